"""Replay: compute one section from recorded inputs, whoever recorded them.

    replay(model, theirs, "layer.17.attention.gated")

gives what the reference makes of *their* q, k, v, r, sink and gate: compared with their output it judges that one
kernel, however far their inputs had drifted by then. An error that began in layer 3 shows in every later section of a
trace, but in no later replay.

An input that was not recorded is replayed from its own inputs, down to what there is. Sections that read earlier
positions (attention, convolutions) need all positions of the prompt, and in decoding steps those before too. Attention
is one operation: `probabilities`, `context` and `gated` are all replayed from its operands.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from .. import attention, moe, residual, vision
from ..errors import InputError
from . import trace as tracing
from .sections import name_of, parse
from .trace import Trace

# Recorded in float32 (`residual.wide`) where the model has 16 bits; every other float has the model's dtype.
_WIDE = {"after_attention", "weights", "mix", "scores", "biased", "uncapped", "logits"}
_A, _M, _V = "layer.{i}.attention.", "moe.{i}.", "vision.{i}."


@torch.inference_mode()
def replay(model: Any, recorded: Trace, name: str) -> Tensor:
    """A section as `model` computes it from the recorded sections before it, in the model's dtype.

    Args:
        model: an `Inkling` with the weights of the recorded one.
        recorded: with the manifest's prompt, decoded, positions and images, as far as the section depends on them.
        name: as recorded, `step.2.moe.3.out` say.

    Raises:
        InputError: an unknown name, or inputs that are missing or do not fit the model.
    """
    step, section, layer = parse(name)
    try:
        return _At(model, recorded, step, layer, {}).compute(section.name)
    except InputError:
        raise
    except (RuntimeError, LookupError, TypeError, ValueError, AttributeError) as error:
        reason = str(error).partition("\n")[0]
        raise InputError(f"replay of {name}: the recorded inputs do not fit this model ({reason})") from None


@dataclass(frozen=True)
class _At:
    """One step and layer of a recorded pass; calling it reads a section there."""

    model: Any
    recorded: Trace
    step: int
    layer: int | None
    replayed: dict[str, Tensor]  # what was not recorded, once computed

    def __call__(self, pattern: str, layer: int | None = None, step: int | None = None) -> Tensor:
        """A section of this layer and step, or of the given ones, as it was recorded, or else replayed."""
        layer, step = self.layer if layer is None else layer, self.step if step is None else step
        name = name_of(pattern, layer, step)
        if (x := self.recorded.tensors.get(name)) is None:
            if name not in self.replayed:
                self.replayed[name] = replace(self, layer=layer, step=step).compute(pattern)
            return self.replayed[name]
        x = x.to(self.model.device)
        if not x.is_floating_point():
            return x
        is_wide = pattern.rpartition(".")[2] in _WIDE and not pattern.startswith("vision.")
        return x.to(residual.wide(x.new_empty(0, dtype=self.dtype)).dtype if is_wide else self.dtype)

    def compute(self, pattern: str) -> Tensor:
        if pattern not in _FUNCTIONS:
            name = name_of(pattern, self.layer, self.step)
            raise InputError(f"replay: {name} was not recorded, and it is computed from nothing that could be")
        value = _FUNCTIONS[pattern](self)
        if pattern.startswith("vision."):
            return value
        return value.masked_fill(~self.real.view(*value.shape[:2], *[1] * (value.dim() - 2)), 0)

    @property
    def dtype(self) -> torch.dtype:
        return self.model.dtype

    @property
    def text(self) -> Any:
        return self.model.config.text

    @property
    def module(self) -> Any:
        return self.model.llm.layers[self.layer]

    @property
    def counts(self) -> list[int]:
        """Tokens of every row in this step."""
        return [len(row) if self.step == 0 else 1 for row in self.recorded.manifest["prompt"]]

    def of_tokens(self, values: list[list[int]]) -> Tensor:
        """Values of every row's tokens in this step as [B, T], zero where there is none, at the recorded positions."""
        table = pad_sequence([torch.tensor(row, device=self.model.device) for row in values], batch_first=True)
        positions = self.recorded.manifest.get("positions")
        return table if self.step or positions is None else table[:, positions]

    @property
    def ids(self) -> Tensor:
        manifest = self.recorded.manifest
        rows = [[row[self.step - 1]] for row in manifest["decoded"]] if self.step else manifest["prompt"]
        return self.of_tokens(rows)

    @property
    def places(self) -> Tensor:
        """Absolute position of every token."""
        lengths = [len(row) + self.step - 1 for row in self.recorded.manifest["prompt"]]
        return self.of_tokens([[n] for n in lengths] if self.step else [list(range(n)) for n in self.counts])

    @property
    def real(self) -> Tensor:
        return self.of_tokens([[1] * n for n in self.counts]).bool()

    def sequences(self, pattern: str) -> list[Tensor]:
        """Each row's entries [1, S, ...] from position 0 to the end of this step."""
        if self.recorded.manifest.get("positions") is not None:
            raise InputError(f"replay: {pattern} was recorded at some positions only, expected all of the prompt")
        steps = [(self(pattern, step=s), replace(self, step=s).counts) for s in range(self.step + 1)]
        return [torch.cat([x[b : b + 1, : n[b]] for x, n in steps], dim=1) for b in range(len(self.counts))]


def _rows(rows: list[Tensor]) -> Tensor:
    """[1, T, ...] of every row to [B, T, ...]."""
    return pad_sequence([row[0] for row in rows], batch_first=True)


# --- Depth state ---------------------------------------------------------------------------------------------------


def _entering(at: _At, layer: int) -> Float[Tensor, "B T D"]:
    return at("layer.{i}.out", layer=layer - 1) if layer else at("embedding.out")


def _sources(at: _At, boundaries: int, partial: Tensor) -> Float[Tensor, "B T n D"]:
    blocks = [_entering(at, j) for j in range(boundaries) if at.text.starts_block(j)]
    return residual.DepthState(torch.stack(blocks, dim=2), partial).sources()


def _mixing(which: str) -> Callable[[_At], tuple[Tensor, Tensor]]:
    """Sources and queries of a mixture."""

    def operands(at: _At) -> tuple[Tensor, Tensor]:
        queries, i = at.model.llm.attn_res, at.layer
        if which == "attn":
            sources, query = _sources(at, i, _entering(at, i)), queries.attn_queries[i - 1]
        elif which == "mlp":
            sources, query = _sources(at, i + 1, at("layer.{i}.after_attention")), queries.mlp_queries[i]
        else:
            L = at.text.num_hidden_layers
            sources, query = _sources(at, L, _entering(at, L)), queries.output_query
        return sources, query.view(-1, query.shape[-1])

    return operands


def _norm(at: _At, mixture: Tensor, norm: Any) -> Float[Tensor, "B T D"]:
    return residual.rounded(residual.rms_norm(mixture, norm.weight, at.text.rms_norm_eps), at.dtype)


def _attention_input(norm: str, number: int) -> Callable[[_At], Tensor]:
    def compute(at: _At) -> Tensor:
        mixture = at("residual.{i}.attn.mix")[:, :, number] if at.layer else at("embedding.out")
        return _norm(at, mixture, getattr(at.module, norm))

    return compute


def _embedding(at: _At) -> Float[Tensor, "B T D"]:
    llm = at.model.llm
    e = residual.rms_norm(at("embedding.rows"), llm.embed_norm.weight, at.text.rms_norm_eps).to(at.dtype)
    if at.step or not at.recorded.manifest.get("images"):
        return e
    image, number = at.model.config.image_token_id, 0
    numbers = []  # of every image token's feature, from 1
    for row in at.recorded.manifest["prompt"]:
        numbers.append([number := number + 1 if token == image else number for token in row])
    is_image = (at.ids == image) & at.real
    features = at("vision.features")[(at.of_tokens(numbers) - 1).clamp(min=0)]
    return torch.where(is_image[..., None], features, e)


# --- Attention -----------------------------------------------------------------------------------------------------


def _read_by(x: str, at: _At) -> Tensor:
    """What the projection of q, k or v reads."""
    return at(_A + "input" if at.module.is_sliding else f"{_A}input_{x}")


def _projected(x: str, linear: str) -> Callable[[_At], Tensor]:
    def compute(at: _At) -> Tensor:
        sizes = at.module.attn.sizes
        heads = sizes.num_key_value_heads if x in "kv" else sizes.num_heads
        y = getattr(at.module.attn, linear)(_read_by("q" if x == "r" else x, at))
        return y if linear == "attn_sink_proj" else y.unflatten(-1, (heads, -1))

    return compute


def _clipped(x: str) -> Callable[[_At], Tensor]:
    def compute(at: _At) -> Tensor:
        attn = at.module.attn
        clip, threshold = (attn.q_l2_clip, attn.qk_threshold) if x == "q" else (attn.rel_l2_clip, attn.r_threshold)
        return attention.scaled_l2_clip(at(f"{_A}{x}_projected"), clip.scale, threshold)

    return compute


def _scaled(x: str) -> Callable[[_At], Tensor]:
    def compute(at: _At) -> Tensor:
        if at.module.is_sliding:
            return _clipped(x)(at)
        return attention.log_scale(at(f"{_A}{x}_clipped"), at.places, *at.module.attn.sizes.log_scaling)

    return compute


def _taps(x: str) -> Callable[[_At], Tensor]:
    def compute(at: _At) -> Tensor:
        weight = getattr(at.module.attn, f"{x}_sconv").weight_proj
        return F.linear(_read_by(x, at), weight).unflatten(-1, (-1, at.text.conv_kernel_size))

    return compute


def _convolved(at: _At, pattern: str, convolve: Callable[[Tensor, int], Tensor]) -> Tensor:
    """Row by row; `convolve` gets the inputs with K - 1 before this step's, and the row."""
    past, rows = at.text.conv_kernel_size - 1, []
    for b, u in enumerate(at.sequences(pattern)):
        u = F.pad(u.flatten(2), (0, 0, past, 0))
        rows.append(convolve(u[:, u.shape[1] - at.counts[b] - past :], b))
    return _rows(rows)


def _key_value_conv(x: str) -> Callable[[_At], Tensor]:
    def compute(at: _At) -> Tensor:
        conv = getattr(at.module.attn, f"{x}_sconv")
        if at.module.is_sliding:
            y = _convolved(at, f"{_A}{x}_projected", lambda u, b: at.model.backend.short_conv(u, conv.weight))
        else:
            taps = at(f"{_A}{x}_taps")

            def convolve(u: Tensor, b: int) -> Tensor:
                return at.model.backend.dynamic_short_conv(u, taps[b : b + 1, : at.counts[b]], conv.static_w)

            y = _convolved(at, f"{_A}{x}_projected", convolve)
        return y.unflatten(-1, (at.module.attn.sizes.num_key_value_heads, -1))

    return compute


def _conv(pattern: str, module: str) -> Callable[[_At], Tensor]:
    def compute(at: _At) -> Tensor:
        weight = getattr(at.module, module).weight
        return _convolved(at, pattern, lambda u, b: at.model.backend.short_conv(u, weight))

    return compute


def _attend(result: Callable[..., Tensor]) -> Callable[[_At], Tensor]:
    """result(backend, operands, lengths) of every row alone; its last axis may be keys."""

    def compute(at: _At) -> Tensor:
        attn = at.module.attn
        now = {x: at(_A + x) for x in ("q", "r", "sink", "gate")}
        rows = []
        for b, (k, v) in enumerate(zip(at.sequences(_A + "k"), at.sequences(_A + "v"), strict=True)):
            operands = {x: y[b : b + 1, : at.counts[b]] for x, y in now.items()}
            operands |= {"gate": operands["gate"].flatten(2), "k": k.transpose(1, 2), "v": v.transpose(1, 2)}
            before = [k.shape[1] - at.counts[b]]
            operands |= {"profiles": attn.rel_logits_proj.proj, "offsets": before, "window": attn.sizes.window}
            rows.append(result(at.model.backend, operands, before))
        widest = max(row.shape[-1] for row in rows)
        return _rows([F.pad(row, (0, widest - row.shape[-1])) for row in rows])

    return compute


# --- Experts -------------------------------------------------------------------------------------------------------


def _chosen(at: _At) -> Tensor:
    best = at(_M + "biased").sort(dim=-1, descending=True, stable=True).indices  # as `moe.route` orders ties
    return best[..., : at.text.num_experts_per_tok].sort(dim=-1).values


def _routing_weights(at: _At) -> Tensor:
    chosen = at(_M + "scores").gather(-1, at(_M + "chosen"))
    return chosen / (chosen.sum(dim=-1, keepdim=True) + 1e-20) * at.text.route_scale


def _experts(result: Callable[..., Tensor]) -> Callable[[_At], Tensor]:
    """result(backend, operands), of tokens in one row."""

    def compute(at: _At) -> Tensor:
        experts = at.module.mlp.experts
        h, ids = at(_M + "input"), at(_M + "chosen")
        operands = {"h": h.flatten(0, 1), "ids": ids.flatten(0, 1), "weights": at(_M + "weights").flatten(0, 1)}
        operands |= {"w13": experts.matrix("w13_weight"), "w2": experts.matrix("w2_weight")}
        operands |= {**dict(zip(("gate_cap", "up_cap"), experts.caps, strict=True)), "quantize": experts.quantize}
        return result(at.model.backend, operands).unflatten(0, h.shape[:2])

    return compute


# --- Pictures ------------------------------------------------------------------------------------------------------


def _vision_block(at: _At) -> Any:
    return at.model.visual.backbone.layers[at.layer]


def _per_picture(at: _At, x: Tensor, more: int) -> tuple[Tensor, ...]:
    """Split tokens (more = 1: with the class token) or patches (0) by picture."""
    merge = at.model.visual.config.spatial_merge_size
    return x.split([rows * columns * merge**2 + more for _, rows, columns in at.recorded.manifest["images"]])


def _patch_places(at: _At) -> list[tuple[Tensor, Tensor]]:
    """For every picture the places of its patches, [1, patches, 2], and its size in patches."""
    merge, found = at.model.visual.config.spatial_merge_size, []
    for _, rows, columns in at.recorded.manifest["images"]:
        grid = torch.tensor([[rows, columns]], device=at.model.device)
        found.append((vision.patch_places(grid, rows * columns, merge)[0], grid * merge))
    return found


def _patches(at: _At) -> Tensor:
    visual = at.model.visual
    patches = vision.patchify(at("vision.pixels")[None], visual.config.spatial_merge_size)
    return visual.backbone.embeddings.patch_embedding(patches)[0]


def _vision_embedding(at: _At) -> Tensor:
    embeddings, side, out = at.model.visual.backbone.embeddings, at.model.visual.config.posemb_grid_size, []
    recorded = _per_picture(at, at("vision.patches"), 0)
    pixels = embeddings.patch_embedding.in_features
    for patches, (place, size) in zip(recorded, _patch_places(at), strict=True):
        weights = vision.position_weights(place, size, side, residual.wide(embeddings.position_embedding).dtype)
        # The module embeds the patches itself: let it find the recorded ones there.
        handle = embeddings.patch_embedding.register_forward_hook(lambda *_, patches=patches: patches[None])
        try:
            out.append(embeddings(patches.new_zeros(1, len(patches), pixels), weights)[0])
        finally:
            handle.remove()
    return torch.cat(out)


def _vision_entering(at: _At) -> Tensor:
    return at("vision.{i}.out", layer=at.layer - 1) if at.layer else at("vision.norm")


def _rotated(x: str) -> Callable[[_At], Tensor]:
    def compute(at: _At) -> Tensor:
        config, attn = at.model.visual.config, _vision_block(at).self_attn
        angles = [vision.rotary_angles(place, attn.head_dim, config.rope_theta)[0] for place, _ in _patch_places(at)]
        angles = torch.cat(angles)
        heads = getattr(attn, f"{x}_proj")(at(_V + "attention.input")).unflatten(-1, (-1, attn.head_dim))
        wide = residual.wide(heads).dtype
        return vision.rotate(heads.transpose(0, 1)[None], angles.cos().to(wide), angles.sin().to(wide))[0].transpose(
            0, 1
        )

    return compute


def _vision_heads(at: _At) -> Tensor:
    pictures = zip(*(_per_picture(at, at(f"{_V}attention.{x}"), 1) for x in "qkv"), strict=True)
    out = [F.scaled_dot_product_attention(*(x.transpose(0, 1)[None] for x in qkv))[0] for qkv in pictures]
    return torch.cat([y.transpose(0, 1).flatten(1) for y in out])


def _merged(at: _At) -> Tensor:
    last = at("vision.{i}.out", layer=at.model.visual.config.num_hidden_layers - 1)
    patches = torch.cat([x[1:] for x in _per_picture(at, last, 1)])
    return patches.unflatten(0, (-1, at.model.visual.config.spatial_merge_size**2)).flatten(1)


# --- The table -----------------------------------------------------------------------------------------------------

_FUNCTIONS: dict[str, Callable[[_At], Tensor]] = {
    "vision.patches": _patches,
    "vision.embedding": _vision_embedding,
    "vision.norm": lambda at: at.model.visual.backbone.ln_pre(at("vision.embedding")),
    _V + "attention.input": lambda at: _vision_block(at).ln_1(_vision_entering(at)),
    _V + "attention.q": _rotated("q"),
    _V + "attention.k": _rotated("k"),
    _V + "attention.v": lambda at: (
        _vision_block(at)
        .self_attn.v_proj(at(_V + "attention.input"))
        .unflatten(-1, (-1, _vision_block(at).self_attn.head_dim))
    ),
    _V + "attention.heads": _vision_heads,
    _V + "attention.out": lambda at: _vision_block(at).self_attn.out_proj(at(_V + "attention.heads")),
    _V + "after_attention": lambda at: _vision_block(at).ls_1(_vision_entering(at), at(_V + "attention.out")),
    _V + "mlp.input": lambda at: _vision_block(at).ln_2(at(_V + "after_attention")),
    _V + "mlp.hidden": lambda at: F.gelu(_vision_block(at).mlp.c_fc(at(_V + "mlp.input"))),
    _V + "mlp.out": lambda at: _vision_block(at).mlp.c_proj(at(_V + "mlp.hidden")),
    _V + "out": lambda at: _vision_block(at).ls_2(at(_V + "after_attention"), at(_V + "mlp.out")),
    "vision.merged": _merged,
    "vision.hidden": lambda at: F.gelu(at.model.visual.proj_in(at("vision.merged"))),
    "vision.features": lambda at: at.model.visual.proj_out(at("vision.hidden")),
    "embedding.rows": lambda at: at.model.llm.embed(at.ids),
    "embedding.out": _embedding,
    "residual.{i}.attn.weights": lambda at: tracing.mixture_weights(*_mixing("attn")(at)),
    "residual.{i}.attn.mix": lambda at: tracing.mixtures(at.model.backend, *_mixing("attn")(at)),
    _A + "input": _attention_input("attn_norm", 0),
    **{f"{_A}input_{x}": _attention_input(f"{x}_input_norm", n) for n, x in enumerate("qkv")},
    **{f"{_A}{x}_projected": _projected(x, f"w{x}_{'du' if x in 'qr' else 'dv'}") for x in "qrkv"},
    **{f"{_A}{x}_clipped": _clipped(x) for x in "qr"},
    **{f"{_A}{x}": _scaled(x) for x in "qr"},
    **{f"{_A}{x}_taps": _taps(x) for x in "kv"},
    **{f"{_A}{x}_conv": _key_value_conv(x) for x in "kv"},
    _A + "k": lambda at: attention.l2_clip(at(_A + "k_conv"), at.module.attn.qk_threshold),
    _A + "v": lambda at: residual.rounded(residual.rms(at(_A + "v_conv"), at.text.rms_norm_eps), at.dtype),
    _A + "sink": _projected("q", "attn_sink_proj"),
    _A + "gate": _projected("q", "gate_attn"),
    _A + "bias": _attend(lambda ops, operands, before: tracing.bias_by_position(operands, before)),
    _A + "probabilities": _attend(tracing.probabilities),
    _A + "context": _attend(lambda ops, operands, before: tracing.context(ops, operands)),
    _A + "gated": _attend(lambda ops, operands, before: ops.attend(**operands).unflatten(-1, operands["q"].shape[2:])),
    _A + "out": lambda at: at.module.attn.wo_ud(at(_A + "gated").flatten(2)),
    "layer.{i}.conv_attn": _conv(_A + "out", "attn_sconv"),
    "layer.{i}.after_attention": lambda at: (
        residual.wide(at("layer.{i}.conv_attn"))
        + (0 if at.module.starts_block else residual.wide(_entering(at, at.layer)))
    ),
    "residual.{i}.mlp.weights": lambda at: tracing.mixture_weights(*_mixing("mlp")(at)),
    "residual.{i}.mlp.mix": lambda at: tracing.mixtures(at.model.backend, *_mixing("mlp")(at)),
    _M + "input": lambda at: _norm(at, at("residual.{i}.mlp.mix")[:, :, 0], at.module.mlp_norm),
    _M + "scores": lambda at: tracing.router_scores(at.module.mlp.gate, at(_M + "input")),
    _M + "biased": lambda at: at(_M + "scores") + residual.wide(at.module.mlp.gate.bias),
    _M + "chosen": _chosen,
    _M + "weights": _routing_weights,
    _M + "gate": _experts(lambda ops, operands: tracing.first_products(operands)[..., 0::2]),
    _M + "up": _experts(lambda ops, operands: tracing.first_products(operands)[..., 1::2]),
    _M + "activation": _experts(tracing.activations),
    _M + "expert_out": _experts(tracing.expert_outputs),
    _M + "out": _experts(lambda ops, operands: ops.experts(**operands)),
    "layer.{i}.conv_mlp": _conv(_M + "out", "mlp_sconv"),
    "layer.{i}.out": lambda at: residual.rounded(
        at("layer.{i}.after_attention") + residual.wide(at("layer.{i}.conv_mlp")), at.dtype
    ),
    "output.weights": lambda at: tracing.mixture_weights(*_mixing("output")(at)),
    "output.mix": lambda at: tracing.mixtures(at.model.backend, *_mixing("output")(at)),
    "output.hidden": lambda at: _norm(at, at("output.mix")[:, :, 0], at.model.llm.norm),
    "output.uncapped": lambda at: tracing.uncapped_logits(at.model.llm, at("output.hidden")),
    "logits": lambda at: moe.softcap(at("output.uncapped"), at.text.final_logit_softcapping),
}
