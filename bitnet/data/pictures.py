"""Records of pictures and texts: where they are, which are held out, and how they are kept.

A record is some pictures, what is asked of them, and the answer. A caption is an answer that nothing asks for. Records
are the lines of .jsonl files and the rows of .csv files, with paths relative to the file, or the pictures of a folder:

    {"image": "a.png", "caption": "a red ring"}              also "text"
    {"image": "a.png", "prefix": "how many?", "suffix": "3"} also "question" and "answer"
    {"images": ["a.png", "b.png"], "prefix": "which is older?", "suffix": "the second"}
    a.png and beside it a.txt, which holds the caption

Pictures are decoded once, as the engine decodes them (`bitnet_runtime.images`), to bytes in a file of the run folder,
from which they are mapped like the token ids beside them. The same pictures decide by hash whether their records are
for training or for validation, so none is seen on both sides.
"""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple, Self

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from bitnet.config import ModelConfig
from bitnet.data import dataset
from bitnet.data.corpus import DataError, repetitions
from bitnet.data.dataset import Tokens
from bitnet.data.tokenizer import IMAGE
from bitnet.process import flush, sha256
from bitnet_runtime import images

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""Of the pictures that are looked for in a folder. One that a record names is read whatever its name."""
RECORDS = (".jsonl", ".csv")
ANSWERS, QUESTIONS = ("caption", "text", "suffix", "answer"), ("prefix", "question")
EXPECTED = 'expected "image" and "caption", or "image", "prefix" and "suffix"'
MAX_LINE = 16 << 20  # bytes


class Sight(NamedTuple):
    """What a model sees of an image."""

    image_size: int  # pixels of a side
    channels: int
    n_tokens: int  # vectors that an image becomes
    pixel_mean: tuple[float, ...]
    pixel_std: tuple[float, ...]

    @classmethod
    def of(cls, vision: ModelConfig) -> Self:
        """Of the stack that looks."""
        return cls(vision.image_size, vision.channels, vision.max_context, vision.pixel_mean, vision.pixel_std)


class Record(NamedTuple):
    images: tuple[Path, ...]
    prefix: str  # "" of a caption
    suffix: str
    where: str  # file and line, for messages


# ---- files ----


def read(sources: Sequence[str]) -> Iterator[Record]:
    """The records of files and folders. Raises DataError naming file and line."""
    if not sources:
        raise DataError("a model that looks at images learns from records of images and texts; name them with --data")
    for source in sources:
        path = Path(source)
        if path.is_dir():
            files = sorted(file for file in path.rglob("*") if file.is_file())
            tables = [file for file in files if file.suffix in RECORDS and file.name != "log.jsonl"]
            yield from _files(tables) if tables else _beside_texts(path, files)
        elif path.suffix in RECORDS:
            yield from _files([path])
        else:
            found = "is no .jsonl file, .csv file or folder" if path.exists() else "does not exist"
            raise DataError(f"{source} {found}, expected records of images and texts")


def _files(files: Iterable[Path]) -> Iterator[Record]:
    for file in files:
        try:
            lines = _rows(file) if file.suffix == ".csv" else _objects(file)
            for number, values in lines:
                yield _record(values, file.parent, f"{file}, line {number}")
        except UnicodeDecodeError:
            raise DataError(f"{file} is not UTF-8") from None
        except csv.Error as error:
            raise DataError(f"{file} is no table of comma-separated values: {error}") from None


def _objects(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as lines:
        number = 0
        while line := lines.readline(MAX_LINE + 1):
            number += 1
            if len(line) > MAX_LINE:
                raise DataError(f"{file}, line {number} is longer than {MAX_LINE} bytes, expected one record")
            if line.strip():
                try:
                    yield number, json.loads(line.decode())
                except UnicodeDecodeError as error:
                    raise DataError(f"{file}, line {number} is not UTF-8 (byte {error.start})") from None
                except (json.JSONDecodeError, RecursionError) as error:
                    raise DataError(f"{file}, line {number}: not JSON: {error}") from None


def _rows(file: Path) -> Iterator[tuple[int, Any]]:
    """An empty cell says nothing."""
    with file.open(encoding="utf-8-sig", newline="") as lines:
        rows = csv.DictReader(lines, strict=True)
        for row in rows:
            if None in row or None in row.values():
                raise DataError(f"{file}, line {rows.line_num}: expected {len(rows.fieldnames or ())} cells")
            yield rows.line_num, {name: cell for name, cell in row.items() if cell}


def _beside_texts(folder: Path, files: Sequence[Path]) -> Iterator[Record]:
    pictures = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not pictures:
        raise DataError(f"{folder} holds no .jsonl file, no .csv file and no picture ({', '.join(SUFFIXES)})")
    for picture in pictures:
        text = picture.with_suffix(".txt")
        try:
            caption = text.read_text(encoding="utf-8").strip()
        except FileNotFoundError:
            raise DataError(f"{picture} has no text beside it, expected its caption in {text.name}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{text} is not UTF-8 (byte {error.start})") from None
        yield _record({"image": str(picture.absolute()), "caption": caption}, folder, str(text))


def _record(values: Any, folder: Path, where: str) -> Record:
    said = values if isinstance(values, dict) else {}
    answers, questions = ([name for name in names if name in said] for names in (ANSWERS, QUESTIONS))
    paths = said.get("images", [said["image"]] if "image" in said else [])
    if len(answers) != 1 or len(questions) > 1 or ("image" in said and "images" in said):
        raise DataError(f"{where}: {_found(values)}; {EXPECTED}")
    if answers[0] in ("caption", "text") and (questions or len(paths) != 1):
        raise DataError(f"{where}: {_found(values)}; a caption is of one image that nothing is asked of; {EXPECTED}")
    if not isinstance(paths, list) or not all(isinstance(path, str) and path.strip() for path in paths):
        raise DataError(f"{where}: the images are {paths!r:.80}, expected paths")
    prefix, suffix = (said[names[0]] if names else "" for names in (questions, answers))
    for name, text in ((questions or ["prefix"])[0], prefix), (answers[0], suffix):
        if problem := _problem(text, empty=name != answers[0]):
            raise DataError(f'{where}: "{name}" {problem}')
    found = tuple(folder / path for path in paths)
    if missing := [path for path in found if not path.is_file()]:
        raise DataError(f"{where}: there is no file {missing[0]}")
    return Record(found, prefix, suffix, where)


def _problem(text: Any, empty: bool) -> str:
    """What is wrong with a text, which may be empty or not; "" if nothing is."""
    if not isinstance(text, str) or not (empty or text.strip()):
        return f"is {text!r:.80}, expected a text" + " that is not empty" * (not empty)
    if IMAGE in text:
        return f"spells {IMAGE}, which stands for images that are not in the text; leave it out: they come first"
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON can spell it
        return "holds half of a surrogate pair, which is no character"
    return ""


def _found(values: Any) -> str:
    return f"has {', '.join(map(repr, values)) or 'nothing'}"[:160] if isinstance(values, dict) else "is no object"


# ---- two sides ----


class Side(NamedTuple):
    """The records for training, or for validation, with the SHA-256 of each one's picture files."""

    records: list[Record]
    images: list[tuple[bytes, ...]]


def split(
    records: Iterable[Record], validation: float, say: Callable[[str], object] = lambda _: None
) -> tuple[Side, Side]:
    """For training and for validation, by the hash of the pictures (of the texts where there are none): of both one set
    of pictures at least, and of more than two two for validation. Equal records are dropped, which `say` is told."""
    digest_of, n = cache(sha256), 0
    unique: dict[tuple[bytes, tuple[bytes, ...], bytes], Record] = {}
    for record in records:
        images = tuple(bytes.fromhex(digest_of(path)) for path in record.images)
        text = json.dumps([record.prefix, record.suffix]).encode()
        group = hashlib.sha256(b"".join(images) or text).digest()
        unique.setdefault((group, images, text), record)
        n += 1
    if line := repetitions(n - len(unique), n, "records"):
        say(line)
    order = sorted({group for group, *_ in unique})
    if len(order) < 2:
        raise DataError(f"{len(order)} different pictures, expected at least 2: one is held out for validation")
    chosen, least = [group for group in order if int.from_bytes(group[:8]) < validation * 2**64], min(2, len(order) - 1)
    held_out = set((chosen if len(chosen) >= least else order[:least])[: len(order) - 1])
    sides = Side([], []), Side([], [])
    for (group, images, _), record in unique.items():
        side = sides[group in held_out]
        side.records.append(record)
        side.images.append(images)
    return sides


def every(records: Iterable[Record]) -> Side:
    """Every record, as it is."""
    digest_of, all_of_them = cache(sha256), list(records)
    if not all_of_them:
        raise DataError("the data holds no record")
    return Side(all_of_them, [tuple(bytes.fromhex(digest_of(p)) for p in record.images) for record in all_of_them])


# ---- on disk ----


class Pictures:
    """Records in memory-mapped files: token ids, pictures, and which picture is whose.

    text: two documents for each record, what stands before the answer with a new line behind it, and the answer.
    """

    def __init__(self, text: Tokens, file: Path, shape: Sequence[int]) -> None:
        """file: the pictures, of this shape each."""
        self.text, self.file, self.shape = text, file, tuple(shape)
        self.pixels = _mapped(file, np.uint8, self.shape)  # (n, C, S, S)
        self.owners = _mapped(file.with_suffix(".owners"), np.int32, (2,))  # record and picture, records in order
        self.digest = f"{text.digest}-{file.stem.rpartition('-')[2]}"

    def __reduce__(self) -> tuple[Any, ...]:
        """Another process maps the files."""
        return Pictures, (self.text, self.file, self.shape)

    def to_dict(self) -> dict[str, Any]:
        """For `recorded`, in a folder that may have been moved since."""
        files = {file.name: sha256(file) for file in (self.file, self.file.with_suffix(".owners"))}
        return {"text": self.text.to_dict(), "files": files, "shape": list(self.shape)}


def recorded(state: dict[str, Any], side: str, folder: Path) -> Pictures | None:
    """Those of "train" or "validation" that a run recorded in `state`; None unless they are in its folder.

    Raises DataError: a file is not what it was.
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


def _mapped(file: Path, dtype: type, shape: Sequence[int]) -> NDArray[Any]:
    if not file.stat().st_size:  # which cannot be mapped
        return np.empty((0, *shape), dtype)
    return np.memmap(file, dtype, mode="r").reshape(-1, *shape)


def store(side: Side, words: Tokenizer, sight: Sight, folder: Path, name: str, first: int) -> Pictures:
    """Decode and encode to files in `folder` that begin with `name`, or map those that are there already.

    sight: of the model that will see them. first: the token before every text.
    """
    texts = [text for record in side.records for text in (record.prefix + "\n", record.suffix)]
    text = dataset.tokenize(texts, words, folder, name, first)
    shape = sight.channels, sight.image_size, sight.image_size
    recipe = hashlib.sha256(json.dumps(shape).encode())
    for digests in side.images:
        recipe.update(len(digests).to_bytes(4) + b"".join(digests))
    file = folder / f"{name}-{recipe.hexdigest()[:16]}.pixels"
    if not file.exists() or not file.with_suffix(".owners").exists():
        _decode(side, shape, file)
    return Pictures(text, file, shape)


def _decode(side: Side, shape: tuple[int, int, int], file: Path) -> None:
    """Each picture once, however many records have it."""
    number_of: dict[bytes, int] = {}
    owners: list[tuple[int, int]] = []
    partial = file.with_suffix(".partial")
    try:
        with partial.open("wb") as out:
            for number, (record, digests) in enumerate(zip(side.records, side.images, strict=True)):
                for path, digest in zip(record.images, digests, strict=True):
                    if digest not in number_of:
                        out.write(decoded(path, shape, record.where).tobytes())
                    owners.append((number, number_of.setdefault(digest, len(number_of))))
            out.flush()
            os.fsync(out.fileno())
        np.array(owners, np.int32).tofile(file.with_suffix(".owners"))
        flush(file.with_suffix(".owners"))
        partial.rename(file)
    finally:
        partial.unlink(missing_ok=True)


def decoded(path: Path, shape: tuple[int, int, int], where: str) -> NDArray[np.uint8]:
    """A picture as the engine would see it, in bytes, (C, S, S). Raises DataError: it is none, or damaged."""
    try:
        return images.Processor(shape[1], shape[0]).bytes(path)
    except (images.ImageError, OSError) as error:
        raise DataError(f"{where}: {error}") from None
