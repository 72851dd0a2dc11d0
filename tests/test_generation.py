"""Generation on a model whose right answer is known for any history, then on the real one; sampling; streams."""

import dataclasses
import math
from types import SimpleNamespace

import pytest
import torch
from helpers import random_ids, random_model

from inkling_ref import InputError
from inkling_ref.generation import generate, probabilities, sample, stream

V = 11


class FakeModel:
    """Next-token logits from a hash of a row's whole history: any slip in what is fed, or where, changes the text.

    It keeps the state that a cache would, refuses what the real model would compute wrongly, and notes positions.
    """

    device = torch.device("cpu")
    visual = None

    def __init__(self, limit=1000, eos=None, logits_of=None):
        text = SimpleNamespace(vocab_size=V + 5, unpadded_vocab_size=V, max_position_embeddings=limit, eos_token_id=eos)
        self.config = SimpleNamespace(text=text, image_token_id=V - 1)
        self.logits_of = logits_of or self.hashed
        self.calls = []  # T of every call
        self.positions = set()

    @staticmethod
    def hashed(history):
        generator = torch.Generator().manual_seed(hash(tuple(history)) % 2**31)
        return torch.randn(V, generator=generator) * 3

    def new_cache(self, batch_size, rollback=32):
        return [[] for _ in range(batch_size)]

    def __call__(self, input_ids, cache, attention_mask=None, image_features=None, logits_to_keep=0):
        assert torch.is_inference_mode_enabled()
        self.calls.append(input_ids.shape[1])
        mask = torch.ones_like(input_ids) if attention_mask is None else attention_mask
        logits = torch.zeros(*input_ids.shape, V)
        for row, history in enumerate(cache):
            for t, (token, is_token) in enumerate(zip(input_ids[row].tolist(), mask[row].tolist(), strict=True)):
                if is_token:
                    self.positions.add(len(history))
                    history.append(token)
                    logits[row, t] = self.logits_of(history)
        return SimpleNamespace(logits=logits[:, -logits_to_keep:])

    def greedy(self, prompt, n):
        """The same, without any machinery."""
        history = list(prompt)
        for _ in range(n):
            history.append(int(self.logits_of(history).argmax()))
        return history[len(prompt) :]


PROMPTS = [[1, 2, 3], [4], [5, 6, 7, 8, 9, 0, 1]]


# Probabilities


def test_temperature_zero_is_one_hot_on_the_lowest_id_of_a_tie():
    p = probabilities(torch.tensor([[0.0, 2.0, 2.0, -1.0], [5.0, 5.0, 5.0, 5.0]]), temperature=0)
    assert p.tolist() == [[0, 1, 0, 0], [1, 0, 0, 0]]


def test_temperature_divides_the_logits():
    logits = torch.randn(3, 7, generator=torch.Generator().manual_seed(1))
    for temperature in (0.5, 1, 2.5):
        torch.testing.assert_close(probabilities(logits, temperature), (logits / temperature).softmax(-1))


@pytest.mark.parametrize("temperature", [1e-3, 1e-30, 1e-300, 5e-324], ids=str)
def test_tiny_temperatures_approach_greedy(temperature):
    logits = torch.tensor([[-30.0, 29.0, 30.0, -30.0], [0.0, 0.0, 0.0, -1.0]])
    p = probabilities(logits, temperature)
    assert p[0].tolist() == [0, 0, 1, 0]
    torch.testing.assert_close(p[1], torch.tensor([1, 1, 1, 0]) / 3)


@pytest.mark.parametrize(
    ("top_k", "kept"), [(1, [3]), (2, [3, 0]), (3, [3, 0, 2]), (4, [3, 0, 2, 4]), (5, [3, 0, 2, 4, 1]), (9, range(5))]
)
def test_top_k_keeps_exactly_k_lower_ids_first(top_k, kept):
    logits = torch.tensor([[1.0, 0.0, 1.0, 2.0, 1.0]])
    p = probabilities(logits, 1.0, top_k=top_k)[0]
    assert p.nonzero().flatten().tolist() == sorted(kept)
    expected = torch.zeros(5).scatter(0, torch.tensor(list(kept)), logits[0, list(kept)].softmax(0))
    torch.testing.assert_close(p, expected)


def test_top_k_breaks_ties_by_id_in_a_large_vocabulary():
    p = probabilities(torch.zeros(2, 5003), 1.0, top_k=700)
    assert p[1].nonzero().flatten().tolist() == list(range(700))


@pytest.mark.parametrize(
    ("top_p", "kept"),
    [(1e-9, [2]), (0.4, [2]), (0.5, [2]), (0.51, [0, 2]), (0.8, [0, 2]), (0.81, [0, 2, 3]), (1.0, [0, 1, 2, 3])],
)
def test_top_p_keeps_the_smallest_set_that_reaches_it(top_p, kept):
    masses = torch.tensor([0.3, 0.05, 0.5, 0.15])
    p = probabilities(masses.log()[None], 1.0, top_p=top_p)[0]
    assert p.nonzero().flatten().tolist() == kept
    torch.testing.assert_close(p[kept], masses[kept] / masses[kept].sum())


def test_top_p_works_on_what_top_k_left():
    masses = torch.tensor([0.4, 0.3, 0.2, 0.1])
    # after top_k = 2: 4/7 and 3/7; 0.55 is reached by the first alone, which it is not without top_k
    assert probabilities(masses.log()[None], 1.0, top_k=2, top_p=0.55)[0].tolist() == pytest.approx([1, 0, 0, 0])
    assert probabilities(masses.log()[None], 1.0, top_p=0.55)[0].count_nonzero() == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("settings", [(1, None, None), (0.7, 5, None), (1.3, None, 0.6), (0.9, 7, 0.8), (0, 3, 0.5)])
def test_probabilities_sum_to_one_in_any_shape(settings, dtype):
    logits = torch.randn(2, 3, 13, generator=torch.Generator().manual_seed(2)).to(dtype)
    p = probabilities(logits, *settings)
    assert p.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(p.sum(-1), torch.ones(2, 3, dtype=p.dtype))
    torch.testing.assert_close(p[1, 2], probabilities(logits[1, 2], *settings))


def test_samples_follow_the_distribution():
    p = probabilities(torch.tensor([[2.0, 1.0, 0.0, -1.0, 0.5]]), 0.8, top_k=4, top_p=0.9)
    draws = sample(p.expand(40000, -1), torch.Generator().manual_seed(3))
    frequency = torch.bincount(draws, minlength=5) / 40000
    assert frequency[p[0] == 0].sum() == 0
    assert (frequency - p[0]).abs().max() < 0.01


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({"temperature": -0.1}, "temperature is -0.1"),
        ({"temperature": math.nan}, "temperature is nan"),
        ({"temperature": math.inf}, "temperature is inf"),
        ({"top_k": 0}, "top_k is 0"),
        ({"top_k": -3}, "top_k is -3"),
        ({"top_k": 1.5}, "top_k is 1.5"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"top_p": -0.5}, "top_p is -0.5"),
        ({"top_p": 1.01}, "top_p is 1.01"),
        ({"top_p": math.nan}, "top_p is nan"),
    ],
)
def test_settings_out_of_range_are_named(settings, named):
    with pytest.raises(InputError, match=named):
        probabilities(torch.zeros(1, V), **({"temperature": 1.0} | settings))
    model = FakeModel()
    with pytest.raises(InputError, match=named):
        stream(model, [1], **settings)
    assert model.calls == []


# The loop, on a model whose right answer is known


@pytest.mark.parametrize("n", [0, 1, 2, 17])
def test_exactly_the_asked_number_of_tokens(n):
    model = FakeModel()
    result = generate(model, PROMPTS[0], max_new_tokens=n)
    assert result.tokens == [model.greedy(PROMPTS[0], n)]
    assert result.stop_reason == ["length"]
    # one call for the prompt, one for each token but the last; none at all for no token
    assert model.calls == ([3] + [1] * (n - 1) if n else [])


@pytest.mark.parametrize("chunk", [None, 1, 2, 3, 5, 7, 100])
def test_rows_of_unequal_length_equal_each_row_alone(chunk):
    model = FakeModel()
    result = generate(model, PROMPTS, max_new_tokens=9, prefill_chunk=chunk)
    assert result.tokens == [model.greedy(p, 9) for p in PROMPTS]
    assert max(model.calls) <= (chunk or 7)


def test_case_52_never_a_position_beyond_the_context():
    for room in range(4):
        model = FakeModel(limit=7 + room)
        for asked in (0, 1, 2, 3, 5):
            result = generate(model, PROMPTS, max_new_tokens=asked)
            given = [min(asked, model.config.text.max_position_embeddings - len(p)) for p in PROMPTS]
            assert result.tokens == [model.greedy(p, n) for p, n in zip(PROMPTS, given, strict=True)]
            assert result.stop_reason == ["length" if n == asked else "context" for n in given]
        assert max(model.positions) < 7 + room


def test_prompt_beyond_the_context_is_refused():
    with pytest.raises(InputError, match="row 2 has 7 tokens, max_position_embeddings is 6"):
        generate(FakeModel(limit=6), PROMPTS)


@pytest.mark.parametrize("as_list", [False, True])
def test_eos_ends_each_row_where_it_comes(as_list):
    model = FakeModel()
    free = [model.greedy(p, 20) for p in PROMPTS]
    eos = free[0][4]
    result = generate(model, PROMPTS, max_new_tokens=20, eos_token_id=[eos, V + 2] if as_list else eos)
    for tokens, reason, text in zip(result.tokens, result.stop_reason, free, strict=True):
        expected = text[: text.index(eos) + 1] if eos in text else text
        assert tokens == expected
        assert reason == ("eos" if eos in text else "length")
    assert len({len(t) for t in result.tokens}) > 1  # they did end at different times


def test_eos_wins_over_length_and_context():
    model = FakeModel(limit=8)
    free = model.greedy(PROMPTS[0], 5)
    assert free[4] not in free[:4]
    assert generate(model, PROMPTS[0], eos_token_id=free[4]).stop_reason == ["eos"]
    assert generate(model, PROMPTS[0], max_new_tokens=5, eos_token_id=free[4]).stop_reason == ["eos"]


def test_eos_inside_a_prompt_does_not_end_it():
    model = FakeModel()
    result = generate(model, PROMPTS[0], max_new_tokens=1, eos_token_id=PROMPTS[0])
    assert len(result.tokens[0]) == 1


def test_eos_comes_from_the_config_unless_given():
    eos = FakeModel().greedy(PROMPTS[0], 3)[2]
    assert len(generate(FakeModel(eos=eos), PROMPTS[0]).tokens[0]) <= 3
    assert len(generate(FakeModel(eos=[eos, V + 1]), PROMPTS[0]).tokens[0]) <= 3
    assert len(generate(FakeModel(eos=eos), PROMPTS[0], eos_token_id=[]).tokens[0]) == 64


@pytest.mark.parametrize("eos", [-1, V + 5, 1.5, "a", [3, -1]], ids=str)
def test_impossible_eos_is_named(eos):
    with pytest.raises(InputError, match="eos_token_id"):
        generate(FakeModel(), [1], eos_token_id=eos)


@pytest.mark.parametrize(
    "mask", [[[0, 0, 1, 1, 1], [1, 1, 0, 0, 0]], [[1, 0, 1, 0, 1], [0, 1, 0, 1, 0]]], ids=["left_and_right", "holes"]
)
def test_padding_anywhere(mask):
    pad = 44  # not even an id: padding is never looked at
    ids = torch.full((2, 5), pad)
    ids[0, torch.tensor(mask[0], dtype=torch.bool)] = torch.tensor([1, 2, 3])
    ids[1, torch.tensor(mask[1], dtype=torch.bool)] = torch.tensor([4, 5])
    model = FakeModel()
    result = generate(model, ids, max_new_tokens=6, attention_mask=torch.tensor(mask, dtype=torch.bool))
    assert result.tokens == [model.greedy([1, 2, 3], 6), model.greedy([4, 5], 6)]
    assert result.stats.prompt_tokens == 5


@pytest.mark.parametrize(
    "form", [lambda p: p, lambda p: [p], torch.tensor, lambda p: torch.tensor([p]), lambda p: torch.tensor(p).numpy(),
             tuple, lambda p: [torch.tensor(i) for i in p]],
    ids=["list", "rows", "tensor_T", "tensor_BT", "array", "tuple", "scalars"],
)  # fmt: skip
def test_forms_of_a_prompt(form):
    model = FakeModel()
    assert generate(model, form(PROMPTS[0]), max_new_tokens=4).tokens == [model.greedy(PROMPTS[0], 4)]


@pytest.mark.parametrize(
    ("ids", "named"),
    [
        ([], "input_ids"), ([[]], "row 0 has no tokens"), ([[1], []], "row 1 has no tokens"),
        (torch.zeros(0, dtype=torch.long), "input_ids"), (torch.zeros(2, 0, dtype=torch.long), "row 0 has no tokens"),
        ("hello", "input_ids"), (3, "input_ids"), (None, "input_ids"), ([1.5], "input_ids: expected integers"),
        (torch.tensor([0.5]), "input_ids: expected integers"), ([["a"]], "input_ids: expected integers"),
        (torch.zeros(1, 1, 1, dtype=torch.long), "input_ids: expected integers"), ([1, [2]], "expected integers"),
        ([1, -1], "row 0, column 1 is -1"), ([[1], [2, V]], f"row 1, column 1 is {V}, expected 0 <= id < {V}"),
    ],
    ids=str,
)  # fmt: skip
def test_unusable_prompts_are_named(ids, named):
    model = FakeModel()
    with pytest.raises(InputError, match=named):
        stream(model, ids)
    assert model.calls == []


def test_mask_must_fit_and_leave_something():
    with pytest.raises(InputError, match="attention_mask"):
        generate(FakeModel(), [[1, 2]], attention_mask=[[1]])
    with pytest.raises(InputError, match="attention_mask"):
        generate(FakeModel(), [[1, 2]], attention_mask=[[1, 1], [1, 1]])
    with pytest.raises(InputError, match="row 1 has no tokens"):
        generate(FakeModel(), [[1], [2]], attention_mask=[[1], [0]])


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"max_new_tokens": -1}, "max_new_tokens is -1"),
        ({"prefill_chunk": 0}, "prefill_chunk is 0"),
        ({"drafter": object()}, "drafter is object, expected a Drafter"),
        ({"pixel_values": torch.zeros(1, 4, 4, 3)}, "image_grid_thw"),
    ],
)
def test_other_arguments_are_named(options, named):
    with pytest.raises(InputError, match=named):
        stream(FakeModel(), [1], **options)


@pytest.mark.parametrize("temperature", [0, 1.0])
@pytest.mark.parametrize("bad", [math.nan, math.inf], ids=str)
def test_logits_that_are_not_finite_are_named(bad, temperature):
    def logits_of(history):
        logits = FakeModel.hashed(history)
        if history[0] == 4 and len(history) == 3:
            logits[6] = bad
        return logits

    steps = stream(FakeModel(logits_of=logits_of), PROMPTS, temperature=temperature, seed=1)
    next(steps), next(steps)
    with pytest.raises(InputError, match="logits: not finite in row 1 at position 2"):
        next(steps)
    assert [len(t) for t in steps.result.tokens][1] == 2


def test_minus_infinity_only_forbids():
    def logits_of(history):
        logits = FakeModel.hashed(history)
        logits[:6] = -math.inf
        return logits

    for temperature in (0, 1.0):
        result = generate(FakeModel(logits_of=logits_of), PROMPTS, 8, temperature, seed=1)
        assert min(min(t) for t in result.tokens) >= 6


def test_logits_of_padded_vocabulary_rows_are_refused():
    model = FakeModel(logits_of=FakeModel.hashed)
    model.config.text.unpadded_vocab_size = V - 1
    with pytest.raises(AssertionError):
        generate(model, [1])


def test_greedy_takes_the_lowest_id_of_a_tie():
    model = FakeModel(logits_of=lambda history: torch.tensor([0.0, 1, 3, 2, 3, 3, *[0.0] * (V - 6)]))
    assert generate(model, [1], max_new_tokens=3).tokens == [[2, 2, 2]]


# Sampling


def test_seeds_reproduce_and_differ():
    def run(seed):
        return generate(FakeModel(), PROMPTS, 12, temperature=1.5, seed=seed).tokens

    assert run(7) == run(7)
    assert run(7) != run(8)
    assert run(None) != run(None)


def test_the_global_random_state_is_neither_read_nor_written():
    def run(seed):
        torch.manual_seed(seed)
        before = torch.get_rng_state()
        tokens = generate(FakeModel(), PROMPTS, 12, temperature=1.5, seed=3).tokens
        assert torch.equal(torch.get_rng_state(), before)
        generate(FakeModel(), PROMPTS, 2, temperature=1.5)
        assert torch.equal(torch.get_rng_state(), before)
        return tokens

    assert run(1) == run(2)


def test_top_k_one_and_tiny_top_p_are_greedy():
    model = FakeModel()
    greedy = generate(model, PROMPTS, 8).tokens
    assert generate(model, PROMPTS, 8, temperature=1, top_k=1).tokens == greedy
    assert generate(model, PROMPTS, 8, temperature=1, top_p=1e-6).tokens == greedy


def test_generation_draws_from_probabilities():
    logits = torch.randn(V, generator=torch.Generator().manual_seed(5)) * 2
    model = FakeModel(logits_of=lambda history: logits)
    settings = {"temperature": 0.7, "top_k": 6, "top_p": 0.9}
    tokens = generate(model, [[1]] * 4000, 2, seed=1, **settings).tokens
    frequency = torch.bincount(torch.tensor(tokens).flatten(), minlength=V) / 8000
    p = probabilities(logits[None], **settings)[0]
    assert frequency[p == 0].sum() == 0
    assert (frequency - p).abs().max() < 0.02


# Streaming


def test_stream_yields_what_generate_returns():
    model = FakeModel()
    eos = model.greedy(PROMPTS[0], 4)[3]
    expected = generate(model, PROMPTS, 10, eos_token_id=eos)
    seen = [[] for _ in PROMPTS]
    steps = stream(model, PROMPTS, 10, eos_token_id=eos)
    for step in steps:
        for row, token in enumerate(step):
            if token is not None:
                seen[row].append(token)
        assert steps.result.tokens == seen
    assert seen == expected.tokens
    assert steps.result.stop_reason == expected.stop_reason
    calls = []
    generate(model, PROMPTS, 10, eos_token_id=eos, on_token=lambda row, token: calls.append((row, token)))
    assert [[token for r, token in calls if r == row] for row in range(len(PROMPTS))] == expected.tokens


def test_a_stream_computes_only_what_is_read():
    model = FakeModel()
    steps = stream(model, PROMPTS[0], 10)
    assert model.calls == []
    next(steps)
    assert model.calls == [3]
    assert not torch.is_inference_mode_enabled()  # between steps the caller's own mode rules
    next(steps)
    assert model.calls == [3, 1]
    assert steps.result.stop_reason == [None]


def test_stats_count_tokens():
    model = FakeModel()
    free = [model.greedy(p, 10) for p in PROMPTS]
    eos = free[1][0]
    result = generate(model, PROMPTS, 10, eos_token_id=eos)
    stats = result.stats
    assert stats.prompt_tokens == 11
    assert stats.new_tokens == sum(map(len, result.tokens))
    assert stats.decode_steps == max(map(len, result.tokens)) - 1 == len(model.calls) - 1
    assert min(stats.prefill_seconds, stats.decode_seconds) > 0
    nothing = generate(model, PROMPTS, 0).stats
    assert (nothing.new_tokens, nothing.prefill_seconds, nothing.decode_steps) == (0, 0, 0)


# The real model, tiny, with random weights large enough for clear decisions


@pytest.fixture(scope="module")
def model():
    return random_model()


def by_full_forward(model, prompt, n, **images):
    """Greedy text without any cache; also the smallest gap between the two largest logits."""
    ids, gap = list(prompt), math.inf
    for _ in range(n):
        top = model(torch.tensor([ids]), logits_to_keep=1, **images).logits[0, -1].topk(2)
        gap = min(gap, float(top.values[0] - top.values[1]))
        ids.append(int(top.indices[0]))
    return ids[len(prompt) :], gap


def prompts(*lengths, seed=1):
    return [random_ids(n, seed=seed + n).tolist() for n in lengths]


def test_greedy_with_a_cache_equals_full_forwards(model):
    (prompt,) = prompts(13)
    expected, gap = by_full_forward(model, prompt, 12)
    assert gap > 1e-3  # no near tie: the comparison is not decided by rounding
    assert len(set(expected)) > 5
    assert generate(model, prompt, 12).tokens == [expected]


@pytest.fixture(scope="module")
def rows_alone(model):
    """Prompts of unequal length, and the greedy text of each without a cache."""
    rows = prompts(1, 13, 6, 21)
    texts, gaps = zip(*(by_full_forward(model, row, 8) for row in rows), strict=True)
    assert min(gaps) > 1e-3
    return rows, texts


@pytest.mark.parametrize("chunk", [None, 1, 4, 7])
def test_model_batch_of_unequal_lengths_equals_rows_alone(model, rows_alone, chunk):
    rows, free = rows_alone
    eos = free[2][3]
    result = generate(model, rows, 8, eos_token_id=eos, prefill_chunk=chunk)
    assert result.tokens == [t[: t.index(eos) + 1] if eos in t else t for t in free]


def test_case_13_a_second_call_equals_a_fresh_model(model):
    first, second = prompts(9, 5, seed=2)
    expected = by_full_forward(model, second, 10)[0]
    state = {name: t.clone() for name, t in model.state_dict().items()}
    generate(model, first, 10)
    assert generate(model, second, 10).tokens == [expected]
    assert generate(model, second, 10).tokens == [expected]
    assert all(torch.equal(t, state[name]) for name, t in model.state_dict().items())
    assert list(model.state_dict()) == list(state)


def test_case_13_a_window_longer_than_the_context(model):
    text = dataclasses.replace(model.config.text, sliding_window_size=64, rel_extent=64, max_position_embeddings=20)
    wide = random_model(dataclasses.replace(model.config, text=text))
    first, second = prompts(9, 5, seed=3)
    generate(wide, first, 64)
    result = generate(wide, second, 64)
    assert result.tokens == [by_full_forward(wide, second, 15)[0]]
    assert result.stop_reason == ["context"]


def test_case_42_the_bound_is_the_unpadded_vocabulary(model):
    assert (model.config.text.vocab_size, model.config.text.unpadded_vocab_size) == (48, 40)
    text_only = random_model(dataclasses.replace(model.config, vision=None))
    result = generate(text_only, [[39, 1]] * 8, 4, temperature=1000.0, seed=0)
    assert 30 < max(map(max, result.tokens)) < 40
    with pytest.raises(InputError, match="column 1 is 44, expected 0 <= id < 40"):
        generate(model, [39, 44], 1)


def image_prompt(model, tiles, seed):
    """Text around one image; pixel values and grid of it."""
    generator = torch.Generator().manual_seed(seed)
    before, after = prompts(3, 4, seed=seed)
    rows, columns = tiles
    side = model.config.vision.tile_size
    pixels = torch.rand(rows * columns, side, side, 3, generator=generator) * 2 - 1
    ids = before + [model.config.image_token_id] * (rows * columns) + after
    return ids, pixels, torch.tensor([[1, rows, columns]])


@pytest.mark.parametrize("chunk", [None, 1, 5, 8])
def test_images_in_a_batch_with_any_chunk(model, chunk):
    parts = [image_prompt(model, (2, 3), 1), image_prompt(model, (1, 2), 2)]
    text = prompts(11, seed=4)[0]
    expected = [
        by_full_forward(model, ids, 1, pixel_values=pixels, image_grid_thw=grid)[0] for ids, pixels, grid in parts
    ]
    pixels, grids = torch.cat([p for _, p, _ in parts]), torch.cat([g for _, _, g in parts])
    rows = [parts[0][0], text, parts[1][0]]
    result = generate(model, rows, 6, pixel_values=pixels, image_grid_thw=grids, prefill_chunk=chunk)
    assert [result.tokens[0][:1], result.tokens[2][:1]] == expected
    alone = [generate(model, ids, 6, pixel_values=p, image_grid_thw=g).tokens[0] for ids, p, g in parts]
    assert [result.tokens[0], result.tokens[2]] == alone
    assert result.tokens[1] == generate(model, text, 6).tokens[0]
    # and the picture matters
    swapped = generate(model, rows, 6, pixel_values=-pixels, image_grid_thw=grids).tokens
    assert swapped[0] != result.tokens[0]


def test_padding_is_no_image_token(model):
    # whatever id stands in the padding, here the image token's
    zero = random_model(dataclasses.replace(model.config, image_token_id=0))
    ids, pixels, grid = image_prompt(zero, (1, 2), 5)
    ids = [token or 1 for token in ids[:3]] + [0, 0] + [token or 1 for token in ids[5:]]
    rows = [[5, 6], ids, [7]]
    result = generate(zero, rows, 4, pixel_values=pixels, image_grid_thw=grid)
    assert result.tokens[1] == generate(zero, ids, 4, pixel_values=pixels, image_grid_thw=grid).tokens[0]
    assert result.tokens[0] == generate(zero, rows[0], 4).tokens[0]


@pytest.mark.parametrize("chunk", [None, 2])
def test_tiles_and_image_tokens_must_match(model, chunk):
    ids, pixels, grid = image_prompt(model, (2, 3), 1)
    with pytest.raises(InputError, match="6 image tokens, the images have 0 tiles"):
        generate(model, ids, 2, prefill_chunk=chunk)
    with pytest.raises(InputError, match="5 image tokens, the images have 6 tiles"):
        generate(model, ids[:3] + ids[4:], 2, pixel_values=pixels, image_grid_thw=grid, prefill_chunk=chunk)


def test_a_sampled_image_token_is_a_token_like_any_other(model):
    forced, image = random_model(model.config), model.config.image_token_id
    hidden = forced(torch.tensor([[1, 2]])).hidden[0, -1]
    forced.llm.unembed.weight.zero_()
    forced.llm.unembed.weight[image] = hidden
    result = generate(forced, [1, 2], 3)
    assert result.tokens[0][0] == image
    assert len(result.tokens[0]) == 3


def test_seeds_reproduce_on_the_model(model):
    rows = prompts(5, 9)
    runs = [generate(model, rows, 12, temperature=1.0, top_p=0.9, seed=s).tokens for s in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    assert max(max(t) for t in runs[0]) < 40


@pytest.mark.parametrize("seed", [2**64, -(2**63) - 1, 10**30], ids=str)
def test_a_seed_out_of_range_is_named(model, seed):
    with pytest.raises(InputError, match=f"seed is {seed}, expected an integer"):
        generate(model, [[1]], 1, temperature=1.0, seed=seed)


@pytest.mark.parametrize("seed", [2**64 - 1, -(2**63)], ids=str)
def test_the_ends_of_the_range_are_seeds(model, seed):
    assert len(generate(model, [[1]], 2, temperature=1.0, seed=seed).tokens[0]) == 2
