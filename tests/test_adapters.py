"""Traces of other implementations: live from `transformers`, and from dumps in a stranger's names and layouts."""

import json

import pytest
import torch
from helpers import random_ids, random_model, relative_rms, unchecked
from test_parity_transformers import CONFIGS, Public, prompt, transformers  # noqa: F401  a fixture
from torch import Tensor

import inkling_ref as ir
from inkling_ref.errors import InputError
from inkling_ref.measure.adapters import recorded
from inkling_ref.measure.adapters import transformers as adapter
from inkling_ref.measure.sections import SECTIONS, order, parse

TOLERANCE = 5e-5  # relative RMS of a section, float32; after eight layers 3e-5 were seen


# --- transformers --------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def public(transformers, tmp_path_factory):  # noqa: F811
    return Public(transformers, tmp_path_factory)


def inputs_of(config: ir.InklingConfig, what: str) -> dict:
    if what == "ragged":  # their rows are padded on the left
        lengths = (37, 5, 1)
        return {"input_ids": [random_ids(n, seed=n, below=config.image_token_id).tolist() for n in lengths]}
    return prompt(config)


@pytest.mark.parametrize("what", ["pictures", "ragged"])
@pytest.mark.parametrize("name", ["small-in-miniature", "full-layer-first", "one-block", "block-of-one"])
def test_every_section_agrees(public, name, what):
    """Prompt and two decoding steps, all sections, shapes, dtypes and padding; ragged rows, or text and pictures."""
    config = CONFIGS[name]
    model = random_model(config, seed=1)
    inputs = inputs_of(config, what)
    theirs = public.load(model)
    with unchecked():  # shapes are checked in the tests of traces
        ours = ir.trace(model, **inputs, decode=2, sections=["all"])
        theirs = adapter.trace(theirs, **inputs, decode=ours.manifest["decoded"], sections=["all"])
    assert theirs.manifest["implementation"].startswith("transformers 5.")
    for key in ("prompt", "decoded", "images", "config", "positions", "dtype"):
        assert theirs.manifest[key] == ours.manifest[key], key
    assert theirs.tensors.keys() == ours.tensors.keys()
    for section in sorted(ours.tensors, key=order):
        a, b = ours.tensors[section], theirs.tensors[section]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), section
        if a.is_floating_point():
            assert relative_rms(b, a) < TOLERANCE, section
        else:
            assert torch.equal(a, b), section


def test_these_configs_have_every_section(public):
    names = {s.name for s in SECTIONS}
    theirs = public.load(random_model(CONFIGS["small-in-miniature"]))
    trace = adapter.trace(theirs, **prompt(CONFIGS["small-in-miniature"]), sections=["all"])
    assert {parse(name).section.name for name in trace.tensors} == names


def test_a_term_that_only_one_side_has_shows_in_its_section(public):
    """The comparison could fail: their sink is switched off in one layer."""
    model = random_model(CONFIGS["one-block"], seed=1)
    theirs = public.load(model)
    theirs.model.layers[1].self_attn.sink_proj.weight.data.zero_()
    ids = random_ids(1, 23)
    a = ir.trace(model, ids, sections=["all"]).tensors
    b = adapter.trace(theirs, ids, sections=["all"]).tensors
    assert next(n for n in sorted(a, key=order) if relative_rms(b[n], a[n]) > TOLERANCE) == "layer.1.attention.sink"


def test_bfloat16(public):
    """Text rounds at the same points: most tokens differ by less than a tenth of a rounding error (2e-3)."""
    config = CONFIGS["small-in-miniature"]
    model = random_model(config, seed=2, dtype=torch.bfloat16)
    ids = random_ids(2, 37, below=config.image_token_id)
    ours = ir.trace(model, ids, layers=[0, 1], sections=["all"])
    theirs = adapter.trace(public.load(model, torch.bfloat16), ids, layers=[0, 1], sections=["all"])
    assert ours.tensors.keys() == theirs.tensors.keys()
    for name, a in ours.tensors.items():
        b = theirs.tensors[name]
        assert (a.dtype, a.shape) == (b.dtype, b.shape), name
        if name.startswith(("layer", "residual", "moe")) and a.is_floating_point():
            a, b = (x.double().flatten(0, 1).flatten(1) for x in (a, b))
            assert ((a - b).norm(dim=1) / a.norm(dim=1).clamp(min=1e-9)).median() < 2e-4, name


def test_hooks_are_taken_off_again(public):
    theirs = public.load(random_model(CONFIGS["one-block"]))
    modeling = __import__("sys").modules[type(theirs).__module__]
    before = modeling.eager_attention_forward
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in theirs.modules()]
    adapter.trace(theirs, random_ids(1, 7), sections=["logits"])
    assert modeling.eager_attention_forward is before
    assert hooks == [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in theirs.modules()]


def test_other_experts_implementations_only_lack_what_they_do_not_show(public):
    model = random_model(CONFIGS["one-block"], seed=1)
    theirs = public.load(model)
    theirs.set_experts_implementation("batched_mm")
    ids = random_ids(2, 23)
    a = ir.trace(model, ids, sections=["all"]).tensors
    b = adapter.trace(theirs, ids, sections=["all"]).tensors
    assert {n.rpartition(".")[2] for n in a.keys() - b.keys()} == {"gate", "up", "activation", "expert_out"}
    assert relative_rms(b["logits"], a["logits"]) < TOLERANCE


def test_another_model():
    with pytest.raises(InputError, match="model: Linear, expected Inkling2ForCausalLM"):
        adapter.trace(torch.nn.Linear(2, 3), [[1]])


# --- A dump in other names and layouts ------------------------------------------------------------------------------

CONFIG = ir.InklingConfig.tiny()
A, M = "layer.{i}.attention.", "moe.{i}."


@pytest.fixture(scope="module")
def ours() -> ir.Trace:
    rows = [random_ids(19, seed=1).tolist(), random_ids(6, seed=2).tolist()]
    return ir.trace(random_model(), rows, decode=2, sections=["all"])


def interleaved(gate: Tensor, up: Tensor) -> Tensor:
    return torch.stack([gate, up], dim=-1).flatten(-2)


def by_group(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Query heads of a key/value head, its key, its value; then the next."""
    q = q.unflatten(2, (k.shape[2], -1))
    return torch.cat([q, k[:, :, :, None], v[:, :, :, None]], dim=3).flatten(2)


# Name in the dump: how it is made from sections, and its rule in the map.
LAYOUTS = {
    "blk.{i}.qkv": (
        lambda q, k, v: torch.cat([q.flatten(2), k.flatten(2), v.flatten(2)], dim=-1),
        {"to": [A + "q_projected", A + "k_projected", A + "v_projected"], "axes": "B T (part d)"},
    ),
    "blk.{i}.grouped": (by_group, {"to": [A + "q", A + "k", A + "v"], "axes": "B T (G part d)"}),
    "blk.{i}.kv": (
        lambda k, v: torch.stack([k, v]),
        {"to": [A + "k_conv", A + "v_conv"], "axes": "part B T G d"},
    ),
    "blk.{i}.ctx_minor": (lambda x: x.transpose(2, 3).flatten(2), {"to": A + "context", "axes": "B T (d H)"}),
    "blk.{i}.sink": (lambda x: x.permute(2, 0, 1), {"to": A + "sink", "axes": "H B T"}),
    "probs-{i}": (lambda x: x.transpose(1, 2), {"to": A + "probabilities", "axes": "B H T S"}),
    "blk.{i}.gate": (lambda x: x.flatten(2) / 8, {"to": A + "gate", "axes": "B T (H d)", "scale": 8}),
    "blk.{i}.inter": (interleaved, {"to": [M + "gate", M + "up"], "axes": "B T k (I part)"}),
    "blk.{i}.out": (lambda x: x, "layer.{i}.out"),
    "flat.{i}": (lambda x: x.flatten(2), {"to": A + "gated", "axes": "B T (H d)"}),
    "final": (lambda x: x.mT, {"to": "output.hidden", "axes": "B D T"}),
    "residual.{i}": (lambda x: x.squeeze(2), {"to": "residual.{i}.mlp.mix", "axes": "B T D"}),
}


def dump(trace: ir.Trace, layouts: dict, folder, change=lambda name, x: x) -> list:
    """Files of a stranger's engine, one a pass."""
    files = []
    for step in range(3):
        kept = {}
        for theirs, (make, rule) in layouts.items():
            targets = [rule] if isinstance(rule, str) else [rule["to"]] if isinstance(rule["to"], str) else rule["to"]
            for layer in range(4) if "{i}" in theirs else [None]:
                names = [t.replace("{i}", str(layer)) for t in targets]
                names = [f"step.{step}.{n}" if step else n for n in names]
                kept[theirs.replace("{i}", str(layer))] = make(
                    *(change(n, trace.tensors[n]) for n in names)
                ).contiguous()
        files.append(folder / f"dump-{step}.safetensors")
        ir.Trace(kept).save(files[-1])
    return files


def test_layouts(tmp_path, ours):
    files = dump(ours, LAYOUTS, tmp_path)
    rules = {"implementation": "stranger 1", "tensors": {name: rule for name, (_, rule) in LAYOUTS.items()}}
    (tmp_path / "map.json").write_text(json.dumps(rules))
    ours.save(tmp_path / "ours.safetensors")
    theirs = recorded.read(files, tmp_path / "map.json", like=tmp_path / "ours.safetensors")
    assert theirs.manifest["implementation"] == "stranger 1"
    assert theirs.manifest["prompt"] == ours.manifest["prompt"]
    assert not theirs.manifest.keys() & {"device", "backend", "versions"}  # a dump does not tell
    sections = {parse(name).section.name for name in theirs.tensors}
    assert len(theirs.tensors) == 3 * (4 * (len(sections) - 1) + 1)
    assert len(sections) == 18
    for name, tensor in theirs.tensors.items():
        assert tensor.dtype == ours.tensors[name].dtype, name
        assert torch.equal(tensor, ours.tensors[name]), name


def test_the_recipe(tmp_path):
    """The map in the documentation, for an engine that dumps one row under these names."""
    text = recorded.__doc__
    rules = json.loads(text[text.index('{"implementation"') : text.index("4. Compare")])
    ours = ir.trace(random_model(), random_ids(1, 13), decode=2, sections=["all"])
    engine = {
        "blk.{i}.qkv": lambda q, k, v: torch.cat([q, k, v], dim=2).flatten(2),
        "blk.{i}.gate_up": interleaved,
        "blk.{i}.attn_probs": lambda p: p.transpose(1, 2),
        "blk.{i}.q_scaled": lambda q: q.transpose(1, 2) / rules["tensors"]["blk.{i}.q_scaled"]["scale"],
        "logits": lambda x: x,
    }
    layouts = {name: (lambda *x, make=make: make(*x)[0], rules["tensors"][name]) for name, make in engine.items()}
    theirs = recorded.read(dump(ours, layouts, tmp_path), rules, like=ours)
    assert len(theirs.tensors) == 3 * (4 * 7 + 1)
    for name, tensor in theirs.tensors.items():
        assert relative_rms(tensor, ours.tensors[name]) < 1e-6, name


def test_experts_in_another_order(tmp_path, ours):
    sections = ["chosen", "weights", "expert_out", "activation"]
    shuffled = torch.tensor([2, 0, 1])
    layouts = {f"{s}.{{i}}": (lambda x: x[:, :, shuffled], f"moe.{{i}}.{s}") for s in sections}
    files = dump(ours, layouts, tmp_path)
    theirs = recorded.read(files, {"tensors": {name: rule for name, (_, rule) in layouts.items()}}, like=ours)
    assert all(torch.equal(tensor, ours.tensors[name]) for name, tensor in theirs.tensors.items())
    assert len(theirs.tensors) == 3 * 4 * 4


def test_padding_on_the_left(tmp_path, ours):
    def left(name: str, x: Tensor) -> Tensor:
        """Row 1 has 6 of 19 tokens."""
        x = x.clone()
        if not name.startswith("step."):
            x[1] = x[1].roll(13, 0)
            x[1, :13] = 9.0
        if name.endswith("probabilities"):
            x[1] = x[1].roll(13, -1)
        return x

    layouts = {"p.{i}": LAYOUTS["probs-{i}"], "o.{i}": LAYOUTS["blk.{i}.out"], "qkv.{i}": LAYOUTS["blk.{i}.qkv"]}
    files = dump(ours, layouts, tmp_path, left)
    rules = {"padding": "left", "tensors": {name: rule for name, (_, rule) in layouts.items()}}
    theirs = recorded.read(files, rules, like=ours)
    assert len(theirs.tensors) == 3 * 4 * 5
    assert all(torch.equal(tensor, ours.tensors[name]) for name, tensor in theirs.tensors.items())


def test_a_dump_without_rows(tmp_path):
    ours = ir.trace(random_model(), random_ids(1, 11), sections=["attention.q", "logits"])
    dumped = {
        "q.2": ours.tensors["layer.2.attention.q"][0].transpose(0, 1),
        "lm": ours.tensors["logits"][0],
        "x": torch.ones(3),
    }
    ir.Trace({name: x.contiguous() for name, x in dumped.items()}).save(tmp_path / "d.safetensors")
    rules = {"tensors": {"q.{i}": {"to": A + "q", "axes": "H T d"}, "lm": {"to": "logits", "axes": "T V"}}}
    with pytest.warns(UserWarning, match="does not name ignored: x"):
        theirs = recorded.read(tmp_path / "d.safetensors", rules, like=ours)
    assert theirs.tensors.keys() == {"layer.2.attention.q", "logits"}
    assert all(torch.equal(tensor, ours.tensors[name]) for name, tensor in theirs.tensors.items())


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        ({"to": A + "q", "axes": "B T d"}, r"blk.2: \[2, 19, 60\], expected 'B T d' with d 10"),
        ({"to": A + "q", "axes": "B T H d"}, r"blk.2: \[2, 19, 60\], which is not 'B T H d'"),
        ({"to": A + "q", "axes": "B T (H H)"}, r"which is not 'B T \(H H\)'"),
        ({"to": A + "q", "axes": "T B (H d)"}, r"layer.2.attention.q: \[19, 2, 6, 10\], expected 2 rows of 19 tokens"),
        ({"to": [A + "k", A + "v"], "axes": "B T (G d)"}, "several sections, expected an axis part"),
        ({"to": [A + "k", A + "v"], "axes": "B T (part d G)"}, None),
        ({"to": A + "qq", "axes": "B T (H d)"}, "section 'layer.2.attention.qq': unknown"),
        ({"axes": "none to"}, r"map: blk.2 is \{'axes': 'none to'\}, expected to: a section's name"),
        ({"to": [], "axes": "empty"}, "expected to: a section's name, or a list of them"),
        ({"to": [5], "axes": "number"}, "expected to: a section's name, or a list of them"),
        ({"to": A + "q", "axes": 5}, "map: blk.2 has axes 5 and scale None, expected text and a number"),
        ({"to": A + "q", "axes": "B T (H d)", "scale": "2"}, "scale '2', expected text and a number"),
    ],
    ids=lambda v: str(v.get("axes")) if isinstance(v, dict) else "",
)
def test_rules_that_do_not_fit(tmp_path, ours, rule, message):
    x = ours.tensors["layer.2.attention.q"].flatten(2)  # H 6, d 10; G 3
    ir.Trace({"blk.2": x}).save(tmp_path / "d.safetensors")
    rules = {"tensors": {"blk.{i}": rule}}
    if message is None:
        assert recorded.read(tmp_path / "d.safetensors", rules, like=ours).tensors.keys() == {
            "layer.2.attention.k", "layer.2.attention.v",
        }  # fmt: skip
        return
    with pytest.raises(InputError, match=message):
        recorded.read(tmp_path / "d.safetensors", rules, like=ours)


@pytest.mark.parametrize("rules", [{}, {"tensors": {}}, {"tensors": {"a": "logits"}, "padding": "top"}], ids=str)
def test_a_map_that_is_none(tmp_path, ours, rules):
    with pytest.raises(InputError, match="map: expected tensors"):
        recorded.read(tmp_path / "d.safetensors", rules, like=ours)
