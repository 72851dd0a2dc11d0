r"""Prefill attention for Hopper, in Gluon: the twin of `attention.attend` for many queries in bfloat16.

Three roles run at one time in a program. One warp copies keys and values to shared memory. Two groups of four warps
own 64 rows each: q k^T, bias, running softmax, p v. While one group is busy with exponentials, the matrix unit works
for the other. A program stays for many tiles; the longest tiles are dealt first.

A tile is 64 consecutive queries of two heads that share a key/value head. Keys are walked from the first visible one
on in steps of 128, with a last step of 64 where no more are left; full layers walk the keys at distances of X and more
in a loop of their own, without bias. Masks are applied in the steps that an edge crosses.

**Relative bias: one product of depth R, then a shift by whole registers.** A warp has 16 rows: two heads of the
queries t_0 + 8 i, i = 0..7. One product on the matrix unit gives their bias at all distances that occur in a step of
N keys from n_0 on,

$$ B_{i,u} = \sum_c r_i[c] \, P[c, \, t_0 - n_0 + 56 - u], \qquad 0 \le u < N + 56 $$

and row i needs it at key n_0 + m in column

$$ b_{i,m} = B_{i, \, m + 56 - 8 i} $$

The unit leaves eight neighbouring columns of a row in the same register of four lanes, so that a shift by 8 (7 - i)
columns chooses among registers: two selects, and no number leaves its lane. This is why the queries of a warp lie 8
apart. B waits in float16 for its scores. P is read from a copy in which distance falls from row to row, with rows of
zeros on both sides: no bias needs a mask.

Sink and gate are an epilogue, as in `kernels.decode`. What `suits` refuses, `kernels.attention` does.
"""

import math
from functools import cache
from typing import no_type_check

import torch
from jaxtyping import Float
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from . import LOG2E, adjacent, cdiv, prepared, processors
from .approximate import reciprocal

_STAGES: gl.constexpr = gl.constexpr(2)  # steps of keys and values in shared memory
_PAD = 320  # rows of zeros on both sides of the profiles: two steps and a tile reach that far beyond them
_BEFORE: gl.constexpr = gl.constexpr(_PAD)
_LOG2E: gl.constexpr = gl.constexpr(LOG2E)
# Rows of q, p v and outputs by registers of the matrix unit, and as memory is read and written best.
_ROWS: gl.constexpr = gl.constexpr(gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16]))
_LINES: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 8], [2, 16], [4, 1], [1, 0]))
_WORDS: gl.constexpr = gl.constexpr(gl.BlockedLayout([1, 32], [32, 1], [4, 1], [1, 0]))  # a thread's, for `_bias`
_barrier = gl.barrier if hasattr(gl, "barrier") else gl.thread_barrier  # the second is Triton 3.6, as below
_copy = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared


def _bias_ptx() -> tuple[str, str]:
    """PTX of a thread's share of b for 128 keys, as 32 pairs of float16, and the constraints of its operands.

    mma.sync leaves row g of lane 4 g + c in d0, d1 and row g + 8 in d2, d3. Rows g are queries i = g % 4 and need the
    products from 4 + 3 - i on; rows g + 8 are queries 4 + i and need those from 3 - i on.

    Operands, 32 of each, the inputs the same in all: b, the four words of r, 3 - i, the address in the profiles.
    """
    r0, r1, r2, r3, shift, profiles = (f"${32 * (i + 1)}" for i in range(6))
    lines = [
        ".reg .b32 low<23>, high<23>, p0, p1, bit; .reg .f32 d<4>, zero; .reg .pred by1, by2;",
        "mov.f32 zero, 0f00000000;",
        f"and.b32 bit, {shift}, 1; setp.ne.b32 by1, bit, 0;",
        f"and.b32 bit, {shift}, 2; setp.ne.b32 by2, bit, 0;",
    ]
    for i in range(23):  # 128 + 56 distances, 8 a product
        lines += [
            f"ld.global.nc.v2.b32 {{p0, p1}}, [{profiles} + {256 * i}];",
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {d0, d1, d2, d3}, "
            f"{{{r0}, {r1}, {r2}, {r3}}}, {{p0, p1}}, {{zero, zero, zero, zero}};",
            f"cvt.rn.f16x2.f32 low{i}, d1, d0; cvt.rn.f16x2.f32 high{i}, d3, d2;",
        ]
    for half, first in (("low", 4), ("high", 0)):
        for i in range(first, first + 17):
            lines.append(f"selp.b32 {half}{i}, {half}{i + 2}, {half}{i}, by2;")
        for i in range(16):
            lines.append(f"selp.b32 ${2 * i + (half == 'high')}, {half}{first + i + 1}, {half}{first + i}, by1;")
    return "{\n" + "\n".join(lines) + "\n}", ",".join(["=&r"] * 32 + ["r"] * 160 + ["l"] * 32)


_BIAS, _BIAS_KINDS = (gl.constexpr(text) for text in _bias_ptx())


@gluon.jit
@no_type_check
def _number(wave):
    """The program's tile of a wave. Every other wave is dealt backwards, so that no program always gets the longest."""
    programs, here = gl.num_programs(0), gl.program_id(0)
    return wave * programs + gl.where(wave % 2 == 0, here, programs - 1 - here)


@gluon.jit
@no_type_check
def _waves(total):
    whole = total // gl.num_programs(0)
    return whole + gl.where(_number(whole) < total, 1, 0)


@gluon.jit
@no_type_check
def _place(wave, sizes):
    """Batch row, first query and first head of the program's tile in a wave; longest tiles first."""
    T, total, pairs, _Q, _X, _W = sizes
    blocks = (T + 63) // 64
    index = gl.minimum(_number(wave), total - 1)
    b, index = index // (blocks * pairs), index % (blocks * pairs)
    return b, (blocks - 1 - index // pairs) * 64, index % pairs * 2


@gluon.jit
@no_type_check
def _keys(start_t, slots, sizes, SLIDING: gl.constexpr):
    """First key of a tile, its steps of 128 without bias, all of 128, and all with a last one of 64."""
    offset, first, S = slots
    T, _total, _pairs, _Q, X, W = sizes
    o = offset + start_t
    stop = gl.minimum(gl.minimum(o + 64, offset + T), S)
    low = first
    if SLIDING:
        low = gl.maximum(low, o - W + 1)
    low = gl.minimum(gl.maximum(low, 0), stop)
    far = gl.maximum(gl.minimum(o - X + 1, stop) - low, 0) // 128
    return low, far, (stop - low + 63) // 128, (stop - low + 127) // 128


@gluon.jit
@no_type_check
def _load(
    k_desc, v_desc, gate_ptr, k_tiles, v_tiles, bars, slots, sizes, gate_b, gate_t,
    SLIDING: gl.constexpr,
):  # fmt: skip
    """The role of one warp: keys and values to shared memory, step by step; the tile's gates to the L2 cache."""
    k_full, k_empty, v_full, v_empty = bars
    T, total, _pairs, Q, _X, _W = sizes
    row = gl.arange(0, 128, gl.BlockedLayout([1], [32], [1], [0]))
    count = 0
    for wave in range(_waves(total)):
        b, start_t, head = _place(wave, sizes)
        low, _far, _whole, steps = _keys(start_t, slots, sizes, SLIDING)
        for i in range(steps):
            stage, free = count % _STAGES, (count // _STAGES & 1) ^ 1
            mbarrier.wait(k_empty.index(stage), free)
            mbarrier.expect(k_full.index(stage), 128 * 256)
            _copy(k_desc, [b, head // Q, low + i * 128, 0], k_full.index(stage), k_tiles.index(stage))
            mbarrier.wait(v_empty.index(stage), free)
            mbarrier.expect(v_full.index(stage), 128 * 256)
            _copy(v_desc, [b, head // Q, low + i * 128, 0], v_full.index(stage), v_tiles.index(stage))
            count += 1
            if i == 0:
                token = gl.minimum(start_t + row // 2, T - 1).to(gl.int64)
                gate = gate_ptr + b.to(gl.int64) * gate_b + token * gate_t + (head + row % 2) * 128
                gl.inline_asm_elementwise(
                    "cp.async.bulk.prefetch.L2.global [$1], 256; mov.b32 $0, 0;", "=r,l", [gate], gl.int32, False, 1
                )


@gluon.jit
@no_type_check
def _rows(u, layout: gl.constexpr):
    """One number a row (or a thread) as `layout` has them; nothing moves."""
    return gl.convert_layout(u, gl.SliceLayout(1, layout), assert_trivial=True)


@gluon.jit
@no_type_check
def _bias(relative, n0):
    """b of a warp group's rows at 128 keys from slot n0 on: 32 pairs of float16 a thread, see `_unpacked`."""
    profiles_ptr, column, shift, r0, r1, r2, r3 = relative
    r0, r1 = _rows(r0, _WORDS)[:, None], _rows(r1, _WORDS)[:, None]
    r2, r3 = _rows(r2, _WORDS)[:, None], _rows(r3, _WORDS)[:, None]
    shift = _rows(shift, _WORDS)[:, None] + gl.full([128, 32], 0, gl.int32, _WORDS)
    profiles = _rows(profiles_ptr + (column + n0 * 8), _WORDS)[:, None]
    return gl.inline_asm_elementwise(_BIAS, _BIAS_KINDS, [r0, r1, r2, r3, shift, profiles], gl.int32, False, 32)


@gluon.jit
@no_type_check
def _unpacked(bias, N: gl.constexpr, SCORES: gl.constexpr):
    """The first N keys of `_bias` as float32 [64, N], laid out as the scores are; nothing moves."""
    if N == 64:
        bias, _rest = gl.split(bias.reshape([128, 2, 16]).permute([0, 2, 1]))
    even = (bias & 0xFFFF).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    odd = (bias >> 16).to(gl.int16).to(gl.float16, bitcast=True).to(gl.float32)
    pairs = gl.join(even, odd).reshape([4, 8, 4, N // 8, 2, 2]).permute([0, 4, 1, 3, 2, 5])
    return gl.convert_layout(pairs.reshape([64, N]), SCORES, assert_trivial=True)


@gluon.jit
@no_type_check
def _step(state, n0, count, fixed, N: gl.constexpr, NEAR: gl.constexpr, SLIDING: gl.constexpr):
    """The running softmax of a warp group over N keys from slot n0 on; NEAR: with bias and masks.

    The bias of the next step is made while the exponentials of this one keep other units busy.
    """
    SCORES: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, N, 16])
    q_tile, k_tiles, v_tiles, bars, relative, slot, o, W, scale = fixed
    k_full, k_empty, v_full, v_empty = bars
    top, total, acc, bias = state
    stage, phase = count % _STAGES, count // _STAGES & 1
    mbarrier.wait(k_full.index(stage), phase)
    k = k_tiles.index(stage).reshape([128, 128]).slice(0, N).permute((1, 0))
    s = warpgroup_mma(q_tile, k, gl.full([64, N], 0.0, gl.float32, SCORES), use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    s = s * scale
    if NEAR:
        s = s + _unpacked(bias, N, SCORES)
        keys = gl.arange(0, N, gl.SliceLayout(0, SCORES))[None, :]
        last = _rows(slot - n0, SCORES)[:, None]
        if n0 + N > o + 1:
            s = gl.where(keys <= last, s, float("-inf"))
        if SLIDING:  # noqa: SIM102 (a constant of the compiler's and a number of the device's)
            if n0 + W < o + 64:
                s = gl.where(keys > last - W, s, float("-inf"))
    new_top = gl.maximum(top, _rows(gl.max(s, 1), _ROWS))
    p = gl.exp2(s * _LOG2E - _rows(new_top * _LOG2E, SCORES)[:, None])
    shrink = gl.exp2((top - new_top) * _LOG2E)
    if NEAR and N == 128:
        bias = _bias(relative, n0 + 128)
    total = total * shrink + _rows(gl.sum(p, 1), _ROWS)
    acc = acc * shrink[:, None]
    p = gl.convert_layout(p.to(gl.bfloat16), gl.DotOperandLayout(0, _ROWS, 2))
    # ptxas moves nothing across the branch of this wait: the bias stays among the exponentials.
    mbarrier.wait(v_full.index(stage), phase)
    v = v_tiles.index(stage).reshape([128, 128]).slice(0, N)
    acc = warpgroup_mma_wait(0, deps=[warpgroup_mma(p, v, acc, is_async=True)])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return new_top, total, acc, bias


@gluon.jit
@no_type_check
def _query(row, GROUP: gl.constexpr):
    """Query of the tile in a row of a warp group; its head is bit 2 of the row."""
    return row % 4 * 8 + row // 8 % 2 * 32 + row // 16 + 4 * GROUP


@gluon.jit
@no_type_check
def _lines(start_t, GROUP: gl.constexpr):
    """Rows and channels as memory is read and written best: query, head of the pair and channel."""
    row, channel = gl.arange(0, 64, gl.SliceLayout(1, _LINES)), gl.arange(0, 128, gl.SliceLayout(0, _LINES))
    return start_t + _query(row, GROUP), row // 4 % 2, channel


@gluon.jit
@no_type_check
def _queries(q_ptr, q_b, q_t, q_h, wave, waves, sizes, GROUP: gl.constexpr):
    """Rows of q of the group's tile in a wave; zeros after the last wave."""
    b, start_t, head = _place(wave, sizes)
    t, h, channel = _lines(start_t, GROUP)
    rows = q_ptr + b.to(gl.int64) * q_b + t.to(gl.int64) * q_t + (head + h) * q_h
    real = (t < sizes[0]) & (wave < waves)
    # Past the L1 cache, which is to keep the profiles.
    return gl.load(rows[:, None] + channel[None, :], mask=real[:, None], other=0.0, cache_modifier=".cg")


@gluon.jit
@no_type_check
def _relative(r_ptr, r_b, r_t, r_h, wave, waves, sizes, GROUP: gl.constexpr):
    """The left operand of `_bias`: lane 4 g + c has columns 4 c .. 4 c + 3 of rows g and g + 8, two a word."""
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    lane_g = thread // 4 % 8
    b, start_t, head = _place(wave, sizes)
    t = start_t + _query(thread // 32 * 16 + lane_g, GROUP)
    row = r_ptr + b.to(gl.int64) * r_b + t.to(gl.int64) * r_t + (head + lane_g // 4) * r_h + thread % 4 * 2
    r0, r2 = gl.load(row, mask=t < sizes[0], other=0), gl.load(row + 1, mask=t < sizes[0], other=0)
    row += 32 * r_t
    r1, r3 = gl.load(row, mask=t + 32 < sizes[0], other=0), gl.load(row + 1, mask=t + 32 < sizes[0], other=0)
    return r0, r1, r2, r3


@gluon.jit
@no_type_check
def _group(
    given, strides, q_tiles, k_tiles, v_tiles, bars, slots, sizes, scale,
    SLIDING: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """The role of a warp group: its 64 rows of one tile after the other."""
    q_ptr, r_ptr, profiles_ptr, sink_ptr, gate_ptr, out_ptr = given
    q_b, q_t, q_h, r_b, r_t, r_h, z_b, z_t, gate_b, gate_t = strides
    T, all_tiles, pairs, _Q, X, W = sizes
    q_tile = q_tiles.index(GROUP)
    thread = gl.arange(0, 128, gl.BlockedLayout([1], [32], [4], [0]))
    warp, lane_g, lane_c = thread // 32, thread // 4 % 8, thread % 4
    row = gl.arange(0, 64, gl.SliceLayout(1, _ROWS))
    count = 0
    waves = _waves(all_tiles)
    q = _queries(q_ptr, q_b, q_t, q_h, 0, waves, sizes, GROUP)
    r0, r1, r2, r3 = _relative(r_ptr, r_b, r_t, r_h, 0, waves, sizes, GROUP)
    for wave in range(waves):
        q_tile.store(q)
        fence_async_shared()
        _barrier()
        b, start_t, head = _place(wave, sizes)
        low, far, whole, steps = _keys(start_t, slots, sizes, SLIDING)
        o = slots[0] + start_t
        # u = 0 is distance o + 4 GROUP + warp + 56 - n0; a row of the profiles is 8 words.
        column = (X - 1 + _BEFORE - (o + 4 * GROUP + warp + 56) + lane_g) * 8 + lane_c * 2
        relative = (profiles_ptr, column, 3 - lane_g % 4, r0, r1, r2, r3)
        t = start_t + _query(row, GROUP)
        fixed = (q_tile, k_tiles, v_tiles, bars, relative, slots[0] + t, o, W, scale)
        top = gl.full([64], -1e30, gl.float32, gl.SliceLayout(1, _ROWS))
        total = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, _ROWS))
        near = 0
        if not SLIDING:
            near = far
        bias = _bias(relative, low + near * 128)
        state = (top, total, gl.full([64, 128], 0.0, gl.float32, _ROWS), bias)
        if not SLIDING:
            for i in range(far):
                n0 = low + i * 128
                state = _step(state, n0, count, fixed, 128, False, SLIDING)
                count += 1
        for i in range(near, whole):
            n0 = low + i * 128
            state = _step(state, n0, count, fixed, 128, True, SLIDING)
            count += 1
        if whole < steps:
            n0 = low + whole * 128
            state = _step(state, n0, count, fixed, 64, True, SLIDING)
            count += 1
        top, total, acc, _bias_of_none = state

        q = _queries(q_ptr, q_b, q_t, q_h, wave + 1, waves, sizes, GROUP)
        r0, r1, r2, r3 = _relative(r_ptr, r_b, r_t, r_h, wave + 1, waves, sizes, GROUP)
        sinks = sink_ptr + b.to(gl.int64) * z_b + t.to(gl.int64) * z_t + head + row // 4 % 2
        z = gl.load(sinks, mask=t < T, other=0.0).to(gl.float32)
        some = total > 0  # a row that saw no key has the sum 0 and a weight of nothing
        total = gl.where(some, total, 1.0)
        log2 = gl.where(some, top * _LOG2E + gl.log2(total), -1e30)
        weight = reciprocal(total * (1.0 + gl.exp2(z * _LOG2E - log2)))  # sigmoid(L - z) / total
        # Gates and outputs pass through the tile that held q: whole lines on one side, rows of the sums on the other.
        t, h, channel = _lines(start_t, GROUP)
        line = t.to(gl.int64) * gate_t + (head + h) * 128 + b.to(gl.int64) * gate_b
        real = (t < T)[:, None]
        gate = gl.load(gate_ptr + line[:, None] + channel[None, :], mask=real, other=0.0, cache_modifier=".cg")
        q_tile.store(gate)
        gate = q_tile.load(_ROWS).to(gl.float32)
        q_tile.store((acc * weight[:, None] * reciprocal(1.0 + gl.exp2(gate * -_LOG2E))).to(gl.bfloat16))
        line = ((b * T + t.to(gl.int64)) * pairs * 2 + head + h) * 128
        gl.store(out_ptr + line[:, None] + channel[None, :], q_tile.load(_LINES), mask=real)


@gluon.jit(do_not_specialize=["offset", "first", "S", "T", "total", "pairs", "Q", "X", "W"])
@no_type_check
def _prefill(
    q_ptr, k_desc, v_desc, r_ptr, profiles_ptr, sink_ptr, gate_ptr, out_ptr,
    offset, first, S, T, total, pairs, Q, X, W, scale,
    q_b, q_t, q_h, r_b, r_t, r_h, z_b, z_t, gate_b, gate_t,
    SLIDING: gl.constexpr,
):  # fmt: skip
    q_layout: gl.constexpr = gl.NVMMASharedLayout.get_default_for([64, 128], gl.bfloat16)
    q_tiles = gl.allocate_shared_memory(gl.bfloat16, [2, 64, 128], q_layout)
    k_tiles = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 1, 1, 128, 128], k_desc.layout)
    v_tiles = gl.allocate_shared_memory(gl.bfloat16, [_STAGES, 1, 1, 128, 128], v_desc.layout)
    k_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [_STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(_STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    bars, slots, sizes = (k_full, k_empty, v_full, v_empty), (offset, first, S), (T, total, pairs, Q, X, W)
    given = (q_ptr, r_ptr, profiles_ptr, sink_ptr, gate_ptr, out_ptr)
    strides = (q_b, q_t, q_h, r_b, r_t, r_h, z_b, z_t, gate_b, gate_t)
    gl.warp_specialize(
        [
            (_group, (given, strides, q_tiles, k_tiles, v_tiles, bars, slots, sizes, scale,
                      SLIDING, gl.constexpr(0))),
            (_group, (given, strides, q_tiles, k_tiles, v_tiles, bars, slots, sizes, scale,
                      SLIDING, gl.constexpr(1))),
            (_load, (k_desc, v_desc, gate_ptr, k_tiles, v_tiles, bars, slots, sizes, gate_b, gate_t,
                     SLIDING)),
        ],
        [4, 1], [240, 24],
    )  # fmt: skip


def _falling(profiles: Float[Tensor, "R X"]) -> Tensor:
    """P^T with distance falling from row to row, between rows of zeros; two bfloat16 a word."""
    R, X = profiles.shape
    rows = torch.zeros(X + 2 * _PAD, R, dtype=profiles.dtype, device=profiles.device)
    rows[_PAD : _PAD + X] = profiles.flip(1).t()
    return rows.view(torch.int32)


@cache
def _tile_layout(d: int) -> gl.NVMMASharedLayout:
    """In shared memory, of 128 keys or values. Kept, as Triton takes 11 us to find it."""
    return gl.NVMMASharedLayout.get_default_for([1, 1, 128, d], gl.bfloat16)


def suits(q: Tensor, k: Tensor, v: Tensor, r: Tensor, gate: Tensor, profiles: Tensor, window: int | None) -> bool:
    """Whether a call is one for `attend`: a Hopper GPU, bfloat16, d = 128, R = 16, an even number of heads a key/value
    head, a window of at most X, strides that its wide loads allow, and at least a tile for every processor.
    """
    (B, T, H, d), G, (R, X) = q.shape, k.shape[1], profiles.shape
    return (
        q.is_cuda
        and torch.cuda.get_device_capability(q.device) == (9, 0)
        and q.dtype == torch.bfloat16
        and (d, R) == (128, 16)
        and H // G % 2 == 0
        and (window is None or window <= X)
        and all(u.stride(-1) == 1 and all(n % 8 == 0 for n in u.stride()[:-1]) for u in (q, k, v, r, gate))
        and all(u.data_ptr() % 16 == 0 for u in (q, k, v, r, gate))
        and B * cdiv(T, 64) * (H // 2) >= processors(q.device)
    )


def attend(
    q: Float[Tensor, "B T H d"],
    k: Float[Tensor, "B G S d"],
    v: Float[Tensor, "B G S d"],
    r: Float[Tensor, "B T H R"],
    profiles: Float[Tensor, "R X"],
    sink: Float[Tensor, "B T H"],
    gate: Float[Tensor, "B T H*d"],
    offsets: list[int],
    window: int | None = None,
    first_keys: list[int] | None = None,
) -> Float[Tensor, "B T H*d"]:
    """Twin of `attention.attend` for a call that `suits`, from this kernel's own `attend`, which has checked it.

    Batch rows in different places are launched one by one.
    """
    (B, T, H, d), (G, S), X = q.shape, k.shape[1:3], profiles.shape[1]
    (sink,) = adjacent(sink)
    out = torch.empty(B, T, H * d, dtype=q.dtype, device=q.device)
    places = list(zip(offsets, first_keys or [0] * B, strict=True))
    parts = [slice(0, B)] if len(set(places)) == 1 else [slice(b, b + 1) for b in range(B)]
    layout = _tile_layout(d)
    words = r.view(torch.int32)
    for part in parts:
        offset, first = places[part.start]
        n = part.stop - part.start
        # Slots past the last query's hold anything: beyond the tensor as described they read as zeros.
        live = min(S, offset + T)
        k_desc, v_desc = (
            TensorDescriptor(u[part], [n, G, live, d], list(u.stride()), [1, 1, 128, d], layout) for u in (k, v)
        )
        total = n * cdiv(T, 64) * (H // 2)
        _prefill[(min(total, processors(q.device)),)](
            q[part], k_desc, v_desc, words[part], prepared(profiles, _falling), sink[part], gate[part], out[part],
            offset, first, S, T, total, H // 2, H // G, X, window or 0, 1 / math.sqrt(d),
            *q.stride()[:3], *words.stride()[:3], *sink.stride()[:2], *gate.stride()[:2],
            SLIDING=window is not None, num_warps=4, maxnreg=168,
        )  # fmt: skip
    return out
