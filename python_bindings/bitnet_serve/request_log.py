"""A line for each answer on standard error: who asked, how much, how long it took. Never what was said."""

from __future__ import annotations

import contextlib
import secrets
import time
from datetime import UTC, datetime

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from bitnet_runtime.terminal import escape, say
from bitnet_serve.errors import MESSAGES

LEFT = 499  # the usual status in logs for a client that left before its answer was complete
SHOWN = 100  # characters of a path or a name


class RequestLog:
    """Wraps the whole application, which notes model and tokens in the state of a request's scope."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "POST":  # probes and pages would fill the log
            return await self._app(scope, receive, send)
        begin, name = time.perf_counter(), f"req_{secrets.token_hex(12)}"
        status, ended = LEFT, False
        state = scope.setdefault("state", {})

        async def noted(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                own = [b"request-id"] if scope["path"].startswith(MESSAGES) else []  # where Anthropic's client looks
                message["headers"] = [*message["headers"], *((each, name.encode()) for each in [b"x-request-id", *own])]
            ended = message["type"] == "http.response.body" and not message.get("more_body")
            await send(message)

        try:
            await self._app(scope, receive, noted)
        finally:
            code = LEFT if state.get("left") or not ended else state.get("failed", status)
            self._say(scope, name, code, time.perf_counter() - begin)

    @staticmethod
    def _say(scope: Scope, name: str, status: int, seconds: float) -> None:
        state, (address, *_) = scope["state"], scope.get("client") or ["-"]
        read, made = state.get("tokens", ("-", "-"))
        told = {
            "id": name, "address": address, "path": scope["path"], "model": state.get("model", "-"), "tokens_in": read,
            "tokens_out": made, "seconds": f"{seconds:.3f}", "status": status,
        }  # fmt: skip
        words = (f"{key}={escape(str(value))[:SHOWN].replace(' ', '%20')}" for key, value in told.items())
        with contextlib.suppress(OSError):  # nobody reads it any more, and answers go on
            say(f"{datetime.now(UTC):%Y-%m-%dT%H:%M:%SZ} {' '.join(words)}")
