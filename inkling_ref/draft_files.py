"""Drafters on disk: mtp.safetensors beside the target, or a folder of their own.

Sizes are read from the tensors' shapes, and the kind of head, norms, gate, sink and relative bias from the tensors'
names; a config that says otherwise is refused. What no tensor shows (taps, block, mask, layout) is read from
config.json: from the section `mtp_config`, as `save_drafter` writes it, or `dspark_config`, `dflash_config`, or the top
level, in any of the spellings below. What is left open can be given to `load_drafter`, and judged by what the target
accepts.
"""

import re
import warnings
from collections.abc import Callable
from dataclasses import asdict, fields
from json import dumps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .checkpoint import ShapesOnly
from .config import InklingConfig, TextConfig
from .draft_config import DSparkConfig
from .dspark import Drafter
from .errors import InputError, listed
from .files import whole_file
from .model import Inkling
from .tensor_files import WEIGHTS, CheckpointReader, Layout, Part, read_json, write_file

FILE, SECTION = "mtp.safetensors", "mtp_config"
_SECTIONS = (SECTION, "dspark_config", "dflash_config")
_PREFIX = re.compile(r"^(model\.)?(mtp\.|dspark\.|drafter\.)?(model\.)?")
# Inkling's own names for what has another in DeepSpec.
_RENAMED = {
    ".attn.": ".self_attn.", "wq_du": "q_proj", "wk_dv": "k_proj", "wv_dv": "v_proj", "wo_ud": "o_proj",
    "attn_norm": "input_layernorm", "mlp_norm": "post_attention_layernorm",
}  # fmt: skip
_SHARED = {"embed_tokens.weight": "embed", "lm_head.weight": "unembed"}  # copies of the target's
_ALIASES = {
    "dspark_target_layer_ids": "target_layer_ids", "dspark_block_size": "block_size",
    "dspark_noise_token_id": "mask_token_id", "dspark_markov_rank": "markov_rank",
}  # fmt: skip
_AFTER_NEXT = ("eagle_aux_hidden_state_layer_ids", "aux_hidden_state_layer_ids")  # these count from 1
_NOT_OURS = {"architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "num_speculative_tokens"}
# Keys that a config shared with the target has for the target.
_OF_TARGET = {
    "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size", "d_rel",
    "rel_extent", "rms_norm_eps", "rope_theta",
}  # fmt: skip
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def load_drafter(
    folder: str | Path,
    model: Inkling,
    part: Callable[[Drafter], dict[str, tuple[slice, ...]]] | None = None,
    **choices: Any,
) -> Drafter:
    """Read the drafter of `model`, on its device and in its dtype, in eval mode and without gradients.

    `bytes_read` of the drafter counts the bytes of tensors that were read.

    Args:
        folder: holds mtp.safetensors, or is a drafter's own and holds model.safetensors.
        part: turns an empty drafter into a part of itself, and tells what to read of each tensor: see `parallel`.
        choices: fields of `DSparkConfig` that are open, or to be tried otherwise than the config says.

    Raises:
        InputError: naming the file and every tensor that is unknown, missing, or of another shape or kind; or the key
            that is missing, impossible, or contradicts the tensors.
    """
    folder = Path(folder)
    config, file = read_config(folder, model.config, **choices), find(folder)
    with CheckpointReader(folder, file) as reader:
        names = _plain_names(reader, folder / file)
        with torch.device("meta"), ShapesOnly():
            drafter = Drafter(config, model)
        expected = dict(drafter.named_parameters())
        slices = part(drafter) if part else {}

        def read(name: str) -> Tensor:
            return reader.read_slice(names[name], slices.get(name, ()))

        _check(reader, names, expected, read, folder / file, model)
        for name, parameter in list(drafter.named_parameters()):
            tensor = read(name)
            if tensor.shape[0] < parameter.shape[0]:  # a table without the target's unused rows
                tensor = torch.cat([tensor, tensor.new_zeros(parameter.shape[0] - len(tensor), *tensor.shape[1:])])
            module, _, leaf = name.rpartition(".")
            tensor = nn.Parameter(tensor.to(model.device, model.dtype), requires_grad=False)
            drafter.get_submodule(module).register_parameter(leaf, tensor)
        drafter.bytes_read = reader.bytes_read
    return drafter.eval()


def read_config(folder: str | Path, target: InklingConfig, **choices: Any) -> DSparkConfig:
    """What the drafter of a folder is, from its file's header and config.json; arguments, errors of `load_drafter`."""
    folder = Path(folder)
    if unknown := sorted(set(choices) - {f.name for f in fields(DSparkConfig)}):
        raise InputError(f"load_drafter: unknown choice {', '.join(unknown)}, expected fields of DSparkConfig")
    file = find(folder)
    with CheckpointReader(folder, file) as reader:
        shapes = {name: reader.shape(stored) for name, stored in _plain_names(reader, folder / file).items()}
    return _config(shapes, _said(folder, target.text), choices, folder / file, target.text)


def find(folder: Path) -> str:
    """The file of `folder` that holds a drafter. Raises InputError if there is none."""
    if (folder / FILE).is_file():
        return FILE
    if (folder / WEIGHTS).is_file():
        with CheckpointReader(folder, WEIGHTS) as reader:
            if "fc.weight" in map(_plain_name, reader.names):
                return WEIGHTS
    raise InputError(f"{folder}: no drafter, expected {FILE} or a drafter's own {WEIGHTS}")


def _plain_name(stored: str) -> str:
    name = _PREFIX.sub("", stored)
    for theirs, ours in _RENAMED.items():
        name = name.replace(theirs, ours)
    return name


def _plain_names(reader: CheckpointReader, file: Path) -> dict[str, str]:
    """Our name of every tensor -> its stored one."""
    names: dict[str, str] = {}
    for stored in reader.names:
        name = _plain_name(stored)
        if name in names:
            raise InputError(f"{file}: {stored} and {names[name]} are the same tensor, {name}")
        names[name] = stored
    return names


def _said(folder: Path, target: TextConfig) -> dict[str, Any]:
    """What config.json says about the drafter, in our spelling."""
    path = folder / "config.json"
    data = read_json(path) if path.is_file() else {}
    sections = [data[key] for key in _SECTIONS if data.get(key) is not None]
    if not all(isinstance(section, dict) for section in sections):
        raise InputError(f"{path}: {' or '.join(_SECTIONS)} is no JSON object")
    known = {f.name for f in fields(DSparkConfig)}
    said: dict[str, Any] = {}
    # The top level may be the target's, whose sizes are not the drafter's.
    for section in ({k: v for k, v in data.items() if k not in _OF_TARGET}, *sections):
        for key, value in section.items():
            if key in _AFTER_NEXT and value is not None:
                if not isinstance(value, list) or not all(isinstance(id, int) for id in value):
                    raise InputError(f"{path}: {key} is {value!r}, expected a list of layers")
                said["target_layer_ids"] = [id - 1 for id in value]
            elif (name := _ALIASES.get(key, key)) in known and value is not None:
                said[name] = value
            elif key == "draft_vocab_size" and value not in (None, target.unpadded_vocab_size, target.vocab_size):
                expected = f"the target's vocabulary, {target.unpadded_vocab_size}"
                raise InputError(f"{path}: {key} is {value}, expected {expected}")
        if section in sections and "layer_types" in section:
            window, kinds = section.get("sliding_window"), section["layer_types"]
            if not isinstance(kinds, list) or not all(isinstance(kind, str) for kind in kinds):
                raise InputError(f"{path}: layer_types is {kinds!r}, expected a list of names")
            said["windows"] = [window if "sliding" in kind else None for kind in kinds]
    other = {key for section in sections for key in section} - known - set(_ALIASES) - set(_AFTER_NEXT) - _NOT_OURS
    if other := sorted(other - {"layer_types", "sliding_window", "draft_vocab_size"}):
        warnings.warn(f"{path}: unknown keys of the drafter ignored: {', '.join(other)}", stacklevel=3)
    return said


def _config(
    shapes: dict[str, tuple[int, ...]], said: dict[str, Any], choices: dict[str, Any], file: Path, target: TextConfig
) -> DSparkConfig:
    """Sizes and kinds from the tensors; the rest from `said`, and `choices` above all."""

    def shape(name: str, axes: int = 2) -> tuple[int, ...]:
        if len(shapes.get(name, ())) != axes or 0 in shapes[name]:
            raise InputError(f"{file}: {name} is {list(shapes[name]) if name in shapes else 'missing'}")
        return shapes[name]

    layers = {int(match[1]) for name in shapes if (match := re.match(r"layers\.(\d+)\.", name))}
    attention = "layers.0.self_attn."
    is_rms = attention + "q_norm.weight" in shapes
    d = shape(attention + "q_norm.weight", 1)[0] if is_rms else shape(attention + "q_l2_clip.scale")[1]
    has_bias = attention + "wr_du.weight" in shapes
    R, X = shape(attention + "rel_logits_proj.proj") if has_bias else (0, 0)
    kinds = {"joint_proj": "rnn", "gate_proj": "gated"}
    kind = next((k for part, k in kinds.items() if f"markov_head.{part}.weight" in shapes), "vanilla")
    has_head = any(name.startswith("markov_head.") for name in shapes)
    rank = shape("markov_head.markov_w1.weight")[1] if has_head else 0
    head = "confidence_head.proj.weight"
    confidence = shape(head)[1] if head in shapes else 0
    derived = {
        "num_hidden_layers": len(layers),
        "num_attention_heads": shape(attention + "q_proj.weight")[0] // d,
        "num_key_value_heads": shape(attention + "k_proj.weight")[0] // d,
        "head_dim": d,
        "intermediate_size": shape("layers.0.mlp.gate_proj.weight")[0],
        "markov_head_type": kind if has_head else "none",
        "markov_rank": rank,
        "enable_confidence_head": confidence > 0,
        "qk_norm": "rms" if is_rms else "clip",
        "d_rel": R,
        "attention_gate": attention + "gate_attn.weight" in shapes,
        "attention_sink": attention + "attn_sink_proj.weight" in shapes,
    }
    if has_bias:
        derived["rel_extent"] = X
    elif "rope_theta" not in said:
        derived["rope_theta"] = 1e6  # attention must tell positions apart; Qwen3's
    if confidence:
        derived["confidence_head_with_markov"] = confidence > target.hidden_size
    for key, value in derived.items():
        if key in said and said[key] != value:
            raise InputError(f"{file}: the config says {key} {said[key]!r}, the tensors say {value!r}")
    values = {**said, **derived, **choices}
    taps, rest = divmod(shape("fc.weight")[1], target.hidden_size)
    for key in ("target_layer_ids", "mask_token_id"):
        if key not in values:
            raise InputError(f"{file}: {key} is missing in config.json; give load_drafter one (fc reads {taps} taps)")
    config = DSparkConfig(**values)
    config.check(target)
    if rest or taps != len(config.target_layer_ids):
        wide = f"{taps} taps of {target.hidden_size}" if not rest else f"{shape('fc.weight')[1]} channels"
        raise InputError(f"{file}: target_layer_ids is {config.target_layer_ids}, but fc.weight reads {wide}")
    return config


def _check(
    reader: CheckpointReader,
    names: dict[str, str],
    expected: dict[str, Tensor],
    read: Callable[[str], Tensor],
    file: Path,
    model: Inkling,
) -> None:
    """All that is unknown, missing or different, in one error."""
    problems = [f"{names[name]} is unknown" for name in sorted(set(names) - set(expected) - set(_SHARED))]
    for name, parameter in expected.items():
        if name not in names:
            problems.append(f"{name} is missing")
            continue
        layout, wanted = reader.layout(names[name]), tuple(parameter.shape)
        allowed = {wanted, (model.config.text.unpadded_vocab_size, *wanted[1:])} if "markov_w" in name else {wanted}
        if layout.shape not in allowed or layout.dtype not in _FLOATS:
            problems.append(f"{names[name]} is {layout}, expected floats {list(wanted)}")
    for name, ours in _SHARED.items():
        if name in names:
            table = getattr(model.llm, ours).weight
            theirs = read(name).to(table)
            if theirs.shape[1:] != table.shape[1:] or not torch.equal(theirs, table[: len(theirs)]):
                problems.append(f"{names[name]} is not the target's llm.{ours}.weight, which it would share")
    if problems:
        raise InputError(f"{file}: {listed(problems)}")


def save_drafter(
    drafter: Drafter, folder: str | Path, dtype: torch.dtype | None = None, metadata: dict[str, str] | None = None
) -> None:
    """Write mtp.safetensors, and the section mtp_config of the config.json that is there, or of a new one.

    Args:
        dtype: of the stored tensors; None keeps the drafter's.
        metadata: text for the file's header.

    Raises:
        InputError: a rank's part of a drafter.
    """
    share = getattr(drafter, "share", None)
    if share is not None and share.plan.tp > 1:
        raise InputError(f"drafter: the part of rank {share.rank} of {share.plan.world}, expected a whole one")
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "config.json"
    config = {**(read_json(path) if path.is_file() else {}), SECTION: asdict(drafter.config)}
    parts = [
        Part({name: Layout(dtype or p.dtype, tuple(p.shape))}, lambda name=name, p=p: {name: p.to(dtype or p.dtype)})
        for name, p in drafter.state_dict().items()
    ]
    # Both are written before either is in place; the inner one is moved first.
    with whole_file(path) as sizes, whole_file(folder / FILE) as tensors:
        for _ in write_file(tensors, parts, metadata or {}):
            pass
        sizes.write_text(dumps(config, indent=2) + "\n", encoding="utf-8")
