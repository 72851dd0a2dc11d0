"""Exercises of 04_moe: a check for each, and a worked solution."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from inkling_ref import moe


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


# ---------------------------------------------------------------- 1: the router, for all tokens


def check_1(candidate: Callable) -> None:
    """candidate(h, weight, bias, k, scale) -> weights [N, k], ids [N, k]."""
    h, weight, bias = _normal(0, 31, 9), _normal(1, 7, 9), 0.5 * _normal(2, 7)
    weight[5], bias[5] = weight[1], bias[1]
    wanted_w, wanted = moe.route(h, weight, bias, 3, 2.5)
    w, ids = candidate(h, weight, bias, 3, 2.5)
    assert tuple(ids.shape) == (31, 3), f"ids: expected shape (31, 3), got {tuple(ids.shape)}"
    same_set = (ids.sort(dim=1).values == wanted.sort(dim=1).values).all(dim=1)
    ties = ((wanted == 1).any(1) & (ids == 5).any(1) & ~same_set).sum().item()
    assert not ties, f"{ties} tokens took expert 5 where its twin, expert 1, has the same score and the lower id"
    assert same_set.all(), f"{int((~same_set).sum())} of 31 tokens chose other experts: the bias chooses"
    assert torch.equal(ids, wanted), "the right experts in another order: best first, by score plus bias"
    total = w.sum(dim=1).mean().item()
    assert abs(total - 2.5) < 1e-9, f"a token's weights add up to {total:.3f}, expected the scale, 2.5"
    assert torch.allclose(w, wanted_w), "weights differ: the bias chooses, it does not weigh"


def solution_1(h: Tensor, weight: Tensor, bias: Tensor, k: int, scale: float) -> tuple[Tensor, Tensor]:
    """A stable sort keeps equal scores in the order of their ids; topk promises nothing."""
    e = (h @ weight.T).sigmoid()
    ids = (e + bias).sort(dim=1, descending=True, stable=True).indices[:, :k]
    chosen = e.gather(1, ids)
    return scale * chosen / (chosen.sum(dim=1, keepdim=True) + 1e-20), ids


# ---------------------------------------------------------------- 2: rows as they are stored


def check_2(candidate: Callable) -> None:
    """candidate(gate, up) -> w13 with rows g0, u0, g1, u1, ..."""
    gate, up = _normal(3, 4, 5, 3), _normal(4, 4, 5, 3)
    found = candidate(gate, up)
    shape = tuple(found.shape) if isinstance(found, Tensor) else found
    assert shape == (4, 10, 3), f"expected a tensor (4, 10, 3), got {shape}"
    assert not torch.equal(found, torch.cat([gate, up], dim=1)), "all gates, then all ups: rows must alternate"
    assert torch.equal(found[:, 0::2], gate), "rows 0, 2, 4, ... must be the gate's"
    assert torch.equal(found[:, 1::2], up), "rows 1, 3, 5, ... must be the up's"


def solution_2(gate: Tensor, up: Tensor) -> Tensor:
    """Stack the two behind the row axis, then let that axis swallow them: pairs stay together."""
    return torch.stack([gate, up], dim=2).flatten(1, 2)


# ---------------------------------------------------------------- 3: when all experts are in use


def check_3(candidate: Callable) -> None:
    """candidate(x, E, k) -> the smallest batch that uses x E of the experts on average."""
    for x, E, k in ((0.5, 384, 8), (0.95, 384, 8), (0.5, 16, 4), (0.9, 7, 3)):
        B = candidate(x, E, k)
        assert isinstance(B, int), f"expected a whole number, got {B!r}"
        now, before = (1 - (1 - k / E) ** n for n in (B, B - 1))
        assert now >= x > before, (
            f"x = {x}, E = {E}, k = {k}: {B} tokens use {now:.1%} of the experts, {B - 1} use {before:.1%}"
        )


def solution_3(x: float, E: int, k: int) -> int:
    """An expert is missed by all B tokens with probability (1 - k/E)^B = 1 - x: take logarithms."""
    return math.ceil(math.log(1 - x) / math.log(1 - k / E))


# ---------------------------------------------------------------- 4: one rank's experts


def check_4(candidate: Callable) -> None:
    """candidate(h, weights, ids, w13, w2, first, last) -> [N, D], the local experts' share of the sum."""
    E, D, I = 6, 9, 5
    h, w13, w2 = _normal(5, 13, D), _normal(6, E, 2 * I, D), _normal(7, E, D, I)
    weights, ids = moe.route(h, _normal(8, E, D), 0.2 * _normal(9, E), 3, 3.0)
    whole = moe.experts(h, weights, ids, moe.ExpertMatrix(w13), moe.ExpertMatrix(w2), 4.0, 25.0)
    parts = []
    for first, last in ((0, 2), (2, 3), (3, 6)):
        part = candidate(h, weights, ids, w13[first:last], w2[first:last], first, last)
        shape = tuple(part.shape) if isinstance(part, Tensor) else part
        assert shape == (13, D), f"experts {first} to {last - 1}: expected a tensor (13, {D}), got {shape}"
        away = ((ids < first) | (ids >= last)).all(dim=1)
        assert not part[away].any(), f"experts {first} to {last - 1}: tokens that chose none of them must get zeros"
        parts.append(part)
    error = ((sum(parts) - whole).norm() / whole.norm()).item()
    assert error < 1e-9, f"the ranks' sum is off by {error:.1%}: local expert j has the global id first + j"


def solution_4(h: Tensor, weights: Tensor, ids: Tensor, w13: Tensor, w2: Tensor, first: int, last: int) -> Tensor:
    """Every rank routes all tokens alike; an expert gets the weight its token gave it, or zero."""
    out = torch.zeros_like(h)
    for j in range(last - first):
        weight = (weights * (ids == first + j)).sum(dim=1, keepdim=True)
        out += weight * (moe.softcapped_swiglu(h @ w13[j].T, 4.0, 25.0) @ w2[j].T)
    return out
