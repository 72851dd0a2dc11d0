"""Contract of a decoding step on the kernels: what the reference's step gives, and on a GPU from one CUDA graph."""

import pytest
import torch
from helpers import random_ids, random_model, relative_rms
from kernel_contract import DEVICE, needs_device, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref.decode_step import DecodeStep, step_backend
from inkling_ref.kernels import INTERPRETED
from inkling_ref.kernels.backend import triton_backend

pytestmark = needs_device


def steps(model, T, count, prefill=None, capture=False):
    """Hidden states of `count` steps of T tokens after a prefill of unequal rows, some tokens taken back.

    prefill: the model that makes the cache (the interpreter takes minutes for these); None: the same one.
    """
    ids, mask = random_ids(2, 124, seed=3).to(DEVICE), torch.ones(2, 124, dtype=torch.bool, device=DEVICE)
    mask[1, 60:] = False  # soon on its second page; the other row is about to reuse its first
    cache = model.new_cache(2)
    (prefill or model)(ids, cache=cache, attention_mask=mask)
    step = DecodeStep(model, 2, 192, tokens=T, page=64)
    step.take(cache)
    if capture:
        step.capture()
    out, rejected = [], None
    for i in range(count):
        out.append(step(random_ids(2, T, seed=50 + i).to(DEVICE), rejected).clone())
        rejected = [i % T, (2 * i + 1) % T]
    return torch.stack(out)


@pytest.mark.parametrize(("T", "count"), [(1, 4), (3, 3)])
@torch.inference_mode()
def test_step(T, count):
    exact = steps(random_model(dtype=torch.float64).to(DEVICE), T, count)
    model = random_model(dtype=torch.float32, backend=triton_backend()).to(DEVICE)
    actual = steps(model, T, count, random_model(dtype=torch.float32).to(DEVICE))
    assert relative_rms(actual, exact) < 2e-5


def test_step_takes_the_kernels_with_a_model_on_them():
    report = step_backend(triton_backend()).report()
    assert {"attend_cache", "join_and_mix", "prepare_qkv", "sample_head"} < report.keys()
    assert all(place.startswith("inkling_ref.kernels.") for place in report.values())


@pytest.mark.skipif(INTERPRETED, reason="no GPU")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 4])
@torch.inference_mode()
def test_step_as_one_graph(T, dtype, monkeypatch):
    monkeypatch.undo()  # poisoning would put a kernel between those that overlap in a graph
    model = random_model(dtype=dtype, backend=triton_backend()).to(DEVICE)
    assert torch.equal(steps(model, T, 9, capture=True), steps(model, T, 9))
