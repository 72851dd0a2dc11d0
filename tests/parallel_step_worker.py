"""What the ranks of a world check of their decoding steps: the logits and tokens of one process."""

import os
import sys
import time
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from helpers import random_ids, random_model, relative_rms
from parallel_draft_worker import random_drafter
from parallel_worker import SHORT, TOLERANCE, joined, prompts
from torch import Tensor

from inkling_ref import generation
from inkling_ref.config import InklingConfig
from inkling_ref.decode_step import GRAPHS, DecodeStep
from inkling_ref.draft_config import DSparkConfig
from inkling_ref.model import Inkling
from inkling_ref.parallel.apply import Mesh, parallelize
from inkling_ref.parallel.drafter import adopt
from inkling_ref.parallel.generation import generate
from inkling_ref.parallel.plan import Plan


@dataclass
class StepCase:
    name: str
    plan: Plan
    config: InklingConfig
    prompts: list[list[int]] = field(default_factory=lambda: prompts(range(3)))


def step_of(model: Inkling, rows: int, capacity: int, tokens: int, taps: DSparkConfig | None = None) -> DecodeStep:
    """On a GPU a graph, if the model is a rank's part."""
    page = 64 if model.device.type == "cuda" else 16
    step = DecodeStep(model, rows, capacity, tokens, page=page, taps=taps)
    if model.device.type == "cuda" and hasattr(model, "share"):
        step.capture()
    return step


def read_and_append(model: Inkling) -> list[Tensor]:
    """Logits after each chunk of unequal prompts, then of steps whose tokens are taken back; and their best tokens."""
    device, below = model.device, min(model.config.text.unpadded_vocab_size, 39)
    step, ids = step_of(model, 2, 40, 2), random_ids(2, 13, below=below).to(device)
    mask, answers = (torch.arange(13) >= torch.tensor([[0], [8]])).to(device), []
    for part, is_token in zip(ids.split([9, 4], dim=1), mask.split([9, 4], dim=1), strict=True):
        hidden = step.prefill(part, is_token)
    answers.append(model.llm.logits(hidden[:, None]))
    for i in range(12):  # beyond the window
        hidden = step(random_ids(2, 2, seed=i, below=below).to(device), [i % 2, 0] if i else None)
        answers += [model.llm.logits(hidden), step.next_tokens().clone()]
    return answers


def check_steps(rank: int, cases: list[StepCase], device: str = "cpu") -> None:
    """On GPUs parts run on the kernels, beside the reference."""
    backend, tolerance = ("triton", 5e-5) if device == "cuda" else ("torch", TOLERANCE)
    with torch.inference_mode(), joined(rank, Plan(tp=int(os.environ["WORLD_SIZE"])), device):
        for case in cases:
            print(f"{time.strftime('%T')} {case.name}", file=sys.stderr, flush=True)  # how far a world came
            whole = random_model(case.config).to(device)
            part = parallelize(random_model(case.config, backend=backend), Mesh.join(case.plan, device, SHORT))
            part = part.to(device)
            for actual, expected in zip(read_and_append(part), read_and_append(whole), strict=True):
                if actual.is_floating_point():
                    error = relative_rms(actual, expected)
                    assert error < tolerance, f"{case.name}: relative RMS error {error:.2g}"
                else:
                    assert torch.equal(actual, expected), f"{case.name}: {actual}, expected {expected}"
            step = step_of(part, len(case.prompts), 60, 1)
            for options in ({}, {"temperature": 0.9, "top_k": 3, "seed": 3}):
                expected = generation.generate(whole, case.prompts, 9, **options).tokens
                tokens = generate(part, case.prompts, max_new_tokens=9, step=step, **options).tokens
                assert tokens == expected, f"{case.name}: {tokens}, expected {expected}"
            plain = generation.generate(whole, case.prompts, 9).tokens
            drafter = adopt(random_drafter(part, num_attention_heads=4).to(device))
            step = step_of(part, len(case.prompts), 60, 1 + drafter.num_draft_tokens, drafter.config)
            result = generate(part, case.prompts, max_new_tokens=9, drafter=drafter, step=step)
            assert result.tokens == plain, f"{case.name}, drafts: {result.tokens}, expected {plain}"
            assert sum(result.stats.drafting.checked) > 0


def hold_a_graph(rank: int) -> None:
    """Beyond the end of the world."""

    class Graph:
        def reset(self) -> None:
            print(f"reset in a world of {dist.get_world_size()}", file=sys.stderr)

    graph = Graph()
    with joined(rank, Plan(2)):
        GRAPHS.add(graph)
    assert not dist.is_initialized()
