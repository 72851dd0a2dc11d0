"""The drafter's configuration: its sizes, and the choices that checkpoints of this kind make differently.

The released drafter of Inkling 2 says little about itself; each choice that a file may leave open is a field here, so
that it can be switched and judged by what the target accepts. None of them can make the text wrong.
"""

from dataclasses import dataclass, field, fields
from inspect import formatannotation
from types import UnionType
from typing import Any, Literal, get_args, get_origin, no_type_check

from .config import TextConfig
from .errors import InputError


# no_type_check: the tests' type checker must let a wrong JSON value through to `check`, which names its key.
@no_type_check
@dataclass
class DSparkConfig:
    """A drafter. Its width D, vocabulary, clip thresholds and soft cap are the target's."""

    num_hidden_layers: int = 5
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    intermediate_size: int = 10752
    # What is tapped, ascending: the depth state's running sum after a layer, or entering it, or the mixture that enters
    # its queries. -1 after is the embedding; id num_hidden_layers of the target is its output mixture.
    target_layer_ids: list[int] = field(default_factory=lambda: [5, 23, 41, 48])
    tap: Literal["after", "before", "mixed"] = "after"
    final_tap: Literal["mix", "norm"] = "norm"  # the output mixture, before or after the last norm
    block_size: int = 8  # slots
    sample_from_anchor: bool = False  # the layout anchor_first
    is_causal: bool = False  # a slot sees no later slot of its block
    mask_token_id: int = 201023
    markov_head_type: Literal["rnn", "gated", "vanilla", "none"] = "rnn"
    markov_rank: int = 256
    enable_confidence_head: bool = True
    confidence_head_with_markov: bool = True
    qk_norm: Literal["clip", "rms"] = "clip"  # as in the target, values normed too; or weighted RMSNorms of q and k
    rope_theta: float | None = None
    d_rel: int = 16  # the target's relative bias; 0 for none
    rel_extent: int = 1024
    attention_gate: bool = True
    attention_sink: bool = True
    windows: list[int | None] = field(default_factory=list)  # keys at distance < window; empty: every layer sees all
    embed_norm: bool = True  # the target's norm of its embedding, on the block's tokens
    softcap: bool = True  # the target's cap, on U
    rms_norm_eps: float = 1e-6

    @property
    def num_draft_tokens(self) -> int:
        """gamma."""
        return self.block_size - (not self.sample_from_anchor)

    @property
    def first_slot(self) -> int:
        """The slot that predicts x_1."""
        return 0 if self.sample_from_anchor else 1

    @property
    def kind(self) -> str:
        """What it is, in two lines for people."""
        head = f"{self.markov_head_type} head of rank {self.markov_rank}" if self.markov_rank else "no Markov head"
        has = {
            "relative bias": self.d_rel,
            "RoPE": self.rope_theta,
            "gate": self.attention_gate,
            "sink": self.attention_sink,
            "confidence": self.enable_confidence_head,
        }
        return (
            f"{self.num_hidden_layers} layers, {head}, {self.num_draft_tokens} tokens a block, "
            f"taps {', '.join(map(str, self.target_layer_ids))}\n"
            f"with {', '.join(name for name, value in has.items() if value) or 'nothing more'}"
        )

    def check(self, target: TextConfig) -> None:
        """Raises InputError naming the key that is impossible in itself or for that target."""
        for f in fields(self):
            if not _fits(value := getattr(self, f.name), f.type):
                choices = f"one of {', '.join(get_args(f.type))}" if get_origin(f.type) is Literal else None
                raise InputError(f"drafter: {f.name} is {value!r}, expected {choices or formatannotation(f.type)}")
        L, ids = target.num_hidden_layers, self.target_layer_ids
        least = -1 if self.tap == "after" else 0
        G, longest = self.num_key_value_heads, target.max_position_embeddings
        sizes = ("num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size")
        wrong = [
            *((key, getattr(self, key) < 1, "at least 1") for key in sizes),
            *((key, getattr(self, key) < 0, "at least 0") for key in ("d_rel", "rel_extent", "rms_norm_eps")),
            ("num_attention_heads", G and self.num_attention_heads % G, f"a multiple of num_key_value_heads {G}"),
            (
                "target_layer_ids",
                not ids or ids != sorted(set(ids)) or not least <= ids[0] <= ids[-1] <= L,
                f"ascending layers from {least} to {L}",
            ),
            ("block_size", self.num_draft_tokens < 1, "at least one drafted token"),
            ("block_size", self.block_size > longest, f"at most max_position_embeddings {longest}"),
            (
                "mask_token_id",
                not 0 <= self.mask_token_id < target.vocab_size,
                f"0 <= id < vocab_size {target.vocab_size}",
            ),
            (
                "markov_rank",
                self.markov_rank < (self.markov_head_type != "none"),
                f"at least 1 for markov_head_type {self.markov_head_type}",
            ),
            (
                "confidence_head_with_markov",
                self.enable_confidence_head and self.confidence_head_with_markov and self.markov_head_type == "none",
                "false without a Markov head",
            ),
            ("windows", len(self.windows) not in (0, self.num_hidden_layers), "one a layer"),
            ("windows", any(w is not None and w < 1 for w in self.windows), "at least 1, or null"),
            ("rope_theta", self.rope_theta is not None and self.rope_theta <= 0, "more than 0"),
            ("rope_theta", self.rope_theta is not None and self.head_dim % 2, "none for an odd head_dim"),
        ]
        for key, is_wrong, expected in wrong:
            if is_wrong:
                raise InputError(f"drafter: {key} is {getattr(self, key)!r}, expected {expected}")

    def check_ranks(self, tp: int) -> None:
        """Raises InputError unless tp ranks can share the heads, or each repeat key/value heads that are fewer."""
        H, G = self.num_attention_heads, self.num_key_value_heads
        if H % tp:
            raise InputError(f"tp is {tp}, expected a divisor of the drafter's num_attention_heads {H}")
        if G % tp and tp % G:
            raise InputError(f"tp is {tp}, expected a divisor or a multiple of the drafter's num_key_value_heads {G}")


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of the annotated kind: whole numbers are floats too, true and false no numbers."""
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(entry, get_args(kind)[0]) for entry in value)
    if get_origin(kind) is UnionType:
        return any(_fits(value, option) for option in get_args(kind))
    return type(value) in ((int, float) if kind is float else (kind,))
