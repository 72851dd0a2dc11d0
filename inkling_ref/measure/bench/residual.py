"""Times of the kernels on the depth state."""

import torch

from ... import residual
from .harness import BF16, Bench, D, normal, sets_of


def bench_residual(bench: Bench) -> None:
    """Mixture and norm: prefill with one and three queries, sources in 16 and 32 bits; one token."""
    from ...kernels import residual as kernel

    compiled = torch.compile(residual.mix_and_norm, dynamic=False)
    for tokens, n, count, dtype in (
        (8192, 9, 1, BF16),
        (8192, 9, 3, BF16),
        (8192, 9, 1, torch.float32),
        (1, 9, 1, BF16),
    ):
        queries, weights = normal(count, D, dtype=torch.float32), [normal(D) for _ in range(count)]

        def arguments(queries=queries, weights=weights, tokens=tokens, n=n, dtype=dtype):
            return normal(1, tokens, n, D, dtype=dtype), queries, weights, 1e-6, BF16

        sets = sets_of(arguments)
        exact = residual.mix_and_norm(sets[0][0].float(), queries, [w.float() for w in weights], 1e-6, torch.float32)
        nbytes = sets[0][0].nbytes + count * tokens * D * 2
        case = f"mix and norm {tokens} x {n}, {count} q, {str(dtype)[6:]}"
        bench.arm(case, "triton", kernel.mix_and_norm, sets, exact, nbytes)
        for name, value in (("_WARPS", 16), ("_REGISTERS", 64 if count == 1 else 168)) if tokens > 1 else ():
            usual = getattr(kernel, name)
            setattr(kernel, name, value)
            bench.arm(
                case, f"triton,{name.lower().replace('_', ' ')} {value}", kernel.mix_and_norm, sets, exact, nbytes
            )
            setattr(kernel, name, usual)
        if dtype == BF16 and count == 1:
            bench.arm(case, "compiled", compiled, sets, exact, nbytes)
            bench.arm(case, "eager", residual.mix_and_norm, sets, exact, nbytes)
        del sets, exact
        torch.cuda.empty_cache()
