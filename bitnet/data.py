"""Text to token ids on disk, and batches from them.

A document is a file, or a line of a .jsonl file. Its content decides by hash whether it is for
training or for validation, so equal texts never lie on both sides, and the split is the same
on every machine. Every document begins with the end token, which separates it from the last.
torch is imported when a batch is made: a packed file is measured on text without it.

Texts are read anew each time they are needed, so that a corpus may be larger than the memory: what
stays there is about 100 bytes a document.
"""

from __future__ import annotations

import glob
import hashlib
import itertools
import json
import os
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bitnet.tokenizer import END_ID

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".txt", ".py", ".md", ".jsonl")
HUB = "hf:"  # a source that begins so is read by the `datasets` library
LEFT_OUT = {"site-packages", "dist-packages", "test", "tests", "idle_test", "encodings", "pydoc_data"}
"""Folders of the standard library that are others' packages, tests, or generated tables."""

IGNORED = -100
"""A target that does not count: what `cross_entropy` leaves out."""


class DataError(ValueError):
    """The data cannot be read, or is too little."""


# ---- documents ----


def files_of(sources: Sequence[str]) -> list[Path]:
    """The files that paths, folders and globs name, each once; no source: Python's standard library."""
    if not sources:
        root = Path(sysconfig.get_path("stdlib"))
        return [f for f in _walk(root) if f.suffix == ".py" and not LEFT_OUT & set(f.relative_to(root).parts)]
    files: dict[Path, None] = {}
    for source in sources:
        matches = (
            [Path(source)] if Path(source).exists() else [Path(m) for m in sorted(glob.glob(source, recursive=True))]
        )
        if not matches:
            raise DataError(f"no file, folder or glob matches {source!r}")
        found = [file for match in matches for file in (_walk(match) if match.is_dir() else [match])]
        known = [file for file in found if file.suffix in SUFFIXES]
        if not known:
            raise DataError(f"{source!r} holds no text, expected files ending in {', '.join(SUFFIXES)}")
        files |= dict.fromkeys(known)
    return list(files)


class Documents:
    """The texts that sources name: files, folders, globs, or hf:NAME, hf:NAME:SPLIT, hf:NAME:CONFIG:SPLIT.

    Each iteration reads them from disk. NAME is a dataset of the Hugging Face hub or a folder with one, SPLIT is
    train where none is named, and the texts are the column "text".
    """

    def __init__(self, sources: Sequence[str]) -> None:
        hub = [source for source in sources if source.startswith(HUB)]
        paths = [source for source in sources if source not in hub]
        self._files = files_of(paths) if paths or not hub else []
        self._datasets = {source: _dataset(source) for source in hub}

    def __iter__(self) -> Iterator[str]:
        yield from documents(self._files)
        for source, rows in self._datasets.items():
            for number, row in enumerate(rows, start=1):
                yield _text_of(row, f"{source}, row {number}")


def documents(files: Iterable[Path]) -> Iterator[str]:
    """The texts of files; of a .jsonl file the "text" of each line."""
    for file in files:
        if file.suffix == ".jsonl":
            yield from _lines(file)
        else:
            yield _decoded(file.read_bytes(), file, 0)


@dataclass(frozen=True)
class Texts:
    """Some of the documents of a source, in its order."""

    source: Iterable[str]
    chosen: bytes | bytearray  # 1 for each document of the source that belongs here, 0 for each other
    digests: list[bytes]  # SHA-256 of those that do
    n_bytes: int
    cut: tuple[int, slice] = (-1, slice(None))  # a document of which only this part belongs here

    def __iter__(self) -> Iterator[str]:
        at, part = self.cut
        for i, (text, chosen) in enumerate(itertools.zip_longest(self.source, self.chosen)):
            if text is None or chosen is None:
                raise DataError("the data was changed while it was read; start again")
            if chosen:
                yield text[part] if i == at else text


def split(source: Iterable[str], validation: float) -> tuple[Texts, Texts]:
    """Training and validation texts, equal ones dropped. `validation` is the share of the latter.

    source: gives the same texts each time it is iterated.
    When one side would stay empty (a single book, say) the longest text is cut once, near its end.
    """
    chosen: tuple[bytearray, bytearray] = bytearray(), bytearray()
    digests: tuple[list[bytes], list[bytes]] = [], []
    n_bytes, seen, longest, at = [0, 0], set(), "", 0
    for i, text in enumerate(source):
        digest = hashlib.sha256(encoded := text.encode()).digest()
        side = int.from_bytes(digest[:8]) < validation * 2**64
        new = bool(text) and digest not in seen
        chosen[side].append(new)
        chosen[not side].append(False)
        if new:
            seen.add(digest)
            digests[side].append(digest)
            n_bytes[side] += len(encoded)
            longest, at = (text, i) if len(text) > len(longest) else (longest, at)
    if not seen:
        raise DataError("the data holds no text")
    train, held_out = (Texts(source, *of_side) for of_side in zip(chosen, digests, n_bytes, strict=True))
    if train.digests and held_out.digests:
        return train, held_out
    return _cut(train if train.digests else held_out, longest, at, validation)


def _cut(texts: Texts, longest: str, at: int, validation: float) -> tuple[Texts, Texts]:
    """All of `texts` without the end of one of them, which is document `at` of the source; that end."""
    place = int(len(longest) * (1 - validation))
    parts = slice(place), slice(place, None)
    first, last = (longest[part].encode() for part in parts)
    digests, before = list(texts.digests), sum(texts.chosen[:at])
    digests[before] = hashlib.sha256(first).digest()
    only = bytes(i == at for i in range(len(texts.chosen)))
    return (
        Texts(texts.source, texts.chosen, digests, texts.n_bytes - len(last), (at, parts[0])),
        Texts(texts.source, only, [hashlib.sha256(last).digest()], len(last), (at, parts[1])),
    )


def _all_of(source: Iterable[str]) -> Texts:
    """Every text, as it is."""
    digests, n_bytes = [], 0
    for text in source:
        digests.append(hashlib.sha256(encoded := text.encode()).digest())
        n_bytes += len(encoded)
    return Texts(source, b"\1" * len(digests), digests, n_bytes)


def _dataset(source: str) -> Iterable[Any]:
    name, *more = source.removeprefix(HUB).split(":")
    *config, part = more or ["train"]
    if not name or not part or len(config) > 1:
        raise DataError(f"{source!r}, expected hf:NAME, hf:NAME:SPLIT or hf:NAME:CONFIG:SPLIT")
    import datasets

    try:
        rows = datasets.load_dataset(name, *config, split=part)
    except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
        raise DataError(f"{source!r} cannot be read: {error}") from None
    if "text" not in rows.column_names:
        raise DataError(f"{source!r} has the columns {', '.join(rows.column_names)}, expected one named text")
    return rows.select_columns("text")  # type: ignore[no-any-return]


def _walk(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file())


def _lines(file: Path) -> Iterator[str]:
    with file.open("rb") as lines:
        start = 0
        for number, line in enumerate(lines, start=1):
            text = _decoded(line, file, start)
            start += len(line)
            if text.strip():
                yield _text_of_line(text, f"{file}, line {number}")


def _decoded(text: bytes, file: Path, start: int) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{file} is not UTF-8 (byte {start + error.start}); convert it or leave it out") from None


def _text_of_line(line: str, where: str) -> str:
    try:
        return _text_of(json.loads(line), where)
    except (json.JSONDecodeError, RecursionError) as error:
        raise DataError(f"{where}: not JSON: {error}") from None


def _text_of(record: Any, where: str) -> str:
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f'{where}: expected an object with a string "text"')
    text: str = record["text"]
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell it
        raise DataError(f'{where}: "text" holds half of a surrogate pair, which is no character') from None
    return text


# ---- token ids ----


@dataclass(frozen=True)
class Tokens:
    """Token ids in a memory-mapped file, and the bytes of text they stand for."""

    ids: NDArray[Any]  # uint16 or uint32
    n_bytes: int
    digest: str  # of text and tokenizer

    @classmethod
    def map(cls, file: Path, dtype: str, n_bytes: int, digest: str) -> Self:
        return cls(np.memmap(file, dtype, mode="r"), n_bytes, digest)

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the file; token ids are not sent."""
        assert isinstance(self.ids, np.memmap)
        return self.map, (Path(str(self.ids.filename)), self.ids.dtype.name, self.n_bytes, self.digest)

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def bytes_per_token(self) -> float:
        return self.n_bytes / len(self.ids)

    def windows(self, context: int) -> int:
        """How many windows of `context` inputs, each with its next token, fit without overlap."""
        return (len(self.ids) - 1) // context

    def window(self, indices: Sequence[int], context: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (len(indices), context) each."""
        import torch

        rows = [self.ids[shift + i * context : shift + (i + 1) * context + 1].astype(np.int64) for i in indices]
        block = torch.from_numpy(np.stack(rows))
        return block[:, :-1], block[:, 1:]


PORTION = 64, 1 << 20
"""Texts, and characters, that are encoded together: an encoding takes some 100 bytes a token."""


def tokenize(texts: Iterable[str], tokenizer: Tokenizer, folder: Path, name: str, first: int = END_ID) -> Tokens:
    """Encode to `folder/<name>-<hash>.bin`, or map that file when it is there already.

    texts: gives the same texts each time it is iterated. first: the token before every document.
    """
    of = texts if isinstance(texts, Texts) else _all_of(texts)
    recipe = hashlib.sha256(tokenizer.to_str().encode())
    if first != END_ID:
        recipe.update(str(first).encode())
    for digest_of_text in of.digests:
        recipe.update(digest_of_text)
    digest = recipe.hexdigest()[:16]
    dtype = "uint16" if tokenizer.get_vocab_size() <= 1 << 16 else "uint32"
    file = folder / f"{name}-{digest}.bin"
    if not file.exists():
        partial = file.with_suffix(".partial")
        try:
            with partial.open("wb") as out:
                for portion in _portions(of):
                    for encoding in tokenizer.encode_batch(portion, add_special_tokens=False):
                        out.write(np.array([first, *encoding.ids], dtype).tobytes())
                out.flush()
                os.fsync(out.fileno())
            partial.rename(file)
        finally:
            partial.unlink(missing_ok=True)
    return Tokens.map(file, dtype, of.n_bytes, digest)


def _portions(texts: Iterable[str]) -> Iterator[list[str]]:
    portion: list[str] = []
    size = 0
    for text in texts:
        portion.append(text)
        size += len(text)
        if len(portion) == PORTION[0] or size >= PORTION[1]:
            yield portion
            portion, size = [], 0
    if portion:
        yield portion


# ---- batches ----


class Batches:
    """Sequence n, a pure function of the seed and n, so that a position is one integer.

    An epoch visits every window once in random order; each epoch cuts the windows elsewhere.
    """

    def __init__(self, tokens: Tokens, batch: int, context: int, seed: int) -> None:
        self.tokens, self.batch, self.context, self.seed = tokens, batch, context, seed
        self.per_epoch = tokens.windows(context) - 1  # one window is left for the shift
        if self.per_epoch < batch:
            need = (batch + 1) * context + 1
            raise DataError(
                f"the training text has {len(tokens.ids):,} tokens, one batch of {batch} × {context} needs {need:,}; "
                "add data, or lower --batch or --context"
            )
        self._epoch = -1

    def __getitem__(self, i: int) -> tuple[Tensor, ...]:
        """Batch i."""
        return self.sequences(i * self.batch, (i + 1) * self.batch)

    def sequences(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Inputs and targets of the sequences from `first` to before `last`, int64 (last - first, context) each."""
        import torch

        parts = []
        while first < last:
            epoch, place = divmod(first, self.per_epoch)
            self._begin(epoch)
            chosen = self._order[place : place + last - first].tolist()
            parts.append(self.tokens.window(chosen, self.context, self._shift))
            first += len(chosen)
        return parts[0] if len(parts) == 1 else tuple(torch.cat(pair) for pair in zip(*parts, strict=True))

    def _begin(self, epoch: int) -> None:
        import torch

        if epoch != self._epoch:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shift = int(torch.randint(self.context, (), generator=random))
            self._order = torch.randperm(self.per_epoch, generator=random)
            self._epoch = epoch
