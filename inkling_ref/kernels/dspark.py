r"""The sequential part of a draft: the RNN head's state, its correction of the logits, the choice of a token.

Two kernels a token. The first, over r channels, finds the token that was chosen before, looks up its embedding e and
updates the state (equations in `dspark`); the share of h in W_J is one product for all tokens, before the loop. The
second is the logits head's own (`head`): W_2 tanh(o) + U, a tile of the vocabulary a program, and the best of all.

What limits it are the bytes of W_2, 103 MB a token. A program walks over tiles and has the next ones on their way while
it multiplies one; each kernel is launched while the one before it runs out, reads what does not depend on that one, and
waits for its end itself (programmatic dependent launch, PDL in the code). Every other token walks the vocabulary
backwards, so that what the L2 cache still holds of W_2 is read first.
"""

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from ..dspark import MarkovHead
from ..errors import InputError
from ..fused import inverse
from . import FLOATS, INTEGERS, axes, cdiv, dependent, expect, next_power_of_2, processors
from .approximate import tanh
from .head import WORST, drawn_with, gumbel, packed, uniform

_CHANNELS: int = 8  # of a program of the state's kernel


@triton.jit
@no_type_check
def _next_state(
    j_ptr, share_ptr, w1_ptr, token_ptr, s_ptr, u_ptr, best_ptr, k, B, n, r, j_n,
    R: tl.constexpr, CHANNELS: tl.constexpr, FIRST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Some channels of s_k and tanh(o) of one row, in [n, B, r]; best[k] is reset for the kernel that follows."""
    row, columns = tl.program_id(1), tl.arange(0, R)
    channels = tl.program_id(0) * CHANNELS + tl.arange(0, CHANNELS)
    if PDL:
        gdc_launch_dependents()
    mask = (channels[:, None] < r) & (columns[None, :] < r)
    at = j_ptr + channels[:, None] * j_n + columns[None, :]
    a_s, a_e = tl.load(at, mask=mask, other=0.0), tl.load(at + r, mask=mask, other=0.0)
    at += r * j_n
    b_s, b_e = tl.load(at, mask=mask, other=0.0), tl.load(at + r, mask=mask, other=0.0)
    at += r * j_n
    o_s, o_e = tl.load(at, mask=mask, other=0.0), tl.load(at + r, mask=mask, other=0.0)
    if PDL:
        gdc_wait()
    token = tl.load(token_ptr + row).to(tl.int64) & 0xFFFFFFFF  # best of the token before packs a score above its id
    e = tl.load(w1_ptr + token * r + columns, mask=columns < r, other=0.0).to(tl.float32)[None, :]
    own = channels < r
    share = share_ptr + (row * n + k) * 3 * r + channels
    a = tl.load(share, mask=own, other=0.0).to(tl.float32)
    b = tl.load(share + r, mask=own, other=0.0).to(tl.float32)
    o = tl.load(share + 2 * r, mask=own, other=0.0).to(tl.float32)
    a_in, b_in, o_in = a_e.to(tl.float32) * e, b_e.to(tl.float32) * e, o_e.to(tl.float32) * e
    old = tl.zeros([CHANNELS], tl.float32)
    if not FIRST:  # s_0 = 0
        before = s_ptr + ((k - 1) * B + row) * r
        s = tl.load(before + columns, mask=columns < r, other=0.0)[None, :]
        old = tl.load(before + channels, mask=own, other=0.0)
        a_in += a_s.to(tl.float32) * s
        b_in += b_s.to(tl.float32) * s
        o_in += o_s.to(tl.float32) * s
    f = tl.sigmoid(a + tl.sum(a_in, 1))
    out = (k * B + row) * r + channels
    tl.store(s_ptr + out, f * old + (1 - f) * tanh(b + tl.sum(b_in, 1)), mask=own)
    u = tanh(o + tl.sum(o_in, 1))
    tl.store(u_ptr + out, u.to(u_ptr.dtype.element_ty), mask=own)
    tl.store(best_ptr + k * B + row, WORST, mask=tl.program_id(0) == 0)


@triton.jit
@no_type_check
def _next_token(
    u_ptr, w_ptr, base_ptr, best_ptr, seed_ptr, position_ptr, B, V, r, base_n, inverse_temperature, is_reversed,
    R: tl.constexpr, IDS: tl.constexpr, ROWS: tl.constexpr, SAMPLE: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """Some tiles of W_2 u + base for a tile of rows, and the best of their scores into `best_ptr`."""
    columns, rows = tl.arange(0, R), tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    tiles, step = tl.cdiv(V, IDS), tl.num_programs(0)
    turn, sign = 0, 1
    if is_reversed:
        turn, sign = tiles - 1, -1
    first = turn + sign * tl.program_id(0)
    ids = first * IDS + tl.arange(0, IDS)
    if PDL:
        gdc_launch_dependents()
    b_rows = base_ptr + rows[None, :].to(tl.int64) * base_n
    base = tl.load(b_rows + ids[:, None], mask=(rows[None, :] < B) & (ids[:, None] < V), other=0.0)
    if PDL:
        gdc_wait()
    u = tl.load(
        u_ptr + rows[None, :] * r + columns[:, None], mask=(rows[None, :] < B) & (columns[:, None] < r), other=0.0
    )
    if SAMPLE:
        seed = tl.load(seed_ptr + rows, mask=rows < B, other=0)
        position = tl.load(position_ptr + rows, mask=rows < B, other=0)
    best = tl.full([IDS, ROWS], WORST, tl.int64)
    for i in tl.range(tl.program_id(0), tiles, step, num_stages=STAGES):
        ids = (turn + sign * i) * IDS + tl.arange(0, IDS)
        w = tl.load(
            w_ptr + ids[:, None] * r + columns[None, :], mask=(ids[:, None] < V) & (columns[None, :] < r), other=0.0
        )
        following = ids + sign * step * IDS
        mask = (rows[None, :] < B) & (following[:, None] >= 0) & (following[:, None] < V)
        next_base = tl.load(b_rows + following[:, None], mask=mask, other=0.0)  # on its way during the product
        z = tl.dot(w, u, base, input_precision="ieee")
        if SAMPLE:
            noise = gumbel(uniform((turn + sign * i) * IDS, IDS, seed, position))
            z = z * inverse_temperature + noise
        best = tl.minimum(best, packed(z, ids, V))
        base = next_base
    tl.atomic_min(best_ptr + rows, tl.min(best, 0), mask=rows < B, sem="relaxed")


def draft_rnn(
    head: MarkovHead,
    h: Float[Tensor, "B n D"],
    base: Float[Tensor, "B n V"],
    anchors: Int[Tensor, " B"],
    temperature: float = 0.0,
    seeds: Int[Tensor, " B"] | None = None,
    positions: Int[Tensor, "B n"] | None = None,
) -> Int[Tensor, "B n"]:
    """Twin of `fused.draft_rnn`, in 2 n launches and two around them.

    That anchors are tokens of the head is not checked: it would wait for the device.

    Raises:
        InputError: for another kind of head, or more logits than it has tokens; see `expect` and `fused.check_draw`.
    """
    if head.kind != "rnn":
        raise InputError(f"triton draft_rnn: a head of kind {head.kind!r}, expected 'rnn'")
    w1, w2, joint = (u.weight.contiguous() for u in (head.markov_w1, head.markov_w2, head.joint_proj))
    (B, n, V), r = axes("draft_rnn", "base", base, 3, batch=1), w1.shape[1]
    expect("draft_rnn", FLOATS, w1=(w1, w2.shape), w2=(w2, w1.shape), joint=(joint, (3 * r, joint.shape[1])))
    expect("draft_rnn", (joint.dtype,), h=(h, (B, n, joint.shape[1] - 2 * r)))
    expect("draft_rnn", (torch.float32,), base=(base, (B, n, min(V, len(w2)))))
    expect("draft_rnn", INTEGERS, anchors=(anchors, (B,)), seeds=(seeds, (B,)), positions=(positions, (B, n)))
    seeds, positions = drawn_with(temperature, seeds, None if positions is None else positions.t())
    share = F.linear(h, joint[:, 2 * r :], head.joint_proj.bias)
    base, anchors = base.contiguous(), anchors.contiguous()
    s = torch.empty(n, B, r, dtype=torch.float32, device=h.device)
    u = torch.empty(n, B, r, dtype=w2.dtype, device=h.device)
    best = torch.empty(n, B, dtype=torch.int64, device=h.device)
    R, rows = max(16, next_power_of_2(r)), min(64, max(16, next_power_of_2(B)))
    pdl = dependent(h.device)
    ids = 128 // w2.element_size()
    for k in range(n):
        _next_state[(cdiv(r, _CHANNELS), B)](
            joint, share, w1, best[k - 1] if k else anchors, s, u, best, k, B, n, r, joint.stride(0),
            R=R, CHANNELS=_CHANNELS, FIRST=k == 0, PDL=pdl, num_warps=4,
            launch_pdl=k > 0 and pdl,
        )  # fmt: skip
        _next_token[(min(2 * processors(h.device), cdiv(V, ids)), cdiv(B, rows))](
            u[k], w2, base[:, k], best[k], seeds, None if positions is None else positions[k], B, V, r, n * V,
            inverse(temperature), k % 2, R=R, IDS=ids, ROWS=rows, SAMPLE=temperature > 0,
            STAGES=3, PDL=pdl, num_warps=4 if rows == 16 else 8, launch_pdl=pdl,
        )  # fmt: skip
    return (best & 0xFFFFFFFF).t()
