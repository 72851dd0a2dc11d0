"""Contract of the kernels on the depth state."""

import re

import pytest
import torch
import triton
from helpers import relative_rms
from kernel_contract import DEVICE, DTYPES, bound, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (fixture)
from ptx import emulate, floats

from inkling_ref import fused, residual
from inkling_ref.errors import InputError
from inkling_ref.kernels import residual as residual_kernel
from inkling_ref.kernels import residual_hopper
from inkling_ref.kernels.projections import project

pytestmark = needs_device

MANY: int = 67 if DEVICE == "cuda" else 5  # tokens a row; on Hopper GPUs two such rows go in bursts


def holds(actual, eager, exact, dtype):
    """Every output within the bound, in its dtype."""
    assert len(actual) == len(eager)
    for a, b, c in zip(actual, eager, exact, strict=True):
        assert a.dtype == dtype
        assert relative_rms(a, c) <= bound(dtype, b, c)


@dtypes
@pytest.mark.parametrize("n", [1, 2, 9], ids="{} sources".format)
@pytest.mark.parametrize("D", [37, 576] if DEVICE == "cpu" else [37, 576, 1024], ids="D {}".format)
@pytest.mark.parametrize("queries", [None, 1, 3], ids=["unmixed", "1 query", "3 queries"])
def test_mix_and_norm(queries, D, n, dtype):
    count = queries or 2
    T = 67 if DEVICE == "cuda" else 1  # there bursts of tokens, and clusters for a few
    sources = placed(3 * torch.randn(2, T, n, D), dtype)
    weights = [placed(torch.randn(D), dtype) for _ in range(count)]
    q = None if queries is None else placed(1.5 * torch.randn(*([count] if count > 1 else []), D), torch.float32)
    wide_q = None if q is None else q.double()
    exact = residual.mix_and_norm(sources.double(), wide_q, [w.double() for w in weights], 1e-5, torch.float64)
    eager = residual.mix_and_norm(sources, q, weights, 1e-5, dtype)
    holds(residual_kernel.mix_and_norm(sources, q, weights, 1e-5, dtype), eager, exact, dtype)
    if T > 1:
        few = residual_kernel.mix_and_norm(sources[:, :2], q, weights, 1e-5, dtype)
        holds(few, [b[:, :2] for b in eager], [c[:, :2] for c in exact], dtype)


def test_strided_tokens():
    sources, q, w = placed(torch.randn(2, 5, 4, 37)), placed(torch.randn(37)), placed(torch.randn(37))
    part = sources[:, 1:3, 1:]
    (expected,) = residual.mix_and_norm(part, q, [w], 1e-5, torch.float32)
    (actual,) = residual_kernel.mix_and_norm(part, q, [w], 1e-5, torch.float32)
    assert relative_rms(actual, expected) < 1e-6


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
@pytest.mark.parametrize("running_sum", ["16 bits", "float32"])
@pytest.mark.parametrize("tokens", [2, 1100] if DEVICE == "cuda" else [2], ids="{} tokens".format)
@pytest.mark.parametrize("queries", [1, 3], ids="{} queries".format)
def test_released_width(queries, tokens, running_sum, dtype):
    """Blocks and running sum where they are, and joined to one tensor (in float32, as the reference model does)."""
    D, wide = 4608, torch.float32 if running_sum == "float32" else dtype
    blocks, partial = placed(torch.randn(1, tokens, 5, D), dtype), placed(torch.randn(1, tokens, D), wide)
    q, w = placed(torch.randn(queries, D), torch.float32), [placed(torch.randn(D), dtype) for _ in range(queries)]
    sources = torch.cat([blocks.to(wide), partial[:, :, None]], dim=2)
    exact = residual.mix_and_norm(sources.double(), q.double(), [u.double() for u in w], 1e-6, torch.float64)
    eager = residual.mix_and_norm(sources, q, w, 1e-6, dtype)
    holds(residual_kernel.mix_and_norm(sources, q, w, 1e-6, dtype), eager, exact, dtype)
    holds(residual_kernel.mix_depth_and_norm(blocks, partial, q, w, 1e-6, dtype), eager, exact, dtype)


@dtypes
@pytest.mark.parametrize(
    ("T", "rows", "rejected", "count", "queries", "opens", "ends"),
    [
        pytest.param(1, 3, None, 2, 1, False, False, id="after attention"),
        pytest.param(1, 3, None, 3, 3, False, True, id="end of a layer, 3 queries"),
        pytest.param(1, 5, [0, 2, 1], 0, 1, True, False, id="first block closes, rows taken back"),
        pytest.param(1, 4, None, 8, 3, True, True, id="9 blocks"),
        pytest.param(3, 6, [3, 0, 1], 2, 1, True, False, id="3 tokens a row"),
        pytest.param(MANY, 3, None, 8, 1, False, False, id="many tokens"),
        pytest.param(MANY, 3, None, 2, 3, True, True, id="many tokens, a block closes, 3 queries"),
        pytest.param(MANY, 4, [1, 0, 1], 0, 1, True, False, id="many tokens, first block closes"),
    ],
)
@pytest.mark.parametrize("D", [37, 576] if DEVICE == "cpu" else [37, 576, 4608], ids="D {}".format)
def test_join_and_mix(D, T, rows, rejected, count, queries, opens, ends, dtype):
    B, K = 3 if rejected else 2, 4
    wide = torch.float32
    blocks = torch.randn(B, T, count + 2, D)
    blocks[:, :, count:] = torch.nan  # not there yet
    given = {
        "y": placed(torch.randn(B, T, D), dtype),
        "state": placed(torch.randn(B, rows, D), dtype),
        "weight": placed(torch.randn(D, 1, K) / 2, wide),
        "blocks": placed(blocks, dtype),
        "partial": placed(torch.randn(B, T, D).to(dtype), wide),
        "queries": placed(torch.randn(*([queries] if queries > 1 else []), D), wide),
    }
    weights = [placed(torch.randn(D), dtype) for _ in range(queries)]
    taken_back = None if rejected is None else torch.tensor(rejected, device=DEVICE)

    def run(op, to=None):
        tensors = {name: t.to(to, copy=True) if to else t.clone() for name, t in given.items()}
        norms = [w.to(to) if to else w for w in weights]
        outputs = op(
            **tensors, count=count, norm_weights=norms, eps=1e-5, opens_block=opens, ends_layer=ends,
            rejected=taken_back,
        )  # fmt: skip
        return outputs, tensors

    exact, exact_after = run(fused.join_and_mix, torch.float64)
    eager, eager_after = run(fused.join_and_mix)
    actual, after = run(residual_kernel.join_and_mix)
    holds(actual, eager, exact, dtype)
    partial = (after["partial"], eager_after["partial"], exact_after["partial"])
    assert relative_rms(partial[0], partial[2]) <= bound(dtype, *partial[1:])
    assert not ends or torch.equal(partial[0], partial[0].to(dtype).float())
    assert torch.equal(after["state"], eager_after["state"])
    assert torch.equal(after["blocks"].nan_to_num(7), eager_after["blocks"].nan_to_num(7))


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize("running_sum", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("how", [{"opens_block": True}, {"ends_layer": True}], ids="-".join)
def test_many_tokens_join_in_bursts(monkeypatch, how, running_sum):
    """More tokens than programs; a row alone and with another has the same bits."""
    if residual_kernel._hopper(torch.device(DEVICE)) is None:
        pytest.skip("a kernel for Hopper GPUs")
    monkeypatch.setattr(residual_kernel, "_programs", None)
    T, D, n, dtype = 301, 4608, 7, torch.bfloat16
    given = [placed(torch.randn(2, *shape), dtype) for shape in ((T, D), (3, D), (T, n + 1, D))]
    given.append(placed(torch.randn(2, T, D), running_sum))
    shared = [placed(torch.randn(*shape), torch.float32) for shape in ((D, 1, 4), (D,), (D,))]

    def run(op, first=0, to=None):
        y, state, blocks, partial = (t[first:].to(to, copy=True) if to else t[first:].clone() for t in given)
        taps, query, norm = (t.to(to) if to else t for t in shared)
        (out,) = op(y, state, taps, blocks, partial, n, query, [norm], 1e-6, **how)
        return out, blocks, partial

    exact, eager = run(fused.join_and_mix, to=torch.float64), run(fused.join_and_mix)
    actual, alone = run(residual_kernel.join_and_mix), run(residual_kernel.join_and_mix, first=1)
    assert all(torch.equal(a[1:], b) for a, b in zip(actual, alone, strict=True))
    assert torch.equal(actual[1], eager[1])
    for i in (0, 2):
        assert relative_rms(actual[i], exact[i]) <= bound(dtype, eager[i], exact[i])


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_in_a_graph_sources_are_read_early(monkeypatch):
    """There a token's sources are read before the kernel in front has ended, which writes y: never an old y."""
    monkeypatch.undo()  # poisoning would put a kernel between them
    D, B, layers, dtype = 4608, 2, 5, torch.bfloat16
    taps, query, norm = (placed(torch.randn(*shape), torch.float32) for shape in ((D, 1, 4), (D,), (D,)))
    weights = [placed(torch.randn(D, D) / 70, dtype) for _ in range(layers)]
    given = [placed(torch.randn(B, *shape), dtype) for shape in ((1, D), *[(3, D)] * layers, (1, 3, D))]
    given.append(placed(torch.randn(B, 1, D), torch.float32))
    now = [t.clone() for t in given]

    def chain():
        h, *states, blocks, partial = now
        for i, (w, state) in enumerate(zip(weights, states, strict=True)):
            how = {"opens_block": i == 2, "ends_layer": i % 2 == 1}
            (y,) = project([h], [w])
            (h,) = residual_kernel.join_and_mix(
                y, state, taps, blocks, partial, 1 + (i > 2), query, [norm], 1e-6, **how
            )  # fmt: skip
        return h

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        h = chain()
    for _ in range(20):
        given[0].normal_()
        after = []
        for run in (graph.replay, chain):
            for t, start in zip(now, given, strict=True):
                t.copy_(start)
            result = run()
            after.append([t.clone() for t in (h if result is None else result, *now)])
        assert all(map(torch.equal, *after))


def test_strided_arguments():
    """Norm weights and `rejected` are read as they lie; a state, written in place, is refused."""
    wide, sources, q = placed(torch.randn(2, 74)), placed(torch.randn(2, 3, 4, 37)), placed(torch.randn(2, 37))
    weights = [wide[0, ::2], wide[1, 1::2]]
    expected = residual.mix_and_norm(sources, q, weights, 1e-5, torch.float32)
    actual = residual_kernel.mix_and_norm(sources, q, weights, 1e-5, torch.float32)
    rejected = torch.tensor([[1, 7], [0, 7]], device=DEVICE)[:, 0]
    y, weight, state = (placed(torch.randn(*shape)) for shape in ((2, 3, 37), (37, 1, 4), (2, 5, 37)))

    def join(op, state):
        partial = sources[:, :, 3].clone()
        return op(y, state, weight, sources.clone(), partial, 2, q, weights, 1e-5, rejected=rejected)

    actual += join(residual_kernel.join_and_mix, state.clone())
    for a, b in zip(actual, expected + join(fused.join_and_mix, state.clone()), strict=True):
        assert relative_rms(a, b) < 1e-6
    with pytest.raises(InputError, match=r"^triton join_and_mix: a state of channels 5 apart"):
        join(residual_kernel.join_and_mix, state.mT.contiguous().mT)


@pytest.mark.parametrize(("V", "warps"), [(1, 8), (18, 8), (36, 2), (5, 1)])
def test_sums_of_a_block(V, warps):
    """Inline PTX, which no interpreter runs: every thread gets the sums over all threads."""
    values = torch.randn(1, warps, 32, V, dtype=torch.float64)
    given = {f"${V + v}": values[..., v] for v in range(V)}
    after, _ = emulate(residual_hopper.sums_ptx(V, warps), 1, warps, given, floats(1, warps * V))
    actual = torch.stack([after[f"${v}"] for v in range(V)], dim=-1)
    assert relative_rms(actual, values.sum(dim=(0, 1, 2)).expand_as(actual)) < 1e-12


@pytest.mark.parametrize(("blocks", "warps"), [(8, 4), (4, 1), (2, 4)])
@pytest.mark.parametrize(("old", "Q"), [(9, 1), (0, 1), (4, 3), (10, 3)])
def test_sums_of_a_cluster(old, Q, blocks, warps):
    """Exchanges through one allocation; a barrier must see as many bytes as it expects, or it never opens."""
    exchanges = residual_hopper._exchanges(old, Q)
    opened = residual_hopper.open_ptx(exchanges, blocks, warps)
    boxes = floats(blocks, int(re.search(r"box\[(\d+)\]", opened)[1]) // 4)
    expected = [int(n) for n in re.findall(r"expect_tx.*, (\d+);", opened)]
    address, values = torch.zeros(blocks, warps, 32, dtype=torch.long), []
    for k, V in enumerate(exchanges):
        values.append(torch.randn(blocks, warps, 32, V, dtype=torch.float64))
        given = {"$1": address} | {f"${2 + v}": values[k][..., v] for v in range(V)}
        _, sent = emulate(residual_hopper.send_ptx(exchanges, k, blocks, warps), blocks, warps, given, boxes)
        assert sent == blocks * expected[k]
    assert boxes[:, : 2 * len(exchanges)].isnan().all()  # the barriers' own words
    for k, V in enumerate(exchanges):
        ptx = residual_hopper.receive_ptx(exchanges, k, blocks, warps)
        after, _ = emulate(ptx, blocks, warps, {f"${V}": address}, boxes)
        actual = torch.stack([after[f"${v}"] for v in range(V)], dim=-1)
        assert relative_rms(actual, values[k].sum(dim=(0, 1, 2)).expand_as(actual)) < 1e-12


@pytest.mark.parametrize(("V", "warps", "sources"), [(2, 8, 10), (3, 4, 7), (4, 8, 3)])
def test_sums_that_warps_leave_source_by_source(V, warps, sources):
    """Warps leave their sums of a source in its place; then lane j of all warps fetches those of source j."""
    values = torch.randn(sources, warps, 32, V, dtype=torch.float64)
    lane, warp = torch.arange(32).expand(1, warps, 32), torch.arange(warps)[:, None].expand(1, warps, 32)
    box, size = floats(1, sources * V * warps), 4 * V * warps
    for j in range(sources):
        given = {f"${1 + v}": values[j, None, ..., v] for v in range(V)}
        given |= {f"${V + 1}": lane, f"${V + 2}": j * size + 4 * warp}
        emulate(residual_hopper.leave_ptx(V, warps), 1, warps, given, box)
    ptx = residual_hopper.fetch_ptx(V, warps)
    after, _ = emulate(ptx, 1, warps, {f"${V}": lane.clamp(max=sources - 1) * size}, box)
    actual = torch.stack([after[f"${v}"] for v in range(V)], dim=-1)[0, :, :sources]
    assert relative_rms(actual, values.sum(dim=(1, 2)).expand_as(actual)) < 1e-12


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
@pytest.mark.parametrize(("T", "kernel", "most"), [(133, "mix_bursts", 1), (1, "mix_cluster", 2)], ids=str)
def test_variants_are_few(monkeypatch, T, kernel, most):
    """Each takes about a second to compile, and a model has sublayers of nearly all kinds."""
    if residual_kernel._hopper(torch.device(DEVICE)) is None:
        pytest.skip("kernels for Hopper GPUs")
    made, D = [], 1536  # a width of no other test
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda src, **rest: made.append(src.name))
    y, state, blocks = (placed(torch.randn(1, *shape), torch.bfloat16) for shape in ((T, D), (3, D), (T, 3, D)))
    partial, taps, query, norm = (placed(torch.randn(*shape)) for shape in ((1, T, D), (D, 1, 4), (D,), (D,)))
    opens, ends = {"opens_block": True}, {"ends_layer": True}
    for count, how in ((0, opens), (1, {}), (1, ends), (2, opens), (3, {})):
        residual_kernel.join_and_mix(y, state, taps, blocks, partial, count, query, [norm], 1e-6, **how)
    assert sum(kernel in name for name in made) == most
