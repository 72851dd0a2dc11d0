"""Worlds of GPUs on NCCL: every plan gives what one GPU gives. What the ranks check: `parallel_worker`."""

from dataclasses import replace

import pytest
import torch
from parallel_step_worker import check_steps
from parallel_worker import Case, start
from test_parallel import CUT, SEND, WORLDS, compute_alike, end_with_its_message, nano, succeed
from test_parallel_step import WORLDS as STEPS

from inkling_ref import checkpoint
from inkling_ref.config import FULL, SLIDING, InklingConfig, TextConfig
from inkling_ref.parallel.apply import Mesh
from inkling_ref.parallel.plan import Plan
from inkling_ref.parallel.synthetic import synthetic

DEVICE, GPUS = "cuda", torch.cuda.device_count()
pytestmark = pytest.mark.skipif(GPUS < 2, reason=f"torch sees {GPUS} GPUs here, expected 2 or more")
SIZES = [size for size in (2, 4, 8) if size <= GPUS] or [2]
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda d: str(d).removeprefix("torch."))

# As wide as Small, and longer than window and extent; 16 experts are enough to choose eight from, on eight ranks two.
SLICE = TextConfig(
    vocab_size=512, unpadded_vocab_size=499, num_hidden_layers=4, layer_types=[SLIDING, FULL, SLIDING, FULL],
    n_routed_experts=16, log_scaling_n_floor=300, eos_token_id=None,
)  # fmt: skip


def forms(size: int, tp: int) -> dict[str, Plan]:
    """Every form of exchange, on tp x dp ranks; where experts are cut, tp ranks share one."""
    dp = size // tp
    grid = (tp, dp)
    return {
        "sums": Plan(*grid),
        "sending": Plan(*grid, **SEND),
        "width": Plan(*grid, ep=dp),
        "width, sending": Plan(*grid, ep=dp, **SEND),
        "sequence": Plan(*grid, **CUT),
        "sequence, sending": Plan(*grid, **SEND, **CUT),
        "dp": Plan(1, size),
        "dp, sending": Plan(1, size, **SEND),
    }


def rows(plan: Plan) -> tuple[int, ...]:
    """Every other group has none."""
    return (2,) if plan.dp == 1 else tuple((i + 1) % 2 for i in range(plan.dp))


@pytest.mark.parametrize("size", SIZES)
def test_a_world_of_gpus_computes_what_one_does(size, tmp_path):
    """All that worlds of processes on CPUs show, in float32, drafts and pictures too."""
    compute_alike(size, [replace(case, device=DEVICE) for case in WORLDS[size]], tmp_path)


@dtypes
@pytest.mark.parametrize("size", SIZES)
def test_nano(size, dtype, tmp_path):
    """Logits, and greedy tokens with and without its drafter. Two ranks: it has two key/value heads."""
    cases = [
        nano(name, plan, rows(plan), *(["nano_drafts"] if name in ("sums", "sequence") else []))
        for name, plan in forms(size, 2).items()
    ]
    compute_alike(size, [replace(case, device=DEVICE, dtype=dtype) for case in cases], tmp_path)


@pytest.mark.parametrize("size", SIZES)
def test_four_layers_of_full_width(size, tmp_path):
    """From packed experts; each backend beside itself on one GPU."""
    folder, cases = tmp_path / "slice", []
    with torch.inference_mode():
        checkpoint.save(synthetic(InklingConfig(SLICE, None), Mesh.stand_in(Plan(), 0), DEVICE, torch.bfloat16), folder)
    torch.cuda.empty_cache()
    for backend, experts in (("torch", "dequantize"), ("triton", "packed")):
        where = {"device": DEVICE, "dtype": torch.bfloat16, "backend": backend, "experts": experts, "folder": folder}
        cases += [
            Case(f"{backend}, {name}", plan, checks=("long",), rows=rows(plan), **where)
            for name, plan in forms(size, size).items()
        ]
    compute_alike(size, cases, tmp_path)


@pytest.mark.parametrize("size", [size for size in SIZES if size in STEPS])
def test_steps_as_graphs_with_their_collectives(size, tmp_path):
    """The last of them is still held when its world ends."""
    succeed(start(size, tmp_path, check_steps, STEPS[size], DEVICE))


def test_one_gpus_rank_that_fails_brings_all_down_with_its_message(tmp_path):
    failures = [
        ("kill", 1, "rank 1 is gone without a message: killed"),
        ("hang", 1, "rank 1 did not come to"),
        ("raise", 1, "rank 1: ValueError: out of luck"),
    ]
    end_with_its_message(2, failures, tmp_path, DEVICE)
