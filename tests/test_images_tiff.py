"""A tile of a TIFF file is decoded whole: its size is limited as that of a picture."""

from __future__ import annotations

import io
import struct
import zlib
from typing import Any

import numpy as np
import pytest
from PIL import Image

from bitnet_runtime import ImageError
from bitnet_runtime.images.processor import Processor

S = 20
TILE = 32
SHORT, LONG, WIDTH = 3, 4, 322


def tiled(
    width: Any = TILE, height: Any = TILE, order: str = "<", big: bool = False, more: tuple[tuple[int, Any], ...] = ()
) -> bytes:
    """A grey picture S × S in one tile that holds 0, 1, …; `more`: tags and values behind the others.

    A value is a number of type SHORT or LONG, or a pair (type, how many) with the number TILE.
    """
    body = zlib.compress((np.arange(TILE * TILE) % 251).astype(np.uint8).tobytes())
    tags: list[tuple[int, Any]] = [(256, S), (257, S), (258, 8), (259, 8), (262, 1), (277, 1), (322, width)]
    tags += [(323, height), (324, 0), (325, len(body)), *more]
    entry, counter = ("HHQQ", "Q") if big else ("HHII", "H")
    start = 16 if big else 8
    at = start + struct.calcsize(order + counter) + len(tags) * struct.calcsize(order + entry) + (8 if big else 4)
    out = b"II" if order == "<" else b"MM"
    out += struct.pack(order + "HHHQ", 43, 8, 0, start) if big else struct.pack(order + "HI", 42, start)
    out += struct.pack(order + counter, len(tags))
    for tag, value in tags:
        number = at if tag == 324 else value
        kind, count = (SHORT if tag in (258, 259, 262, 277) else LONG), 1
        if isinstance(number, tuple):
            (kind, count), number = number, TILE
        width_of_value = 8 if big else 4
        packed = struct.pack(order + {SHORT: "H", LONG: "I"}.get(kind, "I"), number)
        out += struct.pack(order + entry[:-1], tag, kind, count) + packed.ljust(width_of_value, b"\0")
    return out + bytes(8 if big else 4) + body


@pytest.mark.parametrize(("order", "big"), [("<", False), (">", False), ("<", True)])  # Pillow lacks the fourth
def test_a_picture_in_tiles_is_read(order: str, big: bool) -> None:
    expected = (np.arange(TILE * TILE) % 251).astype(np.uint8).reshape(TILE, TILE)[:S, :S]
    for data in (tiled(order=order, big=big), tiled((SHORT, 1), (SHORT, 1), order, big)):
        assert np.array_equal(Processor(S, channels=1).bytes(data)[0], expected)


@pytest.mark.parametrize("order", ["<", ">"])
@pytest.mark.parametrize("big", [False, True])
@pytest.mark.parametrize(
    ("tags", "fault"),
    [
        ({"width": 30_000, "height": 30_000}, "its tiles: 30,000 × 30,000 pixels, expected at most"),
        ({"width": 1 << 20, "height": 16}, "its tiles: 1,048,576 × 16 pixels, expected at most"),
        ({"width": 0}, "its tiles: 0 × 32 pixels, expected at least 1 × 1"),
        ({"width": 30_000, "height": 30_000, "more": ((322, 32), (323, 32))}, "the tag 322 of TIFF twice"),
        ({"width": (1, 1)}, "its tag 322 has 1 values of type 1, expected one of type 3 or 4"),
        ({"height": (4, 2)}, "its tag 323 has 2 values of type 4, expected one"),
    ],
)
def test_tiles_that_would_fill_the_memory_are_refused(tags: dict[str, Any], fault: str, order: str, big: bool) -> None:
    with pytest.raises(ImageError, match=fault):
        Processor(S).bytes(tiled(order=order, big=big, **tags))


def test_a_directory_that_is_cut_short_is_refused() -> None:
    whole = tiled()
    for length in range(4, len(whole) - 1, 7):
        with pytest.raises(ImageError):
            Processor(S).bytes(whole[:length])


def test_a_picture_in_strips_has_no_tiles() -> None:
    file = io.BytesIO()
    Image.new("L", (S, S), 77).save(file, "TIFF", compression="tiff_adobe_deflate")
    assert (Processor(S, channels=1).bytes(file.getvalue()) == 77).all()


def test_a_text_that_begins_as_tiff_does_is_no_picture() -> None:
    with pytest.raises(ImageError, match="it begins with b'II\\. The second p', expected a picture"):
        Processor(S).bytes(b"II. The second part of it all")
