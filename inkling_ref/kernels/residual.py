r"""Attention-residual mixture and RMSNorm: every source read once, for all queries of a sublayer.

The score of a source needs two sums over the row that is mixed, x q and x x, and the normalised source is the row
times a number; so one read of x serves the norm, the scores of all queries and all mixtures:

$$ \rho_j = 1 / \sqrt{\overline{x_j^2} + \epsilon}, \qquad \mathrm{mix} =
   \sum_j \frac{e^{s_j} \rho_j}{\sum_i e^{s_i}} x_j, \qquad s_j = \rho_j \, (x_j \cdot q) / \sqrt{D} $$

Here with the running maximum and sum of an online softmax over j, one program a token. D = 4608 is no power of two, as
the tiles of Triton are: a row is 9 chunks of 512, without the 44 % of idle lanes that padding to 8192 would have. All
sums of a source are taken in one reduction. Where the sources are in 16 bits, and where the tokens are few, Hopper GPUs
run the faster forms of `kernels.residual_hopper` instead.
"""

# ruff: noqa: RUF005, RET505 (Triton joins tuples with +, does not know *, and wants an else after a return)

import math
from types import ModuleType
from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from ..errors import InputError
from ..residual import SOURCE_EPS
from . import FLOATS, LOG2E, axes, capability_major, expect, next_power_of_2, prepared, processors, residual_hopper
from .short_conv import RUN, check_state, rolling_short_conv, token_major

_CHUNK: int = 512
# One query, or more: warps of a program, and registers that a thread may use.
_PROGRAMS: dict[bool, tuple[int, int]] = {False: (4, 160), True: (8, 255)}
_FEW: int = 24  # tokens, up to which a cluster takes each
_FEW_TO_JOIN: int = 128  # with the convolution, which it has of one token a row
_CLUSTER: tuple[int, int, int] = (8, 4, 8)  # its multiprocessors, their warps, channels of a thread
_BURSTS: tuple[int, int] = (8, 2)  # warps of a program, programs a processor
_HELD: int = 2  # chunks of several queries that stay in registers; of one query all do
_NEAR: int = 2  # more of them in shared memory, if it has room
_MOST_QUERIES: int = 3  # whose mixtures fit into registers
_MOST_BLOCKS: int = 30  # a lane has the sums of one source
_SHARED_BYTES: int = 226 * 1024  # of a processor, without what its programs reserve


@triton.constexpr_function
def _power_of_two(k):  # type: ignore[no-untyped-def]
    """The largest up to k."""
    return 1 << (k.bit_length() - 1)


@triton.jit
@no_type_check
def _joined(values, K: tl.constexpr):
    """K vectors, a power of two of them, as one tensor with log2 K axes more."""
    if K == 1:
        return values[0]
    else:
        return tl.join(_joined(values[: K // 2], K // 2), _joined(values[K // 2 :], K // 2))


@triton.jit
@no_type_check
def _parted(t, K: tl.constexpr):
    """The opposite of `_joined`."""
    if K == 1:
        return (t,)
    else:
        a, b = tl.split(t)
        return _parted(a, K // 2) + _parted(b, K // 2)


@triton.jit
@no_type_check
def _sums(values, K: tl.constexpr):
    """The sums of K vectors, a power of two of them in one reduction (and its barriers)."""
    P: tl.constexpr = _power_of_two(K)
    out = _parted(tl.sum(_joined(values[:P], P), 0), P)
    if P < K:
        out = out + _sums(values[P:], K - P)
    return out


@triton.jit
@no_type_check
def _load(pointer, c: tl.constexpr, o, D: tl.constexpr, CHUNK: tl.constexpr):
    if (c + 1) * CHUNK <= D:
        return tl.load(pointer + c * CHUNK + o).to(tl.float32)
    else:
        return tl.load(pointer + c * CHUNK + o, mask=o < D - c * CHUNK, other=0.0).to(tl.float32)


@triton.jit
@no_type_check
def _store(pointer, x, c: tl.constexpr, o, D: tl.constexpr, CHUNK: tl.constexpr):
    if (c + 1) * CHUNK <= D:
        tl.store(pointer + c * CHUNK + o, x.to(pointer.dtype.element_ty))
    else:
        tl.store(pointer + c * CHUNK + o, x.to(pointer.dtype.element_ty), mask=o < D - c * CHUNK)


@triton.jit
@no_type_check
def _take_in(x, q, mixed, top, total, eps, D: tl.constexpr, Q: tl.constexpr, C: tl.constexpr):
    """One source more in all Q mixtures: C chunks of it; mixed, top, total are the state of Q online softmaxes."""
    parts = (x[0] * x[0],)
    for i in tl.static_range(Q):
        parts = parts + (x[0] * q[i * C],)
    for c in tl.static_range(1, C):
        new = (parts[0] + x[c] * x[c],)
        for i in tl.static_range(Q):
            new = new + (parts[1 + i] + x[c] * q[i * C + c],)
        parts = new
    sums = _sums(parts, 1 + Q)
    rho = tl.rsqrt(sums[0] / D + eps)
    new_mixed, new_top, new_total = (), (), ()
    for i in tl.static_range(Q):
        score = sums[1 + i] * rho  # to base 2
        highest = tl.maximum(top[i], score)
        shrink, p = tl.exp2(top[i] - highest), tl.exp2(score - highest)
        for c in tl.static_range(C):
            new_mixed = new_mixed + (mixed[i * C + c] * shrink + x[c] * (p * rho),)
        new_top, new_total = new_top + (highest,), new_total + (total[i] * shrink + p,)
    return new_mixed, new_top, new_total


@triton.jit
@no_type_check
def _mix_and_norm(
    y_ptr, block_ptr, partial_ptr, query_ptr, weight_ptrs, out_ptr, N, n, y_t, block_t, partial_t, source_eps,
    norm_eps, score_scale,
    D: tl.constexpr, Q: tl.constexpr, CHUNK: tl.constexpr, MIX: tl.constexpr, JOIN: tl.constexpr,
    OPENS: tl.constexpr, ENDS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """n blocks and the running sum, which y joins first where JOIN says so."""
    C: tl.constexpr = (D + CHUNK - 1) // CHUNK
    token = tl.program_id(0).to(tl.int64)
    o = tl.arange(0, CHUNK)
    blocks = block_ptr + token * block_t
    partial = partial_ptr + token * partial_t
    last, closed = (), ()
    for c in tl.static_range(C):
        row = _load(partial, c, o, D, CHUNK)
        if JOIN:
            y = _load(y_ptr + token * y_t, c, o, D, CHUNK)
            if OPENS:
                _store(blocks + n * D, row, c, o, D, CHUNK)
                closed = closed + (row.to(block_ptr.dtype.element_ty).to(tl.float32),)
                row = y
            else:
                row += y
            if ENDS:
                row = row.to(out_ptr.dtype.element_ty).to(tl.float32)
            _store(partial, row, c, o, D, CHUNK)
        last = last + (row,)
    # One entry a query and chunk. (Tensors with an axis of Q would be padded, and moved between layouts.)
    q, mixed, top, total = (), (), (), ()
    for i in tl.static_range(Q):
        for c in tl.static_range(C):
            if MIX:
                q = q + (_load(query_ptr + i * D, c, o, D, CHUNK) * score_scale,)
                mixed = mixed + (tl.zeros([CHUNK], tl.float32),)
            else:  # the first layer: the running sum as it is
                mixed = mixed + (last[c],)
        top, total = top + (-1e30,), total + (0.0 if MIX else 1.0,)
    if MIX:
        for j in tl.range(0, n, num_stages=STAGES):
            x = ()
            for c in tl.static_range(C):
                x = x + (_load(blocks + j * D, c, o, D, CHUNK),)
            mixed, top, total = _take_in(x, q, mixed, top, total, source_eps, D, Q, C)
        if OPENS:
            mixed, top, total = _take_in(closed, q, mixed, top, total, source_eps, D, Q, C)
        mixed, top, total = _take_in(last, q, mixed, top, total, source_eps, D, Q, C)
    squares = ()
    for i in tl.static_range(Q):
        own = mixed[i * C] * mixed[i * C]
        for c in tl.static_range(1, C):
            own += mixed[i * C + c] * mixed[i * C + c]
        squares = squares + (own,)
    sums = _sums(squares, Q)
    for i in tl.static_range(Q):
        inverse = tl.rsqrt(sums[i] / (total[i] * total[i]) / D + norm_eps) / total[i]
        for c in tl.static_range(C):
            w = _load(weight_ptrs[i], c, o, D, CHUNK)
            _store(out_ptr + (i * N + token) * D, mixed[i * C + c] * inverse * w, c, o, D, CHUNK)


def _hopper(device: torch.device) -> ModuleType | None:
    """The faster kernels, where they run: clusters, and 227 KB of shared memory (Hopper, data-centre Blackwell)."""
    return residual_hopper if capability_major(device) in (9, 10) else None


def _by_token(x: Float[Tensor, "B T *rest"]) -> tuple[Float[Tensor, "B T *rest"], int]:
    """`x`, or a copy, whose tokens of all rows stand one distance apart and are whole in memory; that distance."""
    B, T = x.shape[:2]
    row, token = x.stride()[:2]
    whole = x[0, 0].is_contiguous()
    if not whole or (B > 1 and T > 1 and row != T * token):
        x = x.contiguous()
        row, token = x.stride()[:2]
    return x, token if T > 1 else row


def _launch(
    blocks: Float[Tensor, "B T n D"],
    partial: Float[Tensor, "B T D"],
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"] | None,
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
    dtype: torch.dtype,
) -> list[Float[Tensor, "B T D"]]:
    """Mixtures of the blocks and the running sum, by the form that suits the number of tokens."""
    B, T, n, D = blocks.shape
    N, Q = B * T, len(norm_weights)
    out = torch.empty(Q, B, T, D, dtype=dtype, device=partial.device)
    if out.numel() == 0:
        return list(out.unbind(0))
    blocks, block_t = _by_token(blocks)
    partial, partial_t = _by_token(partial)
    queries = None if queries is None else queries.contiguous()
    norm_weights = [w.contiguous() for w in norm_weights]
    hopper = None if queries is None else _hopper(partial.device)
    if hopper is not None and N <= _FEW and D <= 8192:
        _cluster(
            hopper, None, None, None, None, blocks, partial, n, queries, norm_weights, out, eps, block_t, partial_t
        )
        return list(out.unbind(0))
    if hopper is not None and _bursts(
        hopper, None, blocks, partial, n, queries, norm_weights, out, eps, block_t, partial_t
    ):
        return list(out.unbind(0))
    _programs(None, blocks, partial, n, queries, norm_weights, out, eps, block_t, partial_t)
    return list(out.unbind(0))


def _programs(
    y: Tensor | None, blocks: Tensor, partial: Tensor, n: int, queries: Tensor | None, norm_weights: list[Tensor],
    out: Tensor, eps: float, block_t: int, partial_t: int, opens: bool = False, ends: bool = False,
) -> None:  # fmt: skip
    """`_mix_and_norm`, on any GPU and for any sizes; without y of the sources as they are."""
    D, Q = out.shape[-1], len(norm_weights)
    N = out[0, ..., 0].numel()
    warps, registers = _PROGRAMS[Q > 1]
    _mix_and_norm[(N,)](
        y, blocks, partial, queries, tuple(norm_weights), out, N, n, D, block_t, partial_t, SOURCE_EPS, eps,
        LOG2E / math.sqrt(D),
        D=D, Q=Q, CHUNK=min(_CHUNK, next_power_of_2(D)), MIX=queries is not None, JOIN=y is not None,
        OPENS=opens, ENDS=ends, STAGES=3, num_warps=max(1, min(warps, D // 512)), maxnreg=registers,
    )  # fmt: skip


def _bursts(
    hopper: ModuleType, y: Tensor | None, blocks: Tensor, partial: Tensor, n: int, queries: Tensor,
    norm_weights: list[Tensor], out: Tensor, eps: float, block_t: int, partial_t: int, opens: bool = False,
    ends: bool = False,
) -> bool:  # fmt: skip
    """`mix_bursts` of many tokens; False where whole tokens do not fit into shared memory or cannot be copied there.

    Without y of the sources as they are.
    """
    D, Q, N = out.shape[-1], len(norm_weights), out[0, ..., 0].numel()
    warps, programs = _BURSTS
    chunk = 64 * warps
    sources = [(y, D), (blocks, block_t), (partial, partial_t)]
    aligned = all(t is None or t.data_ptr() % 16 == stride % 16 == 0 for t, stride in sources)
    if D % chunk or Q > _MOST_QUERIES or not aligned:
        return False
    C, sums = D // chunk, 4 * warps * (Q + 1)
    hold = C if Q == 1 else min(C, _HELD)
    room = _SHARED_BYTES // programs - D * (partial.element_size() + (0 if y is None else y.element_size()))
    room -= 2 * sums + 4 * warps * Q
    # As many blocks as fit, whatever their number is now: one variant of the kernel serves them all.
    near, row = min(C - hold, _NEAR), D * blocks.element_size() + sums
    if room - near * Q * 4 * chunk < n * row:
        near = 0
    rows = min((room - near * Q * 4 * chunk) // row, _MOST_BLOCKS)
    if rows < max(n, 1):
        return False
    words, strides, copies = [], [], []
    for t, stride in sources:
        pairs = t is not None and t.dtype == torch.bfloat16  # as words of two
        words.append(t.view(torch.int32) if pairs else t)
        strides.append(stride // 2 if pairs else stride)
        size = 4 if t is None else words[-1].element_size()
        copies.append(hopper.copy_layout(chunk // 2 if pairs else chunk, size, warps))
    hopper.mix_bursts[(min(N, programs * processors(out.device)),)](
        *words, queries, tuple(norm_weights), None if y is None else partial, None if y is None else blocks, out, N, n,
        opens, ends, *strides[1:], partial_t, block_t, SOURCE_EPS, eps, LOG2E / math.sqrt(D),
        D=D, ROWS=rows, Q=Q, WARPS=warps, HOLD=hold, NEAR=near, ONE=hopper.layout(1, warps, 1),
        TWO=hopper.layout(1, warps, 2), Y_COPY=copies[0], BLOCK_COPY=copies[1], LAST_COPY=copies[2],
        QUERY_COPY=hopper.copy_layout(chunk, queries.element_size(), warps), num_warps=warps,
        maxnreg=65536 // (programs * 32 * warps),
    )  # fmt: skip
    return True


def _cluster(
    hopper: ModuleType, y: Tensor | None, state: Tensor | None, weight: Tensor | None, rejected: Tensor | None,
    blocks: Tensor, partial: Tensor, n: int, queries: Tensor, norm_weights: list[Tensor], out: Tensor, eps: float,
    block_t: int, partial_t: int, opens: bool = False, ends: bool = False, early: bool = False,
) -> None:  # fmt: skip
    """`mix_cluster` of a few tokens; without y of the sources as they are, without a state no convolution."""
    Q, D = len(norm_weights), out.shape[-1]
    N = out[0, ..., 0].numel()
    K = 0 if weight is None else weight.shape[-1]
    taps = None if weight is None else prepared(weight, token_major)
    ctas, warps, vec = _CLUSTER
    hopper.mix_cluster[(N,)](
        y, state, rejected, taps, blocks, partial, queries, tuple(norm_weights), out, N,
        early, 0 if y is None else D, 0 if state is None else state.stride(0), block_t, partial_t, opens, ends,
        1 / math.sqrt(K + 1), SOURCE_EPS, eps, LOG2E / math.sqrt(D),
        D=D, n=n + opens, Q=Q, K=K, ROWS=0 if state is None else state.shape[1], JOIN=y is not None,
        L=hopper.layout(ctas, warps, vec), CTAS=ctas, WARPS=warps, VEC=vec,
        num_warps=warps, num_ctas=ctas, launch_pdl=True,
    )  # fmt: skip


def _readers(
    queries: Tensor | None, norm_weights: list[Tensor], D: int
) -> dict[str, tuple[Tensor | None, tuple[int, ...]]]:
    """What mixes and norms the sources, and the shapes that it must have, for `expect`."""
    one = queries is not None and queries.ndim == 1 and len(norm_weights) == 1
    shapes = {"queries": (queries, (D,) if one else (len(norm_weights), D))}
    return shapes | {f"norm_weights[{i}]": (w, (D,)) for i, w in enumerate(norm_weights)}


def mix_and_norm(
    sources: Float[Tensor, "B T n D"],
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"] | None,
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
    dtype: torch.dtype,
) -> list[Float[Tensor, "B T D"]]:
    """Twin of `residual.mix_and_norm`; sources of any of the three dtypes, float32 inside, one rounding.

    Raises:
        InputError: see `expect`.
    """
    shape = axes("mix_and_norm", "sources", sources, 4, batch=2)
    expect("mix_and_norm", FLOATS, sources=(sources, shape), **_readers(queries, norm_weights, shape[3]))
    return _launch(sources[:, :, :-1], sources[:, :, -1], queries, norm_weights, eps, dtype)


def mix_depth_and_norm(
    blocks: Float[Tensor, "B T n D"],
    partial: Float[Tensor, "B T D"],
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"],
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
    dtype: torch.dtype,
) -> list[Float[Tensor, "B T D"]]:
    """Twin of `fused.mix_depth_and_norm`: blocks and running sum are read where they are, each in its dtype.

    Raises:
        InputError: see `expect`.
    """
    B, T, n, D = axes("mix_depth_and_norm", "blocks", blocks, 4, batch=3)
    given = {"blocks": (blocks, (B, T, n, D)), "partial": (partial, (B, T, D))}
    expect("mix_depth_and_norm", FLOATS, **given, **_readers(queries, norm_weights, D))
    return _launch(blocks, partial, queries, norm_weights, eps, dtype)


def join_and_mix(
    y: Float[Tensor, "B T D"],
    state: Float[Tensor, "B N D"],
    weight: Float[Tensor, "D 1 K"],
    blocks: Float[Tensor, "B T capacity D"],
    partial: Float[Tensor, "B T D"],
    count: int,
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"],
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
    opens_block: bool = False,
    ends_layer: bool = False,
    rejected: Int[Tensor, " B"] | None = None,
) -> list[Float[Tensor, "B T D"]]:
    """Twin of `fused.join_and_mix`: state, blocks and running sum are written in place, nothing waits for the host.

    One launch for a token a row on Hopper GPUs, otherwise one more for the convolution. In a graph that one launch
    reads all but y while the kernel in front still runs. That may write y, but none of the others, and must not let
    this one start before it has itself waited for those in front of it. A call before the capture prepares the weight.

    Raises:
        InputError: see `expect`; no room for `count` blocks and one that closes; blocks or running sum whose tokens do
            not stand one distance apart; for the state see `short_conv.check_state`: a call of more than 16 tokens
            takes up to 9 taps.
    """
    (B, T, D), Q = axes("join_and_mix", "y", y, 3, batch=1), len(norm_weights)
    N, K = B * T, axes("join_and_mix", "weight", weight, 3)[2]
    capacity = axes("join_and_mix", "blocks", blocks, 4, batch=3)[2]
    expect(
        "join_and_mix", FLOATS, y=(y, (B, T, D)), weight=(weight, (D, 1, K)), blocks=(blocks, (B, T, capacity, D)),
        partial=(partial, (B, T, D)), **_readers(queries, norm_weights, D),
    )  # fmt: skip
    check_state("join_and_mix", state, rejected, (B, T, D), K, RUN)
    if not 0 <= count <= capacity - opens_block:
        raise InputError(f"triton join_and_mix: {count} blocks, expected at most {capacity - opens_block}")
    out = torch.empty(Q, B, T, D, dtype=y.dtype, device=y.device)
    if B == 0:
        return list(out.unbind(0))
    (same, block_t), (sum_, partial_t) = _by_token(blocks), _by_token(partial)
    if same is not blocks or sum_ is not partial:
        raise InputError("triton join_and_mix: strided blocks or running sum, expected tokens one distance apart")
    as_they_lie = all(t is None or t.is_contiguous() for t in (rejected, queries, *norm_weights))
    rejected = None if rejected is None else rejected.contiguous()
    norm_weights = [w.contiguous() for w in norm_weights]
    hopper = _hopper(y.device)
    most = _FEW_TO_JOIN if T == 1 else _FEW
    few = hopper is not None and most >= N and D <= 8192
    if not few or T > 1 or state[0].stride() != (D, 1):
        y, state, weight, rejected = rolling_short_conv(y, state, weight, rejected), None, None, None
    y, queries = y.contiguous(), queries.contiguous()
    rest = blocks, partial, count, queries, norm_weights, out, eps, block_t, partial_t, opens_block, ends_layer
    if few:
        # Where no kernel just in front of this one writes anything but y: in a graph, and without copies.
        early = state is not None and as_they_lie and torch.cuda.is_current_stream_capturing()
        _cluster(hopper, y, state, weight, rejected, *rest, early)
    elif hopper is None or not _bursts(hopper, y, *rest):
        _programs(y, *rest)
    return list(out.unbind(0))
