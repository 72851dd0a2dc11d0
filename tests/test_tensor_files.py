"""Safetensors files and folders of shards: cases 38 and 39, slices, and agreement with the `safetensors` package."""

import io
import json
import shutil
import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from jaxtyping import TypeCheckError
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from inkling_ref.errors import InputError
from inkling_ref.tensor_files import (
    DTYPES,
    INDEX,
    WEIGHTS,
    CheckpointReader,
    Layout,
    Part,
    read_header,
    read_json,
    write_file,
)


def some_tensors():
    generator = torch.Generator().manual_seed(0)
    return {
        "a.weight": torch.randn(3, 5, 7, generator=generator),
        "b": torch.randn(11, generator=generator).bfloat16(),
        "codes": torch.randint(0, 256, (2, 13), generator=generator).to(torch.uint8),
        "count": torch.tensor(17),
        "empty": torch.zeros(0, 4),
        "scales": torch.randn(5, 3, generator=generator).to(torch.float8_e4m3fn),
        "z": torch.randn(2, 2, generator=generator, dtype=torch.float64),
    }


def equal(a, b):
    return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.float(), b.float())


@pytest.fixture
def single(tmp_path):
    save_file(some_tensors(), tmp_path / WEIGHTS)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    """Tensors a.0 ... a.8 of different sizes, three in each of three shards."""
    weight_map = {}
    for shard in range(3):
        file = f"model-{shard + 1:05}-of-00003.safetensors"
        tensors = {f"a.{i}": torch.full((i + 1, 3), float(i)) for i in range(3 * shard, 3 * shard + 3)}
        save_file(tensors, tmp_path / file)
        weight_map |= dict.fromkeys(tensors, file)
    (tmp_path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    return tmp_path


def edit_index(folder, edit):
    data = json.loads((folder / INDEX).read_text())
    edit(data["weight_map"])
    (folder / INDEX).write_text(json.dumps(data))


# ---------------------------------------------------------------- agreement with the format's own package


def test_reads_what_safetensors_writes(single):
    with CheckpointReader(single) as reader:
        assert reader.names == sorted(some_tensors())
        for name, tensor in some_tensors().items():
            assert (reader.shape(name), reader.dtype(name)) == (tuple(tensor.shape), tensor.dtype)
            assert equal(reader.read(name), tensor), name
        assert reader.bytes_read == sum(tensor.nbytes for tensor in some_tensors().values())


def test_safetensors_reads_what_this_writes(tmp_path):
    tensors = some_tensors()

    def part(*names):
        layout = {name: Layout(tensors[name].dtype, tuple(tensors[name].shape)) for name in names}
        return Part(layout, lambda: {name: tensors[name] for name in names})

    parts = [part("codes", "a.weight"), part("z", "b", "empty"), part("count"), part("scales")]
    path = tmp_path / "x.safetensors"
    assert list(write_file(path, parts, {"made by": "a test"})) == [part.nbytes for part in parts]
    loaded = load_file(path)
    assert all(equal(loaded[name], tensor) for name, tensor in tensors.items())
    assert loaded.keys() == tensors.keys()
    with safe_open(path, "pt") as file:
        assert file.metadata() == {"format": "pt", "made by": "a test"}
    for name, stored in read_header(path).items():
        assert stored.offset % stored.layout.dtype.itemsize == 0, name


@pytest.mark.parametrize("name", [n for n in DTYPES if n not in ("U64", "U32", "U16", "F8_E8M0")])
def test_dtypes_have_the_names_of_the_format(name, tmp_path):
    save_file({"x": torch.zeros(3).to(DTYPES[name])}, tmp_path / WEIGHTS)
    header = (tmp_path / WEIGHTS).read_bytes()[8:]
    assert f'"dtype":"{name}"'.encode() in header
    assert read_header(tmp_path / WEIGHTS)["x"].layout.dtype == DTYPES[name]


# ---------------------------------------------------------------- slices


@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_slices_equal_indexing_and_read_only_their_bytes(tmp_path_factory, data):
    folder = tmp_path_factory.getbasetemp() / "slices"
    tensor = torch.arange(4 * 5 * 6, dtype=torch.int16).view(4, 5, 6)
    if not folder.exists():
        folder.mkdir()
        save_file({"before": torch.ones(3), "x": tensor, "y": torch.ones(2)}, folder / WEIGHTS)
    bound = st.none() | st.integers(-7, 7)
    index = tuple(data.draw(st.lists(st.builds(slice, bound, bound), max_size=3)))
    with CheckpointReader(folder) as reader:
        out = reader.read_slice("x", index)
        assert torch.equal(out, tensor[index])
        assert reader.bytes_read == out.nbytes


def test_a_range_of_experts_is_one_read(single):
    reads = []

    class Counting(io.FileIO):
        def readinto(self, buffer):
            reads.append(len(buffer))
            return super().readinto(buffer)

    with CheckpointReader(single) as reader:
        reader._files[single / WEIGHTS] = Counting(single / WEIGHTS)
        assert torch.equal(reader.read_slice("a.weight", slice(1, 3)), some_tensors()["a.weight"][1:3])
        assert torch.equal(
            reader.read_slice("a.weight", (slice(None), slice(2, 4))), some_tensors()["a.weight"][:, 2:4]
        )
        assert reads == [2 * 5 * 7 * 4] + [2 * 7 * 4] * 3  # rows of each expert: one read an expert


@pytest.mark.parametrize("index", [3, (0,), (slice(0, 4, 2),), (slice(None),) * 4, ("a",)], ids=str)
def test_other_indices_are_refused(single, index):
    with CheckpointReader(single) as reader, pytest.raises((InputError, TypeCheckError), match=r"index"):
        reader.read_slice("a.weight", index)


def test_an_unknown_name_is_refused(single):
    with CheckpointReader(single) as reader, pytest.raises(InputError, match="no tensor nothing"):
        reader.read("nothing")
    assert "nothing" not in reader


# ---------------------------------------------------------------- case 38: a file that is not what its header says


def damage(path, how):
    data = path.read_bytes()
    n = int.from_bytes(data[:8], "little")
    path.write_bytes(
        {
            "cut by 100 bytes": data[:-100],
            "cut inside the header": data[: 8 + n // 2],
            "cut inside the length": data[:5],
            "empty": b"",
            "header of 2^40 bytes": (2**40).to_bytes(8, "little") + data[8:],
            "100 trailing bytes": data + bytes(100),
            "one trailing byte": data + b"\0",
        }[how]
    )
    return len(data)


@pytest.mark.parametrize(
    "how",
    [
        "cut by 100 bytes",
        "cut inside the header",
        "cut inside the length",
        "empty",
        "header of 2^40 bytes",
        "100 trailing bytes",
        "one trailing byte",
    ],
)
def test_case_38_wrong_length(single, how):
    whole = damage(single / WEIGHTS, how)
    real = (single / WEIGHTS).stat().st_size
    with pytest.raises(InputError) as caught:
        CheckpointReader(single)
    message = str(caught.value)
    assert "\n" not in message
    assert WEIGHTS in message
    assert f"{real} bytes, expected" in message
    if how in ("cut by 100 bytes", "100 trailing bytes", "one trailing byte"):
        assert f"expected {whole}" in message
    if "2^40" in how:
        assert str(8 + 2**40) in message


def test_case_38_a_damaged_shard_is_named(sharded):
    damage(sharded / "model-00002-of-00003.safetensors", "one trailing byte")
    with pytest.raises(InputError, match="model-00002-of-00003"):
        CheckpointReader(sharded)


def test_case_38_a_file_cut_while_open(single):
    with CheckpointReader(single) as reader:
        reader.read("count")
        reader._files.clear()  # the next read opens the file anew
        damage(single / WEIGHTS, "cut by 100 bytes")
        with pytest.raises(InputError, match="became shorter"):
            [reader.read(name) for name in reader.names]


def write_header(path, header, payload=bytes(64)):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + payload)


@pytest.mark.parametrize(
    ("header", "expected"),
    [
        (b"not json at all", "safetensors header"),
        (b"\xff\xfe\xfa", "safetensors header"),
        (b"[1, 2]", "safetensors header"),
        (b"17", "safetensors header"),
        ({"x": 3}, "safetensors header"),
        ({"x": {"dtype": "F32", "shape": [16]}}, "data_offsets"),
        ({"x": {"dtype": "F32", "shape": ["16"], "data_offsets": [0, 64]}}, "safetensors header"),
        ({"x": {"dtype": "F32", "shape": [4.0, 4], "data_offsets": [0, 64]}}, "safetensors header"),
        ({"x": {"dtype": "F3", "shape": [16], "data_offsets": [0, 64]}}, "x: unknown dtype F3"),
        (
            {"x": {"dtype": "F32", "shape": [17], "data_offsets": [0, 64]}},
            r"x: F32 \[17\] at bytes 0 to 64, expected 68",
        ),
        ({"x": {"dtype": "F32", "shape": [-4, -4], "data_offsets": [0, 64]}}, "x: F32"),
        ({"x": {"dtype": "F32", "shape": [15], "data_offsets": [4, 64]}}, "expected 60 bytes from 0"),
        (
            {
                "x": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},
                "y": {"dtype": "F32", "shape": [9], "data_offsets": [28, 64]},
            },
            "y: F32 .* expected 36 bytes from 32",
        ),
        (
            b'{"x": {"dtype": "F32", "shape": [8], "data_offsets": [0, 32]},'
            b' "x": {"dtype": "F32", "shape": [8], "data_offsets": [32, 64]}}',
            "x: twice in the header",
        ),
    ],
    ids=lambda value: str(value)[:30],
)
def test_case_38_a_header_that_is_none(tmp_path, header, expected):
    write_header(tmp_path / WEIGHTS, header)
    with pytest.raises(InputError, match=expected) as caught:
        CheckpointReader(tmp_path)
    assert WEIGHTS in str(caught.value)


# ---------------------------------------------------------------- case 39: shards and their index


def test_shards_are_read_through_the_index(sharded):
    with warnings.catch_warnings(), CheckpointReader(sharded) as reader:
        warnings.simplefilter("error")
        assert len(reader.names) == 9
        assert reader.file("a.4") == "model-00002-of-00003.safetensors"
        assert torch.equal(reader.read("a.4"), torch.full((5, 3), 4.0))


def test_case_39_missing_shard(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(InputError, match=r"model-00002-of-00003\.safetensors is missing.*a\.3, a\.4, a\.5") as caught:
        CheckpointReader(sharded)
    assert "a.0" not in str(caught.value)


def test_case_39_entry_in_the_wrong_shard(sharded):
    edit_index(sharded, lambda m: m.update({"a.1": "model-00003-of-00003.safetensors"}))
    with pytest.raises(InputError, match=r"00003\.safetensors lacks a\.1 \(which is in model-00001-of-00003"):
        CheckpointReader(sharded)


def test_case_39_entry_in_no_shard(sharded):
    edit_index(sharded, lambda m: m.update({"b": "model-00003-of-00003.safetensors"}))
    with pytest.raises(InputError, match=r"lacks b \(which is in no shard"):
        CheckpointReader(sharded)


def test_case_39_old_single_file_beside_the_shards(sharded):
    save_file({"a.0": torch.full((1, 3), 99.0), "old": torch.ones(2)}, sharded / WEIGHTS)
    with pytest.warns(UserWarning, match=WEIGHTS):
        reader = CheckpointReader(sharded)
    with reader:
        assert torch.equal(reader.read("a.0"), torch.zeros(1, 3))
        assert "old" not in reader


def test_case_39_same_tensor_in_two_shards(sharded):
    save_file(
        {"a.8": torch.zeros(9, 3), "a.7": torch.zeros(8, 3), "a.6": torch.zeros(7, 3), "a.0": torch.ones(1, 3)},
        sharded / "model-00003-of-00003.safetensors",
    )
    with pytest.raises(InputError, match=r"a\.0 is in model-00001-of-00003\.safetensors and model-00003"):
        CheckpointReader(sharded)


def test_case_39_tensor_in_no_index_is_reported(sharded):
    edit_index(sharded, lambda m: m.pop("a.5"))
    with pytest.warns(UserWarning, match=r"index does not name ignored: a\.5"):
        reader = CheckpointReader(sharded)
    assert "a.5" not in reader
    assert len(reader.names) == 8


def test_case_39_all_problems_in_one_error(sharded):
    (sharded / "model-00001-of-00003.safetensors").unlink()
    edit_index(sharded, lambda m: m.update({"a.3": "model-00003-of-00003.safetensors", "new": "absent.safetensors"}))
    shutil.copy(sharded / "model-00002-of-00003.safetensors", sharded / "model-00001-of-00003.safetensors")
    with pytest.raises(InputError) as caught:
        CheckpointReader(sharded)
    message = str(caught.value)
    assert "\n" not in message
    for expected in (
        "absent.safetensors is missing, which should hold new",
        "model-00001-of-00003.safetensors lacks a.0 (which is in no shard)",
        "lacks a.1",
        "lacks a.2",
        "model-00003-of-00003.safetensors lacks a.3",
        "a.4 is in model-00001-of-00003.safetensors and model-00002-of-00003.safetensors",
    ):
        assert expected in message


def test_a_missing_shard_names_a_few_of_its_tensors(sharded):
    (sharded / "model-00003-of-00003.safetensors").unlink()
    edit_index(sharded, lambda m: m.update({f"b.{i}": "model-00003-of-00003.safetensors" for i in range(7)}))
    with pytest.raises(
        InputError, match=r"00003.safetensors is missing, which should hold [^;]*, and \d more$"
    ) as caught:
        CheckpointReader(sharded)
    assert str(caught.value).count("b.") < 4


@pytest.mark.parametrize("file", ["../model-00001-of-00003.safetensors", "/etc/passwd", "."])
def test_an_index_cannot_leave_the_folder(sharded, file):
    edit_index(sharded, lambda m: m.update({"a.0": file}))
    with pytest.raises(InputError, match=r"is missing, which should hold a\.0"):
        CheckpointReader(sharded)


@pytest.mark.parametrize("text", ["{", "[]", "{}", '{"weight_map": [1]}', '{"weight_map": {"a": 3}}'])
def test_an_index_that_is_none(sharded, text):
    (sharded / INDEX).write_text(text)
    with pytest.raises(InputError, match=INDEX):
        CheckpointReader(sharded)


def test_a_folder_without_weights(tmp_path):
    with pytest.raises(InputError, match=r"expected model\.safetensors or model\.safetensors\.index\.json"):
        CheckpointReader(tmp_path)


def test_json_that_is_nested_too_deeply_is_named(tmp_path):
    deep = b"[" * 100_000 + b"]" * 100_000
    (tmp_path / "deep.json").write_bytes(deep)
    with pytest.raises(InputError, match=r"deep\.json: not valid JSON"):
        read_json(tmp_path / "deep.json")
    (tmp_path / "deep.safetensors").write_bytes(len(deep).to_bytes(8, "little") + deep)
    with pytest.raises(InputError, match=r"deep\.safetensors: expected a safetensors header"):
        read_header(tmp_path / "deep.safetensors")
