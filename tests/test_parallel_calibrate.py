"""`inkling-ref bench collectives`: its fit, and the whole command on two processes with gloo."""

import json
from contextlib import redirect_stdout
from itertools import product
from pathlib import Path

import pytest
from parallel_worker import start
from test_parallel import succeed

from inkling_ref.cli import main
from inkling_ref.parallel import calibrate
from inkling_ref.parallel.calibrate import NAMES, Fit, by_fits, fit


def test_a_fit_finds_latency_and_bandwidth():
    points = [(sent, 7e-6 + sent / 310e9) for sent in (4608, 36864, 589824, 75497472)]
    found = fit(points)
    assert found[:2] == pytest.approx((7e-6, 1 / 310e9), rel=1e-9)
    assert found.off < 1e-9
    assert found.seconds(3, 5000) == pytest.approx(3 * 7e-6 + 5000 / 310e9)
    noisy = [(sent, seconds * (1.1 if i % 2 else 1)) for i, (sent, seconds) in enumerate(points)]
    assert 0.04 < fit(noisy).off < 0.11  # of the smallest and the largest alike, not of the largest alone


@pytest.mark.parametrize(
    ("points", "expected"),
    [
        ([(100, 3e-6), (1000, 2e-6), (3000, 2e-6)], "beta"),  # faster with size
        ([(1000, 1e-6), (2000, 3e-6), (4000, 8e-6)], "alpha"),  # through less than nothing
    ],
    ids=["no cost of a byte", "no latency"],
)
def test_neither_is_negative(points, expected):
    found = fit(points)
    assert getattr(found, expected) == 0
    assert min(found[:2]) == 0 < max(found[:2])


def test_seconds_of_a_phase():
    fits = {(name, "eager"): Fit(1.0 * i, 10.0 * i, 0.0) for i, name in enumerate(("gather", "swap"), 1)}
    counts = {"gather over tp": {"calls": 5, "sent": 3}, "exchange over world": {"calls": 7, "sent": 2}}
    assert by_fits(counts, fits) == (5 * 1 + 3 * 10) + (7 * 2 + 2 * 20)


def few(rank: int, folder: Path) -> None:
    """The command, with fewer calls."""
    calibrate.CALLS, calibrate.ROUNDS, calibrate.ROWS = 2, 3, {"cpu": (1, 7)}
    calibrate.BATCHES, calibrate.CONTEXT, calibrate.STEPS = (1, 3), 9, 2
    with (folder / f"stdout-{rank}").open("w") as stdout, redirect_stdout(stdout):
        assert main(["bench", "collectives", "--json", str(folder / "report.json")]) == 0


def test_the_command_measures_fits_and_compares(tmp_path):
    succeed(start(2, tmp_path, few, tmp_path))
    report = json.loads((tmp_path / "report.json").read_text())
    assert (report["ranks"], report["collectives"], report["device"]) == (2, "gloo", "cpu")
    points = {(p["collective"], p["dtype"], p["rows"]): p for p in report["points"]}
    assert len(points) == len(report["points"]) == len(NAMES) * 2 * 2
    assert points["sum", "float32", 7]["sent"] == 7 * 128 * 4  # there and back, of which a half each
    assert points["gather", "bfloat16", 7]["sent"] == 7 * 128 * 2 / 2
    assert min(point["eager"] for point in report["points"]) > 0
    assert set(report["fits"]) == {f"{name}, eager" for name in (*NAMES, "layers")}
    assert [(step["way"], step["batch"]) for step in report["steps"]] == [*product(("layers", "step"), (1, 3))]
    for step in report["steps"]:
        assert 0 < step["collectives"] < step["seconds"]
        assert min(step["by fits"], step["by link"], step["published"], step["compute"]) > 0
    out = (tmp_path / "stdout-0").read_text()
    assert "all-to-all, eager" in out
    assert max(map(len, out.splitlines())) <= 80
    assert (tmp_path / "stdout-1").read_text() == ""
