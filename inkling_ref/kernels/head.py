r"""Logits head and choice of the next token, without the logits in memory.

The unembedding is 1.84 GB and a step reads it once; what is left of a tile of it is one number a row, the best score
and its id packed into one integer. A second kernel finds the least of a row's and computes the logit that belongs to
it: what ranks compare. A third elects one of all ranks' candidates, and says where there is none.

Greedily the score is the logit itself. The soft cap is strictly monotone, so it would change nothing but make equal
what float32 cannot tell apart near the cap: it is left out. Otherwise the score is that of the Gumbel trick,

$$ \mathrm{cap}_{30}(z_v) / \mathrm{temperature} - \log(E_v), \qquad E_v = -\log(1 - u_v) $$

whose largest is distributed as softmax(cap(z) / temperature). u is made of the words of Philox4x32-10, see
`fused.uniform`: what is drawn depends on a row's seed and position and on the token's id, not on tiles, batch or GPU.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..fused import check_draw, inverse
from . import FLOATS, INTEGERS, adjacent, axes, cdiv, dependent, expect, next_power_of_2
from .approximate import comparable, log2, tanh

WORST = tl.constexpr(2**63 - 1)  # no score packs to more
_LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
@no_type_check
def uniform(first, V: tl.constexpr, seed, position):
    """u of `fused.uniform` for V tokens from `first`, both multiples of 4, and rows [N]: [V, N]."""
    N: tl.constexpr = seed.shape[0]
    group = first // 4 + tl.arange(0, V // 4)
    zero = tl.zeros([V // 4, N], tl.uint32)
    low, high = (position & 0xFFFFFFFF).to(tl.uint32), (position >> 32).to(tl.uint32)
    a, b, c, d = tl.philox(
        zero.to(tl.uint64) + seed[None, :].to(tl.uint64), zero + group[:, None].to(tl.uint32), zero + low[None, :],
        zero + high[None, :], zero,
    )  # fmt: skip
    words = tl.join(tl.join(a, c), tl.join(b, d))
    words = tl.reshape(tl.permute(words, 0, 2, 3, 1), [V, N])
    return words.to(tl.float32) * 2.0**-32 + 2.0**-33


@triton.jit
@no_type_check
def gumbel(u):
    """-log(-log(1 - u)): finite, and as exact as u where u is small."""
    small = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    exponential = tl.where(u < 2.0**-5, small, log2(1 - tl.minimum(u, 1 - 2.0**-24)) * -_LN2)
    return log2(exponential) * -_LN2


@triton.jit
@no_type_check
def packed(score, ids, V):
    """(score, id) of scores [ids, rows] as integers: least is the largest score, of equals the lowest id; NaN wins."""
    score += 0.0  # -0 equals 0
    bits = comparable(score.to(tl.int32, bitcast=True), 0x7FFFFFFF)
    bits = tl.where(score != score, 0x7FFFFFFF, bits)
    order = ((-1 - bits).to(tl.int64) << 32) | ids[:, None].to(tl.int64)
    return tl.where(ids[:, None] < V, order, WORST)


@triton.jit
@no_type_check
def _best_token(
    x_ptr, w_ptr, best_ptr, seed_ptr, position_ptr, N, V, x_n, cap, inverse_temperature,
    D: tl.constexpr, STEP: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr, SAMPLE: tl.constexpr,
    STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of tokens for a tile of rows, and their best into [N, tiles]."""
    if PDL:
        gdc_launch_dependents()
    first = tl.program_id(0) * IDS
    ids, columns = first + tl.arange(0, IDS), tl.arange(0, STEP)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    w_rows = w_ptr + ids[:, None].to(tl.int64) * D
    x_rows = x_ptr + rows[None, :].to(tl.int64) * x_n
    z = tl.zeros([IDS, ROWS], tl.float32)
    for d0 in tl.range(0, D, STEP, num_stages=STAGES):
        d = d0 + columns
        w = tl.load(w_rows + d[None, :], mask=(ids[:, None] < V) & (d[None, :] < D), other=0.0)
        x = tl.load(x_rows + d[:, None], mask=(rows[None, :] < N) & (d[:, None] < D), other=0.0)
        z = tl.dot(w, x, z, input_precision="ieee")
    if SAMPLE:
        seed = tl.load(seed_ptr + rows, mask=rows < N, other=0)
        position = tl.load(position_ptr + rows, mask=rows < N, other=0)
        z = tanh(z / cap) * (cap * inverse_temperature) + gumbel(uniform(first, IDS, seed, position))
    out = best_ptr + rows.to(tl.int64) * tl.num_programs(0) + tl.program_id(0)
    tl.store(out, tl.min(packed(z, ids, V), 0), mask=rows < N)


@triton.jit
@no_type_check
def _best_of_tiles(
    best_ptr, x_ptr, w_ptr, token_ptr, logit_ptr, tiles, x_n, first,
    D: tl.constexpr, TILES: tl.constexpr, COLUMNS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Of a row's best tile the token, and its logit."""
    row, tile, columns = tl.program_id(0).to(tl.int64), tl.arange(0, TILES), tl.arange(0, COLUMNS)
    # Early: `_best_token`, in front, began when this was written.
    x = tl.load(x_ptr + row * x_n + columns, mask=columns < D, other=0.0).to(tl.float32)
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    best = tl.load(best_ptr + row * tiles + tile, mask=tile < tiles, other=WORST)
    id = tl.min(best, 0) & 0xFFFFFFFF
    w = tl.load(w_ptr + id * D + columns, mask=columns < D, other=0.0).to(tl.float32)
    tl.store(token_ptr + row, id + first)
    tl.store(logit_ptr + row, tl.sum(x * w, 0).to(tl.float64))


@triton.jit
@no_type_check
def _elect(
    token_ptr, logit_ptr, out_ptr, ranks, N, token_n, logit_n, not_finite,
    RANKS: tl.constexpr, ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """See `fused.elect`."""
    rank, row = tl.arange(0, RANKS)[:, None], tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    mask = (rank < ranks) & (row[None, :] < N)
    if PDL:
        gdc_wait()
    logit = tl.load(logit_ptr + rank * logit_n + row[None, :], mask=mask, other=0.0) + 0.0  # -0 equals 0
    token = tl.load(token_ptr + rank * token_n + row[None, :], mask=mask, other=0)
    order = comparable(logit.to(tl.int64, bitcast=True), WORST)
    order = tl.where(logit != logit, WORST, order)
    order = tl.where(rank < ranks, order, -WORST - 1)
    winner = tl.min(tl.where(order == tl.max(order, 0)[None, :], rank, RANKS), 0)
    token = tl.where(tl.abs(logit) < float("inf"), token, not_finite)
    tl.store(out_ptr + row, tl.sum(tl.where(rank == winner[None, :], token, 0), 0), mask=row < N)


def drawn_with(
    temperature: float, seeds: Tensor | None, positions: Tensor | None
) -> tuple[Tensor | None, Tensor | None]:
    """Seeds and positions as the kernels read them. Raises InputError: see `fused.check_draw`."""
    check_draw(temperature, seeds, positions)
    return (seeds.contiguous(), positions.contiguous()) if temperature > 0 else (None, None)


def sample_head(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    cap: float,
    temperature: float = 0.0,
    seeds: Int[Tensor, " N"] | None = None,
    positions: Int[Tensor, " N"] | None = None,
    first: int = 0,
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """Twin of `fused.sample_head`: the next token of every row, and its logit.

    The weight is read once for every 64 rows.

    Raises:
        InputError: see `expect` and `fused.check_draw`.
    """
    (N, D), (V, _) = axes("sample_head", "hidden", hidden, 2, batch=1), axes("sample_head", "weight", weight, 2)
    expect("sample_head", FLOATS, hidden=(hidden, (N, D)))
    expect("sample_head", (hidden.dtype,), weight=(weight, (V, D)))
    expect("sample_head", INTEGERS, seeds=(seeds, (N,)), positions=(positions, (N,)))
    seeds, positions = drawn_with(temperature, seeds, positions)
    (hidden,), weight, pdl = adjacent(hidden), weight.contiguous(), dependent(hidden.device)
    rows = min(64, max(16, next_power_of_2(N)))
    ids, columns, stages, warps = (64, 256, 5, 4) if rows == 16 else (128, 128, 4, 8)
    tiles = cdiv(V, ids)
    best = torch.empty(N, tiles, dtype=torch.int64, device=hidden.device)
    _best_token[(tiles, cdiv(N, rows))](
        hidden, weight, best, seeds, positions, N, V, hidden.stride(0), cap,
        inverse(temperature), D=D, STEP=columns // weight.element_size(), IDS=ids,
        ROWS=rows, SAMPLE=temperature > 0, STAGES=stages, PDL=pdl, num_warps=warps,
    )  # fmt: skip
    token = torch.empty(N, dtype=torch.int64, device=hidden.device)
    logit = torch.empty(N, dtype=torch.float64, device=hidden.device)
    _best_of_tiles[(N,)](
        best, hidden, weight, token, logit, tiles, hidden.stride(0), first, D=D, TILES=next_power_of_2(tiles),
        COLUMNS=next_power_of_2(D), PDL=pdl, num_warps=8, launch_pdl=pdl,
    )  # fmt: skip
    return token, logit


def elect(tokens: Int[Tensor, "ranks N"], logits: Float[Tensor, "ranks N"], not_finite: int) -> Int[Tensor, " N"]:
    """Twin of `fused.elect`.

    Raises:
        InputError: see `expect`.
    """
    ranks, N = axes("elect", "tokens", tokens, 2, batch=2)
    expect("elect", (torch.int64,), tokens=(tokens, (ranks, N)))
    expect("elect", (torch.float64,), logits=(logits, (ranks, N)))
    (tokens, logits), pdl = adjacent(tokens, logits), dependent(tokens.device)
    if N == 0:
        return tokens.new_empty(0)
    out, rows = torch.empty(N, dtype=torch.int64, device=tokens.device), min(64, next_power_of_2(N))
    _elect[(cdiv(N, rows),)](
        tokens, logits, out, ranks, N, tokens.stride(0), logits.stride(0), not_finite,
        RANKS=next_power_of_2(ranks), ROWS=rows, PDL=pdl, num_warps=1, launch_pdl=pdl,
    )  # fmt: skip
    return out
