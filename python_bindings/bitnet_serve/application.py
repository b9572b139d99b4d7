"""The server without its sockets: an ASGI application, for our own server or another."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from starlette.types import ASGIApp, Receive, Scope, Send

from bitnet_runtime.errors import InvalidParameterError
from bitnet_runtime.model import Model
from bitnet_runtime.model_sessions import free_memory
from bitnet_serve.app import Api
from bitnet_serve.guard import Guard, local_hosts
from bitnet_serve.models.registry import Loader, Served
from bitnet_serve.models.scheduler import Scheduler
from bitnet_serve.models.sessions import Memory, Sessions
from bitnet_serve.models.shelf import Shelf
from bitnet_serve.models.stored import Folder
from bitnet_serve.options import Options
from bitnet_serve.request_log import RequestLog

TEXT_BODY, IMAGE_BODY = 1 << 20, 16 << 20  # bytes of a request if no model sees images, and if one does


class Application:
    """Models and their endpoints. Call `close` at the end."""

    def __init__(self, models: Mapping[str, Loader], options: Options) -> None:
        self.models: dict[str, Served] = {}
        self._folder: Folder | None = None
        try:
            shelf = self._shelf(models, options)
        except BaseException:
            self.close()
            raise
        sees = any(each.sees for each in self.models.values())
        self.api = Api(shelf, options.max_body or (IMAGE_BODY if sees else TEXT_BODY))
        own = "" if options.unix else options.host  # a socket has no name, and may be called by any
        hosts = local_hosts("localhost" if options.allow_hosts else own)
        hosts |= {name.lower() for name in [own, *options.allow_hosts] if name} if hosts else set()
        guard = Guard(self.api.application(), options.api_keys, hosts, options.cors_origins, options.allow_hosts)
        self._outermost: ASGIApp = RequestLog(guard) if options.log_requests else guard

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self._outermost(scope, receive, send)

    def _shelf(self, models: Mapping[str, Loader], options: Options) -> Shelf:
        rooms = list[int]()
        if options.cache_dir:
            self._folder = Folder(options.cache_dir, options.cache_dir_size, options.api_keys)
        folder = self._folder

        def sessions(name: str) -> Callable[[Model], Sessions]:
            return lambda model: Sessions(model, memory, folder.of(name) if folder else None)

        for name, load in models.items():
            with load(True, ()) as model:
                if model.has_text:
                    rooms.append(room_for(name, model, options.max_cache))
                scheduler = Scheduler(options.parallel, options.queue, name)
                self.models[name] = Served(name, model, load, scheduler, sessions(name))
        free = min(rooms, default=0)
        memory = Memory(min(free, options.max_cache) if options.max_cache else free, 0.25 * options.reuse)
        sizes = [each.nbytes for each in self.models.values()]
        fits = max(3 * free // 4, *sizes) if rooms else sum(sizes)
        return Shelf(self.models, options.models_memory or fits)

    def close(self) -> None:
        for each in self.models.values():
            each.scheduler.close()
            each.close()
        if self._folder:
            self._folder.close()


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
    return free_memory(model)
