r"""The cost model: parameters, bytes, cache and FLOPs of a model, from its config alone, whole or on one rank.

Plain integers, no tensors: `tests/test_cost.py` holds these counts against real modules and against the published
totals of Inkling 2 Small. The attention of one layer (q, gate and output; k and v; r; sink; the scales of q and r;
the table P) has this many parameters:

$$ D (3Hd + 2Gd + HR + H) + Hd + HR + RX $$

its experts, of which a token meets the share k / E:

$$ E \cdot 3DI $$

A layer keeps for each sequence the keys and values of S tokens, in a sliding layer of at most W - 1,

$$ 2Gd \cdot \min(S, W - 1) $$

and the last inputs of its four convolutions:

$$ (K - 1) (2D + 2Gd) $$

One multiply-add is two FLOPs; norms, activations and the softmax are not counted.

A rank of a (TP, EP) group holds H / TP query and G / TP key/value heads, the output convolutions' channels / TP, the
rows / TP of embedding and unembedding, and E / EP experts. Router, norms, residual queries, the table P and the image
encoder are on every rank. `parallel.plan` is the table by which ranks really divide a model; it can do more.
"""

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from ..config import InklingConfig, TextConfig, VisionConfig
from ..draft_config import DSparkConfig
from ..errors import InputError

ExpertFormat = Literal["bf16", "mxfp8", "nvfp4+mxfp8"]


@dataclass(frozen=True)
class _Tensors:
    """Some parameters of one part that are stored alike. layer is set for the text stack's experts."""

    part: str
    count: int
    dtype: Literal["bfloat16", "float32", "experts"]
    layer: int = -1


def parameters(config: InklingConfig, tp: int = 1, ep: int = 1) -> Counter[str]:
    """Parameters of one rank by part, in the order of a table.

    Raises:
        InputError: if heads, hidden size or experts cannot be divided among that many ranks.
    """
    counts: Counter[str] = Counter()
    for tensors in _tensors(config, tp, ep):
        counts[tensors.part] += tensors.count
    return counts


def active_parameters(config: InklingConfig) -> Counter[str]:
    """Parameters that one text token meets, by part: k of E experts, one row of the embedding, no image encoder.

    The published "17e9 active" of Small counts what is `in_layers`.
    """
    text, counts = config.text, parameters(config)
    counts["experts"] = counts["experts"] * text.num_experts_per_tok // text.n_routed_experts
    counts["embedding"] = text.hidden_size
    counts["unembedding"] = text.unpadded_vocab_size * text.hidden_size
    counts["vision"] = 0
    return counts


def in_layers(counts: Counter[str]) -> int:
    """The sum without embedding, unembedding and image encoder."""
    return counts.total() - counts["embedding"] - counts["unembedding"] - counts["vision"]


def checkpoint_bytes(
    config: InklingConfig, experts: ExpertFormat = "nvfp4+mxfp8", tp: int = 1, ep: int = 1
) -> Counter[str]:
    """Bytes of one rank's weights by storage format, experts in the given format.

    NVFP4 spends 4 bits on a value and 8 on the scale of every 16, MXFP8 8 bits on a value and 8 on the scale of
    every 32. In a mixed checkpoint the last layers are MXFP8 (40 to 47 of Small). Tensors that
    stay float32 in a bfloat16 model: static convolutions, router, residual queries.
    """
    mxfp8_from = {"bf16": config.text.num_hidden_layers, "mxfp8": 0, "nvfp4+mxfp8": first_mxfp8_layer(config.text)}
    sizes: Counter[str] = Counter()
    for tensors in _tensors(config, tp, ep):
        if tensors.dtype == "float32":
            sizes["float32"] += 4 * tensors.count
        elif tensors.dtype == "bfloat16" or experts == "bf16":
            sizes["bfloat16"] += 2 * tensors.count
        elif tensors.layer < mxfp8_from[experts]:
            sizes["NVFP4 codes"] += tensors.count // 2
            # two matrices, each with an amax for every expert and one denominator
            sizes["NVFP4 scales"] += tensors.count // 16 + 2 * 4 * (config.text.n_routed_experts // ep + 1)
        else:
            sizes["MXFP8 values"] += tensors.count
            sizes["MXFP8 scales"] += tensors.count // 32
    return sizes


def first_mxfp8_layer(text: TextConfig) -> int:
    """Where the experts of a mixed checkpoint turn from NVFP4 to MXFP8: after the first 5/6 of the layers."""
    return text.num_hidden_layers * 5 // 6


def cache_bytes(
    config: InklingConfig, context: int, tp: int = 1, kv_bytes: int = 2, convolution_bytes: int = 4
) -> Counter[str]:
    """Bytes that one sequence of `context` tokens keeps on one rank, by part.

    The defaults, bfloat16 keys and values and float32 convolution inputs, are how the model is served. `cache.Cache`
    keeps both in the model's dtype, which loses nothing, and `rollback` positions more.
    """
    _check_split(config, tp, 1)
    text = config.text
    sizes = Counter({"full layers": 0, "sliding layers": 0, "convolution states": 0})
    for layer in range(text.num_hidden_layers):
        a = text.attention(layer)
        channels = 2 * a.num_key_value_heads * a.head_dim // tp
        if a.window is None:
            sizes["full layers"] += channels * kv_bytes * context
        else:
            sizes["sliding layers"] += channels * kv_bytes * min(context, a.window - 1)
        inputs = channels + 2 * text.hidden_size // tp
        sizes["convolution states"] += (text.conv_kernel_size - 1) * inputs * convolution_bytes
    return sizes


def drafter_parameters(config: InklingConfig, draft: DSparkConfig, tp: int = 1) -> Counter[str]:
    """Parameters of one rank of a drafter, by part; `parallel.drafter` says what is cut.

    Raises:
        InputError: heads that the ranks cannot share.
    """
    draft.check_ranks(tp)
    D, L, r, R = config.text.hidden_size, draft.num_hidden_layers, draft.markov_rank, draft.d_rel
    H, G, d = draft.num_attention_heads // tp, max(draft.num_key_value_heads // tp, 1), draft.head_dim
    has_rms = draft.qk_norm == "rms"
    of_head = D * ((2 + draft.attention_gate) * d + R + draft.attention_sink) + R + d * (not has_rms)
    whole = 2 * D + L * (2 * D + 2 * d * has_rms + R * draft.rel_extent)  # norms, profiles
    whole += {"rnn": 3 * r * (2 * r + D + 1), "gated": r * (r + D + 1)}.get(draft.markov_head_type, 0)
    whole += draft.enable_confidence_head * (D + r * draft.confidence_head_with_markov + 1)
    return Counter(
        {
            "fusion": len(draft.target_layer_ids) * D * D // tp,
            "attention": L * (H * of_head + 2 * G * d * D),
            "SwiGLU": L * 3 * D * (draft.intermediate_size // tp),
            "tables of the head": 2 * r * (config.text.vocab_size // tp),
            "on every rank": whole,
        }
    )


def drafter_cache_bytes(draft: DSparkConfig, context: int, tp: int = 1, kv_bytes: int = 2) -> int:
    """Bytes of one sequence's keys and values on one rank: of all positions, whatever the windows."""
    return draft.num_hidden_layers * 2 * max(draft.num_key_value_heads // tp, 1) * draft.head_dim * kv_bytes * context


def flops(config: InklingConfig, context: int, tokens: int = 1, tp: int = 1, ep: int = 1) -> Counter[str]:
    """FLOPs by part of the text stack for the last `tokens` tokens of a sequence that then has `context` tokens.

    tokens=1 is a decoding step, tokens=context a prefill. Logits of the last token only. A rank's experts: the mean
    rank's, under uniform routing.

    Raises:
        InputError: if tokens is not in 1..context, or the model cannot be divided among that many ranks.
    """
    if not 0 < tokens <= context:
        raise InputError(f"tokens is {tokens}, expected 1 to {context}, the length of the sequence")
    _check_split(config, tp, ep)
    text, counts = config.text, Counter()
    D, I = text.hidden_size, text.moe_intermediate_size
    for layer in range(text.num_hidden_layers):
        a = text.attention(layer)
        scores = 4 * a.num_heads * a.head_dim * keys_seen(context, tokens, a.window)  # q.k and p.v
        biases = 2 * a.num_heads * text.d_rel * keys_seen(context, tokens, a.extent)
        counts["attention projections"] += 2 * tokens * _projections(text, layer) // tp
        counts["attention over keys"] += (scores + biases) // tp
        counts["convolutions"] += 2 * tokens * sum(_convolutions(text, layer).values()) // tp
        at_attention, at_mlp = residual_sources(text, layer)
        # a mixture is a product with the query and a weighted sum
        mixed = at_attention * (1 if text.is_sliding(layer) else 3) + at_mlp
        counts["residual mixing"] += 4 * tokens * D * mixed
        counts["router"] += 2 * tokens * D * text.n_routed_experts
        counts["experts"] += 2 * tokens * text.num_experts_per_tok * 3 * D * I // ep
    counts["residual mixing"] += 4 * D * output_sources(text)
    counts["unembedding"] += 2 * D * text.unpadded_vocab_size // tp
    return counts


def residual_sources(text: TextConfig, layer: int) -> tuple[int, int]:
    """How many sources of the depth state this layer's attention input and MoE input mix."""
    block = text.n_layers_per_attn_res_block
    return (_ceil(layer, block) + 1 if layer else 0), _ceil(layer + 1, block) + 1


def output_sources(text: TextConfig) -> int:
    """How many sources the output mixture reads."""
    return _ceil(text.num_hidden_layers, text.n_layers_per_attn_res_block) + 1


def _ceil(a: int, b: int) -> int:
    return -(-a // b)


def keys_seen(context: int, tokens: int, window: int | None) -> int:
    """Summed over the last `tokens` of `context` queries: position t sees min(t + 1, window)."""

    def first(n: int) -> int:
        bounded = n if window is None else min(n, window)
        return bounded * (bounded + 1) // 2 + (n - bounded) * bounded

    return first(context) - first(context - tokens)


def _projections(text: TextConfig, layer: int) -> int:
    """Weights of one layer's q, gate and output, k and v, r, and sink projections."""
    a = text.attention(layer)
    H, G, d = a.num_heads, a.num_key_value_heads, a.head_dim
    return text.hidden_size * (3 * H * d + 2 * G * d + H * text.d_rel + H)


def _convolutions(text: TextConfig, layer: int) -> dict[str, int]:
    """Taps of one layer's four convolutions by dtype: dynamic ones (full layers' k and v) are bfloat16."""
    a = text.attention(layer)
    D, K, G = text.hidden_size, text.conv_kernel_size, a.num_key_value_heads
    outputs, keys_values = 2 * D * K, 2 * G * a.head_dim * K
    if text.is_sliding(layer):
        return {"float32": outputs + keys_values}
    return {"float32": outputs, "bfloat16": keys_values + 2 * G * K * D}


def _tensors(config: InklingConfig, tp: int, ep: int) -> Iterator[_Tensors]:
    """Every parameter of one rank once."""
    _check_split(config, tp, ep)
    text = config.text
    D, E, I = text.hidden_size, text.n_routed_experts, text.moe_intermediate_size
    yield _Tensors("embedding", _ceil(text.vocab_size, tp) * D, "bfloat16")
    yield _Tensors("unembedding", _ceil(text.vocab_size, tp) * D, "bfloat16")
    for layer in range(text.num_hidden_layers):
        a, full = text.attention(layer), not text.is_sliding(layer)
        scales = a.num_heads * (a.head_dim + text.d_rel)
        yield _Tensors("attention", (_projections(text, layer) + scales) // tp + text.d_rel * a.extent, "bfloat16")
        for dtype, taps in _convolutions(text, layer).items():
            yield _Tensors("convolutions", taps // tp, dtype)
        queries = (0 if layer == 0 else 3 if full else 1) + 1
        yield _Tensors("residual mixing", queries * D, "float32")
        yield _Tensors("norms", (4 if full else 2) * D, "bfloat16")
        yield _Tensors("router", E * D + E, "float32")
        yield _Tensors("experts", E // ep * 3 * D * I, "experts", layer)
    yield _Tensors("residual mixing", D, "float32")
    yield _Tensors("norms", 2 * D, "bfloat16")  # after the embedding, before the unembedding
    if config.vision is not None:
        yield _Tensors("vision", _vision(config.vision, D), "bfloat16")


def _vision(vision: VisionConfig, text_hidden_size: int) -> int:
    D, M, P = vision.hidden_size, vision.intermediate_size, vision.projection_hidden_dim
    embeddings = D * 3 * vision.patch_size**2 + D * vision.posemb_grid_size**2 + 2 * D
    attention, mlp, norms_and_scales = 4 * (D * D + D), 2 * D * M + M + D, 4 * D + 2 * D
    projector = vision.spatial_merge_size**2 * D * P + P * text_hidden_size
    return embeddings + 2 * D + vision.num_hidden_layers * (attention + mlp + norms_and_scales) + projector


def _check_split(config: InklingConfig, tp: int, ep: int) -> None:
    text = config.text
    divided = {"hidden_size": text.hidden_size}
    for layer in range(text.num_hidden_layers):
        prefix, a = "swa_" if text.is_sliding(layer) else "", text.attention(layer)
        divided[prefix + "num_attention_heads"] = a.num_heads
        divided[prefix + "num_key_value_heads"] = a.num_key_value_heads
    for ranks, name, sizes in ((tp, "tp", divided), (ep, "ep", {"n_routed_experts": text.n_routed_experts})):
        for key, size in sizes.items():
            if ranks < 1 or size % ranks:
                raise InputError(f"{name} is {ranks}, expected a divisor of {key} {size}")
