"""Paraphrase: one question said in many ways, as people type it.

Every generator writes its questions as templates in British spelling with a capital and a final mark. `say` picks
one, fills it, and now and then changes the spelling, the case, the punctuation or puts a few words in front. The
answer never depends on any of this.
"""

from collections.abc import Sequence
from random import Random

AMERICAN = (
    ("colour", "color"),
    ("Colour", "Color"),
    ("grey", "gray"),
    ("centre", "center"),
)
# Words before a question ("?") and before a request (".").
QUESTION_LEADS = (
    "Tell me, ", "Please tell me: ", "Question: ", "So, ", "And now, ", "Can you tell me: ", "OK, ", "Hey, ",
)  # fmt: skip
REQUEST_LEADS = ("Please ", "Now ", "Please ", "Then ", "OK, now ", "Could you please ")


def say(rng: Random, templates: Sequence[str], leads: Sequence[str] = QUESTION_LEADS, **slots: str) -> str:
    """One of the templates, filled and restyled. `leads` may come before a question; a request has its own.

    Capitalised slot values (names) keep their case, most of the time, when the rest goes to lower case.
    """
    template = rng.choice(templates)
    restyle = rng.random()
    if restyle < 0.12 and not template.startswith("I "):
        lead = rng.choice(REQUEST_LEADS if template.endswith(".") else leads)
        template = lead + (template[0].lower() + template[1:] if not template.startswith("{") else template)
    elif restyle < 0.37:
        template = template[0].lower() + template[1:] if rng.random() < 0.3 else template.lower()
    text = template.format(**slots)
    if restyle >= 0.9:
        text = text.lower()
    if rng.random() < 0.4:
        for british, american in AMERICAN:
            text = text.replace(british, american)
    punctuation = rng.random()
    if punctuation < 0.25:
        text = text.rstrip("?.")
    elif punctuation < 0.28:
        text = text.rstrip("?.") + rng.choice((" ?", "??", "!", ".", "?"))
    if rng.random() < 0.04:
        text = text.rstrip("?.!") + ", please" + rng.choice(("?", ".", ""))
    return text


def words(text: str) -> tuple[str, ...]:
    """The words of a list that is written as one string."""
    return tuple(text.split())


def a_or_an(noun: str) -> str:
    """The noun with its article."""
    return ("an " if noun[0] in "aeiou" else "a ") + noun


def join(parts: Sequence[str]) -> str:
    """`a, b and c`."""
    return parts[0] if len(parts) == 1 else ", ".join(parts[:-1]) + " and " + parts[-1]
