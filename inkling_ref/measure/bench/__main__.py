"""The Triton kernels on a GPU: `python -m inkling_ref.measure.bench --correctness --bench [--json FILE]`.

`--correctness` runs the contract tests there, in bfloat16 too. `--bench` times every kernel on the released sizes
beside the eager reference, the compiled reference (`torch.compile`) or PyTorch's attention without bias, and beside
two limits measured in the same process: the rate of a copy (bytes read and written) and of a matrix product.

Each group of cases runs in a process of its own, so that one that fails or hangs costs only its own rows. A time is
the median of replays of one CUDA graph that holds a call for each of several input sets, together larger than the L2
cache; the first call of every arm is compared with the reference in float32 on the same inputs. Bytes count each input
and output once; FLOPs count visible pairs only.
"""

import argparse
import json
import os
import platform
import signal
import subprocess
import sys
import time
from pathlib import Path

import torch

from ...tensor_files import whole_file
from .attention import bench_decode, bench_prefill
from .harness import Bench
from .moe import bench_router, bench_swiglu
from .residual import bench_residual
from .short_conv import bench_short_conv

GROUPS = {
    "decode": bench_decode, "residual": bench_residual, "router": bench_router, "short_conv": bench_short_conv,
    "prefill": bench_prefill, "swiglu": bench_swiglu,
}  # fmt: skip


def run(command: list[str], seconds: float) -> tuple[str, str]:
    """Output of a command, and what went wrong with it ('' for nothing)."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment, start_new_session=True
    )
    try:
        output, _ = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # the compiler's workers hold the pipe open
        output, _ = process.communicate()
        return output, f"stopped after {seconds:.0f} s"
    return output, "" if process.returncode == 0 else f"exit status {process.returncode}"


def print_table(report: dict) -> None:
    """Microseconds, the share of the limit (bytes or FLOPs, the slower), the error; 79 columns."""
    print(f"\n{report['gpu']}, torch {report['torch']}, triton {report['triton']}, {report['date']}")
    print(f"{'':52}{'us':>9}{'limit':>7}{'error':>10}")
    case = None
    for row in report["rows"]:
        if row["case"] != case:
            case = row["case"]
            print(case)
        if "failed" in row:
            print(f"    {row['arm']}: {row['failed']}"[:79])
            continue
        share = f"{row['floor_us'] / row['us']:.0%}"
        error = f"{row['error']:.1e}" if "error" in row else ""
        print(f"    {row['arm']:48}{row['us']:9.1f}{share:>7}{error:>10}")
    print("\n".join(report.get("notes", [])))
    for name, trouble in report["trouble"].items():
        print(f"{name}: {trouble}")


def main() -> None:
    """Run the tests and the groups asked for, each in its own process; then the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--correctness", action="store_true", help="run the contract tests on this GPU")
    parser.add_argument("--bench", action="store_true", help="time every kernel")
    parser.add_argument("--only", default=",".join(GROUPS), help="groups to time, with commas (default: all)")
    parser.add_argument("--json", type=Path, help="write everything measured to this file")
    parser.add_argument("--seconds", type=float, default=235, help="stop starting work after so long (default: 235)")
    parser.add_argument("--group", help=argparse.SUPPRESS)  # one group, in this process
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("no CUDA device")
    if arguments.group:
        torch.manual_seed(0)
        with torch.inference_mode():
            GROUPS[arguments.group](Bench())
        return

    import triton

    start = time.monotonic()
    report = {
        "gpu": torch.cuda.get_device_name(), "torch": torch.__version__, "triton": triton.__version__,
        "python": platform.python_version(), "date": time.strftime("%Y-%m-%d"), "limits": {}, "rows": [], "trouble": {},
    }  # fmt: skip
    me = [sys.executable, "-m", "inkling_ref.measure.bench"]
    work = []
    if arguments.correctness:
        tests = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-n", "12"]
        work.append(("tests", [*tests, *sorted(map(str, Path("tests").glob("test_kernels_*.py")))], 120.0))
    if arguments.bench:
        work += [(name, [*me, "--group", name], 75.0) for name in arguments.only.split(",")]
    for name, command, limit in work:
        left = arguments.seconds - (time.monotonic() - start)
        if left < 10:
            report["trouble"][name] = "no time left"
            continue
        began = time.monotonic()
        output, trouble = run(command, min(limit, left))
        lines = output.splitlines()
        if name == "tests":
            print("\n".join(lines[-25:]), flush=True)
            report["tests"] = lines[-1] if lines else ""
        for line in lines:
            if line.startswith('{"limits"'):
                report["limits"][name] = json.loads(line)["limits"]
            elif line.startswith('{"case"'):
                report["rows"].append(json.loads(line) | {"group": name})
            elif line.startswith("router "):
                report.setdefault("notes", []).append(line)
        if trouble:
            report["trouble"][name] = trouble
            if name != "tests":
                print("\n".join(lines[-12:]), flush=True)
        print(f"{name}: {time.monotonic() - began:.0f} s {trouble}", flush=True)
        if arguments.json:
            with whole_file(arguments.json) as partial:
                partial.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    print_table(report)


if __name__ == "__main__":
    main()
