"""Other ways to run a rank's weights than by the kernels, in place: of what is made once there is one."""

from functools import partial
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from .. import fused
from ..backends import Backend
from ..decode_step import StepBackend
from ..measure.bench.layer import MATRICES, put
from ..measure.bench.peers import attend_cache_at, gathered_experts
from ..model import Inkling
from ..moe import route


def release_experts(model: Inkling) -> None:
    """From the kernels' order back to the released layout, a matrix at a time."""
    text = model.config.text
    D, I = text.hidden_size, text.moe_intermediate_size // model.mesh.plan.etp
    for experts in (layer.mlp.experts for layer in model.llm.layers):
        for name, rows, columns in zip(MATRICES, (2 * I, D), (D, I), strict=True):
            if experts.matrix(name).weight.dtype == torch.int32:  # see `Backend.pack_experts`
                from ..kernels.packing import unpack

                put(experts, name, unpack(experts.matrix(name), rows, columns))


def use(model: Inkling, ops: Backend) -> None:
    """Run a rank by other operations."""
    model.backend = ops
    for module in model.llm.modules():
        if isinstance(getattr(module, "ops", None), Backend):
            module.ops = ops
    for layer in model.llm.layers:
        layer.mlp.use(ops)


def compiled(model: Inkling, length: int) -> StepBackend:
    """The operations of a step through `torch.compile`, for rows that hold `length` positions.

    One by one: a step of many layers as one would compile for many minutes, and what can be fused is within them. For
    fixed shapes, but for the number of completed blocks, which changes from layer to layer.
    """
    torch._dynamo.config.recompile_limit = 64  # of an operation: kinds of layers, and of what reads them
    fixed = partial(torch.compile, fullgraph=True, dynamic=False)
    names = ("embed_and_norm", "project", "prepare_qkv", "elect")
    experts = fixed(gathered_experts.of_rank(model.share.local_experts.start))

    def of_rank(*inputs: Any) -> Tensor:
        return experts(*inputs)

    of_rank.of_rank = lambda _: of_rank  # it is of this one
    return StepBackend(
        **{name: fixed(getattr(fused, name)) for name in names},
        join_and_mix=torch.compile(fused.join_and_mix, fullgraph=True),
        attend_cache=fixed(attend_cache_at(length)),
        route=fixed(route),
        experts=of_rank,
        sample_head=fixed(likeliest),
    )


def likeliest(
    hidden: Float[Tensor, "N D"], weight: Float[Tensor, "V D"], cap: float, first: int = 0
) -> tuple[Int[Tensor, " N"], Float[Tensor, " N"]]:
    """`fused.sample_head` at temperature 0, with logits in the model's dtype as `TextModel.logits` has them."""
    row = F.linear(hidden, weight).argmax(dim=-1)
    return row + first, fused.logit_of(hidden, weight, row)
