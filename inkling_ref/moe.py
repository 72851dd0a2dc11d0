r"""Mixture of experts: a sigmoid router with a correction bias, and soft-capped SwiGLU experts. No shared experts.

The router runs in `wide` precision on the rounded input h:

$$ e = \sigma(W_r h), \qquad \mathrm{chosen} = \text{the } k \text{ largest of } e + b, \qquad
   w_i = \mathrm{scale} \cdot e_i / (\textstyle\sum_{\mathrm{chosen}} e + 10^{-20}) $$

The bias b chooses and does not weigh. Deviation: ties go to the lower id (the public implementation leaves them to
`topk`), so that all devices and kernels choose alike. A chosen expert, with gate rows g and up rows u interleaved:

$$ (g, u) = W_{13} h, \qquad a = \mathrm{cap}_4(g) \, \sigma(g) \, \mathrm{cap}_{25}(u), \qquad y = W_2 a $$

$$ \mathrm{cap}_c(x) = c \tanh(x / c) $$

The sigmoid sees the raw gate (the config's `hidden_act: silu` is not plain SiLU). The weighted sum over the chosen
experts is formed in `wide` precision and rounded once.

Tensors below `mlp.`: gate.weight [E, D], gate.bias [E] (float32), experts.w13_weight [E, 2I, D] with rows g0, u0, g1,
u1, ..., experts.w2_weight [E, D, I]; quantised experts keep that layout, see `quantization`.
"""

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .config import TextConfig
from .quantization import COMPANIONS, mxfp8_decode, nvfp4_decode
from .residual import rounded, wide

if TYPE_CHECKING:
    from .backends import Backend


class ExpertMatrix(NamedTuple):
    """One matrix of all experts, [E, rows, columns], dense or packed in a released format (see `quantization`)."""

    weight: Tensor  # dense; uint8 = NVFP4 codes, two a byte; float8_e4m3fn = MXFP8 values
    scale: Tensor | None = None
    amax: Tensor | None = None
    denominator: Tensor | None = None

    def dense(self, expert: int, dtype: torch.dtype) -> Float[Tensor, "rows columns"]:
        """One expert's matrix, dequantised if it is packed."""
        one = slice(expert, expert + 1)
        if self.scale is None:
            return self.weight[expert]
        if self.amax is None:
            return mxfp8_decode(self.weight[one], self.scale[one], dtype)[0]
        return nvfp4_decode(self.weight[one], self.scale[one], self.amax[one], self.denominator, dtype)[0]


def softcap(x: Tensor, cap: float) -> Tensor:
    """c tanh(x / c): the identity near zero, bounded by c."""
    return torch.tanh(x / cap) * cap


def softcapped_swiglu(gate_up: Float[Tensor, "N rows"], gate_cap: float, up_cap: float) -> Float[Tensor, "N I"]:
    """a of the module docstring from interleaved (g0, u0, g1, ...) columns; `wide` inside, rounded once."""
    g, u = wide(gate_up).view(len(gate_up), -1, 2).unbind(-1)
    return rounded(softcap(g, gate_cap) * g.sigmoid() * softcap(u, up_cap), gate_up.dtype)


def route(
    h: Float[Tensor, "N D"],
    weight: Float[Tensor, "E D"],
    bias: Float[Tensor, " E"],
    k: int,
    scale: float,
    normalize: bool = True,
) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
    """Routing weights (`wide`) and expert ids of every token, best first; ties go to the lower id.

    A row with NaN scores still gets k distinct ids in range. `normalize` False leaves out the division (models of
    the family without it); the scale applies once either way.
    """
    scores = F.linear(wide(h), wide(weight)).sigmoid()
    ids = (scores + wide(bias)).sort(dim=-1, descending=True, stable=True).indices[:, :k]
    chosen = scores.gather(-1, ids)
    if normalize:
        chosen = chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20)
    return chosen * scale, ids


def experts(
    h: Float[Tensor, "N D"],
    weights: Float[Tensor, "N k"],
    ids: Int[Tensor, "N k"],
    w13: ExpertMatrix,
    w2: ExpertMatrix,
    gate_cap: float,
    up_cap: float,
    quantize: Callable[[Tensor], Tensor] | None = None,
) -> Float[Tensor, "N D"]:
    """sum_i weights_i E_i(h) over the chosen experts. Only experts that were chosen are read.

    The N k (token, expert) pairs are sorted by expert, so that each expert is two matrix products over its own rows.

    Args:
        quantize: fake quantisation of the activations entering either product, or None.
    """
    N, k = ids.shape
    if N == 0:
        return h.clone()
    x = h if quantize is None else quantize(h)
    if N == 1:  # decoding: the pairs are one row each, in any order
        order, runs = None, [(e, 1) for e in ids[0].tolist()]
        rows = [x] * k
    else:
        order = ids.flatten().argsort(stable=True)  # pair numbers, by expert
        counts = torch.bincount(ids.flatten(), minlength=w13.weight.shape[0]).tolist()
        runs = [(e, n) for e, n in enumerate(counts) if n]
        rows = x[order // k].split([n for _, n in runs])
    gate_up = torch.cat([F.linear(xs, w13.dense(e, h.dtype)) for xs, (e, _) in zip(rows, runs, strict=True)])
    a = softcapped_swiglu(gate_up, gate_cap, up_cap)
    a = a if quantize is None else quantize(a)
    rows = a.split([n for _, n in runs])
    y = torch.cat([F.linear(xs, w2.dense(e, h.dtype)) for xs, (e, _) in zip(rows, runs, strict=True)])
    if order is not None:  # back to (token, choice)
        y = torch.empty_like(y).index_copy(0, order, y)
    return rounded((wide(y).view(N, k, -1) * weights[..., None]).sum(dim=1), h.dtype)


class Router(nn.Module):
    """`mlp.gate`: the router's weight and its correction bias, float32 in the release."""

    def __init__(self, config: TextConfig, ops: "Backend") -> None:
        super().__init__()
        self.ops = ops
        self.k, self.scale = config.num_experts_per_tok, config.route_scale
        E, D = config.n_routed_experts, config.hidden_size
        self.weight = nn.Parameter(torch.randn(E, D) / math.sqrt(D))
        self.bias = nn.Parameter(torch.zeros(E), requires_grad=False)  # balanced by the trainer, not by gradients

    def forward(self, h: Float[Tensor, "N D"]) -> tuple[Float[Tensor, "N k"], Int[Tensor, "N k"]]:
        return self.ops.route(h, self.weight, self.bias, self.k, self.scale)


class Experts(nn.Module):
    """`mlp.experts`: dense parameters, or packed buffers in a released format under the released names."""

    def __init__(self, config: TextConfig, ops: "Backend") -> None:
        super().__init__()
        self.ops = ops
        self.caps = (config.mlp_gate_softcap, config.mlp_up_softcap)
        self.quantize: Callable[[Tensor], Tensor] | None = None  # see Inkling.quantize_activations
        self.stored_format = "bf16"  # the checkpoint's: bf16, nvfp4 or mxfp8
        E, D, I = config.n_routed_experts, config.hidden_size, config.moe_intermediate_size
        self.w13_weight = nn.Parameter(torch.randn(E, 2 * I, D) / math.sqrt(D))
        self.w2_weight = nn.Parameter(torch.randn(E, D, I) / math.sqrt(I))
        for name in ("w13_weight", "w2_weight"):  # filled by `checkpoint` where the weights stay packed
            for suffix in COMPANIONS:
                self.register_buffer(name + suffix, None)

    def matrix(self, name: str) -> ExpertMatrix:
        """`name`: w13_weight or w2_weight."""
        return ExpertMatrix(*(getattr(self, name + suffix) for suffix in ("", *COMPANIONS)))

    def forward(
        self, h: Float[Tensor, "N D"], weights: Float[Tensor, "N k"], ids: Int[Tensor, "N k"]
    ) -> Float[Tensor, "N D"]:
        return self.ops.experts(
            h, weights, ids, self.matrix("w13_weight"), self.matrix("w2_weight"), *self.caps, self.quantize
        )


class MoE(nn.Module):
    """Router and experts of one layer."""

    def __init__(self, config: TextConfig, ops: "Backend") -> None:
        super().__init__()
        self.gate = Router(config, ops)
        self.experts = Experts(config, ops)

    def forward(self, h: Float[Tensor, "B T D"]) -> Float[Tensor, "B T D"]:
        flat = h.flatten(0, 1)
        weights, ids = self.gate(flat)
        return self.experts(flat, weights, ids).view_as(h)
