"""Texts that verbs read from a file or a pipe, and vectors that they print."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST = 256 << 20
"""Most bytes of a text: a device that never ends would fill the memory."""


def read_text(file: Path | None) -> str | None:
    """What a file holds, or standard input where None is given; None when that is a terminal.

    Raises ValueError where it is not UTF-8 or has no end, OSError.
    """
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        return None
    with contextlib.nullcontext(sys.stdin.buffer) if file is None else file.open("rb") as stream:
        found = stream.read(MOST + 1)
    where = file or "standard input"
    if len(found) > MOST:
        raise ValueError(f"{where} has more than {MOST >> 20} MiB, expected a text")
    try:
        text = io.TextIOWrapper(io.BytesIO(found), encoding="utf-8").read()  # which knows all ends of lines
        return text.removeprefix("\ufeff")  # as files of Windows begin, and training leaves out, too
    except UnicodeDecodeError as error:
        wrong = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"{where}: {wrong}, expected UTF-8 text") from None


def typed(word: str) -> str:
    """A text of the command line: UTF-8, also where the encoding of the locale is another and lacks its characters."""
    try:
        word.encode()
        return word
    except UnicodeEncodeError:
        with contextlib.suppress(UnicodeError):
            return os.fsencode(word).decode("utf-8")
    encoding = sys.getfilesystemencoding()
    wrong = "no UTF-8" if encoding == "utf-8" else f"neither UTF-8 nor {encoding}, the encoding of the locale"
    raise argparse.ArgumentTypeError(f"{word!a} is {wrong}")


def lines_of(text: str) -> list[str]:
    """Lines without their ends. Not splitlines, which also splits at characters that a text may contain."""
    return text.removesuffix("\n").split("\n") if text else []


def plain(rows: NDArray[np.float32]) -> list[list[float]]:
    """Rows of numbers for JSON, as short as tells each float32 from its neighbours."""
    return [[float(f"{x:.9g}") for x in row] for row in rows]
