"""Whole models on the kernels' backend, and what the backend refuses.

Two layers, one sliding and one full: in the interpreter of tiny's sizes, on a GPU of Small's width, and nano there too.
"""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import random_ids, random_model
from kernel_contract import DEVICE, DTYPES, INTERPRETED, needs_device, poisoned_outputs  # noqa: F401 (a fixture)
from test_dspark import PROMPTS, Scripted, make

import inkling_ref as ir
from inkling_ref.backends import get_backend
from inkling_ref.cli import NANO
from inkling_ref.config import FULL, SLIDING, InklingConfig, TextConfig
from inkling_ref.errors import InputError
from inkling_ref.kernels import backend as kernel_backend
from inkling_ref.measure.make_golden import randomize
from inkling_ref.model import Inkling

pytestmark = needs_device
TINY = InklingConfig.tiny().text
# A block closes after each layer: the output mixes as many sources as that of the four layers of tiny.
SHALLOW = InklingConfig(
    replace(TINY, num_hidden_layers=2, layer_types=[SLIDING, FULL], n_layers_per_attn_res_block=1), vision=None
)
needs_gpu = pytest.mark.skipif(INTERPRETED, reason="takes too long in the interpreter")


def passes(model, length, documents=False):
    """Logits of a prefill of two unequal rows, of a decoded token, of four to be verified; of packed documents."""
    below = model.config.text.unpadded_vocab_size - 1  # nano's last is its image token
    ids, mask = random_ids(2, length, below=below), torch.ones(2, length, dtype=torch.bool)
    mask[1, length * 2 // 3 :] = False
    cache = model.new_cache(2)
    with torch.inference_mode():
        out = [model(ids.to(DEVICE), cache=cache, attention_mask=mask.to(DEVICE)).logits]
        for T in (1, 4):
            out.append(model(random_ids(2, T, seed=T, below=below).to(DEVICE), cache=cache).logits)
        if documents:
            numbers = (torch.arange(length) >= 4).long()[None]
            out.append(model(ids[:1].to(DEVICE), document_ids=numbers.to(DEVICE)).logits)
    logits = torch.cat([logits.flatten(0, 1) for logits in out])
    return logits[logits.any(dim=1)]  # padded positions have zeros, in any model


def check(exact, eager, actual, *arguments):
    """The error of `actual`, a model on the kernels, is at most 1.5 times that of `eager` of the same dtype.

    At the token of median error, with which most agree: in 16 bits a near tie of two experts sends single tokens
    another way, in either model.
    """
    exact, eager, actual = (passes(model, *arguments).double() for model in (exact, eager, actual))
    assert actual.isfinite().all()
    errors = [(logits - exact).norm(dim=1) / exact.norm(dim=1) for logits in (eager, actual)]
    ours, theirs = (float(error.median()) for error in reversed(errors))
    assert ours <= max(1.5 * theirs, 2e-6)


# --- The whole model -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES[-1:] if INTERPRETED else DTYPES, ids=str)
def test_tiny_model(dtype):
    models = [(torch.float64, "torch"), (dtype, "torch"), (dtype, "triton")]
    check(*(random_model(SHALLOW, dtype=dtype, backend=backend).to(DEVICE) for dtype, backend in models), 9, True)


def test_greedy_text_with_a_drafter():
    """Three rounds that verify four drafts and accept two, none and all of them."""
    prompts = PROMPTS[:1]
    model = random_model(SHALLOW, backend="triton").to(DEVICE)
    drafter = make(model, Scripted, target_layer_ids=[0, 1, 2]).to(DEVICE)
    expected = ir.generate(random_model(SHALLOW), prompts, 8).tokens
    drafter.texts, drafter.script = [prompts[0] + expected[0]], (2, 0, 4)
    result = ir.generate(model, prompts, 8, drafter=drafter)
    assert result.tokens == expected
    assert result.stats.drafting.row_rounds == 3


@needs_gpu
def test_nano():
    models = [(torch.float64, "torch"), (torch.bfloat16, "torch"), (torch.bfloat16, "triton")]
    check(*(ir.load(NANO, device="cuda", dtype=dtype, backend=name) for dtype, name in models), 211, True)


@needs_gpu
@pytest.mark.parametrize("drafts", [False, True], ids=["plain", "drafted"])
def test_nano_answers_about_a_picture(drafts):
    model = ir.load(NANO, device="cuda", dtype=torch.bfloat16, backend="triton")
    tokenizer = ir.Tokenizer.from_pretrained(NANO)
    picture = str(Path(__file__).parents[1] / "examples/shapes.png")
    content = [{"type": "image", "image": picture}, "Describe the picture."]
    prompt = ir.render([{"role": "user", "content": content}], tokenizer)
    images = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
    drafter = ir.load_drafter(NANO, model) if drafts else None
    tokens = ir.generate(model, [prompt.input_ids], eos_token_id=tokenizer.end_ids, drafter=drafter, **images).tokens[0]
    assert ir.parse(tokens, tokenizer)[-1].text == "a red circle, a green triangle and a blue square"


@needs_gpu
def test_two_layers_of_full_width():
    """Longer than window and extent; 12 experts are enough to choose eight from."""
    text = TextConfig(
        vocab_size=512, unpadded_vocab_size=499, num_hidden_layers=2, layer_types=[SLIDING, FULL],
        n_routed_experts=12, log_scaling_n_floor=300, eos_token_id=None,
    )  # fmt: skip
    config = InklingConfig(text, vision=None)
    with torch.device("meta"):
        eager, exact, actual = (Inkling(config, name).eval() for name in ("torch", "torch", "triton"))
    eager.cast(torch.bfloat16).to_empty(device="cuda")
    randomize(eager, device="cuda")
    weights = eager.state_dict()
    actual.load_state_dict(weights, assign=True)
    exact.load_state_dict({name: weight.double() for name, weight in weights.items()}, assign=True)
    check(exact, eager, actual, 1301)


# --- The backend -----------------------------------------------------------------------------------------------------


def test_backend_reports_the_kernels():
    report = get_backend("triton").report()
    assert all(place.startswith("inkling_ref.kernels.") for place in report.values())


def test_backend_needs_a_device(monkeypatch):
    monkeypatch.setattr(kernel_backend, "INTERPRETED", False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(InputError, match=r"^backend 'triton': torch sees no GPU here, expected one, or TRITON_INTERPR"):
        get_backend("triton")
