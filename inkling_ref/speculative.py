r"""Speculative decoding: a drafter proposes a block, one pass of the target judges it, every state is rolled back.

A round, with the anchor x_0 (the newest token, which neither target nor drafter has read) at position p:

    drafter   proposes x_1 .. x_n
    schedule  keeps the first w of them (optional)
    target    reads x_0 .. x_w in one pass: row j gives the distribution of position p + j + 1
    accept    a of them stand, and one more token follows (see `sampling`): a + 1 new tokens for one pass
    roll back the target's cache and the drafter's context keep x_0 .. x_a; the last new token is the next anchor

The text has the distribution that it has without a drafter. At temperature 0 it is the same text, as far as a pass over
w + 1 tokens and a pass over one give the same logits: in float32 they differ by about 1e-6 relative, in bfloat16 by
about 1e-2, so that there a token may differ where the two best logits are closer than that.

On a `DecodeStep`, without top_k and top_p, that holds at any temperature: a token is drawn there from numbers that its
row's seed and its position give (see `fused.choose`), so that the target's tokens do not depend on the drafts at all.
The drafter draws from the same numbers, and a draft stands if both came to the same token. A step reads all of its
tokens always: a schedule, which checks fewer, saves nothing there.

**Schedules.** With confidences c_j, a drafted token survives with probability a_j, and a longer check costs more:

$$ a_j = \prod_{i \le j} c_i, \qquad \Theta = \frac{R + \sum a_j}{\mathrm{seconds}(\text{rows of the pass})} $$

`Throughput` admits tokens of R rows by falling survival for as long as each raises the throughput Theta, and stops at
the first that does not. Stopping there, rather than at the best of all prefixes, is what keeps the text exact: whether
a token is admitted must not depend on tokens after it (nor on itself: c_j is computed before x_j is drawn).
"""

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from itertools import pairwise
from numbers import Real
from statistics import median
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .decode_step import NOT_FINITE
from .errors import InputError
from .sampling import WHOLE, accept, accept_greedy, check_count
from .stepping import Stepping

# ---------------------------------------------------------------- schedules


@dataclass(frozen=True)
class Threshold:
    """Check the drafts before the first whose confidence is below `least`. 0 checks all, 1 next to none."""

    least: Real

    def __post_init__(self) -> None:
        if not isinstance(self.least, Real) or not 0 <= self.least <= 1:
            raise InputError(f"Threshold: {self.least!r}, expected 0 to 1")

    def __call__(self, confidence: Float[Tensor, "*shape R n"]) -> Int[Tensor, "*shape R"]:
        return (confidence >= self.least).long().cumprod(dim=-1).sum(dim=-1)


@dataclass(frozen=True)
class Throughput:
    """Check the drafts that raise the expected tokens per second (module docstring).

    seconds: of a round in which the target reads 1, 2, ... tokens, over all R rows: see `measure_seconds`. What lies
        beyond the table costs as the last step in it.
    """

    seconds: Sequence[float]

    def __post_init__(self) -> None:
        if not self.seconds or not all(isinstance(s, Real) and s > 0 for s in self.seconds):
            raise InputError(f"Throughput: seconds {self.seconds!r}, expected positive numbers")

    def __call__(self, confidence: Float[Tensor, "*shape R n"]) -> Int[Tensor, "*shape R"]:
        R, n = confidence.shape[-2:]
        table = list(self.seconds)
        last = max(table[-1] - table[-2], 0) if len(table) > 1 else 0
        table += [table[-1] + last * (i + 1) for i in range(R + R * n - len(table))]
        seconds = confidence.new_tensor(table, dtype=torch.float64)[R - 1 :]  # of R rows, and 0, 1, 2, ... drafts more

        # A row's tokens stay in order: survival falls along it, and the sort is stable.
        survival, order = confidence.double().cumprod(dim=-1).flatten(-2).sort(dim=-1, descending=True, stable=True)
        expected = torch.cat([torch.zeros_like(survival[..., :1]), survival.cumsum(dim=-1)], dim=-1) + R
        rate = expected / seconds[: R * n + 1]
        admitted = (rate[..., 1:] > rate[..., :-1]).long().cumprod(dim=-1)
        return torch.zeros_like(admitted).scatter(-1, order, admitted).unflatten(-1, (R, n)).sum(dim=-1)


# ---------------------------------------------------------------- settings and counts


@dataclass(frozen=True)
class Drafting:
    """How to use a drafter; `generate(drafter=...)` takes one of these or a drafter alone.

    num_tokens: draft at most that many a round; None: as many as the drafter can.
    greedy: draft the likeliest tokens instead of drawing them. The text's distribution is the same; fewer stand.
    schedule: from the confidences [R, n] of running rows to how many drafts to check, [R]; None checks all.
    """

    drafter: Any
    num_tokens: int | None = None
    greedy: bool = False
    schedule: Callable[[Tensor], Tensor] | None = None

    def __post_init__(self) -> None:
        if not callable(getattr(self.drafter, "propose", None)):
            raise InputError(f"drafter is {type(self.drafter).__name__}, expected a Drafter, or a Drafting with one")
        if self.num_tokens is not None:
            check_count("num_tokens", self.num_tokens, 1)
            if self.num_tokens > self.drafter.num_draft_tokens:
                raise InputError(f"num_tokens is {self.num_tokens}, the drafter has {self.drafter.num_draft_tokens}")
        if self.schedule is not None and not callable(self.schedule):
            raise InputError(f"schedule is {self.schedule!r}, expected a function of the confidences")
        if self.schedule is not None and getattr(self.drafter, "confidence_head", True) is None:
            raise InputError("schedule: this drafter has no confidence head (its config's enable_confidence_head)")


@dataclass
class DraftStats:
    """What drafting did. A round of a row is one pass of the target for it; tokens after its end do not count."""

    row_rounds: int = 0
    new_tokens: int = 0  # of those rounds: the prompt's own pass is none
    checked: list[int] = field(default_factory=list)  # drafts that the target read, by position in the block
    accepted: list[int] = field(default_factory=list)
    proposed: int = 0
    draft_seconds: float = 0.0
    verify_seconds: float = 0.0  # the target's pass, verdict and roll-back

    @property
    def tokens_per_pass(self) -> float:
        """The acceptance length: 1 without any luck, gamma + 1 at best."""
        return self.new_tokens / self.row_rounds if self.row_rounds else 0.0

    def acceptance(self) -> list[float]:
        """By position: accepted of those checked there. A draft after a rejected one was checked and did not stand."""
        return [a / c if c else 0.0 for a, c in zip(self.accepted, self.checked, strict=True)]


# ---------------------------------------------------------------- the rounds


class Speculation:
    """The drafter's side of one call of `generate`: its context, its rounds, its counts."""

    def __init__(
        self,
        model: Any,
        drafting: Drafting,
        batch_size: int,
        temperature: Real,
        top_k: Real | None,
        top_p: Real | None,
        generator: torch.Generator,
    ) -> None:
        if getattr(drafting.drafter, "model", model) is not model:
            raise InputError("drafter: made for another model object, expected one of the model that generates")
        self.model, self.drafting, self.drafter = model, drafting, drafting.drafter
        self.width = drafting.num_tokens or self.drafter.num_draft_tokens
        self.sampling, self.generator = (temperature, top_k, top_p), generator
        self.is_greedy = temperature == 0
        self.vocabulary = getattr(model, "vocabulary", WHOLE)  # a model on many ranks may have another
        self.stats = DraftStats(checked=[0] * self.width, accepted=[0] * self.width)
        self.context = self.drafter.new_context(batch_size)

    def read(self, input_ids: Int[Tensor, "B T"], *, cache: Any, **options: Any) -> Any:
        """Run the model on tokens that are certain, and tell the drafter."""
        before = list(cache.lengths)
        with self._observe(cache) as taps:
            model = cache if isinstance(cache, Stepping) else self.model
            output = model(input_ids, cache=cache, **options)
        self._append(taps, cache, [new - old for new, old in zip(cache.lengths, before, strict=True)])
        output.logits = self.vocabulary.spread(output.logits, self.sampling[0])  # the first token is not chosen here
        return output

    def _observe(self, cache: Any) -> AbstractContextManager[dict[int, Tensor]]:
        return cache.observe() if isinstance(cache, Stepping) else self.drafter.observe(self.model)

    def _append(self, taps: Any, cache: Any, counts: list[int]) -> None:
        self.drafter.append(self.context, taps, counts)
        if self.context.lengths != cache.lengths:
            raise RuntimeError(f"the drafter has read {self.context.lengths} tokens, the target {cache.lengths}")

    def _choose(self, logits: Float[Tensor, "B V"]) -> tuple[Int[Tensor, " B"], Float[Tensor, "B V"] | None]:
        """The drafter's next token of every row, and what it was drawn from."""
        if self.is_greedy or self.drafting.greedy:
            return self.vocabulary.best(logits), None
        q, _ = self.vocabulary.distribution(logits, *self.sampling)  # a drafter that breaks costs speed, nothing else
        return self.vocabulary.sample(q, self.generator), q

    @torch.inference_mode()
    def round(self, cache: Any, anchors: Int[Tensor, " B"], room: list[int], eos: set[int]) -> list[list[int]]:
        """The new tokens of every row: at most `room` of them, none for 0, and none after an end-of-sequence id.

        NOT_FINITE stands where the target's logits are not finite, and ends a row's list.
        """
        start = time.perf_counter()
        limits = [min(self.width, max(tokens - 1, 0)) for tokens in room]
        drafts, q, widths = self._draft(cache, anchors, limits)
        mid = time.perf_counter()

        n = max(widths)
        drafts, q = drafts[:, :n], None if q is None else q[:, :n]
        counts = torch.tensor([1 + w if tokens else 0 for w, tokens in zip(widths, room, strict=True)])
        is_token = torch.arange(n + 1) < counts[:, None]
        mask = None if is_token.all() else is_token.to(anchors.device)
        before = list(cache.lengths)
        with self._observe(cache) as taps:
            block = torch.cat([anchors[:, None], drafts], dim=1)
            if isinstance(cache, Stepping):
                output = cache.append(block, counts.tolist())
            else:
                output = self.model(block, cache=cache, attention_mask=mask)
        limit = torch.tensor(widths, device=anchors.device)
        if isinstance(cache, Stepping) and cache.seeds is not None:
            best = cache.tokens()[:, : n + 1]  # drawn, whatever the drafts are
            sound = best != NOT_FINITE
            accepted, token = accept_greedy(best, drafts, limit)
        elif self.is_greedy:
            largest, best = output.logits.max(dim=-1)
            sound = largest.isfinite()
            accepted, token = accept_greedy(best, drafts, limit)
        else:
            p, sound = self.vocabulary.distribution(output.logits, *self.sampling)
            accepted, token = accept(p, q, drafts, limit, self.generator, self.vocabulary)
        written = torch.cat([drafts, token[:, None]], dim=1).scatter(1, accepted[:, None], token[:, None])
        written = torch.where(sound, written, NOT_FINITE).tolist()

        new = []
        for row, a in enumerate(accepted.tolist()):
            tokens = written[row][: a + 1] if room[row] else []
            end = next((i + 1 for i, t in enumerate(tokens) if t in eos or t == NOT_FINITE), len(tokens))
            new.append(tokens[:end])
            self._count(new[-1], a, widths[row])
        # Row j of the pass read the anchor or draft j and gave new token j + 1: as many stay as there are new tokens.
        kept = [len(tokens) for tokens in new]
        cache.crop([old + count for old, count in zip(before, kept, strict=True)])
        self._append(taps, cache, kept)
        self.stats.draft_seconds += mid - start
        self.stats.verify_seconds += time.perf_counter() - mid
        return new

    def _draft(self, cache: Any, anchors: Tensor, limits: list[int]) -> tuple[Tensor, Tensor | None, list[int]]:
        """Drafts, their distributions, and how many of each row's to check."""
        n = max(limits)
        if n == 0:
            return anchors[:, None][:, :0], None, limits
        on_device = isinstance(cache, Stepping) and cache.seeds is not None
        choose = cache.choice(self.drafting.greedy) if on_device else self._choose
        tokens, q, confidence = self.drafter.propose(self.context, anchors, n, choose)
        self.stats.proposed += sum(limits)
        running = [row for row, limit in enumerate(limits) if limit]
        if self.drafting.schedule is None:
            return tokens, q, limits
        scheduled = torch.as_tensor(self.drafting.schedule(confidence[running]))
        if scheduled.shape != (len(running),) or scheduled.is_floating_point() or (scheduled < 0).any():
            raise InputError(f"schedule: gave {scheduled!r:.80}, expected {len(running)} counts >= 0, one a row")
        widths = [0] * len(limits)
        for row, width in zip(running, scheduled.tolist(), strict=True):
            widths[row] = min(width, limits[row])
        return tokens, q, widths

    def _count(self, new: list[int], accepted: int, width: int) -> None:
        """A row's part in the counts; where the row ends within the block, the rest of the block is left out."""
        if not new:
            return
        self.stats.row_rounds += 1
        self.stats.new_tokens += len(new)
        is_cut = len(new) <= accepted
        for k in range(len(new) if is_cut else width):
            self.stats.checked[k] += 1
            self.stats.accepted[k] += k < accepted


@torch.inference_mode()
def measure_seconds(
    model: Any, drafter: Any, input_ids: Int[Tensor, "R T"], most: int | None = None, repeats: int = 7
) -> list[float]:
    """Median seconds of a round after R prompts, in which the target reads 1, 2, ... R `most` tokens in all.

    The table of `Throughput`: drafting a block and checking that much of it. Measured where all rows check equally
    many, R w tokens; between, interpolated; fewer than R tokens cost what R do.

    most: of one row; None for gamma + 1.
    """
    most = most or drafter.num_draft_tokens + 1
    R = len(input_ids)
    cache, context = model.new_cache(R), drafter.new_context(R)
    with drafter.observe(model) as taps:
        model(input_ids, cache=cache, logits_to_keep=1)
    drafter.append(context, taps, [input_ids.shape[1]] * R)
    times: list[list[float]] = [[] for _ in range(most)]
    for _ in range(repeats + 1):  # the first round warms up; widths take turns
        for width, taken in enumerate(times, start=1):
            block = input_ids[:, :1].expand(-1, width)
            start = time.perf_counter()
            drafter.propose(context, block[:, 0], drafter.num_draft_tokens, lambda logits: (logits.argmax(-1), None))
            before = cache.length
            with drafter.observe(model):
                model(block, cache=cache).logits.argmax(dim=-1).tolist()
            taken.append(time.perf_counter() - start)
            cache.crop(before)
    measured = [median(taken[1:]) for taken in times]
    return (
        [measured[0]] * (R - 1)
        + [low + (high - low) * i / R for low, high in pairwise(measured) for i in range(R)]
        + measured[-1:]
    )
