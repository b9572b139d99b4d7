"""A server in a thread of the test, and plain HTTP requests to it."""

from __future__ import annotations

import contextlib
import json
import socket
import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

from bitnet_runtime import Model
from bitnet_serve.models.registry import Loader
from bitnet_serve.options import Options
from bitnet_serve.server import Serving


@contextlib.contextmanager
def served(*paths: Path, threads: int = 1, adapters: Sequence[Path] = (), **options: Any) -> Iterator[Serving]:
    """Serve these models, by their file names without suffix, until the block ends."""

    def loader(path: Path) -> Loader:
        named = {each.stem: each for each in adapters}

        def load(look: bool, without: Collection[str]) -> Model:
            kept = {name: file for name, file in named.items() if name not in without}
            return Model.load(path, threads=threads, verify=not look, adapters=kept)

        return load

    models = {path.stem: loader(path) for path in paths}
    serving = Serving(models, Options(port=0, **({"grace": 0.0} | options)))
    running = threading.Thread(target=serving.run)
    running.start()
    try:
        wait(lambda: serving.started)
        yield serving
    finally:
        serving.stop()
        running.join(60)
        assert not running.is_alive()


def wait(done: Callable[[], bool], seconds: float = 60) -> None:
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end, f"waited {seconds} s"
        time.sleep(0.005)


def idle(serving: Serving) -> bool:
    """Whether nothing is running or queued."""
    schedulers = [each.scheduler for each in serving.models.values()]
    return all(each.load == (0, 0) and each.requests == 0 for each in schedulers)


def port(serving: Serving) -> int:
    return int(serving.address.rpartition(":")[2])


def request(
    serving: Serving, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
) -> tuple[int, dict[str, str], Any]:
    """Status, headers and JSON (or text) of one request. body: bytes, or what becomes JSON."""
    connection = HTTPConnection("127.0.0.1", port(serving), timeout=30)
    try:
        data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
        kind = {"content-type": "application/json"} if body is not None else {}
        connection.request(method, path, data, kind | (headers or {}))
        response = connection.getresponse()
        text = response.read()
        found = {name.lower(): value for name, value in response.getheaders()}
        is_json = found.get("content-type", "").startswith("application/json")
        return response.status, found, json.loads(text) if is_json else text.decode()
    finally:
        connection.close()


def post(serving: Serving, path: str, body: Any, **headers: str) -> tuple[int, Any]:
    status, _, answer = request(serving, "POST", path, body, headers)
    return status, answer


def connect(serving: Serving, data: bytes = b"") -> socket.socket:
    """A raw connection, over which `data` was sent."""
    connection = socket.create_connection(("127.0.0.1", port(serving)), 20)
    connection.sendall(data)
    return connection


def until(connection: socket.socket, text: bytes) -> bytes:
    """The received bytes, up to and including `text`."""
    seen = b""
    while text not in seen:
        data = connection.recv(10_000)
        assert data, seen[-500:]
        seen += data
    return seen


def as_http(path: str, body: Any) -> bytes:
    """A POST as bytes."""
    data = json.dumps(body).encode()
    head = f"POST {path} HTTP/1.1\r\nhost: localhost\r\ncontent-type: application/json\r\ncontent-length: {len(data)}"
    return head.encode() + b"\r\n\r\n" + data


def events(serving: Serving, path: str, body: Any) -> list[Any]:
    """The data of a stream, with every byte checked."""
    status, headers, text = request(serving, "POST", path, body)
    assert (status, headers["content-type"]) == (200, "text/event-stream; charset=utf-8")
    assert headers["cache-control"] == "no-cache"
    blocks = text.split("\n\n")
    assert blocks[-2:] == ["data: [DONE]", ""]
    assert all(block.startswith("data: {") or block.startswith(": ") for block in blocks[:-2])
    return [json.loads(block.removeprefix("data: ")) for block in blocks[:-2] if not block.startswith(":")]
