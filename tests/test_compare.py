"""Comparing traces: the measures, the verdict, and what the command shows and writes."""

import json
import math
import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import pytest
import torch
from faults import CONFIG, FAULTS, healthy, inputs
from helpers import unchecked
from torch import Tensor

from inkling_ref import cli
from inkling_ref.checkpoint import save
from inkling_ref.errors import InputError
from inkling_ref.measure import differences, report, speed
from inkling_ref.measure.compare import compare
from inkling_ref.measure.differences import difference, differing_sets, first_bad, systematic
from inkling_ref.measure.sections import SECTIONS, TOLERANCES, equations
from inkling_ref.measure.trace import Trace, trace

generator = torch.Generator().manual_seed(1)


def noise(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, generator=generator)


@pytest.fixture(scope="module")
def ours() -> Trace:
    with unchecked():
        return trace(healthy(), sections=["all"], **inputs())


@pytest.fixture(scope="module")
def of_fault():
    """The trace of a port that has one of the faults."""
    kept: dict[str, Trace] = {}

    def make(name: str) -> Trace:
        (fault,) = [fault for fault in FAULTS if fault.name == name]
        if name not in kept:
            kept[name] = fault.trace(healthy())
        return kept[name]

    return make


def changed(recorded: Trace, **tensors: Tensor) -> Trace:
    """A trace with some tensors replaced; None takes one away."""
    kept = {**recorded.tensors, **{name.replace("__", "."): x for name, x in tensors.items()}}
    return replace(recorded, tensors={name: x for name, x in kept.items() if x is not None})


# ---- measures


def test_difference_by_hand():
    a = torch.tensor([[[3.0, 4.0], [0.0, 10.0]]])
    b = torch.tensor([[[3.0, 4.0], [0.0, 11.0]]])
    d = difference(a, b)
    assert d.relative_rms == pytest.approx(1 / math.sqrt(125))
    assert d.max_abs == 1
    assert d.cosine == pytest.approx((25 + 110) / math.sqrt(125 * 146))
    assert d.tokens.tolist() == [[0, pytest.approx(0.1)]]
    assert first_bad(a, b, d.tokens, 0.01) == (0, 1, 1)


def test_difference_is_the_same_in_chunks(monkeypatch):
    a, b = noise(2, 7, 5), noise(2, 7, 5)
    whole = difference(a, b)
    monkeypatch.setattr(differences, "_CHUNK", 12)
    parts = difference(a, b)
    assert torch.equal(whole.tokens, parts.tokens)
    assert (whole.relative_rms, whole.cosine) == pytest.approx((parts.relative_rms, parts.cosine))


def test_difference_leaves_its_operands_alone():
    a, b = noise(1, 3, 5).double(), noise(1, 3, 5).double()
    x, y = a.clone(), b.clone()
    difference(a, b)
    assert torch.equal(a, x)
    assert torch.equal(b, y)


def test_one_wrong_channel_of_thousands_shows():
    a = noise(1, 3, 4000)
    b = a.clone()
    b[0, 2, 1234] += 3
    d = difference(a, b)
    assert d.relative_rms < 0.03
    assert d.tokens[0, 2] > 0.05
    assert first_bad(a, b, d.tokens, 0.01) == (0, 2, 1234)


def test_a_short_vector_is_measured_against_the_others():
    a = torch.stack([noise(8), noise(8, scale=1e-6)])[None]
    d = difference(a, a + 1e-6 * noise(1, 2, 8))
    assert d.worst < 1e-4


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_only_one_side_finite(value):
    a = noise(1, 3, 5)
    b = a.clone()
    b[0, 1, 2] = value
    for x, y in ((a, b), (b, a)):
        d = difference(x, y)
        assert d.tokens.isinf().tolist() == [[False, True, False]]
        assert d.relative_rms == math.inf
    assert difference(b, b.clone()).worst == 0
    assert first_bad(a, b, difference(a, b).tokens, 0.1) == (0, 1, 2)


@pytest.mark.parametrize("shape", [(2, 3, 0), (0, 3, 4), (2, 3, 4)], ids=str)
def test_zeros_and_nothing(shape):
    d = difference(torch.zeros(shape), torch.zeros(shape))
    assert (d.relative_rms, d.max_abs, d.cosine, d.worst) == (0, 0, 1, 0)


def test_zeros_beside_numbers():
    assert difference(torch.zeros(1, 2, 3), torch.ones(1, 2, 3)).worst == math.inf


def test_systematic_errors_and_rounding():
    x = 2 * noise(40, 50)
    exact = torch.nn.functional.gelu(x)
    tanh = torch.nn.functional.gelu(x, approximate="tanh")
    assert systematic(exact.bfloat16(), exact) == 0
    assert systematic(exact, exact.bfloat16()) == 0
    assert systematic(exact.bfloat16(), tanh.bfloat16()) > 5e-5
    assert systematic(exact[:2, :10], tanh[:2, :10]) == 0  # too few to be certain


def test_sets_that_differ_by_a_gap():
    biased = torch.tensor([[[0.9, 0.5, 0.49, 0.1], [0.9, 0.5, 0.49, 0.1]]])
    a, b = torch.tensor([[[0, 1], [0, 1]]]), torch.tensor([[[2, 0], [0, 3]]])
    wrong, gap = differing_sets(a, b, biased)
    assert wrong.tolist() == [[True, True]]
    assert gap.tolist() == [[pytest.approx(0.01), pytest.approx(0.4)]]
    assert differing_sets(a, a.flip(-1), biased)[0].any().item() is False
    assert differing_sets(a, b, None)[1].isinf().all()
    assert differing_sets(a, b + 9, biased)[1].isinf().all()  # ids that do not exist


# ---- verdicts


def test_a_trace_agrees_with_itself(ours):
    found = compare(ours, ours)
    assert found.exit_status == 0
    assert {row.status for row in found.rows} == {"agrees"}
    assert all(row.error == 0 for row in found.rows)


def test_input_wrong_is_not_this_section_wrong(ours, of_fault):
    found = compare(ours, of_fault("static scale 3"))
    by_name = {row.name: row for row in found.rows}
    assert found.first.name == "layer.0.attention.k_conv"
    assert by_name["layer.0.attention.k"].status == "carried"  # computed rightly from wrong keys
    assert by_name["layer.0.attention.sink"].status == "agrees"
    assert by_name["layer.1.attention.k_conv"].status == "departs"  # wrong anew
    assert by_name["layer.0.attention.k_conv"].inputs == {"layer.0.attention.k_projected": 0}
    assert found.hints == ["the port's numbers are 0.7454 times the reference's"]


def test_what_the_port_did_not_record_may_be_to_blame(ours, of_fault):
    port = of_fault("clip before the scale")  # layer.0.attention.q
    kept = {n: x for n, x in port.tensors.items() if not n.startswith("layer.0.attention.") or n.endswith(".out")}
    found = compare(ours, replace(port, tensors=kept))
    assert found.first.name == "layer.0.attention.out"
    assert "layer.0.attention.q" in found.between
    assert "layer.0.attention.q" in found.missing
    assert "did not record" in report.blame(found)


def test_layer_outputs_alone(ours, of_fault):
    port = of_fault("E8M0 bias 128")  # of layer 2
    kept = {name: x for name, x in port.tensors.items() if re.fullmatch(r"layer\.\d\.out|logits", name)}
    found = compare(ours, replace(port, tensors=kept))
    assert [row.name for row in found.rows] == ["layer.0.out", "layer.1.out", "layer.2.out", "logits"]
    assert found.first.name == "layer.2.out"
    assert "moe.2.gate" in found.between


def test_another_shape(ours):
    q = ours.tensors["layer.1.attention.q"]
    found = compare(ours, changed(ours, layer__1__attention__q=q.transpose(1, 2).contiguous()))
    assert found.first.name == "layer.1.attention.q"
    assert found.first.note == "shape [2, 6, 31, 14], expected [2, 31, 6, 14] = [B T H d]"


def test_another_dtype_is_noted(ours):
    x = ours.tensors["layer.1.out"]
    found = compare(ours, changed(ours, layer__1__out=x.double()))
    (row,) = [row for row in found.rows if row.name == "layer.1.out"]
    assert (row.status, row.note) == ("agrees", "float64 here, float32 in the reference")


def test_nan_is_counted_and_its_followers_are_excused(ours):
    x = ours.tensors["layer.1.conv_attn"].clone()
    x[1, 5, :3] = math.nan
    y = ours.tensors["layer.1.after_attention"].clone()
    y[1, 5, :] = math.nan
    found = compare(ours, changed(ours, layer__1__conv_attn=x, layer__1__after_attention=y))
    assert found.first.name == "layer.1.conv_attn"
    assert found.first.note == f"3 of {x.numel()} numbers are NaN or infinite"
    assert found.first.first_bad[0] == (1, 5, 0)
    assert {r.name: r.status for r in found.rows}["layer.1.after_attention"] == "carried"


def test_a_near_tie_explains_another_choice(ours):
    """The last of the chosen and the best of the others change places, in scores and choice."""
    biased, chosen = (ours.tensors[f"moe.0.{name}"] for name in ("biased", "chosen"))
    ranked = biased.sort(dim=-1, descending=True)
    k = chosen.shape[-1]
    gap = ranked.values[0, :, k - 1] - ranked.values[0, :, k]
    t = int(gap.argmax())
    last, other = ranked.indices[0, t, k - 1], ranked.indices[0, t, k]
    port = chosen.clone()
    port[0, t][port[0, t] == last] = other
    port = port.sort(dim=-1).values
    wrong = compare(ours, changed(ours, moe__0__chosen=port))
    assert wrong.first.name == "moe.0.chosen"
    assert wrong.first.first_bad[0][:2] == (0, t)
    assert wrong.first.relative_rms == pytest.approx(1 / port[..., 0].numel())
    assert wrong.first.same_order == 1

    near = biased.clone()
    near[0, t, other] = near[0, t, last] - 1e-6
    tie = changed(ours, moe__0__biased=near)
    found = compare(tie, changed(tie, moe__0__chosen=port))
    rows = {row.name: row for row in found.rows}
    assert rows["moe.0.chosen"].status == "carried"
    assert found.exit_status == 0

    def chooses_the_same(name: str) -> Tensor:
        return port

    replayed = compare(tie, changed(tie, moe__0__chosen=port), chooses_the_same, sections=["moe.0.chosen"])
    (row,) = (row for row in replayed.rows if row.name == "moe.0.chosen")
    assert row.status == "carried"
    _, expected, found = row.first_bad
    assert expected != found  # the reference's own choice beside the port's, not the replayed one, which is the same


def test_one_wrong_decoding_step(ours):
    x = ours.tensors["step.1.moe.2.out"]
    found = compare(ours, changed(ours, step__1__moe__2__out=1.01 * x))
    assert found.first.name == "step.1.moe.2.out"


def test_some_sections_alone(ours, of_fault):
    found = compare(ours, of_fault("static scale 3"), sections=["moe.*.gate"])
    assert [row.name for row in found.rows][:2] == ["moe.0.gate", "moe.1.gate"]
    assert found.exit_status == 0  # their inputs are wrong, they are not
    assert found.rows[0].inputs["moe.0.input"] > 0.01
    with pytest.raises(InputError, match="fits no section"):
        compare(ours, ours, sections=["moe.*.gates"])


def test_hints():
    x = noise(2, 31, 6, 14)
    name = "layer.0.attention.q"

    def hints(y: Tensor) -> list[str]:
        return compare({name: x}, {name: y}).hints

    assert hints(-2.5 * x) == ["the port's numbers are -2.5 times the reference's"]
    assert hints(x.flip(2)) == ["heads are in another order: reversed"]
    assert hints(x.roll(1, dims=1)) == ["tokens are in another order: 1 too late"]
    interleaved = x.unflatten(-1, (2, 7)).transpose(-1, -2).flatten(-2)
    assert hints(interleaved) == ["channels are in another order: interleaved (halves in the reference)"]
    assert hints(x.unflatten(-1, (7, 2)).transpose(-1, -2).flatten(-2)) == [
        "channels are in another order: even ones first, then odd ones (interleaved in the reference)"
    ]
    y = x.clone()
    y[:, 8:] += 1
    assert hints(y) == ["only tokens 8-30 of 31"]
    y = x.clone()
    y[1, :, 3] += 1
    assert hints(y) == ["only rows 1 of 2, heads 3 of 6"]


# ---- what cannot be compared


def test_other_prompts(ours):
    rows = [row.copy() for row in ours.manifest["prompt"]]
    was, rows[1][7] = rows[1][7], 1
    with pytest.raises(InputError, match=rf"other prompts: row 1, token 7 is {was} and 1$"):
        compare(ours, replace(ours, manifest={**ours.manifest, "prompt": rows}))
    with pytest.raises(InputError, match=r"other prompts: rows of \[31, 31\] and of \[31, 30\] tokens"):
        compare(ours, replace(ours, manifest={**ours.manifest, "prompt": [rows[0], rows[1][:-1]]}))


@pytest.mark.parametrize(
    ("key", "value"), [("images", [[1, 2, 2]]), ("positions", [0, 3]), ("decoded", [[1], [2]])], ids=lambda x: str(x)
)
def test_other_inputs(ours, key, value):
    with pytest.raises(InputError, match=f"other {key}"):
        compare(ours, replace(ours, manifest={**ours.manifest, key: value}))


def test_nothing_in_common(ours):
    with pytest.raises(InputError, match=r"no section in common \(the port has blk\.0\.q\)"):
        compare(ours, {"blk.0.q": noise(3)})


def test_dumps_of_eight_bits_and_unsigned_ids(ours):
    name = "moe.1.chosen"
    assert compare(ours, {**ours.tensors, name: ours.tensors[name].to(torch.uint32)}, sections=[name]).first is None
    narrow = {**ours.tensors, "logits": ours.tensors["logits"].to(torch.float8_e4m3fn)}
    for pair in ((ours, narrow), (narrow, ours)):
        found = compare(*pair, sections=["logits"])
        assert 0.01 < found.first.relative_rms < 0.05  # three bits of mantissa


@pytest.mark.parametrize("ids", [math.nan, 1000.0, -1.0], ids=str)
def test_choices_that_are_no_experts(ours, ids):
    other = {**ours.tensors, "moe.1.chosen": torch.full_like(ours.tensors["moe.1.chosen"], ids, dtype=torch.float32)}
    for pair in ((ours, other), (other, ours)):
        assert compare(*pair, sections=["biased", "chosen"]).first.name == "moe.1.chosen"


def test_replay_of_another_shape_is_none(ours):
    with pytest.raises(InputError, match=r"nothing could be replayed.*logits: \[1, 2\] with these weights, recorded"):
        compare(ours, ours, lambda name: torch.ones(1, 2), sections=["logits"])


def test_unknown_dtype(ours):
    with pytest.raises(InputError, match="dtype 'int8': expected one of float64, float32"):
        compare(ours, ours, dtype="int8")


def test_another_config_is_noted(ours, of_fault):
    found = compare(ours, of_fault("residual block counted in sublayers"))
    assert found.notes == ["config: text_config.n_layers_per_attn_res_block is 2, the port's 1"]


def test_without_a_manifest(ours):
    found = compare(ours, ours.tensors)
    assert found.exit_status == 0
    assert "no manifest" in found.notes[0]
    assert found.dtype == "float32"


def test_the_coarser_dtype_rules(ours):
    assert compare(ours, {n: x.bfloat16() if x.is_floating_point() else x for n, x in ours.tensors.items()}).dtype == (
        "bfloat16"
    )
    assert compare(ours, ours, dtype="float16").dtype == "float16"


# ---- the table


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.name)
def test_every_section_has_its_tolerance_and_readable_equations(section):
    row = TOLERANCES[section.tolerance]
    assert list(row) == ["float64", "float32", "float16", "bfloat16", "gain"]
    numbers = list(row.values())[:4]
    assert numbers == sorted(numbers)
    for latex in equations(section):
        assert not re.search(r"[\\{}$]", report.plain(latex)), report.plain(latex)


def test_an_equation_for_a_terminal():
    latex = r"\hat x_j = x_j / \sqrt{\mathrm{mean}(x_j^2) + \epsilon}"
    assert report.plain(latex) == "x\N{COMBINING CIRCUMFLEX ACCENT}_j = x_j / √(mean(x_j^2) + ε)"


# ---- the command


def run(capsys, monkeypatch, *arguments: object) -> tuple[int, str, str]:
    monkeypatch.setenv("COLUMNS", "80")
    status = cli.main(["compare", *map(str, arguments)])
    out, err = capsys.readouterr()
    return status, out, err


@pytest.fixture(scope="module")
def files(ours, of_fault, tmp_path_factory):
    folder = tmp_path_factory.mktemp("traces")
    ours.save(folder / "ours.safetensors")
    of_fault("static scale 3").save(folder / "port.safetensors")
    return folder


def test_agreement(capsys, monkeypatch, files):
    status, out, err = run(capsys, monkeypatch, files / "ours.safetensors", files / "ours.safetensors")
    assert (status, err) == (0, "")
    assert out.splitlines()[0].startswith("agrees: ")


@pytest.mark.parametrize("everything", [False, True], ids=["what-matters", "all"])
def test_departure(capsys, monkeypatch, files, everything):
    more = ["--all"] if everything else []
    status, out, _ = run(capsys, monkeypatch, files / "ours.safetensors", files / "port.safetensors", *more)
    lines = out.splitlines()
    assert status == 1
    assert lines[0] == "departs at layer.0.attention.k_conv"
    assert max(map(len, lines)) <= 80
    assert "This section is wrong" in out
    assert re.search(r"inkling_ref/short_conv.py:\d+, short_conv._convolve", out)
    assert "√(K + 1)" in out
    assert "0.7454 times" in out
    assert ("step.1.moe.0.up" in out) == everything
    assert (len(lines) < 45) != everything


def test_json_and_html(capsys, monkeypatch, files, tmp_path):
    names = [tmp_path / "found.json", tmp_path / "found.html"]
    status, *_ = run(
        capsys, monkeypatch, files / "ours.safetensors", files / "port.safetensors",
        "--json", names[0], "--html", names[1],
    )  # fmt: skip
    assert status == 1
    assert sorted(path.name for path in tmp_path.iterdir()) == ["found.html", "found.json"]
    data = json.loads(names[0].read_text(), parse_constant=lambda text: pytest.fail(text))
    assert data["exit_status"] == 1
    assert data["first"]["name"] == "layer.0.attention.k_conv"
    assert re.fullmatch(r"inkling_ref/short_conv\.py:\d+", data["first"]["source"])
    assert len(data["sections"]) > 250
    page = names[1].read_text()
    assert not re.search(r"https?:|src=|href=|@import|url\(|<script", page)  # loads nothing
    assert page.count("<svg") == 5  # the flow, and four sections by layer
    parser = _Balanced()
    parser.feed(page)
    parser.close()


class _Balanced(HTMLParser):
    """Fails on an element that is closed by another's end."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []

    def handle_starttag(self, tag, attrs):
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        pass

    def handle_endtag(self, tag):
        while self.open[-1] in ("p", "td", "tr", "dd", "dt") and self.open[-1] != tag:
            self.open.pop()
        assert self.open.pop() == tag

    def close(self):
        super().close()
        assert self.open == []


def test_replay_of_one_section(capsys, monkeypatch, files, tmp_path):
    save(healthy(torch.bfloat16), tmp_path / "model")
    arguments = (files / "ours.safetensors", files / "port.safetensors", "--checkpoint", tmp_path / "model")
    status, out, _ = run(capsys, monkeypatch, *arguments, "--replay", "layer.1.conv_attn")
    assert status == 1
    assert out.splitlines()[0] == "departs at layer.1.conv_attn"
    assert "from the port's own inputs the reference" in out
    status, out, _ = run(capsys, monkeypatch, *arguments, "--replay", "moe.*.out,attention.gated")
    assert status == 0  # their inputs are wrong, they are not
    *_, out, _ = run(capsys, monkeypatch, *arguments, "--replay", "moe.*", "--all")
    assert re.search(r"^moe\.0\.chosen +[\d.]+ % +of sets +(agrees|carried) *$", out, re.MULTILINE)  # not cut off


def test_replay_with_other_weights(capsys, monkeypatch, files):
    """The shipped nano's, where no --checkpoint says otherwise."""
    traces = (files / "ours.safetensors", files / "port.safetensors")
    status, out, err = run(capsys, monkeypatch, *traces, "--replay", "layer.*.conv_attn")
    assert (status, out) == (2, "")
    assert re.match(r"error: compare: nothing could be replayed, for example: replay of layer\.0\.conv_attn: ", err)


def test_what_could_not_be_replayed_is_noted(ours):
    def replayed(name: str) -> Tensor:
        if name.startswith("moe."):
            raise InputError(f"{name}: no")
        return ours.tensors[name]

    found = compare(ours, ours, replayed, sections=["moe.*.out", "layer.*.out"])
    assert found.exit_status == 0
    assert found.notes == ["3 sections not replayed but compared as recorded, for example: moe.0.out: no"]


def test_a_dump_and_a_map(capsys, monkeypatch, files, of_fault, tmp_path):
    from safetensors.torch import save_file

    x = of_fault("static scale 3").tensors
    mine = {f"h{i}": x[f"layer.{i}.attention.k_conv"].transpose(1, 2).contiguous() for i in range(3)}
    save_file({**mine, "other": noise(2)}, tmp_path / "dump.safetensors")
    rule = {"to": "layer.{i}.attention.k_conv", "axes": "B G T d"}
    (tmp_path / "map.json").write_text(json.dumps({"implementation": "mine", "tensors": {"h{i}": rule}}))
    arguments = (files / "ours.safetensors", tmp_path / "dump.safetensors", "--map", tmp_path / "map.json")
    status, out, err = run(capsys, monkeypatch, *arguments)
    assert status == 1
    assert out.splitlines()[0] == "departs at layer.0.attention.k_conv"
    assert "port: mine" in out
    assert "did not record" in " ".join(out.split())
    assert "layer.0.attention.k_projected. Record these" in " ".join(out.split())
    assert err == "warning: tensors that the map does not name ignored: other\n"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["ours.safetensors", "missing.safetensors"], r"missing\.safetensors: not found, expected a trace"),
        (["ours.safetensors", "broken.safetensors"], r"broken\.safetensors: 5 bytes, expected at least"),
        (["ours.safetensors", "port.safetensors", "--json", "none/found.json"], "none: not found, expected a folder"),
        (["ours.safetensors", "port.safetensors", "port.safetensors"], "2 dumps of the port, expected one trace"),
        (["ours.safetensors", "port.safetensors", "--dtype", "int8"], "dtype 'int8': expected one of"),
        (["ours.safetensors", "port.safetensors", "--map", "map.json"], r"map\.json: No such file"),
    ],
    ids=["missing", "broken", "no-folder", "two-dumps", "dtype", "no-map"],
)
def test_unusable(capsys, monkeypatch, files, arguments, message):
    (files / "broken.safetensors").write_bytes(b"12345")
    before = sorted(files.iterdir())
    monkeypatch.chdir(files)
    status, out, err = run(capsys, monkeypatch, *arguments)
    assert (status, out) == (2, "")
    assert re.search(message, err)
    assert err.count("\n") == 1
    assert sorted(files.iterdir()) == before


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_comparing_takes_less_memory_than_the_traces():
    """The benchmark at a tenth of its size. How busy the machine is does not matter."""
    size, _, before, memory = speed.comparison(tokens=47)
    assert size > 39
    assert 0 < memory - before < size


def test_config_is_the_one_of_the_faults(ours):
    assert ours.manifest["config"] == CONFIG.to_dict()
