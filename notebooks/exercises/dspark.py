"""Exercises of 08_dspark: a check for each, and a worked solution."""

from collections.abc import Callable, Sequence
from itertools import product

import torch
from torch import Tensor
from torch.nn import functional as F

import inkling_ref as ir
from inkling_ref.dspark import MarkovHead


def _distribution(seed: int, V: int) -> Tensor:
    return torch.randn(V, generator=torch.Generator().manual_seed(seed)).mul(1.5).softmax(dim=0)


# ---------------------------------------------------------------- 1: the rule


def check_1(candidate: Callable) -> None:
    """candidate(p [V], q [V]) -> (probability of a rejection, distribution of the replacement [V])."""
    for V in (2, 5, 11):
        p, q = _distribution(V, V), _distribution(V + 1, V)
        chance, replacement = candidate(p.clone(), q.clone())
        assert tuple(replacement.shape) == (V,), f"expected a replacement of shape {(V,)}"
        assert (replacement >= 0).all(), "a probability is negative: the residual is cut off at 0"
        assert abs(float(replacement.sum()) - 1) < 1e-5, "the replacement's distribution does not sum to 1"
        # With both right, what is kept and what replaces the rest make p.
        made = torch.minimum(p, q) + float(chance) * replacement
        assert torch.allclose(made, p, atol=1e-5), f"kept and replaced words together are {made}, expected p = {p}"
    p = _distribution(3, 5)
    chance, replacement = candidate(p.clone(), p.clone())
    assert abs(float(chance)) < 1e-5, "a draft from p itself is never rejected"
    assert torch.allclose(replacement, p), "q = p: nothing is lacking (0 / 0), expected p"
    certain = F.one_hot(torch.tensor(1), 5).float()
    chance, _ = candidate(p.clone(), certain)
    assert abs(float(chance) - float(1 - p[1])) < 1e-5, "a certain draft x is rejected with probability 1 - p(x)"


def solution_1(p: Tensor, q: Tensor) -> tuple[float, Tensor]:
    """What is lacking after keeping min(p, q) is as much as what is rejected."""
    lacking = (p - q).clamp(min=0)
    chance = float(lacking.sum())
    return chance, lacking / chance if chance > 0 else p


# ---------------------------------------------------------------- 2: how many to draft


def check_2(candidate: Callable) -> None:
    """candidate(overlaps [n], seconds [n + 1]) -> int, 0..n."""
    for overlaps, seconds, best, why in (
        ([0.9, 0.9, 0.9], [1.0, 1.0, 1.0, 1.0], 3, "checking costs nothing more: draft all"),
        ([0.9, 0.9, 0.9], [1.0, 2.0, 3.0, 4.0], 0, "each draft costs as much as a plain step: draft none"),
        ([0.5, 0.9, 0.9, 0.9], [1.0, 1.3, 1.4, 1.5, 1.9], 3, "token k stands only if those before it do: a product"),
        ([0.5, 0.9, 0.9], [1.0, 1.5, 1.5, 1.5], 3, "one draft alone does not pay, three do: look at all"),
        ([0.5, 0.0], [1.0, 1.5, 1.5], 0, "equal rates: the smallest"),
        ([1.0, 1.0], [1.0, 1.0, 2.5], 1, "seconds[n] belongs to n drafts; the bonus token counts too"),
    ):
        found = candidate(list(overlaps), list(seconds))
        assert found == best, f"overlaps {overlaps}, seconds {seconds}: expected {best}, got {found} ({why})"


def solution_2(overlaps: Sequence[float], seconds: Sequence[float]) -> int:
    """Tokens of a round are 1 plus the sum of the products; max takes the first of equal rates."""
    tokens, survival, rates = 1.0, 1.0, [1.0 / seconds[0]]
    for overlap, cost in zip(overlaps, seconds[1:], strict=True):
        survival *= overlap
        tokens += survival
        rates.append(tokens / cost)
    return max(range(len(rates)), key=rates.__getitem__)


# ---------------------------------------------------------------- 3: the head


def _head(V: int, D: int, r: int) -> MarkovHead:
    """The package's, with large weights: a mistake then shows."""
    head, dice = MarkovHead("rnn", V, D, r), torch.Generator().manual_seed(V)
    for p in head.parameters():
        p.data = torch.randn(p.shape, generator=dice)
    return head.requires_grad_(False)


def _run(head: MarkovHead, h: Tensor, previous: Tensor) -> Tensor:
    s, found = head.start(h[:, 0]), []
    for k in range(h.shape[1]):
        correction, s = head.step(h[:, k], previous[:, k], s, head.markov_w2.weight.shape[0])
        found.append(correction)
    return torch.stack(found, dim=1)


def check_3(candidate: Callable) -> None:
    """candidate(h [B, n, D], previous [B, n], W1 [V, r], W2 [V, r], WJ [3r, 2r + D], bJ [3r]) -> [B, n, V]."""
    V, D, r, B, n = 13, 7, 5, 3, 4
    head, dice = _head(V, D, r), torch.Generator().manual_seed(0)
    h = torch.randn(B, n, D, generator=dice)
    previous = torch.randint(V, (B, n), generator=dice)
    joint, W1, W2 = head.joint_proj, head.markov_w1.weight, head.markov_w2.weight
    found = candidate(h, previous, W1, W2, joint.weight, joint.bias)
    assert tuple(found.shape) == (B, n, V), f"expected {(B, n, V)}, got {tuple(found.shape)}"
    wanted = _run(head, h, previous)
    assert torch.allclose(found[:, 0], wanted[:, 0], atol=1e-4), (
        "token 1 is wrong, where the state is still 0: z is [s; e; h] in this order, its product [a; b; o], and the "
        "correction W2 tanh(o)"
    )
    assert torch.allclose(found[:, 1], wanted[:, 1], atol=1e-4), (
        "token 2 is wrong: s_1 = sigma(a) s_0 + (1 - sigma(a)) tanh(b), from the a and b of token 1"
    )
    assert torch.allclose(found, wanted, atol=1e-4), "tokens 1 and 2 are right, later ones are not: is s carried on?"


def solution_3(h: Tensor, previous: Tensor, W1: Tensor, W2: Tensor, WJ: Tensor, bJ: Tensor) -> Tensor:
    """o is computed with the old state; the new state waits for the next token."""
    s, found = torch.zeros(len(h), W1.shape[1]), []
    for k in range(h.shape[1]):
        z = torch.cat([s, W1[previous[:, k]], h[:, k]], dim=-1)
        a, b, o = F.linear(z, WJ, bJ).chunk(3, dim=-1)
        found.append(F.linear(o.tanh(), W2))
        f = a.sigmoid()
        s = f * s + (1 - f) * b.tanh()
    return torch.stack(found, dim=1)


# ---------------------------------------------------------------- 4: catch the cheat


def _package(schedule: Callable) -> Callable:
    return lambda c: int(schedule(torch.tensor([c]))[0])


def _best_of_all(c: list[float]) -> int:
    """The most tokens a second, with the future in view."""
    survival, tokens, rates = 1.0, 1.0, [1.0]
    for k, c_k in enumerate(c):
        survival *= c_k
        tokens += survival
        rates.append(tokens / (1.7 + 0.2 * k))
    return max(range(len(rates)), key=rates.__getitem__)


def check_4(candidate: Callable) -> None:
    """candidate(schedule, n) -> bool."""
    for n in (2, 3, 4):
        for schedule, fair, what in (
            (lambda c: len(c), True, "checks everything"),
            (lambda c: 1, True, "always checks one draft"),
            (_package(ir.Threshold(0.6)), True, "cuts before the first low confidence"),
            (_package(ir.Throughput([1.0, 1.4, 1.7, 2.2, 2.6])), True, "stops at the first token that does not pay"),
            (lambda c: 0 if c[0] < 0.3 else len(c), True, "looks at c_1 only"),
            (lambda c: sum(x > 0.3 for x in c), False, "counts the high confidences, wherever they stand"),
            (lambda c: len(c) if c[-1] > 0.3 else 0, False, "looks at the last confidence first"),
            (_best_of_all, False, "takes the best of all widths"),
            (lambda c: len(c) - (c[-1] < 0.3), True, "cuts only the last, by its own confidence"),
            (lambda c: len(c) - 1 - (c[-1] < 0.3), False, "looks one confidence ahead"),
        ):
            found = candidate(schedule, n)
            assert isinstance(found, bool), f"expected True or False, got {found!r}"
            assert found == fair, f"n = {n}: the schedule that {what} is {'fair' if fair else 'not fair'}"


def solution_4(schedule: Callable[[list[float]], int], n: int) -> bool:
    """Whether draft k is checked must be a function of c_1 .. c_k: note it the first time, compare ever after."""
    known: dict[tuple[float, ...], bool] = {}
    for c in product((0.1, 0.5, 0.9), repeat=n):
        width = schedule(list(c))
        for k in range(1, n + 1):
            if known.setdefault(c[:k], width >= k) != (width >= k):
                return False
    return True
