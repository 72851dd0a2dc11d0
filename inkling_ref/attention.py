r"""Attention: relative bias from projected profiles, a per-token sink, a sigmoid gate; sliding and full layers.

Per token t and query head h (key/value head g(h) = floor(h G / H)), from the layer's inputs x_q, x_k, x_v:

$$ q = \mathrm{clip}_{c}(s_q \odot W_q x_q), \qquad r = \mathrm{clip}_{c_r}(s_r \odot W_r x_q) $$

$$ k = \mathrm{clip}_{c}(\mathrm{Conv}_k(W_k x_k)), \qquad v = \mathrm{RMS}(\mathrm{Conv}_v(W_v x_v)) $$

$$ \mathrm{clip}_c(u) = u \cdot \min(1, \; c / (\lVert u \rVert + 10^{-6})) $$

Full layers scale q and r, after their clips, with the absolute position:

$$ \tau(t) = 1 + \alpha \log \max((t + 1) / \mathrm{floor}, 1) $$

The relative bias is a mixture of learned profiles over the distance t - s; r holds the mixture's weights:

$$ b_{t,s} = (r_t P)[t - s] \;\; \text{for} \;\; 0 \le t - s < X, \quad \text{else} \;\; 0 $$

The sink is one more logit without a value; it only takes mass away:

$$ p = \mathrm{softmax}([q_t \cdot k_s / \sqrt{d} + b_{t,s}, \; z_t]) \text{ without its last entry}, \; z = W_z x_q $$

$$ y = W_o \big( \textstyle\sum_s p_s v_s \odot \sigma(W_\gamma x_q) \big) $$

A query sees keys at distances 0..W-1 (sliding) or 0..t (full). In sliding layers X = W: every visible key has a bias.

Tensors below `attn.`: wq_du, wk_dv, wv_dv, wr_du, wo_ud, gate_attn, attn_sink_proj (`.weight`), q_l2_clip.scale,
rel_l2_clip.scale, rel_logits_proj.proj [R, X], k_sconv, v_sconv. Config keys: qk_l2_clip_threshold,
rel_l2_clip_threshold, log_scaling_n_floor, log_scaling_alpha, sliding_window_size, rel_extent, d_rel.
"""

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .config import TextConfig
from .residual import rms, rounded, same, wide
from .short_conv import DynamicTaps, ShortConv, with_history

if TYPE_CHECKING:
    from .backends import Backend
    from .cache import LayerCache, Step

_QUERY_BLOCK = 256  # queries whose scores exist at one time: bounds memory, and skips keys outside a block's window


def l2_clip(u: Float[Tensor, "*shape d"], threshold: float) -> Float[Tensor, "*shape d"]:
    """Scale vectors longer than `threshold` down to it; `wide` inside, rounded once."""
    w = wide(u)
    norm = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    return rounded(w * ((norm + 1e-6).reciprocal() * threshold).clamp(max=1.0), u.dtype)  # how torch divides c / x


def scaled_l2_clip(
    u: Float[Tensor, "*shape H d"], scale: Float[Tensor, "H d"], threshold: float
) -> Float[Tensor, "*shape H d"]:
    """`l2_clip` of the learned scaling of u; one rounding for both."""
    return rounded(l2_clip(wide(u) * wide(scale), threshold), u.dtype)


def log_scale(
    u: Float[Tensor, "B T H d"], positions: Int[Tensor, "b T"], floor: float, alpha: float
) -> Float[Tensor, "B T H d"]:
    """u tau(t): 1 up to position `floor`, then growing with the logarithm of the position."""
    w = wide(u)
    tau = 1 + alpha * ((positions + 1).to(w.dtype) / floor).clamp(min=1.0).log()
    return rounded(w * tau[..., None, None], u.dtype)


def distances(offset: int | Int[Tensor, "B 1 1"], queries: range, keys: range, device: torch.device) -> Tensor:
    """Distance from each query to each key slot, [1 or B, t, s]; query t stands in key slot offset + t."""
    t = torch.arange(queries.start, queries.stop, device=device)[:, None]
    return (t - torch.arange(keys.start, keys.stop, device=device))[None] + offset


def relative_bias(
    r: Float[Tensor, "B H t R"], profiles: Float[Tensor, "R X"], distance: Int[Tensor, "b t s"]
) -> Float[Tensor, "B H t s"]:
    """b_{t,s} of the module docstring: entries 0..X-1 exactly, zero at every other distance."""
    X = profiles.shape[-1]
    per_distance = F.pad(r @ profiles, (0, 1))  # [B, H, t, X + 1]: the spare entry holds the zero
    index = distance.masked_fill((distance < 0) | (distance >= X), X)
    return per_distance.gather(-1, index[:, None].expand(*r.shape[:3], -1))


def softmax_with_sink(scores: Float[Tensor, "B H t s"], sink: Float[Tensor, "B H t"]) -> Float[Tensor, "B H t s"]:
    """Softmax over [scores, sink], the sink's share dropped; a row of -inf scores gives zeros."""
    logits = wide(torch.cat([scores, sink[..., None]], dim=-1))
    return rounded(logits.softmax(dim=-1)[..., :-1], scores.dtype)


def attend(
    q: Float[Tensor, "B T H d"],
    k: Float[Tensor, "B G S d"],
    v: Float[Tensor, "B G S d"],
    r: Float[Tensor, "B T H R"],
    profiles: Float[Tensor, "R X"],
    sink: Float[Tensor, "B T H"],
    gate: Float[Tensor, "B T H*d"],
    offsets: list[int],
    window: int | None = None,
    first_keys: list[int] | None = None,
    document_ids: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T H*d"]:
    """Gated attention output, before W_o (the last three equations of the module docstring).

    Rounding in bfloat16: r P, q k^T, its scaling and the sum of scores each round; softmax in float32, p rounds;
    p v rounds; the gate's product in float32 rounds.

    Args:
        q, r: clipped (and log-scaled) queries and relative states.
        k, v: keys and values in slots 0..S-1; consecutive slots hold consecutive positions.
        sink, gate: logits.
        offsets: for each row, the key slot in which its query 0 stands.
        window: W, or None for all keys up to the query's own.
        first_keys: for each row, the first slot that holds a key (slots below are empty); None = 0.
        document_ids: packed documents; only keys of the query's own document are visible. Needs S == T.
    """
    B, T, H, d = q.shape
    G, S = k.shape[1], k.shape[2]
    first_keys = first_keys or [0] * B
    uniform = same(offsets) and same(first_keys)
    if uniform:
        offset, first_key = offsets[0], first_keys[0]
    else:
        offset, first_key = (torch.tensor(n, device=q.device)[:, None, None] for n in (offsets, first_keys))
    q, r, sink = q.transpose(1, 2), r.transpose(1, 2), sink.transpose(1, 2)
    scale = 1 / math.sqrt(d)
    block = _QUERY_BLOCK if window is None else min(_QUERY_BLOCK, max(window, 32))  # W queries meet 2 W keys at most

    outputs = []
    for start in range(0, T, block):
        queries = range(start, min(start + block, T))
        oldest = 0 if window is None else min(offsets) + start - window + 1
        stop = min(S, max(offsets) + queries.stop)
        keys = range(min(max(oldest, min(first_keys)), stop), stop)  # empty where no query has a key
        t, s = slice(queries.start, queries.stop), slice(keys.start, keys.stop)

        # The H / G query heads of a key/value head become rows of one product, so that keys are never repeated.
        grouped = q[:, :, t].reshape(B, G, -1, d)
        scores = (grouped @ k[:, :, s].transpose(-1, -2)).view(B, H, len(queries), len(keys)) * scale
        if T == 1 and uniform:  # decoding: the query sees exactly these keys, at distances n - 1 .. 0
            bias = (r @ profiles)[..., : len(keys)].flip(-1)
            scores[..., -bias.shape[-1] :] += bias
        else:
            distance = distances(offset, queries, keys, q.device)
            scores = scores + relative_bias(r[:, :, t], profiles, distance)
            hidden = distance < 0
            if window is not None:
                hidden = hidden | (distance >= window)
            if not uniform:
                hidden = hidden | (torch.arange(keys.start, keys.stop, device=q.device) < first_key)
            if document_ids is not None:
                hidden = hidden | (document_ids[:, t, None] != document_ids[:, None, s])
            scores = scores.masked_fill(hidden[:, None], -math.inf)
        p = softmax_with_sink(scores, sink[:, :, t])
        outputs.append((p.view(*grouped.shape[:3], len(keys)) @ v[:, :, s]).view(B, H, len(queries), d))
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    o = o.transpose(1, 2).reshape(B, T, H * d)
    return rounded(wide(o) * wide(gate).sigmoid(), o.dtype)


class Named(nn.Module):
    """Holds one parameter under its released name, `q_l2_clip.scale` say; the functions above do the arithmetic."""

    def __init__(self, name: str, value: Tensor) -> None:
        super().__init__()
        self.register_parameter(name, nn.Parameter(value))


class Attention(nn.Module):
    """One layer's attention with its released parameters; `config.attention(layer)` says which kind."""

    def __init__(self, config: TextConfig, layer: int, ops: "Backend") -> None:
        super().__init__()
        self.ops = ops
        self.sizes = a = config.attention(layer)
        self.eps = config.rms_norm_eps
        self.qk_threshold, self.r_threshold = config.qk_l2_clip_threshold, config.rel_l2_clip_threshold
        D, H, G, d, R = config.hidden_size, a.num_heads, a.num_key_value_heads, a.head_dim, config.d_rel
        self.wq_du = nn.Linear(D, H * d, bias=False)
        self.wk_dv = nn.Linear(D, G * d, bias=False)
        self.wv_dv = nn.Linear(D, G * d, bias=False)
        self.wr_du = nn.Linear(D, H * R, bias=False)
        self.wo_ud = nn.Linear(H * d, D, bias=False)
        self.gate_attn = nn.Linear(D, H * d, bias=False)
        self.attn_sink_proj = nn.Linear(D, H, bias=False)
        self.q_l2_clip = Named("scale", torch.ones(H, d))
        self.rel_l2_clip = Named("scale", torch.ones(H, R))
        self.rel_logits_proj = Named("proj", torch.randn(R, a.extent) / 16)
        self.kernel = K = config.conv_kernel_size
        if config.is_sliding(layer):
            self.k_sconv, self.v_sconv = (ShortConv(G * d, K, ops) for _ in range(2))
        else:
            self.k_sconv, self.v_sconv = (DynamicTaps(G, d, D, K) for _ in range(2))

    def forward(
        self,
        x_q: Float[Tensor, "B T D"],
        x_k: Float[Tensor, "B T D"],
        x_v: Float[Tensor, "B T D"],
        step: "Step",
        cache: "LayerCache | None",
    ) -> Float[Tensor, "B T D"]:
        a = self.sizes
        B, T, _ = x_q.shape
        q = scaled_l2_clip(self.wq_du(x_q).view(B, T, a.num_heads, -1), self.q_l2_clip.scale, self.qk_threshold)
        r = scaled_l2_clip(self.wr_du(x_q).view(B, T, a.num_heads, -1), self.rel_l2_clip.scale, self.r_threshold)
        if a.log_scaling is not None:
            q, r = (log_scale(u, step.positions, *a.log_scaling) for u in (q, r))
        k, v = self.project_key_value(x_k, x_v, step, cache)
        offsets, first_keys = [0] * B, None
        if cache is not None:
            k, v, offsets, first_keys = cache.extend_key_value(k, v, step.lengths)
        o = self.ops.attend(
            q, k, v, r, self.rel_logits_proj.proj, self.attn_sink_proj(x_q), self.gate_attn(x_q),
            offsets, a.window, first_keys, step.document_ids,
        )  # fmt: skip
        return self.wo_ud(o)

    def project_key_value(
        self, x_k: Float[Tensor, "B T D"], x_v: Float[Tensor, "B T D"], step: "Step", cache: "LayerCache | None"
    ) -> tuple[Float[Tensor, "B G T d"], Float[Tensor, "B G T d"]]:
        """k and v as they are cached: a rounding after the projection, after the convolution and after clip or RMS."""
        # Keys and values are one convolution over twice the channels: half the calls.
        kv = torch.cat([self.wk_dv(x_k), self.wv_dv(x_v)], dim=-1)
        kv = with_history(kv, self.kernel - 1, cache and cache.key_value_conv)
        k_conv, v_conv = self.k_sconv, self.v_sconv
        if self.sizes.window is not None:
            kv = self.ops.short_conv(kv, torch.cat([k_conv.weight, v_conv.weight]), step.document_position)
        else:
            taps = torch.cat([F.linear(x_k, k_conv.weight_proj), F.linear(x_v, v_conv.weight_proj)], dim=-1)
            taps, static = taps.unflatten(-1, (-1, self.kernel)), torch.cat([k_conv.static_w, v_conv.static_w], dim=1)
            kv = self.ops.dynamic_short_conv(kv, taps, static, step.document_position)
        k, v = kv.view(*kv.shape[:2], -1, self.sizes.head_dim).transpose(1, 2).chunk(2, dim=1)
        return l2_clip(k, self.qk_threshold), rounded(rms(v, self.eps), v.dtype)
