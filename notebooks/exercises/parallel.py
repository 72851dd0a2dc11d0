"""Exercises of 12_parallel: a check for each, and a worked solution."""

from collections.abc import Callable

import torch

from inkling_ref.parallel.collectives import Link
from inkling_ref.parallel.estimate import all_reduce
from inkling_ref.parallel.plan import Plan, owners


def check_1(candidate: Callable) -> None:
    """candidate(E, ranks, expert) -> the rank that owns the expert."""
    for E, ranks in ((16, 4), (7, 2), (8, 3), (3, 5), (384, 16)):
        for expert, (expected,) in enumerate(owners(Plan(ranks), E)):
            found = candidate(E, ranks, expert)
            assert found == expected, (
                f"{E} experts on {ranks} ranks: expert {expert} is rank {expected}'s, got {found}. "
                "The first E mod ranks of them hold one expert more."
            )


def solution_1(E: int, ranks: int, expert: int) -> int:
    """The first `more` ranks hold size + 1 experts each; after them, runs of `size` begin at `border`."""
    size, more = divmod(E, ranks)
    border = more * (size + 1)
    return expert // (size + 1) if expert < border else more + (expert - border) // size


def wrong_1(E: int, ranks: int, expert: int) -> int:
    """As if the experts always came out even."""
    return expert // (E // ranks or 1)


def check_2(candidate: Callable) -> None:
    """candidate(parts, ids) -> the embeddings [T, D] of ids, from every rank's rows of the table."""
    generator = torch.Generator().manual_seed(0)
    for V, D, ranks in ((12, 5, 3), (13, 4, 3), (9, 7, 4)):
        table = torch.randn(V, D, generator=generator)
        parts = list(table.tensor_split(ranks))
        ids = torch.randint(V, (11,), generator=generator)
        found = candidate([part.clone() for part in parts], ids)
        assert found.shape == (11, D), f"expected {(11, D)}, got {tuple(found.shape)}"
        assert torch.equal(found, table[ids]), (
            f"{V} rows on {ranks} ranks: a token's embedding is wrong. "
            "A rank has zeros for a token that is not among its rows; exactly one rank has not."
        )


def solution_2(parts: list[torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    """Every rank looks up what it holds and puts zeros elsewhere; the sum is exact, for only one term is not 0."""
    total, first = 0, 0
    for part in parts:
        row = ids - first
        is_mine = (row >= 0) & (row < len(part))
        total = total + torch.where(is_mine[:, None], part[torch.where(is_mine, row, 0)], 0)
        first += len(part)
    return total


def check_3(candidate: Callable) -> None:
    """candidate(T, D, tp, itemsize) -> bytes that a rank sends for one layer, without sequence parallelism."""
    for T, D, tp, itemsize in ((1, 4608, 8, 2), (8192, 4608, 4, 2), (34, 128, 2, 4)):
        expected = 4 * T * D * itemsize * (tp - 1) // tp
        found = candidate(T, D, tp, itemsize)
        assert found == expected, (
            f"T {T}, D {D}, tp {tp}, {itemsize} bytes: expected {expected}, got {found}. "
            "Two sublayers; each has a reduce_scatter and a gather; nobody sends to himself."
        )


def solution_3(T: int, D: int, tp: int, itemsize: int) -> int:
    """Four collectives a layer, and in each a rank sends all of [T, D] but the part that it keeps."""
    return 4 * (T * D * itemsize - T * D * itemsize // tp)


def check_4(candidate: Callable) -> None:
    """candidate(ranks, alpha, speed) -> the bytes up to which their sum is faster in one shot than in two."""
    for ranks, link in ((8, Link()), (4, Link(alpha=5e-6)), (3, Link(bandwidth=50e9))):
        size = candidate(ranks, link.alpha, link.usable * link.bandwidth)
        for factor, shots, where in ((0.99, 1, "below"), (1.01, 2, "above")):
            found = all_reduce(ranks, factor * size, link).calls
            assert found == shots, (
                f"{ranks} ranks: just {where} {size:.3g} bytes {('one shot is', 'two shots are')[found - 1]} faster. "
                "What the second latency costs must equal what its fewer bytes save."
            )


def solution_4(ranks: int, alpha: float, speed: float) -> float:
    """Where the second latency equals the bytes that it saves: alpha = (ranks - 1) (1 - 2 / ranks) size / speed."""
    return alpha * speed / ((ranks - 1) * (1 - 2 / ranks))


def wrong_4(ranks: int, alpha: float, speed: float) -> float:
    """As if two shots sent no bytes."""
    return alpha * speed / (ranks - 1)
