"""What drafting brings: acceptance by position, tokens per pass of the target, tokens per second, the cost of checking.

`by_task` asks nano's held-out questions at batch 1, with and without the drafter in turns, so that a machine that slows
down slows both. `find_layout` judges the choices that a drafter's file leaves open, by what the target accepts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from ..chat import Tokenizer, render
from ..draft_files import load_drafter
from ..errors import InputError
from ..generation import generate
from ..model import Inkling
from ..nano import rows, train_drafter
from ..nano import tasks as nano_tasks
from ..speculative import Drafting

TASKS = train_drafter.LONG
QUESTIONS = (
    "Tell me a story.",
    "What is 17 plus 25?",
    "Explain in three sentences why the sky is blue.",
    "Write a Python function that returns the n-th Fibonacci number.",
)
BATCH_TOKENS = 4096  # of prompts that are answered together
NEW_TOKENS = 48  # of each answer that a layout is judged by
# The first of each is what a file that says nothing is taken to mean.
OPEN = {
    "sample_from_anchor": (False, True),
    "tap": ("after", "before", "mixed"),
    "final_tap": ("norm", "mix"),
    "embed_norm": (True, False),
    "softcap": (True, False),
}


@dataclass
class Result:
    """Of one set of prompts; each number is a ratio of sums over its answers."""

    acceptance: list[float]  # by position
    tokens_per_pass: float
    tokens_per_second: float
    without: float  # tokens per second without a drafter


def side_by_side(
    model: Inkling, drafting: Any, prompts: Sequence[dict], max_new_tokens: int, temperature: float, eos: list[int]
) -> Result:
    """Each prompt, the arguments of `generate` as a dict, with and without drafting. The first is a warm-up as well."""
    seconds, tokens, drafts = [0.0, 0.0], [0, 0], []
    for i, prompt in enumerate([prompts[0], *prompts]):
        for way, drafter in enumerate((None, drafting)):
            options = {"temperature": temperature, "seed": i, "eos_token_id": eos, "drafter": drafter}
            stats = generate(model, max_new_tokens=max_new_tokens, **prompt, **options).stats
            if i:
                seconds[way] += stats.decode_seconds
                tokens[way] += stats.new_tokens - 1
                drafts += [stats.drafting] if drafter else []
    checked = [sum(column) for column in zip(*(d.checked for d in drafts), strict=True)]
    accepted = [sum(column) for column in zip(*(d.accepted for d in drafts), strict=True)]
    return Result(
        [a / c if c else 0.0 for a, c in zip(accepted, checked, strict=True)],
        sum(d.new_tokens for d in drafts) / max(1, sum(d.row_rounds for d in drafts)),
        tokens[1] / seconds[1] if seconds[1] else 0.0,
        tokens[0] / seconds[0] if seconds[0] else 0.0,
    )


def by_task(
    folder: str | Path, model: Inkling, drafting: Any, tasks: Sequence[str], examples: int, temperature: float
) -> Iterator[tuple[str, Result]]:
    """Nano's tasks, held-out prompts. Raises InputError for an unknown task, before any is run."""
    check_tasks(tasks)
    tokenizer = Tokenizer.from_pretrained(folder)
    encoder = rows.Encoder(tokenizer)
    for task in tasks:
        made = train_drafter.prompts(task, examples, 0, encoder, held_out=True)
        if not made:
            raise InputError(f"task {task!r}: its prompts leave no room for an answer")
        prompts = [{"input_ids": [row.ids], **train_drafter.pictures([row], encoder)} for row in made]
        result = side_by_side(model, drafting, prompts, train_drafter.NEW_TOKENS, temperature, tokenizer.end_ids)
        yield task, result


def all_tasks() -> tuple[str, ...]:
    """Nano's tasks, and "running text": tell a story."""
    return (*nano_tasks.TASKS, "running text")


def check_tasks(tasks: Sequence[str]) -> None:
    """Raises InputError for one that does not exist."""
    if unknown := [task for task in tasks if task not in all_tasks()]:
        raise InputError(f"task {unknown[0]!r}: expected one of {', '.join(all_tasks())}")


@dataclass
class Same:
    """Greedy answers of one task with and without drafting."""

    answers: int
    tokens: int
    tokens_per_pass: float
    different: list[int]  # which prompts


def same_answers(
    folder: str | Path, model: Inkling, drafting: Any, tasks: Sequence[str], examples: int
) -> Iterator[tuple[str, Same]]:
    """Whether greedy answers are token for token those of plain decoding, on held-out prompts of every length.

    Raises InputError for an unknown task, before any is run.
    """
    check_tasks(tasks)
    tokenizer = Tokenizer.from_pretrained(folder)
    encoder, ended = rows.Encoder(tokenizer), tokenizer.end_ids
    for task in tasks:
        made = train_drafter.prompts(task, examples, 0, encoder, True, model.config.text.max_position_embeddings)
        size = max(1, BATCH_TOKENS // max(len(row.ids) for row in made))
        tokens, rounds, new, different = 0, 0, 0, []
        for start in range(0, len(made), size):
            part = made[start : start + size]
            ids, images = [row.ids for row in part], train_drafter.pictures(part, encoder)
            plain, drafted = (
                generate(model, ids, train_drafter.NEW_TOKENS, eos_token_id=ended, drafter=drafter, **images)
                for drafter in (None, drafting)
            )
            different += [
                start + i for i, (a, b) in enumerate(zip(plain.tokens, drafted.tokens, strict=True)) if a != b
            ]
            tokens += sum(map(len, plain.tokens))
            rounds += drafted.stats.drafting.row_rounds
            new += drafted.stats.drafting.new_tokens
        yield task, Same(len(made), tokens, new / max(1, rounds), different)


def some_ids(model: Inkling, length: int = 64) -> Int[Tensor, "1 T"]:
    """A prompt for timing, whose text does not matter."""
    return (torch.arange(length, device=model.device) % model.config.text.unpadded_vocab_size)[None]


def find_layout(folder: str | Path, model: Inkling) -> list[tuple[dict[str, Any], float, float]]:
    """(choices, acceptance of the first draft, mean acceptance of the others) of all combinations, the best first.

    Greedy answers to a few questions. A wrong layout, tap or norm shows as a large drop; the text is right with each.
    Choices that this drafter cannot have are left out.
    """
    tokenizer = Tokenizer.from_pretrained(folder)
    prompts = [render([{"role": "user", "content": q}], tokenizer, config=model.config).input_ids for q in QUESTIONS]
    ended, found = tokenizer.end_ids, []
    has_output = load_drafter(folder, model).config.target_layer_ids[-1] == model.config.text.num_hidden_layers
    for values in product(*({**OPEN, **({} if has_output else {"final_tap": ("norm",)})}).values()):
        choices = dict(zip(OPEN, values, strict=True))
        try:
            drafter = load_drafter(folder, model, **choices)
        except InputError:  # impossible for this one: nothing comes before the embedding, say
            continue
        drafting = Drafting(drafter, num_tokens=max(1, drafter.config.block_size - 1))
        stats = generate(model, prompts, NEW_TOKENS, eos_token_id=ended, drafter=drafting).stats.drafting
        first, *others = stats.acceptance()
        found.append((choices, first, fmean(others) if others else 0.0))
    return sorted(found, key=lambda entry: -entry[1] - entry[2])
