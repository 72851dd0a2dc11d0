"""Nano's small world: the answers are right, nothing is ambiguous, splits are apart, rows obey their limits.

Answers are recomputed here from what the user says and from the scene's things, by code that shares nothing with the
generators but their word lists.
"""

import hashlib
import json
import os
import re
import subprocess
import sys
from collections import Counter
from itertools import pairwise
from pathlib import Path
from random import Random

import numpy as np
import pytest

from inkling_ref import chat
from inkling_ref.config import InklingConfig
from inkling_ref.nano import rows, vocabulary
from inkling_ref.nano.tasks import TASKS
from inkling_ref.nano.world import questions, retrieval, scenes, stories, sums, talk
from inkling_ref.vision import process_images

ROOT = Path(__file__).parent.parent
KINDS = [*dict.fromkeys(rows.short_plan(64)), *dict.fromkeys(rows.LONG_PLAN)]


@pytest.fixture(scope="module")
def encoder():
    return rows.Encoder(chat.Tokenizer.from_pretrained(vocabulary.SHIPPED))


def some_scenes(n, max_tiles=rows.SHORT_TILES, large=False):
    return [scenes.make_scene(Random(f"test {i}"), max_tiles, large) for i in range(n)]


def conversations(encoder, n, kinds=KINDS, seed=0):
    """n conversations of each kind, with their rows."""
    for kind in kinds:
        for i in range(n):
            length = 128 if kind in rows.short_plan(64) else 2048
            yield kind, length, *rows.make_row(kind, rows.generator("train", "test", kind, seed, i), encoder, length)


def user_text(turn):
    return " ".join(part for part in turn.user if isinstance(part, str))


def british(text):
    return text.lower().replace("color", "colour").replace("gray", "grey").replace("center", "centre")


# Scenes and pictures


@pytest.mark.parametrize(
    ("large", "tiles"), [(False, rows.SHORT_TILES), (True, rows.LONG_TILES)], ids=["short", "long"]
)
def test_scene_sizes_and_things_inside_and_apart(large, tiles):
    for scene in some_scenes(300, tiles, large):
        assert scene.width >= 40
        assert scene.height >= 40
        assert scene.grid[0] * scene.grid[1] <= tiles
        assert len(scene.things) <= scenes.MAX_THINGS
        for i, a in enumerate(scene.things):
            assert a.half_width < a.x < scene.width - a.half_width
            assert a.half_height < a.y < scene.height - a.half_height
            for b in scene.things[:i]:
                apart = max(
                    abs(a.x - b.x) - a.half_width - b.half_width, abs(a.y - b.y) - a.half_height - b.half_height
                )
                assert apart >= 2, f"{a.name} touches {b.name}"


def test_large_scenes_reach_several_hundred_pixels():
    sides = [max(s.width, s.height) for s in some_scenes(200, rows.LONG_TILES, large=True)]
    assert max(sides) > 400
    assert {1, 2, 3, 4, 5, 6} <= {len(s.things) for s in some_scenes(200)}


def test_every_colour_and_shape_occurs():
    things = [thing for scene in some_scenes(400) for thing in scene.things]
    assert {t.colour for t in things} == set(scenes.COLOURS)
    assert {t.shape for t in things} == set(scenes.SHAPES)
    assert {t.style for t in things} == {"fill", "lined", "hollow"}


def test_picture_shows_the_things_where_they_are():
    """On plain backgrounds, what differs from the background lies in the boxes, and every box holds its colour."""
    seen = 0
    for scene in some_scenes(300):
        background = scene.background
        if background.second or background.pattern or background.noise:
            continue
        levels = scenes.draw(scene).astype(int)
        assert levels.shape == (scene.height, scene.width, 3)
        other = np.abs(levels - np.array(background.first)).max(-1) > 8
        for thing in scene.things:
            box = (
                slice(int(thing.y - thing.half_height) - 1, int(thing.y + thing.half_height) + 3),
                slice(int(thing.x - thing.half_width) - 1, int(thing.x + thing.half_width) + 3),
            )
            exact = (np.abs(levels[box] - np.array(thing.rgb)).max(-1) == 0).sum()
            assert exact >= 0.08 * thing.size**2, f"{thing.name} of size {thing.size:.0f}: {exact} pixels"
            other[box] = False
            seen += 1
        assert not other.any()
    assert seen > 150


def test_colour_names_keep_apart():
    """The closest variants of two names, jitter included, are further apart than twice the jitter."""
    for one, (variants, jitter) in scenes.COLOURS.items():
        for other, (others, other_jitter) in scenes.COLOURS.items():
            if one < other:
                nearest = min(np.abs(np.subtract(a, b)).max() for a in variants for b in others)
                assert nearest > jitter + other_jitter, (one, other)


def test_things_stand_out_from_their_background():
    for scene in some_scenes(200):
        for thing in scene.things:
            assert np.linalg.norm(np.subtract(thing.rgb, scene.background.first)) >= scenes.CONTRAST


# Questions about pictures


def named(text):
    """(colour, shape) words of a phrase, each None if absent."""
    found = re.findall(r"[a-z]+", british(text))
    singular = {plural: shape for shape, plural in questions.PLURALS.items()}
    shapes = [singular.get(w, w) for w in found if singular.get(w, w) in scenes.SHAPES]
    colours = [w for w in found if w in scenes.COLOURS]
    return (colours[0] if colours else None), (shapes[0] if shapes else None)


def matching(scene, colour, shape):
    return [t for t in scene.things if colour in (None, t.colour) and shape in (None, t.shape)]


def asked(kind, n=400):
    for i, scene in enumerate(some_scenes(n)):
        question = questions.ask(Random(f"ask {kind} {i}"), kind, scene)
        if question is not None:
            yield scene, question


@pytest.mark.parametrize("kind", ["colour", "shape"])
def test_property_answers(kind):
    for scene, question in asked(kind):
        found = matching(scene, *named(question.text))
        assert {getattr(thing, kind) for thing in found} == {question.answer}, question


def test_count_answers():
    answers = Counter()
    for scene, question in asked("count", 1500):
        assert question.answer == str(len(matching(scene, *named(question.text)))), question
        answers[question.answer] += 1
    assert set(answers) == set("012345")


def test_position_answers_are_clear_of_doubt():
    rough = {"top": 0, "bottom": 2, "left": 0, "right": 2}
    checked = Counter()
    for scene, question in asked("position", 1200):
        words = british(question.text)
        parts = re.split(r"relative|compared|as seen|from|left|right|above|below|on which side|direction", words)
        if question.answer in ("left", "right", "above", "below") and len(parts) > 1:
            continue  # relations: below
        (thing,) = matching(scene, *named(question.text))
        down, across = 1, 1
        for word in question.answer.split():
            if word in ("top", "bottom"):
                down = rough[word]
            elif word in ("left", "right"):
                across = rough[word]
        x, y = thing.x / scene.width, thing.y / scene.height
        assert across / 3 + 0.05 <= x + 1e-9 or across == 0
        assert x <= (across + 1) / 3 - 0.05 + 1e-9 or across == 2
        assert down / 3 + 0.05 <= y + 1e-9 or down == 0
        assert y <= (down + 1) / 3 - 0.05 + 1e-9 or down == 2
        checked[question.answer] += 1
    assert len(checked) == 9


def test_relations_have_one_dominant_axis():
    for scene in some_scenes(200):
        for one in scene.things:
            for other in scene.things:
                answer = questions.relation(one, other)
                dx, dy = one.x - other.x, one.y - other.y
                if answer in ("left", "right"):
                    assert abs(dx) > 1.5 * abs(dy)
                    assert (dx < 0) == (answer == "left")
                elif answer:
                    assert abs(dy) > 1.5 * abs(dx)
                    assert (dy < 0) == (answer == "above")


def test_existence_answers():
    answers = Counter()
    for scene, question in asked("yes_no", 1500):
        if not re.search(r"\b(there an?|see an?|any|contain|show an?|find an?)\b", british(question.text)):
            continue
        if re.search(r"\b(more|than|true|exactly)\b", british(question.text)):
            continue
        assert question.answer == ("yes" if matching(scene, *named(question.text)) else "no"), question
        answers[question.answer] += 1
    assert min(answers["yes"], answers["no"]) > 100


def test_size_answers():
    for scene, question in asked("size", 800):
        if question.answer in ("small", "large"):
            (thing,) = matching(scene, *named(question.text))
            assert question.answer == ("small" if thing.size <= 22 else "large")
            assert not 22 < thing.size < 29
        else:
            assert matching(scene, *named(question.answer))


def test_captions_name_everything_from_left_to_right():
    seen = 0
    for scene, question in asked("caption", 800):
        if question.answer == "nothing":
            assert not scene.things
            continue
        phrases = re.split(r", | and ", question.answer)
        assert all(re.fullmatch(r"an? [a-z]+ [a-z]+", phrase) for phrase in phrases)
        things = sorted(scene.things, key=lambda t: t.x)
        assert [named(phrase) for phrase in phrases] == [(t.colour, t.shape) for t in things]
        assert all(b.x - a.x >= 8 for a, b in pairwise(things)), "order in doubt"
        seen += 1
    assert seen > 300


def test_absent_things_are_not_known():
    for scene, question in asked("absent"):
        assert question.answer == "I do not know that."
        colour, shape = named(question.text)
        assert colour or shape
        assert not matching(scene, colour, shape)


# Stories


def forms(verbs):
    return sorted({form for pair in verbs for form in pair}, key=len, reverse=True)


class Reader:
    """Reads a story sentence by sentence, by pattern."""

    def __init__(self):
        self.place, self.holder, self.lies, self.gave = {}, {}, {}, {}

    def read(self, sentence):
        for lead in sorted(stories.THEN, key=len, reverse=True):
            sentence = sentence.removeprefix(lead)
        who, _, rest = sentence.partition(" ")
        if sentence in {s for pair in stories.SCENERY for s in pair}:
            return
        if match := re.fullmatch(r"(\w+) and (\w+) (?:is|are|was|were) in the (.+)", sentence):
            self.place[match[1]] = self.place[match[2]] = match[3]
            return
        if rest in ("looks around", "looked around"):
            return
        for verb in forms(stories.DROPS):
            if match := re.fullmatch(rf"{verb} the (.+?)(?: in the (.+))?", rest):
                thing = match[1]
                assert self.holder.pop(thing) == who
                self.lies[thing] = self.place[who]
                assert match[2] in (None, self.place[who])
                return
        for verb in forms(stories.GIVES):
            match = re.fullmatch(rf"{verb} the (.+) to (\w+)", rest) or re.fullmatch(rf"{verb} (\w+) the (.+)", rest)
            if match:
                thing, other = match.groups() if match.re.pattern.endswith(r"(\w+)") else (match[2], match[1])
                assert self.holder[thing] == who
                self.holder[thing] = other
                self.gave.setdefault((thing, other), []).append(who)
                return
        for verb in forms(stories.STAYS + stories.GOES):
            if match := re.fullmatch(rf"{verb} the (.+?)(?: and (.+))?", rest):
                self.place[who] = match[1]
                if match[2]:
                    self.read(f"{who} {match[2]}")
                return
        for verb in forms(stories.TAKES):
            if match := re.fullmatch(rf"{verb} (?:the|an?) (.+)", rest):
                thing = match[1]
                assert thing not in self.holder
                assert self.lies.pop(thing, self.place.get(who)) == self.place.get(who)
                self.holder[thing] = who
                return
        raise AssertionError(f"cannot read {sentence!r}")

    def answer(self, question, people):
        """The answer to a question in plain spelling."""
        who = [p for p in people if p in question.split()]
        who = who[0] if who else None
        things = sorted({*self.holder, *self.lies}, key=len, reverse=True)
        thing = next((t for t in things if f"the {t}" in question), None)
        place = next((p for p in stories.PLACES if f"the {p}" in question), None)
        if question.startswith(("Is ", "Does ", "Has ", "Can ")):
            right = self.holder.get(thing) == who if thing else self.place.get(who) == place
            return "yes" if right else "no"
        if re.search(r"gave|get the", question):
            return self.gave[thing, who][-1]
        if re.search(r"[Ww]here|place|^Find", question):
            if who:
                return self.place.get(who, "I do not know that.")
            at = self.lies.get(thing) or self.place.get(self.holder.get(thing))
            return at or "I do not know that."
        if place:
            there = [p for p, at in self.place.items() if at == place]
            return there[0] if there else "nobody"
        if who:
            held = [t for t, holder in self.holder.items() if holder == who]
            assert len(held) < 2
            return held[0] if held else "nothing"
        if thing:
            return self.holder.get(thing, "nobody")
        return "I do not know that."


def test_story_answers_by_an_independent_reader(monkeypatch):
    monkeypatch.setattr(stories, "say", lambda rng, templates, **slots: rng.choice(templates).format(**slots))
    kinds = Counter()
    for i in range(1500):
        rng = Random(f"story {i}")
        reader = Reader()
        story, strangers = stories.make_story(rng, held_out=i % 2 == 0)
        for _ in range(3 + i % 14):
            reader.read(story.sentence().removesuffix("."))
        for kind in dict.fromkeys(stories.KINDS):
            pair = story.question(kind, strangers)
            if pair is None:
                continue
            question, answer = pair
            kinds[kind] += 1
            if strangers[0] in question.split() or f"the {strangers[1]}" in question:
                assert answer == "I do not know that."
                continue
            assert reader.answer(re.sub(r"[?.]", "", question), story.people) == answer, question
    assert set(kinds) == set(stories.KINDS)
    assert min(kinds.values()) > 100, kinds


def test_stories_have_the_stated_number_of_sentences():
    for i in range(3, 17):
        ((text, _), *_) = stories.story_turns(Random(i), i, 1) or [("", "")]
        if text:
            assert len(re.findall(r"\.(?:\s|$)", text)) in (i, i + 1, i + 2)


def test_new_names_are_endless_and_no_words():
    names = {stories.new_name(Random(i)) for i in range(2000)}
    assert len(names) > 1300
    assert all(re.fullmatch(r"[A-Z][a-z]{2,9}", name) for name in names)
    assert not names & {"And", "Are", "The", "Who"}


# Codes, sums, talk


def test_code_answers(encoder, monkeypatch):
    monkeypatch.setattr(retrieval, "say", lambda rng, templates, **slots: "Q: " + rng.choice(templates).format(**slots))
    unknown = 0
    for i in range(60):
        turns = retrieval.retrieval_turns(Random(i), 150 + 20 * i, 2 + i % 30, 6, encoder.length)
        text = turns[0][0]
        facts = dict(re.findall(r"the \w+ (?:of|for) the ([a-z ]+) is (\d+)\.", text, flags=re.IGNORECASE))
        assert len(facts) == len(re.findall(r" is \d+\.", text)), "a key with two codes"
        for question, answer in turns:
            key = question.partition("Q: ")[2].rpartition(" the ")[2].rstrip("?.").removesuffix(" have")
            unknown += key not in facts
            assert answer == facts.get(key, "I do not know that.")
            assert key not in facts or 2 <= len(answer) <= 5
    assert unknown > 5


@pytest.mark.parametrize("think", [False, True], ids=["direct", "thinking"])
@pytest.mark.parametrize("held_out", [False, True], ids=["train", "held_out"])
def test_sums(think, held_out):
    lengths = Counter()
    for i in range(1500):
        question, answer, thinking = sums.sum_turn(Random(f"{think} {i}"), think, held_out)
        terms = [int(n) for n in re.findall(r"\d+", question)]
        assert 2 <= len(terms) <= 3
        assert str(sum(terms)) == answer
        assert (thinking is not None) == think
        lengths[len(terms)] += 1
        pairs = {(a, b) for j, a in enumerate(terms) for b in terms[:j]}
        rule = {(a, b) for a, b in pairs if max(a, b) >= 10 and 0 in ((101 * a + 37 * b) % 11, (101 * b + 37 * a) % 11)}
        assert bool(rule) if held_out else not rule
        if think:
            for left, right in re.findall(r"(\d+(?: \+ \d+)+) = (\d+)\.", thinking):
                assert sum(map(int, left.split(" + "))) == int(right)
            # the last two steps give the tens and, in their last digit, the unit
            if max(terms) >= 10:
                units, tens = re.findall(r"= (\d+)\.", thinking)[-2:]
                assert answer == str(10 * int(tens) + int(units[-1]))
    assert lengths[3] > 200


def test_talk_answers_are_the_stated_ones():
    stated = {answer for answer, _ in talk.SMALL_TALK}
    assert "Hello!" in stated
    for i in range(300):
        assert talk.small_talk(Random(i))[1] in stated
        assert talk.too_hard(Random(i))[1] == "I do not know that."
        assert talk.nothing_shown(Random(i))[1] == "I do not know that."


# Splits


def test_batches_depend_on_their_seed_alone(encoder):
    one, again, other = (rows.short_batch(seed, encoder, rows=32) for seed in (5, 5, 6))
    for name in ("ids", "targets", "tiles", "extents", "grids", "objects"):
        assert np.array_equal(getattr(one, name), getattr(again, name)), name
    assert not np.array_equal(one.ids, other.ids)


def test_generators_do_not_depend_on_the_hash_seed(encoder):
    batch = rows.long_batch(3, encoder, rows=8)
    here = hashlib.sha256(batch.ids.tobytes() + batch.tiles.tobytes()).hexdigest()
    code = (
        "import hashlib; from inkling_ref import chat; from inkling_ref.nano import rows, vocabulary;"
        "e = rows.Encoder(chat.Tokenizer.from_pretrained(vocabulary.SHIPPED)); b = rows.long_batch(3, e, rows=8);"
        "print(hashlib.sha256(b.ids.tobytes() + b.tiles.tobytes()).hexdigest())"
    )
    environment = {**os.environ, "PYTHONHASHSEED": "12345"}
    there = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, capture_output=True, check=True)
    assert there.stdout.decode().strip() == here


def test_held_out_names_and_sums_never_in_training(encoder):
    words, questions_asked = Counter(), 0
    for _, _, conversation, _ in conversations(encoder, 40):
        for turn in conversation.turns:
            text = user_text(turn)
            words.update(re.findall(r"[A-Za-z]+", text))
            if turn.answer.isdigit() and re.search(r"\d+ ?(\+|plus|and) ?\d+", text):
                terms = [int(n) for n in re.findall(r"\d+", text)]
                if sum(terms) == int(turn.answer):
                    questions_asked += 1
                    assert not any(sums.is_held_out(a, b) for a, b in pairwise(terms))
    assert questions_asked > 100
    assert not set(stories.HELD_OUT_NAMES) & set(words)
    assert not set(stories.HELD_OUT_NAMES) & set(stories.NAMES)


def test_splits_draw_differently():
    draws = {
        rows.generator(split, kind, seed).random()
        for split in ("train", "held-out")
        for kind in "ab"
        for seed in range(50)
    }
    assert len(draws) == 200


# Rows and batches


def test_rows_are_the_wire_format(encoder):
    for kind, length, conversation, row in conversations(encoder, 3):
        prompt = chat.render(
            conversation.messages(), encoder.tokenizer, effort=conversation.effort, add_generation_prompt=False
        )
        assert row.ids == prompt.input_ids, kind
        assert len(row.ids) <= length
        assert len(row.targets) == len(row.ids)
        again = rows.encode(conversation, encoder)
        assert (again.ids, again.targets) == (row.ids, row.targets)


def test_targets_are_the_replies(encoder):
    start, end = encoder.markers[chat.MESSAGE_MODEL], encoder.markers[chat.END_SAMPLING]
    for _, _, conversation, row in conversations(encoder, 4):
        replies, inside = 0, False
        for token, worth in zip(row.ids, row.targets, strict=True):
            assert (worth == rows.ANSWER) == inside
            if token == start and not inside:
                inside = True
            elif token == end:
                inside, replies = False, replies + 1
            if token == encoder.image_id:
                assert worth == rows.NO_LOSS
        assert replies == len(conversation.turns)


def test_cached_words_give_the_tokenizers_ids(encoder):
    for _, _, conversation, _ in conversations(encoder, 10):
        for turn in conversation.turns:
            for text in (user_text(turn), turn.answer, turn.thinking or ""):
                assert encoder.encode(text) == encoder.tokenizer.encode(text)
    for text in ("it's 12  345, isn't it? ", "a\nb", "Tom's  12", "  x", "9 9", "(3+4)"):
        assert encoder.encode(text) == encoder.tokenizer.encode(text)


def test_thinking_follows_the_effort(encoder):
    thought = Counter()
    for _, _, conversation, _ in conversations(encoder, 30, ["sum", "talk", "picture"]):
        for turn in conversation.turns:
            is_sum = re.search(r"\d ?(\+|plus|and|, \d+ and) ?\d", user_text(turn)) and turn.answer.isdigit()
            assert (turn.thinking is not None) == bool(is_sum and (conversation.effort or 0) >= 0.5)
            thought[turn.thinking is not None] += 1
    assert min(thought.values()) > 20


@pytest.mark.parametrize("rows_length", [(256, 128), (64, 160)], ids=str)
def test_short_batch(encoder, rows_length):
    n, length = rows_length
    batch = rows.short_batch(1, encoder, rows=n, length=length)
    assert batch.ids.shape == batch.targets.shape == (n, length)
    assert len(batch.grids) == 13 * n // 16
    assert batch.grids.prod(1).max() <= rows.SHORT_TILES
    assert len(batch.tiles) == len(batch.extents) == batch.grids.prod(1).sum() == (batch.ids == encoder.image_id).sum()
    assert not (batch.ids[5 * n // 8 :] == encoder.image_id).any()
    assert 0.85 < (batch.ids != encoder.pad_id).mean() < 1
    assert not batch.targets[batch.ids == encoder.pad_id].any()
    assert not batch.targets[:, 0].any()
    assert (batch.objects >= 0).all()
    assert (batch.objects < [len(batch.tiles), len(scenes.COLOURS), len(scenes.SHAPES)]).all()


@pytest.mark.parametrize(("n", "length"), [(16, 2048), (8, 4096)], ids=["2048", "4096"])
def test_long_batch(encoder, n, length):
    for seed in (0, 1):
        batch = rows.long_batch(seed, encoder, rows=n, length=length)
        assert batch.ids.shape == (n, length)
        assert batch.grids.prod(1).max() <= rows.LONG_TILES
        assert len(batch.grids) <= rows.max_long_pictures(n, length)
        assert len(batch.tiles) == (batch.ids == encoder.image_id).sum()
        assert batch.ids[:, length // 2 :].max() < vocabulary.VOCABULARY


def test_pixel_values_are_those_of_process_images(encoder):
    made = [rows.make_row("two pictures", rows.generator("train", "pixels", i), encoder, 128)[1] for i in range(6)]
    batch = rows.collate(made, encoder, 128)
    levels = [scenes.draw(scene) for row in made for scene in row.scenes]
    pixels, grid = process_images(levels)
    assert np.array_equal(batch.pixel_values(), pixels.numpy())
    assert np.array_equal(batch.grids, grid.numpy()[:, 1:])


def test_objects_name_the_tile_of_each_centre(encoder):
    made = [rows.make_row("picture", rows.generator("train", "objects", i), encoder, 128)[1] for i in range(20)]
    batch = rows.collate(made, encoder, 128)
    first, found = 0, 0
    for scene in (scene for row in made for scene in row.scenes):
        count = scene.grid[0] * scene.grid[1]
        here = [o for o in batch.objects.tolist() if first <= o[0] < first + count]
        expected = [
            [first + int(t.y) // 40 * scene.grid[1] + int(t.x) // 40, list(scenes.COLOURS).index(t.colour),
             scenes.SHAPES.index(t.shape)]
            for t in scene.things
        ]  # fmt: skip
        assert here == expected
        first, found = first + count, found + len(here)
    assert found == len(batch.objects)


# The vocabulary


def test_vocabulary_ends_with_the_markers(encoder):
    tokenizer = encoder.tokenizer._tokenizer
    config = InklingConfig.nano()
    assert tokenizer.get_vocab_size() == vocabulary.VOCABULARY == config.text.vocab_size
    assert [tokenizer.id_to_token(i) for i in range(vocabulary.TEXT_IDS, vocabulary.VOCABULARY)] == list(
        vocabulary.MARKERS
    )
    assert encoder.image_id == config.image_token_id == vocabulary.VOCABULARY - 1
    assert len(set(vocabulary.MARKERS)) == 16


def test_any_text_can_be_encoded(encoder):
    tokenizer = encoder.tokenizer
    for text in ("Grüße, 東京! 🙂\x00\t", "<|end_message|>", "".join(map(chr, range(256)))):
        ids = tokenizer.encode(text)
        assert max(ids) < vocabulary.TEXT_IDS
        assert tokenizer.decode(ids) == text
    assert tokenizer.encode("4821") == [tokenizer.encode(d)[0] for d in "4821"]


def test_vocabulary_training_gives_nearly_the_shipped_file(tmp_path):
    """The shipped checkpoint keeps the vocabulary it was trained with, while the world goes on to change a little."""
    command = [sys.executable, "-m", "inkling_ref.nano.vocabulary", str(tmp_path / "new")]
    subprocess.run(command, cwd=ROOT, check=True)  # a process of its own: quick, without the tests' type checks
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["tokenizer.json"]
    new, shipped = (
        json.loads((folder / "tokenizer.json").read_text()) for folder in (tmp_path / "new", vocabulary.SHIPPED)
    )
    assert new["added_tokens"] == shipped["added_tokens"]
    assert len(new["model"]["vocab"]) == len(shipped["model"]["vocab"])
    assert len(new["model"]["vocab"].keys() & shipped["model"]["vocab"].keys()) > 0.85 * vocabulary.TEXT_IDS


# The tasks


@pytest.mark.parametrize("name", TASKS)
def test_task(encoder, name):
    task = TASKS[name]
    examples = task.examples(8)
    again, other = task.examples(8), task.examples(8, seed=1)
    texts = [[user_text(t) for t in e.conversation.turns] for e in examples]
    assert texts == [[user_text(t) for t in e.conversation.turns] for e in again]
    assert texts != [[user_text(t) for t in e.conversation.turns] for e in other]
    for example in examples:
        prompt = chat.render(example.messages, encoder.tokenizer, effort=example.effort).input_ids
        row = rows.encode(example.conversation, encoder)
        assert row.ids[: len(prompt)] == prompt
        assert set(row.targets[len(prompt) :]) == {rows.ANSWER}
        assert rows.ANSWER not in row.targets[: len(prompt)]
        blocks = chat.parse(row.ids[len(prompt) :], encoder.tokenizer)
        assert blocks[-1].text == example.answer
        if name.startswith("retrieval_"):
            tokens = int(name.removeprefix("retrieval_"))
            assert (0.8 if tokens < 500 else 0.95) * tokens <= len(prompt) <= tokens * (1.2 if tokens < 500 else 1)


def test_stories_of_the_task_use_held_out_names():
    text = " ".join(user_text(e.conversation.turns[0]) for e in TASKS["story"].examples(40))
    names = set(re.findall(r"[A-Z][a-z]+", text))
    assert names & set(stories.HELD_OUT_NAMES)
    assert not names & set(stories.NAMES)
