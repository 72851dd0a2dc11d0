"""Exercises of 01_residual: a check for each, and a worked solution."""

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from inkling_ref import residual


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_1(candidate: Callable) -> None:
    """candidate(layer, block) -> (sources read by attention, by the MLP), the first layer's attention counting 0."""
    for block in (1, 2, 3, 6, 7):
        closed = 0
        for layer in range(20):
            before = closed + 1 if layer else 0
            closed += layer % block == 0
            found = tuple(candidate(layer, block))
            assert found == (before, closed + 1), (
                f"layer {layer}, blocks of {block}: expected {(before, closed + 1)}, got {found}. "
                "A boundary closes its block after attention has read and before the MLP reads."
            )


def solution_1(layer: int, block: int) -> tuple[int, int]:
    """Blocks are closed at layers 0, block, 2 block and so on; the running sum is one source more.

    Layers 0 to i - 1 have closed ceil(i / block) blocks, which is what attention of layer i finds; its MLP comes after
    the closing in layer i itself.
    """
    return (math.ceil(layer / block) + 1 if layer else 0), math.ceil((layer + 1) / block) + 1


def check_2(candidate: Callable) -> None:
    """candidate(sources [n, D], j) -> query [D]."""
    for seed, (n, D) in enumerate(((2, 5), (4, 7), (9, 31))):
        sources = _random(seed, n, D) * 10 ** _random(seed + 10, n, 1)
        sources[1] += 0.9 * sources[0]  # sources of one token are far from orthogonal
        for j in range(n):
            query = candidate(sources.clone(), j)
            assert query.shape == (D,), f"expected a query of shape {(D,)}, got {tuple(query.shape)}"
            assert query.isfinite().all(), "the query has entries that are not finite"
            scores = residual.rms(sources, residual.SOURCE_EPS).double() @ query.double() / math.sqrt(D)
            weight = float(scores.softmax(dim=0)[j])
            assert weight > 0.99, f"n = {n}, j = {j}: the weight of the source is {weight:.3f}, expected more than 0.99"


def solution_2(sources: Tensor, j: int) -> Tensor:
    """Ask for the scores and solve for the query: n linear equations in D > n unknowns.

    10 for source j and 0 for the others leaves them (n - 1) e^-10 together. Pointing the query along source j is not
    enough: sources that resemble it would come along.
    """
    n, D = sources.shape
    wanted = torch.zeros(n, dtype=torch.float64)
    wanted[j] = 10 * math.sqrt(D)
    normed = residual.rms(sources.double(), residual.SOURCE_EPS)
    return (torch.linalg.pinv(normed) @ wanted).to(sources.dtype)


def wrong_2(sources: Tensor, j: int) -> Tensor:
    """Along the source: right only where no other source resembles it."""
    return 20 * residual.rms(sources, residual.SOURCE_EPS)[j]


def check_3(candidate: Callable) -> None:
    """candidate(iterator of n sources [T, D], query [D]) -> mixture [T, D]."""
    for seed, (n, T, D) in enumerate(((1, 2, 5), (6, 3, 7))):
        sources, query = _random(seed, n, T, D) * 5, 400 * _random(seed + 10, D)
        held: list[Tensor] = []

        def once(sources: Tensor = sources, held: list[Tensor] = held) -> Iterator[Tensor]:
            for source in sources:
                for earlier in held:
                    earlier.fill_(math.nan)  # whoever kept it now holds nothing
                held.append(source.clone())
                yield held[-1]

        found = candidate(once(), query)
        wanted = residual.mix(sources.transpose(0, 1)[None], query[None], residual.SOURCE_EPS)[0, :, 0]
        assert found.shape == wanted.shape, f"expected {tuple(wanted.shape)}, got {tuple(found.shape)}"
        assert found.isfinite().all(), "not finite: an exponential overflowed, or an earlier source was used again"
        assert torch.allclose(found, wanted, rtol=1e-4, atol=1e-5), "the values are not those of residual.mix"


def solution_3(sources: Iterator[Tensor], query: Tensor) -> Tensor:
    """The softmax that runs along: keep the largest score so far, the sum of exponentials and the weighted sum.

    When a larger score comes, what was summed before is scaled down by e^(old largest - new largest). That is how
    attention kernels go through keys, too.
    """
    largest, total, mixed = torch.tensor(-math.inf), torch.tensor(0.0), torch.tensor(0.0)
    for source in sources:
        x = residual.rms(source, residual.SOURCE_EPS)
        score = (x @ query / math.sqrt(len(query)))[:, None]
        new = torch.maximum(largest, score)
        old, e = (largest - new).exp(), (score - new).exp()
        largest, total, mixed = new, total * old + e, mixed * old + e * x
    return mixed / total


def check_4(candidate: Callable) -> None:
    """candidate(partial, y, z), all bfloat16 [T, D] -> bfloat16 [T, D]."""
    partial, y, z = (torch.full((2, 3), x, dtype=torch.bfloat16) for x in (256, 1, 1))
    found = candidate(partial, y, z)
    assert found.dtype == torch.bfloat16, f"expected bfloat16, got {found.dtype}"
    assert (found == 258).all(), f"256 + 1 + 1 must give 258, got {float(found[0, 0])}: round once, at the end"
    partial, y, z = (_random(seed, 5, 7).bfloat16() * 3**seed for seed in range(3))
    exact = (partial.double() + y.double() + z.double()).bfloat16()
    assert torch.equal(candidate(partial, y, z), exact), "the values are not the rounded sum"


def solution_4(partial: Tensor, y: Tensor, z: Tensor) -> Tensor:
    """Widen, add both, round: what DepthState.add, .add and .round do. The two outputs were rounded when they came."""
    return (partial.float() + y.float() + z.float()).bfloat16()
