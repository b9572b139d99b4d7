"""Slow clients, deaf clients, many connections: none of them stalls the others or holds what it does not use."""

from __future__ import annotations

import contextlib
import logging
import socket
import time
from collections.abc import Iterator

import pytest

from bitnet_serve import body, protocol
from bitnet_serve.server import Serving
from runtime_models import slow_model, small_model
from servers import as_http, connect, idle, port, post, request, served, until, wait
from test_serve_load import COMPLETE, LONG


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(small_model(tmp_path_factory.mktemp("models"))) as serving:
        yield serving


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(slow_model(tmp_path_factory.mktemp("slow")), parallel=2, queue=2) as serving:
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


def test_what_is_no_request_behind_its_answer(serving: Serving, logged: list[logging.LogRecord]) -> None:
    """An early refusal, and then chunks that are none."""
    with connect(
        serving, b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
    ) as c:
        until(c, b" 415 ")
        c.sendall(b"no chunk\r\n")
        assert closed_after(c) < 8
    assert not logged


def connections(serving: Serving) -> list[protocol.Protocol]:
    return [each for each in serving._server.server_state.connections if isinstance(each, protocol.Protocol)]


def deaf(serving: Serving, data: bytes) -> socket.socket:
    """A client that sends this, and for which the system keeps little of what comes."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", port(serving)))
    connection.sendall(data)
    return connection
