r"""What a rank holds, computes, moves and sends, on paper: from the config and the plan alone.

An operation takes as long as its arithmetic or its bytes, whichever is longer; every input is read once and every
output written once. Seconds of a pass are the sum over operations, with the collectives on top, none overlapped:

$$ t = \sum_{\mathrm{op}} \max\left(\frac{\mathrm{FLOP}}{\mathrm{FLOP/s}},
   \frac{\mathrm{bytes}}{\mathrm{bytes/s}}\right) + \sum_{\mathrm{collective}} t_c $$

**Collectives.** One costs a latency alpha and its bytes over what is usable of a link's bandwidth. A sum over ranks
takes one shot (each sends its whole partial sum to every other) or two (a reduce_scatter, then a gather), whichever is
faster:

$$ t_c = \min\left(\alpha + (\mathrm{ranks} - 1) \frac{\mathrm{bytes}}{\mathrm{bandwidth}}, \;
   2 \alpha + 2 \, \frac{\mathrm{ranks} - 1}{\mathrm{ranks}} \frac{\mathrm{bytes}}{\mathrm{bandwidth}}\right) $$

`layers` always take two, with the convolution in between; where a sum is one call, as in `step`, every rank convolves
all channels. Across hosts, sums and gathers go in two steps, within hosts and then between the like GPUs of each.

**Routing.** Uniform and independent, so that `work` is the mean rank's. In every layer the others wait for the busiest:
its experts are `busiest`, from drawn routes, which can also be skewed.

Conventions: weights and stream in bfloat16, experts in their released formats. The router's weight is float32, and
goes through the matrix units as the exact sum of three bfloat16 matrices (see `kernels.moe`). Sources of the depth
state are read once for each sublayer: that, norms and router are what sequence parallelism divides. Launching a kernel
costs nothing here, so that decoding at batch 1 is underestimated: a layer has ten operations, each of 2 us or more on
a real device.

Sources. Device: the H200's datasheet, of which a good kernel reaches 90 % of the memory's speed and 80 % of the matrix
units'. Latencies: `ALPHAS`, from figures published for H100 and GB200. Links: 450 GB/s each way of an NVLink 4 GPU,
80 % of it usable; between hosts a network card of 400 Gb/s for each GPU, with a latency that is assumed.
"""

import argparse
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from math import comb
from typing import Any

import torch
from torch import Tensor

from ..checkpoint import empty_model, layer_formats
from ..config import InklingConfig
from ..measure import cost
from ..model import keeps_float32
from .apply import Mesh, parallelize
from .collectives import Link
from .plan import Plan, Share, split

HOST = 8  # GPUs of one
NETWORK = Link(alpha=30e-6, bandwidth=50e9)
ALPHAS = {  # seconds of one collective that carries next to nothing
    "NCCL": 20e-6,  # all-reduce on 8 H100: 19 to 25 us up to 512 KB (Triton-distributed, issue 57)
    "one-shot kernel": 7e-6,  # on 4 ranks 10 us at 0.5 MB and 23 at 2 MB (vLLM, pull request 24532)
    "Lamport push": 5e-6,  # of 8 with convolution and norm, on GB200 at batch 1 (vLLM's article on Inkling 1)
}
PER_WEIGHT = {"bf16": 2.0, "nvfp4": 1 / 2 + 1 / 16, "mxfp8": 1 + 1 / 32}  # bytes, with scales
STREAM, ROUTE = 2, 4  # bytes of a bfloat16 and a float32
DRAWN = 16384  # tokens whose routes are drawn
CHUNK = 8192  # tokens of one pass of a long prefill


@dataclass(frozen=True)
class Device:
    """Bytes and operations a second that a good kernel reaches."""

    memory: float = 4.3e12
    matrix: float = 790e12  # bfloat16
    scalar: float = 60e12  # float32, outside the matrix units
    splits_router: bool = True  # into three bfloat16 products; else one in float32


@dataclass
class Work:
    """Operations of one kind in one pass of one rank."""

    flops: int | float = 0.0
    bytes: int | float = 0.0
    seconds: int | float = 0.0


@dataclass
class Exchange:
    """Collectives of one purpose in one pass: calls of one rank, bytes that leave it, seconds."""

    calls: int | float = 0
    sent: int | float = 0.0
    seconds: int | float = 0.0


@dataclass(frozen=True)
class Estimate:
    """A pass of one rank: the mean rank's work by operation, collectives by purpose, and the busiest ranks' experts."""

    work: dict[str, Work]
    exchanges: dict[str, Exchange]
    busiest: Work

    @property
    def flops(self) -> int | float:
        return sum(work.flops for work in self.work.values())

    @property
    def bytes(self) -> int | float:
        return sum(work.bytes for work in self.work.values())

    @property
    def calls(self) -> int | float:
        return sum(exchange.calls for exchange in self.exchanges.values())

    @property
    def sent(self) -> int | float:
        return sum(exchange.sent for exchange in self.exchanges.values())

    @property
    def compute_seconds(self) -> int | float:
        """Of the mean rank."""
        return sum(work.seconds for work in self.work.values())

    @property
    def busiest_seconds(self) -> int | float:
        """As `compute_seconds`, but every layer takes as long as the rank computes that is busiest there."""
        return self.compute_seconds - self.work["experts"].seconds + self.busiest.seconds

    @property
    def collective_seconds(self) -> int | float:
        return sum(exchange.seconds for exchange in self.exchanges.values())

    @property
    def seconds(self) -> int | float:
        return self.compute_seconds + self.collective_seconds


def weight_bytes(
    config: InklingConfig, plan: Plan, rank: int = 0, experts: cost.ExpertFormat = "nvfp4+mxfp8"
) -> Counter[str]:
    """What a rank holds of a released checkpoint, by part: counted on its own modules, without memory."""
    model, _ = empty_model(config, "cpu", torch.bfloat16)
    parallelize(model, Mesh.stand_in(plan, rank))
    formats = layer_formats(experts, config.text.num_hidden_layers)
    sizes: Counter[str] = Counter()
    for name, p in model.named_parameters():
        if ".experts." in name:
            sizes["experts"] += int(p.numel() * PER_WEIGHT[formats[int(name.split(".")[2])]])
        else:
            part = next((word for word in ("visual", "unembed", "embed.", "gate.", "attn.") if word in name), "other")
            part = {"visual": "image encoder", "gate.": "router", "attn.": "attention"}.get(part, part.strip("."))
            sizes[part] += p.numel() * (4 if keeps_float32(name) else 2)
    return sizes


# ---------------------------------------------------------------- routing


@dataclass(frozen=True)
class Load:
    """What the tokens of a pass ask in one layer of the mean rank and of the busiest; expected values.

    visited: of a rank's experts that a token chose, and that are then read; pairs: of a token and an expert.
    """

    visited: int | float
    pairs: int | float
    busiest_visited: int | float
    busiest_pairs: int | float


@cache
def _drawn_choices(E: int, k: int, skew: int | float) -> Tensor:
    """Experts [tokens, k] that tokens chose, k different ones each; id 0 is the most popular."""
    generator = torch.Generator().manual_seed(0)
    popularity = torch.arange(1.0, E + 1) ** -skew
    arrival = torch.empty(DRAWN, E).exponential_(generator=generator) / popularity  # the first is drawn by popularity,
    return arrival.topk(k, largest=False).indices  # and so is the next of those that are left


@cache
def load(E: int, k: int, parts: int, tokens: int, skew: int | float = 0.0) -> Load:
    """Load of `parts` ranks that share E experts, where every token chooses k.

    skew: exponent of Zipf's law. An expert is chosen in proportion to 1 / place^skew in the order of popularity; the
    order is another in every layer, so that popular experts may lie anywhere. 0: all are equally popular.
    """
    drawn = min(tokens, CHUNK)  # of more tokens the busiest has as many pairs more as the mean
    chosen = _drawn_choices(E, k, skew)
    passes = chosen[: len(chosen) // drawn * drawn].view(-1, drawn * k)
    counts = torch.zeros(len(passes), E).scatter_add_(1, passes, torch.ones(passes.shape))
    owner = torch.tensor([part for part, run in enumerate(split(E, parts)) for _ in run])
    of_part = torch.nn.functional.one_hot(owner, parts).float()
    generator = torch.Generator().manual_seed(1)
    visited, busiest_visited, busiest_pairs = [], [], []
    for _ in range(16):
        order = of_part[torch.randperm(E, generator=generator)]
        hits = (counts > 0).float() @ order
        visited.append(hits.mean())
        busiest_visited.append(hits.amax(dim=1).mean())
        busiest_pairs.append((counts @ order).amax(dim=1).mean())
    pairs = tokens * k / parts
    busiest = float(torch.stack(busiest_pairs).mean()) / (drawn * k / parts)
    mean = E / parts * (1 - (1 - k / E) ** tokens) if skew == 0 else float(torch.stack(visited).mean())
    return Load(mean, pairs, float(torch.stack(busiest_visited).mean()), busiest * pairs)


def reached(config: InklingConfig, plan: Plan) -> float:
    """Other ranks to which a token is sent because they own one of its experts: uniform routing."""
    E, k = config.text.n_routed_experts, config.text.num_experts_per_tok
    parts = sum(1 - comb(E - len(run), k) / comb(E, k) for run in split(E, plan.n_ep))
    return parts * (plan.world - 1) / plan.n_ep  # the token's own rank is as likely among them as any


# ---------------------------------------------------------------- a pass


def estimate(
    config: InklingConfig,
    plan: Plan,
    tokens: int,
    context: int,
    batch: int = 1,
    experts: cost.ExpertFormat = "nvfp4+mxfp8",
    device: Device | None = None,
    link: Link | None = None,
    skew: int | float = 0.0,
    one_shot: bool = True,
    routing: Load | None = None,
) -> Estimate:
    """A pass over the last `tokens` tokens of `batch` sequences of `context` tokens, in each dp group.

    skew: of the routing, see `load`. one_shot: whether sums may take one, which `layers` never do. routing: what was
    counted, instead; its rank may be another than the mean one.
    """
    device, text, share = device or Device(), config.text, Share(config, plan, 0)
    D, I, E, R = text.hidden_size, text.moe_intermediate_size, text.n_routed_experts, text.d_rel
    L, k, tp, N = text.num_hidden_layers, text.num_experts_per_tok, plan.tp, batch * tokens
    is_cut = plan.sequence and tp > 1 and tokens >= plan.sequence_from
    n_own = N / tp if is_cut else N  # tokens that this rank mixes and norms
    n_routed = N / tp if is_cut or plan.exchange == "all_to_all" else N
    work, busiest = defaultdict(Work), Work()

    def add(done: Work, times: int, flops: int | float, moved: int | float, speed: int | float = device.matrix) -> None:
        _add(done, Work(flops, moved, max(flops / speed, moved / device.memory)), times)

    add(work["embedding"], 1, 0, 2 * N * D * STREAM)
    for is_sliding, times in Counter(map(text.is_sliding, range(L))).items():
        layer = next(i for i in range(L) if text.is_sliding(i) == is_sliding)
        a, H, G = text.attention(layer), share.n_local_heads(layer), share.n_local_kv_heads(layer)
        d, queries = a.head_dim, 1 if is_sliding else 3
        out = 2 * H * d + 2 * G * d + H * R + H
        weights = D * (out + H * d)
        moved = weights + N * (queries * D + out + H * d + D)
        add(work["attention projections"], times, 2 * N * weights, STREAM * moved)
        seen, near = (cost.keys_seen(context, tokens, span) for span in (a.window, a.extent))
        keys = min(context, tokens + (a.window or context))
        moved = batch * (2 * G * d * keys + tokens * (3 * H * d + H * R)) + R * a.extent
        add(work["attention over keys"], times, batch * H * (4 * d * seen + 2 * R * near), STREAM * moved)
        channels = N * (2 * G * d + 2 * D // tp)
        flops = 2 * channels * text.conv_kernel_size
        add(work["convolutions"], times, flops, 2 * STREAM * channels, device.scalar)
    for layer in range(L):
        at_attention, at_mlp = cost.residual_sources(text, layer)
        queries = 1 if text.is_sliding(layer) else 3
        flops = 4 * D * n_own * (at_attention * queries + at_mlp)
        moved = D * n_own * STREAM * (at_attention + at_mlp + queries + 1 + 4)  # y is added twice: read and written
        add(work["residual mixing and norms"], 1, flops, moved, device.scalar)
    speed = device.matrix / 3 if device.splits_router else device.scalar
    add(work["router"], L, 2 * n_routed * D * E, 4 * E * D + STREAM * n_routed * D, speed)
    routing = routing or load(E, k, plan.n_ep, N * plan.dp, skew)
    for quantisation, times in Counter(layer_formats(experts, L)).items():
        for done, visited, pairs in (
            (work["experts"], routing.visited, routing.pairs),
            (busiest, routing.busiest_visited, routing.busiest_pairs),
        ):
            moved = visited * 3 * D * I * PER_WEIGHT[quantisation] + STREAM * pairs * (2 * D * plan.etp + 3 * I)
            add(done, times, 6 * pairs * D * I / plan.etp, moved / plan.etp)
    rows = len(share.local_vocabulary)
    add(work["unembedding"], 1, 2 * batch * rows * D, STREAM * rows * D)
    return Estimate(dict(work), _exchanges(config, plan, N, is_cut, link or Link(), one_shot), busiest)


@dataclass(frozen=True)
class _Ranks:
    """`size` ranks whose numbers are `stride` apart, with the links between them."""

    size: int
    stride: int
    link: Link
    one_shot: bool

    @property
    def n_near(self) -> int:
        """Those of one host."""
        return min(self.size, max(HOST // self.stride, 1))

    def direct(self, each: int | float) -> Exchange:
        """Every rank sends so many bytes to every other, at once over all links."""
        seconds = self.link.seconds(1, (self.n_near - 1) * each)
        if self.size > self.n_near:
            seconds = max(seconds, NETWORK.seconds(1, (self.size - self.n_near) * each))
        return Exchange(1, (self.size - 1) * each, seconds)

    def half(self, whole: int | float) -> Exchange:
        """A reduce_scatter or a gather of so many bytes."""
        near, hosts = self.n_near, -(-self.size // self.n_near)
        seconds = self.link.seconds(1, (near - 1) / near * whole) if near > 1 else 0.0
        if hosts > 1:
            seconds += NETWORK.seconds(1, (hosts - 1) / self.size * whole)
        return Exchange(1, (self.size - 1) / self.size * whole, seconds)

    def sum(self, whole: int | float) -> Exchange:
        """Of so many bytes on every rank: one shot or two."""
        one, half = self.direct(whole), self.half(whole)
        if self.one_shot and one.seconds < 2 * half.seconds:
            return one
        return Exchange(2, 2 * half.sent, 2 * half.seconds)


def all_reduce(ranks: int, size: int | float, link: Link | None = None) -> Exchange:
    """A sum of `size` bytes over so many ranks of one host: in one shot or two."""
    return _Ranks(ranks, 1, link or Link(), True).sum(size)


def _exchanges(
    config: InklingConfig, plan: Plan, N: int, is_cut: bool, link: Link, one_shot: bool
) -> dict[str, Exchange]:
    """Of a pass over N tokens in each dp group, up to the hidden states."""
    text, sends = config.text, plan.exchange == "all_to_all"
    D, k, L = text.hidden_size, text.num_experts_per_tok, text.num_hidden_layers
    stream, routes = N * D * STREAM, N * 2 * k * ROUTE  # bytes
    tp, dp, world = (_Ranks(*size, link, one_shot) for size in ((plan.tp, 1), (plan.dp, plan.tp), (plan.world, 1)))
    exchanges: dict[str, Exchange] = defaultdict(Exchange)

    def add(name: str, times: int, ranks: _Ranks, made: Exchange) -> None:
        if ranks.size > 1:
            _add(exchanges[name], made, times)

    add("embedding", 1, tp, tp.sum(stream))
    if is_cut:
        full = sum(not text.is_sliding(i) for i in range(L))
        add("tokens to attention", L - full, tp, tp.half(stream))
        add("tokens to attention", full, tp, tp.half(3 * stream))
        add("partial sums", L if sends else 2 * L, tp, tp.half(stream))
        if sends:
            add("channels to tokens", L, tp, tp.direct(stream / plan.tp**2))
        else:
            add("tokens to experts", L, tp, tp.half(stream))
            add("tokens to experts", L, tp, tp.half(routes))
        add("channels to tokens", 2 * L, tp, tp.direct(stream / plan.tp**2))
        add("hidden states", 1, tp, tp.half(stream))
    else:
        add("partial sums", 2 * L, tp, tp.sum(stream))
    if sends:
        each = N / plan.tp * reached(config, plan) / (plan.world - 1) if plan.world > 1 else 0  # tokens to another rank
        add("tokens to experts", L, world, world.direct(8))  # how many
        add("tokens to experts", L, world, world.direct(each * (D * STREAM + 2 * k * ROUTE)))
        add("experts to tokens", L, world, world.direct(each * D * STREAM))
    else:
        add("tokens to experts", L, dp, dp.half(plan.dp * (stream + routes)))
        add("experts to tokens", L, dp, dp.half(plan.dp * stream))
    return dict(exchanges)


def prefill(config: InklingConfig, plan: Plan, context: int, **options: Any) -> Estimate:
    """Of a prompt, in passes of `CHUNK` tokens; options of `estimate`.

    Passes after the first differ in attention over keys alone, which grows by the same amount from each to the next:
    the one in their middle stands for all.
    """
    n_full, rest = divmod(context, CHUNK)
    passes = [(1, CHUNK, CHUNK)] if n_full else []
    if n_full > 1:
        passes.append((n_full - 1, CHUNK, CHUNK * (n_full + 2) // 2))
    if rest:
        passes.append((1, rest, context))
    work, exchanges, busiest = defaultdict(Work), defaultdict(Exchange), Work()
    for times, tokens, end in passes:
        one = estimate(config, plan, tokens, end, **options)
        parts = [(busiest, one.busiest), *((work[name], part) for name, part in one.work.items())]
        for total, part in [*parts, *((exchanges[name], part) for name, part in one.exchanges.items())]:
            _add(total, part, times)
    return Estimate(dict(work), dict(exchanges), busiest)


def _add(total: Work | Exchange, part: Work | Exchange, times: int) -> None:
    for name, value in vars(part).items():
        setattr(total, name, getattr(total, name) + times * value)


# ---------------------------------------------------------------- the table


PLANS = {
    "TP4/EP4": Plan(4),
    "TP8/EP8": Plan(8),
    "TP8, MoE-TP": Plan(8, ep=1),
    "TP16/EP16, 2 hosts": Plan(16),
    "TP8 x DP2, EP16, all-to-all, 2 hosts": Plan(8, 2, exchange="all_to_all"),
    "DP8/EP8, all-to-all": Plan(1, 8, exchange="all_to_all"),
}
CONTEXTS = (1024, 32768, 102400, 1048576)
GPU_BYTES = 132 * 2**30  # that an H200 has free for weights and caches


def scaling(config: InklingConfig | None = None) -> list[dict[str, Any]]:
    """A row for every plan and context: bytes, and the estimates of a decoding step and of the prompt's prefill.

    cache: of one sequence; sequences: how many fit beside the weights. fast: the step with the lowest of `ALPHAS`;
    by token: the prefill with sequence parallelism.
    """
    config = config or InklingConfig.small()
    fast = Link(alpha=min(ALPHAS.values()))
    table: list[dict[str, Any]] = []
    for name, plan in PLANS.items():
        weights, share = weight_bytes(config, plan).total(), Share(config, plan, 0)
        for context in CONTEXTS:
            # A rank's cache is the whole cache of a model with its sizes.
            cache = cost.cache_bytes(InklingConfig(share.local_text(), None), context).total()
            row = {"plan": name, "context": context, "weights": weights, "cache": cache}
            row |= {
                "sequences": (GPU_BYTES - weights) // cache,
                "decode": estimate(config, plan, 1, context),
                "fast": estimate(config, plan, 1, context, link=fast),
                "prefill": prefill(config, plan, context),
                "by token": prefill(config, replace(plan, sequence=True), context),
            }
            table.append(row)
    return table


def tables(rows: list[dict[str, Any]]) -> dict[str, list[tuple[str, ...]]]:
    """What `scaling` found, as three tables of texts: heads first, then rows that begin with the plan.

    on keys: of the number before, attention over the cached keys. busy: each layer waits for its busiest rank.
    weights, cache of one sequence: GB; fit: sequences. SP: sequence parallel. + s: the collectives on top, without it.
    """
    step = [("plan", "weights", "calls", "MB sent", "NCCL ms", "push ms")]
    decode = [("plan", "context", "GFLOP", "on keys", "GB", "on keys", "cache", "fit", "ms", "busy ms")]
    prompt = [("plan", "tokens", "TFLOP", "on keys", "TB", "s", "busy s", "SP s", "calls", "GB sent", "+ s")]
    for row in rows:
        first, e, fast = (row["plan"], f"{row['context'] // 1024}K"), row["decode"], row["fast"]
        if row["context"] == rows[0]["context"]:
            numbers = (row["weights"] / 1e9, e.calls, e.sent / 1e6, *(1e3 * x.collective_seconds for x in (e, fast)))
            step.append((row["plan"], *map(_digits, numbers)))
        over_keys = e.work["attention over keys"]
        numbers = [x / 1e9 for x in (e.flops, over_keys.flops, e.bytes, over_keys.bytes, row["cache"])]
        numbers += [row["sequences"], 1e3 * e.compute_seconds, 1e3 * e.busiest_seconds]
        decode.append((*first, *map(_digits, numbers)))
        e, cut = row["prefill"], row["by token"]
        numbers = [x / 1e12 for x in (e.flops, e.work["attention over keys"].flops, e.bytes)]
        numbers += [e.compute_seconds, e.busiest_seconds, cut.compute_seconds]
        prompt.append((*first, *map(_digits, (*numbers, e.calls, e.sent / 1e9, e.collective_seconds))))
    return {"collectives of a step": step, "decoding at batch 1": decode, "reading a prompt": prompt}


def loads(config: InklingConfig | None = None) -> list[tuple[str, ...]]:
    """Milliseconds of a TP8 rank in steps of 1, 8 and 64 rows and in a prefill, as texts under heads.

    Of the mean and the busiest rank, if experts are equally popular and if they are so by Zipf's law; and where every
    rank has a part of every expert (MoE-TP), so that none is busier.
    """
    config = config or InklingConfig.small()
    table = [("pass", "EP8", "busy", "Zipf", "busy", "MoE-TP", "Zipf")]
    for batch, tokens in ((1, 1), (8, 1), (64, 1), (1, CHUNK)):
        even, zipf, sliced, sliced_zipf = (
            estimate(config, plan, tokens, max(tokens, 1024), batch, skew=skew)
            for plan in (Plan(8), Plan(8, ep=1))
            for skew in (0.0, 1.0)
        )
        seconds = [x for e in (even, zipf) for x in (e.compute_seconds, e.busiest_seconds)]
        seconds += [sliced.compute_seconds, sliced_zipf.compute_seconds]
        name = f"decode {batch}" if tokens == 1 else f"prefill {tokens}"
        table.append((name, *(_digits(1e3 * x) for x in seconds)))
    return table


def _digits(x: int | float) -> str:
    """Three digits; whole numbers and large ones as they are."""
    return f"{x:.0f}" if isinstance(x, int) or x >= 99.95 else f"{x:#.3g}"


def sequence_gain(tp: int, config: InklingConfig | None = None, **options: Any) -> tuple[float, float]:
    """What sequence parallelism takes off a prefill of 8,192 tokens: without collectives, and with all exposed."""
    config = config or InklingConfig.small()
    plain, cut = (estimate(config, Plan(tp, sequence=s), 8192, 8192, **options) for s in (False, True))
    return 1 - cut.compute_seconds / plain.compute_seconds, 1 - cut.seconds / plain.seconds


def main() -> None:
    """Print the tables, and the gain of sequence parallelism."""
    argparse.ArgumentParser(
        "python -m inkling_ref.parallel.estimate",
        description="Print what a rank of Small holds, sends and takes, on paper, for plans and contexts; no options.",
    ).parse_args()
    print("Small on H200s, on paper: one rank, uniform routing, no overlap, no launches.")
    print("on keys: of that, attention over keys. busy: each layer waits for its busiest.")
    print("weights, cache of a sequence: GB; fit: sequences. SP: sequence parallel. + s:")
    print("NCCL's collectives, without it. With DP: one group's. A collective takes")
    per_call = ", ".join(f"{name} {1e6 * alpha:g} us" for name, alpha in ALPHAS.items())
    print(f"{per_call}; {Link().usable:.0%} of {Link().bandwidth / 1e9:g} GB/s;")
    print(f"between hosts {1e6 * NETWORK.alpha:g} us, {NETWORK.usable:.0%} of {NETWORK.bandwidth / 1e9:g} GB/s.")
    for name, (heads, *rows) in tables(scaling()).items():
        print(f"\n{name}")
        is_long = len(rows) > len(PLANS)  # then a plan has a line of its own
        for plan, of_plan in groupby((heads, *rows), lambda row: row[0]):
            if is_long and plan in PLANS:
                print(plan)
            for _, *cells in of_plan:
                print(("" if is_long else f"{plan:37}") + "".join(f"{cell:>8}" for cell in cells))
    print("\nms of a TP8 rank: experts on one rank each (EP8), or sliced by width (MoE-TP)")
    for name, *cells in loads():
        print(f"{name:14}" + "".join(f"{cell:>8}" for cell in cells))
    print("\nprefill of 8,192 tokens cut by tokens: saved if all collectives hide, or none")
    for name, device in (("split", Device()), ("in float32", Device(splits_router=False))):
        gains = (f"TP{tp} {' or '.join(f'{gain:.0%}' for gain in sequence_gain(tp, device=device))}" for tp in (4, 8))
        print(f"router {name}: {', '.join(gains)}")
    print("published: TP4 22%, TP8 26%")


if __name__ == "__main__":
    sys.exit(main())
