"""Contract of the beginning of a decoding step."""

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, bound, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import fused
from inkling_ref.errors import InputError
from inkling_ref.kernels.embedding import embed_and_norm
from inkling_ref.residual import wide

pytestmark = needs_device

V = 19


def case(D, norms, dtype):
    table, weights = placed(2 * torch.randn(V, D), dtype), [placed(torch.randn(D), dtype) for _ in range(norms + 1)]
    return table, weights[0], weights[1:]


def outputs(function, ids, table, norm_weight, norm_weights):
    """The running sum, then the inputs of the first layer's attention."""
    partial = placed(torch.full((*ids.shape, table.shape[1]), torch.nan), wide(table[:0]).dtype)
    return [partial, *function(ids, table, norm_weight, partial, norm_weights, 1e-5)]


@dtypes
@pytest.mark.parametrize(("B", "T", "D", "norms"), [(1, 1, 37, 1), (3, 2, 576, 3), (2, 1, 4608, 1)])
def test_embed_and_norm(B, T, D, norms, dtype):
    ids = torch.randint(V, (B, T), device=DEVICE)
    table, norm_weight, norm_weights = case(D, norms, dtype)
    exact = outputs(fused.embed_and_norm, ids, table.double(), norm_weight.double(), [w.double() for w in norm_weights])
    eager = outputs(fused.embed_and_norm, ids, table, norm_weight, norm_weights)
    for a, b, c in zip(outputs(embed_and_norm, ids, table, norm_weight, norm_weights), eager, exact, strict=True):
        assert a.dtype == b.dtype
        assert relative_rms(a, c) <= bound(dtype, b, c)


def test_strided_arguments():
    table, norm_weight, norm_weights = case(37, 2, torch.float32)
    ids = torch.randint(V, (3, 4), device=DEVICE)[:, ::2]
    expected = outputs(embed_and_norm, ids.contiguous().int(), table, norm_weight, norm_weights)
    pairs = [torch.stack([w, w * torch.nan], dim=-1)[..., 0] for w in (table, norm_weight, *norm_weights)]
    actual = outputs(embed_and_norm, ids, pairs[0], pairs[1], pairs[2:])
    assert all(map(torch.equal, actual, expected))
    with pytest.raises(InputError, match="embed_and_norm: a strided running sum, expected a contiguous one"):
        embed_and_norm(ids, table, norm_weight, torch.zeros(3, 2, 74, device=DEVICE)[..., ::2], norm_weights, 1e-5)
