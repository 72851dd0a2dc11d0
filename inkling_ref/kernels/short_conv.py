r"""Short convolutions, static and dynamic taps, prefill and decoding: a run of tokens of some channels a program.

$$ y_t = \Big( \sum_{j=0}^{K-1} \mathrm{tap}_j \, u_{t-j} + u_t \Big) \, \mathrm{scale} $$

A thread keeps its channels and walks along the tokens: every row is loaded once and serves K outputs, from registers.
The K - 1 rows before a run are the neighbour's too, and come from the cache. The dynamic part of a tap is one number
for a whole head, and adds 2 G K bytes a token.
"""

# ruff: noqa: RUF005 (Triton joins tuples with +, and does not know *)

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from . import require

_TOKENS: int = 16  # a program's run


@triton.jit(do_not_specialize=["T"])
@no_type_check
def _convolve(
    u_ptr, tap_ptr, dynamic_ptr, position_ptr, out_ptr, T, C, u_b, u_t, tap_c, tap_j, dynamic_b, dynamic_t, scale,
    K: tl.constexpr, TOKENS: tl.constexpr, WIDTH: tl.constexpr, CHANNELS: tl.constexpr, DYNAMIC: tl.constexpr,
    DOCUMENTS: tl.constexpr,
):  # fmt: skip
    part = tl.program_id(0)  # of WIDTH channels: with dynamic taps, a head
    start = tl.program_id(1) * TOKENS
    b = tl.program_id(2).to(tl.int64)
    c = part * WIDTH + tl.arange(0, CHANNELS)
    limit = tl.minimum(C, (part + 1) * WIDTH)
    inside = c < limit
    taps, rows = (), ()
    for j in tl.static_range(K):
        tap = tl.load(tap_ptr + c * tap_c + j * tap_j, mask=inside, other=0.0).to(tl.float32)
        tap = tap + 1.0 if j == 0 else tap  # the convolution's own residual is one more tap 0
        taps = taps + (tap * scale,)
    u_row = u_ptr + b * u_b + start.to(tl.int64) * u_t + c
    for i in tl.static_range(TOKENS + K - 1):
        live = c < tl.where(start + i < T + K - 1, limit, 0)
        rows = rows + (tl.load(u_row + i * u_t, mask=live, other=0.0).to(tl.float32),)
    out_row = out_ptr + (b * T + start) * C + c
    for i in tl.static_range(TOKENS):
        t = start + i
        if DOCUMENTS:
            position = tl.load(position_ptr + b * T + t, mask=t < T, other=0)
        y = tl.zeros([CHANNELS], tl.float32)
        for j in tl.static_range(K):
            tap = taps[j]
            if DYNAMIC:
                dynamic = dynamic_ptr + b * dynamic_b + t.to(tl.int64) * dynamic_t + part * K + j
                tap += scale * tl.load(dynamic, mask=t < T, other=0.0).to(tl.float32)
            u = rows[i + K - 1 - j]
            if DOCUMENTS:  # a tap that reaches before its document's start reads zero
                u = tl.where(position >= j, u, 0.0)
            y += tap * u
        tl.store(out_row + i * C, y.to(out_ptr.dtype.element_ty), mask=c < tl.where(t < T, limit, 0))


def _launch(
    u: Tensor, K: int, taps: Tensor, strides: tuple[int, int], dynamic: Tensor | None, document_position: Tensor | None
) -> Float[Tensor, "B T C"]:
    """`taps` begins at the current token's tap of channel 0; `strides` lead to the next channel and one token back."""
    B, S, C = u.shape
    T = S - K + 1
    u = u if u.stride(2) == 1 else u.contiguous()
    document_position = None if document_position is None else document_position.contiguous()
    out = torch.empty(B, T, C, dtype=u.dtype, device=u.device)
    tokens, width = min(_TOKENS, triton.next_power_of_2(T)), min(512, triton.next_power_of_2(C))
    heads, terms = 1, K + 1
    if dynamic is not None:
        heads, terms = dynamic.shape[2], 2 * K + 1
        width = C // heads
    channels = triton.next_power_of_2(width)
    _convolve[(triton.cdiv(C, width), triton.cdiv(T, tokens), B)](
        u, taps, dynamic, document_position, out, T, C, *u.stride()[:2], *strides, T * heads * K, heads * K,
        1 / math.sqrt(terms),
        K=K, TOKENS=tokens, WIDTH=width, CHANNELS=channels, DYNAMIC=dynamic is not None,
        DOCUMENTS=document_position is not None, num_warps=max(1, channels // 256),
    )  # fmt: skip
    return out


def short_conv(
    u: Float[Tensor, "B S C"], weight: Float[Tensor, "C 1 K"], document_position: Int[Tensor, "B T"] | None = None
) -> Float[Tensor, "B T C"]:
    """Twin of `short_conv.short_conv`; float32 inside, one rounding.

    Raises:
        InputError: see `require`.
    """
    require("short_conv", u, weight)
    current = weight[:, 0, -1:]
    return _launch(u, weight.shape[2], current, (weight.stride(0), -weight.stride(2)), None, document_position)


def dynamic_short_conv(
    u: Float[Tensor, "B S C"],
    dynamic_taps: Float[Tensor, "B T G K"],
    static: Float[Tensor, "K C"],
    document_position: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T C"]:
    """Twin of `short_conv.dynamic_short_conv`; float32 inside, one rounding.

    Raises:
        InputError: see `require`.
    """
    require("dynamic_short_conv", u, dynamic_taps, static)
    strides = static.stride(1), static.stride(0)
    return _launch(u, len(static), static, strides, dynamic_taps.contiguous(), document_position)
