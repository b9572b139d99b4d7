"""Sockets, signals and deadlines: runs the application until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import logging
import os
import signal
import socket
import stat
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import uvicorn

from bitnet_runtime.errors import InvalidParameterError
from bitnet_serve.app import Api
from bitnet_serve.application import Application
from bitnet_serve.models.registry import Loader, Served
from bitnet_serve.options import Options
from bitnet_serve.protocol import UNREAD, Protocol

log = logging.getLogger("bitnet_serve")

IDLE = 5  # seconds between two requests of a connection
MOST_FILES = 4096  # open at once, if the system allows: those that listen take some thousand connections at a time
SCARCE = (errno.EMFILE, errno.ENFILE)
AGAIN = 60.0  # seconds until a lack of files is told again


class Server(uvicorn.Server):
    """Stops so that answers that run may end: until then it says 503 to new requests."""

    def __init__(self, config: uvicorn.Config, api: Api, models: Sequence[Served], grace: float) -> None:
        super().__init__(config)
        self._api, self._models, self._grace = api, models, grace
        self._stopping: asyncio.Task[None] | None = None
        self.interrupted = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        self._loop.set_exception_handler(_Scarcity())
        with _hearing(signal.SIGHUP, self.handle_exit):  # a terminal that is closed; of the others uvicorn hears
            await super().serve(sockets)

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """As uvicorn does it, but Ctrl-C stays ignored where it is: in the background of a script, for example."""
        ignored = signal.getsignal(signal.SIGINT) == signal.SIG_IGN
        with super().capture_signals():
            if ignored and threading.current_thread() is threading.main_thread():
                signal.signal(signal.SIGINT, signal.SIG_IGN)
            yield

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
                "Stopping: answers that run (%d) have up to %g s more, and new requests are refused; Ctrl-C ends them",
                running, self._grace,
            )  # fmt: skip
        while any(each.scheduler.requests for each in self._models) and self._loop.time() < begin + self._grace:
            await asyncio.sleep(0.02)
        for each in self._models:
            await asyncio.to_thread(each.scheduler.close)
        self.should_exit = True


class _Scarcity:
    """Tells in a line that no connection can be accepted: asyncio writes a traceback for each it tries, thousands."""

    _told = -AGAIN

    def __call__(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        error = context.get("exception")
        if isinstance(error, ValueError) and "_start_serving" in context["message"]:
            return  # it tries again, once for each, and the server has stopped meanwhile
        if not (isinstance(error, OSError) and error.errno in SCARCE):
            loop.default_exception_handler(context)
        elif loop.time() >= self._told + AGAIN:
            self._told = loop.time()
            log.error("New connections wait: %s; raise the limit, as `ulimit -n %d` does", error.strerror, MOST_FILES)


def _allow_files() -> None:
    """As many as may be needed: many systems give a program fewer, unless it asks."""
    import resource  # Windows lacks it

    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = MOST_FILES if hard == resource.RLIM_INFINITY else min(MOST_FILES, hard)
    if soft != resource.RLIM_INFINITY and soft < most:
        resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))


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
            self._leave()
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
        _allow_files()
        try:
            self._server.run([self._socket])
        finally:
            self._app.close()
            self._leave()
        return self._server.interrupted

    def _leave(self) -> None:
        self._socket.close()
        if self._options.unix:
            self._options.unix.unlink(missing_ok=True)

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
