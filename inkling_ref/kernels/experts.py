r"""Experts: both products of the chosen experts, on the matrices of a checkpoint or on repacked ones.

The tokens' N k choices are *pairs*, numbered token * k + choice. An *item* is an expert with a few of its pairs: the
unit of work, one program for each item and tile of rows.

1. `plan` makes the list of items on the GPU. All the host knows is how long it can be,

$$ \textstyle\sum_e \lceil n_e / \mathrm{slots} \rceil \le
   \lfloor (N k + (\mathrm{slots} - 1) \min(E, N k)) / \mathrm{slots} \rfloor $$

   so that launches do not depend on routes, and a CUDA graph can hold them. Programs of unused items end at once; an
   expert that nobody chose is in none, and neither is a pair of another rank's expert (`of_rank`).

2. The first product with SwiGLU makes a row [I] of each pair; the second, times the routing weight, a row [D].

3. `combine` sums each token's k rows in order and rounds once: the same bits every time.

Two kernels do step 2. `_released_product` reads a checkpoint's own bytes, or dense matrices, in any dtype on any GPU,
and in the interpreter. On Hopper, in bfloat16, matrices that `packing.pack` has repacked go through `experts_hopper`.
One token needs no plan: each pair is an item. On a rank it needs not even step 3, for the second product adds up its
few pairs; and a few tokens need no plan there, since hardly two of their pairs share an expert. Up to FEW tokens memory
is the limit, beyond them the tensor cores.
"""

from collections.abc import Callable
from functools import cache, partial
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from .. import quantization
from ..errors import InputError
from ..moe import ExpertMatrix
from . import FLOATS, INTEGERS, axes, capability_major, cdiv, expect, next_power_of_2, processors
from .approximate import near, swiglu
from .experts_hopper import pair_product, product, tile_product, token_product
from .packing import ROWS, is_packed, packed_layout

DENSE, NVFP4, MXFP8 = 0, 1, 2  # how a matrix is stored, as the kernels count
FEW = 256  # tokens up to which memory is the limit
FEW_PAIRS = 512  # up to which `_plan` makes the list; with more, about as many programs as a GPU has processors
PROGRAMS = 128
# Up to which a rank needs no plan: pairs of all ranks, and those times the experts here. Of Small's 384 experts these
# are 8 pairs here, on average. (It does not look at how many share an expert: with 16 experts in all, many do.)
APART, SPARSE = 64, 8 * 384
AT_ONCE = 16  # pairs that have programs of their own there
REGISTERS = 65_536  # of a processor
OFFSETS, GRID_ROWS = 2**31, 65_535  # what fits: elements in an offset of the kernels, rows in a grid
Quantize = Callable[[Tensor], Tensor] | None


class Call(NamedTuple):
    """One call of `experts`, checked."""

    x: Float[Tensor, "N D"]
    weights: Float[Tensor, "N k"]
    ids: Int[Tensor, "N k"]
    w13: ExpertMatrix
    w2: ExpertMatrix
    rates: tuple[float, float, float]  # what `swiglu` takes for its caps
    quantize: Quantize
    origin: int  # the first expert that is here


@triton.jit
@no_type_check
def _local(ids, origin, E):
    """Experts counted from `origin`, the first that is here; -1 for those of other ranks."""
    ids = ids.to(tl.int32) - origin
    return tl.where((ids >= 0) & (ids < E), ids, -1)


@triton.jit
@no_type_check
def _plan(
    id_ptr, expert_ptr, slot_ptr, P, ITEMS, origin, E,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, PADDED_E: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Items of one expert, of at most BLOCK pairs of all; the last expert fills what is left of the list."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # they wait for the end of this kernel, but need not be launched then
    expert = tl.program_id(0)
    pairs, experts = tl.arange(0, BLOCK), tl.arange(0, PADDED_E)
    ids = _local(tl.load(id_ptr + pairs, mask=pairs < P, other=-1), origin, E)
    mine = (ids == expert).to(tl.int32)
    count = tl.sum(mine, 0)
    if (count > 0) | (expert == E - 1):
        counts = tl.histogram(tl.where(ids < 0, PADDED_E - 1, ids), PADDED_E)
        item = tl.sum(tl.where(experts < expert, (counts + SLOTS - 1) // SLOTS, 0), 0)
        tl.store(slot_ptr + item * SLOTS + tl.cumsum(mine, 0) - 1, pairs, mask=mine > 0)
        lead, last = tl.min(tl.where(mine > 0, pairs, P), 0), (count + SLOTS - 1) // SLOTS
        rest = count // SLOTS * SLOTS + tl.arange(0, SLOTS)
        empty = (rest >= count) & (rest < last * SLOTS)
        tl.store(slot_ptr + item * SLOTS + rest, ~lead + tl.zeros([SLOTS], tl.int32), mask=empty)
        tl.store(expert_ptr + item + pairs, expert + tl.zeros([BLOCK], tl.int32), mask=pairs < last)
        if expert == E - 1:
            for start in range(item + last, ITEMS, BLOCK):
                tl.store(expert_ptr + start + pairs, tl.full([BLOCK], -1, tl.int32), mask=start + pairs < ITEMS)


@triton.jit
@no_type_check
def _count(
    id_ptr, count_ptr, P, STEPS, origin, E, BLOCK: tl.constexpr, PADDED_E: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    """Pairs of every expert in STEPS blocks; in the last column those that are of none."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program, experts = tl.program_id(0), tl.arange(0, PADDED_E)
    counts = tl.zeros([PADDED_E], tl.int32)
    for step in range(STEPS):
        pairs = (program * STEPS + step) * BLOCK + tl.arange(0, BLOCK)
        ids = _local(tl.load(id_ptr + pairs, mask=pairs < P, other=-1), origin, E)
        counts += tl.histogram(tl.where(ids < 0, PADDED_E - 1, ids), PADDED_E)
    tl.store(count_ptr + program * PADDED_E + experts, counts)


@triton.jit
@no_type_check
def _place(
    id_ptr, count_ptr, expert_ptr, slot_ptr, P, STEPS, ITEMS, origin, E,
    SLOTS: tl.constexpr, BLOCK: tl.constexpr, PADDED_E: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """The pairs of STEPS blocks into their slots, after those that other programs have counted before them.

    An item's first pair writes the item's expert, and an expert's first pair the empty slots of its last item.
    """
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    program, programs = tl.program_id(0), tl.num_programs(0)
    block, experts, rows = tl.arange(0, BLOCK), tl.arange(0, PADDED_E), tl.arange(0, ROWS)
    total, seen = tl.zeros([ROWS, PADDED_E], tl.int32), tl.zeros([ROWS, PADDED_E], tl.int32)
    for row in range(0, programs, ROWS):
        at = (row + rows)[:, None]
        counts = tl.load(count_ptr + at * PADDED_E + experts[None, :], mask=at < programs, other=0)
        total += counts
        seen += tl.where(at < program, counts, 0)
    total, seen = tl.sum(total, 0), tl.sum(seen, 0)
    items = tl.where(experts < E, (total + SLOTS - 1) // SLOTS, 0)
    begin = (tl.cumsum(items, 0) - items) * SLOTS
    free = begin + seen
    for step in range(STEPS):
        start = (program * STEPS + step) * BLOCK
        pairs = start + block
        given = tl.load(id_ptr + pairs, mask=pairs < P, other=-1).to(tl.int32)
        ids = _local(given, origin, E)
        mine, bins = ids >= 0, tl.where(ids < 0, PADDED_E - 1, ids)
        place = tl.gather(free, bins, 0)
        for column in range(0, BLOCK, COLUMNS):
            others = column + tl.arange(0, COLUMNS)
            their = tl.load(id_ptr + start + others, mask=start + others < P, other=-1).to(tl.int32)
            # One comparison: of the same expert and before me is what is less than my number in the block behind me.
            behind = (given * BLOCK + block - 1)[None, :] - (their * BLOCK + others)[:, None]
            place += tl.sum((behind.to(tl.uint32) < block.to(tl.uint32)[None, :]).to(tl.int32), 0)
        tl.store(slot_ptr + place, pairs, mask=mine)
        tl.store(expert_ptr + place // SLOTS, ids, mask=mine & (place % SLOTS == 0))
        leads = mine & (place == tl.gather(begin, bins, 0))
        if tl.max(leads.to(tl.int32), 0) > 0:
            count = tl.gather(total, bins, 0)
            stop = tl.where(leads, (count + SLOTS - 1) // SLOTS * SLOTS, 0)
            for column in range(0, SLOTS, 8):  # 32 bytes, what memory takes at a time
                slot = (count // SLOTS * SLOTS + column)[:, None] + tl.arange(0, 8)[None, :]
                empty = (slot >= count[:, None]) & (slot < stop[:, None])
                tl.store(slot_ptr + place[:, None] + slot, ~pairs[:, None] + slot * 0, mask=empty)
        free += tl.histogram(bins, PADDED_E)
    for start in range(tl.sum(items, 0) + program * BLOCK, ITEMS, programs * BLOCK):
        tl.store(expert_ptr + start + block, tl.full([BLOCK], -1, tl.int32), mask=start + block < ITEMS)


@triton.jit
@no_type_check
def _swap(
    x_ptr, out_ptr, total, K,
    COLUMNS: tl.constexpr, FROM: tl.constexpr, TO: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Chunks (FROM, TO, 2) of rows of K numbers, filled with zeros to COLUMNS, as (TO, FROM, 2)."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    column = i % COLUMNS
    x = tl.load(x_ptr + i // COLUMNS * K + column, mask=(i < total) & (column < K), other=0.0)
    x = tl.permute(tl.reshape(x, [BLOCK // (2 * FROM * TO), FROM, TO, 2]), (0, 2, 1, 3))
    tl.store(out_ptr + i, tl.reshape(x, [BLOCK]), mask=i < total)


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
    bits = ((bits & 0x7F) << 20) | ((bits & 0x80) << 24)  # the value * 2^-120
    return bits.to(tl.float32, bitcast=True) * 2.0**120


@triton.jit
@no_type_check
def _released_product(
    x_ptr, code_ptr, scale_ptr, amax_ptr, denominator_ptr, expert_ptr, slot_ptr, weight_ptr, out_ptr,
    gate_rate, up_rate, quarter,
    K: tl.constexpr, N: tl.constexpr, TOP_K: tl.constexpr, FORMAT: tl.constexpr, FIRST: tl.constexpr,
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
def _combine(part_ptr, id_ptr, out_ptr, D, origin, E, TOP_K: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr):
    columns = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    first_pair, stops = tl.program_id(1) * TOP_K, ()
    for i in tl.static_range(TOP_K):  # no branches: many loads go out together
        here = _local(tl.load(id_ptr + first_pair + i), origin, E) >= 0
        stops = stops + (tl.where(here, D, 0),)  # noqa: RUF005
    if PDL:  # the products have waited for the ids
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros([BLOCK], tl.float32)
    for i in tl.static_range(TOP_K):
        part = tl.load(part_ptr + (first_pair + i) * D + columns, mask=columns < stops[i], other=0.0)
        total += part.to(tl.float32)
    tl.store(out_ptr + tl.program_id(1) * D + columns, total.to(out_ptr.dtype.element_ty), mask=columns < D)


def plan(
    ids: Int[Tensor, "N k"], E: int, slots: int, origin: int = 0, pdl: bool = False
) -> tuple[Int[Tensor, " items"], Int[Tensor, "items {slots}"]]:
    """The list of items, without a look from the host.

    Few pairs take one launch, in which every expert looks at all of them. Many take two: programs count a part of the
    pairs each, and know from all counts where theirs belong.

    Args:
        origin: the expert that is the first of the E.
        pdl: launched before the kernel in front has ended, as what follows may be (Hopper).

    Returns: each item's expert (of E), -1 where an item is not needed; its pairs, ascending over an expert's items. An
    empty slot holds ~pair of the expert's first: a row that is read anyway.
    """
    pairs, device = ids.numel(), ids.device
    items = (pairs + (slots - 1) * min(E, pairs)) // slots
    expert = torch.empty(items, dtype=torch.int32, device=device)
    slot = torch.empty(items, slots, dtype=torch.int32, device=device)
    padded = next_power_of_2(E + 1)
    if pairs <= FEW_PAIRS:
        _plan[(E,)](
            ids, expert, slot, pairs, items, origin, E, SLOTS=slots, BLOCK=next_power_of_2(pairs),
            PADDED_E=padded, PDL=pdl, num_warps=1 if pairs <= 64 else 4, launch_pdl=pdl,
        )  # fmt: skip
        return expert, slot
    block = 128 if pairs <= 128 * PROGRAMS else 256
    steps = cdiv(pairs, block * PROGRAMS)
    programs = cdiv(pairs, block * steps)
    count = torch.empty(programs, padded, dtype=torch.int32, device=device)
    _count[(programs,)](
        ids, count, pairs, steps, origin, E, BLOCK=block, PADDED_E=padded, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    _place[(programs,)](
        ids, count, expert, slot, pairs, steps, items, origin, E, SLOTS=slots, BLOCK=block, PADDED_E=padded, ROWS=16,
        COLUMNS=64, PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return expert, slot


def combine(
    part: Float[Tensor, "pairs D"],
    ids: Int[Tensor, "N k"],
    out: Float[Tensor, "N D"],
    origin: int,
    E: int,
    pdl: bool = False,
) -> Float[Tensor, "N D"]:
    """`out`, filled with the sums of each token's rows: those of the E experts from `origin` on.

    pdl: launched before the kernel in front has ended (Hopper). That one, or one before it, has to have waited for
    `ids`, which are read at once.
    """
    (N, D), block = out.shape, 128 * 16 // part.element_size()  # 16 bytes a thread of each row
    _combine[(cdiv(D, block), N)](
        part, ids, out, D, origin, E, TOP_K=ids.shape[1], BLOCK=block, PDL=pdl, num_warps=4, launch_pdl=pdl
    )
    return out


def _swapped(x: Float[Tensor, "N K"], outer: int, inner: int, columns: int) -> Float[Tensor, "N {columns}"]:
    out, block = x.new_empty(len(x), columns), 4096
    _swap[(cdiv(out.numel(), block),)](
        x, out, out.numel(), x.shape[1], COLUMNS=columns, FROM=outer, TO=inner, BLOCK=block, num_warps=8
    )
    return out


def in_core_order(x: Float[Tensor, "N K"], nvfp4: bool, columns: int) -> Float[Tensor, "N {columns}"]:
    """Rows filled with zeros to `columns`, in the order of a fragment's: chunks of (s, h, t, e), not (t, s, h, e)."""
    return _swapped(x, 4, 8 if nvfp4 else 16, columns)


def in_natural_order(x: Float[Tensor, "N columns"], nvfp4: bool) -> Float[Tensor, "N columns"]:
    """The inverse of `in_core_order`, filling included."""
    return _swapped(x, 8 if nvfp4 else 16, 4, x.shape[1])


def _summed(run: Callable[..., Tensor], call: Call) -> Tensor:
    """Both products by `run`, rows [pairs, ...] of which the second's are in float32, and each token's sum."""
    x, _, ids, w13, w2, _, quantize, origin = call
    a = run(x, w13, 32 * w13.weight.shape[1], x.dtype, True)
    a = a if quantize is None else quantize(a)
    part = run(a, w2, x.shape[1], torch.float32, False)
    return combine(part, ids, torch.empty_like(x), origin, len(w13.weight), pdl=True)


def _packed_few(call: Call) -> Tensor:
    """At the rate of memory."""
    x, weights, ids, w13, _, rates, _, origin = call
    N, k, E, one, nvfp4 = len(x), ids.shape[1], len(w13.weight), len(x) == 1, w13.amax is not None
    expert, slots = (ids, ids) if one else plan(ids, E, 8, origin, pdl=True)

    def run(x: Tensor, matrix: ExpertMatrix, rows: int, dtype: torch.dtype, first: bool) -> Tensor:
        out = torch.empty(N * k, rows, dtype=dtype, device=x.device)
        tiles, steps = matrix.weight.shape[1:3]
        product[(tiles, N * k if one else len(expert))](
            x, matrix.weight, scale_words(matrix), *outer_scale(matrix, weights), expert, slots, weights, out, *rates,
            K=x.shape[1], TILES=tiles, STEPS=steps, WIDTH=rows, TOP_K=k, NVFP4=nvfp4, FIRST=first, ONE=one,
            PADDED=next_power_of_2(steps * 256), NEAR=near(x.dtype), num_warps=4, launch_pdl=True,
        )  # fmt: skip
        return out

    return _summed(run, call)


def _packed_pairs(call: Call) -> Tensor:
    """At the rate of memory, a few tokens on a rank."""
    x, weights, ids, w13, _, rates, _, origin = call
    N, k, E, nvfp4 = len(x), ids.shape[1], len(w13.weight), w13.amax is not None

    def run(x: Tensor, matrix: ExpertMatrix, rows: int, dtype: torch.dtype, first: bool) -> Tensor:
        out = torch.empty(N * k, rows, dtype=dtype, device=x.device)
        tiles, steps = matrix.weight.shape[1:3]
        pair_product[(tiles, min(N * k, AT_ONCE))](
            x, matrix.weight, scale_words(matrix), *outer_scale(matrix, weights), ids, weights, out, *rates, N * k,
            origin, E, K=x.shape[1], TILES=tiles, STEPS=steps, WIDTH=rows, TOP_K=k, NVFP4=nvfp4, FIRST=first,
            PAIRS=APART, PADDED=next_power_of_2(steps * 256), NEAR=near(x.dtype), num_warps=4, launch_pdl=True,
        )  # fmt: skip
        return out

    return _summed(run, call)


def _packed_token(call: Call) -> Tensor:
    """At the rate of memory, one token on a rank."""
    x, weights, ids, w13, w2, rates, quantize, origin = call
    k, E, nvfp4 = ids.shape[1], len(w13.weight), w13.amax is not None

    def run(x: Tensor, matrix: ExpertMatrix, out: Tensor, first: bool) -> Tensor:
        tiles, steps = matrix.weight.shape[1:3]
        resident = 4 if nvfp4 and not first else 3  # a step ahead takes 5 registers of a thread, of MXFP8 9
        token_product[(resident * processors(x.device),)](
            x, matrix.weight, scale_words(matrix), *outer_scale(matrix, weights), ids, weights, out, *rates, origin, E,
            K=x.shape[1], TILES=tiles, STEPS=steps, WIDTH=out.shape[1], TOP_K=k, NVFP4=nvfp4, FIRST=first,
            NEAR=near(x.dtype), PADDED=max(512, next_power_of_2(steps * 256)), AHEAD=min(steps, 9),
            RESIDENT=resident, num_warps=4, maxnreg=REGISTERS // (128 * resident) // 8 * 8, launch_pdl=True,
        )  # fmt: skip
        return out

    a = run(x, w13, torch.empty(k, 32 * w13.weight.shape[1], dtype=x.dtype, device=x.device), True)
    a = a if quantize is None else quantize(a)
    return run(a, w2, torch.empty_like(x), False)


def _packed_many(call: Call) -> Tensor:
    """At the rate of the tensor cores."""
    x, weights, ids, w13, w2, rates, quantize, origin = call
    (N, D), k, E, nvfp4 = x.shape, ids.shape[1], len(w13.weight), w13.amax is not None
    expert, slots = plan(ids, E, 128, origin, pdl=True)

    def run(x: Tensor, matrix: ExpertMatrix, out: Tensor, first: bool) -> Tensor:
        tiles, steps = matrix.weight.shape[1:3]
        tile_product[(cdiv(tiles, 4), len(expert))](
            x, matrix.weight, scale_words(matrix), *outer_scale(matrix, weights), expert, slots, weights, out, *rates,
            TILES=tiles, STEPS=steps, X_STRIDE=x.shape[1], WIDTH=out.shape[1], TOP_K=k, NVFP4=nvfp4, FIRST=first,
            NEAR=near(x.dtype), num_warps=8,
        )  # fmt: skip
        return out

    columns = 256 * w2.weight.shape[2]
    make = torch.empty if columns == 32 * w13.weight.shape[1] else torch.zeros  # what the first product does not reach
    a = make(N * k, columns, dtype=x.dtype, device=x.device)
    a = run(in_core_order(x, nvfp4, 256 * w13.weight.shape[2]), w13, a, True)
    if quantize is not None:
        a = in_core_order(quantize(in_natural_order(a, nvfp4)), nvfp4, columns)
    part = torch.empty(N * k, D, dtype=x.dtype, device=x.device)
    return combine(run(a, w2, part, False), ids, torch.empty_like(x), origin, E)


def scale_words(matrix: ExpertMatrix) -> Tensor:
    """A repacked matrix's scales, four to a word."""
    return matrix.scale.flatten(-2).view(torch.int32)


def outer_scale(matrix: ExpertMatrix, nothing: Tensor) -> tuple[Tensor, Tensor]:
    """amax and denominator; MXFP8 has none, and its kernel does not read what it is given."""
    return (nothing, nothing) if matrix.amax is None else (matrix.amax.contiguous(), matrix.denominator)


def _released(call: Call) -> Tensor:
    """On the bytes of a checkpoint, or dense matrices."""
    x, weights, ids, w13, w2, rates, quantize, origin = call
    (N, D), k, E, slots = x.shape, ids.shape[1], len(w13.weight), 16 if len(x) <= FEW else 64
    expert, slot = plan(ids, E, slots, origin)

    def run(x: Tensor, matrix: ExpertMatrix, columns: int, dtype: torch.dtype, first: bool) -> Tensor:
        out = torch.empty(N * k, columns, dtype=dtype, device=x.device)
        form = _form(matrix)
        codes = scale = matrix.weight.contiguous()
        if form != DENSE:
            codes, scale = codes.view(torch.uint8), matrix.scale.contiguous().view(torch.uint8)
        rows = 64
        _released_product[(cdiv(codes.shape[1], rows), len(expert))](
            x, codes, scale, *outer_scale(matrix, weights), expert, slot, weights, out, *rates, K=x.shape[1],
            N=codes.shape[1], TOP_K=k, FORMAT=form, FIRST=first, SLOTS=slots, ROWS=rows, STEP=64, NEAR=near(x.dtype),
        )  # fmt: skip
        return out

    a = run(x, w13, w13.weight.shape[1] // 2, x.dtype, True)
    a = a if quantize is None else quantize(a)
    return combine(run(a, w2, D, torch.float32, False), ids, torch.empty_like(x), origin, E)


@cache
def _layout(
    name: str, form: int, packed: bool, shape: tuple[int, int, int]
) -> list[tuple[tuple[torch.dtype, ...], tuple[int, ...]]]:
    """Dtypes and shapes of the tensors of an `ExpertMatrix` of [E, N, K]."""
    if 0 in shape:
        raise InputError(f"triton experts: {name} of shape {list(shape)}, expected no empty axis")
    if form == DENSE:
        return [(FLOATS, shape)]
    stored = quantization.NVFP4 if form == NVFP4 else quantization.MXFP8
    layout = (
        packed_layout(stored, shape) if packed else quantization.stored_layout(stored, shape, f"triton experts: {name}")
    )
    return [((dtype,), shape) for dtype, shape in layout.values()]


def _form(matrix: ExpertMatrix) -> int:
    return DENSE if matrix.scale is None else MXFP8 if matrix.amax is None else NVFP4


def _check_matrices(w13: ExpertMatrix, w2: ExpertMatrix, D: int, packed: bool) -> int:
    """I, of two matrices that go together."""
    E, I = len(w13.weight), w13.weight.shape[1] * (ROWS if packed else 1) // 2
    for name, matrix, shape in (("w13", w13, (E, 2 * I, D)), ("w2", w2, (E, D, I))):
        parts = zip(ExpertMatrix._fields, matrix, _layout(name, _form(matrix), packed, shape), strict=False)
        for part, t, (dtypes, expected) in parts:
            expect("experts", dtypes, **{f"{name}.{part}": (t, expected)})
            if packed and not t.is_contiguous():
                raise InputError(f"triton experts: {name}.{part} of stride {t.stride()}, expected no gaps, as repacked")
    return I


def of_rank(origin: int) -> Callable[..., Tensor]:
    """`experts` on a rank whose matrices begin with the expert `origin`: ids of others add nothing and cost nothing."""
    return partial(_experts, origin)


def experts(
    h: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    ids: Int[Tensor, "N k"],
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    gate_cap: float,
    up_cap: float,
    quantize: Quantize = None,
) -> Float[Tensor, "N D"]:
    """Twin of `moe.experts`: both matrices as released or dense, or both repacked (`packing.pack`).

    The rows between the products are rounded to h's dtype once, after SwiGLU. So are, beyond FEW tokens on Hopper, the
    terms of the sums over experts, as in the reference: it halves the memory that they take, and the time to add them.
    That ids are below E is not checked: it would wait for the device. See `of_rank` for others.

    Raises:
        InputError: see `expect`; one repacked matrix of two; repacked ones and not bfloat16 on Hopper.
    """
    return _experts(None, h, weights, ids, w13, w2, gate_cap, up_cap, quantize)


experts.of_rank = of_rank


def _experts(
    origin: int | None,  # None: all experts are here
    h: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    ids: Int[Tensor, "N k"],
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    gate_cap: float,
    up_cap: float,
    quantize: Quantize = None,
) -> Float[Tensor, "N D"]:
    (N, D), (_, k) = axes("experts", "h", h, 2, batch=1), axes("experts", "ids", ids, 2, batch=1)
    expect("experts", FLOATS, h=(h, (N, D)), weights=(weights, (N, k)))
    expect("experts", INTEGERS, ids=(ids, (N, k)))
    packed = is_packed(w13)
    if packed != is_packed(w2):
        raise InputError("triton experts: one matrix is repacked, expected both or none")
    if packed and (h.dtype != torch.bfloat16 or capability_major(h.device) != 9):
        raise InputError(f"triton experts: {h.dtype} on {h.device}, expected bfloat16 on Hopper for repacked matrices")
    I = _check_matrices(w13, w2, D, packed)
    if N == 0:  # a rank to which no token was sent
        return h.new_empty(0, D)
    # Offsets of 64 bits would cost the kernels registers, so a very large call is several. (Rows may be filled to 256.)
    most = min(GRID_ROWS, (OFFSETS - 1) // (k * (max(D, I) + 255)))
    if len(h) > most:
        parts = zip(h.split(most), weights.split(most), ids.split(most), strict=True)
        return torch.cat([_experts(origin, *part, w13, w2, gate_cap, up_cap, quantize) for part in parts])
    x = h.contiguous() if quantize is None else quantize(h.contiguous())
    pairs, on_rank = N * k, origin is not None
    if not packed:
        run = _released
    elif N > FEW:
        run = _packed_many
    elif on_rank and N == 1:
        run = _packed_token
    elif on_rank and pairs <= APART and pairs * len(w13.weight) <= SPARSE:
        run = _packed_pairs
    else:
        run = _packed_few
    rates = (2 / gate_cap, 2 / up_cap, gate_cap * up_cap / 4)
    return run(Call(x, weights.float().contiguous(), ids.contiguous(), w13, w2, rates, quantize, origin or 0))
