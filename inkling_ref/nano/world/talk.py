"""Small talk, and the one honest answer to everything outside this world: "I do not know that."."""

from random import Random

from .phrasing import REQUEST_LEADS, say, words
from .questions import (
    COLOUR,
    COUNT,
    PLACE,
    PLURALS,
    SHAPE,
    SIZE,
    THING_WORDS,
    UNKNOWN,
)
from .retrieval import ADJECTIVES, LABELS
from .retrieval import QUESTIONS as CODE_QUESTIONS
from .scenes import COLOURS, SHAPES
from .stories import NAMES, THINGS, WHERE_PERSON, WHERE_THING, WHO_HAS, new_name, running_text

SMALL_TALK: tuple[tuple[str, tuple[str, ...]], ...] = (
    (
        "Hello!",
        (
            "Hello!", "Hello.", "Hi!", "Hi there!", "Hey!", "Hello there!", "Good morning!", "Good evening!",
            "Good afternoon!", "Good day!", "Hi", "hey there", "Greetings!", "Hello, Inkling!", "Hi, nano!",
            "Hello, nano.",
            "Hey Inkling", "Nice to meet you!", "hello again", "Welcome!", "Morning!", "Howdy!",
        ),
    ),
    (
        "I am fine, thank you.",
        (
            "How are you?", "How are you today?", "How do you do?", "How is it going?", "Are you well?",
            "How do you feel?",
            "How are things?", "Hello, how are you?", "Hi, how are you?", "Are you OK?", "How's it going?", "You OK?",
        ),
    ),
    (
        "I am Inkling nano, a very small model.",
        (
            "Who are you?", "What are you?", "What is your name?", "What's your name?", "Tell me your name.",
            "What should I call you?", "Introduce yourself.", "Tell me who you are.", "Who am I talking to?",
            "Are you a robot?", "Are you a person?", "Are you human?", "Which model are you?", "Do you have a name?",
            "Hello, who are you?", "Hi, what is your name?", "Tell me about yourself.", "What kind of model are you?",
        ),
    ),
    (
        "I can answer questions about pictures of shapes and short stories, find codes in a text and add numbers.",
        (
            "What can you do?", "What can I ask you?", "Help!", "Help", "What do you know?", "How can you help me?",
            "Can you help me?", "What are you good at?", "What questions can you answer?", "Tell me what you can do.",
            "What are you able to do?", "What can I ask?", "How can you help?",
        ),
    ),
    (
        "You are welcome.",
        (
            "Thank you!", "Thanks!", "Thank you.", "Thanks a lot!", "Thank you very much.", "Many thanks!", "Thanks",
            "thank you so much", "Great, thanks!", "OK, thank you.", "That was helpful, thank you.",
            "Thanks for your help!",
            "Good, thanks.", "thx", "Well done, thank you!",
        ),
    ),
    (
        "Goodbye!",
        (
            "Bye!", "Goodbye!", "Bye bye", "See you!", "See you later!", "Good night!", "Goodbye.", "See you tomorrow!",
            "Take care!", "Farewell!", "bye now", "Have a nice day!", "I have to go, bye!",
        ),
    ),
)  # fmt: skip

_LANDS = words(
    "France Germany Italy Spain China Japan India Brazil Canada Egypt Peru Kenya Norway Poland Mexico Chile Cuba "
    "Greece Turkey Russia Iran Nepal Ireland Sweden America England Africa Europe Asia Australia Portugal Austria"
)
_CITIES = words(
    "Paris London Berlin Rome Madrid Tokyo Cairo Moscow Lima Oslo Vienna Boston Chicago Sydney Dublin Athens "
    "Prague Delhi"
)
_FAMOUS = words(
    "Shakespeare Einstein Newton Mozart Napoleon Caesar Darwin Picasso Beethoven Plato Galileo Lincoln Columbus "
    "Bach Goethe Cleopatra Gandhi Turing"
)
_MATTERS = words(
    "love time life music history gravity water money war peace art light energy science football chess weather "
    "happiness electricity philosophy physics chemistry biology religion democracy evolution language coffee "
    "chocolate sleep"
)
_BEASTS = words(
    "cats dogs whales bees spiders birds elephants sharks horses snakes penguins tigers lions ants owls wolves"
)
_STUFF = words(
    "computer telescope car train airplane engine rocket bridge house volcano mountain planet star river ocean "
    "brain heart battery microscope novel poem song film recipe cake pizza bread soup tea country king queen "
    "president city"
)
_TOO_HARD = (
    "What is the capital of {land}?", "Where is {land}?", "Where is {city}?", "How many people live in {land}?",
    "How many people live in {city}?", "What language do they speak in {land}?", "Who is the president of {land}?",
    "Who is the king of {land}?", "What is the weather in {city}?", "How far is it from {city} to {city2}?",
    "Who was {famous}?", "When was {famous} born?", "When did {famous} die?", "What did {famous} do?",
    "What is {matter}?", "Why do we need {matter}?", "Explain {matter}.", "Tell me something about {matter}.",
    "Write a poem about {matter}.", "Write an essay about {matter}.", "What is the meaning of {matter}?",
    "Do you like {matter}?", "What do you think about {matter}?", "Who invented {matter}?",
    "Tell me a joke about {matter}.",
    "How does a {stuff} work?", "Who invented the {stuff}?", "How much does a {stuff} cost?",
    "How do I build a {stuff}?",
    "What is a {stuff}?", "Why is the {stuff} so big?", "How old is the {stuff}?", "What is the best {stuff}?",
    "Which {stuff} should I buy?", "How do I make a {stuff}?", "What is the name of the {stuff}?",
    "Why do {beasts} sleep?", "What do {beasts} eat?", "How long do {beasts} live?", "How fast are {beasts}?",
    "Can {beasts} fly?", "Are {beasts} dangerous?", "Do {beasts} dream?", "Where do {beasts} live?",
    "What is {a} times {b}?", "What is {a} minus {b}?", "{a} * {b}", "{a} - {b}", "{a} / {b}",
    "What is {a} divided by {b}?",
    "What is the square root of {a}?", "What is {a} percent of {b}?", "Multiply {a} by {b}.",
    "What happened in 1{b}{a}?", "Who won in 20{a}?", "Who is {new}?", "What is {new}?", "Where is the town of {new}?",
    "What does {new} mean?", "How do you spell {new}?", "Do you know {new}?", "When was {new} built?",
    "Translate {stuff} to German.", "How do you say {stuff} in French?", "What is the opposite of {matter}?",
    "Is {land} bigger than {land2}?", "Is {matter} good or bad?", "Which is better, {matter} or {beasts}?",
    "What time is it?", "What time is it in {city}?", "What day is it today?", "What is the date?",
    "How old are you?", "Where do you live?", "Where are you from?", "Who made you?", "Do you have a family?",
    "What is your favourite colour?", "What is your favourite food?", "Can you sing?", "Can you dance?",
    "Do you speak French?", "Are you happy?", "What did you eat today?", "Do you dream?", "Can you swim?",
    "Will it rain tomorrow?", "Is it raining?", "What is the news today?", "Who won the match yesterday?",
    "What is the price of gold?", "How tall is the highest mountain?", "How deep is the ocean?",
    "How far is the moon?", "How hot is the sun?", "Why is the sky blue?", "What colour is the sky?",
    "How many planets are there?", "How many days does a year have?", "What is the biggest animal?",
    "Who wrote the Bible?", "Who painted the Mona Lisa?", "Who wrote Hamlet?", "What is the speed of light?",
    "What should I cook tonight?", "What should I do today?", "Should I buy a {stuff}?", "Do you love me?",
    "What is the best film ever?", "Recommend a good {stuff}.", "What is my name?", "How old am I?", "Where am I?",
    "What am I thinking?", "What do I have in my pocket?", "Who will win the election?", "Play some music.",
    "Call my mother.", "Set an alarm.", "Book a flight to {city}.", "Open the window.", "Write some code for me.",
    "Sort this list.", "Write a program.", "Fix my {stuff}.", "Draw a {stuff}.", "Sing a song about {beasts}.",
)  # fmt: skip
STORY_REQUESTS = (
    "Tell me a story.", "Tell a story.", "Can you tell me a story?", "Please tell me a story.", "Make up a story.",
    "I want to hear a story.", "Write a short story.", "Tell me a short story.", "Do you know a story?",
    "Tell me something.",
)  # fmt: skip


def small_talk(rng: Random) -> tuple[str, str]:
    """(what is said, the reply)."""
    answer, said = rng.choice(SMALL_TALK)
    text = rng.choice(said)
    style = rng.random()
    if style < 0.2:
        text = text.lower()
    if 0.15 < style < 0.4:
        text = text.rstrip("!.?")
    return text, answer


def too_hard(rng: Random) -> tuple[str, str]:
    """A question about the world at large."""
    slots = {
        "land": rng.choice(_LANDS), "land2": rng.choice(_LANDS),
        "city": rng.choice(_CITIES), "city2": rng.choice(_CITIES), "famous": rng.choice(_FAMOUS),
        "matter": rng.choice(_MATTERS), "beasts": rng.choice(_BEASTS),
        "stuff": rng.choice(_STUFF), "new": new_name(rng), "a": str(rng.randint(10, 99)), "b": str(rng.randint(2, 9)),
    }  # fmt: skip
    return say(rng, _TOO_HARD, **slots), UNKNOWN


def nothing_shown(rng: Random) -> tuple[str, str]:
    """A question about a picture, a story or a text that was never given."""
    colour, shape = rng.choice(list(COLOURS)), rng.choice(SHAPES)
    word, thing = rng.choice(THING_WORDS), rng.choice(THINGS)
    kind = rng.randrange(9)
    place = {
        "w": rng.choice(("", "", " in the picture", " in this picture")),
        "of": " of the picture",
        "picture": "the picture",
    }
    if kind == 0:
        text = say(rng, COLOUR, it=shape, **place)
    elif kind == 1:
        text = say(rng, SHAPE, it=f"{colour} {word}", **place)
    elif kind == 2:
        text = say(rng, COUNT, them=PLURALS[shape], **place)
    elif kind == 3:
        text = say(rng, PLACE, it=f"{colour} {shape}", **place)
    elif kind == 4:
        text = say(rng, SIZE, it=f"{colour} {shape}", **place)
    elif kind == 5:
        text = say(rng, WHERE_PERSON, n=rng.choice(NAMES))
    elif kind == 6:
        text = say(rng, rng.choice((WHERE_THING, WHO_HAS)), t=thing)
    else:
        text = say(rng, CODE_QUESTIONS, label=rng.choice(LABELS), key=f"{rng.choice(ADJECTIVES)} {thing}")
    return text, UNKNOWN


def tell_story(rng: Random) -> tuple[str, str]:
    """A request for running text, and the text."""
    return say(rng, STORY_REQUESTS, REQUEST_LEADS), running_text(rng, rng.randint(3, 7))
