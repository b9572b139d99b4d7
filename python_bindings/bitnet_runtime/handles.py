"""Who frees the C objects, and when.

The C library wants every session freed before its model. Python collects in any order, so the
model's `Handles` knows all its sessions and frees those first; whoever comes later finds
nothing left to free.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from bitnet_runtime._native import lib


class Handles:
    """One `bn_model *` and the `bn_session *` made from it."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.closed = False
        self.lock = threading.RLock()  # re-entrant: a finalizer can run while it is held
        self._sessions: dict[int, Any] = {}
        self._next = 0

    def add(self, session: Any, owner: object) -> int:
        """Take over a new `bn_session *`, freed at the latest when `owner` is collected."""
        with self.lock:
            self._next += 1
            self._sessions[self._next] = session
            weakref.finalize(owner, self.free, self._next).atexit = False
            return self._next

    def free(self, key: int) -> None:
        with self.lock:
            session = self._sessions.pop(key, None)
            if session is not None:
                lib.bn_session_free(session)

    def close(self) -> None:
        with self.lock:
            for key in list(self._sessions):
                self.free(key)
            model, self.model, self.closed = self.model, None, True
            if model is not None:
                lib.bn_model_close(model)
