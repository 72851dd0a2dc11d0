"""The kernels on the depth state for Hopper GPUs, in Gluon: with layouts and shared memory by hand.

Both forms look at all sources of a token at once: from every source and query one sum of x q, from every source one
of x x; then one exchange of all these sums, the softmax, the mixtures, and a second exchange for their norms. What
`kernels.residual` does in n steps, each with its own exchange, takes two here.

- `mix_bursts`, for many tokens: a token's sources, adjacent in memory (83 KB in 16 bits), are copied to shared memory
  in one burst and read from there twice. Two programs a multiprocessor, each walking over tokens, take turns: while
  one waits for its burst, the other computes. Where y joins the running sum, it comes with the burst, both readings
  add it up, and the second writes it back.
- `mix_cluster`, for few: a cluster of 8 multiprocessors shares the channels of a token, which one alone could not
  read fast enough; its sums are exchanged through distributed shared memory. For decoding it also holds what stands
  between two sublayers: the short convolution with its rolling state, and the running sum.
"""

# ruff: noqa: RUF005, RET505 (Triton joins tuples with +, does not know *, and wants an else after a return)

from typing import no_type_check

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

_async_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)  # its name from Triton 3.7 on


@triton.constexpr_function
def sums_ptx(V, CTAS, WARPS, first):
    """V inputs of every thread; every thread gets their V sums over a cluster of CTAS blocks of WARPS warps.

    Within a warp by halving: in each of five steps a lane sends half of its values to a partner and keeps the other
    half, so that V values take about V + 3 shuffles, where a butterfly for each would take 5 V. Then a lane owns the
    warp's sum of one value (or of one in 32), and writes it into box[block][warp][value] of every block.
    """
    code = [
        "{",
        ".reg .pred p;",
        ".reg .b32 lane, warp, rank, at, to, far, u;",
        f".reg .f32 t, a<{V}>;",
        f".shared .align 16 .b8 box[{CTAS * WARPS * V * 4}];",
        "mov.u32 lane, %laneid;",
        "mov.u32 warp, %tid.x;",
        "shr.u32 warp, warp, 5;",
        "mov.u32 at, box;",
        f"mad.lo.u32 to, warp, {V * 4}, at;",
        "shl.b32 u, lane, 2;",
        "add.u32 at, at, u;",
    ]
    code += [f"mov.f32 a{v}, ${V + v};" for v in range(V)]
    steps, count = [], V
    for distance in (16, 8, 4, 2, 1):
        half = (count + 1) // 2
        steps.append((distance, count, half))
        code += [f"and.b32 u, lane, {distance};", "setp.ne.u32 p, u, 0;"]
        for i in range(half):
            if half + i < count:
                code += [f"selp.f32 t, a{i}, a{half + i}, p;", f"selp.f32 a{i}, a{half + i}, a{i}, p;"]
            else:  # no partner value: both lanes sum this one
                code.append(f"mov.f32 t, a{i};")
            code += [f"shfl.sync.bfly.b32 t, t, {distance}, 31, -1;", f"add.f32 a{i}, a{i}, t;"]
        count = half
    if CTAS > 1:
        code += ["mov.u32 rank, %cluster_ctarank;", f"mad.lo.u32 to, rank, {WARPS * V * 4}, to;"]
        if first:  # the other blocks of the cluster have started
            code.append("barrier.cluster.wait.acquire.aligned;")
    for i in range(count):
        code.append(f"mov.u32 far, {i};")  # which value this lane owns: the steps backwards
        for k in range(5):
            step = steps[4 - k]
            code += [f"and.b32 u, lane, {step[0]};", "setp.ne.u32 p, u, 0;", f"add.u32 u, far, {step[2]};"]
            code += [f"setp.lt.and.u32 p, u, {step[1]}, p;", "selp.u32 far, u, far, p;"]
        code += ["shl.b32 far, far, 2;", "add.u32 u, to, far;"]
        if CTAS == 1:
            code.append(f"st.shared.f32 [u], a{i};")
        else:
            for block in range(CTAS):
                code += [f"mapa.shared::cluster.u32 far, u, {block};", f"st.shared::cluster.f32 [far], a{i};"]
    if CTAS > 1:
        code += ["barrier.cluster.arrive.release.aligned;", "barrier.cluster.wait.acquire.aligned;"]
    else:
        code.append("bar.sync 0;")
    for start in range(0, V, 32):
        width = min(32, V - start)
        code += [f"setp.lt.u32 p, lane, {width};", "mov.f32 a0, 0f00000000;"]
        for k in range(CTAS * WARPS):
            code += ["mov.f32 t, 0f00000000;", f"@p ld.shared.f32 t, [at + {(k * V + start) * 4}];"]
            code.append("add.f32 a0, a0, t;")
        code += [f"shfl.sync.idx.b32 ${start + v}, a0, {v}, 31, -1;" for v in range(width)]
    return "\n".join(code + ["}"])


@triton.constexpr_function
def _constraints(V):
    return ",".join(["=&f"] * V + ["f"] * V)


@triton.constexpr_function
def _floats(V):
    return (gl.float32,) * V


@triton.constexpr_function
def _pieces(rows):
    """Powers of two (all that a tensor may have) that add up to `rows`, as (first row, rows)."""
    out, first = [], 0
    while first < rows:
        out.append((first, 1 << ((rows - first).bit_length() - 1)))
        first += out[-1][1]
    return tuple(out)


@triton.constexpr_function
def _place(rows, row):
    """The piece in which a row stands, and where."""
    k = max(k for k in range(len(_pieces(rows))) if _pieces(rows)[k][0] <= row)
    return k, row - _pieces(rows)[k][0]


@gluon.jit
@no_type_check
def _all_sums(values, V: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, FIRST: gl.constexpr):
    ptx: gl.constexpr = sums_ptx(V, CTAS, WARPS, FIRST)
    return gl.inline_asm_elementwise(ptx, _constraints(V), values, _floats(V), is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _own(x, CTAS: gl.constexpr, THREADS: gl.constexpr, VEC: gl.constexpr):
    """A thread's own sum over its channels."""
    return gl.sum(x.reshape([CTAS, THREADS, VEC]), 2)


@gluon.jit
@no_type_check
def _wide(t, CTAS: gl.constexpr, THREADS: gl.constexpr, VEC: gl.constexpr, L: gl.constexpr):
    """A thread's number for all its channels."""
    t = gl.expand_dims(t, 2).broadcast_to([CTAS, THREADS, VEC])
    return gl.convert_layout(t.reshape([CTAS, THREADS * VEC]), L, assert_trivial=True)


@gluon.jit
@no_type_check
def _weights(sums, source_eps, score_scale, D: gl.constexpr, n: gl.constexpr, Q: gl.constexpr):
    """For each query: e^(s_j) rho_j of every source, and the sum of e^(s_j). Sums: x x of a source, then its x q."""
    weights, totals, rho = (), (), ()
    for j in gl.static_range(n):
        rho = rho + (gl.rsqrt(sums[j * (Q + 1)] / D + source_eps),)
    for i in gl.static_range(Q):
        score = ()
        for j in gl.static_range(n):
            score = score + (sums[j * (Q + 1) + 1 + i] * (rho[j] * score_scale),)  # to base 2
        top = score[0]
        for j in gl.static_range(1, n):
            top = gl.maximum(top, score[j])
        total = top * 0.0
        for j in gl.static_range(n):
            p = gl.exp2(score[j] - top)
            total += p
            weights = weights + (p * rho[j],)
        totals = totals + (total,)
    return weights, totals


@gluon.jit
@no_type_check
def _allocate(pointer, ROWS: gl.constexpr, CHUNK: gl.constexpr):
    dtype: gl.constexpr = pointer.dtype.element_ty
    WIDTH: gl.constexpr = CHUNK // 2 if dtype == gl.int32 else CHUNK
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    memory = ()
    for k in gl.static_range(len(_pieces(ROWS))):
        memory = memory + (gl.allocate_shared_memory(dtype, [1, _pieces(ROWS)[k][1], WIDTH], plain),)
    return memory


@gluon.jit
@no_type_check
def _copy(memory, pointer, ROWS: gl.constexpr, COPY: gl.constexpr):
    """Adjacent rows, on their way to shared memory."""
    WIDTH: gl.constexpr = memory[0].shape[2]
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    for k in gl.static_range(len(_pieces(ROWS))):
        row = gl.arange(0, _pieces(ROWS)[k][1], layout=gl.SliceLayout(1, COPY)) + _pieces(ROWS)[k][0]
        _async_load(memory[k].index(0), pointer + row[:, None] * WIDTH + c[None, :])


@gluon.jit
@no_type_check
def _send(
    y, blocks, last, y_ptr, block_ptr, partial_ptr, token, N, block_t, partial_t,
    n: gl.constexpr, C: gl.constexpr, Y_COPY: gl.constexpr, BLOCK_COPY: gl.constexpr, LAST_COPY: gl.constexpr,
):  # fmt: skip
    """A token's sources on their way to shared memory: n blocks, the running sum, and y where it joins."""
    if token < N:
        if n > 0:
            _copy(blocks, block_ptr + token * block_t, n * C, BLOCK_COPY)
        _copy(last, partial_ptr + token * partial_t, C, LAST_COPY)
        if y_ptr is not None:
            _copy(y, y_ptr + token * C * y[0].shape[2], C, Y_COPY)
    async_copy.commit_group()


@gluon.jit
@no_type_check
def _halves(x, ONE: gl.constexpr):
    """Even and odd channels, each a thread's own."""
    even, odd = gl.split(x.to(gl.float32).reshape([1, x.shape[1] // 2, 2]))
    return gl.convert_layout(even, ONE, assert_trivial=True), gl.convert_layout(odd, ONE, assert_trivial=True)


@gluon.jit
@no_type_check
def _pair(memory, at, row: gl.constexpr, ROWS: gl.constexpr, ONE: gl.constexpr, TWO: gl.constexpr):
    """Two channels of each thread, from one chunk of a row."""
    place: gl.constexpr = _place(ROWS, row)
    chunk = memory[place[0]].index(at).slice(place[1], 1)
    if chunk.dtype == gl.int32:  # a word is two bfloat16, and a bfloat16 the upper half of a float32
        word = chunk.load(ONE)
        return (word << 16).to(gl.float32, bitcast=True), (word & -65536).to(gl.float32, bitcast=True)
    else:
        return _halves(chunk.load(TWO), ONE)


@gluon.jit
@no_type_check
def _together(even, odd, TWO: gl.constexpr):
    """The opposite of `_halves`."""
    return gl.convert_layout(gl.join(even, odd).reshape([1, 2 * even.shape[1]]), TWO, assert_trivial=True)


@gluon.jit
@no_type_check
def _sources(
    y, blocks, last, at, c: gl.constexpr, C: gl.constexpr, n: gl.constexpr, JOIN: gl.constexpr, DTYPE: gl.constexpr,
    CLOSED: gl.constexpr, ONE: gl.constexpr, TWO: gl.constexpr,
):  # fmt: skip
    """A chunk of every source, even and odd channels in turn; where y joins, of the sources after that.

    CLOSED: dtype of the block that closes, None where none does; DTYPE: that to which a layer's end rounds, or None.
    """
    x = ()
    for j in gl.static_range(n):
        x = x + _pair(blocks, at, j * C + c, n * C, ONE, TWO)
    even, odd = _pair(last, at, c, C, ONE, TWO)
    if JOIN:
        y_even, y_odd = _pair(y, at, c, C, ONE, TWO)
        if CLOSED is not None:
            x = x + (even.to(CLOSED).to(gl.float32), odd.to(CLOSED).to(gl.float32))
            even, odd = y_even, y_odd
        else:
            even, odd = even + y_even, odd + y_odd
        if DTYPE is not None:
            even, odd = even.to(DTYPE).to(gl.float32), odd.to(DTYPE).to(gl.float32)
    return x + (even, odd)


@gluon.jit
@no_type_check
def _queries(query_ptr, c: gl.constexpr, o, D: gl.constexpr, Q: gl.constexpr, ONE: gl.constexpr):
    q = ()
    for i in gl.static_range(Q):
        q = q + _halves(gl.load(query_ptr + i * D + c * o.shape[1] + o, eviction_policy="evict_last"), ONE)
    return q


@gluon.jit
@no_type_check
def mix_bursts(
    y_ptr, block_ptr, partial_ptr, query_ptr, weight_ptrs, sum_ptr, closed_ptr, out_ptr, N, block_t, partial_t, sum_t,
    closed_t, source_eps, norm_eps, score_scale,
    D: gl.constexpr, n: gl.constexpr, Q: gl.constexpr, ENDS: gl.constexpr, WARPS: gl.constexpr, HOLD: gl.constexpr,
    NEAR: gl.constexpr, ONE: gl.constexpr, TWO: gl.constexpr, Y_COPY: gl.constexpr, BLOCK_COPY: gl.constexpr,
    LAST_COPY: gl.constexpr, QUERY_COPY: gl.constexpr,
):  # fmt: skip
    """n blocks and the running sum of every token; int32 stands for two bfloat16, strides count elements of the type.

    With y_ptr y joins the running sum, which goes to sum_ptr; with closed_ptr what it was before becomes a block there.

    HOLD: so many chunks of the queries stay in registers, the NEAR next in shared memory; every token reads the others
    again (from a cache).
    """
    THREADS: gl.constexpr = 32 * WARPS
    CHUNK: gl.constexpr = 2 * THREADS
    C: gl.constexpr = D // CHUNK  # chunks of a row: a thread has two neighbouring channels of each
    JOIN: gl.constexpr = y_ptr is not None
    CLOSED: gl.constexpr = None if closed_ptr is None else closed_ptr.dtype.element_ty
    DTYPE: gl.constexpr = out_ptr.dtype.element_ty if ENDS else None
    SOURCES: gl.constexpr = n + 1 if closed_ptr is None else n + 2
    V: gl.constexpr = SOURCES * (Q + 1)
    blocks, last, joining = _allocate(block_ptr, n * C, CHUNK), _allocate(partial_ptr, C, CHUNK), ()
    if JOIN:
        joining = _allocate(y_ptr, C, CHUNK)
    near = ()
    if NEAR > 0:
        for i in gl.static_range(Q):
            near = near + (_allocate(query_ptr, NEAR, CHUNK),)
            _copy(near[i], query_ptr + i * D + HOLD * CHUNK, NEAR, QUERY_COPY)
    first, step = gl.program_id(0).to(gl.int64), gl.num_programs(0)
    _send(
        joining, blocks, last, y_ptr, block_ptr, partial_ptr, first, N, block_t, partial_t, n, C, Y_COPY, BLOCK_COPY,
        LAST_COPY,
    )  # fmt: skip
    o = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TWO))[None, :]
    q = ()
    for c in gl.static_range(HOLD):
        q = q + _queries(query_ptr, c, o, D, Q, ONE)
    zero = gl.zeros([1, THREADS], gl.float32, ONE)
    for token in range(first, N, step):
        q_next = ()
        if HOLD + NEAR == 0:
            q_next = _queries(query_ptr, 0, o, D, Q, ONE)
        async_copy.wait_group(0)
        parts = (zero,) * V
        for c in gl.static_range(C):
            if c < HOLD:
                q_c = q[2 * Q * c : 2 * Q * (c + 1)]
            elif c < HOLD + NEAR:
                q_c = ()
                for i in gl.static_range(Q):
                    q_c = q_c + _pair(near[i], 0, c - HOLD, NEAR, ONE, TWO)
            else:
                q_c = q_next
            if c + 1 >= HOLD + NEAR and c + 1 < C:  # read one chunk ahead of their use
                q_next = _queries(query_ptr, c + 1, o, D, Q, ONE)
            x = _sources(joining, blocks, last, 0, c, C, n, JOIN, DTYPE, CLOSED, ONE, TWO)
            new = ()
            for j in gl.static_range(SOURCES):
                even, odd = x[2 * j], x[2 * j + 1]
                new = new + (parts[j * (Q + 1)] + even * even + odd * odd,)
                for i in gl.static_range(Q):
                    new = new + (parts[j * (Q + 1) + 1 + i] + even * q_c[2 * i] + odd * q_c[2 * i + 1],)
            parts = new
        sums = _all_sums(parts, V, 1, WARPS, True)
        weights, totals = _weights(sums, source_eps, score_scale, D, SOURCES, Q)
        # The second reading: hidden from the compiler, which would keep all sources in registers instead.
        again = gl.inline_asm_elementwise("mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)
        mixed, squares = (), (zero,) * Q
        for c in gl.static_range(C):
            x = _sources(joining, blocks, last, again, c, C, n, JOIN, DTYPE, CLOSED, ONE, TWO)
            y = (zero,) * (2 * Q)
            for j in gl.static_range(SOURCES):
                new = ()
                for i in gl.static_range(Q):
                    weight = weights[i * SOURCES + j]
                    new = new + (y[2 * i] + x[2 * j] * weight, y[2 * i + 1] + x[2 * j + 1] * weight)
                y = new
            if JOIN:
                joined = _together(x[2 * SOURCES - 2], x[2 * SOURCES - 1], TWO)
                gl.store(sum_ptr + token * sum_t + c * CHUNK + o, joined.to(sum_ptr.dtype.element_ty))
            if CLOSED is not None:
                closed = _together(x[2 * n], x[2 * n + 1], TWO)
                gl.store(closed_ptr + token * closed_t + c * CHUNK + o, closed.to(CLOSED))
            new = ()
            for i in gl.static_range(Q):
                new = new + (squares[i] + y[2 * i] * y[2 * i] + y[2 * i + 1] * y[2 * i + 1],)
            squares = new
            mixed = mixed + y
        _send(
            joining, blocks, last, y_ptr, block_ptr, partial_ptr, token + step, N, block_t, partial_t, n, C, Y_COPY,
            BLOCK_COPY, LAST_COPY,
        )  # fmt: skip
        w = ()  # all before the first store: a load does not overtake a store
        for i in gl.static_range(Q):
            for c in gl.static_range(C):
                w = w + (gl.load(weight_ptrs[i] + c * CHUNK + o, eviction_policy="evict_first"),)
        sums = _all_sums(squares, Q, 1, WARPS, False)
        for i in gl.static_range(Q):
            inverse = gl.rsqrt(sums[i] / (totals[i] * totals[i]) / D + norm_eps) / totals[i]
            for c in gl.static_range(C):
                y = mixed[2 * (c * Q + i)] * inverse, mixed[2 * (c * Q + i) + 1] * inverse
                y = _together(y[0], y[1], TWO) * w[i * C + c].to(gl.float32)
                gl.store(out_ptr + (i * N + token) * D + c * CHUNK + o, y.to(out_ptr.dtype.element_ty))


@gluon.jit
@no_type_check
def _ptx(code: gl.constexpr):
    gl.inline_asm_elementwise(code + " mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _prefetch(pointers):
    """A sector for each thread, into the L2 cache."""
    code: gl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    gl.inline_asm_elementwise(code, "=r,l", [pointers], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def mix_cluster(
    y_ptr, state_ptr, rejected_ptr, tap_ptr, block_ptr, partial_ptr, query_ptr, weight_ptrs, out_ptr, N, y_t, state_b,
    block_t, partial_t, conv_scale, source_eps, norm_eps, score_scale,
    D: gl.constexpr, n: gl.constexpr, Q: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, JOIN: gl.constexpr,
    OPENS: gl.constexpr, ENDS: gl.constexpr, L: gl.constexpr, ONE: gl.constexpr, CTAS: gl.constexpr,
    WARPS: gl.constexpr, VEC: gl.constexpr,
):  # fmt: skip
    """JOIN: y joins the running sum; with a state of ROWS > 0 rows it passes through its convolution first."""
    THREADS: gl.constexpr = 32 * WARPS
    PART: gl.constexpr = (D + CTAS * VEC - 1) // (CTAS * VEC) * VEC  # a block's channels
    gl.static_assert(PART <= THREADS * VEC)
    _ptx("barrier.cluster.arrive.relaxed.aligned;")
    token = gl.program_id(0).to(gl.int64)
    block = gl.arange(0, CTAS, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, THREADS * VEC, layout=gl.SliceLayout(0, L))[None, :]
    o = block * PART + c
    live = (c < PART) & (o < D)
    # Launched before the kernel in front of this one has ended: until then the parameters come nearer.
    spot = gl.arange(0, CTAS, layout=gl.SliceLayout(1, ONE))[:, None] * PART
    spot += gl.arange(0, THREADS, layout=gl.SliceLayout(0, ONE))[None, :] * VEC
    spot = gl.minimum(spot, D - 1)
    for i in gl.static_range(Q):
        _prefetch(query_ptr + i * D + spot)
        _prefetch(weight_ptrs[i] + spot)
    if ROWS > 0:
        for j in gl.static_range(K):
            _prefetch(tap_ptr + j * D + spot)
    _ptx("griddepcontrol.wait; griddepcontrol.launch_dependents;")
    q, w, taps = (), (), ()
    for i in gl.static_range(Q):
        q = q + (gl.load(query_ptr + i * D + o, mask=live, other=0.0).to(gl.float32),)
        w = w + (gl.load(weight_ptrs[i] + o, mask=live, other=0.0).to(gl.float32),)
    if ROWS > 0:
        for j in gl.static_range(K):
            taps = taps + (gl.load(tap_ptr + j * D + o, mask=live, other=0.0).to(gl.float32) * conv_scale,)
    x = ()
    for j in gl.static_range(n):
        x = x + (gl.load(block_ptr + token * block_t + j * D + o, mask=live, other=0.0),)
    last = gl.load(partial_ptr + token * partial_t + o, mask=live, other=0.0)
    if JOIN:
        current = gl.load(y_ptr + token * y_t + o, mask=live, other=0.0)
        y = current.to(gl.float32)
        if ROWS > 0:
            rejected = 0
            if rejected_ptr is not None:
                rejected = gl.load(rejected_ptr + token).to(gl.int32)
            state = state_ptr + token * state_b + o
            rows = ()
            for r in gl.static_range(ROWS):
                rows = rows + (gl.load(state + (r - rejected) * D, mask=live & (r >= rejected), other=0.0),)
            rows = rows + (current,)
            y = y * (taps[0] + conv_scale)
            for j in gl.static_range(1, K):
                y += rows[ROWS - j].to(gl.float32) * taps[j]
            for r in gl.static_range(ROWS):
                gl.store(state + r * D, rows[r + 1], mask=live)
        if OPENS:
            last = last.to(block_ptr.dtype.element_ty)
            gl.store(block_ptr + token * block_t + n * D + o, last, mask=live)
            x = x + (last,)
        else:
            y += last.to(gl.float32)
        if ENDS:
            y = y.to(out_ptr.dtype.element_ty).to(gl.float32)
        gl.store(partial_ptr + token * partial_t + o, y, mask=live)
        last = y
    x = x + (last,)
    own = ()
    for j in gl.static_range(len(x)):
        x_j = x[j].to(gl.float32)
        own = own + (_own(x_j * x_j, CTAS, THREADS, VEC),)
        for i in gl.static_range(Q):
            own = own + (_own(x_j * q[i], CTAS, THREADS, VEC),)
    weights, totals = _weights(_all_sums(own, len(own), CTAS, WARPS, True), source_eps, score_scale, D, len(x), Q)
    mixed, own = (), ()
    for i in gl.static_range(Q):
        y = gl.zeros([CTAS, THREADS * VEC], gl.float32, L)
        for j in gl.static_range(len(x)):
            y += x[j].to(gl.float32) * _wide(weights[i * len(x) + j], CTAS, THREADS, VEC, L)
        mixed, own = mixed + (y,), own + (_own(y * y, CTAS, THREADS, VEC),)
    sums = _all_sums(own, Q, CTAS, WARPS, False)
    for i in gl.static_range(Q):
        inverse = gl.rsqrt(sums[i] / (totals[i] * totals[i]) / D + norm_eps) / totals[i]
        y = mixed[i] * _wide(inverse, CTAS, THREADS, VEC, L) * w[i]
        gl.store(out_ptr + (i * N + token) * D + o, y.to(out_ptr.dtype.element_ty), mask=live)


def copy_layout(width: int, itemsize: int, warps: int) -> gl.BlockedLayout:
    """Rows of `width` elements, 16 bytes a thread."""
    vec = 16 // itemsize
    across = min(width // (32 * vec), warps)
    return gl.BlockedLayout([1, vec], [1, 32], [warps // across, across], [1, 0])


def layout(blocks: int, warps: int, vec: int) -> gl.BlockedLayout:
    """[blocks, 32 warps vec] elements: a row for each block of a cluster, `vec` neighbours for each thread."""
    cluster = [[1 << i, 0] for i in range(blocks.bit_length() - 1)]
    return gl.BlockedLayout([1, vec], [1, 32], [1, warps], [1, 0], cga_layout=cluster)
