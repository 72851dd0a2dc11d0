"""Times of the attention kernels."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ... import attention
from .harness import Bench, R, W, X, d, key_value_bytes, normal, sets_of


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


def paged(x: Tensor, table: Tensor) -> Tensor:
    """Keys or values [B, G, S, d] as pages [P, G, S / pages, d] that stand where the table [B, pages] says."""
    out = torch.empty(table.numel(), x.shape[1], x.shape[2] // table.shape[1], x.shape[3], dtype=x.dtype, device="cuda")
    out[table] = x.unflatten(2, (table.shape[1], -1)).transpose(1, 2)
    return out


def bench_decode(bench: Bench) -> None:
    """Decoding over a cache: tensor-parallel shard and whole heads, short and long, one to eight queries, pages."""
    from ...kernels.attention import attend
    from ...kernels.decode import attend_cache

    cases = (
        (1, 6, 1, 65536), (1, 6, 1, 100352), (2, 6, 1, 100352), (4, 6, 1, 100352), (8, 6, 1, 100352),
        (1, 6, 1, 1048576), (1, 48, 8, 100352), (1, 48, 8, W), (8, 48, 8, W),
    )  # fmt: skip
    for T, heads, groups, S in cases:
        lengths, window = torch.full((1,), S - T, dtype=torch.int32, device="cuda"), W if S == W else None
        sets = sets_of(lambda: (*attention_inputs(T, heads, groups, S), lengths, window))  # noqa: B023
        exact = attention.attend(*(t.float() for t in sets[0][:7]), [S - T], window)
        case, nbytes = f"decode {heads}/{groups}, {S} keys, {T} queries", key_value_bytes(groups, S)
        bench.arm(case, "triton", attend_cache, sets, exact, nbytes)
        offset_sets = [(*s[:7], [S - T], window) for s in sets]
        bench.arm(case, "triton attend", attend, offset_sets, exact, nbytes)
        if S == 100352 and T in (1, 8):
            table = torch.randperm(S // 128, device="cuda")[None]  # one for all sets, as for all layers
            int_table = table.to(torch.int32)
            page_sets = [(q, paged(k, table), paged(v, table), *rest, int_table) for q, k, v, *rest in sets]
            bench.arm(case, "triton, pages of 128", attend_cache, page_sets, exact, nbytes)
            del page_sets
        if T == 1:
            bench.arm(case, "SDPA without bias", without_bias, offset_sets, None, nbytes)
            if S == W:
                bench.arm(case, "compiled", torch.compile(attention.attend, dynamic=False), offset_sets, exact, nbytes)
                bench.arm(case, "eager", attention.attend, offset_sets, exact, nbytes)
        del sets, offset_sets, exact
        torch.cuda.empty_cache()


def bench_batches(bench: Bench) -> None:
    """Decoding of batches whose rows hold 1K to 100K keys, in even ratios."""
    from ...kernels.decode import attend_cache

    for B, heads, groups in ((4, 6, 1), (16, 6, 1), (4, 48, 8), (16, 48, 8)):
        counts = [int(1000 * 100 ** (b / (B - 1))) for b in range(B)]
        rows = [attention_inputs(1, heads, groups, n) for n in counts]
        q, r, sink, gate = (torch.cat([row[i] for row in rows]) for i in (0, 3, 5, 6))
        profiles = rows[0][4]
        keys, values = (torch.zeros(B, groups, counts[-1], d, dtype=q.dtype, device="cuda") for _ in range(2))
        exact = []
        for b, (n, (q_b, k_b, v_b, r_b, _, sink_b, gate_b)) in enumerate(zip(counts, rows, strict=True)):
            keys[b, :, :n], values[b, :, :n] = k_b[0], v_b[0]
            given = (t.float() for t in (q_b, k_b, v_b, r_b, profiles, sink_b, gate_b))
            exact.append(attention.attend(*given, [n - 1]))
        del rows
        lengths = torch.tensor([n - 1 for n in counts], dtype=torch.int32, device="cuda")
        sets = [(q, keys, values, r, profiles, sink, gate, lengths)] * 2  # one is larger than the L2 cache
        case, nbytes = f"decode {heads}/{groups}, {B} rows of 1K to 100K keys", key_value_bytes(groups, sum(counts))
        bench.arm(case, "triton", attend_cache, sets, torch.cat(exact), nbytes)
        del keys, values, sets, exact
        torch.cuda.empty_cache()
