"""An answer as it grows: its text, and draft tokens by n-gram lookup."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Protocol

from bitnet_runtime.chat.calls import CallPart, CallReader
from bitnet_runtime.chat.thoughts import ThoughtReader
from bitnet_runtime.chat.tools import ToolCall
from bitnet_runtime.ids import NO_TOKEN
from bitnet_runtime.tokenizer.text import Detokenizer


class Answer:
    """Tokens in, text out; ends at a stop text, and holds back whatever may become one."""

    def __init__(
        self,
        detokenizer: Detokenizer | None,
        stop: tuple[str, ...],
        reader: CallReader | None = None,
        thinker: ThoughtReader | None = None,
    ) -> None:
        """reader: extracts tool calls from the text; thinker: thoughts, before that."""
        self._detokenizer = detokenizer
        self.reader, self._thinker = reader, thinker
        self._shown = {**(thinker.shown if thinker else {}), **(reader.shown if reader else {})}
        self._thoughts = ""
        self._thinking = 0  # tokens before the answer
        self._stop = [_Stop(text) for text in stop]
        self._held = ""
        self.stopped_by = ""  # the stop text that ended it

    @property
    def parted(self) -> bool:
        """Whether its text is not all that the tokens say."""
        return self.reader is not None or self._thinker is not None

    @property
    def stopped(self) -> bool:
        return bool(self.stopped_by) or (self.reader is not None and self.reader.done)

    @property
    def calls(self) -> list[ToolCall]:
        """The tool calls so far."""
        return self.reader.calls if self.reader else []

    def take(self) -> tuple[CallPart, ...]:
        """Parts of calls since the last time."""
        return self.reader.take() if self.reader else ()

    @property
    def thinking(self) -> int:
        """Tokens of thoughts, with those of their tags."""
        return self._thinking if self._thinker and self._thinker.thought else 0

    def take_thoughts(self) -> str:
        """Thoughts since the last time."""
        thoughts, self._thoughts = self._thoughts, ""
        return thoughts

    def push(self, token: int) -> str:
        self._thinking += self._thinker is not None and not self._thinker.answers
        text = self._detokenizer.push(token) if self._detokenizer else ""
        if self._detokenizer and token in self._shown:
            text += self._detokenizer.flush() + self._shown[token]
        text = self._without_thoughts(text)
        text = self.reader.push(text) if self.reader else text  # a stop text within a call would break it
        return self._until_stop(text) if self._stop else text

    def flush(self, cut: bool = False) -> str:
        """The text held back so far; "" after a stop text. cut: the answer did not end by itself."""
        if self.stopped_by:
            return ""
        text = self._detokenizer.flush() if self._detokenizer else ""
        text = self._without_thoughts(text, final=True)
        text = self.reader.push(text, final=True, cut=cut) if self.reader else text
        if self._stop:
            text, self._held = self._until_stop(text) + self._held, ""
        return text

    def _without_thoughts(self, text: str, final: bool = False) -> str:
        if self._thinker is None:
            return text
        thoughts, text = self._thinker.push(text, final)
        self._thoughts += thoughts
        return text

    def _until_stop(self, text: str) -> str:
        new, text = text, self._held + text
        found = [(place, stop.text) for stop in self._stop if (place := text.find(stop.text)) >= 0]
        if found:
            self._held, (place, self.stopped_by) = "", min(found)
            return text[:place]
        hold = max(stop.begun_by(new) for stop in self._stop)
        self._held = text[len(text) - hold :]
        return text[: len(text) - hold]


class _Stop:
    """A stop text, and how much of it an answer ends with, found in time in proportion to the answer (Knuth, Morris
    and Pratt): both may be as long as a request, and of a kind that takes long to compare."""

    def __init__(self, text: str) -> None:
        self.text = text
        self._begun = 0
        self._ends = [0]  # of so much of it and one character more: as much of the end as it also begins with

    def begun_by(self, more: str) -> int:
        """How many characters of it the answer ends with, which has grown by `more` and does not hold it."""
        for char in more:
            self._begun = self._with(self._begun, char)
        return self._begun

    def _with(self, begun: int, char: str) -> int:
        while begun and self.text[begun] != char:
            begun = self._end(begun)
        return begun + (self.text[begun] == char)

    def _end(self, begun: int) -> int:
        while len(self._ends) < begun:
            self._ends.append(self._with(self._ends[-1], self.text[len(self._ends)]))
        return self._ends[begun - 1]


class Guesses(Protocol):
    """A source of draft tokens."""

    def add(self, token: int) -> None:
        """This one came."""

    def guess(self, most: int) -> Sequence[int]:
        """Up to `most` tokens."""


class Lookup:
    """Speculative decoding by prompt lookup: draft tokens are those that followed the newest n-gram last time.

    It needs no second model, and is good when a text repeats itself (code, summaries). Where a vector stands (-1) no
    token occurred, and none is drafted.
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
            newest = tuple(self._tokens[-n:])
            if len(newest) == n and NO_TOKEN not in (*newest, token):
                self._after[newest] = len(self._tokens)
        self._tokens.append(token)

    def guess(self, most: int) -> list[int]:
        """Up to `most` tokens that may come next."""
        for n in range(self.LONGEST, self.SHORTEST - 1, -1):
            place = self._after.get(tuple(self._tokens[-n:]))
            if place is not None:
                since = list(itertools.takewhile(NO_TOKEN.__ne__, self._tokens[place : place + most]))
                return [since[i % len(since)] for i in range(most)]  # a repeating text goes round again
        return []
