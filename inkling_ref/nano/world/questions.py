"""Questions about a scene, with the one right answer computed from its description.

A question is asked only if its answer leaves no doubt: a referring expression names exactly one thing (or none, on
purpose), a centre keeps away from the borders between thirds, one axis dominates a relation, sizes differ clearly, and
the things of a caption differ clearly in x.
"""

import re
from collections.abc import Callable
from itertools import pairwise
from random import Random
from typing import NamedTuple

from .phrasing import a_or_an, join, say
from .scenes import COLOURS, LARGE, SHAPES, SMALL, Scene, Thing

UNKNOWN = "I do not know that."
PLURALS = {shape: shape + ("es" if shape == "cross" else "s") for shape in SHAPES}
ZONES = (
    ("top left", "top", "top right"),
    ("left", "centre", "right"),
    ("bottom left", "bottom", "bottom right"),
)
ZONE_MARGIN = 0.05  # of the side, between a centre and the border of its third
NUMBERS = ("zero", "one", "two", "three", "four", "five")
MAX_COUNT = 5


class Question(NamedTuple):
    """text: as the user says it; answer: the reply's text block."""

    text: str
    answer: str


# {it}: referring expression; {w}: where, such as " in the picture", or nothing.
COLOUR = (
    "What colour is the {it}{w}?",
    "What is the colour of the {it}{w}?",
    "Which colour is the {it}{w}?",
    "Which colour does the {it}{w} have?",
    "What colour does the {it}{w} have?",
    "What's the colour of the {it}{w}?",
    "Name the colour of the {it}{w}.",
    "Tell me the colour of the {it}{w}.",
    "Give the colour of the {it}{w}.",
    "Say what colour the {it}{w} is.",
    "The {it}{w} has which colour?",
    "The {it}{w} is what colour?",
    "In what colour is the {it}{w} drawn?",
    "Colour of the {it}{w}?",
    "Do you know the colour of the {it}{w}?",
    "Can you see what colour the {it}{w} is?",
    "Identify the colour of the {it}{w}.",
    "What colour was used for the {it}{w}?",
    "What is the {it}'s colour{w}?",
    "Which colour has the {it}{w}?",
    "What colour is that {it}{w}?",
    "Say the colour of the {it}{w}.",
)
COLOUR_PLURAL = (
    "What colour are the {them}{w}?",
    "Which colour do the {them}{w} have?",
    "What is the colour of the {them}{w}?",
    "Name the colour of the {them}{w}.",
    "The {them}{w} are what colour?",
)
SHAPE = (
    "What shape is the {it}{w}?",
    "Which shape is the {it}{w}?",
    "What is the shape of the {it}{w}?",
    "Which shape does the {it}{w} have?",
    "What shape does the {it}{w} have?",
    "What's the shape of the {it}{w}?",
    "Name the shape of the {it}{w}.",
    "Tell me the shape of the {it}{w}.",
    "Give the shape of the {it}{w}.",
    "Say which shape the {it}{w} has.",
    "What kind of shape is the {it}{w}?",
    "The {it}{w} has which shape?",
    "The {it}{w} is what shape?",
    "What form does the {it}{w} have?",
    "Shape of the {it}{w}?",
    "Identify the shape of the {it}{w}.",
    "Can you tell what shape the {it}{w} is?",
    "What is the {it}{w}?",
    "What type of shape is the {it}{w}?",
    "What geometric shape is the {it}{w}?",
    "What is the {it}'s shape{w}?",
    "Say the shape of the {it}{w}.",
)
SHAPE_OF_COLOUR = ("Which shape is {colour}{w}?", "What shape is {colour}{w}?", "Name the shape that is {colour}{w}.")
SHAPE_SINGLE = (
    "What shape is this?",
    "What shape is it?",
    "Which shape is this?",
    "Which shape do you see{w}?",
    "What shape can you see{w}?",
    "What shape is shown{w}?",
    "Which shape is there{w}?",
    "What shape is there{w}?",
    "Name the shape{w}.",
)
COLOUR_SINGLE = ("What colour is it{w}?", "Which colour is it{w}?", "What is its colour{w}?", "Name its colour{w}.")
COUNT = (
    "How many {them} are there{w}?",
    "How many {them} do you see{w}?",
    "How many {them} can you see{w}?",
    "How many {them} are shown{w}?",
    "How many {them} can be seen{w}?",
    "How many {them} can you count{w}?",
    "How many {them} do you count{w}?",
    "Count the {them}{w}.",
    "Count all {them}{w}.",
    "Count how many {them} there are{w}.",
    "What is the number of {them}{w}?",
    "Give the number of {them}{w}.",
    "Tell me the number of {them}{w}.",
    "Tell me how many {them} there are{w}.",
    "Say how many {them} you see{w}.",
    "Number of {them}{w}?",
    "How many {them}{w}?",
    "What number of {them} is there{w}?",
    "How many {them} does {picture} have?",
    "How many {them} does {picture} show?",
    "How many {them} does {picture} contain?",
)
COUNT_OF_COLOUR = (
    "How many {things} are {colour}{w}?",
    "How many of the {things} are {colour}{w}?",
    "How many are {colour}{w}?",
    "Count what is {colour}{w}.",
)
PLACE = (
    "Where is the {it}{w}?",
    "Where is the {it} located{w}?",
    "Where can I find the {it}{w}?",
    "Where do you see the {it}{w}?",
    "Where can the {it} be seen{w}?",
    "Where's the {it}{w}?",
    "In which part{of} is the {it}?",
    "In what part{of} is the {it}?",
    "Which part{of} holds the {it}?",
    "What is the position of the {it}{w}?",
    "Give the position of the {it}{w}.",
    "Tell me where the {it} is{w}.",
    "Say where the {it} is{w}.",
    "Locate the {it}{w}.",
    "Find the {it}{w}.",
    "Name the position of the {it}{w}.",
    "Position of the {it}{w}?",
    "At which place{w} is the {it}?",
    "Where in {picture} is the {it}?",
    "Where in {picture} can you see the {it}?",
    "In which part{of} can the {it} be found?",
    "Which part{of} is the {it} in?",
    "What part{of} is the {it} in?",
)
RELATION = (
    "Where is the {it} relative to the {that}{w}?",
    "Where is the {it} compared to the {that}{w}?",
    "Where is the {it} as seen from the {that}{w}?",
    "Where does the {it} lie relative to the {that}{w}?",
    "On which side of the {that} is the {it}{w}?",
    "In which direction from the {that} is the {it}{w}?",
    "How does the {it} lie relative to the {that}{w}?",
    "What is the position of the {it} relative to the {that}{w}?",
    "Tell me where the {it} is relative to the {that}{w}.",
    "Say where the {it} is compared to the {that}{w}.",
    "Is the {it} left, right, above or below the {that}{w}?",
    "From the {that}, where is the {it}{w}?",
)
LEFT_RIGHT = (
    "Is the {it} left or right of the {that}{w}?",
    "Is the {it} to the left or to the right of the {that}{w}?",
    "Is the {it} on the left or on the right of the {that}{w}?",
    "Left or right: where is the {it} relative to the {that}{w}?",
    "Say whether the {it} is left or right of the {that}{w}.",
)
ABOVE_BELOW = (
    "Is the {it} above or below the {that}{w}?",
    "Does the {it} lie above or below the {that}{w}?",
    "Above or below: where is the {it} relative to the {that}{w}?",
    "Say whether the {it} is above or below the {that}{w}.",
)
EXISTS = (
    "Is there {a}{w}?",
    "Do you see {a}{w}?",
    "Can you see {a}{w}?",
    "Is {a} there{w}?",
    "Is there {a} to be seen{w}?",
    "Is {a} shown{w}?",
    "Is there any {it}{w}?",
    "Is any {it} there{w}?",
    "Are there any {them}{w}?",
    "Do you see any {them}{w}?",
    "Can you find {a}{w}?",
    "Say if there is {a}{w}.",
    "Tell me if there is {a}{w}.",
    "Tell me whether you see {a}{w}.",
)
ANYTHING = (
    "Is there anything {colour}{w}?",
    "Is anything {colour}{w}?",
    "Is something {colour}{w}?",
    "Do you see anything {colour}{w}?",
    "Does {picture} show anything {colour}?",
)
CONTAINS = (
    "Does {picture} show {a}?",
    "Does {picture} contain {a}?",
    "Does {picture} have {a}?",
    "Does {picture} contain any {them}?",
)
IS_COLOUR = (
    "Is the {it} {colour}{w}?",
    "Is the colour of the {it} {colour}{w}?",
    "Does the {it} have the colour {colour}{w}?",
    "Is it true that the {it} is {colour}{w}?",
    "The {it} is {colour}{w}, right?",
    "Say if the {it} is {colour}{w}.",
)
IS_SHAPE = (
    "Is the {it} {a}{w}?",
    "Is it true that the {it} is {a}{w}?",
    "Is the shape of the {it} {a}{w}?",
    "Does the {it} have the shape of {a}{w}?",
    "Say if the {it} is {a}{w}.",
)
IS_RELATED = (
    "Is the {it} {relation} the {that}{w}?",
    "Is it true that the {it} is {relation} the {that}{w}?",
    "Can you see the {it} {relation} the {that}{w}?",
    "Does the {it} lie {relation} the {that}{w}?",
    "Say if the {it} is {relation} the {that}{w}.",
)
IS_PLACED = (
    "Is the {it} in the {zone} of {picture}?",
    "Is the {it} at the {zone} of {picture}?",
    "Do you see the {it} in the {zone} of {picture}?",
)
IS_NUMBER = (
    "Are there {number} {them}{w}?",
    "Are there exactly {number} {them}{w}?",
    "Do you see {number} {them}{w}?",
    "Is the number of {them} {number}{w}?",
    "Is it true that there are {number} {them}{w}?",
)
IS_ONE = (
    "Is there only one {it}{w}?",
    "Is there exactly one {it}{w}?",
    "Is there just one {it}{w}?",
    "Do you see only one {it}{w}?",
)
IS_MORE = (
    "Are there more {them} than {those}{w}?",
    "Do you see more {them} than {those}{w}?",
    "Is the number of {them} larger than the number of {those}{w}?",
)
SIZE = (
    "How big is the {it}{w}?",
    "How large is the {it}{w}?",
    "What size is the {it}{w}?",
    "What is the size of the {it}{w}?",
    "What size does the {it} have{w}?",
    "Which size does the {it} have{w}?",
    "Name the size of the {it}{w}.",
    "Give the size of the {it}{w}.",
    "Is the {it} small or large{w}?",
    "Is the {it} large or small{w}?",
    "Is the {it} big or small{w}?",
    "Is the {it} small or big{w}?",
    "Tell me the size of the {it}{w}.",
    "Say whether the {it} is small or large{w}.",
    "Size of the {it}{w}?",
)
BIGGER = (
    "Which is bigger, the {it} or the {that}{w}?",
    "Which is larger, the {it} or the {that}{w}?",
    "Which one is bigger, the {it} or the {that}{w}?",
    "What is bigger, the {it} or the {that}{w}?",
    "What is larger{w}, the {it} or the {that}?",
    "Is the {it} or the {that} bigger{w}?",
    "Is the {it} or the {that} larger{w}?",
    "Name the bigger one{w}: the {it} or the {that}.",
)
SMALLER = tuple(t.replace("bigger", "smaller").replace("larger", "smaller") for t in BIGGER)
BIGGEST = (
    "Which object is the biggest{w}?",
    "Which shape is the largest{w}?",
    "What is the largest object{w}?",
    "What is the biggest shape{w}?",
    "Name the largest object{w}.",
)
SMALLEST = tuple(t.replace("biggest", "smallest").replace("largest", "smallest") for t in BIGGEST)
CAPTION = (
    "Describe {picture}.",
    "What do you see{w}?",
    "What can you see{w}?",
    "What is in {picture}?",
    "What is on {picture}?",
    "What's in {picture}?",
    "What does {picture} show?",
    "What is shown in {picture}?",
    "What can be seen in {picture}?",
    "Say what {picture} shows.",
    "Give a caption for {picture}.",
    "Caption {picture}.",
    "Write a caption for {picture}.",
    "Tell me what is in {picture}.",
    "Tell me what you see{w}.",
    "List the shapes{w}.",
    "List what you see{w}.",
    "Name everything{w}.",
    "Which objects are in {picture}?",
    "Which shapes do you see{w}?",
    "Give a description of {picture}.",
    "List the objects in {picture} from left to right.",
    "Describe what you see{w}.",
    "Describe the scene.",
    "Describe it.",
    "Give me a caption.",
    "What is this?",
    "What is there to see{w}?",
    "What is here?",
)
THING_WORDS = ("object", "shape", "thing", "figure")
THINGS_WORDS = ("objects", "shapes", "things", "figures")


class _Where(NamedTuple):
    """How one question says which picture it means."""

    w: str  # " in the picture" or nothing
    of: str  # " of the picture"
    picture: str  # "the picture"


def _where(rng: Random, name: str | None) -> _Where:
    """`name`: "first", "second", ... or None for the latest picture."""
    if name is not None:
        picture = f"the {name} " + rng.choice(("picture", "picture", "image"))
        w = "" if rng.random() < 0.25 else f" in {picture}"  # then `ask` says it first
        return _Where(w, f" of {picture}", picture)
    picture = rng.choice(("the picture", "the picture", "this picture", "the image", "this image"))
    if rng.random() < 0.04:
        picture = rng.choice(("the last picture", "the last image", "the latest picture"))
    w = f" in {picture}" if rng.random() < 0.35 else " here" if rng.random() < 0.04 else ""
    return _Where(w, f" of {picture}", picture)


# What a scene's things can be called


def _matching(scene: Scene, colour: str | None, shape: str | None) -> list[Thing]:
    return [t for t in scene.things if (colour is None or t.colour == colour) and (shape is None or t.shape == shape)]


def _called(rng: Random, colour: str | None, shape: str | None) -> str:
    word = shape or rng.choice(THING_WORDS)
    return f"{colour} {word}" if colour else word


def _called_all(rng: Random, colour: str | None, shape: str | None) -> str:
    word = PLURALS[shape] if shape else rng.choice(THINGS_WORDS)
    return f"{colour} {word}" if colour else word


def _reference(rng: Random, scene: Scene, thing: Thing, hide: str = "") -> str | None:
    """Words that name this thing alone; `hide` is the property ("colour", "shape") that they must not tell."""
    choices = [(None, thing.shape), (thing.colour, None), (thing.colour, thing.shape), (thing.colour, thing.shape)]
    if hide == "colour":
        choices = [(None, thing.shape)] if len(scene.things) > 1 else [(None, thing.shape), (None, None)]
    elif hide == "shape":
        choices = [(thing.colour, None)] if len(scene.things) > 1 else [(thing.colour, None), (None, None)]
    rng.shuffle(choices)
    for colour, shape in choices:
        if len(_matching(scene, colour, shape)) == 1:
            return _called(rng, colour, shape)
    return None


def _absent(rng: Random, scene: Scene) -> tuple[str | None, str | None]:
    """(colour, shape) of nothing in the scene, often nearly something."""
    while True:
        colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
        if scene.things and rng.random() < 0.6:
            colour = rng.choice(scene.things).colour
        if scene.things and rng.random() < 0.6:
            shape = rng.choice(scene.things).shape
        pick = rng.random()
        if pick < 0.25:
            colour = None
        elif pick < 0.5:
            shape = None
        if not _matching(scene, colour, shape):
            return colour, shape


def _two(rng: Random, scene: Scene) -> tuple[Thing, Thing, str, str] | None:
    if len(scene.things) < 2:
        return None
    one, other = rng.sample(scene.things, 2)
    it, that = _reference(rng, scene, one), _reference(rng, scene, other)
    return None if it is None or that is None else (one, other, it, that)


def zone(scene: Scene, thing: Thing) -> str | None:
    """The third of the picture, each way, that holds the centre; None within `ZONE_MARGIN` of a border."""
    place = []
    for at, side in ((thing.y, scene.height), (thing.x, scene.width)):
        part = at / side
        if min(abs(part - 1 / 3), abs(part - 2 / 3)) < ZONE_MARGIN:
            return None
        place.append(int(part * 3))
    return ZONES[place[0]][place[1]]


def relation(one: Thing, other: Thing) -> str | None:
    """Where `one` is as seen from `other`, if one axis dominates by half and a few pixels."""
    dx, dy = one.x - other.x, one.y - other.y
    if abs(dx) > 1.5 * abs(dy) + 4:
        return "left" if dx < 0 else "right"
    if abs(dy) > 1.5 * abs(dx) + 4:
        return "above" if dy < 0 else "below"
    return None


def bigger(one: Thing, other: Thing) -> bool:
    """Clearly: by length and by area of the bounding box."""
    area, other_area = one.half_width * one.half_height, other.half_width * other.half_height
    return one.size > 1.4 * other.size and area > 1.4 * other_area


def caption(scene: Scene) -> str | None:
    """`a red circle, an orange star and a blue square`, left to right; None if two centres have nearly the same x."""
    if not scene.things:
        return "nothing"
    things = sorted(scene.things, key=lambda thing: thing.x)
    least = max(8.0, 0.04 * scene.width)
    if any(b.x - a.x < least for a, b in pairwise(things)):
        return None
    return join([a_or_an(thing.name) for thing in things])


# One function a kind of question: None if this scene does not allow the one that was drawn


def _ask_colour(rng: Random, scene: Scene, at: _Where) -> Question | None:
    if not scene.things:
        return None
    thing = rng.choice(scene.things)
    same = _matching(scene, None, thing.shape)
    if len(same) > 1:
        if any(t.colour != thing.colour for t in same):
            return None
        return Question(say(rng, COLOUR_PLURAL, them=PLURALS[thing.shape], w=at.w), thing.colour)
    if len(scene.things) == 1 and rng.random() < 0.2:
        return Question(say(rng, COLOUR_SINGLE, w=at.w), thing.colour)
    return Question(say(rng, COLOUR, it=_reference(rng, scene, thing, "colour"), w=at.w), thing.colour)


def _ask_shape(rng: Random, scene: Scene, at: _Where) -> Question | None:
    if not scene.things:
        return None
    thing = rng.choice(scene.things)
    if len(scene.things) == 1 and rng.random() < 0.4:
        return Question(say(rng, SHAPE_SINGLE, w=at.w), thing.shape)
    it = _reference(rng, scene, thing, "shape")
    if it is None:
        return None
    if thing.colour in it and rng.random() < 0.15:
        return Question(say(rng, SHAPE_OF_COLOUR, colour=thing.colour, w=at.w), thing.shape)
    return Question(say(rng, SHAPE, it=it, w=at.w), thing.shape)


def _counted(rng: Random, scene: Scene) -> tuple[str | None, str | None]:
    """(colour, shape) of a class to count: everything, a colour, a shape or both, usually one that is there."""
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    if scene.things and rng.random() < 0.87:
        thing = rng.choice(scene.things)
        colour, shape = thing.colour, thing.shape
    pick = rng.random()
    if pick < 0.25:
        return None, None
    if pick < 0.5:
        return colour, None
    return (None, shape) if pick < 0.75 else (colour, shape)


def _ask_count(rng: Random, scene: Scene, at: _Where) -> Question | None:
    colour, shape = _counted(rng, scene)
    number = len(_matching(scene, colour, shape))
    if number > MAX_COUNT:
        return None
    if colour is not None and shape is None and rng.random() < 0.25:
        return Question(say(rng, COUNT_OF_COLOUR, things=rng.choice(THINGS_WORDS), colour=colour, w=at.w), str(number))
    return Question(say(rng, COUNT, them=_called_all(rng, colour, shape), w=at.w, picture=at.picture), str(number))


def _ask_position(rng: Random, scene: Scene, at: _Where) -> Question | None:
    if not scene.things:
        return None
    if rng.random() < 0.55:
        thing = rng.choice(scene.things)
        it, where = _reference(rng, scene, thing), zone(scene, thing)
        if it is None or where is None:
            return None
        return Question(say(rng, PLACE, it=it, w=at.w, of=at.of, picture=at.picture), where)
    two = _two(rng, scene)
    if two is None:
        return None
    one, other, it, that = two
    templates, answer = RELATION, relation(one, other)
    if rng.random() < 0.35:
        dx, dy = one.x - other.x, one.y - other.y
        sideways = rng.random() < 0.5
        apart = dx if sideways else dy
        reach = one.half_width + other.half_width if sideways else one.half_height + other.half_height
        if abs(apart) < max(12.0, 0.6 * reach):
            return None
        templates = LEFT_RIGHT if sideways else ABOVE_BELOW
        answer = ("left", "right")[dx > 0] if sideways else ("above", "below")[dy > 0]
    if answer is None:
        return None
    return Question(say(rng, templates, it=it, that=that, w=at.w), answer)


def _yes(truth: bool) -> str:
    return "yes" if truth else "no"


def _ask_exists(rng: Random, scene: Scene, at: _Where) -> Question | None:
    truth = rng.random() < 0.5 and bool(scene.things)
    if truth:
        thing = rng.choice(scene.things)
        colour, shape = rng.choice(((thing.colour, None), (None, thing.shape), (thing.colour, thing.shape)))
    else:
        colour, shape = _absent(rng, scene)
    if colour is not None and shape is None and rng.random() < 0.3:
        return Question(say(rng, ANYTHING, colour=colour, w=at.w, picture=at.picture), _yes(truth))
    it = _called(rng, colour, shape)
    templates = CONTAINS if rng.random() < 0.2 else EXISTS
    them = _called_all(rng, colour, shape)
    return Question(say(rng, templates, a=a_or_an(it), it=it, them=them, w=at.w, picture=at.picture), _yes(truth))


def _ask_property(rng: Random, scene: Scene, at: _Where) -> Question | None:
    if not scene.things:
        return None
    thing = rng.choice(scene.things)
    truth = rng.random() < 0.5
    hide = rng.choice(("colour", "shape"))
    it = _reference(rng, scene, thing, hide)
    if it is None:
        return None
    if hide == "colour":
        others = [t.colour for t in scene.things] if rng.random() < 0.5 else list(COLOURS)
        value = thing.colour if truth else rng.choice(others)
        return Question(say(rng, IS_COLOUR, it=it, colour=value, w=at.w), _yes(value == thing.colour))
    others = [t.shape for t in scene.things] if rng.random() < 0.5 else list(SHAPES)
    value = thing.shape if truth else rng.choice(others)
    return Question(say(rng, IS_SHAPE, it=it, a=a_or_an(value), w=at.w), _yes(value == thing.shape))


def _ask_related(rng: Random, scene: Scene, at: _Where) -> Question | None:
    two = _two(rng, scene)
    if two is None:
        return None
    one, other, it, that = two
    answer = relation(one, other)
    if answer is None:
        return None
    opposite = {"left": "right", "right": "left", "above": "below", "below": "above"}
    asked = answer if rng.random() < 0.5 else opposite[answer]
    spoken = {
        "left": ("left of", "to the left of", "on the left of"),
        "right": ("right of", "to the right of", "on the right of"),
        "above": ("above", "above", "higher than"),
        "below": ("below", "under", "lower than"),
    }
    words = rng.choice(spoken[asked])
    return Question(say(rng, IS_RELATED, it=it, that=that, relation=words, w=at.w), _yes(asked == answer))


def _ask_placed(rng: Random, scene: Scene, at: _Where) -> Question | None:
    if not scene.things:
        return None
    thing = rng.choice(scene.things)
    it, where = _reference(rng, scene, thing), zone(scene, thing)
    if it is None or where is None:
        return None
    corners = ("top left", "top right", "bottom left", "bottom right", "centre")
    # "left" may be said of a thing at the top left, so only names that exclude each other are asked about
    if where not in corners:
        return None
    asked = where if rng.random() < 0.5 else rng.choice(corners)
    return Question(say(rng, IS_PLACED, it=it, zone=asked, picture=at.picture), _yes(asked == where))


def _ask_number(rng: Random, scene: Scene, at: _Where) -> Question | None:
    colour, shape = _counted(rng, scene)
    number = len(_matching(scene, colour, shape))
    them = _called_all(rng, colour, shape)
    if rng.random() < 0.3:
        colour, shape = _counted(rng, scene)
        those, other = _called_all(rng, colour, shape), len(_matching(scene, colour, shape))
        if those == them:
            return None
        return Question(say(rng, IS_MORE, them=them, those=those, w=at.w), _yes(number > other))
    if number and rng.random() < 0.2:
        return Question(say(rng, IS_ONE, it=_called(rng, colour, shape), w=at.w), _yes(number == 1))
    asked = number if rng.random() < 0.5 else number + rng.choice((-1, 1))
    if not 2 <= asked <= MAX_COUNT:
        return None
    spoken = NUMBERS[asked] if rng.random() < 0.7 else str(asked)
    return Question(say(rng, IS_NUMBER, them=them, number=spoken, w=at.w), _yes(asked == number))


def _ask_yes_no(rng: Random, scene: Scene, at: _Where) -> Question | None:
    kinds = (_ask_exists, _ask_exists, _ask_property, _ask_property, _ask_related, _ask_placed, _ask_number)
    return rng.choice(kinds)(rng, scene, at)


def _ask_size(rng: Random, scene: Scene, at: _Where) -> Question | None:
    if not scene.things:
        return None
    pick = rng.random()
    if pick < 0.6:
        thing = rng.choice(scene.things)
        it = _reference(rng, scene, thing)
        if it is None or SMALL < thing.size < LARGE:
            return None
        return Question(say(rng, SIZE, it=it, w=at.w), "small" if thing.size <= SMALL else "large")
    if pick < 0.85:
        two = _two(rng, scene)
        if two is None:
            return None
        one, other, it, that = two
        if bigger(other, one):
            one, other = other, one
        elif not bigger(one, other):
            return None
        if rng.random() < 0.5:
            return Question(say(rng, BIGGER, it=it, that=that, w=at.w), one.name)
        return Question(say(rng, SMALLER, it=it, that=that, w=at.w), other.name)
    if len(scene.things) < 2:
        return None
    order = sorted(scene.things, key=lambda t: t.size)
    if rng.random() < 0.5:
        if all(bigger(order[-1], t) for t in order[:-1]):
            return Question(say(rng, BIGGEST, w=at.w), order[-1].name)
    elif all(bigger(t, order[0]) for t in order[1:]):
        return Question(say(rng, SMALLEST, w=at.w), order[0].name)
    return None


def _ask_caption(rng: Random, scene: Scene, at: _Where) -> Question | None:
    answer = caption(scene)
    return answer and Question(say(rng, CAPTION, w=at.w, picture=at.picture), answer)


def _ask_absent(rng: Random, scene: Scene, at: _Where) -> Question | None:
    """About a thing that is not there."""
    colour, shape = _absent(rng, scene)
    templates = [PLACE, SIZE]
    if colour is None:
        templates += [COLOUR] * 3
    elif shape is None:
        templates += [SHAPE] * 3
    return Question(
        say(rng, rng.choice(templates), it=_called(rng, colour, shape), w=at.w, of=at.of, picture=at.picture), UNKNOWN
    )


ASK: dict[str, Callable[[Random, Scene, _Where], Question | None]] = {
    "colour": _ask_colour,
    "shape": _ask_shape,
    "count": _ask_count,
    "position": _ask_position,
    "yes_no": _ask_yes_no,
    "size": _ask_size,
    "caption": _ask_caption,
    "absent": _ask_absent,
}


def ask(rng: Random, kind: str, scene: Scene, picture: str | None = None) -> Question | None:
    """One question of a kind of `ASK`; None if none could be asked of this scene in a few tries.

    picture: "first", "second" ... names the picture in words; None means the latest one.
    """
    for _ in range(4):
        question = ASK[kind](rng, scene, _where(rng, picture))
        if question is None:
            continue
        text = question.text
        if picture is not None and picture not in text:
            place = f"the {picture} picture"
        elif picture is None and rng.random() < 0.04 and not re.search("picture|image", text):
            place = rng.choice(("this picture", "the picture", "the image"))
        else:
            return question
        lead = rng.choice(("In {}, ", "In {}: ", "Look at {}. ", "In {}, ")).format(place)
        if rng.random() < 0.2:
            lead = lead.lower()
        return Question(lead + (text if "." in lead else text[0].lower() + text[1:]), question.answer)
    return None
