"""One rank of a model measured alone: a rehearsal on the CPU, and the arithmetic beside its numbers."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from helpers import random_ids, relative_rms, unchecked
from parallel_worker import text_config

from inkling_ref.backends import Backend
from inkling_ref.cli import main as command
from inkling_ref.config import FULL, SLIDING, InklingConfig
from inkling_ref.decode_step import DecodeStep, StepBackend
from inkling_ref.errors import InputError
from inkling_ref.measure.launches import ELSEWHERE, Launch, _aligned, _launches
from inkling_ref.measure.ranges import ATTENTION, CONVOLUTION, EXPERTS, MIX, PREPARATION, ROUTER
from inkling_ref.parallel import full_scale, run
from inkling_ref.parallel.apply import Mesh
from inkling_ref.parallel.arms import compiled, release_experts, use
from inkling_ref.parallel.collectives import Link
from inkling_ref.parallel.estimate import Device, Load, all_reduce, estimate
from inkling_ref.parallel.full_scale import (
    Cases,
    Priced,
    by_section,
    collective_seconds,
    counted,
    imposed,
    load_of,
    measure,
    table,
)
from inkling_ref.parallel.layers import ShardedMoE
from inkling_ref.parallel.plan import Plan
from inkling_ref.parallel.synthetic import synthetic

KEYS = {
    "decode": {"backend", "rows", "context", "tokens", "seconds", "best", "collective_seconds", "roofline_seconds",
               "pairs_share", "mean_share", "memory_bytes"},
    "prefill": {"backend", "tokens", "way", "seconds", "collective_seconds", "roofline_seconds"},
    "profile": {"backend", "phase", "rows", "context", "launches", "launches_a_layer", "seconds", "sections",
                "kernels"},
    "sections": {"name", "seconds", "launches", "roofline_seconds", "bytes", "flops"},
    "kernels": {"name", "launches", "seconds", "section"},
}  # fmt: skip


@pytest.fixture
def traced(monkeypatch):
    """`torch.compile` without a compiler. The code of the shape checks breaks graphs: they are whole without it."""
    whole = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, dynamic=None, **_: whole(f, dynamic=dynamic, backend="eager"))


@pytest.fixture
def short(monkeypatch):
    """Few steps of a small model, nothing compiled."""
    monkeypatch.setattr(full_scale, "compiled", lambda model, length: StepBackend())
    monkeypatch.setattr(full_scale, "STEPS", 3)
    cases = Cases(((1, 50, 1), (2, 30, 3)), ((1, 50),), 70, ((1, 50, 1),))
    monkeypatch.setitem(full_scale.CASES, "cpu", cases)
    config = text_config()
    monkeypatch.setattr(InklingConfig, "tiny", classmethod(lambda cls: config))
    monkeypatch.setattr(full_scale, "synthetic", partial(full_scale.synthetic, experts="bf16"))
    return config.text


@unchecked()
def test_a_rehearsal(short, tmp_path):
    path = tmp_path / "full_scale.json"
    found = measure(2, 1, 0.0, "tiny", path, device="cpu")
    assert json.loads(path.read_text()) == {"runs": [json.loads(json.dumps(found))]}
    assert not found["trouble"]
    for name in ("decode", "prefill", "profile"):
        assert all(KEYS[name] <= row.keys() for row in found[name])
    for name in ("sections", "kernels"):
        assert all(KEYS[name] == row.keys() for of in found["profile"] for row in of[name])
    steps = [row for row in found["decode"] if row["backend"] == "torch"]
    assert [(row["rows"], row["context"], row["tokens"]) for row in steps] == [(1, 50, 1), (2, 30, 3)]
    assert [row["backend"] for row in found["decode"]] == ["torch", "torch", "reference", "compile"]
    for row in steps:
        assert 0 < row["roofline_seconds"] < row["best"] <= row["seconds"]
        assert 0 < row["pairs_share"] <= row["busiest_share"] <= 1
        # Embedding, attention and experts of every layer, and the choice of a token: 20 us each.
        assert row["collective_seconds"] == pytest.approx((1 + 2 * short.num_hidden_layers + 1) * 20e-6, rel=0.1)
    assert [row["way"] for row in found["prefill"]] == ["replicated", "sequence"]
    for of in found["profile"]:
        assert of["seconds"] == pytest.approx(sum(section["seconds"] for section in of["sections"]))
        assert of["launches"] == pytest.approx(sum(kernel["launches"] for kernel in of["kernels"]))
        assert {EXPERTS, ROUTER, ATTENTION} < {section["name"] for section in of["sections"]}
    whole = {of["backend"] for of in found["profile"] if of["phase"] == "decode"}
    assert whole == {"torch", "reference", "compile"}
    assert len(found["caveats"]) == 7
    assert "rank 1 of 2" in found["caveats"][1]
    lines = table(found).splitlines()
    assert max(map(len, lines)) <= 80
    assert [line[:2] for line in lines if line[:1].isdigit()] == [f"{i}." for i in range(1, 8)]

    measure(2, 0, 0.0, "tiny", path, seconds=0.0, device="cpu")
    again = measure(2, 1, 0.0, "tiny", path, seconds=0.0, device="cpu")
    runs = json.loads(path.read_text())["runs"]
    assert [one["rank"] for one in runs] == [0, 1]
    assert not runs[1]["decode"]
    assert set(again["trouble"].values()) == {"no time left"}
    assert "torch, decode 2 x 3 at 30" in again["trouble"]


@unchecked()
def test_what_fails_is_said_and_the_rest_goes_on(short, monkeypatch):
    def fails(model, rows, *others):
        if rows == 2:
            raise RuntimeError("out of memory\nby far")
        return before(model, rows, *others)

    before = full_scale.measure_filled
    monkeypatch.setattr(full_scale, "measure_filled", fails)
    found = measure(2, 1, 0.0, "tiny", device="cpu", against=())
    assert found["trouble"] == {"torch, decode 2 x 3 at 30": "RuntimeError: out of memory"}
    assert found["decode"][1] == {
        "backend": "torch", "rows": 2, "context": 30, "tokens": 3, "failed": "RuntimeError: out of memory",
    }  # fmt: skip
    assert len(found["prefill"]) == 2
    assert "RuntimeError: out of memory" in table(found)


@unchecked()
def test_the_second_way_to_read_a_prompt_goes_by_the_routes_of_the_first(short, monkeypatch):
    def listening(moe, h, weights, ids):
        if moe.world.traffic.phase == "prefill":
            heard.append(ids)
        return owned(moe, h, weights, ids)

    heard, owned, L = [], ShardedMoE.owned, short.num_hidden_layers
    monkeypatch.setattr(ShardedMoE, "owned", listening)
    found = measure(2, 1, 0.0, "tiny", device="cpu", against=())
    assert not found["trouble"]
    assert len(heard) == 2 * L
    assert all(torch.equal(first, second) for first, second in zip(heard[:L], heard[L:], strict=True))
    assert found["prefill"][0]["pairs_share"] == found["prefill"][1]["pairs_share"]


def test_the_table_of_a_gpu_holds_results_against_goals():
    def step(backend, rows, context, tokens, seconds):
        case = {"backend": backend, "rows": rows, "context": context, "tokens": tokens}
        return case | {"seconds": seconds, "graph_seconds": 0.9 * seconds, "roofline_seconds": 7e-4,
                       "collective_seconds": 2e-3}  # fmt: skip

    def prefill(way, seconds):
        return {"backend": "triton", "tokens": 8192, "way": way, "launched_seconds": 1.5 * seconds, "seconds": seconds,
                "roofline_seconds": 0.087, "collective_seconds": 0.0395}  # fmt: skip

    section = {"name": f"{CONVOLUTION} and {MIX}", "seconds": 0.1, "launches": 96.0, "roofline_seconds": 1e-2}
    profile = {"rows": 1, "launches": 1234.0, "launches_a_layer": 12.34, "seconds": 0.123456, "sections": [section]}
    found = {
        "gpu": "NVIDIA H200", "torch": "2.11.0+cu130", "triton": "3.6.0", "date": "2026-11-30", "preset": "small",
        "tp": 8, "rank": 7, "skew": 0.08, "copy": 4.2e12, "matrix": 770e12, "weights_bytes": 50.6e9, "caveats": [],
        "trouble": {"compile, decode 8 x 1 at 32768": "no time left"},
        "decode": [
            step("triton", 1, 32768, 1, 1.5e-3), step("triton", 8, 1048512, 1, 0.0123),
            step("reference", 1, 32768, 1, 0.1), step("compile", 1, 32768, 1, 9e-3),
            {"backend": "triton", "rows": 64, "context": 102400, "tokens": 1, "failed": "OutOfMemoryError"},
        ],
        "prefill": [prefill("replicated", 0.14), prefill("sequence", 0.1)],
        "profile": [
            {**profile, "backend": "triton", "phase": "decode", "context": 32768},
            {**profile, "backend": "triton", "phase": "prefill", "context": 8192, "way": "replicated"},
        ],
    }  # fmt: skip
    lines = table(found).splitlines()
    assert max(map(len, lines)) <= 80
    (step_line, *_), (prefill_line,) = (
        [x for x in lines if word in x] for word in ("   1    1    32768", "replicated  ")
    )
    assert step_line.split() == ["triton", "1", "1", "32768", "1.500", "1.350", "0.700", "2.0", "2.00"]
    assert prefill_line.split() == ["triton", "8192", "replicated", "210.0", "140.0", "87.0", "150", "39.5"]
    assert full_scale.ratios(found) == [
        "reference at 1 x 32768: 66.7 times the kernels' step, goal 20",
        "compile at 1 x 32768: 6.0 times the kernels' step, goal 4",
        "launches of the kernels' step at 1 x 32768: 12.3 a layer, goal 10",
        "sequence-parallel prefill: 29% less than replicated, goal 25%",
    ]
    assert lines[-1] == "compile, decode 8 x 1 at 32768: no time left"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((8, 8), "rank 8, expected 0 <= rank < 8"),
        ((5, 0), "tp is 5, expected a divisor of hidden_size"),
        ((1, 0), "--tp is 1, expected ranks that share the model: 2 or more"),
    ],
    ids=["rank", "heads", "one rank"],
)
def test_refuses(arguments, message):
    with pytest.raises(InputError, match=message):
        measure(*arguments, device="cpu")


def test_refuses_an_arm_that_is_none():
    with pytest.raises(InputError, match="--against vllm, expected some of reference, compile, or none"):
        measure(2, 0, 0.0, "nano", device="cpu", against=("compile", "vllm"))


def test_refuses_a_file_that_cannot_be_written(tmp_path):
    for path, message in (
        (tmp_path / "nowhere" / "file.json", "nowhere: not found, expected a folder for the runs"),
        (tmp_path, "a folder, expected the name of a file for the runs"),
        (Path("/dev/null"), "no regular file, expected the name of a file for the runs"),
    ):
        with pytest.raises(InputError, match=message):
            measure(2, 0, 0.0, "nano", path, device="cpu")


def test_refuses_a_skew_that_is_no_number():
    with pytest.raises(InputError, match="--skew is nan, expected a finite number"):
        measure(2, 0, float("nan"), "nano", device="cpu")


def test_refuses_the_file_of_another_command(tmp_path):
    path = tmp_path / "other.json"
    path.write_text('{"rows": []}')
    with pytest.raises(InputError, match=r"other\.json: expected runs that this command wrote"):
        measure(2, 0, 0.0, "nano", path, device="cpu")


# ---------------------------------------------------------------- other arms on the same weights


@unchecked()
@torch.inference_mode()
def test_compiled_operations_give_what_the_reference_gives(traced):
    """On a rank whose tokens choose others' experts too; experts of both formats."""
    text = InklingConfig.nano().text
    text = replace(text, num_hidden_layers=3, layer_types=[SLIDING, FULL, SLIDING])
    model = synthetic(InklingConfig(text, None), Mesh.stand_in(Plan(2), 1))
    ids, hidden, tokens = random_ids(2, 1), [], []
    for ops in (StepBackend(), compiled(model, 41)):
        use(model, ops)
        step = DecodeStep(model, 2, 42)
        step.fill([41, 41])
        hidden.append(step(ids))
        tokens.append(step.next_tokens())
    assert {layer.mlp.experts.stored_format for layer in model.llm.layers} == {"nvfp4", "mxfp8"}
    assert relative_rms(hidden[1], hidden[0]) < 1e-5
    assert torch.equal(*tokens)
    assert model.llm.layers[0].mlp.skips
    use(model, Backend())
    assert not model.llm.layers[0].mlp.skips


@unchecked()
def test_a_captured_step_is_replayed_before_it_is_filled_and_timed(monkeypatch):
    class Graph:
        """In place of a CUDA graph: it does its step, and notes where."""

        def __init__(self, step):
            self.step, self.places = step, []

        def replay(self):
            step = self.step
            self.places.append(step.lengths.tolist())
            step.captured_hidden, step.captured_taps = step.forward(), {}
            step.best = step.captured_hidden.argmax(dim=-1)

    def ready(step):
        step.graph = Graph(step)
        graphs.append(step.graph)
        return step

    graphs = []
    monkeypatch.setattr(run, "ready", ready)
    monkeypatch.setattr(run, "WARM", 4)
    model = synthetic(text_config(), Mesh.stand_in(Plan(2), 1), experts="bf16")
    with counted(model) as routes:
        found = run.measure_filled(model, 2, 30, 3, 5)
    (graph,) = graphs
    assert graph.places == [[0, 0]] * (1 + 4) + [[30, 30], [35, 35], [40, 40]] + [[40, 40]] * (3 + 1)
    assert graph.step.ends == [50, 50]  # after one step more, not by the graph
    assert len(found["step_seconds"]) == len(found["replay_seconds"]) == 3
    assert {some.shape for some in routes} == {(2 * 5, model.config.text.num_experts_per_tok)}


@unchecked()
def test_run_on_compiled_operations(short, monkeypatch, tmp_path):
    made = []
    monkeypatch.setattr(run, "compiled", lambda model, length: made.append((model.mesh.rank, length)) or StepBackend())
    line = ["run", "--synthetic", "tiny", "--experts", "bf16", "--tp", 2, "--only-rank", 1, "--graph", "--filled"]
    line += ["--context", 40, "--max-new-tokens", 3, "--backend", "compile", "--out", tmp_path / "report.json"]
    assert command([str(word) for word in line]) == 0
    (rank,) = json.loads((tmp_path / "report.json").read_text())["ranks"]
    assert len(rank["step_seconds"]) == 3
    assert made == [(1, 40)]


def test_the_only_rank_of_one_exchanges_nothing(tmp_path, capsys):
    line = ["run", "--synthetic", "nano", "--only-rank", 0, "--graph", "--filled", "--context", 9]
    assert command([str(word) for word in [*line, "--max-new-tokens", 1, "--out", tmp_path / "report.json"]]) == 0
    assert "modelled, on top: nothing\n" in capsys.readouterr().err


def test_experts_return_to_the_released_layout_to_the_bit():
    packing = pytest.importorskip("inkling_ref.kernels.packing")
    model = synthetic(InklingConfig.nano(), Mesh.stand_in(Plan(2), 1))
    experts = [model.llm.layers[i].mlp.experts for i in (0, -1)]
    before = [e.matrix(name) for e in experts for name in ("w13_weight", "w2_weight")]
    for e in experts:
        packing.pack_layer(e)
    release_experts(model)
    after = [e.matrix(name) for e in experts for name in ("w13_weight", "w2_weight")]
    assert [m.amax is None for m in before] == [False, False, True, True]
    for old, new in zip(before, after, strict=True):
        for a, b in zip(old, new, strict=True):
            assert (a is None) == (b is None)
            assert a is None or torch.equal(*(t.flatten().view(torch.uint8) for t in (a, b)))


# ---------------------------------------------------------------- collectives, routes, limits


def test_price_of_a_collective():
    link, S = Link(), 64 * 4608 * 2
    sent = 2 * 7 * S // 8
    assert collective_seconds("sum", sent, 8, link) == pytest.approx(all_reduce(8, S, link).seconds)
    assert collective_seconds("sum", sent, 8, link) == pytest.approx(20e-6 + 7 * S / 360e9)
    assert collective_seconds("gather", 720_000, 8, link) == pytest.approx(20e-6 + 2e-6)
    traffic = Priced(8, link)
    for traffic.phase in ("a", "b", "b"):
        traffic.add("gather over tp", 720_000)
    assert traffic.seconds == pytest.approx({"a": 22e-6, "b": 44e-6})
    assert traffic.to_dict()["b"]["gather over tp"]["calls"] == 2


def test_load_of_counted_routes():
    """5 experts on 2 ranks: 3 and 2. Two layers, 4 tokens that choose 2 each."""
    routes = [torch.tensor([[0, 3], [0, 3], [0, 3], [0, 4]]), torch.tensor([[0, 2], [3, 1], [2, 3], [3, 2]])]
    assert load_of(routes, 5, Plan(2), 0, 8) == Load(2.0, 4.5, 2.5, 4.5)
    assert load_of(routes, 5, Plan(2), 1, 8) == Load(1.5, 3.5, 2.5, 4.5)
    assert load_of(routes, 5, Plan(2), 1, 16).pairs == 7  # only half of the tokens were seen


@unchecked()
@torch.inference_mode()
def test_both_ways_to_read_a_prompt_run_the_same_pairs_of_tokens_and_experts():
    model = synthetic(text_config(), Mesh.stand_in(Plan(2), 1), experts="bf16")
    ids, layers, here = random_ids(1, 40), model.llm.layers, model.share.local_experts

    def count() -> list[int]:
        before = [int(layer.mlp.pairs) for layer in layers]
        DecodeStep(model, 1, 41).prefill(ids)
        return [int(layer.mlp.pairs) - n for layer, n in zip(layers, before, strict=True)]

    model.mesh.traffic.phase = "prefill"
    with counted(model) as routes:
        whole = count()
    assert whole == [sum(expert in here for expert in some.flatten().tolist()) for some in routes]
    model.current.plan = Plan(2, sequence=True, sequence_from=1)
    cut = count()
    with imposed(model, routes):
        alike = count()
    assert alike == whole != cut
    assert count() == cut


def test_sections_add_up_to_the_estimate():
    config, plan, device = InklingConfig.small(), Plan(8), Device(4.2e12, 740e12)
    routing = Load(1.25, 1.5, 3.0, 3.5)
    e = estimate(config, plan, 1, 32768, device=device, routing=routing)
    even = estimate(config, plan, 1, 32768, device=device)
    sections = by_section(e, config, plan, 1, device)
    assert full_scale.total(sections) == pytest.approx(e.compute_seconds, rel=0.01)
    assert full_scale.total(sections) > e.compute_seconds
    assert e.work[EXPERTS].bytes > 1.2 * even.work[EXPERTS].bytes
    assert e.busiest.bytes > e.work[EXPERTS].bytes
    # 6 heads of 128 and 16, 2 times 128 for keys and values, in and out, 48 layers in 16 bits.
    assert sections[PREPARATION].bytes == 48 * 2 * 2 * (6 * 128 + 6 * 16 + 2 * 128)


# ---------------------------------------------------------------- a trace


def span(category, name, begin, duration, correlation=None):
    more = {} if correlation is None else {"args": {"correlation": correlation}}
    return {"ph": "X", "cat": category, "name": name, "ts": begin, "dur": duration, **more}


def test_launches_of_a_trace():
    trace = [
        span("user_annotation", ROUTER, 10, 5),
        span("cuda_runtime", "cudaLaunchKernel", 11, 1, 1),
        span("cuda_driver", "cuLaunchKernelEx", 13, 1, 2),
        span("user_annotation", EXPERTS, 20, 5),
        span("cuda_driver", "cuLaunchKernelEx", 21, 1, 3),
        span("cuda_runtime", "cudaLaunchKernel", 27, 1, 4),
        span("gpu_user_annotation", ROUTER, 100, 20),
        span("kernel", "a", 100, 10, 1),
        span("kernel", "b", 104, 16, 2),  # began early and waited
        span("kernel", "c", 105, 2, 3),  # done before
        span("kernel", "d", 130, 3, 4),
    ]
    assert _launches(trace, True) == [
        Launch("a", ROUTER, pytest.approx(10e-6)), Launch("b", ROUTER, pytest.approx(10e-6)), Launch("c", EXPERTS, 0),
        Launch("d", ELSEWHERE, pytest.approx(3e-6)),
    ]  # fmt: skip


def test_launches_of_a_graph_get_their_sections_by_order():
    launched = [Launch(*of, 1.0) for of in (("a", ROUTER), ("count", ELSEWHERE), ("a", EXPERTS), ("b", EXPERTS))]
    replayed = [Launch(name, ELSEWHERE, seconds) for name, seconds in (("a", 0.1), ("a", 0.2), ("b", 0.3))]
    assert list(_aligned(replayed, launched)) == [
        Launch("a", ROUTER, 0.1), Launch("a", EXPERTS, 0.2), Launch("b", EXPERTS, 0.3)
    ]  # fmt: skip
    with pytest.raises(InputError, match="the graph's c is not among those launched one by one"):
        list(_aligned([Launch("c", ELSEWHERE, 0.1)], launched))
