"""Muon: momentum, made orthogonal, for the matrices of nano."""

import math
from collections.abc import Iterable

import torch
from jaxtyping import Float
from torch import Tensor, nn


def orthogonal(g: Float[Tensor, "n r c"]) -> Float[Tensor, "n r c"]:
    """Each matrix's singular values brought to about 1, by five steps of an odd polynomial X -> aX + (bA + cA^2)X,
    A = X X^T. Its coefficients make small values grow fast and leave large ones between 0.7 and 1.2: good enough for
    a direction, and only matrix products.
    """
    x = g / (torch.linalg.matrix_norm(g, keepdim=True) + 1e-7)
    x = x.bfloat16() if g.is_cuda else x
    if tall := g.shape[-2] > g.shape[-1]:  # the Gram matrix of the shorter side
        x = x.mT
    for _ in range(5):
        gram = x @ x.mT
        x = 3.4445 * x + (-4.7750 * gram + 2.0315 * gram @ gram) @ x
    return (x.mT if tall else x).to(g.dtype)


class Muon:
    """Momentum, made orthogonal. Matrices of one shape are stacked (experts are stacks already): a few products in all.

    Takes over the parameters' storage: `p.data` and `p.grad` become views of the stacks.
    """

    def __init__(self, parameters: Iterable[nn.Parameter], momentum: float = 0.95, decay: float = 0.02) -> None:
        self.momentum, self.decay = momentum, decay
        by_shape: dict[tuple, list[nn.Parameter]] = {}
        for p in parameters:
            by_shape.setdefault(tuple(p.shape[-2:]), []).append(p)
        self.stacks = []
        for shape, members in by_shape.items():
            weights = torch.cat([p.data.view(-1, *shape) for p in members])
            gradients = torch.zeros_like(weights)
            counts = [p.numel() // (shape[0] * shape[1]) for p in members]
            for p, w, g in zip(members, weights.split(counts), gradients.split(counts), strict=True):
                p.data, p.grad = w.view(p.shape), g.view(p.shape)
            self.stacks.append((weights, gradients, torch.zeros_like(weights)))

    def step(self, rate: Tensor) -> None:
        """rate: the learning rate, on the device."""
        for weights, gradients, velocity in self.stacks:
            velocity.lerp_(gradients, 1 - self.momentum)
            direction = orthogonal(gradients.lerp(velocity, self.momentum))
            rows, columns = weights.shape[-2:]
            weights.mul_(1 - rate * self.decay).sub_(direction * (rate * math.sqrt(max(1, rows / columns))))
