"""The model in asyncio: the same answers, an event loop that keeps running, and an end within one token."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from bitnet_runtime import InvalidParameterError, Model, Result, Stream
from bitnet_runtime.answers.stream import finish
from bitnet_runtime.sessions.state import all_sessions
from runtime_models import TEMPLATE, scripted_model, slow_model, small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Model.load(small_model(tmp_path_factory.mktemp("models")), threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with Model.load(slow_model(tmp_path_factory.mktemp("slow")), threads=1) as model:
        yield model


def of(model: Model) -> int:
    return sum(session._model is model and session._handle is not None for session in all_sessions())


def test_the_same_answers(model: Model, tmp_path: Path) -> None:
    scripted_model(tmp_path / "chat", [b"Four", b"."], template=TEMPLATE)

    async def main() -> None:
        expected = model.generate("Once", seed=1, max_tokens=20)
        assert (await model.agenerate("Once", seed=1, max_tokens=20)).tokens == expected.tokens
        async with model.astream("Once", seed=1, max_tokens=20) as stream:
            assert stream.result is None
            pieces = [piece async for piece in stream]
        assert "".join(piece.text for piece in pieces) == expected.text
        assert stream.result is not None and stream.result.tokens == expected.tokens
        several = await asyncio.gather(*(model.agenerate("Once", seed=seed, max_tokens=20) for seed in range(8)))
        assert [each.tokens for each in several] == [
            model.generate("Once", seed=seed, max_tokens=20).tokens for seed in range(8)
        ]
        with Model.load(tmp_path / "chat", threads=1) as chatting:
            asked = [{"role": "user", "content": "2 + 2?"}]
            assert (await chatting.achat(asked)).text == "Four."
            assert "".join([piece.text async for piece in chatting.astream_chat(asked)]) == "Four."

    asyncio.run(main())
    assert of(model) == 0


def test_what_is_wrong_is_raised(model: Model) -> None:
    async def main() -> None:
        with pytest.raises(InvalidParameterError, match="temperatur"):
            await model.agenerate("Once", temperatur=1)
        stream = model.astream("Once", top_k=-1)
        with pytest.raises(InvalidParameterError, match="top_k"):
            await anext(stream)
        await stream.aclose()

    asyncio.run(main())


def test_the_loop_goes_on(slow: Model) -> None:
    async def main() -> int:
        ticks = 0
        task = asyncio.create_task(slow.agenerate([1] * 3000, max_tokens=1))
        while not task.done():
            ticks += 1
            await asyncio.sleep(0.001)
        return ticks

    assert asyncio.run(main()) > 5


def test_a_cancelled_task_ends_what_it_reads(slow: Model) -> None:
    async def main() -> None:
        for prompt in ([1], [1] * 40_000):  # among tokens, and within the prompt
            task = asyncio.create_task(slow.agenerate(prompt, max_tokens=20_000))
            await asyncio.sleep(0.3)
            begin = time.perf_counter()
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert time.perf_counter() - begin < 20  # a token, or a piece of the prompt, on a machine that is busy
            assert of(slow) == 0
        stream = slow.astream([1], max_tokens=20_000)
        await anext(stream)
        await stream.aclose()
        assert stream.result is not None and stream.result.finish_reason == "cancelled"
        assert [piece async for piece in stream] == []

    asyncio.run(main())


def test_an_end_waits_for_no_other_answer(slow: Model) -> None:
    """The other answers occupy all threads that asyncio has."""

    async def main() -> None:
        stream = slow.astream([1], max_tokens=20_000)
        await anext(stream)
        others = [asyncio.create_task(slow.agenerate([1, i], max_tokens=20_000)) for i in range(40)]
        await asyncio.sleep(0.3)
        await stream.aclose()
        assert not any(other.done() for other in others)
        for other in others:
            other.cancel()
        await asyncio.gather(*others, return_exceptions=True)

    asyncio.run(main())
    assert of(slow) == 0


def test_a_piece_waits_for_no_other_answer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor for what a program gives to `asyncio.to_thread`."""
    read, begun = threading.Event(), threading.Semaphore(0)

    def held(stream: Stream) -> Result:
        begun.release()
        in_time = read.wait(30)
        read.set()  # one failed wait is enough
        assert in_time
        return finish(stream)

    monkeypatch.setattr("bitnet_runtime.asynchronous.finish", held)

    async def main() -> None:
        others = [asyncio.create_task(model.agenerate([1, i], max_tokens=1)) for i in range(40)]
        await asyncio.sleep(0)
        assert await asyncio.get_running_loop().run_in_executor(ThreadPoolExecutor(1), begun.acquire)
        assert len([piece async for piece in model.astream([1], max_tokens=5)]) == 5
        assert await asyncio.to_thread(len, "abc") == 3
        assert not any(other.done() for other in others)
        read.set()
        assert [len(each.tokens) for each in await asyncio.gather(*others)] == [1] * 40

    asyncio.run(main())


def test_a_stream_leaves_no_thread(model: Model) -> None:
    async def main() -> None:
        streams = [model.astream([1], max_tokens=3) for _ in range(9)]
        for i, stream in enumerate(streams):
            await anext(stream)
            if i % 2:
                await stream.aclose()
            assert len([piece async for piece in stream]) == (0 if i % 2 else 2)
        for thread in {*threading.enumerate()} - before:
            thread.join(30)
            assert not thread.is_alive()

    before = {*threading.enumerate()}
    asyncio.run(main())


class Streamer:
    """Like TextIteratorStreamer of transformers: one thread puts, another reads."""

    def __init__(self) -> None:
        self._queue: queue.Queue[str | None] = queue.Queue()

    def put(self, text: str) -> None:
        self._queue.put(text)

    def end(self) -> None:
        self._queue.put(None)

    def __iter__(self) -> Iterator[str]:
        return iter(self._queue.get, None)


def test_a_streamer_in_another_thread(model: Model) -> None:
    streamer = Streamer()

    def write() -> None:
        for piece in model.stream("Once", seed=2, max_tokens=20):
            streamer.put(piece.text)
        streamer.end()

    thread = threading.Thread(target=write)
    thread.start()
    assert "".join(streamer) == model.generate("Once", seed=2, max_tokens=20).text
    thread.join()
