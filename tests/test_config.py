"""config.json in, config.json out: both spellings, unknown keys, and one error for each impossible value."""

import json
import math
import warnings
from dataclasses import fields, replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inkling_ref.config import FULL, SLIDING, InklingConfig, TextConfig, VisionConfig
from inkling_ref.errors import InputError

PRESETS = {name: getattr(InklingConfig, name)() for name in ("small", "nano", "tiny")}


def text_dict(**changes) -> dict:
    """A flat text config as tiny() has it, with changes; a value of ... removes the key."""
    data = {**InklingConfig.tiny().to_dict()["text_config"], **changes}
    return {key: value for key, value in data.items() if value is not ...}


def nested_dict(**changes) -> dict:
    return {**InklingConfig.tiny().to_dict(), **changes}


def read(data: dict) -> InklingConfig:
    """from_dict, with any warning an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return InklingConfig.from_dict(data)


# ---- presets and round trips


def test_small_is_the_released_model():
    text, vision = PRESETS["small"].text, PRESETS["small"].vision
    assert [i for i in range(48) if not text.is_sliding(i)] == [5, 11, 17, 23, 29, 35, 41, 47]
    assert [i for i in range(48) if text.starts_block(i)] == [0, 6, 12, 18, 24, 30, 36, 42]
    sliding, full = text.attention(0), text.attention(5)
    assert (sliding.window, sliding.extent, sliding.log_scaling) == (1024, 1024, None)
    assert (full.window, full.extent, full.log_scaling) == (None, 1024, (128000, 0.1))
    assert (full.num_heads, full.num_key_value_heads, full.head_dim) == (48, 8, 128)
    assert vision.tile_size == 40
    assert text.qk_l2_clip_threshold == pytest.approx(22.627417)


@pytest.mark.parametrize("preset", PRESETS)
def test_round_trip(preset, tmp_path):
    config = PRESETS[preset]
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert InklingConfig.from_pretrained(tmp_path) == config


def test_round_trip_of_a_text_only_model():
    config = replace(PRESETS["tiny"], vision=None)
    data = config.to_dict()
    assert "text_config" not in data
    assert read(data).text == config.text
    assert read(data).vision is None


def test_transformers_reads_what_we_write_and_we_read_what_it_writes():
    from transformers.models.inkling2 import Inkling2Config, Inkling2TextConfig

    theirs = Inkling2Config(**PRESETS["tiny"].to_dict())
    assert theirs.text_config.swa_head_dim == 10
    assert theirs.vision_config.rope_parameters["rope_theta"] == 10000.0
    assert read(theirs.to_dict()) == PRESETS["tiny"]
    assert read(Inkling2TextConfig(**text_dict()).to_dict()).text == PRESETS["tiny"].text
    assert read(Inkling2Config().to_dict()) == PRESETS["small"]


# ---- spellings


@pytest.mark.parametrize(
    ("other", "name"),
    [
        ("n_layers_per_attnres_block", "n_layers_per_attn_res_block"),
        ("sliding_window", "sliding_window_size"),
        ("num_local_experts", "n_routed_experts"),
        ("sconv_kernel_size", "conv_kernel_size"),
        ("intermediate_size", "moe_intermediate_size"),
        ("routed_scaling_factor", "route_scale"),
        ("model_max_length", "max_position_embeddings"),
    ],
)
def test_both_spellings_of_a_text_key(other, name):
    value = getattr(PRESETS["tiny"].text, name)
    assert read(text_dict(**{name: ..., other: value})).text == PRESETS["tiny"].text
    assert read(text_dict(**{other: value})).text == PRESETS["tiny"].text  # both, and they agree
    with pytest.raises(InputError, match=f"{name} is given twice"):
        read(text_dict(**{other: value + 1}))


@pytest.mark.parametrize(
    ("other", "name"), [("native_patch_size", "patch_size"), ("adapter_merge_size", "spatial_merge_size")]
)
def test_both_spellings_of_a_vision_key(other, name):
    vision = nested_dict()["vision_config"]
    value = vision.pop(name)
    assert read(nested_dict(vision_config={**vision, other: value})) == PRESETS["tiny"]


@pytest.mark.parametrize("spelling", [("hybrid_sliding", "hybrid"), ("sliding_attention", "full_attention")])
def test_both_spellings_of_layer_types(spelling):
    sliding, full = spelling
    data = text_dict(layer_types=[sliding, sliding, sliding, full])
    assert read(data).text.layer_types == [SLIDING, SLIDING, SLIDING, FULL]


def test_local_layer_ids_name_the_sliding_layers():
    data = text_dict(layer_types=..., local_layer_ids=[0, 2])
    assert read(data).text.layer_types == [SLIDING, FULL, SLIDING, FULL]


def test_without_layer_types_every_sixth_layer_is_full():
    data = text_dict(layer_types=..., num_hidden_layers=13)
    assert [i for i, kind in enumerate(read(data).text.layer_types) if kind == FULL] == [5, 11]


@pytest.mark.parametrize("ids", [[0, 4], [-1], ["0"], 3], ids=repr)
def test_impossible_local_layer_ids(ids):
    with pytest.raises(InputError, match="local_layer_ids must be layer numbers below 4"):
        read(text_dict(layer_types=..., local_layer_ids=ids))


def test_null_means_the_default():
    assert read(text_dict(route_scale=None)).text.route_scale == 8.0


def test_rope_theta_in_both_places():
    vision = nested_dict()["vision_config"]
    for key in ({"rope_parameters": {"rope_theta": 77.0}}, {"rope_parameters": None, "rope_theta": 77.0}):
        assert read(nested_dict(vision_config={**vision, **key})).vision.rope_theta == 77.0


def test_vision_mlp_width_from_its_ratio():
    vision = nested_dict()["vision_config"]
    del vision["intermediate_size"]
    assert read(nested_dict(vision_config={**vision, "mlp_ratio": 2.5})).vision.intermediate_size == 60


def test_end_of_text_id_of_the_outer_config():
    text = nested_dict()["text_config"]
    text.pop("eos_token_id")
    assert read(nested_dict(text_config=text, eos_token_id=[3, 5])).text.eos_token_id == [3, 5]


def test_case_42_vocabulary_sizes():
    text = read(text_dict(vocab_size=48, unpadded_vocab_size=40)).text
    assert (text.vocab_size, text.unpadded_vocab_size) == (48, 40)
    assert read(text_dict(vocab_size=48, unpadded_vocab_size=...)).text.unpadded_vocab_size == 48


# ---- unknown keys


def test_unknown_keys_are_named_once_in_one_warning():
    data = nested_dict(zebra=1)
    data["text_config"] = text_dict(aardvark=2)
    data["vision_config"] = {**data["vision_config"], "badger": 3}
    with pytest.warns(UserWarning, match="unknown keys ignored") as caught:
        assert InklingConfig.from_dict(data) == PRESETS["tiny"]
    assert [str(w.message) for w in caught] == [
        "config: unknown keys ignored: text_config.aardvark, vision_config.badger, zebra"
    ]


# ---- impossible values: one error each, naming the key


INTEGERS = [f.name for f in fields(TextConfig) if f.type is int]
FLOATS = [f.name for f in fields(TextConfig) if f.type is float]
VISION_INTEGERS = [f.name for f in fields(VisionConfig) if f.type is int]


def error_of(data: dict) -> str:
    with pytest.raises(InputError) as caught:
        read(data)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", INTEGERS)
@pytest.mark.parametrize("value", [0, -3, 2.5, "8", True], ids=repr)
def test_impossible_integer(name, value):
    assert f"{name} is {value!r}, expected a positive integer" in error_of(text_dict(**{name: value}))


@pytest.mark.parametrize("name", FLOATS)
@pytest.mark.parametrize("value", [0, -1.0, math.inf, math.nan, "x", [1.0]], ids=repr)
def test_impossible_number(name, value):
    assert f"{name} is {value!r}, expected a positive number" in error_of(text_dict(**{name: value}))


@pytest.mark.parametrize("name", VISION_INTEGERS)
def test_impossible_vision_integer(name):
    data = nested_dict(vision_config={**nested_dict()["vision_config"], name: -1})
    assert f"{name} is -1, expected a positive integer" in error_of(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_key_value_heads": 3}, "num_attention_heads 4 is not divisible by num_key_value_heads 3"),
        ({"swa_num_key_value_heads": 4}, "swa_num_attention_heads 6 is not divisible by swa_num_key_value_heads 4"),
        ({"num_experts_per_tok": 8}, "num_experts_per_tok 8 exceeds n_routed_experts 7"),
        ({"unpadded_vocab_size": 49}, "unpadded_vocab_size 49 exceeds vocab_size 48"),
        ({"layer_types": [SLIDING] * 3 + ["linear"]}, "layer_types[3] is 'linear', expected"),
        ({"layer_types": [SLIDING] * 5}, "layer_types has 5 entries, num_hidden_layers is 4"),
        ({"layer_types": "hybrid"}, "layer_types is 'hybrid', expected a list"),
        ({"layer_types": [["hybrid"]] * 4}, "layer_types[0] is ['hybrid'], expected"),
        ({"eos_token_id": 48}, "eos_token_id is 48, expected ids below vocab_size 48"),
        ({"eos_token_id": [3, "x"]}, "eos_token_id is [3, 'x'], expected ids below vocab_size 48"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax', this model needs 'sigmoid'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', this model needs 'silu'"),
        ({"tie_word_embeddings": True}, "tie_word_embeddings is True, this model needs False"),
        ({"n_shared_experts": 1}, "n_shared_experts is 1, this model needs 0"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, this model needs True"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_impossible_text_value(changes, message):
    assert message in error_of(text_dict(**changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_attention_heads": 5}, "hidden_size 24 is not divisible by num_attention_heads 5"),
        ({"num_attention_heads": 4}, "the vision head size 6 (hidden_size / num_attention_heads) must be divisible by"),
        ({"projector_bias": True}, "projector_bias is True, this model needs False"),
        ({"num_channels": 4}, "num_channels is 4, this model needs 3"),
        ({"rope_theta": -1.0, "rope_parameters": None}, "rope_theta is -1.0, expected a positive number"),
        ({"rope_parameters": {"rope_type": "yarn"}}, "rope_type is 'yarn', this model needs 'axial'"),
        ({"hidden_act": "silu"}, "hidden_act is 'silu', this model needs 'gelu'"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_impossible_vision_value(changes, message):
    data = nested_dict(vision_config={**nested_dict()["vision_config"], **changes})
    assert message in error_of(data)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"image_token_id": 48}, "image_token_id is 48, expected 0 <= id < vocab_size 48"),
        ({"image_token_id": "39"}, "image_token_id is '39', expected an integer"),
        ({"text_config": None}, "text_config is None, expected a JSON object"),
        ({"vision_config": [1]}, "vision_config is [1], expected a JSON object"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
def test_impossible_outer_value(changes, message):
    assert message in error_of(nested_dict(**changes))


def test_every_problem_of_a_config_in_one_error():
    message = error_of(text_dict(num_experts_per_tok=9, unpadded_vocab_size=60))
    assert "num_experts_per_tok 9" in message
    assert "unpadded_vocab_size 60" in message


@pytest.mark.parametrize("data", [[], "config", None, 3], ids=repr)
def test_not_an_object(data):
    assert "expected a JSON object" in error_of(data)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "not found"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[" * 100_000 + b"]" * 100_000, "not valid JSON"),
    ],
    ids=["missing", "cut", "not UTF-8", "too deep"],
)
def test_an_unreadable_file_is_named(tmp_path, content, message):
    path = tmp_path / "config.json"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=message) as caught:
        InklingConfig.from_pretrained(tmp_path)
    assert str(caught.value).startswith(str(path))


def test_a_folder_named_config_json(tmp_path):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(InputError, match="not found"):
        InklingConfig.from_pretrained(tmp_path)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-5000, 5000) | st.floats() | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=5,
)
KEYS = st.sampled_from([*text_dict(), "local_layer_ids", "rope_parameters", "sliding_window", "text_config"])


@given(st.dictionaries(KEYS, JSON, max_size=3), st.booleans())
def test_any_json_is_read_or_refused_with_one_line(changes, nested):
    data = {**text_dict(), **changes}
    read_or_refused(nested_dict(text_config=data) if nested else data)


@given(st.dictionaries(st.sampled_from([*nested_dict()["vision_config"], "mlp_ratio", "rope_theta"]), JSON, max_size=3))
def test_any_vision_json_is_read_or_refused_with_one_line(changes):
    data = {**nested_dict()["vision_config"], **changes}
    if changes.pop("intermediate_size", None) is None:
        del data["intermediate_size"]
    read_or_refused(nested_dict(vision_config=data))


def read_or_refused(data: dict) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            InklingConfig.from_dict(data)
        except InputError as error:
            refused = str(error)
        else:
            refused = ""
    assert "\n" not in refused
