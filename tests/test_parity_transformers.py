"""Parity with the public implementation in `transformers`, which loads checkpoints that `save` wrote.

Nine configurations with pairwise-distinct sizes and random weights. That these weights make every term matter is a
test too: `test_switching_off_one_term` takes each term out of the public implementation in turn, one layer at a time.
"""

import copy

import pytest
import torch
from helpers import random_ids, random_model, relative_rms
from torch import Tensor, nn

from inkling_ref.checkpoint import load, save
from inkling_ref.config import FULL, SLIDING, InklingConfig, TextConfig, VisionConfig
from inkling_ref.vision import process_images

TOLERANCE = 3e-5  # relative RMS, float32; either side is 1e-6 to 1e-5 away from float64
ROWS, TOKENS = 2, 37

S, F = SLIDING, FULL
# Sizes a config: D; full layers H, G, d; sliding layers H, G, d; R; W; X; E, k, I; V stored, used.
# Thresholds are small, so that every clip and cap acts; full layers scale from position 4 on.


def make_config(
    layers: list[str], block: int, D: int, full: tuple[int, int, int], sliding: tuple[int, int, int], R: int, W: int,
    X: int, experts: tuple[int, int, int], V: tuple[int, int], vision: VisionConfig | None = None, **others,
) -> InklingConfig:  # fmt: skip
    keys = {
        "qk_l2_clip_threshold": 3.5, "rel_l2_clip_threshold": 2.5, "log_scaling_n_floor": 4, "log_scaling_alpha": 0.4,
        "mlp_gate_softcap": 1.5, "mlp_up_softcap": 2.0, "final_logit_softcapping": 9.0, "route_scale": 2.5,
    }  # fmt: skip
    text = TextConfig(
        layer_types=layers, num_hidden_layers=len(layers), n_layers_per_attn_res_block=block, hidden_size=D,
        num_attention_heads=full[0], num_key_value_heads=full[1], head_dim=full[2],
        swa_num_attention_heads=sliding[0], swa_num_key_value_heads=sliding[1], swa_head_dim=sliding[2],
        d_rel=R, sliding_window_size=W, rel_extent=X, n_routed_experts=experts[0], num_experts_per_tok=experts[1],
        moe_intermediate_size=experts[2], vocab_size=V[0], unpadded_vocab_size=V[1], eos_token_id=None,
        **{**keys, **others},
    )  # fmt: skip
    return InklingConfig(text, vision, image_token_id=V[1] - 1)


CONFIGS = {
    "small-in-miniature": make_config(
        [S, S, F, S, S, F], 3, 46, (10, 5, 11), (12, 6, 7), 9, 13, 17, (14, 8, 19), (83, 71),
        VisionConfig(48, 2, 4, 52, patch_size=3, posemb_grid_size=7, projection_hidden_dim=29),
    ),
    "full-layer-first": make_config(
        [F, S, S, F], 3, 34, (8, 1, 10), (14, 7, 9), 5, 11, 15, (12, 6, 13), (61, 53),
        VisionConfig(24, 1, 3, 31, patch_size=4, posemb_grid_size=5, projection_hidden_dim=21, rope_theta=70.0),
    ),
    "one-block": make_config([S, S, F], 8, 38, (9, 3, 6), (10, 5, 7), 12, 11, 14, (13, 1, 23), (67, 59)),
    "block-of-one": make_config(
        [S, F, S, S], 1, 42, (6, 3, 13), (15, 5, 8), 9, 12, 7, (17, 10, 11), (79, 73),
        VisionConfig(40, 3, 5, 44, patch_size=6, posemb_grid_size=3, projection_hidden_dim=39, layer_norm_eps=1e-2),
    ),
    "eight-layers": make_config(
        [S, S, S, F, S, F, F, S], 3, 50, (10, 5, 7), (9, 1, 12), 6, 16, 21, (13, 8, 18), (97, 89),
        VisionConfig(32, 2, 4, 36, patch_size=3, posemb_grid_size=9, projection_hidden_dim=26),
    ),
    "only-sliding": make_config(
        [S, S, S, S, S], 3, 30, (15, 1, 5), (14, 7, 6), 11, 9, 10, (13, 8, 16), (43, 39),
        VisionConfig(28, 2, 7, 33, patch_size=6, posemb_grid_size=3, projection_hidden_dim=20),
    ),
    "only-full": make_config([F, F, F, F, F], 3, 54, (14, 7, 9), (6, 1, 5), 8, 11, 10, (15, 13, 12), (73, 71)),
    "three-taps-large-epsilon": make_config(
        [S, S, F, S, S], 4, 58, (15, 5, 8), (6, 1, 14), 13, 9, 20, (10, 7, 17), (101, 96),
        VisionConfig(36, 2, 3, 56, patch_size=7, posemb_grid_size=6, projection_hidden_dim=23),
        conv_kernel_size=3, rms_norm_eps=0.03,
    ),
    "released-thresholds": make_config(
        [S, S, S, S, S, F, S], 6, 44, (12, 3, 16), (14, 7, 10), 5, 19, 23, (9, 8, 27), (90, 77),
        VisionConfig(20, 1, 5, 24, patch_size=8, posemb_grid_size=32, projection_hidden_dim=18),
        qk_l2_clip_threshold=22.627416997969522, rel_l2_clip_threshold=8.0, log_scaling_n_floor=128000,
        log_scaling_alpha=0.1, mlp_gate_softcap=4.0, mlp_up_softcap=25.0, final_logit_softcapping=30.0, route_scale=8.0,
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def transformers():
    """The package, silent. No skip if it is missing: without it the suite would prove little."""
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


class Public:
    """`transformers` models, each read by its own `from_pretrained` from a folder that we wrote."""

    def __init__(self, transformers, tmp_path_factory):
        self.transformers, self.make_folder = transformers, tmp_path_factory.mktemp

    def load(self, model, dtype=torch.float32, **how_to_save):
        folder = self.make_folder("checkpoint") / "model"
        save(model, folder, **how_to_save)
        kind = "Inkling2ForCausalLM" if model.visual is None else "Inkling2ForConditionalGeneration"
        public, info = getattr(self.transformers, kind).from_pretrained(
            folder, dtype=dtype, attn_implementation="eager", experts_implementation="eager", output_loading_info=True
        )
        assert not any(info.values()), info
        return public.eval()


@pytest.fixture(scope="module")
def public(transformers, tmp_path_factory):
    return Public(transformers, tmp_path_factory)


def prompt(config: InklingConfig, seed: int = 0) -> dict[str, Tensor]:
    """Two rows of text and, if the model sees, three pictures (5 x 2, 1 x 1 and 2 x 3 tiles) among them."""
    ids = random_ids(ROWS, TOKENS, seed=seed, below=config.image_token_id)
    if config.vision is None:
        return {"input_ids": ids}
    side, generator = config.vision.tile_size, torch.Generator().manual_seed(seed)
    sizes = [(5 * side, 2 * side - 1), (side - 1, side), (2 * side, 3 * side)]
    images = [torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8).numpy() for size in sizes]
    pixel_values, image_grid_thw = process_images(images, config.vision)
    ids[0, 3:13] = ids[0, 20] = ids[1, 7:13] = config.image_token_id
    return {"input_ids": ids, "pixel_values": pixel_values, "image_grid_thw": image_grid_thw}


def run(model, **inputs) -> Tensor:
    extra = {"use_cache": False} if hasattr(model, "generate") else {}
    with torch.no_grad():
        return model(**inputs, **extra).logits


# --- float32 -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CONFIGS)
def test_sizes_are_pairwise_distinct(name):
    """Equal sizes hide exchanged axes. Rows of the batch and tokens of the prompt count too."""
    t, v = CONFIGS[name].text, CONFIGS[name].vision
    text = [
        ROWS, TOKENS, t.hidden_size, t.num_attention_heads, t.num_key_value_heads, t.head_dim,
        t.swa_num_attention_heads, t.swa_num_key_value_heads, t.swa_head_dim, t.d_rel, t.sliding_window_size,
        t.rel_extent, t.n_layers_per_attn_res_block, t.conv_kernel_size, t.moe_intermediate_size, t.n_routed_experts,
        t.num_experts_per_tok, t.vocab_size, t.unpadded_vocab_size,
    ]  # fmt: skip
    assert len(set(text)) == len(text), sorted(text)
    assert max(t.sliding_window_size, t.rel_extent) < TOKENS
    if v is not None:
        sizes = [
            v.hidden_size, v.num_attention_heads, v.intermediate_size, v.patch_size, v.spatial_merge_size,
            v.posemb_grid_size, v.projection_hidden_dim, t.hidden_size,
        ]  # fmt: skip
        assert len(set(sizes)) == len(sizes), sorted(sizes)


@pytest.mark.parametrize("name", CONFIGS)
def test_float32(public, name):
    """Image features and logits of the full forward."""
    config = CONFIGS[name]
    model = random_model(config, seed=len(name))
    theirs = public.load(model)
    inputs = prompt(config)
    if config.vision is not None:
        images = {key: inputs[key] for key in ("pixel_values", "image_grid_thw")}
        with torch.no_grad():
            expected = torch.cat(theirs.get_image_features(**images).pooler_output)
            assert relative_rms(model.image_features(**images), expected) < TOLERANCE
    ours, expected = run(model, **inputs), run(theirs, **inputs)
    assert ours.shape[-1] == config.text.unpadded_vocab_size < config.text.vocab_size
    assert relative_rms(ours, expected) < TOLERANCE


@pytest.mark.parametrize("side", ["left", "right"])
def test_float32_with_padding(public, side):
    """Their mask and positions, our mask; rows of 37, 21 and 5 tokens."""
    config = CONFIGS["one-block"]
    model = random_model(config, seed=1)
    theirs = public.load(model)
    ids = random_ids(3, 37, seed=2, below=59)
    index = torch.arange(37)
    lengths = torch.tensor([[37], [21], [5]])
    mask = index >= 37 - lengths if side == "left" else index < lengths
    ours = run(model, input_ids=ids, attention_mask=mask)
    positions = (mask.cumsum(dim=1) - 1).clamp(min=0)
    expected = run(theirs, input_ids=ids, attention_mask=mask.long(), position_ids=positions)
    assert relative_rms(ours[mask], expected[mask]) < TOLERANCE


def test_float32_decoding(public):
    """Prefill of 20 and then one token at a time, each with its own cache."""
    config = CONFIGS["block-of-one"]
    model = random_model(config, seed=3)
    theirs = public.load(model)
    ids = random_ids(2, 30, seed=4, below=config.image_token_id)
    cache, their_cache = model.new_cache(2), None
    for start, end in [(0, 20), *((t, t + 1) for t in range(20, 30))]:
        with torch.no_grad():
            ours = model(ids[:, start:end], cache=cache).logits
            out = theirs(ids[:, start:end], cache=their_cache, use_cache=True)
        their_cache = out.cache
        assert relative_rms(ours, out.logits) < TOLERANCE


def test_a_bfloat16_checkpoint_in_shards(public):
    """As released: bfloat16 with float32 exceptions, several files; both sides compute in float32."""
    config = CONFIGS["full-layer-first"]
    model = random_model(config, seed=5)
    theirs = public.load(model, experts="bf16", shard_bytes=60_000)
    rounded = copy.deepcopy(model).cast(torch.bfloat16).cast(torch.float32)
    inputs = prompt(config)
    expected = run(theirs, **inputs)
    assert relative_rms(run(rounded, **inputs), expected) < TOLERANCE
    assert relative_rms(run(model, **inputs), expected) > 100 * TOLERANCE  # the rounding shows


def test_we_read_what_they_write(public, tmp_path):
    config = CONFIGS["small-in-miniature"]
    model = random_model(config, seed=5)
    public.load(model).save_pretrained(tmp_path / "theirs")
    again = load(tmp_path / "theirs")
    used = config.text.unpadded_vocab_size
    for name, tensor in model.state_dict().items():
        if name == "llm.unembed.weight":
            tensor[used:] = 0  # they drop the padded rows and write zeros
        assert torch.equal(again.state_dict()[name], tensor), name


# --- bfloat16 ------------------------------------------------------------------------------------------------------


def token_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative error of each token: one whose experts flip does not outweigh the others."""
    difference = (actual.float() - expected.float()).norm(dim=-1)
    return (difference / expected.float().norm(dim=-1)).flatten()


@pytest.fixture(scope="module")
def bfloat16(public):
    """Token errors of ours, of theirs, and between both, against float32 with the same rounded weights.

    For text, for image features, and for text with images, of all configs and two seeds each.
    """
    pools: dict[str, list] = {"text": [], "image features": [], "text with images": []}
    for config in CONFIGS.values():
        for seed in (0, 1):
            model = random_model(config, seed=seed, dtype=torch.bfloat16)
            truth = copy.deepcopy(model).cast(torch.float32)
            models = (model, public.load(model, torch.bfloat16), truth)
            inputs = prompt(config, seed=seed)
            if config.vision is not None:
                pools["text with images"].append([run(m, **inputs) for m in models])
                with torch.no_grad():
                    ours, theirs = (
                        m.get_image_features(inputs["pixel_values"], inputs["image_grid_thw"])
                        if hasattr(m, "generate")
                        else m.image_features(inputs["pixel_values"], inputs["image_grid_thw"])
                        for m in models[:2]
                    )
                    exact = truth.image_features(inputs["pixel_values"], inputs["image_grid_thw"])
                pools["image features"].append([ours, torch.cat(theirs.pooler_output), exact])
            ids = random_ids(ROWS, TOKENS, seed=seed, below=config.image_token_id)
            pools["text"].append([run(m, input_ids=ids) for m in models])
    pairs = ((0, 2), (1, 2), (0, 1))
    return {
        name: [torch.cat([token_errors(runs[a], runs[b]) for runs in pool]) for a, b in pairs]
        for name, pool in pools.items()
    }


@pytest.mark.parametrize("kind", ["text", "image features", "text with images"])
def test_bfloat16_is_equally_far_from_float32(bfloat16, kind):
    ours, theirs, _ = (errors.square().mean().sqrt() for errors in bfloat16[kind])
    assert theirs > 5e-3  # there is something to compare
    assert ours / theirs < 1.2
    ours, theirs, _ = (errors.median() for errors in bfloat16[kind])
    assert ours / theirs < 1.2


def test_bfloat16_text_rounds_at_the_same_points(bfloat16):
    """Most tokens then come out alike, far closer to each other than to float32."""
    ours, _, between = bfloat16["text"]
    assert between.median() < 0.1 * ours.median()


# --- Every term matters --------------------------------------------------------------------------------------------


class Constant(nn.Module):
    """Stands where a projection stood and returns one value."""

    def __init__(self, value: float, size: int):
        super().__init__()
        self.value, self.size = value, size

    def forward(self, x):
        return x.new_full((*x.shape[:-1], self.size), self.value)


def zero(*names):
    """Switch off parameters: set them to zero."""

    def switch(layer):
        for name in names:
            layer.get_parameter(name).data.zero_()

    return switch


def no_clip(name):
    def switch(layer):
        norm = layer.get_submodule(name)
        getattr(norm, "l2_clip", norm).threshold = float("inf")

    return switch


def no_log_scale(name):
    def switch(layer):
        layer.get_submodule(name).log_scale.log_scaling_alpha = 0.0

    return switch


def replaced(name, make=nn.Identity):
    def switch(layer):
        old = layer.get_submodule(name)
        layer.set_submodule(name, make() if make is nn.Identity else make(old.out_features))

    return switch


def uniform_rows(name, row):
    def switch(layer):
        layer.get_parameter(name).data[row] = 0

    return switch


def terms(layer: int, config: TextConfig) -> dict:
    """Name -> what switches that term off in a decoder layer of the public implementation."""
    attn, full = "self_attn", not config.is_sliding(layer)
    out = {
        "sink": replaced(f"{attn}.sink_proj", lambda n: Constant(-1e9, n)),
        "gate": replaced(f"{attn}.o_proj.gate_proj", lambda n: Constant(1e4, n)),
        "bias": zero(f"{attn}.relative_position_bias.proj"),
        "q-clip": no_clip(f"{attn}.q_proj.norm"),
        "k-clip": no_clip(f"{attn}.k_proj.norm"),
        "r-clip": no_clip(f"{attn}.relative_position_bias.norm"),
        "v-norm": replaced(f"{attn}.v_proj.norm"),
        "gate-softcap": replaced("mlp.experts.act_fn.gate_softcap"),
        "up-softcap": replaced("mlp.experts.act_fn.up_softcap"),
        "correction-bias": lambda layer: layer.mlp.gate.e_score_correction_bias.zero_(),
        "mlp-query": zero("mlp_input.query"),
        "attention-convolution": zero("post_attention_convolution.conv1d.weight"),
        "mlp-convolution": zero("post_mlp_convolution.conv1d.weight"),
    }
    if full:
        out["q-log-scaling"] = no_log_scale(f"{attn}.q_proj.norm")
        out["r-log-scaling"] = no_log_scale(f"{attn}.relative_position_bias.norm")
        for x in "kv":
            out[f"{x}-convolution-static-taps"] = zero(f"{attn}.{x}_proj.sconv.static_weight")
            out[f"{x}-convolution-dynamic-taps"] = zero(f"{attn}.{x}_proj.sconv.weight_proj.weight")
    else:
        for x in "kv":
            out[f"{x}-convolution"] = zero(f"{attn}.{x}_proj.sconv.conv1d.weight")
    if layer > 0 and full:
        out |= {f"{x}-query": uniform_rows("attention_input.query", row) for row, x in enumerate("qkv")}
    elif layer > 0:
        out["attention-query"] = zero("attention_input.query")
    return out


ABLATED = CONFIGS["small-in-miniature"]
TERMS = [(layer, term) for layer in range(6) for term in terms(layer, ABLATED.text)]


@pytest.fixture(scope="module")
def ablated(public):
    """(our logits, the public model, inputs)."""
    model = random_model(ABLATED, seed=6)
    inputs = prompt(ABLATED)
    theirs = public.load(model)
    ours = run(model, **inputs)
    assert relative_rms(ours, run(theirs, **inputs)) < TOLERANCE
    return ours, theirs, inputs


@pytest.mark.parametrize(("layer", "term"), TERMS, ids=[f"layer-{layer}-{term}" for layer, term in TERMS])
def test_switching_off_one_term(ablated, layer, term):
    """moves the logits by over 100 times the tolerance: parity holds because both have that term."""
    ours, theirs, inputs = ablated
    broken = copy.deepcopy(theirs)
    with torch.no_grad():
        terms(layer, ABLATED.text)[term](broken.model.language_model.layers[layer])
    assert relative_rms(ours, run(broken, **inputs)) > 100 * TOLERANCE


@pytest.mark.parametrize("term", ["output-query", "logits-softcap", "final-norm", "embedding-norm", "images"])
def test_switching_off_one_term_outside_the_layers(ablated, term):
    ours, theirs, inputs = ablated
    broken = copy.deepcopy(theirs)
    text = broken.model.language_model
    with torch.no_grad():
        match term:
            case "output-query":
                text.final_input.query.zero_()
            case "logits-softcap":
                broken.logit_softcap = nn.Identity()
            case "final-norm":
                text.norm.weight.fill_(1)
            case "embedding-norm":
                text.embed_tokens.embed_norm.weight.fill_(1)
            case "images":
                inputs = {**inputs, "pixel_values": -inputs["pixel_values"]}
    assert relative_rms(ours, run(broken, **inputs)) > 100 * TOLERANCE
