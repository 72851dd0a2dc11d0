"""A decoding step on one rank: where ranks meet.

All else of `DecodeStep` runs on a rank's heads, experts and rows of the vocabulary as it does on those of a whole
model. After attention and after the experts one all_reduce adds the partial sums up, and every rank convolves all
channels: reduce_scatter, convolution of a part and gather, as in `layers`, send as much in two calls, of which a step
can spare none. The taps of all channels, which are small, come together once, when the step is made.
"""

import torch
from jaxtyping import Float, Int
from torch import Tensor

from ..decode_step import Alone
from ..errors import InputError
from ..model import Inkling
from ..short_conv import ShortConv


class Ranks(Alone):
    """What a step asks of the other ranks of a model."""

    def __init__(self, model: Inkling) -> None:
        """
        Raises:
            InputError: for groups of ranks with rows of their own, tokens that are sent, or cut.
        """
        super().__init__(model)
        plan = model.mesh.plan
        for name, value, expected in (
            ("dp", plan.dp, 1), ("exchange", plan.exchange, "all_reduce"), ("sequence", plan.sequence, False),
        ):  # fmt: skip
            if value != expected:
                raise InputError(f"decode step: {name} is {value}, expected {expected}")
        self.tp, head = model.mesh.tp, model.llm.logits
        self.first, self.used = head.first, head.counts[self.tp.rank]

    def embedding(self, ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B T"], Float[Tensor, "rows D"]]:
        """The embeddings of these ids, from the ranks that hold them, are a table of their own."""
        e = self.model.llm.embed(ids).flatten(0, 1)
        return torch.arange(len(e), device=ids.device).view_as(ids), e

    def taps(self, conv: ShortConv) -> Float[Tensor, "D 1 K"]:
        return self.tp.gather(conv.weight.detach(), 0)

    def add_up(self, partial: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        return self.tp.sum(partial)

    def head(self) -> Float[Tensor, "rows D"]:
        return self.model.llm.unembed.weight[: max(self.used, 1)]

    def best(
        self, token: Int[Tensor, " N"], logit: Float[Tensor, " N"], temperature: float
    ) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
        if temperature:  # the noise of a seed goes by the rows of the whole vocabulary
            raise InputError(f"decode step: temperature {temperature} on many ranks, expected 0, or top_k or top_p")
        if not self.used:
            logit = torch.full_like(logit, -torch.inf)
        # One message: ids are exact in float64.
        pairs = self.tp.gather(torch.stack([logit.double(), (token + self.first).double()])[None], 0)
        winner = pairs[:, 0].argmax(dim=0, keepdim=True)  # of equal logits the first; a NaN above all
        logit, token = (pairs[:, i].gather(0, winner)[0] for i in range(2))
        return token.long(), logit
