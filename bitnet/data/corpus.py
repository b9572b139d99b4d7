"""Training documents: where they come from, and which are held out.

A document is a file, a line, or a row of a dataset (`bitnet.data.files`, `bitnet.data.hub`). Its content
decides by hash whether it is for training or for validation, so equal texts never lie on both sides, and
the split is the same on every machine.

Texts are read again each time they are needed, so that a corpus may be larger than memory, which holds
only about 100 bytes per document.
"""

from __future__ import annotations

import codecs
import hashlib
import itertools
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from bitnet.data import files, finding, hub
from bitnet.data.files import DataError as DataError
from bitnet.data.files import NotUTF8Error


class Documents:
    """The texts that sources name: files, folders, globs, or datasets (`bitnet.data.hub`).

    Each iteration reads them again. column: the text column of lines and rows.
    """

    def __init__(self, sources: Sequence[str], column: str = files.COLUMN) -> None:
        of_hub = [source for source in sources if hub.is_named(source)]
        paths = [source for source in sources if source not in of_hub]
        self._column = column
        self._runs: set[Path] = set()
        self._others: Counter[str] = Counter()
        self._files = finding.files_of(paths, self._runs, self._others) if paths or not of_hub else []
        self._datasets = {source: hub.rows_of(source, column) for source in of_hub}
        self._left_out: list[str] = []

    @property
    def left_out(self) -> str:
        """A note on what was left out: folders of runs, other kinds of files, and in the last iteration files that are
        not UTF-8 text; "" if nothing was."""
        return "; ".join(filter(None, (self._runs_left_out(), self._others_left_out(), self._files_left_out())))

    def _runs_left_out(self) -> str:
        return f"what runs wrote was left out: {_some(map(str, sorted(self._runs)))}" if self._runs else ""

    def _others_left_out(self) -> str:
        kinds = [kind for kind, _ in sorted(self._others.items(), key=lambda found: (-found[1], found[0]))]
        n = self._others.total()
        what = "1 file of another kind was" if n == 1 else f"{n:,} files of other kinds were"
        return f"{what} left out: {_some(kinds)}" if n else ""

    def _files_left_out(self) -> str:
        n = len(self._left_out)
        what = "1 file was" if n == 1 else f"{n:,} files were"
        return f"{what} left out, not being UTF-8 text: {_some(map(_with_encoding, self._left_out))}" if n else ""

    def __iter__(self) -> Iterator[str]:
        self._left_out = []
        for file in self._files:
            try:
                yield from files.texts_of(file, self._column)
            except NotUTF8Error:
                if files.kind_of(file) in (*files.ROWS, ".csv"):  # some of its texts were already read
                    raise
                self._left_out.append(str(file))
        if len(self._left_out) == len(self._files) > 0 and not self._datasets:
            raise DataError(f"the data holds no text: {self.left_out}")
        for source, rows in self._datasets.items():
            for number, row in enumerate(rows, start=1):
                yield files.text_of(row, f"{source}, row {number}", self._column)


def _some(names: Iterable[str]) -> str:
    """The first ten names, and how many more there are."""
    every = list(names)
    return ", ".join(every[:10]) + (f" and {len(every) - 10:,} others" if len(every) > 10 else "")


COMPRESSIONS = {
    mark: f" ({kind}, which is not read; decompress it, or use .gz or .zst)"
    for mark, kind in ((b"BZh", "bzip2"), (b"\xfd7zXZ", "xz"), (b"PK\3\4", "zip"), (b"7z\xbc\xaf", "7z"))
}
"""What the first bytes of a compressed file say."""


def _with_encoding(file: str) -> str:
    """A file's name, and its encoding or compression if the first bytes reveal it."""
    with files.opened(Path(file)) as content:
        head = content.read(4096)
    marked = head.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
    packed = next((kind for mark, kind in COMPRESSIONS.items() if head.startswith(mark)), "")
    return file + (" (UTF-16)" if marked else packed or (" (NUL bytes)" if b"\0" in head else ""))


PAUSE = 10.0
"""Seconds until a line says how far a reading is; each pause is twice the one before."""


class Reading:
    """Says now and then how much has been read. of: all bytes, if known."""

    def __init__(self, say: Callable[[str], object], of: int = 0) -> None:
        self._say, self._of, self._read = say, f" of {of / 1e6:,.1f}" if of else "", 0
        self._pause, self._due = PAUSE, time.monotonic() + PAUSE

    def add(self, n_bytes: int) -> None:
        self._read += n_bytes
        if time.monotonic() >= self._due:
            self._say(f"read {self._read / 1e6:,.1f}{self._of} MB of text")
            self._pause *= 2
            self._due = time.monotonic() + self._pause


@dataclass(frozen=True)
class Texts:
    """Some of the documents of a source, in its order."""

    source: Iterable[str]
    chosen: bytes | bytearray  # 1 for each document of the source that belongs here, 0 for each other
    digests: list[bytes]  # SHA-256 of the chosen ones
    n_bytes: int
    cut: tuple[int, slice] = (-1, slice(None))  # index of a document of which only this part belongs here
    cut_digest: bytes = b""  # SHA-256 of that whole document
    say: Callable[[str], object] = lambda _: None  # is told now and then how far a reading is

    def __iter__(self) -> Iterator[str]:
        (at, part), digests, reading = self.cut, iter(self.digests), Reading(self.say, self.n_bytes)
        for i, (text, chosen) in enumerate(itertools.zip_longest(self.source, self.chosen)):
            mine = text if i != at or text is None else text[part]
            encoded = mine.encode() if mine is not None and chosen else b""
            if mine is None or chosen is None or (chosen and hashlib.sha256(encoded).digest() != next(digests)):
                raise DataError("the data was changed while it was read; start again")
            if chosen:
                yield mine
                reading.add(len(encoded))


def split(
    source: Iterable[str],
    validation: float,
    say: Callable[[str], object] = lambda _: None,
    take: Callable[[str], bool] = lambda _: True,
) -> tuple[Texts, Texts]:
    """Training and validation texts, without duplicates, which `say` reports. validation: the share held out.

    source: gives the same texts each time it is iterated. take: whether to keep a text, called for unique ones.
    If one side would stay empty (with a single book, say, or by chance with few texts) the end of the longest text is
    held out: the share of all texts, at most half of that one.
    """
    chosen: tuple[bytearray, bytearray] = bytearray(), bytearray()
    digests: tuple[list[bytes], list[bytes]] = [], []
    n_bytes, seen, longest, at, n_texts, n_alike = [0, 0], set(), "", 0, 0, 0
    reading = Reading(say)
    for i, text in enumerate(source):
        digest = hashlib.sha256(encoded := text.encode()).digest()
        reading.add(len(encoded))
        side = int.from_bytes(digest[:8]) < validation * 2**64
        n_texts += bool(text)
        new = bool(text) and digest not in seen
        if new and not take(text):
            new, n_alike = False, n_alike + 1
        chosen[side].append(new)
        chosen[not side].append(False)
        if new:
            seen.add(digest)
            digests[side].append(digest)
            n_bytes[side] += len(encoded)
            longest, at = (text, i) if len(text) > len(longest) else (longest, at)
    if not seen:
        raise DataError("the data holds no text")
    if line := repetitions(n_texts - n_alike - len(seen), n_texts, "documents"):
        say(line)
    if n_alike:
        say(f"{n_alike:,} of {n_texts:,} documents are near duplicates and were left out")
    sides = zip(chosen, digests, n_bytes, strict=True)
    train, held_out = (Texts(source, *of_side, say=say) for of_side in sides)
    if train.digests and held_out.digests:
        return train, held_out
    return _cut(train if train.digests else held_out, longest, at, validation)


def repetitions(n: int, among: int, what: str) -> str:
    """The note on dropped duplicates; "" if there are none."""
    words = ("is a repetition", "was") if n == 1 else ("are repetitions", "were")
    return f"{n:,} of {among:,} {what} {words[0]} and {words[1]} left out" if n else ""


def _cut(texts: Texts, longest: str, at: int, validation: float) -> tuple[Texts, Texts]:
    """`texts` without the end of document `at` of the source, and that end."""
    of_longest = validation * (texts.n_bytes / len(longest.encode()))
    place = int(len(longest) * (1 - min(0.5, of_longest)))
    parts = slice(place), slice(place, None)
    first, last = (longest[part].encode() for part in parts)
    digests, before = list(texts.digests), sum(texts.chosen[:at])
    whole = digests[before]
    digests[before] = hashlib.sha256(first).digest()
    only = bytes(i == at for i in range(len(texts.chosen)))
    return (
        Texts(texts.source, texts.chosen, digests, texts.n_bytes - len(last), (at, parts[0]), whole, texts.say),
        Texts(texts.source, only, [hashlib.sha256(last).digest()], len(last), (at, parts[1]), whole, texts.say),
    )


class Side(Protocol):
    """Which documents one side of a source has, training or validation."""

    @property
    def digests(self) -> Sequence[bytes]:
        """As in `Texts`."""

    @property
    def cut_digest(self) -> bytes:
        """As in `Texts`."""


def check_apart(sides: Mapping[str, tuple[Side, Side]]) -> None:
    """Raises DataError if one source holds out what another learns from. sides: training and validation of each source,
    by name.

    Equal documents are on the same side by their hash, unless a source was cut to have two sides.
    """
    for (name, (train, held_out)), (other, (its_train, its_held_out)) in itertools.permutations(sides.items(), 2):
        if not held_out.cut_digest:
            continue
        if held_out.cut_digest in its_train.digests:
            raise DataError(_shares_text(other, name))
        if not {train.cut_digest, *train.digests}.isdisjoint(its_held_out.digests):
            raise DataError(_shares_text(name, other))


def _shares_text(learns: str, holds_out: str) -> str:
    """The error for a source that learns what another holds out."""
    return (
        f"source {learns} learns from a document of which source {holds_out} holds out a part or all; remove it from "
        "one of them"
    )


def every(source: Iterable[str]) -> Texts:
    """Keep every text; of chosen ones those."""
    if isinstance(source, Texts):
        return source
    digests, n_bytes = [], 0
    for text in source:
        digests.append(hashlib.sha256(encoded := text.encode()).digest())
        n_bytes += len(encoded)
    return Texts(source, b"\1" * len(digests), digests, n_bytes)
