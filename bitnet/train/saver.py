"""Writes checkpoints in a background thread, one at a time, while training continues."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent import futures
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import Self


class Saver:
    """Errors of writing are raised by the next `settle`."""

    def __init__(self, pool: ThreadPoolExecutor) -> None:
        self._pool = pool
        self._writing: Future[None] | None = None

    @classmethod
    @contextmanager
    def ready(cls) -> Iterator[Self]:
        """A context with a saver. It ends when everything is written."""
        with ThreadPoolExecutor(1, "checkpoint") as pool:
            saver = cls(pool)
            yield saver
            saver.settle()

    def begin(self, write: Callable[[], None]) -> None:
        """Start writing; the previous write has to be settled first."""
        assert self._writing is None
        self._writing = self._pool.submit(write)

    def wait(self) -> None:
        """Wait until everything is written, or has failed."""
        if self._writing:
            futures.wait([self._writing])

    def settle(self, wait: bool = True) -> None:
        """Raise the error of a failed write. wait: for the write to end; otherwise only check whether it has."""
        if self._writing and (wait or self._writing.done()):
            writing, self._writing = self._writing, None
            writing.result()
