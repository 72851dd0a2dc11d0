r"""Attention-residual mixture and RMSNorm: one program a token, every source read once.

The score of a source needs two sums over the row that is mixed, x q and x x, and the normalised source is the row
times a number; so one read of x serves the norm, the scores of all queries and all mixtures:

$$ \rho_j = 1 / \sqrt{\overline{x_j^2} + \epsilon}, \qquad \mathrm{mix} =
   \sum_j \frac{e^{s_j} \rho_j}{\sum_i e^{s_i}} x_j, \qquad s_j = \rho_j \, (x_j \cdot q) / \sqrt{D} $$

with the running maximum and sum of an online softmax over j. D = 4608 is no power of two, as the tiles of Triton are:
a row is a part of 4096 and a part of 512, without the 44 % of idle lanes that padding to 8192 would have.
"""

# ruff: noqa: RUF005 (Triton joins tuples with +, and does not know *)

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from ..residual import SOURCE_EPS
from . import LOG2E, require

_WARPS: int = 8
_REGISTERS: int = 128  # a thread may use: two programs a processor for three queries (which spill 32), three for one


@triton.jit
@no_type_check
def _mix_and_norm(
    source_ptr, query_ptr, weight_ptrs, out_ptr, N, n, source_n, source_eps, norm_eps, score_scale,
    D: tl.constexpr, Q: tl.constexpr, A: tl.constexpr, B: tl.constexpr, MIX: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    a, b = tl.arange(0, A), A + tl.arange(0, B)
    in_b = b < D
    base = source_ptr + token * source_n
    # One entry a query. (Vectors of Q rows would be padded to a power of two, and moved between layouts.)
    q_a, q_b, acc_a, acc_b, top, total = (), (), (), (), (), ()
    for i in tl.static_range(Q):
        if MIX:
            q_a = q_a + (tl.load(query_ptr + i * D + a).to(tl.float32) * score_scale,)
            q_b = q_b + (tl.load(query_ptr + i * D + b, mask=in_b, other=0.0).to(tl.float32) * score_scale,)
            acc_a, acc_b = acc_a + (tl.zeros([A], tl.float32),), acc_b + (tl.zeros([B], tl.float32),)
            top, total = top + (-1e30,), total + (0.0,)
        else:  # the first layer: the last source as it is
            acc_a = acc_a + (tl.load(base + (n - 1) * D + a).to(tl.float32),)
            acc_b = acc_b + (tl.load(base + (n - 1) * D + b, mask=in_b, other=0.0).to(tl.float32),)
    if MIX:
        for j in tl.range(0, n, num_stages=STAGES):
            x_a = tl.load(base + j * D + a).to(tl.float32)
            x_b = tl.load(base + j * D + b, mask=in_b, other=0.0).to(tl.float32)
            rho = tl.rsqrt((tl.sum(x_a * x_a, 0) + tl.sum(x_b * x_b, 0)) / D + source_eps)
            new_a, new_b, new_top, new_total = (), (), (), ()
            for i in tl.static_range(Q):
                score = (tl.sum(q_a[i] * x_a, 0) + tl.sum(q_b[i] * x_b, 0)) * rho  # to base 2
                highest = tl.maximum(top[i], score)
                shrink, p = tl.exp2(top[i] - highest), tl.exp2(score - highest)
                new_a = new_a + (acc_a[i] * shrink + x_a * (p * rho),)
                new_b = new_b + (acc_b[i] * shrink + x_b * (p * rho),)
                new_top, new_total = new_top + (highest,), new_total + (total[i] * shrink + p,)
            acc_a, acc_b, top, total = new_a, new_b, new_top, new_total
    for i in tl.static_range(Q):
        y_a, y_b = acc_a[i], acc_b[i]
        if MIX:
            y_a, y_b = y_a / total[i], y_b / total[i]
        inverse = tl.rsqrt((tl.sum(y_a * y_a, 0) + tl.sum(y_b * y_b, 0)) / D + norm_eps)
        w_a = tl.load(weight_ptrs[i] + a).to(tl.float32)
        w_b = tl.load(weight_ptrs[i] + b, mask=in_b, other=0.0).to(tl.float32)
        out = out_ptr + (i * N + token) * D
        tl.store(out + a, (y_a * inverse * w_a).to(out_ptr.dtype.element_ty))
        tl.store(out + b, (y_b * inverse * w_b).to(out_ptr.dtype.element_ty), mask=in_b)


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
        D=D, Q=Q, A=a, B=b, MIX=queries is not None, STAGES=3,
        num_warps=max(1, min(_WARPS, a // 512)), maxnreg=_REGISTERS,
    )  # fmt: skip
    return list(out.unbind(0))
