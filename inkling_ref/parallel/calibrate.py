r"""`inkling-ref bench collectives`, under torchrun: what collectives take here, beside the cost model; a true step.

**Times.** All ranks start together and make `CALLS` calls one after the other: of a round's time the slowest rank's
counts, of `ROUNDS` rounds the median. `eager` calls are launched one by one; `graph` is a replay of one CUDA graph of
them all. Sizes are those of decoding 1, 8 and 64 rows, of a short prompt and of a prefill of 8,192 tokens.

**Fit.** Of every collective a latency alpha and the seconds beta of a byte that leaves a rank (`collectives` says how
many do), neither negative, by least squares of the relative errors; `off` is the largest of those:

$$ \min_{\alpha, \beta \geq 0} \sum_i \left(\frac{\alpha + \beta s_i}{t_i} - 1\right)^2 $$

NCCL changes its protocol with the size, which no straight line follows.

**Published.** `collectives.Link`'s defaults; of an all-reduce `estimate.all_reduce`.

**A step.** Four layers at Small's sizes (on a CPU: nano) with random packed experts decode on these ranks: `layers`,
launched call by call, and `step`, on a `DecodeStep`, on a GPU as one CUDA graph. First the seconds of a step, and those
that the rank that waits least spends in collectives, from launch to end. Then on paper: the same calls by the fits;
`estimate`'s collectives, with one link fitted (to reduce_scatter and gather, or to the all-reduces of a step) and with
the published one; its computation, by the roofs of an H200 and without launches.
"""

import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..config import FULL, SLIDING, InklingConfig
from ..errors import InputError
from ..files import whole_file
from ..model import Inkling
from ..quantization import dtype_name
from .apply import TIMEOUT, Mesh
from .collectives import Group, Link, entering, moment, seconds_between
from .estimate import all_reduce, estimate
from .launch import barrier, rank_and_size, variable, world
from .plan import Plan
from .run import measure, measure_filled
from .synthetic import synthetic

CALLS, ROUNDS = 20, 9
ROWS = {"cuda": (1, 8, 64, 512, 8192), "cpu": (1, 8, 64, 512)}
DTYPES = (torch.bfloat16, torch.float32)
NAMES = {"sum": "all-reduce", "reduce_scatter": "reduce-scatter", "gather": "all-gather", "swap": "all-to-all"}
BATCHES, CONTEXT, STEPS = (1, 8, 64), 128, 16


class Fit(NamedTuple):
    """Seconds of a call and of a byte, and the largest relative error."""

    alpha: float
    beta: float
    off: float

    def seconds(self, calls: int | float, sent: int | float) -> float:
        return calls * self.alpha + sent * self.beta


def fit(points: list[tuple[int, float]]) -> Fit:
    """Of (bytes sent, seconds), at least two."""
    sent, seconds = torch.tensor(points, dtype=torch.float64).T
    columns = torch.stack([1 / seconds, sent / seconds], dim=1)
    found: list[tuple[float, Tensor]] = []
    for used in ([0, 1], [0], [1]):  # where one would be negative it is 0
        x = torch.zeros(2, dtype=torch.float64)
        x[used] = torch.linalg.lstsq(columns[:, used], torch.ones(len(points), 1, dtype=torch.float64)).solution[:, 0]
        if (x >= 0).all():
            found.append((float((columns @ x - 1).square().sum()), x))
    x = min(found, key=lambda pair: pair[0])[1]
    return Fit(*x.tolist(), float((columns @ x - 1).abs().max()))


def main(device: str = "cpu", json_file: Path | None = None, timeout: timedelta = TIMEOUT) -> dict[str, Any] | None:
    """Measure on all processes of torchrun; the report, which rank 0 writes. None on other ranks.

    Raises:
        InputError: one process, or more than can share the model of the step.
    """
    _, size = rank_and_size()
    config, plan = _config(device), Plan(size)
    if size == 1:
        raise InputError("bench collectives: 1 process, expected 2 or more: torchrun --nproc-per-node 2")
    plan.check(config)
    if device == "cuda":
        torch.cuda.set_device(variable("LOCAL_RANK", 0, torch.cuda.device_count()))
    with torch.inference_mode(), world(plan, device, timeout) as mesh:
        points = calibrate(mesh.world, config.text.hidden_size, device)
        fits = fitted(points)
        steps = true_steps(mesh, config, device, fits)
        if mesh.rank:
            return None
        report = {
            "device": torch.cuda.get_device_name() if device == "cuda" else "cpu",
            "ranks": size,
            "collectives": f"NCCL {'.'.join(map(str, torch.cuda.nccl.version()))}" if device == "cuda" else "gloo",
            "environment": {name: text for name, text in sorted(os.environ.items()) if name.startswith("NCCL_")},
            "torch": torch.__version__,
            "python": platform.python_version(),
            "date": time.strftime("%Y-%m-%d", time.gmtime()),
            "published": asdict(Link()),
            "points": points,
            "fits": {f"{name}, {way}": of._asdict() for (name, way), of in fits.items()},
            "steps": steps,
        }
        if json_file is not None:
            with whole_file(json_file) as partial:
                partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
        return report


def _config(device: str) -> InklingConfig:
    """Of the step: on a GPU four of Small's layers."""
    if device == "cpu":
        return InklingConfig(InklingConfig.nano().text, None)
    text = replace(InklingConfig.small().text, num_hidden_layers=4, layer_types=[SLIDING, SLIDING, SLIDING, FULL])
    return InklingConfig(text, None)


# ---------------------------------------------------------------- collectives


def calibrate(group: Group, D: int, device: str) -> list[dict[str, Any]]:
    """A row for each collective, dtype and size: seconds by way of launching, and what the cost model says."""
    points: list[dict[str, Any]] = []
    for name in NAMES:
        for dtype in DTYPES:
            for rows in ROWS[device]:
                call, whole = _call(group, name, torch.randn(rows * D, device=device).to(dtype))
                sent = (2 if name == "sum" else 1) * (group.size - 1) * whole // group.size
                model = all_reduce(group.size, whole).seconds if name == "sum" else Link().seconds(1, sent)
                point = {"collective": name, "dtype": dtype_name(dtype), "rows": rows, "sent": sent}
                point |= {"eager": _seconds(group, call, device), "published": model}
                if device == "cuda":
                    point["graph"] = _seconds(group, _captured(call), device, calls=CALLS)
                points.append(point)
    return points


def _call(group: Group, name: str, x: Tensor) -> tuple[Callable[[], object], int]:
    """The collective as `Group` makes it, without its counting and copies; bytes of the whole tensor."""
    part = x[: len(x) // group.size].clone()
    if name == "sum":
        x.zero_()  # its own result is its next input: anything else would overflow
        return lambda: group._sum(x), x.nbytes
    if name == "gather":
        return lambda: group._gather(x, part), x.nbytes
    if name == "reduce_scatter":
        return lambda: group._reduce_scatter(part, x), x.nbytes
    out = torch.empty_like(x)
    return lambda: group._exchange(out, x, None, None), x.nbytes


def _captured(call: Callable[[], object]) -> Callable[[], object]:
    """`CALLS` calls as one CUDA graph; the communicator is there already."""
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # NCCL's watching thread asks the device too
        for _ in range(CALLS):
            call()
    return graph.replay


def _seconds(group: Group, call: Callable[[], object], device: str, calls: int = 1) -> float:
    """Of one collective; `call` makes so many."""
    where, times = torch.device(device), []
    for _ in range(ROUNDS + 1):
        with entering(group.ranks, "calibration"):
            barrier()
            start = moment(where)
            for _ in range(CALLS // calls):
                call()
            times.append(seconds_between(start, moment(where)) / CALLS)
    with entering(group.ranks, "the times"):
        slowest = torch.tensor(times[1:], device=device)
        dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return statistics.median(slowest.tolist())


def fitted(points: list[dict[str, Any]]) -> dict[tuple[str, str], Fit]:
    """By collective and way of launching; "layers": what the layers of a step call, reduce_scatter and gather."""
    groups = {name: (name,) for name in NAMES} | {"layers": ("reduce_scatter", "gather")}
    return {
        (group, way): fit([(point["sent"], point[way]) for point in points if point["collective"] in names])
        for group, names in groups.items()
        for way in ("eager", "graph")
        if way in points[0]
    }


# ---------------------------------------------------------------- a step


def true_steps(
    mesh: Mesh, config: InklingConfig, device: str, fits: dict[tuple[str, str], Fit]
) -> list[dict[str, Any]]:
    """Decoding on these ranks beside its model: seconds of one step, a row for each way and batch."""
    dtype, backend = (torch.bfloat16, "triton") if device == "cuda" else (torch.float32, "torch")
    model = synthetic(config, mesh, device, dtype, backend)
    ids = torch.randint(config.text.unpadded_vocab_size, (max(BATCHES), CONTEXT), generator=torch.Generator())
    steps: list[dict[str, Any]] = []
    for way in ("layers", "step"):
        for batch in BATCHES:
            own = _decoded(model, ids[:batch].tolist(), way)
            ranks = [None] * mesh.world.size
            with entering(mesh.world.ranks, "the reports"):
                dist.all_gather_object(ranks, own)
            row = {"way": way, "batch": batch}
            steps.append(row | _beside(config, mesh.plan, row, ranks, fits))
    return steps


def _decoded(model: Inkling, prompts: list[list[int]], way: str) -> dict[str, Any]:
    counts = model.mesh.traffic.counts
    if way == "step":
        counts.clear()
        return measure_filled(model, len(prompts), CONTEXT, STEPS, 1)
    for new in (3, STEPS + 1):  # the first time all is compiled
        counts.clear()
        options = {"max_new_tokens": new, "drafter": None, "eos_token_id": []}
        own = measure(model, prompts, options, trace=False)
    return own


def _beside(
    config: InklingConfig, plan: Plan, row: dict[str, Any], ranks: list[dict], fits: dict[tuple[str, str], Fit]
) -> dict[str, float | None]:
    """Seconds of one step: measured, and on paper."""
    is_step, counts = row["way"] == "step", ranks[0]["traffic"]["decode"]
    way = "graph" if is_step and ("sum", "graph") in fits else "eager"
    alpha, beta, _ = fits["sum" if is_step else "layers", way]  # a step adds up in one call
    links = Link(alpha, 1 / beta if beta else float("inf"), 1.0), Link()
    by_link, published = (
        estimate(config, plan, 1, CONTEXT + STEPS // 2, row["batch"], link=link, one_shot=is_step) for link in links
    )
    waited = min(sum(count["seconds"] for count in rank["traffic"]["decode"].values()) for rank in ranks)
    return {
        "seconds": max(rank["decode_seconds"] for rank in ranks) / STEPS,
        "collectives": waited / STEPS if way == "eager" else None,  # nobody sees those of a graph
        "by fits": by_fits(counts, fits, way) / STEPS,
        "by link": by_link.collective_seconds,
        "published": published.collective_seconds,
        "compute": by_link.busiest_seconds,
    }


def by_fits(counts: dict[str, dict[str, int | float]], fits: dict[tuple[str, str], Fit], way: str = "eager") -> float:
    """Seconds of a phase of a rank's traffic, as `inkling-ref run` reports it."""
    total = 0.0
    for what, count in counts.items():
        name = what.split(" over ")[0]
        total += fits["swap" if name == "exchange" else name, way].seconds(count["calls"], count["sent"])
    return total


# ---------------------------------------------------------------- what people read


def table(report: dict[str, Any]) -> str:
    """At most 80 columns."""
    names = ("device", "collectives", "torch", "date")
    lines = [f"{report['ranks']} x " + ", ".join(report[name] for name in names)]
    heads = ("KB sent", "eager", "graph", "published")
    lines.append(f"{'us of a call':15}{'dtype':9}{'rows':>6}" + "".join(f"{head:>11}" for head in heads))
    for point in report["points"]:
        times = (f"{1e6 * point[way]:.1f}" if way in point else "" for way in heads[1:])
        cells = "".join(f"{cell:>11}" for cell in (f"{point['sent'] / 1e3:.1f}", *times))
        lines.append(f"{NAMES[point['collective']]:15}{point['dtype']:9}{point['rows']:6}{cells}")
    lines += ["", f"{'fit':26}{'us a call':>10}{'GB/s':>10}{'off by at most':>18}"]
    link = Link(**report["published"])
    lines.append(f"{'published':26}{1e6 * link.alpha:10.1f}{link.usable * link.bandwidth / 1e9:10.1f}")
    for name, of in report["fits"].items():
        kind, way = name.split(", ")
        speed = f"{1e-9 / of['beta']:.1f}" if of["beta"] else "any"
        lines.append(f"{NAMES.get(kind, kind) + ', ' + way:26}{1e6 * of['alpha']:10.1f}{speed:>10}{of['off']:18.0%}")
    lines += ["", "ms of a step, and in collectives; on paper: those, three ways, and computation"]
    heads = ("whole", "in calls", "by fits", "by link", "published", "compute")
    columns = ("seconds", "collectives", "by fits", "by link", "published", "compute")
    lines.append(f"{'':7}{'batch':5}" + "".join(f"{head:>11}" for head in heads))
    for step in report["steps"]:
        cells = ("" if step[name] is None else f"{1e3 * step[name]:.3f}" for name in columns)
        lines.append(f"{step['way']:7}{step['batch']:5}" + "".join(f"{cell:>11}" for cell in cells))
    return "\n".join(lines)
