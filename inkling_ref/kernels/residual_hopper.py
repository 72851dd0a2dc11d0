"""The kernels on the depth state for Hopper GPUs, in Gluon: with layouts and shared memory by hand.

Both forms look at all sources of a token at once: from every source and query one sum of x q, from every source one
of x x; then one exchange of all these sums, the softmax, the mixtures, and a second exchange for their norms. What
`kernels.residual` does in n steps, each with its own exchange, takes two here.

- `mix_bursts`, for many tokens: a token's sources, adjacent in memory (83 KB in 16 bits), are copied to shared memory
  in one burst and read from there twice, source by source. Two programs a multiprocessor, each walking over tokens,
  take turns: while one waits for its burst, the other computes. Where y joins the running sum, it comes with the burst.
- `mix_cluster`, for few: a cluster of 8 multiprocessors shares the channels of a token, which one alone could not
  read fast enough; its sums are exchanged through distributed shared memory. For decoding it also holds what stands
  between two sublayers: the short convolution with its rolling state, and the running sum. There only y is new: the
  sums of all other sources are exchanged while the kernel in front of this one still runs (`early`).
"""

# ruff: noqa: RUF005, RET505 (Triton joins tuples with +, does not know *, and wants an else after a return)

from typing import no_type_check

import triton
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy

_async_load = getattr(async_copy, "async_load", async_copy.async_copy_global_to_shared)  # its name from Triton 3.7 on


@triton.constexpr_function
def _halved(V, least=32):
    """PTX of the sums of a<V> over a warp; and, for each that a lane then holds, PTX that puts its number into `far`.

    By halving: in each of five steps a lane sends half of its values to a partner and keeps the other half, so that V
    values take about V + 3 shuffles, where a butterfly for each would take 5 V. Of the lanes that hold the same sum
    `mine` becomes 1 in the first, and in those nearer than `least` to it.
    """
    code, steps, count = [], [], V
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
    owned = []
    for i in range(count):
        own = [f"mov.u32 far, {i};", "mov.u32 mine, 1;"]  # the steps backwards
        for distance, before, half in reversed(steps):
            own += [f"and.b32 u, lane, {distance};", "setp.ne.u32 p, u, 0;", f"add.u32 u, far, {half};"]
            if distance >= least:
                own += [f"setp.ge.and.u32 q, u, {before}, p;", "selp.u32 mine, 0, mine, q;"]
            own += [f"setp.lt.and.u32 p, u, {before}, p;", "selp.u32 far, u, far, p;"]
        owned.append(own)
    return code, owned


@triton.constexpr_function
def _registers(V):
    return [
        ".reg .pred p, q;",
        ".reg .b32 lane, warp, rank, at, to, far, bar, mine, u;",
        f".reg .f32 t, a<{max(V, 4)}>, b<4>;",
        "mov.u32 lane, %laneid;",
        "mov.u32 warp, %tid.x;",
        "shr.u32 warp, warp, 5;",
    ]


@triton.constexpr_function
def sums_ptx(V, WARPS):
    """V inputs of every thread; every thread gets their V sums over a block, through box[warp][value]."""
    halving, owned = _halved(V)
    code = ["{", f".shared .align 16 .b8 box[{WARPS * V * 4}];", *_registers(V), "mov.u32 at, box;"]
    code += [f"mad.lo.u32 to, warp, {V * 4}, at;", "shl.b32 u, lane, 2;", "add.u32 at, at, u;"]
    code += [f"mov.f32 a{v}, ${V + v};" for v in range(V)] + halving
    for i in range(len(owned)):
        code += owned[i] + ["shl.b32 far, far, 2;", "add.u32 u, to, far;", f"st.shared.f32 [u], a{i};"]
    code.append("bar.sync 0;")
    for start in range(0, V, 32):
        width = min(32, V - start)
        code += [f"setp.lt.u32 p, lane, {width};", "mov.f32 a0, 0f00000000;"]
        for k in range(WARPS):
            code += ["mov.f32 t, 0f00000000;", f"@p ld.shared.f32 t, [at + {(k * V + start) * 4}];"]
            code.append("add.f32 a0, a0, t;")
        code += [f"shfl.sync.idx.b32 ${start + v}, a0, {v}, 31, -1;" for v in range(width)]
    return "\n".join(code + ["}"])


@triton.constexpr_function
def box_ptx(size):
    """The address of so many bytes of shared memory."""
    return f"{{\n.shared .align 16 .b8 box[{size}];\nmov.u32 $0, box;\n}}"


@triton.constexpr_function
def leave_ptx(V, WARPS):
    """V values, the lane, and the address of a source's sums, where each warp leaves its own, as [value][warp]."""
    halving, owned = _halved(V)
    code = ["{", ".reg .pred p;", ".reg .b32 lane, far, mine, u;", f".reg .f32 t, a<{V}>;", f"mov.u32 lane, ${V + 1};"]
    code += [f"mov.f32 a{v}, ${v + 1};" for v in range(V)] + halving + owned[0]
    code += [f"mad.lo.u32 u, far, {WARPS * 4}, ${V + 2};", "st.shared.f32 [u], a0;", "mov.u32 $0, 0;", "}"]
    return "\n".join(code)


@triton.constexpr_function
def fetch_ptx(V, WARPS):
    """V sums over all warps, which each left at the address."""
    code = ["{", ".reg .f32 t0, t1, t2, t3;", "bar.sync 0;"]
    for v in range(V):
        for k in range(0, WARPS, 4):
            code.append(f"ld.shared.v4.f32 {{t0, t1, t2, t3}}, [${V} + {(v * WARPS + k) * 4}];")
            code += ["add.f32 t0, t0, t1;", "add.f32 t2, t2, t3;", "add.f32 t0, t0, t2;"]
            code.append(f"mov.f32 ${v}, t0;" if k == 0 else f"add.f32 ${v}, ${v}, t0;")
    return "\n".join(code + ["}"])


@triton.constexpr_function
def _exchanges(old, Q):
    """Values of each exchange of a cluster: sums of the running sum, of the mixtures, and of `old` other sources."""
    return (1 + Q, Q, old * (1 + Q)) if old else (1 + Q, Q)


@triton.constexpr_function
def _apart(CTAS, WARPS):
    """Bytes from value to value in a box: a number of every warp of the cluster, and no conflicts between values."""
    return (CTAS * WARPS + 4) * 4


@triton.constexpr_function
def _box(exchanges, k, CTAS, WARPS):
    """Where the box of exchange k begins, behind a barrier for each."""
    return (len(exchanges) * 8 + 15) // 16 * 16 + sum(exchanges[:k]) * _apart(CTAS, WARPS)


@triton.constexpr_function
def open_ptx(exchanges, CTAS, WARPS):
    """Boxes of a cluster's exchanges, of so many values each, and barriers that count the bytes that arrive in them."""
    code = ["{", f".shared .align 16 .b8 box[{_box(exchanges, len(exchanges), CTAS, WARPS)}];"]
    code += [".reg .pred p;", ".reg .b32 u;", "mov.u32 $0, box;", "mov.u32 u, %tid.x;", "setp.eq.u32 p, u, 0;"]
    for k, V in enumerate(exchanges):
        code.append(f"@p mbarrier.init.shared::cta.b64 [$0 + {8 * k}], 1;")
        code.append(f"@p mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0 + {8 * k}], {CTAS * WARPS * V * 4};")
    code += ["@p fence.mbarrier_init.release.cluster;", "barrier.cluster.arrive.relaxed.aligned;", "}"]
    return "\n".join(code)


@triton.constexpr_function
def send_ptx(exchanges, k, CTAS, WARPS):
    """A warp's sums of V values into box[value][block][warp] of every block of the cluster, without any fence.

    (The fence of a cluster barrier with release waits until all stores of a thread have reached the L2 cache.)
    """
    V = exchanges[k]
    few = V * CTAS <= 32  # then as many lanes hold each sum as there are blocks, and send it to one each
    halving, owned = _halved(V, CTAS if few else 1)
    code = ["{", *_registers(V), "mov.u32 rank, %cluster_ctarank;", f"mad.lo.u32 to, rank, {WARPS}, warp;"]
    code += ["shl.b32 to, to, 2;", "add.u32 to, to, $1;", f"add.u32 to, to, {_box(exchanges, k, CTAS, WARPS)};"]
    code += [f"add.u32 at, $1, {8 * k};"] + [f"mov.f32 a{v}, ${2 + v};" for v in range(V)] + halving
    for i in range(len(owned)):
        code += owned[i] + [f"mad.lo.u32 u, far, {_apart(CTAS, WARPS)}, to;"]
        code += ["setp.eq.u32 p, mine, 0;", f"@p bra sent{i};"]
        if few:
            code.append(f"and.b32 mine, lane, {CTAS - 1};")
        for block in ["mine"] if few else range(CTAS):
            code += [f"mapa.shared::cluster.u32 far, u, {block};", f"mapa.shared::cluster.u32 bar, at, {block};"]
            code.append(f"st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 [far], a{i}, [bar];")
        code.append(f"sent{i}:")
    return "\n".join(code + ["mov.u32 $0, 0;", "}"])


@triton.constexpr_function
def receive_ptx(exchanges, k, CTAS, WARPS):
    """The V sums over the cluster, once all have arrived."""
    V = exchanges[k]
    code = ["{", *_registers(V), f"add.u32 at, ${V}, {_box(exchanges, k, CTAS, WARPS)};", "waiting:"]
    code += [f"mbarrier.try_wait.parity.shared::cta.b64 p, [${V} + {8 * k}], 0;", "@!p bra waiting;"]
    code.append(f"mad.lo.u32 at, lane, {_apart(CTAS, WARPS)}, at;")
    for start in range(0, V, 32):
        width = min(32, V - start)
        code += [f"setp.lt.u32 p, lane, {width};", *(f"mov.f32 b{i}, 0f00000000;" for i in range(4))]
        for i in range(0, CTAS * WARPS, 4):
            code += [f"mov.f32 a{j}, 0f00000000;" for j in range(4)]
            code.append(f"@p ld.shared.v4.f32 {{a0, a1, a2, a3}}, [at + {start * _apart(CTAS, WARPS) + i * 4}];")
            code += [f"add.f32 b{j}, b{j}, a{j};" for j in range(4)]
        code += ["add.f32 b0, b0, b1;", "add.f32 b2, b2, b3;", "add.f32 b0, b0, b2;"]
        code += [f"shfl.sync.idx.b32 ${start + v}, b0, {v}, 31, -1;" for v in range(width)]
    return "\n".join(code + ["}"])


@triton.constexpr_function
def _constraints(V):
    return ",".join(["=&f"] * V + ["f"] * V)


@triton.constexpr_function
def _leave_constraints(V):
    return ",".join(["=r"] + ["f"] * V + ["r"] * 2)


@triton.constexpr_function
def _fetch_constraints(V):
    return ",".join(["=&f"] * V + ["r"])


@triton.constexpr_function
def _send_constraints(V):
    return ",".join(["=&r", "r"] + ["f"] * V)


@triton.constexpr_function
def _receive_constraints(V):
    return ",".join(["=&f"] * V + ["r", "f"])  # what is not read gives the outputs their layout


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
def run_ptx(code: gl.constexpr):
    """Instructions that every thread runs for what they do, not for a result."""
    gl.inline_asm_elementwise(code + " mov.u32 $0, 0;", "=r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _all_sums(values, V: gl.constexpr, WARPS: gl.constexpr):
    """Over a block."""
    ptx: gl.constexpr = sums_ptx(V, WARPS)
    return gl.inline_asm_elementwise(ptx, _constraints(V), values, _floats(V), is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _open(EXCHANGES: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr):
    ptx: gl.constexpr = open_ptx(EXCHANGES, CTAS, WARPS)
    return gl.inline_asm_elementwise(ptx, "=&r", [], gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _send_sums(box, values, EXCHANGES: gl.constexpr, k: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr):
    ptx: gl.constexpr = send_ptx(EXCHANGES, k, CTAS, WARPS)
    given = (box,) + values
    gl.inline_asm_elementwise(ptx, _send_constraints(EXCHANGES[k]), given, gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _received(box, like, EXCHANGES: gl.constexpr, k: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr):
    ptx: gl.constexpr = receive_ptx(EXCHANGES, k, CTAS, WARPS)
    V: gl.constexpr = EXCHANGES[k]
    return gl.inline_asm_elementwise(ptx, _receive_constraints(V), (box, like), _floats(V), is_pure=False, pack=1)


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
def _allocate(pointer, COUNT: gl.constexpr, ROWS: gl.constexpr, CHUNK: gl.constexpr):
    """Room for COUNT times ROWS chunks."""
    dtype: gl.constexpr = pointer.dtype.element_ty
    WIDTH: gl.constexpr = CHUNK // 2 if dtype == gl.int32 else CHUNK
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    memory = ()
    for k in gl.static_range(len(_pieces(ROWS))):
        memory = memory + (gl.allocate_shared_memory(dtype, [COUNT, _pieces(ROWS)[k][1], WIDTH], plain),)
    return memory


@gluon.jit
@no_type_check
def _copy(memory, at, pointer, ROWS: gl.constexpr, COPY: gl.constexpr):
    """Adjacent rows, on their way to shared memory."""
    WIDTH: gl.constexpr = memory[0].shape[2]
    c = gl.arange(0, WIDTH, layout=gl.SliceLayout(0, COPY))
    for k in gl.static_range(len(_pieces(ROWS))):
        row = gl.arange(0, _pieces(ROWS)[k][1], layout=gl.SliceLayout(1, COPY)) + _pieces(ROWS)[k][0]
        _async_load(memory[k].index(at), pointer + row[:, None] * WIDTH + c[None, :])


@gluon.jit
@no_type_check
def _send(
    y, blocks, last, y_ptr, block_ptr, partial_ptr, token, N, n, block_t, partial_t,
    C: gl.constexpr, Y_COPY: gl.constexpr, BLOCK_COPY: gl.constexpr, LAST_COPY: gl.constexpr,
):  # fmt: skip
    """A token's sources on their way to shared memory: n blocks, the running sum, and y where it joins."""
    if token < N:
        _copy(last, 0, partial_ptr + token * partial_t, C, LAST_COPY)
        if y_ptr is not None:
            _copy(y, 0, y_ptr + token * C * y[0].shape[2], C, Y_COPY)
        for j in range(n):
            _copy(blocks, j, block_ptr + token * block_t + j * C * blocks[0].shape[2], C, BLOCK_COPY)
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
def _row(memory, at, C: gl.constexpr, ONE: gl.constexpr, TWO: gl.constexpr):
    """A whole row: of each chunk the even and the odd channel."""
    x = ()
    for c in gl.static_range(C):
        x = x + _pair(memory, at, c, C, ONE, TWO)
    return x


@gluon.jit
@no_type_check
def _rounded(x, dtype: gl.constexpr):
    out = ()
    for k in gl.static_range(len(x)):
        out = out + (x[k].to(dtype).to(gl.float32),)
    return out


@gluon.jit
@no_type_check
def _leave(x, q, lane, to, C: gl.constexpr, Q: gl.constexpr, WARPS: gl.constexpr):
    """The warp's sums of a source, x x and its x q, left at `to`."""
    even, odd = (x[0] * x[0],), (x[1] * x[1],)
    for i in gl.static_range(Q):
        even, odd = even + (x[0] * q[2 * i],), odd + (x[1] * q[2 * i + 1],)
    for c in gl.static_range(1, C):
        new_even, new_odd = (even[0] + x[2 * c] * x[2 * c],), (odd[0] + x[2 * c + 1] * x[2 * c + 1],)
        for i in gl.static_range(Q):
            new_even = new_even + (even[1 + i] + x[2 * c] * q[2 * (c * Q + i)],)
            new_odd = new_odd + (odd[1 + i] + x[2 * c + 1] * q[2 * (c * Q + i) + 1],)
        even, odd = new_even, new_odd
    given = ()
    for i in gl.static_range(Q + 1):
        given = given + (even[i] + odd[i],)
    ptx: gl.constexpr = leave_ptx(Q + 1, WARPS)
    given = given + (lane, to)
    gl.inline_asm_elementwise(ptx, _leave_constraints(Q + 1), given, gl.int32, is_pure=False, pack=1)


@gluon.jit
@no_type_check
def _everywhere(t, WARPS: gl.constexpr, ONE: gl.constexpr):
    """A warp's number for all its lanes."""
    t = gl.expand_dims(t, 1).broadcast_to([WARPS, 32])
    return gl.convert_layout(t.reshape([1, WARPS * 32]), ONE, assert_trivial=True)


@gluon.jit
@no_type_check
def _add(mixed, x, weights, j, C: gl.constexpr, Q: gl.constexpr):
    """A source more in the mixtures; its weights stand in lane j."""
    code: gl.constexpr = "shfl.sync.idx.b32 $0, $1, $2, 31, -1;"
    w, out = (), ()
    for i in gl.static_range(Q):
        w = w + (gl.inline_asm_elementwise(code, "=f,f,r", [weights[i], j], gl.float32, is_pure=False, pack=1),)
    for c in gl.static_range(C):
        for i in gl.static_range(Q):
            even, odd = mixed[2 * (c * Q + i)], mixed[2 * (c * Q + i) + 1]
            out = out + (even + x[2 * c] * w[i], odd + x[2 * c + 1] * w[i])
    return out


@gluon.jit
@no_type_check
def _queries(query_ptr, c: gl.constexpr, o, D: gl.constexpr, Q: gl.constexpr, ONE: gl.constexpr):
    q = ()
    for i in gl.static_range(Q):
        q = q + _halves(gl.load(query_ptr + i * D + c * o.shape[1] + o, eviction_policy="evict_last"), ONE)
    return q


@gluon.jit(do_not_specialize=["N", "n"])
@no_type_check
def mix_bursts(
    y_ptr, block_ptr, partial_ptr, query_ptr, weight_ptrs, sum_ptr, closed_ptr, out_ptr, N, n, opens, ends, block_t,
    partial_t, sum_t, closed_t, source_eps, norm_eps, score_scale,
    D: gl.constexpr, ROWS: gl.constexpr, Q: gl.constexpr, WARPS: gl.constexpr, HOLD: gl.constexpr, NEAR: gl.constexpr,
    ONE: gl.constexpr, TWO: gl.constexpr, Y_COPY: gl.constexpr, BLOCK_COPY: gl.constexpr, LAST_COPY: gl.constexpr,
    QUERY_COPY: gl.constexpr,
):  # fmt: skip
    """n <= ROWS blocks and the running sum of every token; int32 stands for two bfloat16, strides count elements.

    With y_ptr y joins the running sum, which goes to sum_ptr, as a layer `ends` rounded to the dtype of y; where y
    `opens` a block, what the sum was before becomes block n at closed_ptr.

    HOLD: so many chunks of the queries stay in registers, the NEAR next in shared memory; every token reads the others
    again (from a cache). What differs between the sublayers of a model (blocks, opens, ends) is no constant, as each
    variant takes seconds to compile: source by source each warp leaves its sums in shared memory, and then each lane
    looks after one source.
    """
    THREADS: gl.constexpr = 32 * WARPS
    CHUNK: gl.constexpr = 2 * THREADS
    C: gl.constexpr = D // CHUNK  # chunks of a row: a thread has two neighbouring channels of each
    SUMS: gl.constexpr = 4 * WARPS * (Q + 1)  # bytes of a source's
    blocks, last, joining = _allocate(block_ptr, ROWS, C, CHUNK), _allocate(partial_ptr, 1, C, CHUNK), ()
    if y_ptr is not None:
        joining = _allocate(y_ptr, 1, C, CHUNK)
    near = ()
    if NEAR > 0:
        for i in gl.static_range(Q):
            near = near + (_allocate(query_ptr, 1, NEAR, CHUNK),)
            _copy(near[i], 0, query_ptr + i * D + HOLD * CHUNK, NEAR, QUERY_COPY)
    first, step = gl.program_id(0).to(gl.int64), gl.num_programs(0)
    _send(
        joining, blocks, last, y_ptr, block_ptr, partial_ptr, first, N, n, block_t, partial_t, C, Y_COPY, BLOCK_COPY,
        LAST_COPY,
    )  # fmt: skip
    box_code: gl.constexpr = box_ptx(SUMS * (ROWS + 2))
    box = gl.inline_asm_elementwise(box_code, "=r", [], gl.int32, is_pure=False, pack=1)
    o = gl.arange(0, CHUNK, layout=gl.SliceLayout(0, TWO))[None, :]
    thread = gl.arange(0, THREADS, layout=gl.SliceLayout(0, ONE))[None, :]
    lane = thread % 32
    to, source = box + thread // 32 * 4, box + gl.minimum(lane, ROWS + 1) * SUMS
    held = ()
    for c in gl.static_range(HOLD):
        held = held + _queries(query_ptr, c, o, D, Q, ONE)
    zero = gl.zeros([1, THREADS], gl.float32, ONE)
    for token in range(first, N, step):
        q = held
        far = ()
        for c in gl.static_range(HOLD + NEAR, C):
            far = far + _queries(query_ptr, c, o, D, Q, ONE)
        async_copy.wait_group(0)
        for c in gl.static_range(NEAR):
            for i in gl.static_range(Q):
                q = q + _pair(near[i], 0, c, NEAR, ONE, TWO)
        q = q + far
        for j in range(n):
            _leave(_row(blocks, j, C, ONE, TWO), q, lane, to + j * SUMS, C, Q, WARPS)
        count = n
        x = _row(last, 0, C, ONE, TWO)
        if y_ptr is not None:
            if opens:
                closed = _rounded(x, closed_ptr.dtype.element_ty)
                _leave(closed, q, lane, to + n * SUMS, C, Q, WARPS)
                for c in gl.static_range(C):
                    both = _together(closed[2 * c], closed[2 * c + 1], TWO).to(closed_ptr.dtype.element_ty)
                    gl.store(closed_ptr + token * closed_t + n * D + c * CHUNK + o, both)
                count = n + 1
            y = _row(joining, 0, C, ONE, TWO)
            joined = ()
            for k in gl.static_range(2 * C):
                row = y[k] + gl.where(opens, 0.0, x[k])
                joined = joined + (gl.where(ends, row.to(out_ptr.dtype.element_ty).to(gl.float32), row),)
            x = joined
            for c in gl.static_range(C):
                both = _together(x[2 * c], x[2 * c + 1], TWO).to(sum_ptr.dtype.element_ty)
                gl.store(sum_ptr + token * sum_t + c * CHUNK + o, both)
        _leave(x, q, lane, to + count * SUMS, C, Q, WARPS)
        fetch: gl.constexpr = fetch_ptx(Q + 1, WARPS)
        sums = gl.inline_asm_elementwise(
            fetch, _fetch_constraints(Q + 1), [source], _floats(Q + 1), is_pure=False, pack=1
        )  # fmt: skip
        rho = gl.rsqrt(sums[0] / D + source_eps)  # each lane has a source
        weights, totals, mixed = (), (), (zero,) * (2 * C * Q)
        for i in gl.static_range(Q):
            score = gl.where(lane <= count, sums[1 + i] * (rho * score_scale), -1e30)  # to base 2
            p = gl.exp2(score - _everywhere(gl.max(score.reshape([WARPS, 32]), 1), WARPS, ONE))
            weights = weights + (p * rho,)
            totals = totals + (_everywhere(gl.sum(p.reshape([WARPS, 32]), 1), WARPS, ONE),)
        mixed = _add(mixed, x, weights, count, C, Q)
        if y_ptr is not None:  # noqa: SIM102 (the compiler knows this one)
            if opens:
                closed = _rounded(_row(last, 0, C, ONE, TWO), closed_ptr.dtype.element_ty)
                mixed = _add(mixed, closed, weights, n, C, Q)
        for j in range(n):
            mixed = _add(mixed, _row(blocks, j, C, ONE, TWO), weights, j, C, Q)
        _send(
            joining, blocks, last, y_ptr, block_ptr, partial_ptr, token + step, N, n, block_t, partial_t, C, Y_COPY,
            BLOCK_COPY, LAST_COPY,
        )  # fmt: skip
        squares = (zero,) * Q
        for c in gl.static_range(C):
            new = ()
            for i in gl.static_range(Q):
                even, odd = mixed[2 * (c * Q + i)], mixed[2 * (c * Q + i) + 1]
                new = new + (squares[i] + even * even + odd * odd,)
            squares = new
        w = ()  # all before the first store: a load does not overtake a store
        for i in gl.static_range(Q):
            for c in gl.static_range(C):
                w = w + (gl.load(weight_ptrs[i] + c * CHUNK + o, eviction_policy="evict_first"),)
        sums = _all_sums(squares, Q, WARPS)
        for i in gl.static_range(Q):
            inverse = gl.rsqrt(sums[i] / (totals[i] * totals[i]) / D + norm_eps) / totals[i]
            for c in gl.static_range(C):
                y = mixed[2 * (c * Q + i)] * inverse, mixed[2 * (c * Q + i) + 1] * inverse
                y = _together(y[0], y[1], TWO) * w[i * C + c].to(gl.float32)
                gl.store(out_ptr + (i * N + token) * D + c * CHUNK + o, y.to(out_ptr.dtype.element_ty))


@gluon.jit
@no_type_check
def _products(x, q, Q: gl.constexpr, CTAS: gl.constexpr, THREADS: gl.constexpr, VEC: gl.constexpr):
    """A thread's own sums of a source: x x, and its x q."""
    x = x.to(gl.float32)
    own = (_own(x * x, CTAS, THREADS, VEC),)
    for i in gl.static_range(Q):
        own = own + (_own(x * q[i], CTAS, THREADS, VEC),)
    return own


@gluon.jit(do_not_specialize=["N"])
@no_type_check
def mix_cluster(
    y_ptr, state_ptr, rejected_ptr, tap_ptr, block_ptr, partial_ptr, query_ptr, weight_ptrs, out_ptr, N, early, y_t,
    state_b, block_t, partial_t, opens, ends, conv_scale, source_eps, norm_eps, score_scale,
    D: gl.constexpr, n: gl.constexpr, Q: gl.constexpr, K: gl.constexpr, ROWS: gl.constexpr, JOIN: gl.constexpr,
    L: gl.constexpr, CTAS: gl.constexpr, WARPS: gl.constexpr, VEC: gl.constexpr,
):  # fmt: skip
    """n blocks and the running sum; where y `opens` a block, the last of the n is what the sum was before.

    JOIN: y joins the running sum; with a state of ROWS > 0 rows it passes through its convolution first.
    early: the kernel in front writes y alone; all else is read, and summed up, before that has ended.
    """
    THREADS: gl.constexpr = 32 * WARPS
    PART: gl.constexpr = (D + CTAS * VEC - 1) // (CTAS * VEC) * VEC  # a block's channels
    gl.static_assert(PART <= THREADS * VEC)
    EXCHANGES: gl.constexpr = _exchanges(n, Q)
    box = _open(EXCHANGES, CTAS, WARPS)
    token = gl.program_id(0).to(gl.int64)
    block = gl.arange(0, CTAS, layout=gl.SliceLayout(1, L))[:, None]
    c = gl.arange(0, THREADS * VEC, layout=gl.SliceLayout(0, L))[None, :]
    o = block * PART + c
    live = (c < PART) & (o < D)
    if not early:
        run_ptx("griddepcontrol.wait;")
    q, w, taps = (), (), ()
    for i in gl.static_range(Q):
        q = q + (gl.load(query_ptr + i * D + o, mask=live, other=0.0).to(gl.float32),)
        w = w + (gl.load(weight_ptrs[i] + o, mask=live, other=0.0),)
    if ROWS > 0:
        for j in gl.static_range(K):
            taps = taps + (gl.load(tap_ptr + j * D + o, mask=live, other=0.0).to(gl.float32) * conv_scale,)
    x = ()  # past the L1 cache, where an older kernel's reading may stand
    for j in gl.static_range(n):
        there = live & (opens == 0) if JOIN and j == n - 1 else live
        at = block_ptr + token * block_t + j * D + o
        x = x + (gl.load(at, mask=there, other=0.0, cache_modifier=".cg"),)
    last = gl.load(partial_ptr + token * partial_t + o, mask=live, other=0.0, cache_modifier=".cg")
    past, rows = gl.zeros([CTAS, THREADS * VEC], gl.float32, L), ()  # to which the newest y is added
    if ROWS > 0:
        rejected = 0
        if rejected_ptr is not None:
            rejected = gl.load(rejected_ptr + token, cache_modifier=".cg").to(gl.int32)
        state = state_ptr + token * state_b + o
        for r in gl.static_range(ROWS):
            old = live & (r >= rejected)
            rows = rows + (gl.load(state + (r - rejected) * D, mask=old, other=0.0, cache_modifier=".cg"),)
        for j in gl.static_range(1, K):
            past += rows[ROWS - j].to(gl.float32) * taps[j]
    if JOIN:
        if n > 0:
            closed = last.to(block_ptr.dtype.element_ty)
            x = x[: n - 1] + (gl.where(opens, closed, x[n - 1]),)
        past += gl.where(opens, 0.0, last.to(gl.float32))
    own = ()
    for j in gl.static_range(n):
        own = own + _products(x[j], q, Q, CTAS, THREADS, VEC)
    run_ptx("barrier.cluster.wait.acquire.aligned;")  # the other blocks have opened their boxes
    if n > 0:
        _send_sums(box, own, EXCHANGES, 2, CTAS, WARPS)
    run_ptx("griddepcontrol.wait; griddepcontrol.launch_dependents;")
    if JOIN:
        current = gl.load(y_ptr + token * y_t + o, mask=live, other=0.0)
        y = current.to(gl.float32)
        if ROWS > 0:
            y *= taps[0] + conv_scale
        y += past
        last = gl.where(ends, y.to(out_ptr.dtype.element_ty).to(gl.float32), y)
    own = _products(last, q, Q, CTAS, THREADS, VEC)
    _send_sums(box, own, EXCHANGES, 0, CTAS, WARPS)
    if JOIN:
        rows = rows + (current,)
        for r in gl.static_range(ROWS):
            gl.store(state + r * D, rows[r + 1], mask=live)
        if n > 0:
            gl.store(block_ptr + token * block_t + (n - 1) * D + o, closed, mask=live & opens)
        gl.store(partial_ptr + token * partial_t + o, last, mask=live)
    x = x + (last,)
    sums = ()
    if n > 0:
        sums = _received(box, own[0], EXCHANGES, 2, CTAS, WARPS)
    sums = sums + _received(box, own[0], EXCHANGES, 0, CTAS, WARPS)
    weights, totals = _weights(sums, source_eps, score_scale, D, n + 1, Q)
    mixed, own = (), ()
    for i in gl.static_range(Q):
        y = gl.zeros([CTAS, THREADS * VEC], gl.float32, L)
        for j in gl.static_range(n + 1):
            y += x[j].to(gl.float32) * _wide(weights[i * (n + 1) + j], CTAS, THREADS, VEC, L)
        mixed, own = mixed + (y,), own + (_own(y * y, CTAS, THREADS, VEC),)
    _send_sums(box, own, EXCHANGES, 1, CTAS, WARPS)
    sums = _received(box, own[0], EXCHANGES, 1, CTAS, WARPS)
    for i in gl.static_range(Q):
        inverse = gl.rsqrt(sums[i] / (totals[i] * totals[i]) / D + norm_eps) / totals[i]
        y = mixed[i] * _wide(inverse, CTAS, THREADS, VEC, L) * w[i].to(gl.float32)
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
