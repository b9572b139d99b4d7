"""Fill in the middle: in some documents of a sequence the middle is moved to the end (arXiv 2207.14255).

    <|fim_prefix|> prefix <|fim_suffix|> suffix <|fim_middle|> middle <|endoftext|>

Each sequence is a pure function of its number. Documents are cut after they are put into sequences, so that all
three parts are within the context.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from tokenizers import Tokenizer
from torch import Tensor

from bitnet.data.dataset import View, seed_of
from bitnet.data.tokenizer import fim_tokens

LEAST = 8  # fewest tokens of a document to be cut
WITHIN = 0.5  # share of the cuts within a token of several characters, as editors ask in the middle of a word


@dataclass(frozen=True)
class Infilling:
    """A view of sequences in which a `share` of the documents is cut into three parts."""

    share: float
    words: Tokenizer
    first: int  # token before every document
    end: int  # token after a middle
    seed: int
    then: View | None = None  # another view, applied to the result

    def __call__(self, inputs_BT: Tensor, next_BT: Tensor, numbers: Sequence[int]) -> tuple[Tensor, ...]:
        rows = torch.cat([inputs_BT, next_BT[:, -1:]], 1).tolist()
        moved = torch.tensor([self._row(row, number) for row, number in zip(rows, numbers, strict=True)])
        seen = moved[:, :-1], moved[:, 1:]
        return self.then(*seen, numbers) if self.then else seen

    @cached_property
    def marks(self) -> tuple[int, int, int]:
        return fim_tokens(self.words)

    def _row(self, row: list[int], number: int) -> list[int]:
        """A row of the same length; if a document becomes longer, the end of the row is lost."""
        rng, out, moved = random.Random(seed_of(self.seed, number)), list[int](), list[int]()
        for document in self._documents(row):
            head = document[:1] if document[0] == self.first else []
            body = document[len(head) :]
            if moved[-1:] == head:  # the preceding middle already ended with this token
                head = []
            room = len(row) - len(out) - len(head)
            chosen = len(body) >= LEAST and rng.random() < self.share
            moved = self._moved(body, room, rng) if chosen else []
            out += head + (moved or body)
        return out[: len(row)]

    def _documents(self, row: list[int]) -> Iterator[list[int]]:
        places = [i for i, token in enumerate(row) if token == self.first and i > 0]
        for begin, end in zip([0, *places], [*places, len(row)], strict=True):
            yield row[begin:end]

    def _moved(self, body: list[int], room: int, rng: random.Random) -> list[int]:
        """The three parts with their marks, in at most `room` tokens; empty if the middle alone takes more."""
        a, b = sorted(rng.sample(range(len(body) + 1), 2))
        before, middle, behind = body[:a], body[a:b], body[b:]
        left, right = self._parted(body[a], rng)
        before, middle = before + left, right + middle[1:]
        if behind:
            left, right = self._parted(behind[0], rng)
            middle, behind = middle + left, right + behind[1:]
        begin, hole, gap = self.marks
        excess = len(before) + len(middle) + len(behind) + 4 - room
        if excess > 0:  # drop what is farthest from the middle
            cut = min(excess, len(before))
            before, behind = before[cut:], behind[: max(len(behind) - (excess - cut), 0)]
        moved = [begin, *before, hole, *behind, gap, *middle, self.end]
        return moved if len(moved) <= room else []

    def _parted(self, token: int, rng: random.Random) -> tuple[list[int], list[int]]:
        """The tokens before and after a cut at, or within, a token."""
        place = rng.random()
        text = self.words.decode([token])
        if rng.random() >= WITHIN or len(text) < 2:
            return [], [token]
        at = 1 + int(place * (len(text) - 1))
        left, right = (self.words.encode(part, add_special_tokens=False).ids for part in (text[:at], text[at:]))
        whole = "\ufffd" not in text and self.words.decode(left + right) == text and left and right
        return (left, right) if whole else ([], [token])
