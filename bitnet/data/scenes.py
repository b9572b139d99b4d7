"""The content of the images that this project draws, and true statements about it.

An image shows one shape at a place, two shapes beside or above each other, several equal shapes, or a word or digit.
Each is a pure function of (seed, number): `scene` is its content, `caption` and `questions` are true statements.
They test whether a model can combine what it has never seen together: some pairs of a thing with a colour, a place or
a number (`is_held_out`) are in no training image, and every held-out image has at least one.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random

SHAPES = ("circle", "square", "triangle", "star", "cross", "ring", "diamond", "heart")
COLOURS = {
    "red": (214, 38, 38), "orange": (245, 135, 25), "yellow": (235, 200, 25), "green": (40, 155, 60),
    "blue": (40, 85, 215), "purple": (135, 60, 175), "brown": (120, 70, 35), "black": (25, 25, 25),
}  # fmt: skip
LINES = (0.18, 0.5, 0.82)  # centres of rows and columns, as far apart as the patches of `siglip-tiny`
CELLS = tuple(itertools.product(LINES, LINES))  # x and y
STEPS = tuple(itertools.combinations(LINES, 2))  # left to right, or top to bottom
HEIGHTS = dict(zip(("top", "centre", "bottom"), LINES, strict=True))
PLACES = {
    "top left": CELLS[0], "bottom left": CELLS[2], "centre": CELLS[4], "top right": CELLS[6], "bottom right": CELLS[8],
}  # fmt: skip
NUMBERS = ("two", "three", "four", "five")
DIGITS = tuple("0123456789")
WORDS = ("cat", "dog", "sun", "map", "key", "box", "bus", "cup")
TEXTS = DIGITS + WORDS
FONTS = (
    "", "DejaVuSans.ttf", "DejaVuSans-Bold.ttf", "DejaVuSerif.ttf", "DejaVuSerif-Bold.ttf", "DejaVuSansMono.ttf",
)  # fmt: skip
"""Pillow's built-in font, and some of matplotlib's."""
KINDS = ("place", "pair", "pair", "count", "text")  # pairs twice, as they allow the most questions


@dataclass(frozen=True)
class Thing:
    """A shape or a text. Centre and radius are shares of the image's side; the turn is in degrees."""

    what: str
    colour: str
    x: float
    y: float
    radius: float
    turn: float
    tone: tuple[int, ...]  # its colour as painted, a random variation
    font: str = ""


@dataclass(frozen=True)
class Scene:
    """The content of an image. fact: the place, the number, or where the first of a pair is relative to the second,
    left or above."""

    kind: str
    things: tuple[Thing, ...]
    fact: str
    background: tuple[int, ...]
    held_out: bool
    seed: int  # for the choice of questions

    @property
    def combinations(self) -> set[tuple[str, str]]:
        """The combinations in the image: things with their colours, and with their place or number."""
        pairs = {(thing.what, thing.colour) for thing in self.things}
        return pairs if self.kind == "pair" else pairs | {(self.things[0].what, self.fact)}


def is_held_out(what: str, other: str) -> bool:
    """Whether a thing never has this colour, place or number in training: one of each is held out for each thing."""
    number = SHAPES.index(what) if what in SHAPES else TEXTS.index(what)
    places = tuple(PLACES if what in SHAPES else HEIGHTS)
    words = next(words for words in (tuple(COLOURS), places, NUMBERS) if other in words)
    return words.index(other) == (7 * number + 1) % len(words)


def scene(seed: int, number: int, held_out: bool = False) -> Scene:
    """Image `number` of the training or held-out ones: scenes are drawn until one belongs there."""
    random = Random(f"{seed} {number} {held_out}")
    kind = random.choice(KINDS)
    while True:
        found = _scene(kind, random, held_out)
        if held_out == any(is_held_out(*pair) for pair in found.combinations):
            return found


def _scene(kind: str, random: Random, held_out: bool) -> Scene:
    """A random scene of a kind."""

    def near(value: float, most: float) -> float:
        return value + random.uniform(-most, most)

    def thing(what: str, colour: str, x: float, y: float, radius: float, font: str = "") -> Thing:
        tone = tuple(min(255, max(0, level + random.randint(-20, 20))) for level in COLOURS[colour])
        return Thing(what, colour, near(x, 0.02), near(y, 0.02), radius, near(0, 8), tone, font)

    shapes, colours = random.sample(SHAPES, 2), random.sample(list(COLOURS), 2)
    if kind == "place":
        fact = random.choice(list(PLACES))
        things = [thing(shapes[0], colours[0], *PLACES[fact], random.uniform(0.105, 0.13))]
    elif kind == "count":
        fact = random.choice(NUMBERS)
        chosen, radius = random.sample(CELLS, 2 + NUMBERS.index(fact)), random.uniform(0.1, 0.125)
        things = [thing(shapes[0], colours[0], x, y, radius) for x, y in chosen]
    elif kind == "pair":
        fact, line, (one, other) = random.choice(("left", "above")), random.choice(LINES), random.choice(STEPS)
        places = [(one, line), (other, line)] if fact == "left" else [(line, one), (line, other)]
        things = [
            thing(shape, colour, *place, random.uniform(0.1, 0.125))
            for shape, colour, place in zip(shapes, colours, places, strict=True)
        ]
    else:
        fact, word = random.choice(list(HEIGHTS)), random.random() < 0.5
        text, radius = random.choice(WORDS if word else DIGITS), near(0.27 if word else 0.13, 0.02)
        things = [thing(text, colours[0], near(0.5, 0.04), HEIGHTS[fact], radius, random.choice(FONTS))]
    light = tuple(random.randint(228, 255) for _ in range(3))
    return Scene(kind, tuple(things), fact, light, held_out, random.getrandbits(32))


# ---- statements about an image ----


def _beside(fact: str) -> str:
    return f"{fact} of" if fact in ("left", "right") else fact


def _a(noun: str) -> str:
    return f"an {noun}" if noun[0] in "aeiou" else f"a {noun}"


OPPOSITE = {"left": "right", "right": "left", "above": "below", "below": "above"}


def caption(scene: Scene) -> str:
    """The caption. Scenes with different facts have different captions."""
    first = scene.things[0]
    name = f"{first.colour} {first.what}"
    if scene.kind == "place":
        return f"{_a(name)} at the {scene.fact}"
    if scene.kind == "count":
        return f"{scene.fact} {plural(name)}"
    if scene.kind == "pair":
        other = scene.things[1]
        return f"{_a(name)} {_beside(scene.fact)} {_a(f'{other.colour} {other.what}')}"
    return f"the {text_kind(first.what)} {first.what} in {first.colour} at the {scene.fact}"


def plural(name: str) -> str:
    return f"{name}es" if name.endswith("cross") else f"{name}s"


def text_kind(text: str) -> str:
    return "number" if text in DIGITS else "word"


def questions(scene: Scene) -> list[tuple[str, str]]:
    """All questions about an image, with the answers."""
    return [("what is in the picture?", caption(scene)), *_details(scene, Random(scene.seed))]


def _details(scene: Scene, random: Random) -> list[tuple[str, str]]:
    first = scene.things[0]
    if scene.kind == "text":
        kind = text_kind(first.what)
        return [
            ("what does it say?", first.what),
            (f"what colour is the {kind}?", first.colour),
            (f"where is the {kind}?", scene.fact),
        ]
    if scene.kind == "count":
        asked = [
            (f"how many {plural(first.what)} are there?", scene.fact),
            (f"what colour are the {plural(first.what)}?", first.colour),
        ]
    elif scene.kind == "place":
        asked = [
            (f"where is the {first.what}?", scene.fact),
            (f"what colour is the {first.what}?", first.colour),
            (f"what is {first.colour}?", first.what),
        ]
    else:
        one, other = random.sample(scene.things, 2)
        fact = scene.fact if one is first else OPPOSITE[scene.fact]
        said = random.choice((fact, OPPOSITE[fact]))
        asked = [
            (f"what is {_beside(fact)} the {other.what}?", f"{one.colour} {one.what}"),
            (f"what colour is the {one.what}?", one.colour),
            (f"what is {other.colour}?", other.what),
            (f"is the {one.what} {_beside(said)} the {other.what}?", "yes" if said == fact else "no"),
        ]
    return [*asked, *_is_there(scene, random)]


def _is_there(scene: Scene, random: Random) -> list[tuple[str, str]]:
    """Questions about the presence of a thing in the image, and of one that differs only in colour or shape. Training
    never asks about held-out combinations, so that unfamiliarity does not give away the answer."""
    there = [(thing.what, thing.colour) for thing in scene.things]
    what, colour = random.choice(there)
    others = [(what, other) for other in COLOURS] + [(other, colour) for other in SHAPES]
    others = [pair for pair in others if pair not in there and (scene.held_out or not is_held_out(*pair))]
    asked = [((what, colour), "yes"), (random.choice(others), "no")]
    return [(f"is there {_a(f'{colour} {what}')}?", answer) for (what, colour), answer in asked]


# ---- many scenes ----


MOST = 1500  # held-out images with distinct captions; slightly more exist


def scenes(seed: int, n: int, held_out: bool = False) -> Iterator[Scene]:
    """The first n scenes. Held-out ones have distinct captions, so that exactly one image matches each."""
    if held_out and n > MOST:
        raise ValueError(f"{n:,} held-out pictures are requested, expected at most {MOST:,}: no two are alike")
    all_of_them = (scene(seed, number, held_out) for number in itertools.count())
    return itertools.islice(_distinct(all_of_them) if held_out else all_of_them, n)


def _distinct(scenes: Iterator[Scene]) -> Iterator[Scene]:
    seen: set[str] = set()
    for each in scenes:
        if caption(each) not in seen:
            seen.add(caption(each))
            yield each
