r"""The collectives of a pass: torch.distributed underneath, counted; or stand-ins for the rest of an absent world.

A group of `size` ranks exchanges tensors in five ways. A rank sends, of the bytes of the whole tensor,

    gather          (size - 1) / size       every rank's part, put together on all
    reduce_scatter  (size - 1) / size       the sum over ranks, each keeping its part
    sum             2 (size - 1) / size     the sum over ranks, whole on all
    swap            (size - 1) / size       block i of rank j becomes block j of rank i
    exchange        what it says            any number of rows to any rank

A partial sum is in the stream's dtype when it is sent: in a 16-bit model each rank's part rounds once, and so do the
sums of the collective. (The single process sums in float32 and rounds once; in float32 there is no difference.)

Cost, where a collective is modelled and not run:

$$ \mathrm{seconds} = \mathrm{calls} \cdot \alpha + \mathrm{sent} / (\mathrm{usable} \cdot \mathrm{bandwidth}) $$

Source of the defaults: an NCCL call's latency, and the 450 GB/s that an NVLink 4 GPU sends, of which 80 % are usable.
"""

import time
from collections import defaultdict, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from jaxtyping import Shaped
from torch import Tensor

# PyTorch 2.13 renamed them; 2.9 knows the old names only.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


# What this process has come to, by the ranks of the group: how many collectives, and the last. One table for all
# meshes, as torch.distributed has one world; `launch` compares those of all ranks.
ENTERED: dict[tuple[int, ...], tuple[int, str]] = {}


class CollectiveError(RuntimeError):
    """A collective failed here, most likely because another rank is gone."""


@contextmanager
def entering(ranks: tuple[int, ...], what: str) -> Iterator[None]:
    """Within, `ranks` do something together.

    Raises:
        CollectiveError: for what torch.distributed raises.
    """
    ENTERED[ranks] = (ENTERED.get(ranks, (0, ""))[0] + 1, what)
    try:
        yield
    except RuntimeError as error:  # gloo and NCCL know no finer kind
        raise CollectiveError(f"{what}: {str(error).splitlines()[0]}") from error


def moment(device: torch.device) -> "float | torch.cuda.Event":
    """Now, as `device` sees it: a GPU comes to it when it has done what was asked of it before."""
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def seconds_between(start: "float | torch.cuda.Event", end: "float | torch.cuda.Event") -> float:
    """Of two moments; waits for the later one."""
    if isinstance(end, float):
        return end - start
    end.synchronize()
    return start.elapsed_time(end) / 1000  # milliseconds


def waited(device: torch.device) -> float:
    """Now, in seconds, after the device has done what was asked of it: this changes what it times."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


@dataclass(frozen=True)
class Link:
    """The alpha-beta model of one rank's connection: seconds a call, bytes a second."""

    alpha: float = 20e-6
    bandwidth: float = 450e9
    usable: float = 0.8

    def seconds(self, calls: int | float, sent: int | float) -> float:
        return calls * self.alpha + sent / (self.usable * self.bandwidth)


@dataclass
class Count:
    """Calls of one collective on one group: bytes that left this rank, and when each began and ended.

    On a GPU it begins when its turn comes. Stand-ins take no time.
    """

    calls: int = 0
    sent: int = 0
    spans: deque[tuple] = field(default_factory=deque)  # not yet in `_seconds`
    _seconds: float = 0.0

    def add(self, sent: int, *span: tuple) -> None:
        self.calls, self.sent = self.calls + 1, self.sent + sent
        self.spans += span
        self._settle(1000)  # nobody waits for what is so long ago

    @property
    def seconds(self) -> float:
        self._settle(0)
        return self._seconds

    def _settle(self, pending: int) -> None:
        while len(self.spans) > pending:
            self._seconds += seconds_between(*self.spans.popleft())


@dataclass
class Traffic:
    """What a rank exchanged, by phase ("prefill", "decode", ... as `phase` says) and "collective over group"."""

    phase: str = ""
    listener: Callable[[str, float, float, int], None] | None = None  # of each: name, begin and end in us, bytes sent
    counts: dict[tuple[str, str], Count] = field(default_factory=lambda: defaultdict(Count))

    def add(self, what: str, sent: int, *span: tuple) -> None:
        self.counts[self.phase, what].add(sent, *span)

    def to_dict(self) -> dict[str, dict[str, dict[str, int | float]]]:
        phases: dict[str, dict[str, dict[str, int | float]]] = {}
        for (phase, what), count in self.counts.items():
            numbers = {"calls": count.calls, "sent": count.sent, "seconds": count.seconds}
            phases.setdefault(phase, {})[what] = numbers
        return phases


class Group:
    """`size` ranks, of which this process is number `rank`. A group of one exchanges nothing."""

    def __init__(
        self, name: str, size: int, rank: int, traffic: Traffic, process_group: dist.ProcessGroup | None = None
    ) -> None:
        self.name, self.size, self.rank, self.traffic = name, size, rank, traffic
        self.process_group = process_group
        self.ranks = tuple(dist.get_process_group_ranks(process_group)) if process_group is not None else ()

    def _run(self, what: str, sent: int, device: torch.device, collective: Callable[[], object]) -> None:
        traffic, name = self.traffic, f"{what} over {self.name}"
        if device.type == "cuda" and torch.cuda.is_current_stream_capturing():  # nobody sees a graph's replays
            collective()
            traffic.add(name, sent)
            return
        now = moment if traffic.listener is None else waited
        start = now(device)
        with entering(self.ranks, name):
            collective()
        end = now(device)
        traffic.add(name, sent, (start, end))
        if traffic.listener is not None:
            traffic.listener(name, 1e6 * start, 1e6 * end, sent)

    def _part(self, x: Tensor) -> Tensor:
        """Where this rank's part of the sum of all x goes."""
        return x.new_empty(x.shape[0] // self.size, *x.shape[1:])

    def _whole(self, x: Tensor) -> Tensor:
        """Where all ranks' parts go."""
        return x.new_empty(self.size * x.shape[0], *x.shape[1:])

    def _gather(self, out: Tensor, x: Tensor) -> None:
        _all_gather(out, x, group=self.process_group)

    def _reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        _reduce_scatter(out, x, group=self.process_group)

    def _sum(self, x: Tensor) -> None:
        dist.all_reduce(x, group=self.process_group)

    def _exchange(self, out: Tensor, x: Tensor, received: list[int] | None, sent: list[int] | None) -> None:
        dist.all_to_all_single(out, x, received, sent, group=self.process_group)

    def gather(self, x: Shaped[Tensor, "*shape"], dim: int) -> Shaped[Tensor, "*more"]:
        """All ranks' parts, in order, along `dim`; they are equally large."""
        if self.size == 1:
            return x
        x = x.movedim(dim, 0).contiguous()
        out = self._whole(x)
        self._run("gather", (self.size - 1) * x.nbytes, x.device, lambda: self._gather(out, x))
        return out.movedim(0, dim)

    def reduce_scatter(self, x: Shaped[Tensor, "*shape"], dim: int) -> Shaped[Tensor, "*less"]:
        """This rank's part along `dim` of the sum over ranks."""
        if self.size == 1:
            return x
        x = x.movedim(dim, 0).contiguous()
        out = self._part(x)
        self._run("reduce_scatter", (self.size - 1) * out.nbytes, x.device, lambda: self._reduce_scatter(out, x))
        return out.movedim(0, dim)

    def sum(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """The sum over ranks; x is overwritten."""
        if self.size > 1:
            x = x.contiguous()
            self._run("sum", 2 * (self.size - 1) * x.nbytes // self.size, x.device, lambda: self._sum(x))
        return x

    def swap(self, x: Shaped[Tensor, "*shape"]) -> Shaped[Tensor, "*shape"]:
        """x has a block for every rank: block i goes to rank i; block j of the result came from rank j."""
        if self.size == 1:
            return x
        x = x.contiguous()
        out = torch.empty_like(x)
        self._run("swap", (self.size - 1) * x[0].nbytes, x.device, lambda: self._exchange(out, x, None, None))
        return out

    def exchange(self, x: Shaped[Tensor, "*shape"], sent: list[int], received: list[int]) -> Shaped[Tensor, "*other"]:
        """The first sent[0] rows go to rank 0, and so on; the result holds received[j] rows from every rank j."""
        if self.size == 1:
            return x
        out = x.new_empty(sum(received), *x.shape[1:])
        bytes_sent = (len(x) - sent[self.rank]) * x[:1].nbytes
        self._run("exchange", bytes_sent, x.device, lambda: self._exchange(out, x.contiguous(), received, sent))
        return out


AT_ONCE = 4  # results of gathers of one shape that are in use at a time: a layer's attention reads three


class StandIn(Group):
    """A group of which only this rank exists: what others would send has the shape of what this one has.

    Dependencies stay, values are wrong and no bytes move: the seconds of real ones come from `Link`. Only a gather
    takes time, that of its copies, or within `arrived` of one; and a part is a view of what was given.
    """

    places: dict[tuple, deque[Tensor]] | None = None

    @contextmanager
    def arrived(self) -> Iterator[None]:
        """Within, what others send lies there already, as it would when the seconds of `Link` have passed.

        A gather's result is in the place of an earlier one of its shape, AT_ONCE gathers ago, with the others' parts of
        then (copies of this rank's own), and only its own part is copied.
        """
        self.places = {}
        try:
            yield
        finally:
            self.places = None

    def _run(self, what: str, sent: int, device: torch.device, collective: Callable[[], object]) -> None:
        collective()
        self.traffic.add(f"{what} over {self.name}", sent)

    def _part(self, x: Tensor) -> Tensor:
        return x.chunk(self.size)[self.rank]

    def _whole(self, x: Tensor) -> Tensor:
        if self.places is None:
            return super()._whole(x)
        places = self.places.setdefault((x.shape, x.dtype), deque())
        if len(places) < AT_ONCE:
            places.append(torch.cat([x] * self.size))
        else:
            places.rotate(-1)
        return places[-1]

    def _gather(self, out: Tensor, x: Tensor) -> None:
        if self.places is None:
            torch.cat([x] * self.size, out=out)  # reads and writes wider than a copy of an expanded x
        else:
            out.chunk(self.size)[self.rank].copy_(x)

    def _reduce_scatter(self, out: Tensor, x: Tensor) -> None:
        pass

    def _sum(self, x: Tensor) -> None:
        pass

    def _exchange(self, out: Tensor, x: Tensor, received: list[int] | None, sent: list[int] | None) -> None:
        # Every rank sends what this one keeps for itself. The way back asks for other counts: rows are then repeated.
        mine = x.split(sent or [len(x) // self.size] * self.size)[self.rank]
        if len(mine):
            out.copy_(mine[torch.arange(len(out), device=x.device) % len(mine)])
        else:
            out.zero_()
