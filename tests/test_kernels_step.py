"""Contract of a decoding step on the kernels: what the reference's step gives, and on a GPU from one CUDA graph."""

import pytest
import torch
from helpers import random_ids, random_model, relative_rms
from kernel_contract import DEVICE, needs_device, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref.decode_step import DecodeStep
from inkling_ref.kernels import INTERPRETED
from inkling_ref.kernels.backend import triton_backend, triton_step_backend

pytestmark = needs_device


def steps(model, T, count, ops=None, capture=False):
    """Hidden states of `count` steps of T tokens after a prefill of unequal rows, some tokens taken back."""
    ids, mask = random_ids(2, 124, seed=3).to(DEVICE), torch.ones(2, 124, dtype=torch.bool, device=DEVICE)
    mask[1, 60:] = False  # soon on its second page; the other row is about to reuse its first
    cache = model.new_cache(2)
    model(ids, cache=cache, attention_mask=mask)
    step = DecodeStep(model, 2, 192, tokens=T, ops=ops, page=64)
    step.take(cache)
    if capture:
        step.capture()
    out, rejected = [], None
    for i in range(count):
        out.append(step(random_ids(2, T, seed=50 + i).to(DEVICE), rejected).clone())
        rejected = [i % T, (2 * i + 1) % T]
    return torch.stack(out)


@pytest.mark.parametrize(("T", "count"), [(1, 6), (3, 3)])
@torch.inference_mode()
def test_step(T, count):
    exact = steps(random_model(dtype=torch.float64).to(DEVICE), T, count)
    actual = steps(random_model(dtype=torch.float32).to(DEVICE), T, count, triton_step_backend())
    assert relative_rms(actual, exact) < 2e-5


@pytest.mark.skipif(INTERPRETED, reason="no GPU")
@pytest.mark.parametrize("T", [1, 4])
@torch.inference_mode()
def test_step_as_one_graph(T):
    model = random_model(dtype=torch.float32, backend=triton_backend()).to(DEVICE)
    assert torch.equal(steps(model, T, 9, capture=True), steps(model, T, 9))
