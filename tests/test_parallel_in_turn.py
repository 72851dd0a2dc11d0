"""All ranks of a world as threads of one process: what one device gives, and what a world of processes would do."""

import json
import threading

import pytest
import torch
from helpers import random_model, relative_rms
from parallel_step_worker import read_and_append
from parallel_worker import ask_decode, ask_forward, prompts, written
from parallel_worker import text_config as config
from test_parallel import CUT, FOUR, SEND, THREE, TINY

from inkling_ref import generation
from inkling_ref.checkpoint import MATRICES
from inkling_ref.errors import InputError
from inkling_ref.parallel import in_turn as turns
from inkling_ref.parallel.apply import Mesh, parallelize
from inkling_ref.parallel.collectives import CollectiveError
from inkling_ref.parallel.generation import finish, generate
from inkling_ref.parallel.in_turn import FORMS, bound, check_slice, in_turn, slice_config
from inkling_ref.parallel.plan import Plan
from inkling_ref.parallel.synthetic import synthetic
from inkling_ref.quantization import COMPANIONS

TOLERANCE = {torch.float32: 1e-5, torch.float64: 1e-13}
PLANS = {  # a model, a plan, and the rows of every dp group
    "tp, 7 experts on 2 ranks": (config(), Plan(2), (2,)),
    "by token": (THREE, Plan(3, **CUT), (2,)),
    "tokens sent": (config(), Plan(2, **SEND), (2,)),
    "both": (FOUR, Plan(4, **CUT, **SEND), (2,)),
    "width": (config(), Plan(2, ep=1), (2,)),
    "dp, a group without rows": (TINY, Plan(1, 3), (2, 0, 1)),
    "tp x dp, ep x etp, both": (FOUR, Plan(2, 2, ep=2, **CUT, **SEND), (1, 2)),
}


def same(actual: list, expected: list, tolerance: float) -> None:
    for a, e in zip(actual, expected, strict=True):
        if isinstance(e, torch.Tensor) and e.is_floating_point():
            assert relative_rms(a, e) < tolerance
        else:
            assert torch.equal(a, e) if isinstance(e, torch.Tensor) else a == e


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("plan", PLANS)
@torch.inference_mode()
def test_all_ranks_together_are_one_device(plan, dtype):
    config, plan, rows = PLANS[plan]
    groups = [range(sum(rows[:i]), sum(rows[: i + 1])) for i in range(plan.dp)]

    def asked(model, generate, rows):
        tensors = [*ask_forward(model, generate, rows), *ask_decode(model, generate, rows)]
        return tensors, written(generate, model, prompts(rows), max_new_tokens=7)

    def of_rank(mesh):
        model = parallelize(random_model(config, dtype=dtype), mesh)
        answers = asked(model, generate, groups[model.share.dp_index])
        finish(model)
        return *answers, dict(model.current.cut_passes)

    whole = random_model(config, dtype=dtype)
    expected = [asked(whole, generation.generate, group) if group else ([], None) for group in groups]
    for rank, (tensors, tokens, cut) in enumerate(in_turn(plan, of_rank)):
        same(tensors, expected[rank // plan.tp][0], TOLERANCE[dtype])
        assert tokens == expected[rank // plan.tp][1]
        assert bool(cut) == plan.sequence


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("plan", [Plan(4), Plan(4, ep=2)], ids=["ep", "ep x etp"])
@torch.inference_mode()
def test_all_ranks_steps_together_are_one_devices(plan, dtype):
    """Prompts in chunks, steps of two tokens of which some are taken back, and what they choose."""
    expected = read_and_append(random_model(FOUR, dtype=dtype))
    for found in in_turn(plan, lambda mesh: read_and_append(parallelize(random_model(FOUR, dtype=dtype), mesh))):
        same(found, expected, TOLERANCE[dtype])


def test_collectives():
    """Of three ranks: values that tell ranks, rows and columns apart."""
    base = torch.arange(12.0).view(6, 2)

    def of_rank(mesh):
        tp, x = mesh.tp, base + 100 * mesh.rank
        sent = [[1, 0, 2], [0, 3, 0], [2, 1, 1]][mesh.rank]
        received = [[1, 0, 2], [0, 3, 1], [2, 0, 1]][mesh.rank]
        blocks = x.view(3, 2, 2)
        rows = tp.exchange(x[: sum(sent)], sent, received)
        return tp.gather(x, 1), tp.reduce_scatter(x, 0), tp.sum(x.clone()), tp.swap(blocks), rows, mesh.traffic

    xs = [base, base + 100, base + 200]
    total, traffic = 3 * base + 300, []
    for rank, found in enumerate(in_turn(Plan(3), of_rank)):
        gathered, scattered, summed, swapped, rows, counts = found
        assert torch.equal(gathered, torch.cat(xs, dim=1))
        assert torch.equal(scattered, total[2 * rank : 2 * rank + 2])
        assert torch.equal(summed, total)
        assert torch.equal(swapped, torch.stack([x.view(3, 2, 2)[rank] for x in xs]))
        traffic.append(counts.to_dict()[""])
    assert torch.equal(rows, torch.cat([xs[0][1:3], xs[2][3:4]]))  # of the last rank
    assert {what: count["sent"] for what, count in traffic[0].items()} == {
        "gather over tp": 2 * 48, "reduce_scatter over tp": 2 * 16, "sum over tp": 2 * 2 * 16, "swap over tp": 2 * 16,
        "exchange over tp": 2 * 8,
    }  # fmt: skip


def test_sums_round_as_they_go():
    parts = torch.tensor([[256.0], [1.0], [1.0]], dtype=torch.bfloat16)  # 257 is none: it would become 256
    assert [int(x) for x in in_turn(Plan(3), lambda mesh: mesh.tp.sum(parts[mesh.rank].clone()))] == [256] * 3


def test_one_rank_runs_at_a_time():
    order = []

    def of_rank(mesh):
        for i in range(3):
            order.append((i, mesh.rank))
            mesh.world.sum(torch.ones(2))

    in_turn(Plan(2, 2), of_rank)
    assert [i for i, _ in order] == sorted(i for i, _ in order)
    assert sorted(order) == [(i, rank) for i in range(3) for rank in range(4)]


# ---------------------------------------------------------------- what goes wrong


def test_a_rank_that_fails_ends_all_with_its_error():
    ended = []

    def of_rank(mesh):
        try:
            mesh.tp.sum(torch.ones(2))
            if mesh.rank == 1:
                raise ZeroDivisionError("out of luck")
            mesh.tp.sum(torch.ones(2))
        finally:
            ended.append(mesh.rank)

    with pytest.raises(ZeroDivisionError, match="out of luck"):
        in_turn(Plan(3), of_rank)
    assert sorted(ended) == [0, 1, 2]


def test_ctrl_c_ends_the_ranks(monkeypatch):
    ended, begun, join = [], threading.Event(), threading.Thread.join

    def interrupted(thread):
        monkeypatch.setattr(threading.Thread, "join", join)
        begun.wait()
        raise KeyboardInterrupt

    def of_rank(mesh):
        try:
            while True:
                mesh.tp.sum(torch.ones(2))
                begun.set()
        finally:
            ended.append(mesh.rank)

    monkeypatch.setattr(threading.Thread, "join", interrupted)
    with pytest.raises(KeyboardInterrupt):
        in_turn(Plan(3), of_rank)
    assert sorted(ended) == [0, 1, 2]


def test_ranks_that_disagree():
    def of_rank(mesh):
        return mesh.tp.sum(torch.ones(2)) if mesh.rank else mesh.tp.gather(torch.ones(2), 0)

    with pytest.raises(CollectiveError, match="gather over tp and sum over tp at once, expected one collective"):
        in_turn(Plan(3), of_rank)


def test_ranks_that_wait_for_one_that_has_ended():
    with pytest.raises(CollectiveError, match="wait for ever: rank 0 for sum over tp, rank 2 for sum over tp"):
        in_turn(Plan(3), lambda mesh: mesh.rank == 1 or mesh.tp.sum(torch.ones(2)))


def test_another_plan_of_the_same_tensors():
    shard = synthetic(slice_config("nano", 2), Mesh.stand_in(Plan(2), 1))
    assert bound(shard, Mesh.stand_in(Plan(2, **CUT), 1)).llm.norm.weight is shard.llm.norm.weight
    with pytest.raises(InputError, match=r"rank 0 of Plan.*: other slices than those of Plan"):
        bound(shard, Mesh.stand_in(Plan(2, **CUT), 0))


# ---------------------------------------------------------------- a checked slice


def test_shards_are_cut_from_the_whole():
    config = slice_config("nano", 2)  # NVFP4, MXFP8
    whole = synthetic(config, Mesh.stand_in(Plan(), 0), experts="nvfp4+mxfp8")
    shards = [synthetic(config, Mesh.stand_in(Plan(2), rank), cut_from_whole=True) for rank in range(2)]
    for layer in range(2):
        experts, *parts = (model.llm.layers[layer].mlp.experts for model in (whole, *shards))
        for name in [leaf + suffix for leaf in MATRICES for suffix in ("", *COMPANIONS[:2])]:
            if getattr(experts, name) is None:
                continue
            held = [getattr(part, name).view(torch.uint8) for part in parts]
            assert torch.equal(torch.cat(held), getattr(experts, name).view(torch.uint8)), name
        columns = [model.llm.layers[layer].attn.wo_ud.weight for model in (whole, *shards)]
        assert torch.equal(torch.cat(columns[1:], dim=1), columns[0])
    assert not torch.equal(shards[0].llm.embed.weight, synthetic(config, Mesh.stand_in(Plan(2), 0)).llm.embed.weight)


def test_a_slice_of_nano_by_the_command(tmp_path, capsys):
    report = turns.main(["--layers", "2", "--json", str(tmp_path / "slice.json")])
    assert json.loads((tmp_path / "slice.json").read_text()) == report
    assert (report["preset"], report["layers"], report["tp"]) == ("nano", 2, 2)
    assert [row["form"] for row in report["rows"]] == [form for form in FORMS for _ in range(5)]
    for row in report["rows"]:
        if row["call"] == "experts":
            assert row["ranks"] == row["single"] == {"differ": 0}
            continue
        assert row["alike on all ranks"]
        if row["call"] == "tokens":
            assert row["apart"] == {"differ": 0}
        else:
            assert 0 < row["apart"]["typical"] <= 2 * row["apart"]["rms"] < 2e-5, row
            assert row["ranks"]["rms"] < 1e-5, row
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4 + len(report["rows"])
    assert max(map(len, lines)) <= 80


def test_a_slice_with_a_wrong_sum(monkeypatch):
    """The last rank's part is left out."""
    monkeypatch.setattr(turns, "reduce", lambda add, xs: xs[0])
    monkeypatch.setattr(turns, "FORMS", {"step": {}})
    rows = {row["call"]: row for row in check_slice(slice_config("nano", 2), 2)}
    assert all(rows[call]["apart"]["rms"] > 0.01 for call in ("prompt", "decode", "verify"))
    assert rows["experts"]["ranks"]["differ"] > 0.1


def test_a_slice_in_16_bits():
    """Ranks are as far from the reference as one device is, and it is the rounding: experts are the reference's."""
    rows = list(check_slice(slice_config("nano", 2), 2, dtype=torch.bfloat16, alone=True))
    assert {row["dtype"] for row in rows} == {"bfloat16"}
    assert {row["form"] for row in rows} == set(FORMS)
    for row in rows:
        if "rms" in row["ranks"]:
            assert 1e-4 < row["ranks"]["rms"] < 1.5 * row["single"]["rms"] < 0.06, row
        if row["call"] == "experts":
            assert 0 < row["ranks"]["differ"] < 0.2, row


def test_ranks_that_cannot_share_the_slice():
    with pytest.raises(InputError, match="tp is 5, expected a divisor of hidden_size 128"):
        turns.main(["--tp", "5"])


def test_a_report_that_cannot_be_written_is_found_before_the_work(tmp_path, monkeypatch):
    monkeypatch.setattr(turns, "check_slice", None)
    for path, message in ((tmp_path, "a folder"), (tmp_path / "nowhere" / "slice.json", "nowhere: not found")):
        with pytest.raises(InputError, match=f"{message}, expected .* for the report"):
            turns.main(["--json", str(path)])


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU")
def test_no_gpu_is_named():
    with pytest.raises(InputError, match="--device is cuda: torch sees no GPU here"):
        turns.main(["--device", "cuda"])


def test_the_slices_layers_are_of_every_kind():
    text = slice_config("small", 4).text
    assert {text.is_sliding(i) for i in range(4)} == {True, False}
