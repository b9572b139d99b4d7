"""How calls about images that run are ended from elsewhere."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bitnet_runtime._native import ffi, lib


class Stops:
    """The calls of one model, or session. They are ended from any thread, or by a signal handler."""

    def __init__(self) -> None:
        # Changed and copied by single atomic calls only. Locks are re-entrant, for signal handlers.
        self._running: dict[Any, Any] = {}

    @contextmanager
    def call(self) -> Iterator[Any]:
        """A `bn_stop *` for the time of a call. Ask within whether it is to be made at all: what ends it from then
        on finds it here."""
        stop = ffi.new("bn_stop *")
        lock = threading.RLock()
        with lock:
            self._running[stop] = lock
            try:
                yield stop
            finally:
                self._running.pop(stop, None)

    def now(self) -> None:
        """End them, and wait for nothing."""
        for stop in tuple(self._running):
            lib.bn_stop_now(stop)

    def wait(self) -> None:
        """For those of other threads."""
        for lock in tuple(self._running.values()):
            with lock:
                pass
