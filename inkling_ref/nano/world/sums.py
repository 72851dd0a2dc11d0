"""Sums of two or three terms of one or two digits, answered directly or after a thinking block that works by columns.

Held out: a pair of terms (a, b), one of them at least 10, is never trained on in either order if
$$(101 a + 37 b) \\bmod 11 = 0 \\quad\\text{or}\\quad (101 b + 37 a) \\bmod 11 = 0$$
The pairs of one-digit numbers are the addition table and are all trained on; evaluation asks held-out pairs only.
"""

from random import Random

from .phrasing import QUESTION_LEADS, say

BARE = ("{s}", "{s}", "{s} =", "{s} = ?", "{s}?", "{tight}", "{tight}=", "{tight}?")
QUESTIONS = (
    "What is {s}?",
    "What is {s}?",
    "What is {words}?",
    "How much is {s}?",
    "How much is {words}?",
    "What's {s}?",
    "What is {tight}?",
    "What does {s} make?",
    "What is the sum of {listed}?",
    "What is the result of {s}?",
    "What do you get for {s}?",
    "Add {listed}.",
    "Add up {listed}.",
    "Calculate {s}.",
    "Compute {s}.",
    "Compute {words}.",
    "Work out {s}.",
    "Solve {s}.",
    "Sum of {listed}?",
    "Find the sum of {listed}.",
    "How much is {listed} together?",
    "Tell me what {s} is.",
    "{words}?",
    "{words} is what?",
    "{s} is how much?",
    "{words} makes?",
)


def is_held_out(a: int, b: int) -> bool:
    """Whether training may never ask for a + b or b + a."""
    return max(a, b) >= 10 and ((101 * a + 37 * b) % 11 == 0 or (101 * b + 37 * a) % 11 == 0)


def _columns(a: int, b: int) -> str:
    """a + b as it is done on paper: `7 + 8 = 15. 2 + 5 + 1 = 8.`; numbers below 10 need one step."""
    units = a % 10 + b % 10
    steps = f"{a % 10} + {b % 10} = {units}."
    if a < 10 and b < 10:
        return steps
    carry = " + 1" if units >= 10 else ""
    return f"{steps} {a // 10} + {b // 10}{carry} = {a // 10 + b // 10 + units // 10}."


def thinking(terms: list[int]) -> str:
    """The thinking block: term after term, each by columns; a sum that is added to again is written out first."""
    total, steps = terms[0], []
    for i, term in enumerate(terms[1:]):
        if i:
            steps.append(f"{total} + {term}:")
        steps.append(_columns(total, term))
        total += term
    return " ".join(steps)


def _term(rng: Random, digits: int) -> int:
    return rng.randint(0, 9) if digits == 1 else rng.randint(10, 99)


def _digits(rng: Random, think: bool) -> tuple[int, ...]:
    if rng.random() < 0.75:
        return rng.choice(((2, 2), (2, 2), (2, 2), (2, 1), (1, 2), (1, 1)))
    if think:
        return rng.choice(((2, 2, 2), (2, 2, 1), (2, 1, 2), (1, 1, 1), (1, 2, 2)))
    return rng.choice(((1, 1, 1), (1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2)))


def make_terms(rng: Random, think: bool, held_out: bool) -> list[int]:
    """Terms with the first pair held out, or with no two terms, nor the first sum and the third, held out."""
    while True:
        digits = _digits(rng, think)
        terms = [_term(rng, n) for n in digits]
        if held_out:
            if is_held_out(terms[0], terms[1]):
                return terms
            continue
        pairs = [(terms[i], terms[j]) for i in range(len(terms)) for j in range(i)]
        if len(terms) == 3:
            pairs.append((terms[0] + terms[1], terms[2]))
        if not any(is_held_out(a, b) for a, b in pairs):
            return terms


def ask_sum(rng: Random, terms: list[int]) -> str:
    """The question, with or without a verb."""
    numbers = [str(t) for t in terms]
    slots = {
        "s": " + ".join(numbers),
        "tight": "+".join(numbers),
        "words": rng.choice((" plus ", " plus ", " and ")).join(numbers),
        "listed": ", ".join(numbers[:-1]) + " and " + numbers[-1],
    }
    if rng.random() < 0.3:
        return rng.choice(BARE).format(**slots)
    return say(rng, QUESTIONS, QUESTION_LEADS, **slots)


def sum_turn(rng: Random, think: bool, held_out: bool = False) -> tuple[str, str, str | None]:
    """(question, answer, thinking or None)."""
    terms = make_terms(rng, think, held_out)
    return ask_sum(rng, terms), str(sum(terms)), thinking(terms) if think else None
