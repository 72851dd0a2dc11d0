"""Single faults of a port, each as a change to a copy of a model, and the section that `compare` must name for it.

A fault replaces an operation of the model's `Backend`, a function of a component's module, weights, the config, or
what is fed in. The model is small, with every kind of section: two sliding layers, a full one, a block boundary between
them, a picture encoder of two layers, experts whose weights have been through NVFP4 (layers 0, 1) and MXFP8 (2).
"""

import copy
import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
from helpers import random_ids, random_model, unchecked
from torch import Tensor, nn
from torch.nn import functional as F

from inkling_ref import attention, cache, model, moe, quantization, residual, short_conv, vision
from inkling_ref.backends import Backend
from inkling_ref.config import FULL, SLIDING, InklingConfig, TextConfig, VisionConfig
from inkling_ref.measure.trace import Trace, trace
from inkling_ref.vision import process_images

CONFIG = InklingConfig(
    TextConfig(
        layer_types=[SLIDING, SLIDING, FULL], num_hidden_layers=3, n_layers_per_attn_res_block=2, hidden_size=64,
        num_attention_heads=10, num_key_value_heads=5, head_dim=11, swa_num_attention_heads=6,
        swa_num_key_value_heads=3, swa_head_dim=14, d_rel=9, sliding_window_size=8, rel_extent=13,
        n_routed_experts=12, num_experts_per_tok=4, moe_intermediate_size=32, vocab_size=83, unpadded_vocab_size=71,
        qk_l2_clip_threshold=3.5, rel_l2_clip_threshold=2.5, log_scaling_n_floor=4, log_scaling_alpha=0.4,
        mlp_gate_softcap=1.5, mlp_up_softcap=2.0, final_logit_softcapping=9.0, route_scale=2.5, eos_token_id=None,
    ),
    VisionConfig(48, 2, 4, 52, patch_size=3, posemb_grid_size=7, projection_hidden_dim=29),
    image_token_id=70,
)  # fmt: skip
ROWS, TOKENS = 2, 31
NVFP4_LAYERS, MXFP8_LAYERS = (0, 1), (2,)


def stored(weight: Tensor, layer: int) -> tuple[Tensor, ...]:
    """What a checkpoint would hold of an expert matrix."""
    return quantization.nvfp4_quantize(weight) if layer in NVFP4_LAYERS else quantization.mxfp8_quantize(weight)


def expert_weights(m: nn.Module, layers: tuple[int, ...], decode: Callable[..., Tensor]) -> None:
    """Replace the experts' matrices of some layers by what `decode` makes of their stored form."""
    for i in layers:
        for name in ("w13_weight", "w2_weight"):
            weight = getattr(m.llm.layers[i].mlp.experts, name)
            weight.data = decode(*stored(weight.data.float(), i)).to(weight.dtype)


def healthy(dtype: torch.dtype = torch.float32) -> nn.Module:
    """The same weights in every dtype: those of a checkpoint in 16 bits, whose experts decode exactly."""
    m = random_model(CONFIG, seed=3, dtype=torch.bfloat16)
    expert_weights(m, NVFP4_LAYERS, quantization.nvfp4_dequantize)
    expert_weights(m, MXFP8_LAYERS, quantization.mxfp8_dequantize)
    return m.cast(dtype)


def inputs() -> dict[str, Any]:
    """Two rows, two pictures (2 x 3 and 3 x 1 tiles), and a decoding step."""
    ids, side = random_ids(ROWS, TOKENS, seed=5, below=70), CONFIG.vision.tile_size
    generator = torch.Generator().manual_seed(5)
    sizes = [(2 * side, 3 * side), (3 * side - 1, side)]
    images = [torch.randint(256, (*size, 3), generator=generator, dtype=torch.uint8).numpy() for size in sizes]
    pixel_values, image_grid_thw = process_images(images, CONFIG.vision)
    ids[0, 4:10] = ids[1, 12:15] = CONFIG.image_token_id
    decode = random_ids(ROWS, 1, seed=6, below=70)
    return {"input_ids": ids, "pixel_values": pixel_values, "image_grid_thw": image_grid_thw, "decode": decode}


@dataclass
class Fault:
    """One mistake.

    Attributes:
        name: what the port does wrong.
        section: the first section that is wrong, as `compare` must name it.
        functions: `module.name` below the package (or a module object and name) -> wrong function of the right one.
        backend: operation -> wrong function of the right one.
        change: makes the model's weights or modules wrong, in place.
        feed: makes the inputs wrong.
        config: makes the text config wrong.
    """

    name: str
    section: str
    functions: dict[tuple[Any, str], Callable] = field(default_factory=dict)
    backend: dict[str, Callable] = field(default_factory=dict)
    change: Callable[[nn.Module], None] = lambda m: None
    feed: Callable[[dict], dict] = lambda kwargs: kwargs
    config: dict[str, Any] = field(default_factory=dict)

    @contextmanager
    def port(self, right: nn.Module) -> Iterator[nn.Module]:
        """A copy of a model that has the fault, within the context."""
        wrong = {name: make(getattr(Backend(), name)) for name, make in self.backend.items()}
        config = replace(right.config, text=replace(right.config.text, **self.config))
        port = model.Inkling(config, Backend(**wrong)).eval().requires_grad_(False)
        port.load_state_dict(copy.deepcopy(right.state_dict()), assign=True)
        with ExitStack() as stack, torch.no_grad():
            self.change(port)
            for (owner, name), make in self.functions.items():
                stack.enter_context(mock.patch.object(owner, name, make(getattr(owner, name))))
            yield port

    def trace(self, right: nn.Module) -> Trace:
        with unchecked(), self.port(right) as port:
            return trace(port, sections=["all"], **self.feed(inputs()))


# --- Attention -----------------------------------------------------------------------------------------------------


def sink_twice(_):
    def softmax(scores, sink):
        logits = residual.wide(torch.cat([scores, sink[..., None], sink[..., None]], dim=-1))
        return logits.softmax(dim=-1)[..., :-2].to(scores.dtype)

    return softmax


def no_sink(right):
    return lambda scores, sink: right(scores, torch.full_like(sink, -1e4))


def sink_as_base_two(right):
    return lambda scores, sink: right(scores, sink * math.log(2))


def last_bias_repeats(right):
    def bias(r, profiles, distance):
        X = profiles.shape[-1]
        far = distance.clamp(max=X - 1) if CONFIG.text.rel_extent == X else distance
        return right(r, profiles, far)

    return bias


def bias_late(right):
    return lambda r, profiles, distance: right(r, profiles, distance - 1)


def window_plus(n):
    def make(right):
        def attend(q, k, v, r, profiles, sink, gate, offsets, window=None, *rest, **more):
            return right(q, k, v, r, profiles, sink, gate, offsets, window and window + n, *rest, **more)

        return attend

    return make


def scale_by_size(right):
    return lambda q, *rest, **more: right(q / math.sqrt(q.shape[-1]), *rest, **more)


def heads_interleaved(right):
    def attend(q, k, v, *rest, **more):
        heads = torch.arange(q.shape[2]) % k.shape[1]
        return right(q, k[:, heads], v[:, heads], *rest, **more)

    return attend


def gate_channel_major(right):
    def attend(q, k, v, r, profiles, sink, gate, *rest, **more):
        H, d = q.shape[2:]
        return right(
            q, k, v, r, profiles, sink, gate.unflatten(-1, (d, H)).transpose(-1, -2).flatten(-2), *rest, **more
        )

    return attend


def gate_by_head(right):
    def attend(q, k, v, r, profiles, sink, gate, *rest, **more):
        H, d = q.shape[2:]
        mean = gate.unflatten(-1, (H, d))[..., :1].expand(*gate.shape[:2], H, d).flatten(-2)
        return right(q, k, v, r, profiles, sink, mean, *rest, **more)

    return attend


def clip_before_scale(_):
    def clip(u, scale, threshold):
        return (attention.l2_clip(residual.wide(u), threshold) * residual.wide(scale)).to(u.dtype)

    return clip


def scale_missing(_):
    return lambda u, scale, threshold: attention.l2_clip(u, threshold)


def clip_over_heads(_):
    def clip(u, scale, threshold):
        return (
            attention.l2_clip((residual.wide(u) * residual.wide(scale)).flatten(-2), threshold).view_as(u).to(u.dtype)
        )

    return clip


def clip_of_keys_missing():
    """Queries keep theirs: they are clipped by the function that is replaced second."""
    right = attention.l2_clip
    queries = lambda _: lambda u, scale, c: right(residual.wide(u) * residual.wide(scale), c).to(u.dtype)  # noqa: E731
    return {(attention, "l2_clip"): lambda _: lambda u, c: u, (attention, "scaled_l2_clip"): queries}


def late_log_scale(right):
    return lambda u, positions, floor, alpha: right(u, positions - 1, floor, alpha)


def only_queries_scale(right):
    return lambda u, *rest: u if u.shape[-1] == CONFIG.text.d_rel else right(u, *rest)


def swapped(first: str, second: str):
    """Exchange two parameters (of equal shape) in every layer that has them."""

    def change(m):
        for layer in m.llm.layers:
            a, b = (dict(layer.named_parameters()).get(name) for name in (first, second))
            if a is not None and a.shape == b.shape:
                a.data, b.data = b.data, a.data

    return change


def queries_channel_major(m):
    for layer in m.llm.layers:
        weight, sizes = layer.attn.wq_du.weight, layer.attn.sizes
        weight.data = weight.data.unflatten(0, (-1, sizes.num_heads)).transpose(0, 1).flatten(0, 1).contiguous()


def profiles_reversed(m):
    for layer in m.llm.layers:
        layer.attn.rel_logits_proj.proj.data = layer.attn.rel_logits_proj.proj.data.flip(-1)


# --- Convolutions --------------------------------------------------------------------------------------------------


def convolution(own: float = 1.0, taps: int | None = None, dynamic: bool = False):
    """Another weight of the convolution's own residual, another number of terms under the root."""

    def make(right):
        def convolve(u, weights, scale, document_position):
            is_dynamic = weights.dim() == 4
            if is_dynamic != dynamic:
                return right(u, weights, scale, document_position)
            weights = weights.clone()
            weights[..., -1] += own - 1
            return right(u, weights, scale if taps is None else 1 / math.sqrt(taps), document_position)

        return convolve

    return make


def static_reversed(right):
    return lambda u, weight, *rest: right(u, weight.flip(-1), *rest)


def looks_ahead(right):
    def conv(u, weight, *rest):
        return right(F.pad(u, (0, 0, 0, 1))[:, 1:], weight, *rest)

    return conv


def dynamic_static_reversed(right):
    return lambda u, taps, static, *rest: right(u, taps, static.flip(0), *rest)


def dynamic_taps_missing(right):
    return lambda u, taps, static, *rest: right(u, torch.zeros_like(taps), static, *rest)


def history_zero(right):
    """Every call starts from zeros, as the first may."""

    def with_history(x, past, state):
        right(x, past, state)
        return F.pad(x, (0, 0, past, 0))

    return with_history


# --- Depth state ---------------------------------------------------------------------------------------------------


def values_not_normalised(_):
    def mix(sources, queries, eps):
        scores = residual.rms(sources, eps) @ (residual.wide(queries) / math.sqrt(queries.shape[-1])).T
        return scores.softmax(dim=-2).transpose(-1, -2) @ residual.wide(sources)

    return mix


def scores_not_scaled(right):
    return lambda sources, queries, eps: right(sources, queries * math.sqrt(queries.shape[-1]), eps)


def running_sum_left_out(right):
    def mix(sources, queries, eps):
        return right(sources[:, :, :-1] if sources.shape[2] > 1 else sources, queries, eps)

    return mix


def norm_with_one_added(right):
    return lambda x, weight, eps: right(x, weight + 1, eps)


def mixtures_permuted(m):
    for query in m.llm.attn_res.attn_queries:
        if query.dim() == 2:
            query.data = query.data.roll(1, dims=0)


def mlp_query_of_the_layer_before(m):
    queries = m.llm.attn_res.mlp_queries
    for i, query in reversed(list(enumerate(queries))):
        query.data = queries[max(0, i - 1)].data.clone()


def unmixed_output(m):
    right = m.llm.ops.mix_and_norm
    m.llm.ops = replace(m.llm.ops, mix_and_norm=lambda s, q, *rest: right(s[:, :, -1:], q, *rest))


def ones(*names):
    def change(m):
        for name, p in m.named_parameters():
            if name.endswith(names):
                p.data.fill_(1)

    return change


# --- Experts -------------------------------------------------------------------------------------------------------


def activation(formula):
    def make(_):
        def swiglu(gate_up, gate_cap, up_cap):
            g, u = residual.wide(gate_up).view(len(gate_up), -1, 2).unbind(-1)
            return formula(g, u, gate_cap, up_cap).to(gate_up.dtype)

        return swiglu

    return make


cap = moe.softcap


def routing(change):
    """Wrong routing: `change` gets scores, bias, k and scale, and returns ids and weights."""

    def make(_):
        def route(h, weight, bias, k, scale, normalize=True):
            logits = F.linear(residual.wide(h), residual.wide(weight))
            return change(logits, residual.wide(bias), k, scale)

        return route

    return make


def _best(scores, k):
    return scores.sort(dim=-1, descending=True, stable=True).indices[:, :k]


def _weigh(chosen, scale):
    return chosen / chosen.sum(dim=-1, keepdim=True) * scale


def bias_in_weights(logits, bias, k, scale):
    ids = _best(logits.sigmoid() + bias, k)
    return _weigh((logits.sigmoid() + bias).gather(-1, ids), scale), ids


def scale_twice(logits, bias, k, scale):
    ids = _best(logits.sigmoid() + bias, k)
    return _weigh(logits.sigmoid().gather(-1, ids), scale * scale), ids


def not_normalised(logits, bias, k, scale):
    ids = _best(logits.sigmoid() + bias, k)
    return logits.sigmoid().gather(-1, ids) * scale, ids


def softmax_scores(logits, bias, k, scale):
    ids = _best(logits.softmax(dim=-1) + bias, k)
    return _weigh(logits.softmax(dim=-1).gather(-1, ids), scale), ids


def softmax_over_chosen(logits, bias, k, scale):
    ids = _best(logits.sigmoid() + bias, k)
    return logits.gather(-1, ids).softmax(dim=-1) * scale, ids


def bias_unused(logits, bias, k, scale):
    ids = _best(logits.sigmoid(), k)
    return _weigh(logits.sigmoid().gather(-1, ids), scale), ids


def weight_at_the_wrong_end(right):
    """Weights sorted by expert, ids by score."""
    return lambda h, weights, ids, *rest, **more: right(h, weights.gather(-1, ids.argsort(-1)), ids, *rest, **more)


def halves(m):
    for layer in m.llm.layers:
        w = layer.mlp.experts.w13_weight
        w.data = torch.stack(w.data.chunk(2, dim=1), dim=2).flatten(1, 2)


def next_experts_second_matrix(m):
    for layer in m.llm.layers:
        layer.mlp.experts.w2_weight.data = layer.mlp.experts.w2_weight.data.roll(1, dims=0)


def nibbles_swapped(codes, scales, amax, denominator):
    return quantization.nvfp4_decode((codes << 4) | (codes >> 4), scales, amax, denominator)


def scales_as_e8m0(codes, scales, amax, denominator):
    return quantization.nvfp4_decode(codes, quantization.e8m0_value(scales.view(torch.uint8)), amax, denominator)


def other_denominator(codes, scales, amax, denominator):
    return quantization.nvfp4_decode(codes, scales, amax, torch.tensor(1536.0))


def amax_of_the_first(codes, scales, amax, denominator):
    return quantization.nvfp4_decode(codes, scales, amax[:1].expand_as(amax), denominator)


def groups_of_32(codes, scales, amax, denominator):
    wide = scales.view(torch.uint8)[..., ::2].repeat_interleave(2, dim=-1).view(scales.dtype)
    return quantization.nvfp4_decode(codes, wide, amax, denominator)


def other_exponent_bias(values, scales):
    return quantization.mxfp8_decode(values, scales - 1)


def decoded(layers, decode):
    return lambda m: expert_weights(m, layers, decode)


# --- Pictures ------------------------------------------------------------------------------------------------------


def tiles_transposed(kwargs):
    return {**kwargs, "pixel_values": kwargs["pixel_values"].transpose(1, 2).contiguous()}


def colours_reversed(kwargs):
    return {**kwargs, "pixel_values": kwargs["pixel_values"].flip(-1)}


def pixels_from_zero_to_one(kwargs):
    return {**kwargs, "pixel_values": (kwargs["pixel_values"] + 1) / 2}


def columns_before_rows(right):
    def patchify(tiles, merge):
        patch = tiles.shape[2] // merge
        return right(tiles, merge).unflatten(-1, (patch, patch, 3)).transpose(-2, -3).flatten(-3)

    return patchify


def patches_down_then_right(right):
    def patchify(tiles, merge):
        return right(tiles, merge).unflatten(1, (-1, merge, merge)).transpose(2, 3).flatten(1, 3)

    return patchify


def grid_transposed(right):
    return lambda place, size, side, *rest: right(place.flip(-1), size.flip(-1), side, *rest)


def corners_aligned(_):
    def weights(place, size, side, dtype=torch.float32):
        line = torch.arange(side)
        centre = place.double() * (side - 1) / (size[:, None] - 1).clamp(min=1)
        row, column = (1 - (centre[..., None] - line).abs()).clamp(min=0).to(dtype).unbind(2)
        return torch.einsum("npi,npj->npij", row, column).flatten(2)

    return weights


def class_token_among_the_patches(right):
    def angles(place, head_dim, theta):
        turned = right(place, head_dim, theta)
        return torch.cat([turned[:, 1:2], turned[:, 1:]], dim=1)

    return angles


def patches_from_zero(right):
    return lambda place, head_dim, theta: right(place - 1, head_dim, theta)


def rows_turn_first(right):
    return lambda place, head_dim, theta: right(place.flip(-1), head_dim, theta)


def rotated_by_halves(_):
    def rotate(x, cos, sin):
        first, second = residual.wide(x).chunk(2, dim=-1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)

    return rotate


def gelu(**how):
    """`torch.nn.functional`, as `vision` sees it, with another GELU."""
    wrong = lambda x: F.gelu(x, **how) if how else F.silu(1.702 * x) / 1.702  # noqa: E731
    return {(vision, "F"): lambda _: SimpleNamespace(**{**vars(F), "gelu": wrong})}


def features_late(right):
    def place(self, e, input_ids, features, counts, state):
        return right(self, e, input_ids, None if features is None else features.roll(1, dims=0), counts, state)

    return place


def features_through_the_norm(right):
    def place(self, e, input_ids, features, counts, state):
        if features is not None:
            features = residual.rms_norm(features, self.llm.embed_norm.weight, 1e-6).to(features.dtype)
        return right(self, e, input_ids, features, counts, state)

    return place


# --- Decoding ------------------------------------------------------------------------------------------------------


def positions_restart(right):
    def steps(lengths, T, device, document_ids=None):
        step = right(lengths, T, device, document_ids)
        return replace(step, positions=step.positions - min(lengths))

    return steps


def cache_loses_the_oldest(right):
    def extend(self, k, v, lengths):
        k, v, offsets, first = right(self, k, v, lengths)
        if not any(lengths) or isinstance(self.keys, cache.Log):
            return k, v, offsets, first
        oldest = [o - min(n, CONFIG.text.sliding_window_size - 1) for o, n in zip(offsets, lengths, strict=True)]
        return k, v, offsets, [n + 1 for n in oldest]

    return extend


def rows_share_a_cache(right):
    def extend(self, k, v, lengths):
        k, v, offsets, first = right(self, k, v, lengths)
        if not any(lengths):
            return k, v, offsets, first
        k = k.clone()
        k[1:, :, : offsets[0]] = k[:1, :, : offsets[0]]
        return k, v, offsets, first

    return extend


_A0, _A2 = "layer.0.attention.", "layer.2.attention."
FAULTS = [
    # attention
    Fault("sink counted twice", _A0 + "probabilities", {(attention, "softmax_with_sink"): sink_twice}),
    Fault("sink left out", _A0 + "probabilities", {(attention, "softmax_with_sink"): no_sink}),
    Fault("sink in base two", _A0 + "probabilities", {(attention, "softmax_with_sink"): sink_as_base_two}),
    Fault("bias past its extent repeats", _A2 + "bias", {(attention, "relative_bias"): last_bias_repeats}),
    Fault("bias one distance late", _A0 + "bias", {(attention, "relative_bias"): bias_late}),
    Fault("profiles reversed", _A0 + "bias", change=profiles_reversed),
    Fault("window one too wide", _A0 + "probabilities", backend={"attend": window_plus(1)}),
    Fault("window one too narrow", _A0 + "probabilities", backend={"attend": window_plus(-1)}),
    Fault("scores divided by the head size", _A0 + "probabilities", backend={"attend": scale_by_size}),
    Fault("key heads interleaved", _A0 + "probabilities", backend={"attend": heads_interleaved}),
    Fault("gate channel-major", _A0 + "gated", backend={"attend": gate_channel_major}),
    Fault("one gate a head", _A0 + "gated", backend={"attend": gate_by_head}),
    Fault("queries channel-major", _A0 + "q_projected", change=queries_channel_major),
    Fault("keys and values exchanged", _A0 + "k_projected", change=swapped("attn.wk_dv.weight", "attn.wv_dv.weight")),
    Fault("clip before the scale", _A0 + "q", {(attention, "scaled_l2_clip"): clip_before_scale}),
    Fault("scale left out", _A0 + "q", {(attention, "scaled_l2_clip"): scale_missing}),
    Fault("clip over all heads", _A0 + "q", {(attention, "scaled_l2_clip"): clip_over_heads}),
    Fault("keys not clipped", _A0 + "k", clip_of_keys_missing()),
    Fault("values not normalised", _A0 + "v", {(attention, "rms"): lambda _: lambda x, eps: x}),
    Fault("log scaling one position late", _A2 + "q", {(attention, "log_scale"): late_log_scale}),
    Fault("log scaling of queries only", _A2 + "r", {(attention, "log_scale"): only_queries_scale}),
    # convolutions
    Fault("own residual dropped", _A0 + "k_conv", {(short_conv, "_convolve"): convolution(own=0)}),
    Fault("own residual doubled", _A0 + "k_conv", {(short_conv, "_convolve"): convolution(own=2)}),
    Fault("static scale 3", _A0 + "k_conv", {(short_conv, "_convolve"): convolution(taps=9)}),
    Fault("dynamic scale sqrt(5)", _A2 + "k_conv", {(short_conv, "_convolve"): convolution(taps=5, dynamic=True)}),
    Fault("static taps reversed", _A0 + "k_conv", backend={"short_conv": static_reversed}),
    Fault("convolution looks ahead", _A0 + "k_conv", backend={"short_conv": looks_ahead}),
    Fault("static part reversed", _A2 + "k_conv", backend={"dynamic_short_conv": dynamic_static_reversed}),
    Fault("dynamic taps left out", _A2 + "k_conv", backend={"dynamic_short_conv": dynamic_taps_missing}),
    Fault(
        "taps of keys and values exchanged", _A2 + "k_taps",
        change=swapped("attn.k_sconv.weight_proj", "attn.v_sconv.weight_proj"),
    ),
    Fault("convolutions exchanged", "layer.0.conv_attn", change=swapped("attn_sconv.weight", "mlp_sconv.weight")),
    # depth state
    Fault("residual block counted in sublayers", "layer.1.after_attention", config={"n_layers_per_attn_res_block": 1}),
    Fault("sources mixed without their norm", "residual.0.mlp.mix", {(residual, "mix"): values_not_normalised}),
    Fault("mixture scores not scaled", "residual.0.mlp.mix", {(residual, "mix"): scores_not_scaled}),
    Fault("running sum not a source", "residual.0.mlp.mix", {(residual, "mix"): running_sum_left_out}),
    Fault("mixtures of q, k, v permuted", "residual.2.attn.weights", change=mixtures_permuted),
    Fault("MoE query of the layer before", "residual.1.mlp.weights", change=mlp_query_of_the_layer_before),
    Fault("output reads the running sum", "output.mix", change=unmixed_output),
    Fault("norm weights plus one", _A0 + "input", {(residual, "rms_norm"): norm_with_one_added}),
    Fault("embedding not normed", "embedding.out", {(model, "rms_norm"): lambda _: lambda x, *rest: residual.wide(x)}),
    Fault("last norm without its weight", "output.hidden", change=ones("llm.norm.weight")),
    Fault("logits not capped", "logits", {(model, "softcap"): lambda _: lambda x, c: x}),
    # experts
    Fault(
        "sigmoid of the capped gate", "moe.0.activation",
        {(moe, "softcapped_swiglu"): activation(lambda g, u, a, b: cap(g, a) * cap(g, a).sigmoid() * cap(u, b))},
    ),
    Fault(
        "gate not capped", "moe.0.activation",
        {(moe, "softcapped_swiglu"): activation(lambda g, u, a, b: F.silu(g) * cap(u, b))},
    ),
    Fault(
        "caps exchanged", "moe.0.activation",
        {(moe, "softcapped_swiglu"): activation(lambda g, u, a, b: cap(g, b) * g.sigmoid() * cap(u, a))},
    ),
    Fault("gate and up read as halves", "moe.0.gate", change=halves),
    Fault("correction bias in the weights", "moe.0.weights", backend={"route": routing(bias_in_weights)}),
    Fault("route scale twice", "moe.0.weights", backend={"route": routing(scale_twice)}),
    Fault("weights not normalised", "moe.0.weights", backend={"route": routing(not_normalised)}),
    Fault("softmax over the chosen", "moe.0.weights", backend={"route": routing(softmax_over_chosen)}),
    Fault("softmax scores", "moe.0.chosen", backend={"route": routing(softmax_scores)}),
    Fault("correction bias unused", "moe.0.chosen", backend={"route": routing(bias_unused)}),
    Fault("weights in another order than ids", "moe.0.out", backend={"experts": weight_at_the_wrong_end}),
    Fault("second matrix of the next expert", "moe.0.expert_out", change=next_experts_second_matrix),
    Fault("nibbles swapped", "moe.0.gate", change=decoded(NVFP4_LAYERS, nibbles_swapped)),
    Fault("E4M3 scale read as E8M0", "moe.0.gate", change=decoded(NVFP4_LAYERS, scales_as_e8m0)),
    Fault("denominator 1536", "moe.0.gate", change=decoded(NVFP4_LAYERS, other_denominator)),
    Fault("amax of the first expert", "moe.0.gate", change=decoded(NVFP4_LAYERS, amax_of_the_first)),
    Fault("NVFP4 scales of 32", "moe.0.gate", change=decoded(NVFP4_LAYERS, groups_of_32)),
    Fault("E8M0 bias 128", "moe.2.gate", change=decoded(MXFP8_LAYERS, other_exponent_bias)),
    # pictures
    Fault("picture transposed", "vision.pixels", feed=tiles_transposed),
    Fault("colours reversed", "vision.pixels", feed=colours_reversed),
    Fault("pixels from 0 to 1", "vision.pixels", feed=pixels_from_zero_to_one),
    Fault("pixels of a patch column by column", "vision.patches", {(vision, "patchify"): columns_before_rows}),
    Fault("patches of a tile down, then right", "vision.patches", {(vision, "patchify"): patches_down_then_right}),
    Fault("position grid transposed", "vision.embedding", {(vision, "position_weights"): grid_transposed}),
    Fault("position grid with aligned corners", "vision.embedding", {(vision, "position_weights"): corners_aligned}),
    Fault("class token at (1, 1)", "vision.0.attention.q", {(vision, "rotary_angles"): class_token_among_the_patches}),
    Fault("patches count from 0", "vision.0.attention.q", {(vision, "rotary_angles"): patches_from_zero}),
    Fault("rows turn the first half", "vision.0.attention.q", {(vision, "rotary_angles"): rows_turn_first}),
    Fault("rotated by halves", "vision.0.attention.q", {(vision, "rotate"): rotated_by_halves}),
    Fault("GELU by tanh", "vision.0.mlp.hidden", gelu(approximate="tanh")),
    Fault("GELU by sigmoid", "vision.0.mlp.hidden", gelu()),
    Fault("layer scale left out", "vision.0.after_attention", change=ones("gamma")),
    Fault("features one token late", "embedding.out", {(model.Inkling, "_place_images"): features_late}),
    Fault("features normed", "embedding.out", {(model.Inkling, "_place_images"): features_through_the_norm}),
    # decoding
    Fault(
        "convolutions forget between calls", "step.1.layer.0.attention.k_conv",
        {(attention, "with_history"): history_zero, (short_conv, "with_history"): history_zero},
    ),
    Fault("positions restart in each call", "step.1.layer.2.attention.q", {(cache.Step, "make"): positions_restart}),
    Fault(
        "sliding cache loses its oldest key", "step.1.layer.0.attention.probabilities",
        {(cache.LayerCache, "extend_key_value"): cache_loses_the_oldest},
    ),
    Fault(
        "rows share a cache", "step.1.layer.0.attention.probabilities",
        {(cache.LayerCache, "extend_key_value"): rows_share_a_cache},
    ),
]  # fmt: skip
