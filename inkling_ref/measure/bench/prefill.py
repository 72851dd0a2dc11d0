"""Times of prefill attention."""

import torch

from ... import attention
from .attention import attention_inputs, without_bias
from .harness import Bench, G, H, W, attention_flops, sets_of


def bench_prefill(bench: Bench) -> None:
    """Prefill of 8192 tokens, sliding and full: the kernel for this GPU, the one for all, PyTorch's."""
    from ...kernels import attention as kernel

    T = 8192
    for window in (W, None):
        sets = sets_of(lambda: (*attention_inputs(T, H, G, T), [0], window))  # noqa: B023
        exact = attention.attend(*(t.float() for t in sets[0][:7]), [0], window)
        case, flops = f"prefill {T}, {'full' if window is None else 'sliding'}", attention_flops(T, T, window)
        bench.arm(case, "triton", kernel.attend, sets, exact, 0, flops)
        bench.arm(case, "triton, plain", lambda *s: kernel.attend_tiled(kernel.Tile(), *s), sets, exact, 0, flops)
        if window is None:
            bench.arm(case, "SDPA without bias", without_bias, sets, None, 0, flops)
        bench.arm(case, "eager", attention.attend, sets[:1], exact, 0, flops)
        del sets, exact
        torch.cuda.empty_cache()
