"""Exercises of 05_quantization: a check for each, and a worked solution."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from inkling_ref import quantization as qt

GRID = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def _weights(seed: int, shape: tuple[int, ...]) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 0.02


# ---------------------------------------------------------------- 1: a float to an E2M1 code


def check_1(candidate: Callable) -> None:
    """candidate(x: float) -> int, the E2M1 code 0..15."""
    for code in range(16):
        value = GRID[code & 7] * (-1 if code & 8 else 1)
        found = candidate(math.copysign(value, -1 if code & 8 else 1))
        assert found == code, f"{value} is code {code} itself, got {found} (the sign is bit 3)"
    for x, code in ((0.25, 0), (0.75, 2), (1.25, 2), (1.75, 4), (2.5, 4), (3.5, 6), (5.0, 6)):
        found = candidate(x)
        assert found == code, f"{x} lies half-way between two codes: the even one is {code}, got {found}"
    for x, code in ((5.01, 7), (6.7, 7), (1e9, 7), (-2.6, 13), (-0.1, 8), (2.49, 4), (0.26, 1)):
        found = candidate(x)
        assert found == code, f"{x}: expected code {code}, got {found}"


def solution_1(x: float) -> int:
    """The grid has eight magnitudes: take the nearest, and of two equally near ones the even code.

    Sorting by (distance, oddness) says exactly that. Saturation needs no line of its own: beyond 6 the nearest
    magnitude is 6. copysign sees the sign of -0.0, which a comparison with zero does not.
    """
    code = min(range(8), key=lambda c: (abs(abs(x) - GRID[c]), c % 2))
    return code + (8 if math.copysign(1, x) < 0 else 0)


# ---------------------------------------------------------------- 2: read NVFP4 without loading a library for it


def check_2(candidate: Callable) -> None:
    """candidate(codes, scales, amax, denominator) -> float32 weights [E, N, K]."""
    w = _weights(1, (3, 5, 48))
    w[1] *= 7  # experts of different sizes: amax is one number per expert
    stored = qt.nvfp4_quantize(w, denominator=1536.0)
    found, wanted = candidate(*stored), qt.nvfp4_dequantize(*stored)
    shape = tuple(found.shape) if isinstance(found, Tensor) else found
    assert shape == tuple(wanted.shape), f"expected a tensor {tuple(wanted.shape)}, got {shape}"
    swapped = wanted.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    assert not torch.allclose(found, swapped), "neighbouring columns are swapped: the even column is the LOW nibble"
    ratio = (found / wanted).nanmean().item()
    assert torch.allclose(found, wanted, rtol=1e-5), (
        f"values differ, on average by a factor {ratio:.3g}: look at the stored denominator, the expert's amax and "
        "at which 16 columns share a scale"
    )


def solution_2(codes: Tensor, scales: Tensor, amax: Tensor, denominator: Tensor) -> Tensor:
    """Low nibble first; a table of 16 values; one scale for 16 columns; one outer factor for an expert."""
    table = torch.tensor([*GRID, *(-x for x in GRID)])
    values = table[torch.stack((codes & 15, codes >> 4), dim=-1).flatten(-2).long()]
    return values * scales.float().repeat_interleave(16, dim=-1) * (amax / denominator)[:, None, None]


# ---------------------------------------------------------------- 3: bytes of a checkpoint


def check_3(candidate: Callable) -> None:
    """candidate(quantisation: str, E, N, K) -> bytes of a stored weight with its companions."""
    for quantisation in (qt.NVFP4, qt.MXFP8):
        for shape in ((3, 5, 64), (16, 128, 128), (384, 4608, 4608)):
            layout = qt.stored_layout(quantisation, shape)
            wanted = sum(dtype.itemsize * math.prod(size) for dtype, size in layout.values())
            found = candidate(quantisation, *shape)
            assert found == wanted, f"{quantisation} {shape}: {wanted} bytes are stored, got {found}"


def solution_3(quantisation: str, E: int, N: int, K: int) -> int:
    """NVFP4: half a byte a weight, a byte for 16, a float32 for an expert, and one for the denominator."""
    weights = E * N * K
    if quantisation == qt.NVFP4:
        return weights // 2 + weights // 16 + 4 * E + 4
    return weights + weights // 32


# ---------------------------------------------------------------- 4: the shared exponent, without a logarithm


def check_4(candidate: Callable) -> None:
    """candidate(m: Tensor) -> int tensor: the E8M0 byte of blocks whose largest magnitudes are m > 0."""
    one = torch.tensor(1.0)
    below = torch.nextafter(one, torch.tensor(0.0))  # 1 - 2^-24
    for m in (one, below, one * 448, 8 * below, 1.7e-3 * one, 2.0**-20 * below):
        block = torch.zeros(1, 1, 32)
        block[0, 0, 0] = m
        wanted, found = qt.mxfp8_quantize(block)[1].flatten().tolist(), candidate(m.reshape(1))
        found = found.tolist() if isinstance(found, Tensor) else found
        assert found == wanted, f"largest magnitude {m.item()!r}: {wanted}, got {found} (does a logarithm round up?)"


def solution_4(m: Tensor) -> Tensor:
    """frexp reads the exponent off the bits: m = f * 2^e with 1/2 <= f < 1, so floor(log2 m) is e - 1, always."""
    return torch.frexp(m).exponent - 1 - 8 + 127


# ---------------------------------------------------------------- 5: name the fault of a port


FAULTS = ("none", "nibbles", "outer", "scales")


def check_5(candidate: Callable) -> None:
    """candidate(right, wrong) -> one of FAULTS; both are decoded weights [E, N, K]."""
    w = _weights(2, (2, 7, 64))
    codes, scales, amax, denominator = qt.nvfp4_quantize(w)
    right = qt.nvfp4_dequantize(codes, scales, amax, denominator)
    as_bytes = scales.view(torch.uint8)
    cases = {
        "none": right.clone(),
        "nibbles": qt.nvfp4_dequantize(codes >> 4 | codes << 4, scales, amax, denominator),
        "outer": qt.nvfp4_dequantize(codes, scales, amax, torch.tensor(1536.0)),
        "scales": right * (qt.e8m0_value(as_bytes) / scales.float()).repeat_interleave(16, dim=-1),
    }
    for fault, wrong in cases.items():
        found = candidate(right, wrong)
        assert found == fault, f"expected {fault!r}, got {found!r}"
    found = candidate(right, qt.nvfp4_dequantize(codes, scales, amax * torch.tensor([1.0, 3.0]), denominator))
    assert found == "outer", f"one wrong amax changes one expert by a factor: expected 'outer', got {found!r}"


def solution_5(right: Tensor, wrong: Tensor) -> str:
    """Ask what stays the same: everything; everything but the order of neighbours; the ratios within an expert.

    Only what is left can be the block scales, which change the ratio of one block to the next.
    """
    if torch.equal(right, wrong):
        return "none"
    if torch.allclose(right.unflatten(-1, (-1, 2)).flip(-1).flatten(-2), wrong):
        return "nibbles"
    ratio = (wrong / right).flatten(1)  # NaN where a weight is zero
    middle = ratio.nanmedian(dim=1, keepdim=True).values
    is_constant = ((ratio - middle).abs() <= 1e-3 * middle) | ratio.isnan()
    return "outer" if is_constant.all() else "scales"
