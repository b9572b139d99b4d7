"""The texts in files: a document of plain text, the lines of a .jsonl file, the rows of a .parquet file.

Plain text and .jsonl may be compressed, as .gz or .zst. Lines and rows are read one after another, so that a file may
be larger than the memory. What cannot be read is an error that names the file and the line or row.
"""

from __future__ import annotations

import codecs
import contextlib
import csv
import gzip
import io
import json
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any, cast

from bitnet.data.published import is_talk
from bitnet_runtime.errors import json_kind

PLAIN = (".txt", ".md", ".rst", ".py")
ROWS = (".jsonl", ".parquet")
COMPRESSED = (".gz", ".zst")
SUFFIXES = (*PLAIN, *ROWS)
"""Suffixes of the files that are read from a folder; all but .parquet also compressed. Of files that are named
directly, .csv is a table and all others are plain text."""
ENDINGS = f"{', '.join(SUFFIXES)} or .ndjson, all but .parquet also with {' or '.join(COMPRESSED)}"
"""The same for messages."""
COLUMN = "text"
"""The default column of the text in lines and rows."""
MOST = 1 << 30
"""Most bytes of one text: encoding takes some 25 times as much memory."""
MOST_OF_RECORD = 16 << 20
"""Most bytes of a line with a conversation, a pair or the like."""


class DataError(ValueError):
    """The data cannot be read, or is too little."""


class NotUTF8Error(DataError):
    """A file is not text, or has another encoding."""


def kind_of(file: Path) -> str:
    """The suffix of a file, without that of a compression: ".jsonl" for a.jsonl.zst, and for a.ndjson."""
    outer = file.suffix.lower()
    inner = file.with_suffix("").suffix.lower() if outer in COMPRESSED else ""
    kind = inner if inner and inner != ".parquet" else outer
    return ".jsonl" if kind == ".ndjson" else kind


def is_known(file: Path) -> bool:
    return kind_of(file) in SUFFIXES


def texts_of(file: Path, column: str = COLUMN) -> Iterator[str]:
    """The strings in a column of a .jsonl, .parquet or .csv file; otherwise the whole text."""
    kind = kind_of(file)
    if kind == ".parquet":
        return _rows(file, column)
    if kind == ".jsonl":
        return (text_of(record, where, column) for record, where in records(file, MOST))
    if kind == ".csv":
        return (text_of(row, where, column) for row, where in rows_of(file, column))
    return _whole(file)


def text_of(record: Any, where: str, column: str) -> str:
    """The string in a column of a line or row. Raises DataError if there is none."""
    text = record.get(column) if isinstance(record, dict) else None
    if not isinstance(text, str):
        raise DataError(f"{where}: {_instead(record, column)}")
    check_characters(text, where, f'"{column}"')
    return text


def check_characters(text: str, where: str, what: str = "a text") -> None:
    """Raises DataError if a text from JSON holds a lone surrogate, which JSON can spell."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise DataError(f"{where}: {what} holds half of a surrogate pair, which is not a character") from None


def _instead(record: Any, column: str) -> str:
    """The error for a record without a text."""
    if not isinstance(record, dict):
        return f'expected an object with a string "{column}", found {json.dumps(record):.80}'
    if is_talk(record) and column not in record:
        return f"this is a conversation ({', '.join(record):.80}), expected text; give it to --chat, or name a --column"
    if {"chosen", "rejected"} <= record.keys():
        return 'this is a preference ("chosen", "rejected"), expected text; give it to bitnet finetune --preference'
    if {"step", "tokens", "seconds"} <= record.keys():
        return "this is the log of a run, expected text; leave it out"
    if ("image" in record or "images" in record) and column not in record:
        return "this is a record of an image, expected text; a model learns it that has a vision stack, see --vision"
    if column in record:
        return f'"{column}" is {json_kind(record[column])}, expected a string; leave such rows out'
    names = ", ".join(map(str, record))
    return f'expected an object with a string "{column}", found {names[:200] or "nothing"}; name another with --column'


# ---- files of bytes ----


@contextlib.contextmanager
def opened(file: Path) -> Iterator[IO[bytes]]:
    """A file, decompressed. Raises DataError if it is damaged or truncated."""
    with file.open("rb") as raw:
        if file.suffix.lower() in COMPRESSED and not raw.peek(1):  # gzip would read it as an empty text
            raise DataError(f"{file} is damaged or cut off: it has 0 bytes")
        try:
            yield _uncompressed(raw, file.suffix.lower())
        except (EOFError, zlib.error, OSError) as error:
            if getattr(error, "errno", None) or file.suffix.lower() not in COMPRESSED:
                raise  # an error of the disk
            raise DataError(f"{file} is damaged or cut off: {error}") from None


def _uncompressed(raw: IO[bytes], suffix: str) -> IO[bytes]:
    if suffix == ".gz":
        return cast(IO[bytes], gzip.GzipFile(fileobj=raw))
    if suffix == ".zst":
        import pyarrow

        return cast(IO[bytes], io.BufferedReader(pyarrow.CompressedInputStream(raw, "zstd"), 1 << 20))
    return raw


def _whole(file: Path) -> Iterator[str]:
    with opened(file) as content:
        text = _bounded(content.read, MOST, str(file)).removeprefix(codecs.BOM_UTF8)
        if text[257:262] == b"ustar":  # as text it would be learnt, with names and padding between its files
            raise DataError(f"{file} is a tar archive, expected text; unpack it and name its folder")
        if (place := text.find(b"\0")) >= 0:  # UTF-8, and yet of no text: UTF-16 without its mark, or a program's
            raise NotUTF8Error(f"{file} is not UTF-8 text (byte {place} is NUL); convert it or leave it out")
        yield _decoded(text, str(file))


def records(file: Path, most: int = 0) -> Iterator[tuple[Any, str]]:
    """The records in the non-empty lines of a .jsonl file, and where each is, for messages.

    most: bytes per line; 0: MOST_OF_RECORD. Raises DataError naming file and line.
    """
    with opened(file) as content:
        number = 1
        while line := _bounded(content.readline, most or MOST_OF_RECORD, where := f"{file}, line {number}"):
            line = line.removeprefix(codecs.BOM_UTF8) if number == 1 else line
            if line.strip():
                yield _parsed(line, where), where
            number += 1


def first_record(file: Path) -> Any:
    """The value of the first line that is not empty; None if it is not JSON, or there is none."""
    try:
        return next(records(file), (None, ""))[0]
    except DataError:
        return None


def _bounded(read: Callable[[int], bytes], most: int, where: str) -> bytes:
    found = read(most + 1)
    if len(found) > most:
        raise DataError(f"{where}: more than {most:,} bytes; cut it into several")
    return found


def _decoded(text: bytes, where: str) -> str:
    try:
        return text.decode("utf-8")
    except UnicodeDecodeError as error:
        raise NotUTF8Error(f"{where} is not UTF-8 (byte {error.start}); convert it or leave it out") from None


def _parsed(line: bytes, where: str) -> Any:
    text = _decoded(line, where)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg.removesuffix(' at')} at character {error.pos + 1}") from None
    except (ValueError, RecursionError) as error:  # a very long integer, or deep nesting
        raise DataError(f"{where}: not JSON: {error}") from None


# ---- tables ----


def rows_of(file: Path, column: str = "") -> Iterator[tuple[dict[str, str], str]]:
    """The rows of a .csv file, and where each is. column: there may be only one of this name. Raises DataError."""
    csv.field_size_limit(MOST)
    with opened(file) as content:
        rows = csv.reader(io.TextIOWrapper(content, encoding="utf-8-sig", newline=""), strict=True)
        try:
            names = next(rows, [])
            if names.count(column) > 1:
                raise DataError(f"{file} has several columns named {column}, expected one; rename the others")
            begin = rows.line_num + 1
            for cells in rows:
                where, begin = f"{file}, line {begin}", rows.line_num + 1
                if cells and len(cells) != len(names):
                    raise DataError(
                        f"{where}: has {len(cells)} cell{'s' * (len(cells) != 1)}, expected {len(names)}, one for each "
                        "column of the first line; put text that has commas in double quotes"
                    )
                if cells:  # not an empty line
                    yield dict(zip(names, cells, strict=True)), where
        except UnicodeDecodeError:
            raise NotUTF8Error(f"{file} is not UTF-8; convert it or leave it out") from None
        except csv.Error as error:
            raise DataError(f"{file} is not a table of comma-separated values: {error}") from None


def _rows(file: Path, column: str) -> Iterator[str]:
    import pyarrow
    from pyarrow import parquet

    number = 0
    try:
        with parquet.ParquetFile(file, pre_buffer=False) as table:
            _check_column(table.schema_arrow, file, column)
            for part in table.iter_batches(batch_size=64, columns=[column]):
                for value in part.column(0):
                    number += 1
                    where = f"{file}, row {number}"
                    try:
                        text = value.as_py()
                    except UnicodeDecodeError as error:
                        raise NotUTF8Error(f"{where} is not UTF-8 (byte {error.start})") from None
                    if isinstance(text, str) and len(text) > MOST:
                        raise DataError(f"{where}: more than {MOST:,} bytes; cut it into several")
                    yield text_of({column: text}, where, column)
    except (pyarrow.ArrowException, OSError) as error:
        if getattr(error, "errno", None):
            raise
        raise DataError(f"{file} is damaged or cut off, after row {number:,}: {error}") from None


def _check_column(schema: Any, file: Path, column: str) -> None:
    import pyarrow

    if schema.names.count(column) != 1:
        raise DataError(
            f"{file} has the columns {', '.join(schema.names)[:400]}, expected one named {column}; name another with "
            "--column"
        )
    found = kind = schema.field(column).type
    if pyarrow.types.is_dictionary(kind):
        kind = kind.value_type
    is_text = (pyarrow.types.is_string, pyarrow.types.is_large_string, pyarrow.types.is_string_view)
    if not any(check(kind) for check in is_text):
        raise DataError(f"{file}: column {column} holds {found}, expected strings; name another with --column")
