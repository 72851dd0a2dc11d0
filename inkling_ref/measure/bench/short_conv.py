"""Times of the short convolutions' kernels."""

import torch

from ... import short_conv
from .harness import Bench, D, G, d, normal, sets_of


def bench_short_conv(bench: Bench) -> None:
    """Static and dynamic short convolutions, prefill and one token."""
    from ...kernels import short_conv as kernel

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
