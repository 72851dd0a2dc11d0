"""Generation on a decoding step writes what it writes with a cache."""

import pytest
import torch
from helpers import random_ids, random_model, unchecked
from test_dspark import GAMMA, OPTIONS, PROMPTS, make, scripted
from test_generation import image_prompt
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._pytree import tree_leaves

from inkling_ref import DecodeStep, Drafter, Drafting, DraftStep, InputError, Threshold, generate
from inkling_ref import decode_step as decode_step_module
from inkling_ref import draft_step as draft_step_module

LONG = [*PROMPTS, random_ids(23, seed=5).tolist()]  # of 7, 1, 12 and 23 tokens: beyond the window of 8


@pytest.fixture(scope="module")
def model():
    return random_model()


def step_of(model, rows=4, capacity=60, tokens=1, **kwargs):
    return DecodeStep(model, rows, capacity, tokens, page=16, **kwargs)


@unchecked()
def test_greedy_text_is_the_same(model):
    plain = generate(model, LONG, 20)
    eos = [plain.tokens[0][4], plain.tokens[2][11]]  # rows end at different places, and others go on
    step = step_of(model)
    for options in ({}, {"prefill_chunk": 5}, {"eos_token_id": eos}, {"max_new_tokens": 1}):
        expected = generate(model, LONG, **{"max_new_tokens": 20, **options})
        result = generate(model, LONG, **{"max_new_tokens": 20, **options}, step=step)
        assert result.tokens == expected.tokens
        assert result.stop_reason == expected.stop_reason
        assert result.stats.decode_steps == expected.stats.decode_steps
    assert generate(model, LONG, 20, temperature=1.0, top_k=1, step=step).tokens == plain.tokens
    assert generate(model, LONG, 20, temperature=1e-5, seed=3, step=step).tokens == plain.tokens


@unchecked()
def test_drawn_text_depends_on_the_seed_alone(model):
    step = step_of(model)
    first, again, other = (generate(model, LONG, 9, 1.0, seed=seed, step=step).tokens for seed in (5, 5, 6))
    assert first == again != other
    row = step_of(model, rows=1)
    one = generate(model, LONG[0], 9, 1.0, seed=5, step=row).tokens
    same = [generate(model, LONG[:2], 9, 1.0, seed=5, step=step_of(model, 2)).tokens[0]]
    assert one == same  # its seed is the first drawn, whoever else is there


@unchecked()
def test_drawn_tokens_follow_the_distribution():
    """1,000 rows of one prompt: the second token, drawn on the device, against the target's probabilities."""
    model = random_model()
    step, prompt = step_of(model, 1000, 7), [3, 1, 4, 1, 5]
    tokens = torch.tensor(generate(model, [prompt] * 1000, 2, 1.0, seed=1, step=step).tokens)
    first = tokens[:, 0].mode().values
    drawn = tokens[tokens[:, 0] == first, 1]
    with torch.inference_mode():
        p = model(torch.tensor([[*prompt, int(first)]])).logits[0, -1].softmax(-1)
    counts = torch.bincount(drawn, minlength=len(p))
    common = p * len(drawn) >= 5
    cells = [(counts[common], p[common]), (counts[~common].sum()[None], p[~common].sum()[None])]
    expected = torch.cat([q for _, q in cells]) * len(drawn)
    statistic = ((torch.cat([c for c, _ in cells]) - expected).square() / expected).sum()
    dof = torch.tensor((len(expected) - 1) / 2)
    assert len(drawn) > 99
    assert torch.special.gammaincc(dof, statistic / 2) > 0.01


@unchecked()
@pytest.mark.parametrize("script", [[0], [GAMMA], [0, 1, 2, 3, 4, 4, 0, 3]], ids=["none", "all", "changing"])
def test_drafts_change_nothing_at_temperature_zero(model, script):
    drafter, plain = scripted(model, LONG, 17, script)
    step = step_of(model, tokens=GAMMA + 1, taps=drafter.config)
    result = generate(model, LONG, 17, drafter=drafter, step=step)
    drafter.lengths.clear()
    expected = generate(model, LONG, 17, drafter=drafter)
    assert result.tokens == plain == expected.tokens
    assert (result.stats.drafting.accepted, result.stats.drafting.checked) == (
        expected.stats.drafting.accepted, expected.stats.drafting.checked,
    )  # fmt: skip


class Recording(Drafter):
    """Keeps what it drafted."""

    def propose(self, *args):
        proposal = super().propose(*args)
        self.proposed.append(proposal.tokens)
        return proposal


@unchecked()
@pytest.mark.parametrize("name", ["inkling", "before", "mixed", "embedding", "windows"])
def test_the_drafter_sees_the_same_taps(model, name):
    """Its drafts, which depend on them, are the same in every round; some rounds check fewer than they could."""
    drafter, runs = make(model, Recording, **OPTIONS[name]), []
    step = step_of(model, tokens=GAMMA, taps=drafter.config)
    for options in ({}, {"step": step}, {"step": step, "drafter": DraftStep(drafter, step)}):
        drafting = Drafting(options.get("drafter", drafter), num_tokens=GAMMA - 1, schedule=Threshold(0.5))
        drafter.proposed = []
        result = generate(model, LONG, 13, prefill_chunk=9, **{**options, "drafter": drafting})
        runs.append((result.tokens, [tokens.tolist() for tokens in drafter.proposed]))
    assert runs[0] == runs[1] == runs[2]
    assert len(drafter.proposed) > 4


@unchecked()
@pytest.mark.parametrize("name", ["inkling", "gated", "no_head"])
def test_drafts_change_nothing_that_is_drawn_on_the_device(model, name):
    drafter = make(model, **OPTIONS[name])
    alone, step = step_of(model), step_of(model, tokens=GAMMA + 1, taps=drafter.config)
    for seed in (1, 2):
        expected = generate(model, LONG, 17, 0.9, seed=seed, step=alone).tokens
        for drafting in (drafter, Drafting(drafter, greedy=True), Drafting(drafter, 3, schedule=Threshold(0.5))):
            result = generate(model, LONG, 17, 0.9, seed=seed, drafter=drafting, step=step)
            assert result.tokens == expected


@unchecked()
def test_the_drafter_draws_from_the_numbers_of_the_target(model):
    """One that knows the target's logits drafts what the target draws: not one draft is refused."""

    class Knowing(Drafter):
        def propose(self, context, anchors, n, choose):
            proposal, tokens = super().propose(context, anchors, n, lambda logits: (logits.argmax(-1), None)), []
            for _ in range(n):
                read = torch.tensor([self.text[: context.lengths[0] + 1] + tokens])
                tokens += choose(model(read).logits[:, -1])[0].tolist()
            return proposal._replace(tokens=torch.tensor([tokens]))

    drafter, prompt = make(model, Knowing), LONG[0]
    step = step_of(model, 1, tokens=GAMMA + 1, taps=drafter.config)
    drafter.text = prompt + generate(model, prompt, 21, 1.3, seed=4, step=step_of(model, 1)).tokens[0]
    result = generate(model, prompt, 21, 1.3, seed=4, drafter=drafter, step=step)
    assert prompt + result.tokens[0] == drafter.text
    assert result.stats.drafting.accepted == result.stats.drafting.checked == [4] * GAMMA


@unchecked()
def test_top_p_and_drafts(model):
    drafter = make(model)
    step = step_of(model, tokens=GAMMA + 1, taps=drafter.config)
    drawn = [generate(model, LONG, 9, 0.9, top_p=0.8, seed=s, drafter=drafter, step=step).tokens for s in (1, 1, 2)]
    assert drawn[0] == drawn[1] != drawn[2]


@unchecked()
def test_images(model):
    parts = [image_prompt(model, (2, 3), 1), image_prompt(model, (1, 2), 2)]
    images = {"pixel_values": torch.cat([p[1] for p in parts]), "image_grid_thw": torch.cat([p[2] for p in parts])}
    rows, step = [p[0] for p in parts], step_of(model, 2)
    expected = generate(model, rows, 6, **images).tokens
    for chunk in (None, 4):
        assert generate(model, rows, 6, **images, prefill_chunk=chunk, step=step).tokens == expected


def test_logits_that_are_not_finite_are_named():
    model = random_model()
    step, prompts = step_of(model, 2), LONG[:2]
    written = next(t for t in generate(model, prompts, 9).tokens[1][1:-1] if t not in prompts[0] + prompts[1])
    model.llm.embed.weight[written] = float("nan")
    for temperature in (0.0, 1e-5):
        messages = []
        for options in ({}, {"step": step}):
            with pytest.raises(InputError, match=r"not finite in row \d at position") as error:
                generate(model, prompts, 9, temperature, seed=1, **options)
            messages.append(str(error.value))
        assert messages[0] == messages[1]


@unchecked()
def test_refuses_what_does_not_fit(model):
    step, drafter = step_of(model, 2, 16), make(model)
    prompts = [[1, 2, 3], [4, 5]]
    assert len(generate(model, prompts, 14, step=step).tokens[0]) == 14  # positions 0 to 15: the last token is not read
    with pytest.raises(InputError, match=r"a step without this drafter's taps, expected taps=drafter.config"):
        DraftStep(drafter, step)
    for options, message in (
        ({"model": random_model()}, "made for another model object"),
        ({"input_ids": [[1]]}, "made for 2 rows, expected 1 as there are prompts"),
        ({"max_new_tokens": 15}, "16 positions, expected 17 for these prompts"),
        ({"drafter": drafter}, r"without this drafter's taps, expected DecodeStep\(..., taps=drafter.config\)"),
        (
            {"drafter": drafter, "step": step_of(model, 2, 16, GAMMA, taps=drafter.config)},
            f"reads {GAMMA} tokens, expected {GAMMA + 1}",
        ),
    ):
        with pytest.raises(InputError, match=message):
            generate(**{"model": model, "input_ids": prompts, "max_new_tokens": 9, "step": step, **options})


# --- Graphs, on a CPU -----------------------------------------------------------------------------------------------


class Traced:
    """In place of a CUDA graph: the operations that `run` called, on the tensors that it called them with.

    Numbers that the host puts in are frozen, as a graph freezes them. A step's own operations read lengths on the host
    in the reference; they are called again.
    """

    def __init__(self, run):
        self.step, self.result = getattr(run, "__self__", None), run()
        self.taps = self.step and self.step.taps
        self.run = run if self.step else make_fx(lambda: tree_leaves(run()))()

    def replay(self):
        with torch.inference_mode():
            for place, new in zip(tree_leaves(self.result), tree_leaves(self.run()), strict=True):
                if place is not None:
                    place.copy_(new)
            if self.step:
                for id, new in self.step.taps.items():
                    self.taps[id].copy_(new)


def traced(run):
    graph = Traced(run)
    return graph, graph.result


@unchecked()
def test_graphs_give_the_same_texts(model, monkeypatch):
    """Prompts and texts one after the other: lengths, seeds and anchors of later rounds must reach the graphs."""
    for module in (decode_step_module, draft_step_module):
        monkeypatch.setattr(module, "captured", traced)
    drafter = make(model)
    eager, captured = (step_of(model, 2, tokens=GAMMA + 1, taps=drafter.config) for _ in range(2))
    captured.capture()
    ways, drafted = [(drafter, eager), (DraftStep(make(model), captured), captured)], []
    for way, _ in ways:
        drafted.append([])

        def propose(*args, inner=way.propose, kept=drafted[-1]):
            proposal = inner(*args)
            kept.append((proposal.tokens.tolist(), proposal.confidence.tolist()))
            return proposal

        way.propose = propose
    for prompts in (LONG[:2], LONG[2:]):
        texts = [generate(model, prompts, 8, 0.9, seed=len(prompts[0]), drafter=d, step=s).tokens for d, s in ways]
        assert texts[0] == texts[1]
    assert len(drafted[0]) == len(drafted[1]) > 4
    for (tokens, confidence), expected in zip(drafted[1], drafted[0], strict=True):
        assert tokens == expected[0]
        torch.testing.assert_close(torch.tensor(confidence), torch.tensor(expected[1]))


@unchecked()
@torch.inference_mode()
def test_the_best_tokens_are_part_of_a_captured_step(model, monkeypatch):
    monkeypatch.setattr(decode_step_module, "captured", traced)
    step, eager = (step_of(model, 2) for _ in range(2))
    step.capture(greedy=True)
    monkeypatch.setattr(decode_step_module, "captured", None)  # no other graph is made
    for s in (step, eager):
        s.prefill(random_ids(2, 7))
    for i in range(3):
        ids = random_ids(2, 1, seed=i)
        assert torch.equal(step(ids), eager(ids))
        assert torch.equal(step.next_tokens(), eager.next_tokens())
        assert step.next_tokens() is step.best
