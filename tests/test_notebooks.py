"""A fault in the package must turn a notebook's own Verify cell red: what it derives, it really compares.

That every notebook runs, and gives its checked outputs, is nbval's part of `make test`.
"""

import contextlib
import inspect
import linecache
import pkgutil
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from pathlib import Path

import matplotlib.pyplot as plt
import nbformat
import pytest
import torch
from notebook_mutations import MUTATIONS

from inkling_ref import notebook as nb

FOLDER = Path(__file__).parents[1] / "notebooks"
# The last fault first: the run without a fault that it needs reaches the cells of the others.
CASES = [(stem, attribute, how) for stem, faults in MUTATIONS.items() for attribute, how in reversed(faults)]
HEALTHY: dict[str, int] = {}  # how many code cells of a notebook were seen to run without a fault


@contextlib.contextmanager
def broken(attribute: str, how: Callable) -> Iterator[None]:
    """The function `attribute` of the package with another body, for everyone who already holds it, too."""
    function = inspect.unwrap(pkgutil.resolve_name(f"inkling_ref.{attribute}"))
    kept = function.__code__, function.__defaults__, function.__kwdefaults__
    original = types.FunctionType(kept[0], function.__globals__, function.__name__, kept[1], function.__closure__)
    original.__kwdefaults__ = kept[2]
    function.__globals__["_broken"] = how(original)
    body = compile("lambda *arguments, **keywords: _broken(*arguments, **keywords)", "broken", "eval").co_consts[0]
    try:
        function.__code__, function.__defaults__, function.__kwdefaults__ = body, None, None
        yield
    finally:
        function.__code__, function.__defaults__, function.__kwdefaults__ = kept
        del function.__globals__["_broken"]


def run(stem: str, last: int | None = None) -> tuple[int, BaseException | None]:
    """Run a notebook's code cells here, up to number `last`: the number of the one that raises, and what it raises."""
    (path,) = FOLDER.glob(f"[0-9][0-9]_{stem}.ipynb")
    cells = [cell for cell in nbformat.read(path, as_version=4).cells if cell.cell_type == "code"][:last]
    namespace = {"__name__": "__main__"}
    with torch.enable_grad():  # whatever a notebook sets it to, it is as before afterwards
        for number, cell in enumerate(cells):
            name = f"{stem} {cell.id}"
            # Triton reads the source of what it compiles, as it could in a kernel.
            linecache.cache[name] = len(cell.source), None, cell.source.splitlines(keepends=True), name
            try:
                exec(compile(cell.source, name, "exec"), namespace)
            except Exception as error:
                return number, error
    return len(cells), None


@pytest.fixture
def fresh(monkeypatch):
    """As a new kernel: nothing loaded under a fault stays for the next."""
    monkeypatch.chdir(FOLDER)
    plt.switch_backend("Agg")

    def forget() -> None:
        nb.nano.cache_clear()
        plt.close("all")
        for name in [name for name in sys.modules if name.startswith("exercises.")]:
            del sys.modules[name]

    forget()
    yield forget
    forget()


@pytest.mark.parametrize(("stem", "attribute", "how"), CASES, ids=[f"{stem}-{name}" for stem, name, _ in CASES])
def test_a_fault_is_noticed(stem, attribute, how, fresh):
    with broken(attribute, how):
        number, error = run(stem)
    assert isinstance(error, AssertionError), f"no Verify cell noticed it: {error!r}"
    # The cell's own assertion, or torch's: not one that happens to fail inside the package.
    *_, frame = (f for f in traceback.extract_tb(error.__traceback__) if "torch/testing" not in f.filename)
    assert frame.filename.startswith(f"{stem} "), f"{frame.filename}, line {frame.lineno}"
    if HEALTHY.get(stem, 0) <= number:
        fresh()
        HEALTHY[stem], _ = run(stem, number + 1)
    assert HEALTHY[stem] > number, "that cell fails without the fault, too"


def test_every_notebook_that_verifies_has_a_fault():
    assert set(MUTATIONS) == {path.stem[3:] for path in FOLDER.glob("*.ipynb")} - {"tour"}
