"""Experts in the kernels' order: made while loading, and saved as they were released."""

import dataclasses

import pytest
import torch
from helpers import random_ids, random_model

pytest.importorskip("triton", reason="the kernels need Triton")

import inkling_ref as ir
from inkling_ref.backends import Backend
from inkling_ref.errors import InputError
from inkling_ref.kernels.packing import is_packed, pack_layer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("checkpoint")
    config = ir.InklingConfig.tiny()
    text = dataclasses.replace(config.text, moe_intermediate_size=64)  # whole blocks of either format
    ir.save(random_model(dataclasses.replace(config, text=text)), folder, experts="nvfp4+mxfp8")
    return folder


def loaded(folder, dtype=torch.bfloat16):
    packing = dataclasses.replace(Backend(), pack_experts=pack_layer)  # the reference otherwise: no kernel runs here
    return ir.load(folder, dtype=dtype, backend=packing, experts="packed")


def test_loading_packs_and_saving_unpacks(folder, tmp_path):
    model = loaded(folder)
    formats = [layer.mlp.experts.stored_format for layer in model.llm.layers]
    assert formats == ["nvfp4"] * 3 + ["mxfp8"]
    for layer in model.llm.layers:
        assert is_packed(layer.mlp.experts.matrix("w13_weight"))
        assert is_packed(layer.mlp.experts.matrix("w2_weight"))
    ir.save(model, tmp_path / "again")
    ir.save(ir.load(folder, dtype=torch.bfloat16, experts="packed"), tmp_path / "plain")
    for file in ("model.safetensors", "hf_quant_config.json", "config.json"):
        assert (tmp_path / "again" / file).read_bytes() == (tmp_path / "plain" / file).read_bytes()


def test_packed_experts_can_be_saved_in_another_format(folder, tmp_path):
    ir.save(loaded(folder), tmp_path / "dense", experts="bf16")
    ir.save(ir.load(folder, dtype=torch.bfloat16, experts="packed"), tmp_path / "plain", experts="bf16")
    files = [(tmp_path / name / "model.safetensors").read_bytes() for name in ("dense", "plain")]
    assert files[0] == files[1]


def test_other_dtypes_keep_the_released_order(folder):
    # The kernels read their own order in bfloat16 only.
    assert not is_packed(loaded(folder, torch.float32).llm.layers[0].mlp.experts.matrix("w2_weight"))


def test_trace_wants_the_released_order(folder):
    with pytest.raises(InputError, match="trace: the experts are in the kernels' order"):
        ir.trace(loaded(folder), random_ids(1, 3))
