"""Traces: every section is there, is what the model computed, and follows from the sections before it."""

import itertools
import json
import math
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from helpers import IMAGE, logits, random_ids, random_model, relative_rms, unchecked
from torch import Tensor

import inkling_ref as ir
from inkling_ref import attention, cli, residual
from inkling_ref.backends import Backend
from inkling_ref.errors import InputError
from inkling_ref.measure import trace as tracing
from inkling_ref.measure.replay import replay
from inkling_ref.measure.sections import SECTIONS, equations, inputs_of, name_of, order, parse, source

CONFIG = ir.InklingConfig.tiny()
PICTURE = Path(__file__).parents[1] / "examples" / "shapes.png"
DTYPES = [torch.float32, torch.bfloat16, torch.float64]
# How far the replay of a section may be from the trace: sums in another order, and for 16 bits one rounding of few.
REPLAY = {torch.float32: 1e-6, torch.bfloat16: 2e-3, torch.float64: 1e-14}


def pictures() -> dict[str, Tensor]:
    """Two, of 2 x 3 and 1 x 1 tiles."""
    side, generator = CONFIG.vision.tile_size, torch.Generator().manual_seed(5)
    sizes = [(2 * side, 3 * side - 1), (side - 2, side)]
    levels = [torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8).numpy() for size in sizes]
    pixel_values, image_grid_thw = ir.process_images(levels, CONFIG.vision)
    return {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}


def rows() -> list[list[int]]:
    """29 tokens, past window (8) and extent (12), and 5; both with a picture."""
    first, second = random_ids(2, 29, seed=3).tolist()
    return [first[:2] + [IMAGE] * 6 + first[8:], [IMAGE, *second[:4]]]


@pytest.fixture(scope="module", params=DTYPES, ids=["float32", "bfloat16", "float64"])
def recorded(request):
    """A model and a trace of all its sections: two rows with pictures, then three decoding steps."""
    model = random_model(dtype=request.param)
    return model, ir.trace(model, rows(), **pictures(), decode=3, sections=["all"])


# --- The table -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: s.name)
def test_row_of_the_table(section):
    """Its equations and its line of source exist, once; its inputs are rows that come before it."""
    assert all(equations(section))
    found = source(section)
    assert found.file.startswith("inkling_ref/")
    names = [s.name for s in SECTIONS]
    for pattern in itertools.chain(*(p.removeprefix("..").removesuffix("?").split("|") for p in section.inputs)):
        for number in ("{<i}", "{i-1}", "{last}", "{*}"):
            pattern = pattern.replace(number, "{i}")
        earlier_layer = pattern in ("layer.{i}.out", "vision.{i}.out")
        assert pattern in names
        assert earlier_layer or names.index(pattern) < names.index(section.name)


def test_order_is_that_of_the_data():
    expected = [
        "vision.pixels", "vision.0.out", "vision.1.attention.q", "vision.features", "embedding.out",
        "layer.0.attention.q", "moe.0.scores", "layer.0.out", "residual.2.attn.weights", "layer.2.attention.k",
        "layer.10.attention.q", "output.mix", "logits", "step.1.embedding.rows", "step.2.layer.0.out",
        "step.10.layer.0.attention.q",
    ]  # fmt: skip
    assert sorted(sorted(expected), key=order) == expected


@pytest.mark.parametrize(
    "name", ["layer.1.attention.qq", "layer.attention.q", "step.0.logits", "logits.1", "layer.x.out", ""]
)
def test_a_name_that_is_none(name):
    with pytest.raises(InputError, match=r"section .*: unknown"):
        parse(name)


def test_inputs():
    names = {name_of(s, layer, step) for s in SECTIONS for layer in range(4) for step in range(3)}

    def inputs(name: str, recorded: set[str]) -> list[str]:
        return inputs_of(name, recorded)[0]

    assert inputs("layer.2.attention.q_projected", {"layer.1.out", "layer.2.attention.input", "logits"}) == [
        "layer.2.attention.input"
    ]
    assert inputs("layer.2.attention.q_projected", {"embedding.out", "layer.0.out", "layer.1.out"}) == [
        "embedding.out", "layer.0.out", "layer.1.out",
    ]  # fmt: skip
    assert inputs("step.2.layer.1.conv_attn", names) == [
        "layer.1.attention.out", "step.1.layer.1.attention.out", "step.2.layer.1.attention.out",
    ]  # fmt: skip
    assert inputs("vision.merged", names) == ["vision.3.out"]
    assert inputs("logits", {"moe.3.out"}) == ["moe.3.out"]
    assert inputs("embedding.rows", names) == []


def test_what_lies_between():
    """Of two traces one lacks a section: its inputs stand for it, and it may be to blame."""
    names = {"layer.1.attention.gated", "layer.1.attention.out", "layer.1.attention.gate"}
    compared = names - {"layer.1.attention.gated"}
    found, between = inputs_of("layer.1.attention.out", names, compared)
    assert found == ["layer.1.attention.gate"]
    assert "layer.1.attention.gated" in between
    assert not set(between) & compared


# --- What is recorded ----------------------------------------------------------------------------------------------


def test_a_trace_has_every_section_and_no_other_name(recorded):
    _, trace = recorded
    assert {parse(name).section.name for name in trace.tensors} == {s.name for s in SECTIONS}
    steps = {parse(name).step for name in trace.tensors}
    assert steps == {0, 1, 2, 3}
    shapes = {parse(name).section.name: (parse(name), t) for name, t in trace.tensors.items() if parse(name).step == 0}
    for place, tensor in shapes.values():
        letters = {"B": 2, "T": 29, "S": 29, "D": CONFIG.text.hidden_size, "E": 7, "k": 3, "I": 48, "V": 40, "K": 4}
        if place.layer is not None:
            a = CONFIG.text.attention(place.layer)
            letters |= {"H": a.num_heads, "G": a.num_key_value_heads, "d": a.head_dim, "R": CONFIG.text.d_rel}
        axes = place.section.shape.split()
        assert tensor.dim() == len(axes), place
        if not place.section.name.startswith("vision."):
            assert all(n == letters.get(axis, n) for n, axis in zip(tensor.shape, axes, strict=True)), place


def test_every_section_follows_from_those_before(recorded):
    """Its replay from recorded inputs is what was recorded: text and pictures, prompt and decoding, padded rows."""
    model, trace = recorded
    for name, tensor in trace.tensors.items():
        if name == "vision.pixels":
            continue
        again = replay(model, trace, name)
        assert (again.dtype, again.shape) == (tensor.dtype, tensor.shape), name
        if tensor.is_floating_point():
            assert relative_rms(again, tensor) <= REPLAY[model.dtype], name
        else:
            assert torch.equal(again, tensor), name


def test_the_whole_replays_from_tokens_and_pixels_alone(recorded):
    """Inputs that were not recorded are replayed themselves, through all layers and earlier steps."""
    model, trace = recorded
    bare = replace(trace, tensors={"vision.pixels": trace.tensors["vision.pixels"]})
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}[model.dtype]
    for name in ("layer.1.attention.gated", "step.1.layer.2.attention.probabilities"):
        assert relative_rms(replay(model, bare, name), trace.tensors[name]) < tolerance


def test_logits_are_those_of_the_model(recorded):
    model, trace = recorded
    prompt, decoded = rows(), trace.manifest["decoded"]
    for row, (ids, new) in enumerate(zip(prompt, decoded, strict=True)):
        assert new[0] == trace.tensors["logits"][row, len(ids) - 1].argmax()
        features = model.image_features(**pictures())
        features = features[:6] if row == 0 else features[6:]
        alone = logits(model, torch.tensor([ids + new]), image_features=features)[0]
        pieces = [
            trace.tensors["logits"][row, : len(ids)],
            *(trace.tensors[f"step.{n}.logits"][row] for n in (1, 2, 3)),
        ]
        tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float64: 1e-12}[model.dtype]
        assert relative_rms(torch.cat(pieces), alone) < tolerance
        assert not trace.tensors["logits"][row, len(ids) :].any()  # padding


def test_attention_written_out(recorded):
    """Probabilities and context, which no operation returns, against the equations on recorded operands."""
    model, trace = recorded
    if model.dtype != torch.float64:
        return  # the equations do not say where to round
    for layer, step in itertools.product(range(4), range(4)):
        a = CONFIG.text.attention(layer)
        get = lambda x, step=step, layer=layer: trace.tensors[name_of(f"layer.{{i}}.attention.{x}", layer, step)]  # noqa: E731
        profiles = model.llm.layers[layer].attn.rel_logits_proj.proj
        for row, prompt in enumerate(rows()):
            T, S = (len(prompt), len(prompt)) if step == 0 else (1, len(prompt) + step)
            k, v = (
                torch.cat([get(x, s)[row, : len(prompt) if s == 0 else 1] for s in range(step + 1)]) for x in ("k", "v")
            )
            for t, h in itertools.product(range(T), range(a.num_heads)):
                g, position = h * a.num_key_value_heads // a.num_heads, S - T + t
                score = get("q")[row, t, h] @ k[:, g].T / math.sqrt(a.head_dim)
                for s in range(S):
                    distance = position - s
                    bias = get("r")[row, t, h] @ profiles[:, distance] if 0 <= distance < a.extent else 0.0
                    assert abs(float(get("bias")[row, t, h, s] - bias)) < 1e-12
                    score[s] += bias
                    if distance < 0 or distance >= (a.window or S):
                        score[s] = -math.inf
                p = torch.cat([score, get("sink")[row, t, h, None]]).softmax(0)[:-1]
                assert relative_rms(get("probabilities")[row, t, h, :S], p) < 1e-13
                assert relative_rms(get("context")[row, t, h], p @ v[:, g]) < 1e-13


def test_experts_and_mixtures_written_out(recorded):
    model, trace = recorded
    for layer in range(4):
        moe = {x: trace.tensors[f"moe.{layer}.{x}"] for x in ("chosen", "weights", "biased", "expert_out", "out")}
        total = (residual.wide(moe["expert_out"]) * moe["weights"][..., None]).sum(2).to(model.dtype)
        assert relative_rms(moe["out"], total) < REPLAY[model.dtype]
        chosen = moe["chosen"]
        assert (chosen[..., 1:] > chosen[..., :-1])[0].all()  # row 0 has no padding
        best = moe["biased"].topk(3).indices.sort(dim=-1).values
        assert torch.equal(best[0], chosen[0])
        weights = trace.tensors[f"residual.{layer}.mlp.weights"][0]
        assert (weights.sum(-1) - 1).abs().max() < 1e-6
        # Layer 1's blocks: the embedding; layer 2 and 3 also what layer 1 left.
        sources = [trace.tensors["embedding.out"]] + ([trace.tensors["layer.1.out"]] if layer >= 2 else [])
        sources = torch.stack([*map(residual.wide, sources), trace.tensors[f"layer.{layer}.after_attention"]], dim=2)
        mixed = weights.to(sources.dtype) @ residual.rms(sources, 1e-6)[0]
        assert relative_rms(trace.tensors[f"residual.{layer}.mlp.mix"][0], mixed) < 1e-6


def test_a_row_gives_what_it_gives_alone(recorded):
    """Padding, other rows and pictures change nothing; the mask may stand on the left."""
    model, trace = recorded
    images = pictures()
    alone = ir.trace(
        model, [rows()[1]], images["pixel_values"][6:], images["image_grid_thw"][1:],
        decode=[trace.manifest["decoded"][1]], sections=["all"],
    )  # fmt: skip
    padded = [rows()[0], [0] * 24 + rows()[1]]
    mask = [[1] * 29, [0] * 24 + [1] * 5]
    left = ir.trace(model, padded, **images, attention_mask=mask, decode=3, sections=["all"])
    tolerance = {torch.float32: 2e-5, torch.bfloat16: 0.1, torch.float64: 1e-12}[model.dtype]
    for name, tensor in trace.tensors.items():
        if name.startswith("vision."):
            continue
        assert torch.equal(left.tensors[name], tensor), name  # the same call, in the end
        one = alone.tensors[name][0]
        row = tensor[1, : one.shape[0]]
        if name.rpartition(".")[2] in ("bias", "probabilities"):
            row = row[..., : one.shape[-1]]
        if not tensor.is_floating_point():
            assert model.dtype == torch.bfloat16 or torch.equal(row, one), name
        elif model.dtype != torch.bfloat16:  # in 16 bits another expert may be chosen
            assert relative_rms(row, one) < tolerance, name


@pytest.mark.parametrize("quantised_activations", [False, True], ids=["weights", "activations"])
def test_packed_experts(tmp_path, quantised_activations):
    """NVFP4 and MXFP8 that stay packed, and fake-quantised activations, show as the decoded ones do."""
    text = replace(CONFIG.text, moe_intermediate_size=64)
    ir.save(random_model(replace(CONFIG, text=text)), tmp_path / "model", experts="nvfp4+mxfp8")
    traces = []
    for experts in ("packed", "dequantize"):
        model = ir.load(tmp_path / "model", experts=experts).quantize_activations(quantised_activations)
        traces.append(ir.trace(model, random_ids(1, 9), sections=["all"]))
        for section in ("gate", "activation", "expert_out", "out"):
            again = replay(model, traces[-1], f"moe.3.{section}")
            assert relative_rms(again, traces[-1].tensors[f"moe.3.{section}"]) < 1e-6
    packed, decoded = traces
    assert all(torch.equal(packed.tensors[name], tensor) for name, tensor in decoded.tensors.items())


# --- From outside --------------------------------------------------------------------------------------------------


def test_a_trace_leaves_nothing_behind():
    model = random_model()
    ids = random_ids(2, 13)
    before = logits(model, ids)
    operations = [module.ops for module in model.modules() if hasattr(module, "ops")]
    trace = ir.trace(model, ids, decode=1, sections=["all"])
    assert [module.ops for module in model.modules() if hasattr(module, "ops")] == operations
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    assert torch.equal(before, logits(model, ids))
    assert torch.equal(before, trace.tensors["logits"])


def test_a_trace_that_fails_leaves_nothing_behind():
    model = random_model()
    with pytest.raises(InputError, match="image tokens"):
        ir.trace(model, [[1, IMAGE, 2]])
    assert all(m.ops is model.backend for m in model.modules() if hasattr(m, "ops"))
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())


def first_difference(a: ir.Trace, b: ir.Trace) -> str:
    names = sorted(a.tensors, key=order)
    return next(n for n in names if not torch.equal(a.tensors[n], b.tensors[n]))


def test_a_changed_operation_shows_where_it_changed():
    """What an operation keeps to itself is asked from that operation, not from the reference."""

    def twice_the_sink(q, k, v, r, profiles, sink, *others, **named):
        return attention.attend(q, k, v, r, profiles, sink + math.log(2), *others, **named)

    def not_normalised(sources, queries, norms, eps, dtype):
        if queries is None:
            return residual.mix_and_norm(sources, queries, norms, eps, dtype)
        queries = queries.view(-1, queries.shape[-1])
        mixed = (tracing.mixture_weights(sources, queries) @ sources).unbind(2)
        return [residual.rms_norm(m, w, eps).to(dtype) for m, w in zip(mixed, norms, strict=True)]

    healthy = random_model()
    ids = random_ids(1, 21)
    reference = ir.trace(healthy, ids, sections=["all"])
    for operation, expected in [
        ({"attend": twice_the_sink}, "layer.0.attention.probabilities"),
        ({"mix_and_norm": not_normalised}, "residual.0.mlp.mix"),
    ]:
        faulty = random_model(backend=Backend(**operation))
        assert first_difference(reference, ir.trace(faulty, ids, sections=["all"])) == expected


def test_kernels_show_what_they_compute():
    """Probabilities, mixtures and gates are asked from the kernels themselves; every section agrees."""
    kernels = pytest.importorskip("inkling_ref.kernels", reason="needs Triton")
    from inkling_ref.kernels.backend import triton_backend

    if not (kernels.INTERPRETED or torch.cuda.is_available()):
        pytest.skip("Triton without TRITON_INTERPRET=1, and no GPU")
    device = "cpu" if kernels.INTERPRETED else "cuda"
    text = replace(CONFIG.text, num_hidden_layers=2, layer_types=CONFIG.text.layer_types[2:])
    config, ids = replace(CONFIG, vision=None, text=text), random_ids(1, 5)
    reference = ir.trace(random_model(config).to(device), ids, decode=1, sections=["all"])
    model = random_model(config, backend=triton_backend()).to(device)
    trace = ir.trace(model, ids, decode=reference.manifest["decoded"], sections=["all"])
    assert trace.manifest["backend"]["attend"].startswith("inkling_ref.kernels.")
    assert trace.tensors.keys() == reference.tensors.keys()
    for name, tensor in reference.tensors.items():
        if tensor.is_floating_point():
            assert relative_rms(trace.tensors[name], tensor) < 1e-5, name
        else:
            assert torch.equal(trace.tensors[name], tensor), name


def test_a_changed_function_shows_where_it_changed(monkeypatch):
    model, ids = random_model(), random_ids(1, 21)
    reference = ir.trace(model, ids, sections=["all"])
    real = attention.relative_bias
    monkeypatch.setattr(
        attention, "relative_bias", lambda r, p, distance: real(r, p, distance.clamp(max=p.shape[1] - 1))
    )
    assert first_difference(reference, ir.trace(model, ids, sections=["all"])) == "layer.3.attention.bias"


# --- Choosing ------------------------------------------------------------------------------------------------------


def test_the_usual_sections_are_those_not_on_request():
    trace = ir.trace(random_model(), random_ids(1, 5))
    assert {parse(n).section.name for n in trace.tensors} == {
        s.name for s in SECTIONS if not s.on_request and not s.name.startswith("vision.")
    }


@pytest.mark.parametrize(
    ("sections", "layers", "expected"),
    [
        (["logits"], None, {"logits"}),
        (["attention.q"], [1, 3], {"layer.1.attention.q", "layer.3.attention.q"}),
        (["moe.2.*t"], None, {"moe.2.input", "moe.2.out", "moe.2.expert_out"}),
        (["layer.*.attention.prob*"], [0], {"layer.0.attention.probabilities"}),
        (["output.hidden", "layer.2.out"], [2], {"output.hidden", "layer.2.out"}),
    ],
    ids=["one", "beginning left out", "of one layer", "pattern", "layers bind those of the text model"],
)
def test_sections_and_layers(sections, layers, expected):
    trace = ir.trace(random_model(), random_ids(1, 5), sections=sections, layers=layers)
    assert set(trace.tensors) == expected


def test_a_plus_adds_to_the_usual_sections():
    usual = ir.trace(random_model(), random_ids(1, 5))
    more = ir.trace(random_model(), random_ids(1, 5), sections=["+probabilities"])
    assert set(more.tensors) - set(usual.tensors) == {f"layer.{i}.attention.probabilities" for i in range(4)}


def test_positions():
    whole = ir.trace(random_model(), random_ids(2, 17), decode=1, sections=["all"])
    some = ir.trace(random_model(), random_ids(2, 17), decode=1, sections=["all"], positions=[-1, 0, 7, 0])
    assert some.manifest["positions"] == [0, 7, 16]
    for name, tensor in whole.tensors.items():
        kept = tensor if name.startswith("step.") else tensor[:, [0, 7, 16]]
        assert torch.equal(some.tensors[name], kept), name
    model = random_model()
    for name in some.tensors:
        if name.endswith(("bias", "probabilities", "context", "gated", "_conv", "conv_attn", "conv_mlp")):
            with pytest.raises(InputError, match="some positions only"):
                replay(model, some, name)
        else:
            again = replay(model, some, name)
            equal = again == some.tensors[name] if not again.is_floating_point() else None
            assert equal.all() if equal is not None else relative_rms(again, some.tensors[name]) < 1e-6, name


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"sections": ["attention.qq"]}, "sections: 'attention.qq' fits no section"),
        ({"layers": [4]}, r"layers: \[4\], expected numbers from 0 to 3"),
        ({"positions": [5]}, r"positions: \[5\], expected some of -5 to 4"),
        ({"positions": []}, r"positions: \[\]"),
        ({"decode": -1}, "decode: -1 tokens after 5, expected"),
        ({"decode": 4092}, "at most 4096 together"),
        ({"decode": [[1], [2]]}, "decode: rows of"),
        ({"decode": [[77]]}, "decode: row 0, column 0 is 77, expected"),
        ({"pixel_values": torch.zeros(2, 8, 8, 3)}, "image_grid_thw: missing"),
        ({"image_grid_thw": torch.ones(1, 3, dtype=torch.long)}, "pixel_values: missing"),
    ],
    ids=lambda v: next(iter(v)) if isinstance(v, dict) else "",
)
def test_arguments_that_cannot_be_used(arguments, message):
    with pytest.raises(InputError, match=message):
        ir.trace(random_model(), random_ids(1, 5), **arguments)


# --- Files ---------------------------------------------------------------------------------------------------------


def test_a_file_keeps_everything(tmp_path, recorded):
    _, trace = recorded
    trace.save(tmp_path / "trace.safetensors")
    again = ir.Trace.read(tmp_path / "trace.safetensors")
    assert again.manifest == trace.manifest
    assert again.tensors.keys() == trace.tensors.keys()
    for name, tensor in trace.tensors.items():
        assert again.tensors[name].dtype == tensor.dtype, name
        assert torch.equal(again.tensors[name], tensor), name
    assert [p.name for p in tmp_path.iterdir()] == ["trace.safetensors"]
    config = ir.InklingConfig.from_dict(again.manifest["config"])
    assert config == CONFIG


def test_writing_that_fails_leaves_no_file(tmp_path, monkeypatch):
    trace = ir.trace(random_model(), random_ids(1, 5))

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError, match="No space"):
        trace.save(tmp_path / "trace.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_file_without_a_manifest_is_no_error(tmp_path):
    ir.Trace({"logits": torch.ones(1, 2, 3)}).save(tmp_path / "dump.safetensors")
    assert tracing.read_manifest(tmp_path / "dump.safetensors") == {}


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "not found"), (b"\x10\0\0\0\0\0\0\0{", "expected at least 24"), ("other version", "trace of version 99")],
    ids=["missing", "short", "version"],
)
def test_a_file_that_is_no_trace(tmp_path, content, message):
    path = tmp_path / "trace.safetensors"
    if content == "other version":
        ir.Trace({}, {"version": 99}).save(path)
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message):
        ir.Trace.read(path)


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        ([1], "inkling_trace in its header is no JSON object"),
        ({"prompt": 5}, "prompt of its manifest is 5, expected a list of rows"),
        ({"prompt": [[1]], "decoded": [[1], [2]]}, "decoded of its manifest has not as many rows as prompt"),
        ({"prompt": [[1]], "decoded": [["a"]]}, r"decoded of its manifest is \[\['a'\]\]"),
        ({"positions": "x"}, "positions of its manifest is 'x'"),
        ({"dtype": "float99"}, "dtype of its manifest is 'float99', expected a dtype's name"),
        ({"config": 5}, "config of its manifest is 5, expected an object"),
        ({"device": 5}, "device of its manifest is 5, expected text"),
    ],
    ids=str,
)
def test_a_manifest_that_another_program_wrote_wrongly(tmp_path, manifest, message):
    about = {"version": tracing.VERSION, **manifest} if isinstance(manifest, dict) else manifest
    with unchecked():
        ir.Trace({"logits": torch.ones(1, 2, 3)}, about).save(tmp_path / "trace.safetensors")
    with pytest.raises(InputError, match=message):
        tracing.read_manifest(tmp_path / "trace.safetensors")


def test_a_manifest_without_decoded_tokens_has_none(tmp_path):
    ir.Trace({}, {"version": tracing.VERSION, "prompt": [[5, 3], [8]]}).save(tmp_path / "trace.safetensors")
    assert tracing.read_tokens(tmp_path / "trace.safetensors") == ([[5, 3], [8]], 0)


def test_replay_names_what_is_missing_or_does_not_fit():
    model = random_model()
    trace = ir.trace(model, random_ids(1, 5))
    with pytest.raises(InputError, match=r"replay: vision.pixels was not recorded"):
        replay(model, trace, "vision.features")
    trace.tensors["moe.1.input"] = torch.zeros(1, 5, 33)
    with pytest.raises(InputError, match=r"replay of moe.1.out: the recorded inputs do not fit this model"):
        replay(model, trace, "moe.1.out")


# --- The command ---------------------------------------------------------------------------------------------------


def run(capsys, *arguments) -> tuple[int, str]:
    status = cli.main(["trace", *map(str, arguments)])
    captured = capsys.readouterr()
    assert captured.out == ""
    return status, captured.err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--layers", ""], "--layers is '', expected numbers and ranges"),
        (["--layers", "0-99999999999"], "--layers is '0-99999999999', expected numbers and ranges"),
        (["--positions", ""], "--positions is '', expected numbers and ranges"),
        (["--sections", ""], "sections: '' fits no section"),
        (["--sections", "layer.99.attention.q"], "trace: this pass has none of the sections"),
        (["--out", "."], r"\.: a folder, expected the name of a file for the trace"),
        (["--out", ""], r"\.: a folder, expected the name of a file for the trace"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_options_that_cannot_be_used(tmp_path, capsys, arguments, message):
    ir.save(random_model(), tmp_path / "model")
    (tmp_path / "ids.json").write_text("[5, 3, 8]")
    options = ["--tokens", tmp_path / "ids.json", "--checkpoint", tmp_path / "model", "--out", tmp_path / "x"]
    status, err = run(capsys, *options, *arguments)  # of an option that is given twice, the last counts
    assert status == 2
    assert re.match(f"error: {message}", err)
    assert err.count("\n") == 1
    assert sorted(p.name for p in tmp_path.iterdir()) == ["ids.json", "model"]


def test_the_command_writes_a_trace_and_repeats_one(tmp_path, capsys):
    ir.save(random_model(), tmp_path / "model")
    (tmp_path / "ids.json").write_text(json.dumps(rows()[0][:2] + rows()[0][8:]))
    common = ("--checkpoint", tmp_path / "model", "--layers", "0-1,3", "--positions", "-2--1", "--sections", "+bias")
    status, text = run(
        capsys, "--tokens", tmp_path / "ids.json", "--decode", 2, *common, "--out", tmp_path / "a.safetensors"
    )
    assert (status, "23 tokens read, 2 decoded | float32, torch" in text) == (0, True)
    trace = ir.Trace.read(tmp_path / "a.safetensors")
    assert trace.manifest["positions"] == [21, 22]
    assert trace.tensors["layer.3.attention.bias"].shape == (1, 2, 4, 23)
    assert not any(name.startswith("layer.2.") for name in trace.tensors)
    status, _ = run(capsys, "--tokens", tmp_path / "a.safetensors", *common, "--out", tmp_path / "b.safetensors")
    again = ir.Trace.read(tmp_path / "b.safetensors")
    assert (status, again.manifest) == (0, trace.manifest)
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in trace.tensors.items())


def test_the_command_takes_a_question_with_a_picture(tmp_path, capsys):
    status, text = run(
        capsys, "--prompt", "What is it?", "--image", PICTURE, "--layers", "5", "--dtype", "bfloat16",
        "--sections", "embedding.out,vision.features,layer.*.attention.v", "--out", tmp_path / "t.safetensors",
    )  # fmt: skip
    trace = ir.Trace.read(tmp_path / "t.safetensors")
    assert (status, "3 tensors" in text) == (0, True)
    assert set(trace.tensors) == {"embedding.out", "vision.features", "layer.5.attention.v"}
    assert {t.dtype for t in trace.tensors.values()} == {torch.bfloat16}
    assert trace.manifest["images"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "a", "--tokens", "b"], "either --prompt or --tokens"),
        ([], "either --prompt or --tokens"),
        (["--prompt", "a", "--layers", "3-1"], "--layers is '3-1', expected numbers and ranges"),
        (["--prompt", "a", "--layers", "18"], "expected numbers from 0 to 17"),
        (["--prompt", "a", "--sections", "qq"], "sections: 'qq' fits no section"),
        (["--tokens", "missing.json"], "missing.json: No such file"),
        (["--tokens", "prose.md"], "prose.md: expected a JSON list"),
    ],
    ids=lambda v: " ".join(v) if isinstance(v, list) else "",
)
def test_the_command_says_what_is_wrong(tmp_path, monkeypatch, capsys, arguments, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prose.md").write_text("# Not ids\n")
    status, text = run(capsys, *arguments, "--out", "t.safetensors")
    assert (status, text.count("\n")) == (2, 1)
    assert message in text
    assert [path.name for path in tmp_path.iterdir()] == ["prose.md"]
