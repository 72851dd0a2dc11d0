"""Whole models on the kernels' backend, and what the kernels refuse."""

import pytest
import torch
from helpers import random_ids, random_model, relative_rms
from kernel_contract import DEVICE, DTYPES, needs_device, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref.errors import InputError
from inkling_ref.kernels import moe as moe_kernel
from inkling_ref.kernels.backend import triton_backend

pytestmark = needs_device


# --- The whole model -------------------------------------------------------------------------------------------------


def model_logits(backend, dtype):
    """Prefill of two unequal rows, decoding, verification of four drafts, packed documents."""
    model = random_model(dtype=dtype, backend=backend).to(DEVICE)
    ids, mask = random_ids(2, 9).to(DEVICE), torch.ones(2, 9, dtype=torch.bool, device=DEVICE)
    mask[1, 6:] = False
    cache = model.new_cache(2)
    out = [model(ids, cache=cache, attention_mask=mask).logits]
    for T in (1, 4):
        out.append(model(random_ids(2, T, seed=T).to(DEVICE), cache=cache).logits)
    documents = torch.tensor([[0] * 4 + [1] * 5], device=DEVICE)
    out.append(model(ids[:1], document_ids=documents).logits)
    return torch.cat([logits.flatten() for logits in out])


def test_model():
    dtype = DTYPES[-1]
    with torch.inference_mode():
        exact = model_logits("torch", torch.float64)
        eager = model_logits("torch", dtype)
        actual = model_logits(triton_backend(), dtype)
    assert relative_rms(actual, exact) <= 1.5 * relative_rms(eager, exact)


def test_backend_reports_what_stays_in_torch():
    report = triton_backend().report()
    assert report.pop("experts") == "inkling_ref.moe.experts"
    assert all(place.startswith("inkling_ref.kernels.") for place in report.values())


# --- What is refused -------------------------------------------------------------------------------------------------


def test_refuses_float64():
    with pytest.raises(InputError, match=r"triton softcapped_swiglu: torch.float64, expected float32"):
        moe_kernel.softcapped_swiglu(torch.zeros(2, 4, dtype=torch.float64, device=DEVICE), 4.0, 25.0)


def test_refuses_gradients():
    x = torch.zeros(2, 4, device=DEVICE, requires_grad=True)
    with pytest.raises(InputError, match="no backward pass"):
        moe_kernel.softcapped_swiglu(x, 4.0, 25.0)
    with torch.inference_mode():
        moe_kernel.softcapped_swiglu(x, 4.0, 25.0)
