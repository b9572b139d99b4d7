"""Checkpoints are written in a thread of their own, one at a time: steps go on meanwhile."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self


class Saver:
    """What fails there is raised by the next `settle`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._writing: Future[None] | None = None

    @classmethod
    @contextmanager
    def ready(cls) -> Iterator[Self]:
        """Inside, it writes. The block ends when all is written."""
        with ThreadPoolExecutor(1, "checkpoint") as pool:
            saver = cls(pool)
            yield saver
            saver.settle()

    def begin(self, write: Callable[[], None]) -> None:
        """Let it be written; before, the last one has to be settled."""
        assert self._writing is None
        self._writing = self._pool.submit(write)

    def wait(self) -> None:
        """Until all is written, or failed."""
        if self._writing:
            futures.wait([self._writing])

    def settle(self, wait: bool = True) -> None:
        """Raise what failed. wait: until all is written; else only see whether it is."""
        if self._writing and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()
