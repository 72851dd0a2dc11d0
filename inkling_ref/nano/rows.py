"""Conversations, their token ids, and the batches that training reads.

A row is one conversation: optional system messages, then question and answer in turns, as many as fit. Nothing is
packed across conversations. The wire format is that of `chat.render`; here the ids of words are cached, because
training needs some hundred thousand strings a second.

What a token is worth as a target: the reply (content marker to end of sampling) fully, the rest of the text a little,
padding and image tiles nothing.
"""

import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random

import numpy as np

from ..chat import (
    CONTENT_IMAGE,
    CONTENT_TEXT,
    CONTENT_THINKING,
    END_MESSAGE,
    END_OF_TEXT,
    END_SAMPLING,
    MESSAGE_MODEL,
    MESSAGE_SYSTEM,
    MESSAGE_USER,
    Tokenizer,
)
from ..errors import InputError
from .world import questions, retrieval, scenes, stories, sums, talk
from .world.scenes import COLOURS, SHAPES, TILE, Scene

NO_LOSS, TEXT, ANSWER = 0, 1, 2  # what a token is worth as a target

SHORT_TILES = 30  # most tiles of a picture in a short row
SHORT_PAIR_TILES = 12  # most tiles of a picture in a short row that holds two
LONG_TILES = 96  # most tiles of a picture in a long row
PICTURES_PER_2048 = 8  # most pictures in 2,048 tokens of a long row
# What the rows of a short batch hold that have no pictures.
TEXT_PLAN = (
    "story", "sum", "story", "story", "short retrieval", "story", "mixture", "story", "story", "talk", "story",
    "running text",
)  # fmt: skip
# What long rows hold, by row index. Stories are the hardest task: the most of both plans.
LONG_PLAN = ("retrieval", "pictures", "stories", "stories", "retrieval", "mixed", "stories", "pictures")

# The command line's default, 0.9, is the most frequent; None: no effort message.
EFFORTS = (0.9, 0.9, 0.9, 0.9, 0.99, 0.7, 0.2, 0.1, 0.0)
THINKING_EFFORT = 0.5  # sums think from here on
SYSTEM = (
    "You are a helpful assistant.", "You are Inkling nano.", "Answer briefly.", "Be brief.", "Answer the questions.",
    "You are a helpful assistant. Answer briefly.", "Answer exactly.", "Answer in as few words as you can.",
    "Be exact and brief.", "You answer questions about pictures, stories and numbers.",
)  # fmt: skip

# How often each kind of question is asked of a picture.
QUESTION_KINDS = (
    ["colour"] * 10 + ["shape"] * 10 + ["count"] * 20 + ["position"] * 22 + ["yes_no"] * 12 + ["size"] * 11
    + ["caption"] * 9 + ["absent"] * 6
)  # fmt: skip
ORDINALS = ("first", "second", "third")


@dataclass(slots=True)
class Turn:
    """One question with its reply. user: text and pictures in order, each a message of its own."""

    user: list[str | Scene]
    answer: str
    thinking: str | None = None


@dataclass(slots=True)
class Conversation:
    """effort: of the `Thinking effort level` message, None if there is none."""

    effort: float | None = None
    system: list[str] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)

    @property
    def thinks(self) -> bool:
        return self.effort is not None and self.effort >= THINKING_EFFORT

    def messages(self, last_answer: bool = True) -> list[dict]:
        """For `chat.render(..., effort=self.effort)`; pictures as uint8 arrays."""
        messages: list[dict] = [{"role": "system", "content": text} for text in self.system]
        for turn in self.turns:
            parts = [
                part if isinstance(part, str) else {"type": "image", "image": scenes.draw(part)} for part in turn.user
            ]
            messages.append({"role": "user", "content": parts})
            reply = {"role": "assistant", "content": turn.answer}
            if turn.thinking is not None:
                reply["reasoning_content"] = turn.thinking
            messages.append(reply)
        return messages if last_answer else messages[:-1]


# Conversations to ids


class Encoder:
    """`chat.Tokenizer` with a cache from words to ids, for the plain ASCII text of this world.

    Attributes: tokenizer; pad_id; image_id; the ids of the markers, by marker, in `markers`.
    """

    # The pieces that the vocabulary's pre-tokenizer makes of ASCII text: digits one by one, then GPT-2's pattern.
    _PIECES = re.compile(r"\d|'(?:s|t|re|ve|m|ll|d)| ?[A-Za-z]+| ?[^\sA-Za-z\d]+|\s+(?![^\s\d])|\s+")

    def __init__(self, tokenizer: Tokenizer) -> None:
        """Raises InputError if the vocabulary names no image placeholder or no end of text."""
        if tokenizer.image_token_id is None:
            raise InputError("nano: the vocabulary names no image placeholder")
        self.tokenizer = tokenizer
        self.markers = tokenizer.markers
        self.image_id = tokenizer.image_token_id
        self.pad_id = tokenizer.marker_id(END_OF_TEXT)
        self._ids: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """The same ids as `Tokenizer.encode`, for ASCII text."""
        ids: list[int] = []
        cache = self._ids
        for piece in self._PIECES.findall(text):
            known = cache.get(piece)
            if known is None:
                known = self.tokenizer.encode(piece)
                if len(cache) < 200_000:  # endless new names must not fill the memory
                    cache[piece] = known
            ids += known
        return ids

    def length(self, text: str) -> int:
        return len(self.encode(text))


@dataclass(slots=True)
class Row:
    """ids and what they are worth as targets; scenes in the order of their placeholders."""

    ids: list[int]
    targets: list[int]
    scenes: list[Scene]

    def add(self, other: "Row") -> None:
        self.ids += other.ids
        self.targets += other.targets
        self.scenes += other.scenes


def _encode_start(conversation: Conversation, encoder: Encoder) -> Row:
    markers = encoder.markers
    texts = list(conversation.system)
    if conversation.effort is not None:
        texts.append(f"Thinking effort level: {conversation.effort}")
    ids: list[int] = []
    for text in texts:
        ids += [markers[MESSAGE_SYSTEM], markers[CONTENT_TEXT], *encoder.encode(text), markers[END_MESSAGE]]
    return Row(ids, [TEXT] * len(ids), [])


def _encode_turn(turn: Turn, encoder: Encoder) -> Row:
    markers = encoder.markers
    row = Row([], [], [])
    for part in turn.user:
        if isinstance(part, str):
            ids = [markers[MESSAGE_USER], markers[CONTENT_TEXT], *encoder.encode(part), markers[END_MESSAGE]]
            row.targets += [TEXT] * len(ids)
        else:
            rows, columns = part.grid
            tiles = rows * columns
            ids = [markers[MESSAGE_USER], markers[CONTENT_IMAGE], *([encoder.image_id] * tiles), markers[END_MESSAGE]]
            # the end of a picture is worth learning as little as its tiles: it follows from its size
            row.targets += [TEXT, TEXT] + [NO_LOSS] * (tiles + 1)
            row.scenes.append(part)
        row.ids += ids
    reply = [markers[MESSAGE_MODEL]]
    if turn.thinking is not None:
        thinking = encoder.encode(turn.thinking)
        reply += [markers[CONTENT_THINKING], *thinking, markers[END_MESSAGE], markers[MESSAGE_MODEL]]
    reply += [markers[CONTENT_TEXT], *encoder.encode(turn.answer), markers[END_MESSAGE], markers[END_SAMPLING]]
    row.ids += reply
    row.targets += [TEXT] + [ANSWER] * (len(reply) - 1)
    return row


def encode(conversation: Conversation, encoder: Encoder) -> Row:
    """The whole conversation; the ids are those of `chat.render(conversation.messages(), ...)`."""
    row = _encode_start(conversation, encoder)
    for turn in conversation.turns:
        row.add(_encode_turn(turn, encoder))
    if row.targets:
        row.targets[0] = NO_LOSS  # nothing predicts the first token
    return row


# Endless turns of one kind


def _pairs(pairs: list[tuple[str, str]]) -> Iterator[Turn]:
    return (Turn([text], answer) for text, answer in pairs)


def _sum(rng: Random, think: bool) -> Turn:
    text, answer, thinking = sums.sum_turn(rng, think)
    return Turn([text], answer, thinking)


def _aside(rng: Random, think: bool, seen: bool) -> Turn:
    """A turn about something else. seen: a picture, a story or a text has been shown."""
    pick = rng.random()
    if pick < 0.35:
        return _sum(rng, think)
    if pick < 0.6:
        return Turn([(pair := talk.small_talk(rng))[0]], pair[1])
    pair = talk.too_hard(rng) if seen or pick < 0.8 else talk.nothing_shown(rng)
    return Turn([pair[0]], pair[1])


def _with_pictures(rng: Random, shown: list[Scene], text: str) -> list[str | Scene]:
    """Pictures mostly come before the text of their message."""
    return [text, *shown] if rng.random() < 0.07 else [*shown, text]


def _picture_questions(rng: Random, shown: list[Scene], number: int) -> Iterator[questions.Question]:
    """Different questions about the latest picture, some about earlier ones by their ordinal."""
    asked: set[tuple[str, str]] = set()
    begin = rng.random() < 0.25
    for i in range(number):
        kind = "caption" if begin and i == 0 else rng.choice(QUESTION_KINDS)
        which, ordinal = shown[-1], None
        if 2 <= len(shown) <= len(ORDINALS) and rng.random() < 0.5:
            place = rng.randrange(len(shown))
            which, ordinal = shown[place], ORDINALS[place]
        question = questions.ask(rng, kind, which, ordinal)
        if question is not None and (kind, question.text) not in asked:
            asked.add((kind, question.text))
            yield question


def _short_pictures(rng: Random, think: bool, number: int) -> Iterator[Turn]:
    """One or two small pictures, then questions about them for ever."""
    limit = SHORT_TILES if number == 1 else SHORT_PAIR_TILES
    shown = [scenes.make_scene(rng, limit) for _ in range(number)]
    new = list(shown)
    if number == 2 and rng.random() < 0.4:  # one after the other
        for question in _picture_questions(rng, shown[:1], rng.randint(1, 2)):
            user = _with_pictures(rng, shown[:1], question.text) if len(new) == 2 else [question.text]
            yield Turn(user, question.answer)
            new = shown[1:]
    while True:
        for question in _picture_questions(rng, shown, 6):
            yield Turn(_with_pictures(rng, new, question.text) if new else [question.text], question.answer)
            new = []
            if rng.random() < 0.03:
                yield _aside(rng, think, seen=True)


def _long_pictures(rng: Random, think: bool, most: int) -> Iterator[Turn]:
    """Picture after picture, each with some questions; most of them large."""
    shown: list[Scene] = []
    while len(shown) < most:
        large = rng.random() < 0.75
        shown.append(scenes.make_scene(rng, LONG_TILES if large else SHORT_TILES, large))
        new = shown[-1:]
        for question in _picture_questions(rng, shown, rng.randint(6, 16)):
            yield Turn(_with_pictures(rng, new, question.text) if new else [question.text], question.answer)
            new = []
        if new:  # nothing could be asked of it
            shown.pop()


def _stories(rng: Random, sentences: tuple[int, int]) -> Iterator[Turn]:
    taken: set[str] = set()
    kinds = stories.KINDS
    while True:
        yield from _pairs(
            stories.story_turns(rng, rng.randint(*sentences), rng.randint(2, 5), taken=taken, kinds=kinds)
        )
        # an earlier story may know what this one does not tell
        kinds = [kind for kind in stories.KINDS if kind not in ("unknown", "who in")]


def _retrieval(rng: Random, tokens: tuple[int, int], keys: tuple[int, int], encoder: Encoder) -> Iterator[Turn]:
    number = rng.randint(*keys)
    yield from _pairs(retrieval.retrieval_turns(rng, rng.randint(*tokens), number, 3 * number, encoder.length))


def _sums(rng: Random, think: bool) -> Iterator[Turn]:
    while True:
        yield _sum(rng, think)


def _talk(rng: Random, think: bool) -> Iterator[Turn]:
    while True:
        yield _aside(rng, think, seen=False)


def _running(rng: Random) -> Iterator[Turn]:
    while True:
        yield from _pairs([talk.tell_story(rng)])


def _mixed(rng: Random, think: bool, tiles: int, encoder: Encoder) -> Iterator[Turn]:
    """A bit of everything, one after the other; pictures of at most `tiles` tiles, none if 0."""
    pictures, taken = 0, set()
    for i in count():
        kind = rng.choice(("picture", "story", "sum", "aside", "retrieval", "aside"))
        if kind == "picture" and tiles and pictures < PICTURES_PER_2048:
            scene = scenes.make_scene(rng, tiles)
            new, pictures = [scene], pictures + 1
            for question in _picture_questions(rng, [scene], rng.randint(2, 4)):
                yield Turn(_with_pictures(rng, new, question.text) if new else [question.text], question.answer)
                new = []
        elif kind == "story":
            yield from _pairs(stories.story_turns(rng, rng.randint(3, 5), rng.randint(1, 3), taken=taken))
        elif kind == "retrieval":
            yield from _pairs(retrieval.retrieval_turns(rng, rng.randint(20, 60), rng.randint(1, 3), 2, encoder.length))
        elif kind == "sum":
            yield _sum(rng, think)
        else:
            yield _aside(rng, think, seen=i > 0)


# Rows


def _start(rng: Random) -> Conversation:
    conversation = Conversation(effort=rng.choice(EFFORTS) if rng.random() < 0.5 else None)
    if rng.random() < 0.12:
        conversation.system.append(rng.choice(SYSTEM))
    return conversation


def _fill(conversation: Conversation, turns: Iterator[Turn], encoder: Encoder, length: int) -> Row:
    """Turns until one does not fit; later ones may depend on it, so the row ends there."""
    row = _encode_start(conversation, encoder)
    for turn in turns:
        more = _encode_turn(turn, encoder)
        if len(row.ids) + len(more.ids) > length:
            break
        conversation.turns.append(turn)
        row.add(more)
    if row.targets:
        row.targets[0] = NO_LOSS
    return row


def make_row(kind: str, rng: Random, encoder: Encoder, length: int) -> tuple[Conversation, Row]:
    """One conversation of a kind, filled to at most `length` tokens.

    kind: picture, two pictures, story, sum, short retrieval, talk, running text, mixture (short rows);
    retrieval, pictures, stories, mixed (long rows).
    """
    while True:
        conversation = _start(rng)
        think = conversation.thinks
        if kind == "picture":
            turns = _short_pictures(rng, think, 1)
        elif kind == "two pictures":
            turns = _short_pictures(rng, think, 2)
        elif kind == "story":
            turns = _stories(rng, rng.choice(((3, 6), (3, 9), (6, 11))))
        elif kind == "sum":
            turns = _sums(rng, think)
        elif kind == "short retrieval":
            turns = _retrieval(rng, (15, length - 35), (1, 4), encoder)
        elif kind == "talk":
            turns = _talk(rng, think)
        elif kind == "running text":
            turns = _running(rng)
        elif kind == "mixture":
            turns = _mixed(rng, think, 0, encoder)
        elif kind == "retrieval":
            turns = _retrieval(rng, (length // 7, length - 90), (4, 40), encoder)
        elif kind == "pictures":
            turns = _long_pictures(rng, think, PICTURES_PER_2048 * max(1, length // 2048))
        elif kind == "stories":
            turns = _stories(rng, (5, 16))
        else:
            turns = _mixed(rng, think, SHORT_TILES, encoder)
        row = _fill(conversation, turns, encoder, length)
        if conversation.turns:
            return conversation, row


def generator(split: str, kind: str, *seed: int | str) -> Random:
    """A generator that no other split, kind or seed shares."""
    return Random("/".join([split, kind, *map(str, seed)]))


# Batches


@dataclass(slots=True)
class Batch:
    """See the package docstring for the fields."""

    ids: np.ndarray
    targets: np.ndarray
    tiles: np.ndarray
    extents: np.ndarray
    grids: np.ndarray
    objects: np.ndarray

    def pixel_values(self) -> np.ndarray:
        """[n_tiles, 40, 40, 3] float32, as `process_images` gives them."""
        edge = np.arange(TILE)
        inside = (edge[:, None] < self.extents[:, :1, None]) & (edge < self.extents[:, 1:, None])
        levels = np.where(inside[..., None], self.tiles, np.float32(-1))
        return (levels.astype(np.float32) - np.float32(127.5)) / np.float32(127.5)


def cut(levels: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """[height, width, 3] into tiles [n, 40, 40, 3] in raster order, and the extents [n, 2] of what is inside."""
    height, width, _ = levels.shape
    rows, columns = -(-height // TILE), -(-width // TILE)
    padded = np.zeros((rows * TILE, columns * TILE, 3), np.uint8)
    padded[:height, :width] = levels
    tiles = padded.reshape(rows, TILE, columns, TILE, 3).swapaxes(1, 2).reshape(-1, TILE, TILE, 3)
    down = np.minimum(TILE, height - TILE * np.arange(rows))
    across = np.minimum(TILE, width - TILE * np.arange(columns))
    extents = np.stack(np.broadcast_arrays(down[:, None], across[None]), -1).reshape(-1, 2)
    return tiles, extents.astype(np.uint8)


_COLOUR_INDEX = {colour: i for i, colour in enumerate(COLOURS)}
_SHAPE_INDEX = {shape: i for i, shape in enumerate(SHAPES)}


def collate(rows: list[Row], encoder: Encoder, length: int) -> Batch:
    """Rows of at most `length` tokens, padded at the right; draws their pictures."""
    ids = np.full((len(rows), length), encoder.pad_id, np.int32)
    targets = np.zeros((len(rows), length), np.uint8)
    tiles, extents, grids, objects, before = [], [], [], [], 0
    for i, row in enumerate(rows):
        ids[i, : len(row.ids)] = row.ids
        targets[i, : len(row.ids)] = row.targets
        for scene in row.scenes:
            levels, inside = cut(scenes.draw(scene))
            tiles.append(levels)
            extents.append(inside)
            grids.append(scene.grid)
            for thing in scene.things:
                tile = before + int(thing.y // TILE) * scene.grid[1] + int(thing.x // TILE)
                objects.append((tile, _COLOUR_INDEX[thing.colour], _SHAPE_INDEX[thing.shape]))
            before += len(levels)
    return Batch(
        ids,
        targets,
        np.concatenate(tiles) if tiles else np.zeros((0, TILE, TILE, 3), np.uint8),
        np.concatenate(extents) if extents else np.zeros((0, 2), np.uint8),
        np.array(grids, np.int32).reshape(-1, 2),
        np.array(objects, np.int32).reshape(-1, 3),
    )


def short_plan(rows: int) -> list[str]:
    """The kind of each row of a short batch: pictures in the first five eighths, text in the rest."""
    two, pictures = rows * 3 // 16, rows * 5 // 8
    plan = ["two pictures"] * two + ["picture"] * (pictures - two)
    return plan + [TEXT_PLAN[i % len(TEXT_PLAN)] for i in range(rows - pictures)]


def short_batch(seed: int, encoder: Encoder, rows: int = 256, length: int = 128) -> Batch:
    """A batch of short rows, the same for the same arguments."""
    plan = enumerate(short_plan(rows))
    made = [make_row(kind, generator("train", "short", seed, i), encoder, length)[1] for i, kind in plan]
    return collate(made, encoder, length)


def long_batch(seed: int, encoder: Encoder, rows: int = 16, length: int = 2048) -> Batch:
    """A batch of long rows, the same for the same arguments."""
    made = [
        make_row(LONG_PLAN[(seed + i) % len(LONG_PLAN)], generator("train", "long", seed, i), encoder, length)[1]
        for i in range(rows)
    ]
    return collate(made, encoder, length)


def max_long_pictures(rows: int, length: int) -> int:
    """Most pictures of a long batch."""
    rows_with_pictures = sum(kind in ("pictures", "mixed") for kind in LONG_PLAN) * -(-rows // len(LONG_PLAN))
    return min(rows, rows_with_pictures) * PICTURES_PER_2048 * max(1, length // 2048)
