r"""What a call launches on the device, for which section of `ranges`, and how long each launch kept the device.

    with torch.inference_mode():
        first, *others = launches(step, lambda: step.prefill(ids))

**Seconds.** A kernel may begin while the one before it still runs, and wait for it (programmatic dependent launch). So
each is charged what it adds: from its beginning, or from the end of all before it if that is later, to its own end.

$$ t_i = \max\left(0, \; \mathrm{end}_i - \max(\mathrm{begin}_i, \max_{j < i} \mathrm{end}_j)\right) $$

The sum is how long the device was busy; what a call takes beyond that are gaps.

**CUDA graphs** have no ranges. Their kernels get the sections of the same call launched one by one, in the same order.

Without a GPU the outermost operations of PyTorch stand for launches.
"""

import json
import tempfile
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from ..decode_step import DecodeStep
from ..errors import InputError
from ..model import Inkling
from .ranges import EMBEDDING, OPERATIONS, PROJECTIONS, UNEMBEDDING, ranges

ELSEWHERE = "elsewhere"  # outside of every range
SECTIONS = {EMBEDDING, PROJECTIONS, UNEMBEDDING, *OPERATIONS.values()}


class Launch(NamedTuple):
    """seconds: see the module docstring."""

    name: str
    section: str
    seconds: float


def launches(
    run: Inkling | DecodeStep,
    call: Callable[[], object],
    replay: Callable[[], object] | None = None,
    repeats: int = 3,
) -> list[list[Launch]]:
    """What `repeats` calls of `call`, a pass of `run`, launch in order: one list for each.

    Args:
        replay: what replays `call` as a CUDA graph; then its kernels, and their seconds.

    Raises:
        InputError: the graph launches what `call` does not.
    """
    if replay is None:
        return [_recorded(run, call) for _ in range(repeats)]
    sections = _recorded(run, call)
    return [list(_aligned(_recorded(run, replay), sections)) for _ in range(repeats)]


def _aligned(replayed: list[Launch], launched: list[Launch]) -> Iterator[Launch]:
    """With the sections of the same calls launched one by one, among which some may be in no graph."""
    if not replayed:
        raise InputError("launches: the profiler saw none of the graph's")
    rest = iter(launched)
    for name, _, seconds in replayed:
        section = next((launch.section for launch in rest if launch.name == name), None)
        if section is None:
            raise InputError(f"launches: the graph's {name[:60]} is not among those launched one by one")
        yield Launch(name, section, seconds)


def _recorded(run: Inkling | DecodeStep, call: Callable[[], object]) -> list[Launch]:
    """One call under the profiler."""
    has_gpu = (run.model if isinstance(run, DecodeStep) else run).device.type == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if has_gpu else [])]
    with ranges(run), profile(activities=activities) as recorded:
        call()
        if has_gpu:
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:  # the file says which call on the host launched a kernel
        path = Path(folder) / "trace.json"
        recorded.export_chrome_trace(str(path))
        events = json.loads(path.read_text())["traceEvents"]
    spans = sorted((e for e in events if e.get("ph") == "X"), key=lambda e: e["ts"])
    return _launches(spans, has_gpu)


def _launches(spans: list[dict[str, Any]], has_gpu: bool) -> list[Launch]:
    """From a trace's spans, by time of their beginning."""
    of = {category: [s for s in spans if s.get("cat") == category] for category in ("user_annotation", "kernel")}
    sections = [s for s in of["user_annotation"] if s["name"] in SECTIONS]
    begins = [s["ts"] for s in sections]

    def section(moment: int | float) -> str:
        """Sections lie one after the other."""
        last = bisect_right(begins, moment) - 1
        is_within = last >= 0 and moment <= sections[last]["ts"] + sections[last]["dur"]
        return sections[last]["name"] if is_within else ELSEWHERE

    if has_gpu:
        calls = {s["args"]["correlation"]: s["ts"] for s in spans if s.get("cat") in ("cuda_runtime", "cuda_driver")}
        found = [(s, calls.get(s["args"]["correlation"], -1.0)) for s in of["kernel"]]
    else:
        found, end = [], float("-inf")
        for s in (s for s in spans if s.get("cat") == "cpu_op"):
            if s["ts"] >= end:
                found.append((s, s["ts"]))
                end = s["ts"] + s["dur"]
    launched, end = [], 0.0
    for s, moment in found:
        stop = s["ts"] + s["dur"]
        seconds = max(0.0, stop - max(s["ts"], end)) / 1e6  # from microseconds
        launched.append(Launch(s["name"], section(moment), seconds))
        end = max(end, stop)
    return launched
