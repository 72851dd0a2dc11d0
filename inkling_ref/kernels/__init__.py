"""Triton twins of the reference operations: the same stems, the same signatures, for inference.

`kernels.attention.attend` takes the place of `attention.attend`, and so on. Kernels read float16, bfloat16 or float32,
compute in float32 and round once, at the store; they are therefore a little more accurate in 16 bits than the
reference, which rounds between its steps. Importing these modules needs Triton. With TRITON_INTERPRET=1 in the
environment when Triton is first imported they run on a CPU (float32 and float16; its bfloat16 is wrong).

Beside the letters of `inkling_ref`: P are the pages of a cache and S the slots of one (without a table of pages: batch
rows, and slots of a row); Q the query heads of a key/value head, H / G, and in `residual` the queries of a mixture;
N the rows of a convolution's state, or tokens flattened to B*T where there is no such state.
Arguments may be strided, unless they are written in place: there the last axis must be adjacent in memory.
"""

from collections.abc import Callable
from functools import cache
from threading import Lock

import torch
import triton
from jaxtyping import Int
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from ..errors import InputError

INTERPRETED = triton.knobs.runtime.interpret
LOG2E: float = 1.4426950408889634  # exponentials are taken to base 2, the one that the hardware has
FLOATS = (torch.float32, torch.float16) if INTERPRETED else (torch.float32, torch.float16, torch.bfloat16)
INTEGERS = (torch.int32, torch.int64)
_CPU = torch.device("cpu")


@cache
def _gpu(index: int) -> torch.device:
    return torch.device("cuda", index)


def expect(op: str, dtypes: tuple[torch.dtype, ...], **given: tuple[Tensor | None, tuple[int, ...]]) -> None:
    """Refuse what a kernel cannot read, and sizes that do not go together: it would read and write foreign memory.

    Args:
        given: for each argument its tensor, or None where it may be left out and is, and the shape that it must have.

    Raises:
        InputError: for another dtype or shape, a tensor that is not on the current device, or one that wants a
            gradient.
    """
    device = _CPU if INTERPRETED else _gpu(torch.cuda.current_device())
    graded = torch.is_grad_enabled()
    for name, (t, shape) in given.items():
        if t is None or (
            t.dtype in dtypes and t.shape == shape and t.device == device and not (graded and t.requires_grad)
        ):
            continue
        if t.dtype not in dtypes:
            wrong = f"in {t.dtype}, expected {' or '.join(str(dtype).removeprefix('torch.') for dtype in dtypes)}"
            if INTERPRETED and t.dtype == torch.bfloat16:
                wrong += " (bfloat16 in Triton's interpreter is wrong)"
        elif t.shape != shape:
            wrong = f"of shape {list(t.shape)}, expected {list(shape)}"
        elif t.device != device:
            wrong = f"on {t.device}, expected {device}"
        else:
            wrong = "wants a gradient, the kernels have no backward pass: expected torch.inference_mode()"
        raise InputError(f"triton {op}: {name} {wrong}")


def axes(op: str, name: str, t: Tensor, count: int, batch: int = 0) -> torch.Size:
    """The shape of a tensor of `count` axes, of which the first `batch` may be empty.

    Raises:
        InputError: for another number of axes, or an empty one.
    """
    shape = t.shape
    if len(shape) != count or (0 in shape and 0 in shape[batch:]):
        full = f"none empty after the first {batch}" if batch else "none empty"
        raise InputError(f"triton {op}: {name} of shape {list(shape)}, expected {count} axes, {full}")
    return shape


def adjacent(*tensors: Tensor) -> tuple[Tensor, ...]:
    """The tensors, copied where the last axis is not adjacent in memory."""
    return tuple(t if t.stride(-1) == 1 else t.contiguous() for t in tensors)


def cdiv(n: int, size: int) -> int:
    """n / size, rounded up. Triton's own looks for constants of a kernel in its arguments: on the host 6 us a call."""
    return -(-n // size)


def next_power_of_2(n: int) -> int:
    """The first that is not below n."""
    return 1 << max(n - 1, 0).bit_length()


def processors(device: torch.device) -> int:
    """Multiprocessors of the GPU: how many large programs run at one time. (The interpreter pretends to have 8.)"""
    return 8 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


@cache
def capability_major(device: torch.device) -> int:
    """Of the GPU, the first number of its compute capability: 9 is Hopper's; 0 in the interpreter."""
    return 0 if INTERPRETED else torch.cuda.get_device_capability(device)[0]


@cache
def dependent(device: torch.device) -> bool:
    """Whether a kernel may be launched before the one in front has ended (PDL): Hopper or later."""
    return not INTERPRETED and torch.cuda.get_device_capability(device) >= (9, 0)


_RESERVE: int = 2**17
_ARRIVALS: dict[tuple[torch.device, int], Tensor] = {}  # of each device and stream
_SPARE: dict[torch.device, list[Tensor]] = {}  # what graphs take from; kept, as they hold its addresses
_TAKING = Lock()


def arrivals(device: torch.device, count: int) -> Int[Tensor, " some"]:
    """At least `count` zeros in int32: programs count here which of them is the last, and that one puts the zero back.

    Calls on one stream share them, as one follows the other. A graph may be replayed beside anything else, so each call
    in it has its own for good, from a reserve that calls outside graphs have filled: no replay writes zeros first.
    """
    if INTERPRETED:
        return torch.zeros(count, dtype=torch.int32)
    count = 4 * cdiv(count, 4)  # aligned as those outside graphs, or capturing would compile the kernels again
    with _TAKING:
        spare = _SPARE.setdefault(device, [])
        if torch.cuda.is_current_stream_capturing():
            if not spare or len(spare[-1]) < count:
                return torch.zeros(count, dtype=torch.int32, device=device)  # a launch more
            own, spare[-1] = spare[-1].split([count, len(spare[-1]) - count])
            return own
        if not spare or len(spare[-1]) < _RESERVE // 2:
            spare.append(torch.zeros(_RESERVE, dtype=torch.int32, device=device))
            torch.cuda.current_stream(device).synchronize()  # graphs take them to other streams
        stream = device, torch.cuda.current_stream(device).cuda_stream
        if stream not in _ARRIVALS or len(_ARRIVALS[stream]) < count:
            _ARRIVALS[stream] = torch.zeros(max(count, 1024), dtype=torch.int32, device=device)
        return _ARRIVALS[stream]


_PREPARED: WeakIdKeyDictionary = WeakIdKeyDictionary()


def prepared(parameter: Tensor, make: Callable[[Tensor], Tensor]) -> Tensor:
    """make(parameter), made once, and again when the parameter has moved or changed; forgotten with it.

    PyTorch counts no changes of an inference tensor: one that was made under `torch.inference_mode` must not be changed
    in place after its first use here.
    """
    version = 0 if parameter.is_inference() else parameter._version
    state = (make, parameter.data_ptr(), parameter.dtype, version)
    known = _PREPARED.get(parameter)
    if known is None or known[0] != state:
        known = _PREPARED[parameter] = (state, make(parameter.detach()))
    return known[1]
