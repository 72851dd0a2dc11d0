r"""Logits head and choice of the next token, without the logits in memory.

The unembedding is 1.84 GB and a step reads it once; what is left of a tile of it is one number a row, the best score
and its id packed into one integer, and an atomic minimum keeps the best of all tiles: the same whatever their order.

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

from . import require

WORST: int = 2**63 - 1  # no score packs to more


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
def exponential(u):
    """-log(1 - u), exact where u is small; finite."""
    small = u * (1 + u * (1 / 2 + u * (1 / 3 + u * (1 / 4))))
    return tl.where(u < 2.0**-6, small, -tl.log(1 - tl.minimum(u, 1 - 2.0**-24)))


@triton.jit
@no_type_check
def softcapped(z, cap):
    """cap tanh(z / cap): with a polynomial near zero, where the form with exponentials cancels."""
    x = z / cap
    e = tl.exp(-2 * tl.abs(x))
    x2 = x * x
    near = x * (1 - x2 * (1 / 3 - x2 * (2 / 15 - x2 * (17 / 315))))
    far = (1 - e) / (1 + e)
    return cap * tl.where(tl.abs(x) < 0.1, near, tl.where(x < 0, -far, far))


@triton.jit
@no_type_check
def packed_best(score, ids, V):
    """Of scores [ids, rows]: the smallest of (descending score, id) in one integer; NaN counts as largest."""
    score += 0.0  # -0 equals 0
    bits = score.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)  # float bits in an order that integers share
    bits = tl.where(score != score, 0x7FFFFFFF, bits)
    order = ((-1 - bits).to(tl.int64) << 32) | ids[:, None].to(tl.int64)
    return tl.min(tl.where(ids[:, None] < V, order, 0x7FFFFFFFFFFFFFFF), 0)


@triton.jit
@no_type_check
def _best_token(
    x_ptr, w_ptr, base_ptr, best_ptr, seed_ptr, position_ptr, N, V, x_n, base_n, cap, inverse_temperature, is_reversed,
    D: tl.constexpr, STEP: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr, HAS_BASE: tl.constexpr,
    HAS_CAP: tl.constexpr, SAMPLE: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Scores of a tile of tokens for a tile of rows, and their best into `best_ptr`."""
    tile = tl.program_id(0)
    if is_reversed:
        tile = tl.num_programs(0) - 1 - tile
    ids, columns = tile * IDS + tl.arange(0, IDS), tl.arange(0, STEP)
    rows = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    w_rows = w_ptr + ids[:, None].to(tl.int64) * D
    x_rows = x_ptr + rows[None, :].to(tl.int64) * x_n
    if PDL:
        gdc_launch_dependents()
    if D <= STEP:  # the tile of weights is under way before the kernel waits for its rows
        w = tl.load(w_rows + columns[None, :], mask=(ids[:, None] < V) & (columns[None, :] < D), other=0.0)
        if PDL:
            gdc_wait()
        x = tl.load(x_rows + columns[:, None], mask=(rows[None, :] < N) & (columns[:, None] < D), other=0.0)
        z = tl.dot(w, x, input_precision="ieee")
    else:
        if PDL:
            gdc_wait()
        z = tl.zeros([IDS, ROWS], tl.float32)
        for d0 in tl.range(0, D, STEP, num_stages=STAGES):
            d = d0 + columns
            w = tl.load(w_rows + d[None, :], mask=(ids[:, None] < V) & (d[None, :] < D), other=0.0)
            x = tl.load(x_rows + d[:, None], mask=(rows[None, :] < N) & (d[:, None] < D), other=0.0)
            z = tl.dot(w, x, z, input_precision="ieee")
    if HAS_BASE:
        mask = (rows[None, :] < N) & (ids[:, None] < V)
        z += tl.load(base_ptr + rows[None, :].to(tl.int64) * base_n + ids[:, None], mask=mask, other=0.0)
    if SAMPLE:
        seed = tl.load(seed_ptr + rows, mask=rows < N, other=0)
        position = tl.load(position_ptr + rows, mask=rows < N, other=0)
        z = softcapped(z, cap) if HAS_CAP else z
        z = z * inverse_temperature - tl.log(exponential(uniform(tile * IDS, IDS, seed, position)))
    tl.atomic_min(best_ptr + rows, packed_best(z, ids, V), mask=rows < N, sem="relaxed")


def sample_head(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    cap: float,
    temperature: float = 0.0,
    seeds: Int[Tensor, " N"] | None = None,
    positions: Int[Tensor, " N"] | None = None,
) -> Int[Tensor, " N"]:
    """Twin of `fused.sample_head`: the next token of every row.

    The weight is read once for every 64 rows.

    Raises:
        InputError: see `require`.
    """
    require("sample_head", hidden, weight)
    (N, D), V = hidden.shape, weight.shape[0]
    hidden, weight = hidden if hidden.stride(1) == 1 else hidden.contiguous(), weight.contiguous()
    best = torch.full((N,), WORST, dtype=torch.int64, device=hidden.device)
    rows = min(64, max(16, triton.next_power_of_2(N)))
    ids, step, stages, warps = 128, 128 // weight.element_size(), 5, 4
    _best_token[(triton.cdiv(V, ids), triton.cdiv(N, rows))](
        hidden, weight, None, best, seeds, positions, N, V, hidden.stride(0), 0, cap,
        min(1 / temperature, 1e36) if temperature else 0.0, False, D=D, STEP=step, IDS=ids, ROWS=rows, HAS_BASE=False,
        HAS_CAP=True, SAMPLE=temperature > 0, STAGES=stages, PDL=False, num_warps=warps,
    )  # fmt: skip
    return best & 0xFFFFFFFF
