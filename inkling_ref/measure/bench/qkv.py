"""Times of the kernel between the projections and the attention."""

from collections.abc import Callable

import torch
from torch import Tensor

from ... import fused
from .harness import Bench, G, H, R, d, normal, sets_of


def bench_qkv(bench: Bench) -> None:
    """A sliding layer (static taps) and a full one (dynamic taps, log scaling): prefill, then decoding."""
    from ...kernels import qkv as kernel

    C = G * d
    for tokens, batch in ((8192, 1), (1, 1), (1, 64)):
        slots = max(16, tokens)
        for kind in ("sliding", "full"):
            full = kind == "full"
            lengths = torch.randint(0, slots - tokens + 1, (batch,), device="cuda", dtype=torch.int32)
            common = {
                "q_scale": normal(H, d), "r_scale": normal(H, R), "qk_threshold": 10.0, "r_threshold": 3.0, "eps": 1e-6,
                "lengths": lengths,
            }  # fmt: skip
            for name in ("k_taps", "v_taps"):
                common[name] = normal(4, C) if full else normal(C, 1, 4, dtype=torch.float32)
            if full:
                positions = lengths[:, None] + torch.arange(tokens, device="cuda")
                common |= {"positions": positions + 128000, "log_scaling": (128000.0, 0.1)}

            def make(
                batch: int = batch, tokens: int = tokens, slots: int = slots, full: bool = full
            ) -> tuple[Tensor | None, ...]:
                projected = [normal(batch, tokens, width) for width in (H * d, H * R, C, C)]
                caches = [normal(batch, G, slots, d) for _ in range(2)]
                dynamic = [normal(batch, tokens, G, 4) if full else None for _ in range(2)]
                return *projected, *caches, normal(batch, 3, 2 * C), *dynamic

            def calling(function: Callable, common: dict = common) -> Callable:
                names = ["q", "r", "k", "v", "keys", "values", "state", "k_dynamic", "v_dynamic"]
                return lambda *given: function(**common, **dict(zip(names, given, strict=True)))

            sets = sets_of(make)
            wide = [None if t is None else t.float() for t in sets[0]]
            exact = calling(fused.prepare_qkv)(*wide)
            case = f"qkv {kind} {batch} x {tokens}"
            nbytes = 2 * sum(t.nbytes for t in sets[0][:4]) + sum(t.nbytes for t in sets[0][7:] if full)
            bench.arm(case, "triton", calling(kernel.prepare_qkv), sets, exact, nbytes)
            compiled = torch.compile(fused.prepare_qkv, dynamic=False)
            bench.arm(case, "compiled", calling(compiled), sets, exact, nbytes)
            bench.arm(case, "eager", calling(fused.prepare_qkv), sets, exact, nbytes)
