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

    def arms(case, name, reference, arguments, nbytes, compiled):
        sets = sets_of(arguments)
        calls = {"triton": getattr(kernels, name), "eager": reference}
        if compiled:
            calls["compiled"] = torch.compile(reference, dynamic=False)
        for arm, call in calls.items():
            bench.arm(case, arm, call, sets, lambda first=sets[0]: reference(*widened(list(first))), nbytes)
        del sets
        torch.cuda.empty_cache()

    def parameters(count):
        return normal(count, D, dtype=FLOAT), [normal(D) for _ in range(count)]

    def mixing(tokens, count, dtype):
        shared = *parameters(count), 1e-6, BF16
        arms(
            f"mix and norm {tokens} x {SOURCES}, {count} q, {str(dtype)[6:]}",
            "mix_and_norm",
            residual.mix_and_norm,
            lambda: (normal(1, tokens, SOURCES, D, dtype=dtype), *shared),
            tokens * D * (SOURCES * dtype.itemsize + count * 2),
            compiled=count == 1 and dtype == BF16,
        )

    def as_it_stands(count):
        shared = *parameters(count), 1e-6, BF16
        arms(
            f"mix and norm 8192 x {SOURCES}, {count} q, running sum float32",
            "mix_depth_and_norm",
            fused.mix_depth_and_norm,
            lambda: (normal(1, 8192, SOURCES - 1, D), normal(1, 8192, D, dtype=FLOAT), *shared),
            8192 * D * ((SOURCES - 1) * 2 + 4 + count * 2),
            compiled=False,
        )

    def joining(tokens, count):
        taps, shared = normal(D, 1, 4, dtype=FLOAT, scale=0.5), (SOURCES - 1, *parameters(count), 1e-6)

        def chain():
            state, blocks = normal(tokens, 3, D), normal(tokens, 1, SOURCES - 1, D)
            return normal(tokens, 1, D), state, taps, blocks, normal(tokens, 1, D, dtype=FLOAT), *shared

        state = 2 * 3 * 2 + 2 * 4  # bytes a channel, read and written: convolution, running sum
        nbytes = tokens * D * (SOURCES * 2 + state + count * 2) + D * (16 + count * 6)
        compiled = tokens == count == 1
        arms(
            f"join and mix {tokens} x {SOURCES}, {count} q", "join_and_mix", fused.join_and_mix, chain, nbytes, compiled
        )

    mixing(8192, 1, BF16)
    mixing(8192, 3, BF16)
    joining(1, 1)
    as_it_stands(1)
    mixing(8192, 1, FLOAT)
    mixing(1, 1, BF16)
    joining(1, 3)
    joining(16, 1)
    as_it_stands(3)
