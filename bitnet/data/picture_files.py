"""Records of images and texts in files: finding, reading and checking them.

A record has images, a question about them, and the answer. A caption is an answer without a question. Records are the
lines of .jsonl files and the rows of .csv files, with paths relative to the file, or the images of a folder:

    {"image": "a.png", "caption": "a red ring"}              also "text"
    {"image": "a.png", "prefix": "how many?", "suffix": "3"} also "question" and "answer"
    {"images": ["a.png", "b.png"], "prefix": "which is older?", "suffix": "the second"}
    a.png next to a.txt, which holds the caption
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from bitnet.data.corpus import DataError
from bitnet.data.files import kind_of, records, rows_of
from bitnet.data.finding import LOG, matches, walk
from bitnet.data.published import TALKS
from bitnet.data.tokenizer import IMAGE

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm")
"""Suffixes of images in a folder. An image that a record names may have any name."""
RECORDS = (".jsonl", ".csv")
ANSWERS, QUESTIONS = ("caption", "text", "suffix", "answer"), ("prefix", "question")
URL = re.compile(r"data:|[a-z][a-z0-9+.-]*://", re.IGNORECASE)
EXPECTED = 'expected "image" and "caption", or "image", "prefix" and "suffix"'


class Record(NamedTuple):
    images: tuple[Path, ...]
    prefix: str  # "" for a caption
    suffix: str
    where: str  # file and line, for messages


class Problems(list[str]):
    """Problems with records, raised as one error, at the latest when there are MOST."""

    MOST = 10

    def add(self, error: Exception, of: int) -> None:
        """of: the number of records read so far."""
        self.append(str(error))
        if len(self) == self.MOST:
            self.refuse(of)

    def refuse(self, of: int) -> None:
        """Raises DataError if there are any."""
        if len(self) == 1:
            raise DataError(self[0])
        if self:
            places: dict[str, list[str]] = {}  # by fault
            for where, _, fault in (problem.partition(": ") for problem in self):
                places.setdefault(fault, []).append(where)
            said = "; ".join(f"{_together(where)}: {fault}" for fault, where in places.items())
            raise DataError(f"{len(self)} of {of:,} records cannot be used: {said}. Repair them or take them out")


def _together(places: Sequence[str]) -> str:
    """Files and lines with each file named once: a.csv, line 2, line 3."""
    lines: dict[str, list[str]] = {}
    for file, comma, line in (place.rpartition(", line ") for place in places):
        lines.setdefault(file or line, []).extend([f"line {line}"] if comma else [])
    return ", ".join(", ".join([file, *of]) for file, of in lines.items())


def read(sources: Sequence[str], say: Callable[[str], object] = lambda _: None) -> Iterator[Record]:
    """The records of files, folders and globs. Raises DataError naming file and line.

    say: is told of texts in a folder that have no picture.
    """
    if not sources:
        raise DataError("a model that looks at images learns from records of images and texts; name them with --data")
    for path in itertools.chain.from_iterable(map(_named, sources)):
        if path.is_dir():
            files = sorted(itertools.chain.from_iterable(walk(path)))
            tables = [file for file in files if kind_of(file) in RECORDS and file.name != LOG]
            yield from _files(tables) if tables else _beside_texts(path, files, say)
        elif kind_of(path) in RECORDS:
            yield from _files([path])
        else:
            raise DataError(f"{path} is not a .jsonl file, .csv file or folder, expected records of images and texts")


def _named(source: str) -> list[Path]:
    named = [Path(source)] if Path(source).exists() else [Path(match) for match in matches(source)]
    if not named:
        raise DataError(f"{source} does not exist, expected records of images and texts")
    return named


def captions(records: Iterable[Record]) -> Iterator[Record]:
    """The same records. Raises DataError naming those without exactly one image."""
    expected = "and --objective contrastive learns which text belongs to which; give one each, or --objective next"
    problems, n = Problems(), 0
    for n, record in enumerate(records, 1):
        if len(record.images) == 1:
            yield record
        else:
            problems.add(DataError(f"{record.where}: it has {len(record.images)} images, {expected}"), n)
    problems.refuse(n)


def _files(files: Iterable[Path]) -> Iterator[Record]:
    problems, n = Problems(), 0
    for file in files:
        for values, where in records(file) if kind_of(file) == ".jsonl" else _filled(file):
            n += 1
            try:
                record = _record(values, file.parent, where)
            except DataError as error:
                problems.add(error, n)
            else:
                yield record
    problems.refuse(n)


def _filled(file: Path) -> Iterator[tuple[Any, str]]:
    """The rows of a table, without empty cells."""
    return (({name: cell for name, cell in row.items() if cell}, where) for row, where in rows_of(file))


def _beside_texts(folder: Path, files: Sequence[Path], say: Callable[[str], object]) -> Iterator[Record]:
    pictures = [file for file in files if file.suffix.lower() in SUFFIXES]
    if not pictures:
        raise DataError(f"{folder} holds no .jsonl file, no .csv file and no picture ({', '.join(SUFFIXES)})")
    captioned, there = {picture.with_suffix("") for picture in pictures}, set(files)
    for file in files:
        other = file.suffix.lower() not in (*SUFFIXES, ".txt") and file.with_suffix("") not in captioned
        if other and file.with_suffix(".txt") in there:
            raise DataError(f"{file} has a text beside it, expected one of {', '.join(SUFFIXES)}; convert or remove it")
    if alone := [file for file in files if file.suffix == ".txt" and file.with_suffix("") not in captioned]:
        say(f"{folder}: {len(alone):,} .txt without a picture beside it, left out; the first is {alone[0].name}")
    for picture in pictures:
        text = picture.with_suffix(".txt")
        try:
            caption = text.read_text(encoding="utf-8").removeprefix("\ufeff").strip()
        except FileNotFoundError:
            raise DataError(f"{picture} has no text beside it, expected its caption in {text.name}") from None
        except UnicodeDecodeError as error:
            raise DataError(f"{text} is not UTF-8 (byte {error.start})") from None
        yield _record({"image": str(picture.absolute()), "caption": caption}, folder, str(text))


def _record(values: Any, folder: Path, where: str) -> Record:
    said = values if isinstance(values, dict) else {}
    answers, questions = ([name for name in names if name in said] for names in (ANSWERS, QUESTIONS))
    paths = said.get("images", [said["image"]] if "image" in said else [])
    if talk := next((name for name in TALKS if name in said), ""):
        raise DataError(f"{where}: it has {talk!r}; a run learns conversations with --chat; here {EXPECTED}")
    if isinstance(values, dict) and not answers and values:
        raise DataError(f"{where}: {_found(values)} and no text to learn; {EXPECTED}")
    if len(answers) != 1 or len(questions) > 1 or ("image" in said and "images" in said):
        raise DataError(f"{where}: {_found(values)}; {EXPECTED}")
    if not isinstance(paths, list) or not all(isinstance(path, str) and path.strip() for path in paths):
        raise DataError(f"{where}: the images are {paths!r:.80}, expected paths")
    if answers[0] in ("caption", "text") and (questions or len(paths) != 1):
        raise DataError(f"{where}: {_found(values)}; a caption is of one image that nothing is asked of; {EXPECTED}")
    prefix, suffix = (said[names[0]] if names else "" for names in (questions, answers))
    for name, text in ((questions or ["prefix"])[0], prefix), (answers[0], suffix):
        if problem := _problem(text, empty=name != answers[0]):
            raise DataError(f'{where}: "{name}" {problem}')
    if missing := [path for path in paths if not is_file(folder / path)]:
        if URL.match(missing[0]):
            raise DataError(f"{where}: an image is {missing[0]!r:.60}, expected a path: keep it in a file")
        raise DataError(f"{where}: there is no file {folder / missing[0]}")
    return Record(tuple(folder / path for path in paths), prefix, suffix, where)


def is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a data: URL is too long for a name
        return False


def _problem(text: Any, empty: bool) -> str:
    """What is wrong with a text; "" if nothing is. empty: whether it may be empty."""
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
