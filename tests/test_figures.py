"""The drawings of figures/: every script runs, and leaves whole files, those that are committed; and key figures."""

import ast
import importlib.metadata
import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

FIGURES = Path(__file__).parents[1] / "figures"
SCRIPTS = sorted(script.stem for script in FIGURES.glob("make_*.py"))

NOTEBOOKS = sorted(FIGURES.parent.glob("notebooks/*.ipynb"))

pytestmark = pytest.mark.skipif(importlib.util.find_spec("matplotlib") is None, reason="needs the notebooks extra")


def test_there_are_scripts():
    assert {"make_architecture", "make_decoder_layer", "make_memory"} <= set(SCRIPTS)


@pytest.mark.parametrize("script", SCRIPTS)
def test_script_draws_both_files(script, tmp_path):
    """In a copy of the folder: the committed figures stay as they are."""
    for source in FIGURES.glob("*.py"):
        shutil.copy(source, tmp_path)
    # Warnings are errors: a missing glyph or a layout that gives up would be seen in the figure only.
    command = [sys.executable, "-W", "error::UserWarning", f"{script}.py"]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)

    name = script.removeprefix("make_")
    picture, drawing = tmp_path / f"{name}.png", (tmp_path / f"{name}.svg").read_text(encoding="utf-8")
    assert picture.read_bytes().startswith(b"\x89PNG")
    assert drawing.rstrip().endswith("</svg>")
    assert "<text" not in drawing, "letters must be outlines: the reader's fonts are not ours"
    assert "<dc:date>" not in drawing, "a second run would give another file"
    committed = (FIGURES / f"{name}.svg").read_text(encoding="utf-8")
    if f"Matplotlib v{importlib.metadata.version('matplotlib')}," in committed:  # another one places letters otherwise
        assert drawing == committed, "the committed figure is not what the script draws: `make figures`"
    written = {path.name for path in tmp_path.iterdir() if path.suffix != ".py"} - {"__pycache__"}
    assert written == {picture.name, f"{name}.svg"}


@pytest.mark.parametrize("script", SCRIPTS)
def test_committed_figures_are_there(script):
    for suffix in (".svg", ".png"):
        assert (FIGURES / script.removeprefix("make_")).with_suffix(suffix).stat().st_size > 10_000


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_key_figures_are_committed(notebook):
    """What a notebook names in `nb.show(figure, alt, name)`; nothing but `make figures` writes these."""
    cells = json.loads(notebook.read_text(encoding="utf-8"))["cells"]
    code = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "code")
    shown = [c for c in ast.walk(ast.parse(code)) if isinstance(c, ast.Call) and ast.unparse(c.func) == "nb.show"]
    named = [k.value for call in shown for k in call.keywords if k.arg == "name"] + [
        c.args[2] for c in shown if c.args[2:]
    ]
    assert named
    for name in named:
        for suffix in (".svg", ".png"):
            assert (FIGURES / name.value).with_suffix(suffix).stat().st_size > 5_000
