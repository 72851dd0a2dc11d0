"""Times of two full-width layers of Small, one sliding and one full, with all 384 experts, beside other ways.

All arms have the same random weights: NVFP4 experts, as 40 of Small's 48 layers have them, packed for the kernels and
dequantised to bfloat16 for the others (two rows show MXFP8, the other eight's). Embedding included, head excluded.

- triton: a step of `decode_step` as one CUDA graph; its prefill, launched operation by operation.
- eager: the reference with its growing cache.
- eager, grouped_mm experts: PyTorch's grouped product instead of the reference's loop over experts. Nothing waits for
  the device then, so a step (of fixed addresses, its length known to the host) is one CUDA graph.
- compiled graph, grouped_mm experts: that step through `torch.compile`, as one CUDA graph.
- compiled, reduce-overhead: the reference through `torch.compile(mode="reduce-overhead")`, its loop over experts aside.
- transformers: the public model with its cache, to which every call appends, in each of its ways to run experts.

The limit of all arms is that of the packed weights: what a step must read (of the experts those that its tokens choose)
at the rate of a copy, or its FLOPs. An error is the distance of a typical token's hidden state from that of the kernels
launched operation by operation with a growing cache.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ...backends import Backend
from ...cache import Cache, Log, Step
from ...config import FULL, SLIDING, InklingConfig, TextConfig
from ...decode_step import DecodeStep, StepBackend
from ...model import Inkling
from ...moe import ExpertMatrix, experts
from ...quantization import COMPANIONS, MXFP8, NVFP4
from .. import cost
from .harness import BF16, Bench
from .peers import EXPERTS_MODES, attend_cache_at, grouped_experts, transformers_cache, transformers_model

MATRICES = ("w13_weight", "w2_weight")
BYTES = {"bf16": 2.0, MXFP8: 1 + 1 / 32, NVFP4: 1 / 2 + 1 / 16}  # of a value of the experts, scales with them
SPARE = 256  # positions of a step's cache after those that are filled
SMALL = TextConfig(  # a small vocabulary: the head is no part of these times
    num_hidden_layers=2, layer_types=[SLIDING, FULL], vocab_size=1024, unpadded_vocab_size=1024, eos_token_id=None
)


@dataclass(frozen=True)
class Case:
    """`tokens` new ones after `context` cached ones in each of `rows` rows; a prefill has no context."""

    rows: int
    context: int
    tokens: int = 1
    compiled: bool = False  # whether it is worth the compiler's time

    def name(self, what: str) -> str:
        if not self.context:
            return f"{what}, prefill of {self.tokens}"
        return f"{what}, {self.rows} x {self.tokens}, {self.context} keys"


CASES = (  # the most important first
    Case(1, 1024, compiled=True),
    Case(64, 1024, compiled=True),
    Case(1, 0, 8192),
    Case(1, 100352),
    Case(8, 1024),
    Case(1, 100352, 8),
)


# ---------------------------------------------------------------- models of the same weights


def random_matrix(form: str, experts: int, rows: int, columns: int, device: str) -> ExpertMatrix:
    """Random bytes in the released layout, whose values are near 1 / sqrt(columns)."""
    nvfp4 = form == NVFP4
    codes = torch.empty(experts, rows, columns // 2 if nvfp4 else columns, dtype=torch.uint8, device=device)
    for some in codes.split(16):
        some.random_()
        if not nvfp4:
            some[some & 0x7F == 0x7F] = 0  # no NaN
    scale = torch.empty(experts, rows, columns // (16 if nvfp4 else 32), dtype=torch.uint8, device=device)
    if nvfp4:
        amax, denominator = 0.05 + torch.rand(experts, device=device), torch.tensor(2688.0, device=device)
        return ExpertMatrix(codes, scale.random_(74, 104).view(torch.float8_e4m3fn), amax, denominator)
    return ExpertMatrix(codes.view(torch.float8_e4m3fn), scale.random_(112, 118))


def random_layers(text: TextConfig, form: str, dtype: torch.dtype, device: str) -> Inkling:
    """A model with quantised experts in the released layout; everything is random."""
    with torch.device("meta"):
        model = Inkling(InklingConfig(text, vision=None)).eval().requires_grad_(False).cast(dtype)
    for layer in model.llm.layers:
        for name in MATRICES:
            delattr(layer.mlp.experts, name)
    model.to_empty(device=device)
    for name, parameter in model.named_parameters():
        scale = 1.0 if "norm" in name or "clip" in name else 0.5 if "attn_res" in name else parameter.shape[-1] ** -0.5
        parameter.normal_(0, scale)
    E, D, I = text.n_routed_experts, text.hidden_size, text.moe_intermediate_size
    for layer in model.llm.layers:
        layer.mlp.experts.stored_format = form
        for name, rows, columns in zip(MATRICES, (2 * I, D), (D, I), strict=True):
            put(layer.mlp.experts, name, random_matrix(form, E, rows, columns, device))
    return model


def put(module: nn.Module, name: str, matrix: ExpertMatrix) -> None:
    """Quantised experts in the place of dense ones."""
    for suffix, t in zip(("", *COMPANIONS), matrix, strict=True):
        if hasattr(module, name + suffix):
            delattr(module, name + suffix)
        module.register_buffer(name + suffix, t)


def twin(model: Inkling, backend: str | Backend) -> Inkling:
    """The same text stack, tensor by tensor, on another backend."""
    with torch.device("meta"):
        other = Inkling(replace(model.config, vision=None), backend).eval().requires_grad_(False)
    for name, module in other.named_modules():
        source = model.get_submodule(name)
        for leaf, parameter in source.named_parameters(recurse=False):
            setattr(module, leaf, parameter)
    for layer, source in zip(other.llm.layers, model.llm.layers, strict=True):
        layer.mlp.experts.stored_format = source.mlp.experts.stored_format
        if source.mlp.experts.w13_weight_scale is not None:
            for name in MATRICES:
                put(layer.mlp.experts, name, source.mlp.experts.matrix(name))
    return other


def packed(model: Inkling, backend: str) -> Inkling:
    """A twin whose experts are in the order of the backend's kernels, if it has one."""
    other = twin(model, backend)
    if other.backend.pack_experts is not None:
        for layer in other.llm.layers:
            other.backend.pack_experts(layer.mlp.experts)
    return other


def dequantized(model: Inkling) -> Inkling:
    """A twin with dense experts. The temporary memory is one expert's."""
    other, text = twin(model, "torch"), model.config.text
    D, I = text.hidden_size, text.moe_intermediate_size
    for layer in other.llm.layers:
        module = layer.mlp.experts
        for name, shape in zip(MATRICES, ((2 * I, D), (D, I)), strict=True):
            matrix = module.matrix(name)
            dense = torch.empty(text.n_routed_experts, *shape, dtype=model.dtype, device=model.device)
            for expert, place in enumerate(dense):
                place.copy_(matrix.dense(expert, model.dtype))
            for suffix in ("", *COMPANIONS):
                setattr(module, name + suffix, None)
            delattr(module, name)
            module.register_parameter(name, nn.Parameter(dense, requires_grad=False))
    return other


# ---------------------------------------------------------------- a case's state, and its limit


def filled(model: Inkling, case: Case) -> tuple[Cache, Tensor]:
    """A cache that holds `context` random positions, and the ids of the new tokens; the same for the same case."""
    torch.manual_seed(case.rows + case.context)
    ids = torch.randint(model.config.text.unpadded_vocab_size, (case.rows, case.tokens), device=model.device)
    cache = model.new_cache(case.rows)
    if not case.context:
        return cache, ids
    cache.lengths = [case.context] * case.rows
    for slots in cache.slots:
        slots.starts = [case.context - slots.keep] * case.rows
    for layer in cache.layers:
        for state in vars(layer).values():
            if isinstance(state, Log):
                B, G, _, d = state.data.shape
                state.data = state.data.new_empty(B, G, case.context + case.tokens, d)
            state.data.normal_()
    return cache, ids


@contextmanager
def counting(model: Inkling) -> Iterator[list[int]]:
    """A list that gets, while within, how many experts each layer's tokens choose."""
    counts: list[int] = []
    gates = [layer.mlp.gate for layer in model.llm.layers]
    handles = [gate.register_forward_hook(lambda _, __, out: counts.append(len(out[1].unique()))) for gate in gates]
    try:
        yield counts
    finally:
        for handle in handles:
            handle.remove()


def limits(model: Inkling, case: Case, head: bool, chosen: Sequence[int]) -> tuple[float, float]:
    """Bytes to read (weights outside the experts, each layer's `chosen` experts, keys and values), and FLOPs."""
    text, others = model.config.text, ("embed.weight",) if head else ("embed.weight", "unembed.weight")
    config, stop = InklingConfig(text, vision=None), case.context + case.tokens
    dense = sum(t.nbytes for name, t in model.llm.named_parameters() if ".experts." not in name and name not in others)
    expert = 3 * text.hidden_size * text.moe_intermediate_size
    forms = [layer.mlp.experts.stored_format for layer in model.llm.layers]
    packed = expert * sum(BYTES[form] * n for form, n in zip(forms, chosen, strict=True))
    cached = case.rows * cost.cache_bytes(config, stop, convolution_bytes=2).total()
    return dense + packed + cached, float(case.rows * cost.flops(config, stop, case.tokens).total())


# ---------------------------------------------------------------- what is timed


def growing(model: Inkling, cache: Cache, ids: Tensor, head: bool) -> Callable[[], Tensor]:
    """A call of the model as `forward` makes it. It is never committed: every call stands at the same place."""

    def call() -> Tensor:
        cache.begin()
        step = Step.make(cache.lengths, ids.shape[1], ids.device)
        hidden = model.llm(model.llm.embed_tokens(ids), step, cache)
        if head:
            model.llm.logits(hidden).argmax(dim=-1)
        return hidden

    return call


def step_of(
    model: Inkling, cache: Cache, ids: Tensor, head: bool, known: bool = False, compiled: bool = False
) -> Callable[[], Tensor]:
    """A step of fixed addresses, on a GPU as one CUDA graph. The first call is right; convolutions roll on at each.

    known: the reference's, with the length known to the host.
    """
    ops = StepBackend(attend_cache=attend_cache_at(cache.length)) if known else None
    step = DecodeStep(model, ids.shape[0], cache.length + SPARE, ids.shape[1], ops)
    step.take(cache)
    step.ids.copy_(ids)
    step.lengths.fill_(cache.length)
    if compiled:
        step.forward = torch.compile(step.forward, dynamic=False, fullgraph=True)
    if ids.is_cuda:
        step.capture()
    step.has_stepped = True  # by its parts, below

    def call() -> Tensor:
        if step.graph is None:
            step.hidden = step.forward()
        else:
            step.graph.replay()
        if head:
            step.next_tokens()
        return step.hidden

    return call


def prefilled(model: Inkling, cache: Cache, ids: Tensor, head: bool) -> Callable[[], Tensor]:
    """A prompt by the operations of a step; gives the last token alone."""
    step = DecodeStep(model, *ids.shape)

    def call() -> Tensor:
        step.reset()
        return step.prefill(ids)

    return call


def reduced(model: Inkling, cache: Cache, ids: Tensor, head: bool) -> Callable[[], Tensor]:
    """The reference as PyTorch compiles it."""
    for layer in cache.layers:
        for state in vars(layer).values():
            torch._dynamo.mark_static_address(state.data)  # else it is copied at every call, or no graph is made
    return torch.compile(growing(model, cache, ids, head), mode="reduce-overhead", dynamic=False)


def public(theirs: Any, mode: str, cache: Cache, ids: Tensor, head: bool) -> Callable[[], Tensor]:
    """A call of the model of transformers, after what our cache holds."""
    theirs.set_experts_implementation(mode)
    state = transformers_cache(theirs, cache) if cache.length else None

    def call() -> Tensor:
        hidden = theirs.model(input_ids=ids, cache=state, use_cache=True).last_hidden_state
        if head:
            theirs.logit_softcap(theirs.lm_head(hidden).float()).argmax(dim=-1)
        return hidden

    return call


class Race:
    """One model's arms, case by case.

    Args:
        head: whether unembedding and the choice of a token belong to a step.
        fill: makes a case's cache and its new ids, the same for the same case.
    """

    def __init__(
        self,
        bench: Bench,
        what: str,
        ours: Inkling,
        head: bool,
        fill: Callable[[Inkling, Case], tuple[Cache, Tensor]] = filled,
    ) -> None:
        self.bench, self.what, self.model, self.head, self.fill = bench, what, ours, head, fill
        self.expected: dict[Case, Tensor] = {}
        self.limits: dict[Case, tuple[float, float]] = {}

    def arm(
        self, case: Case, name: str, make: Callable[[Cache, Tensor, bool], Callable[[], Tensor]], last: bool = False
    ) -> None:
        """One row; `make` gives what is timed for a cache, the ids after it, and `head`; `last`: of one token a row."""
        title = case.name(self.what)
        if self.bench.wanted(name):
            try:
                call = make(*self.fill(self.model, case), self.head)
                expected = self.expected[case][:, -1] if last else self.expected[case]
                self.bench.arm(title, name, call, [()], expected, *self.limits[case], whole=True)
            except Exception as error:
                self.bench.failed(title, name, error)
        torch.cuda.empty_cache()

    def run_ours(self, cases: Sequence[Case]) -> None:
        """The kernels: operation by operation, for what all arms are held against; then as they are meant to run."""
        for case in cases:
            call = growing(self.model, *self.fill(self.model, case), self.head)
            with counting(self.model) as chosen:
                self.expected[case] = call().clone()
            self.limits[case] = limits(self.model, case, self.head, chosen)
            if case.context:
                self.arm(case, "triton", partial(step_of, self.model))
            else:
                self.arm(case, "triton", partial(prefilled, self.model), last=True)

    def run_peers(self, cases: Sequence[Case], dense: Inkling) -> None:
        """The others, with dense experts; what must be compiled comes last."""
        self.model = dense  # nothing holds the packed one any longer
        grouped = twin(dense, Backend(experts=grouped_experts))
        theirs = self.transformers(cases, dense)
        for case in cases:
            for mode in EXPERTS_MODES if theirs is not None else ():
                self.arm(case, f"transformers, {mode}", partial(public, theirs, mode))
            self.arm(case, "eager", partial(growing, dense))
            if case.context:
                self.arm(case, "eager graph, grouped_mm experts", partial(step_of, grouped, known=True))
            else:
                self.arm(case, "eager, grouped_mm experts", partial(growing, grouped))
        del theirs
        loops = twin(dense, Backend(experts=torch.compiler.disable(experts)))
        for name, make in (
            ("compiled graph, grouped_mm experts", partial(step_of, grouped, known=True, compiled=True)),
            ("compiled, reduce-overhead", partial(reduced, loops)),
        ):
            for case in (case for case in cases if case.compiled):
                self.arm(case, name, make)
                torch.compiler.reset()

    def transformers(self, cases: Sequence[Case], dense: Inkling) -> Any:
        """Their model; None where it is not asked for, or cannot be had: then a row says why."""
        if self.bench.wanted("transformers"):
            try:
                theirs = transformers_model(dense)
                self.bench.note(f"{self.what}: transformers {sys.modules['transformers'].__version__}")
                return theirs
            except Exception as error:
                self.bench.failed(cases[0].name(self.what), "transformers", error)
        return None


def bench_layer(
    bench: Bench,
    text: TextConfig = SMALL,
    cases: Sequence[Case] = CASES,
    backend: str = "triton",
    dtype: torch.dtype = BF16,
    device: str = "cuda",
) -> None:
    """Two layers: the kernels in both formats of the release, then the others."""
    for form in (MXFP8, NVFP4):
        model = random_layers(text, form, dtype, device)
        race = Race(bench, f"2 layers, {form.upper()}", packed(model, backend), head=False)
        race.run_ours(cases if form == NVFP4 else cases[:2])
    if not bench.prepare:
        dense = dequantized(model)
        del model
        race.run_peers(cases, dense)
