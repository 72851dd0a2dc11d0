"""Exercises of 03_attention: a check for each, and a worked solution."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from inkling_ref import attention

# ---------------------------------------------------------------- 1: the shares of one new token


def check_1(candidate: Callable) -> None:
    """candidate(q, k, r, profiles, z) -> [S] shares of a new query for S cached keys, its own the last."""
    d, R = 5, 3
    for S, X in ((11, 4), (4, 11), (7, 7), (1, 6)):
        generator = torch.Generator().manual_seed(S)
        shapes = ((d,), (S, d), (R,), (R, X), ())
        q, k, r, profiles, z = (torch.randn(s, generator=generator, dtype=torch.float64) for s in shapes)
        distance = torch.arange(S - 1, -1, -1)[None, None]
        bias = attention.relative_bias(r[None, None, None], profiles, distance)
        scores = (k @ q / math.sqrt(d))[None, None, None]
        wanted = attention.softmax_with_sink(scores + bias, z[None, None, None])[0, 0, 0]
        found = candidate(q, k, r, profiles, z)
        shape = tuple(found.shape) if isinstance(found, Tensor) else found
        assert shape == (S,), f"S = {S}: expected a tensor ({S},), got {shape}"
        total = found.sum().item()
        assert abs(total - wanted.sum().item()) < 1e-9, f"S = {S}, X = {X}: the shares add up to {total:.3f}: the sink?"
        assert torch.allclose(found, wanted), (
            f"S = {S}, X = {X}: shares differ. The last key is at distance 0; keys at distance X and more have no bias"
        )


def solution_1(q: Tensor, k: Tensor, r: Tensor, profiles: Tensor, z: Tensor) -> Tensor:
    """The curve runs away from the query, the cache towards it: flip the curve, and align both at their ends."""
    scores = k @ q / math.sqrt(len(q))
    bias = (r @ profiles)[: len(k)].flip(0)
    scores[len(k) - len(bias) :] += bias
    return torch.cat([scores, z[None]]).softmax(dim=0)[:-1]


# ---------------------------------------------------------------- 2: a sink to order


def check_2(candidate: Callable) -> None:
    """candidate(scores, share) -> the sink logit that takes this share."""
    scores = torch.tensor([0.3, -1.2, 2.0, 0.9], dtype=torch.float64)
    for shift in (0.0, 5.0):
        for share in (0.01, 0.5, 0.9):
            z = torch.as_tensor(candidate(scores + shift, share), dtype=torch.float64)
            assert z.shape == (), f"expected one number, got {tuple(z.shape)}"
            taken = (
                1 - attention.softmax_with_sink((scores + shift)[None, None, None], z[None, None, None]).sum().item()
            )
            assert abs(taken - share) < 1e-9, f"a share of {share} was wanted, z = {z.item():.3f} takes {taken:.3f}"


def solution_2(scores: Tensor, share: float) -> Tensor:
    """What is kept is sigmoid(LSE - z) = 1 - share; a sigmoid is undone by log(p / (1 - p))."""
    return scores.logsumexp(dim=0) - math.log((1 - share) / share)


# ---------------------------------------------------------------- 3: how much a window saves


def check_3(candidate: Callable) -> None:
    """candidate(T, W) -> visible (query, key) pairs; W None = full."""
    for T, W in ((1, None), (9, None), (9, 1), (9, 4), (9, 9), (4, 9), (1000, 64)):
        wanted = sum(min(t + 1, W or T) for t in range(T))
        found = candidate(T, W)
        assert found == wanted, f"T = {T}, W = {W}: {wanted} pairs are visible, got {found}"


def solution_3(T: int, W: int | None) -> int:
    """A triangle while the window fills, then W for every token that follows."""
    full = T if W is None else min(T, W)
    return full * (full + 1) // 2 + (T - full) * full


# ---------------------------------------------------------------- 4: where log scaling sets in


def check_4(candidate: Callable) -> None:
    """candidate(tau, floor, alpha) -> the first position t with tau(t) >= tau."""
    for tau, floor, alpha in ((1.05, 512, 0.1), (1.2, 128_000, 0.1), (1.5, 7, 0.3)):
        t = candidate(tau, floor, alpha)
        assert isinstance(t, int), f"expected a whole number, got {t!r}"
        at, before = (1 + alpha * math.log(max((n + 1) / floor, 1)) for n in (t, t - 1))
        assert at >= tau > before, f"tau {tau}, floor {floor}: tau({t}) is {at:.6f}, tau({t - 1}) {before:.6f}"


def solution_4(tau: float, floor: float, alpha: float) -> int:
    """Solve tau = 1 + alpha log((t + 1) / floor) for t, and round up to a whole position."""
    return math.ceil(floor * math.exp((tau - 1) / alpha)) - 1
