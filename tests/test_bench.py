"""`inkling-ref bench` of the kernels: its arguments, its processes, its table. What they measure needs a GPU."""

import json
import re
import sys
from types import SimpleNamespace

import pytest
import torch
from helpers import unchecked

from inkling_ref import checkpoint, cli
from inkling_ref.config import FULL, SLIDING, InklingConfig, TextConfig
from inkling_ref.measure import cost
from inkling_ref.measure.bench import harness, layer, runner, step
from inkling_ref.measure.bench.__main__ import GROUPS
from inkling_ref.measure.bench.harness import Bench, attention_flops, key_value_bytes
from inkling_ref.measure.bench.layer import Case

pytest.importorskip("triton", reason="the kernels need Triton")

CHILD = """
import json, pathlib, sys, time
group = sys.argv[1]
been_here = pathlib.Path(sys.argv[0]).with_name(group)
if group == "residual" and not been_here.exists():  # compiles for too long, the first time
    been_here.touch()
    time.sleep(60)
if group == "router":
    print("out of memory")
    sys.exit(3)
print('{"ready": 1}', flush=True)
assert sys.stdin.readline() == "go\\n"
print(json.dumps({"limits": {"copy": 4.2e12, "matrix": 7.4e14}}))
case = "decode 6/1" if group in ("decode", "flex_decode") else group
arms = ["triton", "compiled"] if group != "flex_decode" else ["FlexAttention with bias, and a name that is long"]
for us, arm in enumerate(arms, 1):
    print(json.dumps({"case": case, "arm": arm, "us": 50.0 * us, "floor_us": 45.0, "error": 1e-3}))
print(json.dumps({"case": case, "arm": "eager", "failed": "OutOfMemoryError: " + "x" * 200}))
print(json.dumps({"note": " ".join(sys.argv[2:])}), flush=True)
if group == "prefill":
    print('{"case": "cut', end="", flush=True)
    time.sleep(60)
"""


@pytest.fixture
def child(monkeypatch, tmp_path):
    """Groups that print what a GPU might give."""
    (tmp_path / "child.py").write_text(CHILD)
    monkeypatch.setattr(runner, "CHILD", [sys.executable, str(tmp_path / "child.py")])
    monkeypatch.setattr(runner, "GROUP_SECONDS", 2.0)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "GPU")


def test_groups_that_hang_or_fail_cost_their_own_rows(child, capsys, tmp_path):
    ops = ["decode", "flex_decode", "residual", "router", "prefill"]
    out = tmp_path / "kernels.json"
    assert cli.main(["bench", *ops, "--against", "compile,sdpa", "--json", str(out), "--seconds", "8"]) == 0
    printed = capsys.readouterr().out
    report = json.loads(out.read_text())
    assert {(row["group"], row["arm"]) for row in report["rows"] if "us" in row} == {
        ("decode", "triton"), ("decode", "compiled"), ("prefill", "triton"), ("prefill", "compiled"),
        ("flex_decode", "FlexAttention with bias, and a name that is long"),
        ("residual", "triton"), ("residual", "compiled"),
    }  # fmt: skip
    assert report["trouble"] == {"router": "exit status 3: out of memory", "prefill": "stopped after 2 s"}
    assert {note for notes in report["notes"].values() for note in notes} == {"--against compile,sdpa"}
    assert set(report["limits"]) == {"decode", "prefill", "flex_decode", "residual"}
    assert max(map(len, printed.splitlines())) <= 79
    # One case of two groups, side by side: twice the kernel's time, 45 % of the limit.
    (case,) = re.findall(r"^decode 6/1\n(?:  .*\n)+", printed, re.MULTILINE)
    assert re.search(r"^  compiled +100\.0 +2\.00 +45% +1\.0e-03$", case, re.MULTILINE)
    assert "FlexAttention with bias, and" in case
    assert "  eager: OutOfMemoryError" in case


def test_a_report_keeps_what_other_groups_measured_before(child, tmp_path):
    """On the same GPU with the same versions; a group that is measured again replaces its own."""
    out = tmp_path / "kernels.json"

    def groups(measured):
        assert cli.main(["bench", measured, "--json", str(out), "--seconds", "8"]) == 0
        return [row["group"] for row in json.loads(out.read_text())["rows"] if row["arm"] == "triton"]

    assert groups("swiglu") == ["swiglu"]
    assert groups("decode") == ["decode", "swiglu"]
    assert groups("swiglu") == ["decode", "swiglu"]
    report = json.loads(out.read_text())
    assert set(report["dates"]) == set(report["limits"]) == {"decode", "swiglu"}
    for other in ({"torch": "2.0"}, {"dates": None}):
        out.write_text(json.dumps({key: x for key, x in (report | other).items() if x is not None}))
        assert groups("swiglu") == ["swiglu"]


def test_time_that_runs_out(child, capsys, tmp_path):
    assert cli.main(["bench", "decode", "prefill", "swiglu", "--seconds", "1.5"]) == 0
    printed = capsys.readouterr().out
    assert "prefill: stopped after " in printed
    assert "swiglu: no time left" in printed


WRONG = {
    "op": (["speed"], r"bench: 'speed', expected some of decode, .*"),
    "two ops": (["residual", "dspark"], r"bench: 'dspark', expected some of decode, .*"),
    "against": (
        ["--against", "cudnn"],
        r"--against: 'cudnn', expected some of reference, compile, sdpa, flex, transformers",
    ),
    "peer of all": (["--peer", "math:sqrt"], r"--peer: .*, expected exactly one group"),
    "peer of step": (["step", "--peer", "math:sqrt"], r"--peer: 'step' has no reference .*, expected another group"),
    "peer of layer": (["layer", "--peer", "math:sqrt"], r"--peer: 'layer' has no reference .*, expected another group"),
    "peer module": (["residual", "--peer", "no_such:f"], r"--peer no_such:f: No module named .*"),
    "peer name": (["residual", "--peer", "math:no_such"], r"--peer math:no_such: .*, expected module:function"),
    "peer syntax": (["residual", "--peer", "math"], r"--peer math: .*expected module:function"),
    "peer value": (["residual", "--peer", "math:pi"], r"--peer math:pi: not callable, expected module:function"),
    "seconds": (["--seconds", "0"], r"--seconds is 0\.0, expected more than 0"),
    "json": (["--json", "/no/such/file.json"], r"/no/such: not found, expected a folder for the report"),
    "dspark's": (["--tasks", "sum"], r"--tasks: belongs to dspark, expected it there alone"),
    "kernels'": (["dspark", "--json", "x.json"], r"--json: belongs to the kernels and collectives, .* alone"),
    "neither's": (["collectives", "--seconds", "3"], r"--seconds: belongs to the kernels, expected it there alone"),
    "one rank": (["collectives"], r"bench collectives: 1 process, expected 2 or more: torchrun --nproc-per-node 2"),
    "no gpu": (["residual"], r"bench: torch sees no GPU here, expected one"),
}


@pytest.mark.parametrize(("arguments", "message"), WRONG.values(), ids=WRONG)
def test_a_wrong_argument_is_one_line(capsys, monkeypatch, arguments, message):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["bench", *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"error: {message}\n", err)


def test_the_groups_run_in_order_of_importance(monkeypatch):
    """Those asked for, but in the order of GROUPS."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    names = list(GROUPS)
    assert runner.check([names[3], names[1]], [], []) == [names[1], names[3]]
    assert runner.check([], [], []) == names


def test_launched_calls_are_timed_in_rounds(monkeypatch):
    """Nine rounds, or three of calls that take long; a warm-up before them."""
    for milliseconds, rounds in ((20.0, 9), (100.0, 5), (400.0, 3)):
        event = lambda ms=milliseconds, **_: SimpleNamespace(  # noqa: E731
            record=lambda: None, synchronize=lambda: None, elapsed_time=lambda _: ms
        )
        monkeypatch.setattr(torch.cuda, "Event", event)
        called = []
        taken = harness.launched_seconds([lambda called=called: called.append(1)] * 2)
        assert taken == pytest.approx(milliseconds * 1e-3 / 2)
        assert len(called) == 2 * (1 + rounds)


def test_the_error_of_a_typical_token():
    exact = torch.ones(2, 5, 3)
    actual = exact * torch.tensor([1.25, 1.25, 1.25, 9.0, 1.25])[:, None]
    assert harness.typical_rms(actual, exact) == pytest.approx(0.25)
    actual[1, 2, 0] = torch.nan
    assert harness.typical_rms(actual, exact) != harness.typical_rms(actual, exact)


def test_peers_run_where_asked_for():
    """In preparation every arm is called once: kernels always, peers if their kind is wanted."""
    called = []
    bench = Bench(against=["compile"], prepare=True)
    for name in ("triton", "triton, 8 warps", "compiled", "compiled, max-autotune", "eager", "SDPA without bias"):
        bench.arm("case", name, called.append, [(name,)])
    assert called == ["triton", "triton, 8 warps", "compiled", "compiled, max-autotune"]


def test_preparation_calls_peers_and_prints_nothing(capsys):
    """Else a peer would compile inside the minute of measuring, and what fails would be said twice."""
    called = []
    bench = Bench(against=[], peers={"other:f": called.append}, prepare=True)
    row = bench.arm("case", "triton", lambda x: x.view(77), [(torch.ones(3),)])
    bench.note("tokens")
    assert len(called) == 1
    assert "failed" in row
    assert capsys.readouterr().out == ""


def test_the_reference_is_taken_anew_where_calls_write_into_their_inputs(monkeypatch, capsys):
    monkeypatch.setattr(harness, "graph_seconds", lambda calls: [call() for call in calls] and 1e-3)
    bench = Bench(against=[], peers={"other:f": lambda x: x.add_(1)}, prepare=True)
    bench.prepare, bench.copy, bench.matrix = False, 1e12, 1e12
    x = torch.ones(3)
    bench.arm("case", "triton", lambda x: x.add_(1), [(x,)], lambda: x + 1)
    assert [json.loads(line)["error"] for line in capsys.readouterr().out.splitlines()] == [0.0, 0.0]


def test_an_arm_is_timed_checked_and_followed_by_peers(monkeypatch, capsys):
    """With a clock that says 2 us: rates of 1 MB and 1 MFLOP a us make floors easy to see."""
    monkeypatch.setattr(harness, "graph_seconds", lambda calls: [call() for call in calls] and 2e-6)
    bench = Bench(against=[], peers={"other:f": lambda x: (0.5 * x, None)}, prepare=True)
    bench.prepare, bench.copy, bench.matrix = False, 1e12, 1e12
    x = torch.arange(1.0, 5.0)
    bench.arm("case", "triton", lambda x: x, [(x,)], x, nbytes=1e6, flops=3e5)
    bench.arm("case", "triton, too large", lambda x: x.view(77), [(x,)], x)
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["arm"] for row in rows] == ["triton", "other:f", "triton, too large"]
    assert rows[0] == {"case": "case", "arm": "triton", "error": 0.0, "us": pytest.approx(2), "floor_us": 1.0}
    assert rows[1]["error"] == 0.5
    assert rows[2]["failed"].startswith("RuntimeError: shape '[77]' is invalid")


def test_costs_are_those_of_the_cost_model():
    T, W, H, d, R = 8192, 1024, 48, 128, 16
    pairs = sum(min(t + 1, W) for t in range(T))
    assert attention_flops(T, T, W) == H * (4 * d + 2 * R) * pairs
    assert attention_flops(T, T, None) == H * (4 * d * T * (T + 1) // 2 + 2 * R * pairs)
    assert key_value_bytes(1, 65536) == 2 * 65536 * 128 * 2


# ---- whole layers and steps: every arm on a CPU, with a clock that says 1 ms

TINY = TextConfig(
    num_hidden_layers=2, layer_types=[SLIDING, FULL], vocab_size=97, unpadded_vocab_size=89, hidden_size=64,
    num_attention_heads=6, num_key_value_heads=3, head_dim=10, swa_num_attention_heads=4, swa_num_key_value_heads=2,
    swa_head_dim=12, sliding_window_size=15, d_rel=5, rel_extent=17, moe_intermediate_size=32, n_routed_experts=11,
    num_experts_per_tok=3, eos_token_id=None,
)  # fmt: skip
TRANSFORMERS = [f"transformers, {mode}" for mode in ("grouped_mm", "batched_mm", "eager")]
DECODING = ["triton", *TRANSFORMERS, "eager", "eager graph, grouped_mm experts"]
COMPILED = ["compiled graph, grouped_mm experts", "compiled, reduce-overhead"]


@pytest.fixture
def bench(monkeypatch, capsys):
    """A bench that measures here, and what it has printed."""
    monkeypatch.setattr(harness, "launched_seconds", lambda calls: [call() for call in calls[:2]] and 1e-3)
    compiled = torch.compile
    # The code of the shape checks breaks graphs: those that must be whole are so without them.
    monkeypatch.setattr(torch, "compile", lambda f, dynamic, **_: compiled(f, dynamic=dynamic, backend="eager"))
    bench = Bench(prepare=True)
    bench.prepare, bench.copy, bench.matrix = False, 1e12, 1e12
    bench.rows = lambda: [row for line in capsys.readouterr().out.splitlines() if "case" in (row := json.loads(line))]
    return bench


def arms(rows):
    """Names of the arms that ran, by case."""
    names: dict[str, list[str]] = {}
    for row in rows:
        assert "failed" not in row, row
        names.setdefault(row["case"], []).append(row["arm"])
    return names


@torch.inference_mode()
def test_all_ways_to_run_two_layers_give_the_same(bench):
    """Their caches too: filled alike, and read from where ours reads."""
    cases = [Case(1, 61), Case(3, 57), Case(1, 0, 40), Case(2, 70, 4)]
    layer.bench_layer(bench, TINY, cases, "torch", torch.float32, "cpu")
    rows = bench.rows()
    decoding = {f"2 layers, NVFP4, {case} keys": DECODING for case in ("1 x 1, 61", "3 x 1, 57", "2 x 4, 70")}
    assert arms(rows) == decoding | {
        "2 layers, MXFP8, 1 x 1, 61 keys": ["triton"],
        "2 layers, MXFP8, 3 x 1, 57 keys": ["triton"],
        "2 layers, NVFP4, prefill of 40": ["triton", *TRANSFORMERS, "eager", "eager, grouped_mm experts"],
    }
    assert all(row["error"] < 1e-6 for row in rows)
    assert all(row["us"] == 1000 for row in rows)


@torch.inference_mode()
def test_what_is_compiled_gives_the_same(bench):
    bench.against = ["compile"]
    with unchecked():  # shapes are checked by code that cannot be compiled
        layer.bench_layer(bench, TINY, [Case(1, 61, compiled=True), Case(1, 59)], "torch", torch.bfloat16, "cpu")
    rows = bench.rows()
    assert arms(rows)["2 layers, NVFP4, 1 x 1, 61 keys"] == ["triton", *COMPILED]
    assert arms(rows)["2 layers, NVFP4, 1 x 1, 59 keys"] == ["triton"]
    assert all(row["error"] < 2e-2 for row in rows if row["arm"] in COMPILED)


@torch.inference_mode()
def test_a_step_of_nano_has_a_head(bench, monkeypatch):
    """All of them choose a token, and the head counts as what must be read; pictures are left out."""
    model, case = checkpoint.load(step.NANO, dtype=torch.bfloat16), Case(1, 50)
    monkeypatch.setattr(step, "CASES", (case,))
    step.bench_step(bench, "torch", torch.bfloat16, "cpu")
    rows = bench.rows()
    assert arms(rows) == {"nano step, 1 x 1, 50 keys": DECODING}
    assert all(row["error"] < 2e-2 for row in rows)
    with_head, without = (layer.limits(model, case, head, [1] * len(model.llm.layers))[0] for head in (True, False))
    assert with_head == without + model.llm.unembed.weight.nbytes


@torch.inference_mode()
def test_arms_that_cannot_run_say_why_once(bench, monkeypatch):
    monkeypatch.setitem(sys.modules, "transformers", None)
    layer.bench_layer(bench, TINY, [Case(1, 61), Case(1, 59)], "torch", torch.float32, "cpu")
    (failed,) = (row for row in bench.rows() if "failed" in row)
    assert failed["arm"] == "transformers"
    assert "transformers" in failed["failed"]
    bench.against = ["reference"]
    layer.bench_layer(bench, TINY, [Case(1, 61, compiled=True)], "torch", torch.float32, "cpu")
    names = arms(bench.rows())["2 layers, NVFP4, 1 x 1, 61 keys"]
    assert names == ["triton", "eager", "eager graph, grouped_mm experts"]


@torch.inference_mode()
def test_preparation_makes_no_dense_experts(monkeypatch, capsys):
    """They would not fit beside the other groups, and only the kernels need it."""
    monkeypatch.setattr(layer, "dequantized", None)
    layer.bench_layer(Bench(prepare=True), TINY, [Case(1, 61)], "torch", torch.float32, "cpu")
    assert capsys.readouterr().out == ""


def test_the_limit_of_two_layers_is_the_published_roofline():
    """0.17 ms at one token after 1,024, at 4.2 TB/s, from tensors without memory."""
    with torch.device("meta"):
        model = layer.Inkling(InklingConfig(layer.SMALL, vision=None)).cast(torch.bfloat16)
    for block in model.llm.layers:
        block.mlp.experts.stored_format = "nvfp4"
    nbytes = layer.limits(model, Case(1, 1024), head=False, chosen=[8, 8])[0]
    assert nbytes / 4.2e12 == pytest.approx(0.17e-3, rel=0.02)
    more, flops = layer.limits(model, Case(1, 0, 8192), head=False, chosen=[9, 384])
    assert more - nbytes == (1 + 376) * 3 * 4608 * 2304 * 0.5625 + (8192 - 1025) * 4096  # experts; keys and values
    assert flops == cost.flops(model.config, 8192, 8192).total()
