"""The public implementation's float32 outputs on three small checkpoints in the released format."""

from pathlib import Path

import pytest
import torch
from helpers import relative_rms
from safetensors.torch import load_file

from inkling_ref.checkpoint import load

GOLDEN = Path(__file__).parent / "golden"
# Folder, and whether quantised experts stay packed.
MODELS = {
    "text": ("text", None),
    "mixed precision": ("text_mixed_precision", "dequantize"),
    "mixed precision, packed": ("text_mixed_precision", "packed"),
    "image and text": ("image_text", None),
}


@pytest.fixture(scope="module", params=MODELS)
def run(request):
    """(model, expected tensors, our tensors under the same names)."""
    folder, experts = MODELS[request.param]
    folder = GOLDEN / folder
    model, expected = load(folder, experts=experts), load_file(folder / "expected.safetensors")
    ours = {}
    for i, layer in enumerate(model.llm.layers):
        layer.register_forward_hook(lambda _, __, depth, name=f"layer_{i:02d}": ours.update({name: depth.partial}))
        layer.mlp.gate.register_forward_hook(
            lambda _, __, out, name=f"router_{i:02d}.experts": ours.update({name: out[1].sort(dim=-1).values})
        )
    images = {name: expected[name] for name in ("pixel_values", "image_grid_thw") if name in expected}
    with torch.inference_mode():
        ours["logits"] = model(expected["input_ids"], **images).logits
        if images:
            ours["image_features"] = model.image_features(**images)
    return model, expected, ours


def test_every_expected_tensor_is_compared(run):
    model, expected, ours = run
    inputs = {"input_ids", "pixel_values", "image_grid_thw"}
    assert set(ours) == set(expected) - inputs
    assert sum(name.startswith("layer_") for name in ours) == model.config.text.num_hidden_layers


def test_logits(run):
    _, expected, ours = run
    assert expected["logits"].abs().max() > 20  # the scale against which the bound is small
    assert (ours["logits"] - expected["logits"]).abs().max() < 2e-3


def test_layer_outputs_and_image_features(run):
    _, expected, ours = run
    names = [name for name in expected if name.startswith("layer_") or name == "image_features"]
    errors = {name: relative_rms(ours[name], expected[name]) for name in names}
    assert max(errors.values()) < 2e-4, errors


def test_chosen_experts(run):
    _, expected, ours = run
    wrong = [n for n in expected if n.startswith("router_") and not torch.equal(ours[n], expected[n].to(torch.int64))]
    assert not wrong


def test_prefill_and_decode(run):
    """The same logits through a cache: the prompt in three uneven pieces, then one token at a time."""
    model, expected, _ = run
    ids, images = expected["input_ids"], {}
    if "pixel_values" in expected:
        with torch.inference_mode():
            images = {"image_features": model.image_features(expected["pixel_values"], expected["image_grid_thw"])}
    T = ids.shape[1]
    first = T - 8
    cache = model.new_cache(ids.shape[0])
    pieces = []
    with torch.inference_mode():
        pieces.append(model(ids[:, :first], cache=cache, **images).logits)
        for start, end in [(first, first + 3), *((t, t + 1) for t in range(first + 3, T))]:
            pieces.append(model(ids[:, start:end], cache=cache).logits)
    assert (torch.cat(pieces, dim=1) - expected["logits"]).abs().max() < 2e-3
