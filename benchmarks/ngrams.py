"""An n-gram model of token ids, with interpolated Kneser-Ney smoothing: what counting alone learns from a text."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

Ids = NDArray[Any]


@dataclass(frozen=True)
class Counts:
    """Counts of the n-grams of one length. A key has its ids as digits, the last one lowest."""

    keys: Ids  # sorted
    counts: Ids
    contexts: Ids  # sorted: the keys without the last id
    totals: Ids  # sums of their counts
    kinds: Ids  # numbers of distinct ids that follow them

    @classmethod
    def of(cls, keys: Ids, counts: Ids, base: int) -> Self:
        contexts, first, kinds = np.unique(keys // base, return_index=True, return_counts=True)
        return cls(keys, counts, contexts, np.add.reduceat(counts, first), kinds)

    @property
    def discount(self) -> float:
        once, twice = (int((self.counts == n).sum()) for n in (1, 2))
        return once / (once + 2 * twice) if once else 0.5

    def probabilities(self, keys: Ids, shorter: Ids, base: int) -> Ids:
        """Probabilities of n-grams, given those of the model of shorter n-grams."""
        _, counts = _found(self.keys, keys, self.counts)
        known, totals, kinds = _found(self.contexts, keys // base, self.totals, self.kinds)
        most = np.maximum(counts - self.discount, 0) + self.discount * kinds * shorter
        return np.where(known, most / np.maximum(totals, 1), shorter)


def _found(table: Ids, keys: Ids, *values: Ids) -> list[Ids]:
    """Whether each key is in a sorted table, and the values at its place, 0 if it is not."""
    places = np.minimum(np.searchsorted(table, keys), len(table) - 1)
    known = table[places] == keys
    return [known, *(np.where(known, value[places], 0) for value in values)]


class NGrams:
    """Learns from ids below `base`. base ** order is at most 2 ** 63."""

    def __init__(self, ids: Ids, order: int, base: int) -> None:
        assert float(base) ** order <= 2.0**63
        self.base, self.orders = base, list[Counts]()
        keys, counts = np.unique(_keys(ids, order, base), return_counts=True)
        for n in range(order, 0, -1):
            self.orders.insert(0, Counts.of(keys, counts, base))
            if n > 1:  # shorter ones count distinct preceding ids, not occurrences
                keys, counts = np.unique(keys % base ** (n - 1), return_counts=True)

    def probabilities(self, ids: Ids) -> Ids:
        """Probability of each id given those before it."""
        found = np.full(len(ids), 1 / self.base)
        for n, counts in enumerate(self.orders, 1):
            found[n - 1 :] = counts.probabilities(_keys(ids, n, self.base), found[n - 1 :], self.base)
        return found


def _keys(ids: Ids, n: int, base: int) -> Ids:
    keys = np.zeros(len(ids) - n + 1, np.int64)
    for i in range(n):
        keys = keys * base + ids[i : len(ids) - n + 1 + i]
    return keys
