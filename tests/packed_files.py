"""Small packed files, and functions that change their bytes."""

from __future__ import annotations

import functools
import json
import struct
import tempfile
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from bitnet_export.packed import encodings, int8_rows, records
from bitnet_export.packed.records import Spec
from bitnet_export.packed.writer import Encoded, write_packed

SMALL = ModelConfig(
    vocab_size=19, dim=24, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=20, max_context=32,
    weight_scale="row",
)  # fmt: skip
"""Runs in the engine; every matrix has padding rows or columns."""

_SEES = ModelConfig(
    name="vision", input="images", vocab_size=0, dim=20, n_layers=1, n_heads=2, n_kv_heads=2, head_dim=10, ffn_dim=17,
    max_context=-1, image_size=7, patch_size=3, channels=2, pixel_mean=(0.5, 0.4), pixel_std=(0.5, 0.25),
    class_token=True, patch_bias=True, position="learned", mask="bidirectional", has_head=False, tie_embeddings=False,
    ffn="plain", norm="layer", out_dim=24, projector_bias=True,
)  # fmt: skip
SEEING = SMALL.replace(n_layers=1, mask="prefix", image_token=5, vision=_SEES)
"""A decoder with vision: 5 vectors per image."""

TOWERS = SMALL.replace(
    name="text", n_layers=1, has_head=False, tie_embeddings=False, pooling="mean",
    vision=_SEES.replace(pooling="attention"),
)  # fmt: skip
"""Two towers; that of images has attention pooling."""


STACK_WORDS = (
    "input", "mask", "vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_context",
    "sliding_window", "norm", "norm_flags", "norm_eps", "ffn", "activation", "n_experts", "experts_per_token",
    "position", "rope_attention_factor", "bias_flags", "tie_embeddings", "embedding_scale", "residual_scale",
    "attention_scale", "attention_softcap", "logit_softcap", "pooling", "has_head", "rope_dim", "global_every",
    "normalize_routing", "first_position", "image_size", "patch_size", "channels",
    "pixel_mean.0", "pixel_mean.1", "pixel_mean.2", "pixel_std.0", "pixel_std.1", "pixel_std.2",
    "class_token", "out_dim", "similarity_scale", "similarity_bias", "image_token", "adapters",
)  # fmt: skip
"""The 4-byte words of the record of a stack, in their order (export/FORMAT.md)."""


@functools.cache
def packed_bytes(config: ModelConfig = SMALL, seed: int = 0, encoding: str = "2.0") -> bytes:
    """A random model of this shape, as bytes."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bitnet"
        random_model(config, path, seed, encoding=encoding)
        return path.read_bytes()


def as_stored(file: PackedFile, record: records.Record) -> Encoded:
    """A tensor for `write_packed`, as stored in another file."""
    scales = file.scales(record) if record.scale_size else None
    return Encoded(record.encoding, record.scope, file.stored(record), scales)


@functools.cache
def sketched_bytes() -> bytes:
    """The small model with a sketch, which writers add only to larger tables."""
    file = PackedFile(packed_bytes())

    def source(spec: Spec) -> Encoded:
        record = file.tensors[spec.key]
        tensor = as_stored(file, record)
        if record.encoding != encodings.INT8_ROWS:
            return tensor
        return tensor._replace(encoding=encodings.INT8_SKETCH, data=int8_rows.pack_sketched(file.codes(record)))

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bitnet"
        write_packed(path, file.configs, source)
        return path.read_bytes()


def fix_checksums(file: bytes) -> bytes:
    """Recompute every checksum, as someone who forges a file would."""
    out = bytearray(file)
    count = struct.unpack_from("<I", out, 24)[0]
    table = range(64, min(64 + 32 * count, len(out) - 31), 32)
    for entry in table:
        offset, size = struct.unpack_from("<QQ", out, entry + 8)
        struct.pack_into("<I", out, entry + 4, zlib.crc32(out[offset : offset + size]))
    struct.pack_into("<I", out, 60, zlib.crc32(out[:60] + out[64 : 64 + 32 * count]))
    return bytes(out)


def patch(file: bytes, offset: int, fmt: str, *values: float | bytes) -> bytes:
    """Overwrite fields at an offset and recompute the checksums."""
    out = bytearray(file)
    struct.pack_into("<" + fmt, out, offset, *values)
    return fix_checksums(bytes(out))


def section_entry(file: bytes, kind: int) -> int:
    """Offset of a section's entry in the table."""
    count = struct.unpack_from("<I", file, 24)[0]
    return next(e for e in range(64, 64 + 32 * count, 32) if struct.unpack_from("<I", file, e)[0] == kind)


def section_start(file: bytes, kind: int) -> int:
    return int(struct.unpack_from("<Q", file, section_entry(file, kind) + 8)[0])


def tensor_entry(file: bytes, name: str) -> int:
    """Offset of a tensor's record in the file."""
    names = [key.name for key in PackedFile(file).tensors]
    return section_start(file, records.TENSORS) + 64 * names.index(name)


def with_section(file: bytes, kind: int, content: bytes, flags: int = 0) -> bytes:
    """The file with one section added, replaced, or removed (no content), and a new layout."""
    sections = [(s.kind, 0, file[s.offset : s.offset + s.size]) for s in PackedFile(file).sections if s.kind != kind]
    if content:
        sections = sorted([*sections, (kind, flags, content)])
    end = 64 + 32 * len(sections)
    table, body = b"", b""
    for number, bits, part in sections:
        pad = -end % 64
        table += struct.pack("<IIQQII", number, 0, end + pad, len(part), bits, 0)
        body += bytes(pad) + part
        end += pad + len(part)
    header = bytearray(file[:64])
    struct.pack_into("<QI", header, 16, end + -end % 64, len(sections))
    return fix_checksums(bytes(header) + table + body + bytes(-end % 64))


def with_generation(path: Path, out: Path, **changes: Any) -> Path:
    """Write a packed file again with other generation defaults."""
    file = PackedFile.open(path)
    said = {**file.metadata, "generation": {**file.metadata.get("generation", {}), **changes}}
    out.write_bytes(with_section(path.read_bytes(), records.METADATA, json.dumps(said).encode()))
    return out


LOW_RANK_SCALE = 2**-6  # scale of both parts of an adapter, so that its numbers are exact


def values_of(spec: Spec) -> np.ndarray[Any, np.dtype[np.float32]]:
    random = np.random.default_rng(list(spec.key))
    if spec.form == "low_rank":  # integers times one scale
        return (random.integers(-127, 128, (spec.rows, spec.cols)) * LOW_RANK_SCALE).astype(np.float32)
    return random.normal(size=(spec.rows, spec.cols)).astype(np.float32)


def encoded(spec: Spec) -> Encoded:
    if spec.form != "low_rank":
        return Encoded.f32(values_of(spec))
    codes, scales = values_of(spec) / LOW_RANK_SCALE, np.full(spec.rows, LOW_RANK_SCALE, np.float32)
    return Encoded(encodings.INT8_ROWS, encodings.SCALE_ROW, encodings.INT8_ROWS.encode(codes.astype(np.int8)), scales)


def write_values(path: Path, config: ModelConfig, **options: Any) -> None:
    write_packed(path, [config], encoded, **options)


def swap(name: str, tensor: Callable[[Spec], Encoded]) -> Callable[[Spec], Encoded]:
    return lambda spec: tensor(spec) if spec.key.name == name else Encoded.f32(values_of(spec))
