"""Speed on this machine: `python -m inkling_ref.measure.speed [CHECKPOINT]`, or `make bench`.

Times the shipped nano checkpoint: reading it, decoding, a forward pass of 1,024 tokens beside the same weights in
`transformers` (if that is installed), and `inkling-ref ask` from the start of its process. Medians; the two forward
passes take turns, so that a machine that slows down slows both.
"""

import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from .. import checkpoint
from ..cli import NANO, use_few_threads
from ..config import InklingConfig
from ..generation import generate
from ..model import Inkling

PREFILL_TOKENS, DECODE_TOKENS = 1024, 128


def seconds(*actions: Callable[[], object], repeats: int = 5) -> list[float]:
    """Median seconds of each action; they take turns, after one round to warm up."""
    times: list[list[float]] = [[] for _ in actions]
    for _ in range(repeats + 1):
        for taken, action in zip(times, actions, strict=True):
            start = time.perf_counter()
            action()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken[1:]) for taken in times]


def their_forward(model: Inkling, ids: torch.Tensor) -> Callable[[], object] | None:
    """The same forward pass by `transformers`, with the weights of `model`; None if it is not installed."""
    try:
        from transformers import Inkling2ForConditionalGeneration
        from transformers.utils import logging
    except ImportError:
        return None
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    with tempfile.TemporaryDirectory() as folder:
        checkpoint.save(model, folder)
        theirs = Inkling2ForConditionalGeneration.from_pretrained(folder, dtype=model.dtype).eval()
    # Without a cache, as ours: filling one would be work that only they do.
    forward = partial(theirs, ids, use_cache=False)
    difference = (forward().logits - model(ids).logits).abs().max().item()
    if not difference < 1e-2:
        raise RuntimeError(f"the two models differ by {difference} in a logit: the times would mean nothing")
    return forward


@torch.inference_mode()
def main(folder: str | Path = NANO) -> None:
    """Measure and print, one line a number."""
    print(f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads, torch {torch.__version__}")
    threads = torch.get_num_threads()
    use_few_threads(InklingConfig.from_pretrained(folder), "cpu")  # as `ask` does
    (load,) = seconds(lambda: checkpoint.load(folder))
    print(f"load: {load:.2f} s")

    model = checkpoint.load(folder)
    V = model.config.text.unpadded_vocab_size
    ids = torch.randint(V, (1, PREFILL_TOKENS), generator=torch.Generator().manual_seed(0))
    prompt, speeds = ids[:, :50], []
    for _ in range(4):
        stats = generate(model, prompt, max_new_tokens=DECODE_TOKENS, eos_token_id=[]).stats
        speeds.append((DECODE_TOKENS - 1) / stats.decode_seconds)
    print(f"decode, batch 1: {statistics.median(speeds[1:]):.0f} tokens/s")

    torch.set_num_threads(threads)
    theirs = their_forward(model, ids)
    ours, *other = seconds(lambda: model(ids), *([theirs] if theirs else []))
    beside = [f"transformers {t:.2f} s, ratio {ours / t:.2f}" for t in other] or ["transformers is not installed"]
    print(f"forward, {PREFILL_TOKENS} tokens: {ours:.2f} s; {beside[0]}")

    command = [sys.executable, "-c", "from inkling_ref.cli import main; main()", "ask", "What colour is the circle?"]
    command += ["--checkpoint", str(folder), "--max-new-tokens", "16"]
    (answer,) = seconds(lambda: subprocess.run(command, check=True, capture_output=True), repeats=3)
    print(f"ask, from the start of its process: {answer:.2f} s")


if __name__ == "__main__":
    main(*sys.argv[1:])
