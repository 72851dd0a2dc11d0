r"""Router and soft-capped SwiGLU.

**Router.** The weight is float32, its input exactly bfloat16, and the matrix units multiply bfloat16. A float32 number
has 24 significant bits, a bfloat16 one 8, so three of them carry it whole,

$$ W = W_1 + W_2 + W_3, \qquad W_1 = \mathrm{bf16}(W), \; W_2 = \mathrm{bf16}(W - W_1), \; W_3 = W - W_1 - W_2 $$

and three products are as good as one in float32, at 3/16 of its time, if their sums are: the matrix unit truncates
where it adds, which over 4608 columns and three terms would cost 2^-16 of a logit, so the sums of 64 columns at a time
are added outside it, rounded. A few rows (decoding) are bound by the weight's bytes instead: they read W itself, 4
bytes a number and not 6. Several rows in bfloat16 split it in registers; others multiply in float32.

Choosing takes partial sums of the logits, [slices, N, E], one warp a token. For many rows it is a kernel of its own,
launched when the programs of the product end, and not after all that they wrote has arrived: for that it waits itself
(programmatic dependent launch, PDL in the code). For a few rows one launch does both: the programs of up to eight rows
count themselves when their sums are written, and the last one, which sees all of them, chooses. It adds the same sums
in the same order, whichever program it is, and sets the count back to 0.

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
from . import FLOATS, adjacent, arrivals, axes, cdiv, dependent, expect, next_power_of_2, prepared
from .approximate import TO_BASE2, comparable, exp2, near, reciprocal, swiglu

_FEW: int = 16  # rows up to which the router reads the float32 weight
_TERMS = {torch.bfloat16: 3}  # into which a few rows of a dtype split it; others: none
# Where Triton knows of no alignment a lane reads one number, and a warp 32 neighbours: see `_experts_and_bias`.
_UNALIGNED = ["logit_ptr", "bias_ptr", "weight_ptr", "id_ptr"]


@triton.jit(do_not_specialize=["N"])
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
def _experts_and_bias(bias_ptr, E: tl.constexpr, ROWS: tl.constexpr):
    """Numbers of all experts, [lines of 32 * ROWS, 32], and their biases; ROWS as there are warps, or a multiple.

    Warps take turns along the first axis: so each has a whole row, and its reductions leave no warp.
    """
    LINES: tl.constexpr = triton.next_power_of_2(triton.cdiv(E, 32))
    experts = (tl.arange(0, LINES * ROWS) // ROWS * 32)[:, None] + tl.arange(0, 32)[None, :]
    return experts, tl.load(bias_ptr + experts, mask=experts < E, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _best(
    logit_ptr, experts, bias, weight_ptr, id_ptr, first_row, N, stop, route_scale,
    E: tl.constexpr, SLICES: tl.constexpr, ROWS: tl.constexpr, k: tl.constexpr, NORMALIZE: tl.constexpr,
):  # fmt: skip
    """The choice of `first_row` to `stop`, of ROWS rows at most."""
    LINES: tl.constexpr = experts.shape[0] // ROWS
    PLACES: tl.constexpr = max(32, triton.next_power_of_2(k))
    row, real = first_row + tl.arange(0, LINES * ROWS) % ROWS, experts < E
    at = (tl.minimum(row, stop - 1) * E)[:, None] + experts
    logit = tl.load(logit_ptr + at, mask=real, other=0.0)
    for i in tl.static_range(1, SLICES):
        logit += tl.load(logit_ptr + i * N * E + at, mask=real, other=0.0)
    weight = reciprocal(1 + exp2(logit * -TO_BASE2))
    score, bits = weight + bias, weight.to(tl.int32, bitcast=True)
    score = tl.where(score != score, float("inf"), score)  # NaN first, as a sort has it
    # Reductions of 32 bits, for the score, for the lowest id that has it and for its weight, are one instruction each
    # across a warp.
    order = comparable(score.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    order = tl.reshape(tl.where(real, order, -0x80000000), [LINES, ROWS, 32])
    bits, experts = tl.reshape(bits, [LINES, ROWS, 32]), tl.reshape(experts, [LINES, ROWS, 32])
    row, places = first_row + tl.arange(0, ROWS)[:, None], tl.arange(0, PLACES)[None, :]
    ids = tl.zeros([ROWS, PLACES], tl.int32)
    chosen = ids
    for i in tl.static_range(k):
        most = tl.max(tl.max(order, 0), 1)[:, None]
        best = tl.where(order == most[None], experts, 0x7FFFFFFF)
        best = tl.min(tl.min(best, 0), 1)[:, None]
        found = tl.where(experts == best[None], bits, 0)
        found = tl.sum(tl.sum(found, 0), 1)[:, None]
        order = tl.where(experts == best[None], -0x80000000, order)
        ids, chosen = tl.where(places == i, best, ids), tl.where(places == i, found, chosen)
    chosen = chosen.to(tl.float32, bitcast=True)
    if NORMALIZE:
        chosen = chosen / (tl.sum(chosen, 1) + 1e-20)[:, None]
    out, mask = row.to(tl.int64) * k + places, (row < stop) & (places < k)
    tl.store(weight_ptr + out, chosen * route_scale, mask=mask)
    tl.store(id_ptr + out, ids.to(tl.int64), mask=mask)


@triton.jit(do_not_specialize=["N"], do_not_specialize_on_alignment=_UNALIGNED)
@no_type_check
def _choose(
    logit_ptr, bias_ptr, weight_ptr, id_ptr, N, route_scale,
    E: tl.constexpr, SLICES: tl.constexpr, k: tl.constexpr, NORMALIZE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    experts, bias = _experts_and_bias(bias_ptr, E, 1)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0)
    _best(logit_ptr, experts, bias, weight_ptr, id_ptr, row, N, row + 1, route_scale, E, SLICES, 1, k, NORMALIZE)


@triton.jit(do_not_specialize_on_alignment=_UNALIGNED)
@no_type_check
def _route_few(
    h_ptr, w_ptr, bias_ptr, logit_ptr, count_ptr, weight_ptr, id_ptr, N, h_n, route_scale,
    D: tl.constexpr, E: tl.constexpr, ROWS: tl.constexpr, EXPERTS: tl.constexpr, STEP: tl.constexpr,
    STEPS: tl.constexpr, TERMS: tl.constexpr, k: tl.constexpr, NORMALIZE: tl.constexpr, WARPS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """ROWS rows against a few experts and a slice of the columns: a term of the sum in [slices, N, E]; then the choice.

    Weights and biases are on their way before the kernel waits for the rows.
    """
    SLICES: tl.constexpr = triton.cdiv(D, STEP * STEPS)
    CHOOSING: tl.constexpr = max(WARPS, ROWS)
    everyone, bias = _experts_and_bias(bias_ptr, E, CHOOSING)
    first_row = tl.program_id(2) * ROWS
    first, rows = tl.program_id(1) * STEP * STEPS, first_row + tl.arange(0, ROWS)
    experts = tl.program_id(0) * EXPERTS + tl.arange(0, EXPERTS)
    if TERMS > 1:  # sums of STEP columns, each from 0: see the module
        starts = first + tl.arange(0, STEPS)[:, None, None] * STEP
        columns, lines = starts + tl.arange(0, STEP)[None, None, :], starts + tl.arange(0, STEP)[None, :, None]
        mask = (experts[None, :, None] < E) & (columns < D)
        rest = tl.load(w_ptr + experts[None, :, None] * D + columns, mask=mask, other=0.0)
        w = ()
        for i in tl.static_range(TERMS):
            w = w + (rest.to(tl.bfloat16),)  # noqa: RUF005
            rest -= w[i].to(tl.float32)
        if PDL:
            gdc_launch_dependents()
            gdc_wait()
        h = tl.load(h_ptr + rows[None, None, :] * h_n + lines, mask=(rows[None, None, :] < N) & (lines < D), other=0.0)
        acc = tl.zeros([STEPS, EXPERTS, ROWS], tl.float32)
        for i in tl.static_range(TERMS):
            acc = tl.dot(w[i].to(h.dtype), h, acc, input_precision="ieee")
        part = tl.trans(tl.sum(acc, 0))
    else:
        columns = (first + tl.arange(0, STEP))[None, None, :]
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
        part = tl.sum(acc, 2)
    out = (tl.program_id(1) * N + rows[:, None]) * E + experts[None, :]
    tl.store(logit_ptr + out, part, mask=(rows[:, None] < N) & (experts[None, :] < E))
    # One thread counts for all of the program: after their stores, and before the last program's loads.
    tl.debug_barrier()
    count_ptr += tl.program_id(2)
    if tl.atomic_add(count_ptr, 1, sem="acq_rel") == tl.num_programs(0) * tl.num_programs(1) - 1:
        tl.store(count_ptr, 0)
        stop = tl.minimum(N, first_row + ROWS)
        _best(
            logit_ptr, everyone, bias, weight_ptr, id_ptr, first_row, N, stop, route_scale, E, SLICES, CHOOSING, k,
            NORMALIZE,
        )  # fmt: skip


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

    Several rows of bfloat16 go through three bfloat16 products; a single row, and other dtypes, through one in float32.

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
    (h,), b, pdl = adjacent(h), bias.contiguous(), dependent(h.device)
    if N <= _FEW:
        w, terms = weight.float().contiguous(), 1 if N == 1 else _TERMS.get(h.dtype, 1)  # one row shares no work
        experts, step, steps, warps = (1, 512, 9, 4) if N == 1 else (4, 128, 9, 4) if terms == 1 else (16, 32, 32, 8)
        rows = 8 if terms > 1 else min(8, next_power_of_2(N))  # 8: the matrix unit's least, and what registers hold
        slices, groups = cdiv(D, step * steps), cdiv(N, rows)
        logits = torch.empty(slices, N, E, dtype=torch.float32, device=h.device)
        _route_few[(cdiv(E, experts), slices, groups)](
            h, w, b, logits, arrivals(h.device, groups), weights, ids, N, h.stride(0), scale, D=D, E=E, ROWS=rows,
            EXPERTS=experts, STEP=step, STEPS=steps, TERMS=terms, k=k, NORMALIZE=normalize, WARPS=warps, PDL=pdl,
            num_warps=warps,
            # Only where no kernel just before this one writes weight or bias, read before the wait: in a graph.
            launch_pdl=w is weight and b is bias and pdl and torch.cuda.is_current_stream_capturing(),
        )  # fmt: skip
        return weights, ids
    matrices = prepared(weight, bfloat16_terms if h.dtype == torch.bfloat16 else _one_term).flatten(0, 1)
    h = _aligned(h if h.dtype == torch.bfloat16 else h.float())
    tile, step = (128, 64) if h.dtype == torch.bfloat16 else (64, 32)
    tiles = (cdiv(E, tile), cdiv(N, tile))
    slices = _slices(tiles[0] * tiles[1])
    logits = torch.empty(slices, N, E, dtype=torch.float32, device=h.device)
    _logits[(*tiles, slices)](
        *(TensorDescriptor.from_tensor(t, [tile, step]) for t in (h, matrices)), logits, N, E,
        step * cdiv(D, step * slices), TERMS=len(matrices) // E, TILE=tile, STEP=step, STAGES=3, num_warps=8,
    )  # fmt: skip
    _choose[(N,)](
        logits, b, weights, ids, N, scale, E=E, SLICES=slices, k=k, NORMALIZE=normalize, PDL=pdl, num_warps=1,
        launch_pdl=pdl,
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
    _softcapped_swiglu[(cdiv(out.numel(), block),)](
        gate_up, out, out.numel(), 2 / gate_cap, 2 / up_cap, gate_cap * up_cap / 4, BLOCK=block,
        NEAR=near(out.dtype), num_warps=4,
    )  # fmt: skip
    return out
