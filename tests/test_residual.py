"""Block attention residuals against sums written out in float64, and the order of roundings."""

import math

import pytest
import torch
from helpers import relative_rms, unchecked
from torch import Tensor

from inkling_ref.residual import SOURCE_EPS, DepthState, mix, mix_and_norm, rms, rms_norm, wide

B, T, N, D, Q = 2, 3, 5, 7, 3
EPS = 1e-6


def written_out(sources: Tensor, queries: Tensor) -> Tensor:
    """[B, T, q, D], one dot product at a time."""
    sources, queries = sources.double(), queries.double()
    out = torch.zeros(*sources.shape[:2], len(queries), sources.shape[-1], dtype=torch.float64)
    for b in range(sources.shape[0]):
        for t in range(sources.shape[1]):
            normed = [s / math.sqrt(float(s @ s) / len(s) + 1e-6) for s in sources[b, t]]
            for i, query in enumerate(queries):
                scores = [float(n @ query) / math.sqrt(len(query)) for n in normed]
                total = sum(math.exp(s - max(scores)) for s in scores)
                for score, n in zip(scores, normed, strict=True):
                    out[b, t, i] += math.exp(score - max(scores)) / total * n
    return out


@pytest.fixture
def sources():
    return torch.randn(B, T, N, D) * torch.tensor([0.1, 1.0, 30.0, 2.0, 5.0])[:, None]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("queries", [1, 3])
@pytest.mark.parametrize("n", [1, 2, 5])
def test_mix_is_the_sum_written_out(sources, dtype, queries, n):
    q = 2 * torch.randn(queries, D)
    out = mix(sources[:, :, :n].to(dtype), q.to(dtype), SOURCE_EPS)
    assert out.dtype == dtype
    assert relative_rms(out, written_out(sources[:, :, :n], q)) < (1e-12 if dtype == torch.float64 else 1e-6)


@pytest.mark.parametrize("eps", [1e-6, 0.5])
def test_every_mixture_goes_through_its_own_norm(sources, eps):
    """The epsilon of the config rules the norm after the mixture; that of the sources is a constant."""
    queries, weights = 2 * torch.randn(Q, D), torch.randn(Q, D)
    outs = mix_and_norm(sources.double(), queries.double(), list(weights.double()), eps, torch.float64)
    mixed = written_out(sources, queries)
    assert len(outs) == Q
    for i, out in enumerate(outs):
        m = mixed[:, :, i]
        expected = weights[i] * m / (m.square().mean(dim=-1, keepdim=True) + eps).sqrt()
        assert relative_rms(out, expected) < 1e-12


def test_without_queries_every_norm_reads_the_last_source(sources):
    weights = torch.randn(Q, D)
    outs = mix_and_norm(sources, None, list(weights), EPS, torch.float32)
    for out, weight in zip(outs, weights, strict=True):
        x = sources[:, :, -1].double()
        expected = weight * x / (x.square().mean(dim=-1, keepdim=True) + EPS).sqrt()
        assert relative_rms(out, expected) < 1e-6


def test_one_weight_for_each_query(sources):
    with pytest.raises(ValueError, match="zip"):
        mix_and_norm(sources, torch.randn(Q, D), [torch.ones(D)] * 2, EPS, torch.float32)


def test_scale_of_a_source_does_not_matter(sources):
    query = torch.randn(1, D)
    once = mix(sources, query, SOURCE_EPS)
    scaled = mix(sources * torch.tensor([3.0, 1e3, 7.0, 0.5, 40.0])[:, None], query, SOURCE_EPS)
    assert relative_rms(scaled, once) < 1e-3  # epsilon shows in the source of size 0.1
    assert relative_rms(mix(sources[:, :, [4, 2, 0, 1, 3]], query, SOURCE_EPS), once) < 1e-6  # nor does their order


def test_zeros_stay_zeros():
    assert not rms(torch.zeros(2, D), EPS).any()
    assert not mix(torch.zeros(1, 1, N, D), torch.randn(1, D), SOURCE_EPS).any()


def test_wide():
    for dtype, expected in [(torch.bfloat16, torch.float32), (torch.float32,) * 2, (torch.float64,) * 2]:
        assert wide(torch.zeros(1, dtype=dtype)).dtype == expected
        assert rms_norm(torch.ones(2, D, dtype=dtype), torch.ones(D, dtype=dtype), EPS).dtype == expected


def test_depth_state():
    """Blocks keep the sums of closed blocks in order; a closed block leaves an empty sum."""
    e, y, z = (torch.randn(B, T, D) for _ in range(3))
    depth = DepthState.start(e)
    assert torch.equal(depth.sources(), e[:, :, None])
    depth = depth.close_block().add(y)
    assert torch.equal(depth.sources(), torch.stack([e, y], dim=2))
    depth = depth.add(z)
    assert torch.equal(depth.sources(), torch.stack([e, y + z], dim=2))
    closed = depth.close_block()
    assert torch.equal(closed.sources()[:, :, :2], torch.stack([e, y + z], dim=2))
    assert not closed.partial.any()
    assert torch.equal(depth.partial, y + z)  # states are values: the earlier one is as it was


def test_the_running_sum_is_wide_within_a_layer_and_rounded_at_its_end():
    e = torch.randn(B, T, D, dtype=torch.bfloat16)
    depth = DepthState.start(e).close_block()
    y, z = (torch.randn(B, T, D, dtype=torch.bfloat16) for _ in range(2))
    depth = depth.add(y).add(z)
    assert depth.partial.dtype == torch.float32
    assert torch.equal(depth.partial, y.float() + z.float())
    assert depth.blocks.dtype == torch.bfloat16
    ended = depth.round(torch.bfloat16)
    assert torch.equal(ended.partial, (y.float() + z.float()).bfloat16())
    assert ended.sources().dtype == torch.float32


def test_gradients():
    """Of sources, queries and norm weights, against finite differences."""
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in ((1, 2, 4, 5), (3, 5), (3, 5))]

    def function(sources, queries, weights):
        return tuple(mix_and_norm(sources, queries, list(weights), EPS, torch.float64))

    assert torch.autograd.gradcheck(function, [a.requires_grad_() for a in arguments])


@pytest.mark.parametrize("queries", [None, 1, 3])
def test_one_graph_for_torch_compile(sources, queries):
    q = None if queries is None else torch.randn(queries, D)
    weights = list(torch.randn(queries or 2, D))
    compiled = torch.compile(mix_and_norm, fullgraph=True, backend="aot_eager")
    with unchecked():
        outs = compiled(sources, q, weights, EPS, torch.bfloat16)
    for out, expected in zip(outs, mix_and_norm(sources, q, weights, EPS, torch.bfloat16), strict=True):
        assert torch.equal(out, expected)


# --- cases.md ------------------------------------------------------------------------------------------------------


def test_case_21_near_equal_scores_of_very_different_sources():
    """bfloat16 sources of size 1e3 and 1e-2: float32 from the norm to the sum, one rounding at the end."""
    width = 32
    a = (1e3 * torch.randn(width)).bfloat16()
    b = (1e-2 * torch.randn(width)).bfloat16()
    normed = [s.double() / (s.double().square().mean() + 1e-6).sqrt() for s in (a, b)]
    # A long query, orthogonal to the difference of the sources but for a small rest: scores near 200, 0.05 apart.
    difference, total = normed[0] - normed[1], normed[0] + normed[1]
    query = total - difference * (total @ difference) / (difference @ difference)
    query = query * 200 * math.sqrt(width) / (query @ normed[0])
    query = (query + difference * 0.05 * math.sqrt(width) / (difference @ difference)).float()
    exact = [float(n @ query.double()) / math.sqrt(width) for n in normed]
    assert 0.01 < abs(exact[0] - exact[1]) < 0.1 < 100 < exact[0]

    sources = torch.stack([a, b])[None, None]
    truth = written_out(sources, query[None])
    out = mix(sources, query[None], SOURCE_EPS)
    assert out.dtype == torch.float32
    assert relative_rms(out, truth) < 1e-4
    (rounded,) = mix_and_norm(sources, query[None], [torch.ones(width)], EPS, torch.bfloat16)
    expected = truth[:, :, 0] / (truth[:, :, 0].square().mean(dim=-1, keepdim=True) + EPS).sqrt()
    assert ((rounded.double() - expected).abs() <= expected.abs() * 2**-8).all()

    # Normalised sources rounded to bfloat16 before the scores give another mixture: the measure sees it.
    early = torch.stack(normed).bfloat16()[None, None]
    weights = (early.float() @ query / math.sqrt(width)).softmax(dim=-1)
    assert relative_rms((weights[..., None] * early.float()).sum(dim=2), truth[:, :, 0]) > 1e-2


@pytest.mark.parametrize("n", [1, 4, 5])
def test_case_21_a_zero_query_gives_the_mean(n):
    sources = (torch.randn(B, T, n, D) * torch.logspace(-2, 3, n)[:, None]).bfloat16()
    out = mix(sources, torch.zeros(1, D), SOURCE_EPS)[:, :, 0]
    assert relative_rms(out, rms(sources.double(), SOURCE_EPS).mean(dim=2)) < 1e-6


def test_case_22_rounding_of_the_residual_sum_and_of_the_norm():
    """256 + 1 in 32 channels, norm weight 1.0078125: the layer reads 257, its end rounds to 256."""
    x, y = torch.full((1, 1, 32), 256.0, dtype=torch.bfloat16), torch.ones(1, 1, 32, dtype=torch.bfloat16)
    y[..., ::2] = 3
    depth = DepthState.start(x).add(y)
    assert depth.partial.unique().tolist() == [257, 259]
    assert depth.round(torch.bfloat16).partial.unique().tolist() == [256, 260]  # ties to even

    weight = torch.full((32,), 1.0078125, dtype=torch.bfloat16)
    query = torch.zeros(1, 32)
    (out,) = mix_and_norm(depth.sources(), query, [weight], EPS, torch.bfloat16)
    s = depth.partial.double()
    expected = (1.0078125 * s / s.square().mean(dim=-1, keepdim=True).sqrt()).bfloat16()
    assert torch.equal(out, expected)

    # In general: variance of the wide sum, weight times wide value, one rounding. The other orders differ.
    x, y = torch.randn(64, 32).bfloat16(), torch.randn(64, 32).bfloat16()
    weight = (1 + 0.3 * torch.randn(32)).bfloat16()
    once = rms_norm(x.float() + y.float(), weight, EPS).bfloat16()
    s = x.double() + y.double()
    exact = (weight.double() * s / (s.square().mean(dim=-1, keepdim=True) + EPS).sqrt()).bfloat16()
    assert (once != exact).float().mean() < 0.01
    rounded_sum = rms_norm(x + y, weight, EPS).bfloat16()
    weight_last = weight * rms(x.float() + y.float(), EPS).bfloat16()
    assert (rounded_sum != exact).float().mean() > 0.1
    assert (weight_last != exact).float().mean() > 0.1
