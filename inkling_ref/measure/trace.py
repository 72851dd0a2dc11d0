"""Tracing: run a model and keep what every section computed, under the names of `sections`, in one safetensors file.

    recorded = ir.trace(model, [[5, 3, 8]], decode=2)
    recorded.tensors["layer.3.attention.q"]      # of the prompt's pass
    recorded.tensors["step.1.moe.0.chosen"]      # of the first decoding step
    recorded.save("trace.safetensors")

The model needs no help for it. Its operations belong to a `Backend` that its modules hold, and a trace puts another one
there for as long as it runs: one that calls the same operations and keeps what went in and came out. Module hooks see
the rest. So a trace shows what ran, whichever backend, and with whatever somebody changed in the model.

What an operation keeps to itself is asked from the same operation by other operands, where that is possible: attention
over unit vectors as values returns its probabilities, experts with the unit matrix as W_2 return their activations. The
sections marked `derived` are those that could not be had in this way.

Pictures run one by one, whatever their sizes; text rows run without the caller's padding, which comes back as zeros at
the end.
"""

import fnmatch
import inspect
import json
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .. import __version__, attention, residual, vision
from ..backends import Backend
from ..config import InklingConfig
from ..errors import InputError
from ..files import whole_file
from ..generation import read_rows
from ..moe import ExpertMatrix
from ..quantization import dtype_name
from ..tensor_files import CheckpointReader, Layout, Part, write_file
from .sections import SECTIONS, name_of

KEY = "inkling_trace"  # of the manifest in a file's metadata
VERSION = 1


@dataclass
class Trace:
    """Recorded tensors by name, and the manifest: what ran, on which input.

    manifest: version, implementation, versions, config, dtype, device, backend, prompt (ids of every row, without
    padding), decoded (the ids that the decoding steps read, a row each), positions (of the prompt, that were kept;
    null = all), images (the grids); a golden set adds its case, checkpoint, tolerance and what else made it.
    """

    tensors: dict[str, Tensor]
    manifest: dict[str, Any] = field(default_factory=dict)

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def save(self, path: str | Path) -> None:
        """Write one file; it is there when it is whole. Raises OSError."""
        parts = [
            Part({name: Layout(t.dtype, tuple(t.shape))}, lambda name=name, t=t: {name: t})
            for name, t in self.tensors.items()
        ]
        with whole_file(Path(path)) as partial_path:
            for _ in write_file(partial_path, parts, {KEY: json.dumps(self.manifest)}):
                pass

    @classmethod
    def read(cls, path: str | Path) -> "Trace":
        """The whole trace in memory. Raises InputError for a file that is none."""
        path = Path(path)
        manifest = read_manifest(path)
        with CheckpointReader(path.parent, file=path.name) as reader:
            return cls({name: reader.read(name) for name in reader.names}, manifest)


def read_manifest(path: str | Path) -> dict[str, Any]:
    """The manifest of a trace's file; {} if the file is one of tensors without a manifest.

    Raises:
        InputError: no such file, no safetensors file, a manifest of another version, or none that can be read.
    """
    path = Path(path)
    if not path.is_file():
        raise InputError(f"{path}: not found, expected a trace")
    with CheckpointReader(path.parent, file=path.name), path.open("rb") as file:  # the reader checks the header
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    try:
        manifest = json.loads(header["__metadata__"][KEY]) if KEY in header.get("__metadata__", ()) else {}
    except (ValueError, TypeError, RecursionError):
        manifest = None
    if not isinstance(manifest, dict):
        raise InputError(f"{path}: {KEY} in its header is no JSON object, expected a trace's manifest")
    if manifest and manifest.get("version") != VERSION:
        raise InputError(f"{path}: trace of version {manifest.get('version')!r}, expected {VERSION}")
    for key, (fits, expected) in _KINDS.items():
        if manifest.get(key) is not None and not fits(manifest[key]):
            raise InputError(f"{path}: {key} of its manifest is {manifest[key]!r:.40}, expected {expected}")
    if manifest.get("prompt"):
        manifest["decoded"] = manifest.get("decoded") or [[] for _ in manifest["prompt"]]
        if len(manifest["decoded"]) != len(manifest["prompt"]):
            raise InputError(f"{path}: decoded of its manifest has not as many rows as prompt")
    return manifest


def _is_rows(x: Any) -> bool:
    return isinstance(x, list) and all(isinstance(row, list) and all(type(i) is int for i in row) for row in x)


# Of a manifest, which another program may have written.
_KINDS = {
    **dict.fromkeys(("prompt", "decoded", "images"), (_is_rows, "a list of rows of integers")),
    "positions": (lambda x: _is_rows([x]), "a list of integers"),
    "dtype": (lambda x: isinstance(getattr(torch, str(x), None), torch.dtype), "a dtype's name like float32"),
    "config": (lambda x: isinstance(x, dict), "an object"),
    **{key: (lambda x: isinstance(x, str), "text") for key in ("implementation", "device")},
}


def read_tokens(path: str | Path) -> tuple[Any, Any]:
    """Prompt and tokens to decode from a file: a list of ids, or of rows of ids, as JSON; or a trace, to repeat it.

    Raises:
        InputError: naming the file, if it holds something else.
    """
    path = Path(path)
    if path.suffix == ".safetensors":
        manifest = read_manifest(path)
        if not manifest.get("prompt"):
            raise InputError(f"{path}: no manifest with a prompt, expected a trace")
        return manifest["prompt"], manifest["decoded"] if any(manifest["decoded"]) else 0
    try:
        return json.loads(path.read_text(encoding="utf-8")), 0
    except (ValueError, RecursionError):
        raise InputError(f"{path}: expected a JSON list of token ids, or of rows of them") from None


# --- What to keep --------------------------------------------------------------------------------------------------


def chooser(sections: Sequence[str] | None = None, layers: Sequence[int] | None = None) -> Callable[[str], bool]:
    """Whether a bare name (without its step) is wanted.

    Args:
        sections: names or patterns as `layer.*.attention.q`, of which the beginning may be left out: `attention.q`,
            `probabilities`. None: all but those on request. A leading + adds to these: `+probabilities`. `all` is all.
        layers: of the text model; None: all.

    Raises:
        InputError: for a pattern that no section has.
    """
    patterns = list(sections or [])
    names = {s.name: s for s in SECTIONS}

    def fits(name: str, pattern: str) -> bool:
        pattern = pattern.removeprefix("+")
        return pattern == "all" or fnmatch.fnmatchcase(name, pattern) or fnmatch.fnmatchcase(name, f"*.{pattern}")

    for pattern in patterns:
        # A pattern may name a layer: try it on every number that stands in it.
        numbers = [part for part in pattern.split(".") if part.isdecimal()] or ["0"]
        if not any(fits(name.replace("{i}", n), pattern) for name in names for n in numbers):
            raise InputError(f"sections: {pattern!r} fits no section, expected names like layer.*.attention.q")
    only = [p for p in patterns if not p.startswith("+")]
    added = [p for p in patterns if p.startswith("+")]
    numbers = None if layers is None else set(layers)

    def wanted(name: str) -> bool:
        first, _, rest = name.partition(".")
        layer = int(rest.split(".")[0]) if first in ("layer", "residual", "moe") else None
        if layer is not None and numbers is not None and layer not in numbers:
            return False
        pattern = name if layer is None and first != "vision" else _pattern(name)
        usual = not only and not names[pattern].on_request
        return usual or any(fits(name, p) for p in only + added)

    return wanted


def _pattern(name: str) -> str:
    parts = name.split(".")
    return ".".join(["{i}" if n == 1 and part.isdecimal() else part for n, part in enumerate(parts)])


class Recording:
    """Takes in one pass's sections: those that are wanted, at the wanted positions, padding as zeros, on the CPU.

    An adapter for another implementation uses it as `trace` does: `begin` a pass, then `put` or `put_picture`.
    """

    def __init__(self, wanted: Callable[[str], bool], positions: Sequence[int] | None = None) -> None:
        self.wanted, self.positions = wanted, positions
        self.tensors: dict[str, Tensor] = {}
        self.pictures: dict[str, list[Tensor]] = {}

    def begin(self, step: int, lengths: list[int], counts: list[int]) -> None:
        """A pass: its step, and for every row the tokens before it and in it."""
        self.step, self.lengths, self.counts = step, lengths, counts

    def put(self, name: str, value: Tensor | Callable[[], Tensor]) -> None:
        """A text section [B, T, ...], or a function that makes it if it is wanted."""
        if not self.wanted(name):
            return
        value = value() if callable(value) else value
        kept = value.detach().clone(memory_format=torch.contiguous_format)
        for row, count in enumerate(self.counts):
            kept[row, count:] = 0
        if self.step == 0 and self.positions is not None:
            kept = kept[:, self.positions]
        self.tensors[name_of(name, step=self.step)] = kept.cpu()

    def put_picture(self, name: str, value: Tensor | Callable[[], Tensor]) -> None:
        """A vision section of one picture; pictures come in order."""
        if self.wanted(name):
            value = value() if callable(value) else value
            self.pictures.setdefault(name, []).append(value.detach().cpu().clone())

    def finish(self) -> dict[str, Tensor]:
        """Everything recorded, by name; the pictures' sections joined along their tokens."""
        return {name: torch.cat(parts) for name, parts in self.pictures.items()} | self.tensors


# --- Where the model shows it --------------------------------------------------------------------------------------


def recording_backend(ops: Backend, **watch: Callable[[dict[str, Any], Any], None]) -> Backend:
    """`ops` with operations that tell `watch[name](arguments by name, result)` of every call."""
    reference = Backend()

    def recorded(name: str, see: Callable) -> Callable:
        signature, operation = inspect.signature(getattr(reference, name)), getattr(ops, name)

        def run(*args: Any, **kwargs: Any) -> Any:
            result = operation(*args, **kwargs)
            bound = signature.bind(*args, **kwargs)
            bound.apply_defaults()
            see(bound.arguments, result)
            return result

        return run

    return replace(ops, **{name: recorded(name, see) for name, see in watch.items()})


@contextmanager
def watched(model: Any, recording: Recording) -> Iterator[None]:
    """Within, `recording` sees what `model` computes."""
    with ExitStack() as stack:

        def after(module: nn.Module, see: Callable[[Any], None]) -> None:
            stack.callback(module.register_forward_hook(lambda _, args, result: see(result)).remove)

        def before(module: nn.Module, see: Callable[..., None]) -> None:
            stack.callback(module.register_forward_pre_hook(lambda _, args: see(*args)).remove)

        def operations(module: Any, **watch: Callable) -> None:
            stack.callback(setattr, module, "ops", module.ops)
            module.ops = recording_backend(module.ops, **watch)

        put, llm = recording.put, model.llm

        def see_output(arguments: dict[str, Any], result: list[Tensor], ops: Backend = llm.ops) -> None:
            _see_mixtures(recording, ops, "output", ["output.hidden"], arguments, result)
            put("output.uncapped", lambda: uncapped_logits(llm, result[0]))

        after(llm.embed, partial(put, "embedding.rows"))
        before(llm, lambda e, *_: put("embedding.out", e))
        for i, layer in enumerate(llm.layers):
            _watch_layer(i, layer, recording, after, operations)
        operations(llm, mix_and_norm=see_output)
        if model.visual is not None:
            _watch_pictures(model.visual, recording.put_picture, after, before)
        yield


def _watch_layer(i: int, layer: Any, recording: Recording, after: Callable, operations: Callable) -> None:
    put, ops, attn, sizes = recording.put, layer.ops, layer.attn, layer.attn.sizes
    name = f"layer.{i}.attention."
    H, G = sizes.num_heads, sizes.num_key_value_heads

    def see_mixtures(arguments: dict[str, Any], result: list[Tensor]) -> None:
        if arguments["norm_weights"][0] is layer.mlp_norm.weight:
            put(f"layer.{i}.after_attention", arguments["sources"][:, :, -1])
            outputs, stem = [f"moe.{i}.input"], f"residual.{i}.mlp"
        else:
            outputs = [name + "input"] if layer.is_sliding else [f"{name}input_{x}" for x in "qkv"]
            stem = f"residual.{i}.attn"
        _see_mixtures(recording, ops, stem, outputs, arguments, result)

    def see_convolution(arguments: dict[str, Any], result: Tensor) -> None:
        for x, part in zip("kv", result.unflatten(-1, (2, G, -1)).unbind(2), strict=True):
            put(f"{name}{x}_conv", part)
        if "dynamic_taps" in arguments:
            for x, part in zip("kv", arguments["dynamic_taps"].unflatten(2, (2, G)).unbind(2), strict=True):
                put(f"{name}{x}_taps", part)

    operations(layer, mix_and_norm=see_mixtures)
    clips = {"q": (attn.q_l2_clip, attn.qk_threshold), "r": (attn.rel_l2_clip, attn.r_threshold)}

    def see_projected(y: Tensor, x: str, heads: int) -> None:
        y = y.unflatten(-1, (heads, -1))
        put(f"{name}{x}_projected", y)
        if x in clips and not layer.is_sliding:  # in sliding layers the clipped states are q and r themselves
            learned, threshold = clips[x]
            put(f"{name}{x}_clipped", lambda: attention.scaled_l2_clip(y, learned.scale, threshold))

    for x, linear, heads in [("q", attn.wq_du, H), ("r", attn.wr_du, H), ("k", attn.wk_dv, G), ("v", attn.wv_dv, G)]:
        after(linear, partial(see_projected, x=x, heads=heads))
    attend = partial(_see_attention, recording, attn.ops, name)
    operations(attn, short_conv=see_convolution, dynamic_short_conv=see_convolution, attend=attend)
    after(attn, partial(put, name + "out"))
    operations(layer.attn_sconv, short_conv=lambda _, y: put(f"layer.{i}.conv_attn", y))
    _watch_experts(f"moe.{i}.", layer.mlp, recording, operations)
    after(layer.mlp, partial(put, f"moe.{i}.out"))
    operations(layer.mlp_sconv, short_conv=lambda _, y: put(f"layer.{i}.conv_mlp", y))
    after(layer, lambda depth: put(f"layer.{i}.out", depth.partial))


def mixture_weights(sources: Float[Tensor, "B T n D"], queries: Float[Tensor, "q D"]) -> Float[Tensor, "B T q n"]:
    """The softmax over sources that `residual.mix` forms."""
    scores = residual.rms(sources, residual.SOURCE_EPS) @ (residual.wide(queries) / queries.shape[-1] ** 0.5).T
    return scores.softmax(dim=-2).transpose(-1, -2)


def mixtures(ops: Backend, sources: Float[Tensor, "B T n D"], queries: Float[Tensor, "q D"]) -> Tensor:
    """The mixtures [B, T, q, D] that the operation norms: with an epsilon that drowns them, its norm only divides."""
    norm = [queries.new_full(queries.shape[-1:], 1e6, dtype=sources.dtype)] * len(queries)
    return torch.stack(ops.mix_and_norm(sources, queries, norm, 1e12, sources.dtype), dim=2)


def _see_mixtures(
    recording: Recording, ops: Backend, stem: str, outputs: list[str], arguments: dict[str, Any], result: list[Tensor]
) -> None:
    sources, queries = arguments["sources"], arguments["queries"]
    if queries is not None:
        queries = queries.view(-1, queries.shape[-1])
        recording.put(f"{stem}.weights", lambda: mixture_weights(sources, queries))
        recording.put(f"{stem}.mix", lambda: mixtures(ops, sources, queries))
    for output, x in zip(outputs, result, strict=True):
        recording.put(output, x)


def bias_by_position(attend: dict[str, Any], lengths: list[int]) -> Float[Tensor, "B T H S"]:
    """Relative bias of every visible key by its position, for the operands of `attend`; lengths: before each row."""
    r, T, window = attend["r"].transpose(1, 2), attend["r"].shape[1], attend["window"]
    first = torch.tensor(lengths, device=r.device)[:, None, None]
    distance = attention.distances(first, range(T), range(max(lengths) + T), r.device)
    hidden = (distance < 0) | (distance >= (window or distance.shape[-1]))
    bias = attention.relative_bias(r, attend["profiles"], distance)
    return bias.masked_fill(hidden[:, None], 0).transpose(1, 2)


def context(ops: Backend, attend: dict[str, Any], v: Tensor | None = None) -> Float[Tensor, "B T H d"]:
    """The weighted sum of the values (or of `v`) before the gate: the operation's result with an open gate."""
    open_gate = torch.full_like(attend["gate"], torch.inf)
    result = ops.attend(**{**attend, "v": attend["v"] if v is None else v, "gate": open_gate})
    return result.unflatten(-1, attend["q"].shape[2:])


def probabilities(ops: Backend, attend: dict[str, Any], lengths: list[int]) -> Float[Tensor, "B T H S"]:
    """Probabilities of every key by its position: what the operation makes of unit vectors as values."""
    (B, T, H, d), slots = attend["q"].shape, attend["k"].shape[2]
    chunks = []
    for start in range(0, slots, d):  # a value has d entries: d slots at a time
        part = torch.arange(start, min(start + d, slots), device=attend["v"].device)
        v = torch.zeros_like(attend["v"])
        v[:, :, part, part - start] = 1
        chunks.append(context(ops, attend, v)[..., : len(part)])
    by_slot = torch.cat(chunks, dim=-1)
    by_position = by_slot.new_zeros(B, T, H, max(lengths) + T)
    for row, (length, offset) in enumerate(zip(lengths, attend["offsets"], strict=True)):
        seen = by_slot[row, ..., max(0, offset - length) : offset + T]  # slots before position 0 are empty
        by_position[row, ..., length + T - seen.shape[-1] : length + T] = seen
    return by_position


def _see_attention(
    recording: Recording, ops: Backend, name: str, arguments: dict[str, Any], result: Float[Tensor, "B T C"]
) -> None:
    put, lengths, (_, T, H, d) = recording.put, recording.lengths, arguments["q"].shape
    put(name + "q", arguments["q"])
    put(name + "r", arguments["r"])
    for x in "kv":
        new = [slots[:, start : start + T] for slots, start in zip(arguments[x], arguments["offsets"], strict=True)]
        put(name + x, torch.stack(new).transpose(1, 2))
    put(name + "sink", arguments["sink"])
    put(name + "gate", arguments["gate"].unflatten(-1, (H, d)))

    put(name + "bias", lambda: bias_by_position(arguments, lengths))
    put(name + "probabilities", lambda: probabilities(ops, arguments, lengths))
    put(name + "context", lambda: context(ops, arguments))
    put(name + "gated", result.unflatten(-1, (H, d)))


def first_products(experts: dict[str, Any]) -> Float[Tensor, "N k rows"]:
    """W_13 h of every choice, for the operands of `experts`: gate and up in turn, as the rows are stored."""
    h, ids, quantize = experts["h"], experts["ids"], experts["quantize"]
    x = h if quantize is None else quantize(h)
    out = h.new_empty(*ids.shape, experts["w13"].weight.shape[1])
    for expert in ids.unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        out[token, choice] = F.linear(x[token], experts["w13"].dense(expert, h.dtype))
    return out


def expert_outputs(ops: Backend, experts: dict[str, Any], w2: ExpertMatrix | None = None) -> Float[Tensor, "N k rows"]:
    """Each choice's output alone, with weight 1, for the operands of `experts` (or with another W_2)."""
    alone = torch.ones_like(experts["weights"][:, :1])
    w2 = experts["w2"] if w2 is None else w2
    ids = experts["ids"].split(1, dim=1)
    return torch.stack([ops.experts(**{**experts, "weights": alone, "ids": one, "w2": w2}) for one in ids], dim=1)


def activations(ops: Backend, experts: dict[str, Any]) -> Float[Tensor, "N k I"]:
    """What W_2 reads: the outputs with unit vectors as its rows, D of the I at a time."""
    h, (E, rows, _) = experts["h"], experts["w13"].weight.shape
    D, I = h.shape[1], rows // 2
    chunks = []
    for start in range(0, I, D):
        part = torch.arange(start, min(start + D, I), device=h.device)
        w2 = h.new_zeros(D, I)
        w2[part - start, part] = 1
        chunks.append(expert_outputs(ops, experts, ExpertMatrix(w2.expand(E, -1, -1)))[..., : len(part)])
    return torch.cat(chunks, dim=-1)


def router_scores(gate: Any, h: Float[Tensor, "*N D"]) -> Float[Tensor, "*N E"]:
    """e of `moe`, before the bias."""
    return F.linear(residual.wide(h), residual.wide(gate.weight)).sigmoid()


def uncapped_logits(llm: Any, hidden: Float[Tensor, "B T D"]) -> Float[Tensor, "B T V"]:
    """Logits of the used vocabulary before their cap."""
    return residual.wide(F.linear(hidden, llm.unembed.weight[: llm.config.unpadded_vocab_size]))


def _watch_experts(name: str, mlp: Any, recording: Recording, operations: Callable) -> None:
    ops = mlp.experts.ops
    order: list[Tensor] = []  # that puts the router's choices in ascending order

    def put(section: str, value: Tensor | Callable[[], Tensor]) -> None:
        def by_token() -> Tensor:
            x = value() if callable(value) else value
            return x.view(len(recording.counts), -1, *x.shape[1:])

        recording.put(name + section, by_token)

    def see_route(arguments: dict[str, Any], result: tuple[Tensor, Tensor]) -> None:
        weights, ids = result
        ids, indices = ids.sort(dim=-1)
        order[:] = [indices]
        put("scores", lambda: router_scores(mlp.gate, arguments["h"]))
        put("biased", lambda: router_scores(mlp.gate, arguments["h"]) + residual.wide(arguments["bias"]))
        put("chosen", ids)
        put("weights", weights.gather(-1, indices))

    def see_experts(arguments: dict[str, Any], _: Tensor) -> None:
        ordered = {**arguments, "ids": arguments["ids"].gather(-1, order[0])}
        for offset, x in enumerate(("gate", "up")):
            put(x, lambda offset=offset: first_products(ordered)[..., offset::2])
        put("activation", lambda: activations(ops, ordered))
        put("expert_out", lambda: expert_outputs(ops, ordered))

    operations(mlp.gate, route=see_route)
    operations(mlp.experts, experts=see_experts)


def _watch_pictures(visual: Any, put: Callable, after: Callable, before: Callable) -> None:
    backbone = visual.backbone

    def whole(name: str) -> Callable[[Tensor], None]:
        return lambda y: put(name, y[0])  # one picture at a time

    after(backbone.embeddings.patch_embedding, whole("vision.patches"))
    after(backbone.embeddings, whole("vision.embedding"))
    after(backbone.ln_pre, whole("vision.norm"))
    for i, block in enumerate(backbone.layers):
        name, attn = f"vision.{i}.", block.self_attn
        turn: dict[str, Tensor] = {}

        def see_angles(x: Tensor, cos: Tensor, sin: Tensor, *_: Any, turn: dict = turn) -> None:
            turn.update(cos=cos, sin=sin)

        def see_rotated(
            y: Tensor, x: str, name: str = name, d: int = attn.head_dim, turn: dict = turn
        ) -> None:  # [1, tokens, D] to [tokens, H, d]
            heads = y.unflatten(-1, (-1, d)).transpose(1, 2)
            put(f"{name}attention.{x}", lambda: vision.rotate(heads, **turn)[0].transpose(0, 1))

        after(block.ln_1, whole(name + "attention.input"))
        before(attn, see_angles)
        after(attn.q_proj, partial(see_rotated, x="q"))
        after(attn.k_proj, partial(see_rotated, x="k"))
        after(attn.v_proj, lambda y, name=name, d=attn.head_dim: put(name + "attention.v", y[0].unflatten(-1, (-1, d))))
        before(attn.out_proj, whole(name + "attention.heads"))
        after(attn, whole(name + "attention.out"))
        after(block.ls_1, whole(name + "after_attention"))
        after(block.ln_2, whole(name + "mlp.input"))
        before(block.mlp.c_proj, whole(name + "mlp.hidden"))
        after(block.mlp, whole(name + "mlp.out"))
        after(block.ls_2, whole(name + "out"))
    before(visual.proj_in, whole("vision.merged"))
    before(visual.proj_out, whole("vision.hidden"))
    after(visual, lambda y: put("vision.features", y))


# --- Running it ----------------------------------------------------------------------------------------------------


@dataclass
class Run:
    """The arguments of a trace, checked, and the tokens that it decodes: what every implementation's trace shares.

    rows: prompts without padding; steps: how many tokens to decode; forced: these, or None for the likeliest.
    """

    rows: list[list[int]]
    steps: int
    forced: list[list[int]] | None
    recording: Recording

    @classmethod
    def read(
        cls,
        config: InklingConfig,
        input_ids: Any,
        attention_mask: Any,
        decode: Any,
        layers: Sequence[int] | None,
        sections: Sequence[str] | None,
        positions: Sequence[int] | None,
    ) -> "Run":
        """Arguments as of `trace`. Raises InputError."""
        text = config.text
        rows = read_rows(input_ids, attention_mask, text.unpadded_vocab_size)
        T, forced = max(map(len, rows)), None
        if not isinstance(decode, int):
            forced = read_rows(decode, None, text.unpadded_vocab_size, "decode")
            if len(forced) != len(rows) or len({len(row) for row in forced}) != 1:
                lengths = [*map(len, forced)]
                raise InputError(f"decode: rows of {lengths} tokens, expected equally many for each of {len(rows)}")
        steps = decode if forced is None else len(forced[0])
        if steps < 0 or T + steps > text.max_position_embeddings:
            longest = text.max_position_embeddings
            raise InputError(f"decode: {steps} tokens after {T}, expected at least 0 and at most {longest} together")
        if positions is not None:
            if not positions or not all(-T <= p < T for p in positions):
                raise InputError(f"positions: {list(positions)}, expected some of {-T} to {T - 1}")
            positions = sorted({p % T for p in positions})
        L = text.num_hidden_layers
        if layers is not None and not all(0 <= i < L for i in layers):
            raise InputError(f"layers: {list(layers)}, expected numbers from 0 to {L - 1}")
        return cls(rows, steps, forced, Recording(chooser(sections, layers), positions))

    def decode(self, last: Float[Tensor, "B V"], forward: Callable[[int, list[int]], Float[Tensor, "B V"]]) -> list:
        """Every step's tokens through `forward(step, tokens)`, which returns the logits after them; `last`: before.

        Returns: the tokens of every row.
        """
        decoded: list[list[int]] = [[] for _ in self.rows]
        for step in range(1, self.steps + 1):
            new = last.argmax(dim=-1).tolist() if self.forced is None else [row[step - 1] for row in self.forced]
            for row, token in zip(decoded, new, strict=True):
                row.append(token)
            self.recording.begin(step, [len(row) + step - 1 for row in self.rows], [1] * len(self.rows))
            last = forward(step, new)
        return decoded

    def finish(self, decoded: list[list[int]], config: InklingConfig, image_grid_thw: Any, **about: Any) -> Trace:
        """The trace; `about` joins the manifest."""
        manifest = {
            "version": VERSION,
            "config": config.to_dict(),
            "prompt": self.rows,
            "decoded": decoded,
            "positions": self.recording.positions,
            "images": [] if image_grid_thw is None else image_grid_thw.tolist(),
            "versions": {
                "inkling_ref": __version__,
                "torch": str(torch.__version__),
                "python": platform.python_version(),
                **about.pop("versions", {}),
            },
        }
        return Trace(self.recording.finish(), {**manifest, **about})


@torch.inference_mode()
def trace(
    model: Any,
    input_ids: Any,
    pixel_values: Float[Tensor, "tiles p p 3"] | None = None,
    image_grid_thw: Int[Tensor, "images 3"] | None = None,
    attention_mask: Any = None,
    decode: int | Any = 0,
    layers: Sequence[int] | None = None,
    sections: Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
) -> Trace:
    """One pass over prompts, then decoding steps through a cache, with everything that `sections` names.

    Args:
        model: an `Inkling`.
        input_ids: integers [B, T] or [T], or a list of rows, which may differ in length.
        pixel_values, image_grid_thw: of `process_images`; attention_mask: as `generate` takes it.
        decode: how many further tokens to read, each the likeliest; or these tokens, [B, n] or [n]. To compare two
            implementations give both the same.
        layers, sections: see `chooser`.
        positions: tokens of the prompt to keep, by position, negative from the longest row's end; None keeps all.
            Decoding steps and pictures are kept whole.

    A token of Small in bfloat16 is 0.17 MB a layer (0.26 MB where it is full), without sections on request, and 0.8 MB
    of logits: one position through all 48 layers is 10 MB.

    Raises:
        InputError: an argument that cannot be used.
    """
    run = Run.read(model.config, input_ids, attention_mask, decode, layers, sections, positions)
    recording, counts, device = run.recording, [len(row) for row in run.rows], model.device
    T = max(counts)
    ids = torch.tensor([row + [0] * (T - len(row)) for row in run.rows], device=device)
    mask = torch.arange(T, device=device) < torch.tensor(counts, device=device)[:, None]
    if (pixel_values is None) != (image_grid_thw is None):
        missing = "pixel_values" if pixel_values is None else "image_grid_thw"
        raise InputError(f"{missing}: missing, expected both as process_images returns them")
    if any(layer.mlp.experts.matrix("w13_weight").weight.dtype == torch.int32 for layer in model.llm.layers):
        raise InputError("trace: the experts are in the kernels' order, expected a model loaded on backend 'torch'")
    with watched(model, recording):
        features = None
        if pixel_values is not None:
            features = _features(model, pixel_values, image_grid_thw, recording)
        cache = model.new_cache(len(counts), rollback=0) if run.steps else None
        recording.begin(0, [0] * len(counts), counts)
        logits = model(ids, cache=cache, attention_mask=None if mask.all() else mask, image_features=features).logits
        recording.put("logits", logits)

        def step(_: int, tokens: list[int]) -> Float[Tensor, "B V"]:
            logits = model(torch.tensor(tokens, device=device)[:, None], cache=cache).logits
            recording.put("logits", logits)
            return logits[:, -1]

        decoded = run.decode(torch.stack([row[n - 1] for row, n in zip(logits, counts, strict=True)]), step)
    return run.finish(
        decoded,
        model.config,
        image_grid_thw,
        implementation="inkling_ref",
        dtype=dtype_name(model.dtype),
        device=device.type,
        backend=model.kernel_report(),
    )


def _features(model: Any, pixel_values: Tensor, image_grid_thw: Tensor, recording: Recording) -> Tensor:
    """Features of all pictures, each by a call of its own."""
    sizes = image_grid_thw.prod(dim=1).tolist()
    if sum(sizes) != len(pixel_values):
        raise InputError(f"image_grid_thw: {sum(sizes)} tiles, but pixel_values holds {len(pixel_values)}")
    features = []
    for tiles, grid in zip(pixel_values.to(model.device).split(sizes), image_grid_thw, strict=True):
        recording.put_picture("vision.pixels", tiles)
        features.append(model.image_features(tiles, grid[None].to(model.device)))
    return torch.cat(features)
