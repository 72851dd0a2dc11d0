"""Golden sets: the shipped one is whole and passes; made again it is the same; its corners are really there."""

import hashlib
import json
from pathlib import Path

import pytest
import torch
from helpers import relative_rms, unchecked
from torch import Tensor

import inkling_ref as ir
from inkling_ref import cli
from inkling_ref.errors import InputError
from inkling_ref.measure import make_golden as golden
from inkling_ref.measure.sections import SECTIONS, parse
from inkling_ref.measure.trace import Trace
from inkling_ref.tensor_files import CheckpointReader
from inkling_ref.vision import process_images

SHIPPED = Path(__file__).parent / "validation"
INDEX = json.loads((SHIPPED / "golden.json").read_text())
LIMIT = 3 * 2**20  # bytes of a whole set: it is in the repository
# The same code on another machine: sums in another order. In bfloat16 that may move a rounding.
SAME = {"float32": 2e-5, "bfloat16": 0.05}


def expected(name: str) -> Trace:
    return Trace.read(SHIPPED / INDEX["cases"][name]["trace"])


def run(name: str, trace: Trace, dtype: str, change=lambda model: None) -> Trace:
    """What a user does: load the checkpoint, run the manifest's tokens and the pictures."""
    about = trace.manifest
    model = ir.load(SHIPPED / "checkpoints" / about["checkpoint"], dtype=getattr(torch, dtype))
    model.quantize_activations("activations" in about)
    change(model)
    images = {}
    if about.get("pictures"):
        opened = [ir.load_image(SHIPPED / path) for path in about["pictures"]]
        images = dict(zip(("pixel_values", "image_grid_thw"), process_images(opened, model.config.vision), strict=True))
    decode = about["decoded"] if any(about["decoded"]) else 0
    names = sorted({parse(n).section.name.replace("{i}", "*") for n in trace.tensors})
    return ir.trace(model, about["prompt"], **images, decode=decode, sections=names)


def errors(actual: Trace, expected: Trace) -> dict[str, float]:
    assert actual.tensors.keys() == expected.tensors.keys()

    def error(a: Tensor, b: Tensor) -> float:
        return relative_rms(a, b) if b.is_floating_point() else float((a != b).any()) * 1e9

    return {name: error(actual.tensors[name], b) for name, b in expected.tensors.items()}


# --- The shipped set ------------------------------------------------------------------------------------------------


def test_the_shipped_set_is_whole():
    files = {p.relative_to(SHIPPED).as_posix(): p for p in SHIPPED.rglob("*") if p.is_file()}
    assert INDEX["version"] == golden.VERSION
    assert sum(path.stat().st_size for path in files.values()) <= LIMIT
    assert files.keys() == {*INDEX["sha256"], "golden.json", "README.md"}
    for name, digest in INDEX["sha256"].items():
        assert hashlib.sha256(files[name].read_bytes()).hexdigest() == digest, name


def test_the_shipped_set_has_every_case_and_every_section():
    assert list(INDEX["cases"]) == list(golden.CASES)
    assert {parse(n).section.name for case in INDEX["cases"] for n in expected(case).tensors} == {
        s.name for s in SECTIONS
    }
    text = (SHIPPED / "README.md").read_text()
    assert all(f"| {name} |" in text for name in golden.CASES)
    assert all(f"| `{s.name}` |" in text for s in SECTIONS)


@pytest.mark.parametrize("name", golden.CASES)
def test_the_reference_passes(name):
    trace, case = expected(name), INDEX["cases"][name]
    found = errors(run(name, trace, case["dtype"]), trace)
    assert max(found.values()) < SAME[case["dtype"]] < case["tolerance"], max(found, key=found.get)


@pytest.mark.parametrize("name", golden.CASES)
def test_the_tolerance_leaves_room_for_another_rounding(name):
    """A float64 model passes; with less than a hundredth of the room, the tolerance would say nothing."""
    trace, case = expected(name), INDEX["cases"][name]
    found = max(errors(run(name, trace, "float64"), trace).values())
    assert found < case["tolerance"]
    assert found > case["tolerance"] / 300 or name == "nvfp4-activations"


@pytest.mark.parametrize("name", golden.CASES)
def test_a_wrong_model_fails(name):
    """One bit of arithmetic in one layer: a sink of twice the weight."""

    def change(model):
        for layer in model.llm.layers[:1]:
            layer.attn.attn_sink_proj.weight.data.mul_(2)

    trace, case = expected(name), INDEX["cases"][name]
    assert max(errors(run(name, trace, case["dtype"], change), trace).values()) > 1.5 * case["tolerance"]


# --- Its corners ----------------------------------------------------------------------------------------------------


def test_formats():
    def stored(checkpoint: str, name: str) -> torch.dtype:
        with CheckpointReader(SHIPPED / "checkpoints" / checkpoint) as reader:
            return reader.dtype(f"model.llm.{name}")

    experts = "layers.{}.mlp.experts.w13_weight"
    assert stored("dense", experts.format(0)) == torch.float32
    assert stored("released", experts.format(0)) == torch.bfloat16
    assert stored("released", "layers.0.mlp.gate.weight") == torch.float32
    assert [stored("nvfp4", experts.format(i)) for i in range(3)] == [torch.uint8, torch.uint8, torch.float8_e4m3fn]
    assert stored("mxfp8", experts.format(0)) == torch.float8_e4m3fn
    assert len(list((SHIPPED / "checkpoints" / "released").glob("model-*.safetensors"))) > 2


def test_edges_of_window_and_extent():
    manifest = expected("edges").manifest
    text = ir.InklingConfig.from_dict(manifest["config"]).text
    W, X = text.sliding_window_size, text.rel_extent
    assert [len(row) for row in manifest["prompt"]] == [1, W - 1, W, W + 1, X - 1, X, X + 1]
    # The longest rows reach past both: a key leaves the window, and one key's bias is past the extent.
    p = expected("edges").tensors["layer.0.attention.probabilities"]
    assert not p[3, W, :, 0].any()
    assert p[3, W, :, 1].all()
    bias = expected("everything").tensors["layer.2.attention.bias"][0]
    assert not bias[X, :, 0].any()
    assert bias[X - 1, :, 0].all()
    assert not bias[0, :, 1:].any()


def test_padded_rows_decode_from_their_own_ends():
    trace = expected("padded")
    assert [len(row) for row in trace.manifest["prompt"]] == [13, 2, 7]
    assert not trace.tensors["layer.1.out"][1, 2:].any()
    assert trace.tensors["step.1.layer.2.attention.probabilities"].shape[-1] == 14
    assert trace.tensors["step.1.layer.2.attention.probabilities"][1, 0, :, :3].all()
    assert not trace.tensors["step.1.layer.2.attention.probabilities"][1, 0, :, 3:].any()


def test_pictures():
    trace = expected("pictures")
    assert trace.manifest["images"] == [[1, 2, 3], [1, 1, 1]]
    assert [ir.load_image(SHIPPED / path).mode for path in trace.manifest["pictures"]] == ["RGB", "RGBA"]
    image = trace.manifest["config"]["image_token_id"]
    places = [n for n, token in enumerate(trace.manifest["prompt"][0]) if token == image]
    assert places == [1, 2, 3, 4, 5, 6, 8]
    assert torch.equal(trace.tensors["embedding.out"][0, places], trace.tensors["vision.features"])


def test_rejection():
    """Reading the draft and taking it back changes nothing; not taking it back does."""
    trace = expected("rejection")
    rejection, prompt = trace.manifest["rejection"], trace.manifest["prompt"][0]
    assert prompt[rejection["prompt"] :] == rejection["draft"][: rejection["accepted"]]
    model = ir.load(SHIPPED / "checkpoints" / "dense")
    for kept, equal in ((rejection["accepted"], True), (rejection["accepted"] + 1, False)):
        cache = model.new_cache()
        with torch.inference_mode():
            model(torch.tensor([prompt[: rejection["prompt"]]]), cache=cache)
            model(torch.tensor([rejection["draft"]]), cache=cache)
            cache.crop(rejection["prompt"] + kept)
            logits = model(torch.tensor([trace.manifest["decoded"][0][:1]]), cache=cache).logits
        assert (relative_rms(logits, trace.tensors["step.1.logits"]) < 1e-5) is equal


def test_neutral():
    trace = expected("neutral")
    assert (trace.tensors["moe.0.chosen"] == torch.tensor([0, 1, 2])).all()
    assert trace.tensors["output.weights"].unique().numel() == 1


@pytest.mark.parametrize("name", golden.CASES)
def test_no_choice_is_a_near_tie(name):
    trace = expected(name)
    margin = golden.least_margin(trace)
    assert margin >= golden.CASES[name].margin
    assert margin < 1  # scores were recorded


# --- Making one -----------------------------------------------------------------------------------------------------


def test_made_again_it_is_the_same(tmp_path):
    with unchecked():  # the other tests run the same cases
        size = golden.make_golden(tmp_path / "again", cases=["pictures", "rejection", "mxfp8", "neutral"], seed=0)
    again = json.loads((tmp_path / "again" / "golden.json").read_text())
    assert 0 < size < LIMIT
    assert [p.name for p in tmp_path.iterdir()] == ["again"]
    for name in ("mxfp8", "neutral"):  # the others have fewer cases here, and an earlier seed may do
        assert again["checkpoints"][name] == INDEX["checkpoints"][name]
        folder = Path("checkpoints") / name
        with CheckpointReader(tmp_path / "again" / folder) as new, CheckpointReader(SHIPPED / folder) as old:
            assert new.names == old.names
            for tensor in new.names:
                assert torch.equal(new.read(tensor).view(torch.uint8), old.read(tensor).view(torch.uint8)), tensor
    for name in ("mxfp8", "neutral"):
        found = errors(Trace.read(tmp_path / "again" / again["cases"][name]["trace"]), expected(name))
        assert max(found.values()) < SAME["float32"]
    assert {n: d for n, d in again["sha256"].items() if n.startswith("pictures/")}.items() <= INDEX["sha256"].items()


def test_another_seed_gives_other_weights(tmp_path):
    golden.make_golden(tmp_path / "other", cases=["neutral"], seed=77)
    index = json.loads((tmp_path / "other" / "golden.json").read_text())
    assert index["checkpoints"]["neutral"]["seed"] == 77
    assert list(index["cases"]) == ["neutral"]
    path = "checkpoints/neutral/model.safetensors"
    assert index["sha256"][path] != INDEX["sha256"][path]


def test_a_set_that_cannot_be_made_leaves_nothing(tmp_path, monkeypatch):
    with pytest.raises(InputError, match=r"case 'everthing': expected some of everything, edges"):
        golden.make_golden(tmp_path / "set", cases=["everthing"])
    monkeypatch.setattr(golden, "least_margin", lambda trace: -1.0)
    monkeypatch.setattr(golden, "_TRIES", 2)
    with pytest.raises(InputError, match="checkpoint 'neutral': near ties with every seed from 3 to 4"):
        golden.make_golden(tmp_path / "set", cases=["neutral"], seed=3)
    assert not list(tmp_path.iterdir())
    (tmp_path / "set").mkdir()
    with pytest.raises(InputError, match="is there already"):
        golden.make_golden(tmp_path / "set")


def test_the_command(tmp_path, capsys):
    assert cli.main(["make-golden", str(tmp_path / "set"), "--case", "neutral"]) == 0
    captured = capsys.readouterr()
    assert captured.out == ""
    assert "1 cases, " in captured.err
    assert (tmp_path / "set" / "traces" / "neutral.safetensors").is_file()
    for arguments in ([str(tmp_path / "set")], [str(tmp_path / "no" / "set")], [str(tmp_path / "b"), "--case", "x"]):
        assert cli.main(["make-golden", *arguments]) == 2
        assert capsys.readouterr().err.count("\n") == 1
