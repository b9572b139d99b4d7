"""Slow clients, clients that leave, many clients: none of them stalls the others or holds what it does not use."""

from __future__ import annotations

import contextlib
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
from bitnet_serve import body, protocol
from bitnet_serve.models import sessions
from bitnet_serve.models.sessions import Memory, Sessions
from bitnet_serve.server import Serving
from runtime_models import small_model
from servers import as_http, connect, idle, port, post, request, served, until, wait

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


def closed_after(connection: socket.socket) -> float:
    begin = time.monotonic()
    connection.settimeout(10)
    try:
        while connection.recv(65536):
            pass
    except ConnectionResetError:
        pass
    return time.monotonic() - begin


def test_slow_clients_are_cut(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "HEADERS", 0.2)
    monkeypatch.setattr(body, "SECONDS", 0.2)
    whole = as_http(COMPLETE, {"prompt": "x"})
    begun = [b"", b"POST /v1/comp", whole[: whole.index(b"\r\n\r\n") + 2]]
    connections = [connect(serving, begin) for begin in begun * 30]
    late = connect(serving, whole[:-2])  # a body that never arrives
    assert request(serving, "GET", "/health")[0] == 200
    for connection in connections:
        assert closed_after(connection) < 8  # not cut: 10 s and more
        connection.close()
    assert b" 408 " in late.recv(1000)
    late.close()
    again = connect(serving, b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")  # slow for the second request
    assert b" 200 " in again.recv(1000)
    again.sendall(b"GET /hea")
    assert closed_after(again) < 8
    again.close()


def test_slow_ones_of_an_address_take_places_from_each_other(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", 20)
    monkeypatch.setattr(protocol, "MOST_SLOW", 8)
    monkeypatch.setattr(protocol, "MOST_NEW", 8)
    monkeypatch.setattr(protocol, "HEADERS", 60)
    whole = as_http(COMPLETE, {"prompt": "x"})
    with contextlib.ExitStack() as stack:
        slow = [stack.enter_context(connect(serving, (whole[:9], whole[:-2])[i % 2])) for i in range(40)]
        other = stack.enter_context(
            socket.create_connection(("127.0.0.1", port(serving)), 10, source_address=("127.0.0.2", 0))
        )
        other.sendall(whole)
        assert b" 200 " in other.recv(1000)
        assert request(serving, "GET", "/health")[0] == 200, "the same address, once it is whole"
        for connection in slow[:32]:
            assert closed_after(connection) < 8, "the oldest left"
        slow[-1].sendall(whole[-2:])
        assert b" 200 " in slow[-1].recv(1000), "the latest have their time"


def test_many_may_come_at_once(serving: Serving) -> None:
    """More than may be slow, and none is: each is answered, whatever the order in which they are read."""
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
    with contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connect(serving, one)) for _ in range(protocol.MOST_SLOW + 100)]
        assert all(b" 200 " in each.recv(1000) for each in connections)


def test_whose_connection_will_not_be_kept_is_told(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 200 clients behind a proxy that asked every 1.5 s, 71 found theirs cut when they asked again."""
    monkeypatch.setattr(protocol, "MOST_KEPT", 4)
    one = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    with contextlib.ExitStack() as stack:
        kept = [stack.enter_context(connect(serving)) for _ in range(4)]
        for each in (*kept, *kept):
            each.sendall(one)
            assert b"connection: close" not in until(each, b"}").lower()
        more = stack.enter_context(connect(serving, one))
        assert b"connection: close" in until(more, b"}").lower()
        assert more.recv(1) == b""
        kept[0].sendall(one)
        assert b"connection: close" not in until(kept[0], b"}").lower(), "there is room again"


def test_new_ones_of_an_address_leave_room_for_others(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "MOST_CONNECTIONS", 20)
    monkeypatch.setattr(protocol, "MOST_SLOW", 4)
    monkeypatch.setattr(protocol, "MOST_NEW", 12)
    monkeypatch.setattr(protocol, "PROMPT", 60)
    with contextlib.ExitStack() as stack:
        begun = [stack.enter_context(connect(serving, b"GET")) for _ in range(40)]
        assert request(serving, "GET", "/health")[0] == 200
        for connection in begun[:27]:
            assert closed_after(connection) < 8, "the oldest left"


def test_thousands_that_come_are_compared_to_those_that_stay(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """And not to all that came before them: for 3,000 the server had no time for others in 20 s."""
    monkeypatch.setattr(protocol, "MOST_SLOW", 10)
    monkeypatch.setattr(protocol, "MOST_NEW", 20)
    monkeypatch.setattr(protocol, "PROMPT", 60)
    looked = 0

    def is_there(each: protocol.Protocol) -> bool:
        nonlocal looked
        looked += 1
        return not each.transport.is_closing()

    monkeypatch.setattr(protocol.Protocol, "is_there", property(is_there))
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            stack.enter_context(connect(serving, b"GET"))
        assert request(serving, "GET", "/health")[0] == 200
    assert 0 < looked <= 201 * 21


def test_a_reader_that_stalls_is_cut(slow: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """Until then its answer waits: only a few events are made."""
    monkeypatch.setattr(protocol, "STALLED", 1.0)
    scheduler = slow.models["slow"].scheduler
    before = scheduler.completion_tokens
    connection = deaf(slow, as_http(COMPLETE, LONG | {"stream": True, "logprobs": 20, "logit_bias": {"65": 100}}))
    wait(lambda: idle(slow) and scheduler.completion_tokens > before, 20)
    assert scheduler.completion_tokens - before < 5000
    connection.close()


def test_answers_that_nobody_reads_hold_no_places(slow: Serving) -> None:
    scheduler = slow.models["slow"].scheduler
    asked = as_http(COMPLETE, LONG | {"stream": True, "logprobs": 20, "logit_bias": {"65": 100}, "n": 2})
    connection = deaf(slow, asked)  # as many as are computed together
    wait(lambda: len(scheduler._running) == 2 and all(task.waits for task in scheduler._running))
    assert post(slow, COMPLETE, {"prompt": "x", "max_tokens": 2})[0] == 200
    assert scheduler.load[0] == 2
    connection.close()
    wait(lambda: idle(slow))


def test_answers_that_nobody_reads_hold_no_sockets(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    """A large answer, many that were requested at once, and answers after which the connection would be closed."""
    monkeypatch.setattr(protocol, "STALLED", 1.0)
    large, page = as_http("/tokenize", {"prompt": "x" * 900_000}), b"GET /openapi.json HTTP/1.1\r\nhost: localhost\r\n"
    one = b"connection: close\r\n"
    with contextlib.ExitStack() as stack:
        for data in (large, large.replace(b"\r\n", b"\r\n" + one, 1), (page + b"\r\n") * 20):
            stack.enter_context(deaf(serving, data))
            wait(lambda: any(each.unread for each in connections(serving)))
        wait(lambda: not connections(serving))


def test_a_reader_that_goes_on_is_no_longer_watched(serving: Serving) -> None:
    with deaf(serving, as_http("/tokenize", {"prompt": "x" * 900_000})) as c:
        wait(lambda: any(each.unread for each in connections(serving)))
        (one,) = connections(serving)
        assert one._patience is not None
        while b"}" not in c.recv(1 << 20):
            pass
        c.sendall(b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n")
        until(c, b"200 OK")  # so the server has seen that all was read
        assert one._patience is None


def test_the_rest_of_what_was_refused_has_its_time(serving: Serving, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(body, "SECONDS", 0.5)
    with connect(
        serving, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    ) as c:
        until(c, b" 415 ")
        c.setblocking(False)
        with pytest.raises(OSError, match=r"reset|[Pp]ipe"):  # it is cut off, though bytes keep coming
            for _ in range(1000):
                c.sendall(b"1\r\nx\r\n")
                time.sleep(0.01)


def test_what_is_no_request_behind_its_answer(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    """An early refusal, and then chunks that are none."""
    with connect(
        serving, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    ) as c:
        until(c, b" 415 ")
        c.sendall(b"no chunk\r\n")
        assert closed_after(c) < 8
    assert not caplog.records


def connections(serving: Serving) -> list[protocol.Protocol]:
    return [each for each in serving._server.server_state.connections if isinstance(each, protocol.Protocol)]


def deaf(serving: Serving, data: bytes) -> socket.socket:
    """A client that sends this, and for which the system keeps little of what comes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port(serving)))
    connection.sendall(data)
    return connection


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
        assert slow.models["slow"].scheduler.load[1] > 40
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
