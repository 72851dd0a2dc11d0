r"""Projections of a decoding step: a few rows against a wide weight, at the rate of memory.

$$ y_{t,i} = \sum_j W_{i,j} x_{t,j} $$

    y = einsum("iD,ND->Ni", W, x)

One token multiplies each number of W once, so all that counts is that memory is never idle:

- **Equal programs, in one wave.** Every processor gets the same number of programs, and every program the same number
  of rows of W, up to 32. Its warps share the columns, in blocks of 64 by turns, as a product in three dimensions
  [warps, rows, columns]; their sums are added at the end, in a fixed order. So no sum is spread over programs, and a
  row of x gives the same bits every time.
- **Memory full of requests.** The programs divide the shared memory of their processor among them and fill it with
  weights on their way: up to 190 KB, where 30 KB would cover the latency of memory (Little's law).
- **Before the kernel in front has ended** (programmatic dependent launch). Weights depend on nothing. So the first of
  them are on their way when the program waits for its rows, which it does within the loop, after the pipeline's first
  loads: in the few microseconds of a token's mixture up to 20 MB can arrive. Rows of x are read in branches, a step
  ahead, because what the pipeliner sees it would read before the wait.

Several inputs (those of queries, keys and values in a full layer), each with its weight, are one launch too.
"""

from typing import NamedTuple, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from .. import fused
from ..errors import InputError
from . import FLOATS, INTERPRETED, adjacent, axes, cdiv, dependent, expect, processors
from .decode import wait, ways_added

FEW: int = 16  # rows of x up to which the weight's bytes decide; of more, a processor would read x too often
_ROWS, _STEP = 32, 64  # most rows of a program; columns of a warp's step


class Tile(NamedTuple):
    """How one call is cut, and what the compiler is told."""

    share: int  # rows of a weight that a program has
    rows: int  # of its tile
    tokens: int  # rows of x in the tile
    ways: int  # warps, which share the columns
    stages: int


@triton.jit(do_not_specialize=["N"])
@no_type_check
def _project(
    x_ptrs, w_ptrs, x_strides, out_ptr, N, out_n,
    D: tl.constexpr, COUNTS: tl.constexpr, SHARE: tl.constexpr, ROWS: tl.constexpr, TOKENS: tl.constexpr,
    WAYS: tl.constexpr, STEP: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """SHARE rows of one weight; weight i has COUNTS[i] rows, and its outputs follow those of the one before."""
    part = tl.program_id(0)
    x_ptr, w_ptr, x_n, count = x_ptrs[0], w_ptrs[0], x_strides[0], COUNTS[0]
    first, stop, columns = 0, (COUNTS[0] + SHARE - 1) // SHARE, COUNTS[0]  # parts of this weight; its columns
    for i in tl.static_range(1, len(COUNTS)):
        if part >= stop:
            x_ptr, w_ptr, x_n, count = x_ptrs[i], w_ptrs[i], x_strides[i], COUNTS[i]
            first, out_ptr, columns = stop, out_ptr + columns, COUNTS[i]
        stop += (COUNTS[i] + SHARE - 1) // SHARE
    row = (part - first) * SHARE
    SPAN: tl.constexpr = WAYS * STEP
    rows, tokens = row + tl.arange(0, ROWS), tl.arange(0, TOKENS)
    mine = rows < tl.minimum(row + SHARE, count)
    j = (tl.arange(0, WAYS)[:, None] * STEP + tl.arange(0, STEP)[None, :])[:, None, :]
    w_at = w_ptr + rows.to(tl.int64)[None, :, None] * D + j
    x_at = x_ptr + tokens[None, :, None] * x_n + j
    live = tokens[None, :, None] < N
    x = tl.zeros(x_at.shape, w_ptr.dtype.element_ty)
    acc = tl.zeros([WAYS, ROWS, TOKENS], tl.float32)
    for start in tl.range(0, D, SPAN, num_stages=STAGES):
        inside = mine[None, :, None]
        if D % SPAN != 0:
            inside = inside & (j < D - start)
        w = tl.load(w_at + start, mask=inside, other=0.0)
        if start == 0:
            if PDL:
                wait()
            x = tl.load(x_at, mask=live & (j < D), other=0.0)
        ahead = x
        if start + SPAN < D:
            ahead = tl.load(x_at + start + SPAN, mask=live & (j < D - SPAN - start), other=0.0)
        acc = tl.dot(w, tl.permute(x, (0, 2, 1)), acc)
        x = ahead
    y = ways_added(acc, WAYS).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + tokens[None, :] * out_n + rows[:, None], y, mask=mine[:, None] & (tokens[None, :] < N))


def choose_tile(N: int, counts: list[int], device: torch.device) -> Tile:
    """Equal programs that fill the processors, and their shared memory, in one wave.

    Few programs a processor must take larger steps, to hide what each costs.
    """
    programs = cdiv(sum(counts), _ROWS * processors(device))  # of a processor
    wave = programs * processors(device)
    share = cdiv(sum(counts), wave)
    while share < _ROWS and sum(cdiv(n, share) for n in counts) > wave:
        share += 1
    rows, tokens, ways = 16 if share <= 16 else _ROWS, 8 if N <= 8 else 16, 8 if programs <= 2 else 4
    if INTERPRETED:
        return Tile(share, rows, tokens, ways, 1)
    room = torch.cuda.get_device_properties(device).shared_memory_per_multiprocessor // programs
    room -= 1024 + 2 * ways * tokens * _STEP  # what a program reserves, and x on its way between layouts
    return Tile(share, rows, tokens, ways, 1 + max(2, min(room // (2 * ways * rows * _STEP), 8)))


def project(inputs: list[Float[Tensor, "B T D"]], weights: list[Float[Tensor, "_ D"]]) -> list[Float[Tensor, "B T _"]]:
    """Twin of `fused.project`, one launch; float32 sums, one rounding. More than FEW rows, or float32, are PyTorch's.

    In a graph weights are read before the kernels in front have ended: none of them may write a weight. The kernel
    behind this one may start when all that are in front of it have ended, not earlier.

    Raises:
        InputError: see `expect` and `axes`; for another number of weights than inputs.
    """
    if not inputs or len(inputs) != len(weights):
        raise InputError(f"triton project: {len(inputs)} inputs and {len(weights)} weights, expected a weight for each")
    B, T, D = axes("project", "inputs[0]", inputs[0], 3, batch=2)
    counts = [axes("project", f"weights[{i}]", w, 2)[0] for i, w in enumerate(weights)]
    dtype, device = inputs[0].dtype, inputs[0].device
    given = {f"inputs[{i}]": (x, (B, T, D)) for i, x in enumerate(inputs)}
    given |= {f"weights[{i}]": (w, (n, D)) for i, (w, n) in enumerate(zip(weights, counts, strict=True))}
    expect("project", (dtype,) if dtype in FLOATS else FLOATS, **given)
    if not 0 < B * T <= FEW or dtype == torch.float32:
        return fused.project(inputs, weights)
    xs = adjacent(*(x.flatten(0, 1) for x in inputs))
    out = torch.empty(B, T, sum(counts), dtype=dtype, device=device)
    tile, pdl = choose_tile(B * T, counts, device), dependent(device)
    _project[(sum(cdiv(n, tile.share) for n in counts),)](
        xs, tuple(w.contiguous() for w in weights), tuple(x.stride(0) for x in xs), out, B * T, sum(counts),
        D=D, COUNTS=tuple(counts), SHARE=tile.share, ROWS=tile.rows, TOKENS=tile.tokens, WAYS=tile.ways, STEP=_STEP,
        STAGES=tile.stages, PDL=pdl, num_warps=tile.ways,
        # Only where no kernel just before this one writes a weight, which is read before the wait: in a graph.
        launch_pdl=pdl and torch.cuda.is_current_stream_capturing() and all(w.is_contiguous() for w in weights),
    )  # fmt: skip
    return list(out.split(counts, dim=-1))
