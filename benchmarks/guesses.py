"""Guesses of the next tokens, and their outcomes: parts of drafts.py."""

from __future__ import annotations

import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from bitnet_runtime import Session
from bitnet_runtime.answers.answer import Lookup
from bitnet_runtime.answers.choosing import AT_ONCE
from bitnet_runtime.sessions.sampler import Sampler

Guess = Callable[[list[int], int], list[int]]
"""(the tokens so far, how many to guess at most) -> guesses."""

Chain = Callable[[int, int], Any]
"""(a token, how many to guess at most) -> guesses of what follows it."""

AUTO = -1  # in place of a draft length: the engine's default


@dataclass
class Tally:
    """Totals of all runs with one draft length."""

    tokens: int = 0
    passes: int = 0
    offered: list[int] = field(default_factory=list)  # by place in the draft: guesses that were checked
    right: list[int] = field(default_factory=list)
    speeds: list[float] = field(default_factory=list)  # tokens per second of each run

    def count(self, draft: Sequence[int], out: Sequence[int]) -> None:
        self.passes += 1
        right = 0
        while right < min(len(draft), len(out)) and draft[right] == out[right]:
            right += 1
        for place in range(min(right + 1, len(draft))):  # guesses after the first wrong one are not checked
            if place == len(self.offered):
                self.offered.append(0)
                self.right.append(0)
            self.offered[place] += 1
            self.right[place] += place < right

    def row(self) -> dict[str, Any]:
        shares = [right / offered for right, offered in zip(self.right, self.offered, strict=True)]
        return {
            "tokens_per_pass": self.tokens / self.passes,
            "right": shares,
            "tok_s": statistics.median(self.speeds),
        }


def run(session: Session, prompt: Sequence[int], seed: int, sampler: Sampler, guess: Guess, n: int, most: int,
        tally: Tally, depth: int = 0) -> list[int]:  # fmt: skip
    """Generate n tokens after a prompt, which follows `depth` tokens of the session, with drafts of up to `most`."""
    session.rewind(depth)
    session.feed(prompt)
    session.seed(seed)
    tokens: list[int] = []
    begin = time.perf_counter()
    while len(tokens) < n:
        left = n - len(tokens)
        draft = guess(tokens, min(most, left)) if most > 0 else []
        out = session.advance(sampler, draft, min(AT_ONCE, left) if most == AUTO else 1)
        tally.count(draft, out)
        tokens += out
    seconds = time.perf_counter() - begin
    tally.tokens += len(tokens)
    tally.speeds.append(len(tokens) / seconds)
    return tokens


def repetitions(prompt: Sequence[int]) -> Guess:
    """Guesses as `--draft` makes them."""
    lookup, known = Lookup(prompt), 0

    def guess(tokens: list[int], most: int) -> list[int]:
        nonlocal known
        for token in tokens[known:]:
            lookup.add(token)
        known = len(tokens)
        return lookup.guess(most)

    return guess


def of_layer(session: Session, sampler: Sampler) -> Guess:
    """The next token, and what the model's draft layer guesses after it."""

    def guess(tokens: list[int], most: int) -> list[int]:
        token = session.draw(sampler)
        return [token, *(guessed for guessed, _ in session.guess(sampler, token, most - 1))] if most > 1 else [token]

    return guess


def as_good_as(right: Sequence[int], share: float, seed: int, layer: Chain | None = None) -> Guess:
    """Each guess is the right token with this probability, else another one. layer: also run this one, for its cost.
    The first guess, the token that sampling gives, is then always right, as a layer starts after it."""
    draw = random.Random(seed)

    def guess(tokens: list[int], most: int) -> list[int]:
        coming = right[len(tokens) : len(tokens) + most]
        if layer and len(coming) > 1:
            layer(coming[0], len(coming) - 1)
        return [token if draw.random() < share or (layer and i == 0) else token ^ 1 for i, token in enumerate(coming)]

    return guess
