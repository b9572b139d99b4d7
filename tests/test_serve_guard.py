"""Who may ask a server: keys, names of hosts, origins of pages, and the owner of a socket."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
from collections.abc import Collection
from pathlib import Path
from typing import Any
from unittest.mock import AsyncMock

import pytest
from starlette.types import Receive, Scope, Send

from bitnet_runtime import Model, __version__
from bitnet_serve.guard import Guard
from bitnet_serve.options import Options
from bitnet_serve.server import Serving
from runtime_models import small_model
from servers import as_http, request, served

CHAT, COMPLETE = "/v1/chat/completions", "/v1/completions"


def test_keys_hosts_and_origins(tmp_path: Path) -> None:
    key = {"authorization": "Bearer geheim"}
    origin = "https://good.example"
    with served(small_model(tmp_path), api_keys=["andere", "geheim"], cors_origins=[origin]) as serving:
        for path in ("/health", "/v1/health", "/"):
            assert request(serving, "GET", path)[0] == 200
        assert request(serving, "GET", "/version")[0] == 401
        assert request(serving, "GET", "/version", headers=key)[2] == {"version": __version__}
        assert request(serving, "GET", "/version", headers={"authorization": "bearer geheim"})[0] == 200
        for wrong in ({}, {"authorization": "Bearer x"}, {"authorization": "geheim"}, {"x-api-key": "é" * 5000}):
            status, headers, answer = request(serving, "GET", "/v1/models", headers=wrong)
            assert (status, answer["error"]["code"]) == (401, "invalid_api_key")
            assert headers["www-authenticate"] == "Bearer" and "geheim" not in json.dumps(answer)
        assert request(serving, "GET", "/v1/models", headers=key)[0] == 200
        assert request(serving, "GET", "/v1/models", headers={"x-api-key": "andere"})[0] == 200
        for host in ("evil.example", "evil.example:80", "127.0.0.1.evil.example", ""):
            status, _, answer = request(serving, "GET", "/v1/models", headers=key | {"host": host})
            found = f"the Host header is {host!r}, expected" if host else "the Host header is missing, expected"
            assert status == 403 and answer["error"]["message"].startswith(found)
        for host in ("localhost", "LOCALHOST:1", "[::1]:8080", "[::1]"):
            assert request(serving, "GET", "/v1/models", headers=key | {"host": host})[0] == 200
        for evil in ("https://evil.example", "null"):
            status, headers, answer = request(serving, "GET", "/v1/models", headers=key | {"origin": evil})
            assert answer["error"]["message"].startswith(f"pages of {evil!r} may not ask")
            assert status == 403 and "access-control-allow-origin" not in headers
        _, headers, _ = request(serving, "GET", "/v1/models", headers=key | {"origin": origin})
        assert headers["access-control-allow-origin"] == origin and headers["vary"] == "origin"
        assert "retry-after" in headers["access-control-expose-headers"]
        status, headers, _ = request(serving, "GET", "/v1/models", headers={"origin": origin})
        assert (status, headers["access-control-allow-origin"]) == (401, origin), "the page reads why"
        status, headers, _ = request(serving, "OPTIONS", CHAT, headers={"origin": origin})
        assert status == 200 and headers["access-control-allow-methods"] == "GET, POST"


def test_pages_of_any_site_may_ask_where_all_are_allowed(tmp_path: Path) -> None:
    with served(small_model(tmp_path), cors_origins=["*"]) as serving:
        status, headers, _ = request(serving, "GET", "/v1/models", headers={"origin": "https://any.example"})
        assert (status, headers["access-control-allow-origin"]) == (200, "https://any.example")


def test_a_client_is_a_key_or_else_an_address() -> None:
    """Whose places and turns are counted: those of one key, wherever it asks from, and not of all behind a proxy."""

    def client_of(keys: list[str], given: bytes) -> tuple[object, object]:
        seen: dict[str, Any] = {}

        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            seen.update(scope["state"])

        headers = [(b"authorization", b"Bearer " + given)]
        scope = {"type": "http", "method": "GET", "path": "/version", "headers": headers, "client": ("10.0.0.1", 1)}
        asyncio.run(Guard(app, keys, (), (), ())(scope, AsyncMock(), AsyncMock()))
        return seen["who"], seen["client"]

    assert client_of(["one", "two"], b"two") == (b"two", b"two")
    assert client_of([], b"two") == (None, "10.0.0.1")


def test_an_open_server_may_be_called_by_some_names_alone(tmp_path: Path) -> None:
    """Protects against pages whose host name was made to resolve to this machine, if no key keeps them out."""
    path = small_model(tmp_path)
    for names, found in (([], 200), (["Server.example"], 403)):
        with served(path, host="0.0.0.0", allow_hosts=names) as serving:
            for host, status in (("server.example", 200), ("127.0.0.1:1", 200), ("evil.example", found)):
                asked = {"host": host, "origin": f"http://{host}"}
                assert request(serving, "GET", "/v1/models", headers=asked)[0] == status


def test_probes_ask_by_any_name(tmp_path: Path) -> None:
    """Kubernetes and load balancers ask by the address of a machine, or a name of their own; and nobody else may."""
    with served(small_model(tmp_path), allow_hosts=["server.example"]) as serving:
        for path, status in (("/health", 200), ("/v1/health/", 200), ("/", 403), ("/health/x", 403), ("/version", 403)):
            for host in ("10.1.2.3:8080", "probe"):
                assert request(serving, "GET", path, headers={"host": host})[0] == status
        asked = {"host": "10.1.2.3:8080", "origin": "https://evil.example"}
        assert request(serving, "GET", "/health", headers=asked)[0] == 403, "no page of another site"


def test_a_proxy_may_replace_the_host(tmp_path: Path) -> None:
    """The page comes from its public name, and the proxy asks by that of this machine."""
    other = "https://server.example:1"
    with served(small_model(tmp_path), allow_hosts=["Server.example"], cors_origins=[other]) as serving:
        for origin, status in (
            ("https://server.example", 200), ("http://server.example:81", 200), (other, 200),
            ("https://evil.example", 403), ("http://localhost:1", 403), ("https://server.example.evil.example", 403),
            ("evil://server.example", 403),
        ):  # fmt: skip
            found, headers, _ = request(serving, "GET", "/v1/models", headers={"origin": origin})
            assert found == status
            assert ("access-control-allow-origin" in headers) == (origin == other), "else no page of it may read it"


def test_a_unix_socket_is_its_owners(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    for _ in range(2):  # the second time one is there that nobody listens on
        with served(small_model(tmp_path), unix=path):
            assert path.stat().st_mode & 0o777 == 0o600
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(as_http(COMPLETE, {"prompt": "x"}).replace(b"localhost", b"anything"))
                assert b" 200 " in connection.recv(1000)
            with pytest.raises(ValueError, match="socket: Address already in use; name another path"):
                Serving({}, Options(unix=path))
        assert not path.exists()
        with socket.socket(socket.AF_UNIX) as old:
            old.bind(str(path))
    path.unlink()
    path.write_text("mine")
    with pytest.raises(ValueError, match="is no socket, and is not replaced"):
        Serving({}, Options(unix=path))
    with pytest.raises(ValueError, match="No such file or directory; name a short path"):
        Serving({}, Options(unix=tmp_path / "none" / "socket"))


def test_a_unix_socket_may_be_called_by_some_names_alone(tmp_path: Path) -> None:
    """By a proxy in front, for example, that passes on the name that it was called by."""
    path = tmp_path / "socket"
    with served(small_model(tmp_path), unix=path, allow_hosts=["Server.example"]):
        for host, status in ((b"server.example", b" 200 "), (b"localhost:1", b" 200 "), (b"evil.example", b" 403 ")):
            with socket.socket(socket.AF_UNIX) as connection:
                connection.connect(str(path))
                connection.sendall(as_http(COMPLETE, {"prompt": "x"}).replace(b"localhost", host))
                assert status in connection.recv(1000)


def test_a_server_that_cannot_start_leaves_nothing(tmp_path: Path) -> None:
    def load(look: bool, without: Collection[str]) -> Model:
        raise FileNotFoundError("no model")

    with pytest.raises(FileNotFoundError, match="no model"):
        Serving({"none": load}, Options(unix=tmp_path / "socket"))
    assert not (tmp_path / "socket").exists()
    assert "scheduler of none" not in [thread.name for thread in threading.enumerate()]
