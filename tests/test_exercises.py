"""Every exercise of the notebooks: its solution passes its check, and what is wrong does not."""

import importlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

MODULES = sorted(path.stem for path in (Path(__file__).parents[1] / "notebooks/exercises").glob("[a-z]*.py"))


def named(module: str, kind: str) -> list[tuple[str, str]]:
    names = vars(importlib.import_module(f"exercises.{module}"))
    return [(module, name.removeprefix(f"{kind}_")) for name in names if name.startswith(f"{kind}_")]


EXERCISES = [exercise for module in MODULES for exercise in named(module, "check")]
WRONG = [exercise for module in MODULES for exercise in named(module, "wrong")]
each = pytest.mark.parametrize(("module", "number"), EXERCISES, ids=["-".join(e) for e in EXERCISES])


def get(module: str, kind: str, number: str) -> Callable:
    return getattr(importlib.import_module(f"exercises.{module}"), f"{kind}_{number}")


def spoiled(value: Any) -> Any:
    """A value of the same kind that is not equal to it."""
    match value:
        case bool():
            return not value
        case int() | float():
            return value + 1
        case str():
            return value + "?"
        case torch.Tensor() if value.is_floating_point():
            return value * 1.25 + 0.5
        case torch.Tensor() | np.ndarray():
            return ~value if value.dtype in (torch.bool, np.bool_) else value + 1
        case dict():
            return {key: spoiled(item) for key, item in value.items()}
        case tuple() if hasattr(value, "_fields"):
            return type(value)(*map(spoiled, value))
        case list() | tuple():
            return type(value)(map(spoiled, value))
        case set():
            return {*value, "?"}
    raise NotImplementedError(f"cannot spoil {type(value).__name__}: the exercise needs a wrong_N")


@each
def test_solution_passes_and_explains_itself(module, number):
    solution = get(module, "solution", number)
    assert len((inspect.getdoc(solution) or "").split()) >= 5, "the idea, in a sentence"
    get(module, "check", number)(solution)


@each
def test_a_stub_is_a_stub(module, number):
    def stub(*arguments, **keywords):
        raise NotImplementedError

    with pytest.raises(NotImplementedError):
        get(module, "check", number)(stub)


@each
def test_a_solution_that_breaks_is_noticed(module, number):
    if (module, number) in WRONG:
        candidate = get(module, "wrong", number)
    else:
        solution = get(module, "solution", number)

        def candidate(*arguments, **keywords):
            return spoiled(solution(*arguments, **keywords))

    with pytest.raises(AssertionError):
        get(module, "check", number)(candidate)


def test_every_solution_has_a_check():
    assert [exercise for module in MODULES for exercise in named(module, "solution") if exercise not in EXERCISES] == []
