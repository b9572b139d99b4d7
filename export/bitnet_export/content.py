"""The bytes of a file, read when they are asked for.

Plain reads, not a memory map: what was read does not stay in memory, and a file that is cut short
meanwhile is an error, where a map would end the program with a signal.
"""

from __future__ import annotations

import io
import os
import weakref
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray


class CutShort(OSError):  # noqa: N818  (what happened to the file)
    """A file ends before bytes that it had when it was opened."""


class Content:
    """Bytes of a file, or in memory. size: when it was opened."""

    def __init__(self, file: BinaryIO, what: str) -> None:
        """what: the name of the file in errors."""
        self._file, self._what = file, what
        self.size = file.seek(0, os.SEEK_END)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """A file, open until nothing refers to it any more. Raises OSError."""
        file = open(path, "rb", buffering=0)  # noqa: SIM115
        content = cls(file, os.fspath(path))
        weakref.finalize(content, file.close)
        return content

    @classmethod
    def of(cls, content: bytes | Self) -> Self:
        return content if isinstance(content, cls) else cls(io.BytesIO(content), "the file")  # type: ignore[arg-type]

    def read(self, start: int, size: int) -> NDArray[np.uint8]:
        """`size` bytes from `start` on, within what was there at first. Raises CutShort: it is not there any more."""
        found = np.empty(size, np.uint8)
        rest = found.data
        self._file.seek(start)
        while rest:
            count = self._file.readinto(rest)  # type: ignore[attr-defined]
            if not count:
                raise CutShort(
                    f"{self._what} had {self.size} bytes and ends within the first {start + size} now: it was cut "
                    "short while it was read; begin again when nothing writes to it"
                )
            rest = rest[count:]
        return found
