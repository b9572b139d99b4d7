"""How the tokens of an answer are chosen: by a sampler, within a format, and with guesses at those that follow."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitnet_runtime.answers.answer import Guesses, Lookup
from bitnet_runtime.defaults import Sampling
from bitnet_runtime.errors import InvalidParameterError
from bitnet_runtime.facts import ModelFacts, guide_of
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.structured.formats import held_to

if TYPE_CHECKING:
    from bitnet_runtime.structured.guide import Guide

AT_ONCE = 8  # most tokens that the engine guesses in a step


Choice = tuple[Sampler | None, Sequence[int], int]
"""What a pass is asked to choose: by what, guesses, and how many tokens at most."""


class Chooser:
    """Of one answer."""

    def __init__(
        self, model: ModelFacts, options: Sampling, ends: frozenset[int], prompt: Sequence[int], guide: Guide | None
    ) -> None:
        """ends: tokens that are not chosen before there are `min_tokens`."""
        self._sampler = Sampler(options, model.vocab_size)
        self._least = options.min_tokens
        self._going_on = Sampler(options, model.vocab_size, ends) if self._least else self._sampler
        self._guide = guide or guide_of(model, options)
        self.most = AT_ONCE if options.draft is None else options.draft  # guesses in a pass
        self.guesses: Guesses | None = Lookup(prompt) if options.draft else None

    def choice(self, made: int, room: int, looked_up: int) -> Choice:
        """made: tokens of the answer; room: how many more it may have; looked_up: guesses at most."""
        most, sampler = min(self.most + 1, room), self._sampler
        if (missing := self._least - made) > 0:
            most, sampler = min(most, missing), self._going_on
        guesses: Sequence[int] = ()
        if self.guesses and most > 1 and looked_up:
            guesses = self.guesses.guess(min(most - 1, looked_up) + bool(self._guide))
        if self._guide:  # which has a row for what follows the last, too
            guesses = self._guide.allow(self._sampler, guesses)[:-1]
        return sampler, guesses, most

    def draw(self, session: Session, made: int) -> int:
        """The next token of a session that holds all others."""
        if self._guide:
            self._guide.allow(self._sampler)
        return session.draw(self._going_on if self._least > made else self._sampler)

    def chosen(self, tokens: Sequence[int]) -> Sequence[int]:
        """These come next. Returns those that then have to come, which are taken, too."""
        if not self._guide:
            return ()
        self._guide.take(tokens)
        return self._guide.forced()

    @property
    def complete(self) -> bool:
        """Whether the format lets nothing follow what was chosen."""
        return self._guide is not None and self._guide.complete


def ends_of(options: Sampling, own: frozenset[int], vocab_size: int) -> frozenset[int]:
    """Tokens that end an answer. own: those of the model. Raises InvalidParameterError: the options contradict."""
    if (options.min_tokens or options.ignore_eos) and held_to(options):
        name = "min_tokens" if options.min_tokens else "ignore_eos"
        raise InvalidParameterError(
            f"{name} is given beside a format or calls that have to come, which say where it ends; leave one out", name
        )
    if options.max_tokens is not None and options.min_tokens > options.max_tokens:
        raise InvalidParameterError(
            f"min_tokens is {options.min_tokens}, expected at most max_tokens, which is {options.max_tokens}",
            "min_tokens",
        )
    if outside := [token for token in options.stop_token_ids if token >= vocab_size]:
        raise InvalidParameterError(
            f"stop_token_ids has {outside[0]}, expected ids from 0 to {vocab_size - 1}", "stop_token_ids"
        )
    return frozenset(options.stop_token_ids) | (frozenset() if options.ignore_eos else own)
