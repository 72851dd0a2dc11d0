"""Short convolutions: causal, depthwise, K = 4 taps, four in every layer, all arithmetic in `wide` precision.

Static taps (attention output, MoE output, keys and values of sliding layers), one set a channel c:

$$ y_t = \\Big( \\sum_{j=0}^{K-1} \\mathrm{tap}_j[c] \\, x_{t-j} + x_t \\Big) / \\sqrt{K + 1} $$

Dynamic taps (keys and values of full layers): a static set plus one projected from the token itself, shared within
a key/value head g(c). x is the normed input of the key (value) projection, u the projected key (value):

$$ \\mathrm{tap}_j(t, c) = \\mathrm{static}_j[c] + (W_\\mathrm{dyn} \\, x_t)[g(c) K + j] $$

$$ y_t = \\Big( \\sum_{j=0}^{K-1} \\mathrm{tap}_j(t, c) \\, u_{t-j} + u_t \\Big) / \\sqrt{2K + 1} $$

j counts back from the current token. Before the start of a sequence the inputs are zero. The term outside the sum is
the convolution's own residual; its output joins the depth state once more, as any sublayer output does. The square
roots are the public implementation's: they keep the variance when all terms have the same.

Tensors: `*_sconv.weight` [C, 1, K], the *last* tap weights the current token; `*_sconv.static_w` [K, C], tap 0 weights
the current token; `*_sconv.weight_proj` [G K, D].
"""

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .residual import wide

if TYPE_CHECKING:
    from .backends import Backend
    from .cache import Step, Tail


def _convolve(
    x: Float[Tensor, "B T C"],
    taps: Iterable[Tensor],
    scale: float,
    history: Float[Tensor, "B past C"] | None,
    document_position: Int[Tensor, "B T"] | None,
) -> Float[Tensor, "B T C"]:
    """(sum_j taps[j] x_{t-j} + x_t) * scale; each tap broadcasts against [B, T, C]."""
    taps = list(taps)
    past, T = len(taps) - 1, x.shape[1]
    u = F.pad(x, (0, 0, past, 0)) if history is None else torch.cat([history, x], dim=1)
    u = wide(u)
    y = u[:, past:]
    for j, tap in enumerate(taps):
        shifted = u[:, past - j : past - j + T]
        if document_position is not None and j > 0:  # a tap that reaches before its document's start reads zero
            shifted = shifted * (document_position >= j)[..., None]
        y = torch.addcmul(y, shifted, tap)
    return (y * scale).to(x.dtype)


def short_conv(
    x: Float[Tensor, "B T C"],
    weight: Float[Tensor, "C 1 K"],
    history: Float[Tensor, "B K-1 C"] | None = None,
    document_position: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T C"]:
    """Static short convolution (first equation above), rounded once to the dtype of `x`.

    Args:
        x: inputs of this call's tokens.
        weight: released layout, last tap = current token.
        history: the K - 1 inputs before `x`; None at the start of a sequence (zeros).
        document_position: positions within packed documents; taps do not cross a document's start.
    """
    K = weight.shape[-1]
    taps = wide(weight)[:, 0].flip(-1).T.contiguous()  # [K, C], tap 0 = current token, unit stride along C
    return _convolve(x, taps, 1 / math.sqrt(K + 1), history, document_position)


def dynamic_short_conv(
    u: Float[Tensor, "B T C"],
    dynamic_taps: Float[Tensor, "B T G K"],
    static: Float[Tensor, "K C"],
    history: Float[Tensor, "B K-1 C"] | None = None,
    document_position: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T C"]:
    """Short convolution with per-token taps (second and third equation above), rounded once to the dtype of `u`.

    Args:
        u: projected keys or values, C = G d channels, head-major.
        dynamic_taps: W_dyn x_t, one set of K taps for each key/value head.
        static: released layout, tap 0 = current token.
        history, document_position: as in `short_conv`.
    """
    K, C = static.shape
    G = dynamic_taps.shape[2]
    # tap_j: [G, d] + [B, T, G, 1], back to channels
    taps = wide(static).view(K, G, C // G)[:, None, None] + wide(dynamic_taps).permute(3, 0, 1, 2)[..., None]
    return _convolve(u, taps.flatten(-2), 1 / math.sqrt(2 * K + 1), history, document_position)


class ShortConv(nn.Module):
    """Static short convolution with its released parameter `weight` [C, 1, K] and, when cached, its rolling state."""

    def __init__(self, channels: int, kernel: int, ops: "Backend") -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.randn(channels, 1, kernel) / 8)

    def forward(self, x: Float[Tensor, "B T C"], step: "Step", state: "Tail | None") -> Float[Tensor, "B T C"]:
        history = None if state is None else state.history(x, step.lengths, self.weight.shape[-1] - 1)
        return self.ops.short_conv(x, self.weight, history, step.document_position)


class DynamicShortConv(nn.Module):
    """Dynamic short convolution with its released parameters `static_w` [K, G d] and `weight_proj` [G K, D]."""

    def __init__(self, num_key_value_heads: int, head_dim: int, hidden_size: int, kernel: int, ops: "Backend") -> None:
        super().__init__()
        self.ops = ops
        self.static_w = nn.Parameter(torch.randn(kernel, num_key_value_heads * head_dim) / 8)
        self.weight_proj = nn.Parameter(torch.randn(num_key_value_heads * kernel, hidden_size) / hidden_size)

    def forward(
        self, u: Float[Tensor, "B T C"], x: Float[Tensor, "B T D"], step: "Step", state: "Tail | None"
    ) -> Float[Tensor, "B T C"]:
        kernel = self.static_w.shape[0]
        history = None if state is None else state.history(u, step.lengths, kernel - 1)
        dynamic_taps = F.linear(x, self.weight_proj).unflatten(-1, (-1, kernel))
        return self.ops.dynamic_short_conv(u, dynamic_taps, self.static_w, history, step.document_position)
