"""Other ways to run the same weights: the public model of `transformers`, and parts that let PyTorch do its best."""

import re
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ...attention import attend
from ...cache import Cache, Log
from ...model import Inkling
from ...moe import ExpertMatrix, softcapped_swiglu
from ...quantization import mxfp8_decode, nvfp4_decode
from ...residual import rounded, wide
from .experts import grouped

EXPERTS_MODES = ("grouped_mm", "batched_mm", "eager")  # of transformers; its further ones need kernels from a hub
NAMES = (  # a pattern in our tensors' names, and what their model says instead; one after the other
    (r"^llm\.unembed\.", "lm_head."),
    (r"^llm\.", "model."),
    (r"\.embed\.", ".embed_tokens."),
    (r"\.embed_norm\.", ".embed_tokens.embed_norm."),
    (r"attn_res\.output_query", "final_input.query"),
    (r"attn_res\.mlp_queries\.(\d+)", r"layers.\1.mlp_input.query"),
    (r"\.experts\.w13_weight", ".experts.gate_up_proj"),
    (r"\.experts\.w2_weight", ".experts.down_proj"),
    (r"\.gate\.bias", ".gate.e_score_correction_bias"),
    (r"\.attn_norm\.", ".input_layernorm."),
    (r"\.([qkv])_input_norm\.", r".\1_input_layernorm."),
    (r"\.mlp_norm\.", ".post_attention_layernorm."),
    (r"\.attn_sconv\.weight", ".post_attention_convolution.conv1d.weight"),
    (r"\.mlp_sconv\.weight", ".post_mlp_convolution.conv1d.weight"),
    (r"\.attn\.", ".self_attn."),
    (r"\.(wq_du|q_l2_clip)\.", r".q_proj.\1."),
    (r"\.(wr_du|rel_l2_clip|rel_logits_proj)\.", r".relative_position_bias.\1."),
    (r"\.w([kv])_dv\.", r".\1_proj.linear."),
    (r"\.(wo_ud|gate_attn)\.", r".o_proj.\1."),
    (r"\.attn_sink_proj\.", ".sink_proj."),
    (r"\.(wq_du|wr_du|wo_ud)\.", ".linear."),
    (r"\.gate_attn\.", ".gate_proj."),
    (r"\.(q|rel)_l2_clip\.", ".norm."),
    (r"\.rel_logits_proj\.", "."),
    (r"\.([kv])_sconv\.weight$", r".\1_proj.sconv.conv1d.weight"),
    (r"\.([kv])_sconv\.static_w$", r".\1_proj.sconv.static_weight"),
    (r"\.([kv])_sconv\.weight_proj$", r".\1_proj.sconv.weight_proj.weight"),
)


def renamed(model: Inkling) -> Iterator[tuple[str, Tensor]]:
    """The text stack's tensors under their names, shared but for the gate and up rows, which they do not interleave."""
    for name, t in model.llm.named_parameters(prefix="llm"):
        if name.endswith("w13_weight"):
            pairs = t.unflatten(1, (-1, 2)).transpose(1, 2)
            t = torch.empty_like(t).view(pairs.shape).copy_(pairs).flatten(1, 2)
        elif name == "llm.unembed.weight":
            t = t[: model.config.text.unpadded_vocab_size]
        query = re.fullmatch(r"llm\.attn_res\.attn_queries\.(\d+)", name)  # number i belongs to layer i + 1
        name = f"llm.layers.{int(query[1]) + 1}.attention_input.query" if query else name
        for pattern, word in NAMES:
            name = re.sub(pattern, word, name)
        yield name, t.detach()


def transformers_model(model: Inkling) -> Any:
    """An Inkling2ForCausalLM with the tensors of a dense model.

    Raises:
        ImportError: without transformers, or where it does not know the model.
    """
    from transformers import Inkling2ForCausalLM, Inkling2TextConfig

    config = Inkling2TextConfig(**replace(model.config, vision=None).to_dict())
    with torch.device("meta"):
        theirs = Inkling2ForCausalLM._from_config(config, attn_implementation="eager")
    theirs.load_state_dict(dict(renamed(model)), assign=True)
    return theirs.eval().requires_grad_(False)


def transformers_cache(theirs: Any, cache: Cache) -> Any:
    """Their cache, holding what ours holds of rows of one length."""
    other = sys.modules["transformers"].DynamicCache(config=theirs.config)
    taps = theirs.config.conv_kernel_size
    for layer, state in zip(other.layers, cache.layers, strict=True):
        if isinstance(state.keys, Log):
            held = slice(cache.length)
        else:  # a short text leaves slots before position 0
            held = slice(max(0, -state.keys.slots.starts[0]), None)
        layer.update(state.keys.data[:, :, held], state.values.data[:, :, held])
        if layer.is_sliding:
            layer.cumulative_length = cache.length
        convolutions = (*state.key_value_conv.data.chunk(2, dim=-1), state.attention_conv.data, state.mlp_conv.data)
        for number, inputs in enumerate(convolutions):
            last = inputs[:, -taps:].transpose(1, 2).float()
            layer.update_conv_state(last, state_idx=number, conv_kernel_size=taps)
    return other


def grouped_experts(
    h: Tensor, weights: Tensor, ids: Tensor, w13: ExpertMatrix, w2: ExpertMatrix, gate_cap: float, up_cap: float,
    quantize: None = None,
) -> Tensor:  # fmt: skip
    """`moe.experts` of dense matrices as PyTorch's grouped product: nothing waits for the device."""
    return grouped(h, weights, ids, w13, w2, gate_cap, up_cap)


def gathered_experts(
    h: Tensor, weights: Tensor, ids: Tensor, w13: ExpertMatrix, w2: ExpertMatrix, gate_cap: float, up_cap: float,
    quantize: None = None,
) -> Tensor:  # fmt: skip
    """`moe.experts` for `torch.compile`, on the released bytes: one fixed shape, and nothing waits for the device.

    Every pair of a token and an expert is a row, and gathers its expert's bytes: dequantised and multiplied as one
    elementwise product and a sum, they need never be in memory as numbers. (Not compiled, they are.)
    """
    return _gathered(0, h, weights, ids, w13, w2, gate_cap, up_cap)


# On a rank, pairs of others are rows too: of its first expert, with weight 0. A row fewer would be another shape.
gathered_experts.of_rank = lambda first: partial(_gathered, first)


def _gathered(
    first: int, h: Tensor, weights: Tensor, ids: Tensor, w13: ExpertMatrix, w2: ExpertMatrix, gate_cap: float,
    up_cap: float, quantize: None = None,
) -> Tensor:  # fmt: skip
    (N, k), expert = ids.shape, ids.flatten() - first
    is_here = (expert >= 0) & (expert < len(w13.weight))
    expert = torch.where(is_here, expert, 0)

    def product(x: Tensor, matrix: ExpertMatrix) -> Tensor:
        codes, scale, amax, denominator = matrix
        if scale is None:
            w = codes[expert]
        else:  # bytes: of 8-bit floats PyTorch gathers few
            codes, scale = (t.view(torch.uint8)[expert].view(t.dtype) for t in (codes, scale))
            decoded = mxfp8_decode if amax is None else nvfp4_decode
            w = decoded(codes, scale, *(() if amax is None else (amax[expert], denominator)), x.dtype)
        return rounded((wide(w) * wide(x)[:, None]).sum(dim=-1), x.dtype)

    rows = h[:, None].expand(-1, k, -1).flatten(0, 1)
    y = wide(product(softcapped_swiglu(product(rows, w13), gate_cap, up_cap), w2))
    weights = torch.where(is_here.view(N, k), weights, 0)
    return rounded((y.view(N, k, -1) * weights[..., None]).sum(dim=1), h.dtype)


def attend_cache_at(length: int) -> Callable:
    """`fused.attend_cache` for rows that all hold `length` positions, known while launching: no other key is read."""

    def attend_cache(
        q: Tensor, keys: Tensor, values: Tensor, r: Tensor, profiles: Tensor, sink: Tensor, gate: Tensor,
        lengths: Tensor, window: int | None = None, table: Tensor | None = None,
    ) -> Tensor:  # fmt: skip
        first = 0 if window is None else max(0, length - window + 1)
        stop, slots = length + q.shape[1], keys.shape[2]
        if table is None:
            keys, values = keys[:, :, first:stop], values[:, :, first:stop]
        else:
            positions = torch.arange(first, stop, device=q.device)
            pages = table[:, positions // slots]
            keys, values = (u[pages, :, positions % slots].transpose(1, 2) for u in (keys, values))
        return attend(q, keys, values, r, profiles, sink, gate, [length - first] * len(q), window)

    return attend_cache
