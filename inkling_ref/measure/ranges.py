"""Profiler ranges: a profile of a model, or of a `DecodeStep`, by the parts that the notebooks explain.

    with ranges(model), torch.profiler.profile() as profile:
        model(ids)
    print(profile.key_averages().table())

The model needs no help for it, and outside of `ranges` nothing is measured or slowed: as in `trace`, its operations
belong to a `Backend` that its modules hold, and for as long as this lasts that is one whose operations open a range
each; the projections are modules. `torch.autograd.profiler.emit_nvtx` shows the same ranges to Nsight. A step shows
them as long as it is not captured: what a graph launches has no ranges.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import fields, replace
from functools import wraps
from typing import Any

import torch
from torch import nn
from torch.profiler import record_function

from ..backends import Backend
from ..decode_step import DecodeStep
from ..model import Inkling

EMBEDDING, MIX, CONVOLUTION = "embedding", "attention residual mix", "short convolution"
PROJECTIONS, PREPARATION, ATTENTION = "projections", "queries, keys and values", "attention"
ROUTER, EXPERTS, UNEMBEDDING = "router", "experts", "unembedding"
OPERATIONS = {
    "mix_and_norm": MIX,
    "short_conv": CONVOLUTION,
    "dynamic_short_conv": CONVOLUTION,
    "attend": ATTENTION,
    "route": ROUTER,
    "experts": EXPERTS,
    # Of a step, some of them two parts in one:
    "embed_and_norm": EMBEDDING,
    "project": PROJECTIONS,
    "prepare_qkv": PREPARATION,
    "attend_cache": ATTENTION,
    "join_and_mix": f"{CONVOLUTION} and {MIX}",
    "sample_head": UNEMBEDDING,
    "elect": UNEMBEDDING,
}  # fmt: skip


def ranged(name: str, run: Callable) -> Callable:
    """`run` within a range, as long as a profiler runs: a range for nobody would cost 2 to 6 microseconds."""

    @wraps(run)
    def within(*args: Any, **kwargs: Any) -> Any:
        if not torch.autograd._profiler_enabled():
            return run(*args, **kwargs)
        with record_function(name):
            return run(*args, **kwargs)

    return within


def ranged_backend(ops: Backend) -> Backend:
    """`ops` with a range around each operation."""
    named = [field.name for field in fields(ops) if field.name in OPERATIONS]
    return replace(ops, **{name: ranged(OPERATIONS[name], getattr(ops, name)) for name in named})


@contextmanager
def ranges(run: Inkling | DecodeStep) -> Iterator[None]:
    """Within it a profiler sees the parts of a model, or of a step and its model."""
    model = run.model if isinstance(run, DecodeStep) else run
    with ExitStack() as stack:

        def put(owner: Any, name: str, value: Any) -> None:
            before = vars(owner).get(name)
            setattr(owner, name, value)
            stack.callback(*((setattr, owner, name, before) if before is not None else (delattr, owner, name)))

        for owner in [*([] if run is model else [run]), *model.llm.modules()]:
            if isinstance(getattr(owner, "ops", None), Backend):
                put(owner, "ops", ranged_backend(owner.ops))
        for layer in model.llm.layers:
            for projection in layer.attn.children():
                if isinstance(projection, nn.Linear):
                    put(projection, "forward", ranged(PROJECTIONS, projection.forward))
        put(model.llm, "embed_tokens", ranged(EMBEDDING, model.llm.embed_tokens))
        put(model.llm, "logits", ranged(UNEMBEDDING, model.llm.logits))
        yield
