"""Tensor types of GGUF: their sizes in bytes, and their weights as codes and scales or as floats.

Ids and layouts are those of llama.cpp (ggml-common.h, ggml-quants.c), of microsoft/BitNet (I2_S:
ggml-bitnet-mad.cpp), of ik_llama.cpp (IQ*_BN: iqk_quantize.cpp) and of the PrismML fork (PQ2_0).
A row is always contiguous, except in IQ2_BN_R4, where four are interleaved.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet_export.foreign.source import Floats, SourceError, Tensor
from bitnet_export.foreign.ternary_values import with_widest_scope

from . import blocks

Bytes = NDArray[np.uint8]
Values = NDArray[np.float32]
Read = Callable[[int, int], Bytes]  # (start, size) of the bytes of a tensor
Codes = tuple[Bytes, Values]  # T + 1 in (R, K), and scales in (R, groups of a row)

_CHUNK = 1 << 22  # weights decoded at a time


class TensorType(NamedTuple):
    """A way to store rows of K weights. Exactly one of `codes` and `floats` is set."""

    number: int  # in files
    name: str
    block: int  # weights; divides K
    size: int  # bytes of a block
    codes: Callable[[Bytes], Codes] | None = None  # (R / interleaved, bytes of such rows) -> ternary
    floats: Callable[[Bytes], Values] | None = None  # (R, bytes of a row) -> (R, K)
    header: int = 0  # bytes before the blocks of a row
    tail: int = 0  # bytes after the last row, the first four of them an fp32 scale
    interleaved: int = 1  # rows
    write: Callable[..., NDArray[Any]] | None = None  # from fp32 (N, K), or T and fp16 (N, K / block), its bytes
    file_type: int = -1  # general.file_type where most weights have this type, of those that are written

    def row_size(self, cols: int) -> int:
        return self.header + cols // self.block * self.size

    def tensor_size(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor (N, K) or (K,). Raises SourceError for a shape that the type cannot have."""
        rows, cols = math.prod(shape[:-1]), shape[-1]
        if cols % self.block:
            raise SourceError(f"rows of {self.name} have {cols} weights, expected a multiple of {self.block}")
        if rows % self.interleaved:
            raise SourceError(f"{self.name} has {rows} rows, expected a multiple of {self.interleaved}")
        return rows * self.row_size(cols) + self.tail

    def tensor(self, read: Read, shape: tuple[int, ...]) -> Tensor:
        """The values of a tensor, decoded. Raises SourceError if a code or scale is not ternary."""
        cols, size = shape[-1], self.row_size(shape[-1]) * self.interleaved

        def table(first: int, last: int) -> Bytes:
            return read(first * size, (last - first) * size).reshape(last - first, size)

        decode = self.floats
        if decode:
            return Floats(shape, self.name.lower(), lambda first, last: decode(table(first, last)))
        rows = math.prod(shape[:-1])
        return self._ternary(table, read(rows // self.interleaved * size, self.tail), rows, cols)

    def _ternary(self, table: Callable[[int, int], Bytes], tail: Bytes, rows: int, cols: int) -> Tensor:
        assert self.codes
        codes, scales = np.empty((rows, cols), np.int8), []
        step, lines = max(1, _CHUNK // (cols * self.interleaved)), rows // self.interleaved
        for first in range(0, lines, step):
            found, scale = self.codes(table(first, min(first + step, lines)))
            if (found == 3).any():
                raise SourceError(f"{self.name} has code 3 in it, which means +2: the tensor is not ternary")
            start = first * self.interleaved
            np.subtract(found.view(np.int8), 1, out=codes[start : start + len(found)])
            scales.append(scale)
        every = np.concatenate(scales)
        if self.tail:
            every = np.broadcast_to(tail[:4].view("<f4").astype(np.float32), (rows, 1))
        return with_widest_scope(codes, every, cols // every.shape[1])


def _fields(data: Bytes, lanes: int, shifts: tuple[int, ...] = (0, 2, 4, 6)) -> Bytes:
    """2-bit fields: of each `lanes` bytes first the fields at shifts[0], then those at shifts[1], …

    (..., n) -> (..., 4·n)
    """
    parts = (data.reshape(*data.shape[:-1], -1, 1, lanes) >> np.array(shifts, np.uint8)[:, None]) & np.uint8(3)
    return parts.reshape(*data.shape[:-1], -1)


def _trits(data: Bytes, lanes: int, powers: tuple[int, ...]) -> Bytes:
    """Base-3 digits, the most significant of byte·power (modulo 256), ordered as in `_fields`.

    (..., n) -> (..., len(powers)·n)
    """
    turned = data.reshape(*data.shape[:-1], -1, 1, lanes) * np.array(powers, np.uint8)[:, None]
    return (turned.astype(np.uint16) * 3 >> 8).astype(np.uint8).reshape(*data.shape[:-1], -1)


def _halves(data: Bytes) -> Values:
    """fp16 in the last axis, (..., 2·n) -> (..., n)."""
    return np.ascontiguousarray(data).view("<f2").astype(np.float32)


def _blocks(rows: Bytes, size: int) -> Bytes:
    return rows.reshape(len(rows), -1, size)


def _i2_s(rows: Bytes) -> Codes:
    """128 weights in 32 bytes, the first of four in the highest bits; the scale is in the tail."""
    return _fields(rows, 32, (6, 4, 2, 0)), np.empty((len(rows), 0), np.float32)


def _tq2_0(rows: Bytes) -> Codes:
    """256 weights: 64 bytes, then an fp16 scale."""
    blocks = _blocks(rows, 66)
    return _fields(blocks[..., :64], 32).reshape(len(rows), -1), _halves(blocks[..., 64:])[..., 0]


def _tq1_0(rows: Bytes) -> Codes:
    """256 weights: 48 bytes of five trits, 4 of four, then an fp16 scale."""
    blocks, powers = _blocks(rows, 54), (1, 3, 9, 27, 81)
    parts = [
        _trits(blocks[..., :32], 32, powers),
        _trits(blocks[..., 32:48], 16, powers),
        _trits(blocks[..., 48:52], 4, powers[:4]),
    ]
    return np.concatenate(parts, axis=-1).reshape(len(rows), -1), _halves(blocks[..., 52:])[..., 0]


def _q2_0(rows: Bytes, size: int) -> Codes:
    """An fp16 scale, then the weights, four per byte."""
    blocks = _blocks(rows, size)
    return _fields(blocks[..., 2:], 1).reshape(len(rows), -1), _halves(blocks[..., :2])[..., 0]


def _iq1_bn(rows: Bytes) -> Codes:
    """An fp16 scale; then 64 weights in 13 bytes: of each 16 weights 15 in three bytes, the last in the 13th."""
    blocks, powers = _blocks(rows[:, 2:], 13), (81, 27, 9, 3, 1)
    fifteen = _trits(blocks[..., :12], 1, powers).reshape(*blocks.shape[:2], 4, 15)
    sixteenth = _trits(blocks[..., 12:], 1, powers[:4])[..., None]
    return np.concatenate([fifteen, sixteenth], axis=-1).reshape(len(rows), -1), _halves(rows[:, :2])


def _iq2_bn(rows: Bytes) -> Codes:
    """An fp32 scale; then 64 weights in 16 bytes."""
    return _fields(rows[:, 4:], 16), _f32(rows[:, :4])


def _iq2_bn_r4(fours: Bytes) -> Codes:
    """Four rows: four fp32 scales; then 64 weights of each in 64 bytes, 4 by 4 weights at a time."""
    bytes_ = fours[:, 16:].reshape(len(fours), -1, 4, 4, 4)  # 64 weights, 16 of them, row, 4 of a field
    fields = bytes_[..., None, :] >> np.array([0, 2, 4, 6], np.uint8)[:, None] & np.uint8(3)
    codes = fields.transpose(0, 3, 1, 2, 4, 5).reshape(4 * len(fours), -1)
    return codes, _f32(fours[:, :16]).reshape(-1, 1)


def _f32(rows: Bytes) -> Values:
    return np.ascontiguousarray(rows).view("<f4").astype(np.float32)


def _bf16(rows: Bytes) -> Values:
    return (np.ascontiguousarray(rows).view("<u2").astype(np.uint32) << 16).view(np.float32)


def _q8_0(rows: Bytes) -> Values:
    blocks = _blocks(rows, 34)
    return (_halves(blocks[..., :2]) * blocks[..., 2:].view(np.int8)).reshape(len(rows), -1)


def _q4_0(rows: Bytes) -> Values:
    blocks = _blocks(rows, 18)
    nibbles = np.concatenate([blocks[..., 2:] & 15, blocks[..., 2:] >> 4], axis=-1)
    return (_halves(blocks[..., :2]) * (nibbles.view(np.int8) - np.int8(8))).reshape(len(rows), -1)


def _q4_k(rows: Bytes) -> Values:
    """256 weights scale·q − minimum in eight groups of 32, each with its own 6-bit scale and minimum."""
    blocks = _blocks(rows, 144)
    d, packed = _halves(blocks[..., :4]), blocks[..., 4:16]
    low, high, rest = packed[..., :4], packed[..., 4:8], packed[..., 8:]
    scale = np.concatenate([low & 63, (rest & 15) | (low >> 6 << 4)], axis=-1)
    minimum = np.concatenate([high & 63, (rest >> 4) | (high >> 6 << 4)], axis=-1)
    q = blocks[..., 16:].reshape(*blocks.shape[:2], 4, 1, 32) >> np.array([[0], [4]], np.uint8) & np.uint8(15)
    q = q.reshape(*blocks.shape[:2], 8, 32)
    values: Values = (d[..., :1] * scale)[..., None] * q - (d[..., 1:] * minimum)[..., None]
    return values.reshape(len(rows), -1)


def _q6_k(rows: Bytes) -> Values:
    """256 weights scale·(q − 32): 4 low bits, 2 high ones, and an int8 scale for each 16."""
    blocks = _blocks(rows, 210)
    half = blocks[..., :128].reshape(*blocks.shape[:2], 2, 1, 64)
    low = (half >> np.array([[0], [4]], np.uint8) & np.uint8(15)).reshape(*blocks.shape[:2], 256)
    q = low | _fields(blocks[..., 128:192], 32) << 4
    scale = _halves(blocks[..., 208:]) * blocks[..., 192:208].view(np.int8)
    q16 = (q.view(np.int8) - np.int8(32)).reshape(*blocks.shape[:2], 16, 16)
    return (scale[..., None] * q16).reshape(len(rows), -1)


TYPES: dict[int, TensorType] = {
    kind.number: kind
    for kind in (
        TensorType(0, "F32", 1, 4, floats=_f32, write=blocks.f32, file_type=0),
        TensorType(1, "F16", 1, 2, floats=_halves, write=blocks.f16, file_type=1),
        TensorType(2, "Q4_0", 32, 18, floats=_q4_0),
        TensorType(8, "Q8_0", 32, 34, floats=_q8_0, write=blocks.q8_0, file_type=7),
        TensorType(12, "Q4_K", 256, 144, floats=_q4_k),
        TensorType(14, "Q6_K", 256, 210, floats=_q6_k, write=blocks.q6_k, file_type=18),
        TensorType(30, "BF16", 1, 2, floats=_bf16),
        TensorType(34, "TQ1_0", 256, 54, codes=_tq1_0, write=blocks.tq1_0, file_type=36),
        TensorType(35, "TQ2_0", 256, 66, codes=_tq2_0, write=blocks.tq2_0, file_type=37),
        TensorType(36, "I2_S", 128, 32, codes=_i2_s, tail=32),
        TensorType(42, "Q2_0", 64, 18, codes=lambda rows: _q2_0(rows, 18), write=blocks.q2_0, file_type=41),
        TensorType(134, "IQ1_BN", 64, 13, codes=_iq1_bn, header=2),
        TensorType(135, "IQ2_BN", 64, 16, codes=_iq2_bn, header=4),
        TensorType(142, "PQ2_0", 128, 34, codes=lambda rows: _q2_0(rows, 34)),
        TensorType(335, "IQ2_BN_R4", 64, 16, codes=_iq2_bn_r4, header=4, interleaved=4),
    )
}
WRITTEN = {kind.name: kind for kind in TYPES.values() if kind.write}

Q2_0 = 42
Q2_0_OF_FORKS = TYPES[142]._replace(name="Q2_0")
"""PrismML wrote groups of 128 with llama.cpp's id for groups of 64, before PQ2_0 had its own id."""

_OTHERS = {
    3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 10: "Q2_K", 11: "Q3_K", 13: "Q5_K", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32",
    27: "I64", 28: "F64", 38: "TL1", 39: "MXFP4 or TL2", 41: "Q1_0",
}  # fmt: skip


def type_of(number: int) -> TensorType:
    """The type with an id. Raises SourceError naming a type that is not supported."""
    if number not in TYPES:
        known = ", ".join(kind.name for kind in TYPES.values())
        raise SourceError(f"type {number} ({_OTHERS.get(number, 'unknown')}) is not read, expected one of {known}")
    return TYPES[number]
