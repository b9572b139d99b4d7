"""From the events of generations to the bytes of a response: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from bitnet_serve.endpoints.answers import Block, Choice, Shape, Work, take
from bitnet_serve.errors import ApiError
from bitnet_serve.models.generation import End, Event, Generation, Mailbox, Text

KEEP_ALIVE = 10.0  # seconds of silence after which a comment keeps the connection alive
LINES = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"})  # Python ends a line at them

T = TypeVar("T")


def event(data: Any) -> bytes:
    """A server-sent event as bytes."""
    if isinstance(data, str):
        return data.encode()
    name = f"event: {data['type']}\n" if "type" in data and "object" not in data else ""
    text = json.dumps(data, ensure_ascii=False, separators=(",", ":")).translate(LINES)
    return f"{name}data: {text}\n\n".encode(errors="replace")


async def respond(work: Work, scope: Scope, receive: Receive, send: Send) -> None:
    """Run the work and send the answer. Everything stops when the client leaves, or does not read for too long."""
    mailbox, who, client = Mailbox(), scope["state"].get("who"), scope["state"].get("client")
    choices = [Choice(index, ask) for index, ask in enumerate(work.asks)]
    tasks = [Generation(work.served, ask, mailbox, index, who) for index, ask in enumerate(work.asks)]
    work.served.scheduler.submit(tasks, client)
    answer = _stream if work.stream else _whole
    try:
        if failed := await unless_gone(receive, answer(work, mailbox, choices, send)):
            scope["state"]["failed"] = failed
    except ClientDisconnect:
        scope["state"]["left"] = True
    finally:
        prompts = {id(ask.prompt): len(ask.prompt) for ask in work.asks}
        scope["state"]["tokens"] = sum(prompts.values()), sum(choice.made for choice in choices)
        work.served.scheduler.cancel([task for task, choice in zip(tasks, choices, strict=True) if not choice.end])


async def unless_gone(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`, which is cancelled when the client leaves: ClientDisconnect."""
    working, leaving = asyncio.ensure_future(work), asyncio.ensure_future(_until_gone(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        for each in (working, leaving):
            each.cancel()
            with contextlib.suppress(asyncio.CancelledError, Exception):
                await each


async def _until_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _whole(work: Work, mailbox: Mailbox, choices: list[Choice], send: Send) -> int:
    """0, as an error has its own status."""
    while not all(choice.end for choice in choices):
        for index, found in await mailbox.get():
            take(choices, index, found)
    body = await asyncio.to_thread(lambda: json.dumps(work.shape.whole(choices)).encode())  # it may be long
    await send_all(send, 200, "application/json", body)
    return 0


async def _stream(work: Work, mailbox: Mailbox, choices: list[Choice], send: Send) -> int:
    """The status of an error that came after the 200 of the first event; 0: none."""
    begun, failed = False, 0

    async def put(data: bytes, more: bool = True) -> None:
        nonlocal begun
        if not begun:  # an error before this has its own status
            begun = True
            await send(_start(200, "text/event-stream; charset=utf-8", [(b"x-accel-buffering", b"no")]))
        await send({"type": "http.response.body", "body": data, "more_body": more})

    try:
        async for data in stream_events(work.shape, mailbox, choices):
            await put(data)
    except ApiError as error:
        if not begun:
            raise
        failed = error.status
        await put(b"".join(map(event, work.shape.error(error))))
    await put(b"", False)
    return failed


async def stream_events(shape: Shape, mailbox: Mailbox, choices: list[Choice]) -> AsyncIterator[bytes]:
    """The bytes to send, or a comment when there are none for long: a token may have none. Tokens that have come
    meanwhile are one event."""
    loop = asyncio.get_running_loop()
    due = loop.time() + KEEP_ALIVE
    while not all(choice.end for choice in choices):
        try:
            async with asyncio.timeout_at(due):
                come = await mailbox.get()
        except TimeoutError:
            yield b": still working\n\n"
            due = loop.time() + KEEP_ALIVE
            continue
        out, failed = _events_of(shape, choices, come)
        if out:
            yield b"".join(map(event, out))
            due = loop.time() + KEEP_ALIVE
        if failed:
            raise failed
    yield b"".join(map(event, shape.close(choices)))


def _events_of(
    shape: Shape, choices: list[Choice], come: Sequence[tuple[int, Event]]
) -> tuple[list[Any], ApiError | None]:
    """What to send for these events, and the failure at their end."""
    out: list[Any] = []
    failed = None
    for index, found in come:
        try:
            choice, pieces, scored = take(choices, index, found)
        except ApiError as error:
            failed = error
            break
        if isinstance(found, Text | End) and not choice.begun:
            choice.begun = True
            out += shape.start(choice)
        for block, text in pieces:
            if block is not choice.open:
                out += _switch(shape, choice, block)
            if text:
                choice.unsent.append(text)
                choice.unsent_scores += scored
                scored = []
        if isinstance(found, End):
            out += _switch(shape, choice, None)
            out += shape.end(choice)
    for choice in choices:
        out += _piece(shape, choice)
    return out, failed


def _piece(shape: Shape, choice: Choice) -> list[Any]:
    """The events for the unsent text of the open block."""
    if choice.open is None or not choice.unsent:
        return []
    text, scored = "".join(choice.unsent), choice.unsent_scores
    choice.unsent, choice.unsent_scores = [], []
    return list(shape.piece(choice, choice.open, text, scored))


def _switch(shape: Shape, choice: Choice, block: Block | None) -> list[Any]:
    """The events that end the open block and begin another."""
    out = _piece(shape, choice)
    ended, choice.open = choice.open, block
    out += [] if ended is None else shape.finish(choice, ended)
    return out if block is None else [*out, *shape.begin(choice, block)]


def _start(status: int, kind: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    fixed = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": status, "headers": [*fixed, *headers]}


async def send_all(
    send: Send, status: int, kind: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """A whole response."""
    await send(_start(status, kind, [(b"content-length", b"%d" % len(body)), *headers]))
    await send({"type": "http.response.body", "body": body})
