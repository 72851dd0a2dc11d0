r"""How far a tensor b of a port is from the reference's a, and what b looks like where it is wrong.

For every token t (of a vision section: every patch or tile), with a_t and b_t its vectors,

$$ e_t = \lVert b_t - a_t \rVert \, / \, \max(\lVert a_t \rVert, \; \mathrm{rms}_s \lVert a_s \rVert / 10) $$

and, since one wrong channel of thousands would not show in it,

$$ m_t = \max_i \; |b_{ti} - a_{ti}| \, / \, (\mathrm{rms}(a_t) + |a_{ti}|) $$

the error of a token is the larger of e_t and m_t / 8.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

ELEMENT = 8.0  # m_t counts an eighth: the largest of a million errors is about five times their rms
SMALL = 0.1  # of the rms: vectors shorter than that are measured against it
CERTAIN = 8.0  # standard errors
_CHUNK = 2**17  # numbers that are in float64 at one time: they stay in the processor's cache


# --- How far -------------------------------------------------------------------------------------------------------


@dataclass
class Difference:
    """How far b is from a; `tokens` is the error of every token, infinite where only one of both is finite."""

    relative_rms: float
    max_abs: float
    cosine: float
    tokens: Float[Tensor, "*tokens"]

    @property
    def worst(self) -> float:
        return float(self.tokens.max()) if self.tokens.numel() else 0.0


def difference(a: Tensor, b: Tensor, token_axes: int = 2) -> Difference:
    """The measures of the module docstring, in float64; the first `token_axes` axes count tokens."""
    lead = a.shape[:token_axes]
    a, b = (t.reshape(math.prod(lead), math.prod(t.shape[token_axes:])) for t in (a, b))
    if a.numel() == 0:
        return Difference(0.0, 0.0, 1.0, a.new_zeros(lead, dtype=torch.float64))
    rows = max(1, _CHUNK // a.shape[1])
    chunks = [_sums(x, y) for x, y in zip(a.split(rows), b.split(rows), strict=True)]
    aa, bb, ab, dd, largest, ratio = torch.cat(chunks, dim=1)
    short = aa.sqrt() < SMALL * aa.mean().sqrt()
    errors = dd.sqrt() / torch.where(short, SMALL * aa.mean().sqrt(), aa.sqrt())
    errors = torch.maximum(errors, torch.where(short, 0, ratio / ELEMENT))
    errors = torch.where(dd == 0, 0, errors)  # 0 / 0 where both are zero
    norm, other, dot, distance = (float(x.sum()) for x in (aa, bb, ab, dd))
    relative = math.sqrt(distance / norm) if norm else math.inf if distance else 0.0
    cosine = dot / math.sqrt(norm * other) if norm and other else float(norm == other)
    return Difference(relative, float(largest.max()), cosine, errors.view(lead))


def _sums(x: Tensor, y: Tensor) -> Float[Tensor, "6 tokens"]:
    """|x|^2, |y|^2, x.y, |y - x|^2, the largest |y - x|, and m_t."""
    x, y = x.double(), y.double()
    d = (y - x).abs()
    squares = [x.square().sum(1), y.square().sum(1), (x * y).sum(1), d.square().sum(1)]
    if not torch.stack(squares).isfinite().all():
        same = (x == y) | (x.isnan() & y.isnan())
        d = torch.where(same, 0, d.nan_to_num(nan=math.inf))
        x, y = (t.nan_to_num(nan=0, posinf=0, neginf=0) for t in (x, y))
        squares = [x.square().sum(1), y.square().sum(1), (x * y).sum(1), d.square().sum(1)]
    rms = (squares[0] / x.shape[1]).sqrt()[:, None]
    ratio = (d / (rms + x.abs())).nan_to_num(nan=0, posinf=math.inf)
    return torch.stack([*squares, d.amax(1), ratio.amax(1)])


def systematic(a: Tensor, b: Tensor) -> float:
    """Relative RMS of the part of b - a that follows the value of a, as no rounding does: zero unless that is certain.

    Rounding errors of either sign come alike. So the numbers are sorted by a, cut into bins, and the mean error of a
    bin counts if it is over `CERTAIN` standard errors away from zero: a wrong formula shows far below one rounding.
    """
    a, b = a.flatten().double(), b.flatten().double()
    bins = min(64, a.numel() // 64)
    if bins < 4:
        return 0.0
    kept = a.argsort()[: a.numel() // bins * bins]
    errors = (b - a)[kept].view(bins, -1)
    mean, spread = errors.mean(dim=1), errors.std(dim=1) / math.sqrt(errors.shape[1])
    sure = torch.where(mean.abs() > CERTAIN * spread, mean, 0).square().sum() * errors.shape[1]
    return float((sure / a.square().sum()).sqrt().nan_to_num(nan=0.0))


def first_bad(a: Tensor, b: Tensor, tokens: Tensor, limit: float) -> tuple[int, ...]:
    """Index of the first element, of the first token whose error is beyond `limit`, that is far off."""
    t = int((tokens.flatten() > limit).to(torch.int8).argmax())
    x, y = (s.reshape(tokens.numel(), -1)[t].double() for s in (a, b))
    ratio = ((y - x).abs() / (x.square().mean().sqrt() + x.abs())).nan_to_num(nan=math.inf)
    far = ratio >= min(float(ratio.max()), ELEMENT * limit)
    flat, index = t * x.numel() + int(far.to(torch.int8).argmax()), []
    for n in reversed(a.shape):  # torch.unravel_index imports sympy, which takes a second
        flat, i = divmod(flat, n)
        index.append(i)
    return tuple(reversed(index))


def differing_sets(a: Tensor, b: Tensor, biased: Tensor | None) -> tuple[Tensor, Tensor]:
    """For choices [B, T, k]: which tokens' sets differ, and by which gap of scores (infinite where not known).

    The gap lies between the best expert that only a has and the worst that only b has, by a's ranked scores.
    """
    a, b = a.long(), b.long()  # there are engines with unsigned ids
    wrong = (a.sort(dim=-1).values != b.sort(dim=-1).values).any(dim=-1)
    gap = torch.full(wrong.shape, math.inf, dtype=torch.float64)
    if biased is not None and all(bool(((s >= 0) & (s < biased.shape[-1])).all()) for s in (a, b)):
        in_a, in_b = (torch.zeros_like(biased, dtype=torch.bool).scatter(-1, s, True) for s in (a, b))
        best = torch.where(in_a & ~in_b, biased.double(), -math.inf).amax(-1)
        worst = torch.where(in_b & ~in_a, biased.double(), math.inf).amin(-1)
        gap = (best - worst).nan_to_num(nan=math.inf)
    return wrong, torch.where(wrong, gap, 0)


# --- What it looks like --------------------------------------------------------------------------------------------


_LOOK_AT = 2**24  # numbers; looking for patterns takes some copies
_FEW = 3  # runs of an axis that are worth naming
_AXES = {
    "B": "rows", "T": "tokens", "S": "keys", "H": "heads", "G": "key/value heads", "d": "channels", "D": "channels",
    "R": "relative channels", "K": "taps", "E": "experts", "k": "choices", "I": "expert channels", "n": "sources",
    "q": "mixtures", "V": "logits", "3": "colours",
}  # fmt: skip


def looks_like(a: Tensor, b: Tensor, axes: list[str], limit: float) -> list[str]:
    """What b looks like beside a: a multiple, another order; or where it is off by over `limit`, if in few places.

    `axes`: the letter of every axis. Nothing where nothing is found, and for tensors that are too large.
    """
    if a.numel() > _LOOK_AT:
        return []
    a, b = a.double().nan_to_num(0, 0, 0), b.double().nan_to_num(0, 0, 0)
    found = [hint for hint in (_factor(a, b), *_orders(a, b, axes)) if hint]
    return found or [hint for hint in [_where(a, b, axes, limit)] if hint]


def _where(a: Tensor, b: Tensor, axes: list[str], limit: float) -> str:
    """Slices of every axis that are off, where they are few runs and not all of the axis."""
    parts = []
    for axis, letter in enumerate(axes):
        others = [n for n in range(a.dim()) if n != axis]
        off = (b - a).square().sum(others) > limit**2 * a.square().sum(others).clamp(min=1e-300)
        runs = _runs(off.nonzero().flatten().tolist())
        if 1 <= len(runs) <= _FEW and int(off.sum()) < len(off):
            parts.append(f"{_AXES.get(letter, letter)} {', '.join(runs)} of {len(off)}")
    return "only " + ", ".join(parts) if parts else ""


def _runs(numbers: list[int]) -> list[str]:
    """[0, 1, 2, 5] as 0-2, 5."""
    runs: list[list[int]] = []
    for n in numbers:
        if runs and n == runs[-1][1] + 1:
            runs[-1][1] = n
        else:
            runs.append([n, n])
    return [str(lo) if lo == hi else f"{lo}-{hi}" for lo, hi in runs]


def _factor(a: Tensor, b: Tensor) -> str:
    """Whether b is a multiple of a."""
    norm = float(a.square().sum())
    factor = float((a * b).sum()) / norm if norm else 1.0
    rest = float((b - factor * a).square().sum() / b.square().sum().clamp(min=1e-300))
    close = abs(factor - 1) < 1e-3 or rest > 1e-4
    return "" if close else f"the port's numbers are {factor:.4g} times the reference's"


def _orders(a: Tensor, b: Tensor, axes: list[str]) -> list[str]:
    """Axes along which b holds a's slices in another order."""
    found = []
    for axis, letter in enumerate(axes):
        n = a.shape[axis]
        if not 2 <= n <= 1024:
            continue
        x, y = (t.movedim(axis, 0).reshape(n, -1) for t in (a, b))
        x, y = (t[:, :: max(1, t.shape[1] // 4096)] for t in (x, y))
        if x.shape[1] < 8:
            continue
        match = torch.nn.functional.normalize(y, dim=1) @ torch.nn.functional.normalize(x, dim=1).T
        score, source = match.max(dim=1)
        moved = source != torch.arange(n)
        if float(score.median()) > 0.99 and int(moved.sum()) > n // 2 and float(match.diagonal().median()) < 0.9:
            found.append(f"{_AXES.get(letter, letter)} are in another order: {_order(source.tolist())}")
    return found


def _order(source: list[int]) -> str:
    n = len(source)
    shifts = {s - i for i, s in enumerate(source[1:-1], start=1)}
    if source == list(range(n))[::-1]:
        return "reversed"
    if len(shifts) == 1 and n > 3:
        shift = shifts.pop()
        return f"{abs(shift)} too {'late' if shift < 0 else 'early'}"
    halves = [*range(0, n, 2), *range(1, n, 2)]
    if source == halves:
        return "even ones first, then odd ones (interleaved in the reference)"
    if n % 2 == 0 and [source[i] for i in halves] == list(range(n)):
        return "interleaved (halves in the reference)"
    return ", ".join(map(str, source[:8])) + (", ..." if n > 8 else "")
