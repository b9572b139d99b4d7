"""Texts that are nearly the same, found by MinHash: by how many of their pieces two have in common."""

from __future__ import annotations

import itertools
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

BANDS, ROWS = 16, 4
"""Of the 64 hashes of a text. Pairs that agree in a band are compared: 89 % of those at 0.6, 99 % at 0.7."""
RUN = 5  # words of a piece
AT_ONCE = 10_000  # pieces that are hashed together


Pieces = Callable[[str], Iterable[bytes]]


def runs_of_words(text: str) -> Iterator[bytes]:
    """Every five words that follow each other; of a shorter text all of it."""
    words = text.split()
    for i in range(max(1, len(words) - RUN + 1)):
        yield " ".join(words[i : i + RUN]).encode()


def lines(text: str) -> Iterator[bytes]:
    """Without their indentation: what copies of source code have in common."""
    return (each for line in text.split("\n") if (each := line.strip().encode()))


class Index:
    """Texts that are not alike. It takes about 5 kB of memory for each."""

    def __init__(self, share: float, pieces: Pieces = runs_of_words) -> None:
        """share: of the pieces that either of two texts has, those that both have, from which on they are alike; it
        is estimated to about 0.06."""
        from datasketch import MinHash, MinHashLSH

        self._share, self._pieces = share, pieces
        self._none = MinHash(num_perm=BANDS * ROWS, hashfunc=zlib.crc32, scheme="affine32")
        self._near = MinHashLSH(params=(BANDS, ROWS), num_perm=BANDS * ROWS)
        self._taken: list[Any] = []

    def signature(self, text: str) -> Any:
        found = self._none.copy()
        pieces = iter(self._pieces(text))
        while some := list(itertools.islice(pieces, AT_ONCE)):
            found.update_batch(some)
        return found

    def add(self, text: str) -> bool:
        """Take a text, unless one that was taken is like it."""
        mine = self.signature(text)
        if any(mine.jaccard(self._taken[other]) >= self._share for other in self._near.query(mine)):
            return False
        self._near.insert(len(self._taken), mine, check_duplication=False)
        self._taken.append(mine)
        return True
