"""Near-duplicate texts, found by MinHash: by the share of pieces that two texts have in common."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

HASHES = 64
"""Hashes of a text. Pairs that agree in a band of hashes are compared."""
RUN = 5  # words per piece
AT_ONCE = 10_000  # pieces hashed together


Pieces = Callable[[str], Iterable[bytes]]


def runs_of_words(text: str) -> Iterator[bytes]:
    """All sequences of five words; a shorter text as a whole."""
    words = text.split()
    for i in range(max(1, len(words) - RUN + 1)):
        yield " ".join(words[i : i + RUN]).encode()


def lines(text: str) -> Iterator[bytes]:
    """Lines without their indentation, in which copies of source code may differ."""
    return (each for line in text.split("\n") if (each := line.strip().encode()))


def rows(share: float) -> int:
    """Hashes per band: the most that still find 999 of 1,000 pairs with this share, but at least four.

    Four find 99 % at 0.7 and 89 % at 0.6. With more hashes, fewer pairs that have less in common are compared.
    """
    found = [n for n in range(4, 17) if (1 - share**n) ** (HASHES // n) <= 1e-3]
    return max(found, default=4)


class Index:
    """Collects texts that are not alike, with about 5 kB of memory for each."""

    def __init__(self, share: float, pieces: Pieces = runs_of_words) -> None:
        """share: the Jaccard similarity of their pieces from which on two texts are alike; it is estimated to about
        0.06."""
        from datasketch import MinHash, MinHashLSH

        self._share, self._pieces = share, pieces
        self._none = MinHash(num_perm=HASHES, hashfunc=zlib.crc32, scheme="affine32")
        self._near = MinHashLSH(params=(HASHES // rows(share), rows(share)), num_perm=HASHES)
        self._taken = np.empty((1024, HASHES), self._none.hashvalues.dtype)
        self._n = 0

    def signature(self, text: str) -> Any:
        found = self._none.copy()
        pieces = iter(self._pieces(text))
        while some := list(itertools.islice(pieces, AT_ONCE)):
            found.update_batch(some)
        return found

    def add(self, text: str) -> bool:
        """Keep a text unless a kept one is like it. Returns whether it was kept."""
        mine = self.signature(text)
        near = self._taken[self._near.query(mine)]
        if ((near == mine.hashvalues).mean(1) >= self._share).any():
            return False
        self._near.insert(self._n, mine, check_duplication=False)
        if self._n == len(self._taken):
            self._taken = np.concatenate([self._taken, np.empty_like(self._taken)])
        self._taken[self._n] = mine.hashvalues
        self._n += 1
        return True
