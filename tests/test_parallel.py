"""Worlds of processes on gloo: every plan gives what one process gives. What the ranks check: `parallel_worker`."""

import json
import os
import re
import subprocess
import sys
import threading
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from helpers import random_model
from parallel_worker import (
    PICTURE,
    Case,
    expect,
    fail,
    launch,
    one_expert,
    picture_config,
    read_damaged,
    refuse,
    run_cases,
    start,
)
from parallel_worker import text_config as config

from inkling_ref import checkpoint, cli
from inkling_ref.chat import Tokenizer
from inkling_ref.cli import NANO, main
from inkling_ref.config import InklingConfig
from inkling_ref.errors import InputError
from inkling_ref.parallel import launch as launching
from inkling_ref.parallel import run
from inkling_ref.parallel.plan import Plan
from inkling_ref.parallel.run import ALONE, TOGETHER

CUT = {"sequence": True, "sequence_from": 4}
SEND = {"exchange": "all_to_all"}
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node"]
# Heads that 3, 4 and 8 ranks can share; 4 and 8 ranks exceed the key/value heads of full layers, which are replicated.
THREE = config(hidden_size=33, num_attention_heads=3, num_key_value_heads=3, swa_num_key_value_heads=3)
FOUR = config(swa_num_attention_heads=8, swa_num_key_value_heads=4)
EIGHT = config(num_attention_heads=8, swa_num_attention_heads=16, swa_num_key_value_heads=8)
TINY = InklingConfig.tiny()  # 3 key/value heads for 6 query heads: for dp alone
EVERY = ("forward", "decode", "sample", "speculative")


def with_pictures(config: InklingConfig) -> InklingConfig:
    return replace(TINY, text=config.text)


def nano(name: str, plan: Plan, rows: tuple[int, ...], *checks: str, experts: str = "dequantize") -> Case:
    return Case(f"nano, {name}", plan, checks=("nano", *checks), rows=rows, folder=NANO, experts=experts)


WORLDS = {
    1: [
        Case("tiny", Plan(), TINY, (*EVERY, "pictures"), rows=(2,)),
        Case("tiny, sending", Plan(**SEND), TINY, ("forward", "greedy")),
        nano("alone", Plan(), (2,)),
        nano("sending", Plan(**SEND), (1,)),
    ],
    2: [
        Case("tp, 7 experts on 2 ranks", Plan(2), picture_config(), ("forward", "decode", "sample", "head")),
        Case("sequence", Plan(2, **CUT), picture_config(), ("forward", "decode", "sample")),
        Case("sequence, pictures", Plan(2, **CUT), picture_config(), ("pictures",), rows=(2,)),
        Case("sending", Plan(2, **SEND), checks=("forward", "decode")),
        Case("sending, sequence", Plan(2, **SEND, **CUT), checks=("forward", "decode", "greedy")),
        Case("dp", Plan(1, 2), TINY, EVERY, rows=(2, 1)),
        Case("dp, pictures", Plan(1, 2), TINY, ("pictures",), rows=(2, 1)),
        Case("width", Plan(2, ep=1), checks=("forward", "decode", "greedy")),
        Case("width, sending", Plan(1, 2, ep=1, **SEND), TINY, checks=("forward", "greedy"), rows=(1, 2)),
        nano("sequence", Plan(2, sequence=True, sequence_from=8), (2,), "nano_drafts"),
        nano("sending", Plan(2, **SEND), (1,)),
        nano("width, sending", Plan(2, ep=1, **SEND), (2,), experts="packed"),
    ],
    3: [
        Case("tp", Plan(3), THREE, ("forward", "decode", "greedy", "head")),
        Case("sequence", Plan(3, **CUT), THREE, EVERY),
        Case("dp 4/0/1", Plan(1, 3), TINY, ("forward", "decode", "sample"), rows=(4, 0, 1)),
        Case("dp 4/0/1, sending", Plan(1, 3, **SEND), TINY, ("forward", "decode", "greedy"), rows=(4, 0, 1)),
        Case("dp, pictures, sending", Plan(1, 3, **SEND), TINY, ("pictures",), rows=(0, 1, 1)),
        Case("width", Plan(3, ep=1), THREE, ("forward", "decode", "greedy")),
        Case("width, sending", Plan(3, ep=1, **SEND), THREE, ("forward", "greedy")),
        nano("dp", Plan(1, 3), (1, 0, 1)),
        nano("dp, sending", Plan(1, 3, **SEND), (0, 1, 1)),
    ],
    4: [
        Case("tp", Plan(4), FOUR),
        Case("sending, sequence", Plan(4, **SEND, **CUT), FOUR, ("forward", "decode", "greedy")),
        Case("tp x dp, sequence", Plan(2, 2, **CUT), FOUR, rows=(2, 1)),
        Case("tp x dp, ep x etp, sending", Plan(2, 2, ep=2, **SEND, **CUT), FOUR, ("forward", "greedy"), rows=(1, 2)),
        Case("tp x dp, pictures", Plan(2, 2), with_pictures(FOUR), ("pictures",), rows=(1, 1)),
        Case("width", Plan(4, ep=1), FOUR, ("forward", "decode", "greedy")),
        Case("width, dp, sending", Plan(1, 4, ep=1, **SEND), TINY, ("forward", "greedy"), rows=(1, 0, 2, 0)),
        Case("all to one expert", Plan(4), FOUR, ("forward",), change=one_expert),
        Case("all to one expert, sending", Plan(4, **SEND), FOUR, ("forward",), change=one_expert),
        nano("tp x dp, sequence", Plan(2, 2, sequence=True, sequence_from=8), (1, 1)),
        nano("tp x dp, sending", Plan(2, 2, **SEND), (0, 1)),
        nano("tp x dp, ep x etp", Plan(2, 2, ep=2), (1, 1)),
    ],
    8: [
        Case("tp, a rank without experts", Plan(8), EIGHT, ("forward", "greedy")),
        Case("sequence, ep x etp", Plan(8, ep=2, **CUT), EIGHT, ("forward", "decode")),
        Case("tp x dp, ep x etp, sending", Plan(4, 2, ep=4, **SEND), EIGHT, ("forward", "greedy"), rows=(1, 0)),
        Case("tp, pictures", Plan(8, **CUT), with_pictures(EIGHT), ("pictures",), rows=(2,)),
        Case("dp, pictures, sending", Plan(1, 8, **SEND), TINY, ("forward", "pictures"), rows=(1, 0, 0, 2, 0, 1, 0, 0)),
        Case("width", Plan(8, ep=1), EIGHT, ("forward", "greedy"), rows=(1,)),
        nano("tp x dp, ep x etp, sequence", Plan(2, 4, ep=4, sequence=True, sequence_from=8), (1, 0, 1, 0)),
        nano("dp", Plan(1, 8), (0, 1, 0, 0, 0, 0, 1, 0)),
        nano("tp x dp, sending", Plan(2, 4, **SEND), (1, 0, 0, 1)),
    ],
}


def succeed(results) -> None:
    for rank, (status, stderr) in enumerate(results):
        assert status == 0, f"rank {rank}: status {status}: {stderr[-2000:]}"


def compute_alike(size: int, cases: list[Case], folder: Path) -> None:
    expect(cases, folder / "expected.pt")
    succeed(start(size, folder, run_cases, cases, folder / "expected.pt"))


@pytest.mark.parametrize("size", WORLDS)
def test_a_world_computes_what_one_process_does(size, tmp_path):
    compute_alike(size, WORLDS[size], tmp_path)


def test_a_world_in_16_bits_rounds_like_one_process(tmp_path):
    plans = {"sequence": Plan(2, **CUT), "sequence, sending": Plan(2, **CUT, **SEND), "dp": Plan(1, 2)}
    cases = [
        Case(name, plan, config(hidden_size=256), ("long",), rows=(1,) * plan.dp, dtype=torch.bfloat16)
        for name, plan in plans.items()
    ]
    compute_alike(2, cases, tmp_path)


# 7 experts: uneven on 3 and 4 ranks. On 3 ranks 3 MXFP8 blocks of 32 columns, on 4 ranks 4; 4 ranks exceed the
# key/value heads of full layers.
STORED = {
    3: (
        {"hidden_size": 96, "moe_intermediate_size": 96}, THREE,
        [(Plan(3), (1,)), (Plan(3, ep=1), (1,)), (Plan(1, 3), (1, 0, 1))],
    ),
    4: (
        {"hidden_size": 64, "moe_intermediate_size": 128}, FOUR,
        [(Plan(4), (1,)), (Plan(4, ep=1), (1,)), (Plan(2, 2), (0, 1)), (Plan(1, 4, ep=2), (0, 0, 1, 0))],
    ),
}  # fmt: skip


@pytest.mark.parametrize("size", STORED)
def test_every_rank_reads_its_slices_of_mixed_precision_experts(size, tmp_path):
    sizes, config, plans = STORED[size]
    folder = tmp_path / "mixed"
    model = random_model(InklingConfig(replace(config.text, **sizes), None))
    checkpoint.save(model, folder, experts="nvfp4+mxfp8")
    cases = [
        Case(f"{plan}, {experts}", plan, checks=("forward",), rows=rows, folder=folder, experts=experts)
        for plan, rows in plans
        for experts in ("packed", "dequantize")
    ]
    compute_alike(size, cases, tmp_path)


# ---------------------------------------------------------------- failures


FAILURES = [
    ("raise", 1, "rank 1: ValueError: out of luck"),
    ("raise", 0, "rank 0: ValueError: out of luck"),  # which holds the store
    ("hang", 2, "rank 2 did not come to"),
    ("kill", 1, "rank 1 is gone without a message: killed"),
    ("kill", 0, "rank 0 is gone without a message"),
    ("stuck", 2, "rank 2 is gone without a message: killed (out of memory?), or stuck"),
]


def says(stderr: str, message: str) -> bool:
    return any(line.startswith(f"error: {message}") for line in stderr.splitlines())


def end_with_its_message(size: int, failures: list[tuple[str, int, str]], folder: Path, *device: str) -> None:
    worlds = []
    for i, (how, failing, _) in enumerate(failures):
        own = folder / str(i)
        own.mkdir()
        worlds.append((own, launch(size, own, fail, failing, how, own, *device)))
    for (own, ranks), (how, failing, message) in zip(worlds, failures, strict=True):
        for rank, (status, stderr) in enumerate(ranks.ended()):
            assert status not in (0, None), (how, rank, stderr)
            assert "came to the end" not in stderr
            if rank == failing and how in ("kill", "stuck"):
                assert how == "kill" or "Timeout" in stderr, stderr  # and where it was stuck
            else:
                assert says(stderr, message), (how, rank, stderr)
            assert (own / f"stderr-{rank}").stat().st_mtime - (own / "failing").stat().st_mtime < 30, how


def test_one_rank_that_fails_brings_all_down_with_its_message(tmp_path):
    end_with_its_message(3, FAILURES, tmp_path)


def test_of_ranks_that_wait_for_each_other_the_one_that_waits_for_none_is_late(monkeypatch):
    """A grid of 2 x 2: rank 3 hangs; 2 waits for it over tp, 1 over dp, and 0 for 1 over tp."""
    store = dist.HashStore()
    came = {0: {(0, 1): 9, (0, 2): 4}, 1: {(0, 1): 8, (1, 3): 5}, 2: {(2, 3): 7, (0, 2): 4}, 3: {(2, 3): 6, (1, 3): 4}}
    entered = {rank: {ranks: (n, f"number {n}") for ranks, n in groups.items()} for rank, groups in came.items()}
    for rank in (1, 2, 3):
        store.set(f"rank {rank}", launching._Words(1, False, entered[rank]).encode())
    monkeypatch.setattr(launching, "ENTERED", entered[0])
    watch = launching._Watch(store, 0, 4, timedelta(0))
    try:
        assert watch._look() is None  # the wait begins
        assert re.fullmatch("rank 3 did not come to number (5|7), where rank (1|2) has waited for 0 s", watch._look())
        entered[3][1, 3] = (5, "number 5")  # it comes
        store.set("rank 3", launching._Words(2, False, entered[3]).encode())
        assert watch._look() is None
        watch.silent[1] = watch.patience
        assert watch._look() == "rank 1 is gone without a message: killed (out of memory?), or stuck"
        watch.timeout, watch.silent[1], watch.asked = 100, 0, watch.words[0].number
        assert (watch._look(), watch._asked()) == (None, None)  # some rank has not been asked: it may be the cause
        for rank in (1, 2, 3):
            store.set(f"rank {rank}", launching._Words(3, True, entered[rank]).encode())
        assert watch._look() is None
        assert watch._asked() == "all ranks were asked to end (SIGTERM)"
        store.set("failed", "rank 2: no luck")
        assert watch._look() == "rank 2: no luck"
    finally:
        watch.stop()


def test_a_file_that_cannot_be_written_is_no_traceback(monkeypatch, capfd):
    def end(watch, message, status):
        raise SystemExit(f"{status}: {message}")

    monkeypatch.setattr(launching, "_ENDING", threading.Lock())
    monkeypatch.setattr(launching._Watch, "_end", end)
    watch = launching._Watch(dist.HashStore(), 1, 2, timedelta(0))
    try:
        with pytest.raises(SystemExit, match=r"^2: rank 1: report.json: No space left on device$"):
            watch.report(OSError(28, "No space left on device", "report.json"))
    finally:
        watch.stop()
    assert capfd.readouterr().err == ""


def test_ranks_that_were_asked_for_different_things_are_refused():
    store, asked = dist.HashStore(), {"the plan": Plan(2), "--draft": False, "tokens": 7}
    for _ in range(2):
        launching._agree(store, asked)
    with pytest.raises(InputError, match=r"^the plan, tokens: not as on another rank, expected"):
        launching._agree(store, {**asked, "the plan": Plan(1, 2), "tokens": 8})


def test_torchrun_tells_which_rank_has_failed(tmp_path):
    outputs = []
    for how, message in (("kill", "rank 1 is gone without a message: killed"), ("hang", "rank 1 did not come to")):
        (tmp_path / how).mkdir()
        line = [*TORCHRUN, "2", "-m", "parallel_worker", "1", how, str(tmp_path / how)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
        output = (tmp_path / f"{how}.txt").open("w")
        outputs.append((how, message, subprocess.Popen(line, stdout=output, stderr=output, env=environment)))
    for how, message, torchrun in outputs:
        assert torchrun.wait(300) != 0
        output = tmp_path / f"{how}.txt"
        assert says(output.read_text(), message), output.read_text()
        assert output.stat().st_mtime - (tmp_path / how / "failing").stat().st_mtime < 30


def test_a_part_that_only_one_rank_reads_is_damaged(tmp_path):
    folder = tmp_path / "mxfp8"
    text = replace(config().text, moe_intermediate_size=32, n_routed_experts=4)
    model = random_model(InklingConfig(text, None))
    checkpoint.save(model, folder, experts="mxfp8")
    packed = checkpoint.load(folder, experts="packed")
    packed.llm.layers[2].mlp.experts.w2_weight_scale[3] = 255  # expert 3 is rank 1's
    checkpoint.save(packed, folder)
    for status, stderr in start(2, tmp_path, read_damaged, folder):
        assert status in (1, 2)
        assert "rank 1: model.safetensors: model.llm.layers.2.mlp.experts.w2_weight" in stderr
        assert "NaN scale" in stderr


def test_heads_that_ranks_cannot_share_are_refused_at_start(tmp_path):
    wrong = config(swa_num_attention_heads=12, swa_num_key_value_heads=3)
    for status, stderr in start(4, tmp_path, refuse, Plan(4), wrong):
        assert status in (1, 2)
        (line,) = stderr.splitlines()
        assert "tp is 4, expected a divisor or a multiple of swa_num_key_value_heads 3" in line


# ---------------------------------------------------------------- the command


def command(*arguments, ranks: int = 2) -> subprocess.CompletedProcess:
    line = [*TORCHRUN, str(ranks), "-m", "inkling_ref.cli", "run", *map(str, arguments)]
    return subprocess.run(line, capture_output=True, text=True, timeout=300)


def test_run_under_torchrun_answers_as_one_process_and_reports_every_rank(tmp_path):
    out = tmp_path / "report.json"
    asked = ["--checkpoint", NANO, "--prompt", "Describe the picture.", "--image", PICTURE, "--out", out]
    done = command("--tp", 2, "--sequence", "--sequence-from", 16, "--draft", "--trace", *asked)
    assert done.returncode == 0, done.stderr
    report = json.loads(out.read_text())
    assert done.stdout == report["answer"] + "\n" == "a red circle, a green triangle and a blue square\n"
    assert "--sequence: 1 of 1 prefill calls cut by tokens" in done.stderr
    assert report["note"] == TOGETHER
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    tokenizer = Tokenizer.from_pretrained(NANO)
    for rank in report["ranks"]:
        assert tokenizer.decode(rank["tokens"][0]) == "a red circle, a green triangle and a blue square"
        assert rank["prefill_seconds"] > 0
        assert rank["passes cut by tokens"]["prefill"] == rank["passes"]["prefill"] == 1
        assert rank["traffic"]["prefill"]["reduce_scatter over tp"]["calls"] == 36  # 18 layers, two convolutions each
        spans = [event for event in report["traceEvents"] if event["pid"] == rank["rank"]]
        assert {"text stack", "layer 17 mlp", "gather over tp"} <= {span["name"] for span in spans}
        assert min(span["dur"] for span in spans) >= 0
        sent = sum(span["args"]["bytes sent"] for span in spans if "args" in span)
        assert sent == sum(count["sent"] for phase in rank["traffic"].values() for count in phase.values())
    assert sum(rank["share of the pairs it has seen"] for rank in report["ranks"]) == pytest.approx(1)
    assert "rank 1: 0.0259 GB of weights" in done.stderr


def test_run_under_torchrun_ends_with_the_failing_ranks_message(tmp_path):
    done = command("--synthetic", "nano", "--tp", 2, "--tokens", "1,5000", "--out", tmp_path / "report.json")
    assert done.returncode != 0
    assert "error: rank" in done.stderr
    assert "row 0, column 1 is 5000, expected 0 <= id < 1536" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "plan",
    [["--tp", 8], ["--dp", 8, "--exchange", "all_to_all"], ["--tp", 8, "--sequence", "--ep", 1]],
    ids=["tp", "dp", "sequence, width"],
)
def test_one_rank_of_many_alone_says_so(plan, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(InklingConfig, "tiny", classmethod(lambda cls: EIGHT))
    out = tmp_path / "report.json"
    arguments = ["--synthetic", "tiny", "--experts", "bf16", "--only-rank", 5, "--context", 70, "--batch", 8]
    arguments += ["--max-new-tokens", 3]
    assert main([str(word) for word in ["run", *plan, *arguments, "--out", out]]) == 0
    report, err = json.loads(out.read_text()), capsys.readouterr().err
    assert report["note"] == ALONE
    assert report["modelled collective seconds"]["note"] == ALONE
    assert "one rank's compute; collectives modelled, not run" in err
    assert "20 us a call, 80% of 450 GB/s" in err
    assert report["plan"]["world"] == 8
    (rank,) = report["ranks"]
    assert (rank["rank"], rank["note"]) == (5, ALONE)
    assert all(len(row) == 3 for row in rank["tokens"])
    assert rank["tokens"]
    assert max(map(len, err.splitlines())) <= 80
    if "--sequence" in plan:
        assert "--sequence: 1 of 1 prefill calls cut by tokens\n" in err
    counts = rank["traffic"]["prefill"].values()
    assert all("seconds" not in count for count in counts)
    assert sum(count["modelled seconds"] for count in counts) == report["modelled collective seconds"]["prefill"]
    by_hand = sum(20e-6 * count["calls"] + count["sent"] / 360e9 for count in counts)
    assert report["modelled collective seconds"]["prefill"] == pytest.approx(by_hand)


TIMEOUTS = ("nan", "1e+30", -1, 0)
LONE = ["--context", 5, "--tp", 2, "--only-rank", 0]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", 3, "--context", 5], "tp is 3, expected a divisor of hidden_size 128"),
        (
            ["--tp", 2, "--context", 5],
            "1 processes, expected tp 2 x dp 1 = 2: torchrun --nproc-per-node 2, or --only-rank",
        ),
        (["--tp", 2, "--context", 5, "--only-rank", 2], "rank 2, expected 0 <= rank < 2"),
        (
            ["--dp", 2, "--context", 5, "--only-rank", 1],
            "--only-rank 1: 1 rows leave none to its group, expected 2 or more (dp)",
        ),
        (["--prompt", "x"], "--prompt needs a tokenizer"),
        (["--context", 5, "--tokens", "1"], "expected one of --prompt, --tokens and --context"),
        (["--tokens", "1,2", "--batch", 2], "--batch is for --context"),
        (["--tokens", "1,2", "--image", "x.png"], "--image needs a question, expected --prompt"),
        (["--context", -3], "--context is -3, expected 1 to 8191: max_position_embeddings is 8192, with a new token"),
        (["--context", 8192], "--context is 8192, expected 1 to 8191: max_position_embeddings is 8192"),
        (["--tokens", "1", "--tokens", "1" + 8191 * ",1"], "row 1 has 8192 tokens, expected at most 8191: "),
        (["--context", 5, "--max-new-tokens", 0], "--max-new-tokens is 0, expected an integer >= 1"),
        (["--context", 5, "--prefill-chunk", 0], "--prefill-chunk is 0, expected an integer >= 1"),
        *((["--context", 5, "--timeout", x], f"--timeout is {x}, expected a number from 1 to") for x in TIMEOUTS),
        *(([*LONE, "--bandwidth", x], f"--bandwidth is {x}, expected a number from 1e-06 to 1e+09") for x in (0, -5)),
        ([*LONE, "--alpha", "nan"], "--alpha is nan, expected a number from 0 to 1e+09"),
        ([*LONE, "--skew", "nan"], "--skew is nan, expected a number from -1e+06 to 1e+06"),
        (["--context", 5, "--sequence"], "--sequence cuts tokens among the tp ranks, expected --tp 2 or more"),
        (["--context", 5, "--sequence-from", 9], "--sequence-from belongs to --sequence, expected it there alone"),
        ([*LONE, "--sequence", "--sequence-from", 0], "--sequence-from is 0, expected an integer >= 1"),
        (["--context", 5, "--alpha", 3], "--alpha belongs to --only-rank, expected it there alone"),
        (["--graph", "--filled", "--context", 0], "--context is 0, expected 1 to 8191"),
        (
            ["--graph", "--filled", "--context", 8170, "--step-tokens", 2, "--max-new-tokens", 12],
            "--context 8170 and 12 steps of 2 tokens: 8194 positions, expected at most max_position_embeddings, 8192",
        ),
        (["--context", 5, "--bandwidth", 3], "--bandwidth belongs to --only-rank, expected it there alone"),
    ],
    ids=lambda value: " ".join(map(str, value))[:60] if isinstance(value, list) else "",
)
def test_what_cannot_run_is_said_in_one_line(arguments, message, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "synthetic", None)  # that it is said before the model is made
    line = ["run", "--synthetic", "nano", *arguments, "--out", tmp_path / "report.json"]
    assert main([str(word) for word in line]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_cannot_be_written_to_is_said_before_the_work(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(run, "main", lambda *_, **__: pytest.fail("ran"))
    monkeypatch.setattr("os.access", lambda *_: False)  # root may write anywhere
    line = ["run", "--synthetic", "nano", "--context", "5", "--out", str(tmp_path / "report.json")]
    assert main(line) == 2
    assert capsys.readouterr().err == f"error: {tmp_path}: cannot be written to, expected a folder that can\n"


def test_of_a_fault_that_all_ranks_find_only_rank_0_speaks(tmp_path):
    done = command("--synthetic", "nano", "--tp", 4, "--context", 5, "--out", tmp_path / "report.json")
    assert done.returncode != 0
    (line,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert line == "error: tp is 4, expected a divisor of swa_num_attention_heads 6"


def test_a_call_that_is_too_short_to_be_cut_is_said(tmp_path, capsys):
    line = ["run", "--synthetic", "nano", "--tp", "2", "--only-rank", "1", "--sequence", "--context", "34"]
    assert main([*line, "--max-new-tokens", "1", "--out", str(tmp_path / "report.json")]) == 0
    assert "--sequence: 0 of 1 prefill calls cut by tokens (--sequence-from is 64)\n" in capsys.readouterr().err


def test_a_fault_that_one_rank_finds_is_said_too(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(cli, "GRACE", 0)
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("WORLD_SIZE", "4")
    line = ["run", "--checkpoint", "nowhere", "--tp", "4", "--context", "5", "--out", str(tmp_path / "report.json")]
    assert main(line) == 2
    assert "error: rank 3: nowhere/config.json: not found" in capsys.readouterr().err


@pytest.mark.parametrize("option", [("--experts", "bf16"), ("--skew", "3")], ids=" ".join)
def test_weights_that_are_read_are_not_made(option, tmp_path, capsys):
    line = ["run", "--checkpoint", str(NANO), "--context", "5", *option, "--out", str(tmp_path / "report.json")]
    assert main(line) == 2
    assert capsys.readouterr().err == f"error: run: {option[0]} belongs to --synthetic, expected it there alone\n"


def test_a_format_that_does_not_fit_names_its_option(tmp_path, capsys):
    assert main(["run", "--synthetic", "tiny", "--context", "5", "--out", str(tmp_path / "report.json")]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("error: --experts is nvfp4+mxfp8: 1 ranks share")
    assert line.endswith("expected equal blocks of 32 (mxfp8) for each, or --experts bf16")


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "x"}, "RANK is 'x' in the environment, expected an integer from 0 to 0"),
        ({"RANK": "5", "WORLD_SIZE": "2"}, "RANK is '5' in the environment, expected an integer from 0 to 1"),
        ({"WORLD_SIZE": "-2"}, "WORLD_SIZE is '-2' in the environment, expected an integer from 0"),
        ({"RANK": "0", "WORLD_SIZE": "2"}, "MASTER_ADDR or MASTER_PORT is missing in the environment"),
        ({"WORLD_SIZE": "2", "MASTER_ADDR": "::1", "MASTER_PORT": "x"}, "MASTER_PORT is 'x' in the environment"),
        ({"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}, "MASTER_PORT 1: expected"),
    ],
    ids=["rank", "rank beyond", "size", "no master", "port", "dead master"],
)
def test_an_environment_that_torchrun_did_not_set(environment, message, tmp_path, capfd, monkeypatch):
    monkeypatch.setattr(cli, "GRACE", 0)
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, text in environment.items():
        monkeypatch.setenv(name, text)
    line = ["run", "--synthetic", "nano", "--context", "5", "--timeout", "1", "--out", str(tmp_path / "report.json")]
    assert main([*line, "--tp", environment.get("WORLD_SIZE", "1").strip("-")]) == 2
    (line,) = capfd.readouterr().err.splitlines()
    assert message in line
    assert list(tmp_path.iterdir()) == []
