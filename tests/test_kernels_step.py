"""Contract of a decoding step on the kernels: what the reference's step gives, and on a GPU from one CUDA graph."""

from dataclasses import replace

import pytest
import torch
from helpers import random_ids, random_model, relative_rms, unchecked
from kernel_contract import DEVICE, INTERPRETED, needs_device, poisoned_outputs  # noqa: F401 (a fixture)
from test_dspark import GAMMA, make

import inkling_ref as ir
from inkling_ref.config import FULL, SLIDING, InklingConfig
from inkling_ref.decode_step import DecodeStep, step_backend
from inkling_ref.kernels.backend import triton_backend

pytestmark = needs_device
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="no GPU")
TINY = InklingConfig.tiny()
FEW = replace(  # heads and layers: the interpreter takes seconds for each
    TINY,
    text=replace(
        TINY.text, num_hidden_layers=2, layer_types=[SLIDING, FULL], num_attention_heads=2, num_key_value_heads=1,
        swa_num_attention_heads=3, swa_num_key_value_heads=1, n_layers_per_attn_res_block=1,
    ),
    vision=None,
)  # fmt: skip


def model_of(backend="triton", config=FEW, dtype=torch.float32):
    return random_model(config, dtype=dtype, backend=backend).to(DEVICE)


def exact(config=FEW):
    return model_of("torch", config, torch.float64)


def steps(model, T, count, prefill=None, capture=False):
    """Hidden states of `count` steps of T tokens after a prefill of unequal rows, some tokens taken back.

    prefill: the model that makes the cache (the interpreter takes minutes for these); None: the same one.
    """
    ids, mask = random_ids(2, 124, seed=3).to(DEVICE), torch.ones(2, 124, dtype=torch.bool, device=DEVICE)
    mask[1, 60:] = False  # soon on its second page; the other row is about to reuse its first
    cache = model.new_cache(2)
    with torch.inference_mode():
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


@unchecked()
@pytest.mark.parametrize(("T", "count"), [(2, 2)] if INTERPRETED else [(1, 9), (3, 9), (8, 5)])
def test_step(T, count):
    actual = steps(model_of(), T, count, model_of("torch"))
    assert relative_rms(actual, steps(exact(), T, count)) < 2e-5


def prompts(model, lengths, chunks):
    """Hidden states after each chunk of unequal prompts, then of a step."""
    step, T = DecodeStep(model, len(lengths), sum(chunks) + 2, tokens=2, page=64), sum(chunks)
    ids, mask = random_ids(len(lengths), T, seed=6), torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    parts = zip(ids.split(chunks, dim=1), mask.split(chunks, dim=1), strict=True)
    out = [step.prefill(part.to(DEVICE), is_token.to(DEVICE)) for part, is_token in parts]
    return torch.cat([*out[1:], step(random_ids(len(lengths), 2, seed=7).to(DEVICE)).flatten(0, 1)])


@unchecked()
@pytest.mark.parametrize(
    ("lengths", "chunks"), [([5, 2], [4, 1])] if INTERPRETED else [([5, 2], [4, 1]), ([300, 7, 190], [200, 99, 1])]
)
def test_prompts(lengths, chunks):
    assert relative_rms(prompts(model_of(), lengths, chunks), prompts(exact(), lengths, chunks)) < 2e-5


def test_step_takes_the_kernels_with_a_model_on_them():
    report = step_backend(triton_backend()).report()
    fused = {"attend_cache", "elect", "embed_and_norm", "join_and_mix", "prepare_qkv", "project", "sample_head"}
    assert fused < report.keys()
    assert all(place.startswith("inkling_ref.kernels.") for place in report.values())


# --- One graph -------------------------------------------------------------------------------------------------------


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("T", [1, 4])
def test_step_as_one_graph(T, dtype, monkeypatch):
    monkeypatch.undo()  # poisoning would put a kernel between those that overlap in a graph
    model = model_of(config=TINY, dtype=dtype)
    assert torch.equal(steps(model, T, 9, capture=True), steps(model, T, 9))


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_prefill_as_one_graph(dtype, monkeypatch):
    """Texts of three lengths, each with its graph, and what comes behind them: the bits of calls without."""
    monkeypatch.undo()
    model, found = model_of(config=TINY, dtype=dtype), {False: [], True: []}
    for captures, out in found.items():
        step = DecodeStep(model, 2, 230, tokens=2, page=64)
        for T in (200, 7, 1) if captures else ():
            step.capture_prefill(T)
        for T, seed in ((200, 1), (7, 2), (1, 4), (200, 3)):
            step.reset()
            out.append(step.prefill(random_ids(2, T, seed=seed).to(DEVICE)).clone())
            out.append(step.prefill(random_ids(2, 5, seed=seed).to(DEVICE)).clone())
            out.append(step(random_ids(2, 2, seed=seed).to(DEVICE)).flatten(0, 1).clone())
    for eager, graph in zip(found[False], found[True], strict=True):
        assert torch.equal(eager, graph)


@needs_gpu
def test_generation_on_a_graph(monkeypatch):
    """Texts of one captured step, prompt after prompt: greedy, drawn, and with a drafter that reads its taps."""
    monkeypatch.undo()
    model, rows = model_of(config=TINY), [random_ids(n, seed=n).tolist() for n in (7, 1, 23)]
    drafter = make(model).to(DEVICE)
    plain = ir.generate(random_model(), rows, 30).tokens
    for T, taps in ((1, None), (GAMMA + 1, drafter.config)):
        captured, greedy, eager = (DecodeStep(model, 3, 80, T, taps=taps) for _ in range(3))
        captured.capture()
        greedy.capture(greedy=True)
        ways = [(captured, None), (greedy, None), (eager, None)]
        if taps is not None:
            ways = [(captured, ir.DraftStep(drafter, captured)), (captured, drafter), (eager, drafter)]
        for temperature in (0.0, 0.8, 0.0):
            texts = [ir.generate(model, rows, 30, temperature, seed=1, drafter=d, step=s) for s, d in ways]
            assert all(text.tokens == texts[0].tokens for text in texts)
        assert texts[0].tokens == plain
