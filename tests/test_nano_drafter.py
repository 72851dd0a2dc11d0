"""The drafter that ships beside nano: what it is, what nano accepts of it, and that it changes no greedy answer."""

import json

import pytest
import torch
from typer.testing import CliRunner

from inkling_ref import InputError, Tokenizer, load, load_drafter
from inkling_ref.chat import END_SAMPLING
from inkling_ref.cli import app
from inkling_ref.measure import drafting
from inkling_ref.nano import rows, train_drafter
from inkling_ref.nano.vocabulary import SHIPPED
from inkling_ref.speculative import Drafting, Throughput, measure_seconds

LONG = ("retrieval_2000", "retrieval_4000")


@pytest.fixture(scope="module")
def model():
    return load(SHIPPED)


@pytest.fixture(scope="module")
def drafter(model):
    return load_drafter(SHIPPED, model)


def test_what_it_is(drafter):
    assert drafter.config.markov_head_type == "rnn"
    assert drafter.config.num_hidden_layers == 5
    assert drafter.num_draft_tokens == 7
    assert (SHIPPED / "mtp.safetensors").stat().st_size <= 3 * 2**20


def test_acceptance_at_temperature_1(model, drafter):
    """The goal of every task with long answers; and greedy drafts cost acceptance where the text is not certain."""
    tokenizer = Tokenizer.from_pretrained(SHIPPED)
    ended = tokenizer.marker_id(END_SAMPLING)
    found = train_drafter.held_out(model, drafter, rows.Encoder(tokenizer), ended, examples=12)
    assert list(found) == list(drafting.TASKS)
    assert all(ways["temperature 1"] >= 4.0 for ways in found.values()), found
    stories = found["running text"]
    assert stories["temperature 1, greedy drafts"] < stories["temperature 1"] - 1, found


@pytest.mark.parametrize("task", drafting.all_tasks())
def test_greedy_answers_are_those_of_plain_decoding(model, drafter, task):
    ((_, same),) = drafting.same_answers(SHIPPED, model, drafter, [task], 1 if task in LONG else 6)
    assert same.answers > 0
    assert same.different == []
    assert same.tokens_per_pass >= 1


def test_a_scheduled_check_gives_the_same_answers(model, drafter):
    seconds = measure_seconds(model, drafter, drafting.some_ids(model), repeats=1)
    scheduled = Drafting(drafter, schedule=Throughput(seconds))
    ((_, same),) = drafting.same_answers(SHIPPED, model, scheduled, ["caption"], 4)
    assert same.different == []


def test_heads_were_compared_on_the_same_texts():
    """What the recurrence is for: text that is not certain, where a draft depends on the drafts before it."""
    report = json.loads((SHIPPED / "drafter.json").read_text())
    heads = report["heads"]
    assert {head["steps"] for head in heads.values()} == {heads["rnn"]["steps"]}
    rnn, vanilla, none = (
        heads[h]["tokens a pass"]["running text"]["temperature 1"] for h in ("rnn", "vanilla", "none")
    )
    assert rnn > vanilla > none


def test_command(monkeypatch):
    options = ["bench", "dspark", "--same-text", "--tasks", "talk,count", "--examples", "3"]
    threads = torch.get_num_threads()
    result = CliRunner().invoke(app, options)
    torch.set_num_threads(threads)
    assert result.exit_code == 0, result.output
    assert [line.split()[0] for line in result.stdout.splitlines()] == ["task", "talk", "count"]
    monkeypatch.setattr(drafting, "same_answers", lambda *a: [("talk", drafting.Same(3, 9, 1.0, [2]))])
    assert CliRunner().invoke(app, options).exit_code == 1


@pytest.mark.parametrize("options", ["--find-layout --tasks talk", "--same-text --temperature 1", "--temperature -1"])
def test_options_that_would_do_nothing_are_refused(options):
    with pytest.raises(InputError, match=options.split()[0].strip("-") + ".*expected"):
        CliRunner().invoke(app, ["bench", "dspark", *options.split()], catch_exceptions=False)
