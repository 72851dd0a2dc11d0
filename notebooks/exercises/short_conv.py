"""Exercises of 02_short_conv: a check for each, and a worked solution."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from inkling_ref.short_conv import short_conv


def _random(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def check_1(candidate: Callable) -> None:
    """candidate(C, K) -> weight [C, 1, K]."""
    for C, K in ((5, 4), (3, 2), (2, 7)):
        weight = candidate(C, K)
        assert tuple(weight.shape) == (C, 1, K), f"expected a weight {(C, 1, K)}, got {tuple(weight.shape)}"
        u = _random(K, 1, K - 1 + 9, C)
        found, wanted = short_conv(u, weight), u[:, K - 2 : -1]
        assert not torch.allclose(found * math.sqrt(K + 1), wanted, atol=1e-4), "the square root is still in it"
        assert torch.allclose(found, wanted, atol=1e-5), (
            f"K = {K}: the output is not the previous input. The last tap weights the current token, and the inner "
            "residual adds the current input once whatever the taps are"
        )


def solution_1(C: int, K: int) -> Tensor:
    """-1 at the current token cancels the inner residual; the root at one back cancels the division."""
    weight = torch.zeros(C, 1, K)
    weight[:, :, -1] = -1
    weight[:, :, -2] = math.sqrt(K + 1)
    return weight


def check_2(candidate: Callable) -> None:
    """candidate(u [C], state [K - 1, C], weight [C, 1, K]) -> (output [C], state [K - 1, C])."""
    for C, K, T in ((5, 4, 8), (3, 2, 5)):
        u, weight = _random(T, 1, T, C), _random(T + 1, C, 1, K)
        wanted = short_conv(torch.cat([torch.zeros(1, K - 1, C), u], dim=1), weight)[0]
        state = torch.zeros(K - 1, C)
        for t in range(T):
            before = state.clone()
            y, new = candidate(u[0, t], state, weight)
            assert torch.equal(state, before), "the old state was written into"
            shapes = tuple(y.shape), tuple(new.shape)
            assert shapes == ((C,), (K - 1, C)), f"expected shapes {(C,)} and {(K - 1, C)}, got {shapes}"
            assert torch.allclose(y, wanted[t], atol=1e-5), f"token {t}: the output is not that of the whole text"
            assert torch.equal(new[-1], u[0, t]), "the newest input is the last of the state (inputs, not outputs)"
            state = new


def solution_2(u: Tensor, state: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """The window is the state with u behind it; with the current token's tap last both run the same way."""
    window = torch.cat([state, u[None]])  # [K, C]
    y = (window * weight[:, 0].T).sum(dim=0) + u
    return y / math.sqrt(len(window) + 1), window[1:]


def check_3(candidate: Callable) -> None:
    """candidate(ids [T]) -> positions [T]."""
    for ids, wanted in (
        ([4, 4, 4, 9, 9, 1], [0, 1, 2, 0, 1, 0]),
        ([2], [0]),
        ([7, 7, 3, 7, 7, 7, 0], [0, 1, 0, 0, 1, 2, 0]),
    ):
        found = candidate(torch.tensor(ids)).tolist()
        assert found == wanted, f"document ids {ids}: expected {wanted}, got {found}"


def solution_3(ids: Tensor) -> Tensor:
    """A token's position is its index minus the index of the latest start, which a running maximum carries on."""
    index = torch.arange(len(ids))
    starts = torch.ones(len(ids), dtype=torch.bool)
    starts[1:] = ids[1:] != ids[:-1]
    return index - torch.where(starts, index, 0).cummax(dim=0).values


def check_4(candidate: Callable) -> None:
    """candidate(kept [n, C], rejected, K) -> [K - 1, C], or ValueError."""
    kept, K = _random(1, 9, 5), 4
    for rejected in range(7):
        wanted = kept[6 - rejected : 9 - rejected]
        found = candidate(kept.clone(), rejected, K)
        assert torch.equal(found, wanted), (
            f"{len(kept)} inputs kept, {rejected} rejected: expected inputs {6 - rejected} to {8 - rejected}"
        )
    for rejected in (7, 9):
        try:
            candidate(kept.clone(), rejected, K)
        except ValueError:
            continue
        raise AssertionError(f"{len(kept)} inputs kept, {rejected} rejected: not all K - 1 are there, raise ValueError")


def solution_4(kept: Tensor, rejected: int, K: int) -> Tensor:
    """What is left ends `rejected` before the end; counted from the front, no slice goes wrong at 0."""
    end = len(kept) - rejected
    if end < K - 1:
        raise ValueError(f"{max(end, 0)} inputs left, {K - 1} needed")
    return kept[end - (K - 1) : end]
