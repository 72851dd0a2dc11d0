"""Exercises of 13_full_scale: a check for each, and a worked solution."""

from collections.abc import Callable, Sequence
from itertools import accumulate
from math import isclose
from operator import mul

from inkling_ref.parallel.plan import split


def check_1(candidate: Callable) -> None:
    """candidate(nbytes, flops, copy, product) -> the least seconds, and which unit is busy: "memory" or "matrix"."""
    cases = (8e9, 8e9, (2.0, "memory")), (4e9, 9e12, (3.0, "matrix")), (0, 6e12, (2.0, "matrix"))
    for nbytes, flops, expected in cases:
        seconds, unit = candidate(nbytes, flops, 4e9, 3e12)
        assert isclose(seconds, expected[0]), (
            f"{nbytes:g} bytes and {flops:g} FLOPs at 4e9 and 3e12 a second: expected {expected[0]} s, got {seconds}. "
            "Both units work at the same time; the slower one decides."
        )
        assert unit == expected[1], f"{nbytes:g} bytes, {flops:g} FLOPs: expected {expected[1]!r}, got {unit!r}"


def solution_1(nbytes: float, flops: float, copy: float, product: float) -> tuple[float, str]:
    """The memory and the matrix units work at the same time, so the longer of two times counts, and names the unit."""
    return max((nbytes / copy, "memory"), (flops / product, "matrix"))


def wrong_1(nbytes: float, flops: float, copy: float, product: float) -> tuple[float, str]:
    """One after the other."""
    return nbytes / copy + flops / product, "memory" if nbytes / copy > flops / product else "matrix"


def check_2(candidate: Callable) -> None:
    """candidate(acceptance) -> tokens that a pass gives; entry i: the share of drafts i that pass if all before did."""
    for acceptance, expected in (([], 1.0), ([0.5], 1.5), ([0.9, 0.8, 0.5], 2.98), ([1.0, 0.0, 1.0], 2.0)):
        found = candidate(acceptance)
        assert isclose(found, expected), (
            f"acceptance {acceptance}: expected {expected}, got {found}. A draft counts if it and all before it pass; "
            "one token comes from the target itself, whatever happens."
        )


def solution_2(acceptance: Sequence[float]) -> float:
    """Draft i is written with the product of the first i chances; the target's own token comes on top."""
    return 1 + sum(accumulate(acceptance, mul))


def wrong_2(acceptance: Sequence[float]) -> float:
    """As if a draft could pass after one that did not."""
    return 1 + sum(acceptance)


def check_3(candidate: Callable) -> None:
    """candidate(tokens_of, ranks) -> experts read by the mean rank and by the busiest, where experts lie in runs.

    tokens_of: for every expert, how many tokens chose it.
    """
    for tokens_of, ranks in (([1, 0, 2, 1, 0, 0], 3), ([5, 0, 0, 1], 2), ([1, 1, 1, 0, 0, 0, 3], 3), ([0, 0, 4], 3)):
        read = [sum(tokens_of[e] > 0 for e in run) for run in split(len(tokens_of), ranks)]
        expected = sum(read) / ranks, max(read)
        mean, busiest = candidate(list(tokens_of), ranks)
        assert (round(mean, 9), busiest) == (round(expected[0], 9), expected[1]), (
            f"tokens {tokens_of} on {ranks} ranks: expected {expected}, got {(mean, busiest)}. An expert is read once, "
            "however many tokens chose it, and not at all if none did; the first E mod ranks hold one expert more."
        )


def solution_3(tokens_of: Sequence[int], ranks: int) -> tuple[float, int]:
    """Count the chosen experts of every rank's run: their mean, and their maximum, for which the others wait."""
    read = [sum(tokens_of[expert] > 0 for expert in run) for run in split(len(tokens_of), ranks)]
    return sum(read) / ranks, max(read)


def wrong_3(tokens_of: Sequence[int], ranks: int) -> tuple[float, int]:
    """Pairs of tokens and experts, not experts."""
    pairs = [sum(tokens_of[expert] for expert in run) for run in split(len(tokens_of), ranks)]
    return sum(pairs) / ranks, max(pairs)
