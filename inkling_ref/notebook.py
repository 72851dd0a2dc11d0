"""What the notebooks share: figures of one style, live source, equations, tables, sliders, exercises.

    from inkling_ref import notebook as nb

    python -m inkling_ref.notebook notebooks/*.ipynb           # execute in place, then normalise
    python -m inkling_ref.notebook --check notebooks/*.ipynb   # name the files that are not normal; write nothing
    python -m inkling_ref.notebook --tidy notebooks/*.ipynb    # normalise without a run: what a browser saved, say

Needs the `notebooks` extra. Importing this module sets matplotlib's style, in one place for all notebooks.

A notebook is *normal* when a second run on another machine gives the same file, unless a result differs: kernelspec
`python3`, cells called cell-01, cell-02 and so on, executed once from top to bottom, no machine's metadata, no widgets.
"""

import argparse
import ast
import base64
import copy
import functools
import html
import inspect
import io
import itertools
import json
import os
import platform
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import matplotlib.pyplot as plt
import torch
from IPython import get_ipython
from IPython.display import display
from matplotlib.figure import Figure
from PIL import Image

from . import __version__
from .chat import Tokenizer
from .checkpoint import load
from .errors import InputError
from .files import whole_file
from .model import Inkling

NANO = Path(__file__).parent / "data" / "nano"
WIDGET = "application/vnd.jupyter.widget-view+json"  # dead in a saved notebook

# One colour a concept, through all figures.
COLOURS = {
    "residual": "#d9822b", "embedding": "#8c6239", "attention": "#2f6db5", "conv": "#3a9a5b", "moe": "#8e5bb5",
    "vision": "#cf5a7e", "drafter": "#1f9a9a", "sink": "#b0413e", "gate": "#c9a227", "bias": "#5b6ee1",
    "query": "#2f6db5", "key": "#e08a1e", "value": "#3a9a5b", "image": "#cf5a7e", "text": "#4b5563",
    "good": "#2e8b57", "bad": "#c0392b", "grey": "#9aa0a6",
}  # fmt: skip

plt.rcParams.update(
    {
        "figure.facecolor": "white", "axes.facecolor": "white", "savefig.facecolor": "white",
        "figure.figsize": (7, 3.6), "figure.dpi": 100, "savefig.dpi": "figure",
        "figure.constrained_layout.use": True,
        "font.family": "DejaVu Sans", "font.size": 10, "axes.titlesize": 11, "axes.labelsize": 10,
        "legend.fontsize": 9, "legend.frameon": False, "xtick.labelsize": 9, "ytick.labelsize": 9,
        "axes.spines.top": False, "axes.spines.right": False, "image.interpolation": "nearest",
        "svg.hashsalt": "inkling-ref", "svg.fonttype": "path",
    }
)  # fmt: skip


def versions() -> None:
    """Print what this notebook runs on, and what of it runs here."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU, no GPU found"
    print(f"inkling-ref {__version__}, Python {platform.python_version()}, PyTorch {torch.__version__}, {device}")
    print("Runs here: everything below, on the CPU, in float32 unless a cell says otherwise.")


@functools.cache
def nano() -> tuple[Inkling, Tokenizer]:
    """The shipped trained model in float32 and its tokenizer, loaded once; one thread, so that sums repeat exactly."""
    torch.set_num_threads(1)
    return load(NANO), Tokenizer.from_pretrained(NANO)


def _markdown(text: str) -> None:
    display({"text/markdown": text, "text/plain": text}, raw=True)


def show_source(thing: Callable | type, docstring: bool = False) -> None:
    """Display the source of a function or class as it is installed, without its docstrings unless `docstring`."""
    source = textwrap.dedent(inspect.getsource(thing))
    if not docstring:
        lines = source.splitlines()
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and ast.get_docstring(node):
                text = node.body[0]
                end = text.end_lineno + (lines[text.end_lineno : text.end_lineno + 1] == [""])  # and a blank line after
                lines[text.lineno - 1 : end] = [None] * (end - text.lineno + 1)
        source = "\n".join(line for line in lines if line is not None)
    _markdown(f"`{thing.__module__}.{thing.__qualname__}`\n\n```python\n{source.strip()}\n```")


def equation(thing: ModuleType | Callable | type, index: int | None = None) -> None:
    """Display the `$$` blocks in the docstring of a module, function or class: all of them, or number `index` from 0.

    Raises InputError if there is no such block.
    """
    blocks = re.findall(r"\$\$.+?\$\$", inspect.getdoc(thing) or "", re.DOTALL)
    chosen = blocks if index is None else blocks[index : index + 1]
    if not chosen:
        raise InputError(f"equation {index} of {thing.__name__}: its docstring has {len(blocks)} $$ blocks")
    _markdown("\n\n".join(chosen))


def table(rows: Iterable[Sequence], header: Sequence[str] | None = None) -> None:
    """Display a small table. Columns of numbers, with units or blanks among them, are set to the right; format floats
    yourself.
    """
    cells = [[str(cell).replace("|", r"\|") for cell in row] for row in rows]
    head = [str(name).replace("|", r"\|") for name in header or [""] * len(cells[0])]
    number = re.compile(r"([<>]= )?[-+−]?[\d.,]+(e[-+]?\d+)?( ?([%×x]|[mu]s|[kKMGTi]*B?))?( \([\d.,]+\))?")
    numeric = [
        any(column) and all(number.fullmatch(cell) for cell in column if cell) for column in zip(*cells, strict=True)
    ]
    rules = ["---:" if right else ":---" for right in numeric]
    _markdown("\n".join("| " + " | ".join(row) + " |" for row in [head, rules, *cells]))


def _png(figure: Figure) -> Image.Image:
    """The figure as an image; the figure is closed, so that the front end does not show it a second time."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png")
    plt.close(figure)
    return Image.open(buffer).convert("RGB")


def _encode(image: Image.Image) -> str:
    """PNG with a palette, in base64: a third of the size of a true-colour one, so that notebooks stay small."""
    buffer = io.BytesIO()
    # Maximum coverage: the default spends its colours on large areas, and a colour bar comes out in stripes.
    image = image.quantize(256, Image.Quantize.MAXCOVERAGE, kmeans=2, dither=Image.Dither.NONE)
    image.save(buffer, format="png", optimize=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _show_image(image: Image.Image, alt: str) -> None:
    display({"image/png": _encode(image), "text/plain": alt}, metadata={"image/png": {"alt": alt}}, raw=True)


def show(figure: Figure, alt: str, name: str | None = None, data: dict | None = None) -> None:
    """Display a matplotlib figure as a PNG and close it.

    Args:
        alt: what is seen, for readers who do not see it.
        name: of a key figure. Where the environment variable INKLING_FIGURES names a folder (`make figures`), it is
            written there as name.svg and name.png, and `data`, what the figure is drawn from, as data/name.json.
    """
    folder = os.environ.get("INKLING_FIGURES")
    if name and folder:
        figure.savefig(Path(folder) / f"{name}.svg", metadata={"Date": None})
        figure.savefig(Path(folder) / f"{name}.png", dpi=200)
        if data is not None:
            path = Path(folder) / "data" / f"{name}.json"
            path.parent.mkdir(exist_ok=True)
            path.write_text(json.dumps(data, indent=1) + "\n", encoding="utf-8")
    _show_image(_png(figure), alt)


def explore(plot: Callable[..., Figure], *, alt: str, **values: Sequence) -> None:
    """Display `plot(label=value, ...)` for some values as a grid of two columns; with a live kernel, sliders beneath.

    The grid is what remains in a saved notebook: up to four values of the first label, the others at their first
    value. Sliders go through all values. About 4.5 x 3 inches is a good size for the figures.

    Args:
        plot: takes one value a label, returns a new matplotlib figure.
        alt: what is seen, for readers who do not see it.

    Raises InputError without a value to draw.
    """

    @functools.cache
    def draw(*choice: Any) -> Image.Image:
        chosen = dict(zip(values, choice, strict=True))
        figure = plot(**chosen)
        if not figure.get_suptitle():
            figure.suptitle(", ".join(f"{label} = {value}" for label, value in chosen.items()), fontsize=10)
        return _png(figure)

    if empty := [label for label, options in values.items() if not len(options)]:
        raise InputError(f"explore: {empty[0]} is empty, expected at least one value")
    if not values:
        raise InputError("explore: no values, expected label=values for at least one label")
    label, *others = values
    first = values[label]
    count = min(4, len(first))
    picked = [first[round(i * (len(first) - 1) / max(count - 1, 1))] for i in range(count)]
    panels = [draw(value, *(values[other][0] for other in others)) for value in picked]
    width, height = (max(getattr(panel, side) for panel in panels) for side in ("width", "height"))
    grid = Image.new("RGB", (width * min(count, 2), height * -(-count // 2)), "white")
    for i, panel in enumerate(panels):
        grid.paste(panel, (i % 2 * width, i // 2 * height))
    _show_image(grid, f"{alt} One panel for each {label} of {', '.join(map(str, picked))}.")

    if getattr(get_ipython(), "kernel", None) is not None:  # elsewhere nothing would move a slider
        _sliders(draw, values, alt)


def _sliders(draw: Callable[..., Image.Image], values: dict[str, Sequence], alt: str) -> None:
    import ipywidgets

    sliders = [
        ipywidgets.SelectionSlider(
            options=[(str(value), value) for value in options],
            description=label,
            continuous_update=False,
            style={"description_width": "initial"},
            layout={"width": "30em"},
        )
        for label, options in values.items()
    ]
    picture = ipywidgets.HTML()

    def update(_change: dict | None = None) -> None:
        png = _encode(draw(*(slider.value for slider in sliders)))
        picture.value = f'<img alt="{html.escape(alt)}" src="data:image/png;base64,{png}">'

    for slider in sliders:
        slider.observe(update, names="value")
    update()
    display(ipywidgets.VBox([*sliders, picture]))


def exercise(check: Callable[[Callable], None], candidate: Callable) -> None:
    """Run an exercise's check on your function and print the outcome in one line."""
    name = getattr(candidate, "__name__", type(candidate).__name__)
    try:
        check(candidate)
    except NotImplementedError:
        print(f"{name}: not tried yet")
    except AssertionError as error:
        print(f"{name}: not yet. {str(error) or traceback.extract_tb(error.__traceback__)[-1].line}")
    else:
        print(f"{name}: passed")


def read(path: Path) -> Any:
    """The notebook in a file. Raises InputError if there is none."""
    import nbformat  # here and below: a second that a running notebook need not wait for

    try:
        return nbformat.read(path, as_version=4)
    except (OSError, ValueError, TypeError, AttributeError, RecursionError, nbformat.ValidationError) as error:
        raise InputError(f"{path}: expected a notebook: {str(error).splitlines()[0]}") from error


def normalised(notebook: Any) -> Any:
    """A copy of an nbformat notebook in the normal form (module docstring)."""
    notebook = copy.deepcopy(notebook)
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    counts = itertools.count(1)
    for place, cell in enumerate(notebook.cells, 1):
        cell.id, cell.metadata = f"cell-{place:02}", {}
        if cell.cell_type == "code":
            cell.execution_count = next(counts)
            cell.outputs = [output for output in cell.outputs if WIDGET not in output.get("data", {})]
            for output in cell.outputs:
                if output.output_type == "execute_result":
                    output.execution_count = cell.execution_count
    return notebook


def executed(path: Path) -> Any:
    """The notebook after a run from top to bottom, in its own folder, by a new kernel.

    Raises InputError if there is no notebook, or a cell fails.
    """
    import nbclient

    paths = [str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH")]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths))}
    client = nbclient.NotebookClient(read(path), kernel_name="python3", timeout=300, coalesce_streams=True)
    try:
        return client.execute(cwd=str(path.parent), env=environment)
    except nbclient.exceptions.DeadKernelError:
        raise InputError(f"{path}: the kernel died, expected cells that end") from None
    except nbclient.exceptions.CellExecutionError as error:
        raise InputError(f"{path}: a cell failed\n{error}") from error


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line above; returns the exit status: 1 where a file is not normal or cannot be run."""
    import nbformat

    parser = argparse.ArgumentParser("python -m inkling_ref.notebook", description="Execute and normalise notebooks.")
    parser.add_argument("files", nargs="+", type=Path)
    way = parser.add_mutually_exclusive_group()
    way.add_argument("--check", action="store_true", help="only name the files that are not normal")
    way.add_argument("--tidy", action="store_true", help="normalise without executing")
    options = parser.parse_args(arguments)
    failed = False
    for path in options.files:
        try:
            if not options.check:
                text = nbformat.writes(normalised((read if options.tidy else executed)(path))) + "\n"
                with whole_file(path) as partial:
                    partial.write_text(text, encoding="utf-8")
                print(path)
            elif nbformat.writes(normalised(read(path))) + "\n" != path.read_text(encoding="utf-8"):
                raise InputError(
                    f"{path}: not in normal form; `python -m inkling_ref.notebook --tidy {path}` normalises what a "
                    "browser saved, without --tidy it executes the notebook too"
                )
        except InputError as error:
            print(error, file=sys.stderr)
            failed = True
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
