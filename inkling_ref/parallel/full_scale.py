"""One true rank of a full-size model on one GPU, measured: `python -m inkling_ref.parallel.full_scale --tp 8`.

The rank's weights are made once, packed for the kernels: all layers, its heads, its experts, its rows of the vocabulary
in the released formats. Then, the most important first:

- decode. Steps of `DecodeStep`, one CUDA graph with its head, after a context of random keys and values. `seconds` are
  the host's, from the ids of a step to the next tokens; `graph_seconds` those of a replay that waits for
  nobody. One step more runs launch by launch, to count routes.
- profile. What a step, or a prefill, launches, by section of `measure.ranges`, beside what the section cannot beat.
- prefill. A prompt by `DecodeStep.prefill`, each rank mixing all tokens (replicated) or its share of them (sequence),
  both by the same routes: `seconds` of a call, on a GPU one CUDA graph's; `launched_seconds` there, of the host
  launching kernel by kernel.
- arms. From here on experts are in the released layout, repacked where they lie. The eager reference, with its growing
  cache, dequantises expert by expert. `torch.compile`: the operations of a step, each compiled for its fixed shapes,
  the step one CUDA graph as ours; `bench.peers.gathered_experts` says how its experts run.

Limits come from `estimate` at the rates of a copy and of a product measured here, with the experts that were counted.
Collectives are stand-ins: their seconds are `estimate.all_reduce`'s and `Link`'s, in a column of their own.

On a CPU everything runs at small sizes, a step by the reference's operations (`torch`) in the place of the kernels'.
"""

import gc
import json
import math
import platform
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from textwrap import wrap
from typing import Annotated, Any, Literal

import torch
import typer
from torch import Tensor

from ..backends import Backend
from ..config import InklingConfig
from ..decode_step import DecodeStep
from ..errors import InputError
from ..files import check_file, whole_file
from ..measure.bench.harness import L2_BYTES, rates, said
from ..measure.bench.layer import Case, filled, growing
from ..measure.launches import Launch, launches
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
from ..model import Inkling
from .apply import Mesh
from .arms import compiled, release_experts, use
from .collectives import Link, Traffic, waited
from .estimate import ALPHAS, STREAM, Device, Estimate, Load, Work, all_reduce, estimate, load
from .layers import ShardedMoE
from .plan import Plan, Share, owners
from .run import ALONE, WARM, measure_filled, ready, replay
from .synthetic import synthetic

K = 1024
LONGEST = 1024 * K - 64  # leaves room for the steps
STEPS = 24  # that are timed
KEY = ("gpu", "preset", "tp", "rank", "skew")  # of a run in the file
COUNTED = ("decode", "prefill", "one step, not a graph")  # phases whose routes are counted
WAYS = ("replicated", "sequence")
ARMS = ("reference", "compile")  # to compare with


@dataclass(frozen=True)
class Cases:
    """decode: (rows, context, new tokens a row); profiled: of single tokens; prefill: tokens.

    compared: decoding of the other arms; the first is profiled.
    """

    decode: tuple[tuple[int, int, int], ...]
    profiled: tuple[tuple[int, int], ...]
    prefill: int
    compared: tuple[tuple[int, int, int], ...]


CASES = {
    "cuda": Cases(
        (
            (1, 32 * K, 1), (8, 32 * K, 1), (64, 32 * K, 1), (1, LONGEST, 1), (1, K, 1), (1, 100 * K, 1), (8, K, 1),
            (64, K, 1), (8, 100 * K, 1), (1, 32 * K, 8), (1, 100 * K, 8), (64, 100 * K, 1), (8, LONGEST, 1),
        ),
        ((1, 32 * K), (8, 32 * K), (64, 32 * K)),
        8 * K,
        ((1, 32 * K, 1), (1, K, 1), (8, 32 * K, 1)),
    ),
    "cpu": Cases(((1, 500, 1), (2, 70, 3)), ((1, 500),), 128, ((1, 500, 1),)),
}  # fmt: skip
GOALS = {(1, 32 * K, 1): 2.0e-3, (8, 32 * K, 1): 4.0e-3, (64, 32 * K, 1): 15e-3, (1, LONGEST, 1): 2.3e-3}  # of TP8
PREFILL_GOALS = {"replicated": 150e-3, "sequence": 100e-3}
RATIO_GOALS = {"reference": 20, "compile": 4}  # at least, of a step of one row
LAUNCHES_GOAL, GAIN_GOAL = 10, 0.25  # launches a layer, at most; what a prefill gains by cutting tokens, at least


# ---------------------------------------------------------------- what is counted while a pass runs


class Priced(Traffic):
    """Adds up, by phase, what every collective would take."""

    def __init__(self, ranks: int, link: Link) -> None:
        super().__init__()
        self.ranks, self.link = ranks, link
        self.seconds: dict[str, float] = defaultdict(float)

    def add(self, what: str, sent: int, *span: tuple) -> None:
        super().add(what, sent, *span)
        self.seconds[self.phase] += collective_seconds(what.split()[0], sent, self.ranks, self.link)


def collective_seconds(name: str, sent: int, ranks: int, link: Link) -> float:
    """Of one call: a sum takes one shot or two, whichever is faster; `sent` are the bytes of two."""
    if name == "sum":
        return all_reduce(ranks, sent * ranks / (2 * (ranks - 1)), link).seconds
    return link.seconds(1, sent)


@contextmanager
def counted(model: Inkling) -> Iterator[list[Tensor]]:
    """A list that gets, while within, every token's experts [N, k], layer by layer in every `COUNTED` pass."""
    found: list[Tensor] = []

    def count(_module: torch.nn.Module, _inputs: tuple, outputs: tuple[Tensor, Tensor]) -> None:
        if model.mesh.traffic.phase in COUNTED:
            found.append(outputs[1].long())

    handles = [layer.mlp.gate.register_forward_hook(count) for layer in model.llm.layers]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def imposed(model: Inkling, routes: list[Tensor]) -> Iterator[None]:
    """Within, all tokens go to these experts [T, k], layer by layer; routers run, and their choice is not heard.

    An empty list imposes nothing.
    """

    def heard(moe: ShardedMoE, ids: Tensor) -> Callable[..., Tensor]:
        owned = moe.owned
        return lambda h, weights, _: owned(h, weights, ids)

    moes = [layer.mlp for layer in model.llm.layers] if routes else []
    for moe, ids in zip(moes, routes, strict=True):
        moe.owned = heard(moe, ids)
    try:
        yield
    finally:
        for moe in moes:
            del moe.owned


def load_of(routes: list[Tensor], E: int, plan: Plan, rank: int, pairs: int) -> Load:
    """Of this rank and of every layer's busiest, means over layers and passes.

    pairs: of tokens and the E experts in a layer, should routes of this rank's tokens alone have been counted.
    """
    ids = torch.stack([some.flatten() for some in routes])
    chosen = torch.zeros(len(ids), E, device=ids.device).scatter_add_(1, ids, torch.ones_like(ids, dtype=torch.float))
    chosen = chosen.cpu() * (pairs / ids.shape[1])
    parts = torch.zeros(E, plan.n_ep)
    for expert, ranks in enumerate(owners(plan, E)):
        parts[expert, ranks[0] // plan.etp] = 1
    visited, asked = (chosen > 0).float() @ parts, chosen @ parts
    mine = rank // plan.etp
    means = visited[:, mine], asked[:, mine], visited.amax(dim=1), asked.amax(dim=1)
    return Load(*(float(some.mean()) for some in means))


def by_section(e: Estimate, config: InklingConfig, plan: Plan, N: int, device: Device) -> dict[str, Work]:
    """An estimate of N tokens under the names of `ranges`.

    With what `estimate` leaves out: q, k, v and r on their way from projections to attention.
    """
    text, share, prepared = config.text, Share(config, plan, 0), Work()
    for layer in range(text.num_hidden_layers):
        a, H, G = text.attention(layer), share.n_local_heads(layer), share.n_local_kv_heads(layer)
        prepared.bytes += 2 * STREAM * N * (H * a.head_dim + H * text.d_rel + 2 * G * a.head_dim)
    prepared.seconds = prepared.bytes / device.memory
    convolutions, mixing = e.work["convolutions"], e.work["residual mixing and norms"]
    joined = Work(*(vars(convolutions)[name] + vars(mixing)[name] for name in ("flops", "bytes", "seconds")))
    return {
        EMBEDDING: e.work["embedding"],
        PROJECTIONS: e.work["attention projections"],
        PREPARATION: prepared,
        ATTENTION: e.work["attention over keys"],
        f"{CONVOLUTION} and {MIX}": joined,  # one launch in a step, two sections in a model
        CONVOLUTION: convolutions,
        MIX: mixing,
        ROUTER: e.work["router"],
        EXPERTS: e.work["experts"],
        UNEMBEDDING: e.work["unembedding"],
    }


def total(limits: dict[str, Work]) -> float:
    """Seconds of a step's sections; a model's two are in one of them."""
    return sum(work.seconds for name, work in limits.items() if name not in (CONVOLUTION, MIX))


# ---------------------------------------------------------------- the run


class Run:
    """One rank and what is found about it; `save` is called after each case.

    Args:
        until: of `time.monotonic`; cases that come later are named in `found["trouble"]`.
    """

    def __init__(
        self, model: Inkling, found: dict[str, Any], until: float, save: Callable[[], None], say: Callable[[str], None]
    ) -> None:
        self.model, self.found, self.until, self.save, self.say = model, found, until, save, say
        self.plan, self.rank, self.traffic = model.mesh.plan, model.mesh.rank, model.mesh.traffic
        self.device, self.on_gpu = Device(found["copy"], found["matrix"]), model.device.type == "cuda"
        self.cases = CASES[model.device.type]
        self.routes: list[Tensor] = []  # of the first prefill, for the second one

    def attempt(self, name: str, measure: Callable[[], str], case: dict[str, Any] | None = None) -> None:
        """One case, if there is time; it says what it found, and what goes wrong is in the file.

        case: of decoding, the beginning of its row.
        """
        if time.monotonic() > self.until:
            self.found["trouble"][name] = "no time left"
            return
        began = time.monotonic()
        self.traffic.counts.clear()
        self.traffic.seconds.clear()
        if self.on_gpu:
            torch.cuda.reset_peak_memory_stats()
        try:
            line = measure()
        except Exception as error:  # the next case may go well
            line = self.found["trouble"][name] = said(error)
            if case is not None:
                self.found["decode"].append(case | {"failed": line})
        gc.collect()
        if self.on_gpu:
            torch.cuda.empty_cache()
        self.save()
        self.say(f"{name}: {line} [{time.monotonic() - began:.0f} s]")

    def memory(self, held: int) -> int:
        """The peak of the case; without a GPU the weights, and `held` bytes of its own."""
        return torch.cuda.max_memory_allocated() if self.on_gpu else self.found["weights_bytes"] + held

    def paper(
        self, rows: int, context: int, tokens: int, routing: Load, plan: Plan | None = None
    ) -> tuple[Estimate, dict[str, Work]]:
        """At the rates that were measured; by section too."""
        plan, config = plan or self.plan, self.model.config
        e = estimate(config, plan, tokens, context, rows, device=self.device, routing=routing)
        return e, by_section(e, config, plan, rows * tokens, self.device)

    def load_of(self, routes: list[Tensor], pairs: int) -> Load:
        """Of this rank."""
        return load_of(routes, self.model.config.text.n_routed_experts, self.plan, self.rank, pairs)

    def random_ids(self, rows: int, tokens: int) -> Tensor:
        device, used = self.model.device, self.model.config.text.unpadded_vocab_size
        return torch.randint(used, (rows, tokens), generator=torch.Generator(device).manual_seed(0), device=device)

    def decode(self, backend: str, rows: int, context: int, tokens: int) -> None:
        """A step, one CUDA graph on a GPU."""
        case = {"backend": backend, "rows": rows, "context": context, "tokens": tokens}

        def measure() -> str:
            with counted(self.model) as routes:
                own = measure_filled(self.model, rows, context, STEPS, tokens)
            # A graph's collectives were counted while it ran once and while it was captured.
            on_top = self.traffic.seconds["capture"] / 2 if self.on_gpu else self.traffic.seconds["decode"] / STEPS
            memory = self.memory(own["memory"]["cache_bytes"])
            graph = {"graph_seconds": median(own["replay_seconds"])} if "replay_seconds" in own else {}
            return self.keep_decode(case | graph, own["step_seconds"], routes, on_top, memory)

        self.attempt(f"{backend}, decode {rows} x {tokens} at {context}", measure, case)

    def keep_decode(
        self, case: dict[str, Any], seconds: list[float], routes: list[Tensor], on_top: float, memory: int
    ) -> str:
        """A row of what was found."""
        rows, context, tokens = (case[name] for name in ("rows", "context", "tokens"))
        pairs = rows * tokens * self.model.config.text.num_experts_per_tok
        routing = self.load_of(routes, pairs)
        e, limits = self.paper(rows, context + tokens, tokens, routing)
        limit = total(limits)
        self.found["decode"].append(
            {
                **case, "seconds": median(seconds), "best": min(seconds), "collective_seconds": on_top,
                "roofline_seconds": limit, "busiest_seconds": limit + e.busiest.seconds - e.work["experts"].seconds,
                "pairs_share": routing.pairs / pairs, "mean_share": 1 / self.plan.n_ep,
                "busiest_share": routing.busiest_pairs / pairs, "memory_bytes": memory,
            }
        )  # fmt: skip
        return f"{1e3 * median(seconds):.3f} ms, limit {1e3 * limit:.3f}, collectives +{1e3 * on_top:.2f}"

    def profile_decode(self, backend: str, rows: int, context: int) -> str:
        """Of a step of one token a row: of the graph's replays, where it is one."""
        self.traffic.phase = "making the step"
        step = ready(DecodeStep(self.model, rows, context + 16))
        step.fill([context] * rows)
        ids = self.random_ids(rows, 1)

        def one_by_one() -> None:
            graph, step.graph = step.graph, None
            step(ids), step.next_tokens()
            step.graph = graph

        self.traffic.phase = "decode"
        with counted(self.model) as routes:
            one_by_one()
        self.traffic.phase = "a profile"
        try:
            calls = launches(step, one_by_one, None if step.graph is None else partial(replay, step))
        except InputError as error:  # what is counted for nobody is then among the launches
            self.found["trouble"][f"{backend}, profile {rows} x 1 at {context}"] = f"no graph: {error}"
            calls = launches(step, one_by_one)
        routing = self.load_of(routes, rows * self.model.config.text.num_experts_per_tok)
        _, limits = self.paper(rows, context + 1, 1, routing)
        return self.keep_profile(backend, "decode", rows, context, calls, limits)

    def keep_profile(
        self, backend: str, phase: str, rows: int, context: int, calls: list[list[Launch]], limits: dict[str, Work],
        **more: str,
    ) -> str:  # fmt: skip
        """Means of several calls, by section and by kernel."""
        n, L = len(calls), self.model.config.text.num_hidden_layers
        sections: dict[str, list[float]] = defaultdict(list)
        kernels: dict[tuple[str, str], list[float]] = defaultdict(list)
        for launch in (launch for call in calls for launch in call):
            sections[launch.section].append(launch.seconds)
            kernels[launch.name, launch.section].append(launch.seconds)
        by_seconds = sorted(kernels.items(), key=lambda item: -sum(item[1]))
        count, seconds = (sum(map(f, sections.values())) / n for f in (len, sum))
        self.found["profile"].append(
            {
                "backend": backend, "phase": phase, "rows": rows, "context": context, "launches": count,
                "launches_a_layer": count / L, "seconds": seconds, **more,
                "sections": [
                    {"name": name, "seconds": sum(times) / n, "launches": len(times) / n,
                     "roofline_seconds": limits.get(name, Work()).seconds, "bytes": limits.get(name, Work()).bytes,
                     "flops": limits.get(name, Work()).flops}
                    for name, times in sections.items()
                ],
                "kernels": [
                    {"name": name[:160], "launches": len(times) / n, "seconds": sum(times) / n, "section": section}
                    for (name, section), times in by_seconds
                ],
            }
        )  # fmt: skip
        return f"{count:.0f} launches, {count / L:.1f} a layer, {1e3 * seconds:.3f} ms in kernels"

    def prefill(self, backend: str, way: str) -> str:
        """One prompt, by the operations of a step, launched one by one and, on a GPU, as a graph; its profile too.

        Whichever way comes second goes by the routes of the first: else each has other values, so other experts to run.
        """
        model, T = self.model, self.cases.prefill
        plan = replace(self.plan, sequence=way == "sequence")
        model.current.plan = plan
        try:
            step = DecodeStep(model, 1, T + 8)
            ids = self.random_ids(1, T)

            def call() -> None:
                step.reset()
                step.prefill(ids)

            with model.mesh.tp.arrived(), imposed(model, self.routes):
                self.traffic.phase = "prefill"
                with counted(model) as found:
                    step.prefill(ids)
                on_top = self.traffic.seconds["prefill"]
                self.traffic.phase = "the same again"
                self.routes = self.routes or found
                times, launched = seconds_of(step, ids), {}
                calls = launches(step, call, repeats=1)
                if self.on_gpu:
                    launched = {"launched_seconds": median(times)}
                    step.reset()
                    step.capture_prefill(T)
                    times = seconds_of(step, ids)
            pairs = T * model.config.text.num_experts_per_tok
            routing = self.load_of(self.routes, pairs)
            _, limits = self.paper(1, T, T, routing, plan)
            del limits[UNEMBEDDING]
            limit = total(limits)
            memory = self.memory(step.num_bytes)
        finally:
            model.current.plan = self.plan
        self.found["prefill"].append(
            {
                "backend": backend, "tokens": T, "way": way, **launched, "seconds": median(times), "best": min(times),
                "collective_seconds": on_top, "roofline_seconds": limit, "memory_bytes": memory,
                "pairs_share": routing.pairs / pairs,
            }
        )  # fmt: skip
        self.keep_profile(backend, "prefill", 1, T, calls, limits, way=way)
        return f"{1e3 * median(times):.1f} ms, limit {1e3 * limit:.1f}, collectives +{1e3 * on_top:.1f}"

    def reference(self, rows: int, context: int, tokens: int) -> None:
        """The model as it is defined, call by call."""
        model, own = self.model, {"backend": "reference", "rows": rows, "context": context, "tokens": tokens}

        def measure() -> str:
            case, times = Case(rows, context, tokens), []
            call = growing(model, *filled(model, case), head=True)
            self.traffic.phase = "decode"
            with counted(model) as routes:
                call()
            on_top = self.traffic.seconds["decode"]
            self.traffic.phase = "the same again"
            while len(times) < 5 or (len(times) < STEPS and sum(times) < 1):
                start = waited(model.device)
                call()
                times.append(waited(model.device) - start)
            memory = self.memory(0)
            line = self.keep_decode(own, times, routes, on_top, memory)
            if (rows, context, tokens) == self.cases.compared[0]:
                routing = self.load_of(routes, rows * tokens * model.config.text.num_experts_per_tok)
                _, limits = self.paper(rows, context + tokens, tokens, routing)
                found = launches(model, call, repeats=1)
                line += "; " + self.keep_profile("reference", "decode", rows, context, found, limits)
            return line

        self.attempt(f"reference, decode {rows} x {tokens} at {context}", measure, own)

    def compare(self, against: Sequence[str]) -> None:
        """The other arms, on the same bytes; ours are over."""
        model, cases = self.model, self.cases.compared
        if against:
            release_experts(model)
        if "reference" in against:
            use(model, Backend())
            model.llm.logits.sampling = 0.0, None, None  # ranks exchange their best token, not all logits
            for case in cases:
                self.reference(*case)
        if "compile" in against:
            for rows, context, tokens in cases:
                use(model, compiled(model, context))
                self.decode("compile", rows, context, tokens)
                if (rows, context, tokens) == cases[0]:
                    name = f"compile, profile {rows} x 1 at {context}"
                    self.attempt(name, partial(self.profile_decode, "compile", rows, context))

    def ours(self, backend: str) -> None:
        """Everything but the arms to compare with."""
        for case in self.cases.decode:
            self.decode(backend, *case)
        for rows, context in self.cases.profiled:
            name = f"{backend}, profile {rows} x 1 at {context}"
            self.attempt(name, partial(self.profile_decode, backend, rows, context))
        for way in WAYS:
            self.attempt(f"{backend}, prefill {way}", partial(self.prefill, backend, way))


def seconds_of(step: DecodeStep, ids: Tensor) -> list[float]:
    """Of some calls of `prefill`, each of rows that are empty."""
    times = []
    for _ in range(6):
        step.reset()
        start = waited(ids.device)
        step.prefill(ids)
        times.append(waited(ids.device) - start)
    return times


# ---------------------------------------------------------------- what it means


def caveats(model: Inkling, found: dict[str, Any], link: Link) -> list[str]:
    """What to know beside every number of a run, in seven sentences or two each, with the run's own numbers."""
    config, text, plan, rank = model.config, model.config.text, model.mesh.plan, model.mesh.rank
    E, k, L = text.n_routed_experts, text.num_experts_per_tok, text.num_hidden_layers
    even, zipf = (load(E, k, plan.n_ep, 1, skew) for skew in (0.0, 1.0))
    rates = Device(found["copy"], found["matrix"])
    paper, slow = (estimate(config, plan, 1, 32 * K, skew=s, device=rates, link=link) for s in (0.0, 1.0))
    push = estimate(config, plan, 1, 32 * K, device=rates, link=replace(link, alpha=min(ALPHAS.values())))
    local = model.share.local_experts
    whole = next((row for row in found["decode"] if "seconds" in row), None)
    share, busiest = ("not measured",) * 2 if whole is None else (f"{whole[s]:.1%}" for s in (
        "pairs_share", "busiest_share"))  # fmt: skip
    case = "" if whole is None else f" ({whole['rows']} x {whole['tokens']} tokens)"
    return [
        f"{ALONE[0].upper()}{ALONE[1:]}. A call takes alpha = {1e6 * link.alpha:g} us and its bytes at 1 / beta = "
        f"{link.usable * link.bandwidth / 1e9:g} GB/s; a sum over {plan.tp} ranks the faster of one shot and of two. "
        f"That adds {1e3 * paper.collective_seconds:.2f} ms to a step of one token ({paper.calls:.0f} messages), "
        f"{1e3 * push.collective_seconds:.2f} ms with a kernel that pushes in {1e6 * min(ALPHAS.values()):g} us. "
        f"Nothing here is the speed of {plan.world} GPUs.",
        f"It is rank {rank} of {plan.world}, with experts {local.start} to {local.stop - 1} and routing skew "
        f"{found['skew']:g}. In the first case{case} it had {share} of the pairs of tokens and experts (mean rank "
        f"{1 / plan.n_ep:.1%}, busiest of each layer {busiest}). Every layer waits for its busiest rank: at one token "
        f"that reads {even.busiest_visited:.2f} experts where the mean rank reads {even.visited:.2f}, by Zipf's law "
        f"{zipf.busiest_visited:.2f}: limits at 32K of {1e3 * paper.compute_seconds:.2f} ms (mean), "
        f"{1e3 * paper.busiest_seconds:.2f} (busiest) and {1e3 * slow.busiest_seconds:.2f} (Zipf).",
        "Weights are random, and of a sum over ranks only this rank's part is there: the values are not the model's, "
        "its tokens mean nothing. Times depend on no values but the routes, which are counted; both prefills go by "
        "those of the first. That ranks together compute the model is shown apart: all ranks of a few layers in turn "
        "(parallel.in_turn), and worlds of small models (tests).",
        f"The other ranks are missing, {plan.world - 1} of {plan.world}: no waiting for a slower one, no messages "
        "that take memory bandwidth and multiprocessors from the kernels, no jitter of hosts. All of that makes a real "
        "step longer.",
        f"No zeros: an H200 was 13 % faster on them. {found['weights_bytes'] / 1e9:.3g} GB of random weights in the "
        f"released formats; keys and values as large as real ones; every token routes to {k} different of {E} experts.",
        f"All {L} layers run one after the other, each on its own weights: a step of one token reads about "
        f"{paper.bytes / 1e9:.3g} GB at 32K, {paper.bytes / L2_BYTES:.2g} times the L2 cache of an H200. One layer in "
        f"a loop would find much of itself there. On a GPU {WARM} replays go before the steps that are timed.",
        f"alpha and beta are published figures of other machines, not calibrated on this one: that takes {plan.world} "
        "GPUs of one host (`inkling-ref bench collectives`, which also times a true step). Where NVLink multicast is "
        "off, its faster sums are not to be had.",
    ]


def table(run: dict[str, Any]) -> str:
    """At most 80 columns."""
    head = f"{run['gpu']}, torch {run['torch']}, triton {run['triton']}, {run['date']}"
    lines = [
        head[:80],
        f"{run['preset']}, rank {run['rank']} of TP{run['tp']}, skew {run['skew']:g}: {run['weights_bytes'] / 1e9:.3g} "
        f"GB; copy {run['copy'] / 1e12:.2f} TB/s, product {run['matrix'] / 1e12:.3g} TFLOP/s",
        "",
        f"{'decode, ms a step':11}{'rows':>6}{'new':>5}{'context':>9}{'median':>9}{'graph':>9}{'limit':>9}"
        f"{'goal':>7}{'+ coll.':>9}",
    ]
    goals = run["tp"] == 8 and run["preset"] == "small"
    for row in (row for row in run["decode"] if "seconds" in row):
        case = row["rows"], row["context"], row["tokens"]
        names = ("seconds", "graph_seconds", "roofline_seconds")
        numbers = "".join(f"{1e3 * row[name]:9.3f}" if name in row else " " * 9 for name in names)
        goal = GOALS.get(case) if goals and row["backend"] == "triton" else None
        at_most = "" if goal is None else f"{1e3 * goal:.1f}"
        first = f"{row['backend']:17}{case[0]:6}{case[2]:5}{case[1]:9}"
        lines.append(f"{first}{numbers}{at_most:>7}{1e3 * row['collective_seconds']:9.2f}")
    lines += ["", f"{'prefill, ms':17}{'tokens':>7}{'way':>12}{'launched':>10}{'median':>8}{'limit':>9}{'goal':>7}"
              f"{'+ coll.':>9}"]  # fmt: skip
    for row in run["prefill"]:
        at_most = f"{1e3 * PREFILL_GOALS[row['way']]:.0f}" if goals and row["backend"] == "triton" else ""
        launched = f"{1e3 * row['launched_seconds']:.1f}" if "launched_seconds" in row else ""
        numbers = f"{launched:>10}{1e3 * row['seconds']:8.1f}{1e3 * row['roofline_seconds']:9.1f}{at_most:>7}"
        first = f"{row['backend']:17}{row['tokens']:7}{row['way']:>12}"
        lines.append(f"{first}{numbers}{1e3 * row['collective_seconds']:9.1f}")
    for of in run["profile"]:
        case = f"{of['rows']} x {of['context']}" if of["phase"] == "decode" else f"{of['context']}, {of['way']}"
        lines += ["", f"{of['backend']}, {of['phase']} {case}: {of['launches']:.0f} launches, "
                  f"{of['launches_a_layer']:.1f} a layer, {1e3 * of['seconds']:.4g} ms busy"]  # fmt: skip
        lines.append(f"{'':47}{'launches':>9}{'us':>12}{'limit':>12}")
        for section in of["sections"]:
            numbers = f"{1e6 * section['seconds']:12.1f}{1e6 * section['roofline_seconds']:12.1f}"
            lines.append(f"  {section['name']:45}{section['launches']:9.0f}{numbers}")
    lines += ["", *ratios(run)]
    for number, caveat in enumerate(run["caveats"], 1):
        lines += wrap(f"{number}. {caveat}", 80, subsequent_indent="   ")
    lines += [f"{name}: {trouble}"[:80] for name, trouble in run["trouble"].items()]
    return "\n".join(lines)


def ratios(run: dict[str, Any]) -> list[str]:
    """How many times the kernels' step others take, and what the prefill gains by cutting tokens."""
    rows = [row for row in run["decode"] if "seconds" in row]
    lines, steps = [], {(row["backend"], row["rows"], row["context"], row["tokens"]): row for row in rows}
    for (backend, *case), row in steps.items():
        ours = steps.get(("triton", *case))
        if backend != "triton" and ours is not None:
            goal = f", goal {RATIO_GOALS[backend]}" if case[0] == 1 and backend in RATIO_GOALS else ""
            ratio = row["seconds"] / ours["seconds"]
            lines.append(f"{backend} at {case[0]} x {case[1]}: {ratio:.1f} times the kernels' step{goal}")
    for of in run["profile"]:
        if (of["backend"], of["phase"]) == ("triton", "decode"):
            case = f"{of['rows']} x {of['context']}"
            found = f"{of['launches_a_layer']:.1f} a layer, goal {LAUNCHES_GOAL}"
            lines.append(f"launches of the kernels' step at {case}: {found}")
    gain = gain_of({row["way"]: row["seconds"] for row in run["prefill"] if row["backend"] == "triton"})
    if gain is not None:
        lines.append(f"sequence-parallel prefill: {gain:.0%} less than replicated, goal {GAIN_GOAL:.0%}")
    return lines


def gain_of(ways: dict[str, float]) -> float | None:
    """What a prefill saves by cutting tokens, of the replicated one's seconds; None where one is missing."""
    return 1 - ways["sequence"] / ways["replicated"] if len(ways) == len(WAYS) else None


def kept(path: Path, run: dict[str, Any]) -> None:
    """Put a run into the file, in the place of the one of the same `KEY`."""
    runs = read(path)["runs"]
    runs = [other for other in runs if any(other[name] != run[name] for name in KEY)]
    with whole_file(path) as half:
        half.write_text(json.dumps({"runs": [*runs, run]}, indent=1) + "\n", encoding="utf-8")


def read(path: Path) -> dict[str, Any]:
    """The file's runs, none where there is no file.

    Raises:
        InputError: another file.
    """
    if not path.exists():
        return {"runs": []}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        if all(name in run for run in content["runs"] for name in KEY):
            return content
    except (ValueError, KeyError, TypeError):
        pass
    raise InputError(f"{path}: expected runs that this command wrote")


@torch.inference_mode()
def measure(
    tp: int,
    rank: int = 0,
    skew: float = 0.0,
    preset: str = "small",
    path: Path | None = None,
    seconds: float = 400.0,
    device: str = "cuda",
    against: Sequence[str] = ARMS,
    say: Callable[[str], None] = lambda line: None,
) -> dict[str, Any]:
    """The run, which `path` holds so far at any time.

    Raises:
        InputError: a plan that does not fit the model, a rank that is not in it, an arm that is none, no GPU, a skew
            that is no number, a file of another kind, or one that cannot be written.
    """
    began = time.monotonic()
    config, plan, link = getattr(InklingConfig, preset)(), Plan(tp), Link()
    plan.check(config)
    mesh = Mesh.stand_in(plan, rank)
    mesh.traffic = Priced(tp, link)
    for group in (mesh.world, mesh.tp, mesh.dp):
        group.traffic = mesh.traffic
    if tp == 1:
        raise InputError("--tp is 1, expected ranks that share the model: 2 or more")
    for arm in against:
        if arm not in ARMS:
            raise InputError(f"--against {arm}, expected some of {', '.join(ARMS)}, or none")
    if not math.isfinite(skew):
        raise InputError(f"--skew is {skew}, expected a finite number")
    if path is not None:
        check_file(path, "runs")
        read(path)
    on_gpu = device == "cuda"
    if on_gpu and not torch.cuda.is_available():
        raise InputError("--device is cuda: torch sees no GPU here, expected one, or --device cpu")
    copy, matrix = rates(device)
    say(f"copy {copy / 1e12:.2f} TB/s, product {matrix / 1e12:.3g} TFLOP/s [{time.monotonic() - began:.0f} s]")
    dtype, backend = (torch.bfloat16, "triton") if on_gpu else (torch.float32, "torch")
    model = synthetic(config, mesh, device, dtype, backend, skew=skew)
    found: dict[str, Any] = {
        "gpu": torch.cuda.get_device_name() if on_gpu else "cpu", "torch": torch.__version__,
        "triton": sys.modules["triton"].__version__ if on_gpu else "none", "python": platform.python_version(),
        "date": time.strftime("%Y-%m-%d", time.gmtime()), "preset": preset, "tp": tp, "rank": rank, "skew": skew,
        "copy": copy, "matrix": matrix, "link": asdict(link),
        "weights_bytes": sum(t.nbytes for t in (*model.parameters(), *model.buffers())),
        "caveats": [], "trouble": {}, "decode": [], "prefill": [], "profile": [],
    }  # fmt: skip
    say(f"weights: {found['weights_bytes'] / 1e9:.3g} GB [{time.monotonic() - began:.0f} s]")

    def save() -> None:
        found["caveats"] = caveats(model, found, link)
        if path is not None:
            kept(path, found)

    run = Run(model, found, began + seconds, save, say)
    run.ours(backend)
    run.compare(against)
    save()
    return found


def main(
    tp: Annotated[int, typer.Option(help="Ranks that share the model: tensor and expert parallel.")] = 8,
    rank: Annotated[int, typer.Option(help="The one that is measured.")] = 0,
    skew: Annotated[float, typer.Option(help="Fall of the router's bias from the first expert to the last.")] = 0.0,
    preset: Annotated[Literal["small", "nano"], typer.Option(help="The model's sizes.")] = "small",
    json_file: Annotated[
        Path | None, typer.Option("--json", help="The file of all runs; this one is put there.")
    ] = None,
    seconds: Annotated[float, typer.Option(help="Of the whole run; cases without time are named below.")] = 400.0,
    device: Annotated[Literal["cpu", "cuda"], typer.Option(help="On a CPU at small sizes.")] = "cuda",
    against: Annotated[
        str | None, typer.Option(help=f"Of {','.join(ARMS)}, or none; default: all, on a CPU {ARMS[0]}.")
    ] = None,
) -> None:
    """Measure one rank of a full-size model on one GPU."""
    against = against or (",".join(ARMS) if device == "cuda" else ARMS[0])  # a compiler for CPUs takes a minute
    arms = [] if against == "none" else against.split(",")
    try:
        found = measure(
            tp, rank, skew, preset, json_file, seconds, device, arms, lambda line: print(line, file=sys.stderr)
        )
    except (InputError, OSError) as error:
        print(f"full_scale: {error}", file=sys.stderr)
        raise typer.Exit(2) from None
    print(table(found))


if __name__ == "__main__":
    typer.run(main)
