r"""Figures and tables of one rank of a full-size model: what `full_scale` measured, beside its limits.

A run is an entry of the file that `full_scale` writes. What it lacks is left out, and every figure names hardware,
versions and date. `calls` and `step_table` show what `calibrate` measured on several devices. Needs matplotlib.

`frontier` is modelled, for a world that nobody has run here. Every layer waits for its busiest rank; what a step takes
beyond its limit is what the measured rank's step took beyond its own, as a function of how many tokens it reads (of
each row, where that was measured); and collectives come on top:

$$ t = \mathrm{limit}_{\mathrm{busiest}} + (t - \mathrm{limit})_{\mathrm{measured}} + t_{\mathrm{collectives}} $$

Sources of what is published: vLLM's article on Inkling 2 Small (tokens a second); NVIDIA's data sheets (4.8 TB/s of an
H200, 8 TB/s of a GPU in a GB200); tokens a pass of a drafter for Inkling-Small, by those who trained it.
"""

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

from matplotlib import pyplot as plt
from matplotlib.figure import Figure

from ..config import InklingConfig
from ..measure.ranges import (
    ATTENTION,
    CONVOLUTION,
    EMBEDDING,
    EXPERTS,
    MIX,
    PREPARATION,
    PROJECTIONS,
    ROUTER,
    UNEMBEDDING,
)
from ..notebook import COLOURS
from .calibrate import NAMES, Fit
from .collectives import Link
from .estimate import ALPHAS, Device, estimate
from .full_scale import GAIN_GOAL, GOALS, LAUNCHES_GOAL, PREFILL_GOALS, RATIO_GOALS, K, gain_of
from .plan import Plan

Run = dict[str, Any]
Real = int | float

JOINED, ELSEWHERE = f"{CONVOLUTION} and {MIX}", "elsewhere"
SECTIONS = {
    EMBEDDING: "embedding", MIX: "residual", JOINED: "residual", CONVOLUTION: "conv", PROJECTIONS: "bias",
    PREPARATION: "key", ATTENTION: "attention", ROUTER: "gate", EXPERTS: "moe", UNEMBEDDING: "text", ELSEWHERE: "grey",
}  # fmt: skip
BACKENDS = ("reference", "compile", "torch", "triton")
BATCHES = {1: "attention", 8: "moe", 64: "drafter"}
SCALED = 4.8 / 8.0  # an H200's memory beside that of a GPU in a GB200
PUBLISHED = {  # tokens/s of a user, tokens/s of a GPU; the second on hardware that is not stated
    "1,100 a GPU\nat 100 a user, TP8": (100.0, 1100.0),
    "up to 630\nfor one user, TP4": (630.0, 630 / 4),
}
CONTEXT = 8 * K  # of a server's users
DRAFTER_BYTES, DRAFTED, EXCHANGES = 2.9e9, 7, 1 + 2 * 5 + 2 * 7  # of Small's: fusion, five layers, seven tokens


# ---------------------------------------------------------------- what a run holds


def said(run: Run) -> str:
    """Where and when."""
    return f"{run['gpu']}, torch {run['torch']}, triton {run['triton']}, {run['date']}"


def which(run: Run) -> str:
    """Of which model which rank."""
    skew = f", skewed by {run['skew']:g}" if run["skew"] else ""
    return f"{run['preset']}, rank {run['rank']} of TP{run['tp']}{skew}"


def rows_of(run: Run, kind: str, **wanted: Any) -> list[dict[str, Any]]:
    """Cases of `kind` (decode, prefill, profile) that came to an end."""
    return [row for row in run[kind] if "seconds" in row and all(row.get(name) == x for name, x in wanted.items())]


def ours(run: Run) -> str:
    """The backend of the run's own steps: on a CPU the reference's operations."""
    return "torch" if run["gpu"] == "cpu" else "triton"


def profiles(run: Run, rows: int) -> dict[str, dict[str, Any]]:
    """The decoding step of `rows` rows of every backend, at the context that our own was profiled at."""
    own = rows_of(run, "profile", phase="decode", rows=rows, backend=ours(run))
    found = rows_of(run, "profile", phase="decode", rows=rows, context=own[0]["context"]) if own else []
    return {name: row for name in BACKENDS for row in found if row["backend"] == name}


def ordered(profile: dict[str, Any]) -> list[dict[str, Any]]:
    """Its sections from the model's begin to its end, what belongs to none last."""
    return sorted(profile["sections"], key=lambda section: list(SECTIONS).index(section["name"]))


def step_of(run: Run, profile: dict[str, Any]) -> Real | None:
    """Seconds of the step that was profiled, by the clock."""
    case = {name: profile[name] for name in ("backend", "rows", "context")}
    found = rows_of(run, "decode", tokens=1, **case)
    return found[0]["seconds"] if found else None


def device_of(run: Run) -> Device:
    """Its rates."""
    return Device(run["copy"], run["matrix"])


def config_of(run: Run) -> InklingConfig:
    """The model's sizes."""
    return getattr(InklingConfig, run["preset"])()


def length(context: int) -> str:
    """As people say it."""
    if context >= 1000 * K:
        return f"{round(context / K / K)}M"
    return f"{round(context / K)}K" if context >= K else str(context)


def short(section: str) -> str:
    """Its name, for an axis."""
    return section.replace("short convolution", "convolution").replace("attention residual mix", "mix")


# ---------------------------------------------------------------- tables


def decode_table(run: Run) -> list[tuple[str, ...]]:
    """Every step, with its limit, its goal and what comes on top."""
    goals = GOALS if (run["preset"], run["tp"]) == ("small", 8) else {}
    table = [("backend", "rows x tokens", "context", "ms", "limit", "of the limit", "goal", "collectives", "GB")]
    for row in run["decode"]:
        first = (row["backend"], f"{row['rows']} x {row['tokens']}", length(row["context"]))
        if "seconds" not in row:
            table.append((*first, "failed", *[""] * 5))
            continue
        goal = goals.get((row["rows"], row["context"], row["tokens"])) if row["backend"] == ours(run) else None
        share = f"{row['roofline_seconds'] / row['seconds']:.0%}"
        times = (f"{1e3 * row[name]:.3f}" for name in ("seconds", "roofline_seconds"))
        on_top, memory = f"+{1e3 * row['collective_seconds']:.2f}", f"{row['memory_bytes'] / 1e9:.1f}"
        table.append((*first, *times, share, f"{1e3 * goal:.1f}" if goal else "", on_top, memory))
    return table


def section_table(run: Run, rows: int) -> list[tuple[str, ...]]:
    """Microseconds and launches of a step by section and backend; what a model has apart is in one launch of a step."""
    found = profiles(run, rows)
    by_name = {name: {s["name"]: s for s in profile["sections"]} for name, profile in found.items()}
    table = [("section", "limit, us", *(f"{name}, us (launches)" for name in found))]
    for section in SECTIONS:
        there = [sections.get(section) for sections in by_name.values()]
        if any(there):
            limit = 1e6 * max(s["roofline_seconds"] for s in there if s)
            cells = (f"{1e6 * s['seconds']:,.0f} ({s['launches']:,.0f})" if s else "" for s in there)
            table.append((section, f"{limit:,.1f}" if limit else "", *cells))
    sums = (f"{1e6 * p['seconds']:,.0f} ({p['launches']:,.0f})" for p in found.values())
    steps = [step_of(run, profile) for profile in found.values()]
    by_clock = (f"{1e6 * seconds:,.0f}" if seconds else "" for seconds in steps)
    a_layer = (f"{p['launches_a_layer']:,.1f}" for p in found.values())
    return [*table, ("all kernels", "", *sums), ("by the clock", "", *by_clock), ("launches a layer", "", *a_layer)]


def goal_table(run: Run) -> list[tuple[str, ...]]:
    """Every goal beside what was measured; "not measured" where there is nothing."""
    kernels = {(r["rows"], r["context"], r["tokens"]): r["seconds"] for r in rows_of(run, "decode", backend=ours(run))}
    table = [("goal", "at most / at least", "measured", "")]

    def add(name: str, sign: str, goal: Real, found: Real | None, form: Callable[[Real], str]) -> None:
        met = found is not None and (found <= goal if sign == "<=" else found >= goal)
        outcome = "" if found is None else "met" if met else "missed"
        table.append((name, f"{sign} {form(goal)}", "not measured" if found is None else form(found), outcome))

    def ms(seconds: Real) -> str:
        return f"{1e3 * seconds:.{3 if seconds < 0.02 else 1 if seconds < 0.1 else 0}f} ms"

    for case, goal in GOALS.items():
        add(f"step of {case[0]} x {case[2]} at {length(case[1])}", "<=", goal, kernels.get(case), ms)
    first = profiles(run, 1).get(ours(run))
    add("launches a layer, 1 row", "<=", LAUNCHES_GOAL, first and first["launches_a_layer"], "{:.1f}".format)
    own = kernels.get((1, 32 * K, 1))
    for backend, goal in RATIO_GOALS.items():
        there = rows_of(run, "decode", backend=backend, rows=1, context=32 * K, tokens=1)
        ratio = there[0]["seconds"] / own if there and own else None
        add(f"{backend} / kernels, 1 x 1 at 32K", ">=", goal, ratio, "{:.1f}".format)
    ways = {row["way"]: row["seconds"] for row in rows_of(run, "prefill", backend=ours(run), tokens=8 * K)}
    for way, goal in PREFILL_GOALS.items():
        add(f"prefill of 8K, {way}", "<=", goal, ways.get(way), ms)
    add("cutting tokens saves, of computation alone", ">=", GAIN_GOAL, gain_of(ways), "{:.0%}".format)
    return table


def busiest_table(run: Run) -> list[tuple[str, ...]]:
    """Steps with the limits of this rank and of a rank that is the busiest in every layer."""
    table = [("rows x tokens", "context", "pairs: mean", "this rank", "busiest", "limit, ms", "if busiest", "measured")]
    for row in rows_of(run, "decode", backend=ours(run)):
        shares = (f"{row[name]:.1%}" for name in ("mean_share", "pairs_share", "busiest_share"))
        times = (f"{1e3 * row[name]:.3f}" for name in ("roofline_seconds", "busiest_seconds", "seconds"))
        table.append((f"{row['rows']} x {row['tokens']}", length(row["context"]), *shares, *times))
    return table


# ---------------------------------------------------------------- figures


def labelled(figure: Figure, run: Run, more: str = "") -> Figure:
    """With a line that says where its numbers are from."""
    figure.supxlabel(f"{more}{which(run)} | {said(run)}", fontsize=7, color="#4b5563", x=0.99, ha="right")
    return figure


def waterfall(run: Run, rows: int = 1) -> Figure:
    """A step by section, one after the other, of every backend; black: what a section cannot beat."""
    found = profiles(run, rows)
    figure, axes = plt.subplots(1, len(found), figsize=(7.4, 3.9), sharey=True, squeeze=False)
    names = [name for name in SECTIONS if any(s["name"] == name for p in found.values() for s in p["sections"])]
    places = {name: place for place, name in enumerate([*names, "between kernels", "step"])}
    for ax, (backend, profile) in zip(axes[0], found.items(), strict=True):
        left = 0.0
        for section in ordered(profile):
            place, width, limit = places[section["name"]], 1e3 * section["seconds"], 1e3 * section["roofline_seconds"]
            ax.barh(place, width, left=left, color=COLOURS[SECTIONS[section["name"]]])
            ax.barh(place, limit, left=left, height=0.3, color="black")
            left += width
        step = step_of(run, profile)
        if step is not None:  # kernels that overlap are together longer than the step
            ax.barh(places["between kernels"], 1e3 * step - left, left=left, color=COLOURS["bad"])
            ax.barh(places["step"], 1e3 * step, color="#4b5563")
            ax.text(1e3 * step, places["step"], f"{1e3 * step:.2f} ms ", ha="right", va="center", fontsize=8, color="w")
        ax.set(title=backend, xlabel="ms", xlim=(0, 1.04e3 * max(step or 0, profile["seconds"])))
        ax.set_yticks(range(len(places)), map(short, places))
        ax.tick_params(axis="y", length=0)
    axes[0, 0].invert_yaxis()
    context = length(next(iter(found.values()))["context"])
    return labelled(figure, run, f"step of {rows} x 1 at {context}, no collectives | ")


def roofline(run: Run) -> Figure:
    """Every section of every profile of our own: FLOP/s against FLOP a byte; the kernels' router is three products."""
    figure, ax = plt.subplots(figsize=(7.2, 4.4))
    markers, own = iter("os^DvP*X"), rows_of(run, "profile", backend=ours(run))
    for profile in own:
        what = f"{profile['rows']} x 1" if profile["phase"] == "decode" else f"prefill, {profile.get('way', '')}"
        marker = next(markers)
        for section in profile["sections"]:
            if section["flops"] and section["seconds"]:
                ax.scatter(
                    section["flops"] / section["bytes"], section["flops"] / section["seconds"], marker=marker, s=30,
                    color=COLOURS[SECTIONS[section["name"]]], edgecolor="white", linewidth=0.4, zorder=3,
                )  # fmt: skip
        ax.scatter([], [], marker=marker, color=COLOURS["grey"], label=what)
    for name, colour in SECTIONS.items():
        if any(s["name"] == name and s["flops"] for profile in own for s in profile["sections"]):
            ax.scatter([], [], marker="s", color=COLOURS[colour], label=short(name))
    low, high = 0.05, 5000.0
    ridge = run["matrix"] / run["copy"]
    x = [low, ridge, high]
    ax.plot(x, [min(run["copy"] * i, run["matrix"]) for i in x], color="black", lw=1.2)
    ax.set(xscale="log", yscale="log", xlim=(low, high), xlabel="FLOP a byte", ylabel="FLOP/s")
    if ours(run) == "triton":
        third = run["matrix"] / 3
        ax.plot([third / run["copy"], high], [third] * 2, ":", color=COLOURS["gate"], lw=1)
        ax.text(high, third * 0.9, "a third: router", fontsize=7, ha="right", va="top", color=COLOURS["gate"])
    ax.text(low * 6, run["copy"] * low * 2, f"copy {run['copy'] / 1e12:.2g} TB/s", fontsize=8)
    ax.text(high, run["matrix"] * 1.2, f"product {run['matrix'] / 1e12:.3g} TFLOP/s", fontsize=8, ha="right")
    figure.legend(fontsize=7, loc="outside right center")
    return labelled(figure, run)


def latency(run: Run) -> Figure:
    """Steps of one token a row against context, measured, and the limits on paper."""
    figure, ax = plt.subplots(figsize=(7, 4))
    config, plan, device = config_of(run), Plan(run["tp"]), device_of(run)
    own = rows_of(run, "decode", backend=ours(run))
    drawn = sorted({row["rows"] for row in own if row["tokens"] == 1})
    for rows in drawn:
        colour = COLOURS[BATCHES.get(rows, "grey")]
        points = sorted((r["context"], 1e3 * r["seconds"]) for r in own if (r["rows"], r["tokens"]) == (rows, 1))
        ax.plot(*zip(*points, strict=True), "o-", color=colour, label=f"{rows} row{'s' * (rows > 1)}, measured")
        contexts = [points[0][0] * (points[-1][0] / points[0][0]) ** (i / 24) for i in range(25)]
        limits = [1e3 * estimate(config, plan, 1, round(c), rows, device=device).compute_seconds for c in contexts]
        ax.plot(contexts, limits, "--", color=colour, lw=1)
    several = [row for row in own if row["tokens"] > 1]
    for row in several:
        colour = COLOURS[BATCHES.get(row["rows"], "grey")]
        ax.plot(row["context"], 1e3 * row["seconds"], "D", color=colour, mfc="white")
    if several:
        ax.plot([], [], "D", color=COLOURS["grey"], mfc="white", label="several tokens a row")
    ax.plot([], [], "--", color=COLOURS["grey"], lw=1, label="limit of the mean rank")
    if (run["preset"], run["tp"]) == ("small", 8):
        for (rows, context, _), goal in GOALS.items():
            ax.plot(context, 1e3 * goal, marker=11, color=COLOURS[BATCHES[rows]], ms=8)
        ax.plot([], [], marker=11, ls="", color=COLOURS["grey"], label="goal: below its tip")
    ax.set(xscale="log", yscale="log", xlabel="context", ylabel="ms a step")
    contexts = sorted({row["context"] for row in own})
    ax.set_xticks(contexts, [length(c) for c in contexts])
    ax.minorticks_off()
    low, high = ax.get_ylim()
    ticks = [t for t in (0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200) if low <= t <= high]
    ax.set_yticks(ticks, map(str, ticks))
    figure.legend(fontsize=8, ncols=3, loc="outside upper center")
    return labelled(figure, run, "no collectives | ")


def prefill(run: Run) -> Figure:
    """A prompt by section, mixed by all ranks alike or cut by tokens; hatched: collectives, modelled."""
    rows = sorted(rows_of(run, "prefill"), key=lambda row: (BACKENDS.index(row["backend"]), row["way"]))
    figure, ax = plt.subplots(figsize=(7, 1.6 + 0.55 * len(rows)))
    named: set[str] = set()
    ends = []
    for place, row in enumerate(rows):
        case = {"backend": row["backend"], "phase": "prefill", "context": row["tokens"], "way": row["way"]}
        left = 0.0
        for section in [s for profile in rows_of(run, "profile", **case)[:1] for s in ordered(profile)]:
            label = None if section["name"] in named else short(section["name"])
            named.add(section["name"])
            width = 1e3 * section["seconds"]
            ax.barh(place, width, left=left, color=COLOURS[SECTIONS[section["name"]]], label=label, height=0.6)
            left += width
        seconds, on_top = 1e3 * row["seconds"], 1e3 * row["collective_seconds"]
        by_host = 1e3 * row.get("launched_seconds", 0)
        ends.append(max(seconds + on_top, by_host))
        label = None if place else "collectives, modelled"
        ax.barh(place, on_top, left=seconds, color="white", edgecolor="#4b5563", hatch="////", label=label, height=0.6)
        ax.plot([seconds] * 2, [place - 0.38, place + 0.38], color="black", lw=2, label=None if place else "measured")
        if by_host:
            of_host = {"ls": "--", "color": COLOURS["bad"], "lw": 1.5}
            label = None if place else "launched by the host"
            ax.plot([by_host] * 2, [place - 0.38, place + 0.38], **of_host, label=label)
        limit, mark = 1e3 * row["roofline_seconds"], {"ls": ":", "color": "black", "lw": 1.5}
        ax.plot([limit] * 2, [place - 0.38, place + 0.38], **mark, label=None if place else "limit")
        ax.text(ends[-1], place, f"  {seconds:.0f} + {on_top:.0f} ms", va="center", fontsize=8)
    ax.set_yticks(range(len(rows)), [f"{row['backend']}, {row['way']}" for row in rows])
    ax.set(xlabel="ms", xlim=(0, 1.2 * max(ends)))
    ax.invert_yaxis()
    figure.legend(fontsize=7, ncols=4, loc="outside upper center")
    return labelled(figure, run, f"{rows[0]['tokens']:,} tokens | ")


# ---------------------------------------------------------------- several devices, measured by `calibrate`


def calls(report: Run) -> Figure:
    """Times of collectives against bytes that leave a rank: measured (in a graph, if there), fitted, published."""
    figure, ax = plt.subplots(figsize=(7, 4))
    way = "graph" if "graph" in report["points"][0] else "eager"
    points = {name: [p for p in report["points"] if p["collective"] == name] for name in NAMES}
    ends = [min(p["sent"] for p in report["points"]), max(p["sent"] for p in report["points"])]
    sent = [ends[0] * (ends[1] / ends[0]) ** (i / 60) for i in range(61)]
    kb = [s / 1e3 for s in sent]
    for (name, own), colour in zip(points.items(), ("residual", "conv", "attention", "moe"), strict=True):
        fit = Fit(**report["fits"][f"{name}, {way}"])
        rate = f"{1e-9 / fit.beta:.0f} GB/s" if fit.beta else "any rate"
        label = f"{NAMES[name]}: {1e6 * fit.alpha:.1f} us, {rate}"
        xy = sorted((p["sent"] / 1e3, 1e6 * p[way]) for p in own)
        ax.plot(*zip(*xy, strict=True), "o", ms=4.5, color=COLOURS[colour], label=label)
        ax.plot(kb, [1e6 * fit.seconds(1, s) for s in sent], "--", lw=1, color=COLOURS[colour])
    link = Link(**report["published"])
    label = f"published link: {1e6 * link.alpha:.0f} us, {link.usable * link.bandwidth / 1e9:.0f} GB/s"
    ax.plot(kb, [1e6 * link.seconds(1, s) for s in sent], color="black", lw=1.2, label=label)
    ax.plot([], [], "--", color=COLOURS["grey"], lw=1, label="fitted")
    ax.set(xscale="log", yscale="log", xlabel="KB that leave a rank", ylabel=f"us of a call ({way})")
    low, high = ax.get_ylim()
    ticks = [t for t in (5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000) if low <= t <= high]
    ax.set_yticks(ticks, map(str, ticks))
    ax.set_xticks(ticks := [10**i for i in range(1, 6)], [f"{tick:,}" for tick in ticks])
    ax.minorticks_off()
    ax.legend(fontsize=8, loc="upper left")
    options = "".join(f", {name}={value}" for name, value in report["environment"].items() if "VERSION" not in name)
    text = f"{report['ranks']} x {report['device']}, {report['collectives']}, torch {report['torch']}{options}"
    figure.supxlabel(f"{text}, {report['date']}", fontsize=7, color="#4b5563", x=0.99, ha="right")
    return figure


def step_table(report: Run) -> list[tuple[str, ...]]:
    """Milliseconds of true steps beside their models; "beyond": what fitted calls and computation do not explain."""
    table = [("way", "rows", "step", "in calls", "by fits", "by one link", "published", "computation", "beyond")]
    columns = ("seconds", "collectives", "by fits", "by link", "published", "compute")
    for row in report["steps"]:
        beyond = row["seconds"] - row["by fits"] - row["compute"]
        times = ("" if x is None else f"{1e3 * x:.3f}" for x in (*(row[name] for name in columns), beyond))
        table.append((row["way"], str(row["batch"]), *times))
    return table


# ---------------------------------------------------------------- what a world would do, modelled


def excess(run: Run | None, rows: int, tokens: int, limit: Real) -> Real:
    """Seconds beyond its limit of a step of `rows` x `tokens`: measured at 32K or below, between sizes by the logarithm
    of their tokens.

    Of as many tokens the step counts that has as many a row, if it was measured: 1 x 8 is not 8 x 1. Of more tokens
    than were measured it grows as the limit does. Without a run: none.
    """
    own = rows_of(run, "decode", backend=ours(run)) if run else []
    own = [row for row in own if row["context"] <= 32 * K and row["tokens"] in (1, tokens)]
    own.sort(key=lambda row: (row["tokens"] == tokens, row["context"]))  # what is most alike comes last
    known = {row["rows"] * row["tokens"]: row for row in own}
    if not known:
        return 0.0
    over = {n: known[n]["seconds"] - known[n]["roofline_seconds"] for n in sorted(known)}
    n = rows * tokens
    for a, b in pairwise(over):
        if a <= n <= b:
            return over[a] + (over[b] - over[a]) * math.log(n / a) / math.log(b / a)
    if n < min(over):
        return over[min(over)]
    return over[max(over)] * max(limit / known[max(over)]["roofline_seconds"], 1)


def served(run: Run | None, rows: int, passes: Real, alpha: Real) -> tuple[Real, Real]:
    """Tokens a second of each of `rows` users, and of each of eight GPUs: modelled (module docstring).

    Args:
        passes: tokens that a pass gives; above 1 with a drafter, which has its bytes read and its exchanges made.
    """
    config, link = InklingConfig.small(), Link(alpha=alpha)
    device = device_of(run) if run else Device()
    tokens = 1 if passes == 1 else 1 + DRAFTED
    e = estimate(config, Plan(8), tokens, CONTEXT, rows, device=device, link=link)
    seconds = e.busiest_seconds + excess(run, rows, tokens, e.compute_seconds) + e.collective_seconds
    if passes > 1:
        seconds += DRAFTER_BYTES / 8 / device.memory + EXCHANGES * alpha
    return passes / seconds, rows * passes / seconds / 8


def frontier(
    run: Run | None, passes: dict[str, Real], batches: Sequence[int] = (1, 2, 4, 8, 16, 32, 64, 128)
) -> Figure:
    """Tokens a second of a user against those of a GPU, modelled, beside what is published.

    Args:
        passes: tokens that a pass gives, by what is said of it.
    """
    figure, ax = plt.subplots(figsize=(7, 4.2))
    for (name, n), colour in zip(passes.items(), ("grey", "attention", "moe", "drafter", "gate"), strict=False):
        points = [served(run, rows, n, ALPHAS["Lamport push"]) for rows in batches]
        ax.plot(*zip(*points, strict=True), "o-", ms=3.5, color=COLOURS[colour], label=f"{name}: {n:.3g} a pass")
        points = [served(run, rows, n, ALPHAS["NCCL"]) for rows in batches]
        ax.plot(*zip(*points, strict=True), ":", color=COLOURS[colour], lw=1)
    ax.plot([], [], ":", color=COLOURS["grey"], label=f"with NCCL's {1e6 * ALPHAS['NCCL']:g} us")
    for name, (user, gpu) in PUBLISHED.items():
        ax.plot([user, user * SCALED], [gpu, gpu * SCALED], color=COLOURS["bad"], lw=0.8)
        ax.plot(user, gpu, "s", color=COLOURS["bad"], mfc="white")
        ax.plot(user * SCALED, gpu * SCALED, "s", color=COLOURS["bad"])
        ax.annotate(
            f"published: {name}", (user, gpu), (0, 7), textcoords="offset points", fontsize=7,
            ha="right" if user < 200 else "left",
        )  # fmt: skip
    ax.plot([], [], "s", color=COLOURS["bad"], label=f"published, times {SCALED:g}: memory of an H200")
    ax.set(xscale="log", yscale="log", xlabel="tokens/s of a user", ylabel="tokens/s of a GPU")
    where = f"{length(CONTEXT)} of context, points from {batches[-1]} users (left) to {batches[0]}"
    ax.set_title(f"MODELLED: eight H200s that nobody has run\n{where}", fontsize=9)
    ticks = [20, 50, 100, 200, 500, 1000]
    ax.set_xticks(ticks, map(str, ticks))
    ax.set_yticks([*ticks, 2000], map(str, [*ticks, 2000]))
    ax.minorticks_off()
    ax.legend(fontsize=7, loc="lower left")
    if run:
        return labelled(figure, run, "steps as slow as measured on: ")
    figure.supxlabel("paper alone: every step at its limit", fontsize=7, x=0.99, ha="right")
    return figure
