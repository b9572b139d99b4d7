"""Reading an answer while it is generated, from several threads, and ending it early."""

from __future__ import annotations

from typing import Self

from bitnet_runtime.answers.result import Piece, Result
from bitnet_runtime.answers.writer import Writer
from bitnet_runtime.errors import CancelledError, ClosedError, StateError
from bitnet_runtime.handles import Closing, Unique


class Stream(Closing, Unique):
    """Iterator of `Piece`s. `close()`, from any thread, ends it early; afterwards, or at its end, `result` is there.

    Threads that read one stream take turns. A stream that is dropped frees its cache at once.
    """

    def __init__(self, writer: Writer) -> None:
        self._writer, self._session = writer, writer.session
        self._ended = False  # the answer is complete, and its session free
        self._reading = self._closing = False
        self._batched = False  # a batch takes its tokens

    @property
    def result(self) -> Result | None:
        """The result, once the stream has ended or was closed; None before."""
        return self._writer.result() if self._ended else None

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
            self._writer.done = self._ended = True
        if self._writer.owned:
            self._session.close()
        else:
            self._session._resume()  # a cancel was for this answer

    def __next__(self) -> Piece:
        if self._batched and not self._ended:
            raise StateError("this text is one of a batch, which gives its pieces; iterate over the batch")
        with self._session._lock:
            if self._reading:
                raise StateError("a signal handler cannot read a stream that it interrupted")
            self._reading, goes_on = True, False
            try:
                while not self._writer.done:
                    piece = self._writer.advance()
                    if piece.text or piece.reasoning or piece.calls or piece.token is not None:
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
        self._writer.done = True

    def __iter__(self) -> Self:
        return self

    def __repr__(self) -> str:
        writer, answer = self._writer, self._writer._transcript
        state = answer.finish if self._ended else "running" if writer.begun else "not begun"
        return f"<Stream of {len(writer._prompt)} tokens and {len(answer.tokens)} more, {state}>"


def finish(stream: Stream) -> Result:
    """Read a stream to its end, and return the result."""
    with stream:
        for _ in stream:
            pass
    assert stream.result is not None  # it is closed
    return stream.result
