"""Times of the attention kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import attention
from .harness import Bench, G, H, R, W, X, d, normal, sets_of


def attention_inputs(T: int, heads: int, groups: int, S: int) -> tuple:
    """q, k, v, r, profiles, sink, gate with scores and biases that make a peaked softmax, and a sink that matters."""
    q, r = normal(1, T, heads, d, scale=1.5), normal(1, T, heads, R)
    k, v = (normal(1, groups, S, d) for _ in range(2))
    sink = 8 + normal(1, T, heads, scale=2.0)
    return q, k, v, r, normal(R, X), sink, normal(1, T, heads * d)


def without_bias(q, k, v, r, profiles, sink, gate, offsets, window=None) -> Tensor:
    """PyTorch's own attention without bias, sink and gate: not the same function, but what it would cost."""
    causal = q.shape[1] == k.shape[2]
    return F.scaled_dot_product_attention(q.transpose(1, 2), k, v, is_causal=causal, enable_gqa=True)


def bench_decode(bench: Bench) -> None:
    """Split-KV decoding: tensor-parallel shard and whole heads, short and long, one to eight queries."""
    from ...kernels import attention as kernel

    small, tall = kernel.Tile(16, 128, 132, 3, 3, 4, 2), kernel.Tile(64, 64, 132, 5, 3, 4, 3)
    variants = {
        (1, 6): {"near weighs 1": small._replace(near_weight=1), "near weighs 3": small._replace(near_weight=3),
                 "8 warps": small._replace(warps=8)},
        (8, 6): {"near weighs 4": tall._replace(near_weight=4), "near stages 2": tall._replace(near_stages=2),
                 "3 stages": tall._replace(stages=3)},
    }  # fmt: skip
    for T, heads, groups, S in ((1, 6, 1, 65536), (1, 6, 1, 100352), (1, 6, 1, 1048576), (1, 48, 8, 100352),
                                (2, 6, 1, 100352), (8, 6, 1, 100352), (1, 48, 8, 1024)):  # fmt: skip
        sets = sets_of(lambda: (*attention_inputs(T, heads, groups, S), [S - T]))  # noqa: B023
        exact = attention.attend(*(t.float() for t in sets[0][:-1]), sets[0][-1])
        case, nbytes = f"decode {heads}/{groups}, {S} keys, {T} queries", sets[0][1].nbytes * 2
        bench.arm(case, "triton", kernel.attend, sets, exact, nbytes)
        if S == 100352:
            for name, tile in variants.get((T, heads), {}).items():
                bench.arm(
                    case, f"triton, {name}", lambda *s, tile=tile: kernel.attend_tiled(tile, *s), sets, exact, nbytes
                )
        if T == 1:
            bench.arm(case, "SDPA without bias", without_bias, sets, None, nbytes)
        if S == 1024:
            bench.arm(case, "compiled", torch.compile(attention.attend, dynamic=False), sets, exact, nbytes)
            bench.arm(case, "eager", attention.attend, sets, exact, nbytes)
        del sets, exact
        torch.cuda.empty_cache()


def bench_prefill(bench: Bench) -> None:
    """Prefill of 8192 tokens, sliding and full, over the tiles worth comparing."""
    from ...kernels import attention as kernel

    T = 8192
    tiles = {
        "64x32": (64, 32, 1, 3, 2, 4, 3), "64x64 far 2 near 1": (64, 64, 1, 2, 1, 4, 3),
        "64x64 far 2 near 2": (64, 64, 1, 2, 2, 4, 3), "128x64 far 2 near 1": (128, 64, 1, 2, 1, 8, 3),
        "128x32": (128, 32, 1, 2, 2, 8, 3), "32x64": (32, 64, 1, 3, 3, 4, 3),
    }  # fmt: skip
    for window in (W, None):
        sets = sets_of(lambda: (*attention_inputs(T, H, G, T), [0], window))  # noqa: B023
        exact = attention.attend(*(t.float() for t in sets[0][:7]), [0], window)
        pairs = T * (T + 1) // 2 if window is None else T * W - W * (W - 1) // 2
        biased = T * X - X * (X - 1) // 2
        case, flops = f"prefill {T}, {'full' if window is None else 'sliding'}", H * (4 * d * pairs + 2 * R * biased)
        bench.arm(case, "triton", kernel.attend, sets, exact, 0, flops)
        for name, tile in tiles.items():
            tile = kernel.Tile(*tile)
            bench.arm(
                case, f"triton {name}", lambda *s, tile=tile: kernel.attend_tiled(tile, *s), sets, exact, 0, flops
            )
        if window is None:
            bench.arm(case, "SDPA without bias", without_bias, sets, None, 0, flops)
        bench.arm(case, "eager", attention.attend, sets[:1], exact, 0, flops)
        del sets, exact
        torch.cuda.empty_cache()
