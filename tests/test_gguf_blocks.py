"""Blocks of GGUF that are written: read by hand, and by the `gguf` package."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet_export.foreign.gguf import blocks
from bitnet_export.foreign.gguf.types import WRITTEN

gguf = pytest.importorskip("gguf")


def f16(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def decode_tq2_0(raw: bytes) -> list[float]:
    """Weight by weight, as the blocks are described."""
    out = []
    for at in range(0, len(raw), 66):
        block, scale = raw[at : at + 64], f16(raw[at + 64 : at + 66])
        for i in range(256):
            byte = block[i // 128 * 32 + i % 32]
            out.append(((byte >> 2 * (i % 128 // 32) & 3) - 1) * scale)
    return out


def decode_q2_0(raw: bytes) -> list[float]:
    out = []
    for at in range(0, len(raw), 18):
        scale = f16(raw[at : at + 2])
        out += [((raw[at + 2 + i // 4] >> 2 * (i % 4) & 3) - 1) * scale for i in range(64)]
    return out


def decode_q6_k(raw: bytes) -> list[float]:
    """Of the 6 bits of a weight, 4 are in the first 128 bytes and 2 in the next 64."""
    out = []
    for at in range(0, len(raw), 210):
        block, unit = raw[at : at + 210], f16(raw[at + 208 : at + 210])
        scales = struct.unpack("16b", block[192:208])
        for i in range(256):
            half, part, l = i // 128, i % 128 // 32, i % 32
            low = block[64 * half + 32 * (part % 2) + l] >> 4 * (part // 2) & 15
            high = block[128 + 32 * half + l] >> 2 * part & 3
            out.append(unit * scales[i // 16] * ((high << 4 | low) - 32))
    return out


def some_codes(width: int) -> tuple[NDArray[np.int8], NDArray[np.float16], NDArray[np.float64]]:
    """Codes (3, 512), scales of powers of two for each `width`, and their products."""
    rng = np.random.default_rng(0)
    codes, scales = rng.integers(-1, 2, (3, 512), np.int8), np.exp2(rng.integers(-6, 1, (3, 512 // width)))
    return codes, scales.astype(np.float16), codes * np.repeat(scales, width, axis=1)


def test_ternary_blocks_read_by_hand() -> None:
    codes, scales, values = some_codes(256)
    assert np.array_equal(np.reshape(decode_tq2_0(blocks.tq2_0(codes, scales).tobytes()), (3, 512)), values)
    codes, scales, values = some_codes(64)
    assert np.array_equal(np.reshape(decode_q2_0(blocks.q2_0(codes, scales).tobytes()), (3, 512)), values)


@pytest.mark.parametrize("kind", ["TQ1_0", "TQ2_0"])
def test_ternary_blocks_as_the_gguf_package_reads_and_writes_them(kind: str) -> None:
    codes, scales, values = some_codes(256)
    encode = WRITTEN[kind].write
    assert encode
    data = encode(codes, scales).reshape(3, -1)
    quantization = gguf.GGMLQuantizationType[kind]
    assert np.array_equal(gguf.dequantize(data, quantization), values)
    assert np.array_equal(gguf.quantize(values.astype(np.float32), quantization), data)


def test_q6_k_is_within_a_step() -> None:
    values = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
    values[1, 256:] = 0
    decoded = np.array(decode_q6_k(blocks.q6_k(values).tobytes())).reshape(-1, 256)
    # Half a step by rounding, an eighth because scales are in steps of 1/127 of the largest.
    step = np.abs(values.reshape(-1, 256)).max(axis=1) / 31
    assert (np.abs(decoded - values.reshape(-1, 256)).max(axis=1) <= 0.65 * step).all()


def test_q8_0_is_within_half_a_step() -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    data = blocks.q8_0(values)
    decoded = [[f16(bytes(block[:2])) * code for code in block[2:].view(np.int8)] for block in data]
    step = np.abs(values.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    assert (np.abs(decoded - values.reshape(-1, 32)) <= 0.57 * step).all()  # 127 codes of a scale rounded by 2^-11
    with pytest.raises(ValueError, match="does not fit fp16"):
        blocks.q8_0(np.full((1, 32), 1e9, np.float32))
