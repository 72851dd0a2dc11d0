"""Generation on a world of ranks: `inkling_ref.generate` on every rank, with what has to agree among them.

All ranks of a tp group call with the same prompts and draw the same random numbers, so they write the same tokens;
candidates travel instead of logits, except where a draft is judged at a temperature alone (see `layers.ShardedHead`).
Groups with batches of their own take turns pass by pass: one that has finished, or never had a prompt, still lends its
experts to the others until all are done.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import generation
from ..dspark import Drafter
from ..model import Inkling
from ..speculative import Drafting


def generate(model: Inkling, input_ids: Any, **options: Any) -> generation.Generation | None:
    """`inkling_ref.generate` for a model of `parallelize`; input_ids None: this dp group has no prompts.

    Greedy, top_k and top_p choose as the single process does. With temperature alone the distribution is the same,
    and the tokens of a seed are others. A drafter must have been through `adopt`.
    """
    result = None
    if input_ids is not None:
        seed = _common_seed(model, options.pop("seed", None))
        wanted = tuple(options.get(name) for name in ("temperature", "top_k", "top_p"))
        drafter = options.get("drafter")
        with _sampling(model, wanted, seed, drafter is not None):
            result = generation.generate(model, input_ids, seed=seed, **options)
    finish(model)
    return result


def _common_seed(model: Inkling, seed: int | None) -> int:
    """The seed, or a fresh one: the same on all ranks of a tp group."""
    if seed is not None:
        return seed
    drawn = torch.tensor([secrets.randbits(62)], device=model.device)
    return int(model.mesh.tp.gather(drawn, 0)[0])


@contextmanager
def _sampling(model: Inkling, wanted: tuple, seed: int, has_drafter: bool) -> Iterator[None]:
    """Within, `logits` gives what these settings need."""
    head = model.llm.logits
    temperature, top_k, top_p = wanted
    head.sampling = (temperature or 0.0, top_k, top_p)
    if not has_drafter:  # a verdict on drafts needs the distribution itself
        rank = model.mesh.rank
        head.noise = torch.Generator(device=model.device).manual_seed((seed + 7919 * (rank + 1)) % 2**63)
    try:
        yield
    finally:
        head.sampling = head.noise = None


@torch.inference_mode()
def finish(model: Inkling) -> None:
    """Take part in the passes of other dp groups until none has any left. Every group calls it in the end."""
    current, llm = model.current, model.llm
    if current.dp.size == 1:
        return
    nothing = torch.zeros(1, 0, model.config.text.hidden_size, dtype=model.dtype, device=model.device)
    while max(current.begin(-1, model.device)) >= 0:
        for layer in llm.layers:
            layer.mlp(nothing)


def adopt(drafter: Drafter | Drafting) -> Drafter | Drafting:
    """Make a drafter of a parallel model one of its world; once for each drafter.

    It sees whole tokens, and all but its head's table W_2 is on every rank: base logits and corrections are by rows of
    the vocabulary, like the target's, and for each drafted token candidates travel.
    """
    inner = drafter.drafter if isinstance(drafter, Drafting) else drafter
    model: Inkling = inner.model
    head, current, observe, propose = model.llm.logits, model.current, inner.observe, inner.propose

    @contextmanager
    def observe_all(model: Inkling) -> Iterator[dict[int, Tensor]]:
        T = None

        def note(_: Any, inputs: tuple) -> None:
            nonlocal T
            T = current.T

        handle = model.llm.layers[0].register_forward_pre_hook(note)
        try:
            with observe(model) as taps:
                yield taps
        finally:
            handle.remove()
        if T is not None:  # taps hold this rank's tokens, but for those that look at the gathered output
            current.T = T
            for id, tap in taps.items():
                if tap.shape[1] != T:
                    taps[id] = current.all_tokens(tap)
            current.T = None

    inner.observe = observe_all
    inner.base_logits = lambda h: head.local(h, inner.config.softcap)
    inner.propose = lambda context, anchors, n, choose: propose(
        context, anchors, n, lambda local: choose(head.exchange(local))
    )
    inner.used = max(head.counts)
    if inner.markov_head is not None:
        table, n = inner.markov_head.markov_w2, head.counts[model.mesh.tp.rank]
        rows = F.pad(table.weight[head.first : head.first + n], (0, 0, 0, inner.used - n))
        table.weight = nn.Parameter(rows.clone(), requires_grad=False)
    return drafter
