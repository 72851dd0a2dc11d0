"""Exact match by task on held-out examples of the small world: `inkling-ref eval-nano`.

An answer is right if greedy decoding gives exactly the reference, from the content marker to the end of sampling. By
default this is read off one forward pass over prompt and reference (teacher forcing): greedy decoding follows the
reference as long as every token of it is the most likely one, so both say the same, and one pass is much quicker.
`greedy=True` decodes for real, with the cache.

The whole model runs in float32; what differs is the stored values of the experts. `shipped` reads the checkpoint,
`bf16` the same training before its experts were quantised: the folder `<checkpoint>-bf16`, which `train-nano` writes.

On two cores 100 examples of each task take two to three minutes, of which the two long retrieval tasks, though they get
a fifth of the examples only, take most.
"""

from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .. import checkpoint as checkpoints
from ..chat import Tokenizer, render
from ..errors import InputError
from ..generation import generate
from ..model import Inkling
from . import rows
from .rows import ANSWER
from .tasks import TASKS, Example

TOKENS = 4096  # of a batch, padding included
LONG = ("retrieval_2000", "retrieval_4000")


def batches(encoded: list[rows.Row]) -> Iterator[list[int]]:
    """Indices of rows that go together, shortest first: little padding, at most TOKENS tokens."""
    batch: list[int] = []
    for i in sorted(range(len(encoded)), key=lambda i: len(encoded[i].ids)):
        if batch and (len(batch) + 1) * len(encoded[i].ids) > TOKENS:
            yield batch
            batch = []
        batch.append(i)
    yield batch


@torch.inference_mode()
def teacher_forced(model: Inkling, encoder: rows.Encoder, examples: list[Example]) -> list[bool]:
    """For each example, whether every token of its reply is the most likely one after those before it."""
    encoded = [rows.encode(example.conversation, encoder) for example in examples]
    right = [False] * len(examples)
    for members in batches(encoded):
        batch = rows.collate([encoded[i] for i in members], encoder, max(len(encoded[i].ids) for i in members))
        ids = torch.from_numpy(batch.ids).long().to(model.device)
        images: dict[str, Any] = {}
        if len(batch.grids):
            images["pixel_values"] = torch.from_numpy(batch.pixel_values()).to(model.device)
            images["image_grid_thw"] = torch.nn.functional.pad(torch.from_numpy(batch.grids).long(), (1, 0), value=1)
        best = model(ids, **images).logits.argmax(-1)
        answer = torch.from_numpy(batch.targets == ANSWER).to(model.device)
        missed = ((best[:, :-1] != ids[:, 1:]) & answer[:, 1:]).any(1)
        for i, wrong in zip(members, missed.tolist(), strict=True):
            right[i] = not wrong
    return right


@torch.inference_mode()
def decoded(model: Inkling, tokenizer: Tokenizer, examples: list[Example], batch_size: int = 16) -> list[bool]:
    """For each example, whether greedy decoding gives its reply."""
    encoder, right = rows.Encoder(tokenizer), []
    for start in range(0, len(examples), batch_size):
        members = examples[start : start + batch_size]
        prompts = [render(e.messages, tokenizer, effort=e.effort, config=model.config) for e in members]
        replies = []
        for prompt, example in zip(prompts, members, strict=True):
            replies.append(rows.encode(example.conversation, encoder).ids[len(prompt.input_ids) :])
        pixels = [p.pixel_values for p in prompts if p.pixel_values is not None]
        grids = [p.image_grid_thw for p in prompts if p.image_grid_thw is not None]
        result = generate(
            model, [p.input_ids for p in prompts], max_new_tokens=max(map(len, replies)),
            pixel_values=torch.cat(pixels) if pixels else None, image_grid_thw=torch.cat(grids) if grids else None,
        )  # fmt: skip
        right += [tokens[: len(reply)] == reply for tokens, reply in zip(result.tokens, replies, strict=True)]
    return right


def evaluate(
    model: Inkling,
    tokenizer: Tokenizer,
    tasks: Iterable[str] | None = None,
    examples: int = 100,
    greedy: bool = False,
    seed: int = 0,
    progress: Callable[[list[str]], Iterable[str]] = iter,
) -> dict[str, tuple[float, int]]:
    """Task -> (share of exactly right replies, number of examples). `progress` wraps the list of tasks as they run.

    Raises:
        InputError: for a task that does not exist, or no examples.
    """
    names = list(TASKS) if tasks is None else list(tasks)
    for name in names:
        if name not in TASKS:
            raise InputError(f"task {name!r}: expected one of {', '.join(TASKS)}")
    if examples < 1:
        raise InputError(f"examples: {examples}, expected at least 1")
    encoder, result = rows.Encoder(tokenizer), {}
    for name in progress(names):
        drawn = TASKS[name].examples(-(-examples // 5) if name in LONG else examples, seed)
        right = decoded(model, tokenizer, drawn) if greedy else teacher_forced(model, encoder, drawn)
        result[name] = (sum(right) / len(right), len(right))
    return result


def main(
    checkpoint: str | Path,
    tasks: Iterable[str] | None = None,
    examples: int = 100,
    precision: str = "shipped",
    greedy: bool = False,
    seed: int = 0,
) -> dict[str, dict[str, tuple[float, int]]]:
    """Evaluate and print a table. precision: shipped, bf16 or both (module docstring).

    Raises:
        InputError: as `evaluate`; another precision; a folder that is not there.
    """
    from rich.console import Console
    from rich.progress import track
    from rich.table import Table

    folder = Path(checkpoint)
    folders = {"shipped": folder, "bf16": folder.with_name(f"{folder.resolve().name}-bf16")}
    wanted = list(folders) if precision == "both" else [precision]
    if not set(wanted) <= set(folders):
        raise InputError(f"precision {precision!r}: expected 'shipped', 'bf16' or 'both'")
    if "bf16" in wanted and not folders["bf16"].is_dir():
        raise InputError(f"{folders['bf16']}: not found; train-nano writes it beside its checkpoint")
    tokenizer = Tokenizer.from_pretrained(folder)
    results = {}
    for name in wanted:
        model = checkpoints.load(folders[name], experts="dequantize")
        bar = partial(track, description=f"evaluating {name}", console=Console(stderr=True), transient=True)
        results[name] = evaluate(model, tokenizer, tasks, examples, greedy, seed, bar)

    table = Table(
        "task", "n", *(f"{name}, % exact" for name in wanted), title=f"{folder.resolve().name}, held-out examples"
    )
    for task in results[wanted[0]]:
        shares = [f"{100 * results[name][task][0]:.1f}" for name in wanted]
        table.add_row(task, str(results[wanted[0]][task][1]), *shares)
    Console().print(table)
    return results
