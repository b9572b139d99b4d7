"""The last step of `make vision`: two models on pictures that they have never seen.

    python vision.py FOLDER

FOLDER holds siglip.bitnet, paligemma.bitnet, and in `unseen` the output of `python -m bitnet.data.drawn --held-out`.
Prints their accuracy, next to that of the same models in full precision after more steps
(benchmarks/results/image_gap.json), and writes FOLDER/vision.html.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from vision_page import page

from bitnet_runtime import Model

RECORDED = Path(__file__).resolve().parents[2] / "benchmarks" / "results" / "image_gap.json"
RULE = "-" * 72
KINDS = {
    "what is in the picture": "describes the picture", "what does it say": "reads", "what colour": "colours",
    "how many": "numbers", "where": "places", "what is": "names", "is": "yes or no",
}  # fmt: skip
"""Kinds of questions by their first words, longer ones first."""


@dataclass(frozen=True)
class Asked:
    """A question, the right answer, and the model's answer."""

    image: str
    question: str
    right: str
    said: str

    @property
    def kind(self) -> str:
        return next(kind for start, kind in KINDS.items() if self.question.startswith(start))


@dataclass(frozen=True)
class Matched:
    """Pictures and captions, pair by pair, and the similarity of each picture to each caption."""

    images: list[str]
    captions: list[str]
    scores: NDArray[np.float32]  # (images, captions)

    @property
    def recall(self) -> tuple[float, float]:
        """Share of the pictures whose own caption fits best, and of the captions whose own picture fits best."""
        own = np.arange(len(self.images))
        return float((self.scores.argmax(1) == own).mean()), float((self.scores.argmax(0) == own).mean())


def records(file: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


def match(model: Model, folder: Path) -> Matched:
    found = records(folder / "records.jsonl")
    images, captions = [record["image"] for record in found], [record["caption"] for record in found]
    return Matched(images, captions, model.similarity([folder / image for image in images], captions))


def ask(model: Model, folder: Path) -> list[Asked]:
    """Ask every question separately."""
    found = []
    for record in records(folder / "questions.jsonl"):
        prompt, image = record["prefix"], folder / record["image"]
        said = model.generate(prompt, images=[image], max_tokens=32, temperature=0).text
        found.append(Asked(record["image"], prompt, record["suffix"], said.strip()))
    return found


@dataclass(frozen=True)
class Figure:
    """The share of `of` cases that is right, and that of a full-precision model, if it was measured."""

    what: str
    right: float
    of: int
    twin: float | None = None

    def __str__(self) -> str:
        twin = "" if self.twin is None else f" (full precision: {self.twin:.1%})"
        return f"{self.right:.1%} of {self.of:,}{twin}"


def figures(matched: Matched, asked: list[Asked]) -> list[Figure]:
    """Accuracy of captions for pictures, of pictures for captions, and of answers, word for word."""
    twin, (recall, back), n = recorded(), matched.recall, len(matched.images)
    right = sum(each.said == each.right for each in asked) / len(asked)
    return [
        Figure("Right caption of a picture", recall, n, twin.get("recall")),
        Figure("Right picture of a caption", back, n, twin.get("recall_back")),
        Figure("Right answers", right, len(asked), twin.get("accuracy")),
    ]


def kinds(asked: list[Asked]) -> list[Figure]:
    """The answers by kind of question, the best first."""
    found: dict[str, list[bool]] = defaultdict(list)
    for each in asked:
        found[each.kind].append(each.said == each.right)
    shares = [Figure(kind, sum(right) / len(right), len(right)) for kind, right in found.items()]
    return sorted(shares, key=lambda share: -share.right)


def recorded() -> dict[str, float]:
    """The accuracy of models in full precision; empty if it was not measured."""
    try:
        rows: list[dict[str, Any]] = json.loads(RECORDED.read_text(encoding="utf-8"))["rows"]
    except OSError:
        return {}
    row = next(row for row in rows if row["variant"] == "full")
    return {name: value["mean"] for name, value in row.items() if name != "variant"}


def main(folder: Path) -> None:
    unseen = folder / "unseen"
    with Model.load(folder / "siglip.bitnet") as model:
        matched = match(model, unseen)
    with Model.load(folder / "paligemma.bitnet") as model:
        start = time.perf_counter()
        asked = ask(model, unseen)
        seconds = time.perf_counter() - start
    print(f"\n{RULE}")
    for each in asked[: 4 * len(KINDS) : 3]:
        print(f"{each.image}  {each.question}  {each.said}" + f"   [wrong: {each.right}]" * (each.said != each.right))
    print(RULE)
    print(f"{len(matched.images)} pictures with combinations that no picture in training had.")
    of_all, of_kinds = figures(matched, asked), kinds(asked)
    for figure in of_all + of_kinds:
        print(f"{figure.what + ':':28} {figure}")
    took = f"{1000 * seconds / len(asked):.1f} ms for a picture, a question and its answer."
    print(f"{took}\nFull precision had more steps: benchmarks/results/image_gap.md")
    (folder / "vision.html").write_text(page(unseen, matched, asked, of_all, of_kinds, took), encoding="utf-8")
    print(f"All pictures and answers: {folder / 'vision.html'}")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("expected one argument, the folder that `make vision` fills: python vision.py build/vision")
    main(Path(sys.argv[1]))
