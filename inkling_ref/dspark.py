r"""DSpark: a small drafter that guesses the target's next tokens, a block at a time.

**Context.** The target exposes the depth state at a few places (taps) of every committed token; concatenated and fused,
they are all that the drafter knows of the text. Every draft layer makes its keys and values from the same C:

$$ C_t = \mathrm{RMSNorm}(W_{fc} \, [h_t^{(1)}; \dots; h_t^{(m)}]) $$

**Block.** The anchor x_0 is the newest token, at position p, which the target has not read yet. The drafter reads the
anchor and masks, all slots at once and seeing each other, and predicts x_1 .. x_gamma, the tokens at p + 1 ...:

    one_plus_n     slots x_0, M, .., M at p .. p + gamma;       slot j >= 1 predicts its own position: h_k = y_k
    anchor_first   slots x_0, M, .., M at p .. p + gamma - 1;   slot j predicts the next position:     h_k = y_{k-1}

A draft layer, with n = RMSNorm(x), attends from the block to [context, block] and has a SwiGLU:

$$ x \leftarrow x + W_o \, \mathrm{Attn}(W_q n, W_k [C; n], W_v [C; n]), \qquad
   x \leftarrow x + W_{down}(\mathrm{silu}(W_{gate} u) \odot W_{up} u), \; u = \mathrm{RMSNorm}(x) $$

Embedding and unembedding are the target's own, its soft cap included: U_k = cap(W_u h_k), for all k in one pass.

**Head.** What the parallel pass cannot know, the tokens drafted before, is added left to right in r dimensions. With
e_k = W_1[x_{k-1}]:

$$ \ell_k = U_k + B_k, \qquad \text{vanilla: } B_k = W_2 e_k, \qquad
   \text{gated: } B_k = W_2 (\sigma(W_g [h_k; e_k] + b_g) \odot e_k) $$

$$ \text{rnn: } [a; b; o] = W_J [s_{k-1}; e_k; h_k] + b_J, \quad
   s_k = \sigma(a) \odot s_{k-1} + (1 - \sigma(a)) \odot \tanh b, \quad B_k = W_2 \tanh o $$

The output reads the old state, and s_0 = 0 at the start of every block: nothing of the head is kept between blocks.

**Confidence.** An estimate that the target accepts x_k once it accepted all before, made without knowing x_k:

$$ c_k = \sigma(w_c \cdot [h_k; e_k] + b_c) $$

Tensors (DeepSpec's names; those of Inkling's attention where that has more): fc, hidden_norm, norm,
layers.{i}.{input_layernorm, post_attention_layernorm, self_attn.*, mlp.*}, markov_head.*, confidence_head.proj.
Here N is the slots of a block (of all blocks, in training), gamma the tokens that are drafted.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .attention import Named, l2_clip, relative_bias, scaled_l2_clip, softmax_with_sink
from .cache import Log
from .config import TextConfig
from .draft_config import DSparkConfig
from .model import Inkling
from .residual import SOURCE_EPS, DepthState, RMSNorm, mix, rms, rms_norm, rounded, wide

# ---------------------------------------------------------------- taps


def places(config: DSparkConfig, L: int) -> dict[int, int]:
    """For each tap the depth state that it looks at: number i enters layer i, number L leaves the last layer."""
    return {id: min(id + (config.tap == "after"), L) for id in config.target_layer_ids}


def read_tap(is_mixture: bool, depth: DepthState, query: Tensor | None) -> Float[Tensor, "B T D"]:
    """What a tap takes of a depth state: the running sum, or the mixture that `query` [D] or [3, D] makes there."""
    if query is None or not is_mixture:  # the first layer reads its only source
        return depth.partial
    first = query.view(-1, query.shape[-1])[:1]  # of a full layer's three: the mixture its queries read
    return rounded(mix(depth.sources(), first, SOURCE_EPS)[:, :, 0], depth.partial.dtype)


@contextmanager
def observe(model: Inkling, config: DSparkConfig) -> Iterator[dict[int, Float[Tensor, "B T D"]]]:
    """Within it, a forward pass of the target leaves its taps by layer id, a row's tokens first and padding last.

    Hooks, not code in the model: without a drafter, decoding does nothing for it.
    """
    llm, taps, L, handles = model.llm, {}, model.config.text.num_hidden_layers, []

    def see(id: int, depth: DepthState, query: Tensor | None) -> None:
        taps[id] = read_tap(config.tap == "mixed" or id == L, depth, query)

    for id, place in places(config, L).items():
        if id == L and config.final_tap == "norm":
            handle = llm.register_forward_hook(lambda _, inputs, hidden: taps.update({L: hidden}))
        elif place == L:
            query = llm.attn_res.output_query
            handle = llm.layers[-1].register_forward_hook(lambda _, inputs, depth, id=id, q=query: see(id, depth, q))
        else:
            handle = llm.layers[place].register_forward_pre_hook(lambda _, inputs, id=id: see(id, *inputs[:2]))
        handles.append(handle)
    try:
        yield taps
    finally:
        for handle in handles:
            handle.remove()


# ---------------------------------------------------------------- the block's layers


def rotate(x: Float[Tensor, "B T H d"], positions: Int[Tensor, "b T"], theta: float) -> Float[Tensor, "B T H d"]:
    """Rotary positions: channel pairs (i, i + d/2) turned by positions theta^(-2i/d)."""
    d = x.shape[-1]
    frequency = theta ** (-torch.arange(0, d, 2, device=x.device, dtype=wide(x).dtype) / d)
    angle = positions[..., None, None] * frequency
    a, b = wide(x).chunk(2, dim=-1)
    return rounded(torch.cat([a * angle.cos() - b * angle.sin(), b * angle.cos() + a * angle.sin()], dim=-1), x.dtype)


def linear(size_in: int, size_out: int) -> nn.Linear:
    """A product without a bias."""
    return nn.Linear(size_in, size_out, bias=False)


class DraftAttention(nn.Module):
    """From block slots to context and block."""

    def __init__(self, config: DSparkConfig, target: TextConfig) -> None:
        super().__init__()
        self.config, self.target = config, target
        D, H, G, d = target.hidden_size, config.num_attention_heads, config.num_key_value_heads, config.head_dim
        self.q_proj, self.k_proj, self.v_proj = linear(D, H * d), linear(D, G * d), linear(D, G * d)
        self.o_proj = linear(H * d, D)
        if config.qk_norm == "rms":
            self.q_norm, self.k_norm = RMSNorm(d), RMSNorm(d)
        else:
            self.q_l2_clip = Named("scale", torch.ones(H, d))
        if config.d_rel:
            self.wr_du = linear(D, H * config.d_rel)
            self.rel_l2_clip = Named("scale", torch.ones(H, config.d_rel))
            self.rel_logits_proj = Named("proj", torch.randn(config.d_rel, config.rel_extent) / 16)
        if config.attention_gate:
            self.gate_attn = linear(D, H * d)
        if config.attention_sink:
            self.attn_sink_proj = linear(D, H)

    def key_value(
        self, x: Float[Tensor, "B T D"], positions: Int[Tensor, "b T"]
    ) -> tuple[Float[Tensor, "B G T d"], Float[Tensor, "B G T d"]]:
        """Of context features or block slots: the same projections."""
        c, eps = self.config, self.config.rms_norm_eps
        k, v = (p(x).unflatten(-1, (c.num_key_value_heads, c.head_dim)) for p in (self.k_proj, self.v_proj))
        if c.qk_norm == "rms":
            k = rounded(rms_norm(k, self.k_norm.weight, eps), k.dtype)
        else:
            k, v = l2_clip(k, self.target.qk_l2_clip_threshold), rounded(rms(v, eps), v.dtype)
        if c.rope_theta is not None:
            k = rotate(k, positions, c.rope_theta)
        return k.transpose(1, 2), v.transpose(1, 2)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        positions: Int[Tensor, "b N"],
        k: Float[Tensor, "B G S d"],
        v: Float[Tensor, "B G S d"],
        distance: Int[Tensor, "b N S"],
        visible: Bool[Tensor, "b N S"],
    ) -> Float[Tensor, "B N D"]:
        c, (B, N, _), S = self.config, x.shape, k.shape[2]
        H, G, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
        q = self.q_proj(x).view(B, N, H, d)
        if c.qk_norm == "rms":
            q = rounded(rms_norm(q, self.q_norm.weight, c.rms_norm_eps), q.dtype)
        else:
            q = scaled_l2_clip(q, self.q_l2_clip.scale, self.target.qk_l2_clip_threshold)
        if c.rope_theta is not None:
            q = rotate(q, positions, c.rope_theta)
        grouped = q.transpose(1, 2).reshape(B, G, -1, d)
        scores = (grouped @ k.transpose(-1, -2)).view(B, H, N, S) * d**-0.5
        if c.d_rel:  # later slots of the block, at negative distances, have no bias
            r = self.wr_du(x).view(B, N, H, c.d_rel)
            r = scaled_l2_clip(r, self.rel_l2_clip.scale, self.target.rel_l2_clip_threshold).transpose(1, 2)
            scores = scores + relative_bias(r, self.rel_logits_proj.proj, distance)
        scores = scores.masked_fill(~visible[:, None], -torch.inf)
        if c.attention_sink:
            p = softmax_with_sink(scores, self.attn_sink_proj(x).transpose(1, 2))
        else:
            p = rounded(wide(scores).softmax(dim=-1), scores.dtype)
        o = (p.view(B, G, -1, S) @ v).view(B, H, N, d).transpose(1, 2).reshape(B, N, H * d)
        if c.attention_gate:
            o = rounded(wide(o) * wide(self.gate_attn(x)).sigmoid(), o.dtype)
        return self.o_proj(o)


class SwiGLU(nn.Module):
    """W_down(silu(W_gate x) * W_up x)."""

    def __init__(self, D: int, width: int) -> None:
        super().__init__()
        self.gate_proj, self.up_proj, self.down_proj = linear(D, width), linear(D, width), linear(width, D)

    def forward(self, x: Float[Tensor, "B N D"]) -> Float[Tensor, "B N D"]:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    """Attention to context and block, then SwiGLU; each reads a norm of the stream and adds to it."""

    def __init__(self, config: DSparkConfig, target: TextConfig, layer: int) -> None:
        super().__init__()
        self.eps = config.rms_norm_eps
        self.window = config.windows[layer] if config.windows else None
        self.input_layernorm, self.post_attention_layernorm = (RMSNorm(target.hidden_size) for _ in range(2))
        self.self_attn = DraftAttention(config, target)
        self.mlp = SwiGLU(target.hidden_size, config.intermediate_size)

    def forward(
        self,
        x: Float[Tensor, "B N D"],
        positions: Int[Tensor, "b N"],
        join: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]],
        distance: Int[Tensor, "b N S"],
        visible: Bool[Tensor, "b N S"],
    ) -> Float[Tensor, "B N D"]:
        """`join` puts the block's keys and values behind the context's."""
        n = rounded(rms_norm(x, self.input_layernorm.weight, self.eps), x.dtype)
        k, v = join(*self.self_attn.key_value(n, positions))
        if self.window is not None:
            visible = visible & (distance < self.window)
        x = x + self.self_attn(n, positions, k, v, distance, visible)
        return x + self.mlp(rounded(rms_norm(x, self.post_attention_layernorm.weight, self.eps), x.dtype))


# ---------------------------------------------------------------- the heads


class MarkovHead(nn.Module):
    """B_k: a correction of the base logits by the tokens drafted before, through r dimensions."""

    def __init__(self, kind: str, V: int, D: int, r: int) -> None:
        super().__init__()
        self.kind = kind
        self.markov_w1, self.markov_w2 = nn.Embedding(V, r), linear(r, V)
        if kind == "gated":
            self.gate_proj = nn.Linear(D + r, r)
        elif kind == "rnn":
            self.joint_proj = nn.Linear(2 * r + D, 3 * r)

    def start(self, h: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape r"]:
        """s_0."""
        return h.new_zeros(*h.shape[:-1], self.markov_w1.weight.shape[1])

    def step(
        self, h: Float[Tensor, "*shape D"], previous: Int[Tensor, "*shape"], s: Float[Tensor, "*shape r"], used: int
    ) -> tuple[Float[Tensor, "*shape V"], Float[Tensor, "*shape r"]]:
        """B_k over the first `used` tokens of the vocabulary, and s_k."""
        u = e = self.markov_w1(previous)
        if self.kind == "gated":
            u = self.gate_proj(torch.cat([h, e], dim=-1)).sigmoid() * e
        elif self.kind == "rnn":
            a, b, o = self.joint_proj(torch.cat([s, e, h], dim=-1)).chunk(3, dim=-1)
            f = a.sigmoid()
            s, u = f * s + (1 - f) * b.tanh(), o.tanh()
        return wide(F.linear(u, self.markov_w2.weight[:used])), s


class ConfidenceHead(nn.Module):
    """w_c and b_c."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.proj = nn.Linear(size, 1)


class Proposal(NamedTuple):
    """Drafted tokens; what they were drawn from (None: each was certain); c_k (None without that head)."""

    tokens: Int[Tensor, "B n"]
    q: Float[Tensor, "B n V"] | None
    confidence: Float[Tensor, "B n"] | None


class DraftContext:
    """Keys and values of every draft layer for the committed positions of each row: nothing else is kept."""

    def __init__(self, config: DSparkConfig, batch_size: int, dtype: torch.dtype, device: torch.device) -> None:
        shape = (batch_size, config.num_key_value_heads, config.head_dim)
        self.layers = [
            tuple(Log(shape, dtype, device) for _ in ("keys", "values")) for _ in range(config.num_hidden_layers)
        ]
        self.lengths = [0] * batch_size

    def starts(self, device: torch.device) -> Int[Tensor, "B 1"]:
        """Where each row's next token stands."""
        return torch.tensor(self.lengths, device=device)[:, None]

    def stop(self, N: int) -> int:
        """How many slots there are with N more tokens."""
        return max(self.lengths) + N

    def extend(self, layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """All keys and values, the new ones after each row's length; they count once `lengths` does."""
        keys, values = self.layers[layer]
        return keys.extend(k, self.lengths), values.extend(v, self.lengths)

    def num_bytes(self) -> int:
        """Bytes held by all layers."""
        return sum(log.data.nbytes for logs in self.layers for log in logs)


class Drafter(nn.Module):
    """The drafter of one target, whose embedding and unembedding it borrows; in float32 on the CPU, until moved.

    Raises InputError for a config that is impossible or does not fit the target.
    """

    def __init__(self, config: DSparkConfig, model: Inkling) -> None:
        super().__init__()
        target = model.config.text
        config.check(target)
        self.config, self.used = config, target.unpadded_vocab_size
        self._target = (model,)  # in a tuple: the target's parameters are not the drafter's
        D, r = target.hidden_size, config.markov_rank
        self.fc = linear(len(config.target_layer_ids) * D, D)
        self.hidden_norm, self.norm = RMSNorm(D), RMSNorm(D)
        self.layers = nn.ModuleList(DraftLayer(config, target, i) for i in range(config.num_hidden_layers))
        self.markov_head = self.confidence_head = None
        if config.markov_head_type != "none":
            self.markov_head = MarkovHead(config.markov_head_type, target.vocab_size, D, r)
        if config.enable_confidence_head:
            self.confidence_head = ConfidenceHead(D + r * config.confidence_head_with_markov)

    @property
    def num_draft_tokens(self) -> int:
        return self.config.num_draft_tokens

    @property
    def model(self) -> Inkling:
        """The target."""
        return self._target[0]

    def observe(self, model: Inkling):
        """See `observe`."""
        return observe(model, self.config)

    def fuse(self, taps: dict[int, Float[Tensor, "B T D"]]) -> Float[Tensor, "B T D"]:
        """C."""
        c = self.fc(torch.cat([taps[id] for id in self.config.target_layer_ids], dim=-1))
        return rounded(rms_norm(c, self.hidden_norm.weight, self.config.rms_norm_eps), c.dtype)

    def new_context(self, batch_size: int) -> DraftContext:
        weight = self.fc.weight
        return DraftContext(self.config, batch_size, weight.dtype, weight.device)

    def append(self, context: DraftContext, taps: dict[int, Float[Tensor, "B T D"]], counts: list[int]) -> None:
        """The taps of each row's first counts[b] tokens join the context; those of the others are dropped."""
        self.read(context, taps)
        context.lengths = [n + c for n, c in zip(context.lengths, counts, strict=True)]

    def read(self, context: DraftContext, taps: dict[int, Float[Tensor, "B T D"]]) -> None:
        """Keys and values of tokens, after each row's length."""
        C = self.fuse(taps)
        positions = context.starts(C.device) + torch.arange(C.shape[1], device=C.device)
        for i, layer in enumerate(self.layers):
            context.extend(i, *layer.self_attn.key_value(C, positions))

    def embed(self, tokens: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape D"]:
        llm = self.model.llm
        e = llm.embed(tokens)
        if not self.config.embed_norm:
            return e
        return rounded(rms_norm(e, llm.embed_norm.weight, llm.config.rms_norm_eps), e.dtype)

    def slots(self, anchors: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape N"]:
        """The tokens of the block after each anchor: itself, then masks."""
        masks = torch.full_like(anchors[..., None], self.config.mask_token_id)
        return torch.cat([anchors[..., None], masks.expand(*anchors.shape, self.config.block_size - 1)], dim=-1)

    def backbone(
        self,
        tokens: Int[Tensor, "B N"],
        positions: Int[Tensor, "b N"],
        join: Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]],
        distance: Int[Tensor, "b N S"],
        visible: Bool[Tensor, "b N S"],
    ) -> Float[Tensor, "B N D"]:
        """y of every slot. join(layer, k, v) puts the slots' keys and values behind the context's."""
        if self.config.is_causal:
            visible = visible & (distance >= 0)
        x = self.embed(tokens)
        for i, layer in enumerate(self.layers):
            x = layer(x, positions, lambda k, v, i=i: join(i, k, v), distance, visible)
        return rounded(rms_norm(x, self.norm.weight, self.config.rms_norm_eps), x.dtype)

    def base_logits(self, h: Float[Tensor, "*shape D"]) -> Float[Tensor, "*shape V"]:
        """U, over the used vocabulary."""
        llm = self.model.llm
        if self.config.softcap:
            return llm.logits(h)
        return wide(F.linear(h, llm.unembed.weight[: self.used]))

    def confidence(
        self, h: Float[Tensor, "*shape D"], previous: Int[Tensor, "*shape"]
    ) -> Float[Tensor, "*shape"] | None:
        """The logits of c_k."""
        if self.confidence_head is None:
            return None
        if self.config.confidence_head_with_markov:
            h = torch.cat([h, self.markov_head.markov_w1(previous)], dim=-1)
        return wide(self.confidence_head.proj(h)[..., 0])

    def block(self, context: DraftContext, anchors: Int[Tensor, " B"]) -> Float[Tensor, "B gamma D"]:
        """h of every token that can be drafted after the anchors, which stand at the context's lengths."""
        N, device = self.config.block_size, anchors.device
        start = context.starts(device)
        positions = start + torch.arange(N, device=device)
        keys = torch.arange(context.stop(N), device=device)
        distance = positions[:, :, None] - keys
        # A slot's key stands at its position, so the block's are the last that count; what lies beyond is stale.
        visible = (keys < start + N)[:, None].expand_as(distance)
        y = self.backbone(self.slots(anchors), positions, context.extend, distance, visible)
        return y[:, self.config.first_slot :]

    def propose(
        self,
        context: DraftContext,
        anchors: Int[Tensor, " B"],
        n: int,
        choose: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    ) -> Proposal:
        """Draft n <= gamma tokens a row. `choose` gives for logits [B, V] the tokens and what they were drawn from.

        With an rnn head `choose.rnn`, if it has that, drafts all of them: see `fused.draft_rnn`.
        """
        h = self.block(context, anchors)[:, :n]
        base = self.base_logits(h)
        head, tokens, distributions = self.markov_head, [anchors], []
        if head is not None and head.kind == "rnn" and hasattr(choose, "rnn"):
            tokens += choose.rnn(head, h, base, anchors).unbind(dim=1)
        else:
            s = None if head is None else head.start(h[:, 0])
            for k in range(n):
                logits = base[:, k]
                if head is not None:
                    correction, s = head.step(h[:, k], tokens[-1], s, self.used)
                    logits = logits + correction
                token, q = choose(logits)
                tokens.append(token)
                distributions.append(q)
        tokens = torch.stack(tokens, dim=1)
        confidence = self.confidence(h, tokens[:, :-1])
        q = torch.stack(distributions, dim=1) if distributions and distributions[0] is not None else None
        return Proposal(tokens[:, 1:], q, None if confidence is None else confidence.sigmoid())
