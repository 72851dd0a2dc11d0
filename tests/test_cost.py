"""The cost model against the published totals of Inkling 2 Small and against the parameters of real modules."""

import pytest
import torch

from inkling_ref.config import InklingConfig
from inkling_ref.errors import InputError
from inkling_ref.measure import cost

SMALL = InklingConfig.small()
IMAGE_ENCODER_BYTES = 2 * cost.parameters(SMALL)["vision"]


def test_small_has_594e9_parameters_of_which_17e9_are_active():
    assert round(cost.parameters(SMALL).total() / 1e9) == 594
    active = cost.active_parameters(SMALL)
    assert round(cost.in_layers(active) / 1e9) == 17
    assert round((active.total() - active["embedding"]) / 1e9, 2) == 17.95


@pytest.mark.parametrize(
    ("experts", "published_gb"), [("nvfp4+mxfp8", 394), ("mxfp8", 623)], ids=["nvfp4+mxfp8", "mxfp8"]
)
def test_checkpoint_bytes_are_the_published_ones_less_the_drafter(experts, published_gb):
    # The published sizes contain the drafter (mtp.safetensors), a few GB, which is no part of this config.
    missing = published_gb - cost.checkpoint_bytes(SMALL, experts).total() / 1e9
    assert 3 < missing < 4


@pytest.mark.parametrize(
    ("ranks", "experts", "whole"), [(1, 376.09, 389.6), (4, 94.02, 97.7), (8, 47.01, 49.0)], ids=["whole", "TP4", "TP8"]
)
def test_weights_of_a_rank(ranks, experts, whole):
    sizes = cost.checkpoint_bytes(SMALL, tp=ranks, ep=ranks)
    quantised = sum(size for kind, size in sizes.items() if kind.startswith(("NVFP4", "MXFP8")))
    assert round(quantised / 1e9, 2) == experts
    assert round((sizes.total() - IMAGE_ENCODER_BYTES) / 1e9, 1) == whole


@pytest.mark.parametrize(
    ("tp", "kib_per_token", "sliding_mb", "conv_mb", "total_gb"),
    [(1, 32, 168, 6.49, 34.53), (4, 8, 42, 1.62, 8.63), (8, 4, 21, 0.81, 4.32)],
    ids=["whole", "TP4", "TP8"],
)
def test_cache_of_one_sequence_of_1048576_tokens(tp, kib_per_token, sliding_mb, conv_mb, total_gb):
    cache, shorter = (cost.cache_bytes(SMALL, n, tp) for n in (1048576, 1048575))
    assert cache.total() - shorter.total() == kib_per_token * 1024
    assert round(cache["sliding layers"] / 1e6) == sliding_mb
    assert round(cache["convolution states"] / 1e6, 2) == conv_mb
    assert round(cache.total() / 1e9, 2) == total_gb


def test_sliding_cache_stops_growing_at_window_minus_one():
    sizes = [cost.cache_bytes(SMALL, n)["sliding layers"] for n in (0, 1, 1022, 1023, 1024, 5000)]
    assert sizes[0] == 0
    assert sizes[2] == 1022 * sizes[1]
    assert sizes[3:] == [1023 * sizes[1]] * 3


def test_prefill_and_decode_flops_of_small():
    assert round(cost.flops(SMALL, 8192, 8192).total() / 1e15, 3) == 0.294
    step = cost.flops(SMALL, 32768)
    assert round(step["experts"] / 48 / 1e6) == 510  # 340 for w13 and 170 for w2
    assert round(step["attention projections"] / 48 / 1e6) == 140 + 57 - 1  # qkv and output, each rounded up
    assert round(step["unembedding"] / 1e9, 2) == 1.84
    assert round(step["router"] / 48 / 1e6, 2) == 3.54
    full_layer = (step["attention over keys"] - 40 * 26_738_688) / 8
    assert round(full_layer / 1e6) == 807


def test_prefill_flops_are_the_sum_of_decode_steps():
    config, T = InklingConfig.tiny(), 29
    prefill = cost.flops(config, T, T)
    steps = sum((cost.flops(config, t) for t in range(1, T + 1)), start=cost.Counter())
    for part in prefill:
        if part not in ("unembedding", "residual mixing"):  # the last token alone has logits
            assert prefill[part] == steps[part], part
    chunks = cost.flops(config, 11, 11) + cost.flops(config, T, T - 11)
    assert chunks["attention over keys"] == prefill["attention over keys"]


def test_attention_flops_by_counting_pairs():
    config = InklingConfig.tiny()
    text, T = config.text, 23
    expected = 0
    for layer in range(text.num_hidden_layers):
        a = text.attention(layer)
        for t in range(T):
            for s in range(t + 1):
                if a.window is None or t - s < a.window:
                    expected += 4 * a.num_heads * a.head_dim
                    expected += 2 * a.num_heads * text.d_rel if t - s < a.extent else 0
    assert cost.flops(config, T, T)["attention over keys"] == expected


def test_528_residual_sources_in_a_token_of_small():
    text = SMALL.text
    assert sum(sum(cost.residual_sources(text, i)) for i in range(48)) + cost.output_sources(text) == 528


@pytest.mark.parametrize("preset", ["tiny", "nano", "small"])
def test_parameters_are_those_of_the_real_model(preset):
    from inkling_ref.model import Inkling

    config = getattr(InklingConfig, preset)()
    with torch.device("meta"):
        model = Inkling(config)
    counts = cost.parameters(config)
    assert counts.total() == sum(p.numel() for p in model.parameters())

    by_part = cost.Counter()
    for name, p in model.named_parameters():
        by_part[_part(name)] += p.numel()
    assert by_part == counts


def _part(name: str) -> str:
    for part, marks in {
        "vision": ["visual."],
        "embedding": ["llm.embed.weight"],
        "unembedding": ["unembed"],
        "residual mixing": ["attn_res."],
        "convolutions": ["sconv"],
        "router": [".gate.weight", ".gate.bias"],
        "experts": [".experts."],
        "attention": [".attn."],
        "norms": ["norm.weight"],
    }.items():
        if any(mark in name for mark in marks):
            return part
    raise AssertionError(f"{name} belongs to no part")


@pytest.mark.parametrize("config", [InklingConfig.tiny(), SMALL], ids=["tiny", "small"])
def test_ranks_hold_the_whole_model_and_their_copies(config):
    tp, ep = (1, 7) if config is not SMALL else (8, 8)
    whole, rank = cost.parameters(config), cost.parameters(config, tp, ep)
    assert rank["experts"] * ep == whole["experts"]
    for part in ("embedding", "unembedding"):
        assert rank[part] * tp == whole[part]
    tables = sum(config.text.d_rel * config.text.attention(i).extent for i in range(config.text.num_hidden_layers))
    assert (rank["attention"] - tables) * tp == whole["attention"] - tables
    for part in ("router", "norms", "residual mixing", "vision"):
        assert rank[part] == whole[part], part


@pytest.mark.parametrize(
    ("tp", "ep", "message"),
    [
        (16, 1, "tp is 16, expected a divisor of swa_num_key_value_heads 8"),
        (1, 7, "ep is 7, expected a divisor of n_routed_experts 384"),
        (0, 1, "tp is 0"),
        (-1, 1, "tp is -1"),
    ],
)
def test_a_split_that_does_not_divide_is_refused(tp, ep, message):
    for count in (cost.parameters, cost.checkpoint_bytes):
        with pytest.raises(InputError, match=message):
            count(SMALL, tp=tp, ep=ep)
    with pytest.raises(InputError, match=message):
        cost.flops(SMALL, 8, tp=tp, ep=ep)


def test_more_tokens_than_context_are_refused():
    with pytest.raises(InputError, match="tokens is 9, expected 1 to 8"):
        cost.flops(SMALL, 8, 9)
