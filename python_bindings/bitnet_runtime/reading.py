"""Reading an answer while it is generated, from several threads, and ending it early."""

from __future__ import annotations

from typing import Self

from bitnet_runtime.errors import CancelledError, ClosedError, StateError
from bitnet_runtime.handles import Closing, Unique
from bitnet_runtime.result import Piece
from bitnet_runtime.session import Session


class Reading(Closing, Unique):
    """Iterator of pieces, which threads read in turns and any of them may close."""

    def __init__(self, session: Session, owned: bool) -> None:
        """owned: the session ends with the answer."""
        self._session, self._owned = session, owned
        self._done = False  # the answer is complete
        self._ended = False  # and its session free
        self._reading = self._closing = False

    def _advance(self) -> Piece:
        """One token further."""
        raise NotImplementedError

    def close(self) -> None:
        """Stop, from any thread: no token after the one that is being computed, and no rest of the prompt.

        Returns when that one is done. Closing twice is fine.
        """
        with self._session._ending:  # a cancel after the end would stop what the session does next
            if self._ended:
                return
            self._closing = True
            self._session.cancel()
        with self._session._lock:
            if not self._reading:  # else this is a signal handler, and __next__ ends it
                self._end()

    def _end(self) -> None:
        with self._session._ending:
            if self._ended:
                return
            self._done = self._ended = True
        if self._owned:
            self._session.close()
        else:
            self._session._resume()  # a cancel was for this answer

    def __next__(self) -> Piece:
        with self._session._lock:
            if self._reading:
                raise StateError("a signal handler cannot read a stream that it interrupted")
            self._reading, goes_on = True, False
            try:
                while not self._done:
                    piece = self._advance()
                    if piece.text or piece.calls or piece.token is not None:
                        goes_on = not self._closing
                        return piece
            except (CancelledError, ClosedError) as error:
                self._stop(error)
            finally:
                self._reading = False
                if not goes_on:
                    self._end()
        raise StopIteration

    def _stop(self, error: CancelledError | ClosedError) -> None:
        """End the answer, or raise the error if not the stream but its session or model was closed."""
        if isinstance(error, ClosedError) and not self._ended:
            raise error
        self._done = True

    def __iter__(self) -> Self:
        return self
