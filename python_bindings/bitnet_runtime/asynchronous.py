"""`generate`, `stream` and `chat` for asyncio: the engine computes in a thread, so the event loop keeps running."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self
from weakref import WeakKeyDictionary

from bitnet_runtime.answers.result import Piece, Result
from bitnet_runtime.answers.stream import Stream, finish

if TYPE_CHECKING:
    from bitnet_runtime.ids import Prompt
    from bitnet_runtime.model_text import Message


class AsyncStream:
    """`Stream` for `async for`. Cancelling the reading task ends it within one token, as does `aclose`."""

    def __init__(self, make: Callable[[], Stream]) -> None:
        self._make = make  # in a thread: texts and grammars take time
        self._stream: Stream | None = None
        self._closed = False
        self._lock = threading.Lock()  # of a thread that makes or reads the stream
        self._own = ThreadPoolExecutor(1)  # so that a piece waits for nothing else; it has no thread yet

    @property
    def result(self) -> Result | None:
        """What was generated, once the stream ended or was closed; None before, and if it was closed unread."""
        return None if self._stream is None else self._stream.result

    async def aclose(self) -> None:
        """Stop. Returns when the engine has stopped computing for it."""
        another = ThreadPoolExecutor(1)  # its own may be reading
        closing = asyncio.get_running_loop().run_in_executor(another, self._close)
        another.shutdown(wait=False)  # it ends when that is done
        self._rest()
        await asyncio.shield(closing)

    async def __anext__(self) -> Piece:
        piece: Piece | None = await self._run(self._own, lambda stream: next(stream, None))
        if piece is None:
            self._rest()
            raise StopAsyncIteration
        return piece

    async def finish(self) -> Result:
        """All of it."""
        result: Result = await self._run(_of_answers(), finish)
        return result

    async def _run(self, threads: ThreadPoolExecutor, use: Callable[[Stream], Any]) -> Any:
        try:
            return await asyncio.get_running_loop().run_in_executor(threads, self._use, use)
        except asyncio.CancelledError:
            await self.aclose()
            raise

    def _rest(self) -> None:
        """End its thread when that has done what it was given; there is another for whoever asks again."""
        self._own.shutdown(wait=False)
        self._own = ThreadPoolExecutor(1)

    def _use(self, use: Callable[[Stream], Any]) -> Any:
        with self._lock:
            if self._stream is None:
                self._stream = self._make()
            if self._closed:
                self._stream.close()
            return use(self._stream)

    def _close(self) -> None:
        self._closed = True
        if self._stream is not None:
            self._stream.close()  # ends a thread that reads
        with self._lock:  # one that had only begun
            if self._stream is not None:
                self._stream.close()

    def __aiter__(self) -> Self:
        return self

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()


_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, ThreadPoolExecutor] = WeakKeyDictionary()


def _of_answers() -> ThreadPoolExecutor:
    """The threads of a loop in which whole answers are made: a few, as each answer takes a session. Those of
    `asyncio.to_thread` are for what is short."""
    return _pools.setdefault(asyncio.get_running_loop(), ThreadPoolExecutor())


class ModelAsync:
    """The part of `Model` for asyncio."""

    def astream(self, prompt: Prompt, **given: Any) -> AsyncStream:
        """`stream` for `async for`. Wrong arguments raise when the first piece is read."""
        model: Any = self
        return AsyncStream(lambda: model.stream(prompt, **given))

    async def agenerate(self, prompt: Prompt, **given: Any) -> Result:
        """`generate` of one prompt. The answers to several take turns, a token each: `asyncio.gather`."""
        return await self.astream(prompt, **given).finish()

    def astream_chat(self, messages: Sequence[Message], **given: Any) -> AsyncStream:
        """`stream_chat` for `async for`."""
        model: Any = self
        return AsyncStream(lambda: model.stream_chat(messages, **given))

    async def achat(self, messages: Sequence[Message], **given: Any) -> Result:
        """`chat`."""
        return await self.astream_chat(messages, **given).finish()
