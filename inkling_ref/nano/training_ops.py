"""The model's operations in fixed shapes: the backend that training on a GPU runs.

The reference functions are made to be read and to decode: they compute only the experts that were chosen, one after the
other, and walk over blocks of queries. The functions here give the same numbers in shapes that never change, which a
compiler can fuse and a CUDA graph can record: every expert computes every token (E = 16 is few), sliding attention
works on chunks of W queries against 2W keys, full attention on all T x T scores, convolutions are sums of shifted
products. They need whole sequences: no cache, no packed documents. tests/test_nano_train.py holds values and gradients
to the reference.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from ..backends import Backend
from ..moe import ExpertMatrix
from ..residual import rms, rms_norm, wide


def mix_and_norm(
    sources: Float[Tensor, "B T n D"],
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"] | None,
    norm_weights: list[Tensor],
    eps: float,
    dtype: torch.dtype,
) -> list[Tensor]:
    """As `residual.mix_and_norm`, written out over the few sources: one pass over rows of D, which fuses."""
    if queries is None:
        return [rms_norm(sources[:, :, -1], w, eps).to(dtype) for w in norm_weights]
    normed = [rms(s, eps) for s in sources.unbind(dim=2)]
    outputs = []
    D = queries.shape[-1]
    for query, weight in zip((wide(queries) / math.sqrt(D)).view(-1, D).unbind(), norm_weights, strict=True):
        scores = [(x * query).sum(-1, keepdim=True) for x in normed]
        top = scores[0].detach()
        for s in scores[1:]:
            top = torch.maximum(top, s.detach())
        shares = [(s - top).exp() for s in scores]
        mixture = sum(x * share for x, share in zip(normed, shares, strict=True)) / sum(shares)
        outputs.append(rms_norm(mixture, weight, eps).to(dtype))
    return outputs


def convolve(u: Tensor, taps: Iterable[Tensor], scale: float) -> Tensor:
    """(sum over taps, the oldest first, of tap times input, + input) scale; u [B, K - 1 + T, ...] with its history."""
    taps, wide_u = list(taps), wide(u)
    T = u.shape[1] - len(taps) + 1
    y = wide_u[:, -T:]
    for j, tap in enumerate(taps):
        y = y + wide_u[:, j : j + T] * tap
    return (y * scale).to(u.dtype)


def short_conv(
    u: Float[Tensor, "B P C"], weight: Float[Tensor, "C 1 K"], document_position: None = None
) -> Float[Tensor, "B T C"]:
    """As `short_conv.short_conv`, as a sum of shifted products."""
    taps = wide(weight)[:, 0].unbind(-1)
    return convolve(u, taps, 1 / math.sqrt(len(taps) + 1))


def dynamic_short_conv(
    u: Float[Tensor, "B P C"],
    dynamic_taps: Float[Tensor, "B T G K"],
    static: Float[Tensor, "K C"],
    document_position: None = None,
) -> Float[Tensor, "B T C"]:
    """As `short_conv.dynamic_short_conv`, head by head."""
    K, G = static.shape[0], dynamic_taps.shape[2]
    taps = wide(static).view(K, G, -1)[:, None, None] + wide(dynamic_taps).permute(3, 0, 1, 2)[..., None]
    return convolve(u.unflatten(-1, (G, -1)), taps.flip(0).unbind(), 1 / math.sqrt(2 * K + 1)).flatten(-2)


def band(values: Float[Tensor, "... t x"], first: int, columns: int) -> Float[Tensor, "... t columns"]:
    """Row i holds its x values in columns first + i, first + i + 1, ...; what falls outside the row is cut off.

    By padding rows to columns + 1 and reading them again with columns a row: each row moves one place further, and
    no index is computed. What is cut off lands in columns that the caller's mask hides.
    """
    rows, x = values.shape[-2:]
    skip = 0
    if first < 0:  # start one row higher, and leave that row's beginning out
        skip, first = columns, first + columns
    flat = F.pad(values, (first, columns + 1 - x - first)).flatten(-2)
    return flat[..., skip : skip + rows * columns].unflatten(-1, (rows, columns))


def _by_chunk(u: Tensor, chunks: int, G: int) -> Tensor:
    """Per head values [B, T, H, ...] to [B, G, chunks, H / G, T / chunks, ...]."""
    u = u.unflatten(2, (G, -1)).unflatten(1, (chunks, -1))
    return u.permute(0, 3, 1, 4, 2, *range(5, u.dim()))


def _with_previous(u: Float[Tensor, "B G T d"], rows: int) -> Float[Tensor, "B G chunks keys d"]:
    """Chunks of `rows` positions, each after the chunk before it; zeros before the first."""
    own = u.unflatten(2, (-1, rows))
    return torch.cat([F.pad(u, (0, 0, rows, 0))[:, :, :-rows].unflatten(2, (-1, rows)), own], dim=3)


def attend(
    q: Float[Tensor, "B T H d"],
    k: Float[Tensor, "B G T d"],
    v: Float[Tensor, "B G T d"],
    r: Float[Tensor, "B T H R"],
    profiles: Float[Tensor, "R X"],
    sink: Float[Tensor, "B T H"],
    gate: Float[Tensor, "B T H*d"],
    offsets: list[int],
    window: int | None = None,
    first_keys: list[int] | None = None,
    document_ids: None = None,
) -> Float[Tensor, "B T H*d"]:
    """As `attention.attend`, for whole sequences without a cache or packed documents."""
    assert not any(offsets)
    assert document_ids is None
    B, T, H, d = q.shape
    G, X = k.shape[1], profiles.shape[1]
    rows = T if window is None else window  # queries that share one set of keys
    chunks = T // rows
    assert chunks * rows == T, f"T = {T} must be a multiple of the window {window}"

    if window is None:
        k, v = k[:, :, None], v[:, :, None]
    else:
        k, v = _with_previous(k, rows), _with_previous(v, rows)
    keys = k.shape[3]
    distance = torch.arange(rows, device=q.device)[:, None] + (keys - rows) - torch.arange(keys, device=q.device)
    visible = distance >= 0
    if window is not None:
        chunk = torch.arange(chunks, device=q.device)[:, None, None, None]
        own = torch.arange(keys, device=q.device) >= rows
        visible = visible & (distance < window) & ((chunk > 0) | own)
    scores = (_by_chunk(q, chunks, G).flatten(3, 4) @ k.transpose(-1, -2)).unflatten(3, (H // G, rows)) / math.sqrt(d)
    # Distance x stands in column i + keys - rows - x: the profiles run backwards.
    bias = band(_by_chunk(r, chunks, G) @ profiles.flip(-1), keys - rows - X + 1, keys)
    scores = (wide(scores) + wide(bias)).masked_fill(~visible, -math.inf)
    z = wide(_by_chunk(sink, chunks, G))[..., None]
    top = torch.maximum(scores.detach().amax(-1, keepdim=True), z.detach())
    e = (scores - top).exp()
    p = (e / (e.sum(-1, keepdim=True) + (z - top).exp())).to(q.dtype)
    o = (p.flatten(3, 4) @ v).unflatten(3, (H // G, rows)).permute(0, 2, 4, 1, 3, 5).reshape(B, T, H * d)
    return (wide(o) * wide(gate).sigmoid()).to(o.dtype)


class LoadAsGradient(torch.autograd.Function):
    """Passes the scores on; the "gradient" of the correction bias is the share of tokens each expert received.

    The bias has no gradient of its own, and its slot carries the load to the optimiser's side, summed over the
    batches of a step like any gradient.
    """

    @staticmethod
    def forward(ctx: Any, scores: Tensor, bias: Tensor, ids: Tensor) -> Tensor:
        ctx.save_for_backward(ids, bias)
        return scores.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None]:
        ids, bias = ctx.saved_tensors
        chosen = ids[..., None] == torch.arange(bias.shape[0], device=ids.device)
        return gradient, chosen.to(bias.dtype).mean((0, 1)), None


def route(
    h: Float[Tensor, "N D"],
    weight: Float[Tensor, "E D"],
    bias: Float[Tensor, " E"],
    k: int,
    scale: float,
    normalize: bool = True,
) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """As `moe.route`, but for the order of equal scores, and with the load in the gradient of the bias."""
    scores = F.linear(wide(h), wide(weight)).sigmoid()
    ids = (scores.detach() + wide(bias.detach())).topk(k, dim=-1).indices
    chosen = LoadAsGradient.apply(scores.gather(-1, ids), bias, ids)
    if normalize:
        chosen = chosen / (chosen.sum(-1, keepdim=True) + 1e-20)
    return chosen * scale, ids


def _cap(x: Tensor, c: float) -> Tensor:
    """`moe.softcap`, its tanh made of what GPUs have an instruction for."""
    return (2 * torch.sigmoid(x * (2 / c)) - 1) * c


def experts(
    h: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    ids: Int[Tensor, "N k"],
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    gate_cap: float,
    up_cap: float,
    quantize: None = None,
) -> Float[Tensor, "N D"]:
    """As `moe.experts`, but every expert computes every token, with weight 0 where it was not chosen."""
    E, _, D = w13.weight.shape
    # Gate and up rows apart: interleaved columns of the activation would be read at half speed.
    rows = w13.weight.unflatten(1, (-1, 2)).permute(2, 0, 1, 3).reshape(-1, D)
    g, u = (wide(x).unflatten(-1, (E, -1)) for x in F.linear(h, rows).chunk(2, dim=-1))
    share = (weights[..., None] * (ids[..., None] == torch.arange(E, device=ids.device))).sum(1)  # [N, E]
    a = (_cap(g, gate_cap) * g.sigmoid() * _cap(u, up_cap) * share[..., None]).to(h.dtype)
    return a.flatten(1) @ w2.weight.transpose(1, 2).reshape(-1, D)


def training_backend(compiled: Callable = lambda f: f) -> Backend:
    """Operations for training; `compiled` wraps each of them."""
    mix = compiled(mix_and_norm)

    def flat_mix(sources: Tensor, *args: Any) -> list[Tensor]:  # one compiled shape for both kinds of batches
        return [y.view(*sources.shape[:2], -1) for y in mix(sources.flatten(0, 1)[None], *args)]

    return Backend(flat_mix, short_conv, dynamic_short_conv, attend, compiled(route), compiled(experts))
