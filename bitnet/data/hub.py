"""Datasets on the Hugging Face hub, or in folders, read by the `datasets` library.

    hf:NAME  hf:NAME:SPLIT  hf:NAME:CONFIG:SPLIT      downloaded, and mapped from the library's cache
    hf-stream:…                                       read over the network, or from a folder, each time it is needed

NAME may also be a folder with files in the library's formats, or one that its `save_to_disk` wrote. The default SPLIT
is train. It may be a part, as the library writes it, such as train[:5%], except of a stream and from `save_to_disk`.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bitnet.data.files import DataError

MAPPED, STREAMED = "hf:", "hf-stream:"
SAVED = ("state.json", "dataset_dict.json")  # one of them is in a folder that `save_to_disk` wrote


def is_named(source: str) -> bool:
    return source.startswith((MAPPED, STREAMED))


def parts_of(source: str) -> tuple[str, str, list[str]]:
    """ "hf:" or "hf-stream:"; NAME; CONFIG and SPLIT if given."""
    kind, colon, rest = source.partition(":")
    name, *more = re.split(r":(?![^\[\]]*\])", rest)  # a slice has a colon of its own
    return kind + colon, name, more


def rows_of(source: str, column: str) -> Iterable[Any]:
    """The rows of a dataset, only this column. Raises DataError if it cannot be read or has no such column."""
    kind, name, more = parts_of(source)
    *config, part = more or ["train"]
    if not name or not part or len(config) > 1:
        raise DataError(f"{source!r}, expected {kind}NAME, {kind}NAME:SPLIT or {kind}NAME:CONFIG:SPLIT")
    import datasets

    try:
        if any((Path(name) / file).is_file() for file in SAVED):
            rows = _saved(datasets.load_from_disk(name), source, part)
        else:
            rows = datasets.load_dataset(name, *config, split=part, streaming=kind == STREAMED)
    except (ValueError, OSError, EOFError, datasets.exceptions.DatasetsError) as error:
        why = f": {error.__cause__}" if error.__cause__ else ""  # the library names the file there
        raise DataError(f"{source!r} cannot be read: {error}{why}") from None
    columns = rows.column_names or list(next(iter(_Named(source, rows)), {}))  # a stream may not know them
    if column not in columns:
        raise DataError(
            f"{source!r} has the columns {', '.join(columns)}, expected one named {column}; name another with --column"
        )
    return _Named(source, rows.select_columns(column))


class _Named:
    """Rows whose errors name their source: a stream may fail while it is iterated."""

    def __init__(self, source: str, rows: Iterable[Any]) -> None:
        self._source, self._rows = source, rows

    def __iter__(self) -> Iterator[Any]:
        rows, number = iter(self._rows), 0
        while True:
            try:
                row = next(rows)
            except StopIteration:
                return
            except Exception as error:  # network, decompression and format libraries each have their own
                raise DataError(f"{self._source!r} cannot be read after row {number:,}: {error}") from error
            number += 1
            yield row


def _saved(found: Any, source: str, part: str) -> Any:
    """The split in what `save_to_disk` wrote: one dataset, or a dictionary of splits."""
    if not isinstance(found, dict):
        if found.split and str(found.split) != part:
            raise DataError(f"{source!r} cannot be read: it is the split {found.split} alone, expected {part}")
        return found
    if part not in found:
        raise DataError(f"{source!r} cannot be read: it has the splits {', '.join(found)}, expected {part}")
    return found[part]
