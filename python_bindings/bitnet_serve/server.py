"""Sockets, signals and deadlines: runs the application until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import json
import logging
import os
import signal
import socket
import stat
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bitnet_runtime.errors import InvalidParameterError
from bitnet_serve import body
from bitnet_serve.app import Api
from bitnet_serve.application import Application, Options
from bitnet_serve.errors import ApiError
from bitnet_serve.models.registry import Loader, Served

log = logging.getLogger("bitnet_serve")

HEADERS = 10.0  # seconds until the headers of a request are there
IDLE = 5  # seconds between two requests of a connection
MOST_CONNECTIONS = 512
MOST_SLOW = 128  # of these from one address, whose requests are not whole, or whose answers are not read
MOST_NEW = 384  # of these that came within a second: many may come at once, and have their request read in turn
PROMPT = 1.0
UNREAD = 64 << 10  # bytes that the system keeps for a client that does not read
STALLED = 30.0  # seconds in which a client takes so many, or all that there is
LEAVING = 4.0  # seconds to read the rest when the server ends
EARLY = 64 << 10  # bytes of later requests that may come while a request is answered
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Protocol(H11Protocol):
    """HTTP with deadlines for headers and for readers, and limits of connections."""

    _deadline: asyncio.TimerHandle | None = None
    _patience: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        transport.set_write_buffer_limits(0)  # whatever the system does not take pauses writing
        self.since = self.loop.time()
        self._share()
        if len(self.connections) > MOST_CONNECTIONS and len(self._there()) > MOST_CONNECTIONS:
            transport.write(BUSY)
            transport.close()
        else:
            self._watch()

    def data_received(self, data: bytes) -> None:
        if self.conn.their_state is h11.MUST_CLOSE:  # nothing follows, it has said; old clients send an empty line
            return
        super().data_received(data)
        if self.conn.their_state is h11.DONE and len(self.conn.trailing_data[0]) < EARLY:
            self.flow.resume_reading()  # which the next request has stopped: else nobody sees the client leave
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        self._end_patience()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._wait_for_reader()

    def resume_writing(self) -> None:
        self._end_patience()
        super().resume_writing()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        if self.conn.their_state is h11.SEND_BODY:  # what was refused early has its time to come, and no more
            self.loop.call_later(body.SECONDS, self._end_rest, self.cycle)

    def _end_rest(self, cycle: object) -> None:
        if self.cycle is cycle and self.conn.their_state is h11.SEND_BODY:
            self.transport.abort()

    def shutdown(self) -> None:
        super().shutdown()
        self.loop.call_later(LEAVING, self.transport.abort)

    def send_400_response(self, msg: str) -> None:
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            why = f"this is no HTTP/1.1 request: {sys.exception() or msg}"
            said = json.dumps(ApiError(400, why, "invalid_http").body()).encode()
            headers = [
                ("content-type", "application/json"),
                ("content-length", str(len(said))),
                ("connection", "close"),
            ]
            for event in (h11.Response(status_code=400, headers=headers), h11.Data(data=said), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()  # also where the answer came before the end of the request, which then was none
        if self.cycle and not self.cycle.response_complete:  # what would be answered was a part of it
            self.cycle.disconnected = True
            self.cycle.message_event.set()

    def _there(self) -> list[Protocol]:
        return [each for each in self.connections if isinstance(each, Protocol) and each.is_there]

    def _share(self) -> None:
        """Slow ones of an address only take places from each other: the oldest leave."""
        if len(self.connections) <= MOST_SLOW:
            return
        now = self.loop.time()
        mine = [each for each in self.connections if isinstance(each, Protocol) and each.host == self.host]
        slow = [each for each in mine if each.is_there and each.is_slow]
        slow.sort(key=lambda each: each.since, reverse=True)
        for place, each in enumerate(slow):
            if place >= (MOST_SLOW if now - each.since > PROMPT else MOST_NEW):
                each.transport.abort()
                self.connections.discard(each)  # now, as thousands may come before it is lost: each is compared to all

    @property
    def host(self) -> str | None:
        return self.client[0] if self.client else None

    @property
    def is_there(self) -> bool:
        return not self.transport.is_closing() or self.unread > 0

    @property
    def is_slow(self) -> bool:
        """Whether no whole request is there, or something that is not read."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY) or self.unread > 0

    @property
    def unread(self) -> int:
        """Bytes that the system has no room for."""
        return self.transport.get_write_buffer_size()

    def _watch(self) -> None:
        """The clock runs while headers are incomplete: the first, and those of a later request."""
        if self.conn.their_state is not h11.IDLE:
            self._forget()
        elif self._deadline is None:
            self._deadline = self.loop.call_later(HEADERS, self.transport.abort)

    def _forget(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _wait_for_reader(self) -> None:
        """Not for ever, also where the answer is whole: closing would wait until it is read."""
        self._patience = self.loop.call_later(STALLED, self._look_at_reader, self.unread)

    def _look_at_reader(self, before: int) -> None:
        if before - self.unread < UNREAD:
            self.transport.abort()
        else:
            self._wait_for_reader()

    def _end_patience(self) -> None:
        if self._patience is not None:
            self._patience.cancel()
            self._patience = None


class Server(uvicorn.Server):
    """Stops so that answers that run may end: until then it says 503 to new requests."""

    def __init__(self, config: uvicorn.Config, api: Api, models: Sequence[Served], grace: float) -> None:
        super().__init__(config)
        self._api, self._models, self._grace = api, models, grace
        self._stopping: asyncio.Task[None] | None = None
        self.interrupted = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        with _hearing(signal.SIGHUP, self.handle_exit):  # a terminal that is closed; of the others uvicorn hears
            await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM, SIGHUP and Ctrl-C; a second one ends all answers at once."""
        self.interrupted |= sig == signal.SIGINT
        if self._api.draining:
            self._grace = 0
        self._api.draining = True
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        begin, running = self._loop.time(), sum(each.scheduler.requests for each in self._models)
        if running and self._grace:
            log.warning(
                "Stopping: %d answers have up to %g s more, and new requests are refused; Ctrl-C ends them at once",
                running, self._grace,
            )  # fmt: skip
        while any(each.scheduler.requests for each in self._models) and self._loop.time() < begin + self._grace:
            await asyncio.sleep(0.02)
        for each in self._models:
            await asyncio.to_thread(each.scheduler.close)
        self.should_exit = True


@contextmanager
def _hearing(sent: signal.Signals, handler: Callable[[int, FrameType | None], None]) -> Iterator[None]:
    """As uvicorn does it: in the main thread alone. nohup ignores SIGHUP, and so does its program."""
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(sent) == signal.SIG_IGN:
        yield
        return
    before = signal.signal(sent, handler)
    try:
        yield
    finally:
        signal.signal(sent, before)


class Serving:
    """Models behind a socket, which listens from now on; `run` answers."""

    def __init__(self, models: Mapping[str, Loader], options: Options) -> None:
        self._options = options
        self._socket, self.address = listen(options)
        try:
            self._app = Application(models, options)
        except BaseException:
            self._socket.close()
            raise
        self.models = self._app.models
        config = uvicorn.Config(
            self._app, http=Protocol, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
            server_header=False, timeout_keep_alive=IDLE, timeout_graceful_shutdown=5, proxy_headers=False,
            loop="asyncio",
        )  # fmt: skip
        self._server = Server(config, self._app.api, [*self.models.values()], options.grace)

    def run(self) -> bool:
        """Answer until SIGTERM, Ctrl-C, or `stop`. Returns whether it was Ctrl-C."""
        try:
            self._server.run([self._socket])
        finally:
            self._app.close()
            if self._options.unix:
                self._options.unix.unlink(missing_ok=True)
        return self._server.interrupted

    @property
    def started(self) -> bool:
        return self._server.started

    def stop(self) -> None:
        """What SIGTERM does; from another thread."""
        self._server.handle_exit(signal.SIGTERM, None)


def listen(options: Options) -> tuple[socket.socket, str]:
    """A socket, and the address in words."""
    if options.unix:
        return _listen_unix(options.unix), f"unix:{options.unix}"
    family = socket.AF_INET6 if ":" in options.host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)  # asyncio sends at once if TCP is named
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, UNREAD)  # of its connections
    try:
        sock.bind((options.host, options.port))
        sock.listen(1024)
    except (OSError, OverflowError) as error:  # OverflowError: no such port
        sock.close()
        why = getattr(error, "strerror", None) or str(error).rstrip(".")
        of_port = isinstance(error, OverflowError) or error.errno in (errno.EADDRINUSE, errno.EACCES)
        advice = "--port N takes another" if of_port else "--host takes an address of this machine"
        raise InvalidParameterError(
            f"cannot listen on {options.host}:{options.port}: {why}; {advice}", "port" if of_port else "host"
        ) from None
    host = f"[{options.host}]" if ":" in options.host else options.host
    return sock, f"http://{host}:{sock.getsockname()[1]}"


def _listen_unix(path: Path) -> socket.socket:
    """Only its owner may connect. A socket that nobody listens on any more is replaced."""
    if path.exists() and not stat.S_ISSOCK(path.stat().st_mode):
        raise InvalidParameterError(
            f"{path} is no socket, and is not replaced; name a file that does not exist", "unix"
        )
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and sock.connect_ex(str(path)) == errno.ECONNREFUSED:
            path.unlink()
            sock.close()
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            sock.bind(str(path))
        finally:
            os.umask(before)
        sock.listen(1024)
    except OSError as error:
        sock.close()
        taken = error.errno == errno.EADDRINUSE
        advice = "name another path, or end that server" if taken else "name a short path where you may write"
        raise InvalidParameterError(f"cannot listen on {path}: {error.strerror or error}; {advice}", "unix") from None
    return sock
