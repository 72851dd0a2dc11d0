"""A rank's bytes, FLOPs, collectives and load on paper: against counts of real ranks and published numbers."""

import json
from datetime import timedelta
from itertools import pairwise
from math import comb
from pathlib import Path

import pytest
import torch
from helpers import random_ids, random_model
from parallel_worker import start, text_config

from inkling_ref.cache import Step
from inkling_ref.config import InklingConfig
from inkling_ref.measure import cost
from inkling_ref.parallel import estimate as paper
from inkling_ref.parallel.apply import Mesh, parallelize
from inkling_ref.parallel.collectives import Link
from inkling_ref.parallel.estimate import (
    ALPHAS,
    Device,
    all_reduce,
    estimate,
    load,
    prefill,
    sequence_gain,
    weight_bytes,
)
from inkling_ref.parallel.launch import world
from inkling_ref.parallel.plan import Plan, owners

SMALL = InklingConfig.small()
FOUR = text_config(swa_num_attention_heads=8, swa_num_key_value_heads=4, n_routed_experts=11)
T, BATCH = 72, 2
NCCL, KERNEL, LAMPORT = (Link(alpha=alpha) for alpha in ALPHAS.values())

# ---------------------------------------------------------------- calls and bytes of real ranks


def forward(mesh: Mesh, watch=None) -> None:
    """One pass of one rank over its group's two rows. watch: called with the experts that its tokens choose."""
    model = parallelize(random_model(FOUR, dtype=torch.bfloat16), mesh)
    if watch is not None:
        for layer in model.llm.layers:
            layer.mlp.gate.register_forward_hook(lambda _, inputs, routes: watch(routes[1]))
    ids = random_ids(BATCH, T, seed=mesh.dp.rank)
    with torch.inference_mode():
        model.llm(model.llm.embed_tokens(ids), Step.make([0, 0], T, ids.device))


def made(mesh: Mesh) -> tuple[int, int]:
    """Calls and bytes. As on paper, a sum is two shots, though one call of the library."""
    counts = mesh.traffic.counts
    shots = [count.calls * (1 + what.startswith("sum")) for (_, what), count in counts.items()]
    return sum(shots), sum(count.sent for count in counts.values())


PLANS = [Plan(4), Plan(4, sequence=True), Plan(4, ep=1), Plan(2, 2), Plan(2, 2, sequence=True)]


@pytest.mark.parametrize("plan", PLANS, ids=["tp", "sequence", "width", "tp dp", "tp dp sequence"])
def test_collectives_on_paper_are_those_that_a_rank_makes(plan):
    mesh = Mesh.stand_in(plan, 1)
    forward(mesh)
    expected = estimate(FOUR, plan, T, T, batch=BATCH, one_shot=False)
    agreed = plan.dp > 1  # the groups tell each other how many tokens they have: 8 bytes
    assert made(mesh) == (expected.calls + agreed, expected.sent + 8 * agreed)


SENDING = {
    "tp": Plan(4, exchange="all_to_all"),
    "sequence": Plan(4, exchange="all_to_all", sequence=True),
    "dp": Plan(1, 4, exchange="all_to_all"),
    "tp dp": Plan(2, 2, exchange="all_to_all"),
    "ep width": Plan(2, 2, ep=2, exchange="all_to_all", sequence=True),
}


def count(rank: int, folder: Path) -> None:
    """What this rank sent, and to how many other ranks its tokens had to go."""
    found = {}
    with world(Plan(4), timeout=timedelta(seconds=20)):
        for name, plan in SENDING.items():
            mesh, elsewhere = Mesh.join(plan, timeout=timedelta(seconds=20)), []
            table = owners(plan, FOUR.text.n_routed_experts)

            def watch(chosen, table=table, elsewhere=elsewhere):
                for experts in chosen.tolist():
                    elsewhere.append(len({owner for expert in experts for owner in table[expert]} - {rank}))

            forward(mesh, watch)
            found[name] = [*made(mesh), sum(elsewhere), len(elsewhere)]
    (folder / f"{rank}.json").write_text(json.dumps(found))


@pytest.fixture(scope="module")
def counted(tmp_path_factory) -> dict[str, torch.Tensor]:
    """Calls, bytes, tokens to other ranks and tokens of every rank, by plan."""
    folder = tmp_path_factory.mktemp("counted")
    for status, stderr in start(4, folder, count, folder):
        assert status == 0, stderr[-2000:]
    ranks = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(4)]
    return {name: torch.tensor([rank[name] for rank in ranks], dtype=torch.float64) for name in SENDING}


@pytest.mark.parametrize("name", SENDING)
def test_tokens_sent_to_experts_on_paper_are_those_of_a_real_world(name, counted, monkeypatch):
    plan = SENDING[name]
    calls, sent, elsewhere, tokens = counted[name].T
    uniform = paper.reached(FOUR, plan)
    assert uniform == pytest.approx(float(elsewhere.sum() / tokens.sum()), rel=0.1)  # a random router is nearly uniform
    monkeypatch.setattr(paper, "reached", lambda config, plan: float(elsewhere.sum() / tokens.sum()))
    expected = estimate(FOUR, plan, T, T, batch=BATCH, one_shot=False)
    others = plan.dp - 1  # groups to which a rank says how many tokens it has: 8 bytes
    assert calls.tolist() == [expected.calls + bool(others)] * 4
    assert float(sent.mean()) == pytest.approx(expected.sent + 8 * others, rel=1e-9)


def test_a_token_of_small_reaches_five_of_eight_ranks():
    reached = [paper.reached(SMALL, Plan(1, ranks)) * ranks / (ranks - 1) for ranks in (4, 8)]
    assert reached == pytest.approx([3.61, 5.28], abs=0.01)
    # Of 8,192 tokens 1,024 are a rank's: 43.6 MB and 0.12 ms each way, 11.6 ms in 48 layers.
    there, back = (
        estimate(SMALL, Plan(1, 8, exchange="all_to_all"), 1024, 1024, link=Link(alpha=0.0)).exchanges[name]
        for name in ("tokens to experts", "experts to tokens")
    )
    assert back.sent / 48 == pytest.approx(43.6e6, rel=2e-3)
    assert back.seconds / 48 == pytest.approx(0.12e-3, rel=0.02)
    assert 2 * back.seconds == pytest.approx(11.6e-3, rel=5e-3)
    assert 1 < there.sent / back.sent < 1.01  # with the routes


# ---------------------------------------------------------------- seconds of collectives, against published ones


@pytest.mark.parametrize(
    ("ranks", "size", "link", "microseconds"),
    [
        (4, 2**19, KERNEL, 10),  # vLLM, pull request 24532
        (4, 2**21, KERNEL, 23),
        (8, 2**19, NCCL, 25),  # Triton-distributed, issue 57
        (8, 2**20, NCCL, 32),
        (8, 2**22, NCCL, 59),
        (8, 2**24, NCCL, 136),
        (8, 2**26, KERNEL, 320),  # vLLM, pull request 42324
    ],
    ids=lambda value: f"{value}" if isinstance(value, int) else "",
)
def test_sums_take_as_long_as_published_within_30_percent(ranks, size, link, microseconds):
    assert 1e6 * all_reduce(ranks, size, link).seconds == pytest.approx(microseconds, rel=0.3)


def test_small_sums_take_one_shot_and_large_ones_two():
    one, two = all_reduce(8, 9216, KERNEL), all_reduce(8, 2**26, KERNEL)
    assert (one.calls, one.sent) == (1, 7 * 9216)
    assert one.seconds == pytest.approx(7e-6 + 7 * 9216 / 360e9)
    assert (two.calls, two.sent) == (2, 2 * 7 / 8 * 2**26)
    assert two.seconds == pytest.approx(340e-6, rel=1e-3)
    assert all_reduce(8, 2**23, KERNEL).seconds == pytest.approx(55e-6, rel=0.01)  # published: 46 to 76 us
    border = 7e-6 * 360e9 / (7 * (1 - 2 / 8))  # where what the second latency costs is what it saves
    assert [all_reduce(8, border * x, KERNEL).calls for x in (0.99, 1.01)] == [1, 2]


def test_sums_of_small():
    """Two in each of 48 layers; at batch 1 from 0.5 ms to 1.9 ms, and 39 and 34 ms in a prefill of 8,192 tokens."""
    by_link = [96e3 * all_reduce(8, 4608 * 2, link).seconds for link in (LAMPORT, KERNEL, NCCL)]
    assert by_link == pytest.approx([0.5, 0.69, 1.94], abs=0.01)
    of_step = [1e3 * estimate(SMALL, Plan(8), 1, 1024, link=link).collective_seconds for link in (LAMPORT, NCCL)]
    assert of_step == pytest.approx([97 / 96 * by_link[0], 97 / 96 * by_link[2]])  # the embedding's is one more
    prefill = [96e3 * all_reduce(ranks, 8192 * 4608 * 2).seconds for ranks in (8, 4)]
    assert prefill == pytest.approx([39.1, 34.0], abs=0.1)


def test_two_hosts_are_between_links_and_network():
    """A gather passes each byte to another host once, over its eight cards."""
    whole = 8192 * 4608 * 2
    ranks = paper._Ranks(16, 1, Link(), one_shot=True)
    half = ranks.half(whole)
    assert half.sent == 15 / 16 * whole
    assert half.seconds == pytest.approx(20e-6 + 7 / 8 * whole / 360e9 + 30e-6 + whole / 16 / 40e9)
    # Sent directly, eight of the 15 others are behind the card.
    assert ranks.direct(1e6).seconds == pytest.approx(30e-6 + 8e6 / 40e9)
    groups = paper._Ranks(2, 8, Link(), one_shot=True)  # like ranks of two tp groups: the network alone
    assert groups.half(whole).seconds == pytest.approx(30e-6 + whole / 2 / 40e9)


# ---------------------------------------------------------------- load


def test_the_busiest_of_eight_ranks_at_one_token():
    """Exactly: ways to choose 8 of 384 with at most m on each of eight ranks, as coefficients of a polynomial."""
    ways = [0]
    for most in range(1, 9):
        product = [1] + [0] * 8
        for _ in range(8):
            product = [sum(product[total - n] * comb(48, n) for n in range(min(most, total) + 1)) for total in range(9)]
        ways.append(product[8])
    expected = sum(m * (ways[m] - ways[m - 1]) for m in range(1, 9)) / comb(384, 8)
    drawn = load(384, 8, 8, 1)
    assert (drawn.visited, drawn.pairs) == pytest.approx((1, 1))
    assert drawn.busiest_visited == pytest.approx(expected, rel=0.02)
    assert drawn.busiest_pairs == pytest.approx(expected, rel=0.02)
    assert load(384, 8, 8, 1, skew=1).busiest_visited == pytest.approx(expected, rel=0.02)  # ranks do not know names


@pytest.mark.parametrize(("tokens", "ratio"), [(1, 2.6), (8, 1.5), (64, 1.12)])
def test_experts_that_the_busiest_rank_reads(tokens, ratio):
    found = load(384, 8, 8, tokens)
    assert found.busiest_visited / found.visited == pytest.approx(ratio, abs=0.03)


def test_load_by_tokens_and_skew():
    for skew in (0.0, 0.5, 1.0):
        found = [load(384, 8, 8, tokens, skew) for tokens in (1, 8, 64, 512, 8192)]
        ratios = [one.busiest_pairs / one.pairs for one in found]
        assert ratios == sorted(ratios, reverse=True)
        assert all(one.visited <= one.busiest_visited <= 48 for one in found)
    many = [load(384, 8, 8, 8192, skew) for skew in (0.0, 0.5, 1.0)]
    assert 1 < many[0].busiest_pairs / many[0].pairs < 1.03 < many[1].busiest_pairs / many[1].pairs
    assert many[2].busiest_pairs / many[2].pairs > 1.5
    assert load(384, 8, 8, 64, 1.0).visited < 0.8 * load(384, 8, 8, 64).visited  # the same few are chosen again
    alone = load(384, 8, 1, 64)  # every rank has a part of every expert
    assert alone.busiest_pairs == alone.pairs == 512
    assert alone.busiest_visited == pytest.approx(alone.visited, rel=0.01)
    assert load(7, 3, 2, 10_000).busiest_pairs / load(7, 3, 2, 10_000).pairs == pytest.approx(8 / 7, rel=0.01)
    assert load(384, 8, 8, 65536).busiest_pairs == pytest.approx(8 * load(384, 8, 8, 8192).busiest_pairs)


# ---------------------------------------------------------------- a rank's pass


def test_weights_of_a_rank_are_those_of_the_cost_model():
    for ranks in (4, 8):
        counted = cost.checkpoint_bytes(SMALL, tp=ranks, ep=ranks).total()
        assert weight_bytes(SMALL, Plan(ranks)).total() == pytest.approx(counted, rel=1e-4)


def test_flops_of_a_rank_are_those_of_the_cost_model():
    ours = {name: work.flops for name, work in estimate(SMALL, Plan(8), 8192, 8192).work.items()}
    theirs = cost.flops(SMALL, 8192, 8192, tp=8, ep=8)
    for part in ("attention projections", "attention over keys", "router", "experts"):
        assert ours[part] == pytest.approx(theirs[part], rel=1e-6), part


# An independent roofline of the same sizes, with kernels of its own choice, a router in float32 among them: ms of the
# mean and of the busiest rank.
FLOAT32 = Device(splits_router=False)
DECODING = {
    (8, 1, 1024): (0.645, 1.008),
    (8, 1, 32768): (0.675, 1.038),
    (8, 1, 102400): (0.741, 1.105),
    (8, 1, 1048576): (1.643, 2.006),
    (8, 8, 1024): (2.175, 3.019),
    (8, 64, 1024): (9.160, 10.113),
    (8, 64, 102400): (15.340, 16.294),
    (4, 1, 1024): (1.207, 1.552),
    (4, 8, 102400): (5.797, 6.642),
    (4, 64, 1024): (18.000, 19.003),
}


@pytest.mark.parametrize(("tp", "batch", "context"), DECODING)
def test_decoding_takes_as_long_as_another_roofline_says(tp, batch, context):
    step = estimate(SMALL, Plan(tp), 1, context, batch, device=FLOAT32)
    assert (1e3 * step.compute_seconds, 1e3 * step.busiest_seconds) == pytest.approx(
        DECODING[tp, batch, context], rel=0.01
    )
    width = estimate(SMALL, Plan(tp, ep=1), 1, context, batch, device=FLOAT32)  # nobody is busier
    assert width.busiest_seconds == pytest.approx(width.compute_seconds, rel=0.01)
    assert width.compute_seconds == pytest.approx(step.compute_seconds, rel=0.02)


PREFILL = {Plan(8): 87.1, Plan(8, sequence=True): 51.8, Plan(4): 133.9, Plan(4, sequence=True): 103.6}


@pytest.mark.parametrize("plan", PREFILL, ids=["tp8", "tp8 sequence", "tp4", "tp4 sequence"])
def test_prefill_takes_as_long_as_another_roofline_says(plan):
    """That one's output convolutions are on every rank unless tokens are cut; ours are on D / tp channels always."""
    ours = estimate(SMALL, plan, 8192, 8192, device=FLOAT32).compute_seconds
    whole = 48 * 2 * 2 * 2 * 8192 * 4608 / 4.3e12
    if not plan.sequence:
        ours += whole * (1 - 1 / plan.tp)
    assert 1e3 * ours == pytest.approx(PREFILL[plan], rel=0.006)


def test_a_router_takes_three_products_of_the_matrix_units_or_its_bytes():
    """3 x 29 GFLOP a layer at 790 TFLOP/s for 8,192 tokens; 7.1 MB at 4.3 TB/s for one."""
    for tokens, plan, us in ((8192, Plan(8), 110.1), (8192, Plan(8, sequence=True), 13.76), (1, Plan(8), 1.648)):
        work = estimate(SMALL, plan, tokens, 8192).work["router"]
        assert 1e6 * work.seconds / 48 == pytest.approx(us, rel=1e-3)


def test_gain_of_sequence_parallel_prefill_is_as_published():
    """-22 % and -26 %, between all of the collectives hidden and none, of a router in float32."""
    for tp, published, expected in ((4, 0.22, (0.21, 0.11)), (8, 0.26, (0.39, 0.20))):
        hidden, exposed = sequence_gain(tp, device=FLOAT32)
        assert (hidden, exposed) == pytest.approx(expected, abs=0.006)
        assert exposed < published < hidden + 0.02


def test_a_long_prompt_in_passes():
    found = prefill(SMALL, Plan(8), 44000)
    ends = [8192, 16384, 24576, 32768, 40960, 44000]
    passes = [estimate(SMALL, Plan(8), end - start, end) for start, end in pairwise([0, *ends])]
    for name in ("flops", "bytes", "compute_seconds", "busiest_seconds", "calls", "sent", "collective_seconds"):
        assert getattr(found, name) == pytest.approx(sum(getattr(one, name) for one in passes), rel=1e-9), name
    short = prefill(SMALL, Plan(8), 1000)
    assert short.seconds == pytest.approx(estimate(SMALL, Plan(8), 1000, 1000).seconds)


def test_skew_costs_time_unless_every_rank_has_a_part_of_every_expert():
    _, *rows = paper.loads()
    assert [row[0] for row in rows] == ["decode 1", "decode 8", "decode 64", "prefill 8192"]
    found = {row[0]: [float(cell) for cell in row[1:]] for row in rows}
    for even, busy, zipf, zipf_busy, sliced, sliced_zipf in found.values():
        assert (sliced, sliced_zipf) == pytest.approx((even, zipf), rel=0.02)
        assert even < busy < 1.6 * even
        assert zipf < zipf_busy
    even, busy, zipf, zipf_busy, *_ = found["prefill 8192"]
    assert zipf == even  # all experts are read, and as many pairs computed
    assert zipf_busy > 1.2 * busy
    assert found["decode 64"][2] < 0.75 * found["decode 64"][0]  # users ask for the same few


@pytest.fixture(scope="module")
def table() -> list[dict]:
    return paper.scaling()


def test_table_of_plans(table, capsys, monkeypatch):
    monkeypatch.setattr(paper, "scaling", lambda: table)
    paper.main()
    printed = capsys.readouterr().out.splitlines()
    assert max(map(len, printed)) <= 80
    assert [line for line in printed if line in paper.PLANS] == 2 * list(paper.PLANS)
    assert "    1.64    2.00" in next(line for line in printed if line.startswith("   1024K    30.6"))
    assert printed[-3:] == [
        "router split: TP4 13% or 4%, TP8 26% or 8%",
        "router in float32: TP4 21% or 11%, TP8 39% or 20%",
        "published: TP4 22%, TP8 26%",
    ]


def test_rows_of_plans_and_contexts(table):
    rows = {(row["plan"], row["context"]): row for row in table}
    assert list(rows) == [(name, context) for name in paper.PLANS for context in paper.CONTEXTS]
    longest = paper.CONTEXTS[-1]
    row = rows["TP8/EP8", longest]
    assert round(row["weights"] / 1e9, 1) == 49.7
    assert round(row["cache"] / 1e9, 2) == 4.32
    assert row["sequences"] == 21
    # What a step reads of the cache is the cache, but for the convolutions' inputs.
    assert row["decode"].work["attention over keys"].bytes == pytest.approx(row["cache"], rel=0.01)
    # A second host's ranks replicate key/value heads: no smaller cache.
    assert rows["TP16/EP16, 2 hosts", longest]["cache"] > 0.99 * row["cache"]
    for name in paper.PLANS:
        of_plan = [rows[name, context] for context in paper.CONTEXTS]
        for what in ("decode", "prefill"):
            for amount in ("compute_seconds", "flops", "bytes"):
                values = [getattr(row[what], amount) for row in of_plan]
                assert values == sorted(set(values)), (name, what, amount)
        assert len({row["decode"].sent for row in of_plan}) == 1
        per_token = [row["prefill"].sent / row["context"] for row in of_plan]
        assert per_token == pytest.approx([per_token[0]] * 4, rel=1e-5)
