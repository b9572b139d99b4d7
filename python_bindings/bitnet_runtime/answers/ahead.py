"""Tokens on their way: of a prompt into the session, and what was chosen into the session and the answer."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence


class Ahead:
    """Of one answer. What was chosen is appended to what is missing, and leaves it as the session gets it."""

    def __init__(self, n_prompt: int) -> None:
        self.drawn: deque[int] = deque()  # chosen, and not yet in the answer
        self.missing: list[int] = []  # of the prompt and of what was chosen, not yet in the session
        self.unread = n_prompt  # tokens to read, of the prompt or again, before one is chosen

    def load(self, prompt: Sequence[int]) -> None:
        """This much of the prompt is missing."""
        self.missing, self.unread = list(prompt), len(prompt)

    def lost(self, tokens: Sequence[int]) -> None:
        """The session held these last, before what is missing. They are read again, as a prompt is."""
        self.missing = [*tokens, *self.missing]
        self.unread = len(self.next)

    @property
    def next(self) -> list[int]:
        """What the session needs before the next token of the answer can be chosen, or scored if it was."""
        return self.missing[: len(self.missing) - len(self.drawn)]

    def computed(self, n: int) -> None:
        """The session has so many more."""
        if self.unread:
            self.unread -= n
        del self.missing[:n]

    def chosen(self, tokens: Sequence[int]) -> None:
        """The session holds these, but the last."""
        self.drawn.extend(tokens)
        self.missing = [tokens[-1]]

    def forced(self, tokens: Sequence[int]) -> None:
        """The session holds none of these."""
        self.drawn.extend(tokens)
        self.missing = [*self.missing, *tokens]
