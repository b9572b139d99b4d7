"""Pairs of matching texts, for contrastive learning.

They come from .jsonl files in which every line is an object with two texts, such as {"question": "…", "answer": "…"}.
Any other text gives adjacent pieces of the same document. Pairs are stored as token ids like everything else
(`bitnet.data.dataset`): the two texts of a pair are adjacent documents; documents of other text are cut into pieces.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitnet.data import corpus, finding, hub
from bitnet.data.corpus import DataError
from bitnet.data.dataset import PADDING, Shuffled, Tokens
from bitnet.data.files import check_characters, first_record, kind_of, records
from bitnet.data.frames import Frame, same
from bitnet_runtime.errors import shown

LEAST = 8  # fewest tokens of a piece: less says little about its document


# ---- files ----


def files_of(sources: Sequence[str]) -> list[Path]:
    """The .jsonl files with pairs that sources name; empty if they are other text.

    Raises DataError if there are both.
    """
    if not sources or any(map(hub.is_named, sources)):
        return []
    files = finding.files_of(sources)
    of_pairs = [file for file in files if kind_of(file) == ".jsonl" and _begins_with_a_pair(file)]
    if of_pairs and len(of_pairs) < len(files):
        other = next(file for file in files if file not in of_pairs)
        raise DataError(f"{of_pairs[0]} holds pairs of texts and {other} does not; give one kind of data")
    return of_pairs


def _begins_with_a_pair(file: Path) -> bool:
    record = first_record(file)
    return isinstance(record, dict) and sum(isinstance(value, str) for value in record.values()) == 2


class Joined:
    """The pairs of files, each as one text, so that splitting texts keeps pairs together."""

    def __init__(self, files: Sequence[Path]) -> None:
        self._files = files
        self.names: tuple[str, str] | None = None  # names of the fields, once a record was read

    def __iter__(self) -> Iterator[str]:
        for file in self._files:
            for record, where in records(file):
                self.names, pair = _pair(record, where, self.names)
                yield json.dumps(pair)


def _pair(record: Any, where: str, names: tuple[str, str] | None) -> tuple[tuple[str, str], list[str]]:
    """The names of the two fields, taken from the first record, and their texts in this record."""
    texts = record if isinstance(record, dict) else {}
    if names is None:
        first, second = (name for name, value in texts.items() if isinstance(value, str))
        names = first, second
        if "image" in texts:
            raise DataError(f"{where} has an image, and this model sees none; add --preset siglip-tiny")
    pair = [texts.get(name) for name in names]
    for name, text in zip(names, pair, strict=True):
        if not isinstance(text, str) or not text.strip():
            seen = f'"{name}" is {shown(text)}' if name in texts else f"found {', '.join(texts)[:200] or shown(record)}"
            expected = f'expected an object with the texts "{names[0]}" and "{names[1]}", neither empty'
            raise DataError(f"{where}: {seen}; {expected}")
    found = [str(text) for text in pair]
    check_characters("".join(found), where)
    return names, found


@dataclass(frozen=True)
class Separate:
    """The texts of joined pairs, one after the other."""

    joined: Iterable[str]

    def __iter__(self) -> Iterator[str]:
        for pair in self.joined:
            yield from json.loads(pair)


def separate(train: corpus.Texts, held_out: corpus.Texts) -> tuple[Separate, Separate]:
    """Both sides of split pairs. Raises DataError if there are too few to hold some out."""
    if train.cut[0] >= 0:
        n = len(train.digests)
        raise DataError(f"{n:,} pairs of texts, none of which happens to be held out; add data, or raise --validation")
    return Separate(train), Separate(held_out)


# ---- pairs and batches ----


class Pairs:
    """Pairs in token ids. The counterpart of `bitnet.data.dataset.Tokens`."""

    def __init__(self, tokens: Tokens, first: int, given: bool, frame: Frame) -> None:
        """first: the token between documents. given: adjacent documents are a pair; otherwise each document is cut into
        pairs. frame: the tokens around a text."""
        self.text, self.first, self.given, self.frame = tokens, first, given, frame
        self.digest, self.n_tokens = tokens.digest, tokens.n_tokens
        starts = np.flatnonzero(tokens.ids == first)
        self._documents = np.stack([starts + 1, np.append(starts[1:], len(tokens.ids))], axis=1)
        self._cut: tuple[int, NDArray[np.int64]] = (0, np.empty((0, 4), np.int64))

    def count(self, context: int) -> int:
        return len(self._places(context))

    def tokens_each(self, context: int) -> int:
        """Tokens of a pair."""
        return 2 * context

    def too_long(self, context: int) -> int:
        """How many have a text that loses its end."""
        places = self._places(context)
        lengths = np.maximum(places[:, 1] - places[:, 0], places[:, 3] - places[:, 2])
        return int((lengths > context - self.frame.size).sum())

    def alike(self, indices: Sequence[int]) -> Tensor:
        """Which first texts match which second texts (n, n), where equal texts match, too."""
        places = self._cut[1][list(indices)]
        return same([self._ids(*place[:2]) for place in places]) | same([self._ids(*place[2:]) for place in places])

    def rows(self, indices: Sequence[int], context: int) -> tuple[Tensor, Tensor, Tensor]:
        """Inputs, int64 (2n, context): first texts, then their partners; targets (n,): index of the partner; documents
        (2n, context), 0 for the text."""
        places = self._places(context)[list(indices)]
        inputs = torch.full((2 * len(places), context), self.first)
        documents = torch.full_like(inputs, PADDING)
        for row, (start, end) in enumerate([*places[:, :2], *places[:, 2:]]):
            ids = self.frame.around(self.text.ids[start:end].astype(np.int64), context)
            inputs[row, : len(ids)] = torch.from_numpy(ids)
            documents[row, : len(ids)] = 0
        return inputs, torch.arange(len(places)), documents

    def _ids(self, start: int, end: int) -> bytes:
        return self.text.ids[start:end].tobytes()

    def _places(self, context: int) -> NDArray[np.int64]:
        """Where each pair lies: start and end of one text, start and end of the other. (n, 4)"""
        self.frame.check(context)
        if self._cut[0] != context:
            if self.given:
                places = self._documents.reshape(-1, 4)
            else:
                places = np.concatenate([np.empty((0, 4), np.int64), *self._pieces(context - self.frame.size)])
            self._cut = (context, places)
        return self._cut[1]

    def _pieces(self, most: int) -> Iterator[NDArray[np.int64]]:
        """For each document an even number of equally long pieces of at most `most` tokens."""
        for start, end in self._documents:
            n_pairs = -(-(end - start) // (2 * most))
            if n_pairs and end - start >= 2 * LEAST:
                edges = np.linspace(start, end, 2 * n_pairs + 1).round().astype(np.int64)
                yield np.stack([edges[:-2:2], edges[1:-1:2], edges[1:-1:2], edges[2::2]], axis=1)


class Batches:
    """Pair n, a pure function of the seed and n; an epoch visits every pair once in random order. No batch has a pair
    twice, whose copies would count as wrong partners."""

    def __init__(self, pairs: Pairs, batch: int, context: int, seed: int) -> None:
        self.tokens, self.batch, self.context, self.seed = pairs, batch, context, seed
        self.per_epoch = pairs.count(context)
        if self.per_epoch < batch:
            raise DataError(
                f"the training text has {self.per_epoch:,} pairs, one batch needs {batch:,}; add data, or lower --batch"
            )
        self._order = Shuffled(self.per_epoch, seed)

    def sequences(self, first: int, last: int) -> tuple[Tensor, ...]:
        """`Pairs.rows` of the pairs from `first` to before `last`."""
        return self.tokens.rows(self._order.distinct(first, last), self.context)
