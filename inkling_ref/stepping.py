"""What `generate` and `Speculation` call where they run on a `DecodeStep`: model and cache in one object.

Prompts are read by a call with the arguments of `Inkling.forward`; `append` decodes. Lengths and `crop` are those of a
`Cache`: here a length is a number on the host, and the next step learns from it how many tokens do not count.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.nn import functional as F

from .decode_step import DecodeStep
from .dspark import MarkovHead
from .errors import InputError
from .fused import choose
from .model import Inkling


class StepOutput:
    """As `model.Output`. The logits are made where they are asked for: to choose on the device takes none."""

    def __init__(self, model: Inkling, hidden: Float[Tensor, "B T D"]) -> None:
        self.model, self.hidden = model, hidden

    @cached_property
    def logits(self) -> Float[Tensor, "B T V"]:
        return self.model.llm.logits(self.hidden)


@dataclass
class Choice:
    """Chooses drafts, for `Drafter.propose`, by the numbers by which the target chooses a token at the same place.

    If the drafter is certain of what the target is certain of, and wavers as it does, both choose the same.
    """

    temperature: float
    seeds: Int[Tensor, " B"]
    position: Int[Tensor, " B"]  # of the token before
    draft_rnn: Callable

    def __call__(self, logits: Float[Tensor, "B V"]) -> tuple[Int[Tensor, " B"], None]:
        self.position = self.position + 1
        return choose(logits, self.temperature, self.seeds, self.position), None

    def rnn(
        self, head: MarkovHead, h: Float[Tensor, "B n D"], base: Float[Tensor, "B n V"], anchors: Int[Tensor, " B"]
    ) -> Int[Tensor, "B n"]:
        """All drafts of an rnn head."""
        positions = self.position[:, None] + torch.arange(1, h.shape[1] + 1, device=h.device)
        return self.draft_rnn(head, h, base, anchors, self.temperature, self.seeds, positions)


class Stepping:
    """One generation on a step."""

    def __init__(
        self,
        step: DecodeStep,
        model: Inkling,
        needed: Sequence[int],
        temperature: Real,
        seeds: Int[Tensor, " B"] | None,
        drafter: Any = None,
        drafts: int = 0,
    ) -> None:
        """
        Args:
            needed: positions that each row may reach.
            seeds: with them, tokens are chosen on the device; None: by whoever asks for the logits.
            drafts: of the drafter, how many a pass checks.

        Raises:
            InputError: for a step of another model or number of rows, without the drafter's taps, with too few
                positions, or of too few tokens.
        """
        if step.model is not model:
            raise InputError("step: made for another model object, expected one of the model that generates")
        if len(step.ends) != len(needed):
            raise InputError(f"step: made for {len(step.ends)} rows, expected {len(needed)} as there are prompts")
        if getattr(drafter, "config", step.tapped) != step.tapped:
            raise InputError("step: made without this drafter's taps, expected DecodeStep(..., taps=drafter.config)")
        if step.tokens < 1 + drafts:
            raise InputError(f"step: reads {step.tokens} tokens, expected {1 + drafts} for drafts of {drafts}")
        # The last step begins at most two positions before the end: its first token's successor is the row's last.
        if max(needed) - 2 + step.tokens > step.capacity:
            raise InputError(
                f"step: {step.capacity} positions, expected {max(needed) - 2 + step.tokens} for these prompts, "
                "max_new_tokens and the tokens of a step"
            )
        self.model, self.step, self.temperature, self.seeds = model, step, float(temperature), seeds

    def begin(self) -> "Stepping":
        """Forget what the step held."""
        self.step.reset()
        self.lengths = list(self.step.ends)
        return self

    def __call__(
        self,
        input_ids: Int[Tensor, "B T"],
        cache: "Stepping",
        attention_mask: Bool[Tensor, "B T"] | None = None,
        image_features: Float[Tensor, "tiles D"] | None = None,
        logits_to_keep: int = 1,
    ) -> StepOutput:
        """Read prompts: the hidden state after each row's last token."""
        hidden = self.step.prefill(input_ids, attention_mask, image_features)
        self.lengths = list(self.step.ends)
        return StepOutput(self.model, hidden[:, None])

    def append(self, ids: Int[Tensor, "B n"], counts: list[int]) -> StepOutput:
        """Decode each row's first counts[b] tokens; a row of none has ended."""
        step, n = self.step, ids.shape[1]
        block = F.pad(ids, (0, step.tokens - n))
        rejected = [end - length for end, length in zip(step.ends, self.lengths, strict=True)]
        hidden = step(block, rejected, [count > 0 for count in counts])
        self.lengths = [length + count for length, count in zip(self.lengths, counts, strict=True)]
        return StepOutput(self.model, hidden[:, :n])

    def tokens(self) -> Int[Tensor, "B T"]:
        """The token after each of the newest step's: see `DecodeStep.next_tokens`."""
        return self.step.next_tokens(self.temperature, self.seeds)

    def choice(self, is_greedy: bool) -> "Choice":
        """How drafts of the next round are chosen."""
        position = torch.tensor(self.lengths, device=self.seeds.device)
        return Choice(0.0 if is_greedy else self.temperature, self.seeds, position, self.step.ops.draft_rnn)

    def crop(self, lengths: Sequence[int]) -> None:
        """Forget positions of the newest step."""
        self.lengths = list(lengths)

    @contextmanager
    def observe(self) -> Iterator[dict[int, Tensor]]:
        """As `dspark.observe`."""
        taps: dict[int, Tensor] = {}
        yield taps
        taps.update(self.step.taps)
