"""Decoding with fixed addresses: one step of all layers, the same operations at every length, as a CUDA graph needs it.

`Inkling.forward` with a `Cache` grows tensors and reads lengths on the host; that is the clear form, and the reference
for this one. Here everything that lives from step to step has its place from the start:

- Keys and values. Position p of a row stands in slot p (full layers), or in page p // S of the row's ring of pages
  (sliding layers): the ring holds the window, the newest tokens and a page that is being filled, and its table repeats,
  so that it never changes.
- Convolutions. The last N inputs before the step; N covers the taps and the tokens of a step that may be taken back.
- Lengths, and how many tokens of the step before do not count (drafts that were refused), as tensors on the device.

A step reads T tokens a row: 1, or a token and its drafts. It runs the fused operations of `fused` or their kernels,
about ten launches a layer, and projections that read the same input are one product. A prompt fills the same places by
the same operations (`prefill`): any number of tokens, for which lengths are read on the host. Where a prompt begins, a
number of tokens that comes again and again can be a graph of its own (`capture_prefill`).
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NamedTuple
from weakref import WeakSet

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from . import fused
from .attention import Attention
from .backends import Backend
from .cache import Cache, Log, Slots, ranges
from .draft_config import DSparkConfig
from .dspark import places, read_tap
from .errors import InputError
from .model import DecoderLayer, Inkling
from .residual import DepthState, wide
from .short_conv import ShortConv

PAGE = 128  # slots of a page of a sliding layer's ring
ROWS = 8  # joined projections have a multiple of them
CONVOLUTIONS = ("key_value_conv", "attention_conv", "mlp_conv")  # whose last inputs are kept
INTEGERS = (torch.int32, torch.int64)
NOT_FINITE = -1  # in place of a token: its logits are NaN or infinite
GRAPHS: WeakSet = WeakSet()  # all that somebody holds: those of a rank end before its world does (`parallel.launch`)


@dataclass(frozen=True)
class StepBackend(Backend):
    """The operations of a model, and the fused ones of a step; the defaults are the PyTorch reference."""

    embed_and_norm: Callable = fused.embed_and_norm
    project: Callable = fused.project
    prepare_qkv: Callable = fused.prepare_qkv
    attend_cache: Callable = fused.attend_cache
    join_and_mix: Callable = fused.join_and_mix
    sample_head: Callable = fused.sample_head
    elect: Callable = fused.elect
    draft_rnn: Callable = fused.draft_rnn


def join(parameters: list[nn.Parameter]) -> Float[Tensor, "rows D"]:
    """One weight for several projections of the same input; each of them becomes a view of its rows.

    Zeros fill it to a multiple of ROWS: of outputs of an odd width neither libraries nor kernels read 16 bytes at once.
    """
    with torch.inference_mode(parameters[0].is_inference()):  # as the parameters were made
        weights = [parameter.detach() for parameter in parameters]
        counts, first = [len(w) for w in weights], weights[0]
        rows, columns = -(-sum(counts) // ROWS) * ROWS, first.shape[1]
        ends = [w.data_ptr() + w.nbytes for w in weights]
        storage = first.untyped_storage()
        whole = storage.nbytes() >= (first.storage_offset() + rows * columns) * first.element_size()
        same = all(w.untyped_storage().data_ptr() == storage.data_ptr() for w in weights)
        if whole and same and all(w.data_ptr() == end for w, end in zip(weights[1:], ends, strict=False)):
            return first.as_strided((rows, columns), first.stride())  # joined before, for another step
        weight = torch.cat([*weights, first.new_zeros(rows - sum(counts), columns)])
        for parameter, part in zip(parameters, weight.split([*counts, rows - sum(counts)]), strict=False):
            parameter.data = part
        return weight


class Alone:
    """What a step asks of the other ranks of a model: there are none. See `parallel.step.Ranks`."""

    first = 0  # the token of row 0 of `head`

    def __init__(self, model: Inkling) -> None:
        self.model = model

    def embedding(self, ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B T"], Float[Tensor, "rows D"]]:
        """A table of embeddings, and which of its rows are those of `ids`."""
        return ids, self.model.llm.embed.weight

    def enter(self, ids: Int[Tensor, "B T"]) -> tuple[Int[Tensor, "B carried"], Float[Tensor, "rows D"]]:
        """As `embedding`, of a prompt's tokens: those that are carried through the layers here."""
        return self.embedding(ids)

    def carried(self, x: Float[Tensor, "B T D"]) -> Float[Tensor, "B carried D"]:
        """Of all tokens of a prompt those of `enter`."""
        return x

    def all_tokens(self, xs: list[Float[Tensor, "B carried D"]]) -> list[Float[Tensor, "B T D"]]:
        """The inverse."""
        return xs

    def taps(self, conv: ShortConv) -> Float[Tensor, "D 1 K"]:
        """Those of all channels."""
        return conv.weight

    @contextmanager
    def joined(
        self, partial: Float[Tensor, "B T D"], state: Float[Tensor, "B N D"], prompt: "Prompt | None"
    ) -> Iterator[tuple[Float[Tensor, "B carried D"], Float[Tensor, "B N D"]]]:
        """The sum over ranks of a sublayer's outputs, and its convolution's inputs before them.

        `partial` may be written in place. Within it the operation takes the sums into what stands before them; after it
        `state` holds the newest.
        """
        with rolled(state, (partial,), prompt):
            yield partial, state

    def head(self) -> Float[Tensor, "rows D"]:
        """The used rows of the unembedding, of those that are here."""
        return self.model.llm.unembed.weight[: self.model.config.text.unpadded_vocab_size]

    def candidates(
        self, token: Int[Tensor, " N"], logit: Float[Tensor, " N"], temperature: float
    ) -> tuple[Int[Tensor, "ranks N"], Float[Tensor, "ranks N"]]:
        """From the choice of these rows, and its logit, to those of every rank."""
        return token[None], logit[None]


class LayerState:
    """One layer's places: keys and values, the inputs of its three convolutions; and its joined projections.

    keys, values: views of keys_values, so that one operation copies both. taps: of the convolutions after attention and
    after the experts.
    """

    def __init__(self, layer: DecoderLayer, ranks: Alone, batch: int, capacity: int, tokens: int, page: int) -> None:
        attn, a = layer.attn, layer.attn.sizes
        like = {"dtype": attn.wq_du.weight.dtype, "device": attn.wq_du.weight.device}
        G, d, D = a.num_key_value_heads, a.head_dim, attn.wq_du.in_features
        past = attn.kernel - 1 + tokens - 1
        self.table, self.page = None, page
        if a.window is None:
            shape = (batch, G, capacity, d)
        else:
            # The window of the first token and the whole step, wherever in their pages they begin and end.
            ring = -(-(a.window - 1 + tokens) // page) + 1
            pages = torch.arange(-(-capacity // page), dtype=torch.int32, device=like["device"]) % ring
            self.table = pages + ring * torch.arange(batch, dtype=torch.int32, device=like["device"])[:, None]
            shape = (batch * ring, G, page, d)
        self.keys_values = torch.zeros(2, *shape, **like)
        self.keys, self.values = self.keys_values.unbind(0)
        self.key_value_conv = torch.zeros(batch, past, 2 * G * d, **like)
        self.attention_conv, self.mlp_conv = (torch.zeros(batch, past, D, **like) for _ in range(2))
        first = [attn.wq_du.weight, attn.wr_du.weight, attn.gate_attn.weight]
        k, v, sink = attn.wk_dv.weight, attn.wv_dv.weight, attn.attn_sink_proj.weight
        if layer.is_sliding:  # the sink's few rows last: all others begin at 16 bytes
            inputs = [[*first, k, v, sink]]
        else:  # each with its dynamic taps
            inputs = [[*first, sink], [k, attn.k_sconv.weight_proj], [v, attn.v_sconv.weight_proj]]
        self.sizes = [[len(weight) for weight in group] for group in inputs]
        self.weights = [join(group) for group in inputs]
        self.taps = ranks.taps(layer.attn_sconv), ranks.taps(layer.mlp_sconv)

    def ring(self, positions: Int[Tensor, "B m"]) -> tuple[Int[Tensor, "B m"], Int[Tensor, "B m"]]:
        """Page and slot of every position."""
        return self.table.gather(1, positions // self.page).long(), positions % self.page

    def targets(
        self, ends: Int[Tensor, " B"], count: int, first: Int[Tensor, " B"], slots: int
    ) -> tuple[Int[Tensor, "B count"], ...]:
        """Where each row's last `count` positions go, page and slot, and whence: row, and slot p - first[b] of `slots`.

        A row that has fewer names its position 0 several times.
        """
        positions = (ends[:, None] - count + torch.arange(count, device=ends.device)).clamp(min=0)
        # Indices of one dtype and layout: PyTorch would copy others in every layer.
        rows = torch.arange(len(ends), device=ends.device)[:, None].expand_as(positions).contiguous()
        return *self.ring(positions), rows, (positions - first[:, None]).clamp(max=slots - 1)

    def put(self, targets: tuple[Int[Tensor, "B m"], ...], keys_values: Float[Tensor, "2 B G S d"]) -> None:
        """Copy keys and values to `targets`."""
        pages, slots, rows, source = targets
        self.keys_values[:, pages, :, slots] = keys_values[:, rows, :, source]


class Prompt:
    """One call of `prefill`: where each row's tokens begin and end, and what attention may see."""

    def __init__(self, begins: list[int], counts: list[int], T: int, device: torch.device) -> None:
        self.starts, self.T = begins, T
        # Here, before there is work: a copy to the device waits for all that was launched.
        self.begins = torch.tensor(begins, dtype=torch.int32, device=device)
        self.counts = torch.tensor(counts, device=device)
        self.shortest, self.is_padded = min(counts), min(counts) < T
        # By window, the same in all layers: the slots of token 0, and pages and slots of what came before; `targets`.
        self.seen: dict[int, tuple[Tensor, ...]] = {}
        self.kept: dict[int, tuple[Tensor, ...]] = {}

    def open(
        self, state: LayerState, window: int | None
    ) -> tuple[Float[Tensor, "2 B G S d"], Int[Tensor, " B"], list[int], list[int]]:
        """Keys and values of a layer with room for this call's; for each row the slot of token 0, on the device and on
        the host, and the first slot that is used.

        In a sliding layer a copy: the ring is too short for what the first tokens see and the last ones write.
        """
        B, T = len(self.starts), self.T
        if window is None:
            end = max(self.starts) + T
            return state.keys_values[:, :, :, :end], self.begins, self.starts, [0] * B
        past = min(window - 1, max(self.starts))
        if window not in self.seen:
            positions = self.begins[:, None] - past + torch.arange(past, device=self.begins.device)
            lengths = torch.full_like(self.begins, past)
            self.seen[window] = lengths, *state.ring(positions.clamp(min=0))
        lengths, pages, slots = self.seen[window]
        _, G, _, d = state.keys.shape
        keys_values = state.keys.new_empty(2, B, G, past + T, d)
        if past:  # indexed axes come first
            keys_values[:, :, :, :past] = state.keys_values[:, pages, :, slots].permute(2, 0, 3, 1, 4)
        return keys_values, lengths, [past] * B, [max(0, past - n) for n in self.starts]

    def close(self, state: LayerState, window: int | None, keys_values: Float[Tensor, "2 B G S d"]) -> None:
        """Put what later calls may see into its places."""
        if window is None:
            return
        if window not in self.kept:
            slots = keys_values.shape[3]
            ends, first = self.begins + self.counts, self.begins - (slots - self.T)
            self.kept[window] = state.targets(ends, min(window - 1, slots), first, slots)
        state.put(self.kept[window], keys_values)


class PromptGraph(NamedTuple):
    """Where empty rows begin, one number of tokens: `DecodeStep.capture_prefill`."""

    graph: torch.cuda.CUDAGraph
    prompt: Prompt  # its tensors are read by every replay
    ids: Int[Tensor, "B T"]
    hidden: Float[Tensor, "B D"]
    taps: dict[int, Tensor]


@contextmanager
def rolled(state: Float[Tensor, "B N C"], inputs: tuple[Tensor, ...], prompt: Prompt | None) -> Iterator[None]:
    """Within it an operation takes `inputs`, channels after channels, into `state`; afterwards padding is out of it."""
    if prompt is None or not prompt.is_padded:
        yield
        return
    inputs = torch.cat([state, torch.cat(inputs, dim=-1)], dim=1)
    yield
    index = prompt.counts[:, None] + torch.arange(state.shape[1], device=state.device)
    state.copy_(inputs.take_along_dim(index[..., None], dim=1))


class DecodeStep:
    """A model that decodes `tokens` tokens a row at a time, for rows of up to `capacity` positions.

        step = ir.DecodeStep(model, batch_size=1, capacity=4096)
        step.capture()  # on a GPU
        ir.generate(model, prompt, step=step)

    By hand: `step.reset()`, `step.prefill(ids)` reads prompts, `step.take(cache)` continues after what a cache holds,
    every `step(ids)` appends, `step.next_tokens()` chooses. The model's projections become views of joined weights: it
    computes what it did, and holds hardly a byte more.
    """

    @torch.inference_mode(False)  # the model's weights, and all places, remain tensors that anybody may write
    def __init__(
        self,
        model: Inkling,
        batch_size: int,
        capacity: int,
        tokens: int = 1,
        ops: StepBackend | None = None,
        page: int = PAGE,
        taps: DSparkConfig | None = None,
    ) -> None:
        """`ops`: None takes the backend that the model was made with. `taps`: of a drafter, see the attribute `taps`.

        Raises:
            InputError: for sizes below 1, a capacity below the tokens of one step, or a rank's part of a model whose
                plan is not for steps (see `parallel.step`).
        """
        if not all(isinstance(n, int) for n in (batch_size, capacity, tokens, page)) or page < 1:
            raise InputError(
                f"decode step: {batch_size}, {capacity}, {tokens}, {page}, expected integers and a page >= 1"
            )
        if batch_size < 1 or tokens < 1 or capacity < tokens:
            raise InputError(
                f"decode step: {batch_size} rows of {tokens} tokens in {capacity} positions, expected at least one "
                "row, one token and as many positions"
            )
        self.model, self.capacity, self.tokens, self.page, self.tapped = model, capacity, tokens, page, taps
        self.ops = step_backend(model.backend) if ops is None else ops
        self.ranks = model.ranks() if hasattr(model, "ranks") else Alone(model)
        device = model.device
        sizes = batch_size, capacity, tokens, page
        self.layers = [LayerState(layer, self.ranks, *sizes) for layer in model.llm.layers]
        self.blocks, self.partial = self._depth(batch_size, tokens)
        self.ids = torch.zeros(batch_size, tokens, dtype=torch.int64, device=device)
        self.lengths_rejected = torch.zeros(2, batch_size, dtype=torch.int32, device=device)
        self.lengths, self.rejected = self.lengths_rejected
        self.seeds = torch.zeros(batch_size, dtype=torch.int64, device=device)
        self.hidden: Tensor | None = None
        self.taps: dict[int, Tensor] = {}  # of the newest call, by layer id, [B, T, D]: see `dspark.observe`
        self.graph: torch.cuda.CUDAGraph | None = None
        self.prompts: dict[int, PromptGraph] = {}  # by their numbers of tokens
        self.best: Int[Tensor, "B T"] | None = None  # where the step's graph puts the best tokens, if it finds them
        self.head: tuple[float, torch.cuda.CUDAGraph, Tensor] | None = None  # a temperature's, and where its ids are
        self.reset()

    def _depth(self, B: int, T: int) -> tuple[Float[Tensor, "B T n D"], Float[Tensor, "B T D"]]:
        """Room for the depth state of a call: completed blocks, and the running sum."""
        D, n = self.model.config.text.hidden_size, sum(layer.starts_block for layer in self.model.llm.layers)
        blocks = torch.empty(B, T, n, D, dtype=self.model.dtype, device=self.model.device)
        return blocks, torch.empty(B, T, D, dtype=wide(blocks[:0]).dtype, device=self.model.device)

    @torch.inference_mode()
    def reset(self) -> None:
        """Forget all rows."""
        for state in self.layers:
            for name in CONVOLUTIONS:
                getattr(state, name).zero_()
        self._begin([0] * len(self.ids))

    def _begin(self, ends: list[int], live: list[bool] | None = None) -> None:
        self.ends = list(ends)  # positions of each row, the newest step's with it
        self.loose = [0] * len(ends)  # how many tokens of each row can be taken back
        self.live = [True] * len(ends) if live is None else live  # rows that have not ended
        self.has_stepped = False  # whether `hidden` is of a step after these positions

    @torch.inference_mode()
    def fill(self, ends: list[int], seed: int = 0) -> None:
        """Random keys, values and inputs of convolutions, as large as real ones, in place of texts: for timing.

        Args:
            ends: positions of each row.

        Raises:
            InputError: for another number of rows, or rows that leave no room for a step.
        """
        if len(ends) != len(self.ends) or max(ends) + self.tokens > self.capacity:
            raise InputError(
                f"decode step: filled with {ends}, expected {len(self.ends)} rows of at most "
                f"{self.capacity - self.tokens} positions"
            )
        generator = torch.Generator(device=self.ids.device).manual_seed(seed)
        for state, layer in zip(self.layers, self.model.llm.layers, strict=True):
            state.keys.normal_(0, layer.attn.qk_threshold / state.keys.shape[-1] ** 0.5, generator=generator)
            state.values.normal_(generator=generator)
            for name in CONVOLUTIONS:
                getattr(state, name).normal_(generator=generator)
        self._begin(ends)

    @property
    def num_bytes(self) -> int:
        """Of all places that a cache would have."""
        places = ("keys", "values", *CONVOLUTIONS)
        return sum(getattr(state, name).nbytes for state in self.layers for name in places)

    @torch.inference_mode()
    def take(self, cache: Cache) -> None:
        """Continue from what a cache holds: its positions are copied to their places.

        Raises:
            InputError: for another number of rows, rows that leave no room for a step, a cache that keeps fewer inputs
                of its convolutions than a step may take back, or that of one of many ranks.
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
        (_, inputs, D), slots = self.layers[0].mlp_conv.shape, cache.layers[0].mlp_conv.slots
        if cache.layers[0].mlp_conv.data.shape[2] != D:
            raise InputError(f"decode step: a cache of one rank's channels, expected {D}: read the prompt by `prefill`")
        if inputs > min(n - start for n, start in zip(cache.lengths, slots.starts, strict=True)):
            raise InputError(
                f"decode step: the cache keeps {slots.keep} inputs of its convolutions, expected {inputs} for steps of "
                f"{self.tokens} tokens: make it with a larger rollback than {cache.rollback}"
            )
        lengths = torch.tensor(cache.lengths, device=self.ids.device)
        for state, old in zip(self.layers, cache.layers, strict=True):
            if isinstance(old.keys, Log):
                for data, place in ((old.keys.data, state.keys), (old.values.data, state.values)):
                    place[:, :, : cache.length] = data[:, :, : cache.length]
            else:
                slots = old.keys.slots
                starts = torch.tensor(slots.starts, device=self.ids.device)
                count, stop = min(slots.history, cache.length), old.keys.data.shape[2]
                both = torch.stack((old.keys.data, old.values.data))
                state.put(state.targets(lengths, count, starts, stop), both)
            for name in CONVOLUTIONS:
                tail, place = getattr(old, name), getattr(state, name)
                place.copy_(last(tail.data, tail.slots, cache.lengths, place.shape[1]))
        self._begin(cache.lengths)

    @torch.inference_mode()
    def prefill(
        self,
        ids: Int[Tensor, "B T"],
        attention_mask: Bool[Tensor, "B T"] | None = None,
        image_features: Float[Tensor, "tiles D"] | None = None,
    ) -> Float[Tensor, "B D"]:
        """Append tokens of prompts, any number; returns the hidden state of the last token of each row.

        What `Inkling.forward` with a cache does, by the operations of a step; a prompt may come in chunks. A row
        without a token in this call keeps its state, and its output means nothing.

        Args:
            attention_mask: true = token, false = padding, wherever it stands; None = all tokens.
            image_features: of the image tokens of this call in order, row by row.

        Raises:
            InputError: for another number of rows, for no integers, a mask of another shape or of no bools, no room for
                all T positions after each row, tokens of a row that had ended. That ids are in range is not checked.
        """
        B, T = self._check(ids)
        counts = [T] * B
        if attention_mask is not None:
            if attention_mask.shape != ids.shape or attention_mask.dtype != torch.bool:
                raise InputError(
                    f"decode step: attention_mask {attention_mask.dtype} {tuple(attention_mask.shape)}, expected bools "
                    f"{tuple(ids.shape)}"
                )
            order = (~attention_mask).to(torch.int8).argsort(dim=1, stable=True)  # each row's tokens to its front
            ids, counts = ids.gather(1, order), attention_mask.sum(dim=1).tolist()
        if max(self.ends) + T > self.capacity:
            raise InputError(f"decode step: {self.capacity} positions, expected room for {max(self.ends)} and {T} more")
        if any(count and not live for count, live in zip(counts, self.live, strict=True)):
            raise InputError(f"decode step: {counts} tokens, expected none for rows that had ended: {self.live}")
        if image_features is None:
            self.model._place_images(ids, ids, None, counts, None)  # none are expected: nothing is placed
        if T in self.prompts and counts == [T] * B and image_features is None and not any(self.ends):
            graph, _, own_ids, hidden, self.taps = self.prompts[T]
            own_ids.copy_(ids)
            graph.replay()
        else:
            hidden = self._read(ids, Prompt(self.ends, counts, T, ids.device), image_features)
        self._begin([n + count for n, count in zip(self.ends, counts, strict=True)], self.live)
        return hidden

    def _read(
        self, ids: Int[Tensor, "B T"], prompt: Prompt, image_features: Float[Tensor, "tiles D"] | None = None
    ) -> Float[Tensor, "B D"]:
        """The operations of `prefill`; without images nothing waits for the device."""
        model, llm = self.model, self.model.llm
        eps, norms = model.config.text.rms_norm_eps, input_norms(llm.layers[0])
        rows, table = self.ranks.enter(ids)
        blocks, partial = self._depth(*rows.shape)
        inputs = self.ops.embed_and_norm(rows, table, llm.embed_norm.weight, partial, norms, eps)
        if image_features is not None:
            (e,) = self.ranks.all_tokens([partial.to(model.dtype)])
            placed = self.ranks.carried(model._place_images(e, ids, image_features, prompt.counts.tolist(), None))
            partial.copy_(placed)
            inputs = self.ops.mix_and_norm(placed[:, :, None], None, norms, eps, model.dtype)
        (hidden,) = self.ranks.all_tokens([self._layers(inputs, blocks, partial, prompt)])
        return hidden[torch.arange(len(ids), device=ids.device), (prompt.counts - 1).clamp(min=0)]

    def _check(self, ids: Tensor) -> torch.Size:
        """The shape of sound ids."""
        if ids.dtype not in INTEGERS:
            raise InputError(f"decode step: ids are {ids.dtype}, expected integers")
        if ids.dim() != 2 or len(ids) != len(self.ends) or not ids.numel():
            raise InputError(f"decode step: ids {tuple(ids.shape)}, expected {len(self.ends)} rows of tokens")
        # Of every layer it would cost more than launching the step.
        if self.layers[0].weights[0].data_ptr() != self.model.llm.layers[0].attn.wq_du.weight.data_ptr():
            raise InputError("decode step: the model's weights were replaced, expected a new DecodeStep after that")
        return ids.shape

    @torch.inference_mode()
    def __call__(
        self, ids: Int[Tensor, "B T"], rejected: list[int] | None = None, used: list[bool] | None = None
    ) -> Float[Tensor, "B T D"]:
        """Append one step; returns the hidden states that enter the unembedding, in a place that the next step reuses.

        Args:
            rejected: for each row how many of the newest tokens of the step before do not count; None = none.
            used: false for rows that have ended: they do not grow, and their outputs mean nothing. None = all are used.

        Raises:
            InputError: for another shape or dtype, more taken back than the step before gave, a row that had ended
                before, no room left, or a model whose projections are no longer those of the step. That ids are in
                range is not checked: it would wait for the device.
        """
        B, T = len(self.ends), self.tokens
        rejected, used = rejected or [0] * B, used or [True] * B
        if self._check(ids) != self.ids.shape or not B == len(rejected) == len(used):
            raise InputError(
                f"decode step: ids {tuple(ids.shape)} and {len(rejected)} counts of rejected tokens, expected "
                f"{tuple(self.ids.shape)} and {B}"
            )
        if not all(isinstance(n, int) and 0 <= n <= most for n, most in zip(rejected, self.loose, strict=True)):
            raise InputError(
                f"decode step: {rejected} tokens rejected, expected at most {self.loose} of the step before"
            )
        if any(u and not live for u, live in zip(used, self.live, strict=True)):
            raise InputError(f"decode step: rows in use {used}, expected none that had ended: {self.live}")
        begins = [end - n for end, n in zip(self.ends, rejected, strict=True)]
        longest = max((n for n, u in zip(begins, used, strict=True) if u), default=0)
        if longest + T > self.capacity:
            raise InputError(
                f"decode step: {self.capacity} positions are full, expected room for {longest} and {T} more"
            )
        self.ids.copy_(ids)
        lengths = [n if u else -T for n, u in zip(begins, used, strict=True)]
        # From pinned memory, so that the host need not wait: PyTorch does not reuse it before it is read.
        both = torch.tensor([lengths, rejected], dtype=torch.int32, pin_memory=self.ids.is_cuda)
        self.lengths_rejected.copy_(both, non_blocking=True)
        if self.graph is None:
            self.hidden = self.forward()
        else:
            self.graph.replay()
            self.hidden, self.taps = self.captured_hidden, self.captured_taps
        self.has_stepped = True
        self.ends = [n + T * u for n, u in zip(begins, used, strict=True)]
        self.loose, self.live = [(T - 1) * u for u in used], list(used)
        return self.hidden

    @torch.inference_mode()
    def next_tokens(self, temperature: float = 0.0, seeds: Int[Tensor, " B"] | None = None) -> Int[Tensor, "B T"]:
        """The token that follows each of the newest step's: `fused.sample_head`, drawn by seed and position.

        NOT_FINITE stands where the logits are not finite. After `capture` this is a graph too, made anew for another
        temperature, or a part of the step's (greedy), and the ids are in a place that the next call reuses.

        Raises:
            InputError: where no step has followed a prompt or a reset; for a temperature without seeds, or with seeds
                that are not an integer a row.
        """
        if not self.has_stepped:
            raise InputError(
                "next_tokens: expected a step first; after a prompt, the logits of what `prefill` returned"
            )
        if temperature != 0:
            if seeds is None:
                raise InputError("next_tokens: a temperature needs seeds, expected one a row")
            if seeds.shape != self.seeds.shape or seeds.dtype not in INTEGERS:
                raise InputError(
                    f"next_tokens: seeds {seeds.dtype} {tuple(seeds.shape)}, expected an integer a row: "
                    f"{tuple(self.seeds.shape)}"
                )
            self.seeds.copy_(seeds)
        if self.graph is None:
            return self._head(temperature, self.hidden)
        if temperature == 0 and self.best is not None:
            return self.best
        if self.head is None or self.head[0] != temperature:
            self.head = temperature, *captured(lambda: self._head(temperature, self.hidden))
        _, graph, tokens = self.head
        graph.replay()
        return tokens

    def _head(self, temperature: float, hidden: Float[Tensor, "B T D"]) -> Int[Tensor, "B T"]:
        (B, T), hidden = self.ids.shape, hidden.flatten(0, 1)
        cap, drawn = self.model.config.text.final_logit_softcapping, {}
        if temperature:
            positions = self.lengths[:, None] + torch.arange(1, T + 1, device=self.ids.device)
            seeds = self.seeds[:, None].expand(-1, T)
            drawn = {"temperature": temperature, "seeds": seeds.flatten(), "positions": positions.flatten().long()}
        # Where any logit is NaN, the token of a NaN is chosen.
        token, logit = self.ops.sample_head(hidden, self.ranks.head(), cap, first=self.ranks.first, **drawn)
        return self.ops.elect(*self.ranks.candidates(token, logit, temperature), NOT_FINITE).view(B, T)

    @torch.inference_mode()
    def capture(self, greedy: bool = False) -> None:
        """From now on a step is the replay of one CUDA graph. The state stays as it is, whatever ends the capture.

        greedy: the best tokens are found in the same graph, for `next_tokens`; of no use where tokens are drawn.
        """
        states = [getattr(state, name) for state in self.layers for name in CONVOLUTIONS]
        kept, lengths, hidden = [t.clone() for t in states], self.lengths.clone(), self.hidden
        self.lengths.fill_(-self.tokens)  # rows that are not in use: no slot of the cache is written
        try:  # there may be too little memory
            graph, found = captured(self._with_best if greedy else self.forward)
        finally:
            for t, before in zip([*states, self.lengths], [*kept, lengths], strict=True):
                t.copy_(before)
        self.graph, (self.hidden, self.best) = graph, found if greedy else (found, None)
        if self.has_stepped:  # `next_tokens` may still be asked for those of the newest step
            self.hidden.copy_(hidden)
            if greedy:
                self.best.copy_(self._head(0.0, hidden))
        # The head of a graph before this one read its hidden states.
        self.captured_hidden, self.captured_taps, self.head = self.hidden, self.taps, None

    @torch.inference_mode()
    def capture_prefill(self, T: int) -> None:
        """From now on `prefill` of T tokens of every row, where all begin, without images, is the replay of one graph.

        So a prompt waits for the GPU, not for the host that launches some thirty kernels a layer. The graph keeps the
        memory of one such call, its result among it, which the next one writes over.

        Raises:
            InputError: for a number of tokens that do not fit, or rows that hold some.
        """
        B, device = self.ids.shape[0], self.ids.device
        if type(T) is not int or not 1 <= T <= self.capacity:
            raise InputError(f"decode step: a prompt of {T} tokens, expected 1 to {self.capacity}")
        if any(self.ends):
            raise InputError(
                f"decode step: rows hold {self.ends} positions, expected none: capture_prefill comes first"
            )
        ids = torch.zeros(B, T, dtype=torch.int64, device=device)
        # One for each run, made outside the graph: what a call finds out for all layers must be found within the graph.
        prompts = [Prompt(self.ends, [T] * B, T, device) for _ in range(2)]
        before, waiting = self.taps, iter(prompts)
        try:
            graph, hidden = captured(lambda: self._read(ids, next(waiting)))
            self.prompts[T] = PromptGraph(graph, prompts[-1], ids, hidden, self.taps)
        finally:  # without memory for the graph, rows are none the less empty
            self.taps = before
            self.reset()

    def _with_best(self) -> tuple[Float[Tensor, "B T D"], Int[Tensor, "B T"]]:
        hidden = self.forward()
        return hidden, self._head(0.0, hidden)

    def forward(self) -> Float[Tensor, "B T D"]:
        """The operations of one step, from `ids`, `lengths` and `rejected`; nothing waits for the device."""
        llm, eps = self.model.llm, self.model.config.text.rms_norm_eps
        norms = input_norms(llm.layers[0])
        ids, table = self.ranks.embedding(self.ids)
        inputs = self.ops.embed_and_norm(ids, table, llm.embed_norm.weight, self.partial, norms, eps)
        return self._layers(inputs, self.blocks, self.partial)

    def _layers(
        self,
        inputs: list[Float[Tensor, "B T D"]],
        blocks: Float[Tensor, "B T n D"],
        partial: Float[Tensor, "B T D"],
        prompt: Prompt | None = None,
    ) -> Float[Tensor, "B T D"]:
        """From what the first layer's attention reads to what enters the unembedding.

        blocks, partial: the depth state, of which the running sum is there.
        """
        llm, ops, eps = self.model.llm, self.ops, self.model.config.text.rms_norm_eps
        rejected = self.rejected if prompt is None else None
        # What reads the depth state after each layer: the next layer, and at the end the unembedding.
        readers = [(q, input_norms(layer)) for q, layer in zip(llm.attn_res.attn_queries, llm.layers[1:], strict=True)]
        readers.append((llm.attn_res.output_query, [llm.norm.weight]))
        count, self.taps = 0, {}
        self._tap(0, blocks[:, :, :0], partial, None)
        layers = zip(llm.layers, self.layers, llm.attn_res.mlp_queries, readers, strict=True)
        for i, (layer, state, query, (next_query, norms)) in enumerate(layers):
            attention_taps, mlp_taps = state.taps
            y = self.attention(layer.attn, state, self.ranks.all_tokens(inputs), prompt)
            with self.ranks.joined(y, state.attention_conv, prompt) as (y, before):
                (h,) = ops.join_and_mix(
                    y, before, attention_taps, blocks, partial, count, query, [layer.mlp_norm.weight], eps,
                    opens_block=layer.starts_block, rejected=rejected,
                )  # fmt: skip
            count += layer.starts_block
            with self.ranks.joined(layer.mlp(h), state.mlp_conv, prompt) as (z, before):
                inputs = ops.join_and_mix(
                    z, before, mlp_taps, blocks, partial, count, next_query, norms, eps, ends_layer=True,
                    rejected=rejected,
                )  # fmt: skip
            self._tap(i + 1, blocks[:, :, :count], partial, next_query, inputs[0])
        return inputs[0]

    def _tap(
        self, place: int, blocks: Tensor, partial: Tensor, query: Tensor | None, hidden: Tensor | None = None
    ) -> None:
        """Keep what the drafter reads of the depth state number `place`, see `dspark.places`."""
        config, L = self.tapped, len(self.layers)
        for id in [] if config is None else [id for id, at in places(config, L).items() if at == place]:
            if id == L and config.final_tap == "norm":
                tap = hidden
            else:  # a copy: the running sum goes on in its place
                depth = DepthState(blocks, partial.to(self.model.dtype, copy=True))
                tap = read_tap(config.tap == "mixed" or id == L, depth, query)
            (self.taps[id],) = self.ranks.all_tokens([tap])

    def attention(
        self,
        attn: Attention,
        state: LayerState,
        inputs: list[Float[Tensor, "B T D"]],
        prompt: Prompt | None = None,
    ) -> Float[Tensor, "B T D"]:
        """One layer's attention, from one normed input or from three."""
        a, ops = attn.sizes, self.ops
        products = [
            y[..., : sum(sizes)].split(sizes, dim=-1)
            for y, sizes in zip(ops.project(inputs, state.weights), state.sizes, strict=True)
        ]
        k_conv, v_conv, dynamic = attn.k_sconv, attn.v_sconv, {}
        if a.window is not None:
            ((q, r, gate, k, v, sink),) = products
            k_taps, v_taps = k_conv.weight, v_conv.weight
        else:
            (q, r, gate, sink), (k, k_dynamic), (v, v_dynamic) = products
            k_taps, v_taps, shape = k_conv.static_w, v_conv.static_w, (a.num_key_value_heads, attn.kernel)
            dynamic = {"k_dynamic": k_dynamic.unflatten(-1, shape), "v_dynamic": v_dynamic.unflatten(-1, shape)}
        keys, values, lengths, table, rejected = state.keys, state.values, self.lengths, state.table, self.rejected
        if prompt is not None:
            keys_values, lengths, offsets, first_keys = prompt.open(state, a.window)
            (keys, values), table, rejected = keys_values.unbind(0), None, None
        with rolled(state.key_value_conv, (k, v), prompt):
            q, r = ops.prepare_qkv(
                q, r, k, v, attn.q_l2_clip.scale, attn.rel_l2_clip.scale, k_taps, v_taps, attn.qk_threshold,
                attn.r_threshold, attn.eps, keys, values, lengths, table, state.key_value_conv, rejected,
                log_scaling=a.log_scaling, **dynamic,
            )  # fmt: skip
        profiles = attn.rel_logits_proj.proj
        if prompt is None:
            o = ops.attend_cache(q, keys, values, r, profiles, sink, gate, lengths, a.window, table)
        else:
            o = ops.attend(q, keys, values, r, profiles, sink, gate, offsets, a.window, first_keys)
            prompt.close(state, a.window, keys_values)
        return ops.project([o], [attn.wo_ud.weight])[0]


def captured(run: Callable[[], Any]) -> tuple[torch.cuda.CUDAGraph, Any]:
    """What `run` launches as a CUDA graph, and its result, whose tensors every replay writes."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):  # kernels are compiled, and what they derive from parameters is made
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):  # other threads watch over collectives
        result = run()
    GRAPHS.add(graph)
    return graph, result


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
