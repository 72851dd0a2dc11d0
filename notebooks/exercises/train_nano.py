"""Exercises of 09_train_nano: a check for each, and a worked solution."""

import math
from collections.abc import Callable

import torch
from torch import Tensor

from inkling_ref.chat import Tokenizer
from inkling_ref.nano import rows
from inkling_ref.nano.muon import Muon, orthogonal
from inkling_ref.nano.vocabulary import SHIPPED
from inkling_ref.nano.world.scenes import TILE
from inkling_ref.quantization import fake_nvfp4_weight

# ---------------------------------------------------------------- 1: the tile of a centre


def check_1(candidate: Callable) -> None:
    """candidate(x, y, columns) -> number of the tile."""
    encoder = rows.Encoder(Tokenizer.from_pretrained(SHIPPED))
    for i in range(4):
        _, row = rows.make_row("picture", rows.generator("exercise", "tiles", i), encoder, 128)
        scene = row.scenes[0]
        for thing, (wanted, _, _) in zip(
            scene.things, rows.collate([row], encoder, 128).objects.tolist(), strict=False
        ):
            found = candidate(thing.x, thing.y, scene.grid[1])
            assert found == wanted, (
                f"({thing.x:.1f}, {thing.y:.1f}), {scene.grid[1]} columns: tile {wanted}, not {found}"
            )
    assert isinstance(found, int), f"a number of a tile is an int, not {type(found).__name__}"


def solution_1(x: float, y: float, columns: int) -> int:
    """Whole rows of tiles above, then whole tiles to the left: the row is y // 40, the column x // 40."""
    return int(y // TILE) * columns + int(x // TILE)


# ---------------------------------------------------------------- 2: straight through


def check_2(candidate: Callable) -> None:
    """candidate(w, rounding) -> rounded values whose gradient is that of w."""
    dice = torch.Generator().manual_seed(0)
    for rounding in (torch.round, fake_nvfp4_weight):
        w = (3 * torch.randn(2, 5, 32, generator=dice)).requires_grad_(True)
        found, probe = candidate(w, rounding), torch.randn(2, 5, 32, generator=dice)
        assert torch.allclose(found, rounding(w.detach()), atol=1e-5), "forward: not the rounded values"
        assert found.requires_grad, "no gradient reaches w at all"
        (gradient,) = torch.autograd.grad((found * probe).sum(), w)
        assert torch.allclose(gradient, probe), "backward: the gradient must pass unchanged"


def solution_2(w: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """Add the rounding error as a constant: `detach` hides it from the backward pass, so that w's derivative is 1."""
    return w + (rounding(w) - w).detach()


def wrong_2(w: Tensor, rounding: Callable[[Tensor], Tensor]) -> Tensor:
    """The true derivative of a staircase is zero."""
    return w * 0 + rounding(w).detach()


# ---------------------------------------------------------------- 3: a step of Muon


def check_3(candidate: Callable) -> None:
    """candidate(W, G, velocity, rate) -> (W, velocity)."""
    dice = torch.Generator().manual_seed(0)
    for shape in ((7, 3), (3, 7)):
        W, velocity = torch.randn(shape, generator=dice), torch.zeros(shape)
        parameter = torch.nn.Parameter(W.clone())
        muon = Muon([parameter])
        for step in range(3):
            G = torch.randn(shape, generator=dice)
            parameter.grad.copy_(G)
            muon.step(torch.tensor(0.1))
            W, velocity = candidate(W.clone(), G, velocity.clone(), 0.1)
            close = torch.allclose(W, parameter.detach(), atol=1e-5)
            assert close, f"{shape[0]} x {shape[1]}, step {step}: W is not what Muon makes of it"


def solution_3(W: Tensor, G: Tensor, velocity: Tensor, rate: float) -> tuple[Tensor, Tensor]:
    """Momentum as a moving average, looked ahead once more (Nesterov), made orthogonal; a tall matrix takes a larger
    step, since its orthogonal form spreads the same strength over more rows.
    """
    velocity = velocity.lerp(G, 0.05)
    direction = orthogonal(G.lerp(velocity, 0.95)[None])[0]
    rows_, columns = W.shape
    return W * (1 - 0.02 * rate) - direction * rate * math.sqrt(max(1, rows_ / columns)), velocity


# ---------------------------------------------------------------- 4: filling a row


def check_4(candidate: Callable) -> None:
    """candidate(start, lengths, T) -> how many turns."""
    cases = (
        (0, [40, 40, 40, 40], 128, 3),
        (9, [40, 40, 39], 128, 3),
        (9, [40, 40, 40], 128, 2),
        (5, [100, 60, 3], 128, 1),
        (5, [200], 128, 0),
        (0, [], 10, 0),
    )
    for start, lengths, T, wanted in cases:
        found = candidate(start, lengths, T)
        assert found == wanted, f"start {start}, turns of {lengths}, T = {T}: {wanted} fit, not {found}"


def solution_4(start: int, lengths: list[int], T: int) -> int:
    """Add up until one is too long, and stop there: a shorter one after it does not count."""
    for count, length in enumerate(lengths):
        start += length
        if start > T:
            return count
    return len(lengths)
