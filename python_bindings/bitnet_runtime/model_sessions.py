"""The part of `Model` that makes sessions and closes them."""

from __future__ import annotations

import os
from typing import Any

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import check
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.handles import Closing
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.sessions.state import all_sessions


class ModelSessions(Closing, ModelFacts):
    """Sessions, and the memory that they take."""

    def session(self, n_ctx: int | None = None, *, adapter: str | None = None, draft: bool = True) -> Session:
        """A new session for token-level work, with room for `n_ctx` tokens; None: the model's `n_ctx`. adapter: the
        name of that which its text has. draft: it keeps what draft tokens need, if the model has a draft; that takes
        about the time of one more layer.

        Raises ModelTooLargeError, before any work, if all of it would not fit in memory; the largest
        n_ctx that fits is in the message.
        """
        return Session._new(self, n_ctx, adapter=adapter, draft=draft)

    def load_session(self, path: str | os.PathLike[str]) -> Session:
        """A session that `Session.save` wrote, with the context and the type of cache that it had.

        The file may come from anyone. Raises SessionFileError (also of a session of another model),
        ModelTooLargeError, or OSError.
        """
        return Session._load(self, path)

    def close(self) -> None:
        """Close the model and all its sessions. Closing twice is fine.

        Calls in other threads are cancelled, waited for, and raise ClosedError.
        """
        self._handle = None  # no new sessions from here on
        self._stops.now()
        self._stops.wait()
        for session in all_sessions():
            if session._model is self:
                session._closed = f"the model {self.path.name} is closed; load it again"
                session.close()
        for name in ("_tokenizer", "_template", "_grammars"):  # their processes end with the last who uses them
            vars(self).pop(name, None)


def limit(model: ModelSessions, n_ctx: int) -> None:
    """Make its `n_ctx` this one, where its own is not smaller."""
    model._n_ctx = min(model._n_ctx, n_ctx)


def shrink(model: ModelSessions) -> bool:
    """Make its `n_ctx` one that fits in memory now, an eighth less than the largest: the program needs some, too.

    False: not even one token fits.
    """
    most = int(_memory(model).largest_n_ctx)
    model._n_ctx = min(model._n_ctx, most - most // 8) or model._n_ctx
    return most > 0


def free_memory(model: ModelSessions) -> int:
    """Bytes available to new sessions now: each takes its `nbytes` once its context is full."""
    return int(_memory(model).available)


def _memory(model: ModelSessions) -> Any:
    """`bn_session_memory *` of a session with the model's context."""
    memory, handle = ffi.new("bn_session_memory *"), model._open
    check(lib.bn_session_plan(handle.pointer, model._session_options(), memory))
    return memory
