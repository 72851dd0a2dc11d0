"""Decoding with fixed addresses: one step of all layers, the same operations at every length, as a CUDA graph needs it.

`Inkling.forward` with a `Cache` grows tensors and reads lengths on the host; that is the clear form, and the reference
for this one. Here everything that lives from step to step has its place from the start:

- Keys and values. Position p of a row stands in slot p (full layers), or in page p // S of the row's ring of pages
  (sliding layers): the ring holds the window, the newest tokens and a page that is being filled, and its table repeats,
  so that it never changes.
- Convolutions. The last N inputs before the step; N covers the taps and the tokens of a step that may be taken back.
- Lengths, and how many tokens of the step before do not count (drafts that were refused), as tensors on the device.

A step reads T tokens a row: 1, or a token and its drafts. It runs the fused operations of `fused` or their kernels,
about ten launches a layer, and projections that read the same input are one product.
"""

from collections.abc import Callable
from dataclasses import dataclass, fields

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from . import fused
from .attention import Attention
from .backends import Backend
from .cache import Cache, Log, Slots, ranges
from .errors import InputError
from .model import DecoderLayer, Inkling
from .moe import MoE
from .residual import wide

PAGE = 128  # slots of a page of a sliding layer's ring
CONVOLUTIONS = ("key_value_conv", "attention_conv", "mlp_conv")  # whose last inputs are kept


@dataclass(frozen=True)
class StepBackend(Backend):
    """The operations of a model, and the fused ones of a step; the defaults are the PyTorch reference."""

    prepare_qkv: Callable = fused.prepare_qkv
    attend_cache: Callable = fused.attend_cache
    join_and_mix: Callable = fused.join_and_mix
    sample_head: Callable = fused.sample_head


def join(linears: list[nn.Linear]) -> Float[Tensor, "rows D"]:
    """One weight for several projections of the same input; each of them becomes a view of its rows."""
    weights = [linear.weight.detach() for linear in linears]
    ends = [w.data_ptr() + w.nbytes for w in weights]
    storages = {w.untyped_storage().data_ptr() for w in weights}
    if len(storages) == 1 and all(w.data_ptr() == end for w, end in zip(weights[1:], ends, strict=False)):
        rows = sum(len(w) for w in weights)  # joined before, for another step
        return weights[0].as_strided((rows, weights[0].shape[1]), weights[0].stride())
    weight, start = torch.cat(weights), 0
    for linear in linears:
        stop = start + linear.out_features
        linear.weight.data = weight[start:stop]
        start = stop
    return weight


class LayerState:
    """One layer's places: keys and values, the inputs of its three convolutions, its joined projections."""

    def __init__(self, layer: DecoderLayer, batch: int, capacity: int, tokens: int, page: int) -> None:
        attn, a = layer.attn, layer.attn.sizes
        weight = attn.wq_du.weight
        like = {"dtype": weight.dtype, "device": weight.device}
        G, d, D = a.num_key_value_heads, a.head_dim, weight.shape[1]
        past = attn.kernel - 1 + tokens - 1
        self.table = None
        if a.window is None:
            shape = (batch, G, capacity, d)
        else:
            # The window of the first token and the whole step, wherever in their pages they begin and end.
            ring = -(-(a.window - 1 + tokens) // page) + 1
            pages = torch.arange(-(-capacity // page), dtype=torch.int32, device=weight.device) % ring
            self.table = pages + ring * torch.arange(batch, dtype=torch.int32, device=weight.device)[:, None]
            shape = (batch * ring, G, page, d)
        self.keys, self.values = (torch.zeros(shape, **like) for _ in range(2))
        self.key_value_conv = torch.zeros(batch, past, 2 * G * d, **like)
        self.attention_conv, self.mlp_conv = (torch.zeros(batch, past, D, **like) for _ in range(2))
        first = [attn.wq_du, attn.wr_du, attn.gate_attn, attn.attn_sink_proj]
        keys_and_values = [attn.wk_dv, attn.wv_dv] if layer.is_sliding else []
        self.sizes = [linear.out_features for linear in first + keys_and_values]
        self.weight = join(first + keys_and_values)


class DecodeStep:
    """A model that decodes `tokens` tokens a row at a time, for rows of up to `capacity` positions.

    `step.take(cache)` continues after a prefill; every `step(ids)` appends. The model's projections become views of
    joined weights: it computes what it did, and holds no byte more.
    """

    def __init__(
        self,
        model: Inkling,
        batch_size: int,
        capacity: int,
        tokens: int = 1,
        ops: StepBackend | None = None,
        page: int = PAGE,
    ) -> None:
        """`ops`: None takes the backend that the model was made with.

        Raises:
            InputError: for sizes below 1, a capacity below the tokens of one step, or one rank's part of a model.
        """
        if not all(isinstance(n, int) for n in (batch_size, capacity, tokens, page)) or page < 1:
            raise InputError(
                f"decode step: {batch_size}, {capacity}, {tokens}, {page}, expected integers and a page >= 1"
            )
        if any(type(layer.mlp) is not MoE for layer in model.llm.layers):
            raise InputError("decode step: a part of a model, expected a whole one")
        if batch_size < 1 or tokens < 1 or capacity < tokens:
            raise InputError(
                f"decode step: {batch_size} rows of {tokens} tokens in {capacity} positions, expected at least one "
                "row, one token and as many positions"
            )
        self.model, self.capacity, self.tokens, self.page = model, capacity, tokens, page
        self.ops = step_backend(model.backend) if ops is None else ops
        config, device = model.config.text, model.device
        self.layers = [LayerState(layer, batch_size, capacity, tokens, page) for layer in model.llm.layers]
        blocks = sum(layer.starts_block for layer in model.llm.layers)
        self.blocks = torch.zeros(batch_size, tokens, blocks, config.hidden_size, dtype=model.dtype, device=device)
        self.partial = wide(self.blocks[:, :, 0]).clone()
        self.ids = torch.zeros(batch_size, tokens, dtype=torch.int64, device=device)
        self.lengths, self.rejected = (torch.zeros(batch_size, dtype=torch.int32, device=device) for _ in range(2))
        self.hidden: Tensor | None = None
        self.graph: torch.cuda.CUDAGraph | None = None
        self.ends = [0] * batch_size  # positions of each row, the newest step's with it
        self.started = False  # whether there is a step whose tokens can be taken back

    def take(self, cache: Cache) -> None:
        """Continue from what a cache holds: its positions are copied to their places.

        Raises:
            InputError: for another number of rows, rows that leave no room for a step, or a cache that keeps fewer
                inputs of its convolutions than a step may take back.
        """
        if len(cache.lengths) != len(self.ends):
            raise InputError(f"decode step: made for {len(self.ends)} rows, the cache has {len(cache.lengths)}")
        if cache.length + self.tokens > self.capacity:
            raise InputError(
                f"decode step: {self.capacity} positions, expected room for {cache.length} and {self.tokens} more"
            )
        if len(cache.layers) != len(self.layers):
            raise InputError(f"decode step: the cache has {len(cache.layers)} layers, expected {len(self.layers)}")
        for state, old in zip(self.layers, cache.layers, strict=True):
            kept, place = old.keys.data, state.keys
            if (kept.shape[1], kept.shape[3], kept.dtype) != (place.shape[1], place.shape[3], place.dtype):
                raise InputError(
                    f"decode step: the cache holds {kept.shape[1]} heads of {kept.shape[3]} in {kept.dtype}, expected "
                    f"{place.shape[1]} of {place.shape[3]} in {place.dtype}"
                )
        inputs, slots = self.layers[0].mlp_conv.shape[1], cache.layers[0].mlp_conv.slots
        if inputs > min(n - start for n, start in zip(cache.lengths, slots.starts, strict=True)):
            raise InputError(
                f"decode step: the cache keeps {slots.keep} inputs of its convolutions, expected {inputs} for steps of "
                f"{self.tokens} tokens: make it with a larger rollback than {cache.rollback}"
            )
        for state, old in zip(self.layers, cache.layers, strict=True):
            for data, place in ((old.keys, state.keys), (old.values, state.values)):
                if isinstance(data, Log):
                    place[:, :, : cache.length] = data.data[:, :, : cache.length]
                    continue
                for row, length in enumerate(cache.lengths):
                    begin = max(0, length - data.slots.history)
                    slots = torch.arange(begin, length, device=place.device)
                    entries = data.data[row, :, slots - data.slots.starts[row]]
                    place[state.table[row, slots // self.page], :, slots % self.page] = entries.transpose(0, 1)
            for name in CONVOLUTIONS:
                tail, place = getattr(old, name), getattr(state, name)
                place.copy_(last(tail.data, tail.slots, cache.lengths, place.shape[1]))
        self.ends = list(cache.lengths)
        self.lengths.copy_(torch.tensor(self.ends))
        self.rejected.zero_()
        self.started = False

    def __call__(self, ids: Int[Tensor, "B T"], rejected: list[int] | None = None) -> Float[Tensor, "B T D"]:
        """Append one step; returns the hidden states that enter the unembedding, in a place that the next step reuses.

        Args:
            rejected: for each row how many of the newest tokens of the step before do not count; None = none.

        Raises:
            InputError: for another shape or dtype, more taken back than the step before gave, no room left, or a model
                whose projections are no longer those of the step. That ids are in range is not checked: it would wait
                for the device.
        """
        rejected = rejected or [0] * len(self.ends)
        if ids.dtype not in (torch.int32, torch.int64):
            raise InputError(f"decode step: ids are {ids.dtype}, expected integers")
        if any(
            s.weight.data_ptr() != l.attn.wq_du.weight.data_ptr()
            for s, l in zip(self.layers, self.model.llm.layers, strict=True)
        ):
            raise InputError("decode step: the model's weights were replaced, expected a new DecodeStep after that")
        most = self.tokens - 1 if self.started else 0
        if ids.shape != self.ids.shape or len(rejected) != len(self.ends):
            raise InputError(
                f"decode step: ids {tuple(ids.shape)} and {len(rejected)} counts of rejected tokens, expected "
                f"{tuple(self.ids.shape)} and {len(self.ends)}"
            )
        if not all(isinstance(n, int) and 0 <= n <= most for n in rejected):
            raise InputError(f"decode step: {rejected} tokens rejected, expected 0 to {most} of the step before")
        begins = [end - n for end, n in zip(self.ends, rejected, strict=True)]
        if max(begins) + self.tokens > self.capacity:
            raise InputError(
                f"decode step: {self.capacity} positions are full, expected room for {max(begins)} and "
                f"{self.tokens} more"
            )
        self.ids.copy_(ids)
        self.lengths.copy_(torch.tensor(begins))
        self.rejected.copy_(torch.tensor(rejected))
        if self.graph is None:
            self.hidden = self.forward()
        else:
            self.graph.replay()
        self.ends, self.started = [n + self.tokens for n in begins], True
        return self.hidden

    def next_tokens(self, temperature: float = 0.0, seeds: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B T"]:
        """The token that follows each of the newest step's: `fused.sample_head`, drawn by seed and position.

        Raises:
            InputError: for a temperature without seeds.
        """
        if temperature != 0 and seeds is None:
            raise InputError("next_tokens: a temperature needs seeds, expected one a row")
        config, B, T = self.model.config.text, *self.ids.shape
        positions = (self.lengths[:, None] + torch.arange(1, T + 1, device=self.ids.device)).flatten().long()
        seeds = None if seeds is None else seeds.repeat_interleave(T)
        weight, cap = self.model.llm.unembed.weight[: config.unpadded_vocab_size], config.final_logit_softcapping
        drawn = {} if seeds is None else {"temperature": temperature, "seeds": seeds, "positions": positions}
        return self.ops.sample_head(self.hidden.flatten(0, 1), weight, cap, **drawn).view(B, T)

    def capture(self) -> None:
        """From now on a step is the replay of one CUDA graph. The state stays as it is."""
        states = [getattr(state, name) for state in self.layers for name in CONVOLUTIONS]
        kept, lengths = [t.clone() for t in states], self.lengths.clone()
        self.lengths.fill_(-self.tokens)  # rows that are not in use: no slot of the cache is written
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # kernels are compiled, and what they derive from parameters is made
            self.forward()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.hidden = self.forward()
        self.graph = graph
        for t, before in zip([*states, self.lengths], [*kept, lengths], strict=True):
            t.copy_(before)

    def forward(self) -> Float[Tensor, "B T D"]:
        """The operations of one step, from `ids`, `lengths` and `rejected`; nothing waits for the device."""
        llm, ops, eps, dtype = self.model.llm, self.ops, self.model.config.text.rms_norm_eps, self.model.dtype
        positions = self.lengths[:, None] + torch.arange(self.tokens, device=self.ids.device)
        e = llm.embed_tokens(self.ids)
        self.partial.copy_(e)
        inputs = ops.mix_and_norm(e[:, :, None], None, input_norms(llm.layers[0]), eps, dtype)
        # What reads the depth state after each layer: the next layer, and at the end the unembedding.
        readers = [(q, input_norms(layer)) for q, layer in zip(llm.attn_res.attn_queries, llm.layers[1:], strict=True)]
        readers.append((llm.attn_res.output_query, [llm.norm.weight]))
        count = 0
        layers = zip(llm.layers, self.layers, llm.attn_res.mlp_queries, readers, strict=True)
        for layer, state, query, (next_query, norms) in layers:
            y = self.attention(layer.attn, state, inputs, positions)
            (h,) = ops.join_and_mix(
                y, state.attention_conv, layer.attn_sconv.weight, self.blocks, self.partial, count, query,
                [layer.mlp_norm.weight], eps, opens_block=layer.starts_block, rejected=self.rejected,
            )  # fmt: skip
            count += layer.starts_block
            inputs = ops.join_and_mix(
                layer.mlp(h), state.mlp_conv, layer.mlp_sconv.weight, self.blocks, self.partial, count, next_query,
                norms, eps, ends_layer=True, rejected=self.rejected,
            )  # fmt: skip
        return inputs[0]

    def attention(
        self, attn: Attention, state: LayerState, inputs: list[Float[Tensor, "B T D"]], positions: Int[Tensor, "B T"]
    ) -> Float[Tensor, "B T D"]:
        """One layer's attention, from one normed input or from three."""
        a, ops = attn.sizes, self.ops
        x = inputs[0]
        q, r, gate, sink, *kv = F.linear(x, state.weight).split(state.sizes, dim=-1)
        k_conv, v_conv, dynamic = attn.k_sconv, attn.v_sconv, {}
        if a.window is not None:
            (k, v), k_taps, v_taps = kv, k_conv.weight, v_conv.weight
        else:
            k, v, k_taps, v_taps = attn.wk_dv(inputs[1]), attn.wv_dv(inputs[2]), k_conv.static_w, v_conv.static_w
            k_dynamic, v_dynamic = F.linear(inputs[1], k_conv.weight_proj), F.linear(inputs[2], v_conv.weight_proj)
            shape = (a.num_key_value_heads, attn.kernel)
            dynamic = {"k_dynamic": k_dynamic.unflatten(-1, shape), "v_dynamic": v_dynamic.unflatten(-1, shape)}
        q, r = ops.prepare_qkv(
            q, r, k, v, attn.q_l2_clip.scale, attn.rel_l2_clip.scale, k_taps, v_taps, attn.qk_threshold,
            attn.r_threshold, attn.eps, state.keys, state.values, self.lengths, state.table, state.key_value_conv,
            self.rejected, positions, a.log_scaling, **dynamic,
        )  # fmt: skip
        profiles = attn.rel_logits_proj.proj
        o = ops.attend_cache(q, state.keys, state.values, r, profiles, sink, gate, self.lengths, a.window, state.table)
        return attn.wo_ud(o)


def input_norms(layer: DecoderLayer) -> list[Float[Tensor, " D"]]:
    """Weights of the norms in front of a layer's attention: one, or those of queries, keys and values."""
    norms = [layer.attn_norm] if layer.is_sliding else [layer.q_input_norm, layer.k_input_norm, layer.v_input_norm]
    return [norm.weight for norm in norms]


def last(data: Float[Tensor, "B slots C"], slots: Slots, lengths: list[int], count: int) -> Float[Tensor, "B count C"]:
    """The `count` entries before each row's length."""
    first = [n - count - start for n, start in zip(lengths, slots.starts, strict=True)]
    index = ranges(first, count, data.device)[..., None].expand(-1, -1, data.shape[2])
    return data.gather(1, index)


def step_backend(backend: Backend) -> StepBackend:
    """The fused operations that go with a model's backend: kernels with kernels, the reference with the reference.

    Raises:
        InputError: for a backend of other or of mixed operations: nobody but its maker can say what goes with it.
    """
    if isinstance(backend, StepBackend):
        return backend
    if same_operations(backend, Backend()):
        return StepBackend()
    if any(place.startswith(f"{__package__}.kernels.") for place in backend.report().values()):
        from .kernels.backend import triton_backend, triton_step_backend

        if same_operations(backend, triton_backend()):
            return triton_step_backend()
    raise InputError("decode step: the model's backend has operations of its own, expected ops=StepBackend(...)")


def same_operations(a: Backend, b: Backend) -> bool:
    """Whether every operation is the same function."""
    return all(getattr(a, f.name) is getattr(b, f.name) for f in fields(Backend) if f.name != "pack_experts")
