"""Contract of the attention kernels."""

import math

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, check, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)
from test_attention import operands

from inkling_ref import attention
from inkling_ref.kernels import attention as attention_kernel

pytestmark = needs_device


# Below, at and above the tiles (16 and 64 rows; 64 and 128 keys), the window, the extent; sizes apart from powers of 2.
ATTENTION = {
    "prefill": ({"T": 13}, {"offsets": [0, 0]}),
    "prefill, several tiles": ({"T": 45, "G": 1, "d": 16, "X": 33}, {"offsets": [0, 0]}),
    "prefill, one query": ({"T": 1}, {"offsets": [0, 0]}),
    "prefill, one head a group": ({"T": 35, "H": 3}, {"offsets": [0, 0]}),
    "sliding": ({"T": 41}, {"offsets": [0, 0], "window": 9}),
    "sliding, window above T": ({"T": 7, "X": 19}, {"offsets": [0, 0], "window": 19}),
    "sliding, window of one": ({"T": 5, "X": 1}, {"offsets": [0, 0], "window": 1}),
    "window above extent": ({"T": 40}, {"offsets": [0, 0], "window": 12}),
    "window below extent": ({"T": 40}, {"offsets": [0, 0], "window": 5}),
    "chunk": ({"T": 37, "S": 120}, {"offsets": [83, 83]}),
    "chunk, sliding": ({"T": 37, "S": 60}, {"offsets": [23, 23], "window": 9}),
    "chunks of unequal rows": ({"T": 11, "S": 90}, {"offsets": [79, 30], "first_keys": [0, 3]}),
    "decode": ({"T": 1, "S": 301}, {"offsets": [300, 300]}),
    "decode, extent of a tile": ({"T": 1, "S": 257, "X": 128}, {"offsets": [256, 256]}),
    "decode, short": ({"T": 1, "S": 3}, {"offsets": [2, 2]}),
    "decode, unequal rows": ({"T": 1, "S": 301}, {"offsets": [300, 4], "first_keys": [7, 0]}),
    "decode, sliding": ({"T": 1, "S": 30}, {"offsets": [29, 20], "first_keys": [0, 18], "window": 9}),
    "decode, no bias reaches the first splits": ({"T": 1, "S": 530, "X": 3}, {"offsets": [529, 529]}),
    "verify 2": ({"T": 2, "S": 200}, {"offsets": [198, 198]}),
    "verify 8": ({"T": 8, "S": 261, "X": 70}, {"offsets": [253, 253]}),
    "verify 8, unequal rows": ({"T": 8, "S": 261}, {"offsets": [253, 0]}),
    "no key visible": ({"T": 3, "S": 20}, {"offsets": [17, 2], "first_keys": [0, 9]}),
    "released head": ({"T": 5, "H": 6, "G": 1, "d": 128, "R": 16, "S": 100, "X": 64}, {"offsets": [95, 95]}),
}


@dtypes
@pytest.mark.parametrize(("sizes", "arguments"), ATTENTION.values(), ids=ATTENTION)
def test_attend(sizes, arguments, dtype):
    check(attention_kernel.attend, attention.attend, operands(**sizes), dtype, **arguments)


def test_attend_packed_documents():
    ids = torch.tensor([[0] * 20 + [1] * 13 + [2] * 8, [0] * 41], device=DEVICE)
    tensors = operands(T=41)
    for window in (None, 9):
        arguments = {"offsets": [0, 0], "window": window, "document_ids": ids}
        check(attention_kernel.attend, attention.attend, tensors, torch.float32, **arguments)


SPLITS = {
    "1 split": (16, 16, 1, 2), "5 splits": (16, 16, 5, 2), "7 splits, near keys weigh 3": (16, 32, 7, 3),
    "more splits than steps": (16, 16, 23, 1),
}  # fmt: skip


@pytest.mark.parametrize("window", [None, 9], ids=["full", "sliding"])
@pytest.mark.parametrize(("rows", "keys", "splits", "weight"), SPLITS.values(), ids=SPLITS)
def test_attend_splits(rows, keys, splits, weight, window):
    tile = attention_kernel.Tile(rows, keys, splits, 1, 1, 1, weight)
    tensors, arguments = operands(T=3, S=91, X=40), {"offsets": [88, 50], "window": window}

    def tiled(**kwargs):
        return attention_kernel.attend_tiled(tile, **kwargs)

    check(tiled, attention.attend, tensors, torch.float32, **arguments)


def test_attend_reads_no_dead_slot():
    # Slots before a row's first key and past its last hold NaN; in the reference they would spoil the sums (0 NaN).
    tensors = operands(T=2, S=140)
    offsets, first_keys = [138, 60], [0, 11]
    exact = attention.attend(**tensors, offsets=offsets, first_keys=first_keys)
    given = {name: placed(t, torch.float32) for name, t in tensors.items()}
    for name in ("k", "v"):
        given[name][1, :, :11] = given[name][1, :, 62:] = math.nan
    actual = attention_kernel.attend(**given, offsets=offsets, first_keys=first_keys)
    assert relative_rms(actual.cpu(), exact) < 2e-6


def test_attend_reads_views_of_a_cache():
    tensors = operands(T=2, S=50)
    exact = attention.attend(**tensors, offsets=[48, 48])
    given = {name: t.to(DEVICE, torch.float32) for name, t in tensors.items()}
    for name in ("k", "v"):
        capacity = torch.full((2, 3, 77, 5), math.nan, device=DEVICE)
        capacity[:, :, :50] = given[name]
        given[name] = capacity[:, :, :50]
    actual = attention_kernel.attend(**given, offsets=[48, 48])
    assert relative_rms(actual.cpu(), exact) < 2e-6


def test_attend_follows_a_changed_profile():
    # P is kept transposed; a step of training, or a load, must not leave the old one in use.
    tensors = {name: t.to(DEVICE, torch.float32) for name, t in operands(T=5).items()}
    attention_kernel.attend(**tensors, offsets=[0, 0])
    tensors["profiles"].mul_(-2)
    actual = attention_kernel.attend(**tensors, offsets=[0, 0])
    assert relative_rms(actual, attention.attend(**tensors, offsets=[0, 0])) < 2e-6
