r"""Everything between the projections and the attention of a layer, in one launch, with the write into the cache.

$$ q = \mathrm{clip}_{c}(s_q \odot q') \, \tau, \qquad r = \mathrm{clip}_{c_r}(s_r \odot r') \, \tau, \qquad
   k = \mathrm{clip}_{c}(\mathrm{Conv}(k')), \qquad v = \mathrm{RMS}(\mathrm{Conv}(v')) $$

Nothing here reuses what it reads, so bytes are the limit of a long call, and one launch that of a short one. A
program walks a run of tokens in one of four roles: some heads of queries, of relative states, of keys or of values. A
vector of d = 128 numbers lies across 16 lanes, 8 numbers (16 bytes) each: its norm takes four exchanges.

What decides the time of a long call, after the bytes: how many programs there are (an H200 starts about 0.8 in a
nanosecond, so small ones keep it waiting) and the registers of the convolutions (runs of 4 tokens: 8 would halve the
warps that a processor holds).
"""

# ruff: noqa: RUF005 (Triton joins tuples with +, and does not know *)

import math
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from . import FLOATS, INTEGERS, LOG2E, axes, cdiv, dependent, expect, next_power_of_2, prepared
from .approximate import log2, reciprocal
from .short_conv import (
    SHORT,
    check_state,
    convolve,
    documents_of,
    load_dynamic,
    load_positions,
    load_rows,
    load_state,
    load_taps,
    packed,
    roll_state,
    token_major,
)


class Tile(NamedTuple):
    """How one call is cut: tokens of a run, and heads of a program of each role."""

    tokens: int
    heads: int  # of keys, or of values
    q_heads: int
    r_heads: int
    warps: int


@triton.jit
@no_type_check
def _clipped(
    x_ptr, scale_ptr, position_ptr, out_ptr, part, start, T, slot0, x_t, threshold, per_floor, alpha,
    H: tl.constexpr, d: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr, WIDTH: tl.constexpr,
    LOG: tl.constexpr,
):  # fmt: skip
    """A run of tokens of some heads of one batch row: scale, clip, and the factor of the position."""
    h, e = part * HEADS + tl.arange(0, HEADS)[:, None], tl.arange(0, WIDTH)[None, :]
    c = h * d + e
    inside = tl.full([HEADS, WIDTH], True, tl.int1)
    if H % HEADS != 0:
        inside = inside & (h < H)
    if d != WIDTH:
        inside = inside & (e < d)
    rows = load_rows(x_ptr + c, x_t, start, 0, T, inside, 0, TOKENS)
    positions = ()
    if LOG:
        if position_ptr is not None:
            positions = load_positions(position_ptr, start, T, TOKENS)
        else:
            for i in tl.static_range(TOKENS):
                positions = positions + (slot0 + start + i,)
    scale = tl.load(scale_ptr + c, mask=inside, other=0.0).to(tl.float32)
    out_ptr += start.to(tl.int64) * (H * d) + c
    for i in tl.static_range(TOKENS):
        u = rows[i].to(tl.float32) * scale
        factor = tl.minimum(threshold * reciprocal(tl.sqrt(tl.sum(u * u, 1)) + 1e-6), 1.0)
        if LOG:
            factor *= 1.0 + alpha * tl.maximum(log2((positions[i] + 1).to(tl.float32) * per_floor), 0.0)
        u = (u * factor[:, None]).to(out_ptr.dtype.element_ty)
        tl.store(out_ptr + i * (H * d), u, mask=inside & (start + i < T))


@triton.jit
@no_type_check
def _convolved(
    x_ptr, tap_ptr, dynamic_ptr, state_ptr, document_ptr, cache_ptr, table_ptr, part, start, T, slot0, rejected,
    x_t, tap_j, dynamic_t, state_n, cache_p, cache_g, cache_s, scale, limit,
    G: tl.constexpr, d: tl.constexpr, K: tl.constexpr, N: tl.constexpr, TOKENS: tl.constexpr, HEADS: tl.constexpr,
    WIDTH: tl.constexpr, VALUE: tl.constexpr, DYNAMIC: tl.constexpr, PACKED: tl.constexpr, DOCUMENTS: tl.constexpr,
    WHOLE: tl.constexpr, PAGE: tl.constexpr,
):  # fmt: skip
    """A run of tokens of some heads of one batch row: convolution, clip or RMS, cache, and the state's next inputs."""
    head = tl.arange(0, HEADS)[:, None]
    g, e = part * HEADS + head, tl.arange(0, WIDTH)[None, :]
    c = g * d + e
    inside = tl.full([HEADS, WIDTH], True, tl.int1)
    if G % HEADS != 0:
        inside = inside & (g < G)
    if d != WIDTH:
        inside = inside & (e < d)
    x = x_ptr + c
    rows = load_rows(x, x_t, start, 0, T, inside, K - 1, TOKENS)
    taps = load_taps(tap_ptr + c, tap_j, scale, inside, K)
    dynamic, positions, pages = (), (), ()
    if DYNAMIC:
        dynamic_ptr += part * (HEADS * K)
        heads = G - part * HEADS
        dynamic = load_dynamic(dynamic_ptr, dynamic_t, start, T, head, heads, K, TOKENS, PACKED)
    if DOCUMENTS:
        positions = load_positions(document_ptr, start, T, TOKENS)
    if N > 0:
        state = state_ptr + c
        rows = load_state(rows, state, state_n, start, rejected, inside, K - 1, N, TOKENS)
    slot0 += start
    if PAGE > 0:
        for i in tl.static_range(TOKENS):
            live = (start + i < T) & (slot0 + i >= 0)
            pages = pages + (tl.load(table_ptr + (slot0 + i) // PAGE, mask=live, other=0),)
    cache_ptr += g.to(tl.int64) * cache_g + e
    for i in tl.static_range(TOKENS):
        y = convolve(rows, taps, dynamic, positions, scale, i, K, DYNAMIC, DOCUMENTS)
        square = tl.sum(y * y, 1)
        if VALUE:
            factor = tl.rsqrt(square / d + limit)
        else:
            factor = tl.minimum(limit * reciprocal(tl.sqrt(square) + 1e-6), 1.0)
        y = (y * factor[:, None]).to(cache_ptr.dtype.element_ty)
        place = (slot0 + i).to(tl.int64) * cache_s
        if PAGE > 0:
            place = pages[i].to(tl.int64) * cache_p + (slot0 + i) % PAGE * cache_s
        used = (start + i < T) & (slot0 + i >= 0)  # a row that is not in use has slots below 0
        tl.store(cache_ptr + place, y, mask=inside & used)
    if N > 0:
        roll_state(rows, x, x_t, state, state_n, start, T, rejected, inside, K - 1, N, TOKENS, WHOLE)


@triton.jit
@no_type_check
def _nearer(pointer, part, COUNT: tl.constexpr, STOP: tl.constexpr):
    """Into the L2 cache: COUNT elements of a part, of STOP in all; a lane asks for a sector of 32 bytes."""
    STEP: tl.constexpr = 256 // pointer.dtype.element_ty.primitive_bitwidth
    sectors = tl.arange(0, triton.next_power_of_2((COUNT + STEP - 1) // STEP)) * STEP
    pointers = pointer + tl.minimum(part * COUNT + tl.minimum(sectors, COUNT - 1), STOP - 1)
    code: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(code, "=r,l", [pointers], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit(do_not_specialize=["T"])
@no_type_check
def _prepare(
    q_ptr, r_ptr, k_ptr, v_ptr, q_scale_ptr, r_scale_ptr, k_tap_ptr, v_tap_ptr, k_dynamic_ptr, v_dynamic_ptr,
    key_ptr, value_ptr, length_ptr, table_ptr, state_ptr, rejected_ptr, position_ptr, document_ptr,
    q_out_ptr, r_out_ptr, T,
    q_b, q_t, r_b, r_t, k_b, k_t, v_b, v_t, tap_j, k_dynamic_b, k_dynamic_t, v_dynamic_b, v_dynamic_t,
    key_b, key_g, key_s, value_b, value_g, value_s, table_b, state_b, state_n, position_b, document_b,
    qk_threshold, r_threshold, eps, per_floor, alpha, conv_scale,
    H: tl.constexpr, G: tl.constexpr, d: tl.constexpr, R: tl.constexpr, K: tl.constexpr, N: tl.constexpr,
    TOKENS: tl.constexpr, HEADS: tl.constexpr, Q_HEADS: tl.constexpr, R_HEADS: tl.constexpr, WIDTH: tl.constexpr,
    R_WIDTH: tl.constexpr, LOG: tl.constexpr, DYNAMIC: tl.constexpr, PACKED: tl.constexpr, DOCUMENTS: tl.constexpr,
    WHOLE: tl.constexpr, LENGTHS: tl.constexpr, REJECTED: tl.constexpr, PAGE: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    Q_PARTS: tl.constexpr = (H + Q_HEADS - 1) // Q_HEADS
    R_PARTS: tl.constexpr = (H + R_HEADS - 1) // R_HEADS
    PARTS: tl.constexpr = (G + HEADS - 1) // HEADS
    ROLES: tl.constexpr = Q_PARTS + R_PARTS + 2 * PARTS
    part, start = tl.program_id(0) % ROLES, tl.program_id(0) // ROLES * TOKENS
    b = tl.program_id(1).to(tl.int64)
    if DEPENDENT:  # the next kernel may start, and wait here as this one does for the kernel in front of it
        tl.extra.cuda.gdc_launch_dependents()
        if WHOLE:  # a short call is short of nothing but time: until then its parameters and states come nearer
            if part >= 2 * PARTS + R_PARTS:
                _nearer(q_scale_ptr, part - 2 * PARTS - R_PARTS, Q_HEADS * d, H * d)
            elif part >= 2 * PARTS:
                _nearer(r_scale_ptr, part - 2 * PARTS, R_HEADS * R, H * R)
            else:
                head = part % PARTS
                if part < PARTS:
                    for j in tl.static_range(K):
                        _nearer(k_tap_ptr + j * tap_j, head, HEADS * d, G * d)
                else:  # taps may be of two dtypes
                    for j in tl.static_range(K):
                        _nearer(v_tap_ptr + j * tap_j, head, HEADS * d, G * d)
                for n in tl.static_range(N):
                    row_ptr = state_ptr + b * state_b + n * state_n + part // PARTS * (G * d)
                    _nearer(row_ptr, head, HEADS * d, G * d)
        tl.extra.cuda.gdc_wait()
    slot0 = 0
    if LENGTHS:
        slot0 = tl.load(length_ptr + b)
    positions = position_ptr
    if position_ptr is not None:
        positions += b * position_b
    if part >= 2 * PARTS + R_PARTS:
        _clipped(
            q_ptr + b * q_b, q_scale_ptr, positions, q_out_ptr + b * T * (H * d),
            part - 2 * PARTS - R_PARTS, start, T, slot0, q_t, qk_threshold, per_floor, alpha,
            H, d, TOKENS, Q_HEADS, WIDTH, LOG,
        )  # fmt: skip
    elif part >= 2 * PARTS:
        _clipped(
            r_ptr + b * r_b, r_scale_ptr, positions, r_out_ptr + b * T * (H * R),
            part - 2 * PARTS, start, T, slot0, r_t, r_threshold, per_floor, alpha,
            H, R, TOKENS, R_HEADS, R_WIDTH, LOG,
        )  # fmt: skip
    else:
        rejected = 0
        if REJECTED:
            rejected = tl.load(rejected_ptr + b).to(tl.int32)
        key_base, value_base = key_ptr, value_ptr
        if PAGE == 0:
            key_base, value_base = key_ptr + b * key_b, value_ptr + b * value_b
        if part < PARTS:
            _convolved(
                k_ptr + b * k_b, k_tap_ptr, k_dynamic_ptr + b * k_dynamic_b, state_ptr + b * state_b,
                document_ptr + b * document_b, key_base, table_ptr + b * table_b, part, start, T, slot0, rejected,
                k_t, tap_j, k_dynamic_t, state_n, key_b, key_g, key_s, conv_scale, qk_threshold,
                G, d, K, N, TOKENS, HEADS, WIDTH, False, DYNAMIC, PACKED, DOCUMENTS, WHOLE, PAGE,
            )  # fmt: skip
        else:
            _convolved(
                v_ptr + b * v_b, v_tap_ptr, v_dynamic_ptr + b * v_dynamic_b, state_ptr + b * state_b + G * d,
                document_ptr + b * document_b, value_base, table_ptr + b * table_b, part - PARTS, start, T, slot0,
                rejected, v_t, tap_j, v_dynamic_t, state_n, value_b, value_g, value_s, conv_scale, eps,
                G, d, K, N, TOKENS, HEADS, WIDTH, True, DYNAMIC, PACKED, DOCUMENTS, WHOLE, PAGE,
            )  # fmt: skip


def choose_tile(T: int, H: int, G: int) -> Tile:
    """Up to 16 tokens are one run, cut small. Long calls have larger programs: too many would start too slowly."""
    if T <= SHORT:
        return Tile(T, 1, 8 if T == 1 else 2, 16, warps=1)
    heads, q_heads, r_heads = (min(most, next_power_of_2(n)) for most, n in ((4, G), (8, H), (64, H)))
    return Tile(4, heads, q_heads, r_heads, warps=2)


def prepare_qkv(
    q: Float[Tensor, "B T Hd"],
    r: Float[Tensor, "B T HR"],
    k: Float[Tensor, "B T Gd"],
    v: Float[Tensor, "B T Gd"],
    q_scale: Float[Tensor, "H d"],
    r_scale: Float[Tensor, "H R"],
    k_taps: Tensor,
    v_taps: Tensor,
    qk_threshold: float,
    r_threshold: float,
    eps: float,
    keys: Float[Tensor, "P G S d"],
    values: Float[Tensor, "P G S d"],
    lengths: Int[Tensor, " B"] | None = None,
    table: Int[Tensor, "B pages"] | None = None,
    state: Float[Tensor, "B N C"] | None = None,
    rejected: Int[Tensor, " B"] | None = None,
    positions: Int[Tensor, "b T"] | None = None,
    log_scaling: tuple[float, float] | None = None,
    k_dynamic: Float[Tensor, "B T G K"] | None = None,
    v_dynamic: Float[Tensor, "B T G K"] | None = None,
    document_position: Int[Tensor, "b T"] | None = None,
) -> tuple[Float[Tensor, "B T H d"], Float[Tensor, "B T H R"]]:
    """Twin of `fused.prepare_qkv`; float32 inside, one rounding.

    That lengths leave room for T tokens, and that the table names pages that there are, is not checked: it would wait
    for the device. Where they do not, the kernel writes over what stands behind the cache.

    Raises:
        InputError: see `expect`; for more tokens than slots; for caches whose channels are not adjacent; for a state
            see `short_conv.check_state`: a call of more than 16 tokens takes up to 5 taps.
    """
    B, T = axes("prepare_qkv", "q", q, 3, batch=1)[:2]
    (H, d), R = axes("prepare_qkv", "q_scale", q_scale, 2), axes("prepare_qkv", "r_scale", r_scale, 2)[1]
    P, G, S = axes("prepare_qkv", "keys", keys, 4, batch=1 if table is None else 0)[:3]
    dynamic = k_dynamic is not None
    if dynamic != (v_dynamic is not None):
        raise InputError("triton prepare_qkv: dynamic taps of keys or of values alone, expected both or none")
    K = axes("prepare_qkv", "k_taps", k_taps, 2)[0] if dynamic else axes("prepare_qkv", "k_taps", k_taps, 3)[2]
    rows, taps, of_token = (B, T, G * d), (K, G * d) if dynamic else (G * d, 1, K), (B, T, G, K)
    slots = (P if table is not None else B, G, S, d)
    pages = 1 if table is None else axes("prepare_qkv", "table", table, 2, batch=1)[1]
    expect(
        "prepare_qkv", FLOATS, q=(q, (B, T, H * d)), r=(r, (B, T, H * R)), k=(k, rows), v=(v, rows),
        q_scale=(q_scale, (H, d)), r_scale=(r_scale, (H, R)), k_taps=(k_taps, taps), v_taps=(v_taps, taps),
        keys=(keys, slots), values=(values, slots), k_dynamic=(k_dynamic, of_token), v_dynamic=(v_dynamic, of_token),
    )  # fmt: skip
    shared = positions is not None and len(positions) == 1
    expect(
        "prepare_qkv", INTEGERS, lengths=(lengths, (B,)), table=(table, (B, pages)),
        positions=(positions, (1 if shared else B, T)),
    )  # fmt: skip
    if pages * S < T:
        raise InputError(f"triton prepare_qkv: {T} tokens, expected at most {pages * S}, the slots of a row")
    document_position = documents_of("prepare_qkv", document_position, B, T)
    q, r, k, v, table, positions = (
        u if u is None or u.stride(-1) == 1 else u.contiguous() for u in (q, r, k, v, table, positions)
    )
    q_scale, r_scale = q_scale.contiguous(), r_scale.contiguous()
    lengths, rejected = (None if u is None else u.contiguous() for u in (lengths, rejected))
    for name, cache in (("keys", keys), ("values", values)):
        if cache.stride(3) != 1:
            raise InputError(f"triton prepare_qkv: {name} of channels {cache.stride(3)} apart, expected adjacent ones")
    tile = choose_tile(T, H, G)
    N = 0 if state is None else state.shape[1]
    if dynamic:
        k_taps, v_taps = k_taps.contiguous(), v_taps.contiguous()
        k_dynamic, v_dynamic = (u if u.stride()[2:] == (K, 1) else u.contiguous() for u in (k_dynamic, v_dynamic))
    else:
        k_taps, v_taps = (prepared(w, token_major) for w in (k_taps, v_taps))
        k_dynamic = v_dynamic = q  # not read
    if state is not None:
        check_state("prepare_qkv", state, rejected, (B, T, 2 * G * d), K, tile.tokens)
    width, r_width = next_power_of_2(d), next_power_of_2(R)
    q_out = torch.empty(B, T, H, d, dtype=q.dtype, device=q.device)
    r_out = torch.empty(B, T, H, R, dtype=r.dtype, device=r.device)
    pdl = dependent(q.device)
    floor, alpha = log_scaling or (1.0, 0.0)
    page = 0 if table is None else keys.shape[2]
    parts = cdiv(H, tile.q_heads) + cdiv(H, tile.r_heads) + 2 * cdiv(G, tile.heads)
    _prepare[(parts * cdiv(T, tile.tokens), B)](
        q, r, k, v, q_scale, r_scale, k_taps, v_taps, k_dynamic, v_dynamic,
        keys, values, lengths, table if page else q, state if N else q, rejected,
        positions if log_scaling else None, document_position if document_position is not None else q,
        q_out, r_out, T,
        *q.stride()[:2], *r.stride()[:2], *k.stride()[:2], *v.stride()[:2], G * d,
        *(k_dynamic.stride()[:2] + v_dynamic.stride()[:2] if dynamic else (0, 0, 0, 0)),
        *keys.stride()[:3], *values.stride()[:3], table.stride(0) if page else 0,
        *(state.stride()[:2] if N else (0, 0)),
        0 if not log_scaling or positions is None or shared else positions.stride(0),
        0 if document_position is None else document_position.stride(0),
        qk_threshold, r_threshold, eps, 1 / floor, alpha / LOG2E, 1 / math.sqrt(2 * K + 1 if dynamic else K + 1),
        H=H, G=G, d=d, R=R, K=K, N=N, TOKENS=tile.tokens, HEADS=tile.heads, Q_HEADS=tile.q_heads,
        R_HEADS=tile.r_heads, WIDTH=width, R_WIDTH=r_width, LOG=log_scaling is not None, DYNAMIC=dynamic,
        PACKED=dynamic and packed(k_dynamic) and packed(v_dynamic), DOCUMENTS=document_position is not None,
        WHOLE=tile.tokens == T, LENGTHS=lengths is not None, REJECTED=rejected is not None, PAGE=page,
        DEPENDENT=pdl, num_warps=tile.warps, launch_pdl=pdl,
    )  # fmt: skip
    return q_out, r_out
