"""The GGUF container: metadata, and the place of each tensor. Strict: every deviation is refused.

Layout: docs/gguf.md of ggml, versions 2 and 3, little-endian. Everything is checked against the
size of the file before it is used; tensors are read on demand.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, TypeVar

import numpy as np

from bitnet_export.foreign.source import SourceError, Tensor
from bitnet_export.packed.content import Content

from .types import Q2_0, Q2_0_OF_FORKS, TYPES, TensorType, type_of

MAX_NAME = 64  # bytes of a tensor name (ggml's GGML_MAX_NAME)
MAX_KEY = 65_535
MAX_STRING = 1 << 24  # a chat template or a vocabulary entry is far smaller
MAX_ELEMENTS = 1 << 21  # of all arrays together; the largest vocabularies have 3 arrays of 2^18, and 2^19 merges
MAX_ITEMS = 1 << 16  # metadata pairs, and tensors; 1,024 layers have 26,000
MAX_DIMENSIONS = 4
_PART = 1 << 20  # bytes read at a time

_STRING, _ARRAY = 8, 9
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}

T = TypeVar("T", int, float, str)


class Entry(NamedTuple):
    """A tensor in the file."""

    type: TensorType
    shape: tuple[int, ...]  # (N, K) or (K,): ggml counts dimensions from the other end
    start: int  # from the start of the file
    size: int


class Gguf:
    """A GGUF file, opened and checked. `metadata` has plain Python values, arrays are lists."""

    def __init__(self, content: bytes | Content) -> None:
        self._content = Content.of(content)
        cursor = _Cursor(self._content)
        self.version, self.metadata, records = _header(cursor)
        self.alignment = _alignment(self.metadata)
        self.tensors = _placed(records, cursor.at, self._content.size, self.alignment)

    def value(self, key: str, kind: type[T], default: T | None = None) -> T:
        """The value of a key, or `default`. Raises SourceError if it has another type, or there is neither."""
        value = self.metadata.get(key, default)
        if value is None:
            raise SourceError(f"metadata has no key {key}")
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind:
            raise SourceError(f"{key} is {value!r:.80}, expected {kind.__name__}")
        return value

    def tensor(self, name: str) -> Tensor:
        """A tensor of `tensors`. Raises SourceError naming it if its values are invalid."""
        entry = self.tensors[name]
        try:
            return entry.type.tensor(lambda start, size: self._content.read(entry.start + start, size), entry.shape)
        except SourceError as error:
            raise SourceError(f"tensor {name}: {error}") from None

    def same(self, one: str, other: str) -> bool:
        """Whether two tensors have the same type, shape and bytes."""
        a, b, read = self.tensors[one], self.tensors[other], self._content.read
        return (a.type, a.shape) == (b.type, b.shape) and all(
            np.array_equal(read(a.start + at, size), read(b.start + at, size))
            for at in range(0, a.size, _PART)
            for size in (min(_PART, a.size - at),)
        )


class _Cursor:
    """Reads sequentially through the file; never beyond its end."""

    def __init__(self, content: Content) -> None:
        self._content, self._end = content, content.size
        self._elements = MAX_ELEMENTS
        self._ahead, self._from = b"", 0  # read-ahead buffer and its offset: most values have only a few bytes
        self.at = 0

    @property
    def left(self) -> int:
        return self._end - self.at

    def take(self, size: int, what: str) -> bytes:
        if size > self.left:
            raise SourceError(
                f"{what} takes {size} bytes at {self.at}, the file ends after {self.left}; fetch it again"
            )
        if self.at + size > self._from + len(self._ahead):
            self._from = self.at
            self._ahead = self._content.read(self.at, min(max(size, _PART), self.left)).tobytes()
        self.at += size
        return self._ahead[self.at - size - self._from : self.at - self._from]

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(form, self.take(struct.calcsize(form), what))[0]

    def count(self, what: str, smallest: int, most: int) -> int:
        """A 64-bit count of items of at least `smallest` bytes."""
        count: int = self.number("<Q", what)
        room = min(most, self.left // smallest)
        if count > room:
            where = "" if room == most else f" in the {self.left} bytes that follow"
            raise SourceError(f"{what} is {count}, expected at most {room}{where}")
        return count

    def string(self, what: str, most: int = MAX_STRING) -> str:
        size = int.from_bytes(self.take(8, what), "little")
        if size > most:
            raise SourceError(f"{what} has {size} bytes, expected at most {most}")
        try:
            return self.take(size, what).decode()
        except UnicodeDecodeError:
            raise SourceError(f"{what} is not UTF-8") from None

    def value(self, kind: int, what: str) -> Any:
        if kind == _STRING:
            return self.string(what)
        if kind == _ARRAY:
            return self._array(what)
        if kind not in _SCALARS:
            raise SourceError(f"{what} is of type {kind}, expected 0 to 12")
        value = self.take(struct.calcsize(_SCALARS[kind]), what)
        if kind == 7 and value > b"\1":
            raise SourceError(f"{what} is a bool with value {value[0]}, expected 0 or 1")
        return struct.unpack(_SCALARS[kind], value)[0]

    def _array(self, what: str) -> list[Any]:
        kind: int = self.number("<I", what)
        if kind == _ARRAY:
            raise SourceError(f"{what} is an array of arrays, expected numbers or strings")
        if kind != _STRING and kind not in _SCALARS:
            raise SourceError(f"{what} is an array of type {kind}, expected 0 to 12")
        width = 8 if kind == _STRING else struct.calcsize(_SCALARS[kind])
        count = self.count(f"the length of {what}", width, self._elements)
        self._elements -= count
        if kind == _STRING:
            return [self.string(what) for _ in range(count)]
        if kind == 7:
            return [self.value(kind, what) for _ in range(count)]
        values: list[Any] = np.frombuffer(
            self.take(count * width, what), "<" + np.dtype(_SCALARS[kind][1]).str[1:]
        ).tolist()
        return values


class _Record(NamedTuple):
    """A line of the table of tensors."""

    name: str
    shape: tuple[int, ...]
    number: int  # of the type
    offset: int


def _header(cursor: _Cursor) -> tuple[int, dict[str, Any], list[_Record]]:
    magic = cursor.take(4, "the magic number")
    if magic != b"GGUF":
        raise SourceError(f"the file begins with {magic!r}, expected b'GGUF'")
    version: int = cursor.number("<I", "the version")
    if version & 0xFFFF == 0 and version:
        raise SourceError(
            "the file is big-endian, expected little-endian; convert it with gguf-py's gguf_convert_endian"
        )
    if version not in (2, 3):
        raise SourceError(f"GGUF version is {version}, expected 2 or 3; write the file again with a newer converter")
    tensors = cursor.count("the number of tensors", 8 + 1 + 4 + 8 + 4 + 8, MAX_ITEMS)
    pairs = cursor.count("the number of metadata pairs", 8 + 1 + 4 + 1, MAX_ITEMS)
    metadata: dict[str, Any] = {}
    for index in range(pairs):
        key = cursor.string(f"metadata key {index}", MAX_KEY)
        if key in metadata:
            raise SourceError(f"metadata key {_shown(key)} occurs twice")
        metadata[key] = cursor.value(cursor.number("<I", f"the type of {_shown(key)}"), _shown(key))
    records: dict[str, _Record] = {}
    for index in range(tensors):
        record = _record(cursor, index)
        if record.name in records:
            raise SourceError(f"tensor {_shown(record.name)} occurs twice")
        records[record.name] = record
    return version, metadata, list(records.values())


def _record(cursor: _Cursor, index: int) -> _Record:
    name = cursor.string(f"the name of tensor {index}", MAX_NAME)
    what = f"tensor {_shown(name)}"
    count: int = cursor.number("<I", what)
    if not 1 <= count <= MAX_DIMENSIONS:
        raise SourceError(f"{what} has {count} dimensions, expected 1 to {MAX_DIMENSIONS}")
    sizes = struct.unpack(f"<{count}Q", cursor.take(8 * count, what))
    while len(sizes) > 1 and sizes[-1] == 1:  # trailing dimensions of 1 have no meaning in ggml
        sizes = sizes[:-1]
    if len(sizes) > 2 or not all(1 <= size < 1 << 31 for size in sizes):
        raise SourceError(f"{what} has shape {list(reversed(sizes))}, expected a vector or a matrix")
    number, offset = struct.unpack("<IQ", cursor.take(12, what))
    return _Record(name, tuple(reversed(sizes)), number, offset)


def _shown(name: str) -> str:
    """A name from the file for messages: without control characters, limited in length."""
    return name if name.isprintable() and len(name) <= 80 else ascii(name[:80])


def _alignment(metadata: Mapping[str, Any]) -> int:
    alignment = metadata.get("general.alignment", 32)
    if type(alignment) is not int or not 1 <= alignment <= 1 << 16 or alignment & (alignment - 1):
        raise SourceError(f"general.alignment is {alignment!r:.80}, expected a power of two up to 65536")
    return alignment


def _placed(records: list[_Record], table_end: int, file_size: int, alignment: int) -> dict[str, Entry]:
    """The tensors, contiguous up to the end of the file, as llama.cpp requires."""
    if not any(record.number == Q2_0 for record in records):
        return _places(records, table_end, file_size, alignment, TYPES[Q2_0])
    fitting, problems = [], []
    for kind in (TYPES[Q2_0], Q2_0_OF_FORKS):
        try:
            fitting.append(_places(records, table_end, file_size, alignment, kind))
        except SourceError as error:
            problems.append(error)
    if not fitting:
        raise problems[0]
    if len(fitting) > 1:
        raise SourceError("Q2_0 tensors may have groups of 64 or of 128 weights, and this file is too small to tell")
    return fitting[0]


def _places(
    records: list[_Record], table_end: int, file_size: int, alignment: int, q2_0: TensorType
) -> dict[str, Entry]:
    data = end = -(-table_end // alignment) * alignment
    entries: dict[str, Entry] = {}
    for record in records:
        what, start = f"tensor {_shown(record.name)}", -(-end // alignment) * alignment
        try:
            kind = q2_0 if record.number == Q2_0 else type_of(record.number)
            size = kind.tensor_size(record.shape)
        except SourceError as error:
            raise SourceError(f"{what}: {error}") from None
        if data + record.offset != start:
            raise SourceError(
                f"{what} is at {record.offset}, expected at {start - data}, after the one before it; "
                "the file is damaged, or a tensor has another type than declared"
            )
        end = start + size
        if end > file_size:
            raise SourceError(f"{what} ends at {end}, the file at {file_size}; fetch it again")
        entries[record.name] = Entry(kind, record.shape, start, size)
    if entries and file_size > -(-end // alignment) * alignment:
        raise SourceError(f"the last tensor ends at {end}, the file at {file_size}; the file is damaged")
    return entries
