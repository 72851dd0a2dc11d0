r"""Attention with relative bias, sink and gate: one kernel for prefill and for split-KV decoding.

A program owns a tile of query rows of one key/value head and walks a range of its keys once, with the running softmax
of FlashAttention, in base 2. A row is a (query, head) pair: row r is query r // Q and head r % Q of the Q = H / G heads
that share the key/value head, so that a key is read once for all of them. Three ideas carry the rest.

**Relative bias as a matrix product.** With the profiles stored transposed, P^T [X, R], key n at distance o + t - n
needs for *all* queries t of a tile (the first one in slot o) the consecutive numbers from (o - n) R on:

$$ b_{t,n} = \sum_c r_t[c] \, P^T[o + t - n, c] = \sum_j \hat r_t[j] \; \mathrm{flat}(P^T)[(o - n) R + j], \quad
   \hat r_t[t R + c] = r_t[c], \;\; \text{else} \; 0 $$

so the bias of a tile is one more product, of depth (queries a tile) R, whose right operand is read in whole lines;
no [T, H, X] bias exists anywhere. Keys at distances of X and more skip it: they have a loop of their own.

**Splits.** Few rows and many keys (decoding) leave processors idle, so the keys of a row tile are cut into splits, a
program each. A split writes its normalised sum and the logarithm of its weight; `_combine` adds them up. Keys with a
bias cost more than others: splits are equal in a length in which each of them counts `near_weight` times.

**Sink and gate are an epilogue.** The sink has no value, it only takes mass away: with the logarithm L of the summed
exponentials of all keys,

$$ y = \mathrm{softmax}(s) V \cdot \sigma(L - z) \cdot \sigma(\mathrm{gate}) $$

Source of the shape of the decoding kernel (tiles, splits, transposed profiles): shared measurements of a prototype.
"""

import math
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from . import INTERPRETED, LOG2E, prepared, processors, require

_LOWEST: tl.constexpr = tl.constexpr(-1e30)  # stands for -inf where a difference of two must not be NaN
_LOG2E: tl.constexpr = tl.constexpr(LOG2E)


class Tile(NamedTuple):
    """How one call is cut: rows a tile, keys a step, splits of the keys, and what the compiler is told."""

    rows: int
    keys: int
    splits: int
    stages: int
    near_stages: int  # of the loop over keys with a bias, whose step reads P^T as well
    warps: int
    near_weight: int  # what a key with a bias costs, in keys without


@triton.jit
@no_type_check
def _key(x, far, first_far, first_near, near_weight: tl.constexpr):
    """The key at place x of the length in which each near key counts `near_weight` times."""
    return tl.where(x <= far, first_far + x, first_near + (x - far) // near_weight)


@triton.jit(do_not_specialize=["offset", "first", "T", "S"])
@no_type_check
def _attend(
    q_ptr, k_ptr, v_ptr, r_ptr, flat_ptr, sink_ptr, gate_ptr, document_ptr, out_ptr, part_ptr, log_ptr,
    offset_ptr, first_ptr, offset, first, T, S, scale,
    q_b, q_t, q_h, k_b, k_g, k_s, v_b, v_g, v_s, r_b, r_t, r_h, z_b, z_t, gate_b, gate_t,
    G: tl.constexpr, Q: tl.constexpr, d: tl.constexpr, R: tl.constexpr, X: tl.constexpr, W: tl.constexpr,
    QUERIES: tl.constexpr, ROWS: tl.constexpr, KEYS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    MORE: tl.constexpr, SPLITS: tl.constexpr, NEAR: tl.constexpr, EVEN: tl.constexpr, DOCUMENTS: tl.constexpr,
    STAGES: tl.constexpr, NEAR_STAGES: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:  # launched before the kernel in front of it has ended
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    split = tl.program_id(0)
    # The last queries of a full layer see most keys: they start first.
    start_t = (tl.num_programs(1) - 1 - tl.program_id(1)) * QUERIES
    b, g = tl.program_id(2) // G, tl.program_id(2) % G
    if not EVEN:
        offset, first = tl.load(offset_ptr + b), tl.load(first_ptr + b)
    o = offset + start_t  # slot of the tile's first query

    # Range of keys of the tile, and of this split of it. Keys below `near` have no bias for any of the queries.
    stop = tl.minimum(tl.minimum(o + QUERIES, offset + T), S)
    low = first
    if W > 0:
        low = tl.maximum(low, o - W + 1)
    low = tl.minimum(tl.maximum(low, 0), stop)
    near = low  # packed documents, and windows wider than X: the loop with all masks takes every key
    if (W <= X) and (not DOCUMENTS):
        near = tl.minimum(tl.maximum(o - X + 1, low), stop)
    if SPLITS > 1:
        far = near - low
        chunk = tl.cdiv(tl.cdiv(far + (stop - near) * NEAR, SPLITS), KEYS) * KEYS
        begin = tl.minimum(_key(split * chunk, far, low, near, NEAR), stop)
        end = tl.minimum(_key((split + 1) * chunk, far, low, near, NEAR), stop)
    else:
        begin, end = low, stop
    # Whole steps only: what is left over goes through the masks of the second loop.
    middle = begin + tl.maximum(tl.minimum(near, end) - begin, 0) // KEYS * KEYS

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

    top = tl.full([ROWS], _LOWEST, tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    acc = tl.zeros([ROWS, WIDTH], tl.float32)
    to_base2 = scale * _LOG2E

    for n0 in tl.range(begin, middle, KEYS, num_stages=STAGES):
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
    for n0 in tl.range(middle, end, KEYS, num_stages=NEAR_STAGES):
        n = n0 + keys
        live = n < end
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
    log = tl.where(some, top + tl.log2(tl.where(some, total, 1.0)), _LOWEST)
    row_index = (b * T + token) * (G * Q) + head  # of [B, T, H]
    store = real[:, None] & inside[None, :]
    if SPLITS > 1:
        row_index = row_index * SPLITS + split
        tl.store(part_ptr + row_index[:, None] * d + channels[None, :], acc, mask=store)
        tl.store(log_ptr + row_index, log, mask=real)
    else:
        z = tl.load(sink_ptr + b.to(tl.int64) * z_b + token * z_t + head, mask=real, other=0.0).to(tl.float32)
        gate_rows = gate_ptr + b.to(tl.int64) * gate_b + token * gate_t + head * d
        gate = tl.load(gate_rows[:, None] + channels[None, :], mask=store, other=0.0).to(tl.float32)
        y = acc * tl.sigmoid(log / _LOG2E - z)[:, None] * tl.sigmoid(gate)
        tl.store(out_ptr + row_index[:, None] * d + channels[None, :], y.to(out_ptr.dtype.element_ty), mask=store)


@triton.jit(do_not_specialize=["T"])
@no_type_check
def _combine(
    part_ptr, log_ptr, sink_ptr, gate_ptr, out_ptr, T, z_b, z_t, gate_b, gate_t,
    H: tl.constexpr, d: tl.constexpr, SPLITS: tl.constexpr, PADDED: tl.constexpr, BLOCK: tl.constexpr,
    DEPENDENT: tl.constexpr,
):  # fmt: skip
    if DEPENDENT:
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)  # of [B, T, H]
    h, t, b = row % H, row // H % T, row // H // T
    splits, channels = tl.arange(0, PADDED), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    log = tl.load(log_ptr + row * SPLITS + splits, mask=splits < SPLITS, other=_LOWEST)
    inside = channels < d
    both = (splits < SPLITS)[:, None] & inside[None, :]
    part = tl.load(part_ptr + (row * SPLITS + splits[:, None]) * d + channels[None, :], mask=both, other=0.0)
    top = tl.max(log, 0)
    weight = tl.where(splits < SPLITS, tl.exp2(log - top), 0.0)
    total = tl.sum(weight, 0)
    out = tl.sum(part * weight[:, None], 0) / total
    z = tl.load(sink_ptr + b * z_b + t * z_t + h).to(tl.float32)
    gate = tl.load(gate_ptr + b * gate_b + t * gate_t + h * d + channels, mask=inside, other=0.0).to(tl.float32)
    y = out * tl.sigmoid((top + tl.log2(total)) / _LOG2E - z) * tl.sigmoid(gate)
    tl.store(out_ptr + row * d + channels, y.to(out_ptr.dtype.element_ty), mask=inside)


def _transposed(profiles: Float[Tensor, "R X"]) -> Float[Tensor, "X R"]:
    return profiles.t().contiguous()


def choose_tile(rows: int, keys: int, programs_per_tile: int, processors: int) -> Tile:
    """The tile for `rows` = T H / G query rows that see `keys` keys each, with B G programs for every row tile.

    Decoding (up to 64 rows) gets as many splits as there are processors to fill, at least 64 keys each: one large
    program a processor is faster than several small ones. Prefill has enough row tiles.
    """
    if rows <= 16:
        shape = Tile(16, 128, 1, 3, 3, 4, 2)
    elif rows <= 64:
        shape = Tile(64, 64, 1, 5, 3, 4, 3)
    else:
        shape = Tile(64, 32, 1, 3, 2, 4, 3)
    programs = programs_per_tile * triton.cdiv(rows, shape.rows)
    splits = max(1, min(processors // programs, triton.cdiv(keys, 64)))
    return shape._replace(splits=splits)


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
    document_ids: Int[Tensor, "B T"] | None = None,
) -> Float[Tensor, "B T H*d"]:
    """Twin of `attention.attend`. Scores, bias, softmax and both epilogues stay in float32; p rounds to the dtype of v.

    Raises:
        InputError: see `require`.
    """
    first_keys = first_keys or [0] * len(offsets)
    T, H, G = q.shape[1], q.shape[2], k.shape[1]
    longest = max(o + T - f for o, f in zip(offsets, first_keys, strict=True))
    longest = longest if window is None else min(longest, window + T)
    tile = choose_tile(T * (H // G), longest, len(offsets) * G, processors(q.device))
    if q.element_size() == 4:  # no matrix unit multiplies float32 exactly: the products unroll, and must be small
        tile = tile._replace(rows=16, keys=32, stages=2, near_stages=2)
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
    """`attend` with a given tile: what a measurement varies."""
    require("attend", q, k, v, r, profiles, sink, gate)
    q, k, v, r, sink, gate = (u if u.stride(-1) == 1 else u.contiguous() for u in (q, k, v, r, sink, gate))
    (B, T, H, d), (G, S), (R, X) = q.shape, k.shape[1:3], profiles.shape
    Q = H // G
    first_keys = first_keys or [0] * B
    even = len(set(offsets)) == 1 and len(set(first_keys)) == 1
    starts = None if even else torch.tensor([offsets, first_keys], dtype=torch.int32).to(q.device)
    rows = max(tile.rows, triton.next_power_of_2(Q))
    queries = min(rows // Q, T)
    depth = max(16, triton.next_power_of_2(queries * R))
    more = 0
    if depth > max(16, queries * R):  # two products of 2^n columns have less padding than one of 2^(n+1)
        more = max(16, triton.next_power_of_2(queries * R - depth // 2))
        depth, more = (depth // 2, more) if more < depth // 2 else (depth, 0)
    out = torch.empty(B, T, H * d, dtype=q.dtype, device=q.device)
    part = log = out
    if tile.splits > 1:
        part = torch.empty(B, T, H, tile.splits, d, dtype=torch.float32, device=q.device)
        log = torch.empty(B, T, H, tile.splits, dtype=torch.float32, device=q.device)
    dependent = not INTERPRETED and tile.splits > 1
    early = {"launch_pdl": True} if dependent else {}
    documents = None if document_ids is None else document_ids.to(torch.int32).contiguous()
    _attend[(tile.splits, triton.cdiv(T, queries), B * G)](
        q, k, v, r, prepared(profiles, _transposed), sink, gate, documents, out, part, log,
        None if even else starts[0], None if even else starts[1], offsets[0], first_keys[0], T, S, 1 / math.sqrt(d),
        *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *r.stride()[:3], *sink.stride()[:2], *gate.stride()[:2],
        G=G, Q=Q, d=d, R=R, X=X, W=window or 0, QUERIES=queries, ROWS=rows, KEYS=tile.keys,
        WIDTH=max(16, triton.next_power_of_2(d)), DEPTH=depth, MORE=more, SPLITS=tile.splits, NEAR=tile.near_weight,
        EVEN=even, DOCUMENTS=documents is not None, STAGES=tile.stages, NEAR_STAGES=tile.near_stages,
        DEPENDENT=dependent, num_warps=tile.warps, **early,
    )  # fmt: skip
    if tile.splits > 1:
        block = min(32, triton.next_power_of_2(d))
        _combine[(B * T * H, triton.cdiv(d, block))](
            part, log, sink, gate, out, T, *sink.stride()[:2], *gate.stride()[:2],
            H=H, d=d, SPLITS=tile.splits, PADDED=triton.next_power_of_2(tile.splits), BLOCK=block,
            DEPENDENT=dependent, num_warps=4, **early,
        )  # fmt: skip
    return out
