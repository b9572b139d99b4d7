"""The loop that makes text: sample a token, turn it into text, append it, again."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, NamedTuple, Self

from bitnet_runtime.defaults import Sampling
from bitnet_runtime.session import Sampler, Session, append_batch
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
        self._lookup = Lookup(prompt) if options.draft else None
        self._draft = options.draft
        self._finish: Finish = "cancelled"
        self._computed = 0
        self._prompt_seconds = self._seconds = 0.0
        self._done = False  # the answer is complete
        self._ended = False  # and its session closed
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
        clock = time.perf_counter
        self._begin()
        while not self._done:
            begin = clock()
            tokens = self._next()
            self._seconds += clock() - begin
            for token in tokens:
                begin = clock()
                piece = self._accept(token)
                self._seconds += clock() - begin
                if piece.text or piece.token is not None:
                    yield piece
                if self._done:
                    break

    def _begin(self) -> None:
        """Compute the prompt."""
        begin = time.perf_counter()
        self._computed = extend(self._session, self._prompt)
        self._session.seed(self._seed)
        self._prompt_seconds = time.perf_counter() - begin

    def _next(self) -> Sequence[int]:
        """The tokens that come next: one, or more when a draft was right."""
        left = self._limit - len(self._tokens)
        if self._lookup and left > 1:  # the session holds all tokens so far
            return self._session.advance(self._sampler, self._lookup.guess(min(self._draft, left - 1)))
        if self._tokens and not self._lookup:  # it lacks the newest, which may have been the last
            self._session.step(self._tokens[-1])
        return (self._session.draw(self._sampler),)

    def _accept(self, token: int) -> Piece:
        """Make a sampled token part of the answer, or end it."""
        if token in self._end_tokens:
            self._finish, self._done = "stop", True
            piece = Piece(self._answer.flush(), None)
        else:
            self._tokens.append(token)
            if self._lookup:
                self._lookup.add(token)
            text = self._answer.push(token)
            self._done = self._answer.stopped or len(self._tokens) == self._limit
            if self._done:
                self._finish = "stop" if self._answer.stopped else "length"
                text += self._answer.flush()
            piece = Piece(text, token)
        self._texts.append(piece.text)
        return piece

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Piece:
        return next(self._pieces)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def generate_batch(streams: Sequence[Stream]) -> list[Result]:
    """Results of streams that have not begun, computed together: weights are read once for all."""
    with contextlib.ExitStack() as stack:
        for stream in streams:
            stack.enter_context(stream)
            stream._begin()
        active = [stream for stream in streams if stream._limit > 0]
        for stream in streams:
            if stream not in active:
                stream._finish = "length"
        begin = time.perf_counter()
        while active:
            for stream in active:
                stream._accept(stream._session.draw(stream._sampler))
            now = time.perf_counter()
            for stream in active:
                stream._seconds = now - begin
            active = [stream for stream in active if not stream._done]
            if active:
                append_batch([stream._session for stream in active], [stream._tokens[-1] for stream in active])
    return [result for stream in streams if (result := stream.result) is not None]


class Lookup:
    """Guesses what comes next: what followed the last time that the newest tokens occurred.

    Prompt lookup decoding: no second model, and good where a text repeats itself (code, summaries).
    """

    LONGEST = 3  # tokens that must agree, or as few as SHORTEST
    SHORTEST = 2

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens: list[int] = []
        self._after: dict[tuple[int, ...], int] = {}  # n-gram -> place after its latest occurrence
        for token in tokens:
            self.add(token)

    def add(self, token: int) -> None:
        for n in range(self.SHORTEST, self.LONGEST + 1):
            if len(self._tokens) >= n:
                self._after[tuple(self._tokens[-n:])] = len(self._tokens)
        self._tokens.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next."""
        for n in range(self.LONGEST, self.SHORTEST - 1, -1):
            place = self._after.get(tuple(self._tokens[-n:]))
            if place is not None:
                since = self._tokens[place:]  # if the text goes on repeating, this comes round again
                return [since[i % len(since)] for i in range(most)]
        return []


def extend(session: Session, prompt: Sequence[int]) -> int:
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
