r"""Train a drafter for a frozen target, on the target's own answers.

    python -m inkling_ref.nano.train_drafter CHECKPOINT --minutes 3     # writes CHECKPOINT/mtp.safetensors

**Data.** Prompts of the small world, weighted to long answers (a one-word answer cannot show a long acceptance); the
target answers them, greedily or at temperature 1: a drafter must know what its target writes, not what is right. One
pass of the target over the texts gives the taps and the teacher's hidden states. They are kept: the target is frozen,
so that training itself never runs it.

**Blocks.** From every text a few anchors p are drawn within the answer; the block of each begins at p. All blocks of a
text run in one pass, each seeing the context before its anchor and itself: what decoding would show it.

**Loss.** DeepSpec's, with its weights (DSpark paper, sections 3.3 and 5). With the tokens before k taken from the text
(the recurrence runs over the block from s = 0), q_k the drafter's distribution, p_k the target's, y_k the text's token,
and k counted from 1:

$$ w_k = e^{-(k-1)/4} \, \mathrm{valid}_k, \qquad \langle x \rangle = \sum w_k x_k / \sum w_k $$

$$ \mathrm{loss} = 0.1 \, \langle -\log q_k(y_k) \rangle + 0.9 \, \langle \lVert q_k - p_k \rVert_1 \rangle
   + \langle \mathrm{BCE}(c_k, \; 1 - \tfrac12 \lVert q_k - p_k \rVert_1) \rangle $$

The share of x_k ~ q_k that the target accepts is sum min(p, q) = 1 - |q - p|_1 / 2: the second term is the acceptance
itself, and the third teaches the confidence head to foresee it.
"""

import argparse
import json
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn
from torch.nn import functional as F

from .. import checkpoint
from ..chat import END_SAMPLING, Tokenizer
from ..draft_config import DSparkConfig
from ..draft_files import save_drafter
from ..dspark import Drafter, observe
from ..errors import InputError
from ..files import whole_file
from ..generation import generate
from ..model import Inkling
from ..sampling import check_count
from ..speculative import Drafting
from . import rows
from .rows import ANSWER, Row
from .tasks import TASKS

# How often each task is asked. "running text": tell a story.
MIXTURE = {"caption": 6, "sum_thinking": 5, "running text": 10, "story": 1, "talk": 2, "count": 1, "position": 1}
LONG = ("caption", "sum_thinking", "running text")  # tasks whose answers are long enough to draft in
LENGTH, NEW_TOKENS, ANCHORS = 192, 96, 16  # of a text, of its answer, and blocks that a step takes of it


def drafter_config(model: Inkling, head: str = "rnn", layers: int = 5) -> DSparkConfig:
    """The shipped drafter: thin layers of the target's width; taps after each completed block, and the output."""
    text = model.config.text
    L, block = text.num_hidden_layers, text.n_layers_per_attn_res_block
    taps = [*range(block - 1, L, block), L]
    return DSparkConfig(
        num_hidden_layers=layers, num_attention_heads=text.num_attention_heads,
        num_key_value_heads=text.num_key_value_heads, head_dim=text.head_dim, intermediate_size=2 * text.hidden_size,
        target_layer_ids=taps, mask_token_id=model.config.image_token_id, markov_head_type=head,
        markov_rank=0 if head == "none" else text.hidden_size // 2, confidence_head_with_markov=head != "none",
        d_rel=text.d_rel, rel_extent=text.rel_extent, rms_norm_eps=text.rms_norm_eps,
    )  # fmt: skip


# ---------------------------------------------------------------- texts


@dataclass
class Texts:
    """Texts of the target and what it thought: taps by layer id [B, T, D], last hidden states [B, T, D]."""

    ids: Int[Tensor, "B T"]
    prompt: Int[Tensor, " B"]  # tokens of the prompt
    end: Int[Tensor, " B"]  # tokens in all
    taps: dict[int, Float[Tensor, "B T D"]]
    hidden: Float[Tensor, "B T D"]

    def rows(self, pick: Int[Tensor, " b"]) -> "Texts":
        """Some of them."""
        taps = {i: t[pick] for i, t in self.taps.items()}
        return Texts(self.ids[pick], self.prompt[pick], self.end[pick], taps, self.hidden[pick])


def prompts(
    kind: str, n: int, seed: int, encoder: rows.Encoder, held_out: bool = False, longest: int = LENGTH - NEW_TOKENS
) -> list[Row]:
    """n prompts, up to where the first reply begins; those of more than `longest` tokens are left out."""
    if kind == "running text":
        split = "held-out" if held_out else "train"
        draws = (rows.generator(split, kind, "drafter", seed, i) for i in range(n))
        whole = [rows.make_row(kind, rng, encoder, LENGTH)[1] for rng in draws]
    else:
        examples = TASKS[kind].examples(n, 1000 + seed, held_out)
        whole = [rows.encode(example.conversation, encoder) for example in examples]
    ends = [row.targets.index(ANSWER) for row in whole]  # the tasks' conversations show their pictures before that
    return [
        Row(row.ids[:end], row.targets[:end], row.scenes)
        for row, end in zip(whole, ends, strict=True)
        if end <= longest
    ]


def pictures(made: list[Row], encoder: rows.Encoder) -> dict[str, Tensor | None]:
    """pixel_values and image_grid_thw of all prompts."""
    batch = rows.collate(made, encoder, max(len(row.ids) for row in made))
    if not len(batch.grids):
        return {"pixel_values": None, "image_grid_thw": None}
    grids = torch.from_numpy(batch.grids).long()
    return {
        "pixel_values": torch.from_numpy(batch.pixel_values()),
        "image_grid_thw": torch.cat([torch.ones(len(grids), 1, dtype=torch.long), grids], dim=1),
    }


@torch.inference_mode()
def answer(model: Inkling, made: list[Row], encoder: rows.Encoder, eos: int, temperature: float, seed: int) -> Texts:
    """The target's answers to prompts, and its states along them."""
    images = pictures(made, encoder)
    result = generate(model, [row.ids for row in made], NEW_TOKENS, temperature, seed=seed, eos_token_id=eos, **images)
    # In an answer the image token is a token as any other, which a pass over the whole text could not know.
    texts = [
        row.ids + [encoder.pad_id if t == encoder.image_id else t for t in tokens]
        for row, tokens in zip(made, result.tokens, strict=True)
    ]
    ids = torch.tensor([t + [encoder.pad_id] * (LENGTH - len(t)) for t in texts], device=model.device)
    end = torch.tensor([len(t) for t in texts], device=model.device)
    mask = torch.arange(LENGTH, device=model.device) < end[:, None]
    with observe(model, drafter_config(model)) as taps:
        hidden = model(
            ids, **{name: t if t is None else t.to(model.device) for name, t in images.items()},
            attention_mask=mask, logits_to_keep=1,
        ).hidden  # fmt: skip
    prompt = torch.tensor([len(row.ids) for row in made], device=model.device)
    # Clones outside inference mode: training saves them for its backward pass.
    with torch.inference_mode(False):
        return Texts(*(t.clone() for t in (ids, prompt, end)), {i: t.clone() for i, t in taps.items()}, hidden.clone())


def corpus(model: Inkling, encoder: rows.Encoder, eos: int, number: int, seed: int, chunk: int = 2048) -> Texts:
    """`number` answers of the target to prompts of the mixture.

    Half of them at temperature 1, and all the running text: greedily a target knows only a few stories.
    """
    made: tuple[list[Row], list[Row]] = ([], [])  # by temperature
    for kind, share in MIXTURE.items():
        for i, row in enumerate(prompts(kind, math.ceil(number * share / sum(MIXTURE.values())), seed, encoder)):
            made[1 if kind == "running text" else i % 2].append(row)
    parts = [
        answer(model, group[i : i + chunk], encoder, eos, float(temperature), seed + i)
        for temperature, group in enumerate(made)
        for i in range(0, len(group), chunk)
    ]
    return Texts(
        *(torch.cat([getattr(p, name) for p in parts]) for name in ("ids", "prompt", "end")),
        {i: torch.cat([p.taps[i] for p in parts]) for i in parts[0].taps},
        torch.cat([p.hidden for p in parts]),
    )


# ---------------------------------------------------------------- blocks and losses


def draw_anchors(
    prompt: Int[Tensor, " B"], end: Int[Tensor, " B"], T: int, number: int, generator: torch.Generator | None = None
) -> tuple[Int[Tensor, "B A"], Bool[Tensor, "B A"]]:
    """`number` different places of each answer that have a next token, ascending; and which of them there are."""
    place = torch.arange(T, device=end.device)
    may = (place >= prompt[:, None]) & (place < end[:, None] - 1)
    noise = torch.rand(may.shape, generator=generator, device=may.device).masked_fill(~may, -1)
    chosen = noise.topk(number, dim=1).indices.sort(dim=1).values
    return chosen, may.gather(1, chosen)


def packed_blocks(
    drafter: Drafter, taps: dict[int, Tensor], ids: Int[Tensor, "B T"], anchors: Int[Tensor, "B A"]
) -> Float[Tensor, "B A gamma D"]:
    """h of the blocks at all anchors, each as `Drafter.block` gives it after the tokens before its anchor."""
    c, C = drafter.config, drafter.fuse(taps)
    (B, T, _), A, N, device = C.shape, anchors.shape[1], c.block_size, C.device
    context_places = torch.arange(T, device=device)
    context = [layer.self_attn.key_value(C, context_places[None]) for layer in drafter.layers]
    places = (anchors[..., None] + torch.arange(N, device=device)).flatten(1)  # [B, A N]
    distance = places[:, :, None] - torch.cat([context_places.expand(B, T), places], dim=1)[:, None]
    before = context_places < anchors.repeat_interleave(N, dim=1)[..., None]
    block = torch.arange(A, device=device).repeat_interleave(N)
    visible = torch.cat([before, (block[:, None] == block).expand(B, -1, -1)], dim=-1)

    def join(layer: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return tuple(torch.cat(pair, dim=2) for pair in zip(context[layer], (k, v), strict=True))

    y = drafter.backbone(drafter.slots(ids.gather(1, anchors)).flatten(1), places, join, distance, visible)
    return y.unflatten(1, (A, N))[:, :, c.first_slot :]


@dataclass
class Losses:
    """total has a gradient; acceptance is the expected share of drafts that stand, by position."""

    total: Float[Tensor, ""]
    cross_entropy: Float[Tensor, ""]
    distance: Float[Tensor, ""]
    confidence: Float[Tensor, ""]
    acceptance: Float[Tensor, " gamma"]

    def tokens_per_pass(self) -> float:
        """tau = 1 + sum_k prod_{i <= k} acceptance_i."""
        return 1 + self.acceptance.cumprod(0).sum().item()


def losses(drafter: Drafter, texts: Texts, anchors: Int[Tensor, "B A"], is_anchor: Bool[Tensor, "B A"]) -> Losses:
    """The module docstring's loss over the blocks at `anchors`."""
    h = packed_blocks(drafter, texts.taps, texts.ids, anchors)
    gamma, last = h.shape[2], texts.ids.shape[1] - 1
    k = torch.arange(gamma, device=h.device)
    before = anchors[..., None] + k  # of token k: the place before it, where the target predicts it
    valid = is_anchor[..., None] & (before + 1 < texts.end[:, None, None])
    before = before.clamp(max=last - 1)
    row = torch.arange(len(texts.ids), device=h.device)[:, None, None]
    previous, labels = texts.ids[row, before], texts.ids[row, before + 1]
    with torch.no_grad():
        p = drafter.model.llm.logits(texts.hidden[row, before].flatten(0, 1)).softmax(-1).view(*labels.shape, -1)

    logits = drafter.base_logits(h.flatten(0, 1)).view_as(p)
    if drafter.markov_head is not None:
        s, corrections = drafter.markov_head.start(h[:, :, 0]), []
        for step in range(gamma):
            correction, s = drafter.markov_head.step(h[:, :, step], previous[:, :, step], s, drafter.used)
            corrections.append(correction)
        logits = logits + torch.stack(corrections, dim=2)
    log_q = logits.log_softmax(-1)
    distance = (log_q.exp() - p).abs().sum(-1)
    weight = torch.exp(-k.to(p.dtype) / 4) * valid
    total = weight.sum().clamp(min=1e-9)

    def mean(x: Tensor) -> Tensor:
        return (weight * x).sum() / total

    cross_entropy = mean(-log_q.gather(-1, labels[..., None])[..., 0])
    apart, share = mean(distance), (1 - distance / 2).detach()
    confidence = h.new_zeros(())
    if (c := drafter.confidence(h, previous)) is not None:
        confidence = mean(F.binary_cross_entropy_with_logits(c, share, reduction="none"))
    acceptance = (share * valid).sum((0, 1)) / valid.sum((0, 1)).clamp(min=1)
    return Losses(0.1 * cross_entropy + 0.9 * apart + confidence, cross_entropy, apart, confidence, acceptance)


# ---------------------------------------------------------------- the run


def initialise(drafter: Drafter) -> None:
    """Matrices keep the variance; what is added to the stream, and the head's correction, start small."""
    for name, p in drafter.named_parameters():
        if name.endswith("markov_w1.weight"):
            nn.init.normal_(p, std=0.01)
        elif p.dim() == 2 and not name.endswith(("clip.scale", "proj.proj")):
            small = name.endswith(("o_proj.weight", "down_proj.weight"))
            nn.init.normal_(p, std=(0.2 if small else 1.0) / math.sqrt(p.shape[1]))
        elif name.endswith("bias"):
            nn.init.zeros_(p)


def train(
    drafter: Drafter,
    texts: Texts,
    seconds: float,
    rate: float,
    size: int,
    seed: int,
    log: Callable[[str], None],
    steps: int | None = None,
) -> list[dict]:
    """AdamW, cosine to zero over the time that is given, or over `steps`; a short warm-up. Returns the course."""
    device = texts.ids.device
    generator = torch.Generator(device).manual_seed(seed)
    learning_rate = torch.tensor(rate, device=device)
    optimiser = torch.optim.AdamW(
        drafter.parameters(), lr=learning_rate, betas=(0.9, 0.98), weight_decay=0.0, capturable=device.type == "cuda"
    )
    pick = torch.zeros(size, dtype=torch.long, device=device)

    def draw() -> tuple[Tensor, Tensor]:
        pick.copy_(torch.randint(len(texts.ids), (size,), generator=generator, device=device))
        return draw_anchors(texts.prompt[pick], texts.end[pick], texts.ids.shape[1], ANCHORS, generator)

    anchors, is_anchor = draw()

    def update() -> Losses:
        optimiser.zero_grad(set_to_none=True)
        parts = losses(drafter, texts.rows(pick), anchors, is_anchor)
        parts.total.backward()
        nn.utils.clip_grad_norm_(drafter.parameters(), 1.0)
        optimiser.step()
        return parts

    if device.type == "cuda":
        learning_rate.zero_()  # nothing is learned before the clock starts
        update = captured(update)
    history: list[dict] = []
    started, noted = time.monotonic(), -1e9
    for step in count():
        elapsed = time.monotonic() - started
        progress = min(step / steps if steps else elapsed / seconds, 1.0)
        learning_rate.fill_(rate * min(1.0, (step + 1) / 50, 0.5 * (1 + math.cos(math.pi * progress))))
        for kept, drawn in zip((anchors, is_anchor), draw(), strict=True):
            kept.copy_(drawn)
        parts = update()
        if elapsed - noted > max(1.0, seconds / 40) or progress == 1:
            noted = elapsed
            acceptance = [round(x, 3) for x in parts.acceptance.tolist()]
            history.append({"step": step, "loss": round(parts.total.item(), 4), "acceptance": acceptance})
            log(f"{elapsed:6.1f} s  step {step:5d}  loss {history[-1]['loss']:.4f}  tau {parts.tokens_per_pass():.2f}")
        if progress == 1:
            break
    return history


def captured(update: Callable[[], Losses]) -> Callable[[], Losses]:
    """The same step as one CUDA graph: its two thousand small kernels take longer to launch than to run."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            update()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        parts = update()

    def replay() -> Losses:
        graph.replay()
        return parts

    return replay


def held_out(
    model: Inkling, drafter: Drafter, encoder: rows.Encoder, eos: int, examples: int
) -> dict[str, dict[str, float]]:
    """Tokens a pass of the target on held-out prompts, by task, for each way of drafting."""
    ways = {"temperature 1": (1.0, False), "temperature 1, greedy drafts": (1.0, True), "temperature 0": (0.0, False)}
    found: dict[str, dict[str, float]] = {}
    for task in LONG:
        made = prompts(task, examples, 0, encoder, held_out=True)
        images = {name: t if t is None else t.to(model.device) for name, t in pictures(made, encoder).items()}
        for way, (temperature, greedy) in ways.items():
            result = generate(
                model, [row.ids for row in made], NEW_TOKENS, temperature, seed=0, eos_token_id=eos,
                drafter=Drafting(drafter, greedy=greedy), **images,
            )  # fmt: skip
            found.setdefault(task, {})[way] = round(result.stats.drafting.tokens_per_pass, 3)
    return found


def main(
    folder: str | Path,
    minutes: float = 3.0,
    device: str | None = None,
    seed: int = 0,
    heads: str = "rnn",
    texts: int = 32768,
    layers: int = 5,
    size: int = 64,
    rate: float = 2e-3,
    out: str | Path | None = None,
    steps: int | None = None,
    examples: int = 128,
    log: Callable[[str], None] = print,
) -> Drafter:
    """Train a drafter of the checkpoint in `folder`, and write it there, or to `out`, with drafter.json: its course.

    Args:
        minutes: of training; the target's answers come on top.
        heads: rnn, gated, vanilla or none; or several with commas, to compare: each is trained alike on the same
            texts, and the first is written.
        texts: how many answers of the target to train on, at most.
        size: texts a step.
        steps: train that many instead of `minutes`, which the report then leaves out.
        examples: held-out prompts a task, for the acceptance in drafter.json.

    Raises:
        InputError: a number that is not positive, another device, a file in the folder's place, or a checkpoint that
            cannot be read.
    """
    for name, number in {"minutes": minutes, "rate": rate}.items():
        if not 0 < number < math.inf:
            raise InputError(f"{name}: {number}, expected more than 0")
    for name, number in {"texts": texts, "size": size, "examples": examples, "steps": steps}.items():
        if number is not None:
            check_count(name, number, 1)
    if device not in (None, "cpu", "cuda"):
        raise InputError(f"device: {device!r}, expected cpu or cuda")
    if out and Path(out).exists() and not Path(out).is_dir():
        raise InputError(f"{out}: a file, expected a folder")
    place = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    torch.set_float32_matmul_precision("high")
    model = checkpoint.load(folder, place, torch.float32, experts="dequantize")
    tokenizer = Tokenizer.from_pretrained(folder)
    encoder, eos = rows.Encoder(tokenizer), tokenizer.marker_id(END_SAMPLING)
    candidates = {}
    for head in heads.split(","):
        torch.manual_seed(seed)
        candidates[head] = Drafter(drafter_config(model, head, layers), model)
        initialise(candidates[head])

    began = time.monotonic()
    answers = corpus(model, encoder, eos, texts, seed)
    log(
        f"{len(answers.ids)} texts, {int((answers.end - answers.prompt).sum())} tokens of answers "
        f"after {time.monotonic() - began:.0f} s"
    )
    report: dict[str, Any] = {
        "seed": seed, "minutes": None if steps else minutes, "texts": len(answers.ids), "size": size, "rate": rate,
        "anchors": ANCHORS,
        "device": torch.cuda.get_device_name() if place.type == "cuda" else "CPU", "heads": {},
    }  # fmt: skip
    target, first = Path(out or folder), next(iter(candidates.values()))
    for head, drafter in candidates.items():
        drafter.to(place)
        history = train(drafter, answers, 60 * minutes, rate, size, seed, log, steps)
        drafter.eval().requires_grad_(False)
        tokens = held_out(model, drafter, encoder, eos, examples)
        log(f"{head}: {json.dumps(tokens)}")
        report["heads"][head] = {"steps": history[-1]["step"], "tokens a pass": tokens, "history": history}
        if drafter is first:
            save_drafter(drafter, target, torch.bfloat16, {"training": "see drafter.json"})
        with whole_file(target / "drafter.json") as partial:
            partial.write_text(json.dumps(report) + "\n")
    return first


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Train a drafter for a nano checkpoint.")
    parser.add_argument("folder")
    options = {
        "minutes": float, "device": str, "seed": int, "heads": str, "texts": int, "layers": int, "size": int,
        "steps": int, "rate": float, "out": str, "examples": int,
    }  # fmt: skip
    for option, kind in options.items():
        parser.add_argument(f"--{option}", type=kind, default=argparse.SUPPRESS)
    try:
        main(**vars(parser.parse_args()))
    except (InputError, OSError) as error:
        parser.exit(2, f"error: {error}\n")
