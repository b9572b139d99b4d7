"""Writes the bytes of a GGUF file: keys, names of tensors, tensors; the inverse of `read`."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_export.foreign.source import Progress

from .types import TensorType

_ALIGN = 32

Value = str | bool | int | float | list[str] | list[int] | list[float]


class Entry(NamedTuple):
    """A tensor of the file."""

    name: str
    kind: TensorType
    shape: tuple[int, ...]  # (N, K) or (K,)
    parts: Callable[[], Iterable[NDArray[Any]]]  # its bytes, in order

    @property
    def size(self) -> int:
        return self.kind.tensor_size(self.shape)


def write_file(path: Path, metadata: Mapping[str, Value], entries: list[Entry], progress: Progress) -> None:
    """Magic, version, counts; keys; names, shapes, types and offsets of tensors; their bytes."""
    with open(path, "xb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(entries), len(metadata)))
        file.writelines(_string(key) + _value(value) for key, value in metadata.items())
        offset = 0
        for entry in entries:
            shape = entry.shape[::-1]  # fastest first
            info = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, entry.kind.number, offset)
            file.write(_string(entry.name) + info)
            offset += -(-entry.size // _ALIGN) * _ALIGN
        for number, entry in enumerate(entries, 1):
            progress(f"writing tensor {number} of {len(entries)}")
            file.write(bytes(-file.tell() % _ALIGN))
            begin = file.tell()
            for part in entry.parts():
                file.write(np.ascontiguousarray(part).data)
            assert file.tell() - begin == entry.size, entry.name
        file.write(bytes(-file.tell() % _ALIGN))


def _string(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<Q", len(raw)) + raw


_SCALARS: dict[type, tuple[int, Callable[[Any], bytes]]] = {
    str: (8, _string),
    bool: (7, lambda value: struct.pack("<?", value)),
    int: (4, lambda value: struct.pack("<I", value)),
    float: (6, lambda value: struct.pack("<f", value)),
}
_INT32: tuple[int, Callable[[Any], bytes]] = (
    5,
    lambda value: struct.pack("<i", value),
)  # for numbers below 0, and arrays: token types


def _value(value: Value) -> bytes:
    if not isinstance(value, list):
        kind, pack = _INT32 if type(value) is int and value < 0 else _SCALARS[type(value)]
        return struct.pack("<I", kind) + pack(value)
    element = type(value[0]) if value else str
    kind, pack = _INT32 if element is int else _SCALARS[element]
    return struct.pack("<IIQ", 9, kind, len(value)) + b"".join(map(pack, value))
