"""The built-in corpus: short stories for small children, without end, of known entropy.

In the spirit of TinyStories (Eldan and Li 2023, arXiv 2305.07759), but told by a random
process (see `process`): someone lives somewhere, owns a thing, goes out with it, and
something happens. What is named early returns later: the name, the pronoun, the thing
and its colour; the place says which animals live there and where one can hide or search;
the thing says what one does with it, how it breaks and what mends it.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache

from tune_study.data.process import Table, Teller, write


@dataclass(frozen=True)
class Hero:
    they: str
    their: str
    names: Table


@dataclass(frozen=True)
class Place:
    there: str
    animals: Table
    spots: tuple[str, ...]


@dataclass(frozen=True)
class Thing:
    looks: Table
    use: str
    gone: str
    broke: str
    mended: str


GIRLS = Table({"Lily": 5, "Anna": 3, "Mia": 3, "Sue": 2, "Zoe": 2, "Emma": 2, "Rose": 1, "Ida": 1})
BOYS = Table({"Tom": 5, "Ben": 4, "Max": 3, "Sam": 3, "Leo": 2, "Jack": 2, "Finn": 1, "Otto": 1})
RABBITS = Table({"Clover": 3, "Daisy": 2, "Hop": 2, "Bonny": 1})
FOXES = Table({"Rusty": 3, "Flash": 2, "Amber": 2, "Sly": 1})

HEROES = {
    "girl": Hero("she", "her", GIRLS),
    "boy": Hero("he", "his", BOYS),
    "rabbit": Hero("she", "her", RABBITS),
    "fox": Hero("he", "his", FOXES),
}
HERO = Table({"girl": 4, "boy": 4, "rabbit": 1, "fox": 1})

PLACES = {
    "in a house by the forest": Place(
        "the forest",
        Table({"an owl": 2, "a deer": 2, "a squirrel": 3, "a hedgehog": 1}),
        ("under a tree", "behind a rock", "in the tall grass", "in a deep hole"),
    ),
    "in a hut near the sea": Place(
        "the beach",
        Table({"a crab": 3, "a turtle": 2, "a seal": 2, "a gull": 1}),
        ("in the sand", "under a boat", "behind a rock", "in a big shell"),
    ),
    "on a big farm": Place(
        "the field",
        Table({"a cow": 2, "a pig": 3, "a hen": 2, "a horse": 2}),
        ("in the barn", "under the hay", "behind the fence", "in the mud"),
    ),
    "in a busy town": Place(
        "the park",
        Table({"a cat": 3, "a dog": 3, "a mouse": 2, "a pigeon": 1}),
        ("under a bench", "behind a wall", "in an old box", "by the gate"),
    ),
    "beside a lake": Place(
        "the water",
        Table({"a duck": 3, "a frog": 3, "a swan": 1, "an otter": 1}),
        ("in the reeds", "under the bridge", "behind a bush", "on a log"),
    ),
    "on a green hill": Place(
        "the hill",
        Table({"a goat": 3, "a sheep": 3, "a lark": 1, "a bee": 1}),
        ("in a cave", "under a stone", "behind a bush", "in the flowers"),
    ),
}
PLACE = Table(dict(zip(PLACES, (4, 3, 3, 3, 2, 2), strict=True)))

THINGS = {
    "ball": Thing(
        Table({"red": 4, "blue": 2, "round": 2, "yellow": 1}),
        "kick", "rolled away", "lost all its air", "blew new air into it",
    ),
    "kite": Thing(
        Table({"red": 1, "green": 2, "long": 2, "yellow": 2}),
        "fly", "flew away in the wind", "got a big hole", "put some tape on it",
    ),
    "hat": Thing(
        Table({"blue": 2, "warm": 3, "green": 1, "funny": 2}),
        "wear", "flew away in the wind", "got a big hole", "took a needle and closed it",
    ),
    "drum": Thing(
        Table({"loud": 4, "round": 1, "red": 1, "old": 2}),
        "beat", "rolled away", "made no more sound", "pulled the strings tight",
    ),
    "boat": Thing(
        Table({"white": 3, "blue": 2, "old": 1, "fast": 2}),
        "sail", "floated away", "broke in two", "put some glue on it",
    ),
    "book": Thing(
        Table({"old": 3, "thick": 2, "green": 1, "funny": 2}),
        "read", "fell out of the bag", "lost a page", "put some tape on it",
    ),
    "doll": Thing(
        Table({"soft": 4, "pretty": 3, "old": 1, "funny": 1}),
        "hug", "fell out of the bag", "lost an arm", "took a needle and closed it",
    ),
    "bell": Thing(
        Table({"loud": 2, "shiny": 4, "round": 1, "white": 1}),
        "ring", "rolled away", "made no more sound", "hit it with a hammer",
    ),
}  # fmt: skip
THING = Table(dict(zip(THINGS, (4, 3, 2, 2, 2, 2, 2, 1), strict=True)))

FRIENDS = Table(
    {"Pip": 4, "Dot": 3, "Momo": 3, "Fizz": 2, "Nibble": 2, "Gus": 2, "Tilly": 2, "Bo": 1}
)
HELPERS = {"mom": "She", "dad": "He", "grandma": "She", "grandpa": "He"}
HELPER = Table(dict(zip(HELPERS, (4, 3, 2, 1), strict=True)))

OPENING = Table({"Once upon a time there was": 6, "Once there was": 2, "Long ago there was": 1})
NATURE = Table({"little": 5, "kind": 2, "brave": 2, "happy": 2, "shy": 1})
ORIGIN = Table({"found": 1, "made": 1, "had": 4, "loved": 2})
TIME = Table({"One day": 5, "One morning": 2, "One sunny day": 2, "Last week": 1})
WENT = Table({"went": 4, "walked": 2, "ran": 2})
SAD = Table({"sad": 4, "upset": 1, "worried": 2, "very sad": 1})
GLAD = Table({"happy": 4, "glad": 2, "so happy": 2, "full of joy": 1})
COMFORT = Table({"Do not cry": 3, "Do not worry": 3, "Do not be sad": 2})
GIFT = Table({"a flower": 3, "a cookie": 3, "a feather": 1, "an apple": 2, "a hug": 2})
PASTIME = Table({"sang a song": 3, "told a story": 3, "played a game": 2})
EVENING = Table({"the sun went down": 3, "it was dark": 2, "dinner was ready": 1})
ANSWER = Table({'"Yes': 3, '"No': 2})
FRIENDSHIP = Table({"were best friends": 3, "shared all they had": 2})
REPAIRED = Table({"as good as new": 3, "better than before": 1})
EFFORT = Table({"pulled": 3, "ran home": 2})
WEATHER = Table({"rain": 3, "snow": 1})
FUN = Table({". They had so much fun.": 3, " again.": 1, ". It was a good day.": 2})
ALWAYS = Table({"From that day on": 3, "After that": 2, "Ever since": 1})


def tell(t: Teller) -> None:
    """One story, from its hero to its end."""
    t.word(OPENING)
    t.say(" a ")
    t.word(NATURE)
    t.say(" ")
    hero = HEROES[t.branch(HERO)]
    t.say(" named ")
    name = t.word(hero.names)
    t.say(f". {hero.they.capitalize()} lived ")
    place = PLACES[t.branch(PLACE)]
    t.say(f". {name} ")
    t.word(ORIGIN)
    t.say(" a ")
    thing_name = t.branch(THING)
    thing = THINGS[thing_name]
    t.say(". It was ")
    look = t.word(thing.looks)
    t.say(". ")
    t.word(TIME)
    t.say(f" {hero.they} ")
    t.word(WENT)
    t.say(f" to {place.there} to {thing.use} it. ")
    scene = Scene(t, hero, name, place, thing, thing_name, look)
    PLOT_OF[t.branch(PLOT)](scene)


@dataclass(frozen=True)
class Scene:
    """What the beginning of a story fixed; its methods are the ways it can go on."""

    t: Teller
    hero: Hero
    name: str
    place: Place
    thing: Thing
    thing_name: str
    look: str

    @property
    def it(self) -> str:
        return f"the {self.look} {self.thing_name}"

    @property
    def they(self) -> str:
        return self.hero.they

    @property
    def capital_they(self) -> str:
        return self.hero.they.capitalize()

    def lost(self) -> None:
        t, name = self.t, self.name
        t.say(f" the {self.thing_name} {self.thing.gone}. {name} looked ")
        spots = self.place.spots
        spots = _without(spots, t.branch(_any_of(spots)))
        t.say(" and ")
        spots = _without(spots, t.branch(_any_of(spots)))
        t.say(f", but it was not there. {self.capital_they} was ")
        t.word(SAD)
        t.say(". Then ")
        friend = self._friend()
        t.say(' came by. "')
        t.word(COMFORT)
        t.say(f'," said {friend}. "I will help you." {friend} looked ')
        t.word(_any_of(spots))
        t.say(f" and found {self.it}. {name} was ")
        t.word(GLAD)
        t.say(f'. "Thank you, {friend}!" {self.they} said. They played until ')
        t.word(EVENING)
        t.say(".")

    def shared(self) -> None:
        t, name = self.t, self.name
        t.say(f" {self.they} met ")
        friend = self._friend()
        t.say(f'. "Can I {self.thing.use} {self.it} too?" asked {friend}. ')
        if t.branch(ANSWER) == '"Yes':
            t.say(f'," said {name}. So they took turns. {friend} gave {name} ')
            t.word(GIFT)
            t.say(". ")
        else:
            t.say(f', it is mine," said {name}. {friend} was ')
            t.word(SAD)
            t.say(f' and went away. Then {name} felt bad and ran after {friend}. "I am sorry," ')
            t.say(f"{self.they} said. Now they took turns. ")
        t.word(ALWAYS)
        t.say(f", {name} and {friend} ")
        t.word(FRIENDSHIP)
        t.say(".")

    def broken(self) -> None:
        t, name = self.t, self.name
        t.say(f" the {self.thing_name} {self.thing.broke}. {name} was ")
        t.word(SAD)
        t.say(f". {self.capital_they} took it home to {self.hero.their} ")
        helper = t.branch(HELPER)
        t.say('. "')
        t.word(COMFORT)
        t.say(f'," said {helper}. {HELPERS[helper]} {self.thing.mended}. Soon {self.it} was ')
        t.word(REPAIRED)
        t.say(f". {name} gave {helper} ")
        t.word(GIFT)
        t.say(". ")
        t.word(ALWAYS)
        t.say(f", {self.they} took good care of the {self.thing_name}.")

    def rescued(self) -> None:
        t, name = self.t, self.name
        t.say(f" {self.they} heard a cry. It was ")
        friend = self._friend()
        t.say(", stuck ")
        spot = t.word(_any_of(self.place.spots))
        t.say(f'. "Please help me!" said {friend}. {name} ')
        if t.branch(EFFORT) == "pulled":
            t.say(" and pulled. ")
        else:
            t.say(f" to get {self.hero.their} ")
            t.word(HELPER)
            t.say(". They pulled together. ")
        t.say(f"At last {friend} was free. {friend} was ")
        t.word(GLAD)
        t.say(f" and gave {name} ")
        t.word(GIFT)
        t.say(f". {friend} never went {spot} again.")

    def caught_by_the_weather(self) -> None:
        t, name = self.t, self.name
        t.say(" it began to ")
        rain = t.branch(WEATHER) == "rain"
        t.say(f". {self.capital_they} got {'wet' if rain else 'cold'}, and {self.it} too. ")
        t.say(f"{name} hid ")
        t.word(_any_of(self.place.spots))
        t.say(". There sat ")
        friend = self._friend()
        t.say(f". {name} was not alone now. They ")
        t.word(PASTIME)
        t.say(f" until the {'sun came out' if rain else 'snow stopped'}. ")
        t.say(f"Then {friend} helped {name} to {self.thing.use} the {self.thing_name}")
        t.word(FUN)

    def _friend(self) -> str:
        """Introduces an animal of the place; returns the name given to it."""
        self.t.word(self.place.animals)
        self.t.say(" named ")
        return self.t.word(FRIENDS)


@cache
def _any_of(options: tuple[str, ...]) -> Table:
    return Table(options)


def _without(options: tuple[str, ...], taken: str) -> tuple[str, ...]:
    return tuple(option for option in options if option != taken)


PLOT_OF = {
    "But soon": Scene.lost,
    "There": Scene.shared,
    "But then": Scene.broken,
    "On the way": Scene.rescued,
    "Suddenly": Scene.caught_by_the_weather,
}
PLOT = Table(dict(zip(PLOT_OF, (4, 3, 3, 2, 2), strict=True)))


def stories(seed: int, split: str) -> Iterator[tuple[str, float]]:
    """Endless pairs of a story and its log-probability in nats.

    Each (seed, split) is a stream of its own.
    """
    # Seeding with a string and `random()` give the same numbers in every Python version.
    generator = random.Random(f"{split}-{seed}")
    while True:
        yield write(tell, generator)
