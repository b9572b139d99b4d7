"""Batches of a mixture: which source each sequence comes from, and which of that source's sequences it is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitnet.data.corpus import DataError
from bitnet.data.dataset import Batches, Tokens, View, seed_of
from bitnet.data.mixture import UNITS, Sources, Weights

if TYPE_CHECKING:
    from torch import Tensor


def counts(units: Sequence[int], n: int) -> list[int]:
    """How many of the first n sequences come from each source: as close as possible to their weights.

    The next one always comes from the source with the largest weight / (2 × its count + 1): Sainte-Laguë.
    """
    total, k = sum(units), len(units)
    reached = max(0, n - k)  # computed directly up to a common quotient; few remain for the loop
    found = [(2 * reached * unit + total) // (2 * total) for unit in units]
    while sum(found) < n:
        found[_next(units, found)] += 1
    return found


def _next(units: Sequence[int], found: Sequence[int]) -> int:
    best = -1
    for i, unit in enumerate(units):
        if unit and (best < 0 or unit * (2 * found[best] + 1) > units[best] * (2 * found[i] + 1)):
            best = i
    return best


class Mixed:
    """Sequence n of a mixture. `course`: (first sequence, weights) of each stage so far; more may be appended."""

    def __init__(self, tokens: Sources, batch: int, context: int, seed: int, view: View | None = None) -> None:
        self.tokens, self.batch, self.context, self.view = tokens, batch, context, view
        self._names = list(tokens.parts)
        self._each = [  # each with a seed of its own: the order of equally many windows would be the same
            _batches(name, part, context, seed_of(seed, i) if i else seed)
            for i, (name, part) in enumerate(tokens.parts.items())
        ]
        self.course: tuple[tuple[int, Weights], ...] = ((0, tokens.mixture.weights_at(0, 0)),)

    def passes(self, n: int) -> float:
        """How many epochs of the most repeated source the first n sequences contain."""
        _, _, found = self._before(n)
        return max(count / each.per_epoch for count, each in zip(found, self._each, strict=True))

    def sequences(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Inputs, targets and further model arguments of the sequences from `first` to before `last`."""
        import torch

        inputs_NT, targets_NT = (torch.empty(last - first, self.context, dtype=torch.int64) for _ in range(2))
        places: list[list[int]] = [[] for _ in self._each]
        _, _, begun = self._before(first)
        for place, number in enumerate(range(first, last)):
            places[self._source(number)].append(place)
        for each, at, begin in zip(self._each, places, begun, strict=True):
            if at:
                inputs_NT[at], targets_NT[at] = each.sequences(begin, begin + len(at))
        return self.view(inputs_NT, targets_NT, range(first, last)) if self.view else (inputs_NT, targets_NT)

    def _source(self, n: int) -> int:
        """The index of the source of sequence n."""
        units, inside, _ = self._before(n)
        return _next(units, counts(units, inside))

    def _before(self, n: int) -> tuple[list[int], int, list[int]]:
        """The weights at sequence n, how many earlier sequences have them, and how many of all earlier ones come from
        each source."""
        total, units, begin = [0] * len(self._names), [0] * len(self._names), 0
        ends = [*(begin for begin, _ in self.course[1:]), n]
        for (begin, weights), end in zip(self.course, ends, strict=True):
            units = [round(weights[name] * UNITS) for name in self._names]
            inside = counts(units, min(end, n) - begin)
            total = [a + b for a, b in zip(total, inside, strict=True)]
            if end > n:
                break
        return units, n - begin, total


def _batches(name: str, part: Tokens, context: int, seed: int) -> Batches:
    try:
        return Batches(part, 1, context, seed)
    except DataError as error:
        raise DataError(f"source {name}: {error}") from None
