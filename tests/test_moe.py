"""Router and experts against one token and one expert at a time; ties, bias, NaN rows, packed experts, rounding."""

import math

import pytest
import torch
from helpers import relative_rms, unchecked
from torch import Tensor

from inkling_ref.backends import Backend
from inkling_ref.config import InklingConfig
from inkling_ref.moe import ExpertMatrix, MoE, experts, route, softcap, softcapped_swiglu
from inkling_ref.quantization import (
    fake_mxfp8,
    fake_nvfp4,
    mxfp8_dequantize,
    mxfp8_quantize,
    nvfp4_dequantize,
    nvfp4_quantize,
)

N, D, E, K, I = 11, 32, 7, 3, 48
CAPS = (1.5, 2.5)


def expert_written_out(h: Tensor, w13: Tensor, w2: Tensor, gate_cap: float, up_cap: float) -> Tensor:
    """One expert on one token, in float64; rows of W13 are g0, u0, g1, u1, ..."""
    gate_up = w13.double() @ h.double()
    a = torch.zeros(len(gate_up) // 2, dtype=torch.float64)
    for i in range(len(a)):
        g, u = float(gate_up[2 * i]), float(gate_up[2 * i + 1])
        a[i] = gate_cap * math.tanh(g / gate_cap) / (1 + math.exp(-g)) * up_cap * math.tanh(u / up_cap)
    return w2.double() @ a


def written_out(h, weights, ids, w13, w2, caps=CAPS):
    rows = []
    for token, (row, chosen) in enumerate(zip(weights, ids, strict=True)):
        parts = [
            float(w) * expert_written_out(h[token], w13[e], w2[e], *caps) for w, e in zip(row, chosen, strict=True)
        ]
        rows.append(sum(parts))
    return torch.stack(rows)


def operands(n=N, k=K, dtype=torch.float32, seed=0):
    """(h, weights, ids, w13, w2): distinct random experts for each token."""
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    ids = torch.rand(n, E, generator=generator).argsort(dim=-1)[:, :k]
    w13, w2 = 2 * normal(E, 2 * I, D) / math.sqrt(D), normal(E, D, I) / math.sqrt(I)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    return normal(n, D).to(dtype), normal(n, k).abs().to(wide), ids, w13.to(dtype), w2.to(dtype)


# --- Experts -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
@pytest.mark.parametrize("k", [1, K, E])
@pytest.mark.parametrize("n", [1, 2, N])
def test_experts(n, k, dtype):
    h, weights, ids, w13, w2 = operands(n, k, dtype)
    out = experts(h, weights, ids, ExpertMatrix(w13), ExpertMatrix(w2), *CAPS)
    assert out.dtype == dtype
    assert relative_rms(out, written_out(h, weights, ids, w13, w2)) < (1e-12 if dtype == torch.float64 else 2e-6)


def test_a_token_does_not_depend_on_the_others():
    h, weights, ids, w13, w2 = operands()
    matrices = ExpertMatrix(w13), ExpertMatrix(w2)
    out = experts(h, weights, ids, *matrices, *CAPS)
    for t in range(N):
        one = experts(h[t : t + 1], weights[t : t + 1], ids[t : t + 1], *matrices, *CAPS)
        assert relative_rms(one[0], out[t]) < 1e-6
    order = torch.randperm(N)
    assert relative_rms(experts(h[order], weights[order], ids[order], *matrices, *CAPS), out[order]) < 1e-6


@pytest.mark.parametrize("n", [1, N])
def test_experts_that_were_not_chosen_are_not_read(n):
    h, weights, ids, w13, w2 = operands(n)
    ids = torch.where(ids == E - 1, torch.arange(K), ids)  # nobody goes to the last expert
    idle = sorted(set(range(E)) - set(ids.flatten().tolist()))
    assert E - 1 in idle
    expected = written_out(h, weights, ids, w13, w2)
    w13, w2 = w13.clone(), w2.clone()
    w13[idle], w2[idle] = math.nan, math.nan
    assert relative_rms(experts(h, weights, ids, ExpertMatrix(w13), ExpertMatrix(w2), *CAPS), expected) < 2e-6


def test_softcaps():
    x = torch.tensor([-1e30, -3.0, 0.0, 1e-4, 3.0, 1e30, math.inf], dtype=torch.float64)
    out = softcap(x, 4.0)
    assert torch.allclose(out, 4 * torch.tanh(x / 4))
    assert (out[0], out[2], out[-1]) == (-4, 0, 4)
    assert abs(out[3] - 1e-4) < 1e-12


def test_the_sigmoid_sees_the_raw_gate():
    """Gate 8, up 1, caps 4 and 25: cap_4(8) sigmoid(8) cap_25(1); not the sigmoid of the capped gate, not SiLU."""
    gate_up = torch.tensor([[8.0, 1.0, -8.0, 30.0]], dtype=torch.float64)
    (a, b) = softcapped_swiglu(gate_up, 4.0, 25.0)[0].tolist()
    sigmoid = 1 / (1 + math.exp(-8))
    assert a == pytest.approx(4 * math.tanh(2) * sigmoid * 25 * math.tanh(1 / 25), rel=1e-12)
    assert b == pytest.approx(-4 * math.tanh(2) * (1 - sigmoid) * 25 * math.tanh(30 / 25), rel=1e-9)


def test_bfloat16_rounds_four_times():
    """After W13, after the activation, after W2, and after the weighted sum, which is formed in float32."""
    h, weights, ids, w13, w2 = operands(dtype=torch.bfloat16)
    out = experts(h, weights, ids, ExpertMatrix(w13), ExpertMatrix(w2), *CAPS)
    rows = []
    for t in range(N):
        total = torch.zeros(D)
        for w, e in zip(weights[t], ids[t], strict=True):
            g, u = (w13[e] @ h[t]).float().view(-1, 2).unbind(-1)
            a = (CAPS[0] * torch.tanh(g / CAPS[0]) * g.sigmoid() * CAPS[1] * torch.tanh(u / CAPS[1])).bfloat16()
            total += w * (w2[e] @ a).float()
        rows.append(total.bfloat16())
    assert relative_rms(out, torch.stack(rows)) < 1e-3
    assert 1e-3 < relative_rms(out, written_out(h, weights, ids, w13, w2)) < 2e-2


@pytest.mark.parametrize("kind", ["nvfp4", "mxfp8"])
@pytest.mark.parametrize("n", [1, N])
def test_packed_experts_are_decoded_on_use(kind, n):
    h, weights, ids, w13, w2 = operands(n)
    if kind == "nvfp4":
        packed = [nvfp4_quantize(w) for w in (w13, w2)]
        dense = [nvfp4_dequantize(*p) for p in packed]
    else:
        w2 = torch.cat([w2, w2[..., :16]], dim=-1)  # 64 columns: blocks of 32
        w13 = torch.cat([w13, w13[:, :32]], dim=1)
        packed = [mxfp8_quantize(w) for w in (w13, w2)]
        dense = [mxfp8_dequantize(*p) for p in packed]
    ours = experts(h, weights, ids, *(ExpertMatrix(*p) for p in packed), *CAPS)
    assert relative_rms(ours, experts(h, weights, ids, *(ExpertMatrix(w) for w in dense), *CAPS)) < 1e-6
    assert 1e-3 < relative_rms(ours, written_out(h, weights, ids, w13, w2)) < 0.5


@pytest.mark.parametrize("quantize", [fake_nvfp4, fake_mxfp8])
@pytest.mark.parametrize("n", [1, N])
def test_fake_quantised_activations(quantize, n):
    """Both products read quantised activations, and nothing else is quantised."""
    h, weights, ids, w13, w2 = operands(n)
    w2 = torch.cat([w2, w2[..., :16]], dim=-1)
    w13 = torch.cat([w13, w13[:, :32]], dim=1)
    out = experts(h, weights, ids, ExpertMatrix(w13), ExpertMatrix(w2), *CAPS, quantize)
    rows, x = [], quantize(h)
    for t in range(n):
        pairs = [
            w * (w2[e] @ quantize(softcapped_swiglu((w13[e] @ x[t])[None], *CAPS))[0])
            for w, e in zip(weights[t], ids[t], strict=True)
        ]
        rows.append(sum(pairs))
    # Quantisers jump: a last-bit difference before one may move a value by a step.
    assert relative_rms(out, torch.stack(rows)) < 1e-2
    assert relative_rms(out, experts(h, weights, ids, ExpertMatrix(w13), ExpertMatrix(w2), *CAPS)) > 1e-2


def test_gradients():
    h, weights, ids, w13, w2 = operands(3, 2, torch.float64)
    w13, w2 = w13[:, :6, :5].contiguous(), w2[:, :5, :3].contiguous()

    def function(h, weights, w13, w2):
        return experts(h, weights, ids, ExpertMatrix(w13), ExpertMatrix(w2), *CAPS)

    arguments = [t.requires_grad_() for t in (h[:, :5].clone(), weights, w13, w2)]
    assert torch.autograd.gradcheck(function, arguments)
    h, router = arguments[0].detach().requires_grad_(), torch.randn(E, 5, dtype=torch.float64, requires_grad=True)
    bias = torch.randn(E, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda h, router: route(h, router, bias, K, 2.0)[0], (h, router))


# --- Router --------------------------------------------------------------------------------------------------------


def router(n=N, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((n, D), (E, D), (E,))
    h, weight, bias = (torch.randn(shape, generator=generator) for shape in shapes)
    return h, weight / 4, bias / 4


def route_logits(scores, bias, k, **kwargs):
    """Route tokens whose router logits are given."""
    scores = torch.as_tensor(scores, dtype=torch.float32)
    E = scores.shape[-1]
    bias = torch.as_tensor(bias, dtype=torch.float32) if not isinstance(bias, Tensor) else bias
    return route(scores.view(-1, E), torch.eye(E), bias, k, **{"scale": 1.0, **kwargs})


@pytest.mark.parametrize("k", [1, K, E])
def test_route(k):
    h, weight, bias = router()
    weights, ids = route(h, weight, bias, k, 2.5)
    scores = 1 / (1 + (-(h.double() @ weight.double().T)).exp())
    for t in range(N):
        expected = sorted(range(E), key=lambda e: -float(scores[t, e] + bias[e]))[:k]
        assert ids[t].tolist() == expected
        total = scores[t, expected].sum()
        assert relative_rms(weights[t], 2.5 * scores[t, expected] / total) < 1e-6
    assert relative_rms(weights.sum(dim=-1), torch.full((N,), 2.5)) < 1e-6


def test_the_router_is_float32_on_the_rounded_input():
    """A bfloat16 input with float32 weight and bias: float32 weights, exact for that input."""
    h, weight, bias = router()
    weights, ids = route(h.bfloat16(), weight, bias, K, 2.5)
    assert weights.dtype == torch.float32
    expected, same_ids = route(h.bfloat16().double(), weight.double(), bias.double(), K, 2.5)
    assert expected.dtype == torch.float64
    assert torch.equal(ids, same_ids)
    assert relative_rms(weights, expected) < 1e-6


def test_moe_module():
    """Released names and shapes; router and experts put together."""
    config = InklingConfig.tiny().text
    moe = MoE(config, Backend()).requires_grad_(False)
    shapes = {name: tuple(p.shape) for name, p in moe.named_parameters()}
    assert shapes == {
        "gate.weight": (7, 32), "gate.bias": (7,), "experts.w13_weight": (7, 96, 32), "experts.w2_weight": (7, 32, 48),
    }  # fmt: skip
    moe.gate.bias.normal_()
    h = torch.randn(2, 5, 32)
    weights, ids = route(h.flatten(0, 1), moe.gate.weight, moe.gate.bias, config.num_experts_per_tok, 2.5)
    expected = written_out(h.flatten(0, 1), weights, ids, moe.experts.w13_weight, moe.experts.w2_weight, (4.0, 25.0))
    assert relative_rms(moe(h).flatten(0, 1), expected) < 2e-6


def test_one_graph_for_torch_compile():
    """The router; the experts' loop depends on the routes."""
    h, weight, bias = router()
    compiled = torch.compile(route, fullgraph=True, backend="aot_eager")
    with unchecked():
        weights, ids = compiled(h, weight, bias, K, 2.5)
    expected = route(h, weight, bias, K, 2.5)
    assert torch.equal(ids, expected[1])
    assert relative_rms(weights, expected[0]) < 1e-6


# --- cases.md ------------------------------------------------------------------------------------------------------


def test_case_24_ties_go_to_the_lower_id():
    """A row of all zeros with 384 experts gives 0..k-1; a tie at the cut keeps the lower id."""
    _, ids = route(torch.zeros(2, D), torch.randn(384, D), torch.zeros(384), 8, 8.0)
    assert ids.tolist() == [list(range(8))] * 2
    logits = torch.full((384,), -1.0)
    logits[[300, 17, 250, 40]] = torch.tensor([3.0, 1.0, 1.0, 1.0])  # the k-th and the (k+1)-th tie
    _, ids = route_logits(logits, torch.zeros(384), 3)
    assert ids.tolist() == [[300, 17, 40]]
    scores = torch.randint(0, 3, (50, 61)).float()  # ties everywhere
    _, ids = route_logits(scores, torch.zeros(61), 5)
    for row, chosen in zip(scores, ids, strict=True):
        assert chosen.tolist() == sorted(range(61), key=lambda e: (-float(row[e]), e))[:5]


def test_case_24_equal_experts_keep_their_order():
    """Small integers, exact in bfloat16 and in every order of summation: equal rows of the router stay in id order."""
    h = torch.randint(-2, 3, (40, D)).bfloat16()
    weight = torch.randint(-2, 3, (19, D)) / 16
    weight[[3, 8, 12]] = weight[5].clone()
    _, ids = route(h, weight, torch.zeros(19), 19, 1.0)
    for chosen in ids.tolist():
        places = [chosen.index(e) for e in (3, 5, 8, 12)]
        assert places == sorted(places)


def test_case_25_the_bias_chooses_and_does_not_weigh():
    weights, ids = route_logits([0.0, 0, 0, 0], [0.0, 0, 5, 4], 2)
    assert ids.tolist() == [[2, 3]]
    assert weights.tolist() == [[0.5, 0.5]]
    h, weight, _ = router()
    for shift in (-3.0, -1e4):
        low, none = (route(h, weight, torch.full((E,), b), K, 2.5) for b in (shift, 0.0))
        if shift == -3:
            assert torch.equal(low[1], none[1])
            assert torch.equal(low[0], none[0])
        assert (low[1] >= 0).all()
        assert all(len(set(row)) == K for row in low[1].tolist())


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("k", [1, K, E])
def test_case_26_a_bad_row_stays_alone(bad, k):
    """Three tokens, the middle one NaN or infinite: ids distinct and in range, the others bit for bit as without."""
    h, weight, bias = router(3)
    w13, w2 = (ExpertMatrix(w) for w in operands()[3:])
    clean_weights, clean_ids = route(h, weight, bias, k, 2.5)
    h_bad = h.clone()
    h_bad[1] = bad
    weights, ids = route(h_bad, weight, bias, k, 2.5)
    assert torch.equal(weights[[0, 2]], clean_weights[[0, 2]])
    assert torch.equal(ids[[0, 2]], clean_ids[[0, 2]])
    assert ((ids >= 0) & (ids < E)).all()
    assert len(set(ids[1].tolist())) == k

    # The clean batch goes to the same experts: an expert's product of another size may differ in the last bit.
    clean = experts(h, torch.where(torch.arange(3)[:, None] == 1, 1.0, weights), ids, w13, w2, *CAPS)
    out = experts(h_bad, weights, ids, w13, w2, *CAPS)
    assert torch.equal(out[[0, 2]], clean[[0, 2]])
    assert not out[1].isfinite().all()


@pytest.mark.parametrize("normalize", [True, False])
def test_case_28_the_scale_applies_once(normalize):
    """k = 1, scale 2.5, an expert that is the identity: 2.5 x, or 2.5 score x without normalisation."""
    h, weight, _ = router()
    weights, ids = route(h, weight, torch.zeros(E), 1, 2.5, normalize)
    # cap_c(g) sigmoid(g) with g = 8 is a constant c1; cap(u) = u for caps far above u: W2 divides by c1.
    constant = 1e3 * math.tanh(8 / 1e3) / (1 + math.exp(-8))
    x = torch.cat([h / 50, torch.ones(N, 1)], dim=-1)  # a last channel of ones makes the gates
    w13 = torch.zeros(E, 2 * D, D + 1)
    w13[:, 0::2, -1] = 8
    w13[:, 1::2, :D] = torch.eye(D)
    w2 = torch.zeros(E, D + 1, D)
    w2[:, :D] = torch.eye(D) / constant
    out = experts(x, weights, ids, ExpertMatrix(w13), ExpertMatrix(w2), 1e3, 1e3)[:, :D]
    score = (h @ weight.T).sigmoid().gather(1, ids)
    expected = 2.5 * h / 50 * (1 if normalize else score)
    assert relative_rms(out, expected) < 1e-5
