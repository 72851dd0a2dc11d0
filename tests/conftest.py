"""Settings for every test: no network, a fixed seed, no deadline for generated examples."""

import os

os.environ["HF_HUB_OFFLINE"] = "1"  # read when transformers is imported

import pytest
import torch
from hypothesis import settings

if not torch.cuda.is_available():
    os.environ["TRITON_INTERPRET"] = "1"  # read when triton is imported, by whichever test comes first

# Two workers share two cores: the time of one example says nothing. Derandomised, so that CI is repeatable.
settings.register_profile("suite", deadline=None, derandomize=True, database=None)
settings.load_profile("suite")


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
