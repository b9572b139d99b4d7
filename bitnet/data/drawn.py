"""Images that this project draws itself, with captions, questions and answers.

    python -m bitnet.data.drawn pictures --n 2000 --seed 1

`bitnet.data.scenes` decides what they show and what the texts say; `draw` paints them.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from bitnet.data.scenes import DIGITS, TEXTS, Scene, Thing, caption, questions, scenes

if TYPE_CHECKING:
    from PIL import Image, ImageDraw, ImageFont

SIZE = 72  # pixels per side
FINER = 4  # factor by which the painting is larger before it is reduced, for smooth edges


def _corners(*turns: tuple[float, float]) -> list[tuple[float, float]]:
    """Points by direction (degrees from the top, clockwise) and distance."""
    return [(far * math.sin(math.radians(at)), -far * math.cos(math.radians(at))) for at, far in turns]


_HEART = [
    (math.sin(t) ** 3, -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t)) / 15)
    for t in (i * math.tau / 48 for i in range(48))
]
POLYGONS = {
    "square": _corners(*((45 + 90 * i, 1.2) for i in range(4))),
    "triangle": _corners(*((120 * i, 1.2) for i in range(3))),
    "star": _corners(*((36 * i, 0.5 if i % 2 else 1.2) for i in range(10))),
    "cross": _corners(*((90 * i + at, far) for i in range(4) for at, far in ((-17, 1.1), (17, 1.1), (45, 0.45)))),
    "diamond": [(0.0, -1.2), (0.7, 0.0), (0.0, 1.2), (-0.7, 0.0)],
    "heart": _HEART,
}


def draw(scene: Scene, size: int = SIZE) -> Image.Image:
    """The image, RGB. Its pixels are the same on every machine with the same Pillow and matplotlib."""
    from PIL import Image, ImageDraw

    image = Image.new("RGB", (size * FINER, size * FINER), scene.background)
    painter = ImageDraw.Draw(image)
    for thing in scene.things:
        paint = _paint_text if thing.what in TEXTS else _paint_shape
        paint(painter, thing, size * FINER)
    return image.reduce(FINER)


def _paint_shape(painter: ImageDraw.ImageDraw, thing: Thing, side: int) -> None:
    x, y, radius = thing.x * side, thing.y * side, thing.radius * side
    if thing.what in ("circle", "ring"):
        box = (x - radius, y - radius, x + radius, y + radius)
        if thing.what == "circle":
            painter.ellipse(box, fill=thing.tone)
        else:
            painter.ellipse(box, outline=thing.tone, width=round(0.38 * radius))
        return
    sin, cos = math.sin(math.radians(thing.turn)), math.cos(math.radians(thing.turn))
    points = [(x + radius * (a * cos - b * sin), y + radius * (a * sin + b * cos)) for a, b in POLYGONS[thing.what]]
    painter.polygon(points, fill=thing.tone)


def _paint_text(painter: ImageDraw.ImageDraw, thing: Thing, side: int) -> None:
    """Text of width 2 · radius, a digit of that height; upright, centred on its ink."""
    box = painter.textbbox((0, 0), thing.what, _font(thing.font, 100))
    extent = box[3] - box[1] if thing.what in DIGITS else box[2] - box[0]
    font = _font(thing.font, max(1, round(100 * 2 * thing.radius * side / extent)))
    left, top, right, bottom = painter.textbbox((0, 0), thing.what, font)
    at = (thing.x * side - (left + right) / 2, thing.y * side - (top + bottom) / 2)
    painter.text(at, thing.what, fill=thing.tone, font=font)


@functools.lru_cache(256)
def _font(name: str, size: int) -> ImageFont.FreeTypeFont:
    from PIL import ImageFont

    if not name:
        found = ImageFont.load_default(size)
        assert isinstance(found, ImageFont.FreeTypeFont)  # Pillow without FreeType has only bitmap fonts
        return found
    import matplotlib

    return ImageFont.truetype(Path(matplotlib.get_data_path()) / "fonts" / "ttf" / name, size)


# ---- a folder ----


def write(folder: Path, n: int, seed: int, held_out: bool = False) -> None:
    """Write PNG files, records.jsonl with a caption for each, and questions.jsonl with all questions."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    records, asked = [], []
    for number, each in enumerate(scenes(seed, n, held_out)):
        name = f"images/{number:06}.png"
        draw(each).save(folder / name)
        records.append({"image": name, "caption": caption(each)})
        asked += [{"image": name, "prefix": question, "suffix": answer} for question, answer in questions(each)]
    for file, rows in (("records.jsonl", records), ("questions.jsonl", asked)):
        (folder / file).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m bitnet.data.drawn", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="folder for the images, records.jsonl and questions.jsonl")
    parser.add_argument("--n", type=int, default=1000, help="number of images [1000]")
    parser.add_argument("--seed", type=int, default=0, help="[0]")
    parser.add_argument("--held-out", action="store_true", help="combinations that training images never have")
    args = parser.parse_args(argv)
    try:
        write(args.folder, args.n, args.seed, args.held_out)
    except (ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
