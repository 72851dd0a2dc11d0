"""Both short convolutions against sums written out in float64; history, documents, tap order, residual, rounding."""

import math

import pytest
import torch
from helpers import relative_rms, unchecked
from torch import Tensor

from inkling_ref.backends import Backend
from inkling_ref.cache import Step
from inkling_ref.short_conv import ShortConv, dynamic_short_conv, short_conv

B, T, G, d = 2, 11, 3, 5
C = G * d
KERNELS = [1, 2, 3, 4, 5]


def written_out(x: Tensor, taps: Tensor, terms: int, position: Tensor | None = None) -> Tensor:
    """x [B, past + T, C], taps [B, T, C, K] tap j for the input j back; (sum over taps + x) / sqrt(terms)."""
    x, taps = x.double(), taps.double()
    K, steps = taps.shape[-1], taps.shape[1]
    past = x.shape[1] - steps
    out = torch.zeros(x.shape[0], steps, x.shape[2], dtype=torch.float64)
    for b in range(x.shape[0]):
        for t in range(steps):
            out[b, t] = x[b, past + t]
            for j in range(K):
                if position is None or position[b, t] >= j:
                    out[b, t] += taps[b, t, :, j] * x[b, past + t - j]
    return out / math.sqrt(terms)


def static_taps(weight: Tensor, batch: int = B, steps: int = T) -> Tensor:
    """Released layout [C, 1, K], last tap = current token, to tap j = j back."""
    return weight[:, 0].flip(-1).expand(batch, steps, -1, -1)


def dynamic_taps(dynamic: Tensor, static: Tensor) -> Tensor:
    """dynamic [B, T, G, K], static [K, C], tap 0 = current token, to [B, T, C, K]; channel c belongs to head c // d."""
    batch, steps, heads, K = dynamic.shape
    out = torch.zeros(batch, steps, static.shape[1], K, dtype=torch.float64)
    for c in range(static.shape[1]):
        out[:, :, c] = static[:, c].double() + dynamic[:, :, c // (static.shape[1] // heads)].double()
    return out


def documents() -> Tensor:
    """Positions within documents of 3, 1, 5, 2 tokens and of 11."""
    return torch.tensor([[0, 1, 2, 0, 0, 1, 2, 3, 4, 0, 1], list(range(11))])


TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-6}


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("K", KERNELS)
def test_static(K, dtype, packed):
    u, weight = torch.randn(B, K - 1 + T, C, dtype=dtype), torch.randn(C, 1, K, dtype=dtype)
    position = documents() if packed else None
    out = short_conv(u, weight, position)
    assert out.dtype == dtype
    assert relative_rms(out, written_out(u, static_taps(weight), K + 1, position)) < TOLERANCE[dtype]


@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("K", KERNELS)
def test_dynamic(K, dtype, packed):
    u, static = torch.randn(B, K - 1 + T, C, dtype=dtype), torch.randn(K, C, dtype=dtype)
    dynamic = torch.randn(B, T, G, K, dtype=dtype)
    position = documents() if packed else None
    out = dynamic_short_conv(u, dynamic, static, position)
    assert out.dtype == dtype
    assert relative_rms(out, written_out(u, dynamic_taps(dynamic, static), 2 * K + 1, position)) < TOLERANCE[dtype]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_bfloat16_rounds_once(kind):
    """The exact sum of the rounded inputs, rounded once, but for the odd tie that float32 decides."""
    u = torch.randn(B, 3 + T, C).bfloat16()
    if kind == "static":
        weight = torch.randn(C, 1, 4)  # stays float32 in a bfloat16 model
        out, exact = short_conv(u, weight), written_out(u, static_taps(weight), 5)
    else:
        static, dynamic = torch.randn(4, C).bfloat16(), torch.randn(B, T, G, 4).bfloat16()
        out, exact = dynamic_short_conv(u, dynamic, static), written_out(u, dynamic_taps(dynamic, static), 9)
    assert out.dtype == torch.bfloat16
    assert (out != exact.bfloat16()).float().mean() < 0.01


@pytest.mark.parametrize("kind", ["static", "dynamic"])
@pytest.mark.parametrize("cut", [1, 2, 3, 7])
def test_with_history_a_second_part_goes_on_as_the_whole(kind, cut):
    u, weight = torch.randn(B, 3 + T, C), torch.randn(C, 1, 4)
    static, dynamic = torch.randn(4, C), torch.randn(B, T, G, 4)

    def run(start, stop):
        part = u[:, start : 3 + stop]
        return (
            short_conv(part, weight) if kind == "static" else dynamic_short_conv(part, dynamic[:, start:stop], static)
        )

    assert relative_rms(torch.cat([run(0, cut), run(cut, T)], dim=1), run(0, T)) < 1e-6


def test_module():
    """The released parameter, and zeros before the start of a sequence."""
    module = ShortConv(C, 4, Backend()).requires_grad_(False)
    assert {name: tuple(p.shape) for name, p in module.named_parameters()} == {"weight": (C, 1, 4)}
    module.weight.normal_()
    x = torch.randn(B, T, C)
    padded = torch.cat([torch.zeros(B, 3, C), x], dim=1)
    out = module(x, Step.make([0] * B, T, x.device), None)
    assert relative_rms(out, written_out(padded, static_taps(module.weight), 5)) < 1e-6


def test_dynamic_taps_are_those_of_the_current_token():
    """An input contributes to a later output by the later token's taps."""
    dynamic, static = torch.zeros(1, T, G, 4), torch.zeros(4, C)
    dynamic[0, 6, 1, 2] = 1.0  # token 6, head 1, two back
    u = torch.randn(1, 3 + T, C)
    out = 3 * dynamic_short_conv(u, dynamic, static) - u[:, 3:]
    assert torch.allclose(out[0, 6, d : 2 * d], u[0, 3 + 4, d : 2 * d], atol=1e-5)
    out[0, 6, d : 2 * d] = 0
    assert out.abs().max() < 1e-5


def test_gradients():
    u, weight, static, dynamic = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True)
        for shape in ((1, 6, 4), (4, 1, 3), (3, 4), (1, 4, 2, 3))
    )
    position = torch.tensor([[0, 1, 0, 1]])
    for p in (None, position):
        assert torch.autograd.gradcheck(lambda *a, p=p: short_conv(*a, p), (u, weight))
        assert torch.autograd.gradcheck(lambda *a, p=p: dynamic_short_conv(*a, p), (u, dynamic, static))


def test_one_graph_for_torch_compile():
    u, weight = torch.randn(B, 3 + T, C), torch.randn(C, 1, 4)
    static, dynamic = torch.randn(4, C), torch.randn(B, T, G, 4)
    for function, arguments in [(short_conv, (u, weight)), (dynamic_short_conv, (u, dynamic, static))]:
        compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
        with unchecked():
            out = compiled(*arguments)
        assert relative_rms(out, function(*arguments)) < 1e-6


# --- cases.md ------------------------------------------------------------------------------------------------------


def test_case_06_taps_do_not_cross_a_document_start():
    """Documents of 3 and 5 tokens, and one of 1 between two others: each gives what it gives alone."""
    weight, static = torch.randn(C, 1, 4), torch.randn(4, C)
    for lengths in ([3, 5], [2, 1, 4]):
        x, dynamic = torch.randn(1, sum(lengths), C), torch.randn(1, sum(lengths), G, 4)
        position = torch.cat([torch.arange(n) for n in lengths])[None]
        history = torch.full((1, 3, C), 1e6)  # whatever stands before the row must not leak either
        start = 0
        for n in lengths:
            part = slice(start, start + n)
            alone = torch.cat([torch.zeros(1, 3, C), x[:, part]], dim=1)
            packed = torch.cat([history, x], dim=1)
            out = short_conv(packed, weight, position)[:, part]
            assert relative_rms(out, short_conv(alone, weight)) < 1e-6
            out = dynamic_short_conv(packed, dynamic, static, position)[:, part]
            assert relative_rms(out, dynamic_short_conv(alone, dynamic[:, part], static)) < 1e-6
            start += n


@pytest.mark.parametrize("unit", [0, 1], ids=["zero taps", "unit tap"])
@pytest.mark.parametrize("place", ["static", "dynamic, static part", "dynamic, projected part"])
def test_case_07_the_inner_residual(place, unit):
    """Zero taps return the input, a unit tap at the current token twice the input; over sqrt(K+1) or sqrt(2K+1)."""
    u = torch.randn(B, 3 + T, C)
    weight, static, dynamic = torch.zeros(C, 1, 4), torch.zeros(4, C), torch.zeros(B, T, G, 4)
    if place == "static":
        weight[:, 0, -1] = unit
        out, scale = short_conv(u, weight), math.sqrt(5)
    else:
        if place == "dynamic, static part":
            static[0] = unit
        else:
            dynamic[..., 0] = unit
        out, scale = dynamic_short_conv(u, dynamic, static), 3
    assert relative_rms(out, (1 + unit) * u[:, 3:] / scale) < 1e-6


@pytest.mark.parametrize("length", [1, 2, 3, 4])
def test_case_08_short_prompts(length):
    """Output length is the input's; a later input changes nothing before it; the first tap reaches K - 1 back."""
    weight = torch.randn(C, 1, 4)
    u = torch.cat([torch.zeros(B, 3, C), torch.randn(B, length, C)], dim=1)
    out = short_conv(u, weight)
    assert out.shape == (B, length, C)
    for t in range(length):
        changed = u.clone()
        changed[:, 3 + t] += 1
        differs = (short_conv(changed, weight) != out).any(dim=-1).any(dim=0)
        assert differs.tolist() == [s >= t for s in range(length)]  # at most three later: the prompt is short
    far = torch.zeros(1, 3 + 6, C)
    far[:, 3] = 1
    reach = (short_conv(far, weight) != 0).any(dim=-1)[0]
    assert reach.tolist() == [True] * 4 + [False] * 2
