"""Stopping running image calls from another thread or a signal handler."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from bitnet_runtime._native import ffi, lib


class Stops:
    """The running calls of one model or session. Any thread or signal handler may end them."""

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
        """End all calls, without waiting."""
        for stop in tuple(self._running):
            lib.bn_stop_now(stop)

    def wait(self) -> None:
        """For those of other threads."""
        for lock in tuple(self._running.values()):
            with lock:
                pass
