"""What the tests of the components share: one error measure, random weights, short calls, a cache's contents."""

import inspect
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields

import torch
from jaxtyping import config as jaxtyping_config
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from inkling_ref.backends import Backend
from inkling_ref.cache import Cache
from inkling_ref.config import InklingConfig
from inkling_ref.measure.make_golden import randomize
from inkling_ref.model import Inkling

IMAGE = 39  # tiny's image token: `random_ids` stays below it


def relative_rms(actual: Tensor, expected: Tensor) -> float:
    """Relative RMS error, in float64; infinite for NaN or Inf, so that no comparison passes by accident."""
    assert actual.shape == expected.shape, f"{tuple(actual.shape)} != {tuple(expected.shape)}"
    actual, expected = actual.double(), expected.double()
    if not (actual.isfinite().all() and expected.isfinite().all()):
        return math.inf
    return float((actual - expected).norm() / expected.norm().clamp(min=1e-300))


def random_model(
    config: InklingConfig | None = None,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    backend: str | Backend = "torch",
) -> Inkling:
    """A model of `config` (None: tiny) with `randomize`d weights: the same values in every dtype, rounded to it."""
    model = Inkling(config or InklingConfig.tiny(), backend).eval().requires_grad_(False).double()
    randomize(model, seed)
    return model.cast(dtype)


def random_ids(*shape: int, seed: int = 0, below: int = IMAGE) -> Tensor:
    return torch.randint(below, shape, generator=torch.Generator().manual_seed(seed))


def logits(model: Inkling, ids: Tensor, **kwargs) -> Tensor:
    with torch.inference_mode():
        return model(ids, **kwargs).logits


def hide_triton(monkeypatch) -> None:
    """Until the test ends, Triton is not installed and no kernel imported."""
    for name in [name for name in sys.modules if name.startswith("inkling_ref.kernels")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "triton", None)


@contextmanager
def unchecked() -> Iterator[None]:
    """Without the shape checks of `pytest --jaxtyping-packages`: for hundreds of like calls, and for wrong shapes."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    try:
        yield
    finally:
        jaxtyping_config.update("jaxtyping_disable", before)


class NoNarrowFloat(TorchDispatchMode):
    """Raises when an operation returns a floating tensor narrower than float64."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for t in out if isinstance(out, (tuple, list)) else [out]:
            if isinstance(t, Tensor) and t.is_floating_point() and t.dtype != torch.float64:
                raise AssertionError(f"{func} returned {t.dtype}")
        return out


class Spy:
    """A backend that records the arguments of every operation, by name, and runs another backend (the reference)."""

    def __init__(self, inner: Backend | None = None) -> None:
        self.calls: list[tuple[str, dict]] = []
        self.inner = inner or Backend()
        self.backend = Backend(**{f.name: self._wrap(f.name) for f in fields(Backend) if f.name != "pack_experts"})

    def _wrap(self, name: str):
        signature = inspect.signature(getattr(Backend(), name))

        def record(*args, **kwargs):
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            self.calls.append((name, bound.arguments))
            return getattr(self.inner, name)(*args, **kwargs)

        return record

    def of(self, name: str) -> list[dict]:
        return [arguments for called, arguments in self.calls if called == name]


def contents(model: Inkling, cache: Cache) -> dict[str, Tensor]:
    """All that the next call reads from `cache`, whatever else it still holds, by layer, state and row.

    Keys and values of the last W - 1 positions (full layers: of all), and the last K - 1 inputs of each convolution.
    Seen from outside: as the operands of a call with one more token.
    """
    spy = Spy(model.backend)
    spied = Inkling(model.config, spy.backend).eval().cast(model.dtype)
    spied.load_state_dict(model.state_dict())
    logits(spied, random_ids(len(cache.lengths), 1), cache=cache.fork())
    past = model.config.text.conv_kernel_size - 1
    read = {}
    convolutions = [arguments for name, arguments in spy.calls if name.endswith("short_conv")]
    for i, arguments in enumerate(convolutions):
        for row, u in enumerate(arguments["u"]):
            assert u.shape[0] == past + 1
            read[f"convolution {i} row {row}"] = u[:past].clone()
    for i, arguments in enumerate(spy.of("attend")):
        window = model.config.text.attention(i).window
        for row, n in enumerate(cache.lengths):
            seen = n if window is None else min(n, window - 1)
            slots = slice(arguments["offsets"][row] - seen, arguments["offsets"][row])
            for name in ("k", "v"):
                read[f"layer {i} {name} row {row}"] = arguments[name][row, :, slots].clone()
    return read


def assert_same_contents(model: Inkling, actual: Cache, expected: Cache, tolerance: float = 0.0) -> None:
    """Bit-equal for tolerance 0."""
    ours, theirs = contents(model, actual), contents(model, expected)
    assert ours.keys() == theirs.keys()
    for name in ours:
        if tolerance:
            assert relative_rms(ours[name], theirs[name]) < tolerance, name
        else:
            assert torch.equal(ours[name], theirs[name]), name
