r"""Router and soft-capped SwiGLU.

**Router.** The weight is float32, its input exactly bfloat16, and the matrix units multiply bfloat16. A float32 number
has 24 significant bits, a bfloat16 one 8, so three of them carry it whole,

$$ W = W_1 + W_2 + W_3, \qquad W_1 = \mathrm{bf16}(W), \; W_2 = \mathrm{bf16}(W - W_1), \; W_3 = W - W_1 - W_2 $$

and three products are as good as one in float32, at 3/16 of its time, if their sums are: the matrix unit truncates
where it adds, which over 4608 columns and three terms would cost 2^-16 of a logit, so the sums of 64 columns at a time
are added outside it, rounded. A few rows (decoding) are bound by the weight's bytes instead: they read W itself, 4
bytes a number and not 6, and multiply in float32.

Choosing is a kernel of its own over partial sums of the logits, [slices, N, E], one warp a token. It is launched while
the product runs and waits for its end itself (programmatic dependent launch, PDL in the code), which saves the gap
between two kernels; a decoding step's product starts in the same way within a graph.

**SwiGLU.** One pass over interleaved gate and up columns, with one division for three quotients; see `approximate`.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait
from triton.tools.tensor_descriptor import TensorDescriptor

from ..errors import InputError
from . import FLOATS, adjacent, axes, dependent, expect, prepared
from .approximate import TO_BASE2, exp2, near, reciprocal, swiglu

_FEW: int = 16  # rows up to which the router reads the float32 weight


@triton.jit
@no_type_check
def _logits(
    h_desc, w_desc, out_ptr, N, E, SLICE, TERMS: tl.constexpr, TILE: tl.constexpr, STEP: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """A tile of h W^T over SLICE columns, the weight as a sum of TERMS matrices [TERMS E, D] in the dtype of h."""
    first_row, first_expert = tl.program_id(1) * TILE, tl.program_id(0) * TILE
    start = tl.program_id(2) * SLICE
    acc = tl.zeros([TILE, TILE], tl.float32)
    for d in tl.range(start, start + SLICE, STEP, num_stages=STAGES):
        h = h_desc.load([first_row, d])
        part = tl.zeros([TILE, TILE], tl.float32)
        for i in tl.static_range(TERMS):
            w = w_desc.load([i * E + first_expert, d])
            part = tl.dot(h, w.T, part, input_precision="ieee")
        acc += part  # rounded, where the matrix unit's own long sums are truncated
    rows, experts = first_row + tl.arange(0, TILE), first_expert + tl.arange(0, TILE)
    out = (tl.program_id(2) * N + rows[:, None]) * E + experts[None, :]
    tl.store(out_ptr + out, acc, mask=(rows[:, None] < N) & (experts[None, :] < E))


@triton.jit
@no_type_check
def _logits_few(
    h_ptr, w_ptr, out_ptr, N, E, h_n,
    D: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr, STEPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """All rows against a few experts and a slice of the columns, in float32: one term of the sum in [slices, N, E].

    The weights are on their way before the kernel waits for the rows.
    """
    rows, experts = tl.arange(0, ROWS), tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    columns = (tl.program_id(1) * STEP * STEPS + tl.arange(0, STEP))[None, None, :]
    w_rows, h_rows = w_ptr + experts[None, :, None] * D, h_ptr + rows[:, None, None] * h_n
    w, h = (), ()
    for i in tl.static_range(STEPS):
        mask = (experts[None, :, None] < E) & (columns + i * STEP < D)
        w = w + (tl.load(w_rows + columns + i * STEP, mask=mask, other=0.0),)  # noqa: RUF005
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    for i in tl.static_range(STEPS):
        mask = (rows[:, None, None] < N) & (columns + i * STEP < D)
        h = h + (tl.load(h_rows + columns + i * STEP, mask=mask, other=0.0),)  # noqa: RUF005
    acc = tl.zeros([ROWS, EXPERTS, STEP], tl.float32)
    for i in tl.static_range(STEPS):
        acc += h[i].to(tl.float32) * w[i]
    out = (tl.program_id(1) * N + rows[:, None]) * E + experts[None, :]
    tl.store(out_ptr + out, tl.sum(acc, 2), mask=(rows[:, None] < N) & (experts[None, :] < E))


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
        gdc_launch_dependents()
        gdc_wait()
    logit = tl.load(logit_ptr + token * E + experts, mask=real, other=0.0)
    for i in tl.static_range(1, SLICES):
        logit += tl.load(logit_ptr + (i * N + token) * E + experts, mask=real, other=0.0)
    weight = reciprocal(1 + exp2(logit * -TO_BASE2))
    score = weight + bias
    score = tl.where(score != score, float("inf"), score)  # NaN first, as a sort has it
    # Float bits in an order that integers share: negative numbers have their other bits turned over. Two reductions of
    # 32 bits a round, for the score and for the lowest id that has it, are one instruction each across a warp.
    order = score.to(tl.int32, bitcast=True)
    order = tl.where(order < 0, order ^ 0x7FFFFFFF, order)
    order = tl.where(real, order, -0x80000000)
    ids = tl.zeros([PADDED_K], tl.int32)
    for i in tl.static_range(k):
        best = tl.min(tl.where(order == tl.max(order, 0), experts, PADDED_E), 0)
        order = tl.where(experts == best, -0x80000000, order)
        ids = tl.where(places == i, best, ids)
    chosen = tl.where(places < k, tl.gather(weight, ids, 0), 0.0)
    if NORMALIZE:
        chosen = chosen / (tl.sum(chosen, 0) + 1e-20)
    tl.store(weight_ptr + token * k + places, chosen * route_scale, mask=places < k)
    tl.store(id_ptr + token * k + places, ids.to(tl.int64), mask=places < k)


def _aligned(x: Float[Tensor, "N D"]) -> Float[Tensor, "N columns"]:
    """x as the copy engine reads it: rows a multiple of 16 bytes apart, from such an address."""
    size = 16 // x.element_size()
    if x.stride(0) % size or x.data_ptr() % 16:
        x = F.pad(x, (0, -x.shape[1] % size))
    return x


def bfloat16_terms(weight: Float[Tensor, "E D"]) -> Float[Tensor, "3 E columns"]:
    """Three bfloat16 matrices whose exact sum is the float32 `weight` (unless bits fall below 2^-133); `_aligned`."""
    rest, terms = weight.float(), []
    for _ in range(3):
        terms.append(rest.bfloat16())
        rest = rest - terms[-1]
    return F.pad(torch.stack(terms), (0, -weight.shape[1] % 8))


def _one_term(weight: Float[Tensor, "E D"]) -> Float[Tensor, "1 E columns"]:
    return F.pad(weight.float(), (0, -weight.shape[1] % 8))[None].contiguous()


def _slices(tiles: int) -> int:
    """Programs a tile, so that a large GPU has work for all multiprocessors; few values, each is compiled."""
    return 16 if tiles <= 16 else 4 if tiles <= 66 else 2


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
        InputError: see `expect`; for k below 1, or more than there are experts.
    """
    (N, D), E = axes("route", "h", h, 2, batch=1), len(weight)
    expect("route", FLOATS, h=(h, (N, D)), weight=(weight, (E, D)), bias=(bias, (E,)))
    if not 1 <= k <= E:
        raise InputError(f"triton route: k is {k}, expected 1 to {E}, the experts")
    weights = torch.empty(N, k, dtype=torch.float32, device=h.device)
    ids = torch.empty(N, k, dtype=torch.int64, device=h.device)
    if N == 0:
        return weights, ids
    (h,), bias, pdl = adjacent(h), bias.contiguous(), dependent(h.device)
    if N <= _FEW:
        w, (experts, step, steps) = weight.float().contiguous(), (2, 512, 5) if N == 1 else (4, 128, 9)
        slices = triton.cdiv(D, step * steps)
        logits = torch.empty(slices, N, E, dtype=torch.float32, device=h.device)
        _logits_few[(triton.cdiv(E, experts), slices)](
            h, w, logits, N, E, h.stride(0), D=D, ROWS=triton.next_power_of_2(N), EXPERTS=experts, STEP=step,
            STEPS=steps, PDL=pdl, num_warps=4,
            # Only where no kernel just before this one writes the weight, which is read before the wait: in a graph.
            launch_pdl=w is weight and pdl and torch.cuda.is_current_stream_capturing(),
        )  # fmt: skip
    else:
        terms = prepared(weight, bfloat16_terms if h.dtype == torch.bfloat16 else _one_term).flatten(0, 1)
        h = _aligned(h if h.dtype == torch.bfloat16 else h.float())
        tile, step = (128, 64) if h.dtype == torch.bfloat16 else (64, 32)
        tiles = (triton.cdiv(E, tile), triton.cdiv(N, tile))
        slices = _slices(tiles[0] * tiles[1])
        logits = torch.empty(slices, N, E, dtype=torch.float32, device=h.device)
        _logits[(*tiles, slices)](
            *(TensorDescriptor.from_tensor(t, [tile, step]) for t in (h, terms)), logits, N, E,
            step * triton.cdiv(D, step * slices), TERMS=len(terms) // E, TILE=tile, STEP=step, STAGES=3, num_warps=8,
        )  # fmt: skip
    _choose[(N,)](
        logits, bias, weights, ids, N, E, scale, SLICES=slices, k=k, PADDED_E=triton.next_power_of_2(E),
        PADDED_K=triton.next_power_of_2(k), NORMALIZE=normalize, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return weights, ids


@triton.jit
@no_type_check
def _softcapped_swiglu(x_ptr, out_ptr, total, gate_rate, up_rate, quarter, BLOCK: tl.constexpr, NEAR: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * BLOCK
    both, pairs = tl.arange(0, 2 * BLOCK), tl.arange(0, BLOCK)
    x = tl.load(x_ptr + 2 * start + both, mask=both < 2 * (total - start), other=0.0).to(tl.float32)
    g, u = tl.split(tl.reshape(x, [BLOCK, 2]))
    y = swiglu(g, u, gate_rate, up_rate, quarter, NEAR)
    tl.store(out_ptr + start + pairs, y.to(out_ptr.dtype.element_ty), mask=pairs < total - start)


def softcapped_swiglu(gate_up: Float[Tensor, "N rows"], gate_cap: float, up_cap: float) -> Float[Tensor, "N I"]:
    """Twin of `moe.softcapped_swiglu`: interleaved (g0, u0, g1, ...) columns; float32 inside, one rounding.

    Raises:
        InputError: see `expect`; for an odd number of columns.
    """
    N, rows = axes("softcapped_swiglu", "gate_up", gate_up, 2)
    expect("softcapped_swiglu", FLOATS, gate_up=(gate_up, (N, rows // 2 * 2)))
    gate_up = gate_up.contiguous()
    out = torch.empty(N, rows // 2, dtype=gate_up.dtype, device=gate_up.device)
    block = 1024
    _softcapped_swiglu[(triton.cdiv(out.numel(), block),)](
        gate_up, out, out.numel(), 2 / gate_cap, 2 / up_cap, gate_cap * up_cap / 4, BLOCK=block,
        NEAR=near(out.dtype), num_warps=4,
    )  # fmt: skip
    return out
