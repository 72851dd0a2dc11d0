"""Contract of the kernels on the depth state."""

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DTYPES, bound, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import residual
from inkling_ref.kernels import residual as residual_kernel

pytestmark = needs_device


@dtypes
@pytest.mark.parametrize("n", [1, 2, 9], ids="{} sources".format)
@pytest.mark.parametrize("D", [37, 576], ids="D {}".format)
@pytest.mark.parametrize("queries", [None, 1, 3], ids=["unmixed", "1 query", "3 queries"])
def test_mix_and_norm(queries, D, n, dtype):
    count = queries or 2
    sources = placed(3 * torch.randn(2, 3, n, D), dtype)
    weights = [placed(torch.randn(D), dtype) for _ in range(count)]
    q = None if queries is None else placed(1.5 * torch.randn(*([count] if count > 1 else []), D), torch.float32)
    wide_q = None if q is None else q.double()
    exact = residual.mix_and_norm(sources.double(), wide_q, [w.double() for w in weights], 1e-5, torch.float64)
    eager = residual.mix_and_norm(sources, q, weights, 1e-5, dtype)
    actual = residual_kernel.mix_and_norm(sources, q, weights, 1e-5, dtype)
    assert len(actual) == count
    for a, b, c in zip(actual, exact, eager, strict=True):
        assert a.dtype == dtype
        assert relative_rms(a, b) <= bound(dtype, c, b)


@pytest.mark.parametrize("dtype", DTYPES[1:], ids=str)
def test_mix_and_norm_rounds_wide_sources(dtype):
    # As the model calls it: float32 sources of a 16-bit model.
    D = 4608
    sources, q = placed(torch.randn(1, 2, 4, D), torch.float32), placed(torch.randn(D), torch.float32)
    w = placed(torch.randn(D), dtype)
    (actual,) = residual_kernel.mix_and_norm(sources, q, [w], 1e-6, dtype)
    (exact,) = residual.mix_and_norm(sources.double(), q.double(), [w.double()], 1e-6, torch.float64)
    assert actual.dtype == dtype
    assert relative_rms(actual, exact) <= torch.finfo(dtype).eps / 2
