r"""Short convolutions: causal, depthwise, K = 4 taps, four in every layer, all arithmetic in `wide` precision.

Static taps (attention output, MoE output, keys and values of sliding layers), one set for each of C channels c:

$$ y_t = \Big( \sum_{j=0}^{K-1} \mathrm{tap}_j[c] \, u_{t-j} + u_t \Big) / \sqrt{K + 1} $$

Dynamic taps (keys and values of full layers): a static set plus one projected from the token itself, shared within
a key/value head g(c). x is the normed input of the key (value) projection, u the projected key (value):

$$ \mathrm{tap}_j(t, c) = \mathrm{static}_j[c] + (W_\mathrm{dyn} \, x_t)[g(c) K + j] $$

$$ y_t = \Big( \sum_{j=0}^{K-1} \mathrm{tap}_j(t, c) \, u_{t-j} + u_t \Big) / \sqrt{2K + 1} $$

j counts back from the current token. Before the start of a sequence the inputs are zero. The term outside the sum is
the convolution's own residual; its output joins the depth state once more, as any sublayer output does. The square
roots are the public implementation's: they keep the variance when all terms have the same.

Tensors: `*_sconv.weight` [C, 1, K], the *last* tap weights the current token; `*_sconv.static_w` [K, C], tap 0 weights
the current token; `*_sconv.weight_proj` [G K, D].
"""

import math
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .residual import rounded, wide

if TYPE_CHECKING:
    from .backends import Backend
    from .cache import Step, Tail


def _convolve(
    u: Float[Tensor, "B S C"], taps: Float[Tensor, "*BT C K"], scale: float, document_position: Tensor | None
) -> Float[Tensor, "B T C"]:
    """(sum_j tap_j u_{t-j} + u_t) scale, with the last tap at the current token."""
    K = taps.shape[-1]
    windows = wide(u).unfold(1, K, 1)  # [B, T, C, K], a view
    if document_position is not None:  # a tap that reaches before its document's start reads zero
        age = torch.arange(K - 1, -1, -1, device=u.device)
        windows = windows * (document_position[..., None] >= age)[:, :, None]
    current = u[:, K - 1 :]
    return rounded(((windows * taps).sum(dim=-1) + current) * scale, u.dtype)


def short_conv(
    u: Float[Tensor, "B S C"], weight: Float[Tensor, "C 1 K"], document_position: Int[Tensor, "B T"] | None = None
) -> Float[Tensor, "B T C"]:
    """Static short convolution (first equation above), rounded once to the dtype of `u`.

    Args:
        u: S = K - 1 + T inputs: the K - 1 before this call (zeros at the start of a sequence), then this call's.
        weight: released layout, last tap = current token.
        document_position: positions within packed documents; taps do not cross a document's start.
    """
    return _convolve(u, wide(weight)[:, 0], 1 / math.sqrt(weight.shape[-1] + 1), document_position)


def dynamic_short_conv(
    u: Float[Tensor, "B S C"],
    dynamic_taps: Float[Tensor, "B T G K"],
    static: Float[Tensor, "K C"],
    document_position: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T C"]:
    """Short convolution with per-token taps (second and third equation above), rounded once to the dtype of `u`.

    Args:
        u: projected keys or values with their history, as in `short_conv`; C = G d channels, head-major.
        dynamic_taps: W_dyn x_t, one set of K taps for each key/value head, tap 0 = current token.
        static: released layout, tap 0 = current token.
        document_position: as in `short_conv`.
    """
    K, C = static.shape
    per_channel = wide(dynamic_taps).repeat_interleave(C // dynamic_taps.shape[2], dim=2)  # [B, T, C, K]
    taps = (wide(static).T + per_channel).flip(-1)
    return _convolve(u, taps, 1 / math.sqrt(2 * K + 1), document_position)


def with_history(x: Float[Tensor, "B T C"], past: int, state: "Tail | None") -> Float[Tensor, "B S C"]:
    """`x` after the `past` inputs before it; the state takes `x` in."""
    if state is None:
        return F.pad(x, (0, 0, past, 0))
    inputs = state.extend(x)
    return inputs[:, inputs.shape[1] - x.shape[1] - past :]


class ShortConv(nn.Module):
    """Static short convolution with its released parameter `weight` [C, 1, K] and, when cached, its rolling state."""

    def __init__(self, channels: int, kernel: int, ops: "Backend") -> None:
        super().__init__()
        self.ops = ops
        self.weight = nn.Parameter(torch.randn(channels, 1, kernel) / 8)

    def forward(self, x: Float[Tensor, "B T C"], step: "Step", state: "Tail | None") -> Float[Tensor, "B T C"]:
        weight = self.weight
        return self.ops.short_conv(with_history(x, weight.shape[-1] - 1, state), weight, step.document_position)


class DynamicTaps(nn.Module):
    """The released parameters of a dynamic short convolution: `static_w` [K, G d] and `weight_proj` [G K, D]."""

    def __init__(self, num_key_value_heads: int, head_dim: int, hidden_size: int, kernel: int) -> None:
        super().__init__()
        self.static_w = nn.Parameter(torch.randn(kernel, num_key_value_heads * head_dim) / 8)
        self.weight_proj = nn.Parameter(torch.randn(num_key_value_heads * kernel, hidden_size) / hidden_size)
