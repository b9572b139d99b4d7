"""The loop that generates text: sample a token, turn it into text, append it, repeat."""

from __future__ import annotations

import secrets
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitnet_runtime.abilities import require_embedding, require_head
from bitnet_runtime.answers.ahead import Ahead
from bitnet_runtime.answers.answer import Answer
from bitnet_runtime.answers.choosing import Choice, Chooser, ends_of
from bitnet_runtime.answers.logprobs import Scored, alternatives, score
from bitnet_runtime.answers.result import Piece, Result
from bitnet_runtime.answers.transcript import Transcript
from bitnet_runtime.answers.witness import Witness
from bitnet_runtime.defaults import Sampling, resolve, truth
from bitnet_runtime.errors import InvalidParameterError, TokenizerError
from bitnet_runtime.facts import ModelFacts, detokenizer_of
from bitnet_runtime.ids import NO_TOKEN
from bitnet_runtime.images import vision
from bitnet_runtime.sessions.input import BLOCK
from bitnet_runtime.sessions.prompt import extend
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.sessions.steps import Entry, step_batch

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.chat.calls import CallReader
    from bitnet_runtime.chat.thoughts import ThoughtReader
    from bitnet_runtime.structured.guide import Guide


MOMENT = 0.5e-3
"""Seconds for which the engine goes on unasked: with a small model to ask takes as long as a token. In a session of
somebody else it does not, as that holds what was asked for and no more."""
NOTHING: Choice = None, (), 0
ROW: Choice = None, (), 1  # what is chosen is known, and the row is kept


class Writer:
    """The loop of one answer, alone by `advance` or by passes together with others; a `Stream` reads what it writes."""

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
        thinker: ThoughtReader | None = None,
    ) -> None:
        """prompt: -1 where the vectors of an image stand; pixels: of these images; guide: `guide_of(model, options)`,
        made before, as that may take seconds. receipt: the result has one. adapter: of a new session. reader: takes
        calls out of the text. logprobs: tokens are scored, beside so many others. thinker: takes thoughts out of the
        text."""
        self._top = alternatives(logprobs)
        if self._top is not None:
            options = resolve({"draft": 0}, options)  # the row that each token comes from is wanted
        if truth("receipt", receipt) and pixels is not None:
            raise InvalidParameterError("a receipt is of tokens alone, and images are given", "receipt")
        if receipt:
            model.digest  # noqa: B018  hashes the file, while nobody waits for a token
        needed = None if options.max_tokens is None else min(model.n_ctx, len(prompt) + options.max_tokens)
        ends = ends_of(options, model.end_tokens, model.vocab_size)
        self._chooser = Chooser(model, options, ends, prompt, guide)
        detokenizer = detokenizer_of(model, [token for token in prompt if token != NO_TOKEN])
        if options.stop and detokenizer is None:
            raise TokenizerError(f"{model.path.name} has no tokenizer, so no stop texts; give stop_token_ids")
        self.owned = session is None  # the session ends with the answer
        self.session = session or Session._new(model, needed, adapter=adapter, draft=self._chooser.most > 0)
        self._model, self._prompt, self._pixels = model, prompt, pixels
        self._seed = secrets.randbits(32) if options.seed is None else options.seed
        room = self.session.n_ctx - len(prompt) + 1  # the last token is sampled and not appended
        limit = room if options.max_tokens is None else min(options.max_tokens, room)
        self._transcript = Transcript(Answer(detokenizer, options.stop, reader, thinker), ends, limit)
        self._witness = Witness(model, self.session, prompt, options, self._seed) if receipt else None
        self._ahead = Ahead(len(prompt))
        self._scored: Scored | None = None  # the next token, if asked
        self.begun = False
        self._changes = 0  # of the session, when it had begun
        self._entry: Entry | None = None  # that of all its passes
        self.moment = MOMENT if self.owned else 0.0  # for which the engine goes on unasked
        self.done = self._transcript.complete

    def result(self) -> Result:
        """What there is of it."""
        receipt = self._witness.receipt(self._transcript) if self._witness else None
        return self._transcript.result(len(self._prompt), self._seed, receipt, scores=self._top is not None)

    def advance(self) -> Piece:
        """One token further."""
        self.session._open  # noqa: B018  raises, also where tokens are at hand
        if not self.begun:
            self.begin()
        while not self.ready:
            entry = self.entry()
            step_batch([entry])
            self.take(entry)
        return self.pop()

    @property
    def ready(self) -> bool:
        """Whether the next token of the answer has been chosen, and scored if asked."""
        ahead = self._ahead
        return bool(ahead.drawn) and not ahead.unread and (self._top is None or self._scored is not None)

    @property
    def loads(self) -> int:
        """Tokens that have to be computed before one is chosen: of the prompt, or of all, after `move`."""
        return self._ahead.unread

    @property
    def stopped_by(self) -> str:
        """The stop text that ended the answer; "": it ended otherwise."""
        return self._transcript.answer.stopped_by

    @property
    def ended_by(self) -> int | None:
        """The end token, if one came."""
        return self._transcript.ended_by

    def begin(self) -> None:
        """Take what the session has of the prompt. Images, and a prefix, are computed here and now."""
        if self.begun:
            return
        begin = time.perf_counter()
        if self._pixels is None and self._model.mask != "prefix":
            require_head(self._model)
            require_embedding(self._model)
            held = self.session._keep(self._prompt)
            self.session._fit(len(self._prompt) - held)
            self._ahead.load(self._prompt[held:])
        else:
            rows = None if self._pixels is None else vision.encode(self._model, self._pixels, self.session)
            self._transcript.loaded = extend(self.session, self._prompt, rows)
            self._ahead.load(())
        self.session.seed(self._seed)
        self._force(self._chooser.chosen(()))
        if not self._ahead.missing:
            self._choose([self._chooser.draw(self.session, made=0)])
        self._changes = self.session._changes
        self.begun = True
        if self._top is not None:
            self._score(self._top)
        self._transcript.prompt_seconds = time.perf_counter() - begin

    def move(self, session: Session, held: Sequence[int]) -> None:
        """Go on in another session, which has a beginning of `held`, all tokens that the last one had."""
        self._ahead.lost(held[session.position :])
        self.session, self._entry = session, None
        session.seed(self._seed)
        self._changes = session._changes

    def entry(self, piece: int = BLOCK, looked_up: int = BLOCK) -> Entry:
        """What it has in the next pass, once it has begun: of its prompt, and of guesses, so many tokens at most."""
        ahead, answer = self._ahead, self._transcript
        with self.session._lock:  # else the library may be at the last one, for another thread
            tokens = ahead.next
            if ahead.unread > piece:
                return self._ask(tokens[:piece], NOTHING)
            if ahead.drawn:  # what comes next is known, and the row that it might have come from may be wanted
                return self._ask(tokens, ROW)
            looked_up = looked_up if len(tokens) == 1 else 0
            return self._ask(tokens, self._chooser.choice(len(answer.tokens), answer.room, looked_up))

    def _ask(self, tokens: Sequence[int], choice: Choice) -> Entry:
        if self._entry is None:
            self._entry = Entry(self.session, tokens, *choice, self._changes)
        else:
            self._entry.ask(tokens, *choice)
        self._entry.struct.moment = self.moment
        return self._entry

    def take(self, entry: Entry) -> None:
        """Take the outcome of a pass. Raises its error."""
        if entry.error:
            raise entry.error
        n, ahead, answer = len(entry.tokens), self._ahead, self._transcript
        if ahead.unread:
            answer.prompt_seconds += entry.seconds
            answer.loaded += n
        else:
            answer.seconds += entry.seconds
        ahead.computed(n)
        if entry.chosen and not ahead.drawn:
            self._choose(entry.chosen)
        if self._top is not None:
            self._score(self._top)

    def pop(self) -> Piece:
        """The next token of the answer, which has been chosen."""
        begin = time.perf_counter()
        ahead, answer = self._ahead, self._transcript
        token = ahead.drawn.popleft()
        whole = not ahead.drawn and self._chooser.complete
        scored, self._scored = self._scored, None
        piece = answer.accept(token, scored, whole)
        if piece.token is not None and self._chooser.guesses:
            self._chooser.guesses.add(token)
        if answer.complete:
            self.done = True  # never False: whoever closes a stream says so, too
        answer.seconds += time.perf_counter() - begin
        return piece

    def _choose(self, tokens: Sequence[int]) -> None:
        """The session holds these, but the last."""
        if self._witness:
            self._witness.chosen(self.session, len(tokens))
        self._ahead.chosen(tokens)
        self._force(self._chooser.chosen(tokens))

    def _force(self, tokens: Sequence[int]) -> None:
        """The grammar leaves no choice of these."""
        if tokens:
            self._ahead.forced(tokens)
            if self._witness:
                self._witness.forced(len(tokens))

    def _score(self, top: int) -> None:
        """Score the next token, if the session has the row that it comes from."""
        if not self._ahead.drawn or self._ahead.unread:
            return
        if (row := self.session.logits) is not None:  # else another call took the session, which the next pass says
            (self._scored,) = score(row[None], [self._ahead.drawn[0]], top)
