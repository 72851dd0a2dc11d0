"""What the shipped nano knows: exact match on held-out examples, task by task, against the goals it was trained for.

As `inkling-ref eval-nano`: a reply counts if greedy decoding gives exactly the reference (read off one forward pass;
tests/test_nano_train.py holds that to real decoding). The examples are the first of a fixed seed that training never
draws from; README.md states larger numbers of the same.
"""

import functools
from pathlib import Path

import pytest
import torch

import inkling_ref as ir
from inkling_ref.nano import evaluate

NANO = Path(ir.__file__).parent / "data" / "nano"
# task -> (examples, least share of right replies). evaluate() takes a fifth of the examples of the long retrievals.
GOALS = {
    "colour": (200, 0.98), "shape": (200, 0.98), "count": (200, 0.98), "position": (200, 0.98), "yes_no": (200, 0.98),
    "caption": (150, 0.90), "story": (600, 0.96), "sum_direct": (200, 0.99), "sum_thinking": (200, 0.99),
    "retrieval_2000": (125, 0.99), "retrieval_4000": (50, 0.95),
    # No goal of the issue names these three; they must not rot either.
    "size": (100, 0.95), "two_pictures": (100, 0.95), "talk": (100, 0.98),
}  # fmt: skip


@functools.cache
def nano() -> tuple[ir.Inkling, ir.Tokenizer]:
    return ir.load(NANO), ir.Tokenizer.from_pretrained(NANO)


@pytest.mark.parametrize("task", GOALS)
def test_held_out_accuracy(task):
    examples, goal = GOALS[task]
    share, n = evaluate.evaluate(*nano(), [task], examples)[task]
    print(f"{task}: {100 * share:.1f} % of {n}")
    assert share >= goal


def test_an_untrained_nano_knows_nothing():
    """The measure itself can fail: random weights give no exact reply."""
    torch.manual_seed(0)
    model = ir.Inkling(nano()[0].config).eval()
    share, _ = evaluate.evaluate(model, nano()[1], ["colour"], 20)["colour"]
    assert share == 0
