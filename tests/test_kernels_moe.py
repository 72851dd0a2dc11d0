"""Contract of the router's and the SwiGLU's kernels."""

import math

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, INTERPRETED, check, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import moe
from inkling_ref.kernels import arrivals
from inkling_ref.kernels import moe as moe_kernel

pytestmark = needs_device


ROUTERS = {  # N, D, E, k
    "one token": (1, 96, 24, 3), "few tokens": (16, 37, 11, 4), "more tokens": (17, 37, 130, 5),
    "two tiles": (69, 20, 196, 8), "all experts": (5, 9, 7, 7), "few long sums": (2, 2501, 9, 4),
    "long sums": (18, 2501, 9, 4),
}  # fmt: skip


@dtypes
@pytest.mark.parametrize(("N", "D", "E", "k"), ROUTERS.values(), ids=ROUTERS)
def test_route(N, D, E, k, dtype):
    normalize = N != 16  # both ways, in turn
    h = placed(torch.randn(N, D), dtype)
    weight, bias = (placed(t, torch.float32) for t in (torch.randn(E, D) / math.sqrt(D), 0.1 * torch.randn(E)))
    weights, ids = moe_kernel.route(h, weight, bias, k, 2.5, normalize)
    exact_weights, exact_ids = moe.route(h.double(), weight.double(), bias.double(), k, 2.5, normalize)
    assert ids.dtype == torch.int64
    assert torch.equal(ids, exact_ids)
    assert weights.dtype == torch.float32
    assert relative_rms(weights, exact_weights) < 2e-6


@pytest.mark.parametrize("N", [6, 30])
def test_route_gives_ties_to_the_lower_id(N):
    h, bias = torch.randn(N, 13, device=DEVICE), torch.zeros(23, device=DEVICE)
    weight = torch.randn(23, 13, device=DEVICE)[[i % 5 for i in range(23)]]  # every score stands there 4 or 5 times
    _, ids = moe_kernel.route(h, weight, bias, 9, 1.0)
    assert torch.equal(ids, moe.route(h, weight, bias, 9, 1.0)[1])


def test_route_of_nan_and_negative_scores():
    h = torch.randn(20, 13, device=DEVICE)
    h[3], h[5, 2] = math.nan, math.nan
    weight, bias = torch.randn(11, 13, device=DEVICE), torch.linspace(-3, 0.5, 11, device=DEVICE)
    bias[4] = -math.inf
    _, ids = moe_kernel.route(h, weight, bias, 11, 1.0)
    assert torch.equal(ids, moe.route(h, weight, bias, 11, 1.0)[1])


def test_three_bfloat16_terms_are_the_weight():
    weight = torch.randn(7, 999)
    terms = moe_kernel.bfloat16_terms(weight)
    assert terms.dtype == torch.bfloat16
    assert torch.equal(terms[..., :999].double().sum(0), weight.double())


def test_route_sums_its_terms(monkeypatch):
    # The path of bfloat16, in float32, so that the interpreter can run it.
    monkeypatch.setattr(moe_kernel, "_one_term", lambda weight: moe_kernel.bfloat16_terms(weight).float())
    h, weight, bias = (torch.randn(s, device=DEVICE) for s in ((21, 70), (12, 70), (12,)))
    weights, ids = moe_kernel.route(h, weight, bias, 3, 1.0)
    exact_weights, exact_ids = moe.route(h.double(), weight.double(), bias.double(), 3, 1.0)
    assert torch.equal(ids, exact_ids)
    assert relative_rms(weights, exact_weights) < 2e-6


@pytest.mark.parametrize("N", [2, 9])
def test_route_splits_the_weight_of_few_rows(N, monkeypatch):
    # The path of bfloat16, in float32.
    monkeypatch.setitem(moe_kernel._TERMS, torch.float32, 3)
    h, weight, bias = torch.randn(N, 1070), torch.randn(35, 1070) / 30, torch.randn(35)
    h, weight, bias = (t.to(DEVICE) for t in (h, weight, bias))
    weights, ids = moe_kernel.route(h, weight, bias, 5, 2.5)
    exact_weights, exact_ids = moe.route(h.double(), weight.double(), bias.double(), 5, 2.5)
    assert torch.equal(ids, exact_ids)
    assert relative_rms(weights, exact_weights) < 2e-6


def test_route_leaves_its_count_at_0(monkeypatch):
    count = torch.zeros(2, dtype=torch.int32, device=DEVICE)  # of eight rows each
    monkeypatch.setattr(moe_kernel, "arrivals", lambda device, some: count)
    weight, bias = torch.randn(29, 2600, device=DEVICE) / 50, torch.randn(29, device=DEVICE)
    for N in (1, 5, 1, 13):  # programs of different numbers
        h = torch.randn(N, 2600, device=DEVICE)
        assert torch.equal(moe_kernel.route(h, weight, bias, 3, 1.0)[1], moe.route(h, weight, bias, 3, 1.0)[1])
        assert not count.any()


@pytest.mark.skipif(INTERPRETED, reason="no GPU")
def test_launches_that_may_run_at_one_time_do_not_share_a_count():
    device, streams = torch.device("cuda", torch.cuda.current_device()), [torch.cuda.Stream() for _ in range(2)]
    taken = []
    for stream in streams * 2:
        with torch.cuda.stream(stream):
            taken.append(arrivals(device, 1))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        taken += [arrivals(device, 1), arrivals(device, 1)]
        taken[-1].add_(0)  # a graph is not empty
    places = [t.data_ptr() for t in taken]
    assert places[:2] == places[2:4]
    assert len(set(places)) == 4


@pytest.mark.skipif(INTERPRETED, reason="no GPU")
@pytest.mark.parametrize("N", [1, 8])
def test_routes_on_several_streams_and_in_graphs_at_one_time(N):
    weight, bias = torch.randn(384, 4608, device=DEVICE) / 70, torch.randn(384, device=DEVICE)
    inputs = [torch.randn(N, 4608, device=DEVICE).bfloat16() for _ in range(4)]
    expected = [moe_kernel.route(h, weight, bias, 8, 1.0) for h in inputs]
    graphs, found, streams = [], [], [torch.cuda.Stream() for _ in inputs]
    for h in inputs[:2]:
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            found.append([moe_kernel.route(h, weight, bias, 8, 1.0) for _ in range(9)])
    torch.cuda.synchronize()
    for _ in range(20):
        for stream, run in zip(streams, [*(graph.replay for graph in graphs), *inputs[2:]], strict=True):
            with torch.cuda.stream(stream):
                if callable(run):
                    run()
                else:
                    found.append([moe_kernel.route(run, weight, bias, 8, 1.0) for _ in range(9)])
    torch.cuda.synchronize()
    wanted = [*expected[:2], *(expected[2:] * 20)]
    for outs, (weights, ids) in zip(found, wanted, strict=True):
        assert all(torch.equal(w, weights) and torch.equal(i, ids) for w, i in outs)


@dtypes
@pytest.mark.parametrize("scale", [0.01, 1.0, 30.0])
@pytest.mark.parametrize(("N", "I"), [(1, 5), (7, 129), (3, 1024)], ids=str)
def test_softcapped_swiglu(N, I, scale, dtype):
    tensors = {"gate_up": scale * torch.randn(N, 2 * I)}
    check(moe_kernel.softcapped_swiglu, moe.softcapped_swiglu, tensors, dtype, gate_cap=4.0, up_cap=25.0)
