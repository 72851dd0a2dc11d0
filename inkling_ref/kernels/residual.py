r"""Attention-residual mixture and RMSNorm: one program a token, every source read once.

The score of a source needs two sums over the row that is mixed, x q and x x, and the normalised source is the row
times a number; so one read of x serves the norm, the scores of all queries and all mixtures:

$$ \rho_j = 1 / \sqrt{\overline{x_j^2} + \epsilon}, \qquad \mathrm{mix} =
   \sum_j \frac{e^{s_j} \rho_j}{\sum_i e^{s_i}} x_j, \qquad s_j = \rho_j \, (x_j \cdot q) / \sqrt{D} $$

with the running maximum and sum of an online softmax over j. D = 4608 is no power of two, as the tiles of Triton are:
a row is a part of 4096 and a part of 512, without the 44 % of idle lanes that padding to 8192 would have.
"""

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from ..residual import SOURCE_EPS
from . import LOG2E, require


@triton.jit
@no_type_check
def _fold(acc, x, shrink, weight):
    return acc * shrink[:, None] + weight[:, None] * x[None, :]


@triton.jit
@no_type_check
def _mix_and_norm(
    source_ptr, query_ptr, weight_ptrs, out_ptr, N, n, source_n, source_eps, norm_eps, score_scale,
    D: tl.constexpr, Q: tl.constexpr, ROWS: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MIX: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    a, b = tl.arange(0, A), A + tl.arange(0, B)
    in_b = b < D
    rows = tl.arange(0, ROWS)
    base = source_ptr + token * source_n
    if MIX:
        real = rows[:, None] < Q
        q_a = tl.load(query_ptr + rows[:, None] * D + a[None, :], mask=real, other=0.0).to(tl.float32)
        q_b = tl.load(query_ptr + rows[:, None] * D + b[None, :], mask=real & in_b[None, :], other=0.0).to(tl.float32)
        top = tl.full([ROWS], float("-inf"), tl.float32)
        total = tl.zeros([ROWS], tl.float32)
        acc_a, acc_b = tl.zeros([ROWS, A], tl.float32), tl.zeros([ROWS, B], tl.float32)
        for j in tl.range(0, n, num_stages=STAGES):
            x_a = tl.load(base + j * D + a).to(tl.float32)
            x_b = tl.load(base + j * D + b, mask=in_b, other=0.0).to(tl.float32)
            rho = tl.rsqrt((tl.sum(x_a * x_a, 0) + tl.sum(x_b * x_b, 0)) / D + source_eps)
            dot = tl.sum(q_a * x_a[None, :], 1) + tl.sum(q_b * x_b[None, :], 1)
            score = dot * (rho * score_scale)  # to base 2
            new_top = tl.maximum(top, score)
            shrink, p = tl.exp2(top - new_top), tl.exp2(score - new_top)
            total = total * shrink + p
            acc_a, acc_b = _fold(acc_a, x_a, shrink, p * rho), _fold(acc_b, x_b, shrink, p * rho)
            top = new_top
        acc_a, acc_b = acc_a / total[:, None], acc_b / total[:, None]
    else:  # the first layer: the last source as it is
        x_a = tl.load(base + (n - 1) * D + a).to(tl.float32)
        x_b = tl.load(base + (n - 1) * D + b, mask=in_b, other=0.0).to(tl.float32)
        acc_a = tl.broadcast_to(x_a[None, :], [ROWS, A])
        acc_b = tl.broadcast_to(x_b[None, :], [ROWS, B])
    inverse = tl.rsqrt((tl.sum(acc_a * acc_a, 1) + tl.sum(acc_b * acc_b, 1)) / D + norm_eps)
    acc_a, acc_b = acc_a * inverse[:, None], acc_b * inverse[:, None]
    for i in tl.static_range(Q):
        w_a = tl.load(weight_ptrs[i] + a).to(tl.float32)
        w_b = tl.load(weight_ptrs[i] + b, mask=in_b, other=0.0).to(tl.float32)
        y_a = tl.sum(tl.where(rows[:, None] == i, acc_a, 0.0), 0) * w_a  # row i: a choice within each thread
        y_b = tl.sum(tl.where(rows[:, None] == i, acc_b, 0.0), 0) * w_b
        out = out_ptr + (i * N + token) * D
        tl.store(out + a, y_a.to(out_ptr.dtype.element_ty))
        tl.store(out + b, y_b.to(out_ptr.dtype.element_ty), mask=in_b)


def mix_and_norm(
    sources: Float[Tensor, "B T n D"],
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"] | None,
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
    dtype: torch.dtype,
) -> list[Float[Tensor, "B T D"]]:
    """Twin of `residual.mix_and_norm`; sources of any of the three dtypes, float32 inside, one rounding.

    Raises:
        InputError: see `require`.
    """
    require("mix_and_norm", sources, *norm_weights, *([] if queries is None else [queries]))
    B, T, n, D = sources.shape
    sources = sources.contiguous()
    queries = None if queries is None else queries.contiguous()
    Q = len(norm_weights)
    a = 2 ** (D.bit_length() - 1)
    b = triton.next_power_of_2(max(D - a, 1))
    out = torch.empty(Q, B, T, D, dtype=dtype, device=sources.device)
    _mix_and_norm[(B * T,)](
        sources, queries, tuple(norm_weights), out, B * T, n, n * D, SOURCE_EPS, eps, LOG2E / math.sqrt(D),
        D=D, Q=Q, ROWS=triton.next_power_of_2(Q), A=a, B=b, MIX=queries is not None, STAGES=3,
        num_warps=max(1, min(8, a // 512)),
    )  # fmt: skip
    return list(out.unbind(0))
