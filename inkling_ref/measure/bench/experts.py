"""Times of the expert products on packed weights: one layer of Small, 384 experts of random bytes."""

from collections.abc import Callable

import torch
from torch import Tensor

from ... import moe
from ...moe import ExpertMatrix
from ...quantization import MXFP8, NVFP4
from .harness import BF16, K_EXPERTS, Bench, D, E, I, normal

CAPS = (4.0, 25.0)
FEW = (1, 8, 64, 4, 16, 32, 128, 256)
PREFILL = 8192


def random_packed(form: str, rows: int, columns: int) -> ExpertMatrix:
    """A matrix of random bits, made in the kernels' order: 3.4 GB need no floats and no repack on their way."""
    nvfp4, tiles, steps = form == NVFP4, rows // 64, columns // 256
    inner = (4, 4, 32, 4) if nvfp4 else (4, 2, 4, 32, 2, 2)
    words = torch.empty(E, tiles, steps, *inner, dtype=torch.int32, device="cuda")
    for some in words.split(16):
        some.random_(-(2**31), 2**31)
        if not nvfp4:
            values = some.view(torch.uint8)
            values[values & 0x7F == 0x7F] = 0  # no NaN
    scales = torch.empty(E, tiles, steps, 4, 32, 4 if nvfp4 else 2, 2, dtype=torch.uint8, device="cuda")
    if nvfp4:  # scales and amax of weights near 1 / sqrt(columns)
        amax, denominator = 0.05 + torch.rand(E, device="cuda"), torch.tensor(2688.0, device="cuda")
        return ExpertMatrix(words, scales.random_(90, 120), amax, denominator)
    return ExpertMatrix(words, scales.random_(112, 118))


def routing(tokens: int, experts: int = E) -> tuple[Tensor, Tensor]:
    """Weights and distinct experts of every token, uniform."""
    weights = torch.rand(tokens, K_EXPERTS, device="cuda")
    ids = torch.rand(tokens, experts, device="cuda").topk(K_EXPERTS, -1).indices
    return weights / weights.sum(-1, keepdim=True), ids


def in_float64(h: Tensor, weights: Tensor, ids: Tensor, w13: ExpertMatrix, w2: ExpertMatrix) -> Tensor:
    """The exact result, from the chosen experts' released bytes."""
    from ...kernels.packing import unpack

    def dense(matrix: ExpertMatrix, rows: int, columns: int) -> Tensor:
        if matrix.scale is None:
            return matrix.weight[expert].double()
        one = ExpertMatrix(*(t if t is None or t.ndim == 0 else t[expert : expert + 1] for t in matrix))
        return unpack(one, rows, columns).dense(0, torch.float32).double()

    out = torch.zeros(h.shape, dtype=torch.float64, device=h.device)
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        a = moe.softcapped_swiglu(h[token].double() @ dense(w13, 2 * I, D).T, *CAPS)
        out.index_add_(0, token, weights[token, choice, None].double() * (a @ dense(w2, D, I).T))
    return out


def grouped(
    h: Tensor, weights: Tensor, ids: Tensor, w13: ExpertMatrix, w2: ExpertMatrix, gate_cap: float, up_cap: float
) -> Tensor:
    """The reference on dense matrices, without its loop over experts: PyTorch's grouped product."""
    w13, w2 = w13.weight, w2.weight
    order = ids.flatten().argsort()
    token = order // ids.shape[1]
    ends = torch.histc(ids.flatten().float(), len(w13), 0, len(w13) - 1).cumsum(0).to(torch.int32)
    a = moe.softcapped_swiglu(torch._grouped_mm(h[token], w13.mT, ends), gate_cap, up_cap)
    y = torch._grouped_mm(a, w2.mT, ends).float() * weights.flatten()[order, None]
    return torch.zeros(h.shape, device=h.device).index_add_(0, token, y).to(h.dtype)


def bench_form(bench: Bench, form: str, arm: str, op: Callable, w13: ExpertMatrix, w2: ExpertMatrix) -> None:
    """One way to compute one layer, from one token to prefill."""
    size = sum(t[0].nbytes for t in (*w13[:2], *w2[:2]) if t is not None)
    for tokens in (*FEW, PREFILL):
        sets = [(normal(tokens, D), *routing(tokens), w13, w2, *CAPS) for _ in range(max(1, 40 // tokens))]
        hit = sum(len(ids.unique()) for _, _, ids, *_ in sets) / len(sets)
        exact = in_float64(*sets[0][:5]) if tokens <= 8 and not bench.prepare else None
        bench.arm(
            f"{form} experts, {tokens} tokens", arm, op, sets, exact,
            nbytes=hit * size, flops=tokens * K_EXPERTS * 6 * D * I,
        )  # fmt: skip


def bench_experts(bench: Bench) -> None:
    """NVFP4 and MXFP8, and PyTorch's grouped product of dense bfloat16 matrices."""
    from ...kernels.experts import experts

    for form in (NVFP4, MXFP8):
        bench_form(bench, form, "triton", experts, random_packed(form, 2 * I, D), random_packed(form, D, I))
    w13, w2 = (torch.empty(E, *shape, dtype=BF16, device="cuda").normal_(std=0.015) for shape in ((2 * I, D), (D, I)))
    bench_form(bench, "bf16", "grouped_mm", grouped, ExpertMatrix(w13), ExpertMatrix(w2))
