"""Text to token ids on disk, and batches from them.

A document is a file, or a line of a .jsonl file. Its content decides by hash whether it is for
training or for validation, so equal texts never lie on both sides, and the split is the same
on every machine. Every document begins with the end token, which separates it from the last.
torch is imported when a batch is made: a packed file is measured on text without it.
"""

from __future__ import annotations

import glob
import hashlib
import json
import sysconfig
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bitnet.tokenizer import END_ID

if TYPE_CHECKING:
    from torch import Tensor

SUFFIXES = (".txt", ".py", ".md", ".jsonl")
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


def documents(files: Iterable[Path]) -> Iterator[str]:
    """The texts of files; of a .jsonl file the "text" of each line."""
    for file in files:
        try:
            text = file.read_bytes().decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(f"{file} is not UTF-8 (byte {error.start}); convert it or leave it out") from None
        if file.suffix != ".jsonl":
            yield text
            continue
        for number, line in enumerate(text.split("\n"), start=1):
            if line.strip():
                yield _text_of_line(line, f"{file}, line {number}")


def split(texts: Iterable[str], validation: float) -> tuple[list[str], list[str]]:
    """Training and validation texts, equal ones dropped. `validation` is the share of the latter.

    When one side would stay empty (a single book, say) the longest text is cut once, near its end.
    """
    unique = {hashlib.sha256(text.encode()).digest(): text for text in texts if text}
    if not unique:
        raise DataError("the data holds no text")
    sides: tuple[list[str], list[str]] = [], []
    for digest, text in unique.items():
        sides[int.from_bytes(digest[:8]) < validation * 2**64].append(text)
    train, held_out = sides
    if not train or not held_out:
        everything = train or held_out
        longest = max(range(len(everything)), key=lambda i: len(everything[i]))
        text = everything[longest]
        cut = int(len(text) * (1 - validation))
        train, held_out = [*everything[:longest], text[:cut], *everything[longest + 1 :]], [text[cut:]]
    return train, held_out


def _walk(folder: Path) -> list[Path]:
    return sorted(f for f in folder.rglob("*") if f.suffix in SUFFIXES and f.is_file())


def _text_of_line(line: str, where: str) -> str:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise DataError(f"{where}: not JSON: {error}") from None
    if not isinstance(record, dict) or not isinstance(record.get("text"), str):
        raise DataError(f'{where}: expected an object with a string "text"')
    text: str = record["text"]
    return text


# ---- token ids ----


@dataclass(frozen=True)
class Tokens:
    """Token ids in a memory-mapped file, and the bytes of text they stand for."""

    ids: NDArray[Any]  # uint16 or uint32
    n_bytes: int
    digest: str  # of text and tokenizer

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


def tokenize(texts: list[str], tokenizer: Tokenizer, folder: Path, name: str, first: int = END_ID) -> Tokens:
    """Encode to `folder/<name>-<hash>.bin`, or map that file when it is there already.

    first: the token before every document.
    """
    recipe = hashlib.sha256(tokenizer.to_str().encode())
    if first != END_ID:
        recipe.update(str(first).encode())
    for text in texts:
        recipe.update(hashlib.sha256(text.encode()).digest())
    digest = recipe.hexdigest()[:16]
    dtype = np.uint16 if tokenizer.get_vocab_size() <= 1 << 16 else np.uint32
    file = folder / f"{name}-{digest}.bin"
    if not file.exists():
        partial = file.with_suffix(".partial")
        try:
            with partial.open("wb") as out:
                for start in range(0, len(texts), 64):
                    for encoding in tokenizer.encode_batch(texts[start : start + 64], add_special_tokens=False):
                        out.write(np.array([first, *encoding.ids], dtype).tobytes())
            partial.rename(file)
        finally:
            partial.unlink(missing_ok=True)
    ids = np.memmap(file, dtype, mode="r")
    return Tokens(ids, sum(len(text.encode()) for text in texts), digest)


# ---- batches ----


class Batches:
    """Batch i, a pure function of the seed and i, so that a position is one integer.

    An epoch visits every window once in random order; each epoch cuts the windows elsewhere.
    """

    def __init__(self, tokens: Tokens, batch: int, context: int, seed: int) -> None:
        self.tokens, self.batch, self.context, self.seed = tokens, batch, context, seed
        self.per_epoch = (tokens.windows(context) - 1) // batch  # one window is left for the shift
        if self.per_epoch < 1:
            need = (batch + 1) * context + 1
            raise DataError(
                f"the training text has {len(tokens.ids):,} tokens, one batch of {batch} × {context} needs {need:,}; "
                "add data, or lower --batch or --context"
            )
        self._epoch = -1

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        import torch

        epoch, place = divmod(i, self.per_epoch)
        if epoch != self._epoch:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shift = int(torch.randint(self.context, (), generator=random))
            self._order = torch.randperm(self.tokens.windows(self.context) - 1, generator=random)
            self._epoch = epoch
        chosen = self._order[place * self.batch : (place + 1) * self.batch].tolist()
        return self.tokens.window(chosen, self.context, self._shift)
