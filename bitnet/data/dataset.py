"""Token ids on disk, and batches of them.

Every document starts with the end token, which separates it from the previous one.
torch is imported when a batch is made: evaluating a packed file on text does not need it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bitnet import process
from bitnet.data import corpus
from bitnet.data.corpus import DataError
from bitnet.data.tokenizer import END_ID, encoder, vocabulary_size

if TYPE_CHECKING:
    from torch import Tensor

IGNORED = -100
"""A target that does not count: `cross_entropy` ignores it."""
PADDING = -1
"""The document of padding; texts have numbers from 0 on."""

View: TypeAlias = "Callable[[Tensor, Tensor, Sequence[int]], tuple[Tensor, ...]]"
"""Maps inputs and next tokens (B, T), and sequence numbers, to inputs, targets and further arguments of a model."""


# ---- token ids ----


@dataclass(frozen=True)
class Tokens:
    """Token ids in a memory-mapped file, and the bytes of text they stand for."""

    ids: NDArray[Any]  # uint16 or uint32
    n_bytes: int
    digest: str  # of text and tokenizer
    checksum: str = ""  # of the file, if known

    @classmethod
    def map(cls, file: Path, dtype: str, n_bytes: int, digest: str, checksum: str = "") -> Self:
        return cls(np.memmap(file, dtype, mode="r"), n_bytes, digest, checksum)

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the path: another process maps the file itself."""
        assert isinstance(self.ids, np.memmap)
        return self.map, (Path(str(self.ids.filename)), self.ids.dtype.name, self.n_bytes, self.digest, self.checksum)

    def to_dict(self) -> dict[str, Any]:
        """The record for `recorded`, valid even if the folder is moved."""
        assert isinstance(self.ids, np.memmap)
        file = Path(str(self.ids.filename))
        known = {"dtype": self.ids.dtype.name, "n_bytes": self.n_bytes, "digest": self.digest}
        return {"file": file.name, "sha256": self.checksum or checksum_of(file)} | known

    @property
    def largest(self) -> int:
        """The largest token id; in a large file, only that of the checked pieces and of the last token, which these
        may miss."""
        size = self.ids.dtype.itemsize
        pieces = [self.ids[start // size : (start + n) // size] for start, n in _checked(self.ids.nbytes)]
        return max(int(piece.max(initial=0)) for piece in (*pieces, self.ids[-1:]))

    @property
    def n_tokens(self) -> int:
        return len(self.ids)

    @property
    def bytes_per_token(self) -> float:
        return self.n_bytes / len(self.ids)

    @property
    def first(self) -> int:
        """The token before every document."""
        return int(self.ids[0])

    def windows(self, context: int) -> int:
        """How many windows of `context` inputs, each with its next token, fit without overlap."""
        return (len(self.ids) - 1) // context

    def window(self, indices: Sequence[int], context: int, shift: int = 0) -> tuple[Tensor, Tensor]:
        """Inputs and targets, int64 (len(indices), context) each."""
        import torch

        rows = [self.ids[shift + i * context : shift + (i + 1) * context + 1].astype(np.int64) for i in indices]
        block = torch.from_numpy(np.stack(rows))
        return block[:, :-1], block[:, 1:]


def recorded(state: dict[str, Any], side: str, folder: Path) -> Tokens | None:
    """The token ids of "train" or "validation" that a run recorded in `state`; None unless they are in its folder.

    Raises DataError: the file is not what it was.
    """
    try:
        kept = state["texts"][side]
        file, dtype, said = folder / Path(kept["file"]).name, kept["dtype"], kept["sha256"]
        n_bytes, digest = int(kept["n_bytes"]), str(kept["digest"])
    except (KeyError, TypeError, ValueError, OverflowError):
        return None
    if not file.is_file() or dtype not in ("uint16", "uint32") or n_bytes < 1:
        return None
    if checksum_of(file) != said:
        raise DataError(f"{file} is damaged (SHA-256); remove it, so that it is made again from the text")
    if not (size := file.stat().st_size) or size % np.dtype(dtype).itemsize:
        raise DataError(f"{file} has {size:,} bytes, expected token ids of type {dtype}")
    return Tokens.map(file, dtype, n_bytes, digest, said)


CHECKED, PIECE = 1 << 30, 1 << 20
"""Most bytes of a file that are checked before use: the whole file, or evenly spread pieces."""


def checksum_of(file: Path) -> str:
    """SHA-256 of a file; above CHECKED bytes, of its size and some pieces, so that a run starts in seconds."""
    size, digest = file.stat().st_size, hashlib.sha256()
    if size > CHECKED:
        digest.update(size.to_bytes(8, "little"))
    with file.open("rb") as handle:
        for start, n in _checked(size):
            handle.seek(start)
            for _ in range(-(-n // PIECE)):
                digest.update(handle.read(PIECE))
    return digest.hexdigest()


def _checked(size: int) -> Iterator[tuple[int, int]]:
    """Starts and lengths of the pieces to check. Pieces begin where a token does."""
    if size <= CHECKED:
        yield 0, size
        return
    n = CHECKED // PIECE
    for i in range(n):
        yield i * (size - PIECE) // (n - 1) // 4 * 4, PIECE


PORTION = 64, 1 << 20
"""Most texts, and characters, that are encoded together: an encoding takes some 100 bytes per token."""


def tokenize(texts: Iterable[str], tokenizer: Tokenizer, folder: Path, name: str, first: int = END_ID) -> Tokens:
    """Encode to `folder/<name>-<hash>.bin`, or map that file if it exists.

    texts: gives the same texts each time it is iterated. first: the token before every document.
    """
    of = corpus.every(texts)
    if not of.n_bytes:
        raise DataError("all of the text that was given is empty; give other --data")
    digest = digest_of(of, tokenizer, first)
    dtype = "uint16" if vocabulary_size(tokenizer) <= 1 << 16 else "uint32"
    file = folder / f"{name}-{digest}.bin"
    if not file.exists():
        encode = encoder(tokenizer)
        try:
            with process.written(file) as out:
                for portion in _portions(of):
                    for ids in encode(portion):
                        out.write(np.array([first, *ids], dtype).tobytes())
        except OSError as error:  # a full disk, whose error does not name the file
            error.filename = error.filename or str(file)
            raise
    return Tokens.map(file, dtype, of.n_bytes, digest)


def digest_of(texts: corpus.Texts, tokenizer: Tokenizer, first: int = END_ID) -> str:
    """The digest that these texts have as `Tokens`. first: as in `tokenize`."""
    recipe = hashlib.sha256(tokenizer.to_str().encode())
    if first != END_ID:
        recipe.update(str(first).encode())
    for digest_of_text in texts.digests:
        recipe.update(digest_of_text)
    return recipe.hexdigest()[:16]


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

ORDERED = 1 << 24
"""Windows shuffled together, at 8 bytes of memory each."""


def seed_of(seed: int, number: int) -> int:
    """The seed of the random numbers for sequence `number` of a run with this seed.

    32 bits, the most that torch's generator takes. Two odd factors keep neighbouring seeds and numbers apart.
    """
    return (seed * 0x9E3779B1 ^ number * 0x85EBCA77) & 0xFFFFFFFF


class Batches:
    """Sequence n, a pure function of the seed and n, so that a position is one integer.

    An epoch visits every window once in random order; each epoch cuts the windows elsewhere. Very many windows are
    dealt out in turn to several parts, each spread over all of the text, and each part has an order of its own.
    """

    def __init__(self, tokens: Tokens, batch: int, context: int, seed: int, view: View | None = None) -> None:
        self.tokens, self.batch, self.context, self.seed, self.view = tokens, batch, context, seed, view
        self.per_epoch = tokens.windows(context) - 1  # one window is reserved for the shift
        if self.per_epoch < batch:
            need = (batch + 1) * context + 1
            raise DataError(
                f"the training text has {len(tokens.ids):,} tokens, one batch of {batch} × {context} needs {need:,}, "
                "as each epoch cuts it elsewhere; add data, or lower --batch or --context"
            )
        self._parts = -(-self.per_epoch // ORDERED)
        self._begun = -1, 0  # epoch and part of `_order`

    def sequences(self, first: int, last: int) -> tuple[Tensor, ...]:
        """Inputs and targets of the sequences from `first` to before `last`, int64 (last - first, context) each; or
        what the view makes of them."""
        import torch

        parts, numbers = [], range(first, last)
        while first < last:
            epoch, place = divmod(first, self.per_epoch)
            part, place = self._part(place)
            self._begin(epoch, part)
            chosen = self._order[place : place + last - first] * self._parts + part
            parts.append(self.tokens.window(chosen.tolist(), self.context, self._shift))
            first += len(chosen)
        inputs, targets = parts[0] if len(parts) == 1 else (torch.cat(pair) for pair in zip(*parts, strict=True))
        return self.view(inputs, targets, numbers) if self.view else (inputs, targets)

    def _part(self, place: int) -> tuple[int, int]:
        """The part of an epoch that holds a place, and the place in it. The first parts may have one more window."""
        size, larger = divmod(self.per_epoch, self._parts)
        if place < larger * (size + 1):
            return divmod(place, size + 1)
        part, place = divmod(place - larger * (size + 1), size)
        return larger + part, place

    def _begin(self, epoch: int, part: int) -> None:
        import torch

        if (epoch, part) != self._begun:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._shift = int(torch.randint(self.context, (), generator=random))
            if part:
                random.manual_seed(seed_of(self.seed * 1_000_003 + epoch, part))
            self._order = torch.randperm(-(-(self.per_epoch - part) // self._parts), generator=random)
            self._begun = epoch, part


class Shuffled:
    """An endless random order of n records: each epoch visits every one once."""

    def __init__(self, n: int, seed: int) -> None:
        self.n, self.seed = n, seed
        self._epoch = -1

    def __getitem__(self, i: int) -> int:
        import torch

        epoch, place = divmod(i, self.n)
        if epoch != self._epoch:
            random = torch.Generator().manual_seed(self.seed * 1_000_003 + epoch)
            self._epoch, self._order = epoch, torch.randperm(self.n, generator=random)
        return int(self._order[place])

    def distinct(self, first: int, last: int) -> list[int]:
        """The records from place `first` to before `last`, at most n of them. After the end of an epoch, one that has
        just been seen gives way to the next."""
        found, place = dict[int, None](), first
        while len(found) < last - first:
            found[self[place]] = None
            place += 1
        return list(found)
