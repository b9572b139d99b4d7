"""The loop that generates text: sample a token, turn it into text, append it, repeat."""

from __future__ import annotations

import secrets
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from bitnet_runtime import vision
from bitnet_runtime.answer import Answer, Guesses, Lookup
from bitnet_runtime.defaults import Sampling, truth
from bitnet_runtime.errors import InvalidParameterError
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.ids import NO_TOKEN
from bitnet_runtime.logprobs import Scored, alternatives, score
from bitnet_runtime.prompt import extend
from bitnet_runtime.reading import Reading
from bitnet_runtime.receipt import Receipt, sampling_of, written
from bitnet_runtime.result import Finish, Piece, Result, Timings, Usage
from bitnet_runtime.sampler import Sampler, ends_of
from bitnet_runtime.session import Session
from bitnet_runtime.session_input import BLOCK
from bitnet_runtime.steps import Entry, step_batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.calls import CallReader
    from bitnet_runtime.guide import Guide


AT_ONCE = 8  # most tokens that the engine guesses in a step
MOMENT = 0.5e-3
"""Seconds for which the engine goes on unasked: with a small model to ask takes as long as a token. In a session of
somebody else it does not, as that holds what was asked for and no more."""


class Stream(Reading):
    """Iterator of `Piece`s. `close()`, from any thread, ends it early; afterwards, or at its end, `result` is there.

    Threads that read one stream take turns. A stream that is dropped frees its cache at once.
    """

    def __init__(
        self,
        model: ModelFacts,
        prompt: Sequence[int],
        options: Sampling,
        session: Session | None = None,
        pixels: NDArray[np.float32] | None = None,
        guide: Guide | None = None,
        receipt: bool = False,
        adapter: str | None = None,
        reader: CallReader | None = None,
        logprobs: int | None = None,
    ) -> None:
        """prompt: -1 where the vectors of an image stand; pixels: of these images; guide: `model.guide(options)`,
        made before, as that may take seconds. receipt: the result has one. adapter: of a new session. reader: takes
        calls out of the text. logprobs: tokens are scored, beside so many others."""
        self._top = alternatives(logprobs)
        if self._top is not None:
            options = replace(options, draft=0)  # the row that each token comes from is wanted
        if truth("receipt", receipt) and pixels is not None:
            raise InvalidParameterError("a receipt is of tokens alone, and images are given", "receipt")
        if receipt:
            model.digest  # noqa: B018  hashes the file, while nobody waits for a token
        self._options, self._receipt = options, receipt
        self._digests: list[int | None] = []  # of the states that tokens were chosen from, for a receipt
        needed = None if options.max_tokens is None else min(model.n_ctx, len(prompt) + options.max_tokens)
        self._end_tokens = ends_of(options, model.end_tokens, model.vocab_size)
        self._sampler = Sampler(options, model.vocab_size)
        self._least = options.min_tokens
        self._going_on = Sampler(options, model.vocab_size, self._end_tokens) if self._least else self._sampler
        self._guide = guide or model.guide(options)
        detokenizer = model._detokenizer([token for token in prompt if token != NO_TOKEN])
        self._answer = Answer(detokenizer, options.stop, reader)
        self._most = AT_ONCE if options.draft is None else options.draft
        mine = session or Session._new(model, needed, adapter=adapter, draft=self._most > 0)
        super().__init__(mine, owned=session is None)
        self._model, self._prompt, self._pixels = model, prompt, pixels
        self._seed = secrets.randbits(32) if options.seed is None else options.seed
        self._n_ctx, self._kv_type = self._session.n_ctx, self._session.kv_type
        self._adapter = model.adapter_digest(self._session.adapter) if receipt else None
        room = self._n_ctx - len(prompt) + 1  # the last token is sampled and not appended
        self._limit = room if options.max_tokens is None else min(options.max_tokens, room)
        self._tokens: list[int] = []
        self._texts: list[str] = []
        self._scores: list[Scored] = []  # of the tokens, if asked
        self._scored: Scored | None = None  # the next token, if asked
        self._lookup: Guesses | None = Lookup(prompt) if options.draft else None
        self._drawn: deque[int] = deque()  # chosen, and not yet in the answer
        self._missing: list[int] = []  # of the prompt and of what was chosen, not yet in the session
        self._unread = len(prompt)  # tokens of the prompt that are missing
        self._begun = False
        self._changes = 0  # of the session, when it had begun
        self._entry: Entry | None = None  # that of all its passes
        self._computed = 0  # tokens of the prompt
        self._prompt_seconds = self._seconds = 0.0
        self._finish: Finish = "cancelled" if self._limit > 0 else "length"
        self._done = self._limit <= 0
        self.ended_by: int | None = None  # the end token, if one came

    @property
    def result(self) -> Result | None:
        """The result, once the stream has ended or was closed; None before."""
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
        text, receipt = "".join(self._texts), self._make_receipt() if self._receipt else None
        tokens, calls = [*self._tokens], [*self._answer.calls]  # not the lists that are worked with
        logprobs = None if self._top is None else [*self._scores]
        return Result(text, tokens, self._finish, usage, timings, self._seed, receipt, calls, logprobs)

    def _make_receipt(self) -> Receipt:
        chosen = len(self._tokens) + (self.ended_by is not None)  # there may be more after a stop text
        return Receipt(
            self._model.digest, self._adapter, self._kv_type, self._n_ctx, list(self._prompt), list(self._tokens),
            self.ended_by, self._finish, self._seed, sampling_of(self._options),
            [written(each) for each in self._digests[:chosen]],
        )  # fmt: skip

    def _advance(self) -> Piece:
        """One token further."""
        self._session._open  # noqa: B018  raises, also where tokens are at hand
        if not self._begun:
            self.begin()
        while not self.ready:
            entry = self.entry()
            step_batch([entry])
            self.take(entry)
        return self.pop()

    # ---- for computing several streams together ----

    @property
    def done(self) -> bool:
        """Whether the answer is complete."""
        return self._done

    @property
    def ready(self) -> bool:
        """Whether the next token of the answer has been chosen, and scored if asked."""
        return bool(self._drawn) and not self._unread and (self._top is None or self._scored is not None)

    @property
    def loads(self) -> int:
        """Tokens of the prompt that have to be computed."""
        return self._unread

    def shares_session(self, other: Stream) -> bool:
        """Whether both use the same session, and so cannot be computed together."""
        return self._session is other._session

    @property
    def stopped_by(self) -> str:
        """The stop text that ended the answer; "": it ended otherwise."""
        return self._answer.stopped_by

    def begin(self) -> None:
        """Take what the session has of the prompt. Images, and a prefix, are computed here and now."""
        if self._begun:
            return
        begin = time.perf_counter()
        if self._pixels is None and self._model.mask != "prefix":
            self._model.require_head()
            self._model.require_embedding()
            held = self._session._keep(self._prompt)
            self._session._fit(len(self._prompt) - held)
            self._missing, self._unread = list(self._prompt[held:]), len(self._prompt) - held
        else:
            rows = None if self._pixels is None else vision.encode(self._model, self._pixels, self._session)
            self._computed = extend(self._session, self._prompt, rows)
            self._unread = 0
        self._session.seed(self._seed)
        self._force()
        if not self._missing:
            self._draw()
        self._changes = self._session._changes
        self._begun = True
        self._score()
        self._prompt_seconds = time.perf_counter() - begin

    def entry(self, piece: int = BLOCK, looked_up: int = BLOCK) -> Entry:
        """What it has in the next pass, once it has begun: of its prompt, and of guesses, so many tokens at most."""
        with self._session._lock:  # else the library may be at the last one, for a thread that reads beside a batch
            tokens = self._missing[: len(self._missing) - len(self._drawn)]
            if self._unread > piece:
                return self._ask(tokens[:piece])
            if self._drawn:  # what comes next is known, and the row that it might have come from may be wanted
                return self._ask(tokens, most=1)
            most, sampler = min(self._most + 1, self._limit - len(self._tokens)), self._sampler
            if (missing := self._least - len(self._tokens)) > 0:
                most, sampler = min(most, missing), self._going_on
            guesses: Sequence[int] = ()
            if self._lookup and most > 1 and looked_up and len(tokens) == 1:
                guesses = self._lookup.guess(min(most - 1, looked_up) + bool(self._guide))
            if self._guide:  # which has a row for what follows the last, too
                guesses = self._guide.allow(self._sampler, guesses)[:-1]
            return self._ask(tokens, sampler, guesses, most)

    def _ask(
        self, tokens: Sequence[int], sampler: Sampler | None = None, guesses: Sequence[int] = (), most: int = 0
    ) -> Entry:
        if self._entry is None:
            self._entry = Entry(self._session, tokens, sampler, guesses, most, self._changes)
            self._entry.struct.moment = MOMENT if self._owned else 0
        else:
            self._entry.ask(tokens, sampler, guesses, most)
        return self._entry

    def take(self, entry: Entry) -> None:
        """Take the outcome of a pass. Raises its error."""
        if entry.error:
            raise entry.error
        n = len(entry.tokens)
        if self._unread:
            self._prompt_seconds += entry.seconds
            self._computed += n
            self._unread -= n
        else:
            self._seconds += entry.seconds
        del self._missing[:n]
        if entry.chosen and not self._drawn:
            self._choose(entry.chosen)
        self._score()

    def _score(self) -> None:
        """Score the next token, as the session has the row that it comes from."""
        if self._top is None or not self._drawn or self._unread:
            return
        if (row := self._session.logits) is not None:  # else another call took the session, which the next pass says
            (self._scored,) = score(row[None], [self._drawn[0]], self._top)

    def pop(self) -> Piece:
        """The next token of the answer, which has been chosen."""
        begin = time.perf_counter()
        piece = self._accept(self._drawn.popleft())
        self._seconds += time.perf_counter() - begin
        return piece

    def _draw(self) -> None:
        """Choose the next token of a session that holds all others."""
        if self._guide:
            self._guide.allow(self._sampler)
        self._choose([self._session.draw(self._going_on if self._least > len(self._tokens) else self._sampler)])

    def _choose(self, tokens: Sequence[int]) -> None:
        """The session holds these, but the last."""
        if self._receipt:
            self._digests.extend(self._session._digests(self._session.position - len(tokens), len(tokens)))
        self._drawn.extend(tokens)
        self._missing = [tokens[-1]]
        if self._guide:
            self._guide.take(tokens)
            self._force()

    def _force(self) -> None:
        """Choose the tokens that the grammar forces."""
        if self._guide and (forced := self._guide.forced()):
            self._drawn.extend(forced)
            self._digests.extend([None] * len(forced))
            self._missing = [*self._missing, *forced]

    def _accept(self, token: int) -> Piece:
        """Make a sampled token part of the answer, or end it."""
        scored, self._scored = self._scored, None
        if token in self._end_tokens:
            self._finish, self._done, self.ended_by = "stop", True, token
            piece = Piece(self._answer.flush(), None, self._answer.take(), scored)
        else:
            self._tokens.append(token)
            if scored:
                self._scores.append(scored)
            if self._lookup:
                self._lookup.add(token)
            text = self._answer.push(token)
            whole = self._guide is not None and self._guide.complete and not self._drawn
            if self._answer.stopped or whole or len(self._tokens) == self._limit:
                self._done = True
                text += self._answer.flush(cut=True)  # which may have a stop text
                self._finish = "stop" if self._answer.stopped or whole else "length"
            piece = Piece(text, token, self._answer.take(), scored)
        self._texts.append(piece.text)
        return piece

    def __repr__(self) -> str:
        state = self._finish if self._ended else "running" if self._begun else "not begun"
        return f"<Stream of {len(self._prompt)} tokens and {len(self._tokens)} more, {state}>"


def finish(stream: Stream) -> Result:
    """Read a stream to its end, and return the result."""
    with stream:
        for _ in stream:
            pass
    assert stream.result is not None  # it is closed
    return stream.result
