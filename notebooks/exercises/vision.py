"""Exercises of 06_vision: a check for each, and a worked solution."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from inkling_ref import vision

# ---------------------------------------------------------------- 1: what a picture costs


def check_1(candidate: Callable) -> None:
    """candidate(width, height) -> image tokens, with tiles of 40 pixels."""
    for width, height in ((40, 40), (41, 40), (160, 120), (1, 1), (1920, 1080), (39, 81)):
        pixels = np.zeros((height, width, 3), np.uint8)
        wanted, found = len(vision.process_images(pixels)[0]), candidate(width, height)
        assert found == wanted, f"{width} x {height} pixels (width x height) are {wanted} tokens, got {found}"


def solution_1(width: int, height: int) -> int:
    """Either side is padded to whole tiles, never scaled; the tiles of the rectangle are the tokens."""
    return math.ceil(width / 40) * math.ceil(height / 40)


# ---------------------------------------------------------------- 2: from a pixel to its patch


def check_2(candidate: Callable) -> None:
    """candidate(y, x, columns) -> number from 0 of the patch in block order; columns: tiles a row."""
    for rows, columns in ((1, 1), (3, 2), (2, 5)):
        place, _ = vision.patch_places(torch.tensor([[rows, columns]]), rows * columns, merge=2)
        for number, (row, column) in enumerate(place[0].tolist()):
            for y, x in ((20 * row, 20 * column), (20 * row + 19, 20 * column + 7)):
                found = candidate(y, x, columns)
                where = f"pixel (row {y}, column {x}) of a picture {columns} tiles wide"
                assert found == number, f"{where} lies in patch {number}, got {found}"


def solution_2(y: int, x: int, columns: int) -> int:
    """Four patches a tile: count the tiles before this one in raster order, then the patches inside it."""
    tile = y // 40 * columns + x // 40
    return 4 * tile + y % 40 // 20 * 2 + x % 40 // 20


# ---------------------------------------------------------------- 3: transparency, in integers


def check_3(candidate: Callable) -> None:
    """candidate(rgba: uint8 [rows, columns, 4]) -> integers [rows, columns, 3]."""
    rgba = torch.randint(256, (19, 37, 4), generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    rgba[:2, :, 3], rgba[2:4, :, 3] = 0, 255
    wanted, found = vision.composite(rgba), candidate(rgba)
    shape = tuple(found.shape) if isinstance(found, Tensor) else found
    assert shape == tuple(wanted.shape), f"expected a tensor {tuple(wanted.shape)}, got {shape}"
    assert torch.equal(found[:2].int(), wanted[:2]), "where alpha is 0 only the board is seen: squares of 8 pixels"
    assert torch.equal(found[2:4].int(), wanted[2:4]), "where alpha is 255 the colour itself is seen"
    off = (found.int() - wanted).abs().max().item()
    assert off == 0, f"half-transparent pixels are off by up to {off} (uint8 overflows; + 127 rounds to nearest)"


def solution_3(rgba: Tensor) -> Tensor:
    """In int32, as 255 * 255 does not fit a byte; (n + 127) // 255 is n / 255 to the nearest integer."""
    row, column = (torch.arange(n) // 8 for n in rgba.shape[:2])
    board = torch.where((row[:, None] + column) % 2 == 0, 204, 153)[..., None]
    colour, alpha = rgba[..., :3].int(), rgba[..., 3:].int()
    return (colour * alpha + board * (255 - alpha) + 127) // 255


# ---------------------------------------------------------------- 4: reading the position grid


def check_4(candidate: Callable) -> None:
    """candidate(i, n, g) -> list of g weights: what row i of n patch rows reads of each of g grid rows."""
    for n, g in ((3, 5), (12, 5), (5, 5), (1, 8)):
        place = torch.tensor([[[i, 0] for i in range(n)]])
        wanted = vision.position_weights(place, torch.tensor([[n, 1]]), g).view(n, g, g).sum(-1)
        for i in range(n):
            found = candidate(i, n, g)
            size = len(found) if hasattr(found, "__len__") else None
            assert size == g, f"expected {g} weights, got {found}"
            expected = [round(x, 3) for x in wanted[i].tolist()]
            assert np.allclose(found, wanted[i], atol=1e-5), f"row {i} of {n}, grid of {g}: {expected}, got {found}"


def solution_4(i: int, n: int, g: int) -> list[float]:
    """The centre of row i, in grid rows from the centre of the first, kept within the grid; a tent around it."""
    centre = min(max((i + 0.5) * g / n - 0.5, 0), g - 1)
    return [max(0.0, 1 - abs(centre - j)) for j in range(g)]


# ---------------------------------------------------------------- 5: rotary angles in two dimensions


def check_5(candidate: Callable) -> None:
    """candidate(row, column, d, theta) -> list of d/2 angles of the patch at (row, column), counted from 0."""
    for row, column, d, theta in ((0, 0, 8, 10000.0), (2, 5, 8, 10000.0), (7, 3, 32, 100.0)):
        wanted = vision.rotary_angles(torch.tensor([[[row, column]]]), d, theta)[0, 1]
        found = candidate(row, column, d, theta)
        size = len(found) if hasattr(found, "__len__") else None
        assert size == d // 2, f"expected {d // 2} angles, got {found}"
        hint = "columns come first, patches count from 1"
        expected = [round(x, 4) for x in wanted.tolist()]
        assert np.allclose(found, wanted, rtol=1e-5), f"patch ({row}, {column}), d = {d}: {expected} ({hint})"


def solution_5(row: int, column: int, d: int, theta: float) -> list[float]:
    """The same d/4 frequencies twice: times the column, then times the row, both counted from 1."""
    frequencies = [theta ** (-i / (d // 4)) for i in range(d // 4)]
    return [f * (column + 1) for f in frequencies] + [f * (row + 1) for f in frequencies]
