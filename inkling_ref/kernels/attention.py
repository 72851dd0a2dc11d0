r"""Attention with relative bias, sink and gate: few rows go to `decode`, more to the kernel below.

A program owns a tile of query rows of one key/value head and walks a range of its keys once, with the running softmax
of FlashAttention, in base 2. A row is a (query, head) pair: row i is query i // Q and head i % Q of the Q = H / G heads
that share the key/value head, so that a key is read once for all of them.

**Relative bias as a matrix product.** With the profiles stored transposed, P^T [X, R], key n at distance o + t - n
needs for *all* queries t of a tile (the first one in slot o) the consecutive numbers from (o - n) R on:

$$ b_{t,n} = \sum_c r_t[c] \, P^T[o + t - n, c] = \sum_j \hat r_t[j] \; \mathrm{flat}(P^T)[(o - n) R + j], \quad
   \hat r_t[t R + c] = r_t[c], \;\; \text{else} \; 0 $$

so the bias of a tile is one more product, of depth (queries a tile) R, whose right operand is read in whole lines;
no [T, H, X] bias exists anywhere. Keys at distances of X and more skip it: they have a loop of their own.

**Sink and gate are an epilogue.** The sink has no value, it only takes mass away: with the logarithm L of the summed
exponentials of all keys,

$$ y = \mathrm{softmax}(s) V \cdot \sigma(L - z) \cdot \sigma(\mathrm{gate}) $$
"""

import math
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from . import FLOATS, INTEGERS, adjacent, cdiv, expect, next_power_of_2, prefill, prepared
from .approximate import TO_BASE2
from .decode import LOWEST, attend_split, check_operands, fits, transposed


class Tile(NamedTuple):
    """How one call is cut: rows a tile, keys a step, and what the compiler is told."""

    rows: int = 64
    keys: int = 32
    stages: int = 3
    near_stages: int = 2  # of the loop over keys with a bias, whose step reads P^T as well
    warps: int = 4


@triton.jit(do_not_specialize=["offset", "first", "T", "S"])
@no_type_check
def _attend(
    q_ptr, k_ptr, v_ptr, r_ptr, flat_ptr, sink_ptr, gate_ptr, document_ptr, out_ptr,
    offset_ptr, first_ptr, offset, first, T, S, scale,
    q_b, q_t, q_h, k_b, k_g, k_s, v_b, v_g, v_s, r_b, r_t, r_h, z_b, z_t, gate_b, gate_t,
    G: tl.constexpr, Q: tl.constexpr, d: tl.constexpr, R: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    MORE: tl.constexpr, EVEN: tl.constexpr, DOCUMENTS: tl.constexpr, STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr,
):  # fmt: skip
    # The last queries of a full layer see most keys: they start first.
    start_t = (tl.num_programs(0) - 1 - tl.program_id(0)) * QUERIES
    b, g = tl.program_id(1) // G, tl.program_id(1) % G
    if not EVEN:
        offset, first = tl.load(offset_ptr + b), tl.load(first_ptr + b)
    o = offset + start_t  # slot of the tile's first query

    # Range of keys of the tile. Keys below `near` have no bias for any of the queries.
    stop = tl.minimum(tl.minimum(o + QUERIES, offset + T), S)
    low = first
    if W > 0:
        low = tl.maximum(low, o - W + 1)
    low = tl.minimum(tl.maximum(low, 0), stop)
    near = low  # packed documents, and windows wider than X: the loop with all masks takes every key
    if (W <= X) and (not DOCUMENTS):
        near = tl.minimum(tl.maximum(o - X + 1, low), stop)
    # Whole steps only: what is left over goes through the masks of the second loop.
    middle = low + (near - low) // KEYS * KEYS

    rows = tl.arange(0, ROWS)
    t, head = rows // Q, g * Q + rows % Q
    real = (t < QUERIES) & (start_t + t < T)
    token = (start_t + t).to(tl.int64)
    channels, keys = tl.arange(0, WIDTH), tl.arange(0, KEYS)
    inside = channels < d
    q_rows = q_ptr + b.to(tl.int64) * q_b + token * q_t + head * q_h
    q = tl.load(q_rows[:, None] + channels[None, :], mask=real[:, None] & inside[None, :], other=0.0)
    k_base = k_ptr + b.to(tl.int64) * k_b + g.to(tl.int64) * k_g
    v_base = v_ptr + b.to(tl.int64) * v_b + g.to(tl.int64) * v_g

    # Relative states, block-diagonal: columns t R .. t R + R - 1 of row (t, head).
    r_rows = r_ptr + b.to(tl.int64) * r_b + token * r_t + head * r_h
    j = tl.arange(0, DEPTH)
    mine = real[:, None] & (j[None, :] // R == t[:, None])
    r = tl.load(r_rows[:, None] + j[None, :] % R, mask=mine, other=0.0)
    if MORE > 0:
        j2 = DEPTH + tl.arange(0, MORE)
        mine = real[:, None] & (j2[None, :] // R == t[:, None])
        r2 = tl.load(r_rows[:, None] + j2[None, :] % R, mask=mine, other=0.0)

    top = tl.full([ROWS], LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    to_base2 = scale * TO_BASE2

    for n0 in tl.range(low, middle, KEYS, num_stages=STAGES):
        n = n0 + keys
        k_ptrs = k_base + n[:, None].to(tl.int64) * k_s + channels[None, :]
        v_ptrs = v_base + n[:, None].to(tl.int64) * v_s + channels[None, :]
        if d == WIDTH:
            k, v = tl.load(k_ptrs), tl.load(v_ptrs)
        else:
            k, v = tl.load(k_ptrs, mask=inside[None, :], other=0.0), tl.load(v_ptrs, mask=inside[None, :], other=0.0)
        s = tl.dot(q, tl.trans(k), input_precision="ieee") * to_base2
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    slot = o + t
    if DOCUMENTS:
        mine_doc = tl.load(document_ptr + b.to(tl.int64) * T + token, mask=real, other=-1)
    for n0 in tl.range(middle, stop, KEYS, num_stages=NEAR_STAGES):
        n = n0 + keys
        live = n < stop
        both = live[:, None] & inside[None, :]
        k = tl.load(k_base + n[:, None].to(tl.int64) * k_s + channels[None, :], mask=both, other=0.0)
        # Distances of column j's query: the index stays within P^T exactly where a bias exists.
        index = (o - n[:, None]) * R + j[None, :]
        has = (o - n[:, None] + j[None, :] // R >= 0) & (o - n[:, None] + j[None, :] // R < X)
        profile = tl.load(flat_ptr + index, mask=has, other=0.0)
        bias = tl.dot(r, tl.trans(profile), input_precision="ieee")
        if MORE > 0:
            index = (o - n[:, None]) * R + j2[None, :]
            has = (o - n[:, None] + j2[None, :] // R >= 0) & (o - n[:, None] + j2[None, :] // R < X)
            profile = tl.load(flat_ptr + index, mask=has, other=0.0)
            bias = tl.dot(r2, tl.trans(profile), bias, input_precision="ieee")
        # Into the same accumulator: two would not fit the registers beside `acc`.
        s = tl.dot(q, tl.trans(k), bias * (1 / scale), input_precision="ieee") * to_base2
        sees = live[None, :] & (n[None, :] <= slot[:, None])
        if W > 0:
            sees = sees & (slot[:, None] - n[None, :] < W)
        if DOCUMENTS:
            key_doc = tl.load(document_ptr + b.to(tl.int64) * T + n, mask=live, other=-2)
            sees = sees & (key_doc[None, :] == mine_doc[:, None])
        s = tl.where(sees, s, float("-inf"))
        new_top = tl.maximum(top, tl.max(s, 1))
        p = tl.exp2(s - new_top[:, None])
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(p, 1)
        v = tl.load(v_base + n[:, None].to(tl.int64) * v_s + channels[None, :], mask=both, other=0.0)
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None], input_precision="ieee")
        top = new_top

    some = total > 0  # a row that saw no key has the sum 0 and a weight of nothing
    acc = acc / tl.where(some, total, 1.0)[:, None]
    log = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), LOWEST)
    row_index = (b * T + token) * (G * Q) + head  # of [B, T, H]
    store = real[:, None] & inside[None, :]
    z = tl.load(sink_ptr + b.to(tl.int64) * z_b + token * z_t + head, mask=real, other=0.0).to(tl.float32)
    gate_rows = gate_ptr + b.to(tl.int64) * gate_b + token * gate_t + head * d
    gate = tl.load(gate_rows[:, None] + channels[None, :], mask=store, other=0.0).to(tl.float32)
    y = acc * tl.sigmoid(log / TO_BASE2 - z)[:, None] * tl.sigmoid(gate)
    tl.store(out_ptr + row_index[:, None] * d + channels[None, :], y.to(out_ptr.dtype.element_ty), mask=store)


def attend(
    q: Float[Tensor, "B T H d"],
    k: Float[Tensor, "B G S d"],
    v: Float[Tensor, "B G S d"],
    r: Float[Tensor, "B T H R"],
    profiles: Float[Tensor, "R X"],
    sink: Float[Tensor, "B T H"],
    gate: Float[Tensor, "B T H*d"],
    offsets: list[int],
    window: int | None = None,
    first_keys: list[int] | None = None,
    document_ids: Int[Tensor, "b T"] | None = None,
) -> Float[Tensor, "B T H*d"]:
    """Twin of `attention.attend`. Scores, bias, softmax and both epilogues stay in float32; p rounds to the dtype of v.

    Few query rows go to `decode` (`fits`), many on a Hopper GPU to `prefill` (`suits`), others to this module's kernel.

    Raises:
        InputError: see `decode.check_operands`; for another number of offsets or first keys than rows.
    """
    check_operands("attend", q, {"k": k, "v": v}, r, profiles, sink, gate, window)
    B, T = q.shape[:2]
    for name, slots in (("offsets", offsets), ("first_keys", first_keys)):
        if slots is not None and len(slots) != B:
            raise InputError(f"triton attend: {len(slots)} {name}, expected {B}, one a row")
    if document_ids is not None:
        expect("attend", INTEGERS, document_ids=(document_ids, (1 if len(document_ids) == 1 else B, T)))
        expect("attend", FLOATS, k=(k, (*k.shape[:2], T, k.shape[3])))
        document_ids = document_ids.expand(B, T)
    if document_ids is None and fits(q, k):
        starts = []
        for first in (offsets, first_keys or [0] * len(offsets)):
            even = len(set(first)) == 1
            starts.append(first[0] if even else torch.tensor(first, dtype=torch.int32).to(q.device))
        return attend_split(q, k, v, r, profiles, sink, gate, *starts, window)
    if document_ids is None and prefill.suits(q, k, v, r, gate, profiles, window):
        return prefill.attend(q, k, v, r, profiles, sink, gate, offsets, window, first_keys)
    tile = Tile()
    if q.element_size() == 4:  # no matrix unit multiplies float32 exactly: the products unroll, and must be small
        tile = Tile(rows=16, stages=2)
    return attend_tiled(tile, q, k, v, r, profiles, sink, gate, offsets, window, first_keys, document_ids)


def attend_tiled(
    tile: Tile,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    r: Tensor,
    profiles: Tensor,
    sink: Tensor,
    gate: Tensor,
    offsets: list[int],
    window: int | None = None,
    first_keys: list[int] | None = None,
    document_ids: Tensor | None = None,
) -> Float[Tensor, "B T width"]:
    """`attend` with a given tile, what a measurement varies, once it has checked its arguments."""
    q, k, v, r, sink, gate = adjacent(q, k, v, r, sink, gate)
    (B, T, H, d), (G, S), (R, X) = q.shape, k.shape[1:3], profiles.shape
    Q = H // G
    first_keys = first_keys or [0] * B
    even = len(set(offsets)) == 1 and len(set(first_keys)) == 1
    starts = None if even else torch.tensor([offsets, first_keys], dtype=torch.int32).to(q.device)
    rows = max(tile.rows, next_power_of_2(Q))
    queries = min(rows // Q, T)
    depth = max(16, next_power_of_2(queries * R))
    more = 0
    if depth > max(16, queries * R):  # two products of 2^n columns have less padding than one of 2^(n+1)
        more = max(16, next_power_of_2(queries * R - depth // 2))
        depth, more = (depth // 2, more) if more < depth // 2 else (depth, 0)
    out = torch.empty(B, T, H * d, dtype=q.dtype, device=q.device)
    documents = None if document_ids is None else document_ids.to(torch.int32).contiguous()
    _attend[(cdiv(T, queries), B * G)](
        q, k, v, r, prepared(profiles, transposed), sink, gate, documents, out,
        None if even else starts[0], None if even else starts[1], offsets[0], first_keys[0], T, S, 1 / math.sqrt(d),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *r.stride()[:3], *sink.stride()[:2], *gate.stride()[:2],
        G=G, Q=Q, d=d, R=R, X=X, W=window or 0, QUERIES=queries, ROWS=rows, KEYS=tile.keys,
        WIDTH=max(16, next_power_of_2(d)), DEPTH=depth, MORE=more,
        EVEN=even, DOCUMENTS=documents is not None, STAGES=tile.stages, NEAR_STAGES=tile.near_stages,
        num_warps=tile.warps,
    )  # fmt: skip
    return out
