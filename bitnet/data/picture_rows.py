"""Records of images and texts as rows of tokens with their images.

Captions, for contrastive learning: row n is a text, image n its partner.
Answers, for next-token prediction, as in PaliGemma (arXiv 2407.07726 §3.1):

    <image> × N for each image, start token, question, line break, answer, end token

There is a start token if the packed file names one, as training uses the prompts of the engine (`Frame`). Everything
before the answer is the prefix, whose tokens see each other; the answer and the end token are learnt.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from bitnet.data.augment import changed
from bitnet.data.corpus import DataError
from bitnet.data.dataset import IGNORED, PADDING, Shuffled, seed_of
from bitnet.data.frames import Frame, same
from bitnet.data.pictures import Pictures, Sight

Look = Callable[[Tensor, int], Tensor]
"""Augments the images of record n of a batch, values 0 to 1."""


def as_they_are(pixels: Tensor, _: int) -> Tensor:
    return pixels


class Rows:
    """Records in token ids and bytes. The counterpart of `bitnet.data.dataset.Tokens`."""

    def __init__(self, pictures: Pictures, sight: Sight, first: int) -> None:
        """first: the token between texts on disk."""
        self.pictures, self.sight, self.first, self.digest = pictures, sight, first, pictures.digest
        ids = pictures.text.ids
        starts = np.flatnonzero(ids == first)
        ends = np.append(starts[1:], len(ids))
        self.documents = np.stack([starts + 1, ends], axis=1).reshape(-1, 2, 2)  # (n, prefix or answer, from and to)
        self.owned = np.searchsorted(pictures.owners[:, 0], np.arange(len(self.documents) + 1))
        self.n_tokens = len(ids) + len(pictures.owners) * sight.n_tokens

    def ids(self, record: int, part: int) -> NDArray[np.int64]:
        """Token ids of the prefix (0) or the answer (1)."""
        start, end = self.documents[record, part]
        found: NDArray[np.int64] = self.pictures.text.ids[start:end].astype(np.int64)
        return found

    def images(self, record: int) -> NDArray[np.int32]:
        """The indices of a record's images."""
        found: NDArray[np.int32] = self.pictures.owners[self.owned[record] : self.owned[record + 1], 1]
        return found

    def pixels(self, records: Sequence[int], look: Look = as_they_are) -> Tensor:
        """All their images in order, (n, C, S, S), normalized: (x − mean) / std."""
        mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (self.sight.pixel_mean, self.sight.pixel_std))
        return (self.values(records, look) - mean) / std

    def values(self, records: Sequence[int], look: Look = as_they_are) -> Tensor:
        """All their images in order, (n, C, S, S), from 0 to 1."""
        parts = [torch.empty(0, *self.pictures.shape)]
        for n, record in enumerate(records):
            if len(own := self.images(record)):
                parts.append(look(torch.from_numpy(self.pictures.pixels[own]).float() / 255, n))
        return torch.cat(parts)


class Captions(Rows):
    """Pairs of image and text, from records with one of each (`picture_files.captions`)."""

    def __init__(self, pictures: Pictures, sight: Sight, first: int, frame: Frame) -> None:
        super().__init__(pictures, sight, first)
        self.frame = frame

    def count(self, context: int) -> int:
        self.frame.check(context)
        return len(self.documents)

    def tokens_each(self, context: int) -> int:
        """Tokens of a text and its image."""
        return context + self.sight.n_tokens

    def too_long(self, context: int) -> int:
        """How many texts lose their end."""
        lengths = self.documents[:, 1, 1] - self.documents[:, 1, 0]
        return int((lengths > context - self.frame.size).sum())

    def text(self, record: int, context: int) -> NDArray[np.int64]:
        """Its tokens with their frame."""
        return self.frame.around(self.ids(record, 1), context)

    def alike(self, indices: Sequence[int]) -> Tensor:
        """Which images match which texts (n, n); equal images or texts match each other's partners."""
        texts = [self.ids(record, 1).tobytes() for record in indices]
        return same(texts) | same([int(self.images(record)[0]) for record in indices])

    def rows(self, indices: Sequence[int], context: int, look: Look = as_they_are) -> tuple[Tensor, ...]:
        """Inputs (n, T), targets (n,): index of the matching image; documents; prefix lengths, all 0;
        images (n, C, S, S). T: length of the longest text, at most the context."""
        texts = [self.text(record, context) for record in indices]
        inputs = torch.full((len(texts), max(map(len, texts))), self.first)
        documents = torch.full_like(inputs, PADDING)
        for row, text in enumerate(texts):
            inputs[row, : len(text)], documents[row, : len(text)] = torch.from_numpy(text), 0
        owners, prefix = torch.arange(len(texts)), torch.zeros(len(texts), dtype=torch.int64)
        return inputs, owners, documents, prefix, self.pixels(indices, look)


class Answers(Rows):
    """Images, questions about them, and the answers."""

    def __init__(self, pictures: Pictures, sight: Sight, first: int, frame: Frame, end: int, image: int) -> None:
        """end: the token after an answer; image: the token in whose places image vectors go."""
        super().__init__(pictures, sight, first)
        self.frame, self.end, self.image = frame, end, image
        of_texts = (self.documents[:, :, 1] - self.documents[:, :, 0]).sum(1)
        self.lengths = frame.size + of_texts + sight.n_tokens * np.diff(self.owned)  # of the inputs: no end token
        self._fitting: tuple[int, NDArray[np.int64]] = (0, np.empty(0, np.int64))

    @property
    def bytes_per_token(self) -> float:
        return self.pictures.text.bytes_per_token

    def fitting(self, context: int) -> NDArray[np.int64]:
        """The records that fit the context."""
        if self._fitting[0] != context:
            self._fitting = context, np.flatnonzero(self.lengths <= context)
        return self._fitting[1]

    def count(self, context: int) -> int:
        """The number of records that fit. Raises DataError if none does."""
        if not len(self.fitting(context)):
            raise DataError(
                f"no record fits --context {context}: the shortest has {self.lengths.min()} tokens, "
                f"of which an image takes {self.sight.n_tokens}; raise --context"
            )
        return len(self.fitting(context))

    def parts(self, record: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The tokens before the answer, and the answer with its end token."""
        seen = [self.image] * (self.sight.n_tokens * len(self.images(record)))
        asked = [*self.frame.before, *self.ids(record, 0), *self.frame.behind]
        return np.array([*seen, *asked]), np.array([*self.ids(record, 1), self.end])

    def rows(self, indices: Sequence[int], context: int, look: Look = as_they_are) -> tuple[Tensor, ...]:
        """Inputs and targets (n, T), IGNORED where nothing is learnt; documents; lengths of the prefixes
        (n,); all images in order. T: length of the longest record."""
        records = [int(self.fitting(context)[i]) for i in indices]
        inputs = torch.full((len(records), int(self.lengths[records].max())), self.first)
        targets, documents = torch.full_like(inputs, IGNORED), torch.full_like(inputs, PADDING)
        prefix = torch.empty(len(records), dtype=torch.int64)
        for row, record in enumerate(records):
            before, after = self.parts(record)
            ids = torch.from_numpy(np.concatenate([before, after]))
            last = len(ids) - 1
            inputs[row, :last], documents[row, :last] = ids[:-1], 0
            targets[row, len(before) - 1 : last] = ids[len(before) :]
            prefix[row] = len(before)
        return inputs, targets, documents, prefix, self.pixels(records, look)


class Batches:
    """Record n, a pure function of the seed and n; an epoch visits every record once in random order. Captions are
    compared within a batch, so none has a record twice."""

    def __init__(self, rows: Captions | Answers, batch: int, context: int, seed: int, augment: str) -> None:
        self.tokens, self.batch, self.context, self.seed, self.augment = rows, batch, context, seed, augment
        self.per_epoch = rows.count(context)
        self._order = Shuffled(self.per_epoch, seed)
        if isinstance(rows, Captions) and self.per_epoch < batch:
            there = f"there are {self.per_epoch:,} captions, one batch needs {batch:,}"
            raise DataError(f"{there}; add data, or lower --batch")

    def sequences(self, first: int, last: int) -> tuple[Tensor, ...]:
        """`rows` of the records from `first` to before `last`."""
        compared = isinstance(self.tokens, Captions)
        chosen = self._order.distinct(first, last) if compared else [self._order[n] for n in range(first, last)]

        def look(pixels: Tensor, n: int) -> Tensor:
            return changed(pixels, self.augment, seed_of(self.seed, first + n))

        return self.tokens.rows(chosen, self.context, look)
