r"""Who holds what: one table for any model and any number of ranks. Plain integers, no tensors, no processes.

The ranks of a world are seen as two grids at once:

    attention   dp x tp       rank = dp_index * tp + tp_index       dp groups have their own rows of the batch;
                                                                    the tp ranks of a group share heads and channels
    experts     ep x etp      rank = ep_index * etp + etp_index     ep parts of the experts;
                                                                    etp ranks share the columns of each

The release has dp = etp = 1: tensor and expert parallelism over the same ranks. Data-parallel attention is dp > 1,
and sharding the expert width (for latency: every rank then reads an equal part, whatever the router says) is
ep < tp dp.

What is cut, on a rank with H / tp query heads: projections, scales, sinks, gates and relative states by whole heads;
the key/value side by whole key/value heads, which are replicated where tp exceeds them; the two output convolutions by
channels; embedding and unembedding by rows of the vocabulary. Experts go to ranks in runs, the first E mod ep ranks
having one more. Norms, residual queries, the relative profiles, the router and the image encoder are on every rank.

Per-rank sizes are named n_local_*.
"""

from dataclasses import dataclass, replace
from itertools import pairwise

from ..config import InklingConfig, TextConfig
from ..errors import InputError

BLOCK = {"nvfp4": 16, "mxfp8": 32}  # columns that share a scale: `quantization.GROUP`, without importing torch


@dataclass(frozen=True)
class Plan:
    """How a world of tp * dp ranks divides a model.

    tp: ranks that share attention; dp: groups with batches of their own; ep: parts that the experts fall into, None for
    as many as ranks. exchange: how tokens reach experts, by partial sums over all ranks or by sending each to the
    owners of its experts. sequence: calls of at least `sequence_from` tokens a row cut them among the tp ranks for all
    that is not attention or experts.
    """

    tp: int = 1
    dp: int = 1
    ep: int | None = None
    exchange: str = "all_reduce"  # or "all_to_all"
    sequence: bool = False
    sequence_from: int = 64

    def __post_init__(self) -> None:
        ep = 1 if self.ep is None else self.ep
        for name, value in (("tp", self.tp), ("dp", self.dp), ("ep", ep), ("sequence_from", self.sequence_from)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise InputError(f"{name} is {value!r}, expected an integer >= 1")
        if self.world % self.n_ep:
            raise InputError(
                f"ep is {self.n_ep}, expected a divisor of the {self.world} ranks (tp {self.tp} x dp {self.dp})"
            )
        if self.exchange not in ("all_reduce", "all_to_all"):
            raise InputError(f"exchange is {self.exchange!r}, expected 'all_reduce' or 'all_to_all'")
        if not isinstance(self.sequence, bool):
            raise InputError(f"sequence is {self.sequence!r}, expected True or False")

    @property
    def world(self) -> int:
        return self.tp * self.dp

    @property
    def n_ep(self) -> int:
        return self.world if self.ep is None else self.ep

    @property
    def etp(self) -> int:
        """Ranks that share the I columns of one expert."""
        return self.world // self.n_ep

    def check(self, config: InklingConfig, formats: list[str] | None = None) -> None:
        """Refuse a model that cannot be cut this way.

        Args:
            formats: of every layer's stored experts; a cut of the width must then fall between two blocks.

        Raises:
            InputError: one line with the size and the number of ranks that do not fit.
        """
        text = config.text
        if text.hidden_size % self.tp:
            raise InputError(f"tp is {self.tp}, expected a divisor of hidden_size {text.hidden_size}")
        for layer in range(text.num_hidden_layers):
            prefix, a = "swa_" if text.is_sliding(layer) else "", text.attention(layer)
            H, G = a.num_heads, a.num_key_value_heads
            if H % self.tp:
                raise InputError(f"tp is {self.tp}, expected a divisor of {prefix}num_attention_heads {H}")
            if G % self.tp and self.tp % G:
                raise InputError(
                    f"tp is {self.tp}, expected a divisor or a multiple of {prefix}num_key_value_heads {G}"
                )
        I = text.moe_intermediate_size
        for quantisation in [None, *dict.fromkeys(formats or ())]:
            block = BLOCK.get(quantisation, 1)
            if I % (self.etp * block):
                what = f"{self.etp} ranks share an expert's {I} columns (moe_intermediate_size)"
                size = f"blocks of {block} ({quantisation})" if block > 1 else "parts"
                raise InputError(f"{what}, expected equal {size} for each")


def split(count: int, parts: int) -> list[range]:
    """`count` things in runs for each of `parts` owners; the first count mod parts owners get one more."""
    size, more = divmod(count, parts)
    starts = [i * size + min(i, more) for i in range(parts + 1)]
    return [range(a, b) for a, b in pairwise(starts)]


def owners(plan: Plan, E: int) -> list[list[int]]:
    """For every expert the ranks that hold it, or a part of its width."""
    table: list[list[int]] = []
    for part, experts in enumerate(split(E, plan.n_ep)):
        table += [list(range(part * plan.etp, (part + 1) * plan.etp))] * len(experts)
    return table


@dataclass(frozen=True)
class Share:
    """One rank's part of one model: local sizes, and for every parameter that is cut the slices that it holds."""

    config: InklingConfig
    plan: Plan
    rank: int

    @property
    def tp_index(self) -> int:
        return self.rank % self.plan.tp

    @property
    def dp_index(self) -> int:
        return self.rank // self.plan.tp

    def n_local_heads(self, layer: int) -> int:
        return self.config.text.attention(layer).num_heads // self.plan.tp

    def n_local_kv_heads(self, layer: int) -> int:
        return max(self.config.text.attention(layer).num_key_value_heads // self.plan.tp, 1)

    @property
    def n_local_channels(self) -> int:
        return self.config.text.hidden_size // self.plan.tp

    @property
    def local_experts(self) -> range:
        return split(self.config.text.n_routed_experts, self.plan.n_ep)[self.rank // self.plan.etp]

    @property
    def local_vocabulary(self) -> range:
        """Rows of embedding and unembedding."""
        return split(self.config.text.vocab_size, self.plan.tp)[self.tp_index]

    def local_text(self) -> TextConfig:
        """A config whose cache has this rank's sizes."""
        text, tp = self.config.text, self.plan.tp
        sizes = {"hidden_size": self.n_local_channels}
        for prefix in ("", "swa_"):
            H, G = f"{prefix}num_attention_heads", f"{prefix}num_key_value_heads"
            sizes |= {H: getattr(text, H) // tp, G: max(getattr(text, G) // tp, 1)}
        return replace(text, **sizes)

    def slices(self) -> dict[str, tuple[slice, ...]]:
        """Parameter name -> what of the whole parameter this rank holds; names that are absent are held whole."""
        text, table = self.config.text, {}
        rows = (_slice(self.local_vocabulary),)
        table["llm.embed.weight"] = table["llm.unembed.weight"] = rows
        channels = (_part(text.hidden_size, self.plan.tp, self.tp_index),)
        experts = _slice(self.local_experts)
        columns = _part(text.moe_intermediate_size, self.plan.etp, self.rank % self.plan.etp)
        for layer in range(text.num_hidden_layers):
            a, K = text.attention(layer), text.conv_kernel_size
            H, G, d = self.n_local_heads(layer), self.n_local_kv_heads(layer), a.head_dim
            first, first_kv = H * self.tp_index, a.num_key_value_heads * self.tp_index // self.plan.tp
            # Rows of so many for each head.
            one, states, relative = (slice(first * size, (first + H) * size) for size in (1, d, text.d_rel))
            kv_states, kv_taps = (slice(first_kv * size, (first_kv + G) * size) for size in (d, K))
            of_layer = {
                "attn.wq_du.weight": (states,),
                "attn.gate_attn.weight": (states,),
                "attn.wr_du.weight": (relative,),
                "attn.attn_sink_proj.weight": (one,),
                "attn.q_l2_clip.scale": (one,),
                "attn.rel_l2_clip.scale": (one,),
                "attn.wo_ud.weight": (slice(None), states),
                "attn.wk_dv.weight": (kv_states,),
                "attn.wv_dv.weight": (kv_states,),
                "attn_sconv.weight": channels,
                "mlp_sconv.weight": channels,
                "mlp.experts.w13_weight": (experts, slice(2 * columns.start, 2 * columns.stop)),
                "mlp.experts.w2_weight": (experts, slice(None), columns),
            }
            for conv in ("attn.k_sconv", "attn.v_sconv"):
                if text.is_sliding(layer):
                    of_layer[f"{conv}.weight"] = (kv_states,)
                else:
                    of_layer[f"{conv}.static_w"] = (slice(None), kv_states)
                    of_layer[f"{conv}.weight_proj"] = (kv_taps,)
            table |= {f"llm.layers.{layer}.{name}": cut for name, cut in of_layer.items()}
        return table


def stored_slices(cut: tuple[slice, ...], suffix: str, quantisation: str | None) -> tuple[slice, ...]:
    """The slices of an expert weight [E, N, columns], for the tensor that stores it under `suffix` (`stored_layout`).

    Raises:
        InputError: a cut of the columns that falls within a block.
    """
    if suffix == "_amax":
        return cut[:1]
    if suffix == "_outer_scale_denominator":
        return ()
    if quantisation not in BLOCK or len(cut) < 3:
        return cut
    block, columns = BLOCK[quantisation], cut[2]
    if columns.start % block or columns.stop % block:
        raise InputError(
            f"columns {columns.start} to {columns.stop}, expected whole blocks of {block} ({quantisation})"
        )
    per = block if suffix == "_scale" else 2 if quantisation == "nvfp4" else 1
    return (*cut[:2], slice(columns.start // per, columns.stop // per))


def _slice(run: range) -> slice:
    return slice(run.start, run.stop)


def _part(count: int, parts: int, index: int) -> slice:
    return slice(count // parts * index, count // parts * (index + 1))
