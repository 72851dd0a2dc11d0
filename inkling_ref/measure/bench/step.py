"""Times of whole decoding steps: two full-width layers of Small, one sliding and one full, with all 384 experts."""

import torch

from ...backends import Backend
from ...config import FULL, SLIDING, InklingConfig, TextConfig
from ...decode_step import DecodeStep
from ...model import Inkling
from ...quantization import COMPANIONS, NVFP4
from .. import cost
from .experts import random_packed
from .harness import BF16, Bench, D, I

CASES = [(1, 1024, 1), (1, 100352, 1), (1, 100352, 8), (8, 1024, 1), (64, 1024, 1)]  # rows, context, tokens a row
SMALL_VOCABULARY = 1024  # of the embedding: the head is not part of these times


def two_layers(backend: str | Backend) -> Inkling:
    """The model without values: expert matrices wait to be given, everything else is random."""
    text = TextConfig(
        num_hidden_layers=2, layer_types=[SLIDING, FULL], vocab_size=SMALL_VOCABULARY,
        unpadded_vocab_size=SMALL_VOCABULARY, eos_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = Inkling(InklingConfig(text, vision=None), backend).eval().requires_grad_(False).cast(BF16)
    for layer in model.llm.layers:
        for name in ("w13_weight", "w2_weight"):
            delattr(layer.mlp.experts, name)
    model.to_empty(device="cuda")
    for name, parameter in model.named_parameters():
        scale = 1.0 if "norm" in name or "clip" in name else 0.5 if "attn_res" in name else parameter.shape[-1] ** -0.5
        parameter.normal_(0, scale)
    return model


def give_packed(model: Inkling) -> None:
    """Random NVFP4 experts, in the kernels' order."""
    for layer in model.llm.layers:
        experts = layer.mlp.experts
        for name, rows, columns in (("w13_weight", 2 * I, D), ("w2_weight", D, I)):
            for suffix, t in zip(("", *COMPANIONS), random_packed(NVFP4, rows, columns), strict=True):
                setattr(experts, name + suffix, t)


def filled(model: Inkling, rows: int, context: int, tokens: int) -> DecodeStep:
    """A step whose cache holds `context` random positions of every row."""
    step = DecodeStep(model, rows, context + 256, tokens)
    for state in step.layers:
        for name, t in vars(state).items():
            if name not in ("table", "weight") and isinstance(t, torch.Tensor):
                t.normal_()
    step.ends = [context] * rows
    step.ids.random_(SMALL_VOCABULARY)
    step.lengths.fill_(context)
    return step


def step_bytes(model: Inkling, rows: int, context: int, tokens: int) -> float:
    """What a step must read: weights outside the experts, the experts that uniform routing hits, keys and values."""
    config = model.config
    dense = sum(p.nbytes for name, p in model.named_parameters() if "embed" not in name)
    parts = [t for layer in model.llm.layers for t in layer.mlp.experts.buffers() if t.ndim > 1]
    parts += [getattr(layer.mlp.experts, name) for layer in model.llm.layers for name in ("w13_weight", "w2_weight")]
    missed = (1 - config.text.num_experts_per_tok / config.text.n_routed_experts) ** (rows * tokens)
    experts = sum(t.nbytes for t in {t.data_ptr(): t for t in parts}.values()) * (1 - missed)
    return dense + experts + rows * cost.cache_bytes(config, context + tokens, convolution_bytes=2).total()


def bench_step(bench: Bench) -> None:
    """Ours as one CUDA graph, packed experts; its limit is the bytes that the cost model counts."""
    model = two_layers("triton")
    give_packed(model)
    for rows, context, tokens in CASES:
        step = filled(model, rows, context, tokens)
        nbytes = step_bytes(model, rows, context, tokens)
        bench.arm(f"step, 2 layers, {rows} x {tokens}, {context} keys", "triton", step.forward, [()], None, nbytes)
        del step
        torch.cuda.empty_cache()
