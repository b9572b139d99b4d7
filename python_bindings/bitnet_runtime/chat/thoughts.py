"""Splits a model's output into its thoughts and its answer, as it arrives.

Thoughts stand between two tags at the beginning, of which the prompt may have the first. White space around the tags
is dropped. Text that may turn out to be a tag is held back until that is decided. Where a format holds behind them,
the tags stand at fixed places, so that no white space of the answer is dropped.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

OPEN, CLOSE = "<think>", "</think>"
GAP = "\n\n"  # between thoughts and an answer in a format, as most models write it


def are_written(template: str) -> bool:
    """Whether answers may begin with thoughts, by the chat template of a model."""
    return OPEN in template and CLOSE in template


class Begun(NamedTuple):
    """Where the output of a model that thinks begins. opened: within a thought; text: what there is of it already;
    closed: the prompt says that there are no thoughts; held: a format holds behind them, from `GAP` on."""

    opened: bool
    text: str = ""
    closed: bool = False
    held: bool = False


class ThoughtReader:
    """Text in; thoughts and text out. A state machine: each step names the next."""

    def __init__(self, begun: Begun, shown: Mapping[int, str] | None = None) -> None:
        """shown: tags that are special tokens, and what they say."""
        self.shown = shown or {}
        self._opened, self._held = begun.opened, begun.held
        self._text = ""  # not yet understood
        self._space: list[str] = []  # white space that is dropped if a tag follows
        self._thoughts: list[str] = []
        self._said: list[str] = []
        self.thought = False  # there was one
        self._final = False
        self._step: Callable[[], bool] = self._begin
        self.push(begun.text)
        self._text, self._space = "", []

    def push(self, text: str, final: bool = False) -> tuple[str, str]:
        """What of it, and of what was held back, is thought, and what is text. final: nothing follows."""
        self._text += text
        self._final = final
        while self._step():
            pass
        thoughts, said = "".join(self._thoughts), "".join(self._said)
        self._thoughts, self._said = [], []
        return thoughts, said

    @property
    def thinks(self) -> bool:
        """Whether what follows is a thought, whatever it is."""
        return self._step == self._inside or (self._step == self._begin and self._opened)

    @property
    def answers(self) -> bool:
        """Whether what follows is text."""
        return self._step in (self._behind, self._rest)

    # ---- steps: each takes from the front of the text, and says whether there is more to do ----

    def _begin(self) -> bool:
        """Read to what is no white space, and no beginning of a tag."""
        if not self._held:
            self._hold(len(self._text) - len(self._text.lstrip()))
        if self._text.startswith(OPEN):
            return self._go(self._inside, len(OPEN))
        if OPEN.startswith(self._text) and not self._final:
            return False
        return self._go(self._inside if self._opened else self._rest)

    def _inside(self) -> bool:
        """Read thoughts to the tag that closes them."""
        place = self._text.find(CLOSE)
        end = place if place >= 0 else len(self._text) if self._final else without_begin(self._text, CLOSE)
        bare = len(self._text[:end].rstrip())
        if bare:
            text = self._text[:bare]
            self._thoughts += [*self._space, text] if self.thought else [text.lstrip()]
            self._space, self.thought = [], True
        self._text, end = self._text[bare:], end - bare
        self._hold(end)
        if place >= 0:
            self._space = []
            return self._go(self._behind, len(CLOSE))
        if self._final and self.thought:  # no tag came
            self._thoughts += self._space
            self._space = []
        return False

    def _behind(self) -> bool:
        """Read white space behind the thoughts."""
        if self._held:
            return len(self._text) >= len(GAP) and self._go(self._rest, len(GAP))
        self._text = self._text.lstrip()
        return bool(self._text) and self._go(self._rest)

    def _rest(self) -> bool:
        """Read text to the end."""
        self._said += [*self._space, self._text]
        self._text, self._space = "", []
        return False

    def _hold(self, end: int) -> None:
        """Hold white space at the front back."""
        self._space.append(self._text[:end])
        self._text = self._text[end:]

    def _go(self, step: Callable[[], bool], end: int = 0) -> bool:
        self._text, self._step = self._text[end:], step
        return True


def without_begin(text: str, word: str) -> int:
    """The length of the text without an end that may be the beginning of `word`."""
    return next((len(text) - n for n in range(len(word) - 1, 0, -1) if text.endswith(word[:n])), len(text))
