"""Configuration: every size and constant of the model, under the key that the released config.json uses.

The package docstring's letters: D hidden_size, L num_hidden_layers, R d_rel, X rel_extent, W sliding_window_size
(window and bias extent of sliding layers), E n_routed_experts, k num_experts_per_tok, I moe_intermediate_size, K
conv_kernel_size, V vocab_size (stored rows) and unpadded_vocab_size (rows used). H, G, d: num_attention_heads,
num_key_value_heads, head_dim of full layers; of sliding layers with the prefix swa_.
"""

import json
import math
import warnings
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, no_type_check

from .errors import InputError

SLIDING = "hybrid_sliding"
FULL = "hybrid"

# Released configs and `transformers` spell some keys and layer types in other ways; each is read as its right side.
_ALIASES = {
    "n_layers_per_attnres_block": "n_layers_per_attn_res_block", "sliding_window": "sliding_window_size",
    "num_local_experts": "n_routed_experts", "intermediate_size": "moe_intermediate_size",
    "routed_scaling_factor": "route_scale", "sconv_kernel_size": "conv_kernel_size",
    "model_max_length": "max_position_embeddings", "native_patch_size": "patch_size",
    "adapter_merge_size": "spatial_merge_size", "sliding_attention": SLIDING, "full_attention": FULL,
}  # fmt: skip
# Keys that say nothing about the computation, or are read apart.
_IGNORED = {
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "attention_dropout", "use_cache",
    "initializer_range", "return_dict", "output_hidden_states", "output_attentions", "pad_token_id", "bos_token_id",
    "layer_scale_init_value", "mlp_ratio", "quantization_config", "chunk_size_feed_forward", "is_encoder_decoder",
    "id2label", "label2id", "problem_type", "number_of_conv_states", "mtp_config", "local_layer_ids", "rope_theta",
    "rope_parameters", "text_hidden_size", "_name_or_path", "auto_map", "image_token_id",
}  # fmt: skip
# Facts that this code builds in; a config that says otherwise describes another model.
_CONSTANTS = {
    "scoring_func": ["sigmoid"], "rope_type": ["axial"], "projector_bias": [False], "num_channels": [3],
    "tie_word_embeddings": [False], "n_shared_experts": [0, None], "norm_topk_prob": [True],
}  # fmt: skip


# no_type_check: the tests' type checker must let a wrong JSON value through to the checks below, which name its key.
@no_type_check
@dataclass(frozen=True)
class AttentionConfig:
    """The sizes of one layer's attention; sliding and full layers may differ in all of them.

    H, G, d: query heads, key/value heads, head size. window: visible keys, the current token included
    (None = all). extent: distances 0..extent-1 carry a relative bias. log_scaling: (floor, alpha) or None.
    """

    num_heads: int
    num_key_value_heads: int
    head_dim: int
    window: int | None
    extent: int
    log_scaling: tuple[float, float] | None = None


@no_type_check
@dataclass
class TextConfig:
    """The text stack. Defaults are those of Inkling 2 Small; see the module docstring for the symbols."""

    vocab_size: int = 201024
    unpadded_vocab_size: int = 200058
    hidden_size: int = 4608
    num_hidden_layers: int = 48
    layer_types: list[str] = field(default_factory=list)  # empty: every sixth layer full, the others sliding
    num_attention_heads: int = 48
    num_key_value_heads: int = 8
    head_dim: int = 128
    swa_num_attention_heads: int = 48
    swa_num_key_value_heads: int = 8
    swa_head_dim: int = 128
    sliding_window_size: int = 1024
    d_rel: int = 16
    rel_extent: int = 1024
    n_layers_per_attn_res_block: int = 6
    conv_kernel_size: int = 4
    moe_intermediate_size: int = 2304
    n_routed_experts: int = 384
    num_experts_per_tok: int = 8
    route_scale: float = 8.0
    mlp_gate_softcap: float = 4.0
    mlp_up_softcap: float = 25.0
    final_logit_softcapping: float = 30.0
    qk_l2_clip_threshold: float = 2 * math.sqrt(128)
    rel_l2_clip_threshold: float = 8.0
    log_scaling_n_floor: float = 128000
    log_scaling_alpha: float = 0.1
    rms_norm_eps: float = 1e-6
    max_position_embeddings: int = 1048576
    eos_token_id: int | list[int] | None = 200006

    def __post_init__(self) -> None:
        if not self.layer_types and isinstance(self.num_hidden_layers, int):
            self.layer_types = [FULL if (i + 1) % 6 == 0 else SLIDING for i in range(self.num_hidden_layers)]
        _check(self, _impossible_text)

    def is_sliding(self, layer: int) -> bool:
        return self.layer_types[layer] == SLIDING

    def starts_block(self, layer: int) -> bool:
        """Whether this layer closes the running block of the depth state and starts a new one."""
        return layer % self.n_layers_per_attn_res_block == 0

    def attention(self, layer: int) -> AttentionConfig:
        sliding = self.is_sliding(layer)
        keys = ("num_attention_heads", "num_key_value_heads", "head_dim")
        sizes = [getattr(self, ("swa_" if sliding else "") + key) for key in keys]
        if sliding:
            return AttentionConfig(*sizes, window=self.sliding_window_size, extent=self.sliding_window_size)
        return AttentionConfig(*sizes, None, self.rel_extent, (float(self.log_scaling_n_floor), self.log_scaling_alpha))


@no_type_check
@dataclass
class VisionConfig:
    """The image encoder. Defaults are those of Inkling 2 Small."""

    hidden_size: int = 1024
    num_hidden_layers: int = 23
    num_attention_heads: int = 16
    intermediate_size: int = 4096
    patch_size: int = 20  # pixels a side
    spatial_merge_size: int = 2  # patches a side of one text token's tile
    posemb_grid_size: int = 32  # side of the learned position grid
    projection_hidden_dim: int = 4096
    layer_norm_eps: float = 1e-5
    rope_theta: float = 10000.0

    def __post_init__(self) -> None:
        _check(self, _impossible_vision)

    @property
    def tile_size(self) -> int:
        """Pixels a side of one tile, which becomes one text token."""
        return self.patch_size * self.spatial_merge_size


@no_type_check
@dataclass
class InklingConfig:
    """A whole model: text stack, optional image encoder, and the id that marks an image tile in the text."""

    text: TextConfig = field(default_factory=TextConfig)
    vision: VisionConfig | None = field(default_factory=VisionConfig)
    image_token_id: int = 200054

    def __post_init__(self) -> None:
        if self.vision is not None and not 0 <= self.image_token_id < self.text.vocab_size:
            raise InputError(
                f"config: image_token_id is {self.image_token_id}, expected 0 <= id < vocab_size {self.text.vocab_size}"
            )

    @classmethod
    def small(cls) -> "InklingConfig":
        """Inkling 2 Small: 594e9 parameters, 17e9 active per token."""
        return cls()

    @classmethod
    def nano(cls) -> "InklingConfig":
        """The trained model that ships with this package: Small in miniature, 18 layers in 3 blocks of 6."""
        text = TextConfig(
            vocab_size=1536, unpadded_vocab_size=1536, hidden_size=128, num_hidden_layers=18,
            num_attention_heads=6, num_key_value_heads=2, head_dim=32, sliding_window_size=64, d_rel=8, rel_extent=64,
            swa_num_attention_heads=6, swa_num_key_value_heads=2, swa_head_dim=32,
            moe_intermediate_size=64, n_routed_experts=16, num_experts_per_tok=4, route_scale=4.0, eos_token_id=None,
            qk_l2_clip_threshold=2 * math.sqrt(32), log_scaling_n_floor=512, max_position_embeddings=8192,
        )  # fmt: skip
        vision = VisionConfig(
            hidden_size=128, num_hidden_layers=4, num_attention_heads=4, intermediate_size=512,
            posemb_grid_size=8, projection_hidden_dim=256,
        )  # fmt: skip
        return cls(text, vision, image_token_id=1535)

    @classmethod
    def tiny(cls) -> "InklingConfig":
        """A model for tests: every feature on, every extent shorter than a 40-token prompt, no matrix square."""
        text = TextConfig(
            vocab_size=48, unpadded_vocab_size=40, hidden_size=32, num_hidden_layers=4,
            layer_types=[SLIDING, SLIDING, SLIDING, FULL],
            num_attention_heads=4, num_key_value_heads=2, head_dim=14,
            swa_num_attention_heads=6, swa_num_key_value_heads=3, swa_head_dim=10,
            sliding_window_size=8, d_rel=5, rel_extent=12, n_layers_per_attn_res_block=2,
            moe_intermediate_size=48, n_routed_experts=7, num_experts_per_tok=3, route_scale=2.5,
            qk_l2_clip_threshold=3.0, rel_l2_clip_threshold=2.0, log_scaling_n_floor=10,
            max_position_embeddings=4096, eos_token_id=None,
        )  # fmt: skip
        vision = VisionConfig(24, 2, 3, 44, patch_size=4, posemb_grid_size=5, projection_hidden_dim=28)
        return cls(text, vision, image_token_id=39)

    @classmethod
    def from_dict(cls, data: dict[str, Any], source: str = "config") -> "InklingConfig":
        """Read a released or `transformers` config; flat (text only) or nested (text_config, vision_config).

        Unknown keys are named in one warning. Raises InputError naming each key whose value is impossible.
        """
        unknown: list[str] = []
        data = _object(data, source)
        if "text_config" in data:
            inherited = {"eos_token_id": data["eos_token_id"]} if "eos_token_id" in data else {}
            text_data = {**inherited, **_object(data["text_config"], f"{source}: text_config")}
            text = _read(TextConfig, text_data, f"{source}: text_config.", unknown)
            known = {"text_config", "vision_config", "eos_token_id"} | _IGNORED
            unknown += [key for key in data if key not in known]
        else:
            text = _read(TextConfig, data, f"{source}: ", unknown)
        vision = None
        if data.get("vision_config") is not None:
            vision_data = _object(data["vision_config"], f"{source}: vision_config")
            vision = _read(VisionConfig, vision_data, f"{source}: vision_config.", unknown)
        if unknown:
            warnings.warn(f"{source}: unknown keys ignored: {', '.join(sorted(unknown))}", stacklevel=2)
        image_token_id = data.get("image_token_id", cls.image_token_id)
        if vision is not None and not isinstance(image_token_id, int):
            raise InputError(f"{source}: image_token_id is {image_token_id!r}, expected an integer")
        return cls(text, vision, image_token_id)

    @classmethod
    def from_pretrained(cls, folder: str | Path) -> "InklingConfig":
        """Read `folder`/config.json. Raises InputError if it is missing, not JSON, or holds impossible values."""
        path = Path(folder) / "config.json"
        if not path.is_file():
            raise InputError(f"{path}: not found, expected a checkpoint folder with a config.json")
        try:
            data = json.loads(path.read_text(encoding="utf-8"))
        except (ValueError, RecursionError) as error:
            raise InputError(f"{path}: not valid JSON ({error})") from None
        return cls.from_dict(data, source=str(path))

    def to_dict(self) -> dict[str, Any]:
        """The config.json that this package, and `transformers`, read."""
        text = {"model_type": "inkling2_text", **asdict(self.text), "hidden_act": "silu", "scoring_func": "sigmoid"}
        if self.vision is None:
            return {"architectures": ["Inkling2ForCausalLM"], **text}
        vision = {"model_type": "inkling2_vision", **asdict(self.vision), "hidden_act": "gelu"}
        vision["rope_parameters"] = {"rope_theta": vision.pop("rope_theta"), "rope_type": "axial"}
        vision["text_hidden_size"] = self.text.hidden_size
        outer = {"architectures": ["Inkling2ForConditionalGeneration"], "model_type": "inkling2"}
        return {**outer, "image_token_id": self.image_token_id, "text_config": text, "vision_config": vision}


def _object(data: Any, name: str) -> dict[str, Any]:
    if not isinstance(data, dict):
        raise InputError(f"{name} is {data!r}, expected a JSON object")
    return data


def _read(kind: type, data: dict[str, Any], prefix: str, unknown: list[str]) -> Any:
    """One dataclass from one JSON object: spellings resolved, constants checked, unknown keys collected."""
    names = {f.name for f in fields(kind)}
    values: dict[str, Any] = {}
    constants = {**_CONSTANTS, "hidden_act": ["silu" if kind is TextConfig else "gelu"]}
    if kind is VisionConfig:  # transformers keeps these two keys in an object of their own
        data = {**data, **_object(data.get("rope_parameters") or {}, f"{prefix}rope_parameters")}
    for key, value in data.items():
        name = key if key in names else _ALIASES.get(key, key)
        if key in constants and value not in constants[key]:
            raise InputError(f"{prefix}{key} is {value!r}, this model needs {constants[key][0]!r}")
        if name in names:
            if name in values and values[name] != value:
                raise InputError(f"{prefix}{name} is given twice, as {values[name]!r} and as {value!r}")
            if value is not None or name == "eos_token_id":  # null means "the default", but no end of text is a choice
                values[name] = value
        elif key not in _IGNORED and key not in constants:
            unknown.append(prefix.partition(": ")[2] + key)
    if kind is TextConfig:
        if not isinstance(values.get("layer_types", []), list):
            raise InputError(f"{prefix}layer_types is {values['layer_types']!r}, expected a list")
        if "layer_types" in values:
            values["layer_types"] = [_ALIASES.get(str(t), t) for t in values["layer_types"]]
        elif (local := data.get("local_layer_ids")) is not None:
            layers = values.get("num_hidden_layers", kind.num_hidden_layers)
            possible = range(layers) if isinstance(layers, int) else []
            if not isinstance(local, list) or any(i not in possible for i in local):
                raise InputError(f"{prefix}local_layer_ids must be layer numbers below {layers}")
            values["layer_types"] = [SLIDING if i in local else FULL for i in possible]
        if "vocab_size" in values:
            values.setdefault("unpadded_vocab_size", values["vocab_size"])
    else:
        width, ratio = values.get("hidden_size"), data.get("mlp_ratio") or 4
        if isinstance(width, int) and isinstance(ratio, (int, float)):
            values.setdefault("intermediate_size", int(width * ratio))
    try:
        return kind(**values)
    except InputError as error:
        raise InputError(str(error).replace("config: ", prefix, 1)) from None


def _check(config: Any, impossible_relations: Callable[[Any], Iterator[str]]) -> None:
    """One error that names every impossible value: integers and floats must be positive, relations possible."""
    problems = []
    for f in fields(config):
        value = getattr(config, f.name)
        if f.type is int and (type(value) is not int or value <= 0):
            problems.append(f"{f.name} is {value!r}, expected a positive integer")
        if f.type is float and (type(value) not in (int, float) or not 0 < value < math.inf):
            problems.append(f"{f.name} is {value!r}, expected a positive number")
    problems = problems or list(impossible_relations(config))  # relations need sound numbers
    if problems:
        raise InputError("config: " + "; ".join(problems))


def _impossible_text(c: TextConfig) -> Iterator[str]:
    for prefix in ("", "swa_"):
        heads, kv_heads = getattr(c, f"{prefix}num_attention_heads"), getattr(c, f"{prefix}num_key_value_heads")
        if heads % kv_heads:
            yield f"{prefix}num_attention_heads {heads} is not divisible by {prefix}num_key_value_heads {kv_heads}"
    if c.num_experts_per_tok > c.n_routed_experts:
        yield f"num_experts_per_tok {c.num_experts_per_tok} exceeds n_routed_experts {c.n_routed_experts}"
    if c.unpadded_vocab_size > c.vocab_size:
        yield f"unpadded_vocab_size {c.unpadded_vocab_size} exceeds vocab_size {c.vocab_size}"
    for i, kind in enumerate(c.layer_types):
        if kind not in (SLIDING, FULL):
            yield f"layer_types[{i}] is {kind!r}, expected {SLIDING!r} or {FULL!r}"
    if len(c.layer_types) != c.num_hidden_layers:
        yield f"layer_types has {len(c.layer_types)} entries, num_hidden_layers is {c.num_hidden_layers}"
    ends = c.eos_token_id if isinstance(c.eos_token_id, list) else [c.eos_token_id]
    if any(e is not None and (type(e) is not int or not 0 <= e < c.vocab_size) for e in ends):
        yield f"eos_token_id is {c.eos_token_id!r}, expected ids below vocab_size {c.vocab_size}"


def _impossible_vision(c: VisionConfig) -> Iterator[str]:
    if c.hidden_size % c.num_attention_heads:
        yield f"hidden_size {c.hidden_size} is not divisible by num_attention_heads {c.num_attention_heads}"
    elif (head := c.hidden_size // c.num_attention_heads) % 4:
        yield f"the vision head size {head} (hidden_size / num_attention_heads) must be divisible by 4"
