"""What every session has: its tokens, its lifetime, and cancelling and rewinding."""

from __future__ import annotations

import contextlib
import os
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.defaults import whole
from bitnet_runtime.errors import CancelledError, ClosedError, ContextLengthError, StateError, check, shown
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.handles import Closing, Handle, Unique
from bitnet_runtime.ids import NO_TOKEN
from bitnet_runtime.stops import Stops

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


CANCELLED = "this session was cancelled; rewind() or reset() ends that"


class SessionState(Closing, Unique):
    """The state of a session, and its end."""

    def __init__(self, model: ModelFacts, handle: Handle) -> None:
        self._model = model
        self._handle: Handle | None = handle  # None when closed
        self._cancelled = False
        self._stops = Stops()
        self._closed = "this session is closed; make a new one with Model.session()"
        self._vocab_size = model.vocab_size
        self._lock = threading.RLock()  # re-entrant, for signal handlers
        self._ending = threading.RLock()  # of a Stream that ends or is closed; held for a moment only
        self._token = ffi.new("int32_t *")
        self._note = b""
        self._changes = 0  # by calls other than those of the answer that was begun last
        _sessions[id(self)] = self
        model._open  # noqa: B018  raises if close() came before it could see this session

    def seed(self, seed: int) -> None:
        """Choose tokens with the noise of this seed from now on, 0 to 2**64 - 1.

        Fork a session and seed its copies to have several answers to one text.
        """
        number = whole("seed", seed, 0, 2**64 - 1)
        with self._lock:
            handle = self._open
            self._changes += 1
            lib.bn_session_seed(handle.pointer, number)

    def __setattr__(self, name: str, value: object) -> None:
        if name == "seed":  # an attribute of much else, and here all answers would fail later
            raise AttributeError(f"seed is a method of a session, expected session.seed({shown(value)})")
        super().__setattr__(name, value)

    @property
    def kv_type(self) -> str:
        """The type of numbers in the cache."""
        return str(ffi.string(lib.bn_kv_name(self._ask(lib.bn_session_kv_type))).decode())

    @property
    def adapter(self) -> str | None:
        """The name of the session's adapter, if it has one."""
        number = self._ask(lib.bn_session_adapter)
        return self._model.adapters[number - 1] if number else None

    @property
    def note(self) -> bytes:
        """The note given to `save`; b"" for a session that was neither saved nor loaded."""
        return self._note

    # ---- cancel, forget ----

    def cancel(self) -> None:
        """Stop what this session does. From any thread and at once: it waits for nothing.

        A generation ends with finish_reason "cancelled", and with it the cancelling. Any other call
        raises CancelledError, one that is running after at most 128 more tokens, until `rewind` or
        `reset`. A session that rests stays cancelled for the next generation.
        """
        handle = self._handle  # keeps it, if another thread closes the session
        self._cancelled = True  # before the C library knows, see _cut
        if handle is not None:
            lib.bn_session_cancel(handle.pointer)
        self._stops.now()

    def rewind(self, n: int) -> None:
        """Forget all tokens from position n on; then logits are unavailable until the next append. Ends a `cancel`.

        n is 0, or from `rewind_least` to the position, else it is a StateError.
        """
        with self._lock:
            n = whole("n", n, 0, self.position, ", the position")
            if 0 < n < self.rewind_least:
                raise StateError(
                    f"n is {n}, expected 0 or {self.rewind_least} to {self.position}: a text that came whole cannot "
                    "be cut, and layers with a window have forgotten what is long past; rewind(0) and append again"
                )
            self._cancelled = False
            self._cut(n)

    def repeat(self, n: int) -> None:
        """For measurements at a depth that takes long to compute: hold n tokens, the first 64 of those held again and
        again. Their keys and values are copied, so a step reads as much memory as after any text of n tokens; what
        the model then says means nothing."""
        with self._lock:
            handle = self._open
            self._changes += 1
            self._check(lib.bn_session_repeat(handle.pointer, whole("n", n, lib.BN_REPEATED, self.n_ctx)))

    def reset(self) -> None:
        """Forget all tokens and take seed 0, as a new session does. Ends a `cancel`."""
        with self._lock:
            self.rewind(0)
            self.seed(0)

    def _keep(self, prompt: Sequence[int]) -> int:
        """Forget what the prompt does not begin with, and at least its last token; how many are held then.

        A cancelled session stays so.
        """
        with self._lock:
            held, same = self.tokens, 0
            while same < min(len(held), len(prompt) - 1) and held[same] == prompt[same] != NO_TOKEN:
                same += 1  # vectors may be others
            same = same if same >= self.rewind_least else 0
            self._cut(same)
            return same

    def _resume(self) -> None:
        """End a `cancel`, and forget nothing."""
        with self._lock:
            if self._cancelled and self._handle is not None:
                self.rewind(self.position)

    def _cut(self, n: int) -> None:
        handle = self._open
        self._changes += n < self.position
        check(lib.bn_session_rewind(handle.pointer, n))  # ends a cancel, which may have come this moment
        if self._cancelled:
            lib.bn_session_cancel(handle.pointer)

    # ---- what it holds ----

    @property
    def position(self) -> int:
        """Tokens held."""
        return self._ask(lib.bn_session_position)

    @property
    def rewind_least(self) -> int:
        """The least n besides 0 that `rewind` takes."""
        return self._ask(lib.bn_session_rewind_least)

    @property
    def n_ctx(self) -> int:
        """Tokens that fit."""
        return self._ask(lib.bn_session_context)

    @property
    def tokens(self) -> list[int]:
        """The tokens held, oldest first; -1 for a vector in place of one."""
        with self._lock:
            handle, n = self._open, self.position
            return list(ffi.unpack(lib.bn_session_tokens(handle.pointer), n)) if n else []

    def _ask(self, call: Callable[[Any], int]) -> int:
        """What a function of the library says of the session."""
        with self._lock:
            handle = self._open
            return int(call(handle.pointer))

    def _digests(self, first: int, n: int) -> list[int]:
        """Hashes of the states after the last layer, of n tokens from one on; 0 of those without logits."""
        with self._lock:
            handle = self._open
            return list(ffi.unpack(lib.bn_session_digests(handle.pointer) + first, n))

    @property
    def logits(self) -> NDArray[np.float32] | None:
        """A copy of the row after the last token, float32[vocab_size]; None when there is none."""
        with self._lock:
            handle = self._open
            return None if lib.bn_session_logits(handle.pointer) == ffi.NULL else self._row()

    def _row(self) -> NDArray[np.float32]:
        import numpy as np

        handle = self._open
        row = lib.bn_session_logits(handle.pointer)
        if row == ffi.NULL:
            check(lib.BN_ERR_NUMERIC)
        return np.frombuffer(ffi.buffer(row, 4 * self._vocab_size), np.float32).copy()

    @property
    def nbytes(self) -> int:
        """Memory of the session in bytes, without the scratch memory that all sessions of a model share."""
        return self._ask(lib.bn_session_bytes)

    # ---- life ----

    def close(self) -> None:
        """Free the memory. A call in another thread is cancelled, waited for, and raises ClosedError.

        Closing twice is fine.
        """
        handle, self._handle = self._handle, None
        if handle is not None:
            lib.bn_session_cancel(handle.pointer)
        self._stops.now()
        with self._lock:
            pass

    @property
    def _open(self) -> Handle:
        if self._handle is None:
            raise ClosedError(self._closed)
        return self._handle

    def _go_on(self) -> None:
        """Raises ClosedError or CancelledError."""
        self._open  # noqa: B018  raises
        if self._cancelled:
            raise CancelledError(CANCELLED)

    def _check(self, status: int, n: int = 1) -> None:
        """`errors.check` for a call that appends n tokens."""
        if status == lib.BN_ERR_CONTEXT:
            raise ContextLengthError(self.position + n, self.n_ctx, most=self._model.info.max_context)
        check_all((self,), status)

    def __repr__(self) -> str:
        try:
            return f"<Session {self.position} of {self.n_ctx} tokens>"
        except ClosedError:  # by another thread in between, too
            return "<Session closed>"


def check_all(sessions: Iterable[SessionState], status: int) -> None:
    """`errors.check` of a call with sessions, that tells those cancelled from those closed by another thread."""
    if status == lib.BN_ERR_CANCELLED:
        for session in sessions:
            session._open  # noqa: B018  raises
        raise CancelledError(CANCELLED)
    check(status)


@contextlib.contextmanager
def turns(sessions: Iterable[SessionState]) -> Iterator[None]:
    """Those of all; in one order for all callers, so that none waits in a circle."""
    held = []
    try:
        for session in sorted(sessions, key=id):
            session._lock.acquire()
            held.append(session._lock)
        yield
    finally:
        for lock in held:
            lock.release()


_sessions: weakref.WeakValueDictionary[int, SessionState] = weakref.WeakValueDictionary()


def all_sessions() -> list[SessionState]:
    """The sessions of all models that exist now."""
    return [session for reference in _sessions.valuerefs() if (session := reference()) is not None]


def _after_fork() -> None:
    """In the child: threads that held a lock are not there, and what they were computing is half done."""
    for session in all_sessions():
        session._ending = threading.RLock()
        if session._lock.acquire(blocking=False):
            session._lock.release()
        else:
            session._lock = threading.RLock()
            session._handle = None
            session._closed = "another thread was using this session when the process forked; make a new one"


os.register_at_fork(after_in_child=_after_fork)
