"""Times of the kernels on the depth state."""

import torch
from torch import Tensor

from ... import fused, residual
from .harness import BF16, Bench, D, normal, sets_of

FLOAT = torch.float32
SOURCES = 9  # of the last block's layers: 8 completed blocks and the running sum


def widened(argument: object) -> object:
    """Inputs of the exact reference: a copy in float32, as calls may write in place."""
    if isinstance(argument, Tensor):
        return argument.float().clone()
    if isinstance(argument, list):
        return [widened(part) for part in argument]
    return FLOAT if argument is BF16 else argument


def bench_residual(bench: Bench) -> None:
    """Mixture and norm: many tokens and one, one and three queries; the depth state as it stands; the decode chain."""
    from ...kernels import residual as kernels

    def arms(case, name, reference, arguments, nbytes, compiled=True):
        sets = sets_of(arguments)
        calls = {"triton": getattr(kernels, name), "eager": reference}
        if compiled:
            calls["compiled"] = torch.compile(reference, dynamic=False)
        for arm, call in calls.items():
            exact = reference(*widened(list(sets[0])))
            bench.arm(case, arm, call, sets, exact, nbytes)
            del exact
        del sets
        torch.cuda.empty_cache()

    def mixing(count):
        return normal(count, D, dtype=FLOAT), [normal(D) for _ in range(count)]

    for tokens, count, dtype in ((8192, 1, BF16), (8192, 3, BF16), (8192, 1, FLOAT), (1, 1, BF16)):
        queries, weights = mixing(count)

        def sources(tokens=tokens, dtype=dtype, queries=queries, weights=weights):
            return normal(1, tokens, SOURCES, D, dtype=dtype), queries, weights, 1e-6, BF16

        nbytes = tokens * D * (SOURCES * dtype.itemsize + count * 2)
        case = f"mix and norm {tokens} x {SOURCES}, {count} q, {str(dtype)[6:]}"
        arms(case, "mix_and_norm", residual.mix_and_norm, sources, nbytes, dtype == BF16)
    for count in (1, 3):
        queries, weights = mixing(count)

        def depth(queries=queries, weights=weights):
            return normal(1, 8192, SOURCES - 1, D), normal(1, 8192, D, dtype=FLOAT), queries, weights, 1e-6, BF16

        nbytes = 8192 * D * ((SOURCES - 1) * 2 + 4 + count * 2)
        case = f"mix and norm 8192 x {SOURCES}, {count} q, running sum float32"
        arms(case, "mix_depth_and_norm", fused.mix_depth_and_norm, depth, nbytes, compiled=False)
    taps = normal(D, 1, 4, dtype=FLOAT, scale=0.5)
    for tokens, count in ((1, 1), (1, 3), (16, 1)):
        queries, weights = mixing(count)

        def chain(tokens=tokens, queries=queries, weights=weights):
            state, blocks = normal(tokens, 3, D), normal(tokens, 1, SOURCES - 1, D)
            partial = normal(tokens, 1, D, dtype=FLOAT)
            return normal(tokens, 1, D), state, taps, blocks, partial, SOURCES - 1, queries, weights, 1e-6

        nbytes = tokens * D * ((SOURCES - 1) * 2 + 2 + 2 * 3 * 2 + 2 * 4 + count * 2) + D * (16 + count * 6)
        arms(f"join and mix {tokens} x {SOURCES}, {count} q", "join_and_mix", fused.join_and_mix, chain, nbytes)
