"""Stopping: from any thread, at any moment, and what a dropped stream leaves behind."""

from __future__ import annotations

import gc
import operator
import signal
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import runtime_models
from bitnet_runtime import CancelledError, ClosedError, Model, Result, Session
from bitnet_runtime._native import lib
from bitnet_runtime.answers.together import IN_FLIGHT, generate_batch
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.handles import Handle
from bitnet_runtime.sessions.state import all_sessions
from runtime_models import small_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model.load(small_model(tmp_path_factory.mktemp("models")), threads=1) as model:
        yield model


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Model]:
    with Model.load(runtime_models.slow_model(tmp_path_factory.mktemp("slow")), threads=1) as model:
        yield model


class Background(threading.Thread):
    """A call in another thread, and what came of it."""

    def __init__(self, call: Callable[[], Any]) -> None:
        super().__init__(daemon=True)
        self.call = call
        self.found: Any = None
        self.start()

    def run(self) -> None:
        try:
            self.found = self.call()
        except Exception as error:
            self.found = error

    def end(self) -> Any:
        self.join(60)
        assert not self.is_alive()
        return self.found


def wait_for(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.001)


def held(session: Session) -> int:
    """Tokens in a session, without waiting for its turn."""
    return int(lib.bn_session_position(session._handle.pointer)) if session._handle else 0


@pytest.mark.parametrize("draft", [0, 4])
def test_a_cancel_ends_a_generation_and_with_it_itself(slow: Model, draft: int) -> None:
    with slow.session() as session:
        running = Background(lambda: slow.generate([1] * 8, max_tokens=None, session=session, draft=draft))
        wait_for(lambda: held(session) > 50)
        session.cancel()
        result = running.end()
        assert result.finish_reason == "cancelled"
        assert 40 < len(result.tokens) < slow.n_ctx - 8
        assert slow.generate([1], max_tokens=3, session=session).finish_reason == "length"


def test_a_close_that_comes_late_spares_the_next_answer(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """It found the answer unfinished; before it cancels, the answer ends and the session's next one begins."""
    session, cancel = model.session(), Session.cancel
    stream = model.stream([1, 2, 3], max_tokens=3, session=session)
    next(stream)
    found: list[Background] = []

    def rest() -> list[Result]:
        list(stream)
        return [model.generate([1, 2, 3], max_tokens=20, session=session) for _ in range(2)]

    def late(session: Session) -> None:
        monkeypatch.setattr(Session, "cancel", cancel)
        found.append(Background(rest))
        found[0].join(0.5)  # as far as it gets
        cancel(session)

    monkeypatch.setattr(Session, "cancel", late)
    stream.close()
    assert [len(result.tokens) for result in found[0].end()] == [20, 20]
    assert stream.result is not None and stream.result.finish_reason in ("length", "cancelled")
    assert len(model.generate([1, 2, 3], max_tokens=20, session=session).tokens) == 20


def test_a_cancel_ends_a_prompt(slow: Model) -> None:
    with slow.session() as session:
        running = Background(lambda: slow.generate([1] * 60_000, session=session))
        wait_for(lambda: held(session) > 0)
        session.cancel()
        result = running.end()
        assert (result.finish_reason, result.tokens) == ("cancelled", [])
        assert 0 < session.position < 60_000


def test_a_cancel_that_comes_before_the_generation(model: Model) -> None:
    plain = model.generate([1, 2, 3], max_tokens=5, seed=1)
    with model.session() as session:
        session.feed([1, 2, 9])
        session.cancel()
        result = model.generate([1, 2, 3], max_tokens=5, seed=1, session=session)
        assert (result.finish_reason, result.tokens, result.text) == ("cancelled", [], "")
        assert model.generate([1, 2, 3], max_tokens=5, seed=1, session=session).tokens == plain.tokens


def test_single_calls_stay_cancelled_until_rewind(model: Model) -> None:
    with model.session() as session:
        session.append([1, 2, 3])
        session.cancel()
        calls = (
            lambda: session.append([1]),
            lambda: session.append([1], "all"),
            lambda: session.feed([1]),
            lambda: session.score([1]),
            session.sample,
            lambda: session.step(1),
        )
        for call in calls:
            with pytest.raises(CancelledError, match=r"rewind\(\) or reset\(\)"):
                call()
        assert session.tokens == [1, 2, 3]
        session.rewind(3)
        session.step(session.sample(temperature=0))
        session.cancel()
        session.reset()
        session.feed([1])


def test_a_loop_of_single_tokens_is_stopped(slow: Model) -> None:
    with slow.session() as session:

        def loop() -> None:
            while True:
                session.feed([1])
                session.step(2)

        for _ in range(5):
            running = Background(loop)
            wait_for(lambda: held(session) > 2)
            session.cancel()
            assert isinstance(running.end(), CancelledError)
            session.reset()


def test_a_stream_is_closed_by_another_thread(slow: Model) -> None:
    stream = slow.stream([1] * 8, max_tokens=None)
    running = Background(lambda: [piece.token for piece in stream])
    wait_for(lambda: len(stream._writer._transcript.tokens) > 20)
    stream.close()
    result = stream.result
    assert result is not None
    assert result.finish_reason == "cancelled"
    assert running.end() == result.tokens
    with pytest.raises(StopIteration):
        next(stream)
    stream.close()


def test_a_stream_is_closed_within_its_prompt_and_leaves_a_session_usable(slow: Model) -> None:
    with slow.session() as session:
        stream = slow.stream([1] * 60_000, session=session)
        running = Background(lambda: list(stream))
        wait_for(lambda: held(session) > 0)
        stream.close()
        assert running.end() == []
        assert session.position < 60_000
        session.feed([1])


def test_many_threads_close_one_stream(model: Model) -> None:
    for _ in range(20):
        stream = model.stream([1], max_tokens=None)
        readers = [Background(lambda stream=stream: sum(1 for _ in stream)) for _ in range(2)]
        closers = [Background(stream.close) for _ in range(4)]
        assert [closer.end() for closer in closers] == [None] * 4
        read = [reader.end() for reader in readers]
        assert stream.result is not None
        assert sum(read) == len(stream.result.tokens)


def test_cancel_and_close_in_two_threads(model: Model) -> None:
    for _ in range(200):
        session = model.session(n_ctx=8)
        cancelling = Background(lambda session=session: [session.cancel() for _ in range(20)])
        session.close()
        assert cancelling.end() == [None] * 20


@pytest.mark.parametrize("what", ["stream", "session", "model"])
def test_closed_by_a_signal_handler(tmp_path: Path, what: str) -> None:
    """It runs between two steps of a call, which must not go on with freed memory."""
    for _ in range(5):
        with Model.load(small_model(tmp_path), threads=1) as model, model.session() as session:
            stream = model.stream([1], max_tokens=None, session=session if what == "session" else None)
            closes = {"stream": stream, "session": session, "model": model}[what].close
            before = signal.signal(signal.SIGALRM, lambda *_, closes=closes: closes())
            try:
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                if what == "stream":
                    list(stream)
                    assert stream.result is not None
                else:
                    with pytest.raises(ClosedError):
                        while True:
                            list(stream)
                            stream = model.stream([1], max_tokens=None, session=session)
            finally:
                signal.setitimer(signal.ITIMER_REAL, 0)
                signal.signal(signal.SIGALRM, before)


def test_a_signal_handler_closes_a_stream_within_its_prompt(slow: Model) -> None:
    with slow.session() as session:
        stream = slow.stream([1] * 60_000, session=session)
        before = signal.signal(signal.SIGALRM, lambda *_: stream.close())
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.1)
            assert list(stream) == []
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        assert stream.result is not None
        assert session.position < 60_000
        session.feed([1])


def test_one_of_a_batch_is_cancelled(slow: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 300, "seed": 3}
    alone = [slow.generate([token], **options) for token in range(3)]
    with slow.session() as session:
        streams = [slow.stream([0], **options), slow.stream([1], session=session, **options)]
        streams += [slow.stream([2], **options), slow.stream([3], **options)]
        running = Background(lambda: generate_batch(partial(operator.getitem, streams, i) for i in range(4)))
        wait_for(lambda: held(session) > 5)
        session.cancel()
        streams[3].close()
        results: list[Result] = running.end()
    assert [result.finish_reason for result in results] == ["length", "cancelled", "length", "cancelled"]
    assert [results[i].tokens for i in (0, 2)] == [alone[i].tokens for i in (0, 2)]
    assert results[1].tokens == alone[1].tokens[: len(results[1].tokens)]


def count_handles() -> int:
    return sum(type(thing) is Handle for thing in gc.get_objects())


@pytest.mark.usefixtures("quick_gc")
@pytest.mark.parametrize("start", ["", "next", "for", "all"])
def test_a_dropped_stream_frees_its_cache_at_once(model: Model, start: str) -> None:
    gc.collect()
    gc.disable()
    try:
        before, handles = len(all_sessions()), count_handles()
        for _ in range(5):
            stream = model.stream([1, 2], max_tokens=3, draft=2)
            if start == "next":
                next(stream)
            elif start == "for":
                for _piece in stream:
                    break
            elif start == "all":
                list(stream)
            del stream
            assert len(all_sessions()) == before
            assert count_handles() == handles
    finally:
        gc.enable()


@pytest.mark.usefixtures("quick_gc")
def test_a_long_list_of_prompts_holds_few_sessions(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    most, before, new_session = 0, count_handles(), Session._new

    def counted(of: ModelFacts, n_ctx: int | None = None, **options: Any) -> Session:
        nonlocal most
        session = new_session(of, n_ctx, **options)
        most = max(most, count_handles() - before)
        return session

    monkeypatch.setattr(Session, "_new", counted)
    prompts = [[1 + i % 7] * (1 + i % 5) for i in range(4 * IN_FLIGHT)]
    sampling: dict[str, Any] = {"max_tokens": 12, "seed": 2, "logit_bias": {5: 6.0}, "stop": "\x05\x05"}
    together = model.generate(prompts, **sampling)
    assert most == IN_FLIGHT
    alone = [model.generate(prompt, **sampling) for prompt in prompts]
    assert [(r.tokens, r.text, r.finish_reason, r.usage) for r in together] == [
        (r.tokens, r.text, r.finish_reason, r.usage) for r in alone
    ]
    assert len({len(result.tokens) for result in together}) > 1  # they end at different times
