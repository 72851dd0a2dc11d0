"""Worlds of processes for the tests: what every rank does, and how they are started.

A process forks from a server that has imported torch already, so that a world of eight starts in a second.
"""

import multiprocessing
import os
import re
import signal
import socket
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path

import torch
from helpers import IMAGE, random_ids, random_model, randomize, relative_rms
from torch import Tensor

from inkling_ref import checkpoint, generation
from inkling_ref.chat import Tokenizer, render
from inkling_ref.cli import NANO
from inkling_ref.config import InklingConfig
from inkling_ref.draft_config import DSparkConfig
from inkling_ref.draft_files import load_drafter
from inkling_ref.dspark import Drafter
from inkling_ref.model import Inkling
from inkling_ref.parallel.apply import Mesh, load, parallelize
from inkling_ref.parallel.generation import adopt, finish, generate
from inkling_ref.parallel.launch import world
from inkling_ref.parallel.plan import Plan
from inkling_ref.sampling import probabilities
from inkling_ref.tensor_files import CheckpointReader

SHORT = timedelta(seconds=20)  # for every collective
TOLERANCE = 1e-5
PICTURE = Path(__file__).parents[1] / "examples" / "shapes.png"


def start(size: int, folder: Path, function, *arguments, timeout: float = 120) -> list[tuple[int | None, str]]:
    """Run `function(rank, *arguments)` on `size` ranks; exit status (None: had to be stopped) and stderr of each."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallel_worker"])
    port = _free_port()
    files = [folder / f"stderr-{rank}" for rank in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, port, files[rank], function, arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + timeout
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    statuses = [process.exitcode for process in processes]
    for process in processes:
        process.kill()
    return [(s, f.read_text(errors="replace") if f.exists() else "") for s, f in zip(statuses, files, strict=True)]


def _free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def _rank(rank: int, size: int, port: int, file: Path, function, arguments: tuple) -> None:
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "WORLD_SIZE": f"{size}", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    with file.open("w") as stderr, redirect_stderr(stderr):
        os.dup2(stderr.fileno(), 2)
        function(rank, *arguments)


# ---------------------------------------------------------------- models


def text_config(**sizes) -> InklingConfig:
    """Of `tiny`, with heads that 2 ranks can share, other sizes, and no pictures."""
    sizes = {"swa_num_key_value_heads": 2, **sizes}
    return InklingConfig(replace(InklingConfig.tiny().text, **sizes), None)


def picture_config() -> InklingConfig:
    return replace(InklingConfig.tiny(), text=text_config().text)


def one_expert(model: Inkling) -> None:
    """Every token goes to expert 3."""
    for layer in model.llm.layers:
        layer.mlp.gate.bias[3] += 100


@dataclass(frozen=True)
class Case:
    """One plan for one model, through several kinds of calls."""

    name: str
    plan: Plan
    config: InklingConfig = field(default_factory=text_config)
    checks: tuple[str, ...] = ("forward", "decode", "generate")
    rows: tuple[int, ...] = (3,)  # of every dp group
    change: Callable[[Inkling], None] | None = None

    def model(self) -> Inkling:
        model = random_model(self.config)
        if self.change:
            self.change(model)
        return model


class Drafted(Drafter):
    """Drafts each row's known text, with a wrong token after 0, 2, 1 right ones, in turns."""

    def __init__(self, model: Inkling, texts: list[list[int]]) -> None:
        small = {
            "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "d_rel": 3,
            "intermediate_size": 20, "target_layer_ids": [1, 3, 4], "block_size": 5, "markov_rank": 7, "rel_extent": 9,
            "mask_token_id": model.config.text.vocab_size - 1,
        }  # fmt: skip
        super().__init__(DSparkConfig(**small), model)
        randomize(self, 3)
        self.texts, self.rounds, self.base = texts, 0, []

    def base_logits(self, h: Tensor) -> Tensor:
        raise AssertionError("adopt gives another")

    def propose(self, context, anchors, n, choose):
        proposal = super().propose(context, anchors, n, choose)
        self.base.append(proposal.tokens.clone())
        tokens, used = proposal.tokens.clone(), self.model.config.text.unpadded_vocab_size
        for row, text in enumerate(self.texts):
            p = context.lengths[row] + 1
            right = (text[p : p + n] + [0] * n)[:n]
            keep = (0, 2, 1)[(self.rounds + row) % 3]
            tokens[row] = torch.tensor([t if k < keep else (t + 1) % used for k, t in enumerate(right)])
        self.rounds += 1
        return proposal._replace(tokens=tokens)


# ---------------------------------------------------------------- what every rank of a world checks


def run_cases(rank: int, cases: list[Case]) -> None:
    whole = Plan(tp=int(os.environ["WORLD_SIZE"]))
    with torch.inference_mode(), world(whole, timeout=SHORT):
        for case in cases:
            mesh = Mesh.join(case.plan, timeout=SHORT)
            for check in case.checks:
                reference, model = case.model(), parallelize(case.model(), mesh)
                start = sum(case.rows[: model.share.dp_index])
                rows = range(start, start + case.rows[model.share.dp_index])
                try:
                    globals()[f"check_{check}"](reference, model, rows)
                except Exception as error:
                    raise AssertionError(f"{case.name}, {check}: {type(error).__name__}: {error}") from error


def close(actual: Tensor, expected: Tensor) -> None:
    error = relative_rms(actual, expected)
    assert error < TOLERANCE, f"relative RMS error {error:.2g}"


def prompts(rows: range) -> list[list[int]]:
    return [random_ids(5 + 4 * (i % 3), seed=i).tolist() for i in rows]


def check_forward(reference: Inkling, model: Inkling, rows: range) -> None:
    """All logits; a batch of unequal rows; packed documents."""
    ids = random_ids(9, 23)[list(rows)]
    documents = (torch.arange(23) >= 9).long().expand(len(rows), 23)
    mask = torch.arange(23) < torch.tensor([[23, 17, 4][i % 3] for i in rows])[:, None] if rows else None
    for options in ({}, {"attention_mask": mask}, {"document_ids": documents}):
        if rows:
            out = model(ids, **options)
            close(out.logits, reference(ids, **options).logits)
            assert out.logits.shape == (len(rows), 23, model.config.text.unpadded_vocab_size)
        finish(model)


def check_decode(reference: Inkling, model: Inkling, rows: range) -> None:
    """A prompt in chunks, tokens one by one, a crop."""
    if rows:
        ids = random_ids(9, 23)[list(rows)]
        ours, theirs = model.new_cache(len(rows)), reference.new_cache(len(rows))
        for start, stop in ((0, 11), (11, 13), (13, 14), (14, 15), (15, 23)):
            part = ids[:, start:stop]
            close(model(part, cache=ours).logits, reference(part, cache=theirs).logits)
        for cache in (ours, theirs):
            cache.crop([20 - i for i in range(len(rows))])
        close(model(ids[:, :2], cache=ours).logits, reference(ids[:, :2], cache=theirs).logits)
        assert ours.num_bytes() < theirs.num_bytes() or model.mesh.tp.size == 1
    finish(model)


def check_pictures(reference: Inkling, model: Inkling, rows: range) -> None:
    pixels = torch.rand(5, 8, 8, 3, generator=torch.Generator().manual_seed(1))
    images = {"pixel_values": pixels, "image_grid_thw": torch.tensor([[1, 2, 1], [1, 1, 3]])}
    ids = [[3, IMAGE, IMAGE, 5, 9, 30], [IMAGE, IMAGE, 7, IMAGE, 11, 2, 8, 21]]
    for options in ({}, {"prefill_chunk": 5}):
        expected = generation.generate(reference, ids, 5, **images, **options)
        assert generate(model, ids, max_new_tokens=5, **images, **options).tokens == expected.tokens


SETTINGS = (
    {},
    {"prefill_chunk": 4},
    {"temperature": 0.9, "top_k": 5, "seed": 3},
    {"temperature": 1.3, "top_p": 0.8, "seed": 4},
    {"temperature": 2.0, "top_p": 0.999, "seed": 5},
)


def check_generate(reference: Inkling, model: Inkling, rows: range) -> None:
    """Greedy and with candidates: the tokens of the single process."""
    model.llm.logits.few = 2  # so that top_p has to ask again, and leaves tokens unnamed
    for options in SETTINGS:
        if rows:
            n = 6 + 2 * model.share.dp_index  # groups that end at different times
            expected = generation.generate(reference, prompts(rows), n, **options).tokens
            assert generate(model, prompts(rows), max_new_tokens=n, **options).tokens == expected, options
        else:
            assert generate(model, None) is None


def check_head(reference: Inkling, model: Inkling, rows: range) -> None:
    """Candidates give the distributions that all logits give; temperature alone: 6,000 draws do."""
    head, temperature, D = model.llm.logits, 1.5, model.config.text.hidden_size
    head.few = 2
    states = torch.randn(1, 80, D, generator=torch.Generator().manual_seed(1))
    for sampling in ((0.0, None, None), (0.7, 4, None), (0.7, 9, 0.6), (0.3, None, 0.5), (1.5, None, 0.9)):
        head.sampling = sampling
        expected = probabilities(reference.llm.logits(states), *sampling)
        logits = torch.cat([head(state) for state in states.split(1, dim=1)], dim=1)  # how many are asked: by the row
        close(probabilities(logits, *sampling), expected)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    hidden = torch.randn(1, 1, D, generator=torch.Generator().manual_seed(2)) / 2
    head.sampling = (temperature, None, None)
    head.noise = torch.Generator().manual_seed(9 + model.mesh.rank)
    drawn = head(hidden.expand(1, 6000, -1))
    assert (drawn.isfinite().sum(dim=-1) == 1).all()
    seen = drawn.argmax(dim=-1)[0].bincount(minlength=drawn.shape[-1])
    expected = 6000 * (reference.llm.logits(hidden)[0, 0] / temperature).softmax(dim=-1)
    chi_square = float(((seen - expected).square() / expected).sum())
    assert chi_square < 85, chi_square  # of 39 degrees of freedom: less than once in 10,000
    generate(model, [[1, 2, 3]], max_new_tokens=3, temperature=1.0)


def check_speculative(reference: Inkling, model: Inkling, rows: range) -> None:
    """Rejections in every round; the drafter sees what it sees on one process."""
    if not rows:
        generate(model, None)
        return
    model.llm.logits.few = 2
    for options in SETTINGS[:1] + SETTINGS[2:4] + ({"temperature": 1.0, "seed": 6},):
        plain = generation.generate(reference, prompts(rows), 9, **options).tokens
        texts = [prompt + tokens for prompt, tokens in zip(prompts(rows), plain, strict=True)]
        alone, ours = Drafted(reference, texts), adopt(Drafted(model, texts))
        alone.base_logits = lambda h, alone=alone: Drafter.base_logits(alone, h)
        expected = generation.generate(reference, prompts(rows), 9, drafter=alone, **options)
        result = generate(model, prompts(rows), max_new_tokens=9, drafter=ours, **options)
        assert result.tokens == expected.tokens, options
        assert 0 < sum(result.stats.drafting.accepted) < sum(result.stats.drafting.checked)
        assert all(torch.equal(a, b) for a, b in zip(ours.base, alone.base, strict=True))
        held, whole = (drafter.markov_head.markov_w2.weight for drafter in (ours, alone))
        assert len(held) <= -(-len(whole) // model.mesh.plan.tp)


def check_nano(reference: Inkling, model: Inkling, rows: range) -> None:
    """Called with the shipped model, read slice by slice: a picture, the shipped drafter, a long call cut by tokens."""
    prompt = render(
        [{"role": "user", "content": [{"type": "image", "image": str(PICTURE)}, "Describe the picture."]}],
        Tokenizer.from_pretrained(NANO),
        config=model.config,
    )
    images = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
    ids = torch.tensor([prompt.input_ids])
    close(model(ids, **images).logits, reference(ids, **images).logits)
    finish(model)
    plain = generation.generate(reference, ids, 12, **images).tokens
    drafted = generate(model, ids, max_new_tokens=12, drafter=adopt(load_drafter(NANO, model)), **images)
    assert drafted.tokens == plain
    assert drafted.stats.decode_steps < 11


def run_folders(rank: int, folder: Path, plans: list[Plan], check: str) -> None:
    """Ranks that read their slices of a folder, against the whole folder on one process."""
    whole = Plan(tp=int(os.environ["WORLD_SIZE"]))
    with torch.inference_mode(), world(whole, timeout=SHORT):
        for plan in plans:
            for experts in ("packed", "dequantize"):
                model = load(folder, Mesh.join(plan, timeout=SHORT), experts=experts)
                read, share = model.bytes_read, share_of(folder, plan)
                assert abs(read / share - 1) < 0.02, f"{plan}: {read} bytes read, the share is {share:.0f}"
                globals()[f"check_{check}"](checkpoint.load(folder, experts=experts), model, range(3))


def share_of(folder: Path, plan: Plan) -> float:
    """Bytes of tensors that one of equal ranks has to read."""
    total = 0.0
    with CheckpointReader(folder) as reader:
        for name in reader.names:
            size = reader.layout(name).nbytes
            if ".experts." in name:
                total += size / plan.world
            elif re.search(r"llm\..*(attn\.(?!rel_logits_proj)|sconv|embed\.weight)", name):
                total += size / plan.tp
            else:
                total += size
    return total


# ---------------------------------------------------------------- what goes wrong


def fail(rank: int, failing: int, how: str) -> None:
    """One rank fails while it decodes; the others wait for it in a collective."""
    seconds = 2 if how == "hang" else 60
    with torch.inference_mode(), world(Plan(3), timeout=timedelta(seconds=seconds)) as mesh:
        config = text_config(hidden_size=33, num_attention_heads=3, num_key_value_heads=3, swa_num_key_value_heads=3)
        model = parallelize(random_model(config), mesh)
        calls = 0

        def hook(*_):
            nonlocal calls
            calls += 1
            if calls == 5 and rank == failing:
                if how == "raise":
                    raise ValueError("out of luck")
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "hang":
                    time.sleep(100)

        model.llm.layers[2].register_forward_pre_hook(hook)
        generate(model, [[1, 2, 3]], max_new_tokens=20)
    print("came to the end", file=sys.stderr)


def read_damaged(rank: int, folder: Path) -> None:
    with world(Plan(2), timeout=timedelta(seconds=60)) as mesh:
        model = load(folder, mesh)
        model(torch.tensor([[1, 2, 3]]))


def refuse(rank: int, plan: Plan, config: InklingConfig) -> None:
    with world(plan, timeout=SHORT) as mesh:
        parallelize(random_model(config), mesh)
