"""What every benchmark of a kernel shares: how a time is taken, the limits of the process, one row for each arm.

A time is the median of replays of one CUDA graph that holds a call for each of several input sets, together larger
than the L2 cache; the first call of every arm is compared with the reference in float32 on the same inputs. Bytes
count each input and output once; FLOPs count visible pairs only.
"""

import json
import statistics
from collections.abc import Callable

import torch
from torch import Tensor

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
