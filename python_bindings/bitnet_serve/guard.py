"""Access control around the whole application: API key, host, origin."""

from __future__ import annotations

import hmac
import ipaddress
import json
import re
from collections.abc import Iterable

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitnet_runtime.errors import shown
from bitnet_serve.endpoints.sending import send_all
from bitnet_serve.errors import ApiError

_WHOLE = re.compile(r"^https?://[^/]*")  # what stands before a path in the absolute form of RFC 9112
HEALTH = frozenset({"/health", "/v1/health"})
"""Open under any name: probes ask by the address of a machine, or by a name of their own."""
EXPOSED = (b"access-control-expose-headers", b"x-request-id, request-id, retry-after, retry-after-ms")
"""What a page of another site may read of an answer, besides its body."""
OPEN = HEALTH | {"/"}
"""Open without a key: the page, which is empty, and whether the server is up."""


class Guard:
    """Refuses what is not allowed, before anything of a request is read.

    keys: one of them is asked for, unless there are none. hosts: names that the Host header may have; empty: any.
    origins: pages of other sites that may ask. own: names whose pages are ours, whatever the Host header says, as many
    a proxy in front replaces it.
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], hosts: Iterable[str], origins: Iterable[str], own: Iterable[str]
    ) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]
        self._hosts, self._origins, self._own = frozenset(hosts), frozenset(origins), frozenset(map(str.lower, own))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return await self._app(scope, receive, send)
        scope["path"] = _WHOLE.sub("", scope["path"]).rstrip("/") or "/"  # behind TLS a redirect would name http
        headers, cors = dict(scope["headers"]), []
        origin = headers.get(b"origin", b"").decode("latin-1")
        try:
            _check_length(headers)
            if scope["path"] not in HEALTH:
                self._check_host(headers.get(b"host", b"").decode("latin-1"))
            cors = self._check_origin(origin, headers.get(b"host", b"").decode("latin-1"))
            if scope["method"] == "OPTIONS" and cors:
                asked = headers.get(b"access-control-request-headers", b"authorization, content-type")
                allowed = [(b"access-control-allow-methods", b"GET, POST"), (b"access-control-allow-headers", asked)]
                return await send_all(send, 200, "text/plain", b"", [*cors, *allowed])
            if scope["path"] not in OPEN:
                who, address = self._check_key(headers), scope.get("client") or [None]
                scope.setdefault("state", {}).update(who=who, client=address[0] if who is None else who)
        except ApiError as error:
            return await refuse(send, error, scope["path"], cors)

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *cors]
            await send(message)

        await self._app(scope, receive, with_headers if cors else send)

    def _check_host(self, host: str) -> None:
        """Stops DNS rebinding: a page whose name was pointed to this machine sends its own name as Host."""
        if self._hosts and _name(host) not in self._hosts:
            found = f"the Host header is {shown(host, 80)}" if host else "the Host header is missing"
            raise ApiError(403, f"{found}, expected a name of this server; --allow-host NAME adds one", "host")

    def _check_origin(self, origin: str, host: str) -> list[tuple[bytes, bytes]]:
        """CORS headers for a page of another site."""
        if not origin or origin in (f"http://{host}", f"https://{host}"):
            return []
        if origin in self._origins or "*" in self._origins:
            return [(b"access-control-allow-origin", origin.encode("latin-1")), (b"vary", b"origin"), EXPOSED]
        if _name(re.sub("^https?://", "", origin)) in self._own:
            return []
        told = (
            f"pages of {shown(origin, 80)} may not ask, expected this server's own; --cors-origin ORIGIN allows others"
        )
        raise ApiError(403, told, "origin")

    def _check_key(self, headers: dict[bytes, bytes]) -> bytes | None:
        """The key of the request; None: the server needs none."""
        if not self._keys:
            return None
        scheme, _, bearer = headers.get(b"authorization", b"").partition(b" ")
        given = bearer.strip() if scheme.lower() == b"bearer" else headers.get(b"x-api-key", b"")
        if not sum(hmac.compare_digest(given, key) for key in self._keys):  # compare all keys, in constant time
            found = "is wrong" if given else "is missing"
            raise ApiError(401, f"the API key {found}, expected Authorization: Bearer KEY", "invalid_api_key")
        return given


def _name(host: str) -> str:
    """Of a host, without its port."""
    name = host.rpartition(":")[0] if ":" in host and not host.endswith("]") else host
    return name.strip("[]").lower()


def _check_length(headers: dict[bytes, bytes]) -> None:
    """Stops request smuggling: a proxy may follow the other of the two headers (RFC 9112 §6.1)."""
    if headers.keys() >= {b"content-length", b"transfer-encoding"}:
        error = ApiError(400, "the request has Content-Length and Transfer-Encoding, expected one", "invalid_http")
        error.headers["connection"] = "close"
        raise error


def local_hosts(host: str) -> set[str]:
    """What the Host header may say when the server listens on `host`; empty: anything, as others may reach it."""
    names = {"localhost", "127.0.0.1", "::1"}
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = host == "localhost"
    return names | {host} if loopback else set()


async def refuse(send: Send, error: ApiError, path: str, cors: list[tuple[bytes, bytes]]) -> None:
    """Send an error."""
    headers = [(name.encode(), value.encode()) for name, value in error.headers.items()]
    await send_all(send, error.status, "application/json", json.dumps(error.body(path)).encode(), [*headers, *cors])
