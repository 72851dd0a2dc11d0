"""A trace of the `transformers` model, by hooks: the names of `sections`, to compare with ours.

    from transformers import AutoModelForImageTextToText
    from inkling_ref.measure.adapters import transformers as adapter

    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    model = AutoModelForImageTextToText.from_pretrained(folder, **eager)
    theirs = adapter.trace(model, [[5, 3, 8]], decode=[[7, 7]])

Written for the Inkling2 classes of transformers 5.24. It reads what their modules take in and give out. Attention's own
numbers, probabilities above all, come from their `eager_attention_forward`, the gate, up and activation of single
experts from their eager experts: with other implementations these sections are missing, and nothing else is.

Of their arithmetic nothing is repeated here but what their modules do between two hooks: the sigmoid of the router's
logits, the sum with the correction bias, and the last product of an expert.
"""

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...config import InklingConfig
from ...errors import InputError
from ...quantization import dtype_name
from ..trace import Recording, Run, Trace


@torch.inference_mode()
def trace(
    model: Any,
    input_ids: Any,
    pixel_values: Tensor | None = None,
    image_grid_thw: Tensor | None = None,
    attention_mask: Any = None,
    decode: int | Any = 0,
    layers: Sequence[int] | None = None,
    sections: Sequence[str] | None = None,
    positions: Sequence[int] | None = None,
) -> Trace:
    """As `inkling_ref.trace`, of an Inkling2ForCausalLM or Inkling2ForConditionalGeneration.

    Rows of unequal length run as that model wants them, padded on the left, and are recorded without padding.

    Raises:
        InputError: another model, or an argument that cannot be used.
    """
    if not type(model).__name__.startswith("Inkling2For"):
        raise InputError(f"model: {type(model).__name__}, expected Inkling2ForCausalLM or ForConditionalGeneration")
    config = InklingConfig.from_dict(model.config.to_dict())
    run = Run.read(config, input_ids, attention_mask, decode, layers, sections, positions)
    counts, T, device = [len(row) for row in run.rows], max(map(len, run.rows)), model.device
    padding = [T - n for n in counts]
    recording = _LeftPadded(run.recording, padding)
    images = {} if pixel_values is None else {"pixel_values": pixel_values, "image_grid_thw": image_grid_thw}

    def inputs(ids: list[list[int]], steps: int) -> dict[str, Any]:
        """Ids with a mask over all positions so far, and the ids' own positions."""
        mask = torch.tensor([[0] * n + [1] * (T - n + steps) for n in padding], device=device)
        places = (mask.cumsum(dim=1) - 1).clamp(min=0)[:, -len(ids[0]) :]
        masks = {"attention_mask": mask, "position_ids": places} if any(padding) else {}
        return {"input_ids": torch.tensor(ids, device=device), **masks}

    cache = None
    with _watched(model, config, recording):
        if pixel_values is not None:
            run.recording.put_picture("vision.pixels", pixel_values)
        run.recording.begin(0, [0] * len(counts), counts)
        ids = [[0] * n + row for n, row in zip(padding, run.rows, strict=True)]
        out = model(**inputs(ids, 0), **images, use_cache=run.steps > 0)
        cache = out.cache
        recording.put("logits", out.logits)

        def step(number: int, tokens: list[int]) -> Tensor:
            nonlocal cache
            out = model(**inputs([[token] for token in tokens], number), cache=cache, use_cache=True)
            cache = out.cache
            recording.put("logits", out.logits)
            return out.logits[:, -1]

        decoded = run.decode(out.logits[:, -1], step)
    version = sys.modules["transformers"].__version__
    return run.finish(
        decoded,
        config,
        image_grid_thw,
        implementation=f"transformers {version}",
        dtype=dtype_name(model.dtype),
        device=device.type,
        backend={"attention": model.config._attn_implementation, "experts": model.config._experts_implementation},
        versions={"transformers": version},
    )


class _LeftPadded:
    """Takes sections with the padding on the left, and keys in slots, into a recording that has neither."""

    def __init__(self, recording: Recording, padding: list[int]) -> None:
        self.recording, self.padding = recording, padding

    def put(self, name: str, value: Tensor | Callable[[], Tensor]) -> None:
        """[B, T, ...], or a function that makes it."""

        def aligned() -> Tensor:
            x = value() if callable(value) else value
            if x.shape[1] == 1:  # decoding; or prompts of one token, without padding
                return x
            return torch.stack([row.roll(-n, dims=0) for row, n in zip(x, self.padding, strict=True)])

        self.recording.put(name, aligned)

    def put_by_key(self, name: str, x: Tensor, distance: Tensor) -> None:
        """[B, H, T, slots]; distance: from query 0 to the key of each slot."""
        lengths = self.recording.lengths
        by_position = x.new_zeros(*x.shape[:3], max(lengths) + x.shape[2])
        for row, (length, padding) in enumerate(zip(lengths, self.padding, strict=True)):
            # Query 0 of the prompt's pass is padding where there is any.
            place = length - distance if length else -distance - padding
            real = (place >= 0) & (place < by_position.shape[-1])
            by_position[row, ..., place[real]] = x[row, ..., real]
        self.put(name, by_position.transpose(1, 2))


@contextmanager
def _watched(model: Any, config: InklingConfig, recording: _LeftPadded) -> Iterator[None]:
    """Within, `recording` sees what `model` computes."""
    modeling = sys.modules[type(model).__module__]
    original, put, dtype = modeling.eager_attention_forward, recording.put, model.dtype
    watched: dict[int, Callable[..., None]] = {}  # by module: what sees the operands of its attention

    def eager_attention_forward(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        result, weights = original(module, query, key, value, *args, **kwargs)
        if see := watched.get(id(module)):
            see(query, key, value, weights)
        return result, weights

    with ExitStack() as stack:

        def after(module: nn.Module, see: Callable[[Any], None]) -> None:
            stack.callback(module.register_forward_hook(lambda _, args, result: see(result)).remove)

        def before(module: nn.Module, see: Callable[..., None]) -> None:
            hook = module.register_forward_pre_hook(lambda _, args, named: see(*args, **named), with_kwargs=True)
            stack.callback(hook.remove)

        def mixture(module: Any, stem: str) -> None:
            watched[id(module)] = lambda query, key, value, weights: put(f"{stem}.weights", weights)
            after(module, lambda mixtures: put(f"{stem}.mix", lambda: torch.stack(mixtures, dim=2)))

        setattr(modeling, "eager_attention_forward", eager_attention_forward)  # noqa: B010
        stack.callback(setattr, modeling, "eager_attention_forward", original)
        text = getattr(model.model, "language_model", model.model)
        before(text.embed_tokens.embed_norm, partial(put, "embedding.rows"))
        before(text.layers[0], lambda x, *_, **__: put("embedding.out", x))
        for i, layer in enumerate(text.layers):
            before(layer.mlp_input, lambda _, x, i=i: put(f"layer.{i}.after_attention", x))
            if layer.attention_input is not None:
                mixture(layer.attention_input, f"residual.{i}.attn")
            mixture(layer.mlp_input, f"residual.{i}.mlp")
            _watch_attention(f"layer.{i}.attention.", layer.self_attn, recording, dtype, after, before)
            after(layer.post_attention_convolution, partial(put, f"layer.{i}.conv_attn"))
            _watch_experts(f"moe.{i}.", layer.mlp, recording, after, before)
            after(layer.post_mlp_convolution, partial(put, f"layer.{i}.conv_mlp"))
            after(layer, partial(put, f"layer.{i}.out"))
        mixture(text.final_input, "output")
        after(text.norm, lambda x: put("output.hidden", x.to(dtype)))
        after(model.lm_head, lambda x: put("output.uncapped", x.float()))
        if config.vision is not None:
            _watch_pictures(model.model.vision_tower, recording.recording.put_picture, watched, after, before)
        yield


def _watch_attention(
    name: str, attn: Any, recording: _LeftPadded, dtype: torch.dtype, after: Callable, before: Callable
) -> None:
    put, H, G = recording.put, attn.num_heads, attn.num_key_value_heads
    distances: list[Tensor] = []  # of the call that runs

    def heads(section: str, count: int) -> Callable[[Tensor], None]:
        return lambda x: put(name + section, x.unflatten(-1, (count, -1)))

    def see_inputs(
        hidden_states: Tensor,
        relative_distance: Tensor,
        key_hidden_states: Tensor | None = None,
        value_hidden_states: Tensor | None = None,
        **_: Any,
    ) -> None:
        distances[:] = [relative_distance[0]]
        if key_hidden_states is None:
            put(name + "input", hidden_states)
        else:
            for x, states in zip("qkv", (hidden_states, key_hidden_states, value_hidden_states), strict=True):
                put(f"{name}input_{x}", states)

    before(attn, see_inputs)
    bias = attn.relative_position_bias
    for x, projection, out in [("q", attn.q_proj, attn.q_proj), ("r", bias, bias.norm)]:
        after(projection.linear, heads(f"{x}_projected", H))
        if hasattr(projection.norm, "l2_clip"):
            after(projection.norm.l2_clip, lambda y, x=x: put(f"{name}{x}_clipped", y.to(dtype)))
        after(out, lambda y, x=x: put(name + x, y.transpose(1, 2) if x == "q" else y))
    for x, projection in [("k", attn.k_proj), ("v", attn.v_proj)]:
        after(projection.linear, heads(f"{x}_projected", G))
        if hasattr(projection.sconv, "weight_proj"):
            after(projection.sconv.weight_proj, heads(f"{x}_taps", G))
        after(projection.sconv, heads(f"{x}_conv", G))
        after(projection, lambda y, x=x: put(name + x, y.transpose(1, 2)))
    after(attn.sink_proj, partial(put, name + "sink"))
    after(attn.o_proj.gate_proj, heads("gate", H))
    after(bias, lambda y: recording.put_by_key(name + "bias", y, distances[0]))
    before(attn.o_proj, lambda x, _: heads("context", H)(x))
    before(attn.o_proj.linear, heads("gated", H))

    def see_result(result: tuple[Tensor, Tensor | None]) -> None:
        if result[1] is not None:
            recording.put_by_key(name + "probabilities", result[1], distances[0])
        put(name + "out", result[0])

    after(attn, see_result)


def _watch_experts(name: str, mlp: Any, recording: _LeftPadded, after: Callable, before: Callable) -> None:
    rows: list[int] = []  # of the batch
    order: list[Tensor] = []  # that puts the router's choices, which come unsorted, in ascending order
    calls: list[tuple[Tensor, ...]] = []  # gate, up and activation of each expert

    def put(section: str, x: Tensor) -> None:
        recording.put(name + section, x.reshape(rows[0], -1, *x.shape[1:]))

    def see_input(x: Tensor) -> None:
        rows[:] = [x.shape[0]]
        calls.clear()
        recording.put(name + "input", x)

    def see_route(result: tuple[Tensor, Tensor, Tensor]) -> None:
        scores, weights, ids = mlp.gate.score_fn(result[0]), result[1], result[2]
        ids, indices = ids.sort(dim=-1)
        order[:] = [ids, indices]
        put("scores", scores)
        put("biased", scores + mlp.gate.e_score_correction_bias)
        put("chosen", ids)
        put("weights", weights.gather(-1, indices))

    def see_experts(_: Tensor) -> None:
        ids = order[0]
        hit = ids.unique().tolist()
        if len(calls) != len(hit):  # not their eager experts
            return
        parts: dict[str, Tensor] = {}
        for expert, tensors in zip(hit, calls, strict=True):
            # Their rows go by place among the unsorted choices, then by token: each token has an expert once.
            unsorted = torch.empty_like(ids).scatter_(-1, order[1], ids)
            token = (unsorted == expert).T.nonzero()[:, 1]
            choice = (ids[token] == expert).nonzero()[:, 1]
            out = F.linear(tensors[2], mlp.experts.down_proj[expert])
            for section, x in zip(("gate", "up", "activation", "expert_out"), (*tensors, out), strict=True):
                whole = parts.setdefault(section, x.new_empty(*ids.shape, x.shape[-1]))
                whole[token, choice] = x
        for section, x in parts.items():
            put(section, x)

    activation: Any = mlp.experts.act_fn
    before(mlp, see_input)
    after(mlp.gate, see_route)
    before(activation, lambda gate, up: calls.append((gate, up)))
    after(activation, lambda y: calls.append((*calls.pop(), y)))
    after(mlp.experts, see_experts)
    after(mlp, lambda y: recording.put(name + "out", y))


def _watch_pictures(tower: Any, put: Callable, watched: dict[int, Callable], after: Callable, before: Callable) -> None:
    after(tower.embeddings.patch_embedding, partial(put, "vision.patches"))
    after(tower.embeddings, partial(put, "vision.embedding"))
    after(tower.pre_layernorm, partial(put, "vision.norm"))
    for i, layer in enumerate(tower.layers):
        name, attn = f"vision.{i}.", layer.self_attn

        def see_rotated(query: Tensor, key: Tensor, value: Tensor, _: Tensor, name: str = name) -> None:
            for x, heads in zip("qkv", (query, key, value), strict=True):  # of one picture: [1, H, tokens, d]
                put(f"{name}attention.{x}", heads[0].transpose(0, 1))

        watched[id(attn)] = see_rotated
        after(layer.layernorm_before, partial(put, name + "attention.input"))
        before(attn.out_proj, partial(put, name + "attention.heads"))
        after(attn.out_proj, partial(put, name + "attention.out"))
        before(layer.layernorm_after, partial(put, name + "after_attention"))
        after(layer.layernorm_after, partial(put, name + "mlp.input"))
        before(layer.mlp.fc2, partial(put, name + "mlp.hidden"))
        after(layer.mlp, partial(put, name + "mlp.out"))
        after(layer, partial(put, name + "out"))
    before(tower.merger, partial(put, "vision.merged"))
    before(tower.merger.linear_2, partial(put, "vision.hidden"))
    after(tower.merger, partial(put, "vision.features"))
