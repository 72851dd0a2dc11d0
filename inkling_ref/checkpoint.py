"""Checkpoints: from a folder in the released names and formats to a model, and back.

Tensor names are the model's parameter names with the prefix `model.`. Experts are stored as floats, NVFP4 or MXFP8 (see
`quantization`); the stored dtype tells which: uint8 is NVFP4, float8_e4m3fn MXFP8. A sidecar hf_quant_config.json,
or the key quantization_config of config.json, may declare the formats too:

    {"quantization": {"quant_algo": "MIXED_PRECISION", "quantized_layers": {
        "model.llm.layers.0.mlp.experts": {"quant_algo": "NVFP4", "group_size": 16}, ...}}}

A declared format that contradicts a stored dtype is an error. A declared block size that contradicts a stored shape is
a warning and the shape wins: a config may say MXFP8 blocks of [32, 32] beside scales per row and 32 columns.
"""

import os
import re
import shutil
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from json import dumps
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from . import __version__
from .backends import Backend
from .config import InklingConfig
from .errors import InputError, listed
from .model import Inkling, keeps_float32
from .moe import ExpertMatrix
from .quantization import (
    COMPANIONS,
    GROUP,
    MXFP8,
    NVFP4,
    check_stored,
    dequantize_stored,
    stored_layout,
)
from .tensor_files import DTYPES, INDEX, WEIGHTS, CheckpointReader, Layout, Part, read_json, write_file

SIDECAR = "hf_quant_config.json"
DENSE = "bf16"  # the name of the format that is none, whichever float dtype holds it
MATRICES = ("w13_weight", "w2_weight")
_FLOATS = tuple(DTYPES[name] for name in ("F32", "BF16", "F16", "F64"))
_FORMAT_OF_DTYPE = {torch.uint8: NVFP4, torch.float8_e4m3fn: MXFP8, **dict.fromkeys(_FLOATS, DENSE)}


def _layer_of_experts(name: str) -> int | None:
    """The layer of an expert weight `llm.layers.{i}.mlp.experts.w13_weight`, with or without `model.`; else None."""
    match = re.search(r"\blayers\.(\d+)\.mlp\.experts\b", name)
    return int(match[1]) if match else None


def _object(data: object, source: Path) -> dict[str, Any]:
    if not isinstance(data, (dict, type(None))):
        raise InputError(f"{source}: {data!r} where formats are declared, expected a JSON object")
    return data or {}


# ---------------------------------------------------------------- what is stored, against what is wanted and declared


def declared_formats(folder: Path, layers: int) -> tuple[str, list[str | None], list[str]]:
    """What a folder's configs say about its experts.

    Returns: the name of the file that says it ("" if none does); per layer nvfp4, mxfp8, bf16, or None where nothing is
    said; and the declared block sizes that are not those of the formats, as text.

    Layers match by `layers.{i}.mlp.experts`, whatever stands around that. A label for the whole model holds for every
    layer that no pattern of exclude_modules, ignore or modules_to_not_convert names.

    Raises:
        InputError: a file that is no JSON, or a declared format that is not one of these.
    """
    source = SIDECAR if (folder / SIDECAR).is_file() else "config.json"
    config = _object(read_json(folder / "config.json").get("quantization_config"), folder / "config.json")
    data = read_json(folder / SIDECAR) if source == SIDECAR else config
    data = _object(data.get("quantization", data), folder / source)
    if not data:
        return "", [None] * layers, []

    def parse(algorithm: object, where: str) -> str | None:
        text = str(algorithm).lower()  # W4A16_NVFP4 is NVFP4 too: what it adds is about activations
        if text.startswith(("mixed", "modelopt")):
            return None
        for quantisation in GROUP:
            if quantisation in text:
                return quantisation
        raise InputError(f"{folder / source}: {where} is {algorithm!r}, expected NVFP4, MXFP8 or MIXED_PRECISION")

    sizes = []
    block = data.get("weight_block_size", config.get("weight_block_size"))
    if block not in (None, [1, GROUP[MXFP8]]):
        sizes.append(f"weight_block_size {block}")
    if listed := _object(data.get("quantized_layers"), folder / source):
        formats: list[str | None] = [DENSE] * layers
        for key, value in listed.items():
            layer = _layer_of_experts(key)
            if layer is not None and layer < layers:
                value = _object(value, folder / source)
                formats[layer] = quantisation = parse(value.get("quant_algo"), key)
                if value.get("group_size") not in (None, GROUP.get(quantisation)):
                    sizes.append(f"{key} group_size {value['group_size']}")
        return source, formats, sizes
    label = parse(data.get("quant_algo") or data.get("quant_method"), "quant_algo")
    patterns = [p for key in ("exclude_modules", "ignore", "modules_to_not_convert") for p in data.get(key) or ()]
    experts = [f"model.llm.layers.{i}.mlp.experts" for i in range(layers)]
    excluded = [any(fnmatch(name, f"*{p}") or fnmatch(name, f"*{p}.*") for p in patterns) for name in experts]
    return source, [DENSE if out else label for out in excluded], sizes


def _expert_problems(reader: CheckpointReader, name: str, shape: tuple[int, ...]) -> list[str]:
    """What one expert weight [E, N, K] and its companions lack or get wrong."""
    stored = reader.layout(name)
    quantisation = _FORMAT_OF_DTYPE.get(stored.dtype)
    if quantisation is None:
        return [f"{reader.file(name)}: {name} is {stored}, expected U8 (NVFP4), F8_E4M3 (MXFP8) or floats"]
    if quantisation == DENSE:
        layout = {"": Layout(stored.dtype, shape)}
    else:
        layout = {suffix: Layout(*spec) for suffix, spec in stored_layout(quantisation, shape, name).items()}
    problems = []
    for suffix in ("", *COMPANIONS):
        part = name + suffix
        if suffix not in layout:
            if part in reader:
                problems.append(f"{reader.file(part)}: {part} does not belong to {name}, which is {stored}")
        elif part not in reader:
            problems.append(f"{part} is missing: {name} is {stored}, {quantisation.upper()}")
        elif reader.layout(part) != layout[suffix]:
            problems.append(f"{reader.file(part)}: {part} is {reader.layout(part)}, expected {layout[suffix]}")
        elif suffix in ("_amax", "_outer_scale_denominator"):
            values = reader.read(part).flatten()
            good = values.isfinite() & (values >= 0 if suffix == "_amax" else values > 0)
            least = "finite and not negative" if suffix == "_amax" else "finite and positive"
            problems += [
                f"{reader.file(part)}: {part} holds {values[i].item()} (number {i}), expected {least} numbers"
                for i in (~good).nonzero().flatten().tolist()[:1]
            ]
    return problems


def check(reader: CheckpointReader, model: Inkling) -> list[str]:
    """Compare all that headers, configs and the smallest tensors tell with what `model` (dense, on any device) needs.

    Returns: the format of every layer's experts: nvfp4, mxfp8 or bf16 (any floats).

    Raises:
        InputError: one error with every missing tensor, wrong shape or dtype, bad amax or denominator, and layer whose
            declared format is not the stored one; of many the first. Tensors that the model does not have are
            reported in a warning.
    """
    problems: list[str] = []
    known: set[str] = set()
    for name, parameter in model.named_parameters():
        name, shape = f"model.{name}", tuple(parameter.shape)
        is_expert = _layer_of_experts(name) is not None
        known.update(name + suffix for suffix in ("", *(COMPANIONS if is_expert else ())))
        if name not in reader:
            problems.append(f"{name} is missing")
        elif is_expert:
            problems += _expert_problems(reader, name, shape)
        elif (stored := reader.layout(name)).shape != shape or stored.dtype not in _FLOATS:
            problems.append(f"{reader.file(name)}: {name} is {stored}, expected floats {list(shape)}")

    source, declared, sizes = declared_formats(reader.folder, model.config.text.num_hidden_layers)
    formats, open_layers = [], []
    for layer, wanted in enumerate(declared):
        names = [f"model.llm.layers.{layer}.mlp.experts.{matrix}" for matrix in MATRICES]
        found = {name: _FORMAT_OF_DTYPE.get(reader.dtype(name)) for name in names if name in reader}
        formats.append(next(iter(found.values()), None) or DENSE)
        for name, quantisation in found.items():
            seen = f"{name} is {reader.layout(name)}, {str(quantisation).upper()}"
            if quantisation not in (None, wanted or formats[layer]):
                says = f"{source} says" if wanted else "its other matrix is"
                problems.append(f"layer {layer}: {says} {(wanted or formats[layer]).upper()}, but {seen}")
            elif quantisation in GROUP and source and not wanted:
                where = f"{source} declares mixed precision and no format for it (quantized_layers of {SIDECAR})"
                open_layers.append(f"layer {layer}: {where}; {seen}")
    problems += open_layers[:1]  # the cause is one, a missing file or list
    if problems:
        raise InputError(f"{reader.folder}: {listed(problems)}")
    if sizes and set(formats) != {DENSE}:
        blocks = f"{GROUP[NVFP4]} (NVFP4) or {GROUP[MXFP8]} (MXFP8)"
        stored = f"the stored shapes, one scale per row and {blocks} columns, win"
        warnings.warn(f"{reader.folder}: declared {', '.join(sizes)}; {stored}", stacklevel=3)
    if extra := sorted(set(reader.names) - known):
        warnings.warn(f"{reader.folder}: tensors unknown to this model ignored: {', '.join(extra)}", stacklevel=3)
    return formats


# ---------------------------------------------------------------- loading


def load(
    folder: str | Path,
    device: str | torch.device = "cpu",
    dtype: torch.dtype = torch.float32,
    backend: str | Backend = "torch",
    experts: str | None = None,
) -> Inkling:
    """Read a checkpoint folder into a model, in eval mode and without gradients.

    The model is built without memory and filled tensor by tensor: the peak is the model plus one stored tensor, and
    for experts that are decoded a few experts more.

    Args:
        dtype: of the weights and the stream. In a 16-bit model the tensors of `keeps_float32` stay float32.
        experts: "dequantize" quantised experts to `dtype`, or keep them "packed" and decode them on use. None: packed
            on a GPU, dequantised elsewhere.

    Raises:
        InputError: naming file and tensor of all that does not fit (see `CheckpointReader` and `check`), before the
            first weight is read; or naming a tensor and expert with a NaN scale, while reading. No model results.
    """
    config = InklingConfig.from_pretrained(folder)
    model, storage = empty_model(config, device, dtype, backend, experts)
    with CheckpointReader(folder) as reader:
        formats = check(reader, model)
        fill(model, reader, formats, storage)
    return model.requires_grad_(False).eval()


class Storage(NamedTuple):
    """How a model's tensors are to be held: where, as what, and whether quantised experts stay packed."""

    device: torch.device
    dtype: torch.dtype
    packed: bool


def empty_model(
    config: InklingConfig,
    device: str | torch.device,
    dtype: torch.dtype,
    backend: str | Backend = "torch",
    experts: str | None = None,
) -> tuple[Inkling, Storage]:
    """A model without memory for `fill`, and the arguments of `load` once they are known to be possible.

    Raises:
        InputError: naming the argument that is not.
    """
    try:
        device = torch.empty(0, device=device).device
    except (RuntimeError, AssertionError, TypeError) as error:
        reason = str(error).partition("\n")[0].partition(":")[0]
        raise InputError(f"device: {device!r} cannot be used here ({reason}), expected cpu or cuda") from None
    experts = experts or ("packed" if device.type == "cuda" else "dequantize")
    if experts not in ("packed", "dequantize"):
        raise InputError(f"experts: {experts!r}, expected 'packed' or 'dequantize'")
    if dtype not in _FLOATS:
        raise InputError(f"dtype: {dtype}, expected one of {', '.join(map(str, _FLOATS))}")
    with torch.device("meta"), ShapesOnly():
        return Inkling(config, backend), Storage(device, dtype, experts == "packed")


def fill(model: Inkling, reader: Any, formats: list[str], storage: Storage) -> None:
    """Read every tensor of an empty model.

    reader: a CheckpointReader, or what reads a part of each tensor for a model that is cut alike.
    formats: of every layer's experts, from `check`.
    """
    device, dtype, packed = storage
    for layer, quantisation in zip(model.llm.layers, formats, strict=True):
        layer.mlp.experts.stored_format = quantisation
    with _progress(f"reading {reader.folder.name}", reader.nbytes) as done:
        for name in [name for name, _ in model.named_parameters()]:
            module_name, _, leaf = name.rpartition(".")
            module, layer = model.get_submodule(module_name), _layer_of_experts(name)
            if layer is None or formats[layer] == DENSE:
                keep = keeps_float32(name) and dtype.itemsize < 4
                tensor = reader.read(f"model.{name}").to(device, torch.float32 if keep else dtype)
                module.register_parameter(leaf, nn.Parameter(tensor))
            else:
                _load_quantised(reader, module, f"model.{name}", formats[layer], device, dtype, packed)
            done(reader.bytes_read)
    if packed and dtype == torch.bfloat16 and model.backend.pack_experts is not None:
        for layer, quantisation in zip(model.llm.layers, formats, strict=True):
            if quantisation != DENSE:
                model.backend.pack_experts(layer.mlp.experts)


class ShapesOnly(TorchFunctionMode):
    """Skips what modules compute to initialise themselves.

    On the meta device that has no result, but the first random number and the first product there import PyTorch's
    compiler, which takes longer than reading a small model.
    """

    def __torch_function__(self, function: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        if function in (Tensor.mul, Tensor.div):
            return args[0]
        if getattr(function, "__module__", None) == nn.init.__name__:
            return args[0] if args else kwargs["tensor"]
        return torch.empty(*args) if function is torch.randn else function(*args, **(kwargs or {}))


def _load_quantised(
    reader: CheckpointReader,
    module: nn.Module,
    name: str,
    quantisation: str,
    device: torch.device,
    dtype: torch.dtype,
    keep: bool,
) -> None:
    """One matrix of one layer's experts: decoded into a parameter or, to keep it, as buffers."""
    leaf = name.rpartition(".")[2]
    tensors = {s: reader.read(name + s).to(device) for s in ("", *COMPANIONS) if name + s in reader}
    named = f"{reader.file(name)}: {name}"
    if not keep:
        module.register_parameter(leaf, nn.Parameter(dequantize_stored(quantisation, tensors, dtype, named)))
        return
    check_stored(quantisation, tensors, named)
    delattr(module, leaf)
    for suffix, tensor in tensors.items():
        module.register_buffer(leaf + suffix, tensor)


# ---------------------------------------------------------------- saving


def layer_formats(experts: str | None, layers: int) -> list[str | None]:
    """The format of every layer's experts in a checkpoint saved with that `experts`; None: as the model holds them.

    Raises:
        InputError: an unknown `experts`.
    """
    if experts == "nvfp4+mxfp8":  # of Small: layers 0-39 and 40-47
        return [NVFP4 if layer < layers * 5 // 6 else MXFP8 for layer in range(layers)]
    if experts not in (None, DENSE, MXFP8):
        raise InputError(f"experts: {experts!r}, expected None, 'bf16', 'mxfp8' or 'nvfp4+mxfp8'")
    return [experts] * layers


def save(
    model: Inkling,
    folder: str | Path,
    experts: str | None = None,
    shard_bytes: int | None = None,
    metadata: dict[str, str] | None = None,
) -> None:
    """Write a checkpoint folder: config.json, weights in the released names, a sidecar if experts are quantised.

    Args:
        experts: None keeps every tensor as the model holds it, bit for bit. Otherwise as released, in bfloat16 with the
            tensors of `keeps_float32` in float32, and the experts in "bf16", "mxfp8", or "nvfp4+mxfp8": NVFP4 in the
            first 5/6 of the layers and MXFP8 in the rest. Experts packed in the wanted format keep their bytes.
        shard_bytes: start a new shard where one would exceed this size; None writes a single file.
        metadata: text for the files' headers.

    Everything is written beside the folder first and moved when it is whole, so an error leaves the folder as it was.
    In an existing folder the files of an older checkpoint are replaced and other files stay.

    Raises:
        InputError: an unknown format, an expert without a code in it (named), metadata that is not text, a folder
            that is a file, or a model that is one rank's part (`parallel.parallelize`).
    """
    share = getattr(model, "share", None)  # by name: a width that is cut does not show in experts packed for a kernel
    if share is not None and share.plan.world > 1:
        raise InputError(f"model: the part of rank {share.rank} of {share.plan.world}, expected a whole model")
    folder = Path(folder)
    wanted = layer_formats(experts, model.config.text.num_hidden_layers)
    if not all(isinstance(text, str) for pair in (metadata or {}).items() for text in pair):
        raise InputError(f"metadata: {metadata!r}, expected text keys and values")
    if shard_bytes is not None and (type(shard_bytes) is not int or shard_bytes < 1):
        raise InputError(f"shard_bytes: {shard_bytes!r}, expected a positive number of bytes, or None")
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder}: a file, expected a folder")
    parts, formats = _plan(model, wanted, None if experts is None else torch.bfloat16)
    total = sum(part.nbytes for part in parts)
    shards: list[list[Part]] = [[]]
    for part in parts:
        if shard_bytes and shards[-1] and sum(p.nbytes for p in shards[-1]) + part.nbytes > shard_bytes:
            shards.append([])
        shards[-1].append(part)
    files = {f"model-{i:05}-of-{len(shards):05}.safetensors": shard for i, shard in enumerate(shards, 1)}
    if not shard_bytes:
        files = {WEIGHTS: parts}

    # Hidden, and on the folder's own file system, so that moving is renaming.
    partial = folder.absolute().parent / f".{folder.absolute().name}.partial-{os.getpid()}"
    partial.mkdir(parents=True)  # outside the try: one that exists is another thread's, and not ours to remove
    try:
        with _progress(f"writing {folder.name}", total) as done:
            written = 0
            for file, shard in files.items():
                for size in write_file(partial / file, shard, metadata or {}):
                    written += size
                    done(written)
        config = {**model.config.to_dict(), "dtype": str(model.dtype if experts is None else torch.bfloat16)[6:]}
        if set(formats) != {DENSE}:
            sidecar, config["quantization_config"] = _declarations(formats, model.visual is not None)
            _write_json(partial / SIDECAR, sidecar)
        _write_json(partial / "config.json", config)
        if shard_bytes:
            weight_map = {name: file for file, shard in files.items() for part in shard for name in part.layout}
            _write_json(partial / INDEX, {"metadata": {"total_size": total}, "weight_map": weight_map})
        _move(partial, folder)
    except OSError as error:
        error.filename = error.filename or str(folder)  # of a write to a full disk Python does not say which file
        raise
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _plan(model: Inkling, wanted: list[str | None], dtype: torch.dtype | None) -> tuple[list[Part], list[str]]:
    """What to write, in the model's order, and the format of each layer's experts; None keeps formats and dtypes."""

    def dense(name: str, shape: tuple[int, ...], stored: torch.dtype, make: Callable[[], Tensor]) -> Part:
        target = stored if dtype is None else torch.float32 if keeps_float32(name) else dtype
        return Part({f"model.{name}": Layout(target, shape)}, lambda: {f"model.{name}": make().to(target)})

    state = model.state_dict()
    parts: list[Part] = []
    formats: dict[int, str] = {}
    encode = model.backend.quantize_stored

    def expert(name: str, layer: int) -> Part:
        module = model.llm.layers[layer].mlp.experts
        matrix = ExpertMatrix(*(None if t is None else t.detach() for t in module.matrix(name.rpartition(".")[2])))
        repacked = matrix.weight.dtype == torch.int32  # see `Backend.pack_experts`
        packed = module.stored_format if repacked else _FORMAT_OF_DTYPE[matrix.weight.dtype]
        target = formats[layer] = wanted[layer] or packed
        E, D, I = len(matrix.weight), model.config.text.hidden_size, model.config.text.moe_intermediate_size
        shape = (E, 2 * I, D) if name.endswith(MATRICES[0]) else (E, D, I)

        def released() -> dict[str, Tensor]:
            stored = matrix
            if repacked:
                from .kernels.packing import unpack

                stored = unpack(matrix, *shape[1:])
            return {s: t for s, t in zip(("", *COMPANIONS), stored, strict=True) if t is not None}

        def decoded() -> Tensor:
            return matrix.weight if packed == DENSE else dequantize_stored(packed, released(), name=name)

        if target == DENSE:
            return dense(name, shape, matrix.weight.dtype, decoded)
        layout = {s: Layout(*spec) for s, spec in stored_layout(target, shape, f"model.{name}").items()}
        make = released if packed == target else (lambda: encode(target, decoded(), f"model.{name}"))
        return Part(
            {f"model.{name}{s}": spec for s, spec in layout.items()},
            lambda: {f"model.{name}{s}": tensor for s, tensor in make().items()},
        )

    for name, tensor in state.items():
        layer = _layer_of_experts(name)
        if layer is None:
            parts.append(dense(name, tuple(tensor.shape), tensor.dtype, lambda tensor=tensor: tensor))
        elif name.endswith(MATRICES):
            parts.append(expert(name, layer))
    return parts, [formats[layer] for layer in sorted(formats)]


def _declarations(formats: list[str], has_images: bool) -> tuple[dict[str, Any], dict[str, Any]]:
    """hf_quant_config.json with the format of each layer, and quantization_config, the label in config.json."""
    algorithm = formats[0].upper() if len(set(formats)) == 1 else "MIXED_PRECISION"
    listed = {
        f"model.llm.layers.{i}.mlp.experts": {"quant_algo": f.upper(), "group_size": GROUP[f]}
        for i, f in enumerate(formats)
        if f != DENSE
    }
    sidecar = {
        "producer": {"name": "inkling_ref", "version": __version__},
        "quantization": {"quant_algo": algorithm, "kv_cache_quant_algo": None, "quantized_layers": listed},
    }
    if algorithm != MXFP8.upper():
        return sidecar, {"quant_method": "modelopt", "quant_algo": algorithm}
    # The form that `transformers` reads; it would take every linear layer that is not excluded for quantised.
    kept = [f"model.llm.layers.{i}.{module}" for i in range(len(formats)) for module in ("attn", "mlp.gate")]
    kept += ["model.llm.unembed", *(["model.visual"] if has_images else [])]
    return sidecar, {
        "quant_method": "mxfp8",
        "activation_scheme": "dynamic",
        "scale_fmt": "ue8m0",
        "weight_block_size": [1, GROUP[MXFP8]],
        "modules_to_not_convert": kept,
    }


def _write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(dumps(data, indent=2) + "\n", encoding="utf-8")


def _move(partial: Path, folder: Path) -> None:
    """Move a complete checkpoint into place: by one rename, or file by file where the folder exists already."""
    if not folder.exists():
        partial.rename(folder)
        return
    names = {path.name for path in partial.iterdir()}
    # A new index comes last and an old one goes first, so that the files an index names are there at any time.
    for name in sorted(names, key=lambda name: (name == INDEX, name)):
        os.replace(partial / name, folder / name)
    for old in (folder / INDEX, folder / SIDECAR, *folder.glob("model*.safetensors")):
        if old.name not in names:
            old.unlink(missing_ok=True)


# ---------------------------------------------------------------- progress


@contextmanager
def _progress(what: str, total: int) -> Iterator[Callable[[int], None]]:
    """A function that takes the bytes done so far; a bar appears on stderr once two seconds have passed."""
    started, bar = time.monotonic(), None

    def done(amount: int) -> None:
        nonlocal bar
        if bar is None and time.monotonic() - started > 2:
            from rich.console import Console
            from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

            columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
            console = Console(stderr=True)
            visible = console.is_terminal or console.is_jupyter
            bar = Progress(*columns, console=console, transient=True, disable=not visible)
            bar.add_task(what, total=total)
            bar.start()
        if bar is not None:
            bar.update(bar.task_ids[0], completed=amount)

    try:
        yield done
    finally:
        if bar is not None:
            bar.stop()
