"""Clients that leave, long requests, many requests: none stalls the others or holds what it does not use."""

from __future__ import annotations

import json
import re
import select
import socket
import struct
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import runtime_models
from bitnet_runtime import NumericError
from bitnet_runtime.answers.writer import Writer
from bitnet_runtime.sessions.state import all_sessions
from bitnet_serve.models import sessions
from bitnet_serve.models.sessions import Memory, Sessions
from bitnet_serve.server import Serving
from runtime_models import small_model
from servers import as_http, connect, idle, post, request, served, until, wait

COMPLETE = "/v1/completions"
LONG = {"prompt": [1, 2, 3], "max_tokens": 60_000, "temperature": 0}  # for minutes
BIG = {"prompt": [1, 2] * 32_000, "max_tokens": 5}  # minutes until the first token


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(small_model(tmp_path_factory.mktemp("models"))) as serving:
        yield serving


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(runtime_models.slow_model(tmp_path_factory.mktemp("slow")), parallel=2, queue=2) as serving:
        yield serving


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("asked", [LONG, BIG], ids=["decode", "prefill"])
def test_a_client_that_leaves_stops_the_work(slow: Serving, asked: dict[str, Any], stream: bool) -> None:
    scheduler = slow.models["slow"].scheduler
    for _ in range(10):
        before = scheduler.cancelled
        connection = connect(slow, as_http(COMPLETE, asked | {"stream": stream}))
        wait(lambda: scheduler.load[0] == 1)
        if stream and asked is LONG:
            until(connection, b"data: ")
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        wait(lambda: idle(slow))  # seconds, of minutes
        assert scheduler.cancelled == before + 1
    assert sum("closed" not in repr(session) for session in all_sessions()) <= sessions.MOST


@pytest.mark.parametrize("more", [b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n", b"GET /he"])
def test_a_client_that_has_sent_more_and_leaves_stops_the_work(slow: Serving, more: bytes) -> None:
    """To read no further than the next request was not to see it leave."""
    before = slow.models["slow"].scheduler.cancelled
    with connect(slow, as_http(COMPLETE, LONG)) as connection:
        wait(lambda: slow.models["slow"].scheduler.load[0] == 1)
        assert request(slow, "GET", "/health")[0] == 200  # by now the server waits for it to leave
        connection.sendall(more)
    wait(lambda: idle(slow))
    assert slow.models["slow"].scheduler.cancelled == before + 1


def test_requests_sent_ahead_are_answered_in_their_order(slow: Serving) -> None:
    asked = as_http(COMPLETE, {"prompt": "x", "max_tokens": 1})
    with connect(slow, as_http(COMPLETE, {"prompt": "x" * 2000, "max_tokens": 200})) as connection:
        wait(lambda: slow.models["slow"].scheduler.load[0] == 1)
        connection.sendall(asked + as_http(COMPLETE, {"prompt": " " * 100_000}) + asked)
        got = b""
        while got.count(b"HTTP/1.1 ") < 4:
            got += connection.recv(10_000)
    assert re.findall(rb"HTTP/1.1 (\d+)", got) == [b"200", b"200", b"400", b"200"]


def test_an_empty_line_behind_the_last_request_ends_no_answer(slow: Serving) -> None:
    asked = as_http(COMPLETE, {"prompt": "x", "max_tokens": 1000, "ignore_eos": True, "stream": True})
    with connect(slow, asked.replace(b"\r\n", b"\r\nconnection: close\r\n", 1)) as connection:
        until(connection, b"data: ")
        connection.sendall(b"\r\n")
        until(connection, b"[DONE]")


def test_overload_is_refused_at_once(slow: Serving) -> None:
    running = [connect(slow, as_http(COMPLETE, LONG)) for _ in range(4)]
    scheduler = slow.models["slow"].scheduler
    wait(lambda: scheduler.load == (2, 2))
    begin = time.monotonic()
    status, headers, answer = request(slow, "POST", COMPLETE, LONG)
    assert time.monotonic() - begin < 20  # of minutes, on a machine that has other things to do
    assert (status, answer["error"]["code"]) == (503, "overloaded")
    assert 1 <= int(headers["retry-after"]) <= 120
    assert 0.25 <= int(headers["retry-after-ms"]) / 1000 / int(headers["retry-after"]) <= 1
    assert request(slow, "GET", "/health")[0] == 200
    running[3].close()  # it never ran
    wait(lambda: scheduler.load == (2, 1))
    running[0].close()
    wait(lambda: scheduler.load == (2, 0))  # the one that waited is running
    for connection in running:
        connection.close()
    wait(lambda: idle(slow))


def test_a_long_prompt_does_not_stop_who_runs(slow: Serving) -> None:
    """Tokens keep coming while a prompt of minutes is read, and the next in line is read when it is gone."""
    with connect(slow, as_http(COMPLETE, LONG | {"stream": True, "logit_bias": {"65": 100}})) as running:
        until(running, b"data: ")
        with connect(slow, as_http(COMPLETE, BIG)) as reading:
            scheduler = slow.models["slow"].scheduler
            wait(lambda: scheduler.load == (2, 0))
            got = 0
            while got < 20_000:  # many tokens
                got += len(running.recv(10_000))
            assert scheduler.load == (2, 0)
            reading.close()
    wait(lambda: idle(slow))


def test_a_short_prompt_does_not_wait_for_a_long_one(slow: Serving) -> None:
    with connect(slow, as_http(COMPLETE, BIG)) as reading:
        wait(lambda: slow.models["slow"].scheduler.load == (1, 0))
        assert post(slow, COMPLETE, {"prompt": [1] * 300, "max_tokens": 2})[0] == 200
        assert slow.models["slow"].scheduler.load == (1, 0)
        reading.close()
    wait(lambda: idle(slow))


def test_a_request_for_many_answers_leaves_places_to_others(slow: Serving) -> None:
    with connect(slow, as_http(COMPLETE, LONG | {"n": 50, "max_tokens": 300})) as many:
        wait(lambda: slow.models["slow"].scheduler.load == (2, 48))
        assert post(slow, COMPLETE, {"prompt": [1] * 3, "max_tokens": 2})[0] == 200
        assert slow.models["slow"].scheduler.load[1] > 40  # a few have ended meanwhile; behind all of them, it is 0
        many.close()
    wait(lambda: idle(slow))


def test_memory_is_promised_once(tmp_path: Path) -> None:
    """Answers wait for that of others, and one that can never have enough is refused."""
    with served(small_model(tmp_path)) as serving:
        (each,) = serving.models.values()
        with each.model.session() as session:
            most = session.nbytes
        memory = Memory(2 * most + most // 2, 0.5)
        each._sessions = Sessions(each.model, memory)
        found: list[int] = []
        peak = 0
        asked = {"prompt": [1], "max_tokens": 255}
        threads = [threading.Thread(target=lambda: found.append(post(serving, COMPLETE, asked)[0])) for _ in range(6)]
        for thread in threads:
            thread.start()
        while any(thread.is_alive() for thread in threads):
            peak = max(peak, each.scheduler.load[0])
        assert found == [200] * 6 and 1 <= peak <= 3  # one may be computed and not kept
        assert len(memory.kept) == 1
        assert memory.take(2 * most + most // 2, None)  # all are free again, and kept texts were dropped
        assert not memory.kept
        each._sessions = Sessions(each.model, Memory(most // 2, 0))
        status, answer = post(serving, COMPLETE, asked)
        assert (status, answer["error"]["code"]) == (400, "out_of_memory")


def test_an_error_of_one_answer_is_its_own(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    pop = Writer.pop

    def sometimes(writer: Writer) -> Any:
        if len(writer._prompt) == 3 and len(writer._transcript.tokens) == 5:
            raise NumericError("the logits are not numbers")
        return pop(writer)

    monkeypatch.setattr(Writer, "pop", sometimes)
    found: dict[int, tuple[int, Any]] = {}
    sizes = [3, 4, 3, 5, 6, 7]

    def ask(index: int) -> None:
        asked = {"model": "small-0-256", "prompt": [1] * sizes[index], "max_tokens": 50, "stream": index == 0}
        asked["seed"] = 1  # five tokens whose bytes are not all the beginning of a character: a stream has begun
        found[index] = post(serving, COMPLETE, asked)

    threads = [threading.Thread(target=ask, args=(index,)) for index in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found[0][0] == 200 and json.loads(found[0][1].split("data: ")[-1])["error"]["code"] == "engine_error"
    assert (found[2][0], found[2][1]["error"]["type"]) == (500, "server_error")
    assert [found[index][1]["usage"]["completion_tokens"] for index in (1, 3, 4, 5)] == [50] * 4
    wait(lambda: idle(serving))


def test_bodies_that_come_take_memory_that_has_an_end(tmp_path: Path) -> None:
    """Before the server knows which model they ask, and whether there is a place. A client leaves others as much."""
    body = json.dumps({"prompt": [1], "max_tokens": 1, "user": "x" * 900}).encode()
    with served(small_model(tmp_path), max_body=1000, api_keys=["a", "b"]) as serving:

        def begun(key: str) -> socket.socket:
            head = f"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\nauthorization: Bearer {key}\r\n"
            head += f"content-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
            return connect(serving, head.encode() + body[:-1])

        def asked(key: str) -> int:
            return request(serving, "POST", "/v1/completions", body, {"authorization": f"Bearer {key}"})[0]

        every = [begun("a") for _ in range(30)]
        most = 16_000 // (len(body) - 1)
        wait(lambda: len(select.select(every, [], [], 0)[0]) == len(every) - most)
        refused = select.select(every, [], [], 0)[0]
        assert all(b" 503 " in until(each, b"being read; try again later") for each in refused)
        assert (asked("a"), asked("b")) == (503, 200)
        first = next(each for each in every if each not in refused)
        first.sendall(body[-1:])
        assert until(first, b"seed").startswith(b"HTTP/1.1 200")
        for each in every:
            each.close()
        wait(lambda: asked("a") == 200)
