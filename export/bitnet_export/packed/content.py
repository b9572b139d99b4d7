"""The bytes of a file, read on demand.

Plain reads, not a memory map: bytes that were read do not stay in memory, and a file that is truncated
meanwhile is an error, whereas a map would kill the program with a signal.
"""

from __future__ import annotations

import os
import weakref
from typing import BinaryIO, Self

import numpy as np
from numpy.typing import NDArray


class CutShort(OSError):  # noqa: N818  (names what happened to the file)
    """A file ends before bytes that it had when it was opened: it was truncated."""


class Content:
    """Bytes of a file, or in memory. size: when it was opened. Threads and forked processes may read concurrently."""

    def __init__(self, source: BinaryIO | memoryview, what: str) -> None:
        """source: a file that stays open, or its content. what: its name in errors."""
        self._source, self._what = source, what
        self.size = source.nbytes if isinstance(source, memoryview) else source.seek(0, os.SEEK_END)

    @classmethod
    def open(cls, path: str | os.PathLike[str]) -> Self:
        """A file, open until nothing refers to it any more. Raises OSError."""
        file = open(path, "rb", buffering=0)  # noqa: SIM115
        content = cls(file, os.fspath(path))
        weakref.finalize(content, file.close)
        return content

    @classmethod
    def of(cls, content: bytes | Self) -> Self:
        return content if isinstance(content, Content) else cls(memoryview(content).cast("B"), "the file")

    def read(self, start: int, size: int) -> NDArray[np.uint8]:
        """`size` bytes from `start` on, within the original size. Raises CutShort if they are no longer there."""
        if isinstance(self._source, memoryview):
            return np.array(self._source[start : start + size])
        found = np.empty(size, np.uint8)
        done, descriptor = 0, self._source.fileno()
        while done < size:
            # a positioned read: the file position is shared by everyone who has it open
            count = os.preadv(descriptor, [found.data[done:]], start + done)
            if not count:
                raise CutShort(
                    f"{self._what} had {self.size} bytes and ends within the first {start + size} now: it was cut "
                    "short while it was read; start again when nothing writes to it"
                )
            done += count
        return found
