r"""Any other engine: tensors that it dumped, under its own names and layouts, brought under the names of `sections`.

**Recipe.** For an engine that can write tensors to a file:

1. Trace the reference once; the prompt and the decoded tokens are in the trace:

       inkling-ref trace --checkpoint DIR --prompt "Why is the sky blue?" --decode 2 --out ours.safetensors

2. Run the engine on the same tokens and write what it computes, under any names, one file a pass. In PyTorch:

       from safetensors.torch import save_file
       kept = {}
       engine.layers[17].qkv.register_forward_hook(lambda m, a, y: kept.update({"blk.17.qkv": y.contiguous()}))
       ours = inkling_ref.Trace.read("ours.safetensors").manifest
       steps = [[[token] for token in tokens] for tokens in zip(*ours["decoded"])]
       for n, rows in enumerate([ours["prompt"], *steps]):
           engine.forward(rows)
           save_file(kept, f"theirs-{n}.safetensors")

3. Say in a map, a JSON file, what each of these names means:

       {"implementation": "engine 0.3", "tensors": {
         "blk.{i}.qkv": {"to": ["layer.{i}.attention.q_projected", "layer.{i}.attention.k_projected",
                                "layer.{i}.attention.v_projected"], "axes": "T (part d)"},
         "blk.{i}.gate_up": {"to": ["moe.{i}.gate", "moe.{i}.up"], "axes": "T k (I part)"},
         "blk.{i}.attn_probs": {"to": "layer.{i}.attention.probabilities", "axes": "H T S"},
         "blk.{i}.q_scaled": {"to": "layer.{i}.attention.q", "axes": "H T d", "scale": 11.3137085},
         "logits": {"to": "logits", "axes": "T V"}}}

4. Compare:

       inkling-ref compare ours.safetensors theirs-*.safetensors --map map.json

**Axes** name the dump's axes by the letters of the section's shape, the slowest first. Parentheses join axes that the
dump holds as one: `T (H d)` is head-major, `T (d H)` the other way. `part` is the axis along which several sections
lie: `(I part)` are gate and up interleaved, `(part I)` two halves; `(part d)` are the heads of q, then those of k, then
of v; `(G part d)` the query heads of one key/value head, then its key, then its value, and so on for the next. A dump
without B has one row. What is not told follows the section's own shape; `scale` multiplies.

Experts may come in any order, where `chosen` comes too. `"padding": "left"` in the map says where the rows' padding is.
"""

import math
import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ...config import InklingConfig
from ...errors import InputError
from ...quantization import dtype_name
from ...tensor_files import CheckpointReader, read_json
from ..sections import name_of, parse
from ..trace import VERSION, Trace, read_manifest

_BY_CHOICE = ("weights", "gate", "up", "activation", "expert_out")  # follow the order of `chosen`


def read(
    dump: str | Path | Sequence[str | Path], names: str | Path | dict[str, Any], like: str | Path | Trace
) -> Trace:
    """A trace from what another engine dumped.

    Args:
        dump: safetensors files, one a pass: the prompt's, then those of the decoding steps.
        names: the map of the module docstring, as a file or as it is.
        like: a trace of the reference for the same tokens: its prompt, decoded tokens, images and config hold here too.

    Raises:
        InputError: naming the tensor whose shape does not fit its axes, or the rule that cannot be followed.
    """
    names = names if isinstance(names, dict) else read_json(Path(names))
    manifest = like.manifest if isinstance(like, Trace) else read_manifest(like)
    if "prompt" not in manifest or "config" not in manifest:
        raise InputError(
            f"like: {like if isinstance(like, (str, Path)) else 'a trace'} has no prompt, expected a trace"
        )
    rules, padding = names.get("tensors"), names.get("padding", "right")
    if not isinstance(rules, dict) or not rules or padding not in ("left", "right"):
        raise InputError("map: expected tensors, an object from their names to sections, and padding left or right")
    config = InklingConfig.from_dict(manifest["config"])
    files = [Path(file) for file in ([dump] if isinstance(dump, (str, Path)) else dump)]
    lengths = [len(row) for row in manifest["prompt"]]
    tensors: dict[str, Tensor] = {}
    unknown: list[str] = []
    for step, file in enumerate(files):
        with CheckpointReader(file.parent, file=file.name) as reader:
            for theirs in reader.names:
                for pattern, rule in rules.items():
                    if match := re.fullmatch(re.escape(pattern).replace(r"\{i\}", r"(\d+)"), theirs):
                        layer = int(match[1]) if match.groups() else None
                        tensors |= _translate(reader.read(theirs), theirs, rule, config, layer, step)
                        break
                else:
                    unknown.append(theirs)
    if unknown:
        warnings.warn(f"tensors that the map does not name ignored: {', '.join(sorted(set(unknown)))}", stacklevel=2)
    for name, tensor in tensors.items():
        if not name.startswith("vision."):
            tensors[name] = _without_padding(tensor, name, lengths, padding == "left")
    _order_choices(tensors)
    # What ran is the dump's own affair; on which input it ran is the reference's word.
    about = {"version": VERSION, "implementation": names.get("implementation", "unnamed"), "dtype": _dtype(tensors)}
    same = {key: manifest[key] for key in ("prompt", "decoded", "images", "config") if key in manifest}
    return Trace(tensors, {**about, **same, "positions": None})


def _dtype(tensors: dict[str, Tensor]) -> str:
    """The narrowest float that was dumped: that of the stream."""
    floats = [t.dtype for t in tensors.values() if t.is_floating_point()] or [torch.float32]
    return dtype_name(min(floats, key=lambda dtype: dtype.itemsize))


def sizes(config: InklingConfig, layer: int | None, vision: bool) -> dict[str, int]:
    """The letters whose sizes the config knows."""
    t, v = config.text, config.vision
    if vision:
        H = v.num_attention_heads
        return {"D": v.hidden_size, "H": H, "d": v.hidden_size // H, "D_text": t.hidden_size}
    known = {
        "V": t.unpadded_vocab_size, "D": t.hidden_size, "R": t.d_rel, "K": t.conv_kernel_size,
        "E": t.n_routed_experts, "k": t.num_experts_per_tok, "I": t.moe_intermediate_size,
    }  # fmt: skip
    if layer is not None:
        a = t.attention(layer)
        known |= {"H": a.num_heads, "G": a.num_key_value_heads, "d": a.head_dim}
    return known


def _translate(
    x: Tensor, theirs: str, rule: dict[str, Any] | str, config: InklingConfig, layer: int | None, step: int
) -> dict[str, Tensor]:
    """One tensor of the dump as one section, or as the several that it holds."""
    if isinstance(rule, str):
        rule = {"to": rule}
    to, axes, scale = (rule.get(key) for key in ("to", "axes", "scale")) if isinstance(rule, dict) else (None,) * 3
    targets = [to] if isinstance(to, str) else to
    if not isinstance(targets, list) or not targets or not all(isinstance(name, str) for name in targets):
        raise InputError(f"map: {theirs} is {rule!r:.60}, expected to: a section's name, or a list of them")
    if not isinstance(axes, str | None) or not isinstance(scale, int | float | None):
        raise InputError(f"map: {theirs} has axes {axes!r:.40} and scale {scale!r:.40}, expected text and a number")
    places = [parse(name_of(pattern, layer, step)) for pattern in targets]
    shapes = [place.section.shape.split() for place in places]
    known = sizes(config, layer, targets[0].startswith("vision."))
    axes = " ".join(shapes[0]) if axes is None else axes
    groups = [group.strip("()").split() for group in re.findall(r"\([^)]*\)|\S+", axes)]
    letters = [letter for group in groups for letter in group]
    if len(groups) != x.dim() or len(set(letters)) != len(letters):
        raise InputError(f"{theirs}: {list(x.shape)}, which is not {axes!r}")
    parts = [1]
    if "part" in letters:  # how many of it are each section's
        others = math.prod(known.get(letter, 1) for letter in letters if letter not in ("k", "part"))
        parts = [math.prod(known.get(n, 1) for n in shape if n not in ("B", "T", "k")) // others for shape in shapes]
        known = {**known, "part": sum(parts)}
    elif len(targets) > 1:
        raise InputError(f"{theirs}: several sections, expected an axis part among {axes!r}")
    full: list[int] = []
    for size, group in zip(x.shape, groups, strict=True):
        free = [letter for letter in group if letter not in known]
        rest = math.prod(known[letter] for letter in group if letter in known)
        if len(free) > 1 or size % max(rest, 1) or (not free and size != rest):
            raise InputError(f"{theirs}: {list(x.shape)}, expected {axes!r} with {_told(known, letters)}")
        full += [known[letter] if letter in known else size // rest for letter in group]
    x = x.reshape(full) if scale is None else x.reshape(full) * scale
    chunks = x.split(parts, dim=letters.index("part")) if "part" in letters else [x]
    return {
        name_of(target, layer, step): _arrange(chunk, letters, shape, theirs)
        for target, shape, chunk in zip(targets, shapes, chunks, strict=True)
    }


def _told(known: dict[str, int], letters: list[str]) -> str:
    return ", ".join(f"{letter} {known[letter]}" for letter in letters if letter in known)


def _arrange(x: Tensor, letters: list[str], shape: list[str], theirs: str) -> Tensor:
    """Axes in the section's order; a letter of the section that is missing is what the letters it lacks make up."""
    missing = [letter for letter in shape if letter not in letters and letter != "B"]
    extra = [letter for letter in letters if letter not in shape]
    if len(missing) > 1:
        raise InputError(f"{theirs}: axes {' '.join(letters)!r}, expected {' '.join(shape)!r} in some order")
    wanted = [n for letter in shape for n in ([letter] if letter in letters else extra if letter in missing else [])]
    wanted += [letter for letter in extra if letter not in wanted]  # of size 1 then
    x = x.permute([letters.index(letter) for letter in wanted])
    extents = dict(zip(wanted, x.shape, strict=True))
    extents |= {letter: math.prod(extents[n] for n in extra) for letter in missing}
    return x.reshape([extents.get(letter, 1) for letter in shape]).contiguous()


def _without_padding(x: Tensor, name: str, lengths: list[int], on_the_left: bool) -> Tensor:
    """Rows moved to the front, with zeros behind them; keys to their positions."""
    step, section, _ = parse(name)
    T = 1 if step else max(lengths)
    if x.shape[:2] != (len(lengths), T):
        raise InputError(f"{name}: {list(x.shape)}, expected {len(lengths)} rows of {T} tokens")
    x = x.clone()
    for row, length in enumerate(lengths):
        padding = max(lengths) - length if on_the_left else 0
        if section.shape.endswith(" S"):
            x[row] = x[row].roll(-padding, dims=-1)
        if not step:
            x[row] = x[row].roll(-padding, dims=0)
            x[row, length:] = 0
    return x


def _order_choices(tensors: dict[str, Tensor]) -> None:
    """Experts in ascending order of their ids, and what follows them."""
    for name in [name for name in tensors if parse(name).section.name == "moe.{i}.chosen"]:
        tensors[name], order = tensors[name].long().sort(dim=-1)
        for follower in _BY_CHOICE:
            other = name.removesuffix("chosen") + follower
            if other in tensors:
                x = tensors[other]
                index = order.view(*order.shape, *[1] * (x.dim() - 3)).expand(x.shape)
                tensors[other] = x.gather(2, index)
