"""What a server refuses before it looks into a body: what is no HTTP, two lengths of a body, and too large ones."""

from __future__ import annotations

import contextlib
import json
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from bitnet_serve import application, protocol
from bitnet_serve.server import Serving
from runtime_models import small_model
from servers import connect, post, request, served, until, wait

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    with served(small_model(tmp_path_factory.mktemp("models"))) as serving:
        yield serving


def test_two_lengths_of_a_body(serving: Serving) -> None:
    """A proxy may go by the other one, and what one takes for the body be a request for the next."""
    with connect(serving) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: 5\r\n"
            b"transfer-encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
        )
        found = b""
        while some := connection.recv(10_000):
            found += some
    assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1") == 1
    assert b"has Content-Length and Transfer-Encoding, expected one" in found


def test_huge_bodies(serving: Serving) -> None:
    status, answer = post(serving, CHAT, b" " * (application.TEXT_BODY + 1))
    assert (status, answer["error"]["code"]) == (413, "body_too_large")
    with connect(serving) as connection:  # in chunks, without a length
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n")
        connection.sendall(b"transfer-encoding: chunked\r\n\r\n")
        try:
            for _ in range(40):
                connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")
        except OSError:  # the answer came before the end
            return
        assert b" 413 " in connection.recv(100)
    with connect(serving, b"GET / HTTP/1.1\r\nx: " + b"y" * 100_000) as connection:
        assert connection.recv(100).startswith(b"HTTP/1.1 400")


def test_the_longest_headers_that_are_taken(serving: Serving) -> None:
    """Also where they come as a whole, in one read."""
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nx: %s\r\n\r\n"
    room = protocol.MOST_HEADERS - len(head % b"")
    with connect(serving, head % (b"y" * room)) as connection:
        assert until(connection, b"}").startswith(b"HTTP/1.1 200")
        connection.sendall(head % (b"y" * (room + 1)))
        answer = until(connection, b"}}")
    assert answer.startswith(b"HTTP/1.1 400")
    assert b"its headers have 65,537 bytes, expected at most 65,536" in answer


def test_a_body_does_not_come_in_crumbs(serving: Serving) -> None:
    """A chunk of a byte costs as much as a large one: of two clients that sent such, the event loop stood for 10 s."""
    head = "POST {} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
    prompt, crumb = b'{"prompt": "x", "max_tokens": 1}', b"1\r\n \r\n"
    end = b"%x\r\n%s\r\n0\r\n\r\n" % (len(prompt), prompt)
    with connect(serving, head.format(COMPLETE).encode() + crumb * (protocol.MOST_CRUMBS - 1) + end) as connection:
        assert b" 200 " in connection.recv(1000)
        large = b"%x\r\n%s\r\n" % (protocol.CRUMB, b" " * protocol.CRUMB)
        connection.sendall(head.format(COMPLETE).encode() + large * 4000 + crumb * 100 + end)
        until(connection, b'"finish_reason": "length"')
    for path in (COMPLETE, "/nothing"):  # the second is answered before its body has come
        with connect(serving, head.format(path).encode()) as connection:
            if path == "/nothing":
                until(connection, b'"not_found"}}')
            connection.sendall(crumb * (protocol.MOST_CRUMBS + 1))
            rest = b""
            with contextlib.suppress(ConnectionResetError):
                while some := connection.recv(10_000):
                    rest += some
            assert (path == "/nothing") or b"expected larger chunks" in rest


def test_a_body_with_room_for_pictures_has_no_more_values(tmp_path: Path) -> None:
    """16 MiB of empty lists took seconds in which nothing else ran."""
    with served(small_model(tmp_path), max_body=4 << 20) as serving:
        n = (4 << 20) - 100
        for filled, status in ((b'"' + b"a" * n + b'"', 400), (b"[" + b"[]," * (n // 3) + b"[]]", 413)):
            found, answer = post(serving, COMPLETE, b'{"prompt": "x", "unknown": ' + filled + b"}")
            assert (found, "commas and brackets" in answer["error"]["message"]) == (status, status == 413)


@pytest.mark.parametrize("head", [b"content-length: %d\r\n\r\n", b"transfer-encoding: chunked\r\n\r\n%x\r\n"])
@pytest.mark.parametrize(("more", "status"), [(0, b"400"), (1, b"413")])
def test_the_largest_body_that_is_taken(serving: Serving, head: bytes, more: int, status: bytes) -> None:
    n = application.TEXT_BODY + more
    sent = b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\n" + head % n
    with connect(serving, sent + b" " * n + b"\r\n0\r\n\r\n" * (b"chunked" in head)) as connection:
        assert until(connection, b"\r\n").split()[1] == status


@pytest.mark.parametrize(
    ("sent", "said"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "Missing mandatory Host"),
        (b"POST /v1/completions HTTP/1.1\r\nhost: localhost\r\ncontent-length: -1\r\n\r\n", "bad Content-Length"),
        (b"hello\r\n\r\n", "illegal request line"),
    ],
)
def test_what_is_no_http_is_told_so_in_the_form_of_all_errors(serving: Serving, sent: bytes, said: str) -> None:
    with connect(serving, sent) as connection:
        head, _, answer = until(connection, b"}}").partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 400") and b"application/json" in head
        assert said in json.loads(answer)["error"]["message"]
        assert not connection.recv(100)


@pytest.mark.parametrize("kind", ["text/plain", "application/json"])
def test_what_is_no_body_is_answered_once(serving: Serving, logged: list[logging.LogRecord], kind: str) -> None:
    """Whether the request was to be refused or not: else its answer came behind this one, and as a traceback."""
    head = f"POST {COMPLETE} HTTP/1.1\r\nhost: localhost\r\ncontent-type: {kind}\r\ntransfer-encoding: chunked\r\n\r\n"
    with connect(serving, head.encode() + b"no length\r\n") as connection:
        found = b""
        while some := connection.recv(10_000):
            found += some
    wait(lambda: not serving._server.server_state.tasks)
    assert found.startswith(b"HTTP/1.1 400") and found.count(b"HTTP/1.1 4") == 1
    assert b'"invalid_http"' in found
    assert not logged


def test_a_target_may_name_the_server(serving: Serving) -> None:
    """As requests to a proxy do (RFC 9112, 3.2.2)."""
    for target in ("http://localhost/health", "http://localhost:80/health?x=1", "http://localhost"):
        assert request(serving, "GET", target)[0] == 200
    assert request(serving, "GET", "http://localhost/nothing")[0] == 404
    for target in ("/http://localhost/health", "/healthhttp://localhost"):
        assert request(serving, "GET", target)[0] == 404
