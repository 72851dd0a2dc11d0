"""Times of a whole decoding step of the shipped nano: embedding, 18 layers, unembedding and the choice of a token."""

from pathlib import Path

import torch

from ... import checkpoint
from .harness import BF16, Bench
from .layer import Case, Race

NANO = Path(__file__).parents[2] / "data" / "nano"
CASES = (Case(1, 1024, compiled=True),)


def bench_step(bench: Bench, backend: str = "triton", dtype: torch.dtype = BF16, device: str = "cuda") -> None:
    """The arms of `layer` on a model that launches bound, not memory: its weights fit into the L2 cache."""
    race = Race(bench, "nano step", checkpoint.load(NANO, device, dtype, backend, "packed"), head=True)
    race.run_ours(CASES)
    if not bench.prepare:  # what PyTorch compiles comes last and is the slowest: its rows may be missing
        race.run_peers(CASES, checkpoint.load(NANO, device, dtype, experts="dequantize"))
