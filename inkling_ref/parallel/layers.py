r"""The modules of one rank. They take the place of the model's own; the depth state in between knows nothing of them.

A sublayer's output reaches its short convolution as this rank's partial sum [B, T, D]: of its heads, of its experts.
There, and nowhere else, the ranks add up. The sum is scattered by channels, convolved where its state lives, and put
together again:

    partial [B, T, D]  --reduce_scatter-->  [B, T, D / tp]  --conv-->  [B, T, D / tp]  --gather-->  y [B, T, D]

**Sequence parallel.** Every rank would mix, norm and route all T tokens alike. In a long call it keeps T / tp of them
instead, from embedding to output mixture; what needs all tokens gathers them, and a convolution returns only its own:

    h [B, T / tp, D]  --gather-->  [B, T, D]  --heads or experts-->  partial [B, T, D]
    partial [B, T, D]  --reduce_scatter-->  [B, T, D / tp]  --conv-->  --swap-->  y [B, T / tp, D]

The swap trades channels for tokens. (Convolving by token needs three tokens of the rank before instead of it, which
saves 1/tp of a reduce_scatter, but leaves a state by token where decoding wants it by channel.)

**Experts, all_reduce.** Every rank sees all tokens and adds up those of its experts. With data-parallel attention the
groups' tokens are gathered first, and the partial sums scattered to the groups after.

**Experts, all_to_all.** Every token has one rank that routes it. That rank sends it, once, to each rank that owns one
of its experts (dispatch), and adds up the partial sums that come back (combine). Complete sums of some tokens, with
zeros elsewhere, are a partial sum as well: the convolution adds the ranks up as before.

In shapes, `carried` are the tokens of a row that this rank takes through the layers: T, or its chunk of them where they
are cut. `channels` are D / tp, `rows` those of the vocabulary.
"""

from collections import Counter
from dataclasses import replace
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from ..backends import Backend
from ..cache import Step, Tail
from ..errors import InputError
from ..model import TextModel
from ..moe import MoE, softcap
from ..quantization import NVFP4
from ..residual import rounded, wide
from ..short_conv import ShortConv
from .collectives import Group
from .plan import Share, owners, split


class Pass:
    """What the modules of a rank must know of the pass that runs: its tokens, here and in other groups.

    T: tokens a row where they are cut among the tp ranks, else None. counts: tokens of every dp group.
    passes, cut_passes: how many there were, by phase of the traffic, and in how many of them tokens were cut.
    """

    def __init__(self, share: Share, tp: Group, dp: Group) -> None:
        self.plan, self.tp, self.dp = share.plan, tp, dp
        self.T: int | None = None
        self.counts = [0]
        self.passes, self.cut_passes = Counter(), Counter()

    def begin(self, tokens: int, device: torch.device) -> list[int]:
        """All groups start a pass, or wait in one: tokens of each, -1 for a group that has nothing left to do."""
        self.counts = [tokens]
        if self.dp.size > 1:
            self.counts = self.dp.gather(torch.tensor(self.counts, device=device), 0).tolist()
        return self.counts

    def enter(self, e: Float[Tensor, "B T D"]) -> Float[Tensor, "B carried D"]:
        """The embeddings that this rank carries through the layers."""
        B, T, _ = e.shape
        self.begin(B * T, e.device)
        plan = self.plan
        self.T = T if plan.sequence and plan.tp > 1 and max(plan.sequence_from, plan.tp) <= T else None
        self.passes[self.tp.traffic.phase] += 1
        if self.T is not None:
            self.cut_passes[self.tp.traffic.phase] += 1
        return self.own_tokens(e)

    def leave(self, hidden: Float[Tensor, "B carried D"]) -> Float[Tensor, "B T D"]:
        whole = self.all_tokens(hidden)
        self.T = None
        return whole

    @property
    def chunk(self) -> int:
        """Tokens a row that a rank carries; the last ranks' may be padding."""
        return -(-self.T // self.plan.tp)

    @property
    def n_local_tokens(self) -> int:
        """Those of `chunk` that are none."""
        return min(max(self.T - self.chunk * self.tp.rank, 0), self.chunk)

    def whole_chunks(self, x: Float[Tensor, "B T C"]) -> Float[Tensor, "B chunks C"]:
        """With as many zeros as the last ranks' tokens lack."""
        missing = self.chunk * self.plan.tp - x.shape[1]
        return F.pad(x, (0, 0, 0, missing)) if missing else x

    def own_tokens(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B carried D"]:
        """Those that this rank carries."""
        return x if self.T is None else self.whole_chunks(x).chunk(self.plan.tp, dim=1)[self.tp.rank]

    def all_tokens(self, x: Shaped[Tensor, "B carried *shape"]) -> Shaped[Tensor, "B T *shape"]:
        return x if self.T is None else self.tp.gather(x, 1)[:, : self.T]

    def to_tokens(self, x: Float[Tensor, "B T channels"]) -> Float[Tensor, "B carried D"]:
        """From this rank's channels of all tokens to all channels of this rank's tokens."""
        tp, chunk, (B, _, channels) = self.tp.size, self.chunk, x.shape
        x = self.whole_chunks(x).unflatten(1, (tp, chunk)).transpose(0, 1)
        return self.tp.swap(x).permute(1, 2, 0, 3).reshape(B, chunk, tp * channels)

    def to_channels(self, x: Float[Tensor, "B carried D"]) -> Float[Tensor, "B T channels"]:
        """The inverse."""
        tp, (B, chunk, D) = self.tp.size, x.shape
        x = x.view(B, chunk, tp, D // tp).permute(2, 0, 1, 3)
        return self.tp.swap(x).transpose(0, 1).reshape(B, tp * chunk, D // tp)[:, : self.T]


class ShardedConv(ShortConv):
    """An output convolution on D / tp channels, in which the ranks' partial sums become one (module docstring)."""

    def __init__(self, conv: ShortConv, current: Pass, takes_own_tokens: bool = False) -> None:
        """`takes_own_tokens`: where tokens are cut, the input is complete and of this rank's tokens."""
        nn.Module.__init__(self)
        self.ops, self.weight = conv.ops, conv.weight
        self.current, self.takes_own_tokens = current, takes_own_tokens

    def forward(self, x: Float[Tensor, "B given D"], step: Step, state: Tail | None) -> Float[Tensor, "B carried D"]:
        current = self.current
        cut = current.T is not None
        x = current.to_channels(x) if cut and self.takes_own_tokens else current.tp.reduce_scatter(x, -1)
        y = super().forward(x, step, state)
        return current.to_tokens(y) if cut else current.tp.gather(y, -1)


class _Message(NamedTuple):
    """Routes, or tokens with theirs, as bytes: one collective carries all."""

    data: UInt8[Tensor, "N bytes"]
    sizes: list[int]
    dtypes: list[torch.dtype]

    @classmethod
    def pack(cls, *parts: Shaped[Tensor, "N _"]) -> "_Message":
        data = [part.contiguous().view(torch.uint8) for part in parts]
        sizes = [d.shape[1] for d in data]
        filled = [F.pad(d, (0, -size % 4)) if size % 4 else d for d, size in zip(data, sizes, strict=True)]
        return cls(torch.cat(filled, dim=1), sizes, [part.dtype for part in parts])

    def unpack(self, data: UInt8[Tensor, "N bytes"]) -> list[Tensor]:
        words = [-(-size // 4) for size in self.sizes]  # bytes one by one would be copied at a fraction of the speed
        parts = data.view(torch.int32).split(words, dim=1)
        # Flat, because a single row is contiguous whatever its stride, and no view of other elements.
        return [
            part.flatten().view(dtype).view(len(data), 4 * n // dtype.itemsize)[:, : size // dtype.itemsize]
            for part, n, size, dtype in zip(parts, words, self.sizes, self.dtypes, strict=True)
        ]


class ShardedMoE(nn.Module):
    """Router, and this rank's experts or its columns of them."""

    def __init__(self, moe: MoE, share: Share, current: Pass, world: Group) -> None:
        super().__init__()
        self.gate, self.experts = moe.gate, moe.experts
        self.current, self.world = current, world
        self.tokens = self.pairs = 0  # that came by; pairs of token and expert that this rank has computed
        self.first, self.stop = share.local_experts.start, share.local_experts.stop
        self.sends, self.has_columns = share.plan.exchange == "all_to_all", share.plan.etp > 1
        table = owners(share.plan, share.config.text.n_routed_experts)
        is_owner = torch.zeros(len(table), share.plan.world, dtype=torch.bool)
        for expert, ranks in enumerate(table):
            is_owner[expert, ranks] = True
        self.is_owner = is_owner  # no buffers: a model that is loaded piece by piece would not move them
        self.is_here = is_owner[:, share.rank].long()  # 1 of an expert that this rank has
        self.use(moe.experts.ops)

    def use(self, ops: Backend) -> None:
        """Run the experts by a backend's operation."""
        self.skips = self.first < self.stop and hasattr(ops.experts, "of_rank")
        is_part = self.skips and self.stop - self.first < len(self.is_owner)
        self.experts.ops = replace(ops, experts=ops.experts.of_rank(self.first)) if is_part else ops

    def owned(
        self, h: Float[Tensor, "N D"], weights: Float[Tensor, "N k"], ids: Int[Tensor, "N k"]
    ) -> Float[Tensor, "N D"]:
        """What this rank's experts add to the weighted sums; a token without one of them gets zeros."""
        if self.skips:
            return self._skipping(h, weights, ids)
        token, choice = ((ids >= self.first) & (ids < self.stop)).nonzero(as_tuple=True)
        out = torch.zeros(h.shape, dtype=weights.dtype, device=h.device)
        self.tokens, self.pairs = self.tokens + len(h), self.pairs + len(token)
        if len(token):
            # One pair a row, with weight 1: the operation then rounds nothing that it would not round for the whole.
            one = torch.ones_like(weights[:1, :1]).expand(len(token), 1)
            y = self.experts(h[token], one, ids[token, choice, None] - self.first)
            out.index_add_(0, token, wide(y) * weights[token, choice, None])
        return rounded(out, h.dtype)

    def _skipping(
        self, h: Float[Tensor, "N D"], weights: Float[Tensor, "N k"], ids: Int[Tensor, "N k"]
    ) -> Float[Tensor, "N D"]:
        """The same, by kernels that find the pairs: nothing waits for the device, as a CUDA graph needs it."""
        if not (ids.is_cuda and torch.cuda.is_current_stream_capturing()):  # nobody sees a graph's replays
            if self.is_here.device != ids.device:
                self.is_here = self.is_here.to(ids.device)
            self.tokens, self.pairs = self.tokens + len(h), self.pairs + self.is_here[ids].sum()
        return self.experts(h, weights, ids)

    def forward(self, h: Float[Tensor, "B carried D"]) -> Float[Tensor, "B returned D"]:
        if self.has_columns and self.experts.quantize and self.experts.stored_format == NVFP4:
            raise InputError("quantize_activations: NVFP4 takes a scale from all columns, expected whole experts (ep)")
        return self._by_sending(h) if self.sends else self._by_summing(h)

    def _by_summing(self, h: Float[Tensor, "B carried D"]) -> Float[Tensor, "B T D"]:
        current, shape = self.current, h.shape[:2]
        weights, ids = self.gate(h.flatten(0, 1))
        if current.T is not None:
            # Two messages: to copy tokens together with their routes and apart again would take longer than a call.
            h, routes = current.all_tokens(h), _Message.pack(weights, ids.int())
            whole = current.all_tokens(routes.data.unflatten(0, shape))
            weights, ids = routes.unpack(whole.flatten(0, 1))
        if current.dp.size == 1:
            return self.owned(h.flatten(0, 1), weights, ids.long()).view_as(h)
        dp, counts = current.dp, [max(n, 0) for n in current.counts]
        message, longest = _Message.pack(h.flatten(0, 1), weights, ids.int()), max(counts)
        real = torch.cat([torch.arange(n, device=h.device) + i * longest for i, n in enumerate(counts)])
        data = dp.gather(F.pad(message.data, (0, 0, 0, longest - len(message.data))), 0)[real]
        all_h, weights, ids = message.unpack(data)
        partial = self.owned(all_h, weights, ids.long())
        padded = partial.new_zeros(dp.size * longest, h.shape[-1]).index_copy(0, real, partial)
        return dp.reduce_scatter(padded, 0)[: len(message.data)].view_as(h)

    def _by_sending(self, h: Float[Tensor, "B carried D"]) -> Float[Tensor, "B carried D"]:
        current = self.current
        flat = h.flatten(0, 1)
        if current.T is None:
            own = split(len(flat), current.tp.size)[current.tp.rank]
            chosen = torch.arange(own.start, own.stop, device=h.device)
        else:
            is_token = torch.arange(h.shape[1], device=h.device) < current.n_local_tokens
            chosen = is_token.repeat(h.shape[0]).nonzero()[:, 0]
        y = self.dispatch_and_combine(flat[chosen])
        return torch.zeros_like(flat).index_copy(0, chosen, y).view_as(h)

    def dispatch_and_combine(self, h: Float[Tensor, "N D"]) -> Float[Tensor, "N D"]:
        """The complete weighted sums of tokens that this rank alone has."""
        world = self.world
        weights, ids = self.gate(h)
        goes_to = self.destinations(ids)
        token = goes_to.T.nonzero()[:, 1]  # by destination, each token once
        sent = goes_to.sum(dim=0)
        received = world.swap(sent[:, None])[:, 0].tolist()
        sent = sent.tolist()
        message = _Message.pack(h, weights, ids.int())
        all_h, weights, ids = message.unpack(world.exchange(message.data[token], sent, received))
        partial = self.owned(all_h, weights, ids.long())
        back = world.exchange(partial, received, sent)
        out = torch.zeros(h.shape, dtype=weights.dtype, device=h.device).index_add_(0, token, back.to(weights.dtype))
        return rounded(out, h.dtype)

    def destinations(self, ids: Int[Tensor, "N k"]) -> Bool[Tensor, "N ranks"]:
        """The ranks that own one of a token's experts."""
        self.is_owner = self.is_owner.to(ids.device)
        return self.is_owner[ids].any(dim=1)


class ShardedEmbedding(nn.Module):
    """Rows of the vocabulary; of a token that another rank holds, this one contributes zeros."""

    def __init__(self, embed: nn.Embedding, share: Share, tp: Group) -> None:
        super().__init__()
        self.weight, self.first, self.tp = embed.weight, share.local_vocabulary.start, tp

    def forward(self, ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        row = ids - self.first
        here = row.clamp(0, len(self.weight) - 1)
        return self.tp.sum(F.embedding(here, self.weight).masked_fill_((row != here)[..., None], 0))


class ShardedHead:
    r"""`llm.logits` with rows of the vocabulary, and what sampling needs of them instead of all.

    Logits are whole unless `sampling` says what they are for. Then a rank sends its likeliest candidates, and all other
    tokens stand as -inf:

    - greedy: one candidate a rank;
    - top_k: the k first of each, which hold the k first of all;
    - top_p: a few of each, and their total mass. The nucleus is known once those above every rank's last reach top_p;
      until then their number doubles. What is left of the mass is spread over the tokens that nobody named, all below
      the cut.
    - all of the distribution (temperature alone): each rank adds noise to its logits and names the largest, which is
      a draw from the whole (Gumbel). It then stands alone. Without noise, nothing is exchanged: every rank's logits
      stay its own, for a verdict on drafts (`generation.Slices`).
    """

    def __init__(self, llm: TextModel, share: Share, tp: Group) -> None:
        self.llm, self.tp = llm, tp
        self.cap, self.used = llm.config.final_logit_softcapping, llm.config.unpadded_vocab_size
        held = [range(r.start, min(r.stop, self.used)) for r in split(llm.config.vocab_size, tp.size)]
        self.counts = [len(r) for r in held]
        self.first = share.local_vocabulary.start
        self.sampling: tuple[float, int | None, float | None] | None = None
        self.noise: torch.Generator | None = None
        self.few = 32  # candidates of a rank that top_p begins with

    def __call__(self, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
        return self.exchange(self.local(hidden))

    def exchange(self, local: Float[Tensor, "*shape rows"]) -> Float[Tensor, "*shape V"]:
        """From every rank's logits to those of the vocabulary, or to what `sampling` needs of them."""
        if self.sampling is None or self.tp.size == 1:
            return self.whole(local)
        temperature, top_k, top_p = self.sampling
        if temperature == 0:
            return self._spread(*self.candidates(local, 1))
        if top_k is not None:
            return self._spread(*self.candidates(local, top_k))
        if top_p is not None and top_p < 1:
            return self._nucleus(local, temperature, top_p)
        return local if self.noise is None else self.draw(local, temperature, self.noise)

    def local(self, hidden: Float[Tensor, "*shape D"], capped: bool = True) -> Float[Tensor, "*shape rows"]:
        """Logits of this rank's rows, -inf where others have one row more."""
        used = self.counts[self.tp.rank]
        logits = wide(F.linear(hidden, self.llm.unembed.weight[:used]))
        logits = softcap(logits, self.cap) if capped else logits
        return F.pad(logits, (0, max(self.counts) - used), value=-torch.inf)

    def whole(self, local: Float[Tensor, "*shape rows"]) -> Float[Tensor, "*shape V"]:
        parts = self.tp.gather(local, -1).unflatten(-1, (self.tp.size, -1))
        return torch.cat([parts[..., i, :n] for i, n in enumerate(self.counts)], dim=-1)

    def candidates(self, local: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Values and ids of every rank's `count` likeliest, ties to the lower id: [..., tp * count]."""
        count = min(count, local.shape[-1])
        if count == 1:
            values, rows = local.max(dim=-1, keepdim=True)  # of equal logits the first; a NaN above all
        else:
            values, rows = local.sort(dim=-1, descending=True, stable=True)
            values, rows = values[..., :count], rows[..., :count]
        ids = torch.where(rows < self.counts[self.tp.rank], rows + self.first, self.used)
        # One message: ids are exact in float64.
        pairs = torch.stack([values.double(), ids.double()], dim=-2)
        pairs = self.tp.gather(pairs, -1)
        return pairs[..., 0, :].to(local.dtype), pairs[..., 1, :].long()

    def _spread(self, values: Tensor, ids: Tensor, rest: Tensor | float = -torch.inf) -> Tensor:
        """Candidates in their places of the vocabulary, `rest` in all others."""
        out = torch.zeros(*values.shape[:-1], self.used, dtype=values.dtype, device=values.device) + rest
        padding = ids == self.used  # of ranks with fewer rows than candidates
        ids, values = torch.where(padding, ids[..., :1], ids), torch.where(padding, values[..., :1], values)
        return out.scatter(-1, ids, values)

    def _nucleus(self, local: Tensor, temperature: float, top_p: float) -> Tensor:
        mass = torch.logsumexp(local / temperature, dim=-1, keepdim=True)
        log_total = torch.logsumexp(self.tp.gather(mass, -1), dim=-1, keepdim=True)
        count = self.few
        while True:
            values, ids = self.candidates(local, count)
            p = (values / temperature - log_total).exp()
            if count >= local.shape[-1]:
                return self._spread(values, ids)
            # Tokens that a rank did not name are not above its last candidate.
            cut = values.unflatten(-1, (self.tp.size, -1))[..., -1].amax(dim=-1, keepdim=True)
            certain = torch.where(values > cut, p, 0).sum(dim=-1, keepdim=True)
            if not (certain < top_p).any():
                break
            count *= 2
        unnamed = self.used - (ids < self.used).sum(dim=-1, keepdim=True)
        rest = (1 - p.sum(dim=-1, keepdim=True)).clamp(min=1e-30) / unnamed
        return self._spread(values, ids, (rest.log() + log_total) * temperature)

    def draw(self, local: Tensor, temperature: float, noise: torch.Generator) -> Tensor:
        """One token by noise that differs by rank; all others stand as -inf."""
        uniform = torch.rand(local.shape, generator=noise, device=local.device, dtype=local.dtype)
        gumbel = -torch.log(-torch.log(uniform.clamp(min=torch.finfo(local.dtype).tiny)))
        values, ids = self.candidates(local / temperature + gumbel, 1)
        value, winner = values.max(dim=-1, keepdim=True)
        drawn = torch.where(value.isfinite(), 0.0, value)  # a NaN stays one, and stops generation
        return self._spread(drawn, ids.gather(-1, winner))
