"""Pictures drawn by ourselves: the same each time, what is said of them is true, what is held out is never learnt."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from bitnet.data import drawn
from bitnet.data.scenes import (
    COLOURS,
    HEIGHTS,
    NUMBERS,
    PLACES,
    SHAPES,
    TEXTS,
    Scene,
    Thing,
    caption,
    is_held_out,
    plural,
    questions,
    scene,
    scenes,
)

TRAIN = list(scenes(3, 1500))
HELD_OUT = list(scenes(3, 400, held_out=True))
RELATIONS = {"left of": (-1, 0), "right of": (1, 0), "above": (0, -1), "below": (0, 1)}


def test_a_scene_depends_on_seed_and_number_alone() -> None:
    assert scene(3, 1400) == TRAIN[1400]
    assert scene(4, 1400) != TRAIN[1400]
    assert scene(3, 1400, held_out=True) != TRAIN[1400]
    first, again = (np.asarray(drawn.draw(scene(0, 7))) for _ in range(2))
    assert first.shape == (drawn.SIZE, drawn.SIZE, 3) and np.array_equal(first, again)
    assert np.asarray(drawn.draw(TRAIN[0], 32)).shape == (32, 32, 3)


def test_held_out_combinations_are_in_no_picture_for_training() -> None:
    seen = set().union(*(each.combinations for each in TRAIN))
    never = set().union(*({pair for pair in each.combinations if is_held_out(*pair)} for each in HELD_OUT))
    assert all(each.combinations & never for each in HELD_OUT)
    assert not seen & never
    assert {what for what, _ in never} == {*SHAPES, *TEXTS}
    words = {*COLOURS, *PLACES, *HEIGHTS, *NUMBERS}
    assert {other for _, other in never} == {other for _, other in seen} == words  # learnt with other things


def test_nor_are_they_asked_for_in_training() -> None:
    asked = [question for each in TRAIN for question, _ in questions(each)]
    named = [re.fullmatch(r"is there an? (\w+) (\w+)\?", question) for question in asked]
    pairs = {(match[2], match[1]) for match in named if match}
    assert len(pairs) == len(SHAPES) * (len(COLOURS) - 1)
    assert not any(is_held_out(*pair) for pair in pairs)


def test_every_thing_lacks_one_colour_one_place_and_one_number() -> None:
    for what in (*SHAPES, *TEXTS):
        for others in (COLOURS, PLACES if what in SHAPES else HEIGHTS, NUMBERS):
            assert sum(is_held_out(what, other) for other in others) == 1


def test_held_out_captions_are_true_of_one_picture_alone() -> None:
    assert len({caption(each) for each in HELD_OUT}) == len(HELD_OUT)
    facts = {caption(each): _facts(each) for each in [*TRAIN, *HELD_OUT]}
    assert len({*facts.values()}) == len(facts)
    assert all(facts[caption(each)] == _facts(each) for each in TRAIN)
    with pytest.raises(ValueError, match="5,000 held-out pictures are requested, expected at most 1,500"):
        scenes(0, 5000, held_out=True)


def _facts(scene: Scene) -> tuple[str, ...]:
    return (scene.kind, scene.fact, *(f"{thing.colour} {thing.what}" for thing in scene.things))


def truth(scene: Scene, question: str) -> str:
    """The answer, found in what is in the scene and where it lies rather than in what the scene says of itself."""
    things = {thing.what: thing for thing in scene.things}
    singular = {plural(what): what for what in SHAPES} | {what: what for what in SHAPES}
    only = scene.things[0]
    singular |= {"word": only.what, "number": only.what}
    if question == "what is in the picture?":
        return caption(scene)  # which another test reads
    if question == "what does it say?":
        return only.what
    if match := re.fullmatch(r"what colour (?:is|are) the (\w+)\?", question):
        return things[singular[match[1]]].colour
    if match := re.fullmatch(r"how many (\w+) are there\?", question):
        return ("one", *NUMBERS)[sum(thing.what == singular[match[1]] for thing in scene.things) - 1]
    if match := re.fullmatch(r"where is the (\w+)\?", question):
        thing = things[singular[match[1]]]
        row, column = (("top", "", "bottom")[round(3 * thing.y - 0.5)], ("left", "", "right")[round(3 * thing.x - 0.5)])
        return f"{row} {column}".strip() or "centre"
    if match := re.fullmatch(r"is there an? (\w+) (\w+)\?", question):
        return "yes" if any(t.what == match[2] and t.colour == match[1] for t in scene.things) else "no"
    if match := re.fullmatch(r"what is (left of|right of|above|below) the (\w+)\?", question):
        (thing,) = (t for t in scene.things if t.what != match[2] and _lies(t, match[1], things[match[2]]))
        return f"{thing.colour} {thing.what}"
    if match := re.fullmatch(r"is the (\w+) (left of|right of|above|below) the (\w+)\?", question):
        return "yes" if _lies(things[match[1]], match[2], things[match[3]]) else "no"
    match = re.fullmatch(r"what is (\w+)\?", question)
    assert match, question
    (what,) = {thing.what for thing in scene.things if thing.colour == match[1]}
    return what


def _lies(thing: Thing, relation: str, other: Thing) -> bool:
    x, y = RELATIONS[relation]
    return x * (thing.x - other.x) + y * (thing.y - other.y) > 0.2


@pytest.mark.parametrize("pictures", [TRAIN, HELD_OUT], ids=["training", "held out"])
def test_answers_are_true(pictures: list[Scene]) -> None:
    answers = [(answer, truth(each, question)) for each in pictures for question, answer in questions(each)]
    assert all(said == true for said, true in answers)
    said = [answer for answer, _ in answers]
    assert 0.8 < said.count("yes") / said.count("no") < 1.25
    assert {*COLOURS, *PLACES, *NUMBERS, *SHAPES, *TEXTS} <= {*said}


def test_captions_are_true() -> None:
    for each in [*TRAIN, *HELD_OUT]:
        text, first = caption(each), each.things[0]
        if match := re.fullmatch(r"(\w+) (\w+) (\w+)", text):  # three green stars
            assert match[1] == truth(each, f"how many {match[3]} are there?")
            assert match[2] == truth(each, f"what colour are the {match[3]}?") and match[3] == plural(first.what)
        elif match := re.fullmatch(r"an? (\w+) (\w+) at the (\w+|\w+ \w+)", text):
            assert match[3] == truth(each, f"where is the {match[2]}?") and (match[2], match[1]) in each.combinations
        elif match := re.fullmatch(r"the (\w+) (\w+) in (\w+) at the (\w+)", text):
            assert (match[1] == "number") == match[2].isdigit()
            assert (match[2], match[3]) == (first.what, first.colour)
            assert match[4] == truth(each, f"where is the {match[1]}?")
        else:
            match = re.fullmatch(r"an? (\w+ \w+) (left of|right of|above|below) an? (\w+) (\w+)", text)
            assert match, text
            assert truth(each, f"what is {match[2]} the {match[4]}?") == match[1]
            assert (match[4], match[3]) in each.combinations


def test_pictures_show_what_the_scene_says() -> None:
    """Each thing has its colour where it lies, and nothing lies elsewhere; so nothing is cut off at the edge."""
    middles = (np.arange(drawn.SIZE) + 0.5) / drawn.SIZE
    for each in [*TRAIN[:60], *HELD_OUT[:60]]:
        pixels = np.asarray(drawn.draw(each)).astype(int)
        empty = np.ones(pixels.shape[:2], bool)
        for thing in each.things:
            near = np.maximum(abs(middles[:, None] - thing.y), abs(middles - thing.x)) < thing.radius * 1.3
            painted = np.abs(pixels - thing.tone).sum(2) <= 6
            assert (painted & near).sum() > 12, caption(each)
            empty &= ~near
        empty[[0, -1]] = empty[:, [0, -1]] = True
        assert (pixels[empty] == each.background).all(), caption(each)


def test_a_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert drawn.main([str(tmp_path), "--n", "20", "--seed", "5", "--held-out"]) == 0
    expected = list(scenes(5, 20, held_out=True))
    records, asked = (
        [json.loads(line) for line in (tmp_path / name).read_text().splitlines()]
        for name in ("records.jsonl", "questions.jsonl")
    )
    assert [record["caption"] for record in records] == [caption(each) for each in expected]
    for record, each in zip(records, expected, strict=True):
        with Image.open(tmp_path / record["image"]) as image:
            assert np.array_equal(np.asarray(image), np.asarray(drawn.draw(each)))
        found = [(row["prefix"], row["suffix"]) for row in asked if row["image"] == record["image"]]
        assert found == questions(each)
    assert drawn.main([str(tmp_path / "more"), "--n", "2000", "--held-out"]) == 1
    assert "expected at most 1,500" in capsys.readouterr().err
