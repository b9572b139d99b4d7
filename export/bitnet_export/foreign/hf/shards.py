"""Tensors of one or several safetensors files, a few rows at a time.

Format: the safetensors README.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_export.foreign.source import Floats, SourceError
from bitnet_export.packed.content import Content
from bitnet_export.packed.recognise import PROBE

from .folder import MAX_JSON, Folder, refuse_pointer, strict_object

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED, PICKLED_INDEX = "pytorch_model.bin", "pytorch_model.bin.index.json"
_MAX_SHARDS = 1000

_DTYPES: dict[str, np.dtype[Any]] = {
    "U8": np.dtype("u1"),
    "F64": np.dtype("<f8"),
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
}
_SIZES = {"BOOL": 1, "I8": 1, "I16": 2, "U16": 2, "I32": 4, "U32": 4, "I64": 8, "U64": 8}
_SIZES |= {"F8_E4M3": 1, "F8_E5M2": 1}
_SIZES |= {name: dtype.itemsize for name, dtype in _DTYPES.items()}

_WEIGHTS = {  # other weight files of folders, and advice
    ".safetensors": f"shards want {INDEX} beside them, a single file the name {SINGLE}",
    ".gguf": "give the file in place of the folder",
    ".bin": f"of its kind {PICKLED} and shards with {PICKLED_INDEX} beside them are read",
    **dict.fromkeys((".pt", ".pth"), "load it with transformers, whose save_pretrained writes safetensors"),
    ".onnx": "a graph is not read, give the model that it was made from",
}
_NEW = {".LayerNorm.gamma": ".LayerNorm.weight", ".LayerNorm.beta": ".LayerNorm.bias"}
_OLD = re.compile(r"\.LayerNorm\.(gamma|beta)$")
"""Older names of a norm's weight and bias, which transformers also renames."""


def rounded(value: float, dtype: str) -> float:
    """The nearest number of a float type."""
    if dtype == "BF16":  # the upper half of the bits of fp32, half to even
        bits = int(np.float32(value).view(np.uint32))
        return float(np.uint32(bits + 0x7FFF + (bits >> 16 & 1) & 0xFFFF0000).view(np.float32))
    return float(np.float16(value) if dtype == "F16" else np.float32(value))


class Entry(NamedTuple):
    """A tensor, and where it is."""

    file: Content
    what: str  # for messages: file and name
    dtype: str  # as safetensors names it
    shape: tuple[int, ...]
    offset: int

    def read(self, first: int, last: int) -> NDArray[Any]:
        """Rows as stored, (last - first, K); a vector is one row. BF16 is returned as bits."""
        dtype, cols = _DTYPES[self.dtype], self.shape[-1] if self.shape else 1
        row = cols * dtype.itemsize
        return self.file.read(self.offset + first * row, (last - first) * row).view(dtype).reshape(last - first, cols)

    def floats(self) -> Floats:
        """The values as fp32, which represents every F32, F16 and BF16 exactly, and rounds F64."""
        if self.dtype not in ("F64", "F32", "F16", "BF16"):
            raise SourceError(f"{self.what} has dtype {self.dtype}, expected F32, F16, BF16 or F64")

        def rows(first: int, last: int) -> NDArray[np.float32]:
            values = self.read(first, last)
            if self.dtype == "BF16":
                return (values.astype(np.uint32) << 16).view(np.float32)
            with np.errstate(over="ignore"):  # infinity, which is refused where it is stored
                return values.astype(np.float32, copy=False)

        return Floats(self.shape, self.dtype.lower(), rows)

    def number(self) -> np.float32:
        """The value of a tensor that has one. Raises SourceError if it has others."""
        if self.shape not in ((), (1,)):
            raise SourceError(f"{self.what} has shape {list(self.shape)}, expected [] or [1]")
        return np.float32(self.floats().rows(0, 1)[0, 0])


def tensors_in(path: Path, what: str) -> dict[str, Entry]:
    return tensors_of(Content.open(path), what)


def open_shards(
    folder: Folder,
    single: str = SINGLE,
    index: str = INDEX,
    read: Callable[[Path, str], dict[str, Entry]] = tensors_in,
) -> dict[str, Entry]:
    """Every tensor of the folder by name. Raises SourceError for missing or damaged files, or headers that disagree.

    single, index: the names of the only file, and of the list of several. read: the tensors of one file.
    """
    places = _weight_map(folder, single, index)
    tensors: dict[str, Entry] = {}
    for name in sorted(set(places.values())) if places is not None else [single]:
        path = folder.find(name)
        if path is None:
            raise SourceError(f"{folder.path / name} is missing, {index} names it; download the model again")
        found = read(path, str(folder.path / name))
        for tensor, entry in found.items():
            if places is not None and places.get(tensor) != name:
                where = f"in {places[tensor]}" if tensor in places else "nowhere"
                raise SourceError(f"{entry.what} is there, but {index} has it {where}")
            tensors[tensor] = entry
    if places is not None and (lost := places.keys() - tensors.keys()):
        name = min(lost)
        raise SourceError(f"{folder.path}: tensor {name} is missing in {places[name]}, {index} has it there")
    return {_OLD.sub(lambda match: _NEW[match[0]], name): entry for name, entry in tensors.items()}


def _weight_map(folder: Folder, single: str, index: str) -> dict[str, str] | None:
    """Shard by tensor, None for a single file."""
    if folder.find(single):
        return None
    if folder.find(index) is None:
        found = sorted((path.name for path in folder.path.iterdir() if path.suffix in _WEIGHTS), key=_as_weights)
        words = f"but {', '.join(found[:3])}" if found else "and no other weights"
        advice = _WEIGHTS[Path(found[0]).suffix] if found else "download the model again"
        raise SourceError(f"{folder.path} has neither {single} nor {index}, {words:.160}; {advice}")
    places = folder.json(index).get("weight_map")
    if not isinstance(places, dict) or not places or not all(isinstance(name, str) for name in places.values()):
        raise SourceError(f"{folder.path / index}: weight_map is not an object of file names by tensor")
    if len(set(places.values())) > _MAX_SHARDS:
        raise SourceError(f"{folder.path / index} names more than {_MAX_SHARDS} files")
    return places


def _as_weights(name: str) -> tuple[int, str]:
    """A sort key in the order of `_WEIGHTS`: next to safetensors, a .bin file may be anything."""
    return list(_WEIGHTS).index(Path(name).suffix), name


def tensors_of(file: Content, what: str) -> dict[str, Entry]:
    """Every tensor of one file by name. what: the file in messages. Raises SourceError if it is damaged."""
    size = file.size
    refuse_pointer(file.read(0, min(size, PROBE)).tobytes(), what)
    length = int.from_bytes(file.read(0, 8).tobytes(), "little") if size >= 8 else 0
    if not 2 <= length <= min(size - 8, MAX_JSON):
        raise SourceError(
            f"{what} is damaged or not a safetensors file: header of {length} bytes in a file of {size}, "
            f"expected 2 to {MAX_JSON} bytes"
        )
    header = strict_object(file.read(8, length).tobytes(), f"{what}: the header")
    header.pop("__metadata__", None)
    base, end = 8 + length, 0
    entries = {name: _entry(file, f"{what}: tensor {name}", value, base) for name, value in header.items()}
    for entry, last in sorted(entries.values(), key=lambda pair: pair[0].offset):
        if entry.offset != base + end:
            raise SourceError(f"{entry.what} begins at {entry.offset - base}, expected {end}: no holes, no overlap")
        end = last
    if base + end != size:
        raise SourceError(f"{what} has {size} bytes, its header calls for {base + end}; download it again")
    return {name: entry for name, (entry, _) in entries.items()}


def _entry(file: Content, what: str, value: object, base: int) -> tuple[Entry, int]:
    """The tensor that an entry of the header describes, and its end within the data."""
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise SourceError(f"{what} is described by {value!r:.80}, expected dtype, shape and data_offsets")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or dtype not in _SIZES:
        raise SourceError(f"{what} has dtype {dtype!r:.40}, expected one of {', '.join(_SIZES)}")
    if not (_naturals(shape) and len(shape) <= 8 and _naturals(offsets) and len(offsets) == 2):
        raise SourceError(f"{what} has shape {shape!r:.80} and offsets {offsets!r:.80}, expected natural numbers")
    size = _SIZES[dtype] * math.prod(shape)
    if offsets[1] - offsets[0] != size:
        raise SourceError(f"{what} has {offsets[1] - offsets[0]} bytes, its shape {shape} of {dtype} takes {size}")
    return Entry(file, what, dtype, tuple(shape), base + offsets[0]), offsets[1]


def _naturals(values: object) -> bool:
    return isinstance(values, list) and all(type(n) is int and 0 <= n < 1 << 63 for n in values)
