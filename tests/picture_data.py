"""Pictures: any, and of two colours in files, with captions and questions; and models that learn these in a second."""

from __future__ import annotations

import csv
import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

COLOURS = {"red": (220, 30, 30), "green": (30, 170, 50), "blue": (30, 60, 220), "white": (250, 250, 250)}
SIZE = 8

STACK = ("dim=24", "n_layers=1", "n_heads=2", "n_kv_heads=2", "head_dim=12", "ffn_dim=32", "image_size=8",
         "patch_size=4", "pooling=attention")  # fmt: skip
VISION = [word for option in STACK for word in ("--set", f"vision.{option}")]
MODEL = ("vocab_size=300", "dim=24", "n_layers=1", "n_heads=2", "n_kv_heads=1", "head_dim=12", "ffn_dim=32")
TINY = [word for option in MODEL for word in ("--set", option)]
TINY += ["--threads", "1", "--batch", "8", "--eval-every", "40", "--save-every", "40", "--lr", "0.01"]
TOWERS = [
    *TINY,
    *VISION,
    "--set",
    "vision.out_dim=16",
    "--set",
    "out_dim=16",
    "--set",
    "has_head=no",
    "--set",
    "pooling=mean",
    "--set",
    "mask=bidirectional",
    "--set",
    "max_context=8",
    "--objective",
    "contrastive",
]
DECODER = [*TINY, "--set", "mask=prefix", "--set", "max_context=24"]


def halves(folder: Path, n: int, seed: int = 0) -> Iterator[tuple[str, str, str]]:
    """n distinct pictures: file name, left colour, right colour."""
    draw = random.Random(seed)
    noise = np.random.default_rng(seed)
    folder.mkdir(parents=True, exist_ok=True)
    for i in range(n):
        left, right = draw.sample(list(COLOURS), 2)
        row = [COLOURS[left]] * (SIZE // 2) + [COLOURS[right]] * (SIZE // 2)
        pixels = np.array([row] * SIZE) + noise.integers(-9, 5, (SIZE, SIZE, 3))
        Image.fromarray(pixels.clip(0, 255).astype(np.uint8)).save(folder / f"{i}.png")
        yield f"{i}.png", left, right


def captions(folder: Path, n: int = 120) -> Path:
    return table(folder, "captions.csv", ({"image": name, "caption": f"{a} {b}"} for name, a, b in halves(folder, n)))


def questions(folder: Path, n: int = 80) -> Path:
    """One question about each picture, some about two, and one without a picture."""
    records: list[dict[str, Any]] = [{"prefix": "say yes", "suffix": "yes"}]
    before = ""
    for i, (name, left, right) in enumerate(halves(folder, n)):
        asked = ("prefix", "suffix") if i % 2 else ("question", "answer")
        records += [{"image": name, **dict(zip(asked, ("colours?", f"{left} {right}"), strict=True))}]
        if i % 4 == 3:
            records += [{"images": [before, name], "prefix": "how many?", "suffix": "two"}]
        before = name
    return lines(folder, "questions.jsonl", records)


def lines(folder: Path, name: str, records: list[dict[str, Any]]) -> Path:
    file = folder / name
    file.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return file


def table(folder: Path, name: str, rows: Iterator[dict[str, str]]) -> Path:
    first, *others = rows
    with (folder / name).open("w", newline="", encoding="utf-8") as out:
        writer = csv.DictWriter(out, list(first))
        writer.writeheader()
        writer.writerows([first, *others])
    return folder / name


# ---- any picture ----

RNG = np.random.default_rng(15)


def noise(*shape: int) -> Any:
    return RNG.integers(0, 256, shape, np.uint8)


def smooth(height: int, width: int) -> Any:
    """A picture that JPEG preserves well."""
    y, x = np.mgrid[:height, :width]
    return np.stack([x * 255 // width, y * 255 // height, (x + y) * 127 // (height + width)], 2).astype(np.uint8)


def encoded(picture: Any, format: str, **options: Any) -> bytes:
    out = io.BytesIO()
    (picture if isinstance(picture, Image.Image) else Image.fromarray(picture)).save(out, format, **options)
    return out.getvalue()
