"""A decoding step on one rank's part of a model: worlds of processes, one rank alone, and the kernels."""

import json
from dataclasses import replace

import pytest
import torch
from helpers import random_ids, random_model, relative_rms, unchecked
from kernel_contract import DEVICE, INTERPRETED, needs_device
from parallel_step_worker import StepCase, check_steps, hold_a_graph
from parallel_worker import start, text_config
from test_parallel import EIGHT, FOUR, THREE, succeed
from torch.utils._python_dispatch import TorchDispatchMode

from inkling_ref.cli import main
from inkling_ref.config import FULL, SLIDING, InklingConfig
from inkling_ref.decode_step import DecodeStep
from inkling_ref.errors import InputError
from inkling_ref.parallel import run
from inkling_ref.parallel.apply import Mesh, parallelize
from inkling_ref.parallel.in_turn import in_turn
from inkling_ref.parallel.layers import ShardedMoE
from inkling_ref.parallel.plan import Plan

# 5 used tokens of 7: on 4 ranks 2, 2, 1 and none.
FEW_TOKENS = InklingConfig(replace(FOUR.text, vocab_size=7, unpadded_vocab_size=5, eos_token_id=None), None)
WORLDS = {
    2: [
        StepCase("7 experts on 2 ranks", Plan(2), text_config()), StepCase("width", Plan(2, ep=1), text_config()),
        StepCase("prompts cut by tokens", Plan(2, sequence=True, sequence_from=3), text_config()),
    ],
    4: [
        StepCase("fewer key/value heads than ranks, ep x etp", Plan(4, ep=2), FOUR),
        StepCase("a rank without used tokens", Plan(4), FEW_TOKENS, [[1, 4, 2], [3]]),
        # A rank's share is 3 tokens of 9, or 1 of 4: fewer than a convolution looks back, and the last rank has none.
        StepCase("prompts cut by tokens", Plan(4, sequence=True, sequence_from=1), FOUR),
    ],
}  # fmt: skip


@pytest.mark.parametrize("size", WORLDS)
def test_a_world_of_steps_writes_what_one_process_does(size, tmp_path):
    succeed(start(size, tmp_path, check_steps, WORLDS[size]))


def test_a_graph_ends_before_its_world(tmp_path):
    """NCCL's communicators wait for every graph that holds a call of theirs: a step that is still held would hang."""
    results = start(2, tmp_path, hold_a_graph)
    succeed(results)
    assert all("reset in a world of 2" in stderr for _, stderr in results)


@unchecked()
@torch.inference_mode()
def test_one_rank_alone():
    model = parallelize(random_model(FOUR), Mesh.stand_in(Plan(4), 2))
    step, text = DecodeStep(model, 3, 30, tokens=2, page=16), FOUR.text
    full, sliding = (next(s for s in step.layers if (s.table is None) == is_full) for is_full in (True, False))
    assert full.keys.shape == (3, 1, 30, text.head_dim)
    assert sliding.keys.shape[1:] == (1, 16, text.swa_head_dim)
    ids = random_ids(3, 7)
    assert step.prefill(ids).isfinite().all()
    traffic = model.mesh.traffic
    traffic.phase = "a step"
    hidden = step(ids[:, :2])
    assert hidden.shape == (3, 2, text.hidden_size)
    calls = {what: count["calls"] for what, count in traffic.to_dict()["a step"].items()}
    assert calls == {"sum over tp": 1 + 2 * text.num_hidden_layers}
    assert step.next_tokens().shape == (3, 2)
    with pytest.raises(InputError, match="a cache of one rank's channels, expected 32: read the prompt by `prefill`"):
        step.take(model.new_cache(3))
    with pytest.raises(InputError, match=r"temperature 0.5 on many ranks, expected 0, or top_k or top_p"):
        step.next_tokens(0.5, torch.zeros(3, dtype=torch.int64))


@unchecked()
@torch.inference_mode()
def test_a_prompt_cut_by_tokens():
    """Its messages, on one rank alone; steps after it are whole."""
    model = parallelize(random_model(FOUR), Mesh.stand_in(Plan(4, sequence=True, sequence_from=7), 3))
    text, traffic = FOUR.text, model.mesh.traffic
    step, L = DecodeStep(model, 2, 30), text.num_hidden_layers
    inputs = sum(1 if text.is_sliding(i) else 3 for i in range(L))
    messages = {"sum over tp": 1 + 2 * L, "reduce_scatter over tp": 2 * L, "gather over tp": inputs + 2 * L + 1}
    for phase, tokens, expected in (("7", 7, messages), ("6", 6, {"sum over tp": 1 + 2 * L})):
        traffic.phase = phase
        assert step.prefill(random_ids(2, tokens)).shape == (2, text.hidden_size)
        assert {what: count["calls"] for what, count in traffic.to_dict()[phase].items()} == expected
    traffic.phase = "a step"
    step.prefill(random_ids(2, 7))
    traffic.counts.clear()
    step(random_ids(2, 1))
    assert traffic.to_dict()["a step"]["sum over tp"]["calls"] == 1 + 2 * L
    assert dict(model.current.cut_passes) == {"7": 1, "a step": 1}


class Launched(TorchDispatchMode):
    """Names of what is computed or copied, views aside, and the newest result."""

    def __init__(self):
        super().__init__()
        self.names, self.newest = [], None

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        found = op(*args, **(kwargs or {}))
        if not any(result.alias_info for result in op._schema.returns) or op._schema.is_mutable:
            self.names.append(op._schema.name.removeprefix("aten::"))
            self.newest = found
        return found


@pytest.mark.parametrize("rank", [0, 3])
@torch.no_grad()
def test_what_joins_a_long_prompt_copies_nothing_but_its_ends(rank):
    """Of every sublayer two launches: the edges into a message, and the newest inputs into their place."""
    model = parallelize(random_model(FOUR), Mesh.stand_in(Plan(4, sequence=True, sequence_from=7), rank))
    step, partial = DecodeStep(model, 1, 30), torch.randn(1, 28, FOUR.text.hidden_size)
    step.prefill(random_ids(1, 28))
    prompt, state = step.ranks.edges[0], torch.randn_like(step.layers[0].mlp_conv)
    old, N = state.clone(), state.shape[1]
    model.current.T = 28
    with Launched() as launched, step.ranks.joined(partial, state, prompt) as (y, before):
        assert torch.equal(y, partial[:, 7 * rank : 7 * rank + 7])
        assert torch.equal(before, partial[:, 7 * rank - N : 7 * rank] if rank else old)
    assert [name for name in launched.names if name != "equal"] == ["index_select", "copy_"]
    assert torch.equal(state, partial[:, -N:])


@torch.no_grad()
def test_what_joins_is_the_last_that_is_made():
    """In a graph `join_and_mix` reads what stands before it earlier, see there."""
    model = parallelize(random_model(FOUR), Mesh.stand_in(Plan(4, sequence=True, sequence_from=1), 3))
    step = DecodeStep(model, 3, 30)
    step.prefill(random_ids(3, 4))
    prompt, state = step.ranks.edges[0], step.layers[0].mlp_conv
    model.current.T = 4  # a token for each rank
    partial = torch.randn(3, 4, FOUR.text.hidden_size)
    with Launched() as launched, step.ranks.joined(partial, state, prompt) as (y, before):
        assert y.shape[1] == 1
        assert before.is_contiguous()
        assert launched.newest.untyped_storage().data_ptr() == y.untyped_storage().data_ptr()


@torch.inference_mode()
def test_gathered_tokens_of_one_row_are_laid_out_like_several():
    """With other strides PyTorch would multiply one row as a batch."""
    model = parallelize(random_model(FOUR), Mesh.stand_in(Plan(4, sequence=True), 1))
    ranks, x = model.ranks(), torch.randn(1, 7, 32)
    model.current.T = 28
    (whole,) = ranks.all_tokens([x])
    assert whole.stride() == (28 * 32, 32, 1)
    assert torch.equal(whole, x.repeat(1, 4, 1))


# 24 tokens: equal shares, as long as a convolution looks back. 13: on 8 ranks shorter ones, and the last has none.
@pytest.mark.parametrize(("size", "config"), [(2, text_config()), (3, THREE), (8, EIGHT)], ids=["2", "3", "8"])
@torch.inference_mode()
def test_prompts_cut_by_tokens_are_read_as_by_one_device(size, config):
    def read(model):
        step, answers = DecodeStep(model, 2, 64, page=16), []
        for i, tokens in enumerate((24, 13, 24)):
            answers += [step.prefill(random_ids(2, tokens, seed=i)), step(random_ids(2, 1, seed=i)).clone()]
        return answers

    expected, plan = read(random_model(config)), Plan(size, sequence=True, sequence_from=8)
    for rank in in_turn(plan, lambda mesh: read(parallelize(random_model(config), mesh))):
        for found, hidden in zip(rank, expected, strict=True):
            assert relative_rms(found, hidden) < 1e-5


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        (Plan(1, 2), "dp is 2, expected 1"),
        (Plan(2, exchange="all_to_all"), "exchange is all_to_all, expected all_reduce"),
    ],
    ids=["dp", "sending"],
)
def test_plans_that_are_not_for_steps(plan, message):
    model = parallelize(random_model(text_config()), Mesh.stand_in(plan, 1))
    with pytest.raises(InputError, match=f"decode step: {message}"):
        DecodeStep(model, 1, 9)


# ---------------------------------------------------------------- the command


def reported(out, *arguments):
    line = ["run", "--synthetic", "tiny", "--experts", "bf16", "--max-new-tokens", 3, *arguments, "--out", out]
    assert main([str(word) for word in line]) == 0
    return json.loads(out.read_text())


def test_run_on_a_step_writes_the_same(tmp_path):
    texts = [reported(tmp_path / "report.json", "--tokens", "3,1,4,1,5", *graph) for graph in ([], ["--graph"])]
    step, plain = (report["ranks"][0] for report in reversed(texts))
    assert step["tokens"] == plain["tokens"]
    assert step["memory"]["cache_bytes"] > 0
    assert step["decode_steps"] == 2


def test_run_on_a_step_has_no_more_places_than_the_model_has_positions(tmp_path):
    line = ["--context", 4091, "--prefill-chunk", 200, "--max-new-tokens", 10**9, "--graph"]
    assert len(reported(tmp_path / "report.json", *line)["ranks"][0]["tokens"][0]) == 5


def test_run_with_a_context_that_nobody_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(InklingConfig, "tiny", classmethod(lambda cls: FOUR))
    alone = ["--tp", 4, "--only-rank", 2, "--graph", "--filled"]
    report = reported(tmp_path / "report.json", *alone, "--context", 4000, "--batch", 2, "--step-tokens", 5)
    (rank,), text = report["ranks"], FOUR.text
    assert (rank["decode_steps"], len(rank["step_seconds"]), rank["prompt_tokens"]) == (3, 3, 8000)
    assert report["prompt tokens of each row"] == [4000, 4000]
    a_step = 1 + 2 * text.num_hidden_layers  # embedding, attention, experts
    assert {what: count["calls"] for what, count in rank["traffic"]["decode"].items()} == {
        "sum over tp": 3 * a_step, "gather over tp": 3,
    }  # fmt: skip
    full = sum(not text.is_sliding(i) for i in range(text.num_hidden_layers))
    assert rank["memory"]["cache_bytes"] > 2 * 4000 * full * 2 * text.head_dim * 4  # one key/value head, float32
    err = capsys.readouterr().err
    assert "8000 tokens unread | " in err
    assert max(map(len, err.splitlines())) <= 80


def test_a_graphs_collectives_count_once_a_replay():
    model = parallelize(random_model(text_config()), Mesh.stand_in(Plan(2), 0))
    traffic = model.mesh.traffic
    for phase, calls in (("capture", 2), ("decode", 1)):  # what runs beside the graph
        traffic.phase = phase
        for _ in range(calls):
            model.mesh.tp.sum(torch.ones(7))
    run._count_replays(model, 5)
    assert traffic.to_dict() == {"decode": {"sum over tp": {"calls": 6, "sent": 6 * 28, "seconds": 0.0}}}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--filled", "--context", 5], "--filled belongs to --graph, expected it there alone"),
        (["--graph", "--filled", "--tokens", "1"], "--filled belongs to --context, expected it there alone"),
        (["--graph", "--context", 5, "--step-tokens", 2], "--step-tokens belongs to --filled, expected it there alone"),
        (["--graph", "--context", 5, "--trace"], "--trace with --graph, expected one without the other"),
        (["--graph", "--context", 5, "--filled", "--sequence"], "--sequence with --filled, expected one without the"),
        (["--graph", "--context", 5, "--backend", "compile"], "--backend compile belongs to --filled --synthetic"),
        (["--graph", "--context", 5, "--exchange", "all_to_all"], "--exchange all_to_all with --graph"),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, list) else "",
)
def test_what_cannot_run_on_a_step_is_said_in_one_line(arguments, message, tmp_path, capsys):
    line = ["run", "--synthetic", "tiny", *arguments, "--out", tmp_path / "report.json"]
    assert main([str(word) for word in line]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert len(err.splitlines()) == 1


# ---------------------------------------------------------------- on the kernels

# A rank's heads are an odd number beside one key/value head, 4 or 3 of 7 experts are its own.
KERNELS = InklingConfig(
    replace(
        text_config().text, num_hidden_layers=2, layer_types=[SLIDING, FULL], num_attention_heads=6,
        num_key_value_heads=2, swa_num_attention_heads=2, swa_num_key_value_heads=1, n_layers_per_attn_res_block=1,
    ),
    None,
)  # fmt: skip


def random_states(tokens: int) -> torch.Tensor:
    return torch.randn(1, tokens, KERNELS.text.hidden_size, generator=torch.Generator().manual_seed(1))


def alone(backend: str, dtype: torch.dtype = torch.float32):
    model = parallelize(random_model(KERNELS, dtype=dtype, backend=backend), Mesh.stand_in(Plan(2), 1))
    return model.to(DEVICE)


@needs_device
@unchecked()
@torch.inference_mode()
@pytest.mark.parametrize("sequence_from", [5, 4], ids=["whole", "cut by tokens"])
def test_kernels_on_a_rank(sequence_from):
    """With stand-ins both compute the same nonsense."""
    actual, expected = [], []
    for model, out in ((alone("triton"), actual), (alone("torch", torch.float64), expected)):
        model.current.plan = replace(model.current.plan, sequence=True, sequence_from=sequence_from)
        step = DecodeStep(model, 2, 64, tokens=2, page=64)
        mask = torch.tensor([[True] * 4, [False] * 2 + [True] * 2], device=DEVICE)
        out.append(step.prefill(random_ids(2, 4).to(DEVICE), mask))
        out += step(random_ids(2, 2, seed=1).to(DEVICE))
        out.append(step.next_tokens())
    assert torch.equal(actual.pop(), expected.pop())
    for a, b in zip(actual, expected, strict=True):
        assert relative_rms(a, b) < 2e-5


@needs_device
@unchecked()
@torch.inference_mode()
@pytest.mark.parametrize("ep", [2, 1])
def test_experts_of_a_rank_are_picked_by_the_kernels(ep, monkeypatch):
    plan, h = Plan(2, ep=ep), random_states(5)[0]
    for rank in range(2):
        ours, exact = (
            parallelize(random_model(KERNELS, dtype=dtype, backend=backend), Mesh.stand_in(plan, rank)).to(DEVICE)
            for backend, dtype in (("triton", torch.float32), ("torch", torch.float64))
        )
        moe, reference = ours.llm.layers[0].mlp, exact.llm.layers[0].mlp
        with monkeypatch.context() as m:
            m.setattr(torch.Tensor, "nonzero", None)  # which waits for the device
            y = moe(h.to(DEVICE)[None])
        expected = reference(h.double().to(DEVICE)[None])
        assert relative_rms(y, expected) < 2e-6
        assert isinstance(moe, ShardedMoE)
        assert (moe.tokens, int(moe.pairs)) == (reference.tokens, reference.pairs)


@needs_device
@unchecked()
@torch.inference_mode()
def test_a_rank_to_which_no_token_is_sent():
    k, h = KERNELS.text.num_experts_per_tok, random_states(1).to(DEVICE)

    def layer_of(backend: str, mesh: Mesh | None = None):
        model = random_model(KERNELS, backend=backend)
        model.llm.layers[0].mlp.gate.bias[:k] += 100  # experts of rank 0
        return (parallelize(model, mesh) if mesh else model).to(DEVICE).llm.layers[0].mlp

    layers = {}

    def run(mesh: Mesh) -> torch.Tensor:
        layers[mesh.rank] = layer_of("triton", mesh)
        return layers[mesh.rank](h)

    found = in_turn(Plan(2, exchange="all_to_all"), run)
    assert [int(layers[rank].pairs) for rank in range(2)] == [k, 0]
    assert relative_rms(sum(found), layer_of("torch")(h)) < 2e-6  # each has the sums of its own tokens


@pytest.mark.skipif(INTERPRETED, reason="no GPU")
@torch.inference_mode()
def test_a_rank_as_one_graph():
    def steps(capture: bool) -> torch.Tensor:
        step = DecodeStep(alone("triton", torch.bfloat16), 2, 200, page=64)
        if capture:
            step.capture()
        step.prefill(random_ids(2, 124).to(DEVICE))
        out = []
        for i in range(9):
            hidden = step(random_ids(2, 1, seed=i).to(DEVICE)).clone()
            out += [hidden, step.next_tokens().clone()]
        return torch.cat([t.flatten().double() for t in out])

    assert torch.equal(steps(True), steps(False))
