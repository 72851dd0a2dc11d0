"""Attention: relative bias from projected profiles, a per-token sink, a sigmoid gate; sliding and full layers.

Per token t and query head h (key/value head g(h) = floor(h G / H)), from the layer's inputs x_q, x_k, x_v:

$$ q = \\mathrm{clip}_{c}(s_q \\odot W_q x_q), \\qquad r = \\mathrm{clip}_{c_r}(s_r \\odot W_r x_q) $$

$$ k = \\mathrm{clip}_{c}(\\mathrm{Conv}_k(W_k x_k)), \\qquad v = \\mathrm{RMS}(\\mathrm{Conv}_v(W_v x_v)) $$

$$ \\mathrm{clip}_c(u) = u \\cdot \\min(1, \\; c / (\\lVert u \\rVert + 10^{-6})) $$

Full layers scale q and r, after their clips, with the absolute position:

$$ \\tau(t) = 1 + \\alpha \\log \\max((t + 1) / \\mathrm{floor}, 1) $$

The relative bias is a mixture of learned profiles over the distance t - s; r holds the mixture's weights:

$$ b_{t,s} = (r_t P)[t - s] \\;\\; \\text{for} \\;\\; 0 \\le t - s < X, \\quad \\text{else} \\;\\; 0 $$

The sink is one more logit without a value; it only takes mass away:

$$ p = \\mathrm{softmax}([q_t \\cdot k_s / \\sqrt{d} + b_{t,s}, \\;\\; z_t]) \\; \\text{without its last entry}, \\qquad z = W_z x_q $$

$$ y = W_o \\big( \\textstyle\\sum_s p_s v_s \\odot \\sigma(W_\\gamma x_q) \\big) $$

A query sees keys at distances 0..W-1 (sliding) or 0..t (full). In sliding layers X = W: every visible key has a bias.

Tensors below `attn.`: wq_du, wk_dv, wv_dv, wr_du, wo_ud, gate_attn, attn_sink_proj (`.weight`), q_l2_clip.scale,
rel_l2_clip.scale, rel_logits_proj.proj [R, X], k_sconv, v_sconv. Config keys: qk_l2_clip_threshold,
rel_l2_clip_threshold, log_scaling_n_floor, log_scaling_alpha, sliding_window_size, rel_extent, d_rel.
"""

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .config import TextConfig
from .residual import rms, wide
from .short_conv import DynamicShortConv, ShortConv

if TYPE_CHECKING:
    from .backends import Backend
    from .cache import LayerCache, Step

_QUERY_BLOCK = 256  # queries whose scores exist at one time: bounds memory, and skips keys outside a block's window


def l2_clip(u: Float[Tensor, "*shape d"], threshold: float) -> Float[Tensor, "*shape d"]:
    """Scale vectors longer than `threshold` down to it; `wide` inside, rounded once."""
    w = wide(u)
    norm = torch.linalg.vector_norm(w, dim=-1, keepdim=True)
    return (w * (threshold / (norm + 1e-6)).clamp(max=1.0)).to(u.dtype)


def scaled_l2_clip(
    u: Float[Tensor, "*shape H d"], scale: Float[Tensor, "H d"], threshold: float
) -> Float[Tensor, "*shape H d"]:
    """`l2_clip` of the learned scaling of u; one rounding for both."""
    return l2_clip(wide(u) * wide(scale), threshold).to(u.dtype)


def log_scale(
    u: Float[Tensor, "B T H d"], positions: Int[Tensor, "b T"], floor: float, alpha: float
) -> Float[Tensor, "B T H d"]:
    """u tau(t): 1 up to position `floor`, then growing with the logarithm of the position."""
    w = wide(u)
    tau = 1 + alpha * ((positions + 1).to(w.dtype) / floor).clamp(min=1.0).log()
    return (w * tau[..., None, None]).to(u.dtype)


def distances(
    offset: int | Int[Tensor, " B"], queries: range, keys: range, device: torch.device
) -> Int[Tensor, "b t s"]:
    """Distance from each query to each key slot; query t stands in key slot offset + t."""
    t = torch.arange(queries.start, queries.stop, device=device)[:, None] - torch.arange(
        keys.start, keys.stop, device=device
    )
    return t[None] + (offset if isinstance(offset, int) else offset[:, None, None])


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
    return wide(torch.cat([scores, sink[..., None]], dim=-1)).softmax(dim=-1)[..., :-1].to(scores.dtype)


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
    scale = 1 / math.sqrt(d)
    first_keys = first_keys or [0] * B
    uniform = len(set(offsets)) == 1 and len(set(first_keys)) == 1
    offset = offsets[0] if uniform else torch.tensor(offsets, device=q.device)
    q, r, sink = q.transpose(1, 2), r.transpose(1, 2), sink.transpose(1, 2)
    block = _QUERY_BLOCK if window is None else min(_QUERY_BLOCK, max(window, 32))

    outputs = []
    for start in range(0, T, block):
        queries = range(start, min(start + block, T))
        low = min(first_keys) if window is None else max(min(first_keys), min(offsets) + queries.start - window + 1)
        keys = range(max(0, min(low, S)), min(S, max(offsets) + queries.stop))
        t, s = slice(queries.start, queries.stop), slice(keys.start, keys.stop)

        distance = distances(offset, queries, keys, q.device)  # [1 or B, t, s]
        visible: Bool[Tensor, "b t s"] = distance >= 0
        if window is not None:
            visible = visible & (distance < window)
        if not uniform:
            slot = torch.arange(keys.start, keys.stop, device=q.device)
            visible = visible & (slot >= torch.tensor(first_keys, device=q.device)[:, None])[:, None]
        if document_ids is not None:
            visible = visible & (document_ids[:, t, None] == document_ids[:, None, s])

        # The H / G query heads of a key/value head become rows of one product, so that keys are never repeated.
        grouped = q[:, :, t].reshape(B, G, -1, d)
        scores = (grouped @ k[:, :, s].transpose(-1, -2)).view(B, H, len(queries), len(keys)) * scale
        scores = scores + relative_bias(r[:, :, t], profiles, distance)
        scores = scores.masked_fill(~visible[:, None], -math.inf)
        p = softmax_with_sink(scores, sink[:, :, t])
        outputs.append((p.view(B, G, -1, len(keys)) @ v[:, :, s]).view(B, H, len(queries), d))
    o = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=2)
    o = o.transpose(1, 2).reshape(B, T, H * d)
    return (wide(o) * wide(gate).sigmoid()).to(o.dtype)


class ScaledClip(nn.Module):
    """Holds the learned scale of `scaled_l2_clip` under its released name `*_l2_clip.scale`."""

    def __init__(self, num_heads: int, size: int) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(num_heads, size))


class RelativeProfiles(nn.Module):
    """Holds P, the bias profiles over distance, under its released name `rel_logits_proj.proj`."""

    def __init__(self, d_rel: int, extent: int) -> None:
        super().__init__()
        self.proj = nn.Parameter(torch.randn(d_rel, extent) / 16)


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
        self.q_l2_clip = ScaledClip(H, d)
        self.rel_l2_clip = ScaledClip(H, R)
        self.rel_logits_proj = RelativeProfiles(R, a.extent)
        K = config.conv_kernel_size
        if config.is_sliding(layer):
            self.k_sconv, self.v_sconv = (ShortConv(G * d, K, ops) for _ in range(2))
        else:
            self.k_sconv, self.v_sconv = (DynamicShortConv(G, d, D, K, ops) for _ in range(2))

    def forward(
        self,
        x_q: Float[Tensor, "B T D"],
        x_k: Float[Tensor, "B T D"],
        x_v: Float[Tensor, "B T D"],
        step: "Step",
        cache: "LayerCache | None",
    ) -> Float[Tensor, "B T D"]:
        a = self.sizes
        q = scaled_l2_clip(self.wq_du(x_q).unflatten(-1, (a.num_heads, -1)), self.q_l2_clip.scale, self.qk_threshold)
        r = scaled_l2_clip(self.wr_du(x_q).unflatten(-1, (a.num_heads, -1)), self.rel_l2_clip.scale, self.r_threshold)
        if a.log_scaling is not None:
            q, r = (log_scale(u, step.positions, *a.log_scaling) for u in (q, r))
        k, v = self.project_key_value(x_k, x_v, step, cache)
        offsets, first_keys = [0] * q.shape[0], None
        if cache is not None:
            k, starts = cache.keys.extend(k, step.lengths)
            v, _ = cache.values.extend(v, step.lengths)
            offsets = [n - start for n, start in zip(step.lengths, starts, strict=True)]
            first_keys = [max(0, -start) for start in starts]
        o = self.ops.attend(
            q, k, v, r, self.rel_logits_proj.proj, self.attn_sink_proj(x_q), self.gate_attn(x_q),
            offsets, a.window, first_keys, step.document_ids,
        )  # fmt: skip
        return self.wo_ud(o)

    def project_key_value(
        self, x_k: Float[Tensor, "B T D"], x_v: Float[Tensor, "B T D"], step: "Step", cache: "LayerCache | None"
    ) -> tuple[Float[Tensor, "B G T d"], Float[Tensor, "B G T d"]]:
        """k and v as they are cached: a rounding after the projection, after the convolution and after clip or RMS."""
        k, v = self.wk_dv(x_k), self.wv_dv(x_v)
        k_state, v_state = (None, None) if cache is None else (cache.key_conv, cache.value_conv)
        if isinstance(self.k_sconv, DynamicShortConv):
            k, v = self.k_sconv(k, x_k, step, k_state), self.v_sconv(v, x_v, step, v_state)
        else:
            k, v = self.k_sconv(k, step, k_state), self.v_sconv(v, step, v_state)
        k, v = (u.unflatten(-1, (self.sizes.num_key_value_heads, -1)).transpose(1, 2) for u in (k, v))
        return l2_clip(k, self.qk_threshold), rms(v, self.eps).to(v.dtype)
