"""The drafter on one rank: a transformer of its own, cut as its target is.

What is cut: projections, scales, sinks, gates and relative states by whole heads; the key/value side, and with it the
context, by whole key/value heads, which are replicated where tp exceeds them; the SwiGLU by its columns; the fusion
W_fc by the channels that it gives; W_1 and W_2 of the head by rows of the vocabulary, like the target's embedding and
unembedding, which the drafter shares. Attention and SwiGLU then give partial sums, which the ranks add up.

On every rank, because it is small and would cost a collective for every drafted token, is W_J of the RNN head (W_g of
the gated one): 8 MB of the 2.9 GB of a drafter with Small's sizes. So are norms, relative profiles and the confidence
head, which are smaller still.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .. import draft_files
from ..draft_config import DSparkConfig
from ..dspark import Drafter
from ..errors import InputError
from ..model import Inkling
from .apply import cut_parameter
from .layers import ShardedEmbedding
from .plan import Share, split


def slices(config: DSparkConfig, share: Share) -> dict[str, tuple[slice, ...]]:
    """Name of a drafter's parameter -> what of the whole this rank holds; names that are absent are held whole.

    Raises:
        InputError: heads that the ranks cannot share.
    """
    tp, H, G, d = share.plan.tp, config.num_attention_heads, config.num_key_value_heads, config.head_dim
    config.check_ranks(tp)
    n_local_heads, n_local_kv_heads = H // tp, max(G // tp, 1)
    first, first_kv = n_local_heads * share.tp_index, G * share.tp_index // tp
    one, states, relative = (slice(first * size, (first + n_local_heads) * size) for size in (1, d, config.d_rel))
    kv_states = slice(first_kv * d, (first_kv + n_local_kv_heads) * d)
    vocabulary, columns, channels = (
        slice(run.start, run.stop)
        for run in (
            share.local_vocabulary,
            split(config.intermediate_size, tp)[share.tp_index],
            split(share.config.text.hidden_size, tp)[share.tp_index],
        )
    )
    of_layer = {
        "self_attn.q_proj.weight": (states,),
        "self_attn.gate_attn.weight": (states,),
        "self_attn.wr_du.weight": (relative,),
        "self_attn.attn_sink_proj.weight": (one,),
        "self_attn.q_l2_clip.scale": (one,),
        "self_attn.rel_l2_clip.scale": (one,),
        "self_attn.o_proj.weight": (slice(None), states),
        "self_attn.k_proj.weight": (kv_states,),
        "self_attn.v_proj.weight": (kv_states,),
        "mlp.gate_proj.weight": (columns,),
        "mlp.up_proj.weight": (columns,),
        "mlp.down_proj.weight": (slice(None), columns),
    }
    of_vocabulary = ("markov_head.markov_w1", "markov_head.markov_w2", "embed_tokens", "lm_head")
    return {
        "fc.weight": (channels,),
        **{f"{name}.weight": (vocabulary,) for name in of_vocabulary},
        **{f"layers.{i}.{name}": kept for i in range(config.num_hidden_layers) for name, kept in of_layer.items()},
    }


def load_drafter(folder: str | Path, model: Inkling, **choices: Any) -> Drafter:
    """This rank's part of a drafter, of which it reads nothing else; all as `inkling_ref.load_drafter` has it."""
    return draft_files.load_drafter(folder, model, cut, **choices)


def cut(drafter: Drafter) -> dict[str, tuple[slice, ...]]:
    """`adopt`, and the table that it went by."""
    table = slices(drafter.config, drafter.model.share)
    adopt(drafter)
    return table


def adopt(drafter: Drafter) -> Drafter:
    """Turn a drafter of a rank's model, whole in memory or without memory, into the rank's part of it, in place.

    It drafts as the whole does, of the vocabulary's rows that the rank holds; `choose` gets what `ShardedHead.exchange`
    makes of them.

    Raises:
        InputError: heads that the ranks cannot share, or a drafter that is a rank's part already.
    """
    if hasattr(drafter, "share"):
        raise InputError(f"drafter: rank {drafter.share.rank}'s part already, expected a whole one")
    model, config, names = drafter.model, drafter.config, dict(drafter.named_parameters())
    share, tp, head = model.share, model.mesh.tp, model.llm.logits
    for name, kept in slices(config, share).items():
        if name in names:
            cut_parameter(drafter, name, kept)
    # Its contexts have this rank's heads.
    local_config = replace(
        config,
        num_attention_heads=config.num_attention_heads // tp.size,
        num_key_value_heads=max(config.num_key_value_heads // tp.size, 1),
    )
    drafter.share, drafter.config = share, local_config
    drafter.fc.register_forward_hook(lambda _, inputs, channels: tp.gather(channels, -1))
    for layer in drafter.layers:
        layer.self_attn.config = local_config
        for module in (layer.self_attn, layer.mlp):
            module.register_forward_hook(lambda _, inputs, partial: tp.sum(partial))
    used = drafter.used = head.counts[tp.rank]
    drafter.base_logits = lambda h: head.local(h, config.softcap)[..., :used]
    if drafter.markov_head is not None:
        drafter.markov_head.markov_w1 = ShardedEmbedding(drafter.markov_head.markov_w1, share, tp)
    propose, observe, padding = drafter.propose, drafter.observe, max(head.counts) - used

    def propose_from_slices(context: Any, anchors: Tensor, n: int, choose: Any) -> Any:
        def exchange(local: Tensor) -> Any:
            return choose(head.exchange(F.pad(local, (0, padding), value=-torch.inf)))

        return propose(context, anchors, n, exchange)

    drafter.propose = propose_from_slices
    drafter.observe = lambda model: _all_tokens(model, observe(model))
    return drafter


@contextmanager
def _all_tokens(model: Inkling, observing: Any) -> Iterator[dict[int, Tensor]]:
    """Taps as they are observed; where the pass cuts tokens among the ranks, then those of all of them."""
    current, T = model.current, None

    def note(_: nn.Module, inputs: tuple) -> None:
        nonlocal T
        T = current.T

    handle = model.llm.layers[0].register_forward_pre_hook(note)
    try:
        with observing as taps:
            yield taps
    finally:
        handle.remove()
    if T is not None:  # the target's output is whole already
        current.T = T
        for id, tap in taps.items():
            if tap.shape[1] != T:
                taps[id] = current.all_tokens(tap)
        current.T = None
