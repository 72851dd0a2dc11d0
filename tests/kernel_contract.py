"""What the contract suites of the kernels share: devices, dtypes, poisoned memory and the bound of the error.

Every op is compared with its reference in float64, over every argument, in every dtype that runs here: on a CPU under
Triton's interpreter in float32 and float16 (its bfloat16 is wrong), on a GPU in bfloat16 as well.
"""

import math

import pytest
import torch
from helpers import relative_rms

pytest.importorskip("triton", reason="the kernels need Triton")

from inkling_ref.kernels import INTERPRETED

DEVICE = "cpu" if INTERPRETED else "cuda"
DTYPES = [torch.float32, torch.float16] + ([] if INTERPRETED else [torch.bfloat16])
needs_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="Triton without TRITON_INTERPRET=1, and no GPU"
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch):
    """New tensors hold NaN, or integers that no kernel writes, so that an element that is not written shows."""

    def poisoned(make):
        def made(*args, **kwargs):
            out = make(*args, **kwargs)
            return out.fill_(math.nan if out.is_floating_point() else torch.iinfo(out.dtype).min + 77)

        return made

    with torch.device("meta"):  # PyTorch lists its constructors once, at the first use: those, not the poisoned ones
        torch.empty(0)
    for name in ("empty", "empty_like"):
        monkeypatch.setattr(torch, name, poisoned(getattr(torch, name)))


def placed(t, dtype=None):
    """The same values on the device, in the middle of memory that holds NaN."""
    t = t.to(DEVICE, dtype if t.is_floating_point() else t.dtype)
    if not t.is_floating_point():
        return t
    memory = torch.full((t.numel() + 128,), math.nan, dtype=t.dtype, device=DEVICE)
    return memory[64 : 64 + t.numel()].view(t.shape).copy_(t)


def bound(dtype, eager, exact):
    """1.5 times the reference's own error in that dtype; rounding alone where the reference happens to be better."""
    floor = 16 * torch.finfo(dtype).eps if dtype == torch.float32 else torch.finfo(dtype).eps / 2
    limit = max(1.5 * relative_rms(eager, exact), floor)
    assert math.isfinite(limit), "the reference itself has no finite result"
    return limit


def check(kernel, reference, tensors, dtype, **arguments):
    """One output of `kernel` against `reference` in float64 on the same rounded inputs."""
    given = {name: placed(t, dtype) for name, t in tensors.items()}
    exact = reference(**{name: t.double() for name, t in given.items()}, **arguments)
    eager = reference(**given, **arguments)
    actual = kernel(**given, **arguments)
    assert actual.dtype == eager.dtype
    assert relative_rms(actual, exact) <= bound(dtype, eager, exact)
