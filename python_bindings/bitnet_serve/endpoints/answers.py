"""From the events of generations to the bytes of a response: whole, or as server-sent events."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive, Scope, Send

from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.chat.calls import CallPart
from bitnet_serve.errors import ApiError, api_error
from bitnet_serve.models.generation import Ask, End, Failure, Generation, Mailbox, Scores, Text
from bitnet_serve.models.registry import Served

KEEP_ALIVE = 10.0  # seconds of silence after which a comment keeps the connection alive
LINES = str.maketrans({char: f"\\u{ord(char):04x}" for char in "\x85\u2028\u2029"})  # Python ends a line at them

T = TypeVar("T")


@dataclass(eq=False)
class Block:
    """A part of an answer: text, thoughts, or a tool call with its arguments."""

    call: CallPart | None = None
    texts: list[str] = field(default_factory=list)
    thinks: bool = False
    place: int = 0  # among the blocks of the answer

    @property
    def text(self) -> str:
        return "".join(self.texts)


@dataclass
class Choice:
    """The answer to one `Ask`, as far as it has come."""

    index: int
    ask: Ask
    blocks: list[Block] = field(default_factory=list)
    prompt_scored: list[Scored] = field(default_factory=list)
    scored: list[Scored] = field(default_factory=list)
    called: int = 0  # blocks that are calls
    made: int = 0  # tokens that have come
    end: End | None = None
    begun = False
    open: Block | None = None  # the block whose events are being sent, in a stream
    length: int = 0  # of `text`, which would take a while to join for each token
    held: list[Scored] = field(default_factory=list)  # scores of tokens whose text has not come; an end token has none

    @property
    def text(self) -> str:
        """The text of the answer, without thoughts and tool calls."""
        return "".join(block.text for block in self.blocks if block.call is None and not block.thinks)

    @property
    def reasoning(self) -> str:
        return "".join(block.text for block in self.blocks if block.thinks)

    @property
    def calls(self) -> list[Block]:
        return [block for block in self.blocks if block.call is not None]

    def ended(self) -> End:
        assert self.end is not None  # all choices have ended
        return self.end

    @property
    def finish_reason(self) -> str:
        """The finish reason in OpenAI's terms."""
        reason = self.ended().finish_reason
        return "tool_calls" if reason == "stop" and self.calls else reason

    def take(self, found: Text) -> list[tuple[Block, str]]:
        """Add an event. Returns the blocks that grew, with their new text; all but the last block are complete."""
        going = [part for part in found.calls if part.number < self.called]
        new = found.calls[len(going) :]
        out = [(self.blocks[-1], part.text) for part in going]
        for text, thinks in ((found.reasoning, True), (found.text, False)):
            if text:
                if not self.blocks or self.blocks[-1].call is not None or self.blocks[-1].thinks != thinks:
                    self.blocks.append(Block(thinks=thinks, place=len(self.blocks)))
                out.append((self.blocks[-1], text))
        for part in new:
            if part.number == self.called:
                self.blocks.append(Block(part, place=len(self.blocks)))
                self.called += 1
            out.append((self.blocks[-1], part.text))
        for block, text in out:
            block.texts.append(text)
            self.length += len(text) * (block.call is None)
        return out


class Shape(Protocol):
    """The form that an API gives an answer. An event is a dictionary, or its JSON text."""

    def start(self, choice: Choice) -> Iterable[Any]:
        """The events before the first piece of a choice."""
        return ()

    def begin(self, choice: Choice, block: Block) -> Iterable[Any]:
        """The events before the first piece of a block."""
        return ()

    def piece(self, choice: Choice, block: Block, text: str, scored: Sequence[Scored]) -> Iterable[Any]:
        """The events for a part of a block's text, with the scores of its tokens."""

    def finish(self, choice: Choice, block: Block) -> Iterable[Any]:
        """The events after the last piece of a block."""
        return ()

    def end(self, choice: Choice) -> Iterable[Any]:
        """The events after the last piece of a choice."""

    def close(self, choices: Sequence[Choice]) -> Iterable[Any]:
        """The events after all choices."""
        return ()

    def whole(self, choices: Sequence[Choice]) -> dict[str, Any]:
        """The body of an answer that is not streamed."""

    def error(self, error: ApiError) -> Iterable[Any]:
        """The events for a stream that breaks off."""


@dataclass
class Work:
    """A parsed request: what is asked of which model, and the form of the answer."""

    served: Served
    asks: list[Ask]
    shape: Shape
    stream: bool


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
        await unless_gone(receive, answer(work, mailbox, choices, send))
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


async def _whole(work: Work, mailbox: Mailbox, choices: list[Choice], send: Send) -> None:
    while not all(choice.end for choice in choices):
        _take(choices, *await mailbox.get())
    body = await asyncio.to_thread(lambda: json.dumps(work.shape.whole(choices)).encode())  # it may be long
    await send_all(send, 200, "application/json", body)


async def _stream(work: Work, mailbox: Mailbox, choices: list[Choice], send: Send) -> None:
    begun = False

    async def put(data: bytes, more: bool = True) -> None:
        nonlocal begun
        if not begun:  # an error before this has its own status
            begun = True
            await send(_start(200, "text/event-stream; charset=utf-8", [(b"x-accel-buffering", b"no")]))
        await send({"type": "http.response.body", "body": data, "more_body": more})

    try:
        async for data in _events(work.shape, mailbox, choices):
            await put(data)
    except ApiError as error:
        if not begun:
            raise
        await put(b"".join(map(event, work.shape.error(error))))
    await put(b"", False)


async def _events(shape: Shape, mailbox: Mailbox, choices: list[Choice]) -> AsyncIterator[bytes]:
    """The bytes to send, a few events at a time, or a comment when there are none for long: a token may have none."""
    loop = asyncio.get_running_loop()
    due = loop.time() + KEEP_ALIVE
    while not all(choice.end for choice in choices):
        try:
            async with asyncio.timeout_at(due):
                index, found = await mailbox.get()
        except TimeoutError:
            yield b": still working\n\n"
            due = loop.time() + KEEP_ALIVE
            continue
        choice, pieces, scored = _take(choices, index, found)
        out: list[Any] = []
        if isinstance(found, Text | End) and not choice.begun:
            choice.begun = True
            out += shape.start(choice)
        for block, text in pieces:
            if block is not choice.open:
                out += _switch(shape, choice, block)
            if text:
                out += shape.piece(choice, block, text, scored)
                scored = []
        if isinstance(found, End):
            out += _switch(shape, choice, None)
            out += shape.end(choice)
        if out:
            yield b"".join(map(event, out))
            due = loop.time() + KEEP_ALIVE
    yield b"".join(map(event, shape.close(choices)))


def _switch(shape: Shape, choice: Choice, block: Block | None) -> list[Any]:
    """The events that end the open block and begin another."""
    ended, choice.open = choice.open, block
    out = [] if ended is None else list(shape.finish(choice, ended))
    return out if block is None else [*out, *shape.begin(choice, block)]


def _take(choices: Sequence[Choice], index: int, found: object) -> tuple[Choice, list[tuple[Block, str]], list[Scored]]:
    """Write an event down. Returns the choice, what is new of its blocks, and the scores of tokens whose text is
    complete with it."""
    choice = choices[index]
    if isinstance(found, Failure):
        raise api_error(found.error)
    if isinstance(found, Scores):
        choice.prompt_scored.extend(found.scored)
    elif isinstance(found, End):
        choice.made = found.completion_tokens  # an end token is none of them
        if found.finish_reason == "cancelled":
            raise ApiError(503, "the answer was cancelled: the server is shutting down", "shutting_down", retry_after=5)
        choice.end = found
        if not choice.blocks:  # nothing was said
            choice.blocks.append(Block())
            return choice, [(choice.blocks[0], "")], []
    elif isinstance(found, Text):
        choice.made += 1
        if found.scored:
            choice.held.append(found.scored)
        if pieces := choice.take(found):
            scored, choice.held = choice.held, []
            choice.scored += scored
            return choice, pieces, scored
    return choice, [], []


def _start(status: int, kind: str, headers: Iterable[tuple[bytes, bytes]] = ()) -> dict[str, Any]:
    fixed = [(b"content-type", kind.encode()), (b"cache-control", b"no-cache")]
    return {"type": "http.response.start", "status": status, "headers": [*fixed, *headers]}


async def send_all(
    send: Send, status: int, kind: str, body: bytes, headers: Iterable[tuple[bytes, bytes]] = ()
) -> None:
    """A whole response."""
    await send(_start(status, kind, [(b"content-length", b"%d" % len(body)), *headers]))
    await send({"type": "http.response.body", "body": body})
