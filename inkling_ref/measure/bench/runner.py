"""`inkling-ref bench`: kernels, reference and peers side by side in one run, beside limits measured in the same run.

Each group of cases runs in a process of its own, so that one that fails or hangs costs only its own rows. All of them
compile at once; then they measure, one after the other. `harness` says what a time, a limit and an error are.

`--peer module:function` adds an arm to every case of one group: it takes the positional arguments of the case's
reference and returns what that returns. References: `fused.attend_cache` (decode, batches), `attention.attend`
(prefill), `moe.route` (router), `moe.experts` (experts; matrices in the kernels' order, see `kernels.packing.unpack`),
`moe.softcapped_swiglu` (swiglu), `fused.project` (projections), `fused.prepare_qkv` (qkv), `fused.sample_head` (head),
`fused.draft_rnn` (draft); short_conv, residual and quantization have several, told apart by their arguments. The other
groups have none, and take no peer.
"""

import importlib
import json
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path

import torch

from ...backends import get_backend
from ...errors import InputError
from ...files import whole_file
from .harness import KINDS

GROUP_SECONDS = 60.0  # one group may measure for so long
LONGER = {"layer": 160.0, "step": 90.0}  # these compile what they measure
COMPILE_SHARE = 0.4  # of the whole time
BY_GROUP = ("limits", "notes", "trouble", "dates")  # of a report, beside its rows
CHILD = [sys.executable, "-m", "inkling_ref.measure.bench"]


def imported(name: str) -> Callable:
    """The callable that `module:function` names.

    Raises:
        InputError: where there is none.
    """
    module, _, function = name.partition(":")
    if os.getcwd() not in sys.path:  # `inkling-ref` is started from elsewhere
        sys.path.insert(0, os.getcwd())
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        raise InputError(f"--peer {name}: {error}, expected module:function") from None
    if not callable(found):
        raise InputError(f"--peer {name}: not callable, expected module:function")
    return found


class Group:
    """The process of one group: it compiles, is ready, waits for `measure`."""

    def __init__(self, name: str, options: Sequence[str], workers: int) -> None:
        self.name = name
        self.output = tempfile.TemporaryFile()  # noqa: SIM115  a pipe that nobody reads would stop the process
        environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
        self.process = subprocess.Popen(
            [*CHILD, name, *options],
            stdin=subprocess.PIPE, stdout=self.output, stderr=subprocess.STDOUT, text=True, start_new_session=True,
            env=environment | {"TORCHINDUCTOR_COMPILE_THREADS": str(workers)},
        )  # fmt: skip

    def lines(self) -> list[str]:
        """What it has printed so far."""
        return os.pread(self.output.fileno(), 2**24, 0).decode(errors="replace").splitlines()

    def is_ready(self, until: float) -> bool:
        """Wait for that, or its end, until then at most."""
        while not any(line.startswith('{"ready"') for line in self.lines()):
            if time.monotonic() > until or self.process.poll() is not None:
                return False
            time.sleep(0.05)
        return True

    def measure(self, seconds: float) -> str:
        """Let it measure; what went wrong ('' for nothing)."""
        try:
            self.process.communicate("go\n", timeout=max(seconds, 0))
        except subprocess.TimeoutExpired:
            self.stop()
            return f"stopped after {seconds:.0f} s"
        return f"exit status {self.process.returncode}" if self.process.returncode else ""

    def stop(self) -> None:
        """End it and what it has started."""
        if self.process.poll() is None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()


def check(groups: Sequence[str], against: Sequence[str], peers: Sequence[str]) -> list[str]:
    """The groups to run, in order; all for none.

    Raises:
        InputError: for an unknown name, a peer that cannot be imported or belongs to no single group with a
            reference, or no GPU.
    """
    from .__main__ import GROUPS, WITHOUT_REFERENCE

    for given, known, what in ((groups, GROUPS, "bench"), (against, KINDS.values(), "--against")):
        if unknown := [name for name in given if name not in known]:
            raise InputError(f"{what}: {unknown[0]!r}, expected some of {', '.join(known)}")
    if peers and len(groups) != 1:
        raise InputError("--peer: its arguments are those of one group's reference, expected exactly one group")
    if peers and groups[0] in WITHOUT_REFERENCE:
        raise InputError(f"--peer: {groups[0]!r} has no reference to take the arguments of, expected another group")
    for name in peers:
        imported(name)
    if not torch.cuda.is_available():
        raise InputError("bench: torch sees no GPU here, expected one")
    get_backend("triton")  # says what is wrong with it
    return [name for name in GROUPS if name in groups or not groups]


def run(
    names: Sequence[str],
    against: Sequence[str],
    peers: Sequence[str],
    seconds: float,
    json_file: Path | None,
    say: Callable[[str], None],
) -> None:
    """Run the groups `names`, from `check`, and print the table; `json_file` holds what is measured so far at any time.

    Args:
        seconds: the whole run; groups that find no time left are named below the table.
        json_file: other groups' measurements in it stay, if they come from the same GPU and versions.
        say: shows a line of progress.
    """
    import triton

    began = time.monotonic()
    report: dict = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "limits": {}, "rows": [], "notes": {}, "trouble": {}, "dates": {},
    }  # fmt: skip
    others = earlier(json_file, report, names)
    options = ["--against", ",".join(against), *(word for name in peers for word in ("--peer", name))]
    workers = max(1, (os.cpu_count() or 1) // len(names))
    groups = [Group(name, options, workers) for name in names]
    try:
        ready = [group for group in groups if group.is_ready(began + COMPILE_SHARE * seconds)]
        late = [group for group in groups if group not in ready]
        for group in late:
            group.stop()  # it would disturb the others; it tries again after them
        say(f"{time.monotonic() - began:5.0f} s  compiled")
        for group in [*ready, *late]:
            if group in late and time.monotonic() < began + seconds:
                group = Group(group.name, options, os.cpu_count() or 1)
                groups.append(group)
                group.is_ready(began + seconds)
            left = began + seconds - time.monotonic()
            trouble = group.measure(min(LONGER.get(group.name, GROUP_SECONDS), left)) if left > 0 else "no time left"
            collect(group, trouble, report)
            say(f"{time.monotonic() - began:5.0f} s  {group.name} {trouble}")
            if json_file is not None:
                with whole_file(json_file) as partial:
                    partial.write_text(json.dumps(with_others(report, others), indent=1) + "\n", encoding="utf-8")
    finally:
        for group in groups:
            group.stop()
    print(table(report))


def earlier(json_file: Path | None, report: dict, names: Sequence[str]) -> dict:
    """What the file holds of other groups, by the report's keys; nothing of another GPU or other versions."""
    old = {}
    if json_file is not None and json_file.exists():
        with suppress(ValueError):
            old = json.loads(json_file.read_text(encoding="utf-8"))
    same = ("gpu", "torch", "triton", "python")
    if not isinstance(old, dict) or "dates" not in old or any(old.get(key) != report[key] for key in same):
        return {"rows": []} | {key: {} for key in BY_GROUP}
    by_group = {key: {group: x for group, x in old[key].items() if group not in names} for key in BY_GROUP}
    return {"rows": [row for row in old["rows"] if row["group"] not in names]} | by_group


def with_others(report: dict, others: dict) -> dict:
    """The report, and what `earlier` gave, in the order of the groups."""
    from .__main__ import GROUPS

    order = list(GROUPS)
    rows = sorted(others["rows"] + report["rows"], key=lambda row: order.index(row["group"]))
    return report | {"rows": rows} | {key: others[key] | report[key] for key in BY_GROUP}


def collect(group: Group, trouble: str, report: dict) -> None:
    """Put into the report what the group has printed."""
    report["dates"][group.name] = report["date"]
    lines = group.lines()
    for line in lines:
        if line.startswith('{"') and line.endswith("}"):  # the last one may be cut
            entry = json.loads(line)
            if "limits" in entry:
                report["limits"][group.name] = entry["limits"]
            elif "note" in entry:
                report["notes"].setdefault(group.name, []).append(entry["note"])
            elif "case" in entry:
                report["rows"].append(entry | {"group": group.name})
    if trouble:
        last = [line for line in lines if line.strip() and not line.startswith('{"')][-1:]
        report["trouble"][group.name] = ": ".join([trouble, *last])


def table(report: dict) -> str:
    """79 columns: microseconds, in how many times the kernel's, the share of the limit, the error."""
    lines = [f"{report['gpu']}, torch {report['torch']}, triton {report['triton']}, {report['date']}"]
    if report["limits"]:
        copy, matrix = ([limits[name] / 1e12 for limits in report["limits"].values()] for name in ("copy", "matrix"))
        product = f"product {min(matrix):.0f} to {max(matrix):.0f} TFLOP/s"
        lines.append(f"limits: copy {min(copy):.2f} to {max(copy):.2f} TB/s, {product}")
    lines.append(f"{'':38}{'us':>11}{'ratio':>9}{'limit':>8}{'error':>11}")
    cases: dict[str, list[dict]] = {}
    for row in report["rows"]:
        cases.setdefault(row["case"], []).append(row)
    for case, rows in cases.items():
        lines.append(case[:79])
        ours = next((row["us"] for row in rows if row["arm"] == "triton" and "us" in row), None)
        for row in rows:
            if "failed" in row:
                lines.append(f"  {row['arm']}: {row['failed']}"[:79])
                continue
            ratio = f"{row['us'] / ours:.2f}" if ours else ""
            error = f"{row['error']:.1e}" if "error" in row else ""
            share = f"{row['floor_us'] / row['us']:.0%}"
            lines.append(f"  {row['arm'][:36]:36}{row['us']:11.1f}{ratio:>9}{share:>8}{error:>11}")
    lines += [note for notes in report["notes"].values() for note in notes]
    lines += [f"{name}: {trouble}" for name, trouble in report["trouble"].items()]
    return "\n".join(line[:79] for line in lines)
