"""The loop that makes text: sample a token, turn it into text, append it, again."""

from __future__ import annotations

import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from bitnet_runtime.defaults import Sampling
from bitnet_runtime.session import Sampler, Session
from bitnet_runtime.text import Detokenizer

if TYPE_CHECKING:
    from bitnet_runtime.model import Model


Finish = Literal["stop", "length", "cancelled"]
"""Why a text ended: an end token or a stop text, max_tokens or the context, or `Stream.close()`."""


class Piece(NamedTuple):
    """One step of a stream. The texts of all pieces joined are `Result.text`."""

    text: str  # "" while a character or a possible stop text is incomplete
    token: int | None  # None for a last piece that only brings text held back


class Usage(NamedTuple):
    """Numbers of tokens. `prompt_tokens` counts those found in the session's cache too."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Timings(NamedTuple):
    """Seconds in the engine, and tokens computed per second. The caller's own time is not counted."""

    prompt_seconds: float
    prompt_tokens_per_second: float
    generation_seconds: float
    generation_tokens_per_second: float


@dataclass(frozen=True)
class Result:
    """What `generate` and `chat` return."""

    text: str
    tokens: list[int]  # as sampled, with those of a stop text, without the end token
    finish_reason: Finish
    usage: Usage
    timings: Timings
    seed: int  # the one used; the same call with it gives the same tokens


class Stream:
    """Iterator of `Piece`s. `close()` ends it early; afterwards, or at its end, `result` is there."""

    def __init__(self, model: Model, prompt: Sequence[int], options: Sampling, session: Session | None = None) -> None:
        needed = None if options.max_tokens is None else min(model.n_ctx, len(prompt) + options.max_tokens)
        self._sampler = Sampler(options, model.vocab_size)
        self._answer = _Answer(model.detokenizer(prompt), options.stop)
        self._session = session or model.session(n_ctx=needed)
        self._owned = session is None
        self._prompt = prompt
        self._end_tokens = model.end_tokens
        self._seed = secrets.randbits(32) if options.seed is None else options.seed
        room = self._session.n_ctx - len(prompt) + 1  # the last token is sampled and not appended
        self._limit = room if options.max_tokens is None else min(options.max_tokens, room)
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._finish: Finish = "cancelled"
        self._computed = 0
        self._prompt_seconds = self._seconds = 0.0
        self._ended = False
        self._pieces = self._run()

    @property
    def result(self) -> Result | None:
        """What was generated, once the stream ended or was closed; None before."""
        if not self._ended:
            return None
        n, made = len(self._prompt), len(self._tokens)
        timings = Timings(
            self._prompt_seconds,
            self._computed / (self._prompt_seconds or 1),
            self._seconds,
            made / (self._seconds or 1),
        )
        usage = Usage(n, made, n + made)
        return Result("".join(self._texts), self._tokens, self._finish, usage, timings, self._seed)

    def close(self) -> None:
        """Stop: no further token is computed. Closing twice is fine."""
        self._pieces.close()
        self._end()

    def _end(self) -> None:
        self._ended = True
        if self._owned:
            self._session.close()

    def _run(self) -> Generator[Piece, None, None]:
        try:
            if self._limit > 0:
                yield from self._steps()
            else:
                self._finish = "length"
        finally:
            self._end()

    def _steps(self) -> Generator[Piece, None, None]:
        session, answer, clock = self._session, self._answer, time.perf_counter
        begin = clock()
        self._computed = _extend(session, self._prompt)
        session.seed(self._seed)
        self._prompt_seconds = clock() - begin
        done = False
        while not done:
            begin = clock()
            if self._tokens:
                session.step(self._tokens[-1])
            token = session.draw(self._sampler)
            if token in self._end_tokens:
                self._finish, done = "stop", True
                piece = Piece(answer.flush(), None)
            else:
                self._tokens.append(token)
                text = answer.push(token)
                done = answer.stopped or len(self._tokens) == self._limit
                if done:
                    self._finish = "stop" if answer.stopped else "length"
                piece = Piece(text + answer.flush() if done else text, token)
            self._texts.append(piece.text)
            self._seconds += clock() - begin
            if piece.text or piece.token is not None:
                yield piece

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _extend(session: Session, prompt: Sequence[int]) -> int:
    """Make the session hold the prompt and its logits; returns how many tokens were computed.

    What it already holds of the prompt's beginning is kept: the bits are the same.
    """
    held, same = session.tokens, 0
    while same < min(len(held), len(prompt) - 1) and held[same] == prompt[same]:
        same += 1
    session.rewind(same)
    session.feed(prompt[same:])
    return len(prompt) - same


class _Answer:
    """Tokens in, text out; ends at a stop text, and shows nothing that may become one."""

    def __init__(self, detokenizer: Detokenizer | None, stop: tuple[str, ...]) -> None:
        self._detokenizer = detokenizer
        self._stop = stop
        self._held = ""
        self.stopped = False

    def push(self, token: int) -> str:
        text = self._detokenizer.push(token) if self._detokenizer else ""
        return self._until_stop(text) if self._stop else text

    def flush(self) -> str:
        """What was held back; "" after a stop text."""
        text = self._detokenizer.flush() if self._detokenizer else ""
        if self.stopped:
            return ""
        text = self._until_stop(text) if self._stop else text
        held, self._held = self._held, ""
        return text + held

    def _until_stop(self, text: str) -> str:
        text = self._held + text
        found = [place for stop in self._stop if (place := text.find(stop)) >= 0]
        if found:
            self._held, self.stopped = "", True
            return text[: min(found)]
        hold = min(len(text), max(map(len, self._stop)) - 1)
        while hold and not any(stop.startswith(text[-hold:]) for stop in self._stop):
            hold -= 1
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]
