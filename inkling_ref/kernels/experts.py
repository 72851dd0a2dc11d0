r"""Experts: the products of the chosen experts, on the matrices that a checkpoint holds or on repacked ones."""

from collections.abc import Callable
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_wait

from ..errors import InputError
from ..moe import ExpertMatrix
from . import INTERPRETED, require
from .experts_hopper import product, swiglu, tile_product
from .packing import is_packed

DENSE, NVFP4, MXFP8 = 0, 1, 2  # how a matrix is stored, as the kernels count


@triton.jit
@no_type_check
def _plan(id_ptr, expert_ptr, slot_ptr, P, ITEMS, E, SLOTS: tl.constexpr, BLOCK: tl.constexpr, PADDED_E: tl.constexpr):
    """Items of one expert: its pairs, SLOTS an item; the last expert fills what is left of the list."""
    expert = tl.program_id(0)
    block, experts = tl.arange(0, BLOCK), tl.arange(0, PADDED_E)
    count, lead = 0, P
    for start in range(0, P, BLOCK):
        pairs = start + block
        mine = tl.load(id_ptr + pairs, mask=pairs < P, other=-1) == expert
        count += tl.sum(mine.to(tl.int32), 0)
        lead = tl.minimum(lead, tl.min(tl.where(mine, pairs, P), 0))
    if (count > 0) | (expert == E - 1):
        counts = tl.zeros([PADDED_E], tl.int32)
        for start in range(0, P, BLOCK):
            ids = tl.load(id_ptr + start + block, mask=start + block < P, other=PADDED_E - 1)
            counts += tl.histogram(ids.to(tl.int32), PADDED_E)
        first = tl.sum(tl.where(experts < expert, (counts + SLOTS - 1) // SLOTS, 0), 0)
        slots, done = slot_ptr + first * SLOTS, 0
        for start in range(0, P, BLOCK):
            pairs = start + block
            mine = (tl.load(id_ptr + pairs, mask=pairs < P, other=-1) == expert).to(tl.int32)
            tl.store(slots + done + tl.cumsum(mine, 0) - 1, pairs, mask=mine > 0)
            done += tl.sum(mine, 0)
        last = (count + SLOTS - 1) // SLOTS
        rest = count // SLOTS * SLOTS + tl.arange(0, SLOTS)
        tl.store(slots + rest, ~lead + tl.zeros([SLOTS], tl.int32), mask=(rest >= count) & (rest < last * SLOTS))
        for start in range(0, last, BLOCK):
            tl.store(
                expert_ptr + first + start + block, expert + tl.zeros([BLOCK], tl.int32), mask=start + block < last
            )
        if expert == E - 1:
            for start in range(first + last, ITEMS, BLOCK):
                tl.store(expert_ptr + start + block, tl.full([BLOCK], -1, tl.int32), mask=start + block < ITEMS)


@triton.jit
@no_type_check
def _decoded(codes, scale, half, FORMAT: tl.constexpr):
    """float32 weights of raw bytes, without the outer scale; half: which nibble (NVFP4)."""
    if FORMAT == 1:
        code = (codes >> (4 * half)).to(tl.int32) & 15
        index = (code & 7).to(tl.float32)
        value = tl.maximum(tl.maximum(index / 2, index - 2), 2 * index - 8)
        return tl.where(code < 8, value, -value) * _e4m3(scale)
    scale = scale.to(tl.int32)
    return _e4m3(codes) * tl.where(scale == 0, 0x00400000, scale << 23).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _e4m3(byte):
    bits = byte.to(tl.int32)
    return (((bits & 0x7F) << 20) | ((bits & 0x80) << 24)).to(tl.float32, bitcast=True) * 1.329227995784916e36  # 2^120


@triton.jit
@no_type_check
def _released_product(
    x_ptr, code_ptr, scale_ptr, amax_ptr, denominator_ptr, expert_ptr, slot_ptr, weight_ptr, out_ptr,
    gate_rate, up_rate, quarter, K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, FIRST: tl.constexpr,
    SLOTS: tl.constexpr, ROWS: tl.constexpr, STEP: tl.constexpr, NEAR: tl.constexpr,
):  # fmt: skip
    """A tile of rows of one expert against its slots, from the released layout: any GPU, any dtype."""
    item, expert = tl.program_id(1), tl.load(expert_ptr + tl.program_id(1))
    if expert >= 0:
        rows, steps = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, STEP)
        pairs = tl.load(slot_ptr + item * SLOTS + tl.arange(0, SLOTS))
        real = pairs >= 0
        pairs = tl.where(real, pairs, ~pairs)
        x_rows = x_ptr + ((pairs // TOP_K if FIRST else pairs) * K)[:, None]
        w_rows = expert.to(tl.int64) * N + rows[:, None]
        acc = tl.zeros([SLOTS, ROWS], tl.float32)
        for start in range(0, K, STEP):
            columns = start + steps[None, :]
            inside = (rows[:, None] < N) & (columns < K)
            if FORMAT == 0:
                w = tl.load(code_ptr + w_rows * K + columns, mask=inside, other=0.0)
            elif FORMAT == 1:
                codes = tl.load(code_ptr + w_rows * (K // 2) + columns // 2, mask=inside, other=0)
                scale = tl.load(scale_ptr + w_rows * (K // 16) + columns // 16, mask=inside, other=0)
                w = _decoded(codes, scale, columns % 2, 1)
            else:
                codes = tl.load(code_ptr + w_rows * K + columns, mask=inside, other=0)
                scale = tl.load(scale_ptr + w_rows * (K // 32) + columns // 32, mask=inside, other=0)
                w = _decoded(codes, scale, 0, 2)
            x = tl.load(x_rows + columns, mask=columns < K, other=0.0)
            if x.dtype == tl.bfloat16:
                acc = tl.dot(x, tl.trans(w.to(tl.bfloat16)), acc)
            else:
                acc = tl.dot(x.to(tl.float32), tl.trans(w.to(tl.float32)), acc, input_precision="ieee")
        if FORMAT == 1:
            acc = acc * (tl.load(amax_ptr + expert) / tl.load(denominator_ptr))
        if FIRST:
            gate, up = tl.split(tl.reshape(acc, [SLOTS, ROWS // 2, 2]))
            y = swiglu(gate, up, gate_rate, up_rate, quarter, NEAR)
            out = tl.program_id(0) * (ROWS // 2) + tl.arange(0, ROWS // 2)
            width = N // 2
        else:
            y = acc * tl.load(weight_ptr + pairs)[:, None]
            out, width = rows, N
        mask = real[:, None] & (out[None, :] < width)
        tl.store(out_ptr + pairs[:, None] * width + out[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit
@no_type_check
def _combine(part_ptr, out_ptr, D, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_wait()
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    row = tl.program_id(1)
    mask = columns < D
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        total += tl.load(part_ptr + (row * TOP_K + i) * D + columns, mask=mask, other=0.0)
    tl.store(out_ptr + row * D + columns, total.to(out_ptr.dtype.element_ty), mask=mask)


def near(dtype: torch.dtype) -> float:
    """Below which argument `swiglu` takes the series of tanh: one term of it is enough for 16 bits."""
    return 0.25 if dtype == torch.float32 else 0.016


def plan(ids: Int[Tensor, "N k"], E: int, slots: int) -> tuple[Int[Tensor, " items"], Int[Tensor, "items {slots}"]]:
    """The work list, made without a look from the host: how many items there are is bounded, so a graph can hold it.

    Returns: each item's expert, -1 where an item is not needed; its pairs (token * k + choice), `slots` at most. An empty
    slot holds ~pair of the item's first, a row that is read anyway.
    """
    pairs = ids.numel()
    items = (pairs + (slots - 1) * min(E, pairs)) // slots
    expert = torch.empty(items, dtype=torch.int32, device=ids.device)
    slot = torch.empty(items, slots, dtype=torch.int32, device=ids.device)
    _plan[(E,)](
        ids.contiguous(), expert, slot, pairs, items, E, SLOTS=slots, BLOCK=min(4096, triton.next_power_of_2(pairs)),
        PADDED_E=triton.next_power_of_2(E + 1), num_warps=4,
    )  # fmt: skip
    return expert, slot


def combine(part: Float[Tensor, "pairs D"], out: Float[Tensor, "N D"], pdl: bool) -> Float[Tensor, "N D"]:
    """The sums of each token's k weighted rows, rounded once."""
    (N, D), block = out.shape, 1024
    _combine[(triton.cdiv(D, block), N)](
        part, out, D, TOP_K=len(part) // N, BLOCK=block, PDL=pdl, num_warps=4, **({"launch_pdl": True} if pdl else {})
    )
    return out


def in_core_order(x: Tensor, nvfp4: bool, columns: int) -> Tensor:
    """Rows filled with zeros to `columns`, in the tensor cores' order within a chunk: (s, h, t, e) of (t, s, h, e)."""
    x = F.pad(x, (0, columns - x.shape[1]))
    return x.view(len(x), -1, 4, 4 if nvfp4 else 8, 2, 2).permute(0, 1, 3, 4, 2, 5).reshape(x.shape)


def in_natural_order(x: Tensor, nvfp4: bool) -> Tensor:
    """The inverse of `in_core_order`, without its filling."""
    return x.view(len(x), -1, 4 if nvfp4 else 8, 2, 4, 2).permute(0, 1, 4, 2, 3, 5).reshape(x.shape)


def _packed_experts(
    h,
    weights,
    ids,
    w13,
    w2,
    rates,
    quantize,
    one=None,
    tiles=None,
    pdl=True,
    V=(0, 0),
    PF=(False, 2, False),
    parts=None,
):
    (N, D), k, E = h.shape, ids.shape[1], len(w13.weight)
    nvfp4, pairs, width = w13.amax is not None, N * k, 32 * w13.weight.shape[1]
    one = N <= 4 if one is None else one
    many = N > 256 if tiles is None else tiles
    new = lambda *shape, dtype: torch.empty(shape, dtype=dtype, device=h.device)
    x = h if quantize is None else quantize(h)
    expert, slots = (ids, ids) if one else plan(ids, E, 128 if many else 8)
    items = pairs if one else len(expert)
    part, out = new(pairs, D, dtype=h.dtype if many and PF[2] else torch.float32), torch.empty_like(h)
    counter = new(N * w2.weight.shape[1] if one else 1, dtype=torch.int32)
    columns = 256 * w2.weight.shape[2] if many else width  # past those that the first product writes: zeros
    a = (
        new(pairs, width, dtype=h.dtype)
        if columns == width
        else torch.zeros(pairs, columns, dtype=h.dtype, device=h.device)
    )
    options = {"NEAR": near(h.dtype)}
    todo = [(x, w13, a, True, V[0], PF), (a, w2, part, False, V[1], PF)]
    if parts is not None:
        todo = [todo[i] for i in parts if i < 2]
    for x, m, y, first, v, pf in todo:
        if quantize is not None and not first:
            natural = in_natural_order(a, nvfp4) if many else a
            x = quantize(natural)
            x = in_core_order(x, nvfp4, columns) if many else x
        tiles_, steps = m.weight.shape[1:3]
        scale = m.scale.flatten(-2).view(torch.int32)
        outer = (m.amax, m.denominator) if nvfp4 else (weights, weights)
        if many:
            x = in_core_order(x, nvfp4, steps * 256) if first and (parts is None or 3 in parts) else x
            tile_product[(triton.cdiv(tiles_, 4), items)](
                x, m.weight, scale, *outer, expert, slots, weights, y, *rates, TILES=tiles_, STEPS=steps,
                X_STRIDE=x.shape[1], OUT_STRIDE=y.shape[1], WIDTH=y.shape[1], TOP_K=k, NVFP4=nvfp4, FIRST=first, LATE=pf[0], DIST=pf[1],
                num_warps=8, **options,
            )  # fmt: skip
        else:
            product[(tiles_, items)](
                x, m.weight, scale, *outer, expert, slots, weights, y, out, counter, len(counter), *rates,
                K=x.shape[1], TILES=tiles_, STEPS=steps, X_STRIDE=x.shape[1], WIDTH=y.shape[1], TOP_K=k, NVFP4=nvfp4,
                FIRST=first, ONE=one, PADDED=triton.next_power_of_2(steps * 256), VARIANT=v, num_warps=4, launch_pdl=pdl, **options,
            )  # fmt: skip
    if parts is not None and 2 not in parts:
        return part
    return out if one and not V[1] & 8 else combine(part, out, pdl and not many)


def _released_experts(h, weights, ids, w13, w2, rates, quantize):
    """Both products on what a checkpoint holds, in any dtype, on any GPU."""
    (N, D), k, E = h.shape, ids.shape[1], len(w13.weight)
    expert, slots = plan(ids, E, 16)

    def run(x, matrix, out, first):
        rows, form = 64, DENSE if matrix.scale is None else MXFP8 if matrix.amax is None else NVFP4
        codes = matrix.weight if form == DENSE else matrix.weight.view(torch.uint8)
        scale = codes if form == DENSE else matrix.scale.view(torch.uint8)
        _released_product[(triton.cdiv(codes.shape[1], rows), len(expert))](
            x, codes, scale, matrix.amax if form == NVFP4 else weights, matrix.denominator if form == NVFP4 else weights,
            expert, slots, weights, out, *rates, K=x.shape[1], N=codes.shape[1], TOP_K=k, FORMAT=form, FIRST=first,
            SLOTS=16, ROWS=rows, STEP=64, NEAR=near(h.dtype),
        )  # fmt: skip
        return out if quantize is None or not first else quantize(out)

    x = h if quantize is None else quantize(h)
    a = torch.empty(N * k, w13.weight.shape[1] // 2, dtype=h.dtype, device=h.device)
    part = torch.empty(N * k, D, dtype=torch.float32, device=h.device)
    run(run(x, w13, a, True), w2, part, False)
    return combine(part, torch.empty_like(h), pdl=False)


def experts(
    h: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    ids: Int[Tensor, "N k"],
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    gate_cap: float,
    up_cap: float,
    quantize: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "N D"]:
    """Twin of `moe.experts`, for matrices as released, or both repacked (`packing.pack`): bfloat16 on Hopper.

    Raises:
        InputError: see `require`; repacked matrices elsewhere, or one of the two alone.
    """
    require("experts", h, weights)
    h, weights, rates = h.contiguous(), weights.float().contiguous(), (2 / gate_cap, 2 / up_cap, gate_cap * up_cap / 4)
    if not is_packed(w13) and not is_packed(w2):
        return _released_experts(h, weights, ids, w13, w2, rates, quantize)
    if not is_packed(w13) or not is_packed(w2):
        raise InputError("triton experts: one matrix is repacked, expected both or none")
    if h.dtype != torch.bfloat16 or INTERPRETED or torch.cuda.get_device_capability(h.device)[0] != 9:
        raise InputError(f"triton experts: {h.dtype} on {h.device}, expected bfloat16 on Hopper for repacked matrices")
    return _packed_experts(h, weights, ids, w13, w2, rates, quantize)
