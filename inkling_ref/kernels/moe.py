r"""Router and soft-capped SwiGLU.

**Router.** The weight is float32, its input exactly bfloat16, and the matrix units multiply bfloat16. A float32 number
has 24 significant bits, a bfloat16 one 8, so three of them carry it whole,

$$ W = W_1 + W_2 + W_3, \qquad W_1 = \mathrm{bf16}(W), \; W_2 = \mathrm{bf16}(W - W_1), \; W_3 = W - W_1 - W_2 $$

and three products with float32 sums are as good as one in float32, at 3/16 of its time. A few rows (decoding) are
bound by the weight's bytes instead: they read W itself, 4 bytes a number and not 6, and multiply in float32.
Choosing is a kernel of its own over [N, E] logits, one warp a token: score and id are packed into one integer, so that
each of the k rounds is a single maximum and ties go to the lower id.

**SwiGLU.** One pass over interleaved gate and up columns; tanh is a polynomial near zero, where the form with
exponentials cancels.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_wait

from . import INTERPRETED, LOG2E, prepared, require

_FEW: int = 16  # rows up to which the router reads the float32 weight


@triton.jit
@no_type_check
def _logits(
    h_ptr, w_ptr, out_ptr, N, E, h_n,
    D: tl.constexpr, SLICE: tl.constexpr, TERMS: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr,
    STEP: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Tile of h W^T over SLICE columns, the weight as a sum of TERMS matrices [TERMS, E, D] in the dtype of h."""
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    columns = tl.arange(0, STEP)
    h_rows = h_ptr + rows[:, None].to(tl.int64) * h_n
    w_rows = w_ptr + experts[:, None] * D
    acc = tl.zeros([ROWS, EXPERTS], tl.float32)
    for d0 in tl.range(tl.program_id(2) * SLICE, min(tl.program_id(2) * SLICE + SLICE, D), STEP, num_stages=STAGES):
        d = d0 + columns
        inside = d[None, :] < D
        h = tl.load(h_rows + d[None, :], mask=(rows[:, None] < N) & inside, other=0.0)
        for i in tl.static_range(TERMS):
            w = tl.load(w_rows + i * E * D + d[None, :], mask=(experts[:, None] < E) & inside, other=0.0)
            acc = tl.dot(h, tl.trans(w), acc, input_precision="ieee")
    mask = (rows[:, None] < N) & (experts[None, :] < E)
    out = (tl.program_id(2) * N + rows[:, None]) * E + experts[None, :]
    tl.store(out_ptr + out, acc, mask=mask)


@triton.jit
@no_type_check
def _logits_few(
    h_ptr, w_ptr, out_ptr, N, E, h_n,
    D: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """All rows against a few experts and a slice of the columns, in float32: one term of the sum in [slices, N, E]."""
    rows, experts = tl.arange(0, ROWS), tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    columns = tl.program_id(1) * STEP * STEPS + tl.arange(0, STEP)
    acc = tl.zeros([ROWS, EXPERTS, STEP], tl.float32)
    for i in tl.static_range(STEPS):
        d = columns + i * STEP
        inside = d[None, :] < D
        w = tl.load(w_ptr + experts[:, None] * D + d[None, :], mask=(experts[:, None] < E) & inside, other=0.0)
        h = tl.load(h_ptr + rows[:, None] * h_n + d[None, :], mask=(rows[:, None] < N) & inside, other=0.0)
        acc += h.to(tl.float32)[:, None, :] * w[None, :, :]
    mask = (rows[:, None] < N) & (experts[None, :] < E)
    out = (tl.program_id(1) * N + rows[:, None]) * E + experts[None, :]
    tl.store(out_ptr + out, tl.sum(acc, 2), mask=mask)


@triton.jit
@no_type_check
def _choose(
    logit_ptr, bias_ptr, weight_ptr, id_ptr, N, E, route_scale,
    SLICES: tl.constexpr, k: tl.constexpr, PADDED_E: tl.constexpr, PADDED_K: tl.constexpr, NORMALIZE: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    experts, places = tl.arange(0, PADDED_E), tl.arange(0, PADDED_K)
    real = experts < E
    bias = tl.load(bias_ptr + experts, mask=real, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    logit = tl.load(logit_ptr + token * E + experts, mask=real, other=0.0)
    for i in tl.static_range(1, SLICES):
        logit += tl.load(logit_ptr + (i * N + token) * E + experts, mask=real, other=0.0)
    weight = tl.sigmoid(logit)
    score = weight + bias
    score = tl.where(score != score, float("inf"), score)  # NaN first, as a sort has it
    # Float bits in an order that integers share: negative numbers have their other bits turned over.
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = (bits.to(tl.int64) << 32) | (PADDED_E - 1 - experts).to(tl.int64)  # of equals, the lower id
    lowest = -0x7FFFFFFFFFFFFFFF
    order = tl.where(real, order, lowest)
    ids = tl.zeros([PADDED_K], tl.int32)
    for i in tl.static_range(k):
        best = tl.max(order, 0)
        order = tl.where(order == best, lowest, order)
        ids = tl.where(places == i, PADDED_E - 1 - (best & 0xFFFFFFFF).to(tl.int32), ids)
    chosen = tl.where(places < k, tl.gather(weight, ids, 0), 0.0)
    if NORMALIZE:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    tl.store(weight_ptr + token * k + places, chosen * route_scale, mask=places < k)
    tl.store(id_ptr + token * k + places, ids.to(tl.int64), mask=places < k)


def bfloat16_terms(weight: Float[Tensor, "E D"]) -> Float[Tensor, "3 E D"]:
    """Three bfloat16 matrices whose exact sum is the float32 `weight` (unless bits fall below 2^-133)."""
    rest, terms = weight.float(), []
    for _ in range(3):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1]
    return torch.stack(terms)


def _one_term(weight: Float[Tensor, "E D"]) -> Float[Tensor, "1 E D"]:
    return weight.float()[None].contiguous()


def route(
    h: Float[Tensor, "N D"],
    weight: Float[Tensor, "E D"],
    bias: Float[Tensor, " E"],
    k: int,
    scale: float,
    normalize: bool = True,
) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """Twin of `moe.route`: float32 weights and int64 ids, best first, ties to the lower id; NaN counts as largest.

    bfloat16 `h` goes through three bfloat16 products, `h` of another dtype through one in float32.

    Raises:
        InputError: see `require`.
    """
    require("route", h, weight, bias)
    (N, D), E = h.shape, weight.shape[0]
    h, bias = h if h.stride(1) == 1 else h.contiguous(), bias.contiguous()
    few = N <= _FEW
    experts, step, steps = (4, 128, 4) if few else (128, 0, 0)
    slices = triton.cdiv(D, step * steps) if few else 1
    logits = torch.empty(slices, N, E, dtype=torch.float32, device=h.device)
    if few:
        _logits_few[(triton.cdiv(E, experts), slices)](
            h, prepared(weight, _one_term), logits, N, E, h.stride(0), D=D, ROWS=triton.next_power_of_2(N),
            EXPERTS=experts, STEP=step, STEPS=steps, num_warps=4,
        )  # fmt: skip
    else:
        terms = prepared(weight, bfloat16_terms if h.dtype == torch.bfloat16 else _one_term)
        if h.dtype != torch.bfloat16:
            h = h.float()
        rows = 128
        _logits[(triton.cdiv(E, experts), triton.cdiv(N, rows))](
            h, terms, logits, N, E, h.stride(0), D=D, SLICE=D, TERMS=len(terms), ROWS=rows, EXPERTS=experts,
            STEP=128 // h.element_size(), STAGES=3, num_warps=8,
        )  # fmt: skip
    weights = torch.empty(N, k, dtype=torch.float32, device=h.device)
    ids = torch.empty(N, k, dtype=torch.int64, device=h.device)
    _choose[(N,)](
        logits, bias, weights, ids, N, E, scale, SLICES=slices, k=k, PADDED_E=triton.next_power_of_2(E),
        PADDED_K=triton.next_power_of_2(k), NORMALIZE=normalize, PDL=not INTERPRETED, num_warps=1,
        launch_pdl=not INTERPRETED,
    )  # fmt: skip
    return weights, ids


@triton.jit
@no_type_check
def _exp2(x, APPROX: tl.constexpr):
    """Without the scaling around the hardware's instruction that keeps results below 2^-126."""
    if APPROX:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
@no_type_check
def _reciprocal(x, APPROX: tl.constexpr):
    if APPROX:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = 1 / x
    return y


@triton.jit
@no_type_check
def _tanh_fraction(x, NEAR: tl.constexpr, LOG2E: tl.constexpr, APPROX: tl.constexpr):
    """2 (1 - e) and 1 + e, e = exp(-|x|): twice tanh |x/2| as a fraction. Near zero, where 1 - e cancels, x (1 + e)."""
    x = tl.abs(x)
    e = _exp2(x * -LOG2E, APPROX)
    near = x * (1 + e)
    if NEAR > 0.1:
        x2 = x * x
        near *= 1 - x2 * (1 / 12 - x2 * (1 / 120 - x2 * (17 / 20160)))
    return tl.where(x < NEAR, near, 2 - 2 * e), 1 + e


@triton.jit
@no_type_check
def swiglu(g, u, gate_rate, up_rate, quarter, NEAR: tl.constexpr, LOG2E: tl.constexpr, APPROX: tl.constexpr):
    """Three quotients over one denominator: a division costs more here than the bytes of its operands."""
    top_g, below_g = _tanh_fraction(g * gate_rate, NEAR, LOG2E, APPROX)
    top_u, below_u = _tanh_fraction(u * up_rate, NEAR, LOG2E, APPROX)
    below = below_g * below_u * (1 + _exp2(g * -LOG2E, APPROX))
    y = quarter * top_g * top_u * _reciprocal(below, APPROX)
    sign = (g.to(tl.int32, bitcast=True) ^ u.to(tl.int32, bitcast=True)) & -0x80000000
    return (y.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _softcapped_swiglu(
    x_ptr, out_ptr, total, gate_rate, up_rate, quarter,
    BLOCK: tl.constexpr, NEAR: tl.constexpr, LOG2E: tl.constexpr, APPROX: tl.constexpr,
):  # fmt: skip
    start = tl.program_id(0).to(tl.int64) * BLOCK
    both, pairs = tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + 2 * start + both, mask=both < 2 * (total - start), other=0.0).to(tl.float32)
    g, u = tl.split(tl.reshape(x, [BLOCK, 2]))
    y = swiglu(g, u, gate_rate, up_rate, quarter, NEAR, LOG2E, APPROX)
    tl.store(out_ptr + start + pairs, y.to(out_ptr.dtype.element_ty), mask=pairs < total - start)


def swiglu_rates(gate_cap: float, up_cap: float) -> tuple[float, float, float]:
    """The numbers that `swiglu` takes for its caps."""
    return 2 / gate_cap, 2 / up_cap, gate_cap * up_cap / 4


def swiglu_options(dtype: torch.dtype) -> dict[str, float]:
    """The constants that `swiglu` takes for results of this dtype."""
    return {"NEAR": 0.25 if dtype == torch.float32 else 0.016, "LOG2E": LOG2E, "APPROX": not INTERPRETED}


def softcapped_swiglu(gate_up: Float[Tensor, "N rows"], gate_cap: float, up_cap: float) -> Float[Tensor, "N I"]:
    """Twin of `moe.softcapped_swiglu`: interleaved (g0, u0, g1, ...) columns; float32 inside, one rounding.

    Raises:
        InputError: see `require`.
    """
    require("softcapped_swiglu", gate_up)
    gate_up = gate_up.contiguous()
    out = torch.empty(len(gate_up), gate_up.shape[1] // 2, dtype=gate_up.dtype, device=gate_up.device)
    warps = 4
    _softcapped_swiglu[(triton.cdiv(out.numel(), 128 * warps),)](
        gate_up, out, out.numel(), *swiglu_rates(gate_cap, up_cap), BLOCK=128 * warps, num_warps=warps,
        **swiglu_options(out.dtype),
    )  # fmt: skip
    return out
