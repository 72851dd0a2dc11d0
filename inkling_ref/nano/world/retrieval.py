"""Codes hidden in a long text: "The code of the old lamp is 4821.", and much that has nothing to do with it."""

from collections.abc import Callable
from random import Random

from .phrasing import say, words
from .questions import UNKNOWN
from .stories import NAMES, PLACES, THINGS, Story, make_story, new_name

ADJECTIVES = words(
    "red blue green yellow black white old new big small round dark cold warm heavy light quiet golden silver "
    "wooden broken clean dusty empty secret"
)
LABELS = ("code", "code", "code", "number", "password", "pin")
FACTS = (
    "The {label} of the {key} is {value}.",
    "The {label} of the {key} is {value}.",
    "The {label} for the {key} is {value}.",
    "Remember that the {label} of the {key} is {value}.",
    "Note: the {label} of the {key} is {value}.",
)
QUESTIONS = (
    "What is the {label} of the {key}?",
    "What is the {label} of the {key}?",
    "What is the {label} for the {key}?",
    "What's the {label} of the {key}?",
    "Which {label} does the {key} have?",
    "What {label} does the {key} have?",
    "What was the {label} of the {key}?",
    "Which {label} belongs to the {key}?",
    "Tell me the {label} of the {key}.",
    "Give the {label} of the {key}.",
    "Name the {label} of the {key}.",
    "Say the {label} of the {key}.",
    "Find the {label} of the {key}.",
    "Do you remember the {label} of the {key}?",
    "{label} of the {key}?",
    "I need the {label} of the {key}.",
)
INTRO = (
    "Read the text and remember the codes. ", "Here is a long text. ", "Remember the numbers in this text. ", "Text: ",
    "Read this. ",
)  # fmt: skip

_ANIMALS = words("cat dog horse bird fish cow sheep mouse fox bear rabbit duck")
_LANDSCAPE = words("river hill tree road sea lake wall bridge window door roof cloud moon wind rain snow fire stone")
_DOES = words("is was looks seems stays became")
_ACTS = words("sleeps runs waits sings jumps rests plays swims looks sits walks hides")
_WHERE = words("near behind in beside under in over")
_WHEN = ("today", "every day", "at night", "in the morning", "all day", "in winter", "in summer", "on Monday", "again")


def filler(rng: Random, story: Story) -> str:
    """One sentence that holds no code; `story` supplies some of them."""
    pick = rng.random()
    if pick < 0.3:
        return story.sentence()
    noun = rng.choice(_ANIMALS if rng.random() < 0.5 else _LANDSCAPE)
    if pick < 0.5:
        return f"The {noun} {rng.choice(_DOES)} {rng.choice(ADJECTIVES)} {rng.choice(_WHEN)}."
    if pick < 0.75:
        adjective = f"{rng.choice(ADJECTIVES)} " if rng.random() < 0.5 else ""
        place = rng.choice(_LANDSCAPE if rng.random() < 0.6 else PLACES)
        return f"The {adjective}{rng.choice(_ANIMALS)} {rng.choice(_ACTS)} {rng.choice(_WHERE)} the {place}."
    if pick < 0.83:
        return f"{rng.choice(NAMES)} likes the {rng.choice(ADJECTIVES)} {noun} and the {rng.choice(THINGS)}."
    if pick < 0.9:
        return f"There are {rng.randint(2, 99)} {rng.choice(THINGS)}s in the {rng.choice(PLACES)}."
    if pick < 0.96:
        return f"The {rng.choice(THINGS)} of {rng.choice(NAMES)} is {rng.choice(ADJECTIVES)}."
    return " ".join(new_name(rng) for _ in range(rng.randint(2, 4))).lower().capitalize() + "."


def _keys(rng: Random, number: int) -> list[str]:
    """Different keys of one or two words; those of two share their parts, so both words count."""
    nouns = rng.sample([*THINGS, *PLACES], number)
    if rng.random() < 0.3:
        return nouns
    adjectives = rng.sample(ADJECTIVES, min(len(ADJECTIVES), max(2, number // 2)))
    nouns = nouns[: max(2, number // 2)]
    pairs = [f"{adjective} {noun}" for adjective in adjectives for noun in nouns]
    return rng.sample(pairs, min(number, len(pairs)))


def retrieval_turns(
    rng: Random, tokens: int, keys: int, questions: int, length: Callable[[str], int]
) -> list[tuple[str, str]]:
    """(user text, answer) pairs: a text of about `tokens` tokens with its first question, then more questions.

    length: number of tokens of a string.
    """
    label = rng.choice(LABELS)
    names = _keys(rng, keys + 1)
    absent, names = names[0], names[1:]
    values = {
        key: str(rng.randint(1, 9)) + "".join(rng.choice("0123456789") for _ in range(rng.randint(1, 4)))
        for key in names
    }
    sentences = [rng.choice(FACTS).format(label=label, key=key, value=value) for key, value in values.items()]
    story, _ = make_story(rng)
    used = sum(length(" " + sentence) for sentence in sentences)
    while True:
        sentence = filler(rng, story)
        used += length(" " + sentence)
        if used > tokens:
            break
        sentences.append(sentence)
    rng.shuffle(sentences)
    text = " ".join(sentences)
    if rng.random() < 0.15:
        text = rng.choice(INTRO) + text
    turns = []
    for _ in range(questions):
        key, answer = rng.choice(list(values.items()))
        if rng.random() < 0.05:
            key, answer = absent, UNKNOWN
        question = say(rng, QUESTIONS, label=label, key=key)
        turns.append((question if turns else text + (" " if rng.random() < 0.85 else "\n") + question, answer))
    return turns
