"""Which implementation runs each operation: an explicit object that the model holds and can print.

The reference functions of the component modules are one backend; a kernel takes the place of one of them by having
the same signature. Nothing falls back silently: a backend that is not available raises when it is asked for.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

from .attention import attend
from .errors import InputError
from .moe import experts, route
from .quantization import fake_mxfp8, fake_nvfp4, quantize_stored
from .residual import mix_and_norm
from .short_conv import dynamic_short_conv, short_conv


@dataclass(frozen=True)
class Backend:
    """One implementation per operation; the defaults are the PyTorch reference.

    `fake_nvfp4`, `fake_mxfp8`: for experts whose activations are quantised. `quantize_stored`: encodes experts while
    they are saved. `pack_experts`: brings a layer's packed experts into the order that `experts` reads best, while they
    are loaded.
    """

    mix_and_norm: Callable = mix_and_norm
    short_conv: Callable = short_conv
    dynamic_short_conv: Callable = dynamic_short_conv
    attend: Callable = attend
    route: Callable = route
    experts: Callable = experts
    fake_nvfp4: Callable = fake_nvfp4
    fake_mxfp8: Callable = fake_mxfp8
    quantize_stored: Callable = quantize_stored
    pack_experts: Callable | None = None

    def report(self) -> dict[str, str]:
        """Operation -> where its implementation is defined."""
        functions = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return {name: f"{function.__module__}.{function.__qualname__}" for name, function in functions.items()}


def get_backend(backend: "str | Backend") -> Backend:
    """A backend by name, or the given one.

    Raises:
        InputError: for an unknown name, and for "triton" without Triton or without a device that runs it.
    """
    if isinstance(backend, Backend):
        return backend
    if backend == "torch":
        return Backend()
    if backend != "triton":
        raise InputError(f"backend {backend!r}: expected 'torch' or 'triton'")
    try:
        from .kernels.backend import triton_backend
    except ModuleNotFoundError as error:
        if error.name != "triton":
            raise
        raise InputError("backend 'triton': Triton is not installed, expected `pip install triton`") from None
    return triton_backend()
