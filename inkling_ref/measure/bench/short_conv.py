"""Times of the short convolutions' kernels."""

import torch

from ... import fused, short_conv
from .harness import Bench, D, G, d, normal, sets_of


def bench_short_conv(bench: Bench) -> None:
    """Static and dynamic short convolutions, prefill and one token; the rolling form, whose state is the step's own."""
    from ...kernels import short_conv as kernel

    weight, static, C = normal(D, 1, 4, dtype=torch.float32), normal(4, 2 * G * d), 2 * G * d
    for tokens in (8192, 1):
        sets = sets_of(lambda: (normal(1, tokens + 3, D), weight))  # noqa: B023
        exact = short_conv.short_conv(sets[0][0].float(), weight)
        case, nbytes = f"short conv {tokens} x {D}", 2 * tokens * D * 2
        bench.arm(case, "triton", kernel.short_conv, sets, exact, nbytes)
        bench.arm(case, "compiled", torch.compile(short_conv.short_conv, dynamic=False), sets, exact, nbytes)
        bench.arm(case, "eager", short_conv.short_conv, sets, exact, nbytes)

        sets = sets_of(lambda: (normal(1, tokens + 3, C), normal(1, tokens, 2 * G, 4), static))  # noqa: B023
        exact = short_conv.dynamic_short_conv(*(t.float() for t in sets[0]))
        case, nbytes = f"dynamic conv {tokens} x {C}", 2 * tokens * C * 2 + sets[0][1].nbytes
        bench.arm(case, "triton", kernel.dynamic_short_conv, sets, exact, nbytes)
        bench.arm(case, "compiled", torch.compile(short_conv.dynamic_short_conv, dynamic=False), sets, exact, nbytes)
        bench.arm(case, "eager", short_conv.dynamic_short_conv, sets, exact, nbytes)

    for rows in (1, 64):
        sets = sets_of(lambda: (normal(rows, 1, D), normal(rows, 3, D), weight))  # noqa: B023
        case, nbytes = f"rolling conv {rows} x {D}", 2 * sum(t.nbytes for t in sets[0][:2])
        compiled = torch.compile(fused.rolling_short_conv, dynamic=False)
        arms = {"triton": kernel.rolling_short_conv, "compiled": compiled, "eager": fused.rolling_short_conv}

        def exact(first: tuple = sets[0]) -> torch.Tensor:  # of the state as the last arm left it
            return fused.rolling_short_conv(*(t.float() for t in first))

        for name, function in arms.items():
            bench.arm(case, name, function, sets, exact, nbytes)
