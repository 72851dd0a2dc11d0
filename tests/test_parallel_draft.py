"""The drafter on many ranks: what one process drafts, in slices, and the distribution that one process has."""

import json
import re

import pytest
import torch
from helpers import random_model
from parallel_draft_worker import (
    SIZES,
    DraftCase,
    check_distribution,
    check_folder,
    check_pictures,
    check_proposals,
    check_traffic,
    is_replicated,
    random_drafter,
    run_drafts,
    text_only,
)
from parallel_worker import picture_config, start
from parallel_worker import text_config as config
from test_parallel import CUT, EIGHT, SEND, succeed

from inkling_ref import Drafting, InputError, checkpoint, save_drafter
from inkling_ref.cli import main
from inkling_ref.config import FULL, SLIDING, InklingConfig
from inkling_ref.draft_config import DSparkConfig
from inkling_ref.measure import cost
from inkling_ref.parallel.apply import Mesh, parallelize
from inkling_ref.parallel.drafter import adopt
from inkling_ref.parallel.generation import generate
from inkling_ref.parallel.plan import Plan
from inkling_ref.parallel.synthetic import synthetic, synthetic_drafter

KINDS = {
    "gated": {"markov_head_type": "gated", "confidence_head_with_markov": False},
    "vanilla, no confidence": {"markov_head_type": "vanilla", "enable_confidence_head": False},
    "none, rope": {
        "markov_head_type": "none", "markov_rank": 0, "confidence_head_with_markov": False, "qk_norm": "rms",
        "rope_theta": 1e4, "d_rel": 0, "attention_gate": False, "attention_sink": False,
    },
}  # fmt: skip
# 5 used tokens of 7: on 2 ranks 4 and 1, on 3 ranks 3, 2 and none.
FEW = text_only(
    7, 5, hidden_size=36, num_key_value_heads=3, swa_num_key_value_heads=3,
    num_hidden_layers=2, layer_types=[SLIDING, FULL],
)  # fmt: skip
FEW_DRAFT = {"num_key_value_heads": 1, "target_layer_ids": [0, 1, 2]}


def distribution(name: str, **options) -> DraftCase:
    return DraftCase(
        name, check_distribution, Plan(3), FEW, {"temperature": 4.0, **FEW_DRAFT, **options}
    )  # the logits are large


def pictures(**sizes) -> InklingConfig:
    return InklingConfig(config(**sizes).text, InklingConfig.tiny().vision, InklingConfig.tiny().image_token_id)


WORLDS = {
    2: [
        DraftCase("heads", check_proposals, Plan(2), config()),
        *(DraftCase(kind, check_proposals, Plan(2), config(), sizes) for kind, sizes in KINDS.items()),
        DraftCase("sequence", check_proposals, Plan(2, **CUT), config()),
        DraftCase("traffic", check_traffic, Plan(2), config()),
        DraftCase("dp, pictures", check_pictures, Plan(1, 2), picture_config(), {"rows": (1, 1)}),
        DraftCase("dp, a group without rows", check_pictures, Plan(1, 2, **SEND), picture_config(), {"rows": (2, 0)}),
    ],
    3: [
        DraftCase("more ranks than key/value heads", check_proposals, Plan(3), FEW, FEW_DRAFT),
        distribution("drawn"),
        distribution("greedy drafts", greedy=True, temperature=8.0),
        distribution("a broken drafter", fault="NaN"),
        distribution("a wrong verdict is seen", fault="verdict"),
    ],
    8: [
        DraftCase("tp", check_proposals, Plan(8), EIGHT, {"num_attention_heads": 8}),
        DraftCase(
            "tp x dp, pictures, sequence", check_pictures, Plan(4, 2, **CUT),
            pictures(swa_num_attention_heads=8, swa_num_key_value_heads=4), {"rows": (1, 1)},
        ),
        DraftCase(
            "dp, pictures, sending", check_pictures, Plan(1, 8, **SEND), picture_config(),
            {"rows": (0, 1, 0, 0, 1, 0, 0, 0)},
        ),
    ],
}  # fmt: skip


@pytest.mark.parametrize("size", WORLDS)
def test_a_world_drafts_as_one_process_does(size, tmp_path):
    succeed(start(size, tmp_path, run_drafts, WORLDS[size]))


def test_every_rank_reads_its_slices_of_the_drafter(tmp_path):
    model = random_model(config())
    checkpoint.save(model, tmp_path / "model")
    save_drafter(random_drafter(model), tmp_path / "model")
    succeed(start(2, tmp_path, check_folder, tmp_path / "model"))


def test_a_report_counts_the_drafter(tmp_path):
    """In bytes that are read and held, and the keys and values of its context in those of the cache."""
    model = random_model(config())
    drafter = random_drafter(model)
    checkpoint.save(model, tmp_path / "model")
    save_drafter(drafter, tmp_path / "model")
    line = ["run", "--checkpoint", tmp_path / "model", "--tp", 2, "--only-rank", 1, "--context", 11, "--batch", 3]
    reports = []
    for name, options in (("with", ["--draft"]), ("without", [])):
        out = tmp_path / f"{name}.json"
        assert main([str(word) for word in [*line, "--max-new-tokens", 6, "--out", out, *options]]) == 0
        reports += json.loads(out.read_text())["ranks"]
    ours = sum(p.nbytes for p in part(2).parameters())
    assert ours < 0.6 * sum(p.nbytes for p in drafter.parameters())
    drafted, plain = reports
    assert drafted["bytes_read"] - plain["bytes_read"] == ours
    assert drafted["memory"]["weight_bytes"] - plain["memory"]["weight_bytes"] == ours
    assert drafted["drafting"]["proposed"] > 0
    assert drafted["memory"]["cache_bytes"] > plain["memory"]["cache_bytes"] + 2 * 3 * 2 * 11 * 10 * 4


def test_a_drafter_without_a_file_has_random_weights_in_its_slices():
    ranks = []
    for rank in (0, 1):
        model = synthetic(config(), Mesh.stand_in(Plan(2), rank), experts="bf16")
        drafter = synthetic_drafter(model, DSparkConfig(**SIZES, mask_token_id=3))
        stats = generate(model, [[1, 2, 3]], max_new_tokens=9, drafter=drafter).stats.drafting
        assert stats.proposed > 8
        ranks.append(drafter)
    shapes = {name: p.shape for name, p in part(2).named_parameters()}
    assert shapes == {name: p.shape for name, p in ranks[1].named_parameters()}
    first, second = (dict(drafter.named_parameters()) for drafter in ranks)
    assert torch.equal(first["norm.weight"], second["norm.weight"])
    assert not torch.equal(first["fc.weight"], second["fc.weight"])


@pytest.mark.parametrize("kind", [{}, *KINDS.values()], ids=["rnn", *KINDS])
def test_the_cost_model_counts_the_parameters_of_a_rank(kind):
    for tp in (1, 2):
        drafter = part(tp, intermediate_size=24, **kind)
        draft = DSparkConfig(**{**SIZES, "intermediate_size": 24, "mask_token_id": 3, **kind})
        counts = cost.drafter_parameters(EIGHT, draft, tp)
        assert counts.total() == sum(p.numel() for p in drafter.parameters())
        assert counts["on every rank"] == sum(
            p.numel() for n, p in drafter.named_parameters() if is_replicated(n, 2, tp)
        )
        context = drafter.new_context(1)
        context.extend(0, *(torch.zeros(1, 2 // tp, 7, 10) for _ in range(2)))
        assert cost.drafter_cache_bytes(draft, 7, tp, 4) == 2 * context.num_bytes()  # of two layers one is filled


def test_info_has_the_drafter_of_small(capsys):
    assert main(["info", "--tp", "8", "--ep", "8"]) == 0
    out = capsys.readouterr().out
    assert re.search(r"SwiGLU +1.486 GB +185.8 MB", out)
    assert re.search(r"context of 1,048,576 tokens +21.47 GB +2.684 GB", out)
    assert max(map(len, out.splitlines())) <= 80


def part(tp: int, **sizes):
    model = parallelize(random_model(EIGHT), Mesh.stand_in(Plan(tp), tp - 1))
    return adopt(random_drafter(model, **sizes))


@pytest.mark.parametrize(
    ("tp", "sizes", "message"),
    [
        (4, {}, "tp is 4, expected a divisor of the drafter's num_attention_heads 6"),
        (2, {"num_key_value_heads": 3}, "tp is 2, expected a divisor or a multiple of the drafter's num_key_value_h"),
    ],
    ids=["heads", "key/value heads"],
)
def test_heads_that_the_ranks_cannot_share_are_refused(tp, sizes, message):
    with pytest.raises(InputError, match=message):
        part(tp, **sizes)


def test_a_whole_drafter_is_refused():
    model = parallelize(random_model(EIGHT), Mesh.stand_in(Plan(2), 1))
    for drafter in (random_drafter(model), Drafting(random_drafter(model))):
        with pytest.raises(InputError, match="drafter: whole, expected a rank's part"):
            generate(model, [[1, 2, 3]], drafter=drafter)


def test_a_part_is_neither_cut_again_nor_saved_for_the_whole(tmp_path):
    drafter = part(2)
    with pytest.raises(InputError, match="drafter: rank 1's part already, expected a whole one"):
        adopt(drafter)
    with pytest.raises(InputError, match="drafter: the part of rank 1 of 2, expected a whole one"):
        save_drafter(drafter, tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert drafter.layers[0].self_attn.q_proj.weight.shape == torch.Size([30, 32])
