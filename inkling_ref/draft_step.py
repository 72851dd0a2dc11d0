"""The drafter's part of a round with fixed addresses: what `decode_step` is to the target.

    step = ir.DecodeStep(model, 1, 4096, tokens=1 + drafter.num_draft_tokens, taps=drafter.config)
    step.capture()  # on a GPU
    ir.generate(model, prompt, drafter=ir.DraftStep(drafter, step), step=step)

The operations are the drafter's own. Its context has as many places as the step's rows have positions, from the start,
and a block's attention reads all of them, seen or not: the step's capacity should not be much more than the texts need.
Once the step is captured a round is two graphs here: the drafts, and the taps of the tokens that were read.
"""

from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .decode_step import DecodeStep, captured
from .dspark import DraftContext, Drafter, Proposal
from .errors import InputError
from .stepping import Choice


class DraftPlaces(DraftContext):
    """A context that does not grow; its lengths are on the device too."""

    def __init__(self, drafter: Drafter, batch_size: int, capacity: int) -> None:
        config, like = drafter.config, drafter.fc.weight
        shape = (batch_size, config.num_key_value_heads, capacity, config.head_dim)
        self.layers = [
            tuple(like.new_zeros(shape) for _ in ("keys", "values")) for _ in range(config.num_hidden_layers)
        ]
        self.lengths, self.capacity = [0] * batch_size, capacity
        self.start = torch.zeros(batch_size, dtype=torch.int64, device=like.device)

    def starts(self, device: torch.device) -> Int[Tensor, "B 1"]:
        return self.start[:, None]

    def stop(self, N: int) -> int:
        return self.capacity

    def extend(
        self, layer: int, k: Float[Tensor, "B G T d"], v: Float[Tensor, "B G T d"]
    ) -> tuple[Float[Tensor, "B G S d"], Float[Tensor, "B G S d"]]:
        """All places, those of this call after each row's length."""
        rows = torch.arange(len(k), device=k.device)[:, None]
        slots = self.start[:, None] + torch.arange(k.shape[2], device=k.device)
        for place, new in zip(self.layers[layer], (k, v), strict=True):
            place[rows, :, slots] = new.transpose(1, 2)
        return self.layers[layer]


class DraftStep:
    """A drafter for the texts of one `DecodeStep`; `generate` takes it as it takes a `Drafter`."""

    @torch.inference_mode(False)  # as a step's, its places remain tensors that anybody may write
    def __init__(self, drafter: Drafter, step: DecodeStep) -> None:
        """
        Raises:
            InputError: for a step without this drafter's taps.
        """
        if drafter.config != step.tapped:
            raise InputError("draft step: a step without this drafter's taps, expected taps=drafter.config")
        self.drafter, self.step, self.config, self.model = drafter, step, drafter.config, drafter.model
        self.num_draft_tokens, self.confidence_head = drafter.num_draft_tokens, drafter.confidence_head
        # Padding is read after a row's end, as the drafts are: at most that many places.
        self.context = DraftPlaces(drafter, len(step.ends), step.capacity + max(step.tokens, drafter.config.block_size))
        self.anchors, self.seeds = (torch.zeros_like(self.context.start) for _ in range(2))
        self.reading: tuple[dict, torch.cuda.CUDAGraph] | None = None  # of these taps
        self.drafting: tuple[float, torch.cuda.CUDAGraph, Proposal] | None = None  # at a temperature

    def new_context(self, batch_size: int) -> DraftPlaces:
        """The places, empty."""
        if batch_size != len(self.context.lengths):
            raise InputError(f"draft step: made for {len(self.context.lengths)} rows, expected {batch_size}")
        self.context.lengths = [0] * batch_size
        return self.context

    def append(self, context: DraftPlaces, taps: dict[int, Float[Tensor, "B T D"]], counts: list[int]) -> None:
        """See `Drafter.append`."""
        context.start.copy_(torch.tensor(context.lengths))
        fixed = {} if self.step.graph is None else self.step.captured_taps
        if taps.keys() == fixed.keys() and all(taps[id] is tap for id, tap in fixed.items()):
            if self.reading is None or self.reading[0] is not fixed:
                self.reading = fixed, captured(lambda: self.drafter.read(context, fixed))[0]
            self.reading[1].replay()
        else:  # of a prompt
            self.drafter.read(context, taps)
        context.lengths = [n + c for n, c in zip(context.lengths, counts, strict=True)]

    def propose(self, context: DraftPlaces, anchors: Int[Tensor, " B"], n: int, choose: Callable) -> Proposal:
        """See `Drafter.propose`; of a graph, in a place that the next round reuses."""
        context.start.copy_(torch.tensor(context.lengths))
        if self.step.graph is None or not isinstance(choose, Choice):
            return self.drafter.propose(context, anchors, n, choose)
        self.anchors.copy_(anchors)
        self.seeds.copy_(choose.seeds)
        if self.drafting is None or self.drafting[0] != choose.temperature:

            def run() -> Any:
                own = Choice(choose.temperature, self.seeds, context.start, choose.draft_rnn)
                return self.drafter.propose(context, self.anchors, self.num_draft_tokens, own)

            self.drafting = choose.temperature, *captured(run)
        _, graph, (tokens, _, confidence) = self.drafting
        graph.replay()
        return Proposal(tokens[:, :n], None, None if confidence is None else confidence[:, :n])
