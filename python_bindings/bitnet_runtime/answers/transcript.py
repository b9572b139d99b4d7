"""What an answer has become: its tokens and their texts, how it ended, and how long it took."""

from __future__ import annotations

from bitnet_runtime.answers.answer import Answer
from bitnet_runtime.answers.logprobs import Scored
from bitnet_runtime.answers.receipt import Finish, Receipt
from bitnet_runtime.answers.result import Piece, Result, Timings, Usage


class Transcript:
    """Of one answer. Tokens in, pieces out."""

    def __init__(self, answer: Answer, ends: frozenset[int], limit: int) -> None:
        """ends: tokens that end it; limit: of the tokens that it may have."""
        self.answer = answer
        self._ends, self._limit = ends, limit
        self.tokens: list[int] = []
        self._texts: list[str] = []
        self._thoughts: list[str] = []
        self._scores: list[Scored] = []  # of the tokens, if asked
        self.complete = limit <= 0
        self.finish: Finish = "length" if self.complete else "cancelled"
        self.ended_by: int | None = None  # the end token, if one came
        self.loaded = 0  # tokens of the prompt that were computed
        self.prompt_seconds = self.seconds = 0.0

    @property
    def room(self) -> int:
        """Tokens that it may still have."""
        return self._limit - len(self.tokens)

    def accept(self, token: int, scored: Scored | None, whole: bool) -> Piece:
        """Make a chosen token part of the answer, or end it. whole: nothing may follow it."""
        if token in self._ends:
            self.finish, self.complete, self.ended_by = "stop", True, token
            text, of = self.answer.flush(), None
        else:
            self.tokens.append(token)
            if scored:
                self._scores.append(scored)
            text = self.answer.push(token)
            if self.answer.stopped or whole or len(self.tokens) == self._limit:
                self.complete = True
                text += self.answer.flush(cut=not whole)  # which may have a stop text
                self.finish = "stop" if self.answer.stopped or whole else "length"
            of = token
        piece = Piece(text, of, self.answer.take(), scored, self.answer.take_thoughts())
        self._texts.append(piece.text)
        self._thoughts.append(piece.reasoning)
        return piece

    def result(self, n_prompt: int, seed: int, receipt: Receipt | None, scores: bool) -> Result:
        """With lists of its own. scores: it has those of the tokens."""
        made = len(self.tokens)
        timings = Timings(
            self.prompt_seconds, self.loaded / (self.prompt_seconds or 1), self.seconds, made / (self.seconds or 1)
        )
        usage = Usage(n_prompt, made, n_prompt + made, self.answer.thinking)
        text, thoughts = "".join(self._texts), "".join(self._thoughts)
        tokens, calls, logprobs = [*self.tokens], [*self.answer.calls], [*self._scores] if scores else None
        return Result(text, tokens, self.finish, usage, timings, seed, receipt, calls, logprobs, thoughts)
