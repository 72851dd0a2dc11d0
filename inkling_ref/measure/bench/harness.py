"""What every benchmark of a kernel shares: how a time is taken, the limits of the process, one row for each arm.

A time is the median of replays of one CUDA graph that holds a call for each of a case's input sets, together about
four times the L2 cache, so that each call reads from memory. Whole layers and steps, some of which wait for the device,
are launched as their users would, one call after the other. Small cases stop at 64 sets (`join and mix 1 x 9`: 129 KB
each, 8 MB in all) and read from the L2 cache: launch and latency bound them, and their share of the limit says little.
Bytes count each input and output once; FLOPs count visible pairs only.

An error is the relative RMS distance of an arm's first call from the reference in float32 (router and experts:
float64) on the same inputs; of several tensors that the call returns, the largest. What it writes into its inputs is
left to the tests. No error stands beside another function (peers without the bias), experts above 8 tokens (the
reference takes too long) and drafts. For head and router a note counts the tokens that come out as in the reference.
"""

import json
import statistics
import time
from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from ...config import FULL, SLIDING, InklingConfig, TextConfig
from .. import cost

L2_BYTES = 60e6  # of an H200
REPLAYS = 9
WARM_SECONDS = 0.5
D, H, G, d, R, X, W = 4608, 48, 8, 128, 16, 1024, 1024  # Inkling 2 Small
E, K_EXPERTS, I = 384, 8, 2304
BF16 = torch.bfloat16
KINDS = {  # by the first word of an arm
    "eager": "reference", "compiled": "compile", "SDPA": "sdpa", "FlexAttention": "flex",
    "transformers": "transformers",
}  # fmt: skip


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


def launched_seconds(calls: list[Callable[[], object]]) -> float:
    """Median seconds of one call of several, launched one after the other, from half a second or at least 3 rounds."""
    for call in calls:
        call()
    times: list[float] = []
    while len(times) < 3 or (len(times) < REPLAYS and sum(times) < 0.5):
        start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for call in calls:
            call()
        stop.record()
        stop.synchronize()
        times.append(start.elapsed_time(stop) * 1e-3)
    return statistics.median(times) / len(calls)


def rates(device: str = "cuda") -> tuple[float, float]:
    """What a device reaches: bytes a second of a copy, read and written, and FLOP/s of a product, on a GPU in bfloat16.

    A CPU is asked for little. A GPU, which may have waited for compilers, first copies for a while.
    """
    on_gpu = device == "cuda"
    count, n, dtype, seconds = (2**28, 8192, BF16, graph_seconds) if on_gpu else (2**22, 512, None, clock_seconds)
    x, y = torch.randn(count, device=device), torch.empty(count, device=device)
    calls = [lambda: torch.mul(x, 1, out=y)] * 4
    if on_gpu:
        until = time.monotonic() + WARM_SECONDS
        while time.monotonic() < until:
            calls[0]()
            torch.cuda.synchronize()
    copy = 2 * x.nbytes / seconds(calls)
    a, b = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(2))
    return copy, 2 * n**3 / seconds([lambda: a @ b] * 4)


def clock_seconds(calls: list[Callable[[], object]]) -> float:
    """Median seconds of a call on a CPU."""
    times = []
    for call in calls:
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return statistics.median(times)


def relative_rms(actual: Tensor, exact: Tensor) -> float:
    """||actual - exact|| / ||exact||; NaN where either holds one."""
    return float((actual.double() - exact.double()).norm() / exact.double().norm())


def typical_rms(actual: Tensor, exact: Tensor) -> float:
    """The same of a token [..., D], the median over tokens: single ones part where rounding decides about an expert."""
    actual, exact = actual.double(), exact.double()
    return float(((actual - exact).norm(dim=-1) / exact.norm(dim=-1)).median())


def tensors_of(out: object) -> list[Tensor | None]:
    """The outputs of a call, one or several, as a list."""
    return list(out) if isinstance(out, list | tuple) else [out]


def said(error: Exception) -> str:
    """An error in one line."""
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:300]


class Bench:
    """Limits of this process, and one printed JSON row for each arm.

    Args:
        against: which peers run beside the kernels: some of the values of KINDS.
        peers: further arms by name, which take the arguments of every arm that is called "triton".
        prepare: only call every arm and peer once, so that compilers leave their results in their caches.
    """

    def __init__(
        self,
        against: Sequence[str] = tuple(KINDS.values()),
        peers: dict[str, Callable] | None = None,
        prepare: bool = False,
    ) -> None:
        self.against, self.peers, self.prepare = against, peers or {}, prepare
        if prepare:
            return
        self.copy, self.matrix = rates()
        print(json.dumps({"limits": {"copy": self.copy, "matrix": self.matrix}}), flush=True)

    def arm(
        self,
        case: str,
        name: str,
        call: Callable,
        sets: list[tuple],
        exact: object = None,
        nbytes: float = 0.0,
        flops: float = 0.0,
        whole: bool = False,
    ) -> dict[str, object]:
        """Time `call(*inputs)` over all input sets; `exact`: what the first set should give. Returns the row.

        `whole` layers or steps are launched call by call, and their errors are those of a typical token.

        Where calls write into their inputs, `exact` is a function, called before each arm and peer. The limit of the
        row is the larger of `nbytes` at the rate of a copy and `flops` at that of a product.
        """
        row: dict[str, object] = {"case": case, "arm": name}
        if not self.wanted(name):
            return row | {"failed": "not asked for"}
        seconds, distance = (launched_seconds, typical_rms) if whole else (graph_seconds, relative_rms)
        try:
            expected = None if self.prepare else exact() if callable(exact) else exact
            out = call(*sets[0])
            if self.prepare:
                torch.cuda.synchronize()
                row["failed"] = "only prepared"
            else:
                if expected is not None:  # of a peer's outputs, the first ones
                    pairs = zip(tensors_of(out), tensors_of(expected), strict=name not in self.peers)
                    row["error"] = float(torch.tensor([distance(a, b) for a, b in pairs]).max())  # NaN wins
                taken = seconds([lambda: call(*sets[0])])
                rounds = sets * max(1, round(2e-3 / (taken * len(sets))))  # a graph takes 10 us to start
                if len(rounds) > 1:
                    taken = seconds([(lambda s=s: call(*s)) for s in rounds])
                row |= {"us": taken * 1e6, "floor_us": max(nbytes / self.copy, flops / self.matrix) * 1e6}
        except Exception as error:  # this arm's row says so; the next arm goes on
            row["failed"] = said(error)
        self.say(row)
        if name == "triton":
            for peer, function in self.peers.items():
                self.arm(case, peer, function, sets, exact, nbytes, flops)
        return row

    def wanted(self, name: str) -> bool:
        """Whether an arm of that name runs."""
        return KINDS.get(name.split()[0].rstrip(",")) in (None, *self.against)

    def failed(self, case: str, name: str, why: Exception) -> None:
        """The row of an arm that could not be made."""
        if self.wanted(name):
            self.say({"case": case, "arm": name, "failed": said(why)})

    def note(self, text: str) -> None:
        """A line below the table."""
        self.say({"note": text})

    def say(self, entry: dict[str, object]) -> None:
        """Print a row or a note; in preparation none: what fails there will fail again, and be said then."""
        if not self.prepare:
            print(json.dumps(entry), flush=True)


def attention_flops(context: int, tokens: int, window: int | None) -> int:
    """What the cost model counts for one of Small's layers: visible pairs, and biases up to the extent."""
    text = TextConfig(num_hidden_layers=1, layer_types=[SLIDING if window else FULL])
    return cost.flops(InklingConfig(text, vision=None), context, tokens)["attention over keys"]


def key_value_bytes(groups: int, context: int) -> int:
    """Bytes of `context` keys and values in one of Small's full layers, with `groups` of its G heads."""
    text = TextConfig(num_hidden_layers=1, layer_types=[FULL])
    return cost.cache_bytes(InklingConfig(text, vision=None), context, tp=G // groups)["full layers"]


def sets_of(make: Callable[[], tuple], most: int = 64) -> list[tuple]:
    """As many input sets as four L2 caches hold, but at least two and at most `most`."""
    first = make()
    size = sum(t.nbytes for t in first if isinstance(t, Tensor))
    return [first] + [make() for _ in range(min(most, max(2, int(4 * L2_BYTES / size))) - 1)]


def normal(*shape: int, dtype: torch.dtype = BF16, scale: float = 1.0) -> Tensor:
    """Random numbers on the GPU."""
    return (scale * torch.randn(shape, device="cuda", dtype=torch.float32)).to(dtype)
