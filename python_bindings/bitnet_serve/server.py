"""Sockets, signals and deadlines: runs the application until it is told to stop."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import socket
import stat
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from bitnet_runtime.errors import InvalidParameterError
from bitnet_runtime.model import Model
from bitnet_serve.app import Api
from bitnet_serve.guard import Guard, local_hosts
from bitnet_serve.models import Loader, Served
from bitnet_serve.scheduler import Scheduler
from bitnet_serve.sessions import Memory, Sessions
from bitnet_serve.shelf import Shelf
from bitnet_serve.stored import Folder

HEADERS = 10.0  # seconds until the headers of a request are there
IDLE = 5  # seconds between two requests of a connection
MOST_CONNECTIONS = 512
MOST_COMING = 128  # of these from one address, whose requests are not whole
UNREAD = 64 << 10  # bytes that the system keeps for a client that does not read
TEXT_BODY, IMAGE_BODY = 1 << 20, 16 << 20  # bytes of a request, where no model sees images and where one does
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


@dataclass(frozen=True)
class Options:
    """How to serve."""

    host: str = "127.0.0.1"
    port: int = 8080  # 0: any that is free
    unix: Path | None = None  # a socket in place of host and port
    api_keys: Sequence[str] = ()
    allow_hosts: Sequence[str] = ()
    cors_origins: Sequence[str] = ()
    parallel: int = 16  # answers of a model that are computed together
    queue: int = 64  # requests that may wait
    grace: float = 30.0  # seconds that answers get to end after SIGTERM
    max_body: int = 0  # bytes; 0: as the models need
    max_cache: int = 0  # bytes of the texts of all models; 0: what is free
    models_memory: int = 0  # bytes of the files of models that are loaded; 0: three quarters of what is free
    cache_dir: Path | None = None  # for texts that are kept while a model is not loaded
    cache_dir_size: int = 1_000_000_000  # bytes
    reuse: bool = True  # what was computed of texts that begin alike; between keys never


class Protocol(H11Protocol):
    """HTTP with a deadline for headers, and limits of connections."""

    _deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn has it
        super().connection_made(transport)
        self.since = self.loop.time()
        self.app_state = {**self.app_state, "abort": transport.abort}
        others = [each for each in self.connections if isinstance(each, Protocol) and not each.transport.is_closing()]
        if len(others) > MOST_CONNECTIONS:
            transport.write(BUSY)
            transport.close()
        else:
            self._watch()
            self._share(others)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def connection_lost(self, exc: Exception | None) -> None:
        self._forget()
        super().connection_lost(exc)

    def _share(self, connections: Sequence[Protocol]) -> None:
        """Slow ones of an address only take places from each other: the oldest leaves."""
        coming = [each for each in connections if each.host == self.host and each.is_coming]
        if len(coming) > MOST_COMING:
            min(coming, key=lambda each: each.since).transport.abort()

    @property
    def host(self) -> str | None:
        return self.client[0] if self.client else None

    @property
    def is_coming(self) -> bool:
        """Whether no whole request is there."""
        return self.conn.their_state in (h11.IDLE, h11.SEND_BODY)

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


class Server(uvicorn.Server):
    """Stops so that answers that run may end: until then it says 503 to new requests."""

    def __init__(self, config: uvicorn.Config, api: Api, models: Sequence[Served], grace: float) -> None:
        super().__init__(config)
        self._api, self._models, self._grace = api, models, grace
        self._stopping: asyncio.Task[None] | None = None
        self.interrupted = False

    async def serve(self, sockets: list[socket.socket] | None = None) -> None:
        self._loop = asyncio.get_running_loop()
        await super().serve(sockets)

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM and Ctrl-C; a second one ends all answers at once."""
        self.interrupted |= sig == signal.SIGINT
        if self._api.draining:
            self._grace = 0
        self._api.draining = True
        self._loop.call_soon_threadsafe(self._stop)

    def _stop(self) -> None:
        if self._stopping is None:
            self._stopping = self._loop.create_task(self._drain())

    async def _drain(self) -> None:
        begin = self._loop.time()
        while any(each.scheduler.requests for each in self._models) and self._loop.time() < begin + self._grace:
            await asyncio.sleep(0.02)
        for each in self._models:
            await asyncio.to_thread(each.scheduler.close)
        self.should_exit = True


class Serving:
    """Models behind a socket, which listens from now on; `run` answers."""

    def __init__(self, models: Mapping[str, Loader], options: Options) -> None:
        self._options = options
        self._socket, self.address = listen(options)
        self.models: dict[str, Served] = {}
        try:
            shelf = self._shelf(models)
        except BaseException:
            self._close()
            self._socket.close()
            raise
        sees = any(each.sees for each in self.models.values())
        api = Api(shelf, options.max_body or (IMAGE_BODY if sees else TEXT_BODY))
        hosts = set() if options.unix else local_hosts(options.host)
        hosts |= {name.lower() for name in options.allow_hosts} if hosts else set()
        app = Guard(api.application(), options.api_keys, hosts, options.cors_origins)
        config = uvicorn.Config(
            app, http=Protocol, ws="none", lifespan="off", log_config=None, log_level="error", access_log=False,
            server_header=False, timeout_keep_alive=IDLE, timeout_graceful_shutdown=5, proxy_headers=False,
            loop="asyncio",
        )  # fmt: skip
        self._server = Server(config, api, [*self.models.values()], options.grace)

    def _shelf(self, models: Mapping[str, Loader]) -> Shelf:
        options, rooms = self._options, list[int]()
        share = options.reuse * 0.25 / max(len(models), 1)
        folder = Folder(options.cache_dir, options.cache_dir_size, options.api_keys) if options.cache_dir else None

        def sessions(name: str) -> Callable[[Model], Sessions]:
            return lambda model: Sessions(model, memory, share, folder.of(name) if folder else None)

        for name, load in models.items():
            scheduler = Scheduler(options.parallel, options.queue, name)
            with load(True) as model:
                if model.has_text:
                    rooms.append(room_for(name, model, options.max_cache))
                self.models[name] = Served(name, model, load, scheduler, sessions(name))
        free = min(rooms, default=0)
        memory = Memory(min(free, options.max_cache) if options.max_cache else free)
        sizes = [each.nbytes for each in self.models.values()]
        fits = max(3 * free // 4, *sizes) if rooms else sum(sizes)
        return Shelf(self.models, options.models_memory or fits)

    def run(self) -> bool:
        """Answer until SIGTERM, Ctrl-C, or `stop`. Returns whether it was Ctrl-C."""
        try:
            self._server.run([self._socket])
        finally:
            self._close()
            if self._options.unix:
                self._options.unix.unlink(missing_ok=True)
        return self._server.interrupted

    def _close(self) -> None:
        for each in self.models.values():
            each.scheduler.close()
            each.close()

    @property
    def started(self) -> bool:
        return self._server.started

    def stop(self) -> None:
        """What SIGTERM does; from another thread."""
        self._server.handle_exit(signal.SIGTERM, None)


def room_for(name: str, model: Model, most: int) -> int:
    """Bytes that are free for texts. InvalidParameterError: one that fills its context takes more than `most`."""
    if most:
        with model.session() as session:
            if session.nbytes > most:
                needed = -(-session.nbytes // 1_000_000)
                raise InvalidParameterError(
                    f"--max-cache is {most // 1_000_000:,} MB, but {model.n_ctx:,} tokens of {name} take {needed:,}; "
                    "give more, or a smaller --ctx", "max_cache",
                )  # fmt: skip
    return model.free_memory()


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
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        if path.exists() and stat.S_ISSOCK(path.stat().st_mode) and sock.connect_ex(str(path)):
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
        raise InvalidParameterError(f"cannot listen on {path}: {error.strerror or error}", "unix") from None
    return sock
