"""The table of shards, without any process: every element has its owners, and what cannot be cut is refused."""

from dataclasses import replace

import pytest
import torch
from helpers import logits, random_ids, random_model, relative_rms, unchecked
from parallel_worker import text_config
from torch import nn

from inkling_ref import InputError
from inkling_ref.checkpoint import empty_model, load, save
from inkling_ref.config import InklingConfig
from inkling_ref.parallel.apply import Mesh, parallelize
from inkling_ref.parallel.collectives import Group, StandIn, Traffic
from inkling_ref.parallel.plan import BLOCK, Plan, Share, owners, split, stored_slices
from inkling_ref.quantization import GROUP

SMALL, NANO = InklingConfig.small(), InklingConfig.nano()
FOUR = text_config(swa_num_attention_heads=8, swa_num_key_value_heads=4)


def shapes(config: InklingConfig) -> dict[str, tuple[int, ...]]:
    model, _ = empty_model(config, "cpu", torch.float32)
    return {name: tuple(p.shape) for name, p in model.named_parameters()}


@pytest.mark.parametrize(
    "plan", [Plan(4), Plan(2, 2), Plan(2, 2, ep=2), Plan(4, ep=1), Plan(1, 4)], ids=["tp", "tp dp", "ep", "width", "dp"]
)
def test_every_element_has_its_owners(plan):
    tables = [Share(FOUR, plan, rank).slices() for rank in range(plan.world)]
    for name, shape in shapes(FOUR).items():
        held = torch.zeros(shape, dtype=torch.int32)
        for table in tables:
            held[table.get(name, ())] += 1
        layer = int(name.split(".")[2]) if ".layers." in name else 0
        copies = plan.world
        if ".experts." in name:
            copies = 1
        elif any(part in name for part in ("wk_dv", "wv_dv", "k_sconv", "v_sconv")):
            copies //= min(plan.tp, FOUR.text.attention(layer).num_key_value_heads)
        elif ("attn." in name and "rel_logits_proj" not in name) or "sconv" in name or "embed.weight" in name:
            copies //= plan.tp
        assert (held == copies).all(), name


def test_two_key_value_heads_on_four_ranks():
    """List of what each rank has: whole heads, never half of one."""
    full = next(i for i in range(4) if not FOUR.text.is_sliding(i))  # H = 4, G = 2, d = 14, R = 5, K = 4
    expected = {
        "wq_du.weight": [(0, 14), (14, 28), (28, 42), (42, 56)],
        "wr_du.weight": [(0, 5), (5, 10), (10, 15), (15, 20)],
        "attn_sink_proj.weight": [(0, 1), (1, 2), (2, 3), (3, 4)],
        "q_l2_clip.scale": [(0, 1), (1, 2), (2, 3), (3, 4)],
        "wk_dv.weight": [(0, 14), (0, 14), (14, 28), (14, 28)],
        "k_sconv.weight_proj": [(0, 4), (0, 4), (4, 8), (4, 8)],
    }
    tables = [Share(FOUR, Plan(4), rank).slices() for rank in range(4)]
    for name, runs in expected.items():
        cuts = [table[f"llm.layers.{full}.attn.{name}"][0] for table in tables]
        assert [(cut.start, cut.stop) for cut in cuts] == runs, name
    assert Share(FOUR, Plan(4), 3).n_local_kv_heads(full) == 1


def test_experts_go_to_ranks_in_runs():
    assert [len(run) for run in split(7, 2)] == [4, 3]
    assert [list(run) for run in split(8, 3)] == [[0, 1, 2], [3, 4, 5], [6, 7]]
    assert [len(run) for run in split(3, 5)] == [1, 1, 1, 0, 0]
    assert owners(Plan(2), 7) == [[0]] * 4 + [[1]] * 3
    assert owners(Plan(4, ep=2), 3) == [[0, 1], [0, 1], [2, 3]]


def test_width_of_small_on_eight_ranks():
    plan = Plan(8, ep=1)
    plan.check(SMALL, ["nvfp4", "mxfp8"])
    table = Share(SMALL, plan, 3).slices()
    up, down = (table[f"llm.layers.7.mlp.experts.{name}"] for name in ("w13_weight", "w2_weight"))
    assert up[1] == slice(3 * 576, 4 * 576)
    assert stored_slices(down, "_scale", "nvfp4")[2] == slice(3 * 18, 4 * 18)
    assert stored_slices(down, "_scale", "mxfp8")[2] == slice(3 * 9, 4 * 9)
    assert stored_slices(down, "", "nvfp4")[2] == slice(3 * 144, 4 * 144)
    assert stored_slices(down, "_amax", "nvfp4") == (slice(0, 384),)
    assert stored_slices(down, "_outer_scale_denominator", "nvfp4") == ()
    with pytest.raises(InputError, match="columns 8 to 16, expected whole blocks of 16"):
        stored_slices((slice(0, 1), slice(None), slice(8, 16)), "_scale", "nvfp4")
    assert BLOCK == GROUP


def heads(H: int, G: int) -> InklingConfig:
    """The same in full and sliding layers."""
    sizes = {"num_attention_heads": H, "num_key_value_heads": G}
    sliding = {f"swa_{name}": size for name, size in sizes.items()}
    return text_config(**sizes, **sliding, hidden_size=96, moe_intermediate_size=64)


@pytest.mark.parametrize(
    ("plan", "config", "formats", "message"),
    [
        ({"tp": 4}, heads(12, 3), None, "tp is 4, expected a divisor or a multiple of swa_num_key_value_heads 3"),
        ({"tp": 3}, heads(4, 2), None, "tp is 3, expected a divisor of swa_num_attention_heads 4"),
        ({"tp": 5}, heads(5, 5), None, "tp is 5, expected a divisor of hidden_size 96"),
        ({"tp": 2, "dp": 3, "ep": 4}, None, None, "ep is 4, expected a divisor of the 6 ranks"),
        ({"tp": 0}, None, None, "tp is 0, expected an integer >= 1"),
        ({"tp": True}, None, None, "tp is True"),
        ({"exchange": "magic"}, None, None, "exchange is 'magic'"),
        ({"sequence": "yes"}, None, None, "sequence is 'yes', expected True or False"),
        ({"sequence_from": -5}, None, None, "sequence_from is -5, expected an integer >= 1"),
        ({"tp": None}, None, None, "tp is None, expected an integer >= 1"),
        ({"tp": 1, "dp": 3, "ep": 1}, heads(4, 2), None, "3 ranks share an expert's 64 columns"),
        ({"tp": 4, "ep": 1}, heads(4, 4), ["bf16", "mxfp8"], "expected equal blocks of 32 .mxfp8. for each"),
        # Nano in the worlds of the tests: it has 128 channels, 6 query heads, and experts of 64 columns.
        ({"tp": 3}, NANO, None, "tp is 3, expected a divisor of hidden_size 128"),
        ({"tp": 4}, NANO, None, "tp is 4, expected a divisor of swa_num_attention_heads 6"),
        ({"tp": 8}, NANO, None, "tp is 8, expected a divisor of swa_num_attention_heads 6"),
        ({"dp": 3, "ep": 1}, NANO, None, "3 ranks share an expert's 64 columns .*, expected equal parts for each"),
        ({"tp": 2, "dp": 2, "ep": 1}, NANO, ["nvfp4", "mxfp8"], "4 ranks share .* equal blocks of 32 .mxfp8. for"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_cut_is_refused_in_one_line(plan, config, formats, message):
    with unchecked(), pytest.raises(InputError, match=message) as error:
        Plan(**plan).check(config, formats)
    assert "\n" not in str(error.value)


# ---------------------------------------------------------------- one rank alone


def test_stand_ins_have_the_shapes_of_the_real_ones():
    group = StandIn("tp", 3, 1, Traffic())
    x = torch.arange(24.0).view(2, 12)
    assert group.gather(x, 1).shape == (2, 36)
    assert torch.equal(group.reduce_scatter(x, 1), x[:, 4:8])
    assert torch.equal(group.sum(x.clone()), x)
    blocks = torch.arange(6).view(3, 2)
    assert torch.equal(group.swap(blocks), blocks[1].expand(3, 2))
    rows = torch.arange(6)[:, None]  # 1 row to rank 0, 2 kept, 3 to rank 2
    assert group.exchange(rows, [1, 2, 3], [2, 2, 2]).flatten().tolist() == [1, 2] * 3
    assert group.exchange(rows, [2, 0, 4], [1, 1, 1]).tolist() == [[0]] * 3


def test_what_has_arrived_is_not_copied_again():
    group = StandIn("tp", 2, 1, Traffic())
    with group.arrived():
        found = [group.gather(torch.full((1, 2), float(i)), 1) for i in range(6)]
        assert found[4].data_ptr() == found[0].data_ptr() != found[1].data_ptr()
        assert [t.flatten().tolist() for t in found[2:]] == [[2] * 4, [3] * 4, [0, 0, 4, 4], [1, 1, 5, 5]]
        assert group.gather(torch.full((1, 2), 7), 1).dtype == torch.int64  # other dtypes have places of their own
    assert group.gather(torch.ones(1, 2), 1).tolist() == [[1] * 4]


def test_bytes_that_a_rank_sends():
    traffic = Traffic(phase="prefill")
    group, x = StandIn("tp", 4, 0, traffic), torch.zeros(8, 6)  # 192 bytes
    group.gather(x, 0)
    group.reduce_scatter(x, 0)
    group.sum(x)
    group.swap(x.view(4, 2, 6))
    group.exchange(x, [2, 3, 3, 0], [1, 1, 1, 1])
    sent = {what: count["sent"] for what, count in traffic.to_dict()["prefill"].items()}
    assert sent == {
        "gather over tp": 3 * 192,
        "reduce_scatter over tp": 3 * 48,
        "sum over tp": 2 * 3 * 48,
        "swap over tp": 3 * 48,
        "exchange over tp": 6 * 24,
    }


class FakeEvent:
    """A moment of a GPU that works on what it was given, 2 s a thing, while the host goes on."""

    queued = done = 0.0

    def __init__(self, enable_timing: bool) -> None:
        assert enable_timing

    def record(self) -> None:
        self.at = FakeEvent.queued

    def synchronize(self) -> None:
        FakeEvent.done = max(FakeEvent.done, self.at)

    def elapsed_time(self, end: "FakeEvent") -> float:
        assert max(self.at, end.at) <= FakeEvent.done, "not there yet"
        return 1000 * (end.at - self.at)


def test_seconds_on_a_gpu_are_those_of_its_work_not_of_the_launch(monkeypatch):
    """There is no GPU here: a false one, whose collectives take 2 s after the host has left them."""
    monkeypatch.setattr(torch.cuda, "Event", FakeEvent)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: synchronised.append(device))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    synchronised, heard, device = [], [], torch.device("cuda", 1)
    group = Group("tp", 2, 0, Traffic(phase="prefill"))

    def collective() -> None:
        FakeEvent.queued += 2.0

    with unchecked():  # annotated as torch's events
        for _ in range(3):
            group._run("sum", 10, device, collective)
        assert FakeEvent.done == 0  # nobody has waited
        assert group.traffic.to_dict()["prefill"]["sum over tp"] == {"calls": 3, "sent": 30, "seconds": 6.0}
    group.traffic.listener = lambda *span: heard.append(span)  # in a trace all spans are by the host's clock
    group._run("swap", 7, device, collective)
    assert synchronised == [device, device]
    ((name, start, end, sent),) = heard
    assert (name, sent) == ("swap over tp", 7)
    assert 0 <= end - start < 1e6


@pytest.mark.parametrize("plan", [Plan(2), Plan(4), Plan(2, 2)], ids=["tp", "tp beyond key/value heads", "tp dp"])
def test_a_rank_keeps_its_part_of_the_cache(plan):
    """Every byte belongs to a head or a channel; 4 ranks have a copy each of 2 key/value heads of full layers."""
    whole, part = random_model(FOUR), parallelize(random_model(FOUR), Mesh.stand_in(plan, 1))
    sizes = []
    for model in (whole, part):
        cache = model.new_cache(3)
        logits(model, random_ids(3, 9), cache=cache)
        sizes.append(cache.num_bytes())
    expected = sizes[0] / plan.tp
    assert sizes[1] == expected if plan.tp == 2 else expected < sizes[1] < 1.3 * expected


def test_one_rank_of_small_without_memory_has_its_share():
    model, _ = empty_model(SMALL, "cpu", torch.bfloat16)
    parallelize(model, Mesh.stand_in(Plan(8), 7))
    sizes = {name: p.numel() for name, p in model.named_parameters()}
    assert sum(n for name, n in sizes.items() if ".experts." in name) == 73_383_542_784  # as `inkling-ref info` counts
    assert tuple(model.llm.unembed.weight.shape) == (201024 // 8, 4608)
    assert all(isinstance(p, nn.Parameter) and p.is_meta for p in model.parameters())


def test_a_part_is_not_cut_again():
    model = parallelize(random_model(FOUR), Mesh.stand_in(Plan(2), 1))
    with pytest.raises(InputError, match="model: rank 1's part already, expected a whole model"):
        parallelize(model, Mesh.stand_in(Plan(2), 0))


@pytest.mark.parametrize("plan", [Plan(2), Plan(1, 2), Plan(1, 2, ep=1)], ids=["tp", "dp", "width"])
def test_a_part_is_not_saved_for_the_whole(plan, tmp_path):
    model = parallelize(random_model(FOUR), Mesh.stand_in(plan, 1))
    with pytest.raises(InputError, match="model: the part of rank 1 of 2, expected a whole model"):
        save(model, tmp_path / "part")
    assert list(tmp_path.iterdir()) == []


def test_a_world_of_one_holds_the_whole_and_saves_it(tmp_path):
    save(parallelize(random_model(FOUR), Mesh.stand_in(Plan(), 0)), tmp_path / "whole")
    twin = load(tmp_path / "whole")
    for name, parameter in random_model(FOUR).named_parameters():
        assert torch.equal(parameter, twin.get_parameter(name)), name


@pytest.mark.skipif(torch.cuda.is_available(), reason="the model is on the CPU, the kernels would not be interpreted")
def test_kernels_run_a_ranks_sizes():
    """One query head, half of a key/value head's group, two experts: the kernels compute what the reference does."""
    pytest.importorskip("triton")
    two = {"num_hidden_layers": 2, "layer_types": FOUR.text.layer_types[2:]}  # one sliding, one full: they take long
    config, passes = InklingConfig(replace(FOUR.text, **two), None), []
    for backend in ("torch", "triton"):
        model = parallelize(random_model(config, backend=backend), Mesh.stand_in(Plan(4, sequence=True), 2))
        cache = model.new_cache(1)
        passes.append(torch.cat([logits(model, random_ids(1, T, seed=T), cache=cache) for T in (9, 1)], dim=1))
    assert relative_rms(passes[1], passes[0]) < 1e-5
