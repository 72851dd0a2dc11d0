"""What decoding keeps between calls: keys and values, and the last inputs of four convolutions in every layer.

Two containers hold one entry a position, along the second-last axis:

- `Log` keeps every position (keys and values of full layers). Position p stands in slot p.
- `Tail` keeps the last `keep` positions before the newest call, and that call's own (sliding layers: keep = W - 1;
  convolutions: keep = K - 1). Positions before 0 read as zeros, as a convolution needs them.

Rows of a batch may have different lengths: every length, slot and crop is per row. A forward pass only proposes;
`commit`, after the last layer, makes its entries part of the state, so that a pass that fails leaves the cache as it
was. Nothing else of the model is state: the depth state belongs to a token and ends with its forward pass.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional as F

from .config import TextConfig
from .errors import InputError
from .residual import same


@dataclass
class Step:
    """Where the tokens of one call stand.

    Attributes:
        lengths: committed positions of every row before this call.
        positions: absolute position of every token, [1, T] where all rows agree; restarts in each packed document.
        document_ids, document_position: for packed documents only, [B, T].
    """

    lengths: list[int]
    positions: Int[Tensor, "b T"]
    document_ids: Int[Tensor, "B T"] | None = None
    document_position: Int[Tensor, "B T"] | None = None

    @classmethod
    def make(cls, lengths: list[int], T: int, device: torch.device, document_ids: Tensor | None = None) -> "Step":
        if document_ids is not None:
            starts = torch.ones_like(document_ids, dtype=torch.bool)
            starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
            index = torch.arange(T, device=device).expand_as(document_ids)
            position = index - torch.where(starts, index, 0).cummax(dim=1).values
            # Number the runs, so that an id that returns later is another document.
            return cls(lengths, position, starts.cumsum(dim=1), position)
        return cls(lengths, ranges(lengths[:1] if same(lengths) else lengths, T, device))


def ranges(first: list[int], count: int, device: torch.device) -> Int[Tensor, "b count"]:
    """`count` consecutive numbers for every row, from its first."""
    return torch.tensor(first, device=device)[:, None] + torch.arange(count, device=device)


class Log:
    """Every position's entry, [B, G, capacity, width]; capacity doubles as it fills."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros(*shape[:-1], 0, shape[-1], dtype=dtype, device=device)

    def extend(self, x: Float[Tensor, "B G T width"], lengths: list[int]) -> Float[Tensor, "B G S width"]:
        """Write `x` after each row's length; returns all entries up to the longest row's end."""
        T, end = x.shape[2], max(lengths) + x.shape[2]
        if end > self.data.shape[2]:
            with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside it
                self.data = F.pad(self.data, (0, 0, 0, max(end - self.data.shape[2], self.data.shape[2])))
        if same(lengths):
            self.data[:, :, end - T : end] = x
        else:
            rows = torch.arange(len(x), device=x.device)[:, None]
            self.data[rows, :, ranges(lengths, T, x.device)] = x.transpose(1, 2)
        return self.data[:, :, :end]

    def commit(self) -> None:
        """Nothing to do: what stands beyond a row's length does not count."""

    def fork(self, slots: dict[int, "Slots"]) -> "Log":
        other = copy.copy(self)
        with torch.inference_mode(False):  # as in `extend`
            other.data = self.data.clone()
        return other


class Slots:
    """Which positions stand in the slots of a `Tail`: one set serves all tails with the same `keep`."""

    def __init__(self, batch: int, history: int, rollback: int) -> None:
        self.history, self.keep = history, history + rollback
        self.starts = [-self.keep] * batch  # position of slot 0, per row

    def begin(self, lengths: list[int]) -> None:
        """Choose the kept entries, which end at each row's length, for the call that starts now."""
        # After a crop into the rollback reserve fewer than `keep` older entries are left; the history is among them.
        self.kept = min(self.keep, min(n - start for n, start in zip(lengths, self.starts, strict=True)))
        self.first = [n - self.kept - start for n, start in zip(lengths, self.starts, strict=True)]
        self.next_starts = [n - self.kept for n in lengths]
        self.empty = [max(0, -start) for start in self.next_starts]  # slots before position 0

    def commit(self) -> None:
        self.starts = self.next_starts


class Tail:
    """The last `keep` entries before the newest call, and that call's. Tensors are replaced, never written into."""

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, slots: Slots) -> None:
        self.slots = slots
        self.data = self.proposed = torch.zeros(*shape[:-1], slots.keep, shape[-1], dtype=dtype, device=device)

    def extend(self, x: Float[Tensor, "B *G T width"]) -> Float[Tensor, "B *G slots width"]:
        """The kept entries, then `x`."""
        kept, first = self.slots.kept, self.slots.first
        if same(first):
            old = self.data.narrow(-2, first[0], kept)
        else:
            index = ranges(first, kept, x.device).view(-1, *[1] * (x.dim() - 3), kept, 1)
            old = self.data.take_along_dim(index, dim=-2)
        self.proposed = torch.cat([old, x], dim=-2)
        return self.proposed

    def commit(self) -> None:
        self.data = self.proposed

    def fork(self, slots: dict[int, Slots]) -> "Tail":
        other = copy.copy(self)
        other.slots = slots[id(self.slots)]
        return other


@dataclass
class LayerCache:
    """One layer's state: keys after their clip, values after their RMS, the inputs of the convolutions."""

    keys: Log | Tail
    values: Log | Tail
    key_value_conv: Tail
    attention_conv: Tail
    mlp_conv: Tail

    def extend_key_value(
        self, k: Float[Tensor, "B G T d"], v: Float[Tensor, "B G T d"], lengths: list[int]
    ) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """All keys and values that this call may see; for each row the slot of its query 0, and its first used slot."""
        if isinstance(self.keys, Log):
            return self.keys.extend(k, lengths), self.values.extend(v, lengths), lengths, [0] * len(lengths)
        slots = self.keys.slots
        return self.keys.extend(k), self.values.extend(v), [slots.kept] * len(lengths), slots.empty


class Cache:
    """State of a batch of sequences. Make it with `model.new_cache`; the model extends it.

    `rollback`: how many tokens before the newest call `crop` can still take back; anywhere within that call is always
    possible. Sliding layers store at most W - 1 + rollback + T positions for calls of T tokens.
    """

    def __init__(
        self, config: TextConfig, batch_size: int, dtype: torch.dtype, device: torch.device, rollback: int = 32
    ) -> None:
        if batch_size < 1 or rollback < 0:
            raise InputError(f"new_cache: batch_size {batch_size}, rollback {rollback}; expected >= 1 and >= 0")
        self.rollback = rollback
        self.lengths = [0] * batch_size
        conv = Slots(batch_size, config.conv_kernel_size - 1, rollback)
        window = Slots(batch_size, config.sliding_window_size - 1, rollback)
        self.slots = [conv, window]
        self.layers: list[LayerCache] = []
        for i in range(config.num_hidden_layers):
            a, D = config.attention(i), config.hidden_size
            G, d = a.num_key_value_heads, a.head_dim
            sizes = (batch_size, G, d), dtype, device
            keys, values = (Log(*sizes) if a.window is None else Tail(*sizes, window) for _ in range(2))
            convs = [Tail((batch_size, channels), dtype, device, conv) for channels in (2 * G * d, D, D)]
            self.layers.append(LayerCache(keys, values, *convs))

    @property
    def length(self) -> int:
        """Committed positions of the longest row."""
        return max(self.lengths)

    def _states(self) -> list[Log | Tail]:
        return [state for layer in self.layers for state in vars(layer).values()]

    def begin(self) -> None:
        """Start a call: the model does it before the first layer."""
        for slots in self.slots:
            slots.begin(self.lengths)

    def commit(self, counts: list[int]) -> None:
        """Make a call's `counts` positions of each row part of the state: the model does it after the last layer."""
        for part in (*self._states(), *self.slots):
            part.commit()
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def crop(self, length: int | Sequence[int]) -> None:
        """Forget all positions from `length` on (one number, or one a row): the state is as if never extended further.

        Raises InputError if a row is shorter than that, or would need older state than the cache holds.
        """
        wanted = [length] * len(self.lengths) if isinstance(length, int) else [int(n) for n in length]
        if len(wanted) != len(self.lengths):
            raise InputError(f"cache.crop: {len(wanted)} lengths for {len(self.lengths)} rows")
        for row, (new, old) in enumerate(zip(wanted, self.lengths, strict=True)):
            oldest = max(slots.starts[row] + slots.history for slots in self.slots)
            if not 0 <= new <= old:
                raise InputError(f"cache.crop: row {row} has {old} positions, cannot be cropped to {new}")
            if new < min(old, oldest):
                raise InputError(
                    f"cache.crop: row {row} cannot go back from {old} to {new}, the oldest length kept is {oldest}; "
                    f"fork() the cache earlier, or make it with a larger rollback than {self.rollback}"
                )
        self.lengths = wanted

    def fork(self) -> "Cache":
        """An independent copy: extending or cropping either leaves the other as it is."""
        other = copy.copy(self)
        copies = {id(slots): copy.copy(slots) for slots in self.slots}
        other.slots = list(copies.values())
        other.layers = [LayerCache(**{n: s.fork(copies) for n, s in vars(layer).items()}) for layer in self.layers]
        return other

    snapshot = fork

    def num_bytes(self) -> int:
        """Bytes held by all states."""
        return sum(state.data.numel() * state.data.element_size() for state in self._states())
