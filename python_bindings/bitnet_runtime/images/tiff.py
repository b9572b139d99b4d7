"""The tiles of a TIFF file: its decoder takes memory for a whole one, however small the picture is."""

from __future__ import annotations

import struct
from typing import BinaryIO

from bitnet_runtime.errors import ImageError

WIDTH, HEIGHT = 322, 323  # tags of a tile
KINDS = {3: "H", 4: "I"}  # the types that their values have


def tile_size(file: BinaryIO) -> tuple[int, int] | None:
    """Width and height of the tiles of a TIFF file's first picture in pixels; None if it has none, or is no TIFF.

    The directory is read here: of a tag that is there twice Pillow reports the last value, and its decoder takes the
    first. Raises ImageError for such a file.
    """
    file.seek(0)
    begin = file.read(16)
    if begin[:4] not in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"):
        return None
    order, large = "<" if begin[:2] == b"II" else ">", b"+" in begin[:4]
    (at,) = struct.unpack(order + "Q", begin[8:]) if large else struct.unpack(order + "I", begin[4:8])
    counter, entry = (struct.Struct(order + form) for form in (("Q", "HHQ8s") if large else ("H", "HHI4s")))
    file.seek(at)
    (number,) = counter.unpack(file.read(counter.size))
    entries = file.read(entry.size * min(number, 0xFFFF))  # the decoder refuses more
    found: dict[int, int] = {}
    for tag, kind, count, value in entry.iter_unpack(entries[: len(entries) // entry.size * entry.size]):
        if tag in found:
            raise ImageError(f"it has the tag {tag} of TIFF twice, expected each once; save it again")
        found[tag] = 0
        if tag in (WIDTH, HEIGHT):
            if kind not in KINDS or count != 1:
                raise ImageError(f"its tag {tag} has {count} values of type {kind}, expected one of type 3 or 4")
            (found[tag],) = struct.unpack_from(order + KINDS[kind], value)
    return (found.get(WIDTH, 0), found.get(HEIGHT, 0)) if found.keys() & {WIDTH, HEIGHT} else None
