r"""NVFP4 (four over six) and MXFP8 encoders, and quantised activations: the bits of `quantization`.

Memory moves a bfloat16 weight and its 0.56 bytes of NVFP4 in the time of 18 instructions of an H200. The rule of
`quantization`, taken literally, is a hundred: four divisions a weight, and each operation rounds where the rule says
so. `_nvfp4`, in which a thread holds a whole block, takes 22, in two steps.

1. **Quickly.** With RN for rounding, the inverse of a divisor u is a sum of two floats,

$$ r = \mathrm{RN}(1 / u), \qquad \rho \approx 1 / u - r, \qquad q = \mathrm{RN}(x r + \mathrm{RN}(x \rho)) $$

   q lies on the same side of every bound between two codes, or on it, as RN(x / u) does: before its last rounding it is
   wrong by less than 2^-46, and quotients that close to the middle between a bound (which has a short mantissa) and the
   next float need a u whose mantissa is 1 to 17 units from a short one. The tests go through these. So scales and codes
   of both targets are those of the rule, and only the choice is open. By the rule, the error of a target with scale s
   and values v is, with epsilon = 2^-24,

$$ \mathrm{error} = (s \, \mathrm{amax} / \mathrm{denominator})^2 \sum_i (v_i - q_i + \delta_i)^2 \, (1 + 8 \epsilon),
   \qquad |\delta_i| \le \epsilon (2 v_i + 3 q_i) \le 32 \epsilon $$

   Computed is sigma, the sum without the deltas. By Cauchy-Schwarz

$$ |\mathrm{error} \; (\mathrm{denominator} / \mathrm{amax})^2 - s^2 \sigma| \; \le \;
   s^2 \epsilon \, (256 \sqrt{\sigma} + 28 \sigma) \; \le \; s^2 \, 2^{-16} (\sigma + 1/2) $$

   and targets whose errors are farther apart than both bounds are chosen between as by the rule.

2. **Literally** otherwise: a near tie, a block too small for a normal scale, an expert of extreme size. Of normal
   weights one block in 3500 to 10000 is such. A program comes back to these when it is through with the rest, and
   then a thread holds a weight: they are few, and it is the last of them that the GPU waits for. Nor are their
   registers those of the quick loop, which needs 64, so that 32 programs share a multiprocessor.

Of the 22 instructions 7 a target are its quotient (2), its value (3: `_nearest`, without a table) and the square of
the difference (2). The rest is for two weights at a time or for blocks: the largest magnitude is found among pairs of
bfloat16, the conversion to E4M3 packs the codes and rounds both scales at once, signs come straight from the weights.

Source: the rule is that of `quantization`, the way to decide it this project's own. Division by a sum of two floats:
N. Brisebarre, J.-M. Muller, S. K. Raina, Accelerating correctly rounded floating-point division when the divisor is
known in advance, IEEE Transactions on Computers 53 (2004).
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, UInt8
from torch import Tensor

from ..quantization import (
    DENOMINATOR,
    FLOAT32_MAX,
    GROUP,
    MXFP8,
    NVFP4,
    check_columns,
    check_largest,
    check_weight,
    nvfp4_limit,
    stored_layout,
)
from . import FLOATS, INTERPRETED, axes, cdiv, expect, processors
from .approximate import reciprocal, with_sign

# Blocks that a program encodes at a time: quickly, one warp in which a thread holds a whole block; and literally.
LANES, PART = (512, 256) if INTERPRETED else (32, 2)
MOST_TILES = 8  # times LANES blocks
RESIDENT = 1 if INTERPRETED else 32  # programs that a multiprocessor holds at a time
WAVES = 4  # of programs, at least, if one has several tiles: who comes late costs a part of one
SIXTH, SIXTH_REST = tl.constexpr(0.1666666716337204), tl.constexpr(-4.967053879312289e-09)  # 1/6: see `_inverse`
BAD_SCALE = 255  # E8M0's NaN
OUTER = tl.constexpr(DENOMINATOR)


# ---------------------------------------------------------------- arithmetic


@triton.jit
@no_type_check
def _nearest(x, LEAST: tl.constexpr, BITS: tl.constexpr):
    """x >= 0 on the grid of floats with BITS mantissa bits and least exponent log2 LEAST; ties to even.

    M = SHIFT max(x, 1.25 LEAST) is a multiple of the step at x, as a float has 24 bits, and M - x is of the size at
    which floats are multiples of just this step: subtracting rounds. (M + x could be a little too large for that, and
    M with LEAST itself too small.) In a tie M is an even multiple, so that the even one of both values results.
    """
    SHIFT: tl.constexpr = 2.0 ** (23 - BITS)
    size = tl.maximum(x, 1.25 * LEAST)
    return tl.fma(size, SHIFT, tl.fma(size, -SHIFT, x))


@triton.jit
@no_type_check
def _inverse(u):
    """1 / u as a sum of two floats, the first one correctly rounded: the step is that of `rcp.rn.f32`."""
    r = reciprocal(u)
    r = tl.fma(tl.fma(r * -1.0, u, 1.0), r, r)  # not -r, which would be 0 - r
    rest = tl.fma(r * -1.0, u, 1.0)
    return r, r * tl.fma(rest, rest, rest)  # its square counts: RN(0.5 / (2 - 2^-23)) is not 0.25


# Left alone, the compiler clears the sign of every second number where it unpacks them: an instruction too many.
_QUOTIENT = tl.constexpr("""{
.reg .f32 x, q;
abs.f32 x, $1;
mul.rn.f32 q, x, $3;
fma.rn.f32 $0, x, $2, q;
}""")


@triton.jit
@no_type_check
def _quotient(x, r, rest, ASSEMBLY: tl.constexpr):
    """|x| times a sum of two floats."""
    if ASSEMBLY:
        q = tl.inline_asm_elementwise(_QUOTIENT, "=f,f,f,f", [x, r, rest], tl.float32, True, 1)
    else:
        q = tl.fma(tl.abs(x), r, tl.abs(x) * rest)
    return q


@triton.jit
@no_type_check
def _halves(x):
    """[blocks, n] -> twice [blocks, n / 2]; no data move."""
    return tl.split(tl.permute(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), [0, 2, 1]))


@triton.jit
@no_type_check
def _e4m3_bits(x):
    """The byte of an E4M3 value that is not negative: of x * 2^-120 the upper bits."""
    return (x * 2.0**-120).to(tl.int32, bitcast=True) >> 20


@triton.jit
@no_type_check
def _quarters(x):
    """[blocks, 4] -> four times [blocks, 1], in order; no data move."""
    a, c = _halves(x)
    a, b = _halves(a)
    c, d = _halves(c)
    return a, b, c, d


# Eight values, v / 64, as a word of codes without signs. As E4M3 a value has its code at bits 4..2.
_CODES = tl.constexpr("""{
.reg .b16 low, high;
.reg .b32 even, odd;
cvt.rn.satfinite.e4m3x2.f32 low, $3, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $7, $5;
mov.b32 even, {low, high};
cvt.rn.satfinite.e4m3x2.f32 low, $4, $2;
cvt.rn.satfinite.e4m3x2.f32 high, $8, $6;
mov.b32 odd, {low, high};
shr.u32 even, even, 2;
shl.b32 odd, odd, 2;
or.b32 $0, even, odd;
}""")


@triton.jit
@no_type_check
def _codes(v, ASSEMBLY: tl.constexpr):
    """The codes of v [blocks, 8], E2M1 magnitudes / 64, as words [blocks]: the first one in the low bits."""
    if ASSEMBLY:
        v, w = _halves(v)
        a, b, c, d = _quarters(v)
        e, f, g, h = _quarters(w)
        args = [a, b, c, d, e, f, g, h]
        word = tl.reshape(
            tl.inline_asm_elementwise(_CODES, "=r,f,f,f,f,f,f,f,f", args, tl.int32, True, 1), [v.shape[0]]
        )
    else:
        code = (v * 2.0**-120).to(tl.int32, bitcast=True) >> 22
        word = tl.sum(code << 4 * tl.arange(0, 8)[None, :], 1)
    return word


# The word $1, with the signs of eight numbers whose upper halves are $2 to $5, two by two.
_SIGNS = tl.constexpr("""{
.reg .b32 first, last, signs, word;
prmt.b32 first, $2, $3, 0x7531;
prmt.b32 last, $4, $5, 0x7531;
prmt.b32 signs, first, last, 0x6420;
shr.u32 signs, signs, 4;
and.b32 signs, signs, 0x08080808;
or.b32 word, $1, signs;
prmt.b32 signs, first, last, 0x7531;
and.b32 signs, signs, 0x80808080;
or.b32 $0, word, signs;
}""")


@triton.jit
@no_type_check
def _with_signs(word, pairs, ASSEMBLY: tl.constexpr):
    """Words [blocks] with the signs of numbers of which pairs [blocks, 4] has the upper halves, two by two."""
    if ASSEMBLY:
        a, b, c, d = _quarters(pairs)
        args = [tl.reshape(word, a.shape), a, b, c, d]
        word = tl.reshape(tl.inline_asm_elementwise(_SIGNS, "=r,r,r,r,r,r", args, tl.int32, True, 1), word.shape)
    else:
        signs = (pairs >> 12 & 0x08) | (pairs >> 24 & 0x80)
        word |= tl.sum(signs << 8 * tl.arange(0, 4)[None, :], 1)
    return word


# Two numbers as E4M3, bytes of $0, and what they have become.
_SCALES = tl.constexpr("""{
.reg .b16 bytes, first, second;
.reg .b32 pair;
cvt.rn.satfinite.e4m3x2.f32 bytes, $4, $3;
cvt.rn.f16x2.e4m3x2 pair, bytes;
mov.b32 {first, second}, pair;
cvt.f32.f16 $1, first;
cvt.f32.f16 $2, second;
cvt.u32.u16 $0, bytes;
}""")


@triton.jit
@no_type_check
def _scales(six, four, ASSEMBLY: tl.constexpr):
    """The nearest scales to two ratios, as bytes of one number and as float32."""
    if ASSEMBLY:
        both, six, four = tl.inline_asm_elementwise(
            _SCALES, "=r,=f,=f,f,f", [six, four], (tl.int32, tl.float32, tl.float32), True, 1
        )
    else:
        six = _nearest(tl.minimum(six, 448.0), 0.015625, 3)
        four = _nearest(tl.minimum(four, 448.0), 0.015625, 3)
        both = _e4m3_bits(six) | _e4m3_bits(four) << 8
    return both, six, four


# The larger magnitudes of two pairs, or NaN; the signs are none.
_LARGER = tl.constexpr("max.NaN.xorsign.abs.bf16x2 $0, $1, $2;")


@triton.jit
@no_type_check
def _larger(p, q):
    return tl.inline_asm_elementwise(_LARGER, "=r,r,r", [p, q], tl.int32, True, 1)


# ---------------------------------------------------------------- NVFP4


@triton.jit
@no_type_check
def _eight(ptr, offset):
    """Eight numbers in a row [blocks, 8] as float32, and their upper halves two by two [blocks, 4]."""
    if ptr.dtype.element_ty == tl.bfloat16:  # the compiler would take three instructions for two of them
        words = ptr.to(tl.pointer_type(tl.int32)) + (offset // 2)[:, None] + tl.arange(0, 4)[None, :]
        pairs = tl.load(words)
        x = tl.reshape(tl.join(pairs << 16, pairs & -0x10000), [offset.shape[0], 8]).to(tl.float32, bitcast=True)
    else:
        x = tl.load(ptr + offset[:, None] + tl.arange(0, 8)[None, :]).to(tl.float32)
        even, odd = tl.split(tl.reshape(x.to(tl.int32, bitcast=True), [offset.shape[0], 4, 2]))
        pairs = (even >> 16 & 0xFFFF) | (odd & -0x10000)
    return x, pairs


@triton.jit
@no_type_check
def _blocks(ptr, block, ASSEMBLY: tl.constexpr):
    """Both halves of blocks as in `_eight`, and the bits of the largest magnitudes [blocks]: NaN is above infinity."""
    x, p = _eight(ptr, block * 16)
    y, q = _eight(ptr, block * 16 + 8)
    if ASSEMBLY and ptr.dtype.element_ty == tl.bfloat16:
        a, b = _halves(_larger(p, q))
        a, b = _halves(_larger(a, b))
        m = tl.reshape(_larger(a, b), [block.shape[0]])
        m = tl.maximum(m & 0x7FFF0000, m << 16 & 0x7FFF0000)
    else:
        m = tl.max(tl.maximum(x.to(tl.int32, bitcast=True) & 0x7FFFFFFF, y.to(tl.int32, bitcast=True) & 0x7FFFFFFF), 1)
    return x, y, p, q, m


@triton.jit
@no_type_check
def _largest(w_ptr, amax_ptr, SIZE, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """The largest magnitude of a part of an expert, as bits: NaN is above infinity."""
    expert = tl.program_id(1).to(tl.int64)
    start = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    w_ptr += expert * SIZE + start
    most = tl.zeros([BLOCK], tl.int32)
    for step in range(STEPS):
        i = step * BLOCK + tl.arange(0, BLOCK)
        x = tl.load(w_ptr + i, mask=i < SIZE - start, other=0.0).to(tl.float32)
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.atomic_max(amax_ptr + expert, tl.max(most, 0), sem="relaxed")


@triton.jit
@no_type_check
def _by_the_rule(x, m, target, amax, denominator, outer):
    """Scale, values, and error of magnitudes [blocks, 16], as `quantization` computes them: step by step."""
    scale = _nearest(tl.minimum(tl.div_rn(tl.div_rn(m, target) * denominator, amax), 448.0), 0.015625, 3)
    unit = (scale * outer)[:, None]
    v = tl.where(unit > 0, _nearest(tl.minimum(tl.div_rn(x, unit), 6.0), 1.0, 1), 0.0)
    error = tl.div_rn(v * scale[:, None] * amax, denominator) - x
    error, other = _halves(error * error)
    error, other = _halves(error + other)
    error, other = _halves(error + other)
    error, other = _halves(error + other)
    return scale, v, tl.reshape(error + other, [x.shape[0]])


@triton.jit
@no_type_check
def _literally(w_ptr, code_ptr, scale_ptr, block, amax, denominator, outer):
    """Encode a few blocks, a weight a thread."""
    w = tl.load(w_ptr + block[:, None] * 16 + tl.arange(0, 16)[None, :]).to(tl.float32)
    x = tl.abs(w)
    m = tl.max(x, 1)
    six, v6, error6 = _by_the_rule(x, m, 6.0, amax, denominator, outer)
    four, v4, error4 = _by_the_rule(x, m, 4.0, amax, denominator, outer)
    take_four = error4 < error6
    scale, v = tl.where(take_four, four, six), tl.where(take_four[:, None], v4, v6)
    code = (v * 2.0**-126).to(tl.int32, bitcast=True) >> 22 | (w.to(tl.int32, bitcast=True) >> 28 & 8)
    code = tl.where((scale * outer > 0)[:, None], code, 0)  # where there is no unit there is no sign
    low, high = tl.split(tl.reshape(code, [block.shape[0], 8, 2]))
    pairs = code_ptr.to(tl.pointer_type(tl.uint8)) + block[:, None] * 8 + tl.arange(0, 8)[None, :]
    tl.store(pairs, (low | high << 4).to(tl.uint8))
    tl.store(scale_ptr + block, _e4m3_bits(scale).to(tl.uint8))


@triton.jit
@no_type_check
def _half(x, r, rest, ASSEMBLY: tl.constexpr):
    """Words of x [blocks, 8], without signs; quotients less values, / 64, as two tensors [blocks, 4]."""
    q = _quotient(x, r[:, None], rest[:, None], ASSEMBLY)
    v = _nearest(q, 0.015625, 1)
    a, b = _halves(q - v)
    return _codes(v, ASSEMBLY), a, b


@triton.jit
@no_type_check
def _at_scale(x, y, scale, outer, ASSEMBLY: tl.constexpr):
    """Words of both halves, without signs, and nearly the sum of squared errors, in units of 64 `outer`."""
    r, rest = _inverse(scale * (64 * outer))
    v, a, b = _half(x, r, rest, ASSEMBLY)
    w, c, d = _half(y, r, rest, ASSEMBLY)
    return v, w, tl.sum(tl.fma(d, d, tl.fma(c, c, tl.fma(b, b, a * a))), 1)


@triton.jit
@no_type_check
def _quickly(x, y, m, r, rest, denominator, outer, ASSEMBLY: tl.constexpr):
    """Words of both halves, without signs, and scale bytes; and for which blocks they are certain."""
    ratio = _quotient(_quotient(m, SIXTH, SIXTH_REST, False) * denominator, r, rest, False)
    other = _quotient(m * (denominator * 0.25), r, rest, False)
    both, six, four = _scales(ratio, other, ASSEMBLY)
    v6, w6, error6 = _at_scale(x, y, six, outer, ASSEMBLY)
    v4, w4, error4 = _at_scale(x, y, four, outer, ASSEMBLY)
    square6, square4 = six * six, four * four
    error6, error4 = error6 * square6, error4 * square4
    bound = tl.fma(square6 + square4, 2.0**-29, (error6 + error4) * 2.0**-16)
    take_four = error4 < error6
    v, w = tl.where(take_four, v4, v6), tl.where(take_four, w4, w6)
    # A scale of 448 for both leaves no difference. A smaller one than normal may be rounded far: quotients reach 8.
    certain = (tl.abs(error6 - error4) > bound) & (ratio >= 0.015625)
    return v, w, tl.where(take_four, both >> 8, both & 255), certain


@triton.jit
@no_type_check
def _bits_of_either(a, b):
    return a | b


@triton.jit(do_not_specialize=["BLOCKS"])
@no_type_check
def _nvfp4(
    w_ptr, code_ptr, scale_ptr, amax_ptr, denominator, BLOCKS,
    LANES: tl.constexpr, PART: tl.constexpr, TILES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """TILES times LANES blocks of an expert. Compiled without contraction: a product that is added must be rounded."""
    expert = tl.program_id(1).to(tl.int64)
    amax = tl.load(amax_ptr + expert)
    ordinary = (amax > 2.0**-60) & (amax < 2.0**60) & (denominator >= 1) & (denominator < 2.0**20)
    amax = tl.where(amax > 0, amax, 1.0)  # a zero expert: 0 / 0 would be NaN
    outer = tl.div_rn(amax, denominator)
    r, rest = _inverse(amax)
    r = tl.where(ordinary, r, float("nan"))  # no ratio is certain
    # No masks: the last program starts earlier instead, and writes again what its neighbour writes.
    start = tl.maximum(tl.minimum(tl.program_id(0) * (LANES * TILES), BLOCKS - LANES * TILES), 0)
    first, lanes = expert * BLOCKS + start, tl.minimum(tl.arange(0, LANES), BLOCKS - 1)
    w_ptr, code_ptr, scale_ptr = w_ptr + first * 16, code_ptr + first * 2, scale_ptr + first
    doubts = tl.zeros([LANES], tl.int32)  # a bit for each tile
    for tile in tl.range(TILES, loop_unroll_factor=min(2, TILES)):
        at = tile * LANES
        x, y, p, q, m = _blocks(w_ptr + at * 16, lanes, ASSEMBLY)
        v, w, byte, certain = _quickly(x, y, m.to(tl.float32, bitcast=True), r, rest, denominator, outer, ASSEMBLY)
        words = tl.join(_with_signs(v, p, ASSEMBLY), _with_signs(w, q, ASSEMBLY))
        pairs = code_ptr + at * 2 + lanes[:, None] * 2 + tl.arange(0, 2)[None, :]
        tl.store(pairs, words, mask=certain[:, None])
        tl.store(scale_ptr + at + lanes, byte.to(tl.uint8), mask=certain)
        doubts = tl.where(certain, doubts, doubts | 1 << tile)
    if tl.reduce(doubts, 0, _bits_of_either) != 0:
        for tile in range(TILES):
            parts = tl.reduce((doubts >> tile & 1) << tl.arange(0, LANES) // PART, 0, _bits_of_either)
            for part in range(LANES // PART):
                if parts >> part & 1:
                    block = tl.minimum(part * PART + tl.arange(0, PART), BLOCKS - 1) + tile * LANES
                    _literally(w_ptr, code_ptr, scale_ptr, block, amax, denominator, outer)


@triton.jit(do_not_specialize=["BLOCKS"])
@no_type_check
def _fake_nvfp4(x_ptr, out_ptr, BLOCKS, LANES: tl.constexpr, ASSEMBLY: tl.constexpr):
    """One token: six is the only target, the outer scale its own."""
    x_ptr += tl.program_id(0).to(tl.int64) * BLOCKS * 16
    out_ptr += tl.program_id(0).to(tl.int64) * BLOCKS * 16
    lanes = tl.arange(0, LANES)
    most = tl.zeros([LANES], tl.int32)
    for start in range(0, BLOCKS, LANES):
        _, _, _, _, m = _blocks(x_ptr, tl.minimum(start + lanes, BLOCKS - 1), ASSEMBLY)
        most = tl.maximum(most, m)
    amax = tl.max(most).to(tl.float32, bitcast=True)
    ordinary = (amax > 2.0**-60) & (amax < 2.0**60)
    outer = tl.where(amax < float("inf"), tl.div_rn(amax, OUTER), float("nan"))
    amax = tl.where(amax > 0, amax, 1.0)
    a, rest = _inverse(amax)
    for start in range(0, BLOCKS, LANES):
        block = tl.minimum(start + lanes, BLOCKS - 1)
        x, y, _, _, m = _blocks(x_ptr, block, ASSEMBLY)
        m = m.to(tl.float32, bitcast=True)
        ratio = _quotient(_quotient(m, SIXTH, SIXTH_REST, False) * OUTER, a, rest, False)
        if ordinary & (tl.min(ratio, 0) >= 0.015625):
            scale = _nearest(tl.minimum(ratio, 448.0), 0.015625, 3)[:, None]
            r, r_rest = _inverse(scale * outer)
            v = with_sign(_nearest(_quotient(x, r, r_rest, ASSEMBLY), 1.0, 1), x)
            w = with_sign(_nearest(_quotient(y, r, r_rest, ASSEMBLY), 1.0, 1), y)
        else:
            scale = tl.div_rn(tl.div_rn(m, 6.0) * OUTER, amax)
            scale = _nearest(tl.minimum(scale, 448.0), 0.015625, 3)[:, None]
            unit = scale * tl.div_rn(amax, OUTER)
            v = with_sign(_nearest(tl.minimum(tl.div_rn(tl.abs(x), unit), 6.0), 1.0, 1), x)
            w = with_sign(_nearest(tl.minimum(tl.div_rn(tl.abs(y), unit), 6.0), 1.0, 1), y)
            v, w = tl.where(unit > 0, v, 0.0), tl.where(unit > 0, w, 0.0)
        both = tl.reshape(tl.permute(tl.join(v * scale * outer, w * scale * outer), [0, 2, 1]), [LANES, 16])
        at = block[:, None] * 16 + tl.arange(0, 16)[None, :]
        tl.store(out_ptr + at, both.to(out_ptr.dtype.element_ty))


# ---------------------------------------------------------------- MXFP8


@triton.jit
@no_type_check
def _mxfp8_round(x):
    """E4M3 magnitudes of x [blocks, 32], E8M0 bytes, the blocks' largest magnitudes as bits."""
    bits = x.to(tl.int32, bitcast=True) & 0x7FFFFFFF
    m = tl.max(bits, 1)
    byte = tl.where(m > 0x7F800000, 0, tl.maximum((m >> 23) - 8, 0))  # NaN: 0, as the comparison there gives
    scaled = bits.to(tl.float32, bitcast=True) * ((254 - byte) << 23).to(tl.float32, bitcast=True)[:, None]
    return _nearest(tl.where(scaled > 448, 448.0, scaled), 0.015625, 3), byte, m


@triton.jit
@no_type_check
def _mxfp8(w_ptr, value_ptr, scale_ptr, BLOCKS, LANES: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * LANES
    lanes = tl.arange(0, LANES)
    inside = lanes < BLOCKS - start
    at = lanes[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(w_ptr + start * 32 + at, mask=inside[:, None], other=0.0).to(tl.float32)
    value, byte, m = _mxfp8_round(x)
    code = _e4m3_bits(value) | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)
    tl.store(value_ptr + start * 32 + at, code.to(tl.uint8), mask=inside[:, None])
    byte = tl.where(m < 0x7F800000, byte, 255)
    tl.store(scale_ptr + start + lanes, byte.to(tl.uint8), mask=inside)


@triton.jit
@no_type_check
def _fake_mxfp8(x_ptr, out_ptr, BLOCKS, LANES: tl.constexpr):
    start = tl.program_id(0).to(tl.int64) * LANES
    lanes = tl.arange(0, LANES)
    inside = (lanes < BLOCKS - start)[:, None]
    at = start * 32 + lanes[:, None] * 32 + tl.arange(0, 32)[None, :]
    x = tl.load(x_ptr + at, mask=inside, other=0.0).to(tl.float32)
    value, byte, m = _mxfp8_round(x)
    scale = tl.where(byte == 0, 0x00400000, byte << 23).to(tl.float32, bitcast=True)
    scale = tl.where(m == 0x7F800000, float("nan"), scale)  # an infinity would saturate to a finite number
    tl.store(out_ptr + at, with_sign(value * scale[:, None], x).to(out_ptr.dtype.element_ty), mask=inside)


# ---------------------------------------------------------------- the functions of `quantization`


def largest(w: Float[Tensor, "E N K"]) -> Float[Tensor, " E"]:
    """Each expert's largest magnitude, as float32; NaN if it holds one.

    Raises:
        InputError: see `expect`.
    """
    axes("largest", "w", w, 3)
    expect("largest", FLOATS, w=(w, w.shape))
    w = w.contiguous()
    size, block, steps = w[0].numel(), 4096, 8
    amax = torch.zeros(len(w), dtype=torch.int32, device=w.device)
    _largest[(cdiv(size, block * steps), len(w))](w, amax, size, BLOCK=block, STEPS=steps)
    return amax.view(torch.float32)


def nvfp4_encode(
    w: Float[Tensor, "E N K"], amax: Float[Tensor, " E"], denominator: float = DENOMINATOR
) -> tuple[UInt8[Tensor, "E N half"], Float[Tensor, "E N blocks"]]:
    """Twin of `quantization.nvfp4_encode`, one pass over w, but of a block with NaN the codes and scale are not its.

    Raises:
        InputError: columns that are no whole blocks; see `expect`.
    """
    E, N, K = axes("nvfp4_encode", "w", w, 3)
    check_columns(NVFP4, w)
    expect("nvfp4_encode", FLOATS, w=(w, w.shape))
    expect("nvfp4_encode", (torch.float32,), amax=(amax, (E,)))
    codes = torch.empty(E, N, K // 2, dtype=torch.uint8, device=w.device)
    scales = torch.empty(E, N, K // GROUP[NVFP4], dtype=torch.uint8, device=w.device)
    blocks = scales[0].numel()
    tiles = _tiles(E, blocks, w.device)
    _nvfp4[(cdiv(blocks, LANES * tiles), E)](
        _aligned(w), codes.view(torch.int32), scales, amax.contiguous(), denominator, blocks, LANES=LANES, PART=PART,
        TILES=tiles, ASSEMBLY=_converts(w.device), num_warps=1, maxnreg=64, enable_fp_fusion=False,
    )  # fmt: skip
    return codes, scales.view(torch.float8_e4m3fn)


def nvfp4_quantize(
    w: Tensor, denominator: float = DENOMINATOR, name: str = "weight"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Twin of `quantization.nvfp4_quantize`: w [E, N, K] is read twice, first for the maxima.

    Raises:
        InputError: as there; see `expect`.
    """
    limit = nvfp4_limit(denominator, name)
    check_weight(NVFP4, w, name)
    expect("nvfp4_quantize", FLOATS, w=(w, w.shape))
    amax = largest(w)
    for expert, most in enumerate(amax.tolist()):
        check_largest(most, limit, expert, name)
    return *nvfp4_encode(w, amax, denominator), amax, torch.full((), denominator, dtype=torch.float32, device=w.device)


def mxfp8_encode(w: Float[Tensor, "E N K"]) -> tuple[Float[Tensor, "E N K"], UInt8[Tensor, "E N blocks"]]:
    """Twin of `quantization.mxfp8_encode`, but blocks with NaN or infinity get the scale NaN.

    Raises:
        InputError: columns that are no whole blocks; see `expect`.
    """
    axes("mxfp8_encode", "w", w, 3)
    check_columns(MXFP8, w)
    expect("mxfp8_encode", FLOATS, w=(w, w.shape))
    values = torch.empty(w.shape, dtype=torch.uint8, device=w.device)
    scales = torch.empty(*w.shape[:-1], w.shape[-1] // GROUP[MXFP8], dtype=torch.uint8, device=w.device)
    blocks, lanes = scales.numel(), 128
    _mxfp8[(cdiv(blocks, lanes),)](w.contiguous(), values, scales, blocks, LANES=lanes, enable_fp_fusion=False)
    return values.view(torch.float8_e4m3fn), scales


def mxfp8_quantize(w: Tensor, name: str = "weight") -> tuple[Tensor, Tensor]:
    """Twin of `quantization.mxfp8_quantize`.

    Raises:
        InputError: as there; see `expect`.
    """
    check_weight(MXFP8, w, name)
    values, scales = mxfp8_encode(w)
    for expert in (scales == BAD_SCALE).flatten(1).any(1).nonzero().flatten().tolist():
        check_largest(w[expert].abs().amax().item(), FLOAT32_MAX, expert, name)
    return values, scales


def quantize_stored(quantisation: str, w: Tensor, name: str = "weight") -> dict[str, Tensor]:
    """Twin of `quantization.quantize_stored`.

    Raises:
        InputError: as there; see `expect`.
    """
    tensors = nvfp4_quantize(w, name=name) if quantisation == NVFP4 else mxfp8_quantize(w, name)
    return dict(zip(stored_layout(quantisation, tuple(w.shape), name), tensors, strict=True))


def fake_nvfp4(x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """Twin of `quantization.fake_nvfp4`.

    Raises:
        InputError: as there; see `expect`.
    """
    check_columns(NVFP4, x)
    expect("fake_nvfp4", FLOATS, x=(x, x.shape))
    x = _aligned(x)
    out, blocks = torch.empty_like(x), x.shape[-1] // GROUP[NVFP4]
    if x.numel():
        _fake_nvfp4[(x.numel() // x.shape[-1],)](
            x, out, blocks, LANES=64, ASSEMBLY=_converts(x.device), num_warps=2, enable_fp_fusion=False
        )
    return out


def fake_mxfp8(x: Float[Tensor, "*rows K"]) -> Float[Tensor, "*rows K"]:
    """Twin of `quantization.fake_mxfp8`.

    Raises:
        InputError: as there; see `expect`.
    """
    check_columns(MXFP8, x)
    expect("fake_mxfp8", FLOATS, x=(x, x.shape))
    x = x.contiguous()
    out, blocks, lanes = torch.empty_like(x), x.numel() // GROUP[MXFP8], 64
    if blocks:
        _fake_mxfp8[(cdiv(blocks, lanes),)](x, out, blocks, LANES=lanes, enable_fp_fusion=False)
    return out


def _tiles(experts: int, blocks: int, device: torch.device) -> int:
    """How many times LANES blocks a program encodes: as many as leave programs for a few waves."""
    tiles = experts * cdiv(blocks, LANES) // (WAVES * RESIDENT * processors(device))
    return max(1, min(tiles, MOST_TILES, blocks // LANES))


def _aligned(w: Tensor) -> Tensor:
    """w in one piece, from an address that suits loads of two bfloat16 and more."""
    w = w.contiguous()
    return w if w.data_ptr() % 16 == 0 else w.clone()


def _converts(device: torch.device) -> bool:
    """Whether the GPU has the conversion to E4M3."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)
