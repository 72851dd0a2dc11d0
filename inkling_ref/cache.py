"""What decoding keeps between calls: keys and values, and the last inputs of four convolutions in every layer.

Two containers hold one tensor a position, [B, G, positions, width]:

- `Log` keeps every position (keys and values of full layers). Position p stands in slot p.
- `Tail` keeps the last `keep` positions before the newest call, and that call's own (sliding layers: keep = W - 1;
  convolutions: keep = K - 1). Positions before 0 read as zeros, as a convolution needs them.

Rows of a batch may have different lengths: every length, slot and crop is per row. Nothing else of the model is state:
the depth state (`blocks`, `partial`) belongs to a token and dies with its forward pass.
"""

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float, Int
from torch import Tensor

from .config import TextConfig
from .errors import InputError


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
            index = torch.arange(T, device=device).expand_as(document_ids)
            starts = torch.ones_like(document_ids, dtype=torch.bool)
            starts[:, 1:] = document_ids[:, 1:] != document_ids[:, :-1]
            position = index - torch.where(starts, index, 0).cummax(dim=1).values
            # Number the runs, so that an id that returns later is another document.
            return cls(lengths, position, starts.cumsum(dim=1), position)
        if _uniform(lengths):
            return cls(lengths, torch.arange(lengths[0], lengths[0] + T, device=device)[None])
        first = torch.tensor(lengths, device=device)[:, None]
        return cls(lengths, first + torch.arange(T, device=device))


class Log:
    """Every position's entry; capacity doubles as it fills. Cropping only moves the length: see `Cache.crop`."""

    def __init__(self, batch: int, groups: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self.data = torch.zeros(batch, groups, 0, width, dtype=dtype, device=device)

    def extend(self, x: Float[Tensor, "B G T width"], lengths: list[int]) -> tuple[Tensor, list[int]]:
        """Write `x` after each row's length. Returns (all entries up to the longest row, position of slot 0 per row)."""
        T, end = x.shape[2], max(lengths) + x.shape[2]
        if end > self.data.shape[2]:
            with torch.inference_mode(False):  # a buffer made in inference mode could not be written outside it
                capacity = max(end, 2 * self.data.shape[2])
                grown = self.data.new_zeros(*self.data.shape[:2], capacity, self.data.shape[3])
            grown[:, :, : self.data.shape[2]] = self.data
            self.data = grown
        if _uniform(lengths):
            self.data[:, :, end - T : end] = x
        else:
            for row, length in enumerate(lengths):
                self.data[row, :, length : length + T] = x[row]
        return self.data[:, :, :end], [0] * len(lengths)

    def oldest_crop(self) -> list[int]:
        return [0] * self.data.shape[0]

    def fork(self) -> "Log":
        other = copy.copy(self)
        other.data = self.data.clone()
        return other


class Tail:
    """The last `keep` entries before the newest call, and that call's. Tensors are replaced, never written into."""

    def __init__(
        self, batch: int, groups: int, width: int, keep: int, rollback: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        self.keep, self.rollback = keep + rollback, rollback
        self.data = torch.zeros(batch, groups, self.keep, width, dtype=dtype, device=device)
        self.starts = [-self.keep] * batch  # position of slot 0, per row

    def extend(self, x: Float[Tensor, "B G T width"], lengths: list[int]) -> tuple[Tensor, list[int]]:
        """Append `x` after each row's length. Returns (kept and new entries, position of slot 0 per row)."""
        # After a crop into the rollback reserve fewer than `keep` older entries remain; the window's are among them.
        keep = min(self.keep, min(n - start for n, start in zip(lengths, self.starts, strict=True)))
        first = [n - keep - start for n, start in zip(lengths, self.starts, strict=True)]
        if _uniform(first):
            kept = self.data[:, :, first[0] : first[0] + keep]
        else:
            kept = torch.stack([row[:, f : f + keep] for row, f in zip(self.data, first, strict=True)])
        self.data = torch.cat([kept, x], dim=2)
        self.starts = [n - keep for n in lengths]
        return self.data, self.starts

    def history(self, x: Float[Tensor, "B T C"], lengths: list[int], n: int) -> Float[Tensor, "B n C"]:
        """Append the convolution inputs `x`; returns the `n` inputs before them."""
        data, _ = self.extend(x[:, None], lengths)
        end = data.shape[2] - x.shape[1]
        return data[:, 0, end - n : end]

    def oldest_crop(self) -> list[int]:
        """The smallest length that each row can be cropped to without missing an entry it needs."""
        return [start + self.keep - self.rollback for start in self.starts]

    def fork(self) -> "Tail":
        other = copy.copy(self)
        other.starts = list(self.starts)
        return other


@dataclass
class LayerCache:
    """One layer's state: keys after convolution and clip, values after convolution and RMS, inputs of each convolution."""

    keys: Log | Tail
    values: Log | Tail
    key_conv: Tail
    value_conv: Tail
    attention_conv: Tail
    mlp_conv: Tail

    def states(self) -> dict[str, Log | Tail]:
        return dict(vars(self))


@dataclass
class Cache:
    """State of a batch of sequences. Make it with `model.new_cache`; the model extends it.

    `rollback`: how many tokens before the newest call `crop` can still take back (anywhere within that call is
    always possible). Sliding layers store at most W - 1 + rollback + T positions for calls of T tokens.
    """

    layers: list[LayerCache]
    lengths: list[int]
    rollback: int
    dtype: torch.dtype = field(repr=False)

    @classmethod
    def new(
        cls, config: TextConfig, batch_size: int, dtype: torch.dtype, device: torch.device, rollback: int = 32
    ) -> "Cache":
        if batch_size < 1 or rollback < 0:
            raise InputError(f"new_cache: batch_size {batch_size}, rollback {rollback}; expected >= 1 and >= 0")
        past = config.conv_kernel_size - 1

        def tail(groups: int, width: int, keep: int) -> Tail:
            return Tail(batch_size, groups, width, keep, rollback, dtype, device)

        layers = []
        for i in range(config.num_hidden_layers):
            a = config.attention(i)
            G, d, D = a.num_key_value_heads, a.head_dim, config.hidden_size
            if a.window is None:
                keys, values = (Log(batch_size, G, d, dtype, device) for _ in range(2))
            else:
                keys, values = (tail(G, d, a.window - 1) for _ in range(2))
            convs = [tail(1, channels, past) for channels in (G * d, G * d, D, D)]
            layers.append(LayerCache(keys, values, *convs))
        return cls(layers, [0] * batch_size, rollback, dtype)

    @property
    def length(self) -> int:
        """Committed positions of the longest row."""
        return max(self.lengths)

    def advance(self, counts: list[int]) -> None:
        """Commit `counts` new positions of each row; the model calls it when all layers have been extended."""
        self.lengths = [n + c for n, c in zip(self.lengths, counts, strict=True)]

    def crop(self, length: int | Sequence[int]) -> None:
        """Forget all positions from `length` on (one number, or one a row): the state is as if never extended further.

        Raises:
            InputError: if a row is shorter than that, or older state would be needed than the cache holds.
        """
        wanted = [length] * len(self.lengths) if isinstance(length, int) else list(length)
        if len(wanted) != len(self.lengths):
            raise InputError(f"cache.crop: {len(wanted)} lengths for {len(self.lengths)} rows")
        states = [state for layer in self.layers for state in layer.states().values()]
        oldest_crops = [max(row) for row in zip(*(state.oldest_crop() for state in states), strict=True)]
        for row, (new, old, oldest) in enumerate(zip(wanted, self.lengths, oldest_crops, strict=True)):
            if not 0 <= new <= old:
                raise InputError(f"cache.crop: row {row} has {old} positions, cannot be cropped to {new}")
            if new < old and new < oldest:
                raise InputError(
                    f"cache.crop: row {row} cannot go back from {old} to {new}, the oldest length kept is {oldest}; "
                    f"fork() the cache earlier, or make it with a larger rollback than {self.rollback}"
                )
        self.lengths = wanted

    def fork(self) -> "Cache":
        """An independent copy: extending or cropping either leaves the other as it is."""
        layers = [LayerCache(**{name: s.fork() for name, s in layer.states().items()}) for layer in self.layers]
        return Cache(layers, list(self.lengths), self.rollback, self.dtype)

    snapshot = fork

    def num_bytes(self) -> int:
        """Bytes held by all states."""
        data = [state.data for layer in self.layers for state in layer.states().values()]
        return sum(t.numel() * t.element_size() for t in data)


def _uniform(values: list[int]) -> bool:
    return len(values) == 1 or values.count(values[0]) == len(values)
