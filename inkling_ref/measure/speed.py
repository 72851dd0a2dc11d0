"""Speed on this machine: `python -m inkling_ref.measure.speed [CHECKPOINT]`, or `make bench`.

Times the shipped nano checkpoint: reading it, decoding, a forward pass of 1,024 tokens beside the same weights in
`transformers` (if that is installed), and `inkling-ref ask` from the start of its process. Medians; the two forward
passes take turns, so that a machine that slows down slows both. Last, on Linux, what comparing two
traces of 200 MB takes.
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
from .trace import VERSION, Trace

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


def comparison(tokens: int = 470) -> tuple[float, float, float, float]:
    """Two traces with Small's shapes, of 0.43 MB a token, compared in a process of its own.

    Returns: MB of both files; seconds; the most MB of memory after importing, and in the end.
    """
    rows = {"attention.q": (48, 128), "attention.gated": (48, 128), "attention.out": (4608,), "conv_attn": (4608,)}
    rows |= {"after_attention": (4608,), "conv_mlp": (4608,), "out": (4608,)}
    generator = torch.Generator().manual_seed(0)
    right = {name: torch.randn(1, tokens, *shape, generator=generator) for name, shape in rows.items()}
    with tempfile.TemporaryDirectory() as folder:
        files = [Path(folder) / f"{side}.safetensors" for side in "ab"]
        for path, factor in zip(files, (1.0, 1.001), strict=True):
            tensors = {f"layer.{i}.{name}": (factor * x).bfloat16() for name, x in right.items() for i in range(6)}
            Trace(tensors, {"version": VERSION, "dtype": "bfloat16"}).save(path)
        size = sum(path.stat().st_size for path in files) / 1e6
        command = [sys.executable, "-c", _COMPARED, *map(str, files)]
        done = subprocess.run(command, check=True, capture_output=True, text=True)
    return size, *map(float, done.stdout.split())


# Not by `resource`: its maximum counts what the process that started this one had.
_COMPARED = """
import re, sys, time
from inkling_ref.measure.compare import compare
memory = lambda: int(re.search(r"VmHWM:\\s+(\\d+)", open("/proc/self/status").read())[1]) / 1e3
start, before = time.perf_counter(), memory()
assert len(compare(*sys.argv[1:]).rows) == 42
print(time.perf_counter() - start, before, memory())
"""


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

    if sys.platform == "linux":  # which tells a process its memory
        size, time_taken, before, memory = comparison()
        print(
            f"compare, two traces, {size:.0f} MB: {time_taken:.1f} s, {memory:.0f} MB of memory ({before:.0f} before)"
        )


if __name__ == "__main__":
    main(*sys.argv[1:])
