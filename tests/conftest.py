"""Settings for every test: no network, a fixed seed, no deadline for generated examples."""

import os
import random

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, by whichever test comes first

# Two workers share two cores: the time of one example says nothing. Derandomised, so that CI is repeatable.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True, scope="session")
def _programs_in_any_order():
    """Triton's interpreter runs a launch's programs one after the other; here shuffled, as a GPU gives no order.

    A program that writes over another's output is then seen: in the order of their numbers the right one may be last.
    """
    if os.environ.get("TRITON_INTERPRET") != "1":
        return
    try:
        from triton.runtime.interpreter import interpreter_builder as builder
    except ImportError:  # the tests of kernels are skipped
        return
    at, orders = builder.set_grid_idx, {}

    def shuffled(*place):
        for n in builder.grid_dim:
            if n not in orders:
                orders[n] = random.Random(n).sample(range(n), n)
        at(*(orders[n][i] for n, i in zip(builder.grid_dim, place, strict=True)))

    builder.set_grid_idx = shuffled


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
