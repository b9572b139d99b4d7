"""Conversations with images, of which the answers are learnt.

    {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "a.png"}},
                                               {"type": "text", "text": "how many rings?"}]},
                  {"role": "assistant", "content": "3"}, {"role": "user", "content": "of what colour?"}, …]}

Parts have the format of OpenAI or Hugging Face ({"type": "image", "image": "a.png"}); an image is a file, its path
relative to the conversation's file. Tokens are those that the engine produces for the same messages. A causal model
learns all answers of a conversation in one row; one with the mask "prefix", whose prompt is one prefix, each in a
separate row. Rows of a conversation are adjacent, and each image is encoded once per batch.
"""

from __future__ import annotations

import hashlib
import itertools
import json
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tokenizers import Tokenizer
from torch import Tensor

from bitnet.data import conversations
from bitnet.data.augment import changed
from bitnet.data.conversations import Conversation, Messages
from bitnet.data.corpus import DataError
from bitnet.data.dataset import IGNORED, PADDING, Shuffled, seed_of
from bitnet.data.dialogues import KNOWN_ROLES, Encoder
from bitnet.data.packing import Dialogue
from bitnet.data.picture_files import Record, is_file
from bitnet.data.pictures import Side, Sight, mapped
from bitnet_runtime.errors import InvalidParameterError
from bitnet_runtime.images.prompts import images_of, is_known, placed, without_images

CHATML = (
    "{{ bos_token }}{% for message in messages %}" + KNOWN_ROLES + "<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}IMAGE{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""The template of a model without one; IMAGE: the text of its image token."""


def read(files: Iterable[Path]) -> Iterator[Record]:
    """Conversations as records: their images, and as prefix their messages without them, in JSON.

    Raises DataError naming file and line.
    """
    for messages, where, tools in conversations.read(files, parts=True):
        if tools or any(message.get("content") is None for message in messages):
            raise DataError(f"{where}: a conversation with pictures calls no tools; leave out one of both")
        try:
            named = images_of(messages)
            _check(messages, where)
            plain = without_images(messages, "for part in content")
        except InvalidParameterError as error:
            raise DataError(f"{where}: {error}") from None
        folder = Path(where.rpartition(", line ")[0]).parent
        for name in named:
            if not _is_file(folder, name):
                raise DataError(f"{where}: there is no file {name!r:.80}; a picture is the path of one")
        yield Record(tuple(folder / str(name) for name in named), json.dumps(plain), "", where)


def _is_file(folder: Path, name: object) -> bool:
    return isinstance(name, str) and bool(name.strip()) and is_file(folder / name)


def _check(messages: Messages, where: str) -> None:
    """Raises DataError if a part is neither a text nor an image, or an image is in an answer."""
    for message in messages:
        if message["role"] == "assistant" and images_of([message]):
            raise DataError(f"{where}: an answer has an image, expected text alone; a question may have it")
        for part in message["content"] if isinstance(message["content"], list) else ():
            if not is_known(part):
                raise DataError(f"{where}: a part is {part!r:.80}, expected a text or an image")


def texts(side: Side) -> Iterator[str]:
    """All texts of the messages."""
    for record in side.records:
        for message in json.loads(record.prefix):
            content = message["content"]
            yield from [content] if isinstance(content, str) else [part.get("text", "") for part in content]


class _Encoder(Encoder):
    """Encodes messages with images to token ids, with the image token where image vectors go."""

    def __init__(self, words: Tokenizer, template: str, generation: dict[str, Any], image: int, n_tokens: int) -> None:
        super().__init__(words, template, generation)
        self._image, self._n_tokens = image, n_tokens

    def _tokens(self, messages: Messages, talk: Conversation, ask: bool) -> list[int]:
        n = sum(part["type"] == "image" for m in messages if isinstance(m["content"], list) for part in m["content"])
        tokens = super()._tokens(list(map(dict, without_images(messages, self._template.source))), talk, ask)
        try:
            return placed(tokens, self._image, n, self._n_tokens) if n else tokens
        except InvalidParameterError as error:
            raise DataError(f"{talk.where}: {error}") from None


class Talks:
    """Encoded conversations and their pictures. The counterpart of `bitnet.data.picture_rows.Answers`."""

    def __init__(
        self, side: Side, file: Path, sight: Sight, words: Tokenizer, template: str, generation: dict[str, Any],
        image: int, prefix: bool,
    ) -> None:  # fmt: skip
        """file: from `pictures.decode`; image: the token in whose places image vectors go; prefix: whether the
        model has the mask "prefix"."""
        self.sight, self.image = sight, image
        self.pixels_on_disk = mapped(file, np.uint8, (sight.channels, sight.image_size, sight.image_size))
        owners = mapped(file.with_suffix(".owners"), np.int32, (2,))
        self._pictures: list[list[int]] = [[] for _ in side.records]
        for record, picture in owners.tolist():
            self._pictures[record].append(picture)
        encoder = _Encoder(words, template, generation, image, sight.n_tokens)
        self._all: list[tuple[int, Dialogue]] = []  # number of the conversation, row
        recipe = hashlib.sha256(words.to_str().encode() + file.name.encode())
        for number, record in enumerate(side.records):
            talk = Conversation(json.loads(record.prefix), record.where)
            for dialogue in encoder.encode(talk, apart=prefix):
                self._all.append((number, dialogue))
                recipe.update(dialogue.ids.tobytes() + dialogue.counts.tobytes())
        self.digest = recipe.hexdigest()[:16]
        self.n_tokens = sum(len(dialogue.ids) for _, dialogue in self._all)
        self._fitting: tuple[int, list[int]] = (0, [])

    @property
    def total(self) -> int:
        return len(self._all)

    def fitting(self, context: int) -> list[int]:
        """The rows that fit the context."""
        if self._fitting[0] != context:
            self._fitting = context, [i for i, (_, row) in enumerate(self._all) if len(row.ids) - 1 <= context]
        return self._fitting[1]

    def count(self, context: int) -> int:
        """The number of rows that fit. Raises DataError if none does."""
        if not (fitting := self.fitting(context)):
            shortest = min(len(dialogue.ids) for _, dialogue in self._all) - 1
            raise DataError(
                f"no conversation fits --context {context}: the shortest has {shortest} tokens, of which an image "
                f"takes {self.sight.n_tokens}; raise --context"
            )
        return len(fitting)

    def conversation(self, i: int) -> int:
        """The number of the conversation of a row."""
        return self._all[i][0]

    def rows(
        self, indices: Iterable[int], context: int, look: Callable[[Tensor, int], Tensor] | None = None
    ) -> tuple[Tensor, ...]:
        """For rows of `fitting`: inputs and targets (n, T), IGNORED where nothing is learnt; documents;
        lengths of the prefixes (n,); images, and the index of the image at each place of the rows, in order.

        look: augments the images of row n of these, equally within a conversation; None: no augmentation.
        """
        fitting = self.fitting(context)
        chosen = [self._all[fitting[i]] for i in indices]
        inputs = torch.zeros(len(chosen), max(len(dialogue.ids) for _, dialogue in chosen) - 1, dtype=torch.int64)
        targets, documents = torch.full_like(inputs, IGNORED), torch.full_like(inputs, PADDING)
        prefix, which = torch.empty(len(chosen), dtype=torch.int64), []
        seen: dict[tuple[int, int], Tensor] = {}  # by conversation, if augmented, and image
        places: dict[tuple[int, int], int] = {}
        for row, (number, dialogue) in enumerate(chosen):
            ids, counts = (torch.from_numpy(part) for part in dialogue)
            last = len(ids) - 1
            inputs[row, :last], documents[row, :last] = ids[:-1], 0
            targets[row, :last] = torch.where(counts[1:], ids[1:].long(), IGNORED)
            prefix[row] = counts.int().argmax()
            shown = int((ids == self.image).sum()) // self.sight.n_tokens
            for picture in self._pictures[number][:shown]:
                key = (number if look else 0, picture)
                if key not in seen:
                    pixels = torch.from_numpy(self.pixels_on_disk[picture : picture + 1].astype(np.float32)) / 255
                    seen[key], places[key] = look(pixels, row) if look else pixels, len(places)
                which.append(places[key])
        mean, std = (torch.tensor(x).view(-1, 1, 1) for x in (self.sight.pixel_mean, self.sight.pixel_std))
        none = torch.empty(0, *self.pixels_on_disk.shape[1:])
        pixels = (torch.cat([none, *seen.values()]) - mean) / std
        return inputs, targets, documents, prefix, pixels, torch.tensor(which, dtype=torch.int64)


class Batches:
    """Row n, a pure function of the seed and n; an epoch visits every conversation once in random order."""

    def __init__(self, talks: Talks, batch: int, context: int, seed: int, augment: str) -> None:
        self.tokens, self.batch, self.context, self.seed, self.augment = talks, batch, context, seed, augment
        self.per_epoch = talks.count(context)
        of_talks: dict[int, list[int]] = {}
        for i, row in enumerate(talks.fitting(context)):
            of_talks.setdefault(talks.conversation(row), []).append(i)
        groups, order = list(of_talks.values()), Shuffled(len(of_talks), seed)

        @lru_cache(2)
        def of_epoch(epoch: int) -> list[tuple[int, int]]:
            """The rows of an epoch, each with the number of its conversation's visit over all epochs."""
            visits = range(epoch * len(groups), (epoch + 1) * len(groups))
            return list(itertools.chain.from_iterable([(i, visit) for i in groups[order[visit]]] for visit in visits))

        self._of_epoch = of_epoch

    def sequences(self, first: int, last: int) -> tuple[Tensor, ...]:
        """`Talks.rows` of the rows from `first` to before `last`."""
        chosen = [self._of_epoch(n // self.per_epoch)[n % self.per_epoch] for n in range(first, last)]

        def look(pixels: Tensor, row: int) -> Tensor:
            return changed(pixels, self.augment, seed_of(self.seed, chosen[row][1]))

        return self.tokens.rows([i for i, _ in chosen], self.context, look if self.augment != "none" else None)
