r"""Short convolutions, static and dynamic taps, prefill and decoding: a run of tokens of some channels a program.

$$ y_t = \Big( \sum_{j=0}^{K-1} \mathrm{tap}_j \, u_{t-j} + u_t \Big) \, \mathrm{scale} $$

A thread keeps its channels, 8 of them (16 bytes), and walks along the tokens: every row is loaded once and serves K
outputs, from registers. The K - 1 rows before a run are the neighbour's too, or come from a state. The dynamic part of
a tap is one number for a whole head. The functions below are also the convolutions of `kernels.qkv`.
"""

# ruff: noqa: RUF005 (Triton joins tuples with +, and does not know *)

import math
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from . import FLOATS, INTEGERS, adjacent, axes, cdiv, dependent, expect, next_power_of_2, prepared

RUN: int = 8  # of a run of a long call
SHORT: int = 16  # calls of so many tokens are one run


@triton.jit
@no_type_check
def load_rows(x_ptr, x_t, start, first, T, inside, PAST: tl.constexpr, TOKENS: tl.constexpr):
    """The rows of a run, after the PAST before it; those before token `first` are zeros."""
    rows = ()
    x_ptr += start.to(tl.int64) * x_t
    for i in tl.static_range(TOKENS + PAST):
        t = start + i - PAST
        rows = rows + (tl.load(x_ptr + (i - PAST) * x_t, mask=inside & (t >= first) & (t < T), other=0.0),)
    return rows


@triton.jit
@no_type_check
def load_state(
    rows, state_ptr, state_n, start, rejected, inside, PAST: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr
):  # fmt: skip
    """`rows`, where those before token 0 come from a state of N rows. (Its address may wait for `rejected`.)"""
    past, joined = (), ()
    for i in tl.static_range(PAST):
        t = start + i - PAST
        place = N - rejected + t
        past = past + (tl.load(state_ptr + place * state_n, mask=inside & (t < 0) & (place >= 0), other=0.0),)
    for i in tl.static_range(TOKENS + PAST):
        joined = joined + (tl.where(start + i < PAST, past[i], rows[i]) if i < PAST else rows[i],)
    return joined


@triton.jit
@no_type_check
def load_taps(tap_ptr, tap_j, scale, inside, K: tl.constexpr):
    """All K taps times the scale; the convolution's own residual is one more tap 0."""
    taps = ()
    for j in tl.static_range(K):
        tap = tl.load(tap_ptr + j * tap_j, mask=inside, other=0.0).to(tl.float32)
        taps = taps + ((tap + 1.0 if j == 0 else tap) * scale,)
    return taps


@triton.jit
@no_type_check
def roll_state(
    rows, x_ptr, x_t, state_ptr, state_n, start, T, rejected, inside,
    PAST: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, WHOLE: tl.constexpr,
):  # fmt: skip
    """The inputs of this call join the state, written by the run that reads it: its threads keep their channels.

    WHOLE: this run is the whole call, and may have fewer tokens than the state has rows: older rows move up.
    """
    if WHOLE:
        OLDER: tl.constexpr = N - TOKENS - PAST  # rows that are not among `rows`
        older = ()
        for n in tl.static_range(OLDER):
            place = n + TOKENS - rejected
            older = older + (tl.load(state_ptr + place * state_n, mask=inside & (place >= 0), other=0.0),)
        for n in tl.static_range(N):
            tl.store(state_ptr + n * state_n, older[n] if n < OLDER else rows[n - OLDER], mask=inside)
    elif start == 0:
        x_ptr += (T - N).to(tl.int64) * x_t
        for n in tl.static_range(N):
            tl.store(state_ptr + n * state_n, tl.load(x_ptr + n * x_t, mask=inside, other=0.0), mask=inside)


@triton.jit
@no_type_check
def load_dynamic(
    dynamic_ptr, dynamic_t, start, T, head, heads,
    K: tl.constexpr, TOKENS: tl.constexpr, PACKED: tl.constexpr,
):  # fmt: skip
    """K taps for every token of a run, in turn: each a number for every head of the program.

    All of them before the first output: a load behind a store would wait for the memory in every token. PACKED: the K
    numbers of a head are loaded as one word of 8 bytes.
    """
    taps = ()
    dynamic_ptr += start.to(tl.int64) * dynamic_t
    some = tl.full(head.shape, True, tl.int1) & (head < heads)  # the interpreter's & of two comparisons is no mask
    for i in tl.static_range(TOKENS):
        live = start + i < T
        for j in tl.static_range(K):
            if j == 0 or not PACKED:
                place = dynamic_ptr + i * dynamic_t + head * K + j
                if PACKED:
                    place = place.to(tl.pointer_type(tl.int64))
                word = tl.load(place, mask=some & live, other=0)
            tap = word
            if PACKED:
                tap = (word >> (16 * j)).to(tl.int16).to(dynamic_ptr.dtype.element_ty, bitcast=True)
            taps = taps + (tap.to(tl.float32),)
    return taps


@triton.jit
@no_type_check
def load_positions(document_ptr, start, T, TOKENS: tl.constexpr):
    """The position of every token of a run in its document."""
    positions = ()
    for i in tl.static_range(TOKENS):
        positions = positions + (tl.load(document_ptr + start + i, mask=start + i < T, other=0),)
    return positions


@triton.jit
@no_type_check
def convolve(
    rows, taps, dynamic, positions, scale,
    I: tl.constexpr, K: tl.constexpr, DYNAMIC: tl.constexpr, DOCUMENTS: tl.constexpr,
):  # fmt: skip
    """Output I of a run, in float32."""
    y = tl.zeros(taps[0].shape, tl.float32)
    for j in tl.static_range(K):
        tap = taps[j]
        if DYNAMIC:
            tap += dynamic[I * K + j] * scale
        u = rows[I + K - 1 - j].to(tl.float32)
        if DOCUMENTS:  # a tap that reaches before its document's start reads zero
            u = tl.where(positions[I] >= j, u, 0.0)
        y += tap * u
    return y


@triton.jit(do_not_specialize=["T", "first"])
@no_type_check
def _convolve(
    x_ptr, tap_ptr, dynamic_ptr, position_ptr, state_ptr, rejected_ptr, out_ptr, T, first, C, x_b, x_t, tap_j,
    dynamic_b, dynamic_t, state_b, state_n, scale,
    K: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    BLOCK: tl.constexpr, EVEN: tl.constexpr, DYNAMIC: tl.constexpr, DOCUMENTS: tl.constexpr, WHOLE: tl.constexpr,
    PACKED: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:  # the next kernel may start, and wait here as this one does for the kernel in front of it
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    part = tl.program_id(0) * HEADS
    start = tl.program_id(1) * TOKENS
    b = tl.program_id(2).to(tl.int64)
    head, e = tl.arange(0, HEADS)[:, None], tl.arange(0, BLOCK)[None, :]
    c = (part + head) * WIDTH + e
    inside = tl.full([HEADS, BLOCK], True, tl.int1)
    if not EVEN:
        inside = inside & (e < WIDTH) & (c < C)
    rejected = 0
    if rejected_ptr is not None:
        rejected = tl.load(rejected_ptr + b).to(tl.int32)
    x = x_ptr + b * x_b + c
    rows = load_rows(x, x_t, start, first, T, inside, K - 1, TOKENS)
    taps = load_taps(tap_ptr + c, tap_j, scale, inside, K)
    dynamic, positions = (), ()
    if DYNAMIC:
        dynamic_row = dynamic_ptr + b * dynamic_b + part * K
        heads = tl.cdiv(C, WIDTH) - part
        dynamic = load_dynamic(dynamic_row, dynamic_t, start, T, head, heads, K, TOKENS, PACKED)
    if DOCUMENTS:
        positions = load_positions(position_ptr + b * T, start, T, TOKENS)
    if N > 0:
        state = state_ptr + b * state_b + c
        rows = load_state(rows, state, state_n, start, rejected, inside, K - 1, N, TOKENS)
    out_ptr += (b * T + start) * C + c
    for i in tl.static_range(TOKENS):
        y = convolve(rows, taps, dynamic, positions, scale, i, K, DYNAMIC, DOCUMENTS)
        tl.store(out_ptr + i * C, y.to(out_ptr.dtype.element_ty), mask=inside & (start + i < T))
    if N > 0:  # at the end: a branch before would keep all that is loaded in registers
        roll_state(rows, x, x_t, state, state_n, start, T, rejected, inside, K - 1, N, TOKENS, WHOLE)


def token_major(weight: Float[Tensor, "C 1 K"]) -> Float[Tensor, "K C"]:
    """Static taps, the current token's first, the channels of one tap adjacent."""
    return weight[:, 0].t().flip(0).contiguous()


def packed(dynamic: Float[Tensor, "B T G K"] | None) -> bool:
    """Whether the K taps of a head are an aligned word of 8 bytes."""
    if dynamic is None or dynamic.shape[3] * dynamic.element_size() != 8:
        return False
    return dynamic.data_ptr() % 8 == 0 and all(n % dynamic.shape[3] == 0 for n in dynamic.stride()[:3])


def check_state(
    op: str,
    state: Float[Tensor, "B N C"],
    rejected: Int[Tensor, " B"] | None,
    shape: tuple[int, int, int],
    K: int,
    tokens: int,
) -> None:
    """Refuse a state that the kernels cannot read and roll, in a call of inputs of `shape` and long runs of `tokens`.

    That no more rows are rejected than N - K + 1 is not checked: it would wait for the device.

    Raises:
        InputError: see `expect`; for fewer than K - 1 rows; for channels that are not adjacent; in a call of T > 16
            tokens, for a state of more than T rows, and for K - 1 > `tokens`: a run later than the first would need
            what the first is about to overwrite.
    """
    (B, T, C), N = shape, axes(op, "state", state, 3, batch=1)[1]
    expect(op, FLOATS, state=(state, (B, N, C)))
    expect(op, INTEGERS, rejected=(rejected, (B,)))
    if N < K - 1:
        raise InputError(f"triton {op}: a state of {N} rows, expected at least {K - 1} for {K} taps")
    if state.stride(2) != 1:
        raise InputError(f"triton {op}: a state of channels {state.stride(2)} apart, expected adjacent ones")
    if T > SHORT and N > T:
        raise InputError(f"triton {op}: a state of {N} rows, expected at most the call's {T} tokens")
    if tokens < K - 1 and T > SHORT:
        raise InputError(
            f"triton {op}: {K} taps on a state, expected at most {tokens + 1} in a call of more than {SHORT} tokens"
        )


def _launch(
    x: Float[Tensor, "B T C"],
    first: int,
    taps: Float[Tensor, "K C"],
    dynamic: Float[Tensor, "B T G K"] | None = None,
    document_position: Int[Tensor, "B T"] | None = None,
    state: Float[Tensor, "B N C"] | None = None,
    rejected: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T C"]:
    """`x` may be read from token `first` <= 0 on; `taps` begin with the current token's."""
    (B, T, C), K = x.shape, len(taps)
    N = 0 if state is None else state.shape[1]
    tokens = T if T <= SHORT else RUN if dynamic is None else RUN // 2  # taps take registers
    if dynamic is None:
        # A short call of few rows is cut small, one of many rows not: its programs would start too slowly.
        width = min(64 if T <= SHORT and B <= 16 else 512, next_power_of_2(C))
        heads, terms = 1, K + 1
    else:
        width = C // dynamic.shape[2]
        heads, terms = min(4 if T > SHORT else 2, next_power_of_2(dynamic.shape[2])), 2 * K + 1
    block = next_power_of_2(width)
    pdl = dependent(x.device)
    out = torch.empty(B, T, C, dtype=x.dtype, device=x.device)
    _convolve[(cdiv(C, width * heads), cdiv(T, tokens), B)](
        x, taps, dynamic, document_position, state, rejected, out, T, first, C, *x.stride()[:2], taps.stride(0),
        *((0, 0) if dynamic is None else dynamic.stride()[:2]), *(state.stride()[:2] if N else (0, 0)),
        1 / math.sqrt(terms),
        K=K, N=N, TOKENS=tokens, HEADS=heads, WIDTH=width, BLOCK=block,
        EVEN=width == block and C % (heads * width) == 0, DYNAMIC=dynamic is not None,
        DOCUMENTS=document_position is not None, WHOLE=tokens == T, PACKED=packed(dynamic),
        DEPENDENT=pdl, num_warps=max(1, heads * block // (256 if T > SHORT else 128)), launch_pdl=pdl,
    )  # fmt: skip
    return out


def documents_of(op: str, document_position: Int[Tensor, "b T"] | None, B: int, T: int) -> Int[Tensor, "B T"] | None:
    """Positions for every row, adjacent in memory; one row may stand for all.

    Raises:
        InputError: see `expect`.
    """
    if document_position is None:
        return None
    rows = 1 if len(document_position) == 1 else B
    expect(op, INTEGERS, document_position=(document_position, (rows, T)))
    return document_position.expand(B, T).contiguous()


def _inputs(op: str, u: Float[Tensor, "B S C"], K: int) -> tuple[int, int, int]:
    """B, T and C of T + K - 1 inputs."""
    B, S, C = axes(op, "u", u, 3, batch=1)
    if S < K:
        raise InputError(f"triton {op}: u of {S} inputs, expected at least {K} for {K} taps")
    return B, S - K + 1, C


def short_conv(
    u: Float[Tensor, "B S C"], weight: Float[Tensor, "C 1 K"], document_position: Int[Tensor, "b T"] | None = None
) -> Float[Tensor, "B T C"]:
    """Twin of `short_conv.short_conv`; float32 inside, one rounding.

    Raises:
        InputError: see `expect`; for fewer inputs than taps.
    """
    K = axes("short_conv", "weight", weight, 3)[2]
    B, T, C = _inputs("short_conv", u, K)
    expect("short_conv", FLOATS, u=(u, u.shape), weight=(weight, (C, 1, K)))
    documents = documents_of("short_conv", document_position, B, T)
    (u,) = adjacent(u)
    return _launch(u[:, K - 1 :], 1 - K, prepared(weight, token_major), document_position=documents)


def dynamic_short_conv(
    u: Float[Tensor, "B S C"],
    dynamic_taps: Float[Tensor, "B T G K"],
    static: Float[Tensor, "K C"],
    document_position: Int[Tensor, "b T"] | None = None,
) -> Float[Tensor, "B T C"]:
    """Twin of `short_conv.dynamic_short_conv`; float32 inside, one rounding.

    Raises:
        InputError: see `expect`; for fewer inputs than taps, or channels that the heads do not divide.
    """
    G, K = axes("dynamic_short_conv", "dynamic_taps", dynamic_taps, 4, batch=1)[2:]
    B, T, C = _inputs("dynamic_short_conv", u, K)
    expect(
        "dynamic_short_conv", FLOATS, u=(u, (B, u.shape[1], C // G * G)), dynamic_taps=(dynamic_taps, (B, T, G, K)),
        static=(static, (K, C)),
    )  # fmt: skip
    documents = documents_of("dynamic_short_conv", document_position, B, T)
    (u,) = adjacent(u)
    return _launch(u[:, K - 1 :], 1 - K, static.contiguous(), dynamic_taps.contiguous(), documents)


def rolling_short_conv(
    x: Float[Tensor, "B T C"],
    state: Float[Tensor, "B N C"],
    weight: Float[Tensor, "C 1 K"],
    rejected: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T C"]:
    """Twin of `fused.rolling_short_conv`; float32 inside, one rounding.

    Raises:
        InputError: see `expect` and `check_state`: a call of more than 16 tokens takes up to 9 taps.
    """
    (B, T, C), K = axes("rolling_short_conv", "x", x, 3, batch=1), axes("rolling_short_conv", "weight", weight, 3)[2]
    expect("rolling_short_conv", FLOATS, x=(x, (B, T, C)), weight=(weight, (C, 1, K)))
    check_state("rolling_short_conv", state, rejected, (B, T, C), K, RUN)
    rejected = None if rejected is None else rejected.contiguous()
    (x,) = adjacent(x)
    return _launch(x, 0, prepared(weight, token_major), state=state, rejected=rejected)
