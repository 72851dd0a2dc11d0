"""The evaluation tasks: one question each, on held-out seeds, with the exact answer.

Held out means: another split in the seed, so no conversation of training; sums with a pair of terms that training
never asks for; stories whose listed names training never uses.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from random import Random

from ..chat import Tokenizer
from .rows import (
    LONG_TILES,
    ORDINALS,
    SHORT_PAIR_TILES,
    SHORT_TILES,
    Conversation,
    Encoder,
    Turn,
    generator,
)
from .vocabulary import SHIPPED
from .world import questions, retrieval, scenes, stories, sums, talk

# Effort messages that evaluation goes through: the command line's default, and none.
EFFORTS = (0.9, None, 0.9, 0.2)


@dataclass(frozen=True)
class Example:
    """A conversation whose last reply is to be generated."""

    conversation: Conversation

    @property
    def messages(self) -> list[dict]:
        """For `chat.render(..., effort=example.effort)`; pictures are uint8 arrays."""
        return self.conversation.messages(last_answer=False)

    @property
    def effort(self) -> float | None:
        return self.conversation.effort

    @property
    def answer(self) -> str:
        """The final text block of a right reply."""
        return self.conversation.turns[-1].answer

    @property
    def thinking(self) -> str | None:
        """The thinking block before it."""
        return self.conversation.turns[-1].thinking


@dataclass(frozen=True)
class Task:
    """make(rng, i, held_out) gives the i-th conversation."""

    name: str
    make: Callable[[Random, int, bool], Conversation]

    def examples(self, n: int, seed: int = 0, held_out: bool = True) -> list[Example]:
        """The same for the same arguments. held_out=False draws what training may have drawn."""
        split = "held-out" if held_out else "train-like"
        return [Example(self.make(generator(split, self.name, seed, i), i, held_out)) for i in range(n)]


def _picture_task(kind: str) -> Task:
    """A question of this kind about one picture; one picture in five is large."""

    def make(rng: Random, i: int, held_out: bool) -> Conversation:
        large = i % 5 == 4
        while True:
            scene = scenes.make_scene(rng, LONG_TILES if large else SHORT_TILES, large)
            question = questions.ask(rng, kind, scene)
            if question is not None:
                turn = Turn([scene, question.text], question.answer)
                return Conversation(EFFORTS[i % len(EFFORTS)], turns=[turn])

    return Task(kind, make)


def _two_pictures(rng: Random, i: int, held_out: bool) -> Conversation:
    """A question about the first or the second of two pictures."""
    kinds = ("colour", "shape", "count", "position", "yes_no", "size")
    while True:
        shown = [scenes.make_scene(rng, SHORT_PAIR_TILES) for _ in range(2)]
        question = questions.ask(rng, kinds[i % len(kinds)], shown[i % 2], ORDINALS[i % 2])
        if question is not None:
            return Conversation(EFFORTS[i % len(EFFORTS)], turns=[Turn([*shown, question.text], question.answer)])


def _story(rng: Random, i: int, held_out: bool) -> Conversation:
    """3 to 16 sentences and one question."""
    while True:
        pairs = stories.story_turns(rng, 3 + i % 14, 1, held_out)
        if pairs:
            return Conversation(EFFORTS[i % len(EFFORTS)], turns=[Turn([pairs[0][0]], pairs[0][1])])


@lru_cache(maxsize=1)
def _shipped_encoder() -> Encoder:
    """Texts are measured in tokens of the shipped vocabulary."""
    return Encoder(Tokenizer.from_pretrained(SHIPPED))


def _retrieval_task(tokens: int) -> Task:
    """A code hidden in a text; the whole prompt has between 95 % and 100 % of `tokens` tokens."""

    def make(rng: Random, i: int, held_out: bool) -> Conversation:
        keys = rng.randint(1, 4) if tokens < 500 else rng.randint(4, 40)
        pairs = retrieval.retrieval_turns(rng, tokens - 22 - tokens // 60, keys, 1, _shipped_encoder().length)
        return Conversation(EFFORTS[i % len(EFFORTS)], turns=[Turn([pairs[0][0]], pairs[0][1])])

    return Task(f"retrieval_{tokens}", make)


def _sum_task(think: bool) -> Task:
    efforts = (0.9, 0.7, 0.99) if think else (None, 0.2, 0.0)

    def make(rng: Random, i: int, held_out: bool) -> Conversation:
        text, answer, thinking = sums.sum_turn(rng, think, held_out)
        return Conversation(efforts[i % len(efforts)], turns=[Turn([text], answer, thinking)])

    return Task("sum_thinking" if think else "sum_direct", make)


def _talk(rng: Random, i: int, held_out: bool) -> Conversation:
    """Greetings and questions that it cannot answer."""
    text, answer = (talk.small_talk, talk.too_hard, talk.small_talk, talk.nothing_shown)[i % 4](rng)
    return Conversation(EFFORTS[i // 4 % len(EFFORTS)], turns=[Turn([text], answer)])


TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        *map(_picture_task, ("colour", "shape", "count", "position", "yes_no", "size", "caption")),
        Task("two_pictures", _two_pictures),
        Task("story", _story),
        *map(_retrieval_task, (100, 2000, 4000)),
        *map(_sum_task, (False, True)),
        Task("talk", _talk),
    )
}
