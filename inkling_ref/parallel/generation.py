"""Generation on a world of ranks: `inkling_ref.generate` on every rank, with what has to agree among them.

All ranks of a tp group call with the same prompts and draw the same random numbers, so they write the same tokens. Not
logits travel but candidates (see `layers.ShardedHead`), and sums where drafts are judged at a temperature alone (see
`Slices`). Groups with batches of their own take turns pass by pass: one that has finished, or never had a prompt, still
lends its experts to the others until all are done.
"""

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from numbers import Real
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from .. import generation
from ..dspark import Drafter
from ..errors import InputError
from ..model import Inkling
from ..sampling import WHOLE, Vocabulary
from .layers import ShardedHead


def generate(model: Inkling, input_ids: Any, **options: Any) -> generation.Generation | None:
    """`inkling_ref.generate` for a model of `parallelize`; input_ids None: this dp group has no prompts.

    Greedy, top_k and top_p choose as the single process does. With temperature alone the distribution is the same,
    and the tokens of a seed are others. A `Drafter` is one of `drafter.adopt`.

    Raises:
        InputError: also for a whole drafter.
    """
    drafter = options.get("drafter")
    if isinstance(inner := getattr(drafter, "drafter", drafter), Drafter) and not hasattr(inner, "share"):
        raise InputError("drafter: whole, expected a rank's part, from parallel.drafter's load_drafter or adopt")
    result = None
    if input_ids is not None:
        seed = _common_seed(model, options.pop("seed", None))
        wanted = tuple(options.get(name) for name in ("temperature", "top_k", "top_p"))
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
    noise = torch.Generator(device=model.device).manual_seed((seed + 7919 * (model.mesh.rank + 1)) % 2**63)
    model.vocabulary = WHOLE
    if not has_drafter:
        head.noise = noise
    elif temperature and top_k is None and top_p in (None, 1) and head.tp.size > 1:  # the rest has few candidates
        model.vocabulary = Slices(head, noise)
    try:
        yield
    finally:
        head.sampling = head.noise = None
        del model.vocabulary


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


class Slices(Vocabulary):
    """The vocabulary's axis in slices, one a rank; for each row a few numbers travel, however many tokens there are.

    A token is drawn by a race: of numbers p / e, with e exponential, the largest is v's with probability p(v). Every
    rank names its largest. The noise differs by rank; whether a draft stands is drawn from what all ranks share.
    """

    def __init__(self, head: ShardedHead, noise: torch.Generator) -> None:
        self.head, self.noise = head, noise
        row = torch.arange(max(head.counts), device=noise.device)
        self.ids = torch.where(row < head.counts[head.tp.rank], row + head.first, -1)  # others may have one row more

    def distribution(
        self, logits: Float[Tensor, "*shape rows"], temperature: Real, top_k: Real | None, top_p: Real | None
    ) -> tuple[Float[Tensor, "*shape rows"], Bool[Tensor, "*shape"]]:
        # In float64 no temperature overflows, and nothing is lost without the largest logit of all ranks.
        scaled = logits.double() / max(temperature, torch.finfo(torch.float32).tiny)
        log_mass = self.head.tp.gather(scaled.logsumexp(dim=-1, keepdim=True), -1).logsumexp(dim=-1, keepdim=True)
        sound = log_mass.isfinite()
        p = torch.where(sound, (scaled - log_mass).exp(), 1 / self.head.used).masked_fill(self.ids < 0, 0)
        return p.to(logits.dtype), sound[..., 0]

    def best(self, logits: Float[Tensor, "*shape rows"]) -> Int[Tensor, "*shape"]:
        values, ids = self.head.candidates(logits, 1)
        return ids.gather(-1, values.argmax(dim=-1, keepdim=True))[..., 0]

    def at(self, p: Float[Tensor, "*shape rows"], ids: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
        return self.sum(torch.where(ids[..., None] == self.ids, p, 0))[..., 0]

    def sum(self, p: Float[Tensor, "*shape rows"]) -> Float[Tensor, "*shape 1"]:
        # Gathered, and added up in one order: ranks that differed in a bit could come to different verdicts.
        return self.head.tp.gather(p.sum(dim=-1, keepdim=True), -1).sum(dim=-1, keepdim=True)

    def one_hot(self, ids: Int[Tensor, "*shape"], p: Float[Tensor, "*shape rows"]) -> Float[Tensor, "*shape rows"]:
        return (ids[..., None] == self.ids).to(p.dtype)

    def sample(self, p: Float[Tensor, "B rows"], generator: torch.Generator | None) -> Int[Tensor, " B"]:
        e = torch.empty_like(p).exponential_(generator=self.noise).clamp(min=torch.finfo(p.dtype).tiny)
        return self.best(p / e)

    def spread(self, logits: Float[Tensor, "*shape rows"], temperature: Real) -> Float[Tensor, "*shape V"]:
        return self.head.draw(logits, temperature, self.noise)
