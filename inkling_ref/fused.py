"""Several reference operations as one: what a kernel may fuse. Each function is a composition of the components' own.

They have the kernels' signatures: caches and states have fixed addresses and are written in place, lengths are tensors
on the device, so that a CUDA graph can replay a call.
"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from .attention import attend, l2_clip, log_scale, scaled_l2_clip
from .dspark import MarkovHead
from .errors import InputError
from .moe import softcap
from .residual import DepthState, mix_and_norm, rms, rms_norm, rounded, wide
from .short_conv import dynamic_short_conv, short_conv


def project(inputs: list[Float[Tensor, "B T D"]], weights: list[Float[Tensor, "_ D"]]) -> list[Float[Tensor, "B T _"]]:
    """W x of every pair of an input and a weight; projections that read the same input are rows of one weight."""
    return [F.linear(x, w) for x, w in zip(inputs, weights, strict=True)]


def embed_and_norm(
    ids: Int[Tensor, "B T"],
    table: Float[Tensor, "V D"],
    norm_weight: Float[Tensor, " D"],
    partial: Float[Tensor, "B T D"],
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
) -> list[Float[Tensor, "B T D"]]:
    """A step's beginning: the normed embedding (`TextModel.embed_tokens`) is the first running sum, and the norms in
    front of the first layer's attention read it.

    Args:
        partial: the running sum, in `wide` precision; written.
        norm_weights, eps: as in `mix_and_norm`.
    """
    e = F.embedding(ids, table)
    e = rounded(rms_norm(e, norm_weight, eps), e.dtype)
    partial.copy_(e)
    return mix_and_norm(e[:, :, None], None, norm_weights, eps, e.dtype)


def with_state(
    x: Float[Tensor, "B T C"], past: int, state: Float[Tensor, "B N C"] | None, rejected: Int[Tensor, " B"] | None
) -> Float[Tensor, "B S C"]:
    """`x` after the `past` inputs before it; the state takes `x` in.

    Args:
        state: the last N >= past inputs before this call, zeros where there were none; updated in place.
        rejected: for each row how many of the newest of them do not count (drafted tokens that were not kept);
            at most N - past of them.
    """
    if state is None:
        return F.pad(x, (0, 0, past, 0))
    N = state.shape[1]
    old = state
    if rejected is not None:
        index = torch.arange(N, device=x.device) - rejected[:, None]
        old = state.take_along_dim(index.clamp(min=0)[..., None], dim=1).masked_fill((index < 0)[..., None], 0)
    inputs = torch.cat([old, x], dim=1)
    state.copy_(inputs[:, -N:])
    return inputs[:, N - past :]


def rolling_short_conv(
    x: Float[Tensor, "B T C"],
    state: Float[Tensor, "B N C"],
    weight: Float[Tensor, "C 1 K"],
    rejected: Int[Tensor, " B"] | None = None,
) -> Float[Tensor, "B T C"]:
    """`short_conv` of a decoding step: the inputs before it stand in `state`, which is updated: see `with_state`."""
    return short_conv(with_state(x, weight.shape[-1] - 1, state, rejected), weight)


def mix_depth_and_norm(
    blocks: Float[Tensor, "B T n D"],
    partial: Float[Tensor, "B T D"],
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"],
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
    dtype: torch.dtype,
) -> list[Float[Tensor, "B T D"]]:
    """`mix_and_norm` of a depth state as it stands: completed blocks in their 16 bits, the running sum in float32."""
    return mix_and_norm(DepthState(blocks, partial).sources(), queries, norm_weights, eps, dtype)


def join_and_mix(
    y: Float[Tensor, "B T D"],
    state: Float[Tensor, "B N D"],
    weight: Float[Tensor, "D 1 K"],
    blocks: Float[Tensor, "B T capacity D"],
    partial: Float[Tensor, "B T D"],
    count: int,
    queries: Float[Tensor, " D"] | Float[Tensor, "q D"],
    norm_weights: list[Float[Tensor, " D"]],
    eps: float,
    opens_block: bool = False,
    ends_layer: bool = False,
    rejected: Int[Tensor, " B"] | None = None,
) -> list[Float[Tensor, "B T D"]]:
    """From a sublayer's output to the next one's inputs: convolution, depth state, mixtures and their norms.

    Args:
        y: output of attention or of the experts, before its convolution; the inputs come back in its dtype.
        state, rejected: inputs of the convolution before this call: see `with_state`.
        weight: static taps.
        blocks: completed blocks, the first `count` of them; one more is written where a block closes.
        partial: the running sum, in `wide` precision; updated in place.
        opens_block: y is the first of a new block: the running sum so far becomes block number `count`.
        ends_layer: the running sum is rounded to the dtype of y, as at the end of every layer.
        queries, norm_weights, eps: as in `mix_and_norm`.
    """
    y = rolling_short_conv(y, state, weight, rejected)
    if opens_block:
        blocks[:, :, count] = partial
        count, partial[:] = count + 1, 0
    depth = DepthState(blocks[:, :, :count], partial).add(y)
    depth = depth.round(y.dtype) if ends_layer else depth
    partial.copy_(depth.partial)
    return mix_and_norm(depth.sources(), queries, norm_weights, eps, y.dtype)


def prepare_qkv(
    q: Float[Tensor, "B T Hd"],
    r: Float[Tensor, "B T HR"],
    k: Float[Tensor, "B T Gd"],
    v: Float[Tensor, "B T Gd"],
    q_scale: Float[Tensor, "H d"],
    r_scale: Float[Tensor, "H R"],
    k_taps: Tensor,
    v_taps: Tensor,
    qk_threshold: float,
    r_threshold: float,
    eps: float,
    keys: Float[Tensor, "P G S d"],
    values: Float[Tensor, "P G S d"],
    lengths: Int[Tensor, " B"] | None = None,
    table: Int[Tensor, "B pages"] | None = None,
    state: Float[Tensor, "B N C"] | None = None,
    rejected: Int[Tensor, " B"] | None = None,
    positions: Int[Tensor, "b T"] | None = None,
    log_scaling: tuple[float, float] | None = None,
    k_dynamic: Float[Tensor, "B T G K"] | None = None,
    v_dynamic: Float[Tensor, "B T G K"] | None = None,
    document_position: Int[Tensor, "B T"] | None = None,
) -> tuple[Float[Tensor, "B T H d"], Float[Tensor, "B T H R"]]:
    """From the projections to what attention reads: queries and relative states; keys and values go to their cache.

    Args:
        q, r, k, v: the projections W x of this call's tokens.
        k_taps, v_taps: static taps [G d, 1, K], or with dynamic taps the static part [K, G d].
        keys, values: written at the slots of this call: [B, G, S, d], or with a table pages [P, G, S, d] of S slots.
        lengths: slot of token 0, for each row; None = 0. A row that is not in use has the length -T: no slot is
            written, only its convolutions' state rolls on. (Here its first slot is written with what it holds: its
            table must not name pages of another row.)
        table: for each row its pages, in order.
        state, rejected: inputs of the convolutions before this call, keys then values: see `with_state`.
        positions, log_scaling: absolute positions, None = the slots; (floor, alpha) of `log_scale`: full layers only.
        k_dynamic, v_dynamic: dynamic taps W_dyn x: full layers only.
        document_position: as in `short_conv`.
    """
    (B, T, _), G, d = q.shape, keys.shape[1], q_scale.shape[1]
    q = scaled_l2_clip(q.unflatten(-1, q_scale.shape), q_scale, qk_threshold)
    r = scaled_l2_clip(r.unflatten(-1, r_scale.shape), r_scale, r_threshold)
    slots = torch.arange(T, device=q.device).expand(B, T)
    if lengths is not None:
        slots = slots + lengths[:, None]
    if log_scaling is not None:
        q, r = (log_scale(u, slots if positions is None else positions, *log_scaling) for u in (q, r))
    K = k_taps.shape[-1] if k_dynamic is None else len(k_taps)
    kv = with_state(torch.cat([k, v], dim=-1), K - 1, state, rejected)
    if k_dynamic is None:
        kv = short_conv(kv, torch.cat([k_taps, v_taps]), document_position)
    else:
        dynamic, static = torch.cat([k_dynamic, v_dynamic], dim=2), torch.cat([k_taps, v_taps], dim=1)
        kv = dynamic_short_conv(kv, dynamic, static, document_position)
    k, v = kv.unflatten(-1, (2 * G, d)).chunk(2, dim=2)  # [B, T, G, d]
    if lengths is not None:
        used, slots = (slots >= 0)[..., None, None], slots.clamp(min=0)
    if table is None:
        rows = torch.arange(B, device=q.device)[:, None]
    else:
        rows, slots = table.gather(1, slots // keys.shape[2]), slots % keys.shape[2]
    for cache, u in ((keys, l2_clip(k, qk_threshold)), (values, rms(v, eps))):
        u = rounded(u, cache.dtype)
        cache[rows, :, slots] = u if lengths is None else torch.where(used, u, cache[rows, :, slots])
    return q, r


def attend_cache(
    q: Float[Tensor, "B T H d"],
    keys: Float[Tensor, "P G S d"],
    values: Float[Tensor, "P G S d"],
    r: Float[Tensor, "B T H R"],
    profiles: Float[Tensor, "R X"],
    sink: Float[Tensor, "B T H"],
    gate: Float[Tensor, "B T H*d"],
    lengths: Int[Tensor, " B"],
    window: int | None = None,
    table: Int[Tensor, "B pages"] | None = None,
) -> Float[Tensor, "B T H*d"]:
    """`attend` of a cache as `prepare_qkv` fills it, where position p of a row stands in slot p.

    A row of T tokens at the end of `lengths[b]` earlier ones. Slots that no query sees are never read: their pages may
    be anybody's. A row that is not in use has the length -T: it sees nothing, and its output is zero.

    Args:
        keys, values: [B, G, S, d], or with a table pages [P, G, S, d] of S slots.
        lengths: slot of query 0, for each row.
        table: for each row its pages, in order; entries beyond its length, or before its window, are not read.
    """
    T = q.shape[1]
    if table is not None:
        table = table.clamp(0, len(keys) - 1)
        keys, values = (u[table].transpose(1, 2).flatten(2, 3) for u in (keys, values))
    slots, first = torch.arange(keys.shape[2], device=q.device), lengths[:, None]
    dead = slots >= first + T
    if window is not None:
        dead = dead | (slots <= first - window)
    keys, values = (u.masked_fill(dead[:, None, :, None], 0) for u in (keys, values))  # 0 NaN would be NaN
    return attend(q, keys, values, r, profiles, sink, gate, lengths.tolist(), window)


def philox(
    counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Philox4x32-10 (Salmon et al., SC 2011): four random words from a counter of four and a key of two, all int64."""
    mask = 0xFFFFFFFF
    (a, b, c, d), (low, high) = counter, key
    for _ in range(10):
        x, y = a * 0xD2511F53, c * 0xCD9E8D57  # of 64 bits; that int64 reads the first as a sign does not matter
        a, b, c, d = (y >> 32 & mask) ^ b ^ low, y & mask, (x >> 32 & mask) ^ d ^ high, x & mask
        low, high = low + 0x9E3779B9 & mask, high + 0xBB67AE85 & mask
    return a, b, c, d


def uniform(V: int, seeds: Int[Tensor, " N"], positions: Int[Tensor, " N"]) -> Float[Tensor, "N V"]:
    """Float32 random numbers in (0, 1], one a token id: word id % 4 of counter (id // 4, position) under key seed."""
    mask = 0xFFFFFFFF
    groups = torch.arange(-(-V // 4), device=seeds.device)
    s, p = seeds.long()[:, None], positions.long()[:, None]
    words = philox((groups, p & mask, p >> 32 & mask, torch.zeros_like(p)), (s & mask, s >> 32 & mask))
    words = torch.stack(words, dim=-1).flatten(1)[:, :V]
    return words.float() * 2.0**-32 + 2.0**-33


def check_draw(temperature: float, seeds: Tensor | None, positions: Tensor | None) -> None:
    """What `choose` is given must be able to draw.

    Raises:
        InputError: for a temperature that is no finite number >= 0, or one above 0 without seeds and positions.
    """
    if not 0 <= temperature < math.inf:
        raise InputError(f"temperature is {temperature!r}, expected a finite number >= 0")
    if temperature > 0 and (seeds is None or positions is None):
        raise InputError(f"temperature is {temperature!r} without seeds and positions, expected one of each a row")


def inverse(temperature: float) -> float:
    """1 / temperature; finite, 0 where nothing is drawn."""
    return min(1 / temperature, 1e36) if temperature > 0 else 0.0


def choose(
    logits: Float[Tensor, "N V"],
    temperature: float = 0.0,
    seeds: Int[Tensor, " N"] | None = None,
    positions: Int[Tensor, " N"] | None = None,
) -> Int[Tensor, " N"]:
    """One token a row: the first of the largest logits at temperature 0, else drawn from softmax(logits / temperature).

    Gumbel's trick with the noise of `uniform`: argmax of logits / temperature - log(E), where E = -log(1 - u) are
    exponential. (Of u itself float32 would resolve the wrong end: E is small where the largest score stands.)

    Args:
        seeds, positions: of each row, int64; the same pair draws the same, whatever the batch.

    Raises:
        InputError: see `check_draw`.
    """
    check_draw(temperature, seeds, positions)
    if temperature == 0:
        return logits.argmax(dim=-1)
    u = uniform(logits.shape[1], seeds, positions).clamp(max=1 - 2.0**-24)
    exponential = -torch.log1p(-u.to(logits.dtype))
    return (logits * inverse(temperature) - exponential.log()).argmax(dim=-1)


def sample_head(
    hidden: Float[Tensor, "N D"],
    weight: Float[Tensor, "V D"],
    cap: float,
    temperature: float = 0.0,
    seeds: Int[Tensor, " N"] | None = None,
    positions: Int[Tensor, " N"] | None = None,
    first: int = 0,
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """The token that follows each row, `choose` from the soft-capped logits, and its logit without the cap, as float64.
    top_k and top_p need all logits: see `sampling`.

    Two deviations from `TextModel.logits` and an argmax. The products stay in `wide` precision, where 16 bits would
    make many neighbours equal; and at temperature 0 the uncapped logits are compared: the cap is strictly monotone, so
    only ties that its rounding makes (all of them at |z| > 9 cap in float32) are decided otherwise, by the larger z.

    Args:
        weight: the used rows of the unembedding.
        first: the token of its row 0. Noise goes by the row.
    """
    z = F.linear(wide(hidden), wide(weight))
    row = choose(z if temperature == 0 else softcap(z, cap), temperature, seeds, positions)
    return row + first, logit_of(hidden, weight, row)


def logit_of(hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], row: Int[Tensor, " N"]) -> Float[Tensor, " N"]:
    """One product a row, in `wide` precision, and as float64: of one weight's row it is the same on every rank."""
    return (wide(hidden) * wide(weight[row])).sum(dim=-1).double()


def elect(tokens: Int[Tensor, "ranks N"], logits: Float[Tensor, "ranks N"], not_finite: int) -> Int[Tensor, " N"]:
    """Of every rank's candidate the one with the largest logit; of equal ones the first rank's, a NaN above all.

    Args:
        not_finite: stands in place of a token whose logit is NaN or infinite.
    """
    winner = logits.argmax(dim=0, keepdim=True)
    logit, token = (t.gather(0, winner)[0] for t in (logits, tokens))
    return torch.where(logit.isfinite(), token, not_finite)


def draft_rnn(
    head: MarkovHead,
    h: Float[Tensor, "B n D"],
    base: Float[Tensor, "B n V"],
    anchors: Int[Tensor, " B"],
    temperature: float = 0.0,
    seeds: Int[Tensor, " B"] | None = None,
    positions: Int[Tensor, "B n"] | None = None,
) -> Int[Tensor, "B n"]:
    """The sequential part of `Drafter.propose` with an rnn head: n tokens a row, each chosen knowing those before.

    Args:
        base: U over the used vocabulary.
        temperature, seeds, positions: as in `choose`; positions of the drafted tokens.
    """
    tokens, s = [anchors], head.start(h[:, 0])
    for k in range(h.shape[1]):
        correction, s = head.step(h[:, k], tokens[-1], s, base.shape[-1])
        logits = base[:, k] + correction
        tokens.append(choose(logits, temperature, seeds, None if positions is None else positions[:, k]))
    return torch.stack(tokens[1:], dim=1)
