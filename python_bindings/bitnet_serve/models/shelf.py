"""Which models are in memory: as many as a budget allows. One that is asked for and is not there takes the place of
those that nobody uses, the least recently used first."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from bitnet_runtime.errors import BitnetError, InvalidParameterError, shown
from bitnet_serve.errors import ApiError
from bitnet_serve.models.registry import Served

log = logging.getLogger("bitnet_serve")

AGAIN = 30.0  # seconds that answers without a pause may go on with the old file of a model that was replaced


class Shelf:
    """For the thread of the server's loop alone. most: bytes of the files of all models that are loaded."""

    def __init__(self, models: Mapping[str, Served], most: int) -> None:
        """Loads as many as fit, in their order.

        Raises InvalidParameterError: one alone takes more than `most`, or a name is of two.
        """
        self._models, self._most = models, most
        self._asked: dict[str, tuple[Served, str | None]] = {}
        for each in self:
            for adapter in (None, *each.adapters):
                name = each.name if adapter is None else f"{each.name}:{adapter}"
                if name in self._asked:
                    raise InvalidParameterError(
                        f"two models or adapters would be {name}; give one another name", "models"
                    )
                self._asked[name] = each, adapter
        self._lock, self._left = asyncio.Lock(), asyncio.Event()  # one loads at a time; somebody left
        self._crowded = False  # somebody waits for models that are in use: later requests queue behind him
        self._clock = itertools.count(1)
        for each in self:
            if each.nbytes > most:
                raise InvalidParameterError(
                    f"--models-memory is {most // 1_000_000:,} MB, but {each.name} takes "
                    f"{-(-each.nbytes // 1_000_000):,}; give more", "models_memory",
                )  # fmt: skip
        for each in self:
            if self._taken() + each.nbytes > most:
                break
            each.open()
            each.loaded, each.used = True, next(self._clock)

    def __iter__(self) -> Iterator[Served]:
        return iter(self._models.values())

    def asked(self, body: Mapping[str, Any]) -> tuple[Served, str | None]:
        """The model that a request names, the first if it names none; and which adapter of it. Raises ApiError."""
        name = body.get("model", next(iter(self._asked)))
        if not isinstance(name, str):
            raise ApiError(400, f"model is {shown(name)}, expected a text", "invalid_type", "model")
        return self.named(name)

    def named(self, name: str) -> tuple[Served, str | None]:
        """`model`, or `model:adapter`."""
        if name not in self._asked:
            raise ApiError(
                404, f"there is no model {shown(name)}, expected one of: {', '.join(self._asked)}", "model_not_found",
                "model",
            )  # fmt: skip
        return self._asked[name]

    def entries(self) -> list[dict[str, Any]]:
        """/v1/models."""
        return [served.entry(adapter) for served, adapter in self._asked.values()]

    async def enter(self, served: Served) -> None:
        """From now on it is loaded, until `leave`. Raises ApiError: it cannot be loaded."""
        loads = served.loads
        if not served.loaded or self._crowded or served.change:
            async with self._lock:
                if served.loaded and (change := served.change):
                    await self._renew(served, change)
                if not served.loaded:
                    if served.failure and served.loads > loads:  # while this request waited: once is enough
                        raise served.failure
                    await self._make_room(served)
                    await self._load(served)
        served.users += 1
        served.used = next(self._clock)

    def leave(self, served: Served) -> None:
        served.users -= 1
        self._left.set()

    async def _renew(self, served: Served, change: str) -> None:
        """Of a model whose file is another now: unload it. What was mapped stays until nobody needs it.

        Under steady load there is always an answer. So from some time on, new ones wait until the last has ended.
        """
        if change == "replaced" and served.users:
            served.replaced = served.replaced or time.monotonic()
            while served.users and time.monotonic() - served.replaced >= AGAIN:
                self._left.clear()
                await self._left.wait()
        if not served.users:
            log.warning("%s: its file has changed, so it is loaded again", served.name)
            await self._unload(served)
        elif change == "written":
            raise ApiError(
                503, f"the file of the model {served.name} was written to while it answers; ask again. A file that is "
                "served is replaced by a rename", "model_changed", "model", retry_after=1,
            )  # fmt: skip

    async def _unload(self, served: Served) -> None:
        served.loaded = False
        await wholly(partial(served.scheduler.at_rest, served.close))

    def _taken(self) -> int:
        return sum(each.nbytes for each in self if each.loaded)

    async def _make_room(self, served: Served) -> None:
        """Raises ApiError: no room would be enough, as its file has been replaced by a larger one."""
        nbytes = served.nbytes
        if nbytes > self._most:
            raise ApiError(
                500, f"the model {served.name} now takes {-(-nbytes // 1_000_000):,} MB, but --models-memory is "
                f"{self._most // 1_000_000:,} MB; give more, or put a smaller file in its place", "model_load_failed",
                "model",
            )  # fmt: skip
        try:
            while self._taken() + nbytes > self._most:
                if idle := [each for each in self if each.loaded and not each.users]:
                    await self._unload(min(idle, key=lambda each: each.used))
                else:
                    self._crowded = True
                    self._left.clear()
                    await self._left.wait()
        finally:
            self._crowded = False

    async def _load(self, served: Served) -> None:
        try:
            await wholly(served.open)
            served.failure = None
        except Exception as error:
            if not isinstance(error, BitnetError | OSError):
                log.exception("a mistake of the server")
            retry = 10 if isinstance(error, MemoryError) else None
            said = f"the model {served.name} cannot be loaded: {error}"
            served.failures += 1
            if said != str(served.failure):  # else it was said: each request tries again
                log.error(said)
            served.failure = ApiError(503 if retry else 500, said, "model_load_failed", "model", retry_after=retry)
            raise served.failure from None
        finally:
            served.loaded, served.replaced = served.is_open, 0.0


async def wholly(work: Callable[[], None]) -> None:
    """Run it in a thread, and to its end, also where whoever waits for it has left. Raises its error then, too."""
    running = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        await asyncio.shield(running)
    except asyncio.CancelledError:
        await asyncio.wait({running})
        running.result()
        raise
