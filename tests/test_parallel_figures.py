"""Figures and tables of full-scale runs: a whole run, what a run lacks, and what is modelled."""

import copy
from itertools import pairwise

import pytest

plt = pytest.importorskip("matplotlib.pyplot")

from inkling_ref.measure.ranges import ATTENTION, CONVOLUTION, EXPERTS, MIX  # noqa: E402
from inkling_ref.parallel import figures  # noqa: E402
from inkling_ref.parallel.estimate import ALPHAS  # noqa: E402
from inkling_ref.parallel.full_scale import LONGEST  # noqa: E402

K = 1024
JOINED = f"{CONVOLUTION} and {MIX}"


def step(backend, rows, context, seconds, tokens=1):
    return {
        "backend": backend, "rows": rows, "context": context, "tokens": tokens, "seconds": seconds, "best": seconds,
        "collective_seconds": 2e-3, "roofline_seconds": 0.7e-3 * rows, "busiest_seconds": 1e-3 * rows,
        "pairs_share": 0.13, "mean_share": 0.125, "busiest_share": 0.3, "memory_bytes": 51e9,
    }  # fmt: skip


def profile(backend, phase, rows, context, names, **more):
    sections = [
        {"name": n, "seconds": 3e-4, "launches": 7, "roofline_seconds": 1e-4, "bytes": 1e6, "flops": 1e6} for n in names
    ]
    kernels = [{"name": f"kernel_{n}", "launches": 7, "seconds": 3e-4, "section": n} for n in names]
    return {
        "backend": backend, "phase": phase, "rows": rows, "context": context, "launches": 7 * len(names),
        "launches_a_layer": 9.3, "seconds": 3e-4 * len(names), "sections": sections, "kernels": kernels, **more,
    }  # fmt: skip


RUN = {
    "gpu": "a GPU", "torch": "2.0", "triton": "3.0", "date": "2001-02-03", "preset": "small", "tp": 8, "rank": 3,
    "skew": 0.2, "copy": 4e12, "matrix": 8e14, "weights_bytes": 50.6e9,
    "decode": [
        step("triton", 1, 32 * K, 1.5e-3), step("triton", 8, 32 * K, 9e-3), step("triton", 1, LONGEST, 2.2e-3),
        step("triton", 1, K, 9e-3), step("triton", 1, 32 * K, 3e-3, tokens=8), step("reference", 1, 32 * K, 36e-3),
        {"backend": "compile", "rows": 1, "context": 32 * K, "tokens": 1, "failed": "OutOfMemoryError"},
    ],
    "prefill": [
        {"backend": "triton", "tokens": 8 * K, "way": way, "seconds": seconds, "collective_seconds": 0.04,
         "roofline_seconds": 0.05, "memory_bytes": 6e10}
        for way, seconds in (("replicated", 0.12), ("sequence", 0.096))
    ],
    "profile": [
        profile("triton", "decode", 1, 32 * K, [JOINED, ATTENTION, EXPERTS]),
        profile("reference", "decode", 1, 32 * K, [MIX, CONVOLUTION, ATTENTION, EXPERTS]),
        profile("triton", "prefill", 1, 8 * K, [JOINED, ATTENTION], way="sequence"),
    ],
}  # fmt: skip
FIGURES = ("waterfall", "roofline", "latency", "prefill")


def collectives(way):
    """Of `calibrate` on two devices: 3 us and 50 GB/s."""
    fit = {"alpha": 3e-6, "beta": 2e-11, "off": 0.0}
    sizes = (1_000, 70_000, 9_000_000)
    step = {"way": "step", "batch": 8, "seconds": 5e-3, "collectives": None, "by fits": 1e-3, "by link": 1.1e-3,
            "published": 2e-3, "compute": 1.5e-3}  # fmt: skip
    return {
        "device": "a GPU", "ranks": 2, "collectives": "NCCL 1.2.3", "torch": "2.0", "date": "2001-02-03",
        "environment": {"NCCL_NVLS_ENABLE": "0", "NCCL_VERSION": "1"},
        "published": {"alpha": 2e-5, "bandwidth": 4.5e11, "usable": 0.8},
        "points": [
            {"collective": name, "sent": n, way: 3e-6 + n * 2e-11}
            for name in ("sum", "reduce_scatter", "gather", "swap") for n in sizes
        ],
        "fits": {f"{name}, {way}": fit for name in ("sum", "reduce_scatter", "gather", "swap")},
        "steps": [step, {**step, "way": "layers", "collectives": 2e-3}],
    }  # fmt: skip


@pytest.fixture(autouse=True)
def no_window():
    plt.switch_backend("Agg")
    yield
    plt.close("all")


@pytest.mark.parametrize("name", FIGURES)
def test_every_figure_says_where_and_when(name):
    figure = getattr(figures, name)(RUN)
    figure.draw_without_rendering()
    text = figure.get_supxlabel()
    for word in ("a GPU", "torch 2.0", "triton 3.0", "2001-02-03", "small, rank 3 of TP8, skewed by 0.2"):
        assert word in text


@pytest.mark.parametrize("name", FIGURES)
def test_a_run_of_one_backend(name):
    run = copy.deepcopy(RUN)
    for kind in ("decode", "prefill", "profile"):
        run[kind] = [row for row in run[kind] if row["backend"] == "triton"][:1]
    getattr(figures, name)(run).draw_without_rendering()


def test_the_waterfall_ends_at_the_clock():
    figure = figures.waterfall(RUN)
    assert [ax.get_title() for ax in figure.axes] == ["reference", "triton"]
    bars = figure.axes[1].patches
    assert bars[-1].get_width() == pytest.approx(1.5)
    assert bars[-2].get_x() + bars[-2].get_width() == pytest.approx(1.5)  # what is between kernels ends there


def test_goals():
    rows = {row[0]: row[2:] for row in figures.goal_table(RUN)}
    assert rows["step of 1 x 1 at 32K"] == ("1.500 ms", "met")
    assert rows["step of 8 x 1 at 32K"] == ("9.000 ms", "missed")
    assert rows["step of 64 x 1 at 32K"] == ("not measured", "")
    assert rows["step of 1 x 1 at 1M"] == ("2.200 ms", "met")
    assert rows["launches a layer, 1 row"] == ("9.3", "met")
    assert rows["reference / kernels, 1 x 1 at 32K"] == ("24.0", "met")
    assert rows["compile / kernels, 1 x 1 at 32K"] == ("not measured", "")
    assert rows["prefill of 8K, sequence"] == ("96.0 ms", "met")
    assert rows["cutting tokens saves, of computation alone"] == ("20%", "missed")


def test_goals_of_an_empty_run():
    empty = {**RUN, "decode": [], "prefill": [], "profile": []}
    _, *rows = figures.goal_table(empty)
    assert {row[2:] for row in rows} == {("not measured", "")}


def test_tables():
    head, *rows = figures.section_table(RUN, 1)
    assert head[2:] == ("reference, us (launches)", "triton, us (launches)")
    assert (CONVOLUTION, "100.0", "300 (7)", "") in rows
    assert (JOINED, "100.0", "", "300 (7)") in rows
    assert rows[-2:] == [("by the clock", "", "36,000", "1,500"), ("launches a layer", "", "9.3", "9.3")]
    _, *rows = figures.decode_table(RUN)
    assert rows[0] == ("triton", "1 x 1", "32K", "1.500", "0.700", "47%", "2.0", "+2.00", "51.0")
    assert rows[-1][3] == "failed"
    assert {len(row) for row in rows} == {9}
    _, *rows = figures.busiest_table(RUN)
    assert rows[0] == ("1 x 1", "32K", "12.5%", "13.0%", "30.0%", "0.700", "1.000", "1.500")
    assert len(rows) == 5


@pytest.mark.parametrize("way", ["graph", "eager"])
def test_collectives_lie_on_their_fits(way):
    """Of every collective a row of points and, right behind it, its dashed line."""
    figure = figures.calls(collectives(way))
    figure.draw_without_rendering()
    ax = figure.axes[0]
    assert way in ax.get_ylabel()
    for points, line in zip(ax.lines[0:8:2], ax.lines[1:8:2], strict=True):
        assert "3.0 us, 50 GB/s" in points.get_label()
        for end in (0, -1):
            assert points.get_xydata()[end] == pytest.approx(line.get_xydata()[end])
    assert ax.lines[8].get_ydata()[0] == pytest.approx(20 + 1e3 / 360e9 * 1e6)  # published
    for word in ("2 x a GPU", "NCCL 1.2.3", "torch 2.0", "NCCL_NVLS_ENABLE=0", "2001-02-03"):
        assert word in figure.get_supxlabel()


def test_true_steps_beside_their_models():
    _, *rows = figures.step_table(collectives("graph"))
    assert rows[0] == ("step", "8", "5.000", "", "1.000", "1.100", "2.000", "1.500", "2.500")
    assert rows[1][:4] == ("layers", "8", "5.000", "2.000")


def test_excess_of_steps_that_were_not_measured():
    """At 32K: 0.8 ms beyond the limit of 1 x 1, 3.4 of 8 x 1, 2.3 of 1 x 8; more than that beyond."""
    assert figures.excess(RUN, 1, 1, 0.7e-3) == pytest.approx(0.8e-3)
    assert figures.excess(RUN, 8, 1, 5.6e-3) == pytest.approx(3.4e-3)
    assert figures.excess(RUN, 1, 8, 5.6e-3) == pytest.approx(2.3e-3)
    assert 0.8e-3 < figures.excess(RUN, 3, 1, 1e-3) < 3.4e-3
    assert figures.excess(RUN, 80, 1, 56e-3) == pytest.approx(34e-3)
    assert figures.excess(RUN, 10, 8, 7e-3) == pytest.approx(23e-3)
    assert figures.excess(None, 8, 1, 1.0) == 0


@pytest.mark.parametrize("run", [None, RUN], ids=["on paper", "measured"])
def test_the_frontier(run):
    """More rows: slower for each, more for all. Drafts: faster for a single user. A dearer exchange: slower."""
    push, nccl = ALPHAS["Lamport push"], ALPHAS["NCCL"]
    points = [figures.served(run, rows, 1, push) for rows in (1, 8, 64)]
    for (fewer, less), (more, gain) in pairwise(points):
        assert fewer > more
        assert less < gain
    assert figures.served(run, 1, 4.0, push)[0] > points[0][0]
    assert figures.served(run, 1, 1, nccl)[0] < points[0][0]
    figure = figures.frontier(run, {"no drafts": 1, "some": 3.5})
    figure.draw_without_rendering()
    assert "MODELLED" in figure.axes[0].get_title()
    assert ("a GPU" if run else "paper alone") in figure.get_supxlabel()
