"""Contract of the projections of a decoding step."""

import math

import pytest
import torch
from helpers import relative_rms
from kernel_contract import DEVICE, bound, dtypes, needs_device, placed, poisoned_outputs  # noqa: F401 (a fixture)

from inkling_ref import fused
from inkling_ref.errors import InputError
from inkling_ref.kernels import projections
from inkling_ref.kernels.projections import FEW, Tile, choose_tile, project

pytestmark = needs_device

SHAPES = {  # B, T, D, rows of the weights
    "one row, less than a tile": (1, 1, 24, [7]),
    "odd columns": (2, 3, 331, [45]),
    "whole steps": (1, 5, 512, [64]),
    "three inputs": (3, 1, 270, [70, 33, 5]),
    "as many rows as a tile has": (2, 8, 300, [32, 31]),
    "PyTorch's": (1, FEW + 1, 100, [37, 11]),
}
if DEVICE == "cuda":
    SHAPES |= {
        "released, sliding": (1, 1, 4608, [15152]),
        "released, full": (4, 2, 4608, [13104, 1056, 1056]),
        "released, output": (1, 8, 6144, [4608]),
    }


def case(B, T, D, rows, dtype=torch.float16):
    """Inputs and weights, each in the middle of NaN."""
    inputs = [placed(torch.randn(B, T, D), dtype) for _ in rows]
    return inputs, [placed(torch.randn(n, D) / math.sqrt(D), dtype) for n in rows]


@dtypes
@pytest.mark.parametrize(("B", "T", "D", "rows"), SHAPES.values(), ids=SHAPES)
def test_project(B, T, D, rows, dtype):
    inputs, weights = case(B, T, D, rows, dtype)
    exact = fused.project([x.double() for x in inputs], [w.double() for w in weights])
    for a, b, c in zip(project(inputs, weights), fused.project(inputs, weights), exact, strict=True):
        assert a.dtype == dtype
        assert relative_rms(a, c) <= bound(dtype, b, c)


def test_few_rows_are_the_kernels(monkeypatch):
    inputs, weights = case(2, 8, 40, [9])
    expected = fused.project(inputs, weights)
    monkeypatch.setattr(projections.fused, "project", None)
    assert relative_rms(project(inputs, weights)[0], expected[0]) < 1e-3


def test_strided_tensors_are_read():
    inputs, weights = case(2, 3, 70, [37, 4])
    strided = [torch.stack([x, x * math.nan], dim=-1)[..., 0] for x in inputs]
    columns = torch.cat(weights).t().contiguous().t().split([37, 4])
    rows = torch.cat([inputs[0], inputs[1] * math.nan], dim=2)[..., :70], inputs[1]  # as wide projections are
    for xs, ws in ((strided, weights), (inputs, columns), (rows, weights)):
        assert all(map(torch.equal, project(list(xs), list(ws)), project(inputs, weights)))


def test_a_row_is_the_same_in_any_batch():
    inputs, weights = case(1, 7, 600, [50])
    together = project(inputs, weights)[0]
    alone = [project([inputs[0][:, i : i + 1]], weights)[0] for i in range(7)]
    assert torch.equal(torch.cat(alone, dim=1), together)


def test_nan_stays_in_its_row_and_its_weight():
    inputs, weights = case(1, 3, 90, [40, 40])
    expected = project(inputs, weights)
    inputs[0][0, 1] = math.nan
    weights[1][3] = math.inf
    actual = project(inputs, weights)
    assert actual[0][0, 1].isnan().all()
    assert torch.equal(actual[0][:, [0, 2]], expected[0][:, [0, 2]])
    others = [i for i in range(40) if i != 3]
    assert torch.equal(actual[1][..., others], expected[1][..., others])


@pytest.mark.skipif(DEVICE == "cpu", reason="no GPU")
def test_in_a_graph_rows_are_read_when_they_are_there(monkeypatch):
    # Programmatic dependent launch: a product starts while the one in front of it, whose output it reads, still runs.
    monkeypatch.undo()  # poisoning would put a kernel between them
    weights = [placed(torch.randn(n, k) / math.sqrt(k), torch.bfloat16) for n, k in ((4096, 512), (512, 4096))] * 6
    x = torch.empty(1, 3, 512, dtype=torch.bfloat16, device=DEVICE)

    def chain():
        y = x
        for w in weights:
            (y,) = project([y], [w])
        return y

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = chain()
    for _ in range(20):
        x.normal_()
        graph.replay()
        assert torch.equal(y, chain())


def test_what_does_not_go_together_is_refused():
    inputs, weights = case(1, 1, 16, [8, 5])
    with pytest.raises(InputError, match=r"triton project: weights\[1\] in torch.float32, expected float16"):
        project(inputs, [weights[0], weights[1].float()])
    with pytest.raises(InputError, match="triton project: 2 inputs and 1 weights, expected a weight for each"):
        project(inputs, weights[:1])


@pytest.mark.parametrize(
    ("N", "counts", "expected"),
    [
        pytest.param(1, [15152], Tile(29, 32, 8, 4, 4), id="sliding"),
        pytest.param(16, [13104, 1056, 1056], Tile(29, 32, 16, 4, 4), id="full, 16 rows"),
        pytest.param(8, [4608], Tile(18, 32, 8, 8, 4), id="output"),
        pytest.param(9, [32 * 132 * 9], Tile(32, 32, 16, 4, 3), id="many rows"),
        pytest.param(9, [40, 41], Tile(1, 16, 16, 8, 9), id="few rows"),
    ],
)
def test_programs_fill_the_processors(monkeypatch, N, counts, expected):
    monkeypatch.setattr(projections, "INTERPRETED", False)
    monkeypatch.setattr(projections, "processors", lambda _: 132)  # an H200's
    h200 = type("", (), {"shared_memory_per_multiprocessor": 228 * 1024})
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: h200)
    tile = choose_tile(N, counts, torch.device("cuda"))
    assert tile == expected
    programs = -(-sum(-(-n // tile.share) for n in counts) // 132)
    shared = 2 * tile.ways * 64 * ((tile.stages - 1) * tile.rows + tile.tokens) + 1024
    assert programs * shared <= 228 * 1024 or tile.stages == 3
