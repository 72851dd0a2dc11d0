"""Worlds of processes for the tests: what every rank does, and how they are started.

A process forks from a server that has imported torch already, so that a world of eight starts in a second. What one
process computes with the whole model is computed once, before, and lies in a file for all ranks.
"""

import ctypes
import multiprocessing
import os
import random
import re
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, suppress
from dataclasses import dataclass, field, replace
from datetime import timedelta
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import torch
from helpers import IMAGE, random_ids, random_model, randomize, relative_rms
from torch import Tensor

from inkling_ref import checkpoint, generation
from inkling_ref.chat import Prompt, Tokenizer, render
from inkling_ref.cli import NANO
from inkling_ref.config import InklingConfig
from inkling_ref.draft_config import DSparkConfig
from inkling_ref.dspark import Drafter
from inkling_ref.measure.bench.harness import typical_rms
from inkling_ref.model import Inkling
from inkling_ref.parallel.apply import Mesh, load, parallelize
from inkling_ref.parallel.drafter import adopt, load_drafter
from inkling_ref.parallel.generation import finish, generate
from inkling_ref.parallel.in_turn import Called
from inkling_ref.parallel.launch import world
from inkling_ref.parallel.plan import Plan
from inkling_ref.sampling import probabilities
from inkling_ref.tensor_files import CheckpointReader

SHORT = timedelta(seconds=60)  # for every collective
TOLERANCE = 1e-5
ROUNDING = 1.5  # in 16 bits: a world may be so much further from float32 than one process
PICTURE = Path(__file__).parents[1] / "examples" / "shapes.png"


@dataclass
class Ranks:
    """Processes that have been started, and where each writes its stderr."""

    processes: list
    files: list[Path]

    def ended(self, timeout: float = 300) -> list[tuple[int | None, str]]:
        """Exit status (None: had to be stopped) and stderr of each."""
        end = time.monotonic() + timeout
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
        statuses = [process.exitcode for process in self.processes]
        for process in self.processes:
            process.kill()
        texts = [file.read_text(errors="replace") if file.exists() else "" for file in self.files]
        return list(zip(statuses, texts, strict=True))


def launch(size: int, folder: Path, function: Callable, *arguments: Any) -> Ranks:
    """`function(rank, *arguments)` on `size` ranks."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["parallel_worker"])
    port = _free_port()
    files = [folder / f"stderr-{rank}" for rank in range(size)]
    processes = [
        context.Process(target=_rank, args=(rank, size, port, files[rank], function, arguments)) for rank in range(size)
    ]
    for process in processes:
        process.start()
    return Ranks(processes, files)


def start(size: int, folder: Path, function: Callable, *arguments: Any) -> list[tuple[int | None, str]]:
    return launch(size, folder, function, *arguments).ended()


@contextmanager
def joined(rank: int, plan: Plan, device: str = "cpu", timeout: timedelta = SHORT) -> Iterator[Mesh]:
    """`world`, each rank on a GPU of its own."""
    if device == "cuda":
        torch.cuda.set_device(rank)
    with world(plan, device, timeout) as mesh:
        yield mesh


def _free_port() -> int:
    """Of those that no system gives to outgoing connections: another test could have it before rank 0 listens."""
    while True:
        port = random.SystemRandom().randrange(10_000, 32_000)  # tests beside this one share the seed of `random`
        with socket.socket() as s, suppress(OSError):
            s.bind(("127.0.0.1", port))
            return port


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
    checks: tuple[str, ...] = ("forward", "decode", "sample")
    rows: tuple[int, ...] = (3,)  # of every dp group
    change: Callable[[Inkling], None] | None = None
    folder: Path | None = None  # of a checkpoint, instead of `config`
    experts: str = "dequantize"
    device: str = "cpu"
    dtype: torch.dtype = torch.float32
    backend: str = "torch"

    @property
    def where(self) -> dict[str, Any]:
        return {"device": self.device, "dtype": self.dtype, "backend": self.backend}

    def whole(self) -> Inkling:
        if self.folder:
            return checkpoint.load(self.folder, experts=self.experts, **self.where)
        model = random_model(self.config, dtype=self.dtype, backend=self.backend).to(self.device)
        if self.change:
            self.change(model)
        return model

    def part(self, mesh: Mesh) -> Inkling:
        if self.folder is None:
            return parallelize(self.whole(), mesh)
        model = load(self.folder, mesh, experts=self.experts, **self.where)
        read, share = model.bytes_read, share_of(self.folder, self.plan, mesh.rank)
        assert abs(read / share - 1) < 0.02, f"{read} bytes read, the share is {share:.0f}"
        return model

    def range(self, dp_index: int) -> range:
        """The rows of a group."""
        first = sum(self.rows[:dp_index])
        return range(first, first + self.rows[dp_index])


class Drafted(Drafter):
    """Drafts each row's known text, with a wrong token after 0, 2, 1 right ones, in turns."""

    def __init__(self, model: Inkling, texts: list[list[int]]) -> None:
        small = {
            "num_hidden_layers": 2, "num_attention_heads": 12, "head_dim": 6, "d_rel": 3,
            "num_key_value_heads": model.config.text.num_key_value_heads,
            "intermediate_size": 20, "target_layer_ids": [1, 3, 4], "block_size": 5, "markov_rank": 7, "rel_extent": 9,
            "mask_token_id": model.config.text.vocab_size - 1,
        }  # fmt: skip
        super().__init__(DSparkConfig(**small), model)
        randomize(self, 3)
        self.to(model.device)
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
            own = [t if k < keep else (t + 1) % used for k, t in enumerate(right)]
            tokens[row] = torch.tensor(own, device=tokens.device)
        self.rounds += 1
        return proposal._replace(tokens=tokens)


# ---------------------------------------------------------------- what every rank of a world checks


def expect(cases: list[Case], file: Path) -> None:
    """What the whole models give to every group of every case; in 16 bits, what they may give."""
    wholes: dict[tuple, Inkling] = {}
    found: dict[tuple, Any] = {}
    answers: list[dict] = []

    def answer(case: Case, check: str, rows: range, *chosen: list[Tensor]) -> Any:
        key = (repr(case.config), case.change, case.folder, case.experts, *case.where.values())
        if (key, check, rows) not in found:
            model = wholes.get(key) or wholes.setdefault(key, case.whole())
            found[key, check, rows] = globals()[f"ask_{check}"](model, generation.generate, rows, *chosen)
        return found[key, check, rows]

    with torch.inference_mode():
        for case in cases:
            asked = [check for check in case.checks if f"ask_{check}" in globals()]
            answers.append({})
            for check, dp_index in product(asked, range(case.plan.dp)):
                if not (rows := case.range(dp_index)):
                    continue
                chosen, exact = [], None
                if case.dtype != torch.float32:
                    exact = answer(replace(case, dtype=torch.float32, backend="torch"), check, rows)
                    chosen = chosen_experts(exact)
                given = answer(case, check, rows, *chosen)
                answers[-1][check, dp_index] = given if exact is None else allowed(given, exact)
    torch.save(answers, file)
    wholes.clear()
    torch.cuda.empty_cache()  # the first rank needs it


def chosen_experts(answer: Any) -> list[list[Tensor]]:
    """Those that `ask_long` recorded, if it did: models in 16 bits take them, and differ by rounding alone."""
    chosen = [a for a in answer if isinstance(a, Tensor) and not a.is_floating_point()]
    return [chosen] if chosen else []


def allowed(answer: Any, exact: Any) -> Any:
    """Tokens as they are; of logits those of float32, and how far from them a typical token may be."""
    if isinstance(answer, Tensor) and answer.is_floating_point():
        return exact, ROUNDING * typical_rms(answer, exact)
    if isinstance(answer, list) and any(isinstance(a, Tensor) for a in answer):
        return [allowed(a, e) for a, e in zip(answer, exact, strict=True)]
    return answer


def run_cases(rank: int, cases: list[Case], file: Path) -> None:
    """Wrong answers are told together, after the last case; any other error ends the world."""
    device, wrong = cases[0].device, []
    with torch.inference_mode(), joined(rank, Plan(tp=int(os.environ["WORLD_SIZE"])), device):
        answers = torch.load(file, map_location=device)
        for case, expected in zip(cases, answers, strict=True):
            print(f"{time.strftime('%T')} {case.name}", file=sys.stderr, flush=True)  # how far a world came
            try:
                model = case.part(Mesh.join(case.plan, device, timeout=SHORT))
                rows = case.range(model.share.dp_index)
                for check in case.checks:
                    ask = globals().get(f"ask_{check}")
                    if ask is None:
                        globals()[f"check_{check}"](case.whole(), case.part(model.mesh), rows)
                        continue
                    given = expected.get((check, model.share.dp_index), [])
                    answer = ask(model, generate, rows, *chosen_experts(given))
                    finish(model)
                    if not rows:
                        continue
                    try:
                        same(answer, given)
                    except AssertionError as error:
                        wrong.append(f"{case.name}, {check}: {error}")
            except Exception as error:
                raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error
    assert not wrong, "; ".join(wrong)


def same(actual: Any, expected: Any) -> None:
    """Logits within the tolerance, or as `allowed`; tokens exactly."""
    wrong = list(differences(actual, expected))
    assert not wrong, ", ".join(wrong)


def differences(actual: Any, expected: Any) -> Iterator[str]:
    if isinstance(expected, Tensor):
        error = relative_rms(actual, expected)
        if not error < TOLERANCE:
            yield f"relative RMS error {error:.2g}"
    elif isinstance(expected, tuple):
        error = typical_rms(actual, expected[0])
        if not error <= expected[1]:
            yield f"typical error {error:.2g} of {list(actual.shape)}, expected at most {expected[1]:.2g}"
    elif isinstance(expected, list) and expected and isinstance(expected[0], (Tensor, list, tuple)):
        for a, b in zip(actual, expected, strict=True):
            yield from differences(a, b)
    elif actual != expected:
        yield f"{actual}, expected {expected}"


def prompts(rows: range) -> list[list[int]]:
    return [random_ids(5 + 4 * (i % 3), seed=i).tolist() for i in rows]


# Of a model, whole or a rank's part, and its `generate`: what both must give. A group without rows makes as many calls
# of `generate` as the others, and nothing else.


def written(generate: Callable, model: Inkling, ids: list[list[int]], **options: Any) -> list[list[int]] | None:
    result = generate(model, ids or None, **options)
    return result.tokens if ids else None


def ask_forward(model: Inkling, generate: Callable, rows: range) -> list[Tensor]:
    """All logits; of a batch of unequal rows; of packed documents."""
    if not rows:
        return []
    ids = random_ids(9, 23)[list(rows)].to(model.device)
    documents = (torch.arange(23) >= 9).long().expand(len(rows), 23).to(model.device)
    mask = (torch.arange(23) < torch.tensor([[23, 17, 4][i % 3] for i in rows])[:, None]).to(model.device)
    return [model(ids, **options).logits for options in ({}, {"attention_mask": mask}, {"document_ids": documents})]


def ask_decode(model: Inkling, generate: Callable, rows: range) -> list[Tensor]:
    """A prompt in chunks, tokens one by one, a crop."""
    if not rows:
        return []
    ids = random_ids(9, 23)[list(rows)].to(model.device)
    cache = model.new_cache(len(rows))
    cuts = ((0, 11), (11, 13), (13, 14), (14, 15), (15, 23))
    logits = [model(ids[:, first:stop], cache=cache).logits for first, stop in cuts]
    cache.crop([20 - i for i in range(len(rows))])
    return [*logits, model(ids[:, :2], cache=cache).logits]


def ask_long(model: Inkling, generate: Callable, rows: range, chosen: list[Tensor] | None = None) -> list[Tensor]:
    """More tokens than windows and tiles of kernels have, then single ones and a few at once; and `chosen_experts`."""
    if not rows:
        return []
    ids = random_ids(9, 1301)[list(rows)].to(model.device)
    called, cache, cuts = Called(model, ids, chosen), model.new_cache(len(rows)), (0, 1293, 1294, 1295, 1301)
    prompt, *steps = (called.read(model, first, stop, cache=cache).logits for first, stop in pairwise(cuts))
    called.routes.end()
    return [prompt, torch.cat(steps, dim=1), *called.routes.chosen]


def ask_greedy(model: Inkling, generate: Callable, rows: range) -> list:
    new = 4 + 2 * rows.start  # groups that end at different times
    chunked = {"prefill_chunk": 4}
    return [written(generate, model, prompts(rows), max_new_tokens=new, **options) for options in ({}, chunked)]


SETTINGS = (
    {},
    {"temperature": 0.9, "top_k": 5, "seed": 3},
    {"temperature": 1.3, "top_p": 0.8, "seed": 4},
    {"temperature": 2.0, "top_p": 0.999, "seed": 5},
)


def ask_sample(model: Inkling, generate: Callable, rows: range) -> list:
    """Greedy and with candidates."""
    if hasattr(model, "share"):
        model.llm.logits.few = 2  # so that top_p has to ask again, and leaves tokens unnamed
    new = 6 + 2 * rows.start
    return [written(generate, model, prompts(rows), max_new_tokens=new, **options) for options in SETTINGS]


def ask_pictures(model: Inkling, generate: Callable, rows: range) -> list:
    """Prompts with one image each, of two tiles and three, whole and in chunks that cut the images."""
    tiles = torch.rand(5, 8, 8, 3, generator=torch.Generator().manual_seed(1)).split([2, 3])
    grids, ids = ([1, 2, 1], [1, 1, 3]), ([3, IMAGE, IMAGE, 5, 9, 30], [IMAGE, IMAGE, 7, IMAGE, 11, 2, 8, 21])
    images = (
        {
            "pixel_values": torch.cat([tiles[i % 2] for i in rows]),
            "image_grid_thw": torch.tensor([grids[i % 2] for i in rows]),
        }
        if rows
        else {}
    )
    asked = [ids[i % 2] for i in rows]
    return [written(generate, model, asked, max_new_tokens=5, **images, **o) for o in ({}, {"prefill_chunk": 5})]


def ask_nano(model: Inkling, generate: Callable, rows: range) -> list:
    """Of the shipped model: a question, of even rows about a picture; logits and the first greedy tokens."""
    if not rows:
        return [written(generate, model, [])]
    answers: list = []
    for row in rows:
        parts = ["Describe the picture.", "What is 7 + 5?"][row % 2 :][:1]
        if row % 2 == 0:
            parts = [{"type": "image", "image": str(PICTURE)}, *parts]
        prompt = nano_prompt(*parts)
        images = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw} if row % 2 == 0 else {}
        placed = {name: t.to(model.device) for name, t in images.items()}
        answers.append(model(torch.tensor([prompt.input_ids], device=model.device), **placed).logits)
        answers.append(written(generate, model, [prompt.input_ids], max_new_tokens=3, **images))
    return answers


def nano_prompt(*parts: Any) -> Prompt:
    messages = [{"role": "user", "content": list(parts)}]
    return render(messages, Tokenizer.from_pretrained(NANO), config=InklingConfig.from_pretrained(NANO))


# The rest looks into a rank's part, and needs the whole model beside it.


def check_head(reference: Inkling, model: Inkling, rows: range) -> None:
    """Candidates give the distributions that all logits give; temperature alone: 6,000 draws do."""
    head, temperature, D = model.llm.logits, 1.5, model.config.text.hidden_size
    head.few = 2
    states = torch.randn(1, 80, D, generator=torch.Generator().manual_seed(1)).to(model.device)
    for sampling in ((0.0, None, None), (0.7, 4, None), (0.7, 9, 0.6), (0.3, None, 0.5), (1.5, None, 0.9)):
        head.sampling = sampling
        expected = probabilities(reference.llm.logits(states), *sampling)
        logits = torch.cat([head(state) for state in states.split(1, dim=1)], dim=1)  # how many are asked: by the row
        same(probabilities(logits, *sampling), expected)
        assert torch.equal(logits.argmax(-1), expected.argmax(-1))
    hidden = (torch.randn(1, 1, D, generator=torch.Generator().manual_seed(2)) / 2).to(model.device)
    head.sampling = (temperature, None, None)
    head.noise = torch.Generator(device=model.device).manual_seed(9 + model.mesh.rank)
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
    for options in SETTINGS[:3]:  # at a temperature alone: test_parallel_draft
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


def check_nano_drafts(reference: Inkling, model: Inkling, rows: range) -> None:
    """The shipped drafter, and a long call that is cut by tokens."""
    prompt = nano_prompt({"type": "image", "image": str(PICTURE)}, "Describe the picture.")
    images = {"pixel_values": prompt.pixel_values, "image_grid_thw": prompt.image_grid_thw}
    plain = generation.generate(reference, [prompt.input_ids], 12, **images).tokens
    drafted = generate(model, [prompt.input_ids], max_new_tokens=12, drafter=load_drafter(NANO, model), **images)
    assert drafted.tokens == plain
    assert drafted.stats.decode_steps < 11


def share_of(folder: Path, plan: Plan, rank: int) -> float:
    """Bytes of tensors that a rank has to read, from their names and sizes alone."""
    text, total = InklingConfig.from_pretrained(folder).text, 0.0
    E, part = text.n_routed_experts, rank // (plan.world // plan.n_ep)
    n_local_experts = E // plan.n_ep + (part < E % plan.n_ep)
    with CheckpointReader(folder) as reader:
        for name in reader.names:
            size = reader.layout(name).nbytes
            layer = int(name.split("layers.")[1].split(".")[0]) if "llm.layers." in name else 0
            G = text.attention(layer).num_key_value_heads
            if ".experts." in name:
                total += size * n_local_experts / E / (plan.world // plan.n_ep)
            elif re.search(r"\.attn\.(wk_dv|wv_dv|k_sconv|v_sconv)", name):
                total += size / min(plan.tp, G)
            elif re.search(r"llm\..*(attn\.(?!rel_logits_proj)|sconv|embed\.weight)", name):
                total += size / plan.tp
            else:
                total += size
    return total


# ---------------------------------------------------------------- what goes wrong


def fail(rank: int, failing: int, how: str, folder: Path, device: str = "cpu") -> None:
    """One rank fails while it decodes, and notes when; the others wait for it in a collective."""
    seconds = 15 if how == "hang" else 60  # enough for processes that start late on a busy machine
    sizes = {"hidden_size": 36, "num_attention_heads": 6, "num_key_value_heads": 6, "swa_num_key_value_heads": 6}
    plan = Plan(int(os.environ["WORLD_SIZE"]))  # of 2 or 3 ranks
    with torch.inference_mode(), joined(rank, plan, device, timedelta(seconds=seconds)) as mesh:
        model = parallelize(random_model(text_config(**sizes)), mesh).to(device)
        calls = 0

        def hook(*_: Any) -> None:
            nonlocal calls
            calls += 1
            if calls == 5 and rank == failing:
                (folder / "failing").touch()
                if how == "raise":
                    raise ValueError("out of luck")
                if how == "kill":
                    os.kill(os.getpid(), signal.SIGKILL)
                if how == "hang":
                    time.sleep(100)
                if how == "stuck":
                    ctypes.PyDLL(None).sleep(100)  # with the interpreter's lock: no thread of this rank runs

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


if __name__ == "__main__":  # under torchrun
    fail(int(os.environ["RANK"]), int(sys.argv[1]), sys.argv[2], Path(sys.argv[3]))
