r"""Sampling: from logits to a distribution, to a token, and to a verdict on drafted tokens.

The logits of one position become probabilities in one place, `probabilities`:

$$ p = \mathrm{softmax}(\mathrm{logits} / \mathrm{temperature}) \; \text{restricted to a set of tokens, renormalised} $$

where the set are the top_k likeliest, and of those (renormalised) the likeliest whose masses first reach top_p.
Tokens are ranked by logit descending, then by id ascending, so that ties at a cut are decided the same way
everywhere. Temperature 0 puts all mass on the first of that ranking.

Drafted tokens x_1 .. x_n, drawn from q_1 .. q_n, are judged by the target's p_1 .. p_n+1 so that what comes out is
distributed as if drawn from p, whatever q is: x_k is accepted with probability

$$ \min(1, \; p_k(x_k) / q_k(x_k)) $$

and at the first rejection, or after the last acceptance with q = 0, one token more is drawn from

$$ \max(p_k - q_k, 0) \;\; \text{renormalised} $$

For then the probability of v is min(q, p)(v) + (1 - sum min(q, p)) (p - q)^+(v) / sum (p - q)^+ = p(v).
"""

import math
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from .errors import InputError
from .residual import wide


def probabilities(
    logits: Float[Tensor, "*shape V"], temperature: Real = 1.0, top_k: Real | None = None, top_p: Real | None = None
) -> Float[Tensor, "*shape V"]:
    """The distribution that sampling draws from (module docstring), in `wide` precision.

    Args:
        temperature: >= 0; 0 gives a one-hot distribution on the first of the largest logits.
        top_k: keep exactly that many tokens (all, if there are fewer); None keeps all.
        top_p: keep the smallest set of the likeliest whose mass reaches top_p, at least one; None keeps all.

    Raises:
        InputError: naming the setting that is out of range.
    """
    check_sampling(temperature, top_k, top_p)
    logits = wide(logits)
    V = logits.shape[-1]
    if temperature == 0:
        return F.one_hot(logits.argmax(dim=-1), V).to(logits.dtype)
    # The largest logit becomes 0 before the division: no temperature, however small, overflows to inf - inf.
    scaled = (logits - logits.amax(dim=-1, keepdim=True)) / max(temperature, torch.finfo(logits.dtype).tiny)
    if top_k is None and top_p is None:
        return scaled.softmax(dim=-1)
    ranked, order = scaled.sort(dim=-1, descending=True, stable=True)
    if top_k is not None:
        ranked[..., top_k:] = -math.inf
    p = ranked.softmax(dim=-1)
    if top_p is not None and top_p < 1:
        mass_before = F.pad(p.cumsum(dim=-1)[..., :-1], (1, 0))
        p = p.masked_fill(mass_before >= top_p, 0)
        p = p / p.sum(dim=-1, keepdim=True)
    return torch.zeros_like(p).scatter(-1, order, p)


def sample(p: Float[Tensor, "B V"], generator: torch.Generator | None = None) -> Int[Tensor, " B"]:
    """One token a row, drawn from the distribution `p`."""
    return torch.multinomial(p, 1, generator=generator)[:, 0]


class Vocabulary:
    """What verdicts ask of the last axis of logits and distributions, which here is whole.

    Where many ranks hold slices of it they give the same answers by exchanging a few numbers: `parallel.generation`.
    """

    def distribution(
        self, logits: Float[Tensor, "*shape V"], temperature: Real, top_k: Real | None, top_p: Real | None
    ) -> tuple[Float[Tensor, "*shape V"], Bool[Tensor, "*shape"]]:
        """`probabilities`, and where all logits are finite; elsewhere p is uniform, as a NaN would fail other rows."""
        sound = logits.amax(dim=-1).isfinite()
        return probabilities(torch.where(sound[..., None], logits, 0), temperature, top_k, top_p), sound

    def best(self, logits: Float[Tensor, "*shape V"]) -> Int[Tensor, "*shape"]:
        """The likeliest, of equals the first."""
        return logits.argmax(dim=-1)

    def at(self, p: Float[Tensor, "*shape V"], ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return p.gather(-1, ids[..., None])[..., 0]

    def sum(self, p: Float[Tensor, "*shape V"]) -> Float[Tensor, "*shape 1"]:
        return p.sum(dim=-1, keepdim=True)

    def one_hot(self, ids: Int[Tensor, "*shape"], p: Float[Tensor, "*shape V"]) -> Float[Tensor, "*shape V"]:
        """All mass on `ids`, in the form of `p`."""
        return F.one_hot(ids, p.shape[-1]).to(p.dtype)

    def sample(self, p: Float[Tensor, "B V"], generator: torch.Generator | None) -> Int[Tensor, " B"]:
        return sample(p, generator)

    def spread(self, logits: Float[Tensor, "*shape V"], temperature: Real) -> Float[Tensor, "*shape V"]:
        """Whole logits, from which sampling draws as from these."""
        return logits


WHOLE = Vocabulary()


def accept(
    p: Float[Tensor, "B n1 V"],
    q: Float[Tensor, "B n V"] | None,
    drafts: Int[Tensor, "B n"],
    widths: Int[Tensor, " B"],
    generator: torch.Generator | None = None,
    vocabulary: Vocabulary = WHOLE,
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """How many drafts of each row stand, and the token that follows them (second part of the module docstring).

    Args:
        p: the target's distributions at the drafts' positions and at the one after: n1 = n + 1.
        q: what the drafts were drawn from; None: they were not drawn, q is all on the draft.
        widths: how many of a row's drafts count; the choice may depend on drafts before a position, never on later.
        vocabulary: how the axis V is read.
    """
    rows, n = torch.arange(len(drafts), device=drafts.device), drafts.shape[1]
    if n == 0:
        return torch.zeros_like(rows), vocabulary.sample(p[:, 0], generator)
    p_draft = vocabulary.at(p[:, :n], drafts)
    q_draft = torch.ones_like(p_draft) if q is None else vocabulary.at(q, drafts)
    # u q < p rather than u < p / q: nothing to divide by, and p = 0 is never accepted.
    stands = torch.rand(p_draft.shape, generator=generator, device=p.device, dtype=p.dtype) * q_draft < p_draft
    stands = stands & (torch.arange(n, device=p.device) < widths[:, None])
    accepted = stands.long().cumprod(dim=1).sum(dim=1)

    p_next, at = p[rows, accepted], accepted.clamp(max=n - 1)
    q_next = vocabulary.one_hot(drafts[rows, at], p_next) if q is None else q[rows, at]
    residual = (p_next - q_next).clamp(min=0)
    mass = vocabulary.sum(residual)
    # No mass is left where p = q; a rejection there is rounding, and p is then as good.
    is_rejected = (accepted < widths)[:, None] & (mass > 1e-8)
    drawn_from = torch.where(is_rejected, residual / mass.clamp(min=1e-30), p_next)
    return accepted, vocabulary.sample(drawn_from, generator)


def accept_greedy(
    best: Int[Tensor, "B n1"], drafts: Int[Tensor, "B n"], widths: Int[Tensor, " B"]
) -> tuple[Int[Tensor, " B"], Int[Tensor, " B"]]:
    """`accept` at temperature 0, where p is all on `best`: drafts stand while they are what the target would write."""
    n = drafts.shape[1]
    stands = (drafts == best[:, :n]) & (torch.arange(n, device=drafts.device) < widths[:, None])
    accepted = stands.long().cumprod(dim=1).sum(dim=1)
    return accepted, best.gather(1, accepted[:, None])[:, 0]


def check_sampling(temperature: Any, top_k: Any, top_p: Any) -> None:
    """Raises InputError naming the setting that is out of range."""
    if not _is_number(temperature) or not 0 <= temperature < math.inf:
        raise InputError(f"temperature is {temperature!r}, expected a finite number >= 0")
    if top_k is not None:
        check_count("top_k", top_k, 1)
    if top_p is not None and (not _is_number(top_p) or not 0 < top_p <= 1):
        raise InputError(f"top_p is {top_p!r}, expected 0 < top_p <= 1")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def check_count(name: str, value: Any, least: int) -> None:
    """Raises InputError unless `value` is an integer >= least."""
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise InputError(f"{name} is {value!r}, expected an integer >= {least}")
