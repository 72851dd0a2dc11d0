"""The Triton kernels on a GPU: `python -m inkling_ref.measure.kernels --correctness --bench [--json FILE]`.

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
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor
from torch.nn import functional as F

from .. import attention, moe, residual, short_conv
from ..tensor_files import whole_file

L2_BYTES = 60e6
REPLAYS = 9
D, H, G, d, R, X, W = 4608, 48, 8, 128, 16, 1024, 1024  # Inkling 2 Small
E, K_EXPERTS, I = 384, 8, 2304
BF16 = torch.bfloat16


def graph_seconds(calls: list[Callable[[], object]]) -> float:
    """Median seconds of one call, from replays of a CUDA graph of them all."""
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for call in calls:  # compile, and prepare what is derived from parameters
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(REPLAYS + 1):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(times[1:]) / len(calls)


def relative_rms(actual: Tensor, exact: Tensor) -> float:
    """||actual - exact|| / ||exact||; NaN where either holds one."""
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def tensors_of(out: object) -> list[Tensor]:
    """The outputs of a call, one or several, as a list."""
    return list(out) if isinstance(out, list | tuple) else [out]


class Bench:
    """Limits of this process, and one printed JSON row for each arm."""

    def __init__(self) -> None:
        x, y = torch.randn(2**28, device="cuda"), torch.empty(2**28, device="cuda")
        self.copy = 2 * x.nbytes / graph_seconds([lambda: torch.mul(x, 1, out=y)] * 4)
        a, b = (torch.randn(8192, 8192, device="cuda", dtype=BF16) for _ in range(2))
        self.matrix = 2 * 8192**3 / graph_seconds([lambda: a @ b] * 4)
        print(json.dumps({"limits": {"copy": self.copy, "matrix": self.matrix}}), flush=True)

    def arm(
        self,
        case: str,
        name: str,
        call: Callable,
        sets: list[tuple],
        exact: object = None,
        nbytes: float = 0,
        flops: float = 0,
    ) -> dict[str, object]:
        """Time `call(*inputs)` over all input sets; `exact`: what the first set should give. Returns the row."""
        row: dict[str, object] = {"case": case, "arm": name}
        try:
            if exact is not None:
                pairs = zip(tensors_of(call(*sets[0])), tensors_of(exact), strict=True)
                row["error"] = float(torch.tensor([relative_rms(a, b) for a, b in pairs]).max())  # NaN wins
            once = graph_seconds([lambda: call(*sets[0])])
            repeats = 1 if once > 1e-3 else max(1, 12 // len(sets))
            taken = graph_seconds([(lambda s=s: call(*s)) for s in sets * repeats])
            row |= {"us": taken * 1e6, "floor_us": max(nbytes / self.copy, flops / self.matrix) * 1e6}
        except Exception as error:  # this arm's row says so; the next arm goes on
            row["failed"] = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]
        print(json.dumps(row), flush=True)
        return row


def sets_of(make: Callable[[], tuple], most: int = 64) -> list[tuple]:
    """As many input sets as four L2 caches hold, at least two."""
    first = make()
    size = sum(t.nbytes for t in first if isinstance(t, Tensor))
    return [first] + [make() for _ in range(min(most, max(2, int(4 * L2_BYTES / size))) - 1)]


def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    """Random numbers on the GPU."""
    return (scale * torch.randn(shape, device="cuda", dtype=torch.float32)).to(dtype)


# --- Groups of cases -----------------------------------------------------------------------------------------------


def bench_residual(bench: Bench) -> None:
    """Mixture and norm: prefill with one and three queries, sources in 16 and 32 bits; one token."""
    from ..kernels import residual as kernel

    compiled = torch.compile(residual.mix_and_norm, dynamic=False)
    for tokens, n, count, dtype in (
        (8192, 9, 1, BF16),
        (8192, 9, 3, BF16),
        (8192, 9, 1, torch.float32),
        (1, 9, 1, BF16),
    ):
        queries, weights = normal(count, D, dtype=torch.float32), [normal(D) for _ in range(count)]

        def arguments(queries=queries, weights=weights, tokens=tokens, n=n, dtype=dtype):
            return normal(1, tokens, n, D, dtype=dtype), queries, weights, 1e-6, BF16

        sets = sets_of(arguments)
        exact = residual.mix_and_norm(sets[0][0].float(), queries, [w.float() for w in weights], 1e-6, torch.float32)
        nbytes = sets[0][0].nbytes + count * tokens * D * 2
        case = f"mix and norm {tokens} x {n}, {count} q, {str(dtype)[6:]}"
        bench.arm(case, "triton", kernel.mix_and_norm, sets, exact, nbytes)
        for name, value in (("_WARPS", 16), ("_REGISTERS", 64 if count == 1 else 168)) if tokens > 1 else ():
            usual = getattr(kernel, name)
            setattr(kernel, name, value)
            bench.arm(
                case, f"triton,{name.lower().replace('_', ' ')} {value}", kernel.mix_and_norm, sets, exact, nbytes
            )
            setattr(kernel, name, usual)
        if dtype == BF16 and count == 1:
            bench.arm(case, "compiled", compiled, sets, exact, nbytes)
            bench.arm(case, "eager", residual.mix_and_norm, sets, exact, nbytes)
        del sets, exact
        torch.cuda.empty_cache()


def bench_short_conv(bench: Bench) -> None:
    """Static and dynamic short convolutions, prefill and one token."""
    from ..kernels import short_conv as kernel

    for tokens in (8192, 1):
        weight = normal(D, 1, 4, dtype=torch.float32)
        sets = sets_of(lambda: (normal(1, tokens + 3, D), weight))  # noqa: B023
        exact = short_conv.short_conv(sets[0][0].float(), weight)
        case, nbytes = f"short conv {tokens} x {D}", 2 * tokens * D * 2
        bench.arm(case, "triton", kernel.short_conv, sets, exact, nbytes)
        if tokens > 1:
            kernel._TOKENS = 8
            bench.arm(case, "triton, runs of 8", kernel.short_conv, sets, exact, nbytes)
            kernel._TOKENS = 16
        bench.arm(case, "compiled", torch.compile(short_conv.short_conv, dynamic=False), sets, exact, nbytes)
        bench.arm(case, "eager", short_conv.short_conv, sets, exact, nbytes)

        static, C = normal(4, 2 * G * d), 2 * G * d
        sets = sets_of(lambda: (normal(1, tokens + 3, C), normal(1, tokens, 2 * G, 4), static))  # noqa: B023
        exact = short_conv.dynamic_short_conv(*(t.float() for t in sets[0]))
        case, nbytes = f"dynamic conv {tokens} x {C}", 2 * tokens * C * 2 + sets[0][1].nbytes
        bench.arm(case, "triton", kernel.dynamic_short_conv, sets, exact, nbytes)
        if tokens > 1:
            compiled = torch.compile(short_conv.dynamic_short_conv, dynamic=False)
            bench.arm(case, "compiled", compiled, sets, exact, nbytes)


def bench_router(bench: Bench) -> None:
    """Router: prefill and decoding, and how often it chooses the experts that float64 chooses."""
    from ..kernels import moe as kernel

    weight, bias = normal(E, D, dtype=torch.float32, scale=D**-0.5), normal(E, dtype=torch.float32, scale=0.1)
    compiled = torch.compile(moe.route, dynamic=False)
    for tokens in (8192, 1, 8):
        sets = sets_of(lambda: (normal(tokens, D), weight.clone(), bias, K_EXPERTS, 2.5))  # noqa: B023
        case, nbytes = f"router {tokens}", sets[0][0].nbytes + weight.nbytes + tokens * K_EXPERTS * 12
        flops = 3 * 2 * tokens * D * E if tokens > 16 else 0
        exact_weights, exact_ids = moe.route(sets[0][0].double(), weight.double(), bias.double(), K_EXPERTS, 2.5)
        for name, op in (("triton", kernel.route), ("compiled", compiled), ("eager", moe.route)):
            row = bench.arm(case, name, lambda *s, op=op: op(*s)[0], sets, exact_weights, nbytes, flops)
            if "failed" not in row:
                chosen = op(*sets[0])[1].sort(-1).values == exact_ids.sort(-1).values
                print(f"router {tokens} {name}: tokens with the experts of float64: {chosen.all(-1).sum()}", flush=True)


def bench_swiglu(bench: Bench) -> None:
    """Soft-capped SwiGLU on the rows of 8192 tokens."""
    from ..kernels import moe as kernel

    sets = sets_of(lambda: (normal(8192 * K_EXPERTS, 2 * I, scale=3.0), 4.0, 25.0))
    exact = moe.softcapped_swiglu(sets[0][0].float(), 4.0, 25.0)
    case, nbytes = f"SwiGLU {8192 * K_EXPERTS} x {I}", sets[0][0].nbytes * 1.5
    bench.arm(case, "triton", kernel.softcapped_swiglu, sets, exact, nbytes)
    bench.arm(case, "compiled", torch.compile(moe.softcapped_swiglu, dynamic=False), sets, exact, nbytes)
    bench.arm(case, "eager", moe.softcapped_swiglu, sets, exact, nbytes)


def attention_inputs(T: int, heads: int, groups: int, S: int) -> tuple:
    """q, k, v, r, profiles, sink, gate with scores and biases that make a peaked softmax, and a sink that matters."""
    q, r = normal(1, T, heads, d, scale=1.5), normal(1, T, heads, R)
    k, v = (normal(1, groups, S, d) for _ in range(2))
    sink = 8 + normal(1, T, heads, scale=2.0)
    return q, k, v, r, normal(R, X), sink, normal(1, T, heads * d)


def without_bias(q, k, v, r, profiles, sink, gate, offsets, window=None) -> Tensor:
    """PyTorch's own attention without bias, sink and gate: not the same function, but what it would cost."""
    causal = q.shape[1] == k.shape[2]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=causal, enable_gqa=True)


def bench_decode(bench: Bench) -> None:
    """Split-KV decoding: tensor-parallel shard and whole heads, short and long, one to eight queries."""
    from ..kernels import attention as kernel

    small, tall = kernel.Tile(16, 128, 132, 3, 3, 4, 2), kernel.Tile(64, 64, 132, 5, 3, 4, 3)
    variants = {
        (1, 6): {"near weighs 1": small._replace(near_weight=1), "near weighs 3": small._replace(near_weight=3),
                 "8 warps": small._replace(warps=8)},
        (8, 6): {"near weighs 4": tall._replace(near_weight=4), "near stages 2": tall._replace(near_stages=2),
                 "3 stages": tall._replace(stages=3)},
    }  # fmt: skip
    for T, heads, groups, S in ((1, 6, 1, 65536), (1, 6, 1, 100352), (1, 6, 1, 1048576), (1, 48, 8, 100352),
                                (2, 6, 1, 100352), (8, 6, 1, 100352), (1, 48, 8, 1024)):  # fmt: skip
        sets = sets_of(lambda: (*attention_inputs(T, heads, groups, S), [S - T]))  # noqa: B023
        exact = attention.attend(*(t.float() for t in sets[0][:-1]), sets[0][-1])
        case, nbytes = f"decode {heads}/{groups}, {S} keys, {T} queries", sets[0][1].nbytes * 2
        bench.arm(case, "triton", kernel.attend, sets, exact, nbytes)
        if S == 100352:
            for name, tile in variants.get((T, heads), {}).items():
                bench.arm(
                    case, f"triton, {name}", lambda *s, tile=tile: kernel.attend_tiled(tile, *s), sets, exact, nbytes
                )
        if T == 1:
            bench.arm(case, "SDPA without bias", without_bias, sets, None, nbytes)
        if S == 1024:
            bench.arm(case, "compiled", torch.compile(attention.attend, dynamic=False), sets, exact, nbytes)
            bench.arm(case, "eager", attention.attend, sets, exact, nbytes)
        del sets, exact
        torch.cuda.empty_cache()


def bench_prefill(bench: Bench) -> None:
    """Prefill of 8192 tokens, sliding and full, over the tiles worth comparing."""
    from ..kernels import attention as kernel

    T = 8192
    tiles = {
        "64x32": (64, 32, 1, 3, 2, 4, 3), "64x64 far 2 near 1": (64, 64, 1, 2, 1, 4, 3),
        "64x64 far 2 near 2": (64, 64, 1, 2, 2, 4, 3), "128x64 far 2 near 1": (128, 64, 1, 2, 1, 8, 3),
        "128x32": (128, 32, 1, 2, 2, 8, 3), "32x64": (32, 64, 1, 3, 3, 4, 3),
    }  # fmt: skip
    for window in (W, None):
        sets = sets_of(lambda: (*attention_inputs(T, H, G, T), [0], window))  # noqa: B023
        exact = attention.attend(*(t.float() for t in sets[0][:7]), [0], window)
        pairs = T * (T + 1) // 2 if window is None else T * W - W * (W - 1) // 2
        biased = T * X - X * (X - 1) // 2
        case, flops = f"prefill {T}, {'full' if window is None else 'sliding'}", H * (4 * d * pairs + 2 * R * biased)
        bench.arm(case, "triton", kernel.attend, sets, exact, 0, flops)
        for name, tile in tiles.items():
            tile = kernel.Tile(*tile)
            bench.arm(
                case, f"triton {name}", lambda *s, tile=tile: kernel.attend_tiled(tile, *s), sets, exact, 0, flops
            )
        if window is None:
            bench.arm(case, "SDPA without bias", without_bias, sets, None, 0, flops)
        bench.arm(case, "eager", attention.attend, sets[:1], exact, 0, flops)
        del sets, exact
        torch.cuda.empty_cache()


GROUPS = {
    "decode": bench_decode, "residual": bench_residual, "router": bench_router, "short_conv": bench_short_conv,
    "prefill": bench_prefill, "swiglu": bench_swiglu,
}  # fmt: skip


# --- The parent process --------------------------------------------------------------------------------------------


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
    me = [sys.executable, "-m", "inkling_ref.measure.kernels"]
    work = []
    if arguments.correctness:
        tests = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider", "-n", "12"]
        work.append(("tests", [*tests, "tests/test_kernels.py"], 120.0))
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
