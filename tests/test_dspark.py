"""The drafter: taps, fusion, block, heads; and what it may never change, the text."""

import math
from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch
from helpers import IMAGE, assert_same_contents, logits, random_ids, random_model, randomize, relative_rms, unchecked

from inkling_ref import Drafter, Drafting, DSparkConfig, InputError, Threshold, Throughput, generate, stream
from inkling_ref import sampling as sampling_module
from inkling_ref import speculative as speculative_module
from inkling_ref.backends import Backend
from inkling_ref.config import InklingConfig
from inkling_ref.dspark import MarkovHead, observe, rotate
from inkling_ref.generation import probabilities
from inkling_ref.moe import experts
from inkling_ref.speculative import Speculation, measure_seconds
from inkling_ref.vision import process_images

TEXT = InklingConfig.tiny().text
V, L, W = TEXT.unpadded_vocab_size, TEXT.num_hidden_layers, TEXT.sliding_window_size  # 40, 4, 8
GAMMA = 4
SMALL = {
    "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 6, "intermediate_size": 20,
    "target_layer_ids": [1, 3, 4], "block_size": 5, "mask_token_id": 45, "markov_rank": 7, "d_rel": 3, "rel_extent": 9,
}  # fmt: skip
# The two families of the format, and single options of each.
INKLING = {}
DEEPSPEC = {
    "sample_from_anchor": True, "block_size": 4, "qk_norm": "rms", "rope_theta": 1e4, "d_rel": 0,
    "attention_gate": False, "attention_sink": False, "embed_norm": False, "target_layer_ids": [0, 2],
    "markov_head_type": "vanilla",
}  # fmt: skip
OPTIONS = {
    "inkling": INKLING,
    "deepspec": DEEPSPEC,
    "gated": {"markov_head_type": "gated"},
    "no_head": {"markov_head_type": "none", "markov_rank": 0, "confidence_head_with_markov": False},
    "no_confidence": {"enable_confidence_head": False},
    "before": {"tap": "before", "target_layer_ids": [0, 2, 4], "final_tap": "mix"},
    "mixed": {"tap": "mixed", "target_layer_ids": [0, 1, 3, 4]},
    "embedding": {"target_layer_ids": [-1, 2]},
    "causal": {"is_causal": True},
    "windows": {"windows": [5, None]},
    "uncapped": {"softcap": False},
}


@pytest.fixture(scope="module")
def model():
    return random_model()


def make(model, cls=Drafter, seed=3, **options):
    drafter = cls(DSparkConfig(**{**SMALL, **options}), model).eval().requires_grad_(False)
    randomize(drafter, seed)
    return drafter.to(model.dtype)


class Scripted(Drafter):
    """Knows each row's text and drafts it, with a wrong token after as many right ones as the script says."""

    def __init__(self, config, model, texts=None, script=(0,)):
        super().__init__(config, model)
        self.texts, self.script, self.lengths = texts, script, []

    def propose(self, context, anchors, n, choose):
        proposal = super().propose(context, anchors, n, choose)
        tokens = proposal.tokens.clone()
        for row, text in enumerate(self.texts):
            p = context.lengths[row] + 1
            right = (text[p : p + n] + [0] * n)[:n]
            accept = self.script[(len(self.lengths) + row) % len(self.script)]
            tokens[row] = torch.tensor([t if k < accept else (t + 1) % V for k, t in enumerate(right)])
        self.lengths.append(list(context.lengths))
        return proposal._replace(tokens=tokens)


PROMPTS = [random_ids(n, seed=n).tolist() for n in (7, 1, 12)]


def scripted(model, prompts, n, script, seed=3, **options):
    """A scripted drafter and the greedy text of every prompt, without the prompt."""
    plain = generate(model, prompts, n).tokens
    drafter = make(model, Scripted, **options)
    drafter.texts = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
    drafter.script = script
    return drafter, plain


# ---------------------------------------------------------------- greedy text is the same


@unchecked()
@pytest.mark.parametrize("accept", range(GAMMA + 1))
def test_greedy_text_with_rejections_at_every_position(model, accept):
    """Prompts from 1 to beyond the window, so that every rejection also falls around the window's wrap."""
    for length in (1, W - 2, W, 13):
        prompt = [random_ids(length, seed=length).tolist()]
        drafter, plain = scripted(model, prompt, 17, [accept])
        result = generate(model, prompt, 17, drafter=drafter)
        assert result.tokens == plain
        drafting = result.stats.drafting
        assert drafting.row_rounds == result.stats.decode_steps == math.ceil(16 / (accept + 1))
        assert drafting.new_tokens == result.stats.new_tokens - 1 == 16
        assert all(a == 0 for a in drafting.accepted[accept:])
        assert sum(drafting.accepted) == 16 - drafting.row_rounds


@unchecked()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_greedy_text_with_any_drafter(model, options):
    drafter = make(model, **options)
    plain = generate(model, PROMPTS, 19)
    assert generate(model, PROMPTS, 19, drafter=drafter).tokens == plain.tokens
    assert generate(model, PROMPTS, 19, drafter=drafter, prefill_chunk=5).tokens == plain.tokens


@unchecked()
def test_rows_with_different_counts_that_end_at_different_times(model):
    drafter, plain = scripted(model, PROMPTS, 31, [4, 0, 2, 1, 3, 3])
    assert generate(model, PROMPTS, 31, drafter=drafter).tokens == plain
    eos = [plain[0][9], plain[1][20], plain[2][4]]
    with_eos = generate(model, PROMPTS, 31, eos_token_id=eos)
    result = generate(model, PROMPTS, 31, eos_token_id=eos, drafter=drafter)
    assert (result.tokens, result.stop_reason) == (with_eos.tokens, with_eos.stop_reason)
    assert len({len(tokens) for tokens in result.tokens}) > 1


@unchecked()
def test_pictures_in_the_prompt(model):
    pixels, grid = process_images([torch.randint(256, (3, 9, 13)).permute(1, 2, 0).byte().numpy()], model.config.vision)
    tiles = len(pixels)
    prompts = [[3, *[IMAGE] * tiles, 5, 8], [2, 4]]
    pictures = {"pixel_values": pixels, "image_grid_thw": grid}
    plain = generate(model, prompts, 21, **pictures).tokens
    assert plain != generate(model, prompts, 21, pixel_values=-pixels, image_grid_thw=grid).tokens
    for script in ([4], [0], [1, 3, 2]):
        drafter = make(model, Scripted)
        drafter.texts = [prompt + tokens for prompt, tokens in zip(prompts, plain, strict=True)]
        drafter.script = script
        for chunk in (None, 3):
            result = generate(model, prompts, 21, drafter=drafter, prefill_chunk=chunk, **pictures)
            assert result.tokens == plain


@unchecked()
def test_a_stream_gives_the_same_tokens_in_order(model):
    drafter, plain = scripted(model, PROMPTS, 17, [2, 4, 0])
    seen = [[] for _ in PROMPTS]
    steps = stream(model, PROMPTS, 17, drafter=drafter)
    for step in steps:
        assert any(token is not None for token in step)
        for row, token in enumerate(step):
            seen[row] += [] if token is None else [token]
        assert steps.result.tokens == seen
    assert seen == plain
    calls = []
    generate(model, PROMPTS, 17, drafter=drafter, on_token=lambda row, token: calls.append((row, token)))
    assert [[t for r, t in calls if r == row] for row in range(len(PROMPTS))] == plain


@unchecked()
def test_nothing_stays_on_drafter_or_model(model):
    drafter = make(model)
    first = generate(model, PROMPTS, 11, 1.0, seed=5, drafter=drafter).tokens
    generate(model, [[1, 2]], 7, 1.0, drafter=drafter)
    assert generate(model, PROMPTS, 11, 1.0, seed=5, drafter=drafter).tokens == first
    hooks = [h for m in model.modules() for h in (*m._forward_hooks, *m._forward_pre_hooks)]
    assert hooks == []


@unchecked()
def test_case_55_every_block_size_and_a_near_tie():
    """A second best logit 1e-3 below the best, all along the text."""
    model = random_model(seed=4)
    unembed = model.llm.unembed.weight
    unembed[20:40] = unembed[:20] * (1 - 1e-4)
    prompt = [random_ids(5, seed=2, below=20).tolist()]
    with torch.inference_mode():
        top = logits(model, torch.tensor(prompt))[0].topk(2).values
    assert ((top[:, 0] - top[:, 1]) < 1e-2).any()
    plain = generate(model, prompt, 64).tokens
    for slots in range(2, 9):
        drafter = make(model, Scripted, block_size=slots)
        drafter.texts, drafter.script = [prompt[0] + plain[0]], [slots - 1, 0, slots - 1, 1]
        assert generate(model, prompt, 64, drafter=drafter).tokens == plain


# ---------------------------------------------------------------- states


def one_by_one(h, weights, ids, *rest):
    rows = zip(h[:, None], weights[:, None], ids[:, None], strict=True)
    return torch.cat([experts(*row, *rest) for row in rows])


@unchecked()
@pytest.mark.parametrize("accept", range(GAMMA + 1))
@pytest.mark.parametrize("length", [6, W - 2, 11])
def test_case_1_no_trace_of_rejected_tokens(accept, length):
    """After a round every state equals that of a cache that saw the accepted tokens only.

    Bit for bit: the clean cache reads them in a call of the same shape, the rejected ones masked, with experts that see
    one token at a time, so that no sum is taken in another order.
    """
    model = random_model(backend=Backend(experts=one_by_one))
    prompt = [random_ids(length, seed=length).tolist()]
    drafter, plain = scripted(model, prompt, GAMMA + 2, [accept])
    generator = torch.Generator().manual_seed(0)
    speculation = Speculation(model, Drafting(drafter), 1, 0.0, None, None, generator)
    cache = model.new_cache(1, rollback=0)
    with torch.inference_mode():
        speculation.read(torch.tensor(prompt), cache=cache)
        anchor = torch.tensor([plain[0][0]])
        (new,) = speculation.round(cache, anchor, [GAMMA + 1], set())
    assert new == plain[0][1 : accept + 2]
    clean = model.new_cache(1, rollback=0)
    logits(model, torch.tensor(prompt), cache=clean)
    block = torch.tensor([[plain[0][0], *plain[0][1 : accept + 1], *[0] * (GAMMA - accept)]])
    logits(model, block, cache=clean, attention_mask=(torch.arange(GAMMA + 1) <= accept)[None])
    assert cache.lengths == clean.lengths == [length + accept + 1]
    assert_same_contents(model, cache, clean)
    next_token = torch.tensor([new[-1:]])
    assert torch.equal(logits(model, next_token, cache=cache), logits(model, next_token, cache=clean))


@unchecked()
def test_case_12_drafter_and_target_stay_in_step(model):
    """Twenty rounds of all accept counts; the context is then that of a drafter that reads the text at once."""
    script = [0, 1, 2, 3, 4, 4, 0, 3, 1, 2]
    drafter, plain = scripted(model, [PROMPTS[0]], 61, script)
    committed = []
    steps = stream(model, [PROMPTS[0]], 61, drafter=drafter)
    for _ in steps:
        committed.append(len(PROMPTS[0]) + len(steps.result.tokens[0]) - 1)
    assert steps.result.tokens == plain
    expected, at = [], len(PROMPTS[0])
    for i in range(20):
        expected.append(at)
        at += script[i % len(script)] + 1
    assert [lengths[0] for lengths in drafter.lengths[:20]] == expected
    assert set(expected) <= set(committed)

    contexts = []
    text = torch.tensor([drafter.texts[0][:37]]) % IMAGE
    for splits in ((37,), (3, 4, 9, 21, 37)):
        context, cache, start = drafter.new_context(1), model.new_cache(1), 0
        for end in splits:
            with torch.inference_mode(), drafter.observe(model) as taps:
                # two tokens too many, taken back
                model(torch.cat([text[:, start:end], torch.tensor([[1, 2]])], dim=1), cache=cache)
                cache.crop(end)
                drafter.append(context, taps, [end - start])
            start = end
        assert context.lengths == cache.lengths
        contexts.append(drafter.block(context, text[:, 3]))
    assert relative_rms(contexts[1], contexts[0]) < 1e-5


def test_lengths_that_disagree_are_an_error(model):
    class Late(Drafter):
        def append(self, context, taps, counts):
            super().append(context, taps, [max(0, n - 1) for n in counts])

    with pytest.raises(RuntimeError, match=r"drafter has read \[2\] tokens, the target \[3\]"):
        generate(model, [1, 2, 3], 4, drafter=make(model, Late))


# ---------------------------------------------------------------- ends


@unchecked()
@pytest.mark.parametrize("position", range(1, 9))
def test_case_50_eos_anywhere_in_a_block(model, position):
    """The oracle's blocks: position 1 to 4 are drafts of the first round, 5 is its bonus token."""
    prompt = [PROMPTS[0]]
    drafter, plain = scripted(model, prompt, 24, [GAMMA])
    text = plain[0]
    eos = text[position]
    end = text.index(eos)
    calls, states = [], []
    drafter.append = lambda context, taps, counts, do=drafter.append: (
        do(context, taps, counts),
        states.append(context),
    )
    result = generate(
        model, prompt, 24, eos_token_id=eos, drafter=drafter, on_token=lambda row, token: calls.append(token)
    )
    assert result.tokens == [text[: end + 1]] == [calls]
    assert result.stop_reason == ["eos"]
    assert states[-1].lengths == [len(prompt[0]) + end]  # the text up to EOS, which nobody reads
    stats = result.stats
    assert stats.new_tokens == end + 1
    assert stats.drafting.new_tokens == end
    assert stats.drafting.row_rounds == math.ceil(end / (GAMMA + 1))
    rest = end % (GAMMA + 1)
    assert sum(stats.drafting.checked) == sum(stats.drafting.accepted)
    assert sum(stats.drafting.accepted) == end // (GAMMA + 1) * GAMMA + rest


@unchecked()
@pytest.mark.parametrize("room", [0, 1, 2, 3, GAMMA, GAMMA + 1, GAMMA + 2, 9])
def test_case_52_exactly_the_asked_number(model, room):
    for script in ([GAMMA], [0], [1]):
        drafter, plain = scripted(model, PROMPTS, 12, script)
        result = generate(model, PROMPTS, room, drafter=drafter)
        assert result.tokens == [tokens[:room] for tokens in plain]
        assert result.stop_reason == ["length"] * 3
        assert all(len(tokens) <= room for tokens in result.tokens)


@unchecked()
@pytest.mark.parametrize("room", [0, 1, 2, 5, 8])
def test_case_52_never_a_position_beyond_the_context(model, room):
    config = InklingConfig.tiny()
    config.text.max_position_embeddings = len(PROMPTS[2]) + room
    short = random_model(config)
    plain = generate(short, PROMPTS, 20)
    drafter, _ = scripted(short, PROMPTS, 20, [GAMMA, 2])
    ends = []  # of each call: the last position of each row that is computed

    def note(_, inputs, options):
        mask = options.get("attention_mask")
        counts = [inputs[0].shape[1]] * 3 if mask is None else mask.sum(1).tolist()
        ends.append([n + c - 1 for n, c in zip(options["cache"].lengths, counts, strict=True)])

    hook = short.register_forward_pre_hook(note, with_kwargs=True)
    result = generate(short, PROMPTS, 20, drafter=drafter)
    hook.remove()
    assert (result.tokens, result.stop_reason) == (plain.tokens, plain.stop_reason)
    limit = config.text.max_position_embeddings
    # As in plain decoding, the last token is written and not read.
    assert max(end for call in ends[1:] for end in call) <= limit - (2 if room else 1)
    assert max(ends[0]) == len(PROMPTS[2]) - 1


@unchecked()
@pytest.mark.parametrize("settings", [{}, {"temperature": 1.0, "top_k": 1, "seed": 1}], ids=["greedy", "sampled"])
@pytest.mark.parametrize("script", [[0], [0, 1]], ids=["always_wrong", "rows_take_turns"])
def test_case_58_one_draft(model, settings, script):
    """Of each block one draft: the correction comes from the row of the rejected position, in each sequence its own.

    Also through the sampling path, where top_k 1 leaves one right text.
    """
    drafter, plain = scripted(model, PROMPTS[:2], 15, script, block_size=2)
    result = generate(model, PROMPTS[:2], 15, drafter=drafter, **settings)
    assert result.tokens == plain
    assert result.stats.drafting.acceptance() == [0 if script == [0] else pytest.approx(0.5, abs=0.1)]


@unchecked()
def test_logits_that_are_not_finite_are_named(model):
    """At the row of the pass that decides a token; behind a rejection nobody looks."""
    broken = random_model()
    prompt = PROMPTS[0]
    drafter, plain = scripted(broken, [prompt], 12, [2])

    def poison(at):
        def hook(module, inputs, output):
            step = inputs[1]
            places = (step.positions == at)[..., None]
            return torch.where(places, math.nan, output)

        return broken.llm.register_forward_hook(hook)

    handle = poison(len(prompt) + 1)  # read first as a draft, in the first round
    with pytest.raises(InputError, match=f"not finite in row 0 at position {len(prompt) + 1}"):
        generate(broken, [prompt], 12, drafter=drafter)
    handle.remove()
    handle = poison(len(prompt) + 4)  # a rejected draft of the first round stands there; only the second decides
    steps = stream(broken, [prompt], 12, drafter=drafter)
    got = [next(steps)[0] for _ in range(5)]
    assert got == plain[0][:5]
    with pytest.raises(InputError, match=f"position {len(prompt) + 4}"):
        list(steps)
    handle.remove()


@unchecked()
def test_a_broken_drafter_costs_speed_only(model):
    drafter = make(model)
    drafter.fc.weight.fill_(math.nan)
    for temperature in (0, 1.0):
        result = generate(model, PROMPTS, 9, temperature, seed=1, drafter=drafter)
        assert all(len(tokens) == 9 for tokens in result.tokens)
    assert generate(model, PROMPTS, 9, drafter=drafter).tokens == generate(model, PROMPTS, 9).tokens


# ---------------------------------------------------------------- the distribution is the same

TOY, LENGTH, TRIALS = 4, 5, 200_000


class ToyCache:
    def __init__(self, rows):
        self.lengths, self.last = [0] * rows, torch.zeros(rows, 0, dtype=torch.long)

    def crop(self, lengths):
        keep = torch.tensor(lengths)
        self.last = self.last[:, : max(lengths)].masked_fill(torch.arange(max(lengths)) >= keep[:, None], -1)
        self.lengths = list(lengths)


class ToyTarget:
    """The next token depends on the two before it, by a table of logits."""

    device, visual = torch.device("cpu"), None

    def __init__(self, seed):
        text = SimpleNamespace(vocab_size=TOY, unpadded_vocab_size=TOY, max_position_embeddings=99, eos_token_id=None)
        self.config = SimpleNamespace(text=text, image_token_id=0)
        self.table = torch.randn(TOY, TOY, TOY, generator=torch.Generator().manual_seed(seed)) * 1.5

    def new_cache(self, rows, rollback=32):
        return ToyCache(rows)

    def __call__(self, ids, cache, attention_mask=None, image_features=None, logits_to_keep=0):
        B, T = ids.shape
        counts = torch.full((B,), T) if attention_mask is None else attention_mask.sum(1)
        lengths = torch.tensor(cache.lengths)
        text = torch.cat([cache.last, torch.full((B, T), -1)], dim=1)
        text = text.scatter(1, lengths[:, None] + torch.arange(T), ids)
        at = lengths[:, None] + torch.arange(T)
        before = text.gather(1, (at - 1).clamp(min=0)).clamp(min=0)
        cache.last, cache.lengths = text, (lengths + counts).tolist()
        return SimpleNamespace(logits=self.table[before, ids])

    def joint(self, start, *settings):
        """The probability of every text of LENGTH tokens after the prompt [start]."""
        p = probabilities(self.table, *settings).double()
        total = p[start, start]  # before the first token the table sees the token itself
        for n in range(1, LENGTH):
            step = p[start].expand(*[TOY] * (n - 1), TOY, TOY) if n == 1 else p.expand(*[TOY] * (n - 2), TOY, TOY, TOY)
            total = total[..., None] * step
        return total


class ToyDrafter:
    """Its own tables: logits by position in the block and previous token; confidences likewise."""

    num_draft_tokens = 3

    def __init__(self, seed, peek=False, report_base=False, target=None):
        generator = torch.Generator().manual_seed(seed)
        self.base = torch.randn(3, 1, TOY, generator=generator) * 1.5
        self.bias = torch.randn(3, TOY, TOY, generator=generator) * 1.5
        self.c = torch.rand(3, TOY, generator=generator)
        self.peek, self.report_base = peek, report_base

    @contextmanager
    def observe(self, model):
        yield {}

    def new_context(self, rows):
        return SimpleNamespace(lengths=[0] * rows)

    def append(self, context, taps, counts):
        context.lengths = [n + c for n, c in zip(context.lengths, counts, strict=True)]

    def propose(self, context, anchors, n, choose):
        tokens, q = [anchors], []
        for k in range(n):
            token, distribution = choose((self.base + self.bias)[k][tokens[-1]])
            if self.report_base and distribution is not None:
                distribution = probabilities(self.base[k].expand(len(token), -1))
            tokens.append(token)
            q.append(distribution)
        tokens = torch.stack(tokens, dim=1)
        seen = tokens[:, 1:] if self.peek else tokens[:, :-1]
        c = self.c[torch.arange(n), seen]
        return tokens[:, 1:], None if q[0] is None else torch.stack(q, dim=1), c


def alone(schedule):
    """Each row scheduled for itself."""
    return lambda confidence: schedule(confidence[:, None])[:, 0]


def chi_square(target, drafting, temperature=1.0, top_k=None, top_p=None, seed=1, trials=TRIALS):
    """p-value of texts with drafting against the exact probabilities of texts without."""
    start = 2
    tokens = generate(target, [[start]] * trials, LENGTH, temperature, top_k, top_p, seed=seed, drafter=drafting).tokens
    index = (torch.tensor(tokens) * TOY ** torch.arange(LENGTH - 1, -1, -1)).sum(1)
    counts = torch.bincount(index, minlength=TOY**LENGTH).double()
    expected = target.joint(start, temperature, top_k, top_p).flatten() * trials
    assert abs(expected.sum() - trials) < 1
    if counts[expected == 0].any():
        return 0.0
    # Cells too rare for the statistic count as one.
    common = expected >= 8
    counts = torch.cat([counts[common], counts[~common].sum()[None]])
    expected = torch.cat([expected[common], expected[~common].sum()[None]])
    return p_value(counts[expected > 0], expected[expected > 0], (expected > 0).sum() - 1)


def p_value(counts, expected, degrees):
    statistic = ((counts - expected) ** 2 / expected).sum()
    return float(torch.special.gammaincc(torch.as_tensor(degrees).double() / 2, statistic / 2))


TABLE = (1.0, 1.2, 1.6, 2.2)
LOSSLESS = {
    "probabilistic": ({}, {}),
    "greedy": ({"greedy": True}, {}),
    "temperature": ({}, {"temperature": 0.6}),
    "top_k": ({}, {"top_k": 3}),
    "top_p": ({}, {"temperature": 1.3, "top_p": 0.8}),
    "greedy_top_k_top_p": ({"greedy": True}, {"top_k": 3, "top_p": 0.9}),
    "one_token": ({"num_tokens": 1}, {}),
    "threshold": ({"schedule": Threshold(0.4)}, {}),
    "throughput": ({"schedule": alone(Throughput(TABLE))}, {}),
    "throughput_greedy": ({"schedule": alone(Throughput(TABLE)), "greedy": True}, {}),
    "throughput_of_all_rows": ({"schedule": Throughput([1 + i / TRIALS for i in range(4 * TRIALS)])}, {}),
}


@unchecked()
@pytest.mark.parametrize(("settings", "sampling"), LOSSLESS.values(), ids=LOSSLESS)
def test_the_distribution_of_texts_is_that_without_drafting(settings, sampling):
    assert chi_square(ToyTarget(1), Drafting(ToyDrafter(2), **settings), **sampling) > 0.01


def from_target(p, q, drafts, widths, generator, vocabulary):
    """Wrong: the replacement is drawn from p, not from what q left of it."""
    accepted, _ = sampling_module.accept(p, q, drafts, widths, generator)
    return accepted, sampling_module.sample(p[torch.arange(len(p)), accepted], generator)


def not_renormalised(p, q, drafts, widths, generator, vocabulary):
    """Wrong: what q left of p is taken for a distribution as it is; the mass that lacks falls to the last token."""
    accepted, token = sampling_module.accept(p, q, drafts, widths, generator)
    rows, at = torch.arange(len(p)), accepted.clamp(max=max(0, drafts.shape[1] - 1))
    if drafts.shape[1] == 0:
        return accepted, token
    residual = (p[rows, accepted] - q[rows, at]).clamp(min=0)
    drawn = torch.rand(len(p), 1, generator=generator)
    wrong = (drawn > residual.cumsum(-1)).sum(-1).clamp(max=p.shape[-1] - 1)
    return accepted, torch.where(accepted < widths, wrong, token)


WRONG = {
    "residual_not_subtracted": (from_target, {}, {}),
    "residual_not_renormalised": (not_renormalised, {}, {}),
    "residual_not_subtracted_greedy": (from_target, {}, {"greedy": True}),
    "bias_left_out_of_q": (None, {"report_base": True}, {}),
    "peeking_threshold": (None, {"peek": True}, {"schedule": Threshold(0.4)}),
    "peeking_throughput": (None, {"peek": True}, {"schedule": alone(Throughput(TABLE))}),
}


@unchecked()
@pytest.mark.parametrize(("verdict", "drafter", "settings"), WRONG.values(), ids=WRONG)
def test_wrong_samplers_are_caught(monkeypatch, verdict, drafter, settings):
    if verdict is not None:
        monkeypatch.setattr(speculative_module, "accept", verdict)
    assert chi_square(ToyTarget(1), Drafting(ToyDrafter(2, **drafter), **settings), trials=40_000) < 1e-6


@pytest.mark.parametrize("greedy", [False, True], ids=["drawn", "greedy"])
def test_verdicts_alone_keep_the_distribution(greedy):
    """Without the texts around them, a million: deviations of one per cent show, in the first and the second token."""
    n, generator = 1_000_000, torch.Generator().manual_seed(1)
    p = probabilities(1.5 * torch.randn(3, TOY, TOY, generator=generator))
    q = probabilities(1.5 * torch.randn(2, TOY, TOY, generator=generator))
    anchor = torch.full((n,), 2)
    if greedy:
        first = q[0][anchor].argmax(-1)
        drafts = torch.stack([first, q[1][first].argmax(-1)], dim=1)
    else:
        first = sampling_module.sample(q[0][anchor], generator)
        drafts = torch.stack([first, sampling_module.sample(q[1][first], generator)], dim=1)
    at_drafts = torch.stack([p[k][t] for k, t in enumerate((anchor, *drafts.T))], dim=1)
    drawn_from = None if greedy else torch.stack([q[0][anchor], q[1][first]], dim=1)
    accepted, token = sampling_module.accept(at_drafts, drawn_from, drafts, 1 + torch.arange(n) % 2, generator)
    one = torch.where(accepted == 0, token, drafts[:, 0])
    counts = one.bincount(minlength=TOY).double()
    assert p_value(counts, n * p[0][2].double(), TOY - 1) > 0.01
    stood = accepted > 0
    two = torch.where(accepted == 1, token, drafts[:, 1])
    counts = (TOY * one + two)[stood].bincount(minlength=TOY**2).double().view(TOY, TOY)
    counts = counts[counts.sum(-1) > 0]
    expected = counts.sum(-1, keepdim=True) * p[1][one[stood].unique()].double()
    assert p_value(counts, expected, len(counts) * (TOY - 1)) > 0.01


def test_case_54_greedy_drafts_and_empty_residuals():
    n = 100_000
    p = torch.tensor([0.5, 0.3, 0.2]).expand(n, 2, 3)
    drafts, widths = torch.zeros(n, 1, dtype=torch.long), torch.ones(n, dtype=torch.long)
    generator = torch.Generator().manual_seed(0)
    accepted, token = sampling_module.accept(p, None, drafts, widths, generator)
    assert abs(accepted.float().mean() - 0.5) < 0.01
    assert (token[accepted == 0] != 0).all()
    first = torch.where(accepted == 1, 0, token)
    assert (torch.bincount(first, minlength=3) / n - p[0, 0]).abs().max() < 0.01
    # p = q: nothing is left of p after a rejection, and nothing is divided by it
    accepted, token = sampling_module.accept(p, p[:, :1], drafts, widths, generator)
    assert accepted.all()
    # p(x) = 0, also with q(x) = 0, as of a draft that could not have been drawn
    none = torch.tensor([0.0, 0.6, 0.4]).expand(n, 2, 3)
    for q in (None, p[:, :1], none[:, :1]):
        accepted, token = sampling_module.accept(none, q, drafts, widths, generator)
        assert not accepted.any()
        assert token.min() == 1


@unchecked()
def test_drafts_of_the_target_itself_all_stand():
    """q = p: every draft is accepted, whatever the settings."""
    target, drafter = ToyTarget(1), ToyDrafter(2)
    target.table = target.table[:1].expand(TOY, -1, -1)  # one token back only, as the drafter
    drafter.base, drafter.bias = torch.zeros(3, 1, TOY), target.table[:1].expand(3, -1, -1)
    for settings in ({"temperature": 1.0}, {"temperature": 0.7, "top_k": 3}, {"temperature": 0.0}):
        stats = generate(target, [[1]] * 50, 13, seed=1, drafter=drafter, **settings).stats.drafting
        assert stats.acceptance() == [1.0] * 3
        assert stats.tokens_per_pass == 4


# ---------------------------------------------------------------- schedules


def best_prefix(survival, seconds):
    """Algorithm 1, as it is written in the paper, for one set of rows."""
    R = len(survival)
    items = sorted(((-a, r, j) for r, row in enumerate(survival) for j, a in enumerate(row)))
    rows, expected, lengths = R, float(R), [0] * R
    best = expected / seconds[rows - 1]
    for a, r, _ in items:
        rate = (expected - a) / seconds[rows]
        if rate <= best:
            break
        best, rows, expected = rate, rows + 1, expected - a
        lengths[r] += 1
    return lengths


def test_throughput_is_algorithm_1():
    generator = torch.Generator().manual_seed(0)
    for R in (1, 2, 3):
        confidence = torch.rand(200, R, 5, generator=generator) ** 0.4
        confidence[:3] = 1.0
        seconds = (1 + 0.13 * torch.arange(R * 6) ** 1.1).tolist()
        survival = confidence.double().cumprod(-1).tolist()
        expected = [best_prefix(s, seconds) for s in survival]
        assert Throughput(seconds)(confidence).tolist() == expected
        assert len({tuple(e) for e in expected}) > 3
    assert Throughput([1.0])(torch.ones(1, 4)).tolist() == [4]  # a constant cost admits everything
    assert Throughput([1.0, 3.0])(torch.ones(1, 4)).tolist() == [0]


def test_threshold():
    c = torch.tensor([[0.9, 0.5, 0.7], [0.4, 0.9, 0.9], [0.9, 0.9, 0.9]])
    assert Threshold(0.6)(c).tolist() == [1, 0, 3]
    assert Threshold(0)(c).tolist() == [3, 3, 3]
    assert Threshold(1)(c).tolist() == [0, 0, 0]


@unchecked()
def test_the_text_does_not_depend_on_the_schedule(model):
    drafter, plain = scripted(model, PROMPTS, 15, [4, 1, 2])
    for schedule in (Threshold(0.5), Throughput([1, 1.3, 1.7, 2.5]), lambda c: torch.arange(len(c)) % 3):
        drafting = Drafting(drafter, schedule=schedule)
        result = generate(model, PROMPTS, 15, drafter=drafting)
        assert result.tokens == plain
        assert sum(result.stats.drafting.checked) < result.stats.drafting.proposed


@unchecked()
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_57_confidence_without_markov_features(dtype):
    model = random_model(dtype=dtype)
    no_head = OPTIONS["no_head"]
    with pytest.raises(InputError, match="confidence_head_with_markov is True"):
        make(model, **{**no_head, "confidence_head_with_markov": True})
    for options in (no_head, {}, {"confidence_head_with_markov": False}):
        drafter = make(model, **options)
        assert drafter.confidence_head.proj.weight.dtype == dtype
        for least in (0.5, 0, 1):
            drafting = Drafting(drafter, schedule=Threshold(least))
            result = generate(model, PROMPTS[:2], 6, drafter=drafting)
            stats = result.stats.drafting
            assert stats.proposed > 0
            assert all(len(tokens) == 6 for tokens in result.tokens)
            if least == 0:
                assert sum(stats.checked) > 0
            if least == 1:
                assert stats.row_rounds == 2 * 5
                assert stats.tokens_per_pass == 1
    with pytest.raises(InputError, match="enable_confidence_head"):
        Drafting(make(model, enable_confidence_head=False), schedule=Threshold(0.5))


@pytest.mark.parametrize("gives", [[0.5, 1.0], [1, -1], [1], 2, [[1, 1]]], ids=str)
def test_a_schedule_that_gives_no_counts(model, gives):
    drafting = Drafting(make(model), schedule=lambda confidence: torch.tensor(gives))
    with pytest.raises(InputError, match=r"schedule: gave tensor.*expected 2 counts >= 0"):
        generate(model, random_ids(2, 5), 6, drafter=drafting)


def test_a_schedule_that_is_no_function(model):
    with unchecked(), pytest.raises(InputError, match="schedule is 5, expected a function"):
        Drafting(make(model), schedule=5)


def test_measured_costs(model):
    for R in (1, 3):
        seconds = measure_seconds(model, make(model), random_ids(R, 9), repeats=2)
        assert len(seconds) == R * (GAMMA + 1)
        assert min(seconds) > 0
        assert len(set(seconds[:R])) == 1, "the target reads no fewer than R tokens"
        assert Throughput(seconds)(torch.ones(R, GAMMA)).shape == (R,)


# ---------------------------------------------------------------- the drafter against its definition


def depth_states(model, ids):
    """The depth state that enters each layer, and the one after the last; with the queries that read it."""
    states = []
    hooks = [layer.register_forward_pre_hook(lambda m, inputs: states.append(inputs[:2])) for layer in model.llm.layers]
    hooks.append(model.llm.layers[-1].register_forward_hook(lambda m, i, out: states.append((out, None))))
    output = model(ids)
    for hook in hooks:
        hook.remove()
    return states, output.hidden


def mixture(depth, query):
    sources = torch.cat([depth.blocks, depth.partial[:, :, None]], dim=2).double()
    normed = sources / (sources.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
    weights = (normed @ query.double() / math.sqrt(query.shape[-1])).softmax(-1)
    return (weights[..., None] * normed).sum(2)


def test_taps(model):
    ids = random_ids(2, 9)
    states, hidden = depth_states(model, ids)
    queries = [None, *[q.view(-1, q.shape[-1])[0] for q in model.llm.attn_res.attn_queries]]
    final = mixture(states[L][0], model.llm.attn_res.output_query)

    def taps(**options):
        with observe(model, DSparkConfig(**{**SMALL, **options})) as found:
            model(ids)
        return found

    after = taps(target_layer_ids=[-1, 0, 1, 3, L])
    assert torch.equal(after[-1], model.llm.embed_tokens(ids))
    for layer in (0, 1, 3):
        assert torch.equal(after[layer], states[layer + 1][0].partial)
    assert torch.equal(after[L], hidden)
    before = taps(tap="before", target_layer_ids=[0, 1, 3, L], final_tap="mix")
    for layer in (0, 1, 3):
        assert torch.equal(before[layer], states[layer][0].partial)
    assert relative_rms(before[L], final) < 1e-5
    mixed = taps(tap="mixed", target_layer_ids=[0, 1, 3, L], final_tap="mix")
    assert torch.equal(mixed[0], model.llm.embed_tokens(ids))
    for layer in (1, 3):  # 3 is a full layer, with three queries
        assert relative_rms(mixed[layer], mixture(states[layer][0], queries[layer])) < 1e-5
    assert relative_rms(mixed[L], final) < 1e-5


def norm(x, w, eps=1e-6):
    return x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * w


def clip(x, c):
    return x * min(1.0, c / (float(x.norm()) + 1e-6))


def turn(x, position, theta):
    d = len(x)
    out = x.clone()
    for i in range(d // 2):
        angle = position * theta ** (-2 * i / d)
        out[i] = x[i] * math.cos(angle) - x[i + d // 2] * math.sin(angle)
        out[i + d // 2] = x[i + d // 2] * math.cos(angle) + x[i] * math.sin(angle)
    return out


def written_out(drafter, taps, anchor):
    """h_1 .. h_gamma after one row's context, slot by slot, head by head, key by key, as the specification has it."""
    c, target, llm = drafter.config, drafter.model.config.text, drafter.model.llm
    H, G, d = c.num_attention_heads, c.num_key_value_heads, c.head_dim
    C = norm(torch.cat([taps[i] for i in c.target_layer_ids], -1) @ drafter.fc.weight.T, drafter.hidden_norm.weight)
    p = len(C)
    tokens = [anchor] + [c.mask_token_id] * (c.block_size - 1)
    x = llm.embed.weight[tokens]
    if c.embed_norm:
        x = norm(x, llm.embed_norm.weight)
    for i, layer in enumerate(drafter.layers):
        a, n = layer.self_attn, norm(x, layer.input_layernorm.weight)
        seen = torch.cat([C, n])
        keys, values = (seen @ a.k_proj.weight.T).view(-1, G, d), (seen @ a.v_proj.weight.T).view(-1, G, d)
        rows = []
        for j in range(c.block_size):
            q = (a.q_proj.weight @ n[j]).view(H, d)
            heads = []
            for h in range(H):
                g = h * G // H
                scores, vs = [], []
                query = q[h]
                if c.qk_norm == "rms":
                    query = norm(query, a.q_norm.weight)
                else:
                    query = clip(query * a.q_l2_clip.scale[h], target.qk_l2_clip_threshold)
                if c.rope_theta:
                    query = turn(query, p + j, c.rope_theta)
                for s in range(p + c.block_size):
                    distance = p + j - s
                    if c.is_causal and distance < 0:
                        continue
                    if c.windows and c.windows[i] is not None and distance >= c.windows[i]:
                        continue
                    key, value = keys[s, g], values[s, g]
                    if c.qk_norm == "rms":
                        key = norm(key, a.k_norm.weight)
                    else:
                        key, value = clip(key, target.qk_l2_clip_threshold), norm(value, 1)
                    if c.rope_theta:
                        key = turn(key, s, c.rope_theta)
                    score = query @ key / math.sqrt(d)
                    if c.d_rel and 0 <= distance < c.rel_extent:
                        r = (a.wr_du.weight @ n[j]).view(H, c.d_rel)[h] * a.rel_l2_clip.scale[h]
                        score = score + clip(r, target.rel_l2_clip_threshold) @ a.rel_logits_proj.proj[:, distance]
                    scores.append(score)
                    vs.append(value)
                if c.attention_sink:
                    scores.append(a.attn_sink_proj.weight[h] @ n[j])
                    vs.append(torch.zeros(d, dtype=n.dtype))
                o = (torch.stack(scores).softmax(0)[:, None] * torch.stack(vs)).sum(0)
                if c.attention_gate:
                    o = o * torch.sigmoid(a.gate_attn.weight.view(H, d, -1)[h] @ n[j])
                heads.append(o)
            rows.append(a.o_proj.weight @ torch.cat(heads))
        x = x + torch.stack(rows)
        u = norm(x, layer.post_attention_layernorm.weight)
        gate = u @ layer.mlp.gate_proj.weight.T
        x = x + (gate * torch.sigmoid(gate) * (u @ layer.mlp.up_proj.weight.T)) @ layer.mlp.down_proj.weight.T
    y = norm(x, drafter.norm.weight)
    return y if c.sample_from_anchor else y[1:]


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_block_is_its_definition(options):
    """In float64, rows of different length, context in two pieces."""
    model = random_model(dtype=torch.float64)
    drafter = make(model, **options)
    ids, counts = random_ids(2, 13), [13, 6]
    context = drafter.new_context(2)
    with drafter.observe(model) as taps:
        model(ids)
    drafter.append(context, {i: t[:, :4] for i, t in taps.items()}, [4, 4])
    drafter.append(context, {i: t[:, 4:] for i, t in taps.items()}, [9, 2])
    anchors = torch.tensor([5, 17])
    h = drafter.block(context, anchors)
    for row, n in enumerate(counts):
        expected = written_out(drafter, {i: t[row, :n] for i, t in taps.items()}, int(anchors[row]))
        assert relative_rms(h[row], expected) < 1e-12


def sigmoid(x):
    return 1 / (1 + math.exp(-x))


@pytest.mark.parametrize("kind", ["vanilla", "gated", "rnn"])
def test_heads_step_by_step_in_float64(kind):
    """Scalar by scalar: the equations of the module docstring, with s from the step before."""
    vocabulary, D, r, steps = 11, 5, 3, 6
    head = MarkovHead(kind, vocabulary, D, r)
    randomize(head, 1)
    head32 = MarkovHead(kind, vocabulary, D, r)
    head32.load_state_dict(head.state_dict())
    head.double()
    h = torch.randn(steps, D, generator=torch.Generator().manual_seed(2)).double()
    previous = [4, 4, 0, 9, 10, 4]
    w1, w2 = head.markov_w1.weight.tolist(), head.markov_w2.weight.tolist()
    s, state, state32 = [0.0] * r, head.start(h[0]), head32.start(h[0].float())
    used = 10
    for k in range(steps):
        e, x = w1[previous[k]], h[k].tolist()
        if kind == "vanilla":
            u = e
        elif kind == "gated":
            W, b = head.gate_proj.weight.tolist(), head.gate_proj.bias.tolist()
            z = x + e
            u = [sigmoid(sum(w * v for w, v in zip(W[i], z, strict=True)) + b[i]) * e[i] for i in range(r)]
        else:
            W, b = head.joint_proj.weight.tolist(), head.joint_proj.bias.tolist()
            z = s + e + x
            J = [sum(w * v for w, v in zip(row, z, strict=True)) + bias for row, bias in zip(W, b, strict=True)]
            u = [math.tanh(o) for o in J[2 * r :]]  # reads z, which holds the old state
            f = [sigmoid(a) for a in J[:r]]
            s = [f[i] * s[i] + (1 - f[i]) * math.tanh(J[r + i]) for i in range(r)]
        expected = torch.tensor([sum(w * v for w, v in zip(row, u, strict=True)) for row in w2[:used]]).double()
        token = torch.tensor(previous[k])
        B, state = head.step(h[k], token, state, used)
        B32, state32 = head32.step(h[k].float(), token, state32, used)
        assert relative_rms(B.detach(), torch.tensor(expected.tolist(), dtype=torch.float64)) < 1e-6
        assert relative_rms(B32.detach(), B.detach()) < 1e-5
        if kind == "rnn":
            assert relative_rms(state.detach(), torch.tensor(s).double()) < 1e-6


@unchecked()
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_proposals(model, options):
    """Tokens, their distributions and confidences from h: base logits of the used vocabulary, head, draw."""
    drafter = make(model, **options)
    context, anchors, n = drafter.new_context(2), torch.tensor([5, 17]), 3
    with torch.inference_mode(), drafter.observe(model) as taps:
        model(random_ids(2, 6))
        drafter.append(context, taps, [6, 4])
    generator = torch.Generator().manual_seed(0)
    seen = []

    def choose(logits):
        seen.append(logits)
        q = probabilities(logits)
        return sampling_module.sample(q, generator), q

    tokens, q, confidence = drafter.propose(context, anchors, n, choose)
    h = drafter.block(context, anchors)[:, :n].double()
    u = h @ model.llm.unembed.weight[:V].double().T
    if drafter.config.softcap:
        u = 30 * torch.tanh(u / 30)
    previous = torch.cat([anchors[:, None], tokens[:, :-1]], dim=1)
    head = drafter.markov_head
    s = None if head is None else head.double().start(h[:, 0])
    for k in range(n):
        expected = u[:, k]
        if head is not None:
            B, s = head.step(h[:, k], previous[:, k], s, V)
            expected = expected + B
        assert relative_rms(seen[k], expected) < 1e-5
        assert torch.equal(q[:, k], probabilities(seen[k]))
    if drafter.confidence_head is None:
        assert confidence is None
    else:
        w, b = (t.double() for t in drafter.confidence_head.parameters())
        z = h
        if drafter.config.confidence_head_with_markov:
            z = torch.cat([h, head.markov_w1(previous)], dim=-1)
        assert relative_rms(confidence, torch.sigmoid(z @ w[0] + b)) < 1e-5


def test_rotate_depends_on_distance_only():
    x, y = torch.randn(2, 1, 1, 1, 6).double()
    at = torch.tensor([[3]])
    for shift in (0, 5, 100):
        a, b = rotate(x, at + shift, 1e4), rotate(y, at + 4 + shift, 1e4)
        product = (a * b).sum()
        if shift == 0:
            first = product
        assert abs(product - first) < 1e-9


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"target_layer_ids": [2, 1]}, "target_layer_ids is \\[2, 1\\], expected ascending"),
        ({"target_layer_ids": [1, 5]}, "layers from -1 to 4"),
        ({"target_layer_ids": [-1, 2], "tap": "before"}, "layers from 0 to 4"),
        ({"target_layer_ids": []}, "target_layer_ids"),
        ({"block_size": 1}, "block_size is 1"),
        ({"mask_token_id": 48}, "mask_token_id is 48, expected 0 <= id < vocab_size 48"),
        ({"markov_rank": 0}, "markov_rank is 0"),
        ({"markov_head_type": "gru"}, "markov_head_type is 'gru', expected one of rnn"),
        ({"num_attention_heads": 3}, "num_attention_heads is 3, expected a multiple of num_key_value_heads 2"),
        ({"windows": [3]}, "windows"),
        ({"rope_theta": 1e4, "head_dim": 5}, "rope_theta"),
    ],
)
def test_impossible_configs_are_named(model, options, named):
    with pytest.raises(InputError, match=named):
        make(model, **options)


def test_unusable_drafters_are_named(model):
    drafter = make(model)
    with pytest.raises(InputError, match="another model"):
        generate(random_model(seed=1), [1, 2], drafter=drafter)
    with pytest.raises(InputError, match="drafter is str"):
        generate(model, [1, 2], drafter="mtp")
    with pytest.raises(InputError, match="num_tokens is 9, the drafter has 4"):
        Drafting(drafter, num_tokens=9)
    with pytest.raises(InputError, match="num_tokens is 0"):
        Drafting(drafter, num_tokens=0)
    with pytest.raises(InputError, match="Threshold"):
        Threshold(1.5)
    with pytest.raises(InputError, match="Throughput"):
        Throughput([1.0, -1.0])
