"""Times of the router's and the SwiGLU's kernels."""

import torch

from ... import moe
from .harness import K_EXPERTS, Bench, D, E, I, normal, sets_of


def bench_router(bench: Bench) -> None:
    """Router: prefill and decoding, and how often it chooses the experts that float64 chooses."""
    from ...kernels import moe as kernel

    weight, bias = normal(E, D, dtype=torch.float32, scale=D**-0.5), normal(E, dtype=torch.float32, scale=0.1)
    compiled = torch.compile(moe.route, dynamic=False)
    for tokens in (8192, 1, 8):
        sets = sets_of(lambda: (normal(tokens, D), weight.clone(), bias, K_EXPERTS, 2.5))  # noqa: B023
        case, nbytes = f"router {tokens}", sets[0][0].nbytes + weight.nbytes + tokens * K_EXPERTS * 12
        flops = 3 * 2 * tokens * D * E if tokens > 16 else 0
        exact_weights, exact_ids = moe.route(sets[0][0].double(), weight.double(), bias.double(), K_EXPERTS, 2.5)
        for name, op in (("triton", kernel.route), ("compiled", compiled), ("eager", moe.route)):
            row = bench.arm(case, name, lambda *s, op=op: op(*s)[0], sets, exact_weights, nbytes, flops)
            if "failed" not in row:
                chosen = op(*sets[0])[1].sort(-1).values == exact_ids.sort(-1).values
                bench.note(f"router {tokens} {name}: tokens with the experts of float64: {chosen.all(-1).sum()}")


def bench_swiglu(bench: Bench) -> None:
    """Soft-capped SwiGLU on the rows of 8192 tokens."""
    from ...kernels import moe as kernel

    sets = sets_of(lambda: (normal(8192 * K_EXPERTS, 2 * I, scale=3.0), 4.0, 25.0))
    exact = moe.softcapped_swiglu(sets[0][0].float(), 4.0, 25.0)
    case, nbytes = f"SwiGLU {8192 * K_EXPERTS} x {I}", sets[0][0].nbytes * 1.5
    bench.arm(case, "triton", kernel.softcapped_swiglu, sets, exact, nbytes)
    bench.arm(case, "compiled", torch.compile(moe.softcapped_swiglu, dynamic=False), sets, exact, nbytes)
    bench.arm(case, "eager", moe.softcapped_swiglu, sets, exact, nbytes)
