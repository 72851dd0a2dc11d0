"""The hardware's own approximations of elementary functions, to about 2^-22, without the code that Triton puts around
them for results below 2^-126. They decide the time of kernels that do little else between reading and writing.

The interpreter, which has no inline assembly, takes Triton's functions.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl

from . import INTERPRETED, LOG2E

_APPROX = tl.constexpr(not INTERPRETED)
TO_BASE2 = tl.constexpr(LOG2E)


@triton.jit
@no_type_check
def exp2(x):
    """2^x."""
    if _APPROX:
        y = tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.exp2(x)
    return y


@triton.jit
@no_type_check
def log2(x):
    """The logarithm to base 2, to about 2^-22 absolutely near 1."""
    if _APPROX:
        y = tl.inline_asm_elementwise("lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = tl.log2(x)
    return y


@triton.jit
@no_type_check
def reciprocal(x):
    """1 / x."""
    if _APPROX:
        y = tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=f,f", [x], tl.float32, True, 1)
    else:
        y = 1 / x
    return y


@triton.jit
@no_type_check
def tanh_fraction(x, NEAR: tl.constexpr):
    """2 (1 - e) and 1 + e with e = exp(-|x|), whose quotient is twice tanh |x/2|.

    1 - e cancels near zero; below NEAR |x| (1 + e) takes its place, with more terms of the series if NEAR > 0.1.
    """
    x = tl.abs(x)
    e = exp2(x * -TO_BASE2)
    near = x * (1 + e)
    if NEAR > 0.1:
        x2 = x * x
        near *= 1 - x2 * (1 / 12 - x2 * (1 / 120 - x2 * (17 / 20160)))
    return tl.where(x < NEAR, near, 2 - 2 * e), 1 + e


@triton.jit
@no_type_check
def with_sign(x, of):
    """x, whose sign turns where that of `of` is negative."""
    sign = of.to(tl.int32, bitcast=True) & -0x80000000
    return (x.to(tl.int32, bitcast=True) ^ sign).to(tl.float32, bitcast=True)


@triton.jit
@no_type_check
def comparable(bits, most):
    """Bits of floats as integers in the same order: of negative ones all but the sign, `most`, are turned over."""
    return tl.where(bits < 0, bits ^ most, bits)


@triton.jit
@no_type_check
def tanh(x):
    """In float32 to the last few bits."""
    top, below = tanh_fraction(2 * x, 0.25)
    return with_sign(0.5 * top * reciprocal(below), x)


@triton.jit
@no_type_check
def swiglu(g, u, gate_rate, up_rate, quarter, NEAR: tl.constexpr):
    """cap(g) sigmoid(g) cap(u), three quotients over one denominator: instructions, not bytes, are what kernels run
    out of here.

    The rates are 2 / cap, `quarter` is gate_cap up_cap / 4; NEAR as in `tanh_fraction`. Gluon kernels call it too.
    """
    top_g, below_g = tanh_fraction(g * gate_rate, NEAR)
    top_u, below_u = tanh_fraction(u * up_rate, NEAR)
    below = below_g * below_u * (1 + exp2(g * -TO_BASE2))
    return with_sign(with_sign(quarter * top_g * top_u * reciprocal(below), g), u)


def near(dtype: torch.dtype) -> float:
    """NEAR of `swiglu` for results in `dtype`: one term of the series of tanh is enough for 16 bits."""
    return 0.25 if dtype == torch.float32 else 0.016
