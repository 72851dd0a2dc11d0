r"""Block attention residuals: the depth state that stands where other transformers keep a residual stream.

A token's depth state is a list of *sources* of size D: the outputs of completed blocks of layers, and the running
sum of the block in progress (`partial`). The token embedding is the first block. A sublayer does not read the sum of
all that went before; it reads a mixture, chosen per token by a learned query q over the *normalised* sources x_j:

$$ \hat x_j = \mathrm{RMS}(x_j), \qquad \mathrm{score}_j = \hat x_j \cdot q \, / \sqrt{D} $$

    scores = einsum("BTnD,qD->BTqn", rms(x), q) / sqrt(D)

$$ \mathrm{mix} = \sum_j \mathrm{softmax}(\mathrm{score})_j \, \hat x_j $$

    mix = einsum("BTqn,BTnD->BTqD", softmax(scores, -1), rms(x))

$$ \mathrm{RMS}(x) = x / \sqrt{\mathrm{mean}(x^2) + \epsilon}, \qquad \mathrm{RMSNorm}_w(x) = w \, \mathrm{RMS}(x) $$

The softmax runs over the n sources of one token: depth, not time. Sliding layers have one query; full layers have
three, so that their queries, keys and values read three different mixtures.

Tensors: `attn_res.attn_queries.{i}` (belongs to layer i + 1: layer 0 has one source and nothing to mix),
`attn_res.mlp_queries.{i}`, `attn_res.output_query`; the RMSNorms `embed_norm`, `attn_norm`, `mlp_norm`, `norm`.
"""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor, nn

SOURCE_EPS = 1e-6  # of the sources' RMS: a constant in the public implementation; rms_norm_eps rules the other norms


def wide(x: Tensor) -> Tensor:
    """`x` in the precision of internal sums: float32, or float64 where the model runs in float64."""
    return x.float() if x.dtype.itemsize < 4 else x


def rounded(x: Tensor, dtype: torch.dtype) -> Tensor:
    """`x` rounded to `dtype`. (`Tensor.to` would do; the test saves a microsecond, 300 times a decoded token.)"""
    return x if x.dtype == dtype else x.to(dtype)


def same(values: list[int]) -> bool:
    """Whether all entries are equal: the rows of a batch can then share one slice instead of one each."""
    return len(values) == 1 or values.count(values[0]) == len(values)


def rms(x: Float[Tensor, "*shape D"], eps: float) -> Float[Tensor, "*shape D"]:
    """RMS(x) over the last axis, in (and returned as) `wide` precision."""
    x = wide(x)
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # one pass over x; square and mean would be two
    return x * torch.rsqrt(norm.square() / x.shape[-1] + eps)


def rms_norm(x: Float[Tensor, "*shape D"], weight: Float[Tensor, " D"], eps: float) -> Float[Tensor, "*shape D"]:
    """RMSNorm_w(x) = w RMS(x) in `wide` precision; the caller rounds, once, where the result enters a projection."""
    return rms(x, eps) * wide(weight)


def mix(sources: Float[Tensor, "B T n D"], queries: Float[Tensor, "q D"], eps: float) -> Float[Tensor, "B T q D"]:
    """One mixture of the n sources per query (module docstring), in `wide` precision from norm to sum.

    A zero query gives the mean of the normalised sources.
    """
    normed = rms(sources, eps)
    # Scaling the query instead of the scores saves a pass over [B, T, q, n].
    scores = normed @ (wide(queries) / math.sqrt(queries.shape[-1])).T  # [B, T, n, q]
    return scores.softmax(dim=-2).transpose(-1, -2) @ normed


def mix_and_norm(
    sources: Float[Tensor, "B T n D"],
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"] | None,
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
    dtype: torch.dtype,
) -> list[Float[Tensor, "B T D"]]:
    """The input of a sublayer: one mixture per query, each through its RMSNorm, rounded once to `dtype`.

    Args:
        sources: n source states a token, adjacent; the running sum is the last.
        queries: [q, D], or None to read the last source unmixed (the first layer).
        norm_weights: q weights, one a mixture. With `queries` None every norm reads the same state.
    """
    if queries is None:
        mixtures = [sources[:, :, -1]] * len(norm_weights)
    else:
        mixtures = mix(sources, queries.view(-1, queries.shape[-1]), SOURCE_EPS).unbind(dim=2)
    return [rounded(rms_norm(m, w, eps), dtype) for m, w in zip(mixtures, norm_weights, strict=True)]


@dataclass(frozen=True)
class DepthState:
    """The sources of every token: completed blocks [B, T, n, D] in the stream's dtype, and the running sum [B, T, D].

    Within a layer `partial` is in `wide` precision; it is rounded to the stream's dtype at the layer's end only.
    """

    blocks: Float[Tensor, "B T n D"]
    partial: Float[Tensor, "B T D"]

    @classmethod
    def start(cls, embedding: Float[Tensor, "B T D"]) -> "DepthState":
        """No completed block yet; the running sum is the embedding."""
        return cls(embedding[:, :, None, :][:, :, :0], embedding)

    def sources(self) -> Float[Tensor, "B T n D"]:
        return torch.cat([wide(self.blocks), wide(self.partial)[:, :, None]], dim=2)

    def close_block(self) -> "DepthState":
        """The running sum becomes a completed block, and a new sum starts from nothing."""
        return DepthState(torch.cat([self.blocks, self.partial[:, :, None]], dim=2), torch.zeros_like(self.partial))

    def add(self, y: Float[Tensor, "B T D"]) -> "DepthState":
        """`y` joins the running sum, in `wide` precision."""
        return DepthState(self.blocks, wide(self.partial) + wide(y))

    def round(self, dtype: torch.dtype) -> "DepthState":
        return DepthState(self.blocks, rounded(self.partial, dtype))


class RMSNorm(nn.Module):
    """Holds the weight of one RMSNorm under the released name `*.weight`; `mix_and_norm` does the arithmetic."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))


class AttentionResidualQueries(nn.Module):
    """`attn_res.*`: the queries of all mixtures of the stack. Zeros at first: every mixture starts as a plain mean."""

    def __init__(self, hidden_size: int, queries_per_layer: list[int]) -> None:
        """`queries_per_layer`: 1 for a sliding layer, 3 (query, key, value) for a full one; layer 0 has none."""
        super().__init__()
        shapes = [(hidden_size,) if n == 1 else (n, hidden_size) for n in queries_per_layer]
        self.attn_queries = nn.ParameterList(nn.Parameter(torch.zeros(shape)) for shape in shapes[1:])
        self.mlp_queries = nn.ParameterList(nn.Parameter(torch.zeros(hidden_size)) for _ in shapes)
        self.output_query = nn.Parameter(torch.zeros(hidden_size))
