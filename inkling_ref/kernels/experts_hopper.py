r"""Expert products on packed weights for Hopper, in Gluon: words of `packing` straight to the tensor cores.

**Few tokens an expert** (`product`). The weights are read once, and the rate of memory is the limit. A program is 64
rows of one expert, 4 warps of 16, over all columns, against an item of up to 8 tokens:

1. a lane loads 16 bytes: weights that it hands itself to `mma.sync.m16n8k16` as left operand. (They are the left one
   because it has 16 rows; the right one has 8 columns, which 8 tokens fill.)
2. four words become 16 registers of two bfloat16: eight bit operations a word, a multiplication a register, all exact.
3. activations are read in their natural order: the words' column order is such that a lane needs one run of a block.
   An empty slot repeats the item's first token, which costs no traffic.
4. outer scale, SwiGLU or routing weight are applied to the float32 sums.

There is no shared memory, no barrier and no split sum. The next words are loaded ahead of the arithmetic.

**One token** (ONE: an item is a pair). Eight experts are read in 34 us at the rate of a copy, and all else shows. The
activations are staged in shared memory, not read from L2 by every warp; a warp barrier keeps the compiler from sinking
the loads below the arithmetic; and the second product begins its loads before the first has ended.

**A few tokens on a rank** (`pair_product`). It has a few of their pairs, hardly two of one expert: each is an item. So
no kernel has to make a list first: a warp holds the ids of all pairs, and a scan tells it which are here. A program
takes more than one pair only where there are more than usual.

**One token on a rank** (`token_product`). A rank has one of its pairs, or two, or none, and 72 programs of 64 rows do
not keep memory busy. Here a program has 16 rows, and its four warps share the columns, a quarter of every step each.
One token needs one of eight columns of the right operand: so column n holds the n-th quarter of two steps, every warp
multiplies all of them and keeps the product of its own. Words wait in registers, AHEAD steps of them; what is used is
refilled at once, across the border to the next 16 rows. The grid is what fits on the GPU at one time; programs count
the pairs that are here and share out their rows. In the second product they share the rows of the output, each with
all pairs of its rows, so that the sum needs no other launch. (With eight pairs the form above is faster.)

**Many tokens an expert** (`tile_product`). The rate of the tensor cores is the limit. 256 rows against 64 or 128
tokens: decoded words go to `wgmma` as left operand from registers, activations through shared memory in the words'
column order. Two products are in flight, and while the tensor cores work on them the next 64 columns are decoded.

Reshape, permute and join give registers and lanes new names; no instruction comes of them, which
`convert_layout(..., assert_trivial=True)` makes sure of at compile time.
"""

from typing import no_type_check

import triton
import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy, mma_v2
from triton.experimental.gluon.language.nvidia.hopper import warpgroup_mma, warpgroup_mma_wait

from .approximate import swiglu

_OLD = gl.constexpr(not hasattr(async_copy, "async_load"))  # Triton 3.6
_async_load = async_copy.async_copy_global_to_shared if _OLD else async_copy.async_load


def _assembly(lines: str) -> gl.constexpr:
    return gl.constexpr("{\n.reg .b32 a, b;\n" + lines + "}")


# One word each of a pair, $8 and $9; the scales of r = 0 in $10 (and $11), of r = 1 in $12; registers q = 2 h + r.
NVFP4_WORDS = _assembly(
    "".join(
        f"""
and.b32 a, ${8 + p}, 0x81C081C0;
mul.bf16x2 ${4 * p}, a, $10;
shl.b32 a, ${8 + p}, 6;
and.b32 a, a, 0x81C081C0;
mul.bf16x2 ${4 * p + 1}, a, $12;
shf.r.wrap.b32 a, ${8 + p}, ${8 + p}, 4;
and.b32 a, a, 0x81C081C0;
mul.bf16x2 ${4 * p + 2}, a, $10;
shl.b32 a, ${8 + p}, 2;
shr.u32 b, ${8 + p}, 6;
lop3.b32 a, a, b, 0x81C081C0, 0x28;
mul.bf16x2 ${4 * p + 3}, a, $12;
"""
        for p in range(2)
    )
)
# Two words, h = 0 and 1, $4 and $5; the scales in $6 and $8.
MXFP8_WORDS = _assembly(
    "".join(
        f"""
shl.b32 a, ${4 + p}, 8;
and.b32 a, a, 0x80008000;
shl.b32 b, ${4 + p}, 4;
lop3.b32 a, b, 0x07F007F0, a, 0xEA;
mul.bf16x2 ${2 * p}, a, $6;
and.b32 a, ${4 + p}, 0x80008000;
shr.u32 b, ${4 + p}, 4;
lop3.b32 a, b, 0x07F007F0, a, 0xEA;
mul.bf16x2 ${2 * p + 1}, a, $8;
"""
        for p in range(2)
    )
)


def _scales_assembly(factor: int, offset: int) -> gl.constexpr:
    # Each byte of $4 to a register that holds its bfloat16 twice.
    return _assembly(
        "".join(
            f"prmt.b32 a, $4, 0, {0x4040 + 0x101 * i:#x};\nmad.lo.u32 ${i}, a, {factor}, {offset:#x};\n"
            for i in range(4)
        )
    )


NVFP4_SCALES = _scales_assembly(16, 0x76007600)
MXFP8_SCALES = _scales_assembly(128, 0x38003800)
# Types of results; Triton 3.9 takes no tuple made within a kernel.
FOUR_WORDS = gl.constexpr((gl.int32,) * 4)
FOUR_PAIRS, EIGHT_PAIRS = gl.constexpr((gl.bfloat16,) * 4), gl.constexpr((gl.bfloat16,) * 8)
UNSCALED = gl.constexpr(256.0)  # what is left to multiply: the product of value and scale is 2^-8 of the weight


@gluon.jit
@no_type_check
def _scales(packed, NVFP4: gl.constexpr):
    """The four bytes of each word, as pairs of bfloat16."""
    ASM: gl.constexpr = NVFP4_SCALES if NVFP4 else MXFP8_SCALES
    return gl.inline_asm_elementwise(ASM, "=&r,=&r,=&r,=&r,r", [packed], dtype=FOUR_WORDS, is_pure=True, pack=1)


@gluon.jit
@no_type_check
def _left(words, low, high, W: gl.constexpr, C: gl.constexpr, NVFP4: gl.constexpr, LEFT: gl.constexpr):
    """Words of W warps and C chunks, and their scales [W, C, 32] of r = 0 and 1, as the left operand.

    Reshape, permute and join only give registers and lanes new names: no instruction comes of them.
    """
    if NVFP4:
        words = gl.reshape(words, [W, C, 32, 2, 2])  # warp, chunk, lane, s / 2, s % 2
        low = gl.reshape(gl.join(gl.join(low, low), gl.join(low, low)), words.shape)
        high = gl.reshape(gl.join(gl.join(high, high), gl.join(high, high)), words.shape)
        low = gl.convert_layout(low, words.type.layout, assert_trivial=True)
        high = gl.convert_layout(high, words.type.layout, assert_trivial=True)
        a0, a1, a2, a3, a4, a5, a6, a7 = gl.inline_asm_elementwise(
            NVFP4_WORDS,
            "=&r,=&r,=&r,=&r,=&r,=&r,=&r,=&r,r,r,r,r,r,r",
            [words, low, high],
            dtype=EIGHT_PAIRS,
            is_pure=True,
            pack=2,
        )
        even = gl.join(gl.join(a0, a1), gl.join(a2, a3))
        odd = gl.join(gl.join(a4, a5), gl.join(a6, a7))
        a = gl.reshape(gl.join(even, odd), [W, C, 8, 4, 2, 2, 2, 2, 2])  # warp, chunk, g, t, s / 2, e, r, h, s % 2
        a = gl.permute(a, [0, 6, 2, 1, 4, 8, 7, 3, 5])
    else:
        S: gl.constexpr = words.shape[0] // (W * C * 128)
        words = gl.permute(gl.reshape(words, [W, C, S, 32, 2, 2]), [0, 1, 3, 2, 4, 5])  # ..., lane, s / 2, s % 2, h
        low, high = gl.join(gl.join(low, low), gl.join(low, low)), gl.join(gl.join(high, high), gl.join(high, high))
        low, high = gl.join(low, low), gl.join(high, high)
        if S == 4:
            low, high = gl.join(low, low), gl.join(high, high)
        low = gl.convert_layout(gl.reshape(low, words.shape), words.type.layout, assert_trivial=True)
        high = gl.convert_layout(gl.reshape(high, words.shape), words.type.layout, assert_trivial=True)
        a0, a1, a2, a3 = gl.inline_asm_elementwise(
            MXFP8_WORDS, "=&r,=&r,=&r,=&r,r,r,r,r,r,r", [words, low, high], dtype=FOUR_PAIRS, is_pure=True, pack=2
        )
        a = gl.join(gl.join(a0, a1), gl.join(a2, a3))
        a = gl.reshape(a, [W, C, 8, 4, S, 2, 2, 2, 2])  # warp, chunk, g, t, s / 2, s % 2, e, r, h
        a = gl.permute(a, [0, 7, 2, 1, 4, 5, 8, 3, 6])
    # warp, r, g | chunk, s / 2, s % 2, h, t, e
    return gl.convert_layout(gl.reshape(a, [16 * W, a.numel // (16 * W)]), LEFT, assert_trivial=True)


@gluon.jit
@no_type_check
def _right(x, NVFP4: gl.constexpr, RIGHT: gl.constexpr):
    """Activations [columns, 8] in natural order, of chunks (MXFP8), or of runs of 16 (NVFP4), as the right operand."""
    S: gl.constexpr = 4 if NVFP4 else 8
    x = gl.reshape(x, [x.numel // (128 * S), 4, S, 2, 2, 8])  # chunk, t, s, h, e, n
    COLUMNS: gl.constexpr = x.numel // 8
    x = gl.permute(x, [0, 2, 3, 1, 4, 5])
    return gl.convert_layout(gl.reshape(x, [COLUMNS, 8]), RIGHT, assert_trivial=True)


@gluon.jit
@no_type_check
def _activations(pointers, k, K: gl.constexpr):
    if K % 256 == 0:
        x = gl.load(pointers)
    else:
        x = gl.load(pointers, mask=(k < K)[:, None], other=0.0)
    return x


@triton.jit
@no_type_check
def _sync():
    tl.debug_barrier()


@gluon.jit
@no_type_check
def _asm(INSTRUCTION: gl.constexpr):
    gl.inline_asm_elementwise(INSTRUCTION, "=r", [], dtype=gl.int32, is_pure=False, pack=1)


WARP_BARRIER = gl.constexpr("bar.warp.sync 0xffffffff; // $0")
WAIT = gl.constexpr("griddepcontrol.wait; // $0")
LAUNCH = gl.constexpr("griddepcontrol.launch_dependents; // $0")


@gluon.jit
@no_type_check
def _item_product(
    x_ptr, word_ptr, scale_ptr, amax_ptr, denominator_ptr, slot_ptr, weight_ptr, out_ptr, gate_rate, up_rate, quarter,
    expert, item, tile, K: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr, WIDTH: gl.constexpr,
    TOP_K: gl.constexpr, NVFP4: gl.constexpr, FIRST: gl.constexpr, ONE: gl.constexpr, PADDED: gl.constexpr,
    NEAR: gl.constexpr,
):  # fmt: skip
    """64 rows of one expert against 8 slots, or ONE: `item` is a pair."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, k_width=2)
    # 8 KB of words at a time: four chunks of NVFP4 and a step, or one of MXFP8 and half a step.
    WORDS: gl.constexpr = gl.DistributedLinearLayout(
        [[1], [2], [128], [256]], [[4], [8], [16], [32], [64]], [[512], [1024]], [], [2048]
    )
    if NVFP4:
        C: gl.constexpr = 4
        COLUMNS: gl.constexpr = 256
        SCALES: gl.constexpr = gl.DistributedLinearLayout([[1]], [[2], [4], [8], [16], [32]], [[64], [128]], [], [256])
        X: gl.constexpr = gl.DistributedLinearLayout(
            [[1, 0], [2, 0], [4, 0], [8, 0], [64, 0], [128, 0]], [[16, 0], [32, 0], [0, 1], [0, 2], [0, 4]],
            [[0, 0], [0, 0]], [], [256, 8]
        )  # fmt: skip
    else:
        C: gl.constexpr = 1
        COLUMNS: gl.constexpr = 128
        SCALES: gl.constexpr = gl.DistributedLinearLayout([], [[1], [2], [4], [8], [16]], [[32], [64]], [], [128])
        X: gl.constexpr = gl.DistributedLinearLayout(
            [[1, 0], [2, 0], [4, 0], [8, 0], [16, 0]], [[32, 0], [64, 0], [0, 1], [0, 2], [0, 4]],
            [[0, 0], [0, 0]], [], [128, 8]
        )  # fmt: skip
    PARTS: gl.constexpr = 256 // COLUMNS  # of a step
    UNITS: gl.constexpr = STEPS * PARTS
    S_STEP: gl.constexpr = SCALES.shape[0]
    i = gl.arange(0, 2048, layout=WORDS)
    words = word_ptr + (expert.to(gl.int64) * TILES + tile) * (UNITS * 2048) + (i // 512 * (512 * PARTS) + i % 512)
    scales = scale_ptr + (expert * TILES + tile) * (STEPS * S_STEP) + gl.arange(0, S_STEP, layout=SCALES)
    w, s = gl.load(words), gl.load(scales)
    if NVFP4 and ONE:  # few programs: what the end needs has to come while they are busy
        amax, denominator = gl.load(amax_ptr + expert), gl.load(denominator_ptr)
    if not FIRST:
        _asm(WAIT)
        if ONE:
            weight = gl.load(weight_ptr + item)
    k = gl.arange(0, COLUMNS, layout=gl.SliceLayout(1, X))
    if ONE:
        LINE: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
        SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
        memory = gl.allocate_shared_memory(gl.bfloat16, [PADDED], SHARED)
        line = gl.arange(0, PADDED, layout=LINE)
        _async_load(memory, x_ptr + (item // TOP_K if FIRST else item) * K + line, mask=line < K)
        async_copy.commit_group()
        async_copy.wait_group(0)
        _sync()
        if _OLD:
            staged = memory._reinterpret(gl.bfloat16, [PADDED // COLUMNS, COLUMNS], SHARED)
        else:
            staged = memory.reinterpret(gl.bfloat16, [PADDED // COLUMNS, COLUMNS], SHARED)
    else:
        slots = gl.load(slot_ptr + item * 8 + gl.arange(0, 8, layout=gl.SliceLayout(0, X)))
        slots = gl.where(slots < 0, ~slots, slots)
        x_rows = x_ptr + ((slots // TOP_K if FIRST else slots) * K)[None, :] + k[:, None]
        x = _activations(x_rows, k, K)
    acc = gl.zeros([64, 8], gl.float32, MMA)
    for unit in range(UNITS):
        ahead = gl.minimum(unit + 1, UNITS - 1)
        w_ahead = words + (ahead // PARTS * (2048 * PARTS) + ahead % PARTS * 512)
        s_ahead = scales + ahead // PARTS * S_STEP
        if ONE:
            more = unit + 1 < UNITS  # loads past the end would compete with those of the next kernel
            w_next, s_next = gl.load(w_ahead, mask=more), gl.load(s_ahead, mask=more)
            _asm(WARP_BARRIER)
            x = gl.expand_dims(staged.index(unit).load(gl.SliceLayout(1, X)), 1)
            x, _ = gl.broadcast(x, gl.full([COLUMNS, 8], 0, gl.bfloat16, X))
        else:
            w_next, s_next = gl.load(w_ahead), gl.load(s_ahead)
            x_next = _activations(x_rows + ahead * COLUMNS, k + ahead * COLUMNS, K)
        s0, s1, s2, s3 = _scales(s >> (unit % PARTS * 16), NVFP4)  # of two chunks, r = 0 and 1 of each
        if NVFP4:
            low = gl.permute(gl.reshape(gl.join(s0, s2), [4, 32, C]), [0, 2, 1])
            high = gl.permute(gl.reshape(gl.join(s1, s3), [4, 32, C]), [0, 2, 1])
        else:
            low, high = gl.reshape(s0, [4, C, 32]), gl.reshape(s1, [4, C, 32])
        acc = mma_v2(_left(w, low, high, 4, C, NVFP4, LEFT), _right(x, NVFP4, RIGHT), acc)
        w, s = w_next, s_next
        if not ONE:
            x = x_next
    _asm(LAUNCH)
    if NVFP4:
        if not ONE:
            amax, denominator = gl.load(amax_ptr + expert), gl.load(denominator_ptr)
        acc = acc * (amax / denominator * UNSCALED)
    else:
        acc = acc * UNSCALED
    by_row = gl.reshape(acc, [4, 2, 8, 8])  # warp, r, g, n
    if FIRST:
        gate, up = gl.split(gl.permute(by_row, [0, 2, 3, 1]))
        y = gl.reshape(swiglu(gate, up, gate_rate, up_rate, quarter, NEAR), [32, 8])
    else:
        y = gl.reshape(gl.permute(by_row, [0, 2, 1, 3]), [64, 8])
    ROWS: gl.constexpr = y.shape[0]
    OUT: gl.constexpr = y.type.layout
    rows = tile * ROWS + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    n = gl.arange(0, 8, layout=gl.SliceLayout(0, OUT))
    pairs = gl.where(n == 0, item, -1) if ONE else gl.load(slot_ptr + item * 8 + n)
    if ONE and not FIRST:
        y = y * weight
    elif not FIRST:
        y = y * gl.load(weight_ptr + pairs, mask=pairs >= 0, other=0.0)[None, :]
    mask = (pairs >= 0)[None, :] & (rows < WIDTH)[:, None]
    gl.store(out_ptr + (pairs * WIDTH)[None, :] + rows[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
@no_type_check
def product(
    x_ptr, word_ptr, scale_ptr, amax_ptr, denominator_ptr, expert_ptr, slot_ptr, weight_ptr, out_ptr,
    gate_rate, up_rate, quarter,
    K: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr,
    NVFP4: gl.constexpr, FIRST: gl.constexpr, ONE: gl.constexpr, PADDED: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    """64 rows of one expert against 8 slots: of W13 (FIRST), with SwiGLU, or of W2, times the routing weight.

    ONE: every pair is an item of its own, and `expert_ptr` holds the experts' ids.
    """
    item = gl.program_id(1)
    if FIRST:
        _asm(WAIT)
    expert = gl.load(expert_ptr + item).to(gl.int32)
    if expert >= 0:
        _item_product(
            x_ptr, word_ptr, scale_ptr, amax_ptr, denominator_ptr, slot_ptr, weight_ptr, out_ptr, gate_rate, up_rate,
            quarter, expert, item, gl.program_id(0), K, TILES, STEPS, WIDTH, TOP_K, NVFP4, FIRST, ONE, PADDED, NEAR,
        )  # fmt: skip


@gluon.jit
@no_type_check
def _add(a, b):
    return a + b


@gluon.jit(do_not_specialize=["P", "origin", "E"])
@no_type_check
def pair_product(
    x_ptr, word_ptr, scale_ptr, amax_ptr, denominator_ptr, id_ptr, weight_ptr, out_ptr,
    gate_rate, up_rate, quarter, P, origin, E,
    K: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr,
    NVFP4: gl.constexpr, FIRST: gl.constexpr, PAIRS: gl.constexpr, PADDED: gl.constexpr, NEAR: gl.constexpr,
):  # fmt: skip
    """The same of pairs: those of the E experts from `origin` on, among the first P, at most PAIRS."""
    LIST: gl.constexpr = gl.BlockedLayout([PAIRS // 32], [32], [4], [0])  # every warp has all
    if FIRST:
        _asm(WAIT)
    pairs = gl.arange(0, PAIRS, layout=LIST)
    local = gl.load(id_ptr + pairs, mask=pairs < P, other=-1).to(gl.int32) - origin
    here = ((pairs < P) & (local >= 0) & (local < E)).to(gl.int32)
    place = gl.associative_scan(here, 0, _add) * here - 1  # among those that are here
    for n in range(gl.program_id(1), gl.sum(here, 0), gl.num_programs(1)):
        expert, pair = gl.sum(gl.where(place == n, local, 0), 0), gl.sum(gl.where(place == n, pairs, 0), 0)
        _item_product(
            x_ptr, word_ptr, scale_ptr, amax_ptr, denominator_ptr, id_ptr, weight_ptr, out_ptr, gate_rate, up_rate,
            quarter, expert, pair, gl.program_id(0), K, TILES, STEPS, WIDTH, TOP_K, NVFP4, FIRST, True, PADDED, NEAR,
        )  # fmt: skip
        _sync()  # all have read its activations


@gluon.jit
@no_type_check
def _pair_here(id_ptr, n, origin, E, TOP_K: gl.constexpr):
    """The n-th pair whose expert is here, that expert, and how many such pairs there are."""
    count, pair, expert = 0, 0, 0
    for i in gl.static_range(TOP_K):
        local = gl.load(id_ptr + i).to(gl.int32) - origin
        here = (local >= 0) & (local < E)
        found = here & (count == n)
        pair, expert = gl.where(found, i, pair), gl.where(found, local, expert)
        count += here.to(gl.int32)
    return pair, expert, count


@gluon.jit
@no_type_check
def token_product(
    x_ptr, word_ptr, scale_ptr, amax_ptr, denominator_ptr, id_ptr, weight_ptr, out_ptr,
    gate_rate, up_rate, quarter, origin, E,
    K: gl.constexpr, TILES: gl.constexpr, STEPS: gl.constexpr, WIDTH: gl.constexpr, TOP_K: gl.constexpr,
    NVFP4: gl.constexpr, FIRST: gl.constexpr, NEAR: gl.constexpr,
    PADDED: gl.constexpr, AHEAD: gl.constexpr, RESIDENT: gl.constexpr,
):  # fmt: skip
    """One token's pairs of the E experts from `origin` on: rows of W13 (FIRST), with SwiGLU, or the sum over W2's.

    A unit is 16 rows of a pair; units are in the order of rows, and of pairs within. There are RESIDENT programs a
    processor, neighbours in units if they are launched in turn.
    """
    MMA: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [4, 1], [16, 8])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, k_width=2)
    RIGHT: gl.constexpr = gl.DotOperandLayout(1, MMA, k_width=2)
    SCALES: gl.constexpr = gl.DistributedLinearLayout([], [[4], [8], [16], [32], [64]], [[1], [2]], [], [128])
    # A quarter of a step: a chunk of NVFP4; of MXFP8 half a chunk, the first or last 16 columns of its blocks.
    if NVFP4:
        CHUNKS: gl.constexpr = 8  # of two steps
        WORDS: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2]], [[4], [8], [16], [32], [64]], [[128], [256]], [], [512]
        )
        X: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
            [[0, 1, 0, 0], [0, 2, 0, 0], [1, 0, 0, 0], [2, 0, 0, 0], [4, 0, 0, 0]],
            [[0, 0, 0, 0], [0, 0, 0, 0]], [], [8, 4, 1, 16]
        )  # fmt: skip
    else:
        CHUNKS: gl.constexpr = 4
        WORDS: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2], [128]], [[4], [8], [16], [32], [64]], [[256], [512]], [], [1024]
        )
        X: gl.constexpr = gl.DistributedLinearLayout(
            [[0, 0, 0, 1], [0, 0, 0, 2], [0, 0, 0, 4], [0, 0, 0, 8]],
            [[0, 1, 0, 0], [0, 2, 0, 0], [0, 0, 1, 0], [1, 0, 0, 0], [2, 0, 0, 0]],
            [[0, 0, 0, 0], [0, 0, 0, 0]], [], [4, 4, 2, 16]
        )  # fmt: skip
    SUM: gl.constexpr = gl.DistributedLinearLayout(  # a lane's rows 2 g and 2 g + 1, in all warps
        [[1]], [[0], [0], [2], [4], [8]], [[0], [0]], [], [16]
    )
    PART: gl.constexpr = WORDS.shape[0]  # words of 16 rows and a step
    SCALE_PART: gl.constexpr = 64 if NVFP4 else 32
    GROUPS: gl.constexpr = TILES * 4
    LINE: gl.constexpr = gl.BlockedLayout([8], [32], [4], [0])
    SHARED: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[0])
    VIEW: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, order=[3, 2, 1, 0])
    ROWS_OF_X: gl.constexpr = 1 if FIRST else 2  # the next pair's comes while the last one's is in use
    TWO_STEPS: gl.constexpr = PADDED // 512
    j = gl.arange(0, 128, layout=SCALES)
    if NVFP4:
        j_word, shift = j // 2, j % 2 * 16
    else:
        j_word, shift = j // 4, j % 4 // 2 * 16
    i = gl.arange(0, PART, layout=WORDS)
    memory = gl.allocate_shared_memory(gl.bfloat16, [ROWS_OF_X, PADDED], SHARED)
    if _OLD:
        staged = memory._reinterpret(gl.bfloat16, [ROWS_OF_X * TWO_STEPS, CHUNKS, 4, 8 // CHUNKS, 16], VIEW)
    else:
        staged = memory.reinterpret(gl.bfloat16, [ROWS_OF_X * TWO_STEPS, CHUNKS, 4, 8 // CHUNKS, 16], VIEW)
    line = gl.arange(0, PADDED, layout=LINE)
    part = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))[:, None] // 16
    column = gl.arange(0, 8, layout=gl.SliceLayout(0, MMA))[None, :]
    rows = gl.arange(0, 16, layout=SUM)

    if FIRST:
        _asm(WAIT)
    programs = gl.num_programs(0)
    pair, expert, here = _pair_here(id_ptr, 0, origin, E, TOP_K)
    turn = gl.program_id(0) % (programs // RESIDENT) * RESIDENT + gl.program_id(0) // (programs // RESIDENT)
    if FIRST:
        begin, end = turn * (here * GROUPS) // programs, (turn + 1) * (here * GROUPS) // programs
    else:
        first, last = turn * GROUPS // programs, (turn + 1) * GROUPS // programs
        begin, end = first * here, last * here
        if (here == 0) & (first < last):
            _asm(WAIT)
            zero = gl.zeros([16], out_ptr.dtype.element_ty, SUM)
            for group in range(first, last):
                gl.store(out_ptr + group * 16 + rows, zero, mask=group * 16 + rows < WIDTH)
    if begin < end:
        pair, expert, here = _pair_here(id_ptr, begin % here, origin, E, TOP_K)
        at = expert * GROUPS + begin // here
        words = word_ptr + ((at // 4).to(gl.int64) * (STEPS * 4) + at % 4) * PART + i
        scales = scale_ptr + (at // 4 * (STEPS * 4) + at % 4) * SCALE_PART + j_word
        w, s = (), ()
        for u in gl.static_range(AHEAD):
            w += (gl.load(words + u * (4 * PART)),)
            s += (gl.load(scales + u * (4 * SCALE_PART)),)
        if not FIRST:
            _asm(WAIT)
        _asm(LAUNCH)
        _async_load(memory.index(0), x_ptr + (0 if FIRST else pair * K) + line, mask=line < K)
        async_copy.commit_group()
        buffer = 0
        total = gl.zeros([16], gl.float32, SUM)
        for unit in range(begin, end):
            more = unit + 1 < end
            pair_next, expert_next, _ = _pair_here(id_ptr, (unit + 1) % here, origin, E, TOP_K)
            at = expert_next * GROUPS + (unit + 1) // here
            words_next = word_ptr + ((at // 4).to(gl.int64) * (STEPS * 4) + at % 4) * PART + i
            scales_next = scale_ptr + (at // 4 * (STEPS * 4) + at % 4) * SCALE_PART + j_word
            if NVFP4:
                outer = gl.load(amax_ptr + expert) / gl.load(denominator_ptr) * UNSCALED
            else:
                outer = UNSCALED
            async_copy.wait_group(0)
            _sync()  # all have what they wait for, and have left the other row
            if not FIRST:
                weight = gl.load(weight_ptr + pair)
                _async_load(memory.index(1 - buffer), x_ptr + pair_next * K + line, mask=(line < K) & more)
                async_copy.commit_group()
            acc, odd = gl.zeros([64, 8], gl.float32, MMA), gl.zeros([64, 8], gl.float32, MMA)
            for u in gl.static_range(STEPS):
                if u % 2 == 0:
                    x = staged.index(buffer * TWO_STEPS + u // 2).load(X)
                    right = _right(gl.reshape(gl.permute(x, [1, 3, 0, 2]), [64, 8]), True, RIGHT)
                s0, s1, _, _ = _scales(s[0] >> shift, NVFP4)
                low = gl.reshape(gl.permute(gl.reshape(s0, [32, 4]), [1, 0]), [4, 1, 32])
                high = gl.reshape(gl.permute(gl.reshape(s1, [32, 4]), [1, 0]), [4, 1, 32])
                left = _left(w[0], low, high, 4, 1, NVFP4, LEFT)
                if u % 2 == 0:
                    acc = mma_v2(left, right, acc)
                else:
                    odd = mma_v2(left, right, odd)
                if u + AHEAD < STEPS:
                    w_new = gl.load(words + (u + AHEAD) * (4 * PART))
                    s_new = gl.load(scales + (u + AHEAD) * (4 * SCALE_PART))
                else:
                    w_new = gl.load(words_next + (u + AHEAD - STEPS) * (4 * PART), mask=more)
                    s_new = gl.load(scales_next + (u + AHEAD - STEPS) * (4 * SCALE_PART), mask=more)
                _asm(WARP_BARRIER)
                w, s = w[1:] + (w_new,), s[1:] + (s_new,)  # noqa: RUF005 (no stars in a kernel)
            y = gl.where(column == part, acc, 0.0) + gl.where(column == part + 4, odd, 0.0)
            y = gl.sum(gl.sum(gl.reshape(y, [4, 2, 8, 8]), 3), 0) * outer  # r, g
            group, n = unit // here, unit % here
            if FIRST:
                gate, up = gl.split(gl.permute(y, [1, 0]))
                y = swiglu(gate, up, gate_rate, up_rate, quarter, NEAR)
                out = group * 8 + gl.arange(0, 8, layout=y.type.layout)
                gl.store(out_ptr + pair * WIDTH + out, y.to(out_ptr.dtype.element_ty), mask=out < WIDTH)
            else:
                y = gl.convert_layout(gl.reshape(gl.permute(y, [1, 0]), [16]), SUM, assert_trivial=True)
                total = gl.where(n == 0, 0.0, total) + y * weight
                out = group * 16 + rows
                whole = (out < WIDTH) & (n + 1 == here)
                gl.store(out_ptr + out, total.to(out_ptr.dtype.element_ty), mask=whole)
                buffer = 1 - buffer
            pair, expert, words, scales = pair_next, expert_next, words_next, scales_next


@gluon.jit
@no_type_check
def _chunk_scales(packed, u: gl.constexpr, NVFP4: gl.constexpr):
    """Scales of r = 0 and 1 for the u-th 64 columns of a step."""
    s0, s1, s2, s3 = _scales(packed, NVFP4)
    if NVFP4:
        low, high = (s0, s1) if u % 2 == 0 else (s2, s3)
        low0, low1 = gl.split(gl.reshape(low, [16, 32, 2]))
        high0, high1 = gl.split(gl.reshape(high, [16, 32, 2]))
        low, high = (low0, high0) if u < 2 else (low1, high1)
    else:
        low, high = (s0, s1) if u < 2 else (s2, s3)
    return gl.reshape(low, [16, 1, 32]), gl.reshape(high, [16, 1, 32])


@gluon.jit
@no_type_check
def _tile_product(
    x_ptr, word_ptr, scale_ptr, slots, weight_ptr, out_ptr, tile, left, outer, gate_rate, up_rate, quarter,
    N: gl.constexpr, STEPS: gl.constexpr, X_STRIDE: gl.constexpr, WIDTH: gl.constexpr,
    TOP_K: gl.constexpr, NVFP4: gl.constexpr, FIRST: gl.constexpr,
    NEAR: gl.constexpr,
):  # fmt: skip
    """256 rows, 4 tiles of the packed matrix (`left` of them beside the first are there), by N slots."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [8, 1], [16, N, 16])
    LEFT: gl.constexpr = gl.DotOperandLayout(0, MMA, k_width=2)
    COPY: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    if NVFP4:  # words of 64 columns: a chunk; scales of a step
        WORDS: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2], [1024]], [[4], [8], [16], [32], [64]], [[128], [256], [512]], [], [2048]
        )
        SCALES: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [512]], [[2], [4], [8], [16], [32]], [[64], [128], [256]], [], [1024]
        )
    else:  # half a chunk
        WORDS: gl.constexpr = gl.DistributedLinearLayout(
            [[1], [2], [128], [2048]], [[4], [8], [16], [32], [64]], [[256], [512], [1024]], [], [4096]
        )
        SCALES: gl.constexpr = gl.DistributedLinearLayout(
            [[256]], [[1], [2], [4], [8], [16]], [[32], [64], [128]], [], [512]
        )
    PART: gl.constexpr = WORDS.shape[0] // 16  # words of a warp
    SCALE_WORDS: gl.constexpr = SCALES.shape[0] // 4  # of a tile and step
    i = gl.arange(0, PART * 16, layout=WORDS)
    words = word_ptr + gl.minimum(i // (4 * PART), left).to(gl.int64) * (STEPS * 16 * PART)
    words += i // PART % 4 * (4 * PART) + i % PART
    j = gl.arange(0, SCALE_WORDS * 4, layout=SCALES)
    scales = scale_ptr + gl.minimum(j // SCALE_WORDS, left) * (STEPS * SCALE_WORDS) + j % SCALE_WORDS

    pairs = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(1, COPY)))
    pairs = gl.where(pairs < 0, ~pairs, pairs)
    x_rows = x_ptr + ((pairs // TOP_K if FIRST else pairs) * X_STRIDE)[:, None]
    x_rows += gl.arange(0, 64, layout=gl.SliceLayout(0, COPY))[None, :]
    # One buffer each: the compiler would put a barrier between a read and a write of one and the same.
    SHARED: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    memory = (
        gl.allocate_shared_memory(gl.bfloat16, [N, 64], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [N, 64], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [N, 64], SHARED),
        gl.allocate_shared_memory(gl.bfloat16, [N, 64], SHARED),
    )
    for c in gl.static_range(2):
        _async_load(memory[c], x_rows + c * 64)
        async_copy.commit_group()
    s = gl.load(scales)
    low, high = _chunk_scales(s, 0, NVFP4)
    a = _left(gl.load(words), low, high, 16, 1, NVFP4, LEFT)
    a_before = a
    w = gl.load(words + PART)
    acc = gl.zeros([256, N], gl.float32, MMA)
    for step in range(STEPS):
        next_step = gl.minimum(step + 1, STEPS - 1)
        s_next = gl.load(scales + next_step * SCALE_WORDS)
        for u in gl.static_range(4):
            async_copy.wait_group(1)
            acc = warpgroup_mma(a, memory[u].permute([1, 0]), acc, is_async=True)
            # Two products are in flight, so that one is queued when the other ends. From here the one before is done:
            # its registers take the next decoded words, and the buffer of its predecessor, which every warp has left,
            # the next rows.
            acc, a_before = warpgroup_mma_wait(1, deps=[acc, a_before])
            after = (step if u < 2 else next_step) * 4 + (u + 2) % 4
            _async_load(memory[(u + 2) % 4], x_rows + after * 64)
            async_copy.commit_group()
            if u == 3:
                s = s_next
            low, high = _chunk_scales(s, (u + 1) % 4, NVFP4)
            a_before, a = a, _left(w, low, high, 16, 1, NVFP4, LEFT)
            w = gl.load(words + ((step if u < 2 else next_step) * (16 * PART) + (u + 2) % 4 * PART))
    acc, _ = warpgroup_mma_wait(0, deps=[acc, a_before])
    async_copy.wait_group(0)
    by_row = gl.reshape(acc * outer, [16, 2, 8, N])  # warp, r, g, n
    if FIRST:
        gate, up = gl.split(gl.permute(by_row, [0, 2, 3, 1]))
        y = swiglu(gate, up, gate_rate, up_rate, quarter, NEAR).to(out_ptr.dtype.element_ty)
        S: gl.constexpr = 4 if NVFP4 else 8
        y = gl.permute(gl.reshape(y, [8 // S, 4, S, 2, 2, N]), [0, 2, 3, 1, 4, 5])
        y = gl.convert_layout(gl.reshape(y, [128, N]), gl.BlockedLayout([8, 1], [16, 2], [1, 8], [0, 1]))
    else:
        y = gl.reshape(gl.permute(by_row, [0, 2, 1, 3]), [256, N])
    ROWS: gl.constexpr = y.shape[0]
    OUT: gl.constexpr = y.type.layout
    rows = tile * (ROWS // 4) + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    pairs = gl.load(slots + gl.arange(0, N, layout=gl.SliceLayout(0, OUT)))
    if not FIRST:
        y = y * gl.load(weight_ptr + pairs, mask=pairs >= 0, other=0.0)[None, :]
    mask = (pairs >= 0)[None, :] & (rows < WIDTH)[:, None]
    gl.store(out_ptr + (pairs * WIDTH)[None, :] + rows[:, None], y.to(out_ptr.dtype.element_ty), mask=mask)


@gluon.jit
@no_type_check
def tile_product(
    x_ptr, word_ptr, scale_ptr, amax_ptr, denominator_ptr, expert_ptr, slot_ptr, weight_ptr, out_ptr,
    gate_rate, up_rate, quarter,
    TILES: gl.constexpr, STEPS: gl.constexpr, X_STRIDE: gl.constexpr, WIDTH: gl.constexpr,
    TOP_K: gl.constexpr, NVFP4: gl.constexpr, FIRST: gl.constexpr,
    NEAR: gl.constexpr,
):  # fmt: skip
    """256 rows of one expert against an item of 128 slots, or the first 64 of them where the others are empty.

    x has its columns in the order of the words, and so has the result of the first product.
    """
    tile, item = gl.program_id(0) * 4, gl.program_id(1)
    expert = gl.load(expert_ptr + item)
    if expert >= 0:
        first = expert.to(gl.int64) * TILES + tile
        words = word_ptr + first * (STEPS * (2048 if NVFP4 else 4096))
        scales = scale_ptr + first * (STEPS * (256 if NVFP4 else 128))
        if NVFP4:
            outer = gl.load(amax_ptr + expert) / gl.load(denominator_ptr) * 256
        else:
            outer = 256.0
        slots = slot_ptr + item * 128
        if gl.load(slots + 64) >= 0:
            _tile_product(
                x_ptr, words, scales, slots, weight_ptr, out_ptr, tile, TILES - 1 - tile, outer, gate_rate, up_rate,
                quarter, 128, STEPS, X_STRIDE, WIDTH, TOP_K, NVFP4, FIRST, NEAR,
            )  # fmt: skip
        else:
            _tile_product(
                x_ptr, words, scales, slots, weight_ptr, out_ptr, tile, TILES - 1 - tile, outer, gate_rate, up_rate,
                quarter, 64, STEPS, X_STRIDE, WIDTH, TOP_K, NVFP4, FIRST, NEAR,
            )  # fmt: skip
