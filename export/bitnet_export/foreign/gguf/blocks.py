"""Writes weights as GGUF blocks; the inverse of what reads them in `types`.

Layouts: ggml-common.h and ggml-quants.c of llama.cpp. A ternary block holds T + 1 and its own fp16 scale d,
so that scales may differ between rows or groups.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Bytes = NDArray[np.uint8]
Codes = NDArray[np.int8]
Halves = NDArray[np.float16]
Values = NDArray[np.float32]

_TINY = np.finfo(np.float32).tiny
_FIELDS = np.array([0, 2, 4, 6], np.uint8)


def tq2_0(codes: Codes, scales: Halves) -> Bytes:
    """(N, K) codes in {-1, 0, 1} and (N, K/256) scales to (N·K/256, 66) bytes: two groups of 32 bytes.

    Bits 2n, 2n + 1 of byte m of a group hold weight 32·n + m of its 128. The scale comes last.
    """
    fields = (codes + 1).view(np.uint8).reshape(-1, 2, 4, 32)
    packed = (fields << _FIELDS[:, None]).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    return np.concatenate([packed, _bytes(scales)], axis=1)


def tq1_0(codes: Codes, scales: Halves) -> Bytes:
    """The same to (N·K/256, 54) bytes: five trits per byte, but four in the last four bytes.

    A byte is ⌈256·n / 243⌉, where n is the number whose base-3 digits are the trits, the first the most
    significant. Byte m of 32 holds weights 32·n + m of the first 160, byte m of 16 weights 160 + 16·n + m
    of the next 80, byte m of 4 weights 240 + 4·n + m with a fifth digit 0.
    """
    digits = (codes + 1).view(np.uint8).reshape(-1, 256)
    parts = []
    for first, lanes, count in ((0, 32, 5), (160, 16, 5), (240, 4, 4)):
        each = digits[:, first : first + lanes * count].reshape(-1, count, lanes)
        powers = np.array([81, 27, 9, 3, 1][:count], np.uint16)
        number = (each * powers[:, None]).sum(axis=1, dtype=np.uint16)
        parts.append(((number * 256 + 242) // 243).astype(np.uint8))
    return np.concatenate([*parts, _bytes(scales)], axis=1)


def q2_0(codes: Codes, scales: Halves) -> Bytes:
    """(N, K) codes and (N, K/64) scales to (N·K/64, 18) bytes: the scale, then the weights, four per byte."""
    fields = (codes + 1).view(np.uint8).reshape(-1, 16, 4)
    return np.concatenate([_bytes(scales), (fields << _FIELDS).sum(axis=2, dtype=np.uint8)], axis=1)


def q6_k(values: Values) -> Bytes:
    """fp32 (N, K), K a multiple of 256, to (N·K/256, 210) bytes: 6-bit weights, a scale for each 16."""
    x = values.reshape(-1, 16, 16)
    steps = np.abs(x).max(axis=2) / 31
    unit = f16(steps.max(axis=1, keepdims=True) / 127)  # so that a scale fits 8 bits
    unit32 = np.maximum(unit.astype(np.float32), _TINY)
    scales = np.rint(steps / unit32).clip(1, 127)
    codes = np.rint(x / (unit32 * scales)[:, :, None]).clip(-32, 31) + 32
    q = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    blocks = np.empty((len(q), 210), np.uint8)
    blocks[:, :128] = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(-1, 128)
    blocks[:, 128:192] = ((q >> 4) << _FIELDS[:, None]).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    blocks[:, 192:208] = scales
    blocks[:, 208:] = unit.view(np.uint8)
    return blocks


def q8_0(values: Values) -> Bytes:
    """fp32 (N, K), K a multiple of 32, to (N·K/32, 34) bytes: 8-bit weights, a scale for each 32."""
    x = values.reshape(-1, 32)
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    codes = np.rint(x / np.maximum(scale, _TINY)).astype(np.int8)
    return np.concatenate([f16(scale).view(np.uint8), codes.view(np.uint8)], axis=1)


def f32(values: Values) -> Values:
    return values.astype("<f4", copy=False)


def f16(values: Values) -> Halves:
    """Values as fp16. Raises ValueError on overflow."""
    with np.errstate(over="ignore"):
        halves = values.astype("<f2")
    if not np.isfinite(halves).all():
        raise ValueError(f"a weight or scale of {np.abs(values).max():.3g} does not fit fp16; write it as F32")
    return halves


def _bytes(scales: Halves) -> Bytes:
    return np.ascontiguousarray(scales, "<f2").reshape(-1, 1).view(np.uint8)
