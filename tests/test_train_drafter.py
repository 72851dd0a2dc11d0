"""Training of the drafter: packed blocks are those of decoding, losses are their definition, and it learns."""

import math
import subprocess
import sys

import pytest
import torch
from helpers import random_ids, random_model, relative_rms
from test_dspark import OPTIONS, make

from inkling_ref import InklingConfig, InputError, Tokenizer, generate, load, load_drafter, save
from inkling_ref.nano import rows, train_drafter
from inkling_ref.nano.train_drafter import Texts, draw_anchors, losses, packed_blocks
from inkling_ref.nano.vocabulary import SHIPPED


def texts_of(model, drafter, B=2, T=17):
    ids = random_ids(B, T)
    with drafter.observe(model) as taps:
        hidden = model(ids).hidden
    return Texts(ids, torch.tensor([3, 9])[:B], torch.tensor([T, 12])[:B], taps, hidden)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_packed_blocks_are_those_of_decoding(options):
    model = random_model(dtype=torch.float64)
    drafter = make(model, **options)
    texts = texts_of(model, drafter)
    anchors = torch.tensor([[3, 4, 11], [9, 10, 16]])
    packed = packed_blocks(drafter, texts.taps, texts.ids, anchors)
    for row in range(2):
        for a, p in enumerate(anchors[row].tolist()):
            context = drafter.new_context(1)
            drafter.append(context, {i: t[row : row + 1, :p] for i, t in texts.taps.items()}, [p])
            alone = drafter.block(context, texts.ids[row, p : p + 1])
            assert relative_rms(packed[row, a], alone[0]) < 1e-12


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_losses_are_their_definition(options):
    """Block by block and token by token, through `Drafter.propose` with the text's tokens chosen."""
    model = random_model(dtype=torch.float64)
    drafter = make(model, **options)
    texts = texts_of(model, drafter)
    anchors, is_anchor = torch.tensor([[3, 7, 14], [9, 10, 12]]), torch.tensor([[True] * 3, [True, True, False]])
    parts = losses(drafter, texts, anchors, is_anchor)
    gamma, sums, weights = drafter.num_draft_tokens, [0.0, 0.0, 0.0], 0.0
    shares = [[] for _ in range(gamma)]
    teacher = model(texts.ids).logits.softmax(-1)
    for row, end in enumerate([17, 12]):
        for a, p in enumerate(anchors[row].tolist()):
            if not is_anchor[row, a]:
                continue
            context = drafter.new_context(1)
            drafter.append(context, {i: t[row : row + 1, :p] for i, t in texts.taps.items()}, [p])
            n = min(gamma, end - 1 - p)
            given = iter(texts.ids[row, p + 1 : p + 1 + n].tolist())
            seen = []

            def choose(logits, given=given, seen=seen):
                seen.append(logits[0].softmax(-1))
                return torch.tensor([next(given)]), None

            confidence = drafter.propose(context, texts.ids[row, p : p + 1], n, choose).confidence
            for k, q in enumerate(seen):
                w, target = math.exp(-k / 4), teacher[row, p + k]
                share = float(torch.minimum(q, target).sum())
                shares[k].append(share)
                sums[0] -= w * float(q[texts.ids[row, p + k + 1]].log())
                sums[1] += w * float((q - target).abs().sum())
                if confidence is not None:
                    c = float(confidence[0, k])
                    sums[2] -= w * (share * math.log(c) + (1 - share) * math.log(1 - c))
                weights += w
    expected = [s / weights for s in sums]
    got = [parts.cross_entropy.item(), parts.distance.item(), parts.confidence.item()]
    assert got == pytest.approx(expected, rel=1e-9)
    assert parts.total.item() == pytest.approx(0.1 * expected[0] + 0.9 * expected[1] + expected[2], rel=1e-9)
    means = [sum(s) / len(s) for s in shares]
    assert parts.acceptance.tolist() == pytest.approx(means, rel=1e-9)
    assert parts.tokens_per_pass() == pytest.approx(1 + sum(math.prod(means[: k + 1]) for k in range(gamma)))


def test_anchors_lie_in_answers():
    model = random_model()
    texts = texts_of(model, make(model))
    seen = [set(), set()]
    for seed in range(40):
        anchors, is_anchor = draw_anchors(texts.prompt, texts.end, 17, 5, torch.Generator().manual_seed(seed))
        for row in range(2):
            chosen = anchors[row][is_anchor[row]].tolist()
            assert chosen == sorted(set(chosen))
            seen[row].update(chosen)
    assert seen == [set(range(3, 16)), {9, 10}]


def test_training_does_not_touch_the_target_and_learns(tmp_path):
    """The whole command on a two-layer nano: data, training, file; the drafter then drafts better than before."""
    config = InklingConfig.nano()
    config.text.num_hidden_layers, config.text.layer_types = 2, config.text.layer_types[4:6]
    config.text.n_layers_per_attn_res_block = 1
    model = random_model(config, seed=1)
    save(model, tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((SHIPPED / "tokenizer.json").read_bytes())
    before = {p.name: p.read_bytes() for p in tmp_path.iterdir() if p.suffix == ".safetensors"}
    lines = []
    train_drafter.main(
        tmp_path, steps=30, rate=0.02, device="cpu", texts=16, layers=1, size=6, examples=2, log=lines.append
    )
    assert all((tmp_path / name).read_bytes() == data for name, data in before.items())
    target = load(tmp_path)
    drafter = load_drafter(tmp_path, target)
    assert drafter.config.markov_head_type == "rnn"
    losses_seen = [float(line.split("loss ")[1].split()[0]) for line in lines if "loss" in line]
    assert losses_seen[-1] < 0.8 * losses_seen[0], lines

    encoder = rows.Encoder(Tokenizer.from_pretrained(SHIPPED))
    made = train_drafter.prompts("talk", 4, 7, encoder, held_out=True)
    ids = [row.ids for row in made]
    plain = generate(target, ids, 24, eos_token_id=[])
    result = generate(target, ids, 24, eos_token_id=[], drafter=drafter)
    assert result.tokens == plain.tokens
    assert result.stats.drafting.tokens_per_pass >= 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"minutes": math.nan}, "minutes: nan, expected more than 0"),
        ({"rate": -1.0}, "rate: -1.0, expected more than 0"),
        ({"steps": -1}, "steps is -1, expected an integer >= 1"),
        ({"texts": 0}, "texts is 0, expected"),
        ({"examples": 0}, "examples is 0, expected"),
        ({"device": "foo"}, "device: 'foo', expected cpu or cuda"),
        ({"out": __file__}, "a file, expected a folder"),
        ({}, "config.json: not found"),
    ],
    ids=lambda v: next(iter(v), "folder") if isinstance(v, dict) else "",
)
def test_what_cannot_be_trained_with_is_named_before_training(tmp_path, options, message):
    with pytest.raises(InputError, match=message):
        train_drafter.main(tmp_path, **options)


def test_the_module_ends_in_one_line(tmp_path):
    command = [sys.executable, "-m", "inkling_ref.nano.train_drafter", str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.startswith("error: ")
    assert done.stderr.count("\n") == 1
