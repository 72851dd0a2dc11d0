"""Times of the projections of a decoding step: those into attention, and the one out of it."""

from torch import Tensor

from ... import fused
from .harness import Bench, D, G, H, R, d, normal, sets_of

K_TAPS = 4
_QUERIES, _KEYS = H * (2 * d + R + 1), G * d  # rows for queries, relative states, gate and sink; for keys, or values
SHAPES = {  # columns, and the rows of each weight
    "sliding": (D, [_QUERIES + 2 * _KEYS]),
    "full": (D, [_QUERIES, _KEYS + G * K_TAPS, _KEYS + G * K_TAPS]),  # dynamic taps are projections too
    "output": (H * d, [D]),
}


def projection_inputs(N: int, columns: int, rows: list[int]) -> list[tuple[list[Tensor], list[Tensor]]]:
    """Input sets: an input of N rows for each weight."""

    def make() -> tuple[Tensor, ...]:
        inputs = [normal(1, N, columns) for _ in rows]
        return *inputs, *(normal(n, columns, scale=columns**-0.5) for n in rows)

    return [(list(s[: len(rows)]), list(s[len(rows) :])) for s in sets_of(make)]


def bench_projections(bench: Bench) -> None:
    """1, 8 and 64 rows; the reference is one cuBLAS product a weight."""
    from ...kernels import projections as kernel

    for name, (columns, rows) in SHAPES.items():
        for N in (1, 8, 64):
            sets = projection_inputs(N, columns, rows)
            exact = fused.project(*([t.float() for t in tensors] for tensors in sets[0]))
            nbytes = sum(t.nbytes for tensors in sets[0] for t in tensors) + 2 * N * sum(rows)
            for arm, op in (("triton", kernel.project), ("eager", fused.project)):
                bench.arm(f"projections {name} {N}", arm, op, sets, exact, nbytes)
