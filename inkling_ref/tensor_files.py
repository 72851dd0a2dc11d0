"""Safetensors files and folders of them: checked when opened, read whole or in slices, written in a stream.

A safetensors file is

    8 bytes: length n, little-endian | n bytes of JSON: name -> {dtype, shape, data_offsets} | the tensors' bytes

so where every tensor lies is known after a few kilobytes, and a tensor, or some rows of one, can be read alone. Reading
the format directly takes few lines and keeps promises that mapping the files into memory does not: a file that is not
exactly as long as its header says is refused before the first weight is read; a tensor exists once in memory, not once
more in mapped pages; and a slice costs its own bytes, which are counted.

A folder holds model.safetensors, or shards with an index, model.safetensors.index.json: {"weight_map": {tensor: file}}.
"""

import itertools
import json
import math
import operator
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .errors import InputError, listed

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_HEADER_LIMIT = 100_000_000  # the limit of the format


@dataclass(frozen=True)
class Layout:
    """Dtype and shape of a tensor; prints as `F32 [3, 5]`."""

    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{DTYPE_NAMES[self.dtype]} {list(self.shape)}"


@dataclass(frozen=True)
class Stored:
    """One tensor of a file; `offset` counts from the start of the file."""

    file: Path
    layout: Layout
    offset: int


def read_header(path: Path) -> dict[str, Stored]:
    """The tensors of one file, once the file is known to hold exactly what its header says.

    Raises:
        InputError: naming the file (and the tensor, where one is to blame): too short, too long, a header that is not
            one, an unknown dtype, bytes that overlap or leave gaps, the same name twice.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        if size < 8 or 8 + length > size or length > _HEADER_LIMIT:
            raise InputError(f"{path}: {size} bytes, expected at least {8 + length}, the length of its header")
        text = file.read(length)
    try:
        # Pairs, not a dict: the parser would keep the last of two equal names without a word.
        pairs = [pair for pair in json.loads(text, object_pairs_hook=list) if pair[0] != "__metadata__"]
        entries = []
        for name, value in pairs:
            fields = dict(value)
            start, stop = map(operator.index, fields["data_offsets"])
            entries.append((start, stop, name, str(fields["dtype"]), tuple(map(operator.index, fields["shape"]))))
    except (ValueError, TypeError, KeyError, IndexError, RecursionError) as error:
        raise InputError(f"{path}: expected a safetensors header, got {type(error).__name__}: {error}") from None
    tensors: dict[str, Stored] = {}
    end = 0
    for start, stop, name, dtype, shape in sorted(entries):
        if dtype not in DTYPES:
            raise InputError(f"{path}: {name}: unknown dtype {dtype}, expected one of {', '.join(DTYPES)}")
        if name in tensors:
            raise InputError(f"{path}: {name}: twice in the header, expected once")
        layout = Layout(DTYPES[dtype], shape)
        if start != end or stop - start != layout.nbytes or min(shape, default=0) < 0:
            where = f"{layout} at bytes {start} to {stop}, expected {layout.nbytes} bytes from {end}"
            raise InputError(f"{path}: {name}: {where}")
        tensors[name], end = Stored(path, layout, 8 + length + start), stop
    if size != 8 + length + end:
        raise InputError(f"{path}: {size} bytes, expected {8 + length + end}")
    return tensors


class CheckpointReader:
    """The tensors of a checkpoint folder. Every file is checked when it is opened, no tensor is read until asked for.

    `names` lists the tensors; `bytes_read` counts what has been read of their data. A context manager.

    Raises:
        InputError: no weights; a damaged file (see `read_header`); or, in one error, every shard that is missing and
            every tensor that its shard lacks or that two shards hold. Tensors and files that the index does not name
            are reported in a warning and never read.
    """

    def __init__(self, folder: str | Path, file: str | None = None) -> None:
        """`file`: read that file of the folder, and no other."""
        self.folder = Path(folder)
        self.bytes_read = 0
        self._files: dict[Path, Any] = {}
        if file is not None:
            self._tensors = read_header(self.folder / file)
            return
        if (self.folder / INDEX).is_file():
            self._tensors = _read_index(self.folder)
        elif (self.folder / WEIGHTS).is_file():
            self._tensors = read_header(self.folder / WEIGHTS)
        else:
            raise InputError(f"{self.folder}: expected {WEIGHTS} or {INDEX}, found neither")
        used = {stored.file.name for stored in self._tensors.values()}
        if stray := sorted(path.name for path in self.folder.glob("model*.safetensors") if path.name not in used):
            warnings.warn(f"{self.folder}: files beside the checkpoint ignored: {', '.join(stray)}", stacklevel=2)

    def __enter__(self) -> "CheckpointReader":
        return self

    def __exit__(self, *_: object) -> None:
        for file in self._files.values():
            file.close()
        self._files.clear()

    @property
    def names(self) -> list[str]:
        return sorted(self._tensors)

    @property
    def nbytes(self) -> int:
        """Of all tensors."""
        return sum(stored.layout.nbytes for stored in self._tensors.values())

    def __contains__(self, name: str) -> bool:
        return name in self._tensors

    def layout(self, name: str) -> Layout:
        return self._stored(name).layout

    def shape(self, name: str) -> tuple[int, ...]:
        return self.layout(name).shape

    def dtype(self, name: str) -> torch.dtype:
        return self.layout(name).dtype

    def file(self, name: str) -> str:
        """Name of the file that holds the tensor."""
        return self._stored(name).file.name

    def read(self, name: str) -> Tensor:
        """The whole tensor, in its stored dtype, on the CPU."""
        return self.read_slice(name, ())

    def read_slice(self, name: str, index: slice | tuple[slice, ...]) -> Tensor:
        """`tensor[index]`, reading only its bytes: `(slice(0, 8), slice(64, 128))` is rows 64-127 of experts 0-7.

        Slices of step 1; axes that are not named are taken whole.

        Raises:
            InputError: no such tensor, another kind of index, or a file that became shorter meanwhile.
        """
        stored = self._stored(name)
        full, itemsize = stored.layout.shape, stored.layout.dtype.itemsize
        index = index if isinstance(index, tuple) else (index,)
        if len(index) > len(full) or any(not isinstance(s, slice) or s.step not in (None, 1) for s in index):
            raise InputError(f"{name}: index {index}, expected at most {len(full)} slices of step 1")
        ranges = [range(*s.indices(n)) for s, n in itertools.zip_longest(index, full, fillvalue=slice(None))]
        shape = [len(r) for r in ranges]
        out = torch.empty(shape, dtype=stored.layout.dtype)
        if out.numel() == 0:
            return out
        # From the innermost axis that is cut, inwards, the bytes are one run; the axes outside it are walked.
        cut = max((axis for axis, n in enumerate(full) if shape[axis] < n), default=0)
        strides = [math.prod(full[axis + 1 :]) * itemsize for axis in range(len(full))]
        run = math.prod(shape[cut:]) * itemsize
        target = memoryview(out.view(-1).view(torch.uint8).numpy())
        file = self._files.get(stored.file) or self._files.setdefault(stored.file, stored.file.open("rb"))
        for n, place in enumerate(itertools.product(*ranges[:cut], *(r[:1] for r in ranges[cut:]))):
            file.seek(stored.offset + sum(map(operator.mul, place, strides)))
            if file.readinto(target[n * run : (n + 1) * run]) != run:
                raise InputError(f"{stored.file}: {name}: the file became shorter while it was read")
        self.bytes_read += out.nbytes
        return out

    def _stored(self, name: str) -> Stored:
        if name not in self._tensors:
            raise InputError(f"{self.folder}: no tensor {name}")
        return self._tensors[name]


def _read_index(folder: Path) -> dict[str, Stored]:
    """The tensors that the index names, each from the shard that it gives; all problems in one error."""
    weight_map = read_json(folder / INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise InputError(f"{folder / INDEX}: expected a weight_map from tensor names to file names")
    names_of: dict[str, list[str]] = defaultdict(list)
    for name, file in sorted(weight_map.items()):
        names_of[file].append(name)
    # A file name with a path in it would leave the folder.
    present = [file for file in names_of if Path(file).name == file and (folder / file).is_file()]
    shards = {file: read_header(folder / file) for file in present}
    holders: dict[str, list[str]] = defaultdict(list)
    for file, tensors in shards.items():
        for name in tensors:
            holders[name].append(file)
    problems = []
    for file, names in names_of.items():
        if file not in shards:
            problems.append(f"{file} is missing, which should hold {listed(names, 3, ', ')}")
            continue
        for name in names:
            if file not in holders[name]:
                problems.append(f"{file} lacks {name} (which is in {' and '.join(holders[name]) or 'no shard'})")
    problems += [f"{name} is in {' and '.join(files)}" for name, files in holders.items() if len(files) > 1]
    if problems:
        raise InputError(f"{folder / INDEX}: {listed(problems)}")
    if extra := sorted(name for name, files in holders.items() if files and name not in weight_map):
        warnings.warn(f"{folder}: tensors that the index does not name ignored: {', '.join(extra)}", stacklevel=3)
    return {name: shards[file][name] for name, file in weight_map.items()}


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        InputError: naming the file, if it holds something else.
    """
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path}: not valid JSON ({error})") from None
    if not isinstance(data, dict):
        raise InputError(f"{path}: expected a JSON object, got {type(data).__name__}")
    return data


@dataclass(frozen=True)
class Part:
    """Tensors that are made together when their turn to be written comes, and whose layout is known before."""

    layout: dict[str, Layout]
    make: Callable[[], dict[str, Tensor]]

    @property
    def nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.layout.values())


def write_file(path: Path, parts: list[Part], metadata: dict[str, str]) -> Iterator[int]:
    """Write one file part by part, yielding the bytes of each; no more than one part is in memory."""
    layout = {name: spec for part in parts for name, spec in part.layout.items()}
    # Widest first: every tensor then starts at a multiple of its item size, as readers that map the file need it.
    order = sorted(layout, key=lambda name: (-layout[name].dtype.itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"format": "pt", **metadata}}
    end = 0
    for name in order:
        start, end = end, end + layout[name].nbytes
        spec = {"dtype": DTYPE_NAMES[layout[name].dtype], "shape": layout[name].shape, "data_offsets": [start, end]}
        header[name] = spec
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for part in parts:
            for name, tensor in part.make().items():
                assert Layout(tensor.dtype, tuple(tensor.shape)) == layout[name], name
                file.seek(8 + len(text) + header[name]["data_offsets"][0])
                file.write(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
            yield part.nbytes
