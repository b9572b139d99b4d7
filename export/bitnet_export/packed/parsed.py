"""The description of a packed file, and the places of its tensors: read and checked in the order of FORMAT.md §6.

A file that passes is at worst a model that computes nonsense. Memory use does not grow with any number in the file.
"""

from __future__ import annotations

import struct
import zlib
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig

from . import encodings, records, strict_json
from .content import Content
from .recognise import PROBE, recognise
from .records import Base, Key, Record, Section
from .stacks import pack_stack, unpack_stack


class PackedFormatError(ValueError):
    """The bytes are not a packed file, or a damaged one."""


_PART = 1 << 22  # bytes of a section whose checksum is computed at a time


def _require(ok: bool | np.bool_, message: str) -> None:
    if not ok:
        raise PackedFormatError(message)


class Parsed:
    """A packed file whose every byte is accounted for. Attributes: see `PackedFile`."""

    def __init__(self, content: bytes | Content, adapter: bool | None = False) -> None:
        """adapter: whether a separate adapter is expected; None: either. Raises PackedFormatError, which says what was
        found and what was expected."""
        self._content = Content.of(content)
        self._front = self._read(0, min(self._content.size, records.HEADER.size + 64 * records.SECTION.size))
        self.version, self.header_crc, self.file_size, count, self.base = self._read_header()
        if adapter is not None and adapter != (self.base is not None):
            raise PackedFormatError(
                "is a model, expected an adapter" if adapter else "is an adapter, expected the model that it belongs to"
            )
        self.sections = self._read_sections(count)
        for section in self.sections:
            crc = self._checksum(section)
            _require(
                crc == section.crc,
                f"section {section.name} has checksum {crc:08x}, expected {section.crc:08x}: the file is damaged; "
                "copy or export it again",
            )
        self.metadata = self._read_metadata()
        self.configs = self._read_stacks()
        self.tensors = self._read_tensors()
        for record in self.tensors.values():
            self._check_values(record)

    # --- checks ---

    def _read_header(self) -> tuple[int, int, int, int, Base | None]:
        head = self._front[:PROBE]
        if head[:8] != records.MAGIC[: len(head)] or not head:
            found = recognise(head) or f"a file that begins with {head[:8].hex(' ')}"
            raise PackedFormatError(f"expected a packed bitnet file, as bitnet export writes it; found {found}")
        size = self._content.size
        _require(size >= records.HEADER.size, f"the file has {size} bytes, a header has {records.HEADER.size}")
        _, version, flags, file_size, count, base, header_crc = records.HEADER.unpack_from(self._front)
        remedy = "export or convert the model again" if version < records.VERSION else "use a newer bitnet-edge"
        _require(
            version == records.VERSION,
            f"format version is {version}, this program reads {records.VERSION}; {remedy}",
        )
        known = flags & ~records.ADAPTER_ALONE == 0
        _require(known, f"header flags are {flags:#x}, expected 0 or 1; the file needs a newer bitnet-edge")
        _require(file_size == size, f"the file has {size} bytes, its header says {file_size}; copy or export it again")
        _require(size % records.ALIGN == 0, f"the file has {size} bytes, expected a multiple of {records.ALIGN}")
        _require(3 <= count <= 64, f"section_count is {count}, expected 3 to 64")
        table_end = records.HEADER.size + records.SECTION.size * count
        _require(table_end <= size, f"{count} sections need {table_end} bytes of table, the file has {size}")
        crc = zlib.crc32(self._front[records.HEADER.size : table_end], zlib.crc32(self._front[:60]))
        _require(
            crc == header_crc,
            f"header and section table have checksum {crc:08x}, expected {header_crc:08x}: the file is damaged",
        )
        whose = Base(*records.BASE.unpack(base)) if flags else None
        _require(base == (records.BASE.pack(*whose) if whose else bytes(32)), "reserved bytes of the header are not 0")
        return version, header_crc, file_size, count, whose

    def _read_sections(self, count: int) -> tuple[Section, ...]:
        sections: list[Section] = []
        end = records.HEADER.size + records.SECTION.size * count
        for i in range(count):
            kind, crc, offset, size, flags, reserved = records.SECTION.unpack_from(
                self._front, records.HEADER.size + records.SECTION.size * i
            )
            section = Section(kind, crc, offset, size, bool(flags & records.OPTIONAL))
            _check_entry(section, flags, reserved, sections[-1].kind if sections else 0)
            _require(
                offset == records.align(end) and offset + size <= self.file_size,
                f"section {section.name} is {size} bytes at {offset}, expected at {records.align(end)} "
                f"within {self.file_size}",
            )
            self._check_padding(end, offset, f"before section {section.name}")
            sections.append(section)
            end = offset + size
        _require(records.align(end) == self.file_size, f"the last section ends at {end}, the file at {self.file_size}")
        self._check_padding(end, self.file_size, "at the end of the file")
        for kind in (records.STACKS, records.TENSORS, records.DATA):
            _require(any(s.kind == kind for s in sections), f"section {records.SECTION_NAMES[kind]} is missing")
        for kind in (records.TOKENIZER, records.TEMPLATE) if self.base else ():
            named = f"an adapter alone has a section {records.SECTION_NAMES[kind]}"
            _require(all(s.kind != kind for s in sections), named)
        return tuple(sections)

    def _read_metadata(self) -> dict[str, Any]:
        try:
            metadata = strict_json.parse(self.section(records.METADATA) or b"{}")
        except ValueError as error:
            raise PackedFormatError(f"METADATA is not good JSON: {error}") from None
        _require(isinstance(metadata, dict), f"METADATA is {metadata!r:.80}, expected a JSON object")
        return dict(metadata)

    def _read_stacks(self) -> tuple[ModelConfig, ...]:
        raw = self.section(records.STACKS) or b""
        count = len(raw) // records.STACK.size
        _require(count <= records.MAX_STACKS, f"the file has {count} stacks, expected 1 to {records.MAX_STACKS}")
        configs = []
        for i in range(count):
            record = raw[records.STACK.size * i :][: records.STACK.size]
            try:
                configs.append(unpack_stack(record))
            except ValueError as error:
                raise PackedFormatError(f"stack {i}: {error}") from None
        _require(
            self.base is None or any(config.adapters for config in configs),
            "an adapter alone has adapters in none of its stacks, expected some in one",
        )
        described = self.metadata.get("config")
        if described is None:
            return tuple(configs)
        _require(
            isinstance(described, list) and len(described) == count,
            f"METADATA config: expected a list of {count}, one for each stack",
        )
        try:
            known = ModelConfig.__dataclass_fields__
            full = tuple(ModelConfig.from_dict({k: v for k, v in each.items() if k in known}) for each in described)
            same = b"".join(map(pack_stack, full)) == raw
        except (ValueError, TypeError, AttributeError, OverflowError, struct.error) as error:
            raise PackedFormatError(f"METADATA config: {error}") from None
        _require(same, "METADATA config differs from the STACKS section")
        return full

    def _read_tensors(self) -> dict[Key, Record]:
        table = self.section(records.TENSORS) or b""
        found = (self._read_record(table, i) for i in range(0, len(table), records.TENSOR.size))
        tensors: dict[Key, Record] = {}
        end = 0
        for i, config in enumerate(self.configs):
            for spec in records.expected_tensors(config, i, self.base is not None):
                name = spec.key.name
                record = next(found, None)
                if record is None:
                    raise PackedFormatError(f"tensor {name} is missing; the table ends after {len(tensors)}")
                _require(record.key == spec.key, f"tensor {len(tensors)} is {_describe(record.key)}, expected {name}")
                _require(
                    (record.rows, record.cols) == (spec.rows, spec.cols),
                    f"{name} is {record.rows} x {record.cols}, expected {spec.rows} x {spec.cols}",
                )
                _require(
                    (record.encoding, record.scope) in spec.formats,
                    f"{name} is {encodings.format_name(record.encoding, record.scope)}, "
                    f"expected {encodings.format_names(spec.formats)}",
                )
                end = self._check_place(record, end)
                tensors[record.key] = record
        extra = next(found, None)
        _require(extra is None, f"tensor {extra and _describe(extra.key)} is not called for by the configuration")
        _require(end == self._data_section.size, f"the last tensor ends at {end}, DATA at {self._data_section.size}")
        return tensors

    def _read_record(self, table: bytes, offset: int) -> Record:
        words = records.TENSOR.unpack_from(table, offset)
        key = Key(*words[:5])
        number, scope, reserved8, reserved32, rows, cols, start, size, scale_start, scale_size, reserved64 = words[5:]
        _require(not (reserved8 or reserved32 or reserved64), f"{_describe(key)}: a reserved field is not 0")
        encoding = encodings.ENCODINGS.get(number)
        if encoding is None:
            known = ", ".join(f"{e.number} {e.name}" for e in encodings.ENCODINGS.values())
            raise PackedFormatError(f"{_describe(key)} has encoding {number}, expected one of {known}")
        return Record(key, encoding, scope, rows, cols, start, size, scale_start, scale_size)

    def _check_place(self, record: Record, end: int) -> int:
        """Check that data and scales directly follow the previous ones; returns their end."""
        name = record.key.name
        size = record.encoding.size(record.rows, record.cols)
        scale_size = encodings.scale_size(record.scope, record.rows, record.cols)
        spans = [("data", record.offset, record.size, size)]
        if scale_size:
            spans.append(("scales", record.scale_offset, record.scale_size, scale_size))
        else:
            _require(record.scale_offset == record.scale_size == 0, f"{name} has no scale, but a place for one")
        for what, offset, found, expected in spans:
            _require(found == expected, f"{name}: {what} has {found} bytes, expected {expected}")
            start = records.align(end)
            _require(offset == start, f"{name}: {what} is at {offset}, expected {start}")
            _require(
                start + found <= self._data_section.size,
                f"{name}: {what} ends at {start + found}, DATA at {self._data_section.size}",
            )
            base = self._data_section.offset
            self._check_padding(base + end, base + start, f"before {what} of {name}")
            end = start + found
        return end

    def _check_values(self, record: Record) -> None:
        name, data = record.key.name, self.stored(record)
        fault = record.encoding.fault(data, record.rows, record.cols)
        _require(fault is None, f"{name}: {fault}")
        if records.ROLES[record.key.role].startswith("rope_"):
            values = record.encoding.decode(data, record.rows, record.cols)
            config = self.configs[record.key.stack]
            last = config.max_context - 1 + config.first_position
            with np.errstate(over="ignore"):
                angles = np.abs(values.astype(np.float32) * np.float32(last))
            _require(
                bool((angles < records.MOST_ANGLE).all()),
                f"{name}: a frequency of {np.abs(values).max():g} makes an angle of {angles.max():g} at position "
                f"{last}, expected below {records.MOST_ANGLE:g}",
            )
        dtype = "<f2" if record.scope == encodings.SCALE_GROUP else "<f4"  # fp16 includes those of padding rows
        scales = np.frombuffer(self._data(record.scale_offset, record.scale_size), dtype).astype(np.float32)
        _require(encodings.scales_are_valid(scales), f"{name}: a scale is not a finite, normal number above 0")

    # --- bytes ---

    @cached_property
    def _data_section(self) -> Section:
        return next(s for s in self.sections if s.kind == records.DATA)

    def _data(self, offset: int, size: int) -> NDArray[np.uint8]:
        return self._content.read(self._data_section.offset + offset, size)

    def _read(self, start: int, size: int) -> bytes:
        return self._content.read(start, size).tobytes()

    def _checksum(self, section: Section) -> int:
        crc, end = 0, section.offset + section.size
        for start in range(section.offset, end, _PART):
            crc = zlib.crc32(self._content.read(start, min(_PART, end - start)).data, crc)
        return crc

    def _check_padding(self, start: int, end: int, where: str) -> None:
        _require(not any(self._read(start, end - start)), f"padding {where} is not 0")

    def section(self, kind: int) -> bytes | None:
        """Bytes of a section, None when absent."""
        return next((self._read(s.offset, s.size) for s in self.sections if s.kind == kind), None)

    def stored(self, record: Record, first: int = 0, size: int | None = None) -> NDArray[np.uint8]:
        """The bytes of a tensor as in the file, without its scales; or `size` of them, from `first` on."""
        return self._data(record.offset + first, record.size - first if size is None else size)


def _check_entry(section: Section, flags: int, reserved: int, previous: int) -> None:
    """Check an entry of the section table, except its place. previous: the kind of the one before it."""
    kind, size = section.kind, section.size
    _require(kind > previous, f"section kind {kind} follows kind {previous}, expected ascending kinds from 1")
    known = kind in records.SECTION_NAMES
    _require(known or section.optional, f"section kind {kind} is required but unknown to this version")
    _require(flags & ~(0 if known else records.OPTIONAL) == 0, f"flags of section {section.name} are {flags:#x}")
    _require(reserved == 0, f"reserved word of section {section.name} is {reserved}, expected 0")
    unit = {records.STACKS: records.STACK.size, records.TENSORS: records.TENSOR.size}.get(kind, 1)
    _require(
        size > 0 and size % unit == 0,
        f"section {section.name} has {size} bytes, expected a positive multiple of {unit}",
    )
    _require(
        kind != records.TEMPLATE or size <= records.MAX_TEMPLATE,
        f"section TEMPLATE has {size} bytes, expected at most {records.MAX_TEMPLATE}",
    )


def _describe(key: Key) -> str:
    if key.role in records.ROLES and key.part < 2:
        return key.name
    return "/".join(map(str, key))
