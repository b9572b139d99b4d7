"""`generate`, `stream` and `chat` for asyncio: the engine computes in a thread, the loop goes on."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, Self

from bitnet_runtime.generation import Stream, finish
from bitnet_runtime.result import Piece, Result

if TYPE_CHECKING:
    from bitnet_runtime.ids import Prompt
    from bitnet_runtime.model_text import Message


class AsyncStream:
    """`Stream` for `async for`. Cancelling the task that reads ends it within one token, and so does `aclose`."""

    def __init__(self, make: Callable[[], Stream]) -> None:
        self._make = make  # in a thread: texts and grammars take time
        self._stream: Stream | None = None
        self._closed = False
        self._lock = threading.Lock()  # of a thread that makes or reads the stream

    @property
    def result(self) -> Result | None:
        """What was generated, once the stream ended or was closed; None before."""
        return None if self._stream is None else self._stream.result

    async def aclose(self) -> None:
        """Stop. Returns when nothing is computed any more."""
        own = ThreadPoolExecutor(1)  # those of `asyncio.to_thread` are few, and each may make a long answer
        closing = asyncio.get_running_loop().run_in_executor(own, self._close)
        own.shutdown(wait=False)  # it ends when that is done
        await asyncio.shield(closing)

    async def __anext__(self) -> Piece:
        piece: Piece | None = await self._run(lambda stream: next(stream, None))
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def finish(self) -> Result:
        """All of it."""
        result: Result = await self._run(finish)
        return result

    async def _run(self, use: Callable[[Stream], Any]) -> Any:
        try:
            return await asyncio.to_thread(self._use, use)
        except asyncio.CancelledError:
            await self.aclose()
            raise

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


class ModelAsync:
    """The part of `Model` for asyncio."""

    def astream(self, prompt: Prompt, **given: Any) -> AsyncStream:
        """`stream` for `async for`. What is wrong with the arguments is raised with the first piece."""
        model: Any = self
        return AsyncStream(lambda: model.stream(prompt, **given))

    async def agenerate(self, prompt: Prompt, **given: Any) -> Result:
        """`generate` of one prompt. The answers to several take turns, a token each: `asyncio.gather`."""
        return await self.astream(prompt, **given).finish()

    async def achat(self, messages: Sequence[Message], **given: Any) -> Result:
        """`chat`."""
        model: Any = self
        return await AsyncStream(lambda: model.stream_chat(messages, **given)).finish()
