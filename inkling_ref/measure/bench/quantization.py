"""Times of the quantisers' kernels. An error is 0: their bytes are those of the reference.

A whole NVFP4 quantiser reads its weights twice, as the first scale needs the expert's maximum, but the limit counts
them once. Where the maxima are known one pass is left.

The limit is the rate of a copy from 1 GiB to another. One matrix (42 MB, and 12 MB of codes) would take 13 us at that
rate, of which a launch is a part: beside the encoders a copy of as many bytes stands, half of them read, half written.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from ... import quantization
from .harness import K_EXPERTS, Bench, D, I, normal, sets_of

EXPERTS = 8
TOKENS = 8192


def maxima(w: Tensor) -> Tensor:
    """Each expert's largest magnitude."""
    return w.abs().amax((1, 2)).float()


def whole(largest: Callable, encode: Callable) -> Callable:
    """A quantiser that finds the maxima itself."""
    return lambda w: encode(w, largest(w))


def bench_quantization(bench: Bench) -> None:
    """Weights, matrices of Small's experts; activations, what enters its experts in prefill."""
    from ...kernels import quantization as kernel

    def arms(case: str, function: Callable, twin: Callable, sets: list[tuple], nbytes: float) -> None:
        exact = None if bench.prepare else function(*sets[0])
        bench.arm(case, "triton", twin, sets, exact, nbytes)
        bench.arm(case, "compiled", torch.compile(function, dynamic=False), sets, exact, nbytes)
        bench.arm(case, "eager", function, sets, exact, nbytes)

    for experts in (1, EXPERTS):

        def weights(experts: int = experts) -> Tensor:
            return normal(experts, 2 * I, D, scale=0.015)

        sets = sets_of(lambda: (w := weights(), maxima(w)))
        size, count = f"{experts} x {2 * I} x {D}", sets[0][0].numel()
        encode, twin, nbytes = quantization.nvfp4_encode, kernel.nvfp4_encode, (2 + 9 / 16) * count
        arms(f"NVFP4 {size}, known maxima", encode, twin, sets, nbytes)
        alike = sets_of(lambda: (normal(int(nbytes / 4)),))  # noqa: B023
        bench.arm(f"NVFP4 {size}, known maxima", "copy", lambda x: x * 1, alike, alike[0][0], nbytes)
        sets = [(w,) for w, _ in sets]
        arms(f"NVFP4 {size}", whole(maxima, encode), whole(kernel.largest, twin), sets, nbytes)
    arms(f"maxima {size}", maxima, kernel.largest, sets, 2.0 * count)
    arms(f"MXFP8 {size}", quantization.mxfp8_encode, kernel.mxfp8_encode, sets, (2 + 33 / 32) * count)

    for rows, columns in ((TOKENS, D), (TOKENS * K_EXPERTS, I)):
        sets = sets_of(lambda: (normal(rows, columns),))  # noqa: B023
        for name in ("fake_nvfp4", "fake_mxfp8"):
            case = f"{name} {rows} x {columns}"
            arms(case, getattr(quantization, name), getattr(kernel, name), sets, 2.0 * sets[0][0].nbytes)
