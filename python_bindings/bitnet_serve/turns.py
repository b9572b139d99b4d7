"""Who is next where requests do one at a time, or few, what takes long, or much memory."""

from __future__ import annotations

import asyncio
import contextlib
from collections import deque
from collections.abc import AsyncIterator

from bitnet_serve.models.scheduler import OverloadedError


class Turns:
    """Clients take turns, however many requests each of them has; requests of a client come in their order."""

    def __init__(self, doing: str, patience: float, together: int = 1) -> None:
        """doing: what the others do whom one waits for, at most so many seconds. together: how many have a turn."""
        self._doing, self._patience = doing, patience
        self._waiting: dict[object, deque[asyncio.Future[None]]] = {}  # the next client first
        self._free = together

    @contextlib.asynccontextmanager
    async def turn(self, client: object) -> AsyncIterator[None]:
        """A turn. Raises OverloadedError: it did not come."""
        try:
            async with asyncio.timeout(self._patience):
                await self._take(client)
        except TimeoutError:
            raise OverloadedError(f"{self._doing}; try again later", 4) from None
        try:
            yield
        finally:
            self._give(client)

    async def _take(self, client: object) -> None:
        if self._free:
            self._free -= 1
            return
        mine: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(client, deque()).append(mine)
        try:
            await mine
        except asyncio.CancelledError:
            if not mine.cancelled():  # it came in the same moment
                self._give(client)
            raise

    def _give(self, client: object) -> None:
        """To the next. `client`, who had it, comes after the others."""
        if client in self._waiting:
            self._waiting[client] = self._waiting.pop(client)
        while self._waiting:
            first = next(iter(self._waiting))
            line = self._waiting[first]
            following = line.popleft()
            if not line:
                del self._waiting[first]
            if not following.done():  # it is, when it gave up
                following.set_result(None)
                return
        self._free += 1
