r"""Decoding attention: up to eight queries over a long cache, cut into splits of the keys.

A row of the product is a (query, head) pair: row i is query i // Q and head i % Q of the Q = H / G heads that share a
key/value head, so that a key is read once for all of them. The relative bias is a product too (`attention`).

**Splits.** Few rows leave processors idle, so the keys of every (batch row, key/value head) are cut into splits, and
each program takes one. Which one follows from the lengths, and every program works it out for itself (`_share`): the
steps of all rows, in which a step with a bias counts `near_weight` times, are dealt out in equal chunks, nearly the
smallest for which the programs suffice. The launch depends on the batch only, so a CUDA graph can replay it while rows
grow; a long row gets more splits than a short one; a program without a share leaves. A split writes its normalised sum
and the logarithm of its weight, and the splits of a row are added up:

$$ o = \sum_i 2^{L_i - L} o_i, \qquad L = \log_2 \sum_i 2^{L_i} $$

**Who adds them up.** The program of a head that is done last, by a counter (`arrivals`): it reads the splits of all in
their order, whichever came last, so that the same call gives the same bits. Hundreds of rows of splits (one long row,
or drafts) would take one processor longer than a launch takes: they have a kernel of their own, `_combine`.

**Sink and gate are an epilogue.** The sink has no value, it only takes mass away: with L of all keys, now natural,

$$ y = o \cdot \sigma(L - z) \cdot \sigma(\mathrm{gate}) $$

**The wait for the kernel in front.** A kernel starts before its predecessor has ended (programmatic dependent launch).
Keys that this call did not write need no waiting: in `attend_cache` their first steps are under way when the program
waits for its queries, which it does within the loop, after the pipeline's first loads. This call's own keys are a step
of their own behind that wait, in a head's last split.

**Warps own keys.** With up to 16 rows a step's keys are dealt to the warps, each with its own running softmax, as a
product in three dimensions [warps, rows, keys]: no exchange between warps until the end. More rows fill the wide
matrix unit, whose warps own rows.

One token that sees a window is for `decode_hopper` where it runs: a cluster of processors for each head, in one launch.
"""

import math
from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from . import (
    FLOATS,
    adjacent,
    arrivals,
    axes,
    capability_major,
    cdiv,
    dependent,
    expect,
    next_power_of_2,
    prepared,
    processors,
)
from .approximate import TO_BASE2
from .decode_hopper import decode_cluster, layouts

LOWEST: tl.constexpr = tl.constexpr(-1e30)  # stands for -inf where a difference of two must not be NaN
WITHIN = 256  # rows of one head's splits up to which its last program adds them up; of more, one would take too long
AT_ONCE = 2**14  # numbers of the splits that it reads at one time
CLUSTERS = 64  # heads up to which a window is read by a cluster each


class Tile(NamedTuple):
    """How one call is cut, and what the compiler is told."""

    keys: int  # a step
    programs: int  # of all rows and heads together
    ways: int  # warps that own keys; 1: warps own rows
    stages: int
    near_stages: int  # of the loop over keys with a bias, whose step reads P^T as well
    warps: int
    near_weight: int  # what a step with a bias costs, in steps without
    apart: bool = False  # whether a kernel of its own adds the splits up


@triton.jit
@no_type_check
def _range(o, first, S, T: tl.constexpr, W: tl.constexpr, X: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr):
    """Of a row whose query 0 stands in slot o: keys low..stop - 1; the first step's slot; steps without a bias; steps.

    Steps cover the keys below o: the T keys of this call come extra.
    """
    stop = tl.minimum(tl.maximum(o + T, 0), S)
    low = first
    if W > 0:
        low = tl.maximum(low, o - W + 1)
    low = tl.minimum(tl.maximum(low, 0), stop)
    origin = low
    if PAGE > 0:  # a step never crosses the end of a page
        origin = low // KEYS * KEYS
    far = low * 0
    if W == 0:  # the loop without a bias has no masks either
        far = tl.maximum(o - X + 1 - origin, 0) // KEYS
    return low, stop, origin, far, (tl.maximum(tl.minimum(o, S) - origin, 0) + KEYS - 1) // KEYS


@triton.jit
@no_type_check
def _share(
    lengths_ptr, first_ptr, length, first, S, B: tl.constexpr, G: tl.constexpr, T: tl.constexpr, W: tl.constexpr,
    X: tl.constexpr, KEYS: tl.constexpr, PAGE: tl.constexpr, NEAR: tl.constexpr, PROGRAMS: tl.constexpr,
    PADDED_B: tl.constexpr,
):  # fmt: skip
    """For all rows: o and first key; the cost of a split; splits of each head, and the program after their last."""
    b = tl.arange(0, PADDED_B)
    o, f = b * 0 + length, b * 0 + first
    if lengths_ptr is not None:
        o = tl.load(lengths_ptr + b, mask=b < B, other=0)
    if first_ptr is not None:
        f = tl.load(first_ptr + b, mask=b < B, other=0)
    _, _, _, far, steps = _range(o, f, S, T, W, X, KEYS, PAGE)
    cost = far + (steps - far) * NEAR
    if W > 0:  # few steps: let this call's own keys be one more
        cost += 1
    cost = tl.where(b < B, tl.maximum(cost, 1), 0)  # a row without keys has a program too, which writes its zeros
    total = tl.sum(cost, 0) * G
    chunk = (total + PROGRAMS - 1) // PROGRAMS
    if B * G > 1:  # every head rounds up: what fits is between this and what leaves one split a head aside
        most = total // max(PROGRAMS - B * G, 1) + 1
        for _ in tl.static_range(4):
            middle = (chunk + most) // 2
            enough = tl.sum((cost + middle - 1) // middle, 0) * G <= PROGRAMS
            chunk, most = tl.where(enough, chunk, middle + 1), tl.where(enough, middle, most)
        chunk = most
    splits = (cost + chunk - 1) // chunk
    return o, f, chunk, splits, tl.cumsum(splits, 0) * G


@triton.jit
@no_type_check
def wait():
    """For the kernel in front to end; from here on the next one may start.

    Triton's own functions for this keep its version 3.9 from pipelining a loop in which they stand.
    """
    code: tl.constexpr = "griddepcontrol.wait; griddepcontrol.launch_dependents; // $0"
    tl.inline_asm_elementwise(code, "=r", [], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
@no_type_check
def _step(s, v, top, total, acc):
    LAST: tl.constexpr = len(s.shape) - 1
    new_top = tl.maximum(top, tl.max(s, LAST))
    p = tl.exp2(s - tl.expand_dims(new_top, LAST))
    shrink = tl.exp2(top - new_top)
    acc = tl.dot(p.to(v.dtype), v, acc * tl.expand_dims(shrink, LAST), input_precision="ieee")
    return new_top, total * shrink + tl.sum(p, LAST), acc


@triton.jit
@no_type_check
def _each_way(x, WAYS: tl.constexpr):
    if WAYS > 1:
        x = tl.broadcast_to(x[None, :, :], [WAYS, x.shape[0], x.shape[1]])
    return x


@triton.jit
@no_type_check
def _turned(x):
    if len(x.shape) == 3:
        x = tl.permute(x, (0, 2, 1))
    else:
        x = tl.trans(x)
    return x


@triton.jit
@no_type_check
def _pairs_added(x):
    x, y = tl.split(tl.reshape(x, [x.shape[0], x.shape[1], x.shape[2] // 2, 2]))
    return x + y


@triton.jit
@no_type_check
def ways_added(x, WAYS: tl.constexpr):
    """Sum over the first axis, that of the warps. (`tl.sum` there conflicts in every bank: 10 us.)"""
    x = tl.permute(x, (1, 2, 0))
    if WAYS > 4:
        x = _pairs_added(x)
    if WAYS > 2:
        x = _pairs_added(x)
    x, y = tl.split(x)
    return x + y


@triton.jit
@no_type_check
def _add_splits(
    part_ptr, log_ptr, sink_ptr, gate_ptr, out_ptr, b, g, start, count, pairs, channels, z_b, z_t, gate_b, gate_t,
    T: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, d: tl.constexpr, PROGRAMS: tl.constexpr, SPLITS: tl.constexpr,
    WAIT: tl.constexpr,
):  # fmt: skip
    """Some (query, head) pairs and channels of a head of row b, of its splits in their order; sink, gate, output."""
    real, t, h = pairs < T * Q, pairs // Q, g * Q + pairs % Q
    mask = real[:, None] & (channels < d)[None, :]
    each, line = tl.arange(0, SPLITS), h[:, None] * d + channels[None, :]
    z = tl.load(sink_ptr + b * z_b + t * z_t + h, mask=real, other=0.0).to(tl.float32)
    gate = tl.load(gate_ptr + b * gate_b + t[:, None] * gate_t + line, mask=mask, other=0.0).to(tl.float32)
    if WAIT:
        tl.extra.cuda.gdc_wait()
    top = tl.full(pairs.shape, LOWEST, tl.float32)
    total = tl.full(pairs.shape, 0.0, tl.float32)
    acc = tl.full(mask.shape, 0.0, tl.float32)
    for i in range(0, count, SPLITS):  # what is read once: not by way of L1
        split, live = start + i + each[None, :], i + each[None, :] < count
        log_ptrs = log_ptr + pairs[:, None] * PROGRAMS + split
        log = tl.load(log_ptrs, mask=live & real[:, None], other=LOWEST, cache_modifier=".cg")
        # Splits on the middle axis: the compiler deals the first and the last one to warps and lanes, if they are long.
        part_ptrs = part_ptr + (split[:, :, None] * (T * Q) + pairs[:, None, None]) * d + channels[None, None, :]
        part = tl.load(part_ptrs, mask=live[:, :, None] & mask[:, None, :], other=0.0, cache_modifier=".cg")
        new_top = tl.maximum(top, tl.max(log, 1))
        weight = tl.where(live, tl.exp2(log - new_top[:, None]), 0.0)
        shrink = tl.exp2(top - new_top)
        total = total * shrink + tl.sum(weight, 1)
        acc = acc * shrink[:, None] + tl.sum(part * weight[:, :, None], 1)
        top = new_top
    y = acc * (tl.sigmoid((top + tl.log2(total)) / TO_BASE2 - z) / total)[:, None] * tl.sigmoid(gate)
    out_ptrs = out_ptr + (b * T + t[:, None]) * (G * Q * d) + line
    tl.store(out_ptrs, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["length", "first", "S", "pages"])
@no_type_check
def _decode(
    q_ptr, k_ptr, v_ptr, table_ptr, r_ptr, flat_ptr, sink_ptr, gate_ptr, out_ptr, part_ptr, log_ptr, arrival_ptr,
    lengths_ptr, first_ptr, length, first, S, pages, scale,
    q_b, q_t, q_h, k_p, k_g, v_p, v_g, r_b, r_t, r_h, z_b, z_t, gate_b, gate_t,
    B: tl.constexpr, T: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, d: tl.constexpr, R: tl.constexpr,
    X: tl.constexpr, W: tl.constexpr, PAGE: tl.constexpr, K_S: tl.constexpr, V_S: tl.constexpr,
    ROWS: tl.constexpr, KEYS: tl.constexpr, WAYS: tl.constexpr, WIDTH: tl.constexpr, DEPTH: tl.constexpr,
    PROGRAMS: tl.constexpr, PADDED_B: tl.constexpr, NEAR: tl.constexpr, PAIRS: tl.constexpr, STAGES: tl.constexpr,
    NEAR_STAGES: tl.constexpr, DEPENDENT: tl.constexpr, EARLY: tl.constexpr, APART: tl.constexpr,
    SPLITS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    if DEPENDENT and not EARLY:
        wait()
    os, firsts, chunk, splits, ends = _share(
        lengths_ptr, first_ptr, length, first, S, B, G, T, W, X, KEYS, PAGE, NEAR, PROGRAMS, PADDED_B
    )
    pid = tl.program_id(0)
    batch = tl.arange(0, PADDED_B)
    b = tl.sum(tl.where((batch < B) & (pid >= ends), 1, 0), 0)
    here = batch == b
    count = tl.sum(tl.where(here, splits, 0), 0)
    rest = pid - tl.sum(tl.where(here, ends, 0), 0) + count * G
    if b < B:
        o, first_key = tl.sum(tl.where(here, os, 0), 0), tl.sum(tl.where(here, firsts, 0), 0)
        g, split = rest // count, rest % count
        low, stop, origin, far, steps = _range(o, first_key, S, T, W, X, KEYS, PAGE)
        # Places in a length where each near step counts NEAR times; then steps.
        begin, end = split * chunk, split * chunk + chunk
        begin = tl.minimum(tl.where(begin <= far, begin, far + (begin - far) // NEAR), steps)
        end = tl.minimum(tl.where(end <= far, end, far + (end - far) // NEAR), steps)
        middle = tl.maximum(tl.minimum(end, far), begin)

        LAST: tl.constexpr = 2 if WAYS > 1 else 1
        rows, channels, j = tl.arange(0, ROWS), tl.arange(0, WIDTH), tl.arange(0, DEPTH)
        t, head = rows // Q, g * Q + rows % Q
        real, inside = rows < T * Q, channels < d
        keys = tl.arange(0, KEYS)
        if WAYS > 1:
            keys = tl.arange(0, WAYS)[:, None] * (KEYS // WAYS) + tl.arange(0, KEYS // WAYS)[None, :]
        q_rows = q_ptr + b.to(tl.int64) * q_b + t * q_t + head * q_h
        q_ptrs = _each_way(q_rows[:, None] + channels[None, :], WAYS)
        q_mask = _each_way(real[:, None] & inside[None, :], WAYS)
        # Relative states, block-diagonal: columns t R .. t R + R - 1 of row (t, head).
        r_rows = r_ptr + b.to(tl.int64) * r_b + t * r_t + head * r_h
        r_ptrs = _each_way(r_rows[:, None] + j[None, :] % R, WAYS)
        r_mask = _each_way(real[:, None] & (j[None, :] // R == t[:, None]), WAYS)
        q, r = tl.zeros(q_ptrs.shape, q_ptr.dtype.element_ty), tl.zeros(r_ptrs.shape, q_ptr.dtype.element_ty)
        k_base, v_base = k_ptr + g.to(tl.int64) * k_g, v_ptr + g.to(tl.int64) * v_g
        k_local = tl.expand_dims(keys, LAST) * K_S + channels[None, :]
        v_local = tl.expand_dims(keys, LAST) * V_S + channels[None, :]
        page = b
        if PAGE > 0:
            # The page of a step is loaded in the step before: a load that addresses another one of the same step
            # would cost the pipeline half of its buffers.
            table_ptr += b * pages
            index = (origin + begin * KEYS) // PAGE
            page = tl.load(table_ptr + index, mask=index < pages, other=0)

        if WAYS > 1:
            top = tl.full([WAYS, ROWS], LOWEST, tl.float32)
            acc = tl.zeros([WAYS, ROWS, WIDTH], tl.float32)
            total = tl.zeros([WAYS, ROWS], tl.float32)
        else:
            top = tl.full([ROWS], LOWEST, tl.float32)
            acc = tl.zeros([ROWS, WIDTH], tl.float32)
            total = tl.zeros([ROWS], tl.float32)
        to_base2 = scale * TO_BASE2

        for step in tl.range(begin, middle, num_stages=STAGES):
            n0 = origin + step * KEYS
            slot0 = n0
            if PAGE > 0:
                slot0 = n0 % PAGE
            k_ptrs = k_base + (page.to(tl.int64) * k_p + slot0.to(tl.int64) * K_S) + k_local
            v_ptrs = v_base + (page.to(tl.int64) * v_p + slot0.to(tl.int64) * V_S) + v_local
            if d == WIDTH:
                k, v = tl.load(k_ptrs), tl.load(v_ptrs)
            else:
                k = tl.load(k_ptrs, mask=inside[None, :], other=0.0)
                v = tl.load(v_ptrs, mask=inside[None, :], other=0.0)
            if step == begin:  # the first steps' keys and values are on their way
                if DEPENDENT and EARLY:
                    wait()
                q = tl.load(q_ptrs, mask=q_mask, other=0.0)
            s = tl.dot(q, _turned(k), input_precision="ieee") * to_base2
            top, total, acc = _step(s, v, top, total, acc)
            if PAGE > 0:
                index = (n0 + KEYS) // PAGE
                page = tl.load(table_ptr + index, mask=index < pages, other=0)

        slot = o + t
        for new in tl.static_range(2):  # keys with a bias: the older ones; then this call's, which the last split takes
            if new == 0:
                lowest, highest = low, tl.minimum(o, stop)
                start = middle
            else:
                lowest, highest = tl.maximum(o, low), stop
                start = (lowest - origin) // KEYS
                end = tl.where(split == count - 1, (stop - origin + KEYS - 1) // KEYS, start)
                if PAGE > 0:
                    index = (origin + start * KEYS) // PAGE
                    page = tl.load(table_ptr + index, mask=index < pages, other=0)
                if DEPENDENT and EARLY:
                    wait()
            for step in tl.range(start, end, num_stages=NEAR_STAGES if new == 0 else 1):
                n0 = origin + step * KEYS
                slot0 = n0
                if PAGE > 0:
                    slot0 = n0 % PAGE
                n = n0 + keys
                live = (n >= lowest) & (n < highest)
                both = tl.expand_dims(live, LAST) & inside[None, :]
                k_ptrs = k_base + (page.to(tl.int64) * k_p + slot0.to(tl.int64) * K_S) + k_local
                v_ptrs = v_base + (page.to(tl.int64) * v_p + slot0.to(tl.int64) * V_S) + v_local
                index = tl.expand_dims((o - n) * R, LAST) + j[None, :]  # within P^T exactly where a bias exists
                k = tl.load(k_ptrs, mask=both, other=0.0)
                profile = tl.load(flat_ptr + index, mask=(index >= 0) & (index < X * R), other=0.0)
                v = tl.load(v_ptrs, mask=both, other=0.0)
                if step == start:
                    if DEPENDENT and EARLY:
                        wait()
                    q = tl.load(q_ptrs, mask=q_mask, other=0.0)
                    r = tl.load(r_ptrs, mask=r_mask, other=0.0)
                bias = tl.dot(r, _turned(profile), input_precision="ieee")
                s = tl.dot(q, _turned(k), bias * (1 / scale), input_precision="ieee") * to_base2
                n = tl.expand_dims(n, LAST - 1)
                sees = tl.expand_dims(live, LAST - 1) & (n <= slot[:, None])
                if W > 0:
                    sees = sees & (slot[:, None] - n < W)
                top, total, acc = _step(tl.where(sees, s, float("-inf")), v, top, total, acc)
                if PAGE > 0:
                    index = (n0 + KEYS) // PAGE
                    page = tl.load(table_ptr + index, mask=index < pages, other=0)

        if WAYS > 1:
            high = tl.max(top, 0)
            weight = tl.exp2(top - high[None, :])
            top, total, acc = high, tl.sum(total * weight, 0), ways_added(acc * weight[:, :, None], WAYS)
        some = total > 0  # a row that saw no key has the sum 0 and a weight of nothing
        total = tl.where(some, total, 1.0)
        part_rows = part_ptr + (pid * (T * Q) + rows) * d
        tl.store(part_rows[:, None] + channels[None, :], acc / total[:, None], mask=real[:, None] & inside[None, :])
        tl.store(log_ptr + rows * PROGRAMS + pid, tl.where(some, top + tl.log2(total), LOWEST), mask=real)
        if not APART:
            tl.debug_barrier()  # the stores of all threads come before the arrival, which one thread makes
            arrival_ptr += b * G + g
            if tl.atomic_add(arrival_ptr, 1, sem="acq_rel", scope="gpu") == count - 1:
                tl.store(arrival_ptr, 0)  # for the next call
                for channel in range(0, d, BLOCK):
                    _add_splits(
                        part_ptr, log_ptr, sink_ptr, gate_ptr, out_ptr, b.to(tl.int64), g, pid - split, count,
                        tl.arange(0, PAIRS), channel + tl.arange(0, BLOCK), z_b, z_t, gate_b, gate_t,
                        T, G, Q, d, PROGRAMS, SPLITS, False,
                    )  # fmt: skip


@triton.jit(do_not_specialize=["length", "first", "S"])
@no_type_check
def _combine(
    part_ptr, log_ptr, sink_ptr, gate_ptr, out_ptr, lengths_ptr, first_ptr, length, first, S, z_b, z_t, gate_b, gate_t,
    B: tl.constexpr, T: tl.constexpr, G: tl.constexpr, Q: tl.constexpr, d: tl.constexpr, X: tl.constexpr,
    W: tl.constexpr, PAGE: tl.constexpr, KEYS: tl.constexpr, PROGRAMS: tl.constexpr, PADDED_B: tl.constexpr,
    NEAR: tl.constexpr, SPLITS: tl.constexpr, BLOCK: tl.constexpr, DEPENDENT: tl.constexpr,
):  # fmt: skip
    """One (query, head) pair of one row, and BLOCK of its channels."""
    if DEPENDENT:  # who comes behind waits for this kernel, which waits for the splits
        tl.extra.cuda.gdc_launch_dependents()
    _, _, _, splits, ends = _share(
        lengths_ptr, first_ptr, length, first, S, B, G, T, W, X, KEYS, PAGE, NEAR, PROGRAMS, PADDED_B
    )
    row = tl.program_id(0)  # of [B, T, H]
    h, t, b = row % (G * Q), row // (G * Q) % T, row // (G * Q) // T
    here = tl.arange(0, PADDED_B) == b
    count = tl.sum(tl.where(here, splits, 0), 0)
    start = tl.sum(tl.where(here, ends, 0), 0) - (G - h // Q) * count
    pairs, channels = t * Q + h % Q + tl.arange(0, 1), tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    _add_splits(
        part_ptr, log_ptr, sink_ptr, gate_ptr, out_ptr, b.to(tl.int64), h // Q, start, count, pairs, channels,
        z_b, z_t, gate_b, gate_t, T, G, Q, d, PROGRAMS, SPLITS, DEPENDENT,
    )  # fmt: skip


def transposed(profiles: Float[Tensor, "R X"]) -> Float[Tensor, "X R"]:
    """P^T in memory: one line of R numbers a distance."""
    return profiles.t().contiguous()


def choose_tile(rows: int, heads: int, window: int | None, processors: int, element_size: int) -> Tile:
    """The tile for `rows` = T H / G query rows of `heads` = B G key/value heads.

    One large program a processor reads a long cache faster than several small ones; of a window every program takes
    one small step, if there are enough. Heads take three programs each or more, so that their lengths may differ.
    """
    tile = Tile(64, processors, 4, 5, 3, 4, 2)
    if element_size == 4:  # no matrix unit multiplies float32 exactly: the products unroll, and must be small
        tile = Tile(16, processors, 1, 2, 2, 4, 2)
    elif window is not None:
        keys, ways = (64, 4) if rows <= 16 else (32, 1)
        steps = cdiv(window, keys) + 2
        tile = Tile(keys, min(64 // keys * processors + heads, steps * heads), ways, 2, 3, 4, 1)
    elif rows > 16:
        tile = Tile(64, processors, 1, 4, 3, 4, 4)
    programs = tile.programs * cdiv(3 * heads, tile.programs)
    return tile._replace(programs=programs, apart=cdiv(programs, heads) * rows > WITHIN)


def check_operands(
    op: str,
    q: Tensor,
    caches: dict[str, Tensor],
    r: Tensor,
    profiles: Tensor,
    sink: Tensor,
    gate: Tensor,
    window: int | None,
    paged: bool = False,
) -> None:
    """Refuse what no kernel of attention can do; those that a call is handed on to check nothing more.

    Args:
        caches: keys and values, by the names of these arguments.

    Raises:
        InputError: see `expect`; for query heads that the key/value heads do not divide, or a window below 1.
    """
    (B, T, H, d), (R, X) = axes(op, "q", q, 4), axes(op, "profiles", profiles, 2)
    name, k = next(iter(caches.items()))
    P, G, S, _ = axes(op, name, k, 4)
    if H % G:
        raise InputError(f"triton {op}: {H} query heads on {G} key/value heads, expected a multiple")
    if window is not None and window < 1:
        raise InputError(f"triton {op}: a window of {window}, expected at least 1, or None")
    slots = (P if paged else B, G, S, d)
    expect(op, FLOATS, q=(q, (B, T, H, d)), sink=(sink, (B, T, H)), gate=(gate, (B, T, H * d)))
    of_one_dtype = {name: (cache, slots) for name, cache in caches.items()}
    expect(op, (q.dtype,), **of_one_dtype, r=(r, (B, T, H, R)), profiles=(profiles, (R, X)))


def fits(q: Float[Tensor, "B T H d"], k: Float[Tensor, "P G S d"]) -> bool:
    """Whether a call is for this kernel: up to eight queries, in 64 rows at most."""
    T, H, G = q.shape[1], q.shape[2], k.shape[1]
    return T <= 8 and T * (H // G) <= 64


def attend_split(
    q: Float[Tensor, "B T H d"],
    k: Float[Tensor, "P G S d"],
    v: Float[Tensor, "P G S d"],
    r: Float[Tensor, "B T H R"],
    profiles: Float[Tensor, "R X"],
    sink: Float[Tensor, "B T H"],
    gate: Float[Tensor, "B T H*d"],
    lengths: int | Int[Tensor, " B"],
    first: int | Int[Tensor, " B"] = 0,
    window: int | None = None,
    table: Int[Tensor, "B pages"] | None = None,
    early: bool = False,
    tile: Tile | None = None,
) -> Float[Tensor, "B T H*d"]:
    """One kernel or both: what `attend` and `attend_cache` share, once `check_operands` has let it pass.

    Args:
        lengths, first: slot of query 0 and the first slot that holds a key: a number for all rows, or int32 tensors.
        early: whether keys below `lengths` may be read before the kernels in front have ended, see `attend_cache`.
        tile: what a measurement varies; None = `choose_tile`.
    """
    q, k, v, r, sink, gate = adjacent(q, k, v, r, sink, gate)
    (B, T, H, d), (G, S), (R, X) = q.shape, k.shape[1:3], profiles.shape
    Q, page, pages = H // G, 0, 0
    if table is not None:
        page, pages, S = S, table.shape[1], S * table.shape[1]
    if tile is None:
        tile = choose_tile(T * Q, B * G, window, processors(q.device), q.element_size())
    programs, pairs, width = tile.programs, next_power_of_2(T * Q), next_power_of_2(d)
    block = min(width, 2**12 // pairs)
    out = torch.empty(B, T, H * d, dtype=q.dtype, device=q.device)
    part = torch.empty(programs, T * Q, d, dtype=torch.float32, device=q.device)
    log = torch.empty(T * Q, programs, dtype=torch.float32, device=q.device)
    given = [u for u in (lengths, first, table) if isinstance(u, Tensor)]
    if not all(u.is_contiguous() for u in given):  # their copies come from the kernel in front
        early = False
        lengths, first, table = (u.contiguous() if isinstance(u, Tensor) else u for u in (lengths, first, table))
    length, lengths = (0, lengths) if isinstance(lengths, Tensor) else (lengths, None)
    first_key, first = (0, first) if isinstance(first, Tensor) else (first, None)
    pdl, splits = dependent(q.device), next_power_of_2(cdiv(programs, B * G))
    common = {
        "B": B, "T": T, "G": G, "Q": Q, "d": d, "X": X, "W": window or 0, "PAGE": page, "KEYS": tile.keys,
        "PROGRAMS": programs, "PADDED_B": next_power_of_2(B), "NEAR": tile.near_weight, "DEPENDENT": pdl,
        "launch_pdl": pdl,
    }  # fmt: skip
    strides = *sink.stride()[:2], *gate.stride()[:2]
    _decode[(programs,)](
        q, k, v, table, r, prepared(profiles, transposed), sink, gate, out, part, log,
        None if tile.apart else arrivals(q.device, B * G), lengths, first, length, first_key, S, pages,
        1 / math.sqrt(d), *q.stride()[:3], *k.stride()[:2], *v.stride()[:2], *r.stride()[:3], *strides,
        R=R, K_S=k.stride(2), V_S=v.stride(2), ROWS=16 if T * Q <= 16 else 64, WAYS=tile.ways, WIDTH=max(16, width),
        DEPTH=max(16, next_power_of_2(T * R)), PAIRS=pairs, STAGES=tile.stages, NEAR_STAGES=tile.near_stages,
        EARLY=early, APART=tile.apart, SPLITS=min(splits, AT_ONCE // (pairs * block)),
        BLOCK=block, num_warps=tile.warps, **common,
    )  # fmt: skip
    if tile.apart:
        block = min(32, width)
        _combine[(B * T * H, cdiv(d, block))](
            part, log, sink, gate, out, lengths, first, length, first_key, S, *strides,
            SPLITS=min(256, splits), BLOCK=block, num_warps=4, **common,
        )  # fmt: skip
    return out


def _by_clusters(
    q: Tensor, k: Tensor, v: Tensor, r: Tensor, profiles: Tensor, sink: Tensor, gate: Tensor, lengths: Tensor,
    window: int | None, table: Tensor | None,
) -> Tensor | None:  # fmt: skip
    """`attend_cache` of one token, if the call is for `decode_hopper`; else nothing."""
    (B, T, H, d), (G, S), (R, X) = q.shape, k.shape[1:3], profiles.shape
    if T > 1 or window is None or B * G > CLUSTERS or (d, R) != (128, 16) or q.dtype != torch.bfloat16:
        return None
    given = [lengths] if table is None else [lengths, table]
    if capability_major(q.device) != 9 or window > 1024 or H > 8 * G or not all(u.is_contiguous() for u in given):
        return None
    given, strides = (q, k, v, r, sink, gate), (*k.stride()[:3], *v.stride()[:3])
    if any(u.stride(-1) != 1 for u in given) or any(n % 8 for n in strides):
        return None
    if max(n * stride for u in given for n, stride in zip(u.shape, u.stride(), strict=True)) >= 2**31:
        return None  # it counts in 32 bits
    ctas, keys = 4 if window <= 512 else 8, 128
    page, pages = (S, table.shape[1]) if table is not None else (0, 0)
    out = torch.empty(B, 1, H * d, dtype=q.dtype, device=q.device)
    decode_cluster[(B * G,)](
        q, k, v, table, r, prepared(profiles, transposed), sink, gate, out, lengths, S * max(pages, 1), pages,
        q.stride(0), q.stride(2), *k.stride()[:2], *v.stride()[:2], r.stride(0), r.stride(2), sink.stride(0),
        gate.stride(0), G=G, Q=H // G, X=X, W=window, PAGE=page, K_S=k.stride(2), V_S=v.stride(2), CTAS=ctas, KEYS=keys,
        **layouts(ctas, keys), num_warps=8, num_ctas=ctas, launch_pdl=True,
    )  # fmt: skip
    return out


def attend_cache(
    q: Float[Tensor, "B T H d"],
    keys: Float[Tensor, "P G S d"],
    values: Float[Tensor, "P G S d"],
    r: Float[Tensor, "B T H R"],
    profiles: Float[Tensor, "R X"],
    sink: Float[Tensor, "B T H"],
    gate: Float[Tensor, "B T H*d"],
    lengths: Int[Tensor, " B"],
    window: int | None = None,
    table: Int[Tensor, "B pages"] | None = None,
) -> Float[Tensor, "B T H*d"]:
    """Twin of `fused.attend_cache`, for up to 8 tokens. The launch does not depend on the lengths.

    Slots below `lengths[b]`, `lengths`, `table` and `profiles` are read before the kernels in front have ended; all
    else, this call's slots among it, after. It is not the last kernel alone that may still be running: `prepare_qkv`,
    `route` and the short convolutions let the next kernel start before they wait for the one in front. So between what
    wrote those four and this call there must be a kernel that lets the next one start only when all before itself have
    ended: one that was launched without programmatic dependence, as any PyTorch operation is, or one that waits first,
    as `project` does in `DecodeStep`. (Lengths that change meanwhile would leave a wrong count for later calls.)

    Args:
        lengths, table: int32. Pages have 64 slots or a multiple. That lengths leave room for T tokens, and that the
            table names pages that there are, is not checked: it would wait for the device.

    Raises:
        InputError: for more tokens or other pages; see also `check_operands`.
    """
    caches, paged = {"keys": keys, "values": values}, table is not None
    check_operands("attend_cache", q, caches, r, profiles, sink, gate, window, paged)
    pages = axes("attend_cache", "table", table, 2)[1] if paged else 0
    expect("attend_cache", (torch.int32,), lengths=(lengths, (len(q),)), table=(table, (len(q), pages)))
    if not fits(q, keys):
        raise InputError(
            f"triton attend_cache: {q.shape[1]} tokens of {q.shape[2]} heads, expected at most 8 and 64 rows"
        )
    if table is not None and keys.shape[2] % 64:
        raise InputError(f"triton attend_cache: pages of {keys.shape[2]} slots, expected a multiple of 64")
    out = _by_clusters(q, keys, values, r, profiles, sink, gate, lengths, window, table)
    if out is not None:
        return out
    return attend_split(q, keys, values, r, profiles, sink, gate, lengths, 0, window, table, early=True)
