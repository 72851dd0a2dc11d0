"""Times of the kernel between the projections and the attention."""

import torch
from torch import Tensor

from ... import fused
from .harness import Bench, G, H, R, d, normal, sets_of


def qkv_inputs(full: bool, batch: int, tokens: int) -> tuple[list[tuple], tuple[Tensor, Tensor], int]:
    """Input sets, the queries and relative states that the first gives in float32, bytes."""
    C, slots = G * d, max(16, tokens)
    lengths = torch.randint(0, slots - tokens + 1, (batch,), device="cuda", dtype=torch.int32)
    scales = normal(H, d), normal(H, R)
    taps = [normal(4, C) if full else normal(C, 1, 4, dtype=torch.float32) for _ in range(2)]
    positions = lengths[:, None] + torch.arange(tokens, device="cuda") + 128000
    log_scaling = (positions, (128000.0, 0.1)) if full else (None, None)

    def make() -> tuple[Tensor | None, ...]:
        projected = [normal(batch, tokens, width) for width in (H * d, H * R, C, C)]
        caches = [normal(batch, G, slots, d) for _ in range(2)]
        dynamic = [normal(batch, tokens, G, 4) if full else None for _ in range(2)]
        return *projected, *caches, normal(batch, 3, 2 * C), *dynamic

    def arguments(q, r, k, v, keys, values, state, *dynamic) -> tuple:
        thresholds = 10.0, 3.0, 1e-6
        cache = keys, values, lengths, None, state, None  # no pages, nothing rejected
        return q, r, k, v, *scales, *taps, *thresholds, *cache, *log_scaling, *dynamic

    parts = sets_of(make)
    exact = fused.prepare_qkv(*arguments(*(None if t is None else t.float() for t in parts[0])))
    nbytes = 2 * sum(t.nbytes for t in parts[0][:4]) + sum(t.nbytes for t in parts[0][7:] if full)
    return [arguments(*part) for part in parts], exact, nbytes


def bench_qkv(bench: Bench) -> None:
    """A sliding layer (static taps) and a full one (dynamic taps, log scaling): prefill, then decoding.

    The error is that of the queries and relative states; keys and values go to the cache.
    """
    from ...kernels import qkv as kernel

    for tokens, batch in ((8192, 1), (1, 1), (1, 64)):
        for kind in ("sliding", "full"):
            sets, exact, nbytes = qkv_inputs(kind == "full", batch, tokens)
            case = f"qkv {kind} {batch} x {tokens}"
            bench.arm(case, "triton", kernel.prepare_qkv, sets, exact, nbytes)
            bench.arm(case, "compiled", torch.compile(fused.prepare_qkv, dynamic=False), sets, exact, nbytes)
            bench.arm(case, "eager", fused.prepare_qkv, sets, exact, nbytes)
