"""Exercises of 11_kernels: a check for each, and a worked solution."""

import itertools
import math
from collections.abc import Callable

import torch

# ---------------------------------------------------------------- 1: merging partial softmaxes


def _seen(scores: torch.Tensor, values: torch.Tensor) -> tuple[float, float, float]:
    if not len(scores):
        return -math.inf, 0.0, 0.0
    weights = (scores - scores.max()).exp()
    return float(scores.max()), float(weights.sum()), float(weights @ values)


def check_1(candidate: Callable) -> None:
    """candidate((m, Z, y), (m, Z, y)) -> (m, Z, y)."""
    generator = torch.Generator().manual_seed(0)
    scores, values = 30 * torch.randn(2, 11, generator=generator, dtype=torch.float64)
    for cut in (4, 1, 10, 0, 11):
        a, b = _seen(scores[:cut], values[:cut]), _seen(scores[cut:], values[cut:])
        for got, expected in zip(candidate(a, b), _seen(scores, values), strict=True):
            assert not math.isnan(got), "NaN: minus infinity minus itself, where one part has seen nothing?"
            assert math.isclose(got, expected, rel_tol=1e-9), f"parts of {cut} and {11 - cut} scores: {got}"
    nothing = (-math.inf, 0.0, 0.0)
    assert tuple(candidate(nothing, nothing)) == nothing, "two parts that have seen nothing"


def solution_1(a: tuple[float, float, float], b: tuple[float, float, float]) -> tuple[float, float, float]:
    """Both sums shrink from their own maximum to the common one; what has seen nothing weighs nothing."""
    m = max(a[0], b[0])
    shrink_a, shrink_b = (math.exp(x[0] - m) if x[0] > -math.inf else 0.0 for x in (a, b))
    return m, shrink_a * a[1] + shrink_b * b[1], shrink_a * a[2] + shrink_b * b[2]


# ---------------------------------------------------------------- 2: the sink belongs to the whole


def _sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def check_2(candidate: Callable) -> None:
    """candidate() -> (L_1, L_2, z)."""
    L_1, L_2, z = candidate()
    whole = math.log(math.exp(L_1) + math.exp(L_2))
    off = abs(_sigmoid(L_1 - z) - _sigmoid(whole - z))
    assert off > 0.4, f"the factors of the first piece differ by {off:.2f}"


def solution_2() -> tuple[float, float, float]:
    """The first piece weighs little beside the sink, and the second much: together they hardly lose anything."""
    return 0.0, 10.0, 5.0


def wrong_2() -> tuple[float, float, float]:
    """Two pieces of which the first is nearly all."""
    return 5.0, 0.0, 0.0


# ---------------------------------------------------------------- 3: rows in blocks of powers of two


def check_3(candidate: Callable) -> None:
    """candidate(D, most) -> blocks, powers of two, the largest first."""
    for D, most in itertools.product((1, 72, 128, 4608, 5000, 8191), (1, 2, 3)):
        blocks = list(candidate(D, most))
        assert blocks == sorted(blocks, reverse=True), f"{blocks}: the largest first"
        assert all(b > 0 and b & (b - 1) == 0 for b in blocks), f"{blocks}: powers of two"
        assert len(blocks) <= most, f"{blocks}: at most {most}"
        assert sum(blocks) >= D, f"{blocks}: {D} numbers do not fit"
        # The smallest number from D on with so few ones among its bits.
        least = next(total for total in itertools.count(D) if total.bit_count() <= most)
        assert sum(blocks) == least, f"{blocks}: {sum(blocks) - D} idle lanes, {least - D} are enough for {D}"


def solution_3(D: int, most: int) -> list[int]:
    """Take the highest bit of what is left, and at the end one block that holds all the rest."""
    blocks: list[int] = []
    while D > 0 and len(blocks) < most - 1:
        blocks.append(1 << (D.bit_length() - 1))
        D -= blocks[-1]
    if D > 0:
        blocks.append(1 << (D - 1).bit_length())
    return blocks
