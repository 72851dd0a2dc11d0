"""The decoding step with fixed addresses gives what the model gives with a growing cache."""

from types import SimpleNamespace

import pytest
import torch
from helpers import logits, random_ids, random_model, relative_rms, unchecked

from inkling_ref import decode_step
from inkling_ref.backends import Backend
from inkling_ref.decode_step import DecodeStep, StepBackend, step_backend
from inkling_ref.draft_config import DSparkConfig
from inkling_ref.dspark import observe
from inkling_ref.errors import InputError
from inkling_ref.fused import sample_head

PREFIX = [11, 4]  # tokens of the rows before the first step


@pytest.fixture(scope="module")
def model():
    return random_model(dtype=torch.float64)


def started(model, prefix=PREFIX, ids=None, **kwargs):
    """A step that continues after a prefill of unequal rows, and the rows' tokens."""
    ids = random_ids(len(prefix), max(prefix), seed=3) if ids is None else ids
    mask = torch.arange(ids.shape[1]) < torch.tensor(prefix)[:, None]
    cache = model.new_cache(len(prefix))
    with torch.inference_mode():
        model(ids, cache=cache, attention_mask=mask)
        step = DecodeStep(model, len(prefix), kwargs.pop("capacity", 90), page=kwargs.pop("page", 16), **kwargs)
        step.take(cache)
    return step, [row[:n].tolist() for row, n in zip(ids, prefix, strict=True)]


def check(model, hidden, rows, T):
    """The step's hidden states against the whole texts, row by row, from nothing."""
    for row, text in enumerate(rows):
        expected = logits(model, torch.tensor([text]))[0, -T:]
        assert relative_rms(model.llm.logits(hidden[row : row + 1])[0], expected) < 1e-9


@unchecked()
@torch.inference_mode()
def test_a_token_at_a_time_beyond_the_window_and_around_the_ring(model):
    step, rows = started(model)
    assert model.config.text.sliding_window_size < 40
    for i in range(60):
        ids = random_ids(2, 1, seed=i)
        hidden = step(ids)
        rows = [row + new.tolist() for row, new in zip(rows, ids, strict=True)]
        if i % 9 in (0, 5):
            check(model, hidden, rows, 1)


@pytest.mark.parametrize("T", [2, 4])
@unchecked()
@torch.inference_mode()
def test_drafts_that_are_refused_leave_no_trace(model, T):
    step, rows = started(model, tokens=T)
    rejected = [0, 0]
    for i in range(14):
        ids = random_ids(2, T, seed=50 + i)
        hidden = step(ids, rejected)
        rows = [row[: len(row) - n] + new.tolist() for row, n, new in zip(rows, rejected, ids, strict=True)]
        check(model, hidden, rows, T)
        rejected = [i % T, (2 * i + 1) % T]


@torch.inference_mode()
def test_starts_from_nothing(model):
    step, rows = DecodeStep(model, 2, 20, tokens=3, page=16), [[], []]
    step.take(model.new_cache(2))
    for i in range(3):
        ids = random_ids(2, 3, seed=i)
        hidden = step(ids)
        rows = [row + new.tolist() for row, new in zip(rows, ids, strict=True)]
        check(model, hidden, rows, 3)


@pytest.mark.parametrize("chunks", [[43], [17, 1, 25], [20, 23]], ids=str)
@torch.inference_mode()
def test_prompts_fill_the_places(model, chunks):
    """Rows of 43, 3 and 19 tokens, padded on the left: whole chunks of padding, and rows beyond the window."""
    lengths, T = [43, 3, 19], 2
    assert model.config.text.sliding_window_size < 19
    step, ids = DecodeStep(model, 3, 50, tokens=T, page=16), random_ids(3, 43, seed=3)
    step(random_ids(3, T))  # of texts that are then forgotten
    step.reset()
    mask = torch.arange(43) >= 43 - torch.tensor(lengths)[:, None]
    for part, is_token in zip(ids.split(chunks, dim=1), mask.split(chunks, dim=1), strict=True):
        hidden = step.prefill(part, None if is_token.all() else is_token)
    rows = [row[43 - n :].tolist() for row, n in zip(ids, lengths, strict=True)]
    check(model, hidden[:, None], rows, 1)
    rejected = [0, 0, 0]
    for i in range(2):
        ids = random_ids(3, T, seed=50 + i)
        hidden = step(ids, rejected)
        rows = [row[: len(row) - n] + new.tolist() for row, n, new in zip(rows, rejected, ids, strict=True)]
        check(model, hidden, rows, T)
        rejected = [1, 0, 1]


@torch.inference_mode()
def test_a_captured_prefill_is_for_whole_prompts_of_its_length(model, monkeypatch):
    """Which calls are a replay; the GPU's tests replay true graphs."""
    step, replays = DecodeStep(model, 2, 30, page=16), []

    class Graph:
        def replay(self):
            replays.append(step.prompts[5])
            found = step._read(replays[-1].ids, decode_step.Prompt([0, 0], [5, 5], 5, torch.device("cpu")))
            replays[-1].hidden.copy_(found)

    def twice(run):
        run()
        return Graph(), run()

    monkeypatch.setattr(decode_step, "captured", twice)
    step.capture_prefill(5)
    assert step.ends == [0, 0]
    assert not any(state.mlp_conv.any() for state in step.layers)
    ids, mask = random_ids(2, 8, seed=1), torch.ones(2, 5, dtype=torch.bool)
    for part, given, count in ((ids[:, :5], None, 1), (ids[:, 5:], None, 1), (ids[:, :5], mask, 2), (ids, None, 2)):
        if part.shape[1] != 3:  # not what goes on with the prompt before
            step.reset()
        hidden = step.prefill(part, given)
        assert len(replays) == count
        text = ids if part.shape[1] == 3 else part
        check(model, hidden[:, None], text.tolist(), 1)
    step.reset()
    mask[1, :2] = False  # a row that is shorter
    check(model, step.prefill(ids[:, :5], mask)[:, None], [ids[0, :5].tolist(), ids[1, 2:5].tolist()], 1)
    assert len(replays) == 2
    with pytest.raises(InputError, match=r"rows hold \[5, 3\] positions, expected none"):
        step.capture_prefill(4)
    step.reset()
    for T in (0, 31, 5.0, "5", True):
        with pytest.raises(InputError, match=f"a prompt of {T} tokens, expected 1 to 30"), unchecked():
            step.capture_prefill(T)


@torch.inference_mode()
@pytest.mark.parametrize("what", ["a prompt", "a step"])
def test_a_capture_that_fails_leaves_no_trace(model, what, monkeypatch):
    step, ids = DecodeStep(model, 2, 30, page=16), random_ids(2, 8, seed=1)

    def fail(run):
        run()
        raise torch.OutOfMemoryError("after the first run")

    monkeypatch.setattr(decode_step, "captured", fail)
    if what == "a step":
        step.prefill(ids[:, :7])
    with pytest.raises(torch.OutOfMemoryError):
        step.capture() if what == "a step" else step.capture_prefill(5)
    hidden = step(ids[:, 7:]) if what == "a step" else step.prefill(ids)[:, None]
    check(model, hidden, ids.tolist(), 1)


@pytest.mark.parametrize("greedy", [False, True], ids=["step", "step and tokens"])
@torch.inference_mode()
def test_a_capture_between_a_step_and_its_tokens(model, greedy, monkeypatch):
    step, _ = started(model)
    hidden, expected = step(random_ids(2, 1)).clone(), step.next_tokens()
    monkeypatch.setattr(decode_step, "captured", lambda run: (SimpleNamespace(replay=lambda: None), run()))
    step.capture(greedy)
    assert torch.equal(step.hidden, hidden)
    assert torch.equal(step.next_tokens(), expected)


@torch.inference_mode()
def test_next_tokens_are_those_after_a_step(model, monkeypatch):
    """After a prompt there is no step whose hidden states they could be chosen from."""
    monkeypatch.setattr(decode_step, "captured", lambda run: (None, run()))
    for greedy in (None, False, True):
        step = DecodeStep(model, 2, 30, page=16)
        if greedy is not None:
            step.capture(greedy)
            step.graph = None
        for before, given in ((step.reset, ()), (step.prefill, (random_ids(2, 5),)), (step.reset, ())):
            before(*given)
            with pytest.raises(InputError, match="next_tokens: expected a step first"):
                step.next_tokens()
            step(random_ids(2, 1))
            assert step.next_tokens().shape == (2, 1)


@torch.inference_mode()
def test_rows_that_have_ended_leave_the_others_alone(model):
    step, rows = started(model, tokens=2)
    for used in ([True, True], [True, False], [True, False]):
        ids = random_ids(2, 2, seed=len(rows[0]))
        hidden = step(ids, used=used)
        rows = [row + new.tolist() if u else row for row, new, u in zip(rows, ids, used, strict=True)]
        check(model, hidden[: sum(used)], rows[: sum(used)], 2)
        assert step.ends == [len(row) for row in rows]
    with pytest.raises(InputError, match=r"rows in use \[True, True\], expected none that had ended"):
        step(random_ids(2, 2))
    with pytest.raises(InputError, match=r"\[0, 1\] tokens rejected, expected at most \[1, 0\]"):
        step(random_ids(2, 2), [0, 1], [True, False])
    more = random_ids(2, 3, seed=9)
    with pytest.raises(InputError, match=r"\[3, 3\] tokens, expected none for rows that had ended: \[True, False\]"):
        step.prefill(more)
    hidden = step.prefill(more, torch.tensor([[True] * 3, [False] * 3]))
    check(model, hidden[:1, None], [rows[0] + more[0].tolist()], 1)
    assert step.live == [True, False]


@pytest.mark.parametrize(
    "taps",
    [
        {"target_layer_ids": [-1, 0, 2, 3, 4]},
        {"tap": "before", "target_layer_ids": [0, 1, 3, 4], "final_tap": "mix"},
        {"tap": "mixed", "target_layer_ids": [0, 1, 3, 4], "final_tap": "mix"},
    ],
    ids=["after", "before", "mixed"],
)
@torch.inference_mode()
def test_taps(model, taps):
    config = DSparkConfig(**taps)
    step, cache = DecodeStep(model, 2, 30, tokens=3, page=16, taps=config), model.new_cache(2)
    for part in random_ids(2, 14, seed=4).split([11, 3], dim=1):
        with observe(model, config) as expected:
            model(part, cache=cache)
        _ = step(part) if part.shape[1] == 3 else step.prefill(part)
        assert step.taps.keys() == expected.keys()
        for id, tap in expected.items():
            assert relative_rms(step.taps[id], tap) < 1e-9, id


@torch.inference_mode()
def test_the_model_stays_what_it_was():
    model = random_model(dtype=torch.float32)
    ids = random_ids(1, 9)
    before, size = logits(model, ids), held_bytes(model)
    steps = [DecodeStep(model, 1, 20), DecodeStep(model, 2, 30)]
    assert torch.equal(logits(model, ids), before)
    joined = [w for state in steps[0].layers for w in state.weights]
    assert all(len(w) % 8 == 0 for w in joined)
    more = sum(
        len(w) - sum(sizes) for state in steps[0].layers for w, sizes in zip(state.weights, state.sizes, strict=True)
    )
    assert 0 < more < 8 * len(joined)
    assert held_bytes(model) == size + more * model.config.text.hidden_size * 4
    weights = [[w.data_ptr() for w in state.weights] for state in steps[0].layers]
    assert [[w.data_ptr() for w in state.weights] for state in steps[1].layers] == weights  # joined once


@torch.inference_mode()
def test_notices_replaced_weights():
    model = random_model()
    step = DecodeStep(model, 1, 20)
    step(random_ids(1, 1))
    model.load_state_dict({name: t.clone() for name, t in model.state_dict().items()}, assign=True)
    with pytest.raises(InputError, match="weights were replaced, expected a new DecodeStep"):
        step(random_ids(1, 1))


def held_bytes(model):
    storages = {s.data_ptr(): s.nbytes() for s in (p.untyped_storage() for p in model.parameters())}
    return sum(storages.values())


@torch.inference_mode()
def test_next_tokens(model):
    step, rows = started(model, tokens=2)
    hidden = step(random_ids(2, 2, seed=1))
    assert torch.equal(step.next_tokens(), model.llm.logits(hidden).argmax(-1))
    seeds = torch.tensor([5, 5])
    drawn = [step.next_tokens(temperature, seeds) for temperature in (1e-4, 0.9, 0.9)]
    assert torch.equal(drawn[0], step.next_tokens())
    assert torch.equal(drawn[1], drawn[2])
    positions = torch.tensor([[len(row) + 1, len(row) + 2] for row in rows])
    exact, _ = sample_head(
        hidden.flatten(0, 1), used(model), 30.0, 0.9, seeds.repeat_interleave(2), positions.flatten()
    )
    assert torch.equal(drawn[1].flatten(), exact)
    with pytest.raises(InputError, match="a temperature needs seeds"):
        step.next_tokens(0.5)
    for wrong in (torch.tensor([5.0, 5.0]), torch.tensor([5]), torch.tensor([[5], [5]])):
        with pytest.raises(InputError, match=r"expected an integer a row: \(2,\)"), unchecked():
            step.next_tokens(0.5, wrong)


def used(model):
    return model.llm.unembed.weight[: model.config.text.unpadded_vocab_size]


def test_follows_the_models_backend():
    assert step_backend(Backend()) == StepBackend()
    own = StepBackend(route=lambda *_: None)
    assert step_backend(own) is own
    with pytest.raises(InputError, match="operations of its own, expected ops=StepBackend"):
        step_backend(Backend(route=lambda *_: None))


@torch.inference_mode()
def test_filled_places(model):
    """Random keys no longer than their clip, values of size 1, in every place that a step reads."""
    step = DecodeStep(model, 2, 60, tokens=2, page=16)
    step.fill([57, 23])
    for state in step.layers:
        assert 0.8 < float(state.keys.square().sum(-1).mean().sqrt() / model.llm.layers[0].attn.qk_threshold) < 1.2
        assert 0.9 < float(state.values.std()) < 1.1
    hidden = step(random_ids(2, 2)).clone()
    assert step.ends == [59, 25]
    step.fill([57, 23])
    assert torch.equal(step(random_ids(2, 2)), hidden)
    step.fill([57, 23], seed=1)
    assert relative_rms(step(random_ids(2, 2)), hidden) > 0.1
    with pytest.raises(InputError, match=r"filled with \[59, 1\], expected 2 rows of at most 58 positions"):
        step.fill([59, 1])


@torch.inference_mode()
def test_refuses_what_does_not_fit(model):
    with pytest.raises(InputError, match="0 rows of 1 tokens in 5 positions"):
        DecodeStep(model, 0, 5)
    step, _ = started(model, capacity=13, tokens=2)
    with pytest.raises(InputError, match=r"ids \(2, 3\) and 2 counts"), unchecked():
        step(random_ids(2, 3))
    with pytest.raises(InputError, match=r"\[1, 0\] tokens rejected, expected at most \[0, 0\]"):
        step(random_ids(2, 2), [1, 0])
    step(random_ids(2, 2))
    with pytest.raises(InputError, match="13 positions are full, expected room for 13 and 2 more"):
        step(random_ids(2, 2))
    with pytest.raises(InputError, match="room for 11 and 2 more"):
        started(model, capacity=12, tokens=2)
    with pytest.raises(InputError, match="expected integers and a page >= 1"):
        DecodeStep(model, 1, 20, page=0)
    with pytest.raises(InputError, match=r"ids are torch.float64, expected integers"), unchecked():
        step(random_ids(2, 2).double())
    with pytest.raises(InputError, match=r"\[0.5, 0\] tokens rejected"), unchecked():
        step(random_ids(2, 2), [0.5, 0])
    with pytest.raises(InputError, match=r"in torch.float32, expected 3 of 10 in torch.float64"):
        step.take(random_model().new_cache(2))
    with pytest.raises(InputError, match="keeps 3 inputs of its convolutions, expected 6 for steps of 4 tokens"):
        DecodeStep(model, 2, 20, tokens=4).take(model.new_cache(2, rollback=0))
    with pytest.raises(InputError, match="made for 2 rows, the cache has 3"):
        step.take(model.new_cache(3))
    step.reset()
    with pytest.raises(InputError, match=r"ids \(3, 5\), expected 2 rows of tokens"):
        step.prefill(random_ids(3, 5))
    with pytest.raises(InputError, match="13 positions, expected room for 0 and 14 more"):
        step.prefill(random_ids(2, 14))
    with pytest.raises(InputError, match=r"attention_mask torch.int64 \(2, 5\), expected bools"), unchecked():
        step.prefill(random_ids(2, 5), torch.ones(2, 5, dtype=torch.int64))
