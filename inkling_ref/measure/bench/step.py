"""Times of a whole decoding step of the shipped nano: embedding, 18 layers, unembedding and the choice of a token."""

from pathlib import Path

import torch
from torch import Tensor

from ... import checkpoint
from ...cache import Cache
from ...chat import Tokenizer
from ...model import Inkling
from ...nano.rows import Encoder, generator, make_row
from .harness import BF16, Bench
from .layer import Case, Race

NANO = Path(__file__).parents[2] / "data" / "nano"
CASES = (Case(1, 1024, compiled=True),)


def told(model: Inkling, case: Case) -> tuple[Cache, Tensor]:
    """A cache that holds stories, which nano knows, and the ids after them: on noise a trained model's errors grow."""
    encoder, stop = Encoder(Tokenizer.from_pretrained(NANO)), case.context + case.tokens
    texts = [make_row("stories", generator("bench", "stories", row), encoder, 2 * stop)[1] for row in range(case.rows)]
    ids, cache = torch.tensor([text.ids[:stop] for text in texts], device=model.device), model.new_cache(case.rows)
    model(ids[:, : case.context], cache=cache, logits_to_keep=1)
    return cache, ids[:, case.context :]


def bench_step(bench: Bench, backend: str = "triton", dtype: torch.dtype = BF16, device: str = "cuda") -> None:
    """The arms of `layer` on a model that launches bound, not memory: its weights fit into the L2 cache."""
    race = Race(bench, "nano step", checkpoint.load(NANO, device, dtype, backend, "packed"), True, told)
    race.run_ours(CASES)
    if not bench.prepare:  # what PyTorch compiles comes last and is the slowest: its rows may be missing
        race.run_peers(CASES, checkpoint.load(NANO, device, dtype, experts="dequantize"))
