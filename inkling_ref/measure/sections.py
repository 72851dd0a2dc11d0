r"""The sections of a forward pass: what a trace records, under which name, in which order, and where it is computed.

One table, `SECTIONS`, in data-flow order. `trace` writes these names, the adapters translate to them, `compare` walks
them: the first that departs, in this order, while its inputs agree, is the section to look at.

**Names.** `{i}` stands for the number of a layer: `layer.17.attention.q`, `moe.17.scores`, `vision.3.out`. The prompt's
pass (prefill) bears the bare names; the n-th decoding step after it the prefix `step.n.`, from `step.1.` on.

**Layout.** Text sections are [B, T, ...], where entry t of row b is the t-th token of that row in this call, padding
apart: padding, wherever the caller had it, comes last and is zero. Vision sections have one leading axis: the tokens
(class token first), patches or tiles of all pictures, picture after picture. S counts keys by position from 0;
what a query does not see is zero. Letters are the package's; in vision sections D is the encoder's width.

**Order of choices.** `chosen` lists the k expert ids of a token in ascending order, an order that every engine can
produce; `weights`, `gate`, `up`, `activation` and `expert_out` follow it. The rank is in `biased`.

Sections marked `on_request` are larger, S or k I or k D numbers a token, and cost another call of their operation; a
trace has them where they are asked for by name. Sections marked `derived` cannot be seen where they are computed,
inside one operation: a trace forms them again from what that operation was given, by the functions of the component's
module.

Equations are not repeated here: `equation` finds them in the docstring of the component's module, and `source` finds
the line that computes a section, by inspection.
"""

import inspect
import re
from collections.abc import Collection
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Literal, NamedTuple

from ..errors import InputError

Kind = Literal["float", "choices", "weights"]  # weights: shares of one sum, of which the small ones may be noise


@dataclass(frozen=True)
class Section:
    """One row of the table.

    Attributes:
        name: the pattern of its names, without the step.
        computes: what it is, in one line.
        shape: axes, in the package's letters.
        equations: for each, `module: text that only that equation of the module's docstring holds`.
        source: `module.function: text of the line`, below `inkling_ref`.
        inputs: patterns of the sections it is computed from. `{i-1}` is the layer before, `{<i}` every layer before,
            `{*}` every layer, `{last}` the last; a leading `..`: it reads earlier steps too, through the cache;
            `a|b`: the first that there is; a final `?`: if there is one.
        kind: how two of them are compared.
        tolerance: row of `TOLERANCES`.
        on_request, derived: see the module docstring.
    """

    name: str
    computes: str
    shape: str
    equations: tuple[str, ...]
    source: str
    inputs: tuple[str, ...] = ()
    kind: Kind = "float"
    tolerance: str = "stream"
    on_request: bool = False
    derived: bool = False


# How far two healthy implementations may be apart. The error of a section, which `compare` measures token by token, may
# be its row's number for the coarser dtype of both, plus `gain` times the largest error of its inputs.
#
# Measured on ten models (nine random ones in which every term matters, and nano) with pictures, prompt and decoding
# steps, on the same weights: bfloat16 beside float32, float32 beside float64. The largest error of a token that a
# section adds to inputs that are exact (replayed), and by how much it amplifies that of its inputs:
#
#     row        float32  bfloat16  gain   what makes it
#     given      0        0         -      looked up or prepared, not computed
#     stream     1.2e-6   4.5e-3    3.0    one operation: products and sums in float32 at least, one or two roundings
#     narrow     4e-7     3.3e-3    5.1    the same with few numbers a token, which now and then all are small
#     attention  1.7e-6   4.5e-2    4.6    bfloat16 scores of size 8 are off by 2^-6, and so are probabilities
#     experts    6.1e-7   6.6e-3    2.6    three roundings, and products of soft-capped numbers
#     gelu       1.6e-6   4.5e-3    4.0    on its far negative side it is small beside its slope
#
# The numbers below are two to three times these; float32 has more room, for other orders of summation.
TOLERANCES: dict[str, dict[str, float]] = {
    "given": {"float64": 1e-15, "float32": 1e-7, "float16": 1e-3, "bfloat16": 5e-3, "gain": 0.0},
    "stream": {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2, "gain": 6.0},
    "narrow": {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2, "gain": 12.0},
    "attention": {"float64": 1e-13, "float32": 1e-5, "float16": 2e-2, "bfloat16": 1.2e-1, "gain": 10.0},
    "experts": {"float64": 1e-13, "float32": 1e-5, "float16": 4e-3, "bfloat16": 2.5e-2, "gain": 6.0},
    "gelu": {"float64": 1e-13, "float32": 1e-5, "float16": 2e-3, "bfloat16": 1.2e-2, "gain": 10.0},
}

_A = "layer.{i}.attention."
_M = "moe.{i}."
_V = "vision.{i}."
# What the depth state of layer i is made of. It holds the last layer and those that end blocks; the others are in their
# sums, and to name them here too keeps the size of a block out of the table.
_SOURCES = ("embedding.out", "layer.{<i}.out")

_PICTURES = [
    Section(
        "vision.pixels", "pixels of the tiles, after image processing", "tiles side side 3",
        (r"vision: x = (p - 127.5)",), "vision.process_images: tiles.append(cut_tiles(", tolerance="given",
    ),
    Section(
        "vision.patches", "patches, in block order, through the patch matrix", "patches D",
        (), "vision.Embeddings.forward: x = self.patch_embedding(patches)", ("vision.pixels",),
    ),
    Section(
        "vision.embedding", "class token and patches, each with its position", "tokens D",
        (r"vision: A_{ij}",), "vision.Embeddings.forward: x = x + (weights @ wide(", ("vision.patches",),
    ),
    Section(
        "vision.norm", "LayerNorm before the first layer", "tokens D",
        (), "vision.VisionModel.encode: x = backbone.ln_pre(", ("vision.embedding",),
    ),
]  # fmt: skip
_VISION_IN = ("vision.{i-1}.out|vision.norm",)
_PICTURE_LAYER = [
    Section(
        _V + "attention.input", "first LayerNorm of the layer", "tokens D",
        (r"vision: \gamma_1",), "vision.Block.forward: self.ln_1(x)", _VISION_IN,
    ),
    Section(
        _V + "attention.q", "queries, rotated by column and row", "tokens H d",
        (r"vision: \omega_i =", r"vision: (x_0, x_1)"), "vision.Attention.forward: rotate(q, cos, sin)",
        (_V + "attention.input",), derived=True,
    ),
    Section(
        _V + "attention.k", "keys, rotated by column and row", "tokens H d",
        (r"vision: \omega_i =", r"vision: (x_0, x_1)"), "vision.Attention.forward: rotate(k, cos, sin)",
        (_V + "attention.input",), derived=True,
    ),
    Section(
        _V + "attention.v", "values", "tokens H d",
        (), "vision.Attention.forward: for project in (self.q_proj", (_V + "attention.input",),
    ),
    Section(
        _V + "attention.heads", "attention within one picture, heads joined, before the output matrix", "tokens D",
        (), "vision.Attention.forward: F.scaled_dot_product_attention(",
        tuple(_V + "attention." + x for x in "qkv"),
    ),
    Section(
        _V + "attention.out", "output matrix of the attention", "tokens D",
        (r"vision: \gamma_1",), "vision.Attention.forward: return self.out_proj(", (_V + "attention.heads",),
    ),
    Section(
        _V + "after_attention", "stream after the attention, with its layer scale", "tokens D",
        (r"vision: \gamma_1",), "vision.LayerScale.forward: torch.addcmul(",
        (*_VISION_IN, _V + "attention.out"),
    ),
    Section(
        _V + "mlp.input", "second LayerNorm of the layer", "tokens D",
        (r"vision: \gamma_2",), "vision.Block.forward: self.ln_2(x)", (_V + "after_attention",),
    ),
    Section(
        _V + "mlp.hidden", "first matrix and exact GELU", "tokens hidden",
        (r"vision: \gamma_2",), "vision.MLP.forward: F.gelu(self.c_fc(x))", (_V + "mlp.input",), tolerance="gelu",
    ),
    Section(
        _V + "mlp.out", "second matrix", "tokens D",
        (r"vision: \gamma_2",), "vision.MLP.forward: self.c_proj(", (_V + "mlp.hidden",),
    ),
    Section(
        _V + "out", "stream after the layer, with its layer scale", "tokens D",
        (r"vision: \gamma_2",), "vision.LayerScale.forward: torch.addcmul(",
        (_V + "after_attention", _V + "mlp.out"),
    ),
]  # fmt: skip
_FEATURES = [
    Section(
        "vision.merged", "class token dropped, the patches of each tile side by side", "tiles merged",
        (r"vision: y = W_{out}",), "vision.VisionModel.encode: x = x[:, 1:]", ("vision.{last}.out",),
    ),
    Section(
        "vision.hidden", "first matrix towards the text model, and exact GELU", "tiles hidden",
        (r"vision: y = W_{out}",), "vision.VisionModel.encode: F.gelu(self.proj_in(x))", ("vision.merged",),
        tolerance="gelu",
    ),
    Section(
        "vision.features", "one feature an image token", "tiles D_text",
        (r"vision: y = W_{out}",), "vision.VisionModel.encode: return self.proj_out(", ("vision.hidden",),
    ),
]  # fmt: skip
_EMBEDDING = [
    Section(
        "embedding.rows", "rows of the embedding table", "B T D",
        (), "model.TextModel.embed_tokens: e = self.embed(ids)", tolerance="given",
    ),
    Section(
        "embedding.out", "rows through the embedding norm; image features at image tokens", "B T D",
        (r"residual: \mathrm{RMSNorm}_w(x) =",), "model.TextModel.embed_tokens: return rms_norm(",
        ("embedding.rows", "vision.features"),
    ),
]  # fmt: skip
_LAYER = [
    Section(
        "residual.{i}.attn.weights", "softmax over the sources of the depth state, a query each (full layers: q, k, v)",
        "B T q n", (r"residual: \mathrm{score}_j =", r"residual: \mathrm{mix} ="), "residual.mix: scores = normed @",
        _SOURCES, kind="weights", derived=True,
    ),
    Section(
        "residual.{i}.attn.mix", "mixtures of the normalised sources, before the attention's norms", "B T q D",
        (r"residual: \mathrm{mix} =",), "residual.mix: return scores.softmax",
        (*_SOURCES, "residual.{i}.attn.weights"),
    ),
    *(
        Section(
            _A + name, f"mixture through its RMSNorm: what {reads}", "B T D",
            (r"residual: \mathrm{RMSNorm}_w(x) =",), "residual.mix_and_norm: rounded(rms_norm(",
            ("residual.{i}.attn.mix",),
        )
        for name, reads in [
            ("input", "the attention reads (sliding layers)"),
            ("input_q", "queries, sink and gate read (full layers)"),
            ("input_k", "keys read (full layers)"),
            ("input_v", "values read (full layers)"),
        ]
    ),
    Section(
        _A + "q_projected", "query matrix", "B T H d",
        (r"attention: s_q \odot W_q",), "attention.Attention.forward: q = scaled_l2_clip(",
        (f"{_A}input|{_A}input_q",),
    ),
    Section(
        _A + "q_clipped", "queries after learned scale and clip (full layers)", "B T H d",
        (r"attention: s_q \odot W_q", r"attention: \mathrm{clip}_c(u) ="), "attention.scaled_l2_clip: return rounded(",
        (_A + "q_projected",), derived=True,
    ),
    Section(
        _A + "q", "queries: learned scale, then clip; full layers: then log scaling with the position", "B T H d",
        (r"attention: s_q \odot W_q", r"attention: \mathrm{clip}_c(u) =", r"attention: \tau(t)"),
        "attention.Attention.forward: q = scaled_l2_clip(", (_A + "q_clipped",),
    ),
    Section(
        _A + "r_projected", "relative-state matrix", "B T H R",
        (r"attention: s_q \odot W_q",), "attention.Attention.forward: r = scaled_l2_clip(",
        (f"{_A}input|{_A}input_q",),
    ),
    Section(
        _A + "r_clipped", "relative states after learned scale and clip (full layers)", "B T H R",
        (r"attention: s_q \odot W_q", r"attention: \mathrm{clip}_c(u) ="), "attention.scaled_l2_clip: return rounded(",
        (_A + "r_projected",), derived=True,
    ),
    Section(
        _A + "r", "relative states: learned scale, then clip; full layers: then log scaling", "B T H R",
        (r"attention: s_q \odot W_q", r"attention: \mathrm{clip}_c(u) =", r"attention: \tau(t)"),
        "attention.Attention.forward: r = scaled_l2_clip(", (_A + "r_clipped",),
    ),
    *(
        Section(
            f"{_A}{x}_projected", f"{what} matrix", "B T G d", (r"attention: \mathrm{Conv}_k(W_k",),
            "attention.Attention.project_key_value: kv = torch.cat([self.wk_dv", (f"{_A}input|{_A}input_{x}",),
        )
        for x, what in [("k", "key"), ("v", "value")]
    ),
    *(
        Section(
            f"{_A}{x}_taps", f"dynamic taps of the {what} convolution (full layers), tap 0 = current token", "B T G K",
            (r"short_conv: \mathrm{tap}_j(t, c) = \mathrm{static}",),
            "attention.Attention.project_key_value: taps = torch.cat(", (f"{_A}input_{x}",), tolerance="narrow",
        )
        for x, what in [("k", "key"), ("v", "value")]
    ),
    *(
        Section(
            f"{_A}{x}_conv", f"short convolution of the {what}s; full layers: with dynamic taps", "B T G d",
            (r"short_conv: \mathrm{tap}_j[c] \, u_{t-j}", r"short_conv: \mathrm{tap}_j(t, c) \, u_{t-j}"),
            "short_conv._convolve: return rounded(", (f"..{_A}{x}_projected", f"{_A}{x}_taps?"),
        )
        for x, what in [("k", "key"), ("v", "value")]
    ),
    Section(
        _A + "k", "keys, as they are cached: clip", "B T G d",
        (r"attention: \mathrm{Conv}_k(W_k", r"attention: \mathrm{clip}_c(u) ="),
        "attention.Attention.project_key_value: return l2_clip(k", (_A + "k_conv",),
    ),
    Section(
        _A + "v", "values, as they are cached: RMS without a weight", "B T G d",
        (r"attention: \mathrm{Conv}_k(W_k",), "attention.Attention.project_key_value: rounded(rms(v", (_A + "v_conv",),
    ),
    Section(
        _A + "sink", "sink logits", "B T H",
        (r"attention: z = W_z x_q",), "attention.Attention.forward: self.attn_sink_proj(x_q)",
        (f"{_A}input|{_A}input_q",), tolerance="narrow",
    ),
    Section(
        _A + "gate", "gate logits", "B T H d",
        (r"attention: \sigma(W_\gamma",), "attention.Attention.forward: self.gate_attn(x_q)",
        (f"{_A}input|{_A}input_q",),
    ),
    Section(
        _A + "bias", "relative bias of every visible key", "B T H S",
        (r"attention: b_{t,s} =",), "attention.relative_bias: return per_distance.gather(", (_A + "r",),
        on_request=True, derived=True,
    ),
    Section(
        _A + "probabilities", "softmax over keys and sink, the sink's share dropped", "B T H S",
        (r"attention: p = \mathrm{softmax}",), "attention.softmax_with_sink: return rounded(logits.softmax",
        (_A + "bias", _A + "q", f"..{_A}k", _A + "sink"), kind="weights", on_request=True, tolerance="attention",
    ),
    Section(
        _A + "context", "values summed with these probabilities, before the gate", "B T H d",
        (r"attention: \sigma(W_\gamma",), "attention.attend: outputs.append(",
        (_A + "probabilities", f"..{_A}v"), on_request=True, tolerance="attention",
    ),
    Section(
        _A + "gated", "attention output through the sigmoid gate, before the output matrix", "B T H d",
        (r"attention: p = \mathrm{softmax}", r"attention: \sigma(W_\gamma"),
        "attention.attend: return rounded(wide(o) * wide(gate).sigmoid()",
        (_A + "context", _A + "gate"), tolerance="attention",
    ),
    Section(
        _A + "out", "output matrix of the attention", "B T D",
        (r"attention: \sigma(W_\gamma",), "attention.Attention.forward: return self.wo_ud(o)", (_A + "gated",),
    ),
    Section(
        "layer.{i}.conv_attn", "short convolution of the attention's output", "B T D",
        (r"short_conv: \mathrm{tap}_j[c] \, u_{t-j}",), "short_conv._convolve: return rounded(", (f"..{_A}out",),
    ),
    Section(
        "layer.{i}.after_attention", "running sum after the attention; a block boundary starts it anew", "B T D",
        (r"model: \text{at a block boundary:}",), "model.DecoderLayer.forward: depth = (depth.close_block()",
        ("layer.{i-1}.out|embedding.out", "layer.{i}.conv_attn"),
    ),
    Section(
        "residual.{i}.mlp.weights", "softmax over the sources of the depth state", "B T 1 n",
        (r"residual: \mathrm{score}_j =", r"residual: \mathrm{mix} ="), "residual.mix: scores = normed @",
        (*_SOURCES, "layer.{i}.after_attention"), kind="weights", derived=True,
    ),
    Section(
        "residual.{i}.mlp.mix", "mixture of the normalised sources, before the MoE's norm", "B T 1 D",
        (r"residual: \mathrm{mix} =",), "residual.mix: return scores.softmax",
        (*_SOURCES, "layer.{i}.after_attention", "residual.{i}.mlp.weights"),
    ),
    Section(
        _M + "input", "mixture through its RMSNorm: what router and experts read", "B T D",
        (r"residual: \mathrm{RMSNorm}_w(x) =",), "residual.mix_and_norm: rounded(rms_norm(",
        ("residual.{i}.mlp.mix",),
    ),
    Section(
        _M + "scores", "sigmoid scores of all experts, without the correction bias", "B T E",
        (r"moe: e = \sigma(W_r h)",), "moe.route: scores = F.linear(", (_M + "input",), derived=True,
    ),
    Section(
        _M + "biased", "scores with the correction bias: what is ranked", "B T E",
        (r"moe: e = \sigma(W_r h)",), "moe.route: ids = (scores + wide(bias))", (_M + "scores",), derived=True,
    ),
    Section(
        _M + "chosen", "ids of the chosen experts, ascending", "B T k",
        (r"moe: e = \sigma(W_r h)",), "moe.route: ids = (scores + wide(bias))", (_M + "biased",),
        kind="choices",
    ),
    Section(
        _M + "weights", "routing weights: scores without the bias, normalised, scaled once", "B T k",
        (r"moe: w_i =",), "moe.route: return chosen * scale", (_M + "scores", _M + "chosen"),
        kind="weights",
    ),
    *(
        Section(
            _M + name, f"{name} rows of the chosen experts' first product", "B T k I",
            (r"moe: (g, u) =",), "moe.experts: gate_up = torch.cat(", (_M + "input", _M + "chosen"),
            on_request=True, derived=True,
        )
        for name in ("gate", "up")
    ),
    Section(
        _M + "activation", "soft-capped SwiGLU, as the second product reads it", "B T k I",
        (r"moe: (g, u) =", r"moe: \mathrm{cap}_c(x)"), "moe.softcapped_swiglu: return rounded(softcap(g",
        (_M + "gate", _M + "up"), on_request=True, tolerance="experts",
    ),
    Section(
        _M + "expert_out", "each chosen expert's output, before its weight", "B T k D",
        (r"moe: (g, u) =",), "moe.experts: y = torch.cat([F.linear(xs, w2",
        (_M + "activation", _M + "chosen"), on_request=True, tolerance="experts",
    ),
    Section(
        _M + "out", "weighted sum of the chosen experts", "B T D",
        (r"moe: (g, u) =",), "moe.experts: return rounded((wide(y)",
        (_M + "expert_out", _M + "weights"), tolerance="experts",
    ),
    Section(
        "layer.{i}.conv_mlp", "short convolution of the MoE's output", "B T D",
        (r"short_conv: \mathrm{tap}_j[c] \, u_{t-j}",), "short_conv._convolve: return rounded(", (f"..{_M}out",),
    ),
    Section(
        "layer.{i}.out", "running sum after the layer, rounded once", "B T D",
        (r"model: \mathrm{Conv}(\mathrm{MoE}",), "model.DecoderLayer.forward: return depth.add(z)",
        ("layer.{i}.after_attention", "layer.{i}.conv_mlp"),
    ),
]  # fmt: skip
_OUTPUT = [
    Section(
        "output.weights", "softmax over the sources of the depth state, at the end", "B T 1 n",
        (r"residual: \mathrm{score}_j =", r"residual: \mathrm{mix} ="), "residual.mix: scores = normed @",
        ("embedding.out", "layer.{*}.out"), kind="weights", derived=True,
    ),
    Section(
        "output.mix", "mixture of the normalised sources, before the last norm", "B T 1 D",
        (r"residual: \mathrm{mix} =",), "residual.mix: return scores.softmax",
        ("embedding.out", "layer.{*}.out", "output.weights"),
    ),
    Section(
        "output.hidden", "mixture through the last RMSNorm: what the unembedding reads", "B T D",
        (r"model: \mathrm{logits} =",), "residual.mix_and_norm: rounded(rms_norm(", ("output.mix",),
    ),
    Section(
        "output.uncapped", "logits before their soft cap", "B T V",
        (r"model: \mathrm{logits} =",), "model.TextModel.logits: return softcap(", ("output.hidden",),
        on_request=True, derived=True,
    ),
    Section(
        "logits", "soft-capped logits of the used vocabulary", "B T V",
        (r"model: \mathrm{logits} =", r"moe: \mathrm{cap}_c(x)"), "model.TextModel.logits: return softcap(",
        ("output.uncapped",),
    ),
]  # fmt: skip

_GROUPS = [_PICTURES, _PICTURE_LAYER, _FEATURES, _EMBEDDING, _LAYER, _OUTPUT]
SECTIONS = [section for group in _GROUPS for section in group]
_PLACE = {s.name: (g, n) for g, group in enumerate(_GROUPS) for n, s in enumerate(group)}
_BY_SKELETON = {s.name.replace("{i}", "#"): s for s in SECTIONS}
_STEP = re.compile(r"step\.([1-9]\d*)\.")


class Place(NamedTuple):
    """A recorded name taken apart: step 0 is the prompt's pass; layer None where there is none."""

    step: int
    section: Section
    layer: int | None


@cache
def parse(name: str) -> Place:
    """The section that a recorded name belongs to.

    Raises:
        InputError: for a name that is none of this table's.
    """
    step = _STEP.match(name)
    bare = name[step.end() :] if step else name
    numbers = re.findall(r"(?<=\.)\d+(?=\.)", bare)
    section = _BY_SKELETON.get(re.sub(r"(?<=\.)\d+(?=\.)", "#", bare))
    if section is None:
        raise InputError(f"section {name!r}: unknown, expected a name like layer.17.attention.q or step.1.moe.3.chosen")
    return Place(int(step[1]) if step else 0, section, int(numbers[0]) if numbers else None)


def name_of(section: Section | str, layer: int | None = None, step: int = 0) -> str:
    """The recorded name of a section (or of its pattern)."""
    name = section if isinstance(section, str) else section.name
    name = name if layer is None else name.replace("{i}", str(layer))
    return f"step.{step}.{name}" if step else name


def order(name: str) -> tuple[int, int, int, int]:
    """Sort key of a recorded name: data-flow order. `sorted(names, key=order)`."""
    step, section, layer = parse(name)
    group, place = _PLACE[section.name]
    return step, group, layer or 0, place


def inputs_of(
    name: str, recorded: Collection[str], compared: Collection[str] | None = None
) -> tuple[list[str], list[str]]:
    """The nearest sections from which a section is computed, and those that lie between; both in data-flow order.

    An input that is not there to compare is replaced by its own inputs.

    Args:
        recorded: names of the trace that `name` is from.
        compared: those among them that there are to compare; None: all.
    """
    compared = recorded if compared is None else compared
    found, between, waiting = set(), set(), _direct_inputs(name, recorded)
    while waiting:
        other = waiting.pop()
        if other in compared:
            found.add(other)
        elif other not in between:
            between.add(other)
            waiting += _direct_inputs(other, recorded)
    return sorted(found, key=order), sorted(between, key=order)


def _direct_inputs(name: str, recorded: Collection[str]) -> list[str]:
    step, section, layer = parse(name)
    names = []
    for pattern in section.inputs:
        steps = range(step + 1) if pattern.startswith("..") else [step]
        choices = [_concrete(p, layer, recorded) for p in pattern.removeprefix("..").removesuffix("?").split("|")]
        for s in steps:
            sets = [[name_of(bare, step=s) for bare in choice] for choice in choices if choice]
            there = [names_of for names_of in sets if any(n in recorded for n in names_of)]
            names += (there or ([] if pattern.endswith("?") else sets) or [[]])[0]
    return names


def _concrete(pattern: str, layer: int | None, recorded: Collection[str]) -> list[str]:
    """The bare names that a pattern of `inputs` means for a section of that layer."""
    if "{i-1}" in pattern:
        return [pattern.replace("{i-1}", str(layer - 1))] if layer else []
    if "{" not in pattern or "{i}" in pattern:
        return [name_of(pattern, layer)]
    last = layer if "{<i}" in pattern else _layers(pattern, recorded)  # all layers before this one, or all there are
    first = max(0, last - 1) if "{last}" in pattern else 0
    return [re.sub(r"\{.*\}", str(j), pattern) for j in range(first, last)]


def _layers(pattern: str, recorded: Collection[str]) -> int:
    """One more than the highest layer of the text model, or of the encoder, that recorded names tell of."""
    stem = "vision" if pattern.startswith("vision") else "layer|residual|moe"
    found = (re.match(rf"(?:step\.\d+\.)?(?:{stem})\.(\d+)\.", name) for name in recorded)
    return max((int(match[1]) for match in found if match), default=-1) + 1


def equations(section: Section) -> list[str]:
    """The LaTeX of a section's equations, from the docstrings of the modules that compute it."""
    found = []
    for anchor in section.equations:
        module, _, text = anchor.partition(": ")
        blocks = re.findall(r"\$\$(.+?)\$\$", import_module(f"inkling_ref.{module}").__doc__, flags=re.DOTALL)
        (block,) = [block for block in blocks if text in block]
        found.append(" ".join(block.split()))
    return found


class Source(NamedTuple):
    """A line of source: `file` relative to the folder of the package, line number from 1, text, and the function."""

    file: str
    line: int
    text: str
    function: str


def source(section: Section) -> Source:
    """The line that computes a section, found in the source as it is now."""
    path, _, text = section.source.partition(": ")
    module_name, *attributes = path.split(".")
    function = module = import_module(f"inkling_ref.{module_name}")
    for attribute in attributes:
        function = getattr(function, attribute)
    function = inspect.unwrap(function)
    lines, first = inspect.getsourcelines(function)
    (line,) = [n for n, code in enumerate(lines) if text in code]
    file = Path(module.__file__)
    return Source(f"{file.parent.name}/{file.name}", first + line, lines[line].strip(), path)
