"""What every rank of a world does with a drafter (test_parallel_draft)."""

import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from itertools import product
from pathlib import Path
from typing import Any

import torch
from helpers import IMAGE, random_ids, random_model, randomize
from parallel_worker import SHORT, Drafted, same
from torch import Tensor

from inkling_ref import checkpoint, generation, speculative
from inkling_ref.config import InklingConfig
from inkling_ref.draft_config import DSparkConfig
from inkling_ref.draft_files import FILE
from inkling_ref.draft_files import load_drafter as load_whole
from inkling_ref.dspark import Drafter
from inkling_ref.model import Inkling
from inkling_ref.parallel.apply import Mesh, load, parallelize
from inkling_ref.parallel.drafter import adopt, load_drafter
from inkling_ref.parallel.generation import finish, generate
from inkling_ref.parallel.launch import world
from inkling_ref.parallel.plan import Plan
from inkling_ref.sampling import accept, probabilities
from inkling_ref.speculative import Drafting
from inkling_ref.tensor_files import CheckpointReader

SIZES = {
    "num_hidden_layers": 2, "num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 10, "d_rel": 3,
    "intermediate_size": 23, "target_layer_ids": [1, 3, 4], "block_size": 5, "markov_rank": 7, "rel_extent": 9,
}  # fmt: skip
LENGTH = 4  # of a text whose distribution is looked at


def text_only(vocab_size: int, used: int, **sizes: Any) -> InklingConfig:
    sizes = {"swa_num_attention_heads": 6, "swa_num_key_value_heads": 6, "num_attention_heads": 6, **sizes}
    text = replace(InklingConfig.tiny().text, vocab_size=vocab_size, unpadded_vocab_size=used, **sizes)
    return InklingConfig(text, None)


def random_drafter(model: Inkling, **sizes: Any) -> Drafter:
    drafter = Drafter(DSparkConfig(**{**SIZES, "mask_token_id": 3, **sizes}), model)
    randomize(drafter, 3)
    return drafter.requires_grad_(False)


@dataclass(frozen=True)
class DraftCase:
    """One plan, one model, and a function of this file."""

    name: str
    check: Callable[..., None]
    plan: Plan
    config: InklingConfig
    options: dict = field(default_factory=dict)


def run_drafts(rank: int, cases: list[DraftCase]) -> None:
    with torch.inference_mode(), world(Plan(tp=int(os.environ["WORLD_SIZE"])), timeout=SHORT):
        for case in cases:
            mesh = Mesh.join(case.plan, timeout=SHORT)
            try:
                case.check(random_model(case.config), parallelize(random_model(case.config), mesh), **case.options)
            except Exception as error:
                raise AssertionError(f"{case.name}: {type(error).__name__}: {error}") from error


def check_proposals(reference: Inkling, model: Inkling, **sizes: Any) -> None:
    """A prompt of unequal rows, then a block: logits and confidences of every drafted token, and what a rank holds."""
    ids = random_ids(3, 17, below=model.config.text.unpadded_vocab_size)
    mask = torch.arange(17) < torch.tensor([17, 11, 4])[:, None]
    seen = []
    for target, drafter in (
        (reference, random_drafter(reference, **sizes)),
        (model, adopt(random_drafter(model, **sizes))),
    ):
        context = drafter.new_context(3)
        with drafter.observe(target) as taps:
            target(ids, attention_mask=mask)
        drafter.append(context, taps, [17, 11, 4])
        logits: list[Tensor] = []
        proposal = drafter.propose(
            context, ids[:, 0], 4, lambda row, logits=logits: (logits.append(row) or row.argmax(dim=-1), None)
        )
        seen.append((drafter, context, proposal, torch.stack(logits)))
    (whole, whole_context, expected, expected_logits), (part, context, proposal, logits) = seen
    same(logits, expected_logits)
    assert torch.equal(proposal.tokens, expected.tokens)
    if expected.confidence is not None:
        same(proposal.confidence, expected.confidence)
    tp = model.mesh.tp
    G = whole.config.num_key_value_heads
    assert context.layers[0][0].data.shape[1] == max(G // tp.size, 1)
    assert whole_context.layers[0][0].data.shape[1] == G
    held, total = (sum(p.numel() for p in d.parameters()) for d in (part, whole))
    replicated = sum(p.numel() for n, p in whole.named_parameters() if is_replicated(n, G, tp.size))
    assert int(tp.gather(torch.tensor([held]), 0).sum()) >= total
    assert held <= (total - replicated) / tp.size * 1.1 + replicated


def is_replicated(name: str, G: int, tp: int) -> bool:
    """Written from the list in the module docstring of `parallel.drafter`."""
    small = ("norm", "rel_logits_proj", "confidence_head", "joint_proj", "markov_head.gate_proj")
    return any(word in name for word in small) or (tp > G and ("k_proj" in name or "v_proj" in name))


def check_pictures(reference: Inkling, model: Inkling, rows: tuple[int, ...]) -> None:
    """Rows with images and rejections in every round: greedy and with candidates, the tokens of the single process."""
    pixels = torch.rand(5, 8, 8, 3, generator=torch.Generator().manual_seed(1))
    images = [torch.tensor([[1, 2, 1]]), torch.tensor([[1, 1, 3]])]
    prompts = [[3, IMAGE, IMAGE, 5, 9, 30], [IMAGE, IMAGE, 7, IMAGE, 11, 2, 8, 21]]
    first = sum(rows[: model.share.dp_index])
    own = range(first, first + rows[model.share.dp_index])
    # A temperature alone: where several ranks draw, they draw other tokens.
    drawn = {"temperature": 1.5, "seed": 6} if model.mesh.tp.size == 1 else {"temperature": 0.9, "top_k": 5, "seed": 3}
    settings = ({"prefill_chunk": 5}, drawn)
    if not own:
        for _ in settings:
            assert generate(model, None) is None
        return
    tiles = torch.cat([pixels[:2] if row == 0 else pixels[2:] for row in own])
    given = {"pixel_values": tiles, "image_grid_thw": torch.cat([images[row] for row in own])}
    ids = [prompts[row] for row in own]
    for options in settings:
        new = 5 + 2 * (model.share.dp_index % 2)  # groups that end at different times
        plain = generation.generate(reference, ids, new, **given, **options).tokens
        texts = [prompt + tokens for prompt, tokens in zip(ids, plain, strict=True)]
        alone, ours = Drafted(reference, texts), adopt(Drafted(model, texts))
        alone.base_logits = lambda h, alone=alone: Drafter.base_logits(alone, h)
        expected = generation.generate(reference, ids, new, drafter=alone, **given, **options).tokens
        result = generate(model, ids, max_new_tokens=new, drafter=ours, **given, **options)
        assert result.tokens == expected, options
        assert 0 < sum(result.stats.drafting.accepted) < sum(result.stats.drafting.checked)


def from_target(p, q, drafts, widths, generator, vocabulary):
    """Wrong: the replacement is drawn from p, not from what q left of it."""
    accepted, _ = accept(p, q, drafts, widths, generator, vocabulary)
    return accepted, vocabulary.sample(p[torch.arange(len(p)), accepted], generator)


def check_distribution(
    reference: Inkling, model: Inkling, temperature: float, greedy: bool = False, fault: str | None = None, **sizes: Any
) -> None:
    """Two thousand short texts against their exact probabilities; the ranks write the same ones."""
    trials, V = 2000, model.config.text.unpadded_vocab_size
    drafter = adopt(random_drafter(model, **sizes))
    if fault == "NaN":  # then drafts are drawn from all tokens alike
        drafter.norm.weight.fill_(torch.nan)
    drafting, wrong = Drafting(drafter, greedy=greedy), fault == "verdict"
    speculative.accept = from_target if wrong else accept
    options = {"temperature": temperature, "seed": 5, "max_new_tokens": LENGTH, "drafter": drafting}
    result = generate(model, [[2, 1, 4]] * trials, **options)
    tokens, stats = torch.tensor(result.tokens), result.stats.drafting
    assert torch.equal(model.mesh.tp.gather(tokens[None], 0), tokens.expand(model.mesh.tp.size, -1, -1))
    assert 0.1 < stats.acceptance()[0] < 0.9, stats.acceptance()
    place = V ** torch.arange(LENGTH - 1, -1, -1)
    counts = (tokens * place).sum(dim=1).bincount(minlength=V**LENGTH).double()

    texts = torch.cartesian_prod(*[torch.arange(V)] * LENGTH)
    prompts = torch.tensor([[2, 1, 4]]).expand(len(texts), -1)
    p = probabilities(reference(torch.cat([prompts, texts], dim=1)).logits, temperature)[:, 2:-1].double()
    expected = trials * p.gather(-1, texts[..., None])[..., 0].prod(dim=1)
    common = expected >= 8  # cells too rare for the statistic count as one
    counts, expected = (torch.cat([x[common], x[~common].sum()[None]]) for x in (counts, expected))
    statistic = ((counts - expected).square() / expected).sum()
    p_value = float(torch.special.gammaincc(torch.tensor((len(counts) - 1) / 2).double(), statistic / 2))
    assert p_value < 1e-6 if wrong else p_value > 0.01, f"p-value {p_value:.2g}"


class Enough(Exception):
    """Ends a generation after its first round."""


def bytes_of_a_round(config: InklingConfig, mesh: Mesh, drafts: bool, **options: Any) -> dict[str, tuple[int, int]]:
    """Calls and bytes of every collective between the first token and the next."""
    model, traffic, phase = parallelize(random_model(config), mesh), mesh.traffic, f"{config.text.vocab_size} {options}"
    traffic.phase = "prompt"

    def count(row: int, token: int) -> None:
        if traffic.phase == phase:
            raise Enough
        traffic.phase = phase

    drafter = adopt(random_drafter(model)) if drafts else None
    with suppress(Enough):
        generate(model, [[1, 2, 3]], max_new_tokens=9, on_token=count, drafter=drafter, **options)
    return {what: (count["calls"], count["sent"]) for what, count in traffic.to_dict()[phase].items()}


def check_traffic(reference: Inkling, model: Inkling) -> None:
    """What a token, or a round, sends does not depend on the size of the vocabulary."""
    warm = {"temperature": 1.0, "seed": 1}
    for drafts, options in product((False, True), ({}, warm, {**warm, "top_k": 5}, {**warm, "top_p": 0.9})):
        few, many = (
            bytes_of_a_round(text_only(vocab_size, vocab_size - 3), model.mesh, drafts, **options)
            for vocab_size in (400, 4000)
        )
        assert few == many, f"drafts {drafts}, {options}: {few}, {many}"


def check_folder(rank: int, folder: Path) -> None:
    """The drafter of a folder, of which every rank reads its slices and no more; a folder with the target's tables."""
    with torch.inference_mode(), world(Plan(2), timeout=SHORT) as mesh:
        model = load(folder, mesh)
        drafter = load_drafter(folder, model)
        whole = load_whole(folder, checkpoint.load(folder))
        with CheckpointReader(folder, FILE) as reader:
            sizes = {name: reader.layout(name).nbytes for name in reader.names}
        replicated = sum(size for name, size in sizes.items() if is_replicated(name, 2, 2))
        read = mesh.tp.gather(torch.tensor([drafter.bytes_read]), 0)
        assert int(read.sum()) == sum(sizes.values()) + replicated
        assert abs(drafter.bytes_read / ((sum(sizes.values()) - replicated) / 2 + replicated) - 1) < 0.02
        same = adopt(load_whole_of(whole, model))
        for (name, ours), theirs in zip(drafter.named_parameters(), same.parameters(), strict=True):
            assert torch.equal(ours, theirs), name
        finish(model)


def load_whole_of(whole: Drafter, model: Inkling) -> Drafter:
    """The drafter of another model object."""
    drafter = Drafter(whole.config, model)
    drafter.load_state_dict(whole.state_dict())
    return drafter.requires_grad_(False)
