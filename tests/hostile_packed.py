"""Packed files that every reader of the format has to refuse, and some that it must not.

`hostile_files()` are files with correct checksums whose content breaks a rule of export/FORMAT.md in one
place, each with the status that the C parser returns.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from typing import NamedTuple

import hostile_variants as variants
from bitnet_export.packed import encodings, records
from hostile_variants import Cases
from packed_files import (
    SEEING,
    SMALL,
    STACK_WORDS,
    TOWERS,
    fix_checksums,
    packed_bytes,
    patch,
    section_entry,
    section_start,
    sketched_bytes,
    tensor_entry,
    with_section,
)  # fmt: skip


class Hostile(NamedTuple):
    name: str
    file: bytes
    status: str  # of bn_model_open_bytes; "BN_OK" for what must be accepted


def foreign_files() -> dict[str, bytes]:
    """The first bytes of files that people mistake for a model."""
    return {
        "gguf": b"GGUF\x03\0\0\0" + bytes(64),
        "gguf, other endian": b"GGUF\0\0\0\x03" + bytes(64),
        "safetensors": struct.pack("<Q", 80) + b'{"__metadata__":{}}' + bytes(64),
        "zip": b"PK\x03\x04" + bytes(64),
        "pickle": b"\x80\x02}q\0." + bytes(64),
        "gzip": b"\x1f\x8b\x08\0" + bytes(64),
        "lfs pointer": b"version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 1\n",
        "onnx": b"\x08\x08\x12\x07pytorch" + bytes(64),
        "html": b"<!DOCTYPE html><html><head></head></html>",
        "json": b'{"vocab_size": 1}',
        "zeros": bytes(256),
        "text": b"hello world, this is not a model",
    }


def hostile_files() -> list[Hostile]:
    """Files to refuse (and some to accept), built from the small model."""
    return list(_hostile(packed_bytes()))


def _hostile(good: bytes) -> Iterator[Hostile]:
    yield Hostile("empty", b"", "BN_ERR_TRUNCATED")
    for name, content in foreign_files().items():
        yield Hostile(f"foreign: {name}", content, "BN_ERR_MAGIC")
    for part in (_header, _sections, _stacks, _records, _values, _big_numbers, _accepted):
        for name, file, status in part(good):
            yield Hostile(name, file, status)
    for name, file, status in variants.trits(packed_bytes(encoding="1.6")):
        yield Hostile(f"1.6 bits: {name}", file, status)
    for name, file, status in variants.sketch(sketched_bytes()):
        yield Hostile(f"sketch: {name}", file, status)
    groups = SMALL.replace(dim=130, n_layers=1, weight_scale="group", head_format="ternary")
    for name, file, status in variants.groups(packed_bytes(groups)):
        yield Hostile(f"groups: {name}", file, status)
    for name, file, status in variants.images(with_section(packed_bytes(SEEING), records.METADATA, b"")):
        yield Hostile(f"images: {name}", file, status)
    for name, file, status in variants.pool(with_section(packed_bytes(TOWERS), records.METADATA, b"")):
        yield Hostile(f"towers: {name}", file, status)


def _header(good: bytes) -> Cases:
    yield "first byte", b"\x88" + good[1:], "BN_ERR_MAGIC"
    yield "newline became two", good[:7] + b"\r\n" + good[8:], "BN_ERR_MAGIC"
    for version in (0, 1, 2, 4, 1 << 24, 0xFFFFFFFF):
        yield f"version {version}", patch(good, 8, "I", version), "BN_ERR_VERSION"
    for flags in (2, 1 << 31):
        yield f"header flags {flags}", patch(good, 12, "I", flags), "BN_ERR_VERSION"
    yield "an adapter alone, and nothing of one", patch(good, 12, "I", 1), "BN_ERR_CONFIG"
    yield "reserved in header", patch(good, 28, "I", 1), "BN_ERR_VERSION"
    for size, status in ((0, "TRAILING"), (64, "TRAILING"), (len(good) + 64, "TRUNCATED"), (2**64 - 1, "TRUNCATED")):
        yield f"file_size {size}", patch(good, 16, "Q", size), f"BN_ERR_{status}"
    yield "64 bytes appended", good + bytes(64), "BN_ERR_TRAILING"
    yield "not a multiple of 64", patch(good + b"\0", 16, "Q", len(good) + 1), "BN_ERR_SECTION"
    for count in (0, 2, 65, 1 << 31, 0xFFFFFFFF):
        file = bytearray(good)
        struct.pack_into("<I", file, 24, count)
        yield f"section_count {count}", bytes(file), "BN_ERR_SECTION"
    yield "header checksum", good[:60] + b"\0\0\0\0" + good[64:], "BN_ERR_CHECKSUM"


def _sections(good: bytes) -> Cases:
    for kind, name in ((1, "STACKS"), (2, "TENSORS"), (3, "METADATA"), (6, "DATA")):
        entry, start = section_entry(good, kind), section_start(good, kind)
        size = struct.unpack_from("<Q", good, entry + 16)[0]
        damaged = bytearray(good)
        damaged[start + size // 2] ^= 0x10
        yield f"{name}: a bit", bytes(damaged), "BN_ERR_CHECKSUM"
        for offset in (0, start - 64, start + 1, start + 64, len(good), 2**63, 2**64 - 64):
            yield f"{name}: at {offset}", patch(good, entry + 8, "Q", offset), "BN_ERR_SECTION"
        for wrong in (0, size + len(good), 2**63, 2**64 - 1, 2**64 - start):
            yield f"{name}: {wrong} bytes", patch(good, entry + 16, "Q", wrong), "BN_ERR_SECTION"
        yield f"{name}: reserved", patch(good, entry + 28, "I", 1), "BN_ERR_SECTION"
        for flags in (1, 2, 1 << 31):
            yield f"{name}: flags {flags}", patch(good, entry + 24, "I", flags), "BN_ERR_VERSION"
    for kind, status in ((0, "SECTION"), (2, "SECTION"), (4, "SECTION"), (7, "VERSION"), (2**32 - 1, "VERSION")):
        yield f"DATA is of kind {kind}", patch(good, section_entry(good, 6), "I", kind), f"BN_ERR_{status}"
    yield "STACKS is of kind 0", patch(good, 64, "I", 0), "BN_ERR_SECTION"
    end = section_start(good, 3) + struct.unpack_from("<Q", good, section_entry(good, 3) + 16)[0]
    if end % 64:
        yield "padding between sections", fix_checksums(good[:end] + b"x" + good[end + 1 :]), "BN_ERR_SECTION"
    end = section_start(good, 6) + struct.unpack_from("<Q", good, section_entry(good, 6) + 16)[0]
    if end % 64:
        yield "padding at the end", fix_checksums(good[:-1] + b"x"), "BN_ERR_SECTION"


def _stacks(good: bytes) -> Cases:
    """Without METADATA, whose configuration would be another."""
    good = with_section(good, records.METADATA, b"")
    words = {name: i for i, name in enumerate(STACK_WORDS)}
    big = (1 << 31, 0xFFFFFFFF)
    nan, inf = float("nan"), float("inf")
    values: dict[str, tuple[float, ...]] = {
        "input": (1 << 2, *big), "mask": (3, *big), "vocab_size": (0, (1 << 21) + 1, *big), "dim": (0, 65_537, *big),
        "n_layers": (0, 1025, *big), "n_heads": (0, 1025, *big), "n_kv_heads": (0, 3, *big),
        "head_dim": (0, 1025, *big), "ffn_dim": (0, 262_145, *big), "max_context": (0, (1 << 24) + 1, *big),
        "sliding_window": ((1 << 24) + 1, *big), "norm": (2, *big), "norm_flags": (2 | 64 | 256, 512, *big),
        "ffn": (2, *big), "norm_eps": (0.0, -1e-5, nan, inf), "activation": (5, *big), "n_experts": (1, 65_535, *big),
        "experts_per_token": (1, *big), "position": (1, 4, *big), "rope_attention_factor": (0.0, -1.0, nan, inf),
        "bias_flags": (64, *big), "tie_embeddings": (2, *big), "embedding_scale": (0.0, -1.0, nan, inf),
        "residual_scale": (0.0, nan, -inf), "attention_scale": (0.0, nan, inf), "attention_softcap": (-1.0, nan, inf),
        "logit_softcap": (-1.0, nan, inf), "pooling": (4, 5, *big), "has_head": (2, *big), "rope_dim": (0, 7, 10, *big),
        "global_every": (1, 2, 1025, *big), "normalize_routing": (2, *big), "first_position": (2, *big),
        "image_size": (1, *big), "patch_size": (1, *big), "channels": (1, *big), "class_token": (1, *big),
        "out_dim": (65_537, *big), "image_token": (19, *big), "adapters": (1, 1 << 16, 1 << 23 | 1 << 16 | 1, *big),
        "similarity_scale": (-1.0, nan, inf), "similarity_bias": (nan, inf),
        **{f"pixel_{kind}.{i}": (1.0, -0.0, nan, inf) for kind in ("mean", "std") for i in range(3)},
    }  # fmt: skip
    start = section_start(good, records.STACKS)
    for name, wrong in values.items():
        fmt = "f" if isinstance(wrong[0], float) else "I"
        for value in wrong:
            yield f"{name} = {value}", patch(good, start + 4 * words[name], fmt, value), "BN_ERR_CONFIG"
    for size, status in ((512, "TENSOR"), (513, "CONFIG")):  # of the 512 heads, each of which may have 1024
        heads = patch(good, start + 4 * words["n_heads"], "III", 512, 1, size)
        yield f"heads of {512 * size} together, tensors as before", heads, f"BN_ERR_{status}"
    yield "name of 64 bytes", patch(good, start + 192, "64s", b"x" * 64), "BN_ERR_CONFIG"
    yield "name goes on", patch(good, start + 192, "64s", b"a\0b"), "BN_ERR_CONFIG"


def _records(good: bytes) -> Cases:
    q, k, norm = (tensor_entry(good, f"layers.0.{name}.weight") for name in ("q", "k", "attn_norm"))
    last = tensor_entry(good, "rope_frequencies")
    status = "BN_ERR_TENSOR"
    for field, offset, fmt, wrong in (
        ("stack", 0, "H", (1, 0xFFFF)), ("layer", 2, "H", (1, 2, 0xFFFF)), ("role", 4, "H", (0, 1, 3, 63, 68, 0xFFFF)),
        ("expert", 6, "H", (0, 1)), ("part", 8, "B", (1, 2, 255)), ("encoding", 9, "B", (0, 3, 6, 7, 9, 10, 255)),
        ("scale_scope", 10, "B", (0, 1, 4, 255)), ("reserved8", 11, "B", (1,)), ("reserved32", 12, "I", (1,)),
        ("rows", 16, "I", (0, 15, 17, 32, 1 << 31, 0xFFFFFFFF)), ("cols", 20, "I", (0, 23, 25, 1 << 31, 0xFFFFFFFF)),
        ("size", 32, "Q", (0, 64, 2**63, 2**64 - 64)), ("scale_size", 48, "Q", (0, 60, 68, 2**64 - 4)),
        ("reserved64", 56, "Q", (1,)),
    ):  # fmt: skip
        for value in wrong:
            yield f"q: {field} = {value}", patch(good, q + offset, fmt, value), status
    here, scales = struct.unpack_from("<Q", good, q + 24)[0], struct.unpack_from("<Q", good, q + 40)[0]
    for value in (0, here - 64, here + 1, here + 64, len(good), 2**63, 2**64 - 64):
        yield f"q: offset = {value}", patch(good, q + 24, "Q", value), status
    for value in (0, here, scales - 64, scales + 4, scales + 64, len(good), 2**64 - 64):
        yield f"q: scale_offset = {value}", patch(good, q + 40, "Q", value), status
    yield "norm: scale_offset without scale", patch(good, norm + 40, "Q", 64), status
    yield "norm: encoding F16", patch(good, norm + 9, "B", encodings.F16.number), status
    yield "the same tensor twice", fix_checksums(good[:k] + good[q : q + 64] + good[k + 64 :]), status
    yield "two tensors swapped", fix_checksums(good[:q] + good[k : k + 64] + good[q:k] + good[k + 64 :]), status
    yield "last tensor has other name", patch(good, last + 4, "H", 70), status
    padding = section_start(good, records.DATA) + scales + struct.unpack_from("<Q", good, q + 48)[0]
    if padding % 64:
        yield "padding in DATA", patch(good, padding, "B", 1), status


def _values(good: bytes) -> Cases:
    data, q = section_start(good, records.DATA), tensor_entry(good, "layers.1.q.weight")
    offset, scales = data + struct.unpack_from("<Q", good, q + 24)[0], data + struct.unpack_from("<Q", good, q + 40)[0]
    for name, bits in (
        ("nan", 0x7FC00000), ("signalling nan", 0x7F800001), ("inf", 0x7F800000), ("-inf", 0xFF800000), ("0", 0),
        ("-0", 0x80000000), ("-1", 0xBF800000), ("denormal", 1), ("largest denormal", 0x007FFFFF),
    ):  # fmt: skip
        for place in (0, 15):
            yield f"scale {place} is {name}", patch(good, scales + 4 * place, "I", bits), "BN_ERR_SCALE"
    gain = data + struct.unpack_from("<Q", good, tensor_entry(good, "final_norm.weight") + 24)[0]
    for name, bits in (("nan", 0x7FC00000), ("inf", 0x7F800000), ("-inf", 0xFF800000)):
        yield f"a gain is {name}", patch(good, gain + 4, "I", bits), "BN_ERR_SCALE"
    frequency = data + struct.unpack_from("<Q", good, tensor_entry(good, "rope_frequencies") + 24)[0]
    for most, status in ((1, "BN_OK"), (1.001, "BN_ERR_SCALE"), (-1.001, "BN_ERR_SCALE"), (2.0**100, "BN_ERR_SCALE")):
        value = most * 0.9999999 * records.MOST_ANGLE / (SMALL.max_context - 1)
        yield f"a frequency is {value}", patch(good, frequency, "f", value), status
    from_1 = patch(good, section_start(good, records.STACKS) + 4 * STACK_WORDS.index("first_position"), "I", 1)
    value = 0.9999999 * records.MOST_ANGLE / (SMALL.max_context - 1)  # of the positions from 0 on
    yield "an angle too large at the last position", patch(from_1, frequency, "f", value), "BN_ERR_SCALE"
    for field in range(4):
        byte = good[offset + 5] | 3 << 2 * field
        yield f"code 3 in field {field}", patch(good, offset + 5, "B", byte), "BN_ERR_CODE"
    size = struct.unpack_from("<Q", good, q + 32)[0]
    yield "code 3 in padding", patch(good, offset + size - 1, "B", good[offset + size - 1] | 0xC0), "BN_ERR_CODE"
    e = tensor_entry(good, "embedding.weight")
    start, size = data + struct.unpack_from("<Q", good, e + 24)[0], struct.unpack_from("<Q", good, e + 32)[0]
    for at in (0, 23, size - 64, size - 1):  # the last is padding
        yield f"int8 code -128 at {at}", patch(good, start + at, "b", -128), "BN_ERR_CODE"
    yield "int8 code 0 in place of another", patch(good, start + 7, "b", 0), "BN_OK"
    yield "int8 rows without their sketch", patch(good, e + 9, "B", encodings.INT8_SKETCH.number), "BN_ERR_TENSOR"


def _big_numbers(good: bytes) -> Cases:
    """Numbers that are each allowed, in a file without the corresponding tensors: refused immediately."""
    good = with_section(good, records.METADATA, b"")
    start = section_start(good, records.STACKS)
    for field, value in (("dim", 65_536), ("ffn_dim", 262_144), ("vocab_size", 1 << 21), ("n_layers", 1024)):
        word = STACK_WORDS.index(field)
        yield f"{field} = {value}, tensors as before", patch(good, start + 4 * word, "I", value), "BN_ERR_TENSOR"
    experts = patch(good, start + 4 * STACK_WORDS.index("n_experts"), "II", 65_534, 65_534)
    yield "65,534 experts, tensors as before", experts, "BN_ERR_TENSOR"
    layers = patch(good, start + 4 * STACK_WORDS.index("n_layers"), "I", 1)
    yield "one layer less, tensors as before", layers, "BN_ERR_TENSOR"
    window = patch(good, start + 4 * STACK_WORDS.index("sliding_window"), "I", 4)
    for every in (2, 1024):
        local = patch(window, start + 4 * STACK_WORDS.index("global_every"), "I", every)
        yield f"global_every = {every}, tensors as before", local, "BN_ERR_TENSOR"


def _accepted(good: bytes) -> Cases:
    yield "the file itself", good, "BN_OK"
    yield "unknown optional section", with_section(good, 99, b"new\n", flags=1), "BN_OK"
    yield "unknown required section", with_section(good, 99, b"new\n"), "BN_ERR_VERSION"
    last = with_section(good, 99, b"new\n", flags=1)
    last = patch(last[:-64], 16, "Q", len(last) - 64)
    yield "unknown optional section, empty", patch(last, section_entry(last, 99) + 16, "Q", 0), "BN_ERR_SECTION"
    yield "template too long", with_section(good, records.TEMPLATE, bytes(256 * 1024 + 1)), "BN_ERR_SECTION"
    yield "template just fits", with_section(good, records.TEMPLATE, b" " * 256 * 1024), "BN_OK"
