"""A decoding step on one rank: where ranks meet.

All else of `DecodeStep` runs on a rank's heads, experts and rows of the vocabulary as it does on those of a whole
model. After attention and after the experts one all_reduce adds the partial sums up, and every rank convolves all
channels: reduce_scatter, convolution of a part and gather, as in `layers`, send as much in two calls, of which a step
can spare none. The taps of all channels, which are small, come together once, when the step is made.

A prompt may be cut by tokens, as in `layers`: each rank then mixes, norms and routes T / tp of them. Its convolutions
have all channels of those, and need the inputs before the first (rank 0 has them); and where the prompt ends, every
rank needs the last ones, for its steps. Both are few tokens, of which one more all_reduce adds the partial sums up:

    partial [B, T, D]         --reduce_scatter-->  y [B, T / tp, D]
    its edges [B, tp, N, D]   --all_reduce-->      before y, and after the prompt
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

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
        self.edges: tuple[Prompt, Tensor, tuple[Tensor, Tensor] | None] | None = None  # of a prompt, see `find_edges`

    def embedding(self, ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B T"], Float[Tensor, "rows D"]]:
        """The embeddings of these ids, from the ranks that hold them, are a table of their own."""
        self.current.T = None  # a step is never cut
        return as_table(self.model.llm.embed(ids))

    def enter(self, ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B carried"], Float[Tensor, "rows D"]]:
        return as_table(self.current.enter(self.model.llm.embed(ids)))

    def carried(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B carried D"]:
        return self.current.own_tokens(x)

    def all_tokens(self, xs: list[Float[Tensor, "B carried D"]]) -> list[Float[Tensor, "B T D"]]:
        if self.current.T is None:
            return xs
        # Flat in between, so that one row has the strides of several: else PyTorch multiplies it as a batch.
        return [self.current.all_tokens(x).flatten(0, 1).unflatten(0, (len(x), -1)) for x in xs]

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
        (B, N, _), tp = state.shape, self.tp
        if self.edges is None or self.edges[0] is not prompt:  # the same in all layers
            self.edges = prompt, *self.find_edges(prompt, B, N)
        _, rows, old = self.edges
        edges = tp.sum(partial.flatten(0, 1).index_select(0, rows)).unflatten(0, (B, -1))
        if old is not None:
            is_old, index = old
            edges = torch.where(is_old, state.take_along_dim(index, dim=1), edges)
        first = N * (tp.rank - 1)
        before = edges[:, first : first + N].contiguous() if tp.rank else state
        # Last, because in a graph the operation reads all but y while the kernel in front of it still runs.
        yield tp.reduce_scatter(self.current.whole_chunks(partial), 1).contiguous(), before
        state.copy_(edges[:, -N:])

    def find_edges(
        self, prompt: Prompt, B: int, N: int
    ) -> tuple[Int[Tensor, " rows"], tuple[Bool[Tensor, "B edges 1"], Int[Tensor, "B edges 1"]] | None]:
        """Of every row the N tokens before each rank's but the first, and its last N: where they are in [B T].

        Of what is shorter than N some are before the prompt: which, and where in a convolution's state.
        """
        T, device = self.current.T, prompt.counts.device
        starts = self.current.chunk * torch.arange(1, self.tp.size, device=device)
        ends = torch.cat([starts.expand(B, -1), prompt.counts[:, None]], dim=1)
        token = (ends[..., None] + torch.arange(-N, 0, device=device)).flatten(1)
        rows = (token.clamp(0, T - 1) + T * torch.arange(B, device=device)[:, None]).flatten()
        if min(self.current.chunk, prompt.shortest) >= N:
            return rows, None
        return rows, ((token < 0)[..., None], (token + N).clamp(0, N - 1)[..., None])

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
