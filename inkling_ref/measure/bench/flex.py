"""PyTorch's FlexAttention as a peer, with the relative bias and without; neither has sink and gate.

A `score_mod` can add the bias only from a table [B, H, T, X] in memory, 0.8 GB for 8192 tokens. The table is made
before the clock starts, which favours this peer.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from ... import attention
from .attention import attention_inputs
from .harness import Bench, G, H, W, X, attention_flops, key_value_bytes, sets_of


def visible(T: int, S: int, window: int | None) -> BlockMask:
    """Which of S keys the last T positions see."""

    def sees(b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
        distance = t + (S - T) - s
        return distance >= 0 if window is None else (distance >= 0) & (distance < window)

    return create_block_mask(sees, None, None, T, S, device="cuda")


def with_bias(T: int, S: int) -> Callable:
    """FlexAttention that adds table[b, h, t, distance] to the score."""

    def run(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: BlockMask | None) -> Tensor:
        def biased(score: Tensor, b: Tensor, h: Tensor, t: Tensor, s: Tensor) -> Tensor:
            distance = t + (S - T) - s
            near = (distance >= 0) & (distance < X)
            return score + torch.where(near, table[b, h, t, distance.clamp(0, X - 1)], 0.0)

        return flex_attention(q, k, v, score_mod=biased, block_mask=mask, enable_gqa=True)

    return torch.compile(run, dynamic=False)


def without_bias(q: Tensor, k: Tensor, v: Tensor, table: Tensor, mask: BlockMask | None) -> Tensor:
    """FlexAttention alone."""
    return flex_attention(q, k, v, block_mask=mask, enable_gqa=True)


def arms(
    bench: Bench, case: str, shape: tuple[int, int, int, int], window: int | None, nbytes: int, flops: int
) -> None:
    """Both arms of one case; that with bias is checked against the reference with nothing in the sink, the gate open.

    Args:
        shape: queries, query heads, key/value heads, keys.
    """
    T, heads, groups, S = shape
    mask = None if T == 1 else visible(T, S, window)
    inputs = sets_of(lambda: attention_inputs(T, heads, groups, S))
    sets = [(q.transpose(1, 2), k, v, r.transpose(1, 2) @ profiles, mask) for q, k, v, r, profiles, _, _ in inputs]
    *given, sink, gate = (t.float() for t in inputs[0])
    exact = attention.attend(*given, torch.full_like(sink, -1e4), torch.full_like(gate, 1e4), [S - T], window)
    exact = exact.unflatten(-1, (heads, -1)).transpose(1, 2)
    del inputs, given, sink, gate
    bench.arm(case, "FlexAttention with bias", with_bias(T, S), sets, exact, nbytes, flops)
    bench.arm(case, "FlexAttention without bias", torch.compile(without_bias, dynamic=False), sets, None, nbytes, flops)
    torch.cuda.empty_cache()


def bench_flex_prefill(bench: Bench) -> None:
    """8192 tokens, sliding and full."""
    T = 8192
    for window in (W, None):
        case = f"prefill {T}, {'full' if window is None else 'sliding'}"
        arms(bench, case, (T, H, G, T), window, 0, attention_flops(T, T, window))


def bench_flex_decode(bench: Bench) -> None:
    """One query."""
    for heads, groups, S in ((48, 8, 100352), (6, 1, 65536), (6, 1, 100352), (6, 1, 1048576)):
        case = f"decode {heads}/{groups}, {S} keys, 1 queries"
        arms(bench, case, (1, heads, groups, S), None, key_value_bytes(groups, S), 0)
