"""Exercises of 00_tour: a check for each, and a worked solution."""

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from inkling_ref.vision import process_images


def check_1(candidate: Callable) -> None:
    """candidate(width, height) -> tokens of a picture."""
    for width, height in ((160, 120), (40, 40), (41, 40), (1, 79), (640, 403)):
        _, grid = process_images([np.zeros((height, width, 3), np.uint8)])
        wanted, found = int(grid.prod()), candidate(width, height)
        assert found == wanted, f"{width} x {height} pixels are {wanted} tiles, got {found}"


def solution_1(width: int, height: int) -> int:
    """A tile that is filled only in part is a token all the same: round both sides up, then multiply."""
    return math.ceil(width / 40) * math.ceil(height / 40)


def check_2(candidate: Callable) -> None:
    """candidate(logits [T, V], tokens [T]) -> mean of -log p."""
    generator = torch.Generator().manual_seed(0)
    logits, tokens = 5 * torch.randn(7, 11, generator=generator), torch.arange(7)
    even = float(candidate(torch.zeros(7, 11), tokens))
    assert abs(even - math.log(11)) < 1e-5, f"all 11 tokens equally likely: log 11 = {math.log(11):.4f}, got {even:.4f}"
    wanted, found = float(F.cross_entropy(logits, tokens)), float(candidate(logits, tokens))
    assert abs(found - wanted) < 1e-4, f"expected {wanted:.4f}, got {found:.4f}"
    large = float(candidate(logits + 1000, tokens))
    assert abs(large - wanted) < 1e-2, f"logits larger by 1000 are the same probabilities, got {large}"


def solution_2(logits: Tensor, tokens: Tensor) -> Tensor:
    """log softmax(z) = z - logsumexp(z), and logsumexp subtracts the largest z before it takes exponentials."""
    log_p = logits - logits.logsumexp(dim=-1, keepdim=True)
    return -log_p.gather(-1, tokens[:, None]).mean()


def check_3(candidate: Callable) -> None:
    """candidate(n, E, k) -> share of the expert parameters."""
    cases = {(1, 384, 8): 8 / 384, (2, 384, 8): 16 / 384, (48, 384, 8): 1.0, (100, 384, 8): 1.0, (3, 16, 4): 12 / 16}
    for (n, E, k), wanted in cases.items():
        found = candidate(n, E, k)
        assert abs(found - wanted) < 1e-9, f"n = {n}, E = {E}, k = {k}: expected {wanted:.4f}, got {found}"


def solution_3(n: int, E: int, k: int) -> float:
    """D and I cancel. At most n k different experts are chosen, and there are no more than E."""
    return min(n * k, E) / E
