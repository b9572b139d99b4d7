"""An answer as the scheduler runs it: what is asked, and the events it produces."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from bitnet_runtime.answers.logprobs import Scored, score
from bitnet_runtime.answers.receipt import Receipt
from bitnet_runtime.answers.writer import Writer
from bitnet_runtime.chat.calls import CallPart
from bitnet_runtime.chat.thoughts import Begun
from bitnet_runtime.chat.tools import Tools
from bitnet_runtime.defaults import Sampling
from bitnet_runtime.model_chat import call_reader, thought_reader
from bitnet_runtime.sessions.session import Session
from bitnet_serve.histogram import LATENCIES
from bitnet_serve.models.registry import Served
from bitnet_serve.models.task import Task

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.structured.guide import Guide

PACE = 0.004  # seconds between two looks at a stream
MOMENT = 0.002  # seconds for which the engine goes on unasked: nobody would look sooner
UNREAD = 256  # unread events after which an answer waits for its reader
ROWS = 16 << 20  # bytes of logits computed at a time


class Text(NamedTuple):
    """The text a token added: "" within a character, while a stop text or a call may begin, or for an end token."""

    text: str
    scored: Scored | None = None  # if asked
    calls: Sequence[CallPart] = ()
    reasoning: str = ""


class Scores(NamedTuple):
    """Of the tokens of a prompt from the second on, if asked, in order; there may be several."""

    scored: Sequence[Scored]


class End(NamedTuple):
    """The end of an answer that succeeded or was cancelled."""

    finish_reason: str
    prompt_tokens: int
    completion_tokens: int
    timings: Timings
    stopped_by: str = ""  # a stop text
    reused: int = 0  # tokens of the prompt that were there already
    receipt: Receipt | None = None
    reasoning_tokens: int = 0


class Timings(NamedTuple):
    """Seconds, and the seed."""

    queue_seconds: float
    prompt_seconds: float
    generation_seconds: float
    seed: int


class Failure(NamedTuple):
    error: Exception


Event = Text | Scores | End | Failure


class Mailbox:
    """Events of the tasks of one request, from the scheduler's thread to the loop of the server, several at a time.

    A small model makes a token in less time than it takes to wake the loop and to send an event. So the loop looks
    once in `PACE` seconds, or when an answer ends, and finds what has come meanwhile.
    """

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._events: deque[tuple[int, Event]] = deque()
        self._some = asyncio.Event()
        self._called = False  # the loop, which has not looked yet
        self._resting = False  # the loop, which looks by itself at `_due`
        self._ended = False  # an answer, since the last look
        self._due = 0.0

    def put(self, index: int, event: Event) -> None:
        self._events.append((index, event))
        ends = isinstance(event, End | Failure)
        self._ended |= ends
        if (ends or not self._resting) and not self._called:
            self._called = True
            with contextlib.suppress(RuntimeError):  # the loop is closed: nobody reads
                self._loop.call_soon_threadsafe(self._look)

    def _look(self) -> None:
        self._called = False  # before the events are taken: one that comes later calls again
        self._some.set()

    async def get(self) -> list[tuple[int, Event]]:
        """All that have come, at least one, in order."""
        await self._rest()
        while not self._events:
            self._some.clear()
            await self._some.wait()
        self._resting, self._ended, self._due = True, False, self._loop.time() + PACE
        return [self._events.popleft() for _ in range(len(self._events))]

    async def _rest(self) -> None:
        if not self._ended and self._loop.time() < self._due:
            timer = self._loop.call_at(self._due, self._some.set)
            self._some.clear()
            try:
                await self._some.wait()
            finally:
                timer.cancel()
        self._resting = False

    @property
    def full(self) -> bool:
        return len(self._events) > UNREAD


@dataclass(frozen=True)
class Ask:
    """A prompt to continue, and how."""

    prompt: list[int]  # -1 in place of each vector of an image
    options: Sampling
    pixels: NDArray[np.float32] | None = None
    top: int | None = None  # tokens are scored, beside so many others
    score_prompt: bool = False
    score_end: bool = False  # an end token is scored, too
    guide: Guide | None = None  # the compiled format of the options
    receipt: bool = False  # the answer gets one
    tools: Tools | None = None  # that it may call
    begun: Begun | None = None  # of a model that thinks


class Generation(Task):
    """An `Ask` on its way."""

    def __init__(self, served: Served, ask: Ask, mailbox: Mailbox, index: int, who: object) -> None:
        self._served, self._ask, self._mailbox, self._index = served, ask, mailbox, index
        self._model, self._who = served.model, who
        self._whole = ask.pixels is not None or self._model.mask == "prefix"  # the prompt is computed in one go
        self._session: Session | None = None
        self._writer: Writer | None = None
        self._paused: list[int] = []  # tokens that its session held
        self._held = 0  # tokens of the prompt that are computed
        self._reused = 0  # of these, for another request
        self._made = time.perf_counter()
        self._opened = self._started = self._first = 0.0
        self._failed = False

    @property
    def writer(self) -> Writer | None:
        return self._writer

    @property
    def waits(self) -> bool:
        return self._mailbox.full

    def open(self) -> None:
        prompt, most = self._ask.prompt, self._ask.options.max_tokens
        room = self._model.n_ctx if most is None else min(self._model.n_ctx, len(prompt) + most)
        if self._whole or self._ask.score_prompt:
            self._session = self._served.sessions.new(room, self._served.adapter)
        elif self._writer:
            self._session, _ = self._served.sessions.begin([*self._paused, 0], room, self._who, self._served.adapter)
            self._writer.move(self._session, self._paused)
        else:
            self._session, self._reused = self._served.sessions.begin(prompt, room, self._who, self._served.adapter)
            self._held = self._reused
            if most != 0:
                self._begin()
        self._opened = self._opened or time.perf_counter()

    @property
    def nbytes(self) -> int:
        return self._served.sessions.taken(self._session) if self._session else 0

    @property
    def can_pause(self) -> bool:
        return bool(self._session and self._writer) and not (self._whole or self._ask.score_prompt)

    def pause(self) -> None:
        assert self._session is not None  # it is open
        self._paused = self._session.tokens
        self._served.sessions.end(self._session, self._who)
        self._session = None

    def piece(self, most: int) -> None:
        last = len(self._ask.prompt) - 1  # which makes the logits
        if not self._whole and self._held < last:
            self._feed(self._ask.prompt[self._held : min(self._held + most, last)])
        if self._whole or self._held >= last:
            self._begin()
            self.read()

    def _begin(self) -> None:
        """Hand the rest to the passes, if there are tokens to generate after the prompt."""
        assert self._session is not None  # it is open
        ask = self._ask
        writer = Writer(
            self._model, ask.prompt, ask.options, self._session, ask.pixels, ask.guide, ask.receipt,
            reader=call_reader(self._model, ask.tools), logprobs=ask.top,
            thinker=thought_reader(self._model, ask.begun),
        )  # fmt: skip
        writer.moment = MOMENT
        self.done = writer.done
        if not self.done:
            writer.begin()
        self._writer = writer
        self._note()

    def _note(self) -> None:
        assert self._writer is not None
        held = len(self._ask.prompt) - (0 if self.done else self._writer.loads)
        self._held = max(self._held, held)  # what is read again after a pause is not counted again
        if not self._started and self._held == len(self._ask.prompt):
            self._started = time.perf_counter()

    def _feed(self, tokens: list[int]) -> None:
        session = self._session
        assert session is not None  # it is open
        if not self._ask.score_prompt:
            session.feed(tokens, keep_logits=False)
            self._held += len(tokens)
            return
        step = max(1, ROWS // (4 * self._model.vocab_size))
        for start in range(0, len(tokens), step):
            some = tokens[start : start + step]
            rows = session.append(some, "all")
            self._held += len(some)
            next_ones = self._ask.prompt[self._held - len(some) + 1 : self._held + 1]
            self._tell(Scores(score(rows, next_ones, self._ask.top or 0)))

    def read(self) -> None:
        writer = self._writer
        assert writer is not None  # it has begun
        self._note()
        if writer.ready and not self._first:
            self._first = time.perf_counter()
        while writer.ready and not writer.done:
            piece = writer.pop()
            scored = None if piece.token is None and not self._ask.score_end else piece.scored
            self._tell(Text(piece.text, scored, piece.calls, piece.reasoning))
        self.done = writer.done

    def fail(self, error: Exception) -> None:
        self._failed = True
        self._tell(Failure(error))

    def close(self) -> None:
        end = time.perf_counter()
        writer, session = self._writer, self._session
        self._writer = self._session = None
        made, thought, reason, seed, stopped_by, receipt = 0, 0, "cancelled", 0, "", None
        if writer is not None:
            stopped_by, result = writer.stopped_by, writer.result()
            made, reason, seed, receipt = len(result.tokens), result.finish_reason, result.seed, result.receipt
            thought = result.usage.reasoning_tokens
        self.prompt_tokens, self.completion_tokens = self._held - self._reused, made
        if session is not None:
            self._served.sessions.end(session, self._who)
        if self._failed:
            return
        opened = self._opened or end
        started = max(self._started or end, opened)
        self.seconds = self._latencies(reason, made, end)
        timings = Timings(opened - self._made, started - opened, end - started, seed)
        self._tell(End(reason, len(self._ask.prompt), made, timings, stopped_by, self._reused, receipt, thought))

    def _latencies(self, reason: str, made: int, end: float) -> dict[str, float]:
        """By `LATENCIES`, in their order; of an answer that came to its end."""
        if reason == "cancelled":
            return {}
        first = self._first - self._made if self._first else None
        each = (end - self._first) / (made - 1) if self._first and made > 1 else None
        found = zip(LATENCIES, (first, each, end - self._made), strict=True)
        return {name: seconds for name, seconds in found if seconds is not None}

    def _tell(self, event: Event) -> None:
        self._mailbox.put(self._index, event)
