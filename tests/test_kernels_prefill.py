"""Contract of the prefill kernel for Hopper: on such a GPU only; what it refuses, and its profiles, everywhere."""

import math

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, INTERPRETED, check, placed, poisoned_outputs  # noqa: F401 (a fixture)
from test_attention import operands

from inkling_ref import attention
from inkling_ref.kernels import attention as attention_kernel
from inkling_ref.kernels import prefill

HOPPER = not INTERPRETED and torch.cuda.is_available() and torch.cuda.get_device_capability() == (9, 0)
needs_hopper = pytest.mark.skipif(not HOPPER, reason="needs a GPU of compute capability 9.0, and no interpreter")


def released_head(T, S=None, B=2, H=4, G=2, X=200):
    """Operands with the head size and rank that the kernel is for."""
    return operands(B=B, T=T, H=H, G=G, d=128, R=16, X=X, S=S)


# Below, at and above a tile (64 queries), a step (128 keys; the last has 64 or fewer, or more), window and extent.
CASES = {
    "one query": ({"T": 1}, {"offsets": [0, 0]}),
    "a tile": ({"T": 64}, {"offsets": [0, 0]}),
    "a tile and one": ({"T": 65}, {"offsets": [0, 0]}),
    "tiles, steps with and without bias": ({"T": 517}, {"offsets": [0, 0]}),
    "chunk": ({"T": 131, "S": 700}, {"offsets": [569, 569]}),
    "chunk, slots left over": ({"T": 70, "S": 900}, {"offsets": [411, 411]}),
    "chunks of unequal rows": ({"T": 90, "S": 700}, {"offsets": [610, 30], "first_keys": [0, 3]}),
    "rows that begin late": ({"T": 90, "S": 700}, {"offsets": [500, 500], "first_keys": [333, 333]}),
    "no key visible": ({"T": 70, "S": 300}, {"offsets": [2, 2], "first_keys": [69, 69]}),
    "sliding": ({"T": 517}, {"offsets": [0, 0], "window": 200}),
    "sliding, window above T": ({"T": 130}, {"offsets": [0, 0], "window": 200}),
    "sliding, chunk": ({"T": 131, "S": 700}, {"offsets": [569, 569], "window": 200}),
    "sliding, unequal rows": ({"T": 90, "S": 700}, {"offsets": [610, 30], "first_keys": [450, 3], "window": 200}),
    "window below extent": ({"T": 300}, {"offsets": [0, 0], "window": 70}),
    "released heads": ({"T": 1300, "B": 1, "H": 6, "G": 1, "X": 1024}, {"offsets": [0]}),
    "released heads, sliding": ({"T": 1300, "B": 1, "H": 6, "G": 1, "X": 1024}, {"offsets": [0], "window": 1024}),
}


@needs_hopper
@pytest.mark.parametrize(("sizes", "arguments"), CASES.values(), ids=CASES)
def test_attend(sizes, arguments):
    check(prefill.attend, attention.attend, released_head(**sizes), torch.bfloat16, **arguments)


@needs_hopper
def test_attend_reads_no_dead_slot():
    # Slots before a row's first key and past its last hold NaN; in the reference they would spoil the sums (0 NaN).
    tensors = released_head(T=70, S=700)
    for window in (None, 200):
        arguments = {"offsets": [500, 60], "first_keys": [11, 37], "window": window}
        given = {name: placed(t, torch.bfloat16) for name, t in tensors.items()}
        exact = attention.attend(**{name: t.double() for name, t in given.items()}, **arguments)
        for name in ("k", "v"):
            for row, (low, high) in enumerate(((11, 570), (37, 130))):
                given[name][row, :, :low] = given[name][row, :, high:] = math.nan
        assert relative_rms(prefill.attend(**given, **arguments), exact) < 1e-2


@needs_hopper
def test_attend_reads_views():
    # Slots of a longer cache, and heads of one projection of queries and gates.
    tensors = released_head(T=90, S=300)
    arguments = {"offsets": [210, 210]}
    given = {name: t.to(DEVICE, torch.bfloat16) for name, t in tensors.items()}
    exact = attention.attend(**{name: t.double() for name, t in given.items()}, **arguments)
    for name in ("k", "v"):
        capacity = torch.full((2, 2, 777, 128), math.nan, device=DEVICE, dtype=torch.bfloat16)
        capacity[:, :, :300] = given[name]
        given[name] = capacity[:, :, :300]
    both = torch.cat([given["q"].flatten(2), given["gate"]], dim=-1)
    given["q"], given["gate"] = both[..., :512].unflatten(-1, (4, 128)), both[..., 512:]
    assert relative_rms(prefill.attend(**given, **arguments), exact) < 1e-2


@needs_hopper
def test_attend_of_the_backend_takes_it_where_it_suits(monkeypatch):
    calls = []
    monkeypatch.setattr(prefill, "attend", lambda *args: calls.append(args))
    for T in (8, 4500):  # 71 tiles of 2 pairs of heads: one for every processor
        given = {name: placed(t, torch.bfloat16) for name, t in released_head(T=T, B=1).items()}
        attention_kernel.attend(**given, offsets=[0])
    assert len(calls) == 1


def test_profiles_fall_with_distance_between_zeros():
    profiles = operands(R=16, X=37)["profiles"].bfloat16()
    rows = prefill._falling(profiles).view(torch.bfloat16)
    assert rows.shape == (37 + 2 * prefill._PAD, 16)
    inside = slice(prefill._PAD, prefill._PAD + 37)
    assert torch.equal(rows[inside], profiles.t().flip(0))
    assert rows.abs().sum() == rows[inside].abs().sum()


def test_suits_no_other_device():
    given = {name: t.bfloat16() for name, t in released_head(T=300).items()}
    sizes = {name: given[name] for name in ("q", "k", "v", "r", "gate", "profiles")}
    assert not prefill.suits(**sizes, window=None)
