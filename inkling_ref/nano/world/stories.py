"""Short stories: people go places, take things, pass them on and put them down; then questions.

A story keeps the state of its world (who is where, who holds what, what lies where), so an answer is a look-up. A
question may need two steps: the key is where its holder is. Names come from a list, from syllables that make endless
new ones, or, on held-out seeds only, from a second list that training never sees.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random

from .phrasing import a_or_an, join, say, words
from .questions import UNKNOWN

NAMES = words(
    "Tom Anna Ben Mary Paul Lucy Max Nina Sam Emma Leo Clara Jack Ruth Carl Julia Adam Laura David Sarah Peter "
    "Alice John Kate Mark Ella Simon Rosa Hugo Iris Oscar Maria Felix Jane Noah Lily Henry Eva Finn Mia Daniel "
    "Sofia Omar Zoe"
)
HELD_OUT_NAMES = words(
    "Robert Helen Victor Grace Martin Olga Philip Dora Edgar Wendy Bruno Flora Gavin Yusuf Ingrid Kevin Naomi "
    "Quentin Tessa Ursula Walter Xenia Ahmed Bianca Cedric Dmitri Esther Fatima Gordon Hannah"
)
PLACES = (
    *words(
        "kitchen garden park school shop office station library beach barn attic cellar bathroom bedroom hall forest "
        "market museum hotel garage church tower castle cafe bakery hospital theatre harbour village street field "
        "yard cinema bank tent cave house classroom"
    ),
    "living room",
    "dining room",
)
THINGS = words(
    "key ball book apple lamp cup hat map coin ring drum kite bag box pen letter phone clock spoon knife plate "
    "bottle coat shoe scarf umbrella candle rope hammer violin piano guitar basket cake cheese orange egg banana "
    "newspaper camera watch doll ticket bike football mirror brush glove pencil wallet flower sandwich"
)
ADJECTIVES = ("red", "blue", "green", "old", "new", "big", "small", "yellow", "black", "white")

# (present, past) of what can happen
STAYS = (
    ("is in", "was in"), ("is in", "was in"), ("is at", "was at"), ("stays in", "stayed in"), ("waits in", "waited in"),
    ("sits in", "sat in"), ("sleeps in", "slept in"), ("works in", "worked in"), ("stands in", "stood in"),
    ("plays in", "played in"), ("rests in", "rested in"),
)  # fmt: skip
GOES = (
    ("goes to", "went to"), ("goes to", "went to"), ("walks to", "walked to"), ("runs to", "ran to"),
    ("moves to", "moved to"), ("hurries to", "hurried to"), ("travels to", "travelled to"), ("comes to", "came to"),
    ("returns to", "returned to"), ("goes back to", "went back to"), ("drives to", "drove to"),
    ("heads to", "headed to"),
    ("enters", "entered"), ("rides to", "rode to"), ("walks into", "walked into"), ("arrives at", "arrived at"),
)  # fmt: skip
TAKES = (
    ("has", "had"), ("has", "had"), ("takes", "took"), ("finds", "found"), ("gets", "got"), ("picks up", "picked up"),
    ("buys", "bought"), ("grabs", "grabbed"), ("holds", "held"), ("carries", "carried"), ("receives", "received"),
)  # fmt: skip
GIVES = (
    ("gives", "gave"), ("gives", "gave"), ("hands", "handed"), ("passes", "passed"), ("lends", "lent"),
    ("offers", "offered"), ("brings", "brought"), ("throws", "threw"), ("sends", "sent"),
)  # fmt: skip
DROPS = (("puts down", "put down"), ("drops", "dropped"), ("leaves", "left"), ("lays down", "laid down"))
SCENERY = (
    ("It is raining", "It was raining"), ("The sun shines", "The sun was shining"), ("It is late", "It was late"),
    ("The wind blows", "The wind was blowing"), ("A dog barks", "A dog barked"), ("It is cold", "It was cold"),
    ("The birds sing", "The birds were singing"), ("Everybody is happy", "Everybody was happy"),
)  # fmt: skip
THEN = ("Then ", "Later ", "Now ", "After that, ", "Soon ")
INTRO = (
    "Read the story. ", "Here is a story. ", "Story: ", "Listen. ", "Read this: ", "Read this story and answer. ",
)  # fmt: skip

WHERE_PERSON = (
    "Where is {n}?",
    "Where is {n} now?",
    "Where's {n}?",
    "Where can I find {n}?",
    "Where can {n} be found?",
    "Where did {n} end up?",
    "In which place is {n}?",
    "What place is {n} in?",
    "At which place is {n} now?",
    "Where is {n} at the end?",
    "Tell me where {n} is.",
    "Name the place where {n} is.",
    "Say where {n} is.",
    "Find {n}.",
    "Which place is {n} in?",
    "Do you know where {n} is?",
)
WHO_HAS = (
    "Who has the {t}?",
    "Who has the {t} now?",
    "Who has the {t} at the end?",
    "Who is holding the {t}?",
    "Who holds the {t}?",
    "Who is carrying the {t}?",
    "Who's got the {t}?",
    "Who has got the {t}?",
    "Which person has the {t}?",
    "With whom is the {t}?",
    "Tell me who has the {t}.",
    "Name the person who has the {t}.",
    "Name the person with the {t}.",
    "Say who has the {t}.",
    "Who is the one with the {t}?",
    "Do you know who has the {t}?",
)
WHAT_HAS = (
    "What does {n} have?",
    "What does {n} have now?",
    "What has {n} got?",
    "What is {n} holding?",
    "What is {n} carrying?",
    "What does {n} hold?",
    "Which thing does {n} have?",
    "Which object does {n} have?",
    "Name the thing that {n} has.",
    "Tell me what {n} has.",
    "Say what {n} has.",
    "What does {n} have at the end?",
)
WHERE_THING = (
    "Where is the {t}?",
    "Where is the {t} now?",
    "Where's the {t}?",
    "Where can I find the {t}?",
    "Where can the {t} be found?",
    "Where did the {t} end up?",
    "In which place is the {t}?",
    "What place is the {t} in?",
    "Where is the {t} at the end?",
    "Tell me where the {t} is.",
    "Name the place where the {t} is.",
    "Say where the {t} is.",
    "Find the {t}.",
    "Do you know where the {t} is?",
)
WHO_IN = (
    "Who is in the {p}?",
    "Who is in the {p} now?",
    "Who is at the {p}?",
    "Which person is in the {p}?",
    "Who can be found in the {p}?",
    "Name the person in the {p}.",
    "Tell me who is in the {p}.",
)
IS_IN = ("Is {n} in the {p}?", "Is {n} in the {p} now?", "Is {n} at the {p}?", "Can {n} be found in the {p}?")
HAS = (
    "Does {n} have the {t}?",
    "Does {n} have the {t} now?",
    "Has {n} got the {t}?",
    "Is the {t} with {n}?",
    "Is {n} holding the {t}?",
)
WHO_GAVE = (
    "Who gave the {t} to {n}?",
    "Who gave {n} the {t}?",
    "From whom did {n} get the {t}?",
    "Who did {n} get the {t} from?",
    "Name the person who gave the {t} to {n}.",
)

_ONSETS = words("b d f g h j k l m n p r s t v w z b d f g k l m n r s t br dr gr tr sh ch th st pl sk qu y")
_VOWELS = words("a e i o u a e i o ai ee ia oo")
_ENDS = ["", "", "", "", "n", "r", "l", "s", "k", "m", "x", "th", "nd"]


def new_name(rng: Random) -> str:
    """A name of one to three random syllables, almost surely never seen before."""
    syllables = [
        rng.choice(_ONSETS) + rng.choice(_VOWELS) + rng.choice(_ENDS) for _ in range(rng.choice((1, 2, 2, 2, 3)))
    ]
    if rng.random() < 0.25:
        syllables[0] = syllables[0].lstrip("bcdfghjklmnpqrstvwxyz") or syllables[0]
    name = "".join(syllables)[:9]
    while len(name) < 3 or name in ("and", "are", "the", "who"):
        name += rng.choice("anrol")
    return name.capitalize()


@dataclass
class Story:
    """The state of a story's world, and how it is told."""

    rng: Random
    people: list[str]
    places: list[str]
    things: list[str]
    past: bool
    place_of: dict[str, str] = field(default_factory=dict)  # person -> place
    holder_of: dict[str, str] = field(default_factory=dict)  # thing -> person
    lies_in: dict[str, str] = field(default_factory=dict)  # thing -> place, once put down
    givers: dict[tuple[str, str], list[str]] = field(default_factory=dict)  # (thing, receiver) -> givers
    known: set[str] = field(default_factory=set)  # people, things and places mentioned so far

    def held_by(self, person: str) -> list[str]:
        return [thing for thing, holder in self.holder_of.items() if holder == person]

    def find(self, thing: str) -> str | None:
        """Where a thing is, as far as the story tells."""
        return self.lies_in.get(thing) or self.place_of.get(self.holder_of.get(thing, ""))

    # Telling

    def sentence(self) -> str:
        """Let something happen, and say it."""
        if self.rng.random() < 0.04:
            return self.rng.choice(SCENERY)[self.past] + "."
        lead = self.rng.choice(THEN) if self.known and self.rng.random() < 0.08 else ""
        return lead + self._event(self.rng.choice(self.people)) + "."

    def _verb(self, verbs: tuple[tuple[str, str], ...]) -> str:
        return self.rng.choice(verbs)[self.past]

    def _event(self, who: str) -> str:
        rng = self.rng
        held = self.held_by(who)
        here = self.place_of.get(who)
        free = [t for t in self.things if t not in self.holder_of and self.lies_in.get(t, here) == here]
        kinds = []
        if who not in self.place_of:
            kinds += ["stay"] * 4 + ["together"]
        kinds += ["go"] * 4
        if free:
            kinds += ["take"] * 5
            if rng.random() < 0.3:
                kinds += ["go and take"]
        if held:
            kinds += ["give"] * 4
            if who in self.place_of:
                kinds += ["drop"] * 2
        kind = rng.choice(kinds)
        self.known.add(who)
        if kind == "together":
            return self._together(who)
        if kind in ("stay", "go"):
            return f"{who} {self._move(who, kind)}"
        if kind == "go and take":
            move = self._move(who, "go")
            return f"{who} {move} and {self._take(who, rng.choice([t for t in free if t not in self.lies_in] or ['']))}"
        if kind == "take":
            return f"{who} {self._take(who, rng.choice(free))}"
        thing = rng.choice(held)
        if kind == "drop":
            return f"{who} {self._drop(who, thing)}"
        return f"{who} {self._give(who, thing)}"

    def _together(self, who: str) -> str:
        other = self.rng.choice([p for p in self.people if p != who])
        place = self.rng.choice(self.places)
        self.place_of[who] = self.place_of[other] = place
        self.known |= {other, place}
        return f"{who} and {other} {'were' if self.past else 'are'} in the {place}"

    def _move(self, who: str, kind: str) -> str:
        place = self.rng.choice([p for p in self.places if p != self.place_of.get(who)])
        self.place_of[who] = place
        self.known.add(place)
        return f"{self._verb(STAYS if kind == 'stay' else GOES)} the {place}"

    def _take(self, who: str, thing: str) -> str:
        if not thing:  # nothing that could be carried from anywhere
            return "looked around" if self.past else "looks around"
        new = thing not in self.known
        self.holder_of[thing] = who
        self.lies_in.pop(thing, None)
        self.known.add(thing)
        spoken = a_or_an(thing) if new and self.rng.random() < 0.3 else f"the {thing}"
        return f"{self._verb(TAKES)} {spoken}"

    def _give(self, who: str, thing: str) -> str:
        other = self.rng.choice([p for p in self.people if p != who])
        self.holder_of[thing] = other
        self.givers.setdefault((thing, other), []).append(who)
        self.known.add(other)
        verb = self._verb(GIVES)
        return f"{verb} the {thing} to {other}" if self.rng.random() < 0.75 else f"{verb} {other} the {thing}"

    def _drop(self, who: str, thing: str) -> str:
        del self.holder_of[thing]
        self.lies_in[thing] = self.place_of[who]
        verb = self._verb(DROPS)
        bare = verb.startswith(("leaves", "left"))
        return f"{verb} the {thing}" + (f" in the {self.place_of[who]}" if bare or self.rng.random() < 0.3 else "")

    # Asking

    def question(self, kind: str, strangers: tuple[str, str]) -> tuple[str, str] | None:
        """(question, answer), or None if the story does not allow this kind.

        strangers: a person and a thing that the conversation never mentioned.
        """
        rng = self.rng
        people = [p for p in self.people if p in self.known]
        things = [t for t in self.things if t in self.known]
        if kind == "unknown":
            pick = rng.random()
            if pick < 0.3:
                return say(rng, rng.choice((WHERE_PERSON, WHAT_HAS)), n=strangers[0]), UNKNOWN
            if pick < 0.6:
                return say(rng, rng.choice((WHERE_THING, WHO_HAS)), t=strangers[1]), UNKNOWN
            lost = [p for p in people if p not in self.place_of]
            if lost:
                return say(rng, WHERE_PERSON, n=rng.choice(lost)), UNKNOWN
            lost = [t for t in things if self.find(t) is None]
            return (say(rng, WHERE_THING, t=rng.choice(lost)), UNKNOWN) if lost else None
        if not people:
            return None
        who = rng.choice(people)
        if kind == "where person":
            return (say(rng, WHERE_PERSON, n=who), self.place_of[who]) if who in self.place_of else None
        if kind == "what has":
            held = self.held_by(who)
            if len(held) > 1 or (not held and rng.random() < 0.6):
                return None
            return say(rng, WHAT_HAS, n=who), held[0] if held else "nothing"
        if kind == "who in":
            places = [p for p in self.places if p in self.known]
            if not places or len(self.place_of) < len(people):
                return None
            place = rng.choice(places)
            there = [p for p in people if self.place_of[p] == place]
            if len(there) > 1 or (not there and rng.random() < 0.7):
                return None
            return say(rng, WHO_IN, p=place), there[0] if there else "nobody"
        if kind == "is in":
            if who not in self.place_of:
                return None
            place = self.place_of[who] if rng.random() < 0.5 else rng.choice(self.places)
            return say(rng, IS_IN, n=who, p=place), "yes" if place == self.place_of[who] else "no"
        if not things:
            return None
        thing = rng.choice(things)
        holder = self.holder_of.get(thing)
        if kind == "who has":
            return say(rng, WHO_HAS, t=thing), holder or "nobody"
        if kind == "has":
            who = holder if holder and rng.random() < 0.5 else who
            return say(rng, HAS, n=who, t=thing), "yes" if who == holder else "no"
        if kind == "where thing":
            place = self.find(thing)
            return place and (say(rng, WHERE_THING, t=thing), place)
        unique = [key for key, givers in self.givers.items() if len(givers) == 1]
        if kind == "who gave" and unique:
            thing, receiver = rng.choice(unique)
            return say(rng, WHO_GAVE, t=thing, n=receiver), self.givers[thing, receiver][0]
        return None


KINDS = (
    ["where person"] * 5 + ["who has"] * 4 + ["what has"] * 3 + ["where thing"] * 5
    + ["who in", "is in", "is in", "has", "has", "who gave", "unknown", "unknown"]
)  # fmt: skip


def _cast(rng: Random, number: int, held_out: bool, taken: set[str]) -> list[str]:
    """Different names, none of them taken; half of all stories use listed ones, the others new ones or both."""
    listed = HELD_OUT_NAMES if held_out else NAMES
    kind = rng.random()
    names: list[str] = []
    while len(names) < number:
        name = rng.choice(listed) if kind < 0.45 or (kind < 0.7 and rng.random() < 0.5) else new_name(rng)
        if name in names or name in taken:
            name = new_name(rng)  # the list may be used up
        if name not in names and name not in taken:
            names.append(name)
    return names


def make_story(rng: Random, held_out: bool = False, taken: set[str] | None = None) -> tuple[Story, tuple[str, str]]:
    """A story in which nothing has happened yet, and a person and a thing that will stay out of it.

    taken: names and things of earlier stories, which this one leaves alone and adds its own to.
    """
    taken = set() if taken is None else taken
    people = _cast(rng, rng.randint(2, 4) + 1, held_out, taken)
    free = [thing for thing in THINGS if thing not in taken]
    nouns = rng.sample(free if len(free) > 5 else THINGS, rng.randint(1, 4) + 1)
    taken.update(people, nouns)
    if rng.random() < 0.12:
        nouns = [f"{rng.choice(ADJECTIVES)} {noun}" for noun in nouns]
        if len(nouns) > 2 and nouns[0].split()[0] != nouns[1].split()[0]:  # one noun, two adjectives
            nouns[1] = nouns[1].split()[0] + " " + nouns[0].split()[1]
    places = rng.sample(PLACES, rng.randint(2, 5))
    return Story(rng, people[1:], places, nouns[1:], past=rng.random() < 0.4), (people[0], nouns[0])


def story_turns(
    rng: Random,
    sentences: int,
    questions: int,
    held_out: bool = False,
    taken: set[str] | None = None,
    kinds: Sequence[str] = KINDS,
) -> list[tuple[str, str]]:
    """(user text, answer) pairs: the story with a question, then more questions, now and then after more story."""
    story, strangers = make_story(rng, held_out, taken)
    text = " ".join(story.sentence() for _ in range(sentences))
    if rng.random() < 0.1:
        text = rng.choice(INTRO) + text
    turns: list[tuple[str, str]] = []
    asked: set[str] = set()
    for _ in range(4 * questions):
        if len(turns) == questions:
            break
        more = ""
        if turns and rng.random() < 0.12:
            more = " ".join(story.sentence() for _ in range(rng.randint(1, 2)))
            asked.clear()
        pair = None
        for _ in range(4):
            pair = story.question(rng.choice(kinds), strangers)
            if pair is not None and pair[0] not in asked:
                break
            pair = None
        if pair is None:
            if more:  # what happened must be told, whatever comes of the question
                break
            continue
        asked.add(pair[0])
        before = text if not turns else more
        turns.append((f"{before}{_gap(rng)}{pair[0]}" if before else pair[0], pair[1]))
    return turns


def _gap(rng: Random) -> str:
    return "\n" if rng.random() < 0.1 else " "


# Running text


def running_text(rng: Random, sentences: int) -> str:
    """A little story to tell, without questions."""
    story, _ = make_story(rng)
    text = " ".join(story.sentence() for _ in range(sentences))
    opening = rng.choice(("", "One day, ", "Once upon a time, ", "One morning, "))
    if not text.startswith(tuple(story.people)):
        opening = ""
    closing = rng.choice(
        ("", "", " The end.", " That is all.", f" {join(story.people)} {'were' if story.past else 'are'} happy.")
    )
    return opening + text + closing
