"""Faults that each notebook's own Verify cells must notice: stem -> [(attribute to break, how), ...].

The attribute is `module.name` of `inkling_ref`; `how` takes the original and returns the broken one. Mend nothing
here when a notebook changes: a fault that goes unnoticed means that a Verify cell has stopped verifying.
"""

from collections.abc import Callable
from typing import Any

MUTATIONS: dict[str, list[tuple[str, Callable[[Any], Any]]]] = {}
