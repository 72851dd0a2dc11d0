"""Loading and saving checkpoints: formats and their declarations, damaged folders, round trips, memory, slices."""

import json
import math
import re
import shutil
import subprocess
import sys
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from helpers import logits, random_ids, random_model, relative_rms
from jaxtyping import TypeCheckError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import inkling_ref as ir
from inkling_ref import checkpoint
from inkling_ref.checkpoint import SIDECAR, layer_formats, load, save
from inkling_ref.config import FULL, SLIDING, InklingConfig
from inkling_ref.errors import InputError
from inkling_ref.model import Inkling, keeps_float32
from inkling_ref.quantization import MXFP8, NVFP4, fake_mxfp8, fake_nvfp4, mxfp8_dequantize, quantize_stored
from inkling_ref.tensor_files import INDEX, WEIGHTS, CheckpointReader

GOLDEN = Path(__file__).parent / "golden"
MIXED = GOLDEN / "text_mixed_precision"
EXPERTS = "model.llm.layers.{}.mlp.experts."


def config(layers=6):
    """Tiny, with widths that both formats fit (D = 96, I = 32) and no two tensors of the experts of one shape."""
    text = InklingConfig.tiny().text
    types = [FULL if i % 3 == 2 else SLIDING for i in range(layers)]
    text = replace(text, hidden_size=96, moe_intermediate_size=32, num_hidden_layers=layers, layer_types=types)
    return replace(InklingConfig.tiny(), text=text)


@pytest.fixture(scope="module")
def model():
    return random_model(config())


@pytest.fixture(scope="module")
def saved(model, tmp_path_factory):
    """The module's model in each way of storing it; tests copy what they change."""
    base = tmp_path_factory.mktemp("saved")
    for experts in (None, "bf16", "mxfp8", "nvfp4+mxfp8"):
        save(model, base / str(experts), experts=experts)
    save(model, base / "sharded", experts="nvfp4+mxfp8", shard_bytes=200_000)
    return base


@pytest.fixture
def mixed(saved, tmp_path):
    return shutil.copytree(saved / "nvfp4+mxfp8", tmp_path / "mixed")


def tensors_of(folder):
    out = {}
    for path in sorted(Path(folder).glob("*.safetensors")):
        out |= load_file(path)
    return out


def same(a, b):
    """Same dtype, shape and bytes."""
    raw = [t.contiguous().view(-1).view(torch.uint8) for t in (a, b)]
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(*raw)


def edit(folder, change):
    """Rewrite a single-file checkpoint after `change(tensors)`."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS)


def replace_tensors(folder, prefix, source):
    """Exchange all tensors of that prefix for those of another folder."""

    def change(tensors):
        for key in [key for key in tensors if key.startswith(prefix)]:
            del tensors[key]
        tensors.update({key: tensor for key, tensor in tensors_of(source).items() if key.startswith(prefix)})

    edit(folder, change)


def edit_json(path, change):
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))


def error_of(folder, **kwargs):
    with pytest.raises(InputError) as caught:
        load(folder, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---------------------------------------------------------------- golden


@pytest.mark.parametrize("name", ["text", "text_mixed_precision", "image_text"])
@pytest.mark.parametrize("experts", ["packed", "dequantize"])
def test_golden_folders_load_and_save_bit_for_bit(name, experts, tmp_path):
    loaded = load(GOLDEN / name, experts=experts)
    expected = load_file(GOLDEN / name / "expected.safetensors")
    images = {key: expected[key] for key in ("pixel_values", "image_grid_thw") if key in expected}
    assert (logits(loaded, expected["input_ids"], **images) - expected["logits"]).abs().max() < 2e-3
    save(loaded, tmp_path / "again")
    again = load_file(tmp_path / "again" / WEIGHTS)
    original = load_file(GOLDEN / name / WEIGHTS)
    if experts == "packed":
        assert again.keys() == original.keys()
    for tensor in again:
        if experts == "packed" or "_weight" not in tensor:
            assert same(again[tensor], original[tensor]), tensor


def test_packed_and_dequantised_golden_agree():
    ids = load_file(MIXED / "expected.safetensors")["input_ids"]
    packed, dense = load(MIXED, experts="packed"), load(MIXED)
    assert [layer.mlp.experts.stored_format for layer in packed.llm.layers] == [NVFP4] * 10 + [MXFP8] * 2
    assert [layer.mlp.experts.stored_format for layer in dense.llm.layers] == [NVFP4] * 10 + [MXFP8] * 2
    assert packed.llm.layers[3].mlp.experts.w13_weight.dtype == torch.uint8
    assert dense.llm.layers[3].mlp.experts.w13_weight.dtype == torch.float32
    assert relative_rms(logits(packed, ids), logits(dense, ids)) < 1e-6


# ---------------------------------------------------------------- loading


def test_loaded_models_are_frozen_and_in_eval_mode(saved):
    loaded = load(saved / "nvfp4+mxfp8")
    assert not loaded.training
    assert not any(p.requires_grad for p in loaded.parameters())
    assert not any(t.is_meta for t in loaded.state_dict().values())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("experts", ["packed", "dequantize"])
def test_dtypes(saved, dtype, experts):
    loaded = load(saved / "nvfp4+mxfp8", dtype=dtype, experts=experts)
    stored = tensors_of(saved / "nvfp4+mxfp8")
    for name, tensor in loaded.state_dict().items():
        if ".experts." in name:
            packed = experts == "packed"
            assert same(tensor, stored[f"model.{name}"]) if packed else tensor.dtype == dtype, name
        else:
            keep = keeps_float32(name) and dtype == torch.bfloat16
            assert same(tensor, stored[f"model.{name}"].to(torch.float32 if keep else dtype)), name
    assert loaded.dtype == dtype
    assert logits(loaded, random_ids(1, 5)).isfinite().all()


@pytest.mark.parametrize(
    "kwargs",
    [{"experts": "bf16"}, {"dtype": torch.int64}, {"backend": "none"}, {"device": "gpu"}, {"device": "cuda:99"}],
    ids=str,
)
def test_wrong_arguments_are_named(saved, kwargs):
    assert next(iter(kwargs)) in error_of(saved / "bf16", **kwargs)


def test_activations_are_quantised_in_each_layers_format_on_request(saved):
    """Off by default; on, NVFP4 before NVFP4 experts and MXFP8 before MXFP8 experts; off again, as it was."""
    loaded, ids = load(saved / "nvfp4+mxfp8"), random_ids(2, 11)
    plain = logits(loaded, ids)
    loaded.quantize_activations()
    assert [layer.mlp.experts.quantize for layer in loaded.llm.layers] == [fake_nvfp4] * 5 + [fake_mxfp8]
    assert relative_rms(logits(loaded, ids), plain) > 1e-2
    loaded.quantize_activations(False)
    assert torch.equal(logits(loaded, ids), plain)
    floats = load(saved / "bf16")
    assert torch.equal(logits(floats.quantize_activations(), ids), logits(floats.quantize_activations(False), ids))


def test_a_folder_without_a_config(tmp_path):
    assert "config.json" in error_of(tmp_path)


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads /proc")
def test_memory_is_the_model_and_one_tensor(tmp_path):
    """The peak of a process that loads, against the size of the model: a second copy or mapped pages would show.

    And loading is quick because it imports neither the progress bar nor PyTorch's compiler.
    """
    text = replace(config(4).text, n_routed_experts=96, hidden_size=160, moe_intermediate_size=96)
    big = Inkling(replace(config(), text=text, vision=None))
    save(big, tmp_path / "packed", experts="nvfp4+mxfp8")
    save(big, tmp_path / "floats")
    code = """
import re, sys
from inkling_ref.checkpoint import load
def memory(key):
    return int(re.search(key + r":\\s+(\\d+) kB", open("/proc/self/status").read())[1]) * 1024
small, *folders = sys.argv[1:]
for experts in ("dequantize", "packed"):
    load(small, experts=experts)  # code pages and the allocator's own
for folder in folders:
    before = memory("VmRSS")
    open("/proc/self/clear_refs", "w").write("5")  # the peak starts again
    model = load(folder, experts="packed")
    sizes = [t.nbytes for t in model.state_dict().values()]
    print(sum(sizes), max(sizes), memory("VmHWM") - before, "rich" in sys.modules or "torch._dynamo" in sys.modules)
"""
    folders = [str(MIXED), str(tmp_path / "floats"), str(tmp_path / "packed")]
    out = subprocess.run([sys.executable, "-c", code, *folders], check=True, capture_output=True, text=True).stdout
    for line in out.splitlines():
        size, largest, peak = map(int, line.split()[:3])
        assert size > 15 * largest // 4
        assert peak > 0.8 * size, out  # it measures something
        assert peak < size + 1.5 * largest + 2e6, out
        assert line.endswith("False")


# ---------------------------------------------------------------- saving


@pytest.mark.parametrize("name", ["None", "bf16", "mxfp8", "nvfp4+mxfp8", "sharded"])
def test_names_and_dtypes_are_the_released_ones(saved, model, name):
    stored = tensors_of(saved / name)
    assert {f"model.{key}" for key in model.state_dict()} <= set(stored)
    for key, tensor in stored.items():
        if ".experts." in key:
            layer = int(key.split(".")[3])
            weight = {"None": torch.float32, "bf16": torch.bfloat16}.get(name)
            weight = weight or (torch.uint8 if layer < 5 and name != "mxfp8" else torch.float8_e4m3fn)
            assert not key.endswith("13_weight") or tensor.dtype == weight, key
        else:
            expected = torch.float32 if name == "None" or keeps_float32(key) else torch.bfloat16
            assert tensor.dtype == expected, key
    assert json.loads((saved / name / "config.json").read_text())["dtype"] == (
        "float32" if name == "None" else "bfloat16"
    )


def test_small_has_forty_layers_of_nvfp4():
    assert layer_formats("nvfp4+mxfp8", 48) == [NVFP4] * 40 + [MXFP8] * 8
    assert layer_formats("nvfp4+mxfp8", 18) == [NVFP4] * 15 + [MXFP8] * 3


def test_float_round_trip_is_bit_exact(saved, model):
    again = load(saved / "None")
    assert again.config == model.config
    assert all(same(tensor, model.state_dict()[name]) for name, tensor in again.state_dict().items())
    assert not (saved / "None" / SIDECAR).exists()


@pytest.mark.parametrize("experts", ["nvfp4+mxfp8", "mxfp8"])
def test_quantised_experts_are_what_the_quantiser_makes_of_the_weights(saved, model, experts):
    stored = tensors_of(saved / experts)
    for layer in (0, 4, 5):
        for matrix in ("w13_weight", "w2_weight"):
            name = EXPERTS.format(layer) + matrix
            quantisation = NVFP4 if experts == "nvfp4+mxfp8" and layer < 5 else MXFP8
            expected = quantize_stored(quantisation, model.state_dict()[name.removeprefix("model.")])
            for suffix, tensor in expected.items():
                assert same(stored[name + suffix], tensor), name + suffix


@pytest.mark.parametrize("experts", [None, "nvfp4+mxfp8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_packed_experts_keep_their_bytes(saved, experts, dtype, tmp_path):
    save(load(saved / "nvfp4+mxfp8", dtype=dtype, experts="packed"), tmp_path / "again", experts=experts)
    original, again = tensors_of(saved / "nvfp4+mxfp8"), tensors_of(tmp_path / "again")
    assert again.keys() == original.keys()
    for name, tensor in again.items():
        if ".experts." in name or experts:
            assert same(tensor, original[name]), name
    assert json.loads((tmp_path / "again" / SIDECAR).read_text()) == json.loads(
        (saved / "nvfp4+mxfp8" / SIDECAR).read_text()
    )


def test_packed_experts_change_format_through_their_values(saved, tmp_path):
    packed = load(saved / "nvfp4+mxfp8", experts="packed")
    dense = load(saved / "nvfp4+mxfp8")
    save(packed, tmp_path / "mxfp8", experts="mxfp8")
    save(dense, tmp_path / "mxfp8 from dense", experts="mxfp8")
    save(packed, tmp_path / "bf16", experts="bf16")
    a, b, c = (tensors_of(tmp_path / name) for name in ("mxfp8", "mxfp8 from dense", "bf16"))
    assert all(same(a[name], b[name]) for name in a)
    assert same(a[EXPERTS.format(5) + "w2_weight"], tensors_of(saved / "nvfp4+mxfp8")[EXPERTS.format(5) + "w2_weight"])
    for name, tensor in dense.state_dict().items():
        if ".experts." in name:
            assert same(c[f"model.{name}"], tensor.bfloat16()), name


def test_a_second_quantisation_changes_no_value_noticeably(saved, tmp_path):
    once = load(saved / "nvfp4+mxfp8")
    save(once, tmp_path / "twice", experts="nvfp4+mxfp8")
    twice = load(tmp_path / "twice").state_dict()
    for name, tensor in once.state_dict().items():
        assert relative_rms(twice[name], tensor) < 1e-6, name


def test_tiny_is_too_narrow_for_mxfp8_and_nothing_is_written(tmp_path):
    model = random_model()  # I = 16
    with pytest.raises(InputError, match=r"model\.llm\.layers\.3\.mlp\.experts\.w2_weight.*multiple of 32"):
        save(model, tmp_path / "tiny", experts="nvfp4+mxfp8")
    assert list(tmp_path.iterdir()) == []
    save(model, tmp_path / "tiny")
    again = load(tmp_path / "tiny").state_dict()
    assert all(same(tensor, again[name]) for name, tensor in model.state_dict().items())


def test_shards(saved, model):
    folder = saved / "sharded"
    files = sorted(path.name for path in folder.glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i + 1:05}-of-{len(files):05}.safetensors" for i in range(len(files))]
    index = json.loads((folder / INDEX).read_text())
    assert sorted(set(index["weight_map"].values())) == files
    stored = tensors_of(folder)
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in stored.values())
    for file in files:
        with safe_open(folder / file, "pt") as opened:
            size = sum(stored[name].nbytes for name in opened.keys())  # noqa: SIM118
            assert size <= 200_000
            assert all(index["weight_map"][name] == file for name in opened.keys())  # noqa: SIM118
    single = load(saved / "nvfp4+mxfp8").state_dict()
    assert all(same(tensor, single[name]) for name, tensor in load(folder).state_dict().items())


def test_metadata_goes_into_every_header(model, tmp_path):
    save(model, tmp_path / "x", experts="bf16", metadata={"steps": "17"})
    with safe_open(tmp_path / "x" / WEIGHTS, "pt") as file:
        assert file.metadata() == {"format": "pt", "steps": "17"}
    with pytest.raises((InputError, TypeCheckError), match="metadata"):
        save(model, tmp_path / "y", metadata={"steps": 17})


def test_overwriting_replaces_the_old_checkpoint_and_nothing_else(saved, model, tmp_path):
    folder = shutil.copytree(saved / "sharded", tmp_path / "x")
    (folder / "tokenizer.json").write_text("{}")
    save(model, folder, experts="bf16")
    assert {path.name for path in folder.iterdir()} == {WEIGHTS, "config.json", "tokenizer.json"}
    assert all(same(tensor, tensors_of(saved / "bf16")[name]) for name, tensor in tensors_of(folder).items())
    save(model, folder, experts="mxfp8", shard_bytes=300_000)
    assert WEIGHTS not in {path.name for path in folder.iterdir()}
    load(folder)
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_a_failed_save_leaves_the_folder_as_it_was(saved, tmp_path):
    folder = shutil.copytree(saved / "nvfp4+mxfp8", tmp_path / "x")
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    broken = random_model(config())
    broken.llm.layers[2].mlp.experts.w2_weight.data[3, 1, 4] = math.nan
    with pytest.raises(InputError, match=r"model\.llm\.layers\.2\.mlp\.experts\.w2_weight: expert 3 holds nan"):
        save(broken, folder, experts="nvfp4+mxfp8")
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert [path.name for path in tmp_path.iterdir()] == ["x"]


def test_wrong_arguments_of_save(model, tmp_path):
    with pytest.raises(InputError, match="experts: 'fp4'"):
        save(model, tmp_path / "x", experts="fp4")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="a file, expected a folder"):
        save(model, tmp_path / "file")
    with pytest.raises(InputError, match=r"shard_bytes: -1, expected"):
        save(model, tmp_path / "x", shard_bytes=-1)


def test_a_full_disk_is_named_and_leaves_nothing(model, tmp_path, monkeypatch):
    def write_file(path, *_):
        path.write_bytes(b"the beginning")
        raise OSError(28, "No space left on device")  # as Python raises it: without the file's name

    monkeypatch.setattr(checkpoint, "write_file", write_file)
    with pytest.raises(OSError, match="No space left") as caught:
        save(model, tmp_path / "x")
    assert caught.value.filename == str(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


def test_a_second_save_at_the_same_time_leaves_the_first_alone(model, tmp_path, monkeypatch):
    def write_file(*arguments):
        monkeypatch.undo()
        with pytest.raises(FileExistsError, match="partial"):
            save(model, tmp_path / "x")
        return original(*arguments)

    original = checkpoint.write_file
    monkeypatch.setattr(checkpoint, "write_file", write_file)
    save(model, tmp_path / "x")
    assert torch.equal(logits(load(tmp_path / "x"), random_ids(1, 5)), logits(model, random_ids(1, 5)))


def test_a_config_of_another_model_is_one_line_of_bearable_length(model, tmp_path):
    save(model, tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["text_config"]["hidden_size"] += 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    message = error_of(tmp_path)
    assert "llm.embed.weight" in message
    assert re.search(r"; and \d+ more$", message)
    assert len(message) < 4000


def test_a_model_may_be_saved_over_the_folder_it_came_from(mixed):
    before = tensors_of(mixed)
    save(load(mixed, experts="packed", dtype=torch.bfloat16), mixed)
    assert all(same(tensor, before[name]) for name, tensor in tensors_of(mixed).items())


# ---------------------------------------------------------------- declared formats


def test_sidecar_and_label_as_written(saved):
    sidecar = json.loads((saved / "nvfp4+mxfp8" / SIDECAR).read_text())["quantization"]
    assert sidecar["quant_algo"] == "MIXED_PRECISION"
    assert sidecar["quantized_layers"]["model.llm.layers.4.mlp.experts"] == {"quant_algo": "NVFP4", "group_size": 16}
    assert sidecar["quantized_layers"]["model.llm.layers.5.mlp.experts"] == {"quant_algo": "MXFP8", "group_size": 32}
    label = json.loads((saved / "mxfp8" / "config.json").read_text())["quantization_config"]
    assert (label["quant_method"], label["weight_block_size"]) == ("mxfp8", [1, 32])
    assert InklingConfig.from_pretrained(saved / "mxfp8") == InklingConfig.from_pretrained(saved / "None")


@pytest.mark.parametrize(
    "rename",
    [
        "{}",
        "llm.layers.{}.mlp.experts",
        "model.language_model.layers.{}.mlp.experts",
        "layers.{}.mlp.experts.w13_weight",
    ],
)
def test_layer_names_match_whatever_stands_around_them(mixed, rename):
    rename = "model.llm.layers.{}.mlp.experts" if rename == "{}" else rename

    def change(data):
        listed = data["quantization"]["quantized_layers"]
        data["quantization"]["quantized_layers"] = {rename.format(i): value for i, value in enumerate(listed.values())}

    edit_json(mixed / SIDECAR, change)
    load(mixed)


def test_a_sidecar_without_the_outer_key(mixed):
    edit_json(mixed / SIDECAR, lambda data: data.update(data.pop("quantization")))
    load(mixed)


def test_formats_declared_in_the_config_alone(mixed):
    sidecar = json.loads((mixed / SIDECAR).read_text())["quantization"]
    (mixed / SIDECAR).unlink()
    edit_json(mixed / "config.json", lambda data: data.update(quantization_config=sidecar))
    load(mixed)


def test_nothing_declared_reads_the_dtypes(mixed):
    (mixed / SIDECAR).unlink()
    edit_json(mixed / "config.json", lambda data: data.pop("quantization_config"))
    assert load(mixed).llm.layers[5].mlp.experts.stored_format == MXFP8


def test_a_label_with_excluded_layers(saved, tmp_path):
    folder = shutil.copytree(saved / "mxfp8", tmp_path / "x")
    (folder / SIDECAR).unlink()
    load(folder)  # the label alone
    name = EXPERTS.format(3)
    replace_tensors(folder, name, saved / "bf16")
    assert f"layer 3: config.json says MXFP8, but {name}w13_weight is BF16" in error_of(folder)
    edit_json(
        folder / "config.json",
        lambda data: data["quantization_config"]["modules_to_not_convert"].append("llm.layers.3.mlp"),
    )
    assert load(folder).llm.layers[3].mlp.experts.stored_format == "bf16"


@pytest.mark.parametrize("text", ["[]", "{", '{"quantization": 3}', '{"quantization": {"quantized_layers": [1]}}'])
def test_a_sidecar_that_is_none(mixed, text):
    (mixed / SIDECAR).write_text(text)
    assert SIDECAR in error_of(mixed)


def test_an_unknown_algorithm_is_named(mixed):
    edit_json(
        mixed / SIDECAR,
        lambda data: data["quantization"]["quantized_layers"]["model.llm.layers.1.mlp.experts"].update(
            quant_algo="INT4"
        ),
    )
    message = error_of(mixed)
    assert "model.llm.layers.1.mlp.experts is 'INT4'" in message
    assert SIDECAR in message


# ---------------------------------------------------------------- case 30, 31: values


def test_case_30_load_nan_scale_names_tensor_and_expert(mixed):
    name = EXPERTS.format(2) + "w2_weight"
    edit(mixed, lambda tensors: tensors[f"{name}_scale"].view(torch.uint8)[5, 1, 0].fill_(0x7F))
    for experts in ("packed", "dequantize"):
        message = error_of(mixed, experts=experts)
        assert f"{WEIGHTS}: {name}_scale: expert 5 holds a NaN" in message


def test_case_30_load_nan_scale_of_mxfp8(mixed):
    name = EXPERTS.format(5) + "w13_weight"
    edit(mixed, lambda tensors: tensors[f"{name}_scale"][6, 1, 0].fill_(255))
    assert f"{name}_scale: expert 6 holds a NaN" in error_of(mixed)


def test_case_30_load_amax_zero_gives_exact_zeros(mixed):
    name = EXPERTS.format(1) + "w13_weight"
    edit(mixed, lambda tensors: tensors[f"{name}_amax"][4].fill_(0))
    weight = load(mixed).llm.layers[1].mlp.experts.w13_weight
    assert weight[4].eq(0).all()
    assert weight[3].ne(0).any()
    assert logits(load(mixed, experts="packed"), random_ids(1, 9)).isfinite().all()


BAD = [-1.0, math.nan, math.inf]


@pytest.mark.parametrize(
    ("suffix", "value"),  # an amax of 0 is a zero expert
    [*product(["_amax", "_outer_scale_denominator"], BAD), ("_outer_scale_denominator", 0.0)],
)
def test_case_31_load_bad_amax_or_denominator(mixed, suffix, value, monkeypatch):
    name = EXPERTS.format(0) + "w2_weight" + suffix
    edit(mixed, lambda tensors: tensors[name].fill_(value))
    monkeypatch.setattr(CheckpointReader, "read", only_small(CheckpointReader.read))
    message = error_of(mixed)
    assert f"{WEIGHTS}: {name} holds {value}" in message
    assert "expected finite" in message


@pytest.mark.parametrize("suffix", ["_amax", "_outer_scale_denominator", "_scale"])
def test_case_31_load_missing_companion(mixed, suffix):
    name = EXPERTS.format(3) + "w13_weight"
    edit(mixed, lambda tensors: tensors.pop(name + suffix))
    assert f"{name}{suffix} is missing" in error_of(mixed)


def only_small(read):
    """Early means: nothing larger than amax has been read when the error comes."""

    def limited(self, name):
        assert self.layout(name).nbytes < 100, f"{name} was read before the check was done"
        return read(self, name)

    return limited


# ---------------------------------------------------------------- case 36: the declared scale grid


def test_case_36_stored_scales_win_over_the_declared_grid(saved, tmp_path):
    folder = shutil.copytree(saved / "mxfp8", tmp_path / "x")
    expected = load(folder).state_dict()
    edit_json(folder / "config.json", lambda data: data["quantization_config"].update(weight_block_size=[32, 32]))
    with pytest.warns(UserWarning, match=r"weight_block_size \[32, 32\].*one scale per row"):
        loaded = load(folder)
    assert all(same(tensor, expected[name]) for name, tensor in loaded.state_dict().items())


def test_case_36_group_size_of_a_layer(mixed):
    edit_json(
        mixed / SIDECAR,
        lambda data: data["quantization"]["quantized_layers"]["model.llm.layers.1.mlp.experts"].update(group_size=32),
    )
    with pytest.warns(UserWarning, match=r"layers\.1\.mlp\.experts group_size 32"):
        load(mixed)


@pytest.mark.parametrize("shape", [(7, 2, 3), (7, 64, 4), (7, 64, 1), (7, 1, 3), (64, 3)], ids=str)
def test_case_36_scales_of_another_shape_raise(saved, tmp_path, shape):
    folder = shutil.copytree(saved / "mxfp8", tmp_path / "x")
    name = EXPERTS.format(2) + "w13_weight_scale"  # [7, 64, 96 / 32]
    edit_json(folder / "config.json", lambda data: data["quantization_config"].update(weight_block_size=[32, 32]))
    edit(folder, lambda tensors: tensors.update({name: torch.full(shape, 120, dtype=torch.uint8)}))
    assert f"{WEIGHTS}: {name} is U8 {list(shape)}, expected U8 [7, 64, 3]" in error_of(folder)


# ---------------------------------------------------------------- cases 38, 39, 40, 42: folders that do not fit


def test_case_38_39_load_passes_on_the_errors_of_files(saved, tmp_path):
    folder = shutil.copytree(saved / "sharded", tmp_path / "x")
    shard = sorted(folder.glob("*.safetensors"))[1]
    whole = shard.read_bytes()
    shard.write_bytes(whole[:-100])
    assert f"{shard}: {len(whole) - 100} bytes, expected {len(whole)}" in error_of(folder)
    shard.unlink()
    assert f"{shard.name} is missing" in error_of(folder)


def test_case_39_every_missing_and_wrong_tensor_in_one_early_error(mixed, monkeypatch):
    def change(tensors):
        del tensors["model.llm.norm.weight"]
        del tensors[EXPERTS.format(0) + "w2_weight"]
        tensors["model.llm.layers.1.attn.wq_du.weight"] = torch.zeros(5, 3)
        tensors["model.visual.proj_in.weight"] = tensors["model.visual.proj_in.weight"].to(torch.int64)
        tensors[EXPERTS.format(4) + "w13_weight_amax"].fill_(-3)

    edit(mixed, change)
    monkeypatch.setattr(CheckpointReader, "read", only_small(CheckpointReader.read))
    message = error_of(mixed)
    for expected in (
        "model.llm.norm.weight is missing",
        EXPERTS.format(0) + "w2_weight is missing",
        f"{WEIGHTS}: model.llm.layers.1.attn.wq_du.weight is F32 [5, 3], expected floats [60, 96]",
        f"{WEIGHTS}: model.visual.proj_in.weight is I64",
        EXPERTS.format(4) + "w13_weight_amax holds -3.0",
    ):
        assert expected in message


def test_case_39_unexpected_names_are_reported_and_not_read(mixed):
    edit(mixed, lambda tensors: tensors.update({"model.mtp.weight": torch.ones(3, dtype=torch.int64)}))
    with pytest.warns(UserWarning, match=r"unknown to this model ignored: model\.mtp\.weight"):
        load(mixed)


def test_case_40_sidecar_removed(mixed):
    (mixed / SIDECAR).unlink()
    message = error_of(mixed)
    assert "layer 0: config.json declares mixed precision and no format for it" in message
    assert SIDECAR in message
    assert EXPERTS.format(0) + "w13_weight is U8" in message


@pytest.mark.parametrize(("layer", "declared", "stored"), [(5, "NVFP4", "F8_E4M3"), (0, "MXFP8", "U8")])
def test_case_40_sidecar_contradicts_the_stored_dtype(mixed, layer, declared, stored):
    key = f"model.llm.layers.{layer}.mlp.experts"
    edit_json(
        mixed / SIDECAR,
        lambda data: data["quantization"]["quantized_layers"][key].update(quant_algo=declared, group_size=None),
    )
    message = error_of(mixed)
    assert f"layer {layer}: {SIDECAR} says {declared}, but {key}.w13_weight is {stored}" in message


def test_case_40_layer_that_the_sidecar_does_not_list(mixed):
    edit_json(
        mixed / SIDECAR,
        lambda data: data["quantization"]["quantized_layers"].pop("model.llm.layers.2.mlp.experts"),
    )
    assert f"layer 2: {SIDECAR} says BF16, but {EXPERTS.format(2)}w13_weight is U8" in error_of(mixed)


def test_case_40_scale_deleted(mixed):
    name = EXPERTS.format(5) + "w2_weight"
    edit(mixed, lambda tensors: tensors.pop(f"{name}_scale"))
    message = error_of(mixed)
    assert f"{name}_scale is missing: {name} is F8_E4M3 [7, 96, 32], MXFP8" in message


def test_case_40_scale_of_an_unquantised_weight(saved, tmp_path):
    folder = shutil.copytree(saved / "bf16", tmp_path / "x")
    name = EXPERTS.format(5) + "w2_weight"
    edit(folder, lambda tensors: tensors.update({f"{name}_scale": torch.ones(7, 96, 1, dtype=torch.uint8)}))
    assert f"{name}_scale does not belong to {name}, which is BF16" in error_of(folder)


@pytest.mark.parametrize("dtype", [torch.int64, torch.int8, torch.float8_e5m2], ids=str)
def test_case_40_expert_of_an_unknown_dtype(saved, tmp_path, dtype):
    folder = shutil.copytree(saved / "bf16", tmp_path / "x")
    name = EXPERTS.format(4) + "w13_weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].to(dtype)}))
    assert f"{WEIGHTS}: {name} is " in error_of(folder)
    assert "expected U8 (NVFP4), F8_E4M3 (MXFP8) or floats" in error_of(folder)


def test_case_40_fp8_attention_is_not_read_as_floats(saved, tmp_path):
    folder = shutil.copytree(saved / "bf16", tmp_path / "x")
    name = "model.llm.layers.4.attn.wo_ud.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name].to(torch.float8_e4m3fn)}))
    assert f"{name} is F8_E4M3" in error_of(folder)


def test_case_40_two_formats_in_one_layer(saved, mixed):
    (mixed / SIDECAR).unlink()
    edit_json(mixed / "config.json", lambda data: data.pop("quantization_config"))
    name = EXPERTS.format(1) + "w2_weight"
    replace_tensors(mixed, name, saved / "mxfp8")
    assert f"layer 1: its other matrix is NVFP4, but {name} is F8_E4M3" in error_of(mixed)


def test_case_42_padded_vocabulary(saved, tmp_path):
    loaded = load(saved / "bf16")  # 48 stored rows, 40 used
    assert loaded.llm.unembed.weight.shape[0] == 48
    assert logits(loaded, torch.tensor([[1, 38]])).shape[-1] == 40
    text = replace(config().text, unpadded_vocab_size=40)
    plain = random_model(replace(config(), text=text, vision=None))
    assert logits(plain, torch.tensor([[39]])).shape[-1] == 40
    with pytest.raises(InputError, match=r"id 44.*< 40"):
        logits(plain, torch.tensor([[3, 44]]))
    folder = shutil.copytree(saved / "bf16", tmp_path / "x")
    name = "model.llm.unembed.weight"
    edit(folder, lambda tensors: tensors.update({name: tensors[name][:40].clone()}))
    assert f"{name} is BF16 [40, 96], expected floats [48, 96]" in error_of(folder)


# ---------------------------------------------------------------- slices, progress, others' readers


def test_slices_of_packed_experts(saved):
    """What one rank of an expert- or tensor-parallel run reads."""
    stored = tensors_of(saved / "sharded")
    with CheckpointReader(saved / "sharded") as reader:
        codes, scales = EXPERTS.format(0) + "w2_weight", EXPERTS.format(0) + "w2_weight_scale"
        assert same(reader.read_slice(codes, slice(2, 5)), stored[codes][2:5])
        assert same(reader.read_slice(codes, (slice(2, 5), slice(None), slice(0, 8))), stored[codes][2:5, :, :8])
        assert same(reader.read_slice(scales, (slice(2, 5), slice(48, 96))), stored[scales][2:5, 48:])
        assert reader.bytes_read == 3 * 96 * 16 + 3 * 96 * 8 + 3 * 48 * 2


def test_progress_appears_only_after_two_seconds(saved, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("FORCE_COLOR", "1")  # as if stderr were a terminal
    load(saved / "bf16")
    assert capsys.readouterr().err == ""
    now = iter(range(10**6))
    monkeypatch.setattr(checkpoint.time, "monotonic", lambda: float(next(now)))
    model = load(saved / "bf16")
    assert "reading" in capsys.readouterr().err
    save(model, tmp_path / "x")
    assert "writing" in capsys.readouterr().err


@pytest.mark.skipif(not torch.cuda.is_available(), reason="transformers reads MXFP8 experts on a GPU only")
def test_transformers_reads_mxfp8(tmp_path):
    """Its modules hold the stored bytes; running them takes kernels that it downloads."""
    import transformers

    pytest.importorskip("accelerate")
    save(random_model(replace(config(), vision=None)), tmp_path / "x", experts="mxfp8")
    theirs, report = transformers.Inkling2ForCausalLM.from_pretrained(
        tmp_path / "x", dtype=torch.bfloat16, device_map="cuda", output_loading_info=True
    )
    assert not any(report.values()), report
    ours = load(tmp_path / "x").llm.layers
    for layer, module in enumerate(theirs.model.layers):
        values, scales = module.mlp.experts.gate_up_proj, module.mlp.experts.gate_up_proj_scale_inv
        decoded = mxfp8_dequantize(values.detach().cpu(), scales.detach().view(torch.uint8).cpu())
        gate_up = ours[layer].mlp.experts.w13_weight  # rows g0, u0, g1, ...; theirs are all g, then all u
        assert torch.equal(decoded, torch.cat((gate_up[:, 0::2], gate_up[:, 1::2]), dim=1))
        values, scales = module.mlp.experts.down_proj, module.mlp.experts.down_proj_scale_inv
        decoded = mxfp8_dequantize(values.detach().cpu(), scales.detach().view(torch.uint8).cpu())
        assert torch.equal(decoded, ours[layer].mlp.experts.w2_weight)
        assert module.self_attn.o_proj.linear.weight.dtype == torch.bfloat16


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_gpu_keeps_experts_packed(saved):
    loaded = load(saved / "nvfp4+mxfp8", device="cuda", dtype=torch.bfloat16)
    assert loaded.llm.layers[0].mlp.experts.w13_weight.dtype == torch.uint8
    dense = load(saved / "nvfp4+mxfp8", device="cuda", dtype=torch.bfloat16, experts="dequantize")
    ids = random_ids(2, 11).cuda()
    assert torch.equal(logits(loaded, ids), logits(dense, ids))


def test_package_exports(saved):
    assert ir.load is load
    assert ir.save is save
