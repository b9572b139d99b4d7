"""HTTP with deadlines and limits of connections, so that slow clients leave room for others."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER
from uvicorn.protocols.http.h11_impl import H11Protocol

from bitnet_serve import body
from bitnet_serve.errors import ApiError

HEADERS = 10.0  # seconds until the headers of a request are there
MOST_HEADERS = 64 << 10  # bytes of these
MOST_CONNECTIONS = 512
MOST_SLOW = 128  # of these from one address, whose requests are not whole, or whose answers are not read
MOST_NEW = 384  # of these that came within a second: many may come at once, and have their request read in turn
PROMPT = 1.0
MOST_KEPT = 64  # of one address, that stay open after an answer: else they would be the slow ones, and be cut unasked
UNREAD = 64 << 10  # bytes that the system keeps for a client that does not read
STALLED = 30.0  # seconds in which a client takes so many, or all that there is
LEAVING = 4.0  # seconds to read the rest when the server ends
EARLY = 64 << 10  # bytes of later requests that may come while a request is answered
CRUMB = 256  # bytes: a smaller piece of a body takes longer to handle than to copy
MOST_CRUMBS = 4096  # of a body; a tenth of a second, in which nobody else is served
BUSY = b"HTTP/1.1 503 Service Unavailable\r\nretry-after: 5\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"


class Connection(h11.Connection):
    """Refuses bodies in many small chunks: 40,000 of them may have come when the event loop's thread reads. Also long
    headers that came in one read: h11 looks only at those that are not whole."""

    _crumbs = 0

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        event = super().next_event()
        if isinstance(event, h11.Request):
            self._crumbs = 0
            if (size := _size(event)) > MOST_HEADERS:
                raise h11.RemoteProtocolError(f"its headers have {size:,} bytes, expected at most {MOST_HEADERS:,}")
        elif isinstance(event, h11.Data) and len(event.data) < CRUMB:
            self._crumbs += 1
            if self._crumbs > MOST_CRUMBS:
                told = (
                    f"its body has more than {MOST_CRUMBS:,} pieces of less than {CRUMB} bytes, expected larger chunks"
                )
                raise h11.RemoteProtocolError(told)
        return event


def _size(request: h11.Request) -> int:
    """Bytes of its first line and headers."""
    lines = sum(len(name) + len(value) + len(": \r\n") for name, value in request.headers)
    return len(request.method) + len(request.target) + len("  HTTP/1.1\r\n\r\n") + lines


class Protocol(H11Protocol):
    """HTTP with deadlines for headers and for readers, and limits of connections."""

    _deadline: asyncio.TimerHandle | None = None
    _patience: asyncio.TimerHandle | None = None

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        self.conn = Connection(h11.SERVER, MOST_HEADERS)

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

    def handle_events(self) -> None:
        before = self.cycle
        super().handle_events()
        if self.cycle is not before and len(self.connections) > MOST_KEPT and len(self._of_host()) > MOST_KEPT:
            self.headers.append(CLOSE_HEADER)  # which are those of the scope: so its answer says it

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
            found = str(sys.exception() or msg).replace("bytearray(b", "(")
            why = f"this is no HTTP/1.1 request: {found}"
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
        slow = [each for each in self._of_host() if each.is_there and each.is_slow]
        slow.sort(key=lambda each: each.since, reverse=True)
        for place, each in enumerate(slow):
            if place >= (MOST_SLOW if now - each.since > PROMPT else MOST_NEW):
                each.transport.abort()
                self.connections.discard(each)  # now, as thousands may come before it is lost: each is compared to all

    def _of_host(self) -> list[Protocol]:
        return [each for each in self.connections if isinstance(each, Protocol) and each.host == self.host]

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
