"""Write a packed file, tensor by tensor (FORMAT.md).

Memory: one tensor at a time. The file appears under its name only when it is complete (`replacing`).
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig

from . import encodings, layout, records
from .encodings import Encoding
from .records import Base, Record, Spec
from .replacing import replacing
from .stacks import pack_stack

# The size of a huge page: with aligned writes of this size, the page cache holds the file in huge pages (Linux with
# large folios, such as ext4 from 6.16), which the engine maps and reads faster.
BLOCK = 1 << 21


class Encoded(NamedTuple):
    """A tensor as stored in the file."""

    encoding: Encoding
    scope: int
    data: NDArray[Any]
    scales: NDArray[np.float32] | None = None  # (1,), (N,) or (N, ceil(K/128)) by scope

    @classmethod
    def floats(cls, encoding: Encoding, values: NDArray[Any]) -> Encoded:
        """A tensor of floats. As F16, values beyond 65504 become infinite, which the writer refuses."""
        return cls(encoding, encodings.SCALE_NONE, encoding.encode(values))

    @classmethod
    def f32(cls, values: NDArray[Any]) -> Encoded:
        return cls.floats(encodings.F32, values)


def write_packed(
    path: str | os.PathLike[str],
    stacks: Sequence[ModelConfig],
    source: Callable[[Spec], Encoded],
    *,
    metadata: dict[str, Any] | None = None,
    tokenizer: bytes | None = None,
    template: bytes | None = None,
    base: Base | None = None,
    check: Callable[[Path], None] | None = None,
) -> None:
    """Write a packed file.

    source: called for each tensor that the stacks require, in file order.
    metadata: more keys for METADATA next to "format" and "config".
    base: the file is a separate adapter of this model.
    check: called with the complete temporary file; if it raises, no file is written.

    Raises ValueError if the format cannot express something, OSError if writing fails.
    """
    if not 1 <= len(stacks) <= records.MAX_STACKS:
        raise ValueError(f"{len(stacks)} stacks, expected 1 to {records.MAX_STACKS}")
    if template is not None and len(template) > records.MAX_TEMPLATE:
        raise ValueError(f"chat template is {len(template)} bytes, expected at most {records.MAX_TEMPLATE}")
    description = {"format": "bitnet-edge", "config": [c.to_dict() for c in stacks]} | (metadata or {})
    front = {
        records.STACKS: b"".join(map(pack_stack, stacks)),
        records.TENSORS: b"",
        records.METADATA: _json(description),
        records.TOKENIZER: tokenizer,
        records.TEMPLATE: template,
    }
    known = {kind: content for kind, content in front.items() if content is not None}
    write_sections(path, stacks, source, known, base=base, check=check)


def _json(description: dict[str, Any]) -> bytes:
    """JSON in UTF-8; names of files may have undecodable bytes, which are replaced."""
    return json.dumps(description, ensure_ascii=False, allow_nan=False, indent=1).encode("utf-8", "replace")


def write_sections(
    path: str | os.PathLike[str],
    stacks: Sequence[ModelConfig],
    source: Callable[[Spec], Encoded],
    front: dict[int, bytes],
    *,
    base: Base | None = None,
    check: Callable[[Path], None] | None,
) -> None:
    """`write_packed` with given sections before DATA, by kind; TENSORS is generated here."""
    with replacing(Path(path)) as temporary:
        with open(temporary, "xb", buffering=BLOCK) as file:
            _write(file, stacks, source, front, base)
        if check:
            check(temporary)


def _write(
    file: BinaryIO,
    stacks: Sequence[ModelConfig],
    source: Callable[[Spec], Encoded],
    front: dict[int, bytes],
    base: Base | None,
) -> None:
    alone = base is not None
    specs = [spec for index, config in enumerate(stacks) for spec in records.expected_tensors(config, index, alone)]
    front[records.TENSORS] = bytes(records.TENSOR.size * len(specs))
    section_count = len(front) + 1
    offsets, end = {}, records.HEADER.size + records.SECTION.size * section_count
    for kind, content in front.items():
        offsets[kind] = records.align(end)
        end = offsets[kind] + len(content)
    data_start = records.align(end)

    _append(file, bytes(data_start))  # not a seek: blocks start at multiples of BLOCK; filled in below
    data = _Stream(file)
    table = [_write_tensor(data, spec, source(spec)) for spec in specs]
    front[records.TENSORS] = b"".join(record.pack() for record in table)

    sections = b"".join(
        records.SECTION.pack(kind, zlib.crc32(content), offsets[kind], len(content), 0, 0)
        for kind, content in front.items()
    ) + records.SECTION.pack(records.DATA, data.crc, data_start, data.size, 0, 0)
    file_size = records.align(data_start + data.size)
    whose = bytes(records.BASE.size) if base is None else records.BASE.pack(*base)
    fields = (records.MAGIC, records.VERSION, records.ADAPTER_ALONE * alone, file_size, section_count, whose)
    header = records.HEADER.pack(*fields, 0)[:-4]
    file.truncate(file_size)
    file.seek(0)
    file.write(records.HEADER.pack(*fields, zlib.crc32(header + sections)) + sections)
    for kind, content in front.items():
        file.seek(offsets[kind])
        file.write(content)


class _Stream:
    """The growing DATA section, with its size and checksum."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.crc = file, 0, 0

    def put(self, content: bytes | memoryview) -> int:
        """Append at the next multiple of 64; returns the offset."""
        for part in (bytes(-self.size % records.ALIGN), content):
            _append(self.file, part)
            self.crc = zlib.crc32(part, self.crc)
            self.size += len(part)
        return self.size - len(content)


def _append(file: BinaryIO, content: bytes | memoryview) -> None:
    """Write in parts that end at block boundaries, so that the buffer of `file` is flushed in whole blocks."""
    rest = memoryview(content)
    while rest:
        room = BLOCK - file.tell() % BLOCK
        file.write(rest[:room])
        rest = rest[room:]


def _write_tensor(data: _Stream, spec: Spec, tensor: Encoded) -> Record:
    name = spec.key.name
    if (tensor.encoding, tensor.scope) not in spec.formats:
        raise ValueError(
            f"{name}: stored as {encodings.format_name(tensor.encoding, tensor.scope)}, which FORMAT.md does not allow "
            f"for {spec.rows} x {spec.cols}; expected {encodings.format_names(spec.formats)}"
        )
    content = _bytes(tensor.data)
    size = tensor.encoding.size(spec.rows, spec.cols)
    if len(content) != size:
        raise ValueError(f"{name}: {len(content)} bytes, expected {size} for {spec.rows} x {spec.cols}")
    if tensor.scope == encodings.SCALE_NONE and not np.isfinite(tensor.data).all():
        raise ValueError(f"{name}: a value is NaN, infinite, or beyond the range of {tensor.encoding.name}")
    scales = np.empty(0, "<f4") if tensor.scales is None else np.ascontiguousarray(tensor.scales, "<f4").reshape(-1)
    count = encodings.scale_count(tensor.scope, spec.rows, spec.cols)
    if scales.size != count:
        raise ValueError(f"{name}: {scales.size} scales, expected {count}")
    if not encodings.scales_are_valid(scales):
        raise ValueError(f"{name}: a scale is not a normal number above 0; did training diverge?")
    stored = _bytes(
        scales if tensor.scope != encodings.SCALE_GROUP else _group_scales(name, scales.reshape(spec.rows, -1))
    )
    offset = data.put(content)
    scale_offset = data.put(stored) if count else 0
    return Record(
        spec.key, tensor.encoding, tensor.scope, spec.rows, spec.cols, offset, size, scale_offset, len(stored)
    )


def _group_scales(name: str, scales: NDArray[np.float32]) -> NDArray[np.float16]:
    try:
        return layout.pack_group_scales(scales)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def _bytes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data
