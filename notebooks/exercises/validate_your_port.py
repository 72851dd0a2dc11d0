"""Exercises of 10_validate_your_port: a check for each, and a worked solution."""

import math
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor

import inkling_ref as ir
from inkling_ref import short_conv
from inkling_ref.measure.adapters import recorded
from inkling_ref.measure.trace import Trace


def _tiny() -> tuple[Any, list[list[int]]]:
    """A small random model and a prompt."""
    torch.manual_seed(1)
    return ir.Inkling(ir.InklingConfig.tiny()).eval().requires_grad_(False), [[5, 3, 8, 1, 9, 30, 7, 7, 2, 11]]


# ---------------------------------------------------------------- 1: a rule of a map


def check_1(candidate: Callable) -> None:
    """candidate() -> the rule for a dump of [T, G * 2 * d]: key, value, key, value, head by head."""
    from tempfile import TemporaryDirectory

    from safetensors.torch import save_file

    model, ids = _tiny()
    ours = ir.trace(model, ids)
    rule = candidate()
    assert isinstance(rule, dict), "expected a dict with `to` and `axes`"
    assert set(rule) == {"to", "axes"}, "expected a dict with `to` and `axes`"
    k, v = (ours.tensors[f"layer.1.attention.{x}"][0] for x in "kv")  # [T, G, d]
    with TemporaryDirectory() as folder:
        file = f"{folder}/dump.safetensors"
        save_file({"blk.1.kv": torch.stack([k, v], dim=2).flatten(1)}, file)
        try:
            theirs = recorded.read(file, {"tensors": {"blk.{i}.kv": rule}}, like=ours)
        except ir.InputError as error:
            raise AssertionError(f"the rule cannot be followed: {error}") from None
    for name, wanted in (("k", k), ("v", v)):
        found = theirs.tensors.get(f"layer.1.attention.{name}")
        assert found is not None, f"the rule makes no layer.1.attention.{name}"
        assert torch.equal(found[0], wanted), f"layer.1.attention.{name} is not what was dumped"


def solution_1() -> dict[str, Any]:
    """The slowest axis first: heads G, then `part` (key or value), then the channels d. B is left out, since the dump
    has one row.
    """
    return {"to": ["layer.{i}.attention.k", "layer.{i}.attention.v"], "axes": "T (G part d)"}


# ---------------------------------------------------------------- 2: the verdict


def check_2(candidate: Callable) -> None:
    """candidate(rows) -> the first name whose error is beyond floor + gain * worst input error, or None."""
    healthy = [("a", 1e-7, 1e-5, 6, 0.0), ("b", 4e-6, 1e-5, 6, 1e-7), ("c", 1e-5, 1e-5, 6, 4e-6)]
    drift = [("a", 0.004, 0.012, 6, 0.0), ("b", 0.03, 0.012, 6, 0.004), ("c", 0.15, 0.012, 6, 0.03)]
    wrong = [*healthy, ("d", 0.02, 1e-5, 6, 1e-5), ("e", 0.1, 1e-5, 6, 0.02), ("f", 0.9, 1e-5, 6, 0.1)]
    for rows, wanted in ((healthy, None), (drift, None), (wrong, "d"), (wrong[4:], "f"), ([], None)):
        found = candidate(rows)
        assert found == wanted, f"{rows}: expected {wanted}, got {found}"


def solution_2(rows: list[tuple[str, float, float, float, float]]) -> str | None:
    """An error that the inputs explain is carried, however large it is; the first that is not explained is the one."""
    return next((name for name, error, floor, gain, worst in rows if error > floor + gain * worst), None)


def wrong_2(rows: list[tuple[str, float, float, float, float]]) -> str | None:
    """Blames a section for what came in."""
    return next((name for name, error, floor, _, _ in rows if error > floor), None)


# ---------------------------------------------------------------- 3: another wrong line


def _suspects() -> tuple[Trace, Trace, str, float]:
    """Two traces, the section that is wrong first, and the factor by which it is."""
    model, ids = _tiny()
    ours, right = ir.trace(model, ids), short_conv._convolve

    def wrong(u: Tensor, taps: Tensor, scale: float, position: Any) -> Tensor:
        return right(u, taps, 1 / math.sqrt(5), position)  # what static taps are divided by

    with mock.patch.object(short_conv, "_convolve", wrong):
        theirs = ir.trace(model, ids)
    full = next(i for i, layer in enumerate(model.llm.layers) if not layer.is_sliding)
    return ours, theirs, f"layer.{full}.attention.k_conv", 3 / math.sqrt(5)


def check_3(candidate: Callable) -> None:
    """candidate(reference, port) -> (the section that is wrong first, the factor between its numbers)."""
    ours, theirs, name, factor = _suspects()
    found = candidate(ours, theirs)
    assert found[0] == name, f"{found[0]}: an error before it explains it, or it agrees"
    assert abs(found[1] - factor) < 1e-3, f"{found[1]}: not the factor between the port's numbers and the reference's"


def solution_3(reference: Trace, port: Trace) -> tuple[str, float]:
    """`compare` names the section; the best factor is <a, b> / <a, a>. It is 3 / sqrt(5): a dynamic convolution has
    nine terms, a static one five, and the port divides both by the root of five.
    """
    name = ir.compare(reference, port).first.name
    a, b = reference.tensors[name].double(), port.tensors[name].double()
    return name, float((a * b).sum() / (a * a).sum())


# ---------------------------------------------------------------- 4: near ties


def check_4(candidate: Callable) -> None:
    """candidate(scores, first, second) -> the gap that explains that the sets differ."""
    scores = [0.9, 0.5, 0.49, 0.1, 0.7]
    cases = [([0, 4, 1], [0, 4, 1], 0), ([0, 4, 1], [4, 2, 0], 0.01), ([0, 4], [1, 2], 0.41), ([4, 1], [1, 3], 0.6)]
    for first, second, wanted in cases:
        found = candidate(scores, first, second)
        assert abs(found - wanted) < 1e-9, f"{first} and {second}: expected {wanted}, got {found}"


def solution_4(scores: list[float], first: list[int], second: list[int]) -> float:
    """Experts that both have do not matter, nor does the order."""
    only_first, only_second = set(first) - set(second), set(second) - set(first)
    if not only_first:
        return 0.0
    return max(scores[i] for i in only_first) - min(scores[i] for i in only_second)
