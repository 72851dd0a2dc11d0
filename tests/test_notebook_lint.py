"""The committed notebooks as files: what a reader on a static page, and the next run, can rely on."""

import ast
import importlib
import re
import statistics
from pathlib import Path

import nbformat
import pytest

from inkling_ref import notebook as nb

FOLDER = Path(__file__).parents[1] / "notebooks"
PATHS = {path.stem: path for path in sorted(FOLDER.glob("*.ipynb"))}
NOTEBOOKS = {stem: nbformat.read(path, as_version=4) for stem, path in PATHS.items()}
CHECKED = "# NBVAL_CHECK_OUTPUT"

each = pytest.mark.parametrize("stem", NOTEBOOKS)


def code(stem: str) -> dict[str, str]:
    return {cell.id: cell.source for cell in NOTEBOOKS[stem].cells if cell.cell_type == "code"}


def outputs(stem: str) -> list[tuple[str, dict]]:
    cells = (cell for cell in NOTEBOOKS[stem].cells if cell.cell_type == "code")
    return [(cell.id, output) for cell in cells for output in cell.outputs]


def words(stem: str) -> str:
    """Everything in the notebook that is text: sources and outputs, no pictures."""
    texts = [cell.source for cell in NOTEBOOKS[stem].cells]
    for _, output in outputs(stem):
        texts += [output.get("text", ""), *(v for k, v in output.get("data", {}).items() if k.startswith("text/"))]
    return "\n".join(texts)


def lines(source: str) -> list[str]:
    return [line for line in source.splitlines() if line.strip()]


@each
def test_normal_form(stem):
    assert nb.main(["--check", str(PATHS[stem])]) == 0


@each
def test_every_cell_is_plain_python(stem):
    # nbval lets an unknown magic and a failing `!command` pass.
    for cell, source in code(stem).items():
        ast.parse(source.replace("%matplotlib inline", ""), filename=f"{stem} {cell}")
        assert "NBVAL_SKIP" not in source, cell
        assert "get_ipython" not in source, cell


@each
def test_cells_are_short(stem):
    """79 columns; 25 lines, 15 in a cell that only defines functions; half of the cells 10; 350 lines in all."""
    wide = [f"{cell}: {line}" for cell, source in code(stem).items() for line in source.splitlines() if len(line) > 79]
    assert wide == []
    lengths = {cell: len(lines(source)) for cell, source in code(stem).items()}
    derives = {cell for cell, source in code(stem).items() if re.search(r"^def ", source, re.MULTILINE)}
    derives -= {cell for cell, source in code(stem).items() if re.search(r"\bnb\.(show|explore)\(", source)}
    assert {cell: n for cell, n in lengths.items() if n > (15 if cell in derives else 25)} == {}
    assert statistics.median(lengths.values()) <= 10
    assert sum(lengths.values()) <= 350


@each
def test_text_has_the_length_of_a_lesson(stem):
    text = " ".join(cell.source for cell in NOTEBOOKS[stem].cells if cell.cell_type == "markdown")
    assert 1500 <= len(text.split()) <= 3000


@each
def test_outputs_are_there_and_without_errors(stem):
    kinds = {output.output_type for _, output in outputs(stem)}
    assert "error" not in kinds
    assert [cell for cell, output in outputs(stem) if output.get("name") == "stderr"] == []
    assert len({cell for cell, _ in outputs(stem)}) >= len(code(stem)) / 2


@each
def test_pictures_have_alt_text(stem):
    pictures = [(cell, output) for cell, output in outputs(stem) if "image/png" in output.get("data", {})]
    assert pictures
    for cell, picture in pictures:
        assert len(picture.metadata.get("image/png", {}).get("alt", "")) > 20, cell
    for markdown in (cell.source for cell in NOTEBOOKS[stem].cells if cell.cell_type == "markdown"):
        assert "![](" not in markdown


@each
def test_links_lead_somewhere(stem):
    text = "\n".join(cell.source for cell in NOTEBOOKS[stem].cells if cell.cell_type == "markdown")
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)\s]+)\)", text) if not link.startswith("http")]
    assert [link for link in links if link and not (FOLDER / link).exists()] == []


@each
def test_nothing_tells_of_the_machine(stem):
    """No absolute path, no address of an object."""
    path = r"""(?:^|[\s"'`(=])(/(?:\w[\w.-]*/)+[\w.-]*|[A-Z]:\\\w+)"""
    assert re.findall(path, words(stem), re.MULTILINE) == []
    assert re.findall(r"\bat 0x[0-9a-f]+", words(stem)) == []
    assert "site-packages" not in words(stem)


@each
def test_verifies_and_checks_rounded_numbers(stem):
    assert any(
        re.search(r"^\s*(assert\b|torch\.testing\.assert)", source, re.MULTILINE) for source in code(stem).values()
    )
    checked = {cell for cell, source in code(stem).items() if CHECKED in source}
    assert checked
    shown = {cell: output for cell, output in outputs(stem) if cell in checked}
    assert set(shown) == checked, "a checked cell without output compares nothing"
    for cell, output in shown.items():
        text = output.get("text") or output.data.get("text/plain", "")
        assert not re.search(r"\d\.\d{7}", text), f"{cell}: round what is compared on other machines"


@pytest.mark.parametrize("stem", [stem for stem in NOTEBOOKS if (FOLDER / f"exercises/{stem[3:]}.py").exists()])
def test_exercises_are_offered(stem):
    module = importlib.import_module(f"exercises.{stem[3:]}")
    checks = [name for name in dir(module) if name.startswith("check_")]
    assert 3 <= len(checks) <= 5
    source = "\n".join(code(stem).values())
    assert [name for name in checks if f"nb.exercise({name}," not in source] == []
    assert source.count("raise NotImplementedError") >= len(checks)
    assert f"exercises/{stem[3:]}.py" in words(stem), "says where the solutions are"


def test_sizes():
    sizes = {stem: path.stat().st_size for stem, path in PATHS.items()}
    assert {stem: size for stem, size in sizes.items() if size > 500_000} == {}
    assert sum(sizes.values()) < 6_000_000
