"""A profile shows the parts of a model and of a decoding step under their names, and nothing of it stays."""

from itertools import groupby

import torch
from helpers import random_ids, random_model, unchecked

import inkling_ref as ir
from inkling_ref.measure.ranges import OPERATIONS, ranges

CONVOLUTION, MIX = "short convolution", "attention residual mix"


def seen(run, call):
    """Names of ranges in the order in which they began, repetitions once."""
    with ranges(run), torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        call()
    named = {"embedding", "projections", "unembedding", *OPERATIONS.values()}
    events = sorted((event.time_range.start, event.name) for event in profile.events() if event.name in named)
    return [name for name, _ in groupby(name for _, name in events)]


@unchecked()
@torch.inference_mode()
def test_a_forward_and_a_step():
    model = random_model()
    L, ids = model.config.text.num_hidden_layers, random_ids(1, 5)
    before = {name: vars(module).copy() for name, module in model.named_modules()}
    projected = ["projections", CONVOLUTION, "projections", "attention", "projections", CONVOLUTION, MIX]
    layer = [*projected, "router", "experts", CONVOLUTION, MIX]
    assert seen(model, lambda: model(ids)) == ["embedding", MIX, *layer * L, "unembedding"]

    step = ir.DecodeStep(model, 1, 9)
    plain = step.ops
    joined = f"{CONVOLUTION} and {MIX}"
    attention = ["projections", "queries, keys and values", "attention", "projections"]
    layer = [*attention, joined, "router", "experts", joined]
    assert seen(step, lambda: step.prefill(ids)) == ["embedding", *layer * L]
    parts = seen(step, lambda: (step(ids[:, :1]), step.next_tokens()))
    assert parts == ["embedding", *layer * L, "unembedding"]
    assert step.ops is plain
    for name, module in model.named_modules():
        assert vars(module).keys() == before[name].keys()
        assert vars(module).get("ops") is before[name].get("ops")
