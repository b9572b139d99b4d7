"""Images and texts of records (`bitnet.data.picture_files`): which are held out, and how they are stored.

Images are decoded once, as the engine decodes them (`bitnet_runtime.images.processor`), to bytes in a file of the run
folder, which is memory-mapped like the token ids. Records that share an image, directly or through others, form a
group. The hash of a group's images decides whether it is for training or validation, so no image is on both sides.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bitnet.config import ModelConfig
from bitnet.data import dataset
from bitnet.data.corpus import DataError, repetitions
from bitnet.data.dataset import Tokens
from bitnet.data.picture_files import Problems, Record
from bitnet.process import flush, sha256, written
from bitnet_runtime.errors import ImageError
from bitnet_runtime.images.processor import Processor

# ---- two sides ----


class Side(NamedTuple):
    """The records for training, or for validation, with the SHA-256 of each one's picture files."""

    records: list[Record]
    images: list[tuple[bytes, ...]]


def split(
    records: Iterable[Record], validation: float, say: Callable[[str], object] = lambda _: None
) -> tuple[Side, Side]:
    """Training and validation records, split by the hash of their images (of the texts if there are none).

    Each side has at least one group of records that share images, validation two if there are more than two; a group
    with more than half of all records is for training. Equal records are dropped, which `say` reports."""
    digest_of, n = cache(sha256), 0
    unique: dict[tuple[tuple[bytes, ...], bytes], Record] = {}
    for record in records:
        images = tuple(bytes.fromhex(digest_of(path)) for path in record.images)
        text = json.dumps([record.prefix, record.suffix]).encode()
        unique.setdefault((images, text), record)
        n += 1
    if line := repetitions(n - len(unique), n, "records"):
        say(line)
    first_of = _joined(images for images, _ in unique)
    groups = [hashlib.sha256(first_of[images[0]] if images else text).digest() for images, text in unique]
    sizes = Counter(groups)
    if len(sizes) < 2:
        found = {0: "no record", 1: "a single record"}.get(len(unique), f"{len(unique):,} records that share pictures")
        raise DataError(f"the data holds {found}, expected two groups that share none: one is held out for validation")
    order = sorted(group for group, size in sizes.items() if 2 * size <= len(groups))
    chosen, least = [group for group in order if int.from_bytes(group[:8]) < validation * 2**64], min(2, len(sizes) - 1)
    held_out = set((chosen if len(chosen) >= least else order[:least])[: len(sizes) - 1])
    sides = Side([], []), Side([], [])
    for group, ((images, _), record) in zip(groups, unique.items(), strict=True):
        side = sides[group in held_out]
        side.records.append(record)
        side.images.append(images)
    return sides


def _joined(sets: Iterable[tuple[bytes, ...]]) -> dict[bytes, bytes]:
    """For each image the smallest one in its group: sets that share an image are joined."""
    before: dict[bytes, bytes] = {}  # union-find parent: a smaller one, or itself

    def smallest(image: bytes) -> bytes:
        while before.setdefault(image, image) != image:
            before[image] = image = before[before[image]]
        return image

    for together in sets:
        firsts = {smallest(image) for image in together}
        before.update(dict.fromkeys(firsts, min(firsts, default=b"")))
    return {image: smallest(image) for image in list(before)}


def every(records: Iterable[Record]) -> Side:
    """All records as one side."""
    digest_of, all_of_them = cache(sha256), list(records)
    if not all_of_them:
        raise DataError("the data holds no record")
    return Side(all_of_them, [tuple(bytes.fromhex(digest_of(p)) for p in record.images) for record in all_of_them])


# ---- on disk ----


class Sight(NamedTuple):
    """The image format of a model."""

    image_size: int  # pixels per side
    channels: int
    n_tokens: int  # vectors per image
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]
    resize: str = "stretch"  # how an image becomes a square: `pictures` of METADATA (FORMAT.md §5)
    filter: str = "bicubic"

    @classmethod
    def of(cls, vision: ModelConfig, generation: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """vision: the configuration of the vision stack; generation: defaults of a checkpoint."""
        sizes = vision.image_size, vision.channels, vision.max_context
        return cls(*sizes, vision.pixel_mean, vision.pixel_std, **generation.get("pictures", {}))

    @property
    def processor(self) -> Processor:
        return Processor(self.image_size, self.channels, self.resize, self.filter)


class Pictures:
    """Records in memory-mapped files: token ids, images, and which record has which image.

    text: two documents for each record: the prefix with a line break, and the answer.
    """

    def __init__(self, text: Tokens, file: Path, shape: Sequence[int]) -> None:
        """file: the images, each of this shape."""
        self.text, self.file, self.shape = text, file, tuple(shape)
        self.pixels = mapped(file, np.uint8, self.shape)  # (n, C, S, S)
        self.owners = mapped(file.with_suffix(".owners"), np.int32, (2,))  # record and picture, records in order
        self.digest = f"{text.digest}-{file.stem.rpartition('-')[2]}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle only the paths: another process maps the files itself."""
        return Pictures, (self.text, self.file, self.shape)

    def to_dict(self) -> dict[str, Any]:
        """The record for `recorded`, valid even if the folder is moved."""
        files = {file.name: sha256(file) for file in (self.file, self.file.with_suffix(".owners"))}
        return {"text": self.text.to_dict(), "files": files, "shape": list(self.shape)}


def recorded(state: dict[str, Any], side: str, folder: Path) -> Pictures | None:
    """The images of "train" or "validation" that a run recorded in `state`; None unless they are in its folder.

    Raises DataError if a file has changed.
    """
    try:
        kept = state["pictures"][side]
        text = dataset.recorded({"texts": {side: kept["text"]}}, side, folder)
        files = {folder / Path(name).name: digest for name, digest in kept["files"].items()}
        shape = [int(size) for size in kept["shape"]]
    except (KeyError, TypeError, ValueError, AttributeError):
        return None
    if text is None or not files or not all(file.is_file() for file in files):
        return None
    for file, said in files.items():
        if sha256(file) != said:
            raise DataError(f"{file} is damaged (SHA-256); remove it, so that it is made again from the pictures")
    return Pictures(text, next(iter(files)), shape)


def mapped(file: Path, dtype: type, shape: Sequence[int]) -> NDArray[Any]:
    if not file.stat().st_size:  # an empty file cannot be mapped
        return np.empty((0, *shape), dtype)
    return np.memmap(file, dtype, mode="r").reshape(-1, *shape)


def store(side: Side, words: Tokenizer, sight: Sight, folder: Path, name: str, first: int) -> Pictures:
    """Decode images and encode texts to files `<name>-…` in `folder`, or map them if they exist.

    sight: the image format of the model. first: the token before every text.
    """
    texts = [text for record in side.records for text in (record.prefix + "\n", record.suffix)]
    text = dataset.tokenize(texts, words, folder, name, first)
    return Pictures(text, decode(side, sight, folder, name), (sight.channels, sight.image_size, sight.image_size))


def decode(side: Side, sight: Sight, folder: Path, name: str) -> Path:
    """Only the images of `store`: the path of their file, next to that of `Pictures.owners`."""
    shape = sight.channels, sight.image_size, sight.image_size
    recipe = hashlib.sha256(json.dumps([shape, sight.resize, sight.filter]).encode())
    for digests in side.images:
        recipe.update(len(digests).to_bytes(4) + b"".join(digests))
    file = folder / f"{name}-{recipe.hexdigest()[:16]}.pixels"
    if not file.exists() or not file.with_suffix(".owners").exists():
        _decode(side, sight.processor, file)
    return file


def _decode(side: Side, processor: Processor, file: Path) -> None:
    """Decode each image once, however many records have it."""
    number_of: dict[bytes, int] = {}
    owners: list[tuple[int, int]] = []
    problems = Problems()
    with written(file) as out:
        for number, (record, digests) in enumerate(zip(side.records, side.images, strict=True)):
            for path, digest in zip(record.images, digests, strict=True):
                if digest not in number_of:
                    try:
                        out.write(decoded(path, processor, record.where).tobytes())
                    except DataError as error:
                        problems.add(error, number + 1)
                owners.append((number, number_of.setdefault(digest, len(number_of))))
        problems.refuse(len(side.records))
        np.array(owners, np.int32).tofile(file.with_suffix(".owners"))
        flush(file.with_suffix(".owners"))


def decoded(path: Path, processor: Processor, where: str) -> NDArray[np.uint8]:
    """An image as the engine sees it, in bytes, (C, S, S). Raises DataError if it is not an image, or damaged."""
    try:
        return processor.bytes(path)
    except (ImageError, OSError) as error:
        raise DataError(f"{where}: {error}") from None
