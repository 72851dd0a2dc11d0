r"""NVFP4 (four over six) and MXFP8 encoders, and quantised activations: the bits of `quantization`.

Memory moves a bfloat16 weight and its 0.56 bytes of NVFP4 in the time of 18 instructions of an H200. The rule of
`quantization`, taken literally, is a hundred: four divisions a weight, and each operation rounds where the rule says
so. `_nvfp4`, in which a thread holds a whole block, takes 28, in two steps.

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
   weights one block in 3500 to 10000 is such, and takes the 31 others of its warp with it.

Rounding to a grid of floats needs no table. The values of one exponent are multiples of a step; adding 1.5 * 2^23 steps
and taking them away again rounds to one, ties to even.

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
from . import FLOATS, INTERPRETED, axes, expect
from .approximate import reciprocal, with_sign

# Blocks that a program encodes at a time, and how often: one warp, in which a thread holds a whole block.
LANES, TILES = (512, 1) if INTERPRETED else (32, 8)
SIXTH, SIXTH_REST = tl.constexpr(0.1666666716337204), tl.constexpr(-4.967053879312289e-09)  # 1/6: see `_inverse`
BAD_SCALE = 255  # E8M0's NaN
OUTER = tl.constexpr(DENOMINATOR)


# ---------------------------------------------------------------- arithmetic


@triton.jit
@no_type_check
def _nearest(x, LEAST: tl.constexpr, BITS: tl.constexpr):
    """x on the grid of floats with BITS mantissa bits and least exponent log2 LEAST; ties to even. -0 becomes 0."""
    power = (tl.maximum(tl.abs(x), LEAST).to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    SHIFT: tl.constexpr = 1.5 * 2.0 ** (23 - BITS)  # in steps, relative to the power: both products are exact
    return tl.fma(power, -SHIFT, tl.fma(power, SHIFT, x))


@triton.jit
@no_type_check
def _signed(x, of):
    """x, negative where `of` is: a zero too, which has lost its sign."""
    sign = of.to(tl.int32, bitcast=True) & -0x80000000
    return (x.to(tl.int32, bitcast=True) | sign).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def _inverse(u):
    """1 / u as a sum of two floats, the first one correctly rounded: the step is that of `rcp.rn.f32`."""
    r = reciprocal(u)
    r = tl.fma(tl.fma(-r, u, 1.0), r, r)
    rest = tl.fma(-r, u, 1.0)
    return r, r * tl.fma(rest, rest, rest)


@triton.jit
@no_type_check
def _quotient(x, r, rest):
    return tl.fma(x, r, x * rest)


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


# Eight values of a row of codes, v / 64, as one word. As E4M3 a value has its sign at bit 7 and its code at bits 4..2.
_WORD = tl.constexpr("""{
.reg .b16 low, high;
.reg .b32 even, odd, part, word;
cvt.rn.satfinite.e4m3x2.f32 low, $3, $1;
cvt.rn.satfinite.e4m3x2.f32 high, $7, $5;
mov.b32 even, {low, high};
cvt.rn.satfinite.e4m3x2.f32 low, $4, $2;
cvt.rn.satfinite.e4m3x2.f32 high, $8, $6;
mov.b32 odd, {low, high};
shr.u32 part, even, 2;
and.b32 word, part, 0x07070707;
shr.u32 part, even, 4;
and.b32 part, part, 0x08080808;
or.b32 word, word, part;
shl.b32 part, odd, 2;
and.b32 part, part, 0x70707070;
or.b32 word, word, part;
and.b32 part, odd, 0x80808080;
or.b32 $0, word, part;
}""")


@triton.jit
@no_type_check
def _code(v):
    bits = (v * 2.0**-120).to(tl.int32, bitcast=True)
    return (bits >> 22 & 7) | (bits >> 28 & 8)


@triton.jit
@no_type_check
def _word(v, ASSEMBLY: tl.constexpr):
    """The codes of v [blocks, 8], E2M1 values / 64, as words [blocks]: the first one in the low bits."""
    a, e = _halves(v)
    a, c = _halves(a)
    e, g = _halves(e)
    a, b = _halves(a)
    c, d = _halves(c)
    e, f = _halves(e)
    g, h = _halves(g)
    if ASSEMBLY:
        word = tl.inline_asm_elementwise(_WORD, "=r,f,f,f,f,f,f,f,f", [a, b, c, d, e, f, g, h], tl.int32, True, 1)
    else:
        low = _code(a) | _code(b) << 4 | _code(c) << 8 | _code(d) << 12
        word = low | _code(e) << 16 | _code(f) << 20 | _code(g) << 24 | _code(h) << 28
    return tl.reshape(word, [v.shape[0]])


# ---------------------------------------------------------------- NVFP4


@triton.jit
@no_type_check
def _eight(ptr, offset, mask):
    """Eight numbers in a row [blocks, 8] as float32."""
    if ptr.dtype.element_ty == tl.bfloat16:  # the compiler would take three instructions for two of them
        words = ptr.to(tl.pointer_type(tl.int32)) + (offset // 2)[:, None] + tl.arange(0, 4)[None, :]
        pairs = tl.load(words, mask=mask[:, None], other=0)
        x = tl.reshape(tl.join(pairs << 16, pairs & -0x10000), [offset.shape[0], 8]).to(tl.float32, bitcast=True)
    else:
        x = tl.load(ptr + offset[:, None] + tl.arange(0, 8)[None, :], mask=mask[:, None], other=0.0).to(tl.float32)
    return x


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
def _by_the_rule(x, y, m, target, amax, denominator, outer):
    """Scale, values / 64 of both halves, and error, as `quantization` computes them: step by step."""
    scale = _nearest(tl.minimum(tl.div_rn(tl.div_rn(m, target) * denominator, amax), 448.0), 0.015625, 3)
    unit = (scale * outer)[:, None]
    v = tl.clamp(_nearest(tl.div_rn(x, unit), 1.0, 1), -6.0, 6.0)
    w = tl.clamp(_nearest(tl.div_rn(y, unit), 1.0, 1), -6.0, 6.0)
    v, w = tl.where(unit > 0, v, 0.0), tl.where(unit > 0, w, 0.0)
    error = tl.div_rn(v * scale[:, None] * amax, denominator) - x
    other = tl.div_rn(w * scale[:, None] * amax, denominator) - y
    error, other = _halves(error * error + other * other)
    error, other = _halves(error + other)
    error, other = _halves(error + other)
    return scale, v * 0.015625, w * 0.015625, tl.reshape(error + other, [x.shape[0]])


@triton.jit
@no_type_check
def _quickly(x, y, unit):
    """Values / 64 of both halves for 64 units, and nearly the sum of squared errors in that measure."""
    r, rest = _inverse(unit)
    p, q = _quotient(x, r[:, None], rest[:, None]), _quotient(y, r[:, None], rest[:, None])
    v, w = _nearest(p, 0.015625, 1), _nearest(q, 0.015625, 1)
    a, b = _halves(p - v)
    c, d = _halves(q - w)
    return v, w, tl.sum(tl.fma(d, d, tl.fma(c, c, tl.fma(b, b, a * a))), 1)


@triton.jit
@no_type_check
def _nvfp4(
    w_ptr, code_ptr, scale_ptr, amax_ptr, denominator, BLOCKS,
    LANES: tl.constexpr, TILES: tl.constexpr, ASSEMBLY: tl.constexpr,
):  # fmt: skip
    """A few blocks of an expert. Compiled without contraction: a product that is added must be rounded first."""
    expert = tl.program_id(1).to(tl.int64)
    amax = tl.load(amax_ptr + expert)
    ordinary = (amax > 2.0**-60) & (amax < 2.0**60) & (denominator >= 1) & (denominator < 2.0**20)
    amax = tl.where(amax > 0, amax, 1.0)  # a zero expert: 0 / 0 would be NaN
    outer = tl.div_rn(amax, denominator)
    r, rest = _inverse(amax)
    start = tl.program_id(0).to(tl.int64) * (LANES * TILES)
    left = tl.minimum(BLOCKS - start, LANES * TILES).to(tl.int32)
    first, lanes = expert * BLOCKS + start, tl.arange(0, LANES)
    w_ptr, code_ptr, scale_ptr = w_ptr + first * 16, code_ptr + first * 2, scale_ptr + first
    for tile in range(tl.cdiv(left, LANES)):
        block = tile * LANES + lanes
        inside = block < left
        x, y = _eight(w_ptr, block * 16, inside), _eight(w_ptr, block * 16 + 8, inside)
        m = tl.max(tl.maximum(tl.abs(x), tl.abs(y)), 1)
        ratio = _quotient(_quotient(m, SIXTH, SIXTH_REST) * denominator, r, rest)
        six = _nearest(tl.minimum(ratio, 448.0), 0.015625, 3)
        four = _nearest(tl.minimum(_quotient(m * 0.25 * denominator, r, rest), 448.0), 0.015625, 3)
        v6, w6, error6 = _quickly(x, y, six * (64 * outer))
        v4, w4, error4 = _quickly(x, y, four * (64 * outer))
        square6, square4 = six * six, four * four
        error6, error4 = error6 * square6, error4 * square4
        bound = tl.fma(square6 + square4, 2.0**-29, (error6 + error4) * 2.0**-16)
        # Equal scales, of 448, are a tie: 6 stays. Quotients reach 7, and saturate, with a scale that is rounded far.
        certain = ((tl.abs(error6 - error4) > bound) | (six == four)) & (ratio >= 0.015625) & (ratio < 460)
        if ordinary & (tl.min((certain | ~inside).to(tl.int32), 0) == 1):
            take_four = error4 < error6
            v, w = tl.where(take_four[:, None], v4, v6), tl.where(take_four[:, None], w4, w6)
        else:
            six, v6, w6, error6 = _by_the_rule(x, y, m, 6.0, amax, denominator, outer)
            four, v4, w4, error4 = _by_the_rule(x, y, m, 4.0, amax, denominator, outer)
            take_four = error4 < error6
            v, w = tl.where(take_four[:, None], v4, v6), tl.where(take_four[:, None], w4, w6)
        scale = tl.where(take_four, four, six)
        words = tl.join(_word(_signed(v, x), ASSEMBLY), _word(_signed(w, y), ASSEMBLY))
        words = tl.where((scale * outer > 0)[:, None], words, 0)  # where there is no unit there is no sign
        tl.store(code_ptr + block[:, None] * 2 + tl.arange(0, 2)[None, :], words, mask=inside[:, None])
        tl.store(scale_ptr + block, _e4m3_bits(scale).to(tl.uint8), mask=inside)


@triton.jit
@no_type_check
def _fake_nvfp4(x_ptr, out_ptr, COLUMNS, LANES: tl.constexpr):
    """One token: six is the only target, the outer scale its own."""
    x_ptr += tl.program_id(0).to(tl.int64) * COLUMNS
    out_ptr += tl.program_id(0).to(tl.int64) * COLUMNS
    at = tl.arange(0, LANES)[:, None] * 16 + tl.arange(0, 16)[None, :]
    most = tl.zeros([LANES, 16], tl.int32)
    for start in range(0, COLUMNS, LANES * 16):
        x = tl.load(x_ptr + start + at, mask=start + at < COLUMNS, other=0.0).to(tl.float32)
        most = tl.maximum(most, x.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    amax = tl.max(most).to(tl.float32, bitcast=True)
    outer = tl.where(amax < float("inf"), tl.div_rn(amax, OUTER), float("nan"))
    amax = tl.where(amax > 0, amax, 1.0)
    for start in range(0, COLUMNS, LANES * 16):
        inside = start + at < COLUMNS
        x = tl.load(x_ptr + start + at, mask=inside, other=0.0).to(tl.float32)
        scale = tl.div_rn(tl.div_rn(tl.max(tl.abs(x), 1), 6.0) * OUTER, amax)
        scale = _nearest(tl.minimum(scale, 448.0), 0.015625, 3)[:, None]
        unit = scale * tl.div_rn(amax, OUTER)
        value = tl.clamp(_nearest(tl.div_rn(x, unit), 1.0, 1), -6.0, 6.0)
        value = tl.where(unit > 0, _signed(value, x), 0.0) * scale * outer
        tl.store(out_ptr + start + at, value.to(out_ptr.dtype.element_ty), mask=inside)


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
    _largest[(triton.cdiv(size, block * steps), len(w))](w, amax, size, BLOCK=block, STEPS=steps)
    return amax.view(torch.float32)


def nvfp4_encode(
    w: Float[Tensor, "E N K"], amax: Float[Tensor, " E"], denominator: float = DENOMINATOR
) -> tuple[UInt8[Tensor, "E N half"], Float[Tensor, "E N blocks"]]:
    """Twin of `quantization.nvfp4_encode`, one pass over w.

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
    _nvfp4[(triton.cdiv(blocks, LANES * TILES), E)](
        _aligned(w), codes.view(torch.int32), scales, amax.contiguous(), denominator, blocks, LANES=LANES,
        TILES=TILES, ASSEMBLY=_converts(w.device), num_warps=1, enable_fp_fusion=False,
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
    _mxfp8[(triton.cdiv(blocks, lanes),)](w.contiguous(), values, scales, blocks, LANES=lanes, enable_fp_fusion=False)
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
    x = x.contiguous()
    out, columns = torch.empty_like(x), x.shape[-1]
    if x.numel():
        _fake_nvfp4[(x.numel() // columns,)](x, out, columns, LANES=64, enable_fp_fusion=False)
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
        _fake_mxfp8[(triton.cdiv(blocks, lanes),)](x, out, blocks, LANES=lanes, enable_fp_fusion=False)
    return out


def _aligned(w: Tensor) -> Tensor:
    """w in one piece, from an address that suits loads of two bfloat16 and more."""
    w = w.contiguous()
    return w if w.data_ptr() % 16 == 0 else w.clone()


def _converts(device: torch.device) -> bool:
    """Whether the GPU has the conversion to E4M3."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (8, 9)
