"""Attention against one query at a time, written out in float64; clips, bias, sink, windows, offsets, rounding."""

import math
from itertools import product

import pytest
import torch
from helpers import logits, random_ids, random_model, relative_rms, unchecked
from torch import Tensor

from inkling_ref.attention import attend, l2_clip, log_scale, relative_bias, scaled_l2_clip, softmax_with_sink
from inkling_ref.config import FULL, InklingConfig


def written_out(
    q, k, v, r, profiles, sink, gate, offsets, window=None, first_keys=None, document_ids=None,
) -> Tensor:  # fmt: skip
    """`attend` by its definition: row, head, query and key one after the other."""
    B, T, H, d = q.shape
    G, S = k.shape[1:3]
    q, k, v, r, profiles, sink, gate = (t.double() for t in (q, k, v, r, profiles, sink, gate))
    out = torch.zeros(B, T, H, d, dtype=torch.float64)
    for b, h, t in product(range(B), range(H), range(T)):
        g, slot = h * G // H, offsets[b] + t
        seen = [
            s for s in range(S)
            if s <= slot and s >= (first_keys[b] if first_keys else 0)
            and (window is None or slot - s < window)
            and (document_ids is None or document_ids[b, s] == document_ids[b, t])
        ]  # fmt: skip
        if not seen:
            continue
        bias = r[b, t, h] @ profiles
        inside = [slot - s < profiles.shape[1] for s in seen]
        scores = k[b, g, seen] @ q[b, t, h] / math.sqrt(d)
        scores += torch.stack(
            [bias[slot - s] if near else bias.new_zeros(()) for s, near in zip(seen, inside, strict=False)]
        )
        p = torch.cat([scores, sink[b, t, h, None]]).softmax(dim=0)[:-1]
        out[b, t, h] = p @ v[b, g, seen]
    return out.flatten(2) * gate.sigmoid()


def operands(B=2, T=7, H=6, G=3, d=5, R=4, X=9, S=None, dtype=torch.float64, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = {
        "q": (B, T, H, d), "k": (B, G, S or T, d), "v": (B, G, S or T, d), "r": (B, T, H, R), "profiles": (R, X),
        "sink": (B, T, H), "gate": (B, T, H * d),
    }  # fmt: skip
    scale = {"q": 2.0, "k": 2.0}
    return {
        name: (scale.get(name, 1.0) * torch.randn(shape, generator=generator, dtype=torch.float64)).to(dtype)
        for name, shape in shapes.items()
    }


# --- The operation -------------------------------------------------------------------------------------------------

CASES = {
    "full": ({"T": 13, "X": 9}, {"offsets": [0, 0]}),
    "full, extent beyond the keys": ({"T": 7, "X": 31}, {"offsets": [0, 0]}),
    "window": ({"T": 13, "X": 4}, {"offsets": [0, 0], "window": 4}),
    "window of one": ({"T": 6, "X": 1}, {"offsets": [0, 0], "window": 1}),
    "window longer than the text": ({"T": 6, "X": 19}, {"offsets": [0, 0], "window": 19}),
    "window over several query blocks": ({"B": 1, "T": 83, "X": 8}, {"offsets": [0], "window": 8}),
    "full over several query blocks": ({"B": 1, "T": 301, "H": 2, "G": 1, "X": 11}, {"offsets": [0]}),
    "keys before the queries": ({"T": 3, "S": 17}, {"offsets": [14, 14]}),
    "one query": ({"T": 1, "S": 17}, {"offsets": [16, 16]}),
    "one query, window": ({"T": 1, "S": 17, "X": 5}, {"offsets": [16, 16], "window": 5}),
    "one query, window not full": (
        {"T": 1, "S": 12, "X": 9},
        {"offsets": [11, 11], "window": 9, "first_keys": [7, 7]},
    ),
    "empty first slots": ({"T": 5, "S": 14, "X": 6}, {"offsets": [9, 9], "window": 6, "first_keys": [4, 4]}),
    "free slots after the last key": ({"T": 3, "S": 15}, {"offsets": [6, 6]}),
    "rows of different length": ({"B": 3, "T": 4, "S": 15}, {"offsets": [11, 2, 7]}),
    "rows of different length, window": (
        {"B": 3, "T": 4, "S": 15, "X": 6},
        {"offsets": [9, 9, 9], "window": 6, "first_keys": [0, 7, 3]},
    ),
    "rows of different length, one query": (
        {"B": 3, "T": 1, "S": 12, "X": 6},
        {"offsets": [11, 4, 8], "window": 6, "first_keys": [0, 4, 5]},
    ),
    "rows of different length over several query blocks": (
        {"B": 2, "T": 71, "S": 83, "X": 8},
        {"offsets": [12, 5], "window": 8, "first_keys": [0, 3]},
    ),
    "packed": (
        {"T": 9, "X": 5},
        {"offsets": [0, 0], "document_ids": torch.tensor([[0] * 4 + [1] * 5, [2, 3, 3, 3, 4, 4, 4, 4, 5]])},
    ),
    "packed, window": (
        {"T": 9, "X": 3},
        {"offsets": [0, 0], "window": 3, "document_ids": torch.tensor([[1] * 9, [1] * 4 + [2] * 5])},
    ),
    "as many key/value heads as heads": ({"H": 3, "G": 3}, {"offsets": [0, 0]}),
    "one key/value head": ({"H": 5, "G": 1}, {"offsets": [0, 0]}),
}


@pytest.mark.parametrize("name", CASES)
def test_attend(name):
    sizes, arguments = CASES[name]
    for dtype, tolerance in [(torch.float64, 1e-12), (torch.float32, 2e-6)]:
        x = operands(**sizes, dtype=dtype)
        out = attend(**x, **arguments)
        assert out.dtype == dtype
        assert relative_rms(out, written_out(**x, **arguments)) < tolerance


@pytest.mark.parametrize("term", ["q", "k", "v", "r", "profiles", "sink", "gate"])
def test_every_operand_matters(term):
    """A mutation check: each operand's sign, flipped, moves the result."""
    x = operands()
    out = attend(**x, offsets=[0, 0])
    assert relative_rms(attend(**{**x, term: -x[term]}, offsets=[0, 0]), out) > 0.05


def test_bfloat16_rounds_where_it_says():
    """Each product and sum of scores in bfloat16, softmax and gate in float32: the same steps, one operation each."""
    x = operands(B=1, T=11, dtype=torch.bfloat16)
    out = attend(**x, offsets=[0])
    q, k, v = x["q"].transpose(1, 2), x["k"].repeat_interleave(2, dim=1), x["v"].repeat_interleave(2, dim=1)
    scores = (q @ k.transpose(-1, -2)) / math.sqrt(5)
    bias = x["r"].transpose(1, 2) @ x["profiles"]
    for t, s in product(range(11), range(11)):
        scores[..., t, s] = scores[..., t, s] + bias[..., t, t - s] if 0 <= t - s < 9 else scores[..., t, s]
        if s > t:
            scores[..., t, s] = -math.inf
    p = torch.cat([scores, x["sink"].transpose(1, 2)[..., None]], dim=-1).float().softmax(-1)[..., :-1].bfloat16()
    expected = ((p @ v).transpose(1, 2).flatten(2).float() * x["gate"].float().sigmoid()).bfloat16()
    assert relative_rms(out, expected) < 1e-3  # bit for bit, but for products summed in another order
    truth = written_out(**x, offsets=[0])
    assert 2e-3 < relative_rms(out, truth) < 2e-2


def test_keys_are_not_repeated_and_heads_share_them():
    """Query head h reads key/value head floor(h G / H): two heads of a group with one query agree."""
    x = operands()
    for name in ("q", "r", "sink"):
        x[name][:, :, 1::2] = x[name][:, :, 0::2]
    x["gate"] = x["gate"].zero_() + 50
    out = attend(**x, offsets=[0, 0]).unflatten(-1, (6, 5))
    assert relative_rms(out[:, :, 1::2], out[:, :, 0::2]) < 1e-12
    assert relative_rms(out[:, :, 2], out[:, :, 0]) > 0.1


def test_gradients():
    x = operands(B=1, T=4, H=2, G=1, d=3, R=2, X=3)
    inputs = tuple(t.requires_grad_() for t in x.values())
    for arguments in ({}, {"window": 3}):
        assert torch.autograd.gradcheck(lambda *a, kw=arguments: attend(*a, [0], **kw), inputs)


def test_one_graph_for_torch_compile():
    x = operands(dtype=torch.float32)
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    with unchecked():
        out = compiled(**x, offsets=[0, 0], window=4)
    assert relative_rms(out, attend(**x, offsets=[0, 0], window=4)) < 1e-6


# --- Clips, scales, bias -------------------------------------------------------------------------------------------


def test_clip():
    """Longer vectors come down to the threshold, shorter ones stay bit for bit, zero stays zero."""
    u = torch.randn(50, 7, dtype=torch.float64)
    norm = u.norm(dim=-1, keepdim=True)
    out = l2_clip(u, 2.5)
    long = norm[:, 0] > 2.5
    assert 5 < long.sum() < 45
    assert torch.equal(out[~long], u[~long])
    assert relative_rms(out[long], u[long] * 2.5 / (norm[long] + 1e-6)) < 1e-12
    assert not l2_clip(torch.zeros(2, 7), 2.5).any()
    assert out.norm(dim=-1).max() <= 2.5


def test_scaled_clip_scales_first_and_rounds_once():
    u, scale = torch.randn(40, 3, 7).bfloat16(), 1 + torch.rand(3, 7)
    out = scaled_l2_clip(u, scale, 3.0)
    w = u.double() * scale.double()
    exact = w * (3.0 / (w.norm(dim=-1, keepdim=True) + 1e-6)).clamp(max=1)
    assert (out != exact.bfloat16()).float().mean() < 0.01
    twice = l2_clip((u.float() * scale).bfloat16(), 3.0)
    assert (twice != exact.bfloat16()).float().mean() > 0.05


def test_log_scale():
    """tau = 1 up to position floor - 1, then 1 + alpha log((t + 1) / floor)."""
    u = torch.randn(2, 6, 3, 5, dtype=torch.float64)
    positions = torch.tensor([[0, 8, 9, 10, 99, 1048575]])
    out = log_scale(u, positions, 10.0, 0.3)
    tau = [1, 1, 1] + [1 + 0.3 * math.log((t + 1) / 10) for t in (10, 99, 1048575)]
    assert relative_rms(out, u * torch.tensor(tau, dtype=torch.float64)[:, None, None]) < 1e-12
    assert torch.equal(out[:, :3], u[:, :3])
    own = log_scale(u, positions.expand(2, -1) + torch.tensor([[0], [7]]), 10.0, 0.3)
    assert torch.equal(own[0], out[0])
    assert not torch.equal(own[1], out[1])


def test_relative_bias_is_the_gathered_product():
    r, profiles = torch.randn(2, 3, 5, 4, dtype=torch.float64), torch.randn(4, 6, dtype=torch.float64)
    distance = torch.randint(-4, 11, (2, 5, 8))
    out = relative_bias(r, profiles, distance)
    for b, h, t, s in product(range(2), range(3), range(5), range(8)):
        delta = int(distance[b, t, s])
        expected = float(r[b, h, t] @ profiles[:, delta]) if 0 <= delta < 6 else 0.0
        assert abs(float(out[b, h, t, s]) - expected) < 1e-12


# --- cases.md ------------------------------------------------------------------------------------------------------


def probe(T, S, offset, window, sink=-1e9, profiles=None, first_key=0):
    """Weights [t, s] that one head gives to S keys: uniform scores, one-hot values, open gate."""
    one = torch.ones(1, T, 1, 1)
    v = torch.eye(S)[None, None]
    profiles = torch.zeros(1, 1) if profiles is None else profiles
    return attend(
        torch.zeros(1, T, 1, S), torch.zeros(1, 1, S, S), v, one, profiles, sink * one[..., 0],
        torch.full((1, T, S), 100.0), [offset], window, [first_key],
    )[0]  # fmt: skip


def test_case_09_a_window_of_four_sees_four_keys():
    """Window 4, 6 tokens: query i sees keys i-3..i, in prefill, in one-token decode, and with slots shifted."""
    for query in (3, 4, 5):
        expected = torch.tensor([0.25 if query - 3 <= s <= query else 0.0 for s in range(6)])
        assert torch.allclose(probe(6, 6, 0, 4)[query], expected)
        assert torch.allclose(probe(1, 6, query, 4)[0], expected)
        assert torch.allclose(probe(2, 6, query - 1, 4)[1], expected)
    assert torch.allclose(probe(6, 6, 0, 4)[2], torch.tensor([1 / 3] * 3 + [0.0] * 3))
    assert torch.allclose(probe(1, 6, 5, 4, first_key=4)[0], torch.tensor([0, 0, 0, 0, 0.5, 0.5]))


def test_case_14_bias_ends_at_the_extent():
    """Extent 4, entry d holds d + 1, 7 tokens: 1, 4, 0, 0, 0 at distances 0, 3, 4, 5, 6; the same in cached decode."""
    profiles = torch.tensor([[1.0, 2.0, 3.0, 4.0]])
    bias = torch.tensor([1.0, 2, 3, 4, 0, 0, 0])  # by distance
    distance = torch.arange(7)[None, :, None] - torch.arange(7)
    got = relative_bias(torch.ones(1, 1, 7, 1), profiles, distance)[0, 0]
    for t, s in product(range(7), range(7)):
        assert got[t, s] == (bias[t - s] if s <= t else 0)

    expected = bias.flip(0).softmax(dim=0)  # query 6, keys 0..6
    assert torch.allclose(probe(7, 7, 0, None, profiles=profiles)[6], expected)
    assert torch.allclose(probe(1, 7, 6, None, profiles=profiles)[0], expected)
    assert torch.allclose(probe(3, 7, 4, None, profiles=profiles)[2], expected)


def test_case_14_slots_that_no_query_sees_may_hold_anything():
    """Keys beyond the last query, and empty first slots: NaN in them reaches nothing when rows share one length."""
    x = operands(T=5, S=16, dtype=torch.float32)
    arguments = {"offsets": [6, 6], "first_keys": [2, 2]}
    expected = written_out(**x, **arguments)
    for name in ("k", "v"):
        x[name][:, :, :2] = x[name][:, :, 11:] = math.nan
    assert relative_rms(attend(**x, **arguments), expected) < 2e-6


@pytest.mark.parametrize("sink", [10.0, -10.0, 80.0])
def test_case_17_sink_against_the_extra_column(sink):
    """Scores in [-18, 18]: prefill and decode agree with a column that has a value of zero, to 1e-6."""
    x = operands(T=9, d=4, dtype=torch.float32, seed=1)
    # Quarters up to 3: the scores are exact in float32, and only the softmax is measured.
    x["q"], x["k"] = ((4 * x[name]).round().clamp(-12, 12) / 4 for name in ("q", "k"))
    x["r"].zero_()
    scores = torch.einsum("bthd,bhsd->bhts", x["q"], x["k"].repeat_interleave(2, dim=1)) / 2
    assert 10 < scores.abs().max() <= 18
    x["sink"], x["gate"] = torch.full_like(x["sink"], sink), torch.full_like(x["gate"], 100.0)

    causal = torch.ones(9, 9).tril().bool()
    column = torch.cat([scores.masked_fill(~causal, -math.inf), torch.full((2, 6, 9, 1), sink)], dim=-1).double()
    v = torch.cat([x["v"].repeat_interleave(2, dim=1), torch.zeros(2, 6, 1, 4)], dim=2).double()
    expected = (column.softmax(dim=-1) @ v).transpose(1, 2).flatten(2)

    out = attend(**x, offsets=[0, 0])
    assert (out - expected).abs().max() < 1e-6
    for t in (0, 4, 8):
        one = {name: x[name][:, t : t + 1] for name in ("q", "r", "sink", "gate")}
        assert (attend(**{**x, **one}, offsets=[t, t])[:, 0] - expected[:, t]).abs().max() < 1e-6
    if sink == 80:
        assert out.abs().max() < 1e-20
        assert out.isfinite().all()


def test_case_17_sink_in_a_model(monkeypatch):
    """Sinks of +80 silence attention, of -80 leave plain softmax, in prefill and decode, in every cache dtype."""
    for dtype in (torch.float32, torch.bfloat16):
        model, ids = random_model(dtype=dtype), random_ids(1, 12)
        for value, p_sum in ((80.0, 0.0), (-80.0, 1.0)):
            seen = []

            def watch(scores, sink, value=value, seen=seen):
                p = softmax_with_sink(scores, torch.full_like(sink, value))
                seen.append(p.float().sum(dim=-1))
                return p

            monkeypatch.setattr("inkling_ref.attention.softmax_with_sink", watch)
            cache = model.new_cache()
            for part in (ids[:, :9], ids[:, 9:10], ids[:, 10:]):
                assert logits(model, part, cache=cache).isfinite().all()
            assert len(seen) >= 4 * 3
            assert all((total - p_sum).abs().max() < 0.02 for total in seen)


def test_case_18_a_query_without_keys():
    """Zeros, never NaN: masked by -inf or a large negative number; in prefill, decode, beside rows that see keys."""
    sink = torch.zeros(1, 1, 2)
    for low in (-math.inf, torch.finfo(torch.float32).min, -1e9):
        p = softmax_with_sink(torch.full((1, 1, 2, 3), low), sink)
        assert not p.any()
    for T in (1, 2):
        x = operands(B=2, T=T, S=5, dtype=torch.float32)
        for arguments in (
            {"offsets": [1, 1], "first_keys": [4, 4]},
            {"offsets": [1, 3], "first_keys": [4, 0]},
            {"offsets": [1, 3], "first_keys": [4, 0], "window": 2},
            {"offsets": [1, 1], "first_keys": [4, 4], "window": 2},
        ):
            out = attend(**x, **arguments)
            assert not out[0].any()
            assert relative_rms(out, written_out(**x, **arguments)) < 2e-6
            assert out.isfinite().all()


def test_log_scaling_uses_the_absolute_position_in_decode():
    """Floor 10 of 40 positions: a cached decode at position 30 scales as the full forward does."""
    config = InklingConfig.tiny()
    config.text.layer_types = [FULL] * 4
    config.text.log_scaling_alpha = 1.0
    model, ids = random_model(config), random_ids(1, 40)
    full = logits(model, ids)
    cache = model.new_cache()
    logits(model, ids[:, :30], cache=cache)
    assert relative_rms(logits(model, ids[:, 30:31], cache=cache), full[:, 30:31]) < 1e-5
    config.text.log_scaling_n_floor = 10**6  # no scaling: another result from position 10 on
    other = logits(random_model(config), ids)
    assert relative_rms(other[:, :10], full[:, :10]) < 1e-5
    assert relative_rms(other[:, 30], full[:, 30]) > 1e-2
