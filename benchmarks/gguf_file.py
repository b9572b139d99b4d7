"""The weights of a packed file as a GGUF file that llama.cpp runs as its architecture `bitnet`.

Body: TQ2_0, 2.0625 bits a weight. A block is 256 weights of one row: two groups of 32 bytes, where
bits 2n, 2n+1 of byte m hold code + 1 of weight 32·n + m of the group's 128; then the scale, f16.
Embedding and head are one tensor: q6_K, q8_0 or f16.
Formats: the `gguf` documentation of ggml, and `ggml-common.h` for the blocks.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, Record, packed

ALIGN = 32
ROWS = 4096  # of the embedding, converted at a time

Bytes = NDArray[np.uint8]

NAMES = {
    "attn_norm": "attn_norm", "q": "attn_q", "k": "attn_k", "v": "attn_v", "attn_sub_norm": "attn_sub_norm",
    "o": "attn_output", "ffn_norm": "ffn_norm", "gate": "ffn_gate", "up": "ffn_up",
    "ffn_sub_norm": "ffn_sub_norm", "down": "ffn_down", "embedding": "token_embd", "final_norm": "output_norm",
}  # fmt: skip


def tq2_0(codes: NDArray[np.int8], scale: float) -> Bytes:
    """int8 (N, K) in {-1, 0, 1}, K a multiple of 256, to (N·K/256, 66) bytes."""
    fields = (codes + 1).view(np.uint8).reshape(-1, 2, 4, 32)
    blocks = np.empty((len(fields), 66), np.uint8)
    blocks[:, :64] = (fields << np.array([0, 2, 4, 6], np.uint8)[:, None]).sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    blocks[:, 64:] = np.array([scale], "<f2").view(np.uint8)
    return blocks


def q6_k(values: NDArray[np.float32]) -> Bytes:
    """float32 (N, K), K a multiple of 256, to (N·K/256, 210) bytes: 6-bit weights, a scale for each 16."""
    x = values.reshape(-1, 16, 16)
    steps = np.abs(x).max(axis=2) / 31
    unit = (steps.max(axis=1, keepdims=True) / 127).astype("<f2")  # so that a scale fits 8 bits
    unit32 = np.maximum(unit.astype(np.float32), np.finfo(np.float32).tiny)
    scales = np.rint(steps / unit32).clip(1, 127)
    codes = np.rint(x / (unit32 * scales)[:, :, None]).clip(-32, 31) + 32
    q = codes.astype(np.uint8).reshape(-1, 2, 4, 32)
    blocks = np.empty((len(q), 210), np.uint8)
    blocks[:, :128] = (q[:, :, :2] & 15 | (q[:, :, 2:] & 15) << 4).reshape(-1, 128)
    high = (q >> 4) << np.array([0, 2, 4, 6], np.uint8)[:, None]
    blocks[:, 128:192] = high.sum(axis=2, dtype=np.uint8).reshape(-1, 64)
    blocks[:, 192:208] = scales
    blocks[:, 208:] = unit.view(np.uint8)
    return blocks


def q8_0(values: NDArray[np.float32]) -> Bytes:
    """float32 (N, K), K a multiple of 32, to (N·K/32, 34) bytes: 8-bit weights, a scale for each 32."""
    x = values.reshape(-1, 32)
    scale = np.abs(x).max(axis=1, keepdims=True) / 127
    codes = np.rint(x / np.maximum(scale, np.finfo(np.float32).tiny)).astype(np.int8)
    return np.concatenate([scale.astype("<f2").view(np.uint8), codes.view(np.uint8)], axis=1)


class Type(NamedTuple):
    """A type of GGUF tensors: its number, weights and bytes of a block."""

    number: int
    block: int
    size: int


F32, F16, TQ2_0 = Type(0, 1, 4), Type(1, 1, 2), Type(35, 256, 66)
HEADS: dict[str, tuple[Type, Callable[[NDArray[np.float32]], NDArray[Any]]]] = {
    "q6_K": (Type(14, 256, 210), q6_k),
    "q8_0": (Type(8, 32, 34), q8_0),
    "f16": (F16, lambda values: values.astype("<f2")),
}


def check_config(config: ModelConfig) -> None:
    """Raises ValueError for a model that llama.cpp's `bitnet` graph with TQ2_0 weights is not."""
    sizes = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_context")
    free = {name: getattr(config, name) for name in (*sizes, "name", "norm_eps", "rope_theta")}
    plain = ModelConfig(**free, activation="silu")
    for name, value in plain.to_dict().items():
        found = config.to_dict()[name]
        if found != value:
            raise ValueError(f"{name} is {found!r}; llama.cpp's bitnet graph computes {value!r}")
    if config.n_heads * config.head_dim != config.dim:
        raise ValueError(f"n_heads · head_dim is {config.n_heads * config.head_dim}, expected dim = {config.dim}")
    for name in ("dim", "ffn_dim"):
        if getattr(config, name) % TQ2_0.block:
            raise ValueError(f"{name} is {getattr(config, name)}, expected a multiple of {TQ2_0.block} for TQ2_0")


def write_gguf(model: PackedFile, path: str | os.PathLike[str], head: str = "q6_K") -> int:
    """Write the weights of `model`; returns the bytes of weights that a decoded token reads.

    Scales are rounded to f16, and the embedding to the type `head`. Raises ValueError, see check_config.
    """
    config = model.configs[0]
    check_config(config)
    records = [record for record in model.tensors.values() if packed.ROLES[record.key.role] in NAMES]
    types = [_type(record, head) for record in records]
    sizes = [r.rows * r.cols // t.block * t.size for r, t in zip(records, types, strict=True)]
    metadata = _metadata(config)
    with Path(path).open("wb") as file:
        file.write(struct.pack("<4sIQQ", b"GGUF", 3, len(records), len(metadata)))
        file.writelines(_string(key) + _value(value) for key, value in metadata.items())
        offset = 0
        for record, type_, size in zip(records, types, sizes, strict=True):
            shape = (record.cols,) if record.rows == 1 else (record.cols, record.rows)  # fastest first
            info = struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, type_.number, offset)
            file.write(_string(_name(record)) + info)
            offset += -(-size // ALIGN) * ALIGN
        for record, size in zip(records, sizes, strict=True):
            file.write(bytes(-file.tell() % ALIGN))
            begin = file.tell()
            for part in _data(model, record, head):
                file.write(np.ascontiguousarray(part).data)
            assert file.tell() - begin == size, _name(record)
    return sum(sizes)


def _type(record: Record, head: str) -> Type:
    if record.encoding == packed.TERNARY_2BIT:
        return TQ2_0
    return HEADS[head][0] if packed.ROLES[record.key.role] == "embedding" else F32


def _data(model: PackedFile, record: Record, head: str) -> Iterator[NDArray[Any]]:
    if record.encoding == packed.TERNARY_2BIT:
        yield tq2_0(model.codes(record), float(model.scales(record)[0]))
    elif packed.ROLES[record.key.role] == "embedding":
        codes, scales = model.codes(record), model.scales(record)
        for start in range(0, record.rows, ROWS):
            part = slice(start, start + ROWS)
            yield HEADS[head][1](codes[part] * scales[part, None])
    else:
        yield model.values(record)


def _name(record: Record) -> str:
    name = NAMES[packed.ROLES[record.key.role]] + ".weight"
    return name if record.key.layer == packed.NONE else f"blk.{record.key.layer}.{name}"


def _metadata(config: ModelConfig) -> dict[str, str | int | float]:
    return {
        "general.architecture": "bitnet",
        "general.quantization_version": 2,
        "bitnet.vocab_size": config.vocab_size,
        "bitnet.context_length": config.max_context,
        "bitnet.embedding_length": config.dim,
        "bitnet.block_count": config.n_layers,
        "bitnet.feed_forward_length": config.ffn_dim,
        "bitnet.attention.head_count": config.n_heads,
        "bitnet.attention.head_count_kv": config.n_kv_heads,
        "bitnet.attention.layer_norm_rms_epsilon": float(config.norm_eps),
        "bitnet.rope.dimension_count": config.head_dim,
        "bitnet.rope.freq_base": float(config.rope_theta),
        "tokenizer.ggml.model": "none",
    }


def _string(text: str) -> bytes:
    return struct.pack("<Q", len(text.encode())) + text.encode()


def _value(value: str | int | float) -> bytes:
    if isinstance(value, str):
        return struct.pack("<I", 8) + _string(value)
    return struct.pack("<II", 4, value) if isinstance(value, int) else struct.pack("<If", 6, value)
