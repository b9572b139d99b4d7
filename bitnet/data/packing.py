"""Sequence packing: rows that hold several texts of any length, and batches of such rows.

`Transformer` keeps the texts of a row apart by their numbers: each sees only itself, at the positions it would
have alone, so that packing changes no logit.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Generic, NamedTuple, Protocol, TypeVar

import numpy as np
from numpy.typing import NDArray

from bitnet.data.corpus import DataError
from bitnet.data.dataset import IGNORED, PADDING, Shuffled

if TYPE_CHECKING:
    from torch import Tensor


class Dialogue(NamedTuple):
    """Token ids, and which of them are targets."""

    ids: NDArray[np.int32]
    counts: NDArray[np.bool_]


class Packed(Protocol):
    """Texts in rows."""

    digest: str
    n_tokens: int

    def windows(self, context: int) -> int:
        """The number of rows of `context` tokens."""

    def window(self, indices: Sequence[int], context: int) -> tuple[Tensor, ...]:
        """Inputs, targets and further model arguments of these rows."""


def best_fit(lengths: Mapping[int, int], context: int, alone: bool = False) -> list[list[int]]:
    """Which texts share a row: the longest first, each into the fullest row with room. alone: none share."""
    rows: list[list[int]] = []
    free: list[tuple[int, int]] = []  # room, row; sorted
    for i in sorted(lengths, key=lambda i: -lengths[i]):
        place = len(free) if alone else bisect.bisect_left(free, (lengths[i], -1))
        room, row = free.pop(place) if place < len(free) else (context, len(rows))
        if row == len(rows):
            rows.append([])
        rows[row].append(i)
        bisect.insort(free, (room - lengths[i], row))
    return rows


def filled(rows: Sequence[Iterable[tuple[int, Dialogue]]], context: int) -> tuple[Tensor, Tensor, Tensor]:
    """Inputs, targets (IGNORED where nothing is learnt) and documents, int64 (len(rows), context) each.

    rows: the texts of each with their numbers; a text longer than the context is truncated.
    """
    import torch

    inputs = torch.zeros(len(rows), context, dtype=torch.int64)
    targets, documents = torch.full_like(inputs, IGNORED), torch.full_like(inputs, PADDING)
    for row, texts in enumerate(rows):
        first = 0
        for number, text in texts:
            ids, counts = (torch.from_numpy(part[: context + 1]) for part in text)
            last = first + len(ids) - 1
            inputs[row, first:last] = ids[:-1]
            targets[row, first:last] = torch.where(counts[1:], ids[1:].long(), IGNORED)
            documents[row, first:last] = number
            first = last
    return inputs, targets, documents


T = TypeVar("T", bound=Packed)


class Batches(Generic[T]):
    """Sequence n, a pure function of the seed and n; an epoch visits every row once in random order."""

    def __init__(self, texts: T, batch: int, context: int, seed: int) -> None:
        self.tokens, self.batch, self.context, self.seed = texts, batch, context, seed
        self.per_epoch = texts.windows(context)
        if not self.per_epoch:
            raise DataError(f"no answer lies within the first {context} tokens of its conversation; raise --context")
        self._order = Shuffled(self.per_epoch, seed)

    def sequences(self, first: int, last: int) -> tuple[Tensor, ...]:
        """`Packed.window` of the sequences from `first` to before `last`."""
        return self.tokens.window([self._order[n] for n in range(first, last)], self.context)
