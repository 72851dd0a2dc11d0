"""The notebooks' helpers: what they display, how an exercise speaks, and the normal form of a file."""

import base64
import functools
import io
import json
import types

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from inkling_ref import InputError, residual
from inkling_ref import notebook as nb


@pytest.fixture
def shown(monkeypatch):
    """Everything that is displayed: (data by mime type, metadata)."""
    displays = []
    monkeypatch.setattr(nb, "display", lambda data, metadata=None, raw=False: displays.append((data, metadata)))
    return displays


def pixels(data: dict) -> Image.Image:
    return Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).convert("RGB")


def line(height: float = 1.0) -> plt.Figure:
    figure, axes = plt.subplots(figsize=(3, 2))
    axes.plot([0, height, 0.5])
    return figure


def test_source_is_the_package_s_own(shown):
    nb.show_source(residual.mix)
    nb.show_source(residual.mix, docstring=True)
    bare, full = (data["text/markdown"] for data, _ in shown)
    assert bare.startswith("`inkling_ref.residual.mix`\n\n```python\ndef mix(")
    assert "scores.softmax(dim=-2)" in bare
    assert "A zero query" not in bare
    assert "A zero query" in full


def test_source_of_a_class_drops_every_docstring(shown):
    nb.show_source(residual.DepthState)
    text = shown[0][0]["text/markdown"]
    assert '"""' not in text
    assert "def close_block" in text
    assert "class DepthState:\n    blocks:" in text  # no hole where the docstring was


def test_equations_of_a_docstring(shown):
    nb.equation(residual)
    nb.equation(residual, 1)
    everything, second = (data["text/markdown"] for data, _ in shown)
    assert everything.count("$$") == 6
    assert second == r"$$ \mathrm{mix} = \sum_j \mathrm{softmax}(\mathrm{score})_j \, \hat x_j $$"


@pytest.mark.parametrize(("thing", "index"), [(residual, 3), (residual.wide, None)])
def test_an_equation_that_is_not_there(thing, index):
    with pytest.raises(InputError, match=r"its docstring has \d \$\$ blocks"):
        nb.equation(thing, index)


def test_table(shown):
    nb.table([("a|b", 1, "3.5 MB"), ("c", 22, "10%")], ("name", "n", "size"))
    assert shown[0][0]["text/markdown"].splitlines() == [
        "| name | n | size |",
        "| :--- | ---: | ---: |",
        r"| a\|b | 1 | 3.5 MB |",
        "| c | 22 | 10% |",
    ]
    nb.table([("1.5 (3)", "", "1 x 8", "", "<= 2.0 ms"), ("", "33x", "8 x 1", "", "1 us")], "abcde")
    assert shown[1][0]["text/markdown"].splitlines()[1] == "| ---: | ---: | :--- | :--- | ---: |"


def test_a_figure_is_shown_once_as_a_small_png_with_alt_text(shown):
    nb.show(line(), "A line.", name="key")
    ((data, metadata),) = shown
    assert pixels(data).size == (300, 200)
    assert Image.open(io.BytesIO(base64.b64decode(data["image/png"]))).mode == "P"
    assert metadata == {"image/png": {"alt": "A line."}}
    assert data["text/plain"] == "A line."
    assert plt.get_fignums() == []


def test_key_figures_are_written_where_the_environment_says(shown, tmp_path, monkeypatch):
    monkeypatch.setenv("INKLING_FIGURES", str(tmp_path))
    nb.show(line(), "A line.", name="key", data={"height": 1.0})
    nb.show(line(), "Another line.")
    assert sorted(str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*.*")) == [
        "data/key.json",
        "key.png",
        "key.svg",
    ]
    assert json.loads((tmp_path / "data/key.json").read_text()) == {"height": 1.0}
    first = (tmp_path / "key.svg").read_bytes()
    nb.show(line(), "A line.", name="key")
    assert (tmp_path / "key.svg").read_bytes() == first  # no date, no random names


def test_explore_leaves_a_grid_of_four_values(shown):
    drawn = []

    def plot(height: int, other: str) -> plt.Figure:
        drawn.append((height, other))
        return line(height)

    nb.explore(plot, height=range(10, 17), other=["x", "y"], alt="Lines.")
    assert drawn == [(10, "x"), (12, "x"), (14, "x"), (16, "x")]
    ((data, metadata),) = shown
    assert pixels(data).size == (600, 400)
    assert metadata["image/png"]["alt"] == "Lines. One panel for each height of 10, 12, 14, 16."


def test_explore_with_a_kernel_adds_sliders_that_draw(shown, monkeypatch):
    monkeypatch.setattr(nb, "get_ipython", lambda: types.SimpleNamespace(kernel=object()))
    widgets = []
    monkeypatch.setattr(nb, "display", lambda thing, **_: widgets.append(thing))
    nb.explore(line, height=[1, 2, 3], alt="A <line>.")
    _, box = widgets
    slider, picture = box.children
    before = picture.value
    assert 'alt="A &lt;line&gt;."' in before
    slider.value = 3
    assert picture.value != before
    slider.value = 1
    assert picture.value == before


@pytest.mark.parametrize(
    ("candidate", "says"),
    [
        (lambda: 2, "passed"),
        (lambda: 3, "not yet. expected 2, got 3"),
        (lambda: None, "not yet. raise AssertionError"),
    ],
    ids=["right", "wrong", "wrong without a message"],
)
def test_an_exercise_says_how_it_went(candidate, says, capsys):
    def check(candidate):  # raises by hand: pytest would rewrite `assert`
        if candidate() is None:
            raise AssertionError
        if candidate() != 2:
            raise AssertionError(f"expected 2, got {candidate()}")

    candidate.__name__ = "mine"
    nb.exercise(check, candidate)
    assert capsys.readouterr().out == f"mine: {says}\n"


def test_a_stub_was_not_tried(capsys):
    def mine():
        raise NotImplementedError

    nb.exercise(lambda candidate: candidate(), mine)
    assert capsys.readouterr().out == "mine: not tried yet\n"


def test_versions_name_what_runs(capsys):
    nb.versions()
    assert "PyTorch" in capsys.readouterr().out


def write(path, *sources: str) -> None:
    cells = [new_markdown_cell("# Title"), *(new_code_cell(source) for source in sources)]
    nbformat.write(new_notebook(cells=cells, metadata={"widgets": {"state": 1}, "vscode": {}}), path)


def test_executed_files_are_normal_and_stay_as_they_are(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    explored = "from inkling_ref import notebook as nb\nimport matplotlib.pyplot as plt\n"
    explored += "nb.explore(lambda a: plt.figure(figsize=(1, 1)), a=[1, 2], alt='Nothing.')"
    write(path, "import os; os.path.basename(os.getcwd())", explored)
    assert nb.main(["--check", str(path)]) == 1
    assert "a.ipynb: not in normal form" in capsys.readouterr().err

    assert nb.main([str(path)]) == 0
    assert nb.main(["--check", str(path)]) == 0
    notebook = nbformat.read(path, as_version=4)
    assert [cell.id for cell in notebook.cells] == ["cell-01", "cell-02", "cell-03"]
    assert sorted(notebook.metadata) == ["kernelspec", "language_info"]
    _, folder, grid = notebook.cells
    assert folder.execution_count == folder.outputs[0].execution_count == 1
    assert folder.outputs[0].data["text/plain"] == repr(tmp_path.name)  # a notebook runs in its own folder
    assert [list(output.data) for output in grid.outputs] == [["image/png", "text/plain"]]  # and no widget

    before = path.read_bytes()
    assert nb.main([str(path)]) == 0
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_failing_cell_is_named_and_nothing_is_written(tmp_path, capsys):
    path = tmp_path / "a.ipynb"
    write(path, "1 / 0")
    before = path.read_bytes()
    assert nb.main([str(path)]) == 1
    error = capsys.readouterr().err
    assert "a.ipynb" in error
    assert "ZeroDivisionError" in error
    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_what_a_browser_saved_is_tidied_without_a_run(tmp_path):
    path = tmp_path / "a.ipynb"
    write(path, "1 / 0")
    assert nb.main(["--tidy", str(path)]) == 0
    assert nb.main(["--check", str(path)]) == 0
    assert "1 / 0" in path.read_text(encoding="utf-8")


def test_normal_form_numbers_cells_and_drops_widgets():
    widget = new_output("display_data", {nb.WIDGET: {"model_id": "7"}})
    result = new_output("execute_result", {"text/plain": "7"}, execution_count=31)
    cell = new_code_cell("7", execution_count=31, outputs=[widget, result], metadata={"execution": {"started": "now"}})
    given = new_notebook(cells=[cell, new_code_cell("8")])
    cells = nb.normalised(given).cells
    assert [(cell.id, cell.execution_count, cell.metadata) for cell in cells] == [
        ("cell-01", 1, {}),
        ("cell-02", 2, {}),
    ]
    assert [output.output_type for output in cells[0].outputs] == ["execute_result"]
    assert nb.normalised(nb.normalised(given)) == nb.normalised(given)
    assert given.cells[0].execution_count == 31


@pytest.mark.parametrize("content", [None, "", "{}"], ids=["missing", "empty", "no notebook"])
def test_what_is_no_notebook_is_named(tmp_path, content, capsys):
    path = tmp_path / "a.ipynb"
    if content is not None:
        path.write_text(content)
    for arguments in (["--check"], []):
        assert nb.main([*arguments, str(path)]) == 1
        assert "a.ipynb: " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("values", "message"), [({}, "no values"), ({"a": []}, "a is empty"), ({"a": [1], "b": ()}, "b is empty")], ids=str
)
def test_explore_without_a_value(values, message):
    with pytest.raises(InputError, match=f"explore: {message}, expected"):
        nb.explore(line, alt="None.", **values)


def test_an_exercise_takes_what_has_no_name(capsys):
    nb.exercise(lambda candidate: candidate(), functools.partial(int, 3))
    assert capsys.readouterr().out == "partial: passed\n"


@pytest.mark.parametrize(
    "text",
    ["5", "[]", "null", '{"nbformat": 4, "metadata": {}, "cells": [5]}', "[" * 100_000],
    ids=lambda text: text[:9],
)
def test_json_that_is_no_notebook(text, tmp_path, capsys):
    (tmp_path / "it.ipynb").write_text(text)
    assert nb.main(["--check", str(tmp_path / "it.ipynb")]) == 1
    err = capsys.readouterr().err
    assert "it.ipynb: expected a notebook: " in err
    assert err.count("\n") == 1
