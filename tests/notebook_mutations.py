"""Faults that each notebook's own Verify cells must notice: stem -> [(attribute to break, how), ...].

The attribute is `module.name` of `inkling_ref`; `how` takes the original and returns the broken one. Mend nothing
here when a notebook changes: a fault that goes unnoticed means that a Verify cell has stopped verifying.
"""

from collections.abc import Callable
from typing import Any

MUTATIONS: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {
    "quantization": [
        ("quantization._unpack_e2m1", lambda f: lambda codes: f(codes >> 4 | codes << 4)),  # nibbles swapped
        ("quantization._nvfp4_round", lambda f: lambda w, amax, outer, target: f(w, amax, outer, 6.0)),  # never four
        ("quantization._mxfp8_round", lambda f: lambda w: (f(w)[0], f(w)[1] + 1)),  # the wrong power of two
    ],
}
