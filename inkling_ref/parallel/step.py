"""A decoding step on one rank: where ranks meet.

All else of `DecodeStep` runs on a rank's heads, experts and rows of the vocabulary as it does on those of a whole
model. After attention and after the experts one all_reduce adds the partial sums up, and every rank convolves all
channels: reduce_scatter, convolution of a part and gather, as in `layers`, send as much in two calls, of which a step
can spare none. The taps of all channels, which are small, come together once, when the step is made.

A prompt may be cut by tokens, as in `layers`: each rank then mixes, norms and routes T / tp of them. Its convolutions
have all channels of those, and need the inputs before the first; and where the prompt ends, every rank needs the last
ones, for its steps. Both are few tokens, of which one more all_reduce adds the partial sums up:

    partial [B, T, D]         --reduce_scatter-->  y [B, T / tp, D]
    its edges [B, tp + 1, N, D]  --all_reduce-->   before y, and after the prompt
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..decode_step import Alone, Prompt
from ..errors import InputError
from ..model import Inkling
from ..short_conv import ShortConv


def as_table(e: Float[Tensor, "B T D"]) -> tuple[Int[Tensor, "B T"], Float[Tensor, "rows D"]]:
    """Embeddings as a table of their own, and their rows in it."""
    return torch.arange(e.shape[0] * e.shape[1], device=e.device).view(e.shape[:2]), e.flatten(0, 1)


class Ranks(Alone):
    """What a step asks of the other ranks of a model."""

    def __init__(self, model: Inkling) -> None:
        """
        Raises:
            InputError: for groups of ranks with rows of their own, or tokens that are sent.
        """
        super().__init__(model)
        plan = model.mesh.plan
        for name, value, expected in (("dp", plan.dp, 1), ("exchange", plan.exchange, "all_reduce")):
            if value != expected:
                raise InputError(f"decode step: {name} is {value}, expected {expected}")
        self.tp, self.current, head = model.mesh.tp, model.current, model.llm.logits
        self.first, self.used = head.first, head.counts[self.tp.rank]
        self.edges: tuple[Prompt, Tensor, Tensor, Tensor] | None = None  # of a prompt, where its edges are

    def embedding(self, ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B T"], Float[Tensor, "rows D"]]:
        """The embeddings of these ids, from the ranks that hold them, are a table of their own."""
        self.current.T = None  # a step is never cut
        return as_table(self.model.llm.embed(ids))

    def enter(self, ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B carried"], Float[Tensor, "rows D"]]:
        return as_table(self.current.enter(self.model.llm.embed(ids)))

    def carried(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B carried D"]:
        return x if self.current.T is None else self.whole_chunks(x).chunk(self.tp.size, dim=1)[self.tp.rank]

    def all_tokens(self, xs: list[Float[Tensor, "B carried D"]]) -> list[Float[Tensor, "B T D"]]:
        return xs if self.current.T is None else [self.current.all_tokens(x).contiguous() for x in xs]

    def whole_chunks(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B chunks D"]:
        """With as many zeros as the last ranks' tokens lack."""
        missing = self.current.chunk * self.tp.size - x.shape[1]
        return F.pad(x, (0, 0, 0, missing)) if missing else x

    def taps(self, conv: ShortConv) -> Float[Tensor, "D 1 K"]:
        return self.tp.gather(conv.weight.detach(), 0)

    @contextmanager
    def joined(
        self, partial: Float[Tensor, "B T D"], state: Float[Tensor, "B N D"], prompt: Prompt | None
    ) -> Iterator[tuple[Float[Tensor, "B carried D"], Float[Tensor, "B N D"]]]:
        if self.current.T is None:
            with super().joined(self.tp.sum(partial), state, prompt) as found:
                yield found
            return
        N, tp = state.shape[1], self.tp
        if self.edges is None or self.edges[0] is not prompt:  # the same in all layers
            token = self.edge_tokens(prompt, N)[..., None]
            self.edges = prompt, token.clamp(0, self.current.T - 1), (token + N).clamp(0, N - 1), token < 0
        _, new, old, is_old = self.edges
        edges = tp.sum(partial.take_along_dim(new, dim=1))
        edges = torch.where(is_old, state.take_along_dim(old, dim=1), edges)
        y = tp.reduce_scatter(self.whole_chunks(partial), 1)
        yield y.contiguous(), edges[:, N * tp.rank : N * (tp.rank + 1)].contiguous()
        state.copy_(edges[:, N * tp.size :])

    def edge_tokens(self, prompt: Prompt, N: int) -> Int[Tensor, "B edges"]:
        """The N tokens before each rank's first, and each row's last N; negative: before the prompt."""
        starts = self.current.chunk * torch.arange(self.tp.size, device=prompt.counts.device)
        ends = torch.cat([starts.expand(len(prompt.counts), -1), prompt.counts[:, None]], dim=1)
        return (ends[..., None] + torch.arange(-N, 0, device=ends.device)).flatten(1)

    def head(self) -> Float[Tensor, "rows D"]:
        return self.model.llm.unembed.weight[: max(self.used, 1)]

    def candidates(
        self, token: Int[Tensor, " N"], logit: Float[Tensor, " N"], temperature: float
    ) -> tuple[Int[Tensor, "ranks N"], Float[Tensor, "ranks N"]]:
        if temperature:  # the noise of a seed goes by the rows of the whole vocabulary
            raise InputError(f"decode step: temperature {temperature} on many ranks, expected 0, or top_k or top_p")
        if not self.used:
            logit = torch.full_like(logit, -torch.inf)
        # One message: a logit's 64 bits travel as an integer.
        found = self.tp.gather(torch.stack([token, logit.view(torch.int64)])[None], 0)
        return found[:, 0], found[:, 1].view(torch.float64)
