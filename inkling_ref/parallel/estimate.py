r"""What a rank holds, computes, moves and sends, on paper: from the config and the plan alone.

An operation takes as long as its arithmetic or its bytes, whichever is longer; every input is read once and every
output written once. Seconds of a pass are the sum over operations, with the collectives on top, none overlapped:

$$ t = \sum_{\mathrm{op}} \max(\mathrm{FLOP} / F, \; \mathrm{bytes} / M) + \sum_{\mathrm{collective}}
   (\mathrm{calls} \cdot \alpha + \mathrm{sent} / (e B)) $$

Conventions: weights and stream in bfloat16, experts in their released formats, router weight and arithmetic in
float32. Sources of the depth state are read once for each sublayer: that, norms and router are what sequence
parallelism divides. Routing is uniform, so that this is the mean rank; a busier one takes longer. Launching a kernel
costs nothing here, so that decoding at batch 1 is underestimated: a layer has ten operations, each of 2 us or more on a
real device.

Source of the device's numbers: the H200's datasheet, of which a good kernel reaches 90 % of the memory's speed and
80 % of the matrix units'. Between hosts a GPU has a network card of 400 Gb/s.
"""

import sys
from collections import Counter
from dataclasses import dataclass
from math import comb
from typing import Any

import torch

from ..checkpoint import empty_model, layer_formats
from ..config import InklingConfig
from ..measure import cost
from ..model import keeps_float32
from .apply import Mesh, parallelize
from .collectives import Link
from .plan import Plan, Share

HOST = 8  # GPUs of one
NETWORK = Link(alpha=30e-6, bandwidth=50e9)
STREAM, ROUTE = 2, 4  # bytes of a bfloat16 and a float32


@dataclass(frozen=True)
class Device:
    """Bytes and operations a second that a good kernel reaches."""

    memory: float = 4.3e12
    matrix: float = 790e12  # bfloat16
    scalar: float = 60e12  # float32, outside the matrix units


@dataclass
class Work:
    """One kind of operation in one pass of one rank."""

    flops: float = 0.0
    bytes: float = 0.0
    seconds: float = 0.0


@dataclass(frozen=True)
class Estimate:
    """One pass of one rank: work by operation; calls, bytes and seconds of its collectives."""

    work: dict[str, Work]
    calls: int
    sent: int | float
    collective_seconds: int | float

    @property
    def compute_seconds(self) -> int | float:
        return sum(work.seconds for work in self.work.values())

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
    per_block = {"bf16": 32 * 2, "nvfp4": 32 // 2 + 2, "mxfp8": 32 + 1}  # bytes of 32 weights with their scales
    sizes: Counter[str] = Counter()
    for name, p in model.named_parameters():
        if ".experts." in name:
            sizes["experts"] += p.numel() * per_block[formats[int(name.split(".")[2])]] // 32
        else:
            part = next((word for word in ("visual", "unembed", "embed.", "gate.", "attn.") if word in name), "other")
            part = {"visual": "image encoder", "gate.": "router", "attn.": "attention"}.get(part, part.strip("."))
            sizes[part] += p.numel() * (4 if keeps_float32(name) else 2)
    return sizes


def estimate(
    config: InklingConfig,
    plan: Plan,
    tokens: int,
    context: int,
    batch: int = 1,
    experts: cost.ExpertFormat = "nvfp4+mxfp8",
    device: Device | None = None,
    link: Link | None = None,
) -> Estimate:
    """A pass over the last `tokens` tokens of `batch` sequences of `context` tokens, in each dp group."""
    device, text, share = device or Device(), config.text, Share(config, plan, 0)
    D, I, E, R = text.hidden_size, text.moe_intermediate_size, text.n_routed_experts, text.d_rel
    k, tp, N = text.num_experts_per_tok, plan.tp, batch * tokens
    is_cut = plan.sequence and tp > 1 and tokens >= plan.sequence_from
    n_own = N / tp if is_cut else N  # tokens that this rank mixes and norms
    n_routed = N / tp if is_cut or plan.exchange == "all_to_all" else N
    n_all = N * plan.dp  # tokens that reach the experts of all ranks
    formats = layer_formats(experts, text.num_hidden_layers)
    per_weight = {"bf16": 2.0, "nvfp4": 0.5 + 1 / 16, "mxfp8": 1 + 1 / 32}
    work: dict[str, Work] = {}

    def add(name: str, flops: int | float, size: int | float, speed: float = device.matrix) -> None:
        done = work.setdefault(name, Work())
        done.flops, done.bytes = done.flops + flops, done.bytes + size
        done.seconds += max(flops / speed, size / device.memory)

    add("embedding", 0, 2 * N * D * STREAM)
    for layer in range(text.num_hidden_layers):
        a, H, G = text.attention(layer), share.n_local_heads(layer), share.n_local_kv_heads(layer)
        d, queries = a.head_dim, 1 if a.window else 3
        out = 2 * H * d + 2 * G * d + H * R + H
        weights = D * (out + H * d)
        add("attention projections", 2 * N * weights, STREAM * (weights + N * (queries * D + out + H * d + D)))
        seen, near = (cost.keys_seen(context, tokens, span) for span in (a.window, a.extent))
        keys = min(context, tokens + (a.window or context))
        moved = STREAM * batch * (2 * G * d * keys + tokens * (3 * H * d + H * R))
        add("attention over keys", batch * H * (4 * d * seen + 2 * R * near), moved + STREAM * R * a.extent)
        channels = 2 * G * d + 2 * D // tp
        add("convolutions", 2 * N * channels * text.conv_kernel_size, 2 * STREAM * N * channels, device.scalar)
        at_attention, at_mlp = cost.residual_sources(text, layer)
        mixed = 4 * D * n_own * (at_attention * queries + at_mlp)
        moved = D * n_own * STREAM * (at_attention + at_mlp + queries + 1 + 4)  # y is added twice: read and written
        add("residual mixing and norms", mixed, moved, device.scalar)
        add("router", 2 * n_routed * D * E, 4 * E * D + STREAM * n_routed * D, device.scalar)
        hit = len(share.local_experts) * (1 - (1 - k / E) ** n_all)
        pairs = n_all * k * len(share.local_experts) / E
        moved = hit * 3 * D * I / plan.width * per_weight[formats[layer]]
        moved += STREAM * pairs * (2 * D + 3 * I / plan.width)
        add("experts", 2 * pairs * 3 * D * I / plan.width, moved)
    rows = len(share.local_vocabulary)
    add("unembedding", 2 * batch * rows * D, STREAM * rows * D)
    return Estimate(work, *_collectives(config, plan, N, is_cut, link or Link()))


def _collectives(config: InklingConfig, plan: Plan, N: int, is_cut: bool, link: Link) -> list[int | float]:
    """Calls, bytes and seconds of a pass over N tokens in each dp group, up to the hidden states."""
    text, tp, dp = config.text, plan.tp, plan.dp
    D, k, L = text.hidden_size, text.num_experts_per_tok, text.num_hidden_layers
    S, routes = N * D * STREAM, N * 2 * k * ROUTE
    total: list[int | float] = [0, 0, 0.0]

    def add(calls: int, sent: int | float, size: int, crossing: int | float) -> None:
        """Each of `calls` sends that much; a share `crossing` of it goes to other hosts."""
        if size > 1:
            through = max((1 - crossing) * link.seconds(0, sent), crossing * NETWORK.seconds(0, sent))
            alpha = NETWORK.alpha if crossing else link.alpha
            for i, amount in enumerate((calls, calls * sent, calls * (alpha + through))):
                total[i] += amount

    of_tp = max(tp - HOST, 0) / max(tp - 1, 1)
    of_dp = float(plan.world > HOST and tp >= HOST)
    of_world = max(plan.world - HOST, 0) / max(plan.world - 1, 1)
    part = (tp - 1) / tp
    full = sum(not text.is_sliding(i) for i in range(L))
    sends = plan.exchange == "all_to_all"
    add(1, 2 * part * S, tp, of_tp)  # embedding
    add(L, part * S, tp, of_tp)  # attention: reduce_scatter
    if is_cut:
        add(L - full, part * S, tp, of_tp)  # attention: gather
        add(full, 3 * part * S, tp, of_tp)
        add(2 * L, part * S / tp, tp, of_tp)  # after either convolution: swap
        if sends:
            add(L, part * S / tp, tp, of_tp)
        else:
            add(L, part * (S + routes), tp, of_tp)  # experts: gather
            add(L, part * S, tp, of_tp)  # and reduce_scatter
        add(1, part * S, tp, of_tp)  # hidden states
    else:
        add(L, part * S, tp, of_tp)  # attention: gather
        add(2 * L, part * S, tp, of_tp)  # experts: reduce_scatter and gather
    if sends:
        n = plan.world
        hit = 1 - comb(text.n_routed_experts * (plan.n_ep - 1) // plan.n_ep, k) / comb(text.n_routed_experts, k)
        rows = N / tp * hit * (n - 1)  # of a token to each other rank that owns one of its experts
        add(L, 8 * (n - 1), n, of_world)  # counts
        add(L, rows * (D * STREAM + 2 * k * ROUTE), n, of_world)
        add(L, rows * D * STREAM, n, of_world)
    else:
        add(L, (dp - 1) * (S + routes), dp, of_dp)
        add(L, (dp - 1) * S, dp, of_dp)
    return total


PLANS = {
    "TP4/EP4": Plan(4),
    "TP4/EP4, sequence": Plan(4, sequence=True),
    "TP8/EP8": Plan(8),
    "TP8/EP8, sequence": Plan(8, sequence=True),
    "TP8, MoE-TP": Plan(8, ep=1),
    "DP8/EP8, all-to-all": Plan(1, 8, exchange="all_to_all"),
    "2 hosts: TP16/EP16": Plan(16),
    "2 hosts: TP8 x DP2, EP16, all-to-all": Plan(8, 2, exchange="all_to_all"),
}
CONTEXTS = (1024, 32768, 102400, 1048576)
GPU_BYTES = 132 * 2**30  # that an H200 has free for weights and caches


def scaling(config: InklingConfig | None = None) -> list[dict[str, Any]]:
    """A row for every plan, in bytes and seconds: memory, decoding at every context, a prefill of 8,192 tokens."""
    config = config or InklingConfig.small()
    table: list[dict[str, Any]] = []
    for name, plan in PLANS.items():
        weights = weight_bytes(config, plan).total()
        share = Share(config, plan, 0)
        # A rank's cache is the whole cache of a model with its sizes, but for the convolutions' D / tp channels.
        longest = cost.cache_bytes(InklingConfig(share.local_text(), None), CONTEXTS[-1]).total()
        row: dict[str, Any] = {"plan": name, "weights": weights, "cache at 1M": longest}
        row["sequences of 1M"] = (GPU_BYTES - weights) // longest
        for context in CONTEXTS:
            step = estimate(config, plan, 1, context)
            row[f"decode {context}"] = step.compute_seconds
            row["decode collectives"] = step.collective_seconds
        prefill = estimate(config, plan, 8192, 8192)
        row |= {
            "prefill FLOP": sum(work.flops for work in prefill.work.values()),
            "prefill bytes": sum(work.bytes for work in prefill.work.values()),
            "prefill": prefill.compute_seconds,
            "prefill calls": prefill.calls,
            "prefill sent": prefill.sent,
            "prefill collectives": prefill.collective_seconds,
        }
        table.append(row)
    return table


def sequence_gain(tp: int, config: InklingConfig | None = None) -> tuple[float, float]:
    """What sequence parallelism takes off a prefill of 8,192 tokens: without collectives, and with all exposed."""
    config = config or InklingConfig.small()
    plain, cut = (estimate(config, Plan(tp, sequence=s), 8192, 8192) for s in (False, True))
    return 1 - cut.compute_seconds / plain.compute_seconds, 1 - cut.seconds / plain.seconds


def main() -> None:
    """Print the table."""
    print("Small on H200s, on paper: one rank, mean routing, nothing overlapped, no launch overhead")
    heads = ("GB", "GB at 1M", "fit", *(f"dec {c // 1024}K" for c in CONTEXTS), "coll", "pre 8K", "coll", "GB sent")
    print(f"{'plan':37}" + "".join(f"{head:>9}" for head in heads))
    for row in scaling():
        times = [1e3 * row[f"decode {c}"] for c in CONTEXTS] + [1e3 * row["decode collectives"]]
        prefill = [1e3 * row["prefill"], 1e3 * row["prefill collectives"], row["prefill sent"] / 1e9]
        cells = [row["weights"] / 1e9, row["cache at 1M"] / 1e9, row["sequences of 1M"], *times, *prefill]
        print(f"{row['plan']:37}" + "".join(f"{cell:9.2f}" for cell in cells))
    for tp, published in ((4, 22), (8, 26)):
        alone, exposed = sequence_gain(tp)
        print(f"sequence parallel, TP{tp}: {alone:.0%} without collectives, {exposed:.0%} with; published {published}%")


if __name__ == "__main__":
    sys.exit(main())
