"""The beginning of a decoding step in one launch: embedding, its norm, the running sum, the first layer's norms.

What it reads is a row of the embedding a token: launches are all that it costs, and PyTorch needs a dozen of them.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..errors import InputError
from . import FLOATS, INTEGERS, axes, dependent, expect, next_power_of_2


@triton.jit(do_not_specialize=["N"])
@no_type_check
def _embed_and_norm(
    id_ptr, table_ptr, weight_ptr, partial_ptr, norm_ptrs, out_ptr, N, eps,
    D: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    token, c = tl.program_id(0).to(tl.int64), tl.arange(0, BLOCK)
    inside = c < D
    row = table_ptr + tl.load(id_ptr + token).to(tl.int64) * D
    w = tl.load(weight_ptr + c, mask=inside, other=0.0).to(tl.float32)
    e = tl.load(row + c, mask=inside, other=0.0).to(tl.float32)
    e = (e * tl.rsqrt(tl.sum(e * e, 0) / D + eps) * w).to(table_ptr.dtype.element_ty).to(tl.float32)
    tl.store(partial_ptr + token * D + c, e, mask=inside)
    inverse = tl.rsqrt(tl.sum(e * e, 0) / D + eps)
    for i in tl.static_range(len(norm_ptrs)):
        w = tl.load(norm_ptrs[i] + c, mask=inside, other=0.0).to(tl.float32)
        y = (e * inverse * w).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + (i * N + token) * D + c, y, mask=inside)


def embed_and_norm(
    ids: Int[Tensor, "B T"],
    table: Float[Tensor, "V D"],
    norm_weight: Float[Tensor, " D"],
    partial: Float[Tensor, "B T D"],
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
) -> list[Float[Tensor, "B T D"]]:
    """Twin of `fused.embed_and_norm`; float32 inside, roundings where the reference has them.

    Raises:
        InputError: see `expect` and `axes`; for a running sum that is not contiguous.
    """
    V, D = axes("embed_and_norm", "table", table, 2)
    B, T = axes("embed_and_norm", "ids", ids, 2, batch=2)
    expect("embed_and_norm", INTEGERS, ids=(ids, (B, T)))
    norms = {f"norm_weights[{i}]": (w, (D,)) for i, w in enumerate(norm_weights)}
    expect(
        "embed_and_norm", FLOATS, table=(table, (V, D)), norm_weight=(norm_weight, (D,)), partial=(partial, (B, T, D)),
        **norms,
    )  # fmt: skip
    if not partial.is_contiguous():
        raise InputError("triton embed_and_norm: a strided running sum, expected a contiguous one")
    out = torch.empty(len(norm_weights), B, T, D, dtype=table.dtype, device=table.device)
    if B * T == 0:
        return list(out.unbind(0))
    pdl = dependent(table.device)
    block = next_power_of_2(D)
    _embed_and_norm[(B * T,)](
        ids.contiguous(), table.contiguous(), norm_weight.contiguous(), partial,
        tuple(w.contiguous() for w in norm_weights), out, B * T, eps, D=D, BLOCK=block, PDL=pdl,
        num_warps=max(1, min(16, block // 512)), launch_pdl=pdl,
    )  # fmt: skip
    return list(out.unbind(0))
