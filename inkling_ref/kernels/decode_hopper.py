"""Attention of one token over a window of keys for Hopper GPUs, in Gluon: a cluster for each key/value head.

A step of few rows is short of nothing but time, and to add up the splits of `decode._decode` takes as long as they do.
Here the CTAS multiprocessors of a cluster share the window, KEYS keys each, and meet once, in their shared memories.

1. Before the kernel in front has ended, a block reads the keys, values and profiles of its part into registers: all but
   the newest token's, which is the last key of the last block.
2. Behind the wait come the queries and that key. A warp takes an eighth of the block's keys, as a product with 16 rows,
   of which each query head is one. The scores, 4 KB, go through shared memory to all warps.
3. A warp has all scores of its block now, and of the values 16 of 128 channels: the softmax and the second product need
   no other warp. (Scores turned around are its right operand, whose 8 columns are the heads.)
4. A block sends every other one the sums of its 128 / CTAS channels, with their maximum and total. What it receives is
   counted in bytes by a barrier in shared memory, without a fence. It adds the parts up in their order (the same call
   gives the same bits), applies sink and gate, and stores.

The order in which a product adds up is free, so channels are numbered as a lane has read them: 16 adjacent bytes of a
key, 4 of a value. Reshape and permute rename, no instruction comes of them: `assert_trivial` makes sure.
"""

# ruff: noqa: RUF005 (Triton joins tuples with +, and does not know *)

import functools
from typing import no_type_check

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from .approximate import TO_BASE2
from .residual_hopper import run_ptx

d, R, HEADS, WARPS = gl.constexpr(128), gl.constexpr(16), gl.constexpr(8), gl.constexpr(8)
SCALE, LOWEST = gl.constexpr(128**-0.5), gl.constexpr(-1e30)  # of scores; in place of -inf, whose difference is NaN


@triton.constexpr_function
def open_ptx(CTAS):
    """A block's box for the parts [source, head, channel] and [source, head, 2]; $0 is its address. Its first 16 bytes
    are a barrier that waits for as many bytes as will come.
    """
    size = CTAS * 8 * (128 // CTAS + 2) * 4
    return f"""{{
.shared .align 16 .b8 box[{16 + size}];
.reg .pred first;
.reg .b32 u;
mov.u32 $0, box;
mov.u32 u, %tid.x;
setp.eq.u32 first, u, 0;
@first mbarrier.init.shared::cta.b64 [$0], 1;
@first mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], {size};
@first fence.mbarrier_init.release.cluster;
barrier.cluster.arrive.relaxed.aligned;
}}"""


@triton.constexpr_function
def exchange_ptx(CTAS):
    """From part to part. Lane (g, c) = 4 g + c of warp w holds the sums of heads 2 c, 2 c + 1 in channels 16 w + 2 g,
    16 w + 2 g + 1, and maximum and total of head g. It gets, of every block, the sum of head w in the channel of this
    block whose number in it is the lane's, and maximum and total of head w.
    """
    own = 128 // CTAS  # channels of a block, those of own / 16 warps
    row, sums, n = own * 4, 16 + 8 * 128 * 4, 3 * CTAS  # bytes of a head; where maxima and totals begin; outputs
    send = "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
    code = f"""{{
.reg .pred p;
.reg .b32 lane, warp, rank, g, c, block, here, at, to, bar;
mov.u32 lane, %laneid;
mov.u32 warp, %tid.x;
shr.u32 warp, warp, 5;
mov.u32 rank, %cluster_ctarank;
shr.u32 g, lane, 2;
and.b32 c, lane, 3;
shl.b32 block, warp, 4;
and.b32 here, block, {own - 1};
div.u32 block, block, {own};
mapa.shared::cluster.u32 bar, ${n}, block;
mad.lo.u32 at, g, 2, here;
shl.b32 at, at, 2;
mad.lo.u32 at, rank, {8 * row}, at;
mad.lo.u32 at, c, {2 * row}, at;
add.u32 at, at, ${n};
mapa.shared::cluster.u32 to, at, block;
{send} [to + 16], {{${n + 1}, ${n + 2}}}, [bar];
{send} [to + {16 + row}], {{${n + 3}, ${n + 4}}}, [bar];
or.b32 here, here, c;
setp.eq.u32 p, here, 0;
mad.lo.u32 at, rank, 8, g;
mad.lo.u32 at, at, 8, ${n};
mapa.shared::cluster.u32 to, at, block;
@p {send} [to + {sums}], {{${n + 5}, ${n + 6}}}, [bar];
waiting:
mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [${n}], 0;
@!p bra waiting;
and.b32 at, lane, {own - 1};
mad.lo.u32 at, warp, {own}, at;
mad.lo.u32 at, at, 4, ${n};
mad.lo.u32 to, warp, 8, ${n};
"""
    for k in range(CTAS):
        code += f"ld.shared.f32 ${k}, [at + {16 + k * 8 * row}];\n"
        code += f"ld.shared.v2.f32 {{${CTAS + k}, ${2 * CTAS + k}}}, [to + {sums + k * 64}];\n"
    return code + "}"


@triton.constexpr_function
def _constraints(CTAS):
    return ",".join(["=&f"] * (3 * CTAS) + ["r"] + ["f"] * 6)


@triton.constexpr_function
def _floats(CTAS):
    return (gl.float32,) * (3 * CTAS)


@gluon.jit
@no_type_check
def _axis(N: gl.constexpr, axis: gl.constexpr, L: gl.constexpr):
    """0 .. N - 1 along one of three axes."""
    a: gl.constexpr = 0 if axis > 0 else 1
    b: gl.constexpr = 2 if axis < 2 else 1
    x = gl.arange(0, N, layout=gl.SliceLayout(a, gl.SliceLayout(b, L)))
    return gl.expand_dims(gl.expand_dims(x, a), b)


@gluon.jit
@no_type_check
def _places(n, first, table_ptr, pages, page_stride, COUNT: gl.constexpr, STRIDE: gl.constexpr, PAGE: gl.constexpr):
    """Where keys n stand, COUNT of them from `first` on: few pages, from which each chooses, are fewer loads."""
    place = n * STRIDE
    if PAGE > 0:
        page, origin = gl.maximum(first, 0) // PAGE, n * 0
        for i in gl.static_range((COUNT + PAGE - 2) // PAGE + 1):
            number = gl.load(table_ptr + page + i, mask=page + i < pages, other=0)
            start = number * page_stride - (page + i) * (PAGE * STRIDE)
            origin = start + origin if i == 0 else gl.where(n >= (page + i) * PAGE, start, origin)
        place += origin
    return gl.multiple_of(place, [8, 8, 8])


@gluon.jit
@no_type_check
def _operand(x, index: gl.constexpr, MMA: gl.constexpr):
    """[ways, vectors, numbers], of which a lane has read a run in every four, as left or right operand of a product."""
    RUN: gl.constexpr = 8 if x.shape[2] > 16 else 4
    y = gl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // (4 * RUN), 4, RUN // 4, 2, 2])
    y = gl.reshape(gl.permute(y, (0, 1, 2, 4, 5, 3, 6)), x.shape)
    if index == 1:
        y = gl.permute(y, (0, 2, 1))
    return gl.convert_layout(y, gl.DotOperandLayout(index, MMA, 2), assert_trivial=True)


@gluon.jit(do_not_specialize=["S", "pages"])
@no_type_check
def decode_cluster(
    q_ptr, k_ptr, v_ptr, table_ptr, r_ptr, flat_ptr, sink_ptr, gate_ptr, out_ptr, lengths_ptr, S, pages,
    q_b, q_h, k_p, k_g, v_p, v_g, r_b, r_h, z_b, gate_b,
    G: gl.constexpr, Q: gl.constexpr, X: gl.constexpr, W: gl.constexpr, PAGE: gl.constexpr, K_S: gl.constexpr,
    V_S: gl.constexpr, CTAS: gl.constexpr, KEYS: gl.constexpr, BY_KEY: gl.constexpr, ROW: gl.constexpr,
    PROFILE: gl.constexpr, STATE: gl.constexpr, BY_CHANNEL: gl.constexpr, SCORES: gl.constexpr, MEMORY: gl.constexpr,
    TURNED: gl.constexpr, SUMS: gl.constexpr, BY_HEAD: gl.constexpr, THREADS: gl.constexpr,
):  # fmt: skip
    """Cluster b G + g: the Q heads of key/value head g of row b, which reads the last W of CTAS KEYS keys."""
    WAYS: gl.constexpr = CTAS * WARPS
    N: gl.constexpr = KEYS // WARPS  # keys of a warp
    OWN: gl.constexpr = d // CTAS  # channels that a block adds up
    box = gl.inline_asm_elementwise(open_ptx(CTAS), "=&r", [], gl.int32, is_pure=False, pack=1)
    b, g = gl.program_id(0) // G, gl.program_id(0) % G
    o = gl.load(lengths_ptr + b)  # slot of the newest token; below 0 where the row is not in use
    low, begin = gl.where(o < S, gl.maximum(o - (W - 1), 0), o + 1), o + 1 - CTAS * KEYS
    k_ptr, v_ptr, page, slot = k_ptr + g * k_g, v_ptr + g * v_g, b, gl.maximum(o, 0)
    if PAGE > 0:
        table_ptr += b * pages
        page, slot = gl.load(table_ptr + slot // PAGE, mask=slot < S, other=0), slot % PAGE
    else:
        k_ptr, v_ptr, page = k_ptr + b * k_p, v_ptr + b * v_p, 0

    way, i, channel = _axis(WAYS, 0, BY_KEY), _axis(N, 1, BY_KEY), _axis(d, 2, BY_KEY)
    n = begin + way * N + i
    k_ptrs = k_ptr + (_places(n, begin + way * N, table_ptr, pages, k_p, N, K_S, PAGE) + channel)
    last = (way == WAYS - 1) & (i == N - 1)
    k = gl.load(k_ptrs, mask=(n >= low) & ~last, other=0.0)
    k_new = k_ptr + (page * k_p + slot * K_S + channel + n * 0)
    k_last = last & (o >= low)
    block, i, channel = _axis(CTAS, 0, BY_CHANNEL), _axis(KEYS, 1, BY_CHANNEL), _axis(d, 2, BY_CHANNEL)
    n = begin + block * KEYS + i
    v_ptrs = v_ptr + (_places(n, begin + block * KEYS, table_ptr, pages, v_p, KEYS, V_S, PAGE) + channel)
    last = (block == CTAS - 1) & (i == KEYS - 1)
    v = gl.load(v_ptrs, mask=(n >= low) & ~last, other=0.0)
    v_new = v_ptr + (page * v_p + slot * V_S + channel + n * 0)
    v_last = last & (o >= low)
    far = o - begin - (_axis(WAYS, 0, PROFILE) * N + _axis(N, 1, PROFILE))
    profile = gl.load(flat_ptr + (far * R + _axis(R, 2, PROFILE)), mask=far < X, other=0.0)
    head, row, c = _axis(HEADS, 1, THREADS), g * Q + _axis(16, 1, ROW), _axis(32, 2, THREADS)
    q_ptrs = q_ptr + (b * q_b + row * q_h + _axis(d, 2, ROW) + _axis(WAYS, 0, ROW) * 0)
    q_live = row < (g + 1) * Q
    row = g * Q + _axis(16, 1, STATE)
    r_ptrs = r_ptr + (b * r_b + row * r_h + _axis(R, 2, STATE) + _axis(WAYS, 0, STATE) * 0)
    at = (g * Q + head) * d + _axis(CTAS, 0, THREADS) * OWN + c
    mask = (head < Q) & (c < OWN)

    run_ptx("barrier.cluster.wait.acquire.aligned;")  # all blocks have started
    run_ptx("griddepcontrol.wait; griddepcontrol.launch_dependents;")
    q = gl.load(q_ptrs, mask=q_live, other=0.0)
    k = gl.load(k_new, mask=k_last, other=k)
    r = gl.load(r_ptrs, mask=row < (g + 1) * Q, other=0.0)
    v = gl.load(v_new, mask=v_last, other=v)
    z = gl.load(sink_ptr + (b * z_b + g * Q + head), mask=head < Q, other=0.0).to(gl.float32)
    gate = gl.load(gate_ptr + (b * gate_b + at), mask=mask, other=0.0).to(gl.float32)

    s = mma_v2(_operand(r, 0, SCORES), _operand(profile, 1, SCORES), gl.zeros([WAYS, 16, N], gl.float32, SCORES))
    s = mma_v2(_operand(q, 0, SCORES), _operand(k, 1, SCORES), s / SCALE) * (SCALE * TO_BASE2)
    s, _ = gl.split(gl.permute(gl.reshape(s, [WAYS, 2, HEADS, N]), (0, 2, 3, 1)))
    L: gl.constexpr = s.type.layout
    n = begin + _axis(WAYS, 0, L) * N + _axis(N, 2, L)
    s = gl.where(n >= low, s, float("-inf"))
    s = gl.reshape(gl.permute(gl.reshape(s, [CTAS, WARPS, HEADS, N]), (0, 2, 1, 3)), [CTAS, HEADS, KEYS])
    s = gl.permute(gl.allocate_shared_memory(gl.float32, s.shape, MEMORY, s).load(TURNED), (0, 2, 1))
    top = gl.maximum(gl.max(s, 1), LOWEST)
    p = gl.exp2(s - gl.expand_dims(top, 1))
    total = gl.sum(p, 1)
    p = gl.convert_layout(p.to(v.dtype), gl.DotOperandLayout(1, SUMS, 2), assert_trivial=True)
    v = gl.reshape(gl.permute(gl.reshape(v, [CTAS, KEYS, WARPS, 8, 2]), (0, 2, 4, 3, 1)), [CTAS, d, KEYS])
    v = gl.convert_layout(v, gl.DotOperandLayout(0, SUMS, 2), assert_trivial=True)
    acc = mma_v2(v, p, gl.zeros([CTAS, d, HEADS], gl.float32, SUMS))

    acc = gl.reshape(acc, [CTAS, WARPS, 2, 8, 4, 2])  # channels: warp, one of two, g; heads: c, one of two
    first, second = gl.split(gl.permute(acc, (0, 1, 3, 4, 2, 5)))
    sums = gl.split(first) + gl.split(second)
    values = (box,)
    for k in gl.static_range(4):
        x = gl.reshape(sums[k], [CTAS, WARPS, 32])
        values = values + (gl.convert_layout(x, THREADS, assert_trivial=True),)
    for k in gl.static_range(2):
        x = gl.convert_layout((top, total)[k], BY_HEAD, assert_trivial=True)
        x = gl.expand_dims(gl.expand_dims(x, 1), 3).broadcast_to([CTAS, WARPS, 8, 4])
        values = values + (gl.convert_layout(gl.reshape(x, [CTAS, WARPS, 32]), THREADS, assert_trivial=True),)
    ptx: gl.constexpr = exchange_ptx(CTAS)
    parts = gl.inline_asm_elementwise(ptx, _constraints(CTAS), values, _floats(CTAS), is_pure=False, pack=1)
    top = parts[CTAS]
    for k in gl.static_range(1, CTAS):
        top = gl.maximum(top, parts[CTAS + k])
    y, total = top * 0.0, top * 0.0
    for k in gl.static_range(CTAS):
        weight = gl.exp2(parts[CTAS + k] - top)
        y += parts[k] * weight
        total += parts[2 * CTAS + k] * weight
    total = gl.where(total == 0.0, 1.0, total)  # of no key: the sink takes all
    y /= total * (1.0 + gl.exp2(z * TO_BASE2 - (top + gl.log2(total)))) * (1.0 + gl.exp2(-gate * TO_BASE2))
    gl.store(out_ptr + (b * (G * Q * d) + at), y.to(out_ptr.dtype.element_ty), mask=mask)


@functools.cache
def layouts(ctas: int, keys: int) -> dict[str, object]:
    """Those of `decode_cluster`. Lane 4 g + c, as in the operands of `mma.sync`: the bases of c come first."""

    def bits(stop: int, axis: int, first: int = 1) -> list[list[int]]:
        """first, 2 first, ... below `stop`, along one of three axes."""
        return [[first << i if a == axis else 0 for a in range(3)] for i in range((stop // first).bit_length() - 1)]

    def vectors(rows: int, numbers: int) -> gl.DistributedLinearLayout:
        """[8 ctas, rows, numbers], an axis of warps: row g of every 8, and of every 4 runs the run c."""
        run = 8 if numbers > 16 else 4
        registers = bits(run, 2) + bits(numbers, 2, 4 * run) + bits(rows, 1, 8)
        lanes = bits(4 * run, 2, run) + bits(8, 1)
        return gl.DistributedLinearLayout(registers, lanes, bits(8, 0), bits(8 * ctas, 0, 8), [8 * ctas, rows, numbers])

    n, blocks = keys // 8, bits(ctas, 0)
    mine, c = [[0, 1, 0], *bits(keys, 1, 8)], bits(8, 1, 2)  # keys of a lane
    turned = lambda bases: [[a, u, k] for a, k, u in bases]  # noqa: E731
    values = [[0, 0, 1], *mine], c + bits(16, 2, 2), bits(128, 2, 16), blocks, [ctas, keys, 128]
    scores = turned(mine), turned(c) + bits(8, 1), [[0, 0, 0]] * 3, blocks, [ctas, 8, keys]
    by_head = [[*basis, 0] for basis in blocks]
    by_head = gl.BlockedLayout([1] * 4, [1, 1, 8, 4], [1, 8, 1, 1], [3, 2, 1, 0], cga_layout=by_head)
    return {
        "BY_KEY": vectors(n, 128), "ROW": vectors(16, 128), "PROFILE": vectors(n, 16), "STATE": vectors(16, 16),
        "BY_CHANNEL": gl.DistributedLinearLayout(*values), "TURNED": gl.DistributedLinearLayout(*scores),
        "SCORES": gl.NVMMADistributedLayout([2, 0], [8, 1, 1], [1, 16, 8], cga_layout=blocks),
        "SUMS": gl.NVMMADistributedLayout([2, 0], [1, 8, 1], [1, 16, 8], cga_layout=blocks),
        "MEMORY": gl.SwizzledSharedLayout(8, 1, 4, [2, 1, 0], cga_layout=blocks),
        "BY_HEAD": gl.SliceLayout(1, gl.SliceLayout(3, by_head)),
        "THREADS": gl.BlockedLayout([1] * 3, [1, 1, 32], [1, 8, 1], [2, 1, 0], cga_layout=blocks),
    }  # fmt: skip
