"""A packed file with random weights of any shape: for benchmarks at full scale and for tests.

Ternary tiles are drawn as packed bytes, so that two billion weights take seconds. Needs no torch.
"""

from __future__ import annotations

import math
import os

import numpy as np

from bitnet.config import TERNARY_LINEARS, ModelConfig

from . import encodings, int8_rows, layout, records
from .encodings import Encoding
from .layout import Bytes
from .reader import PackedFile
from .records import Spec
from .writer import Encoded, write_packed

_CHUNK = 1 << 20  # bytes drawn at a time
_INT8_DEVIATION = 127 / 3.5  # of codes in a row whose largest is about 127, like a trained one


def random_model(
    config: ModelConfig,
    path: str | os.PathLike[str],
    seed: int = 0,
    *,
    zeros: float = 1 / 3,
    encoding: str = "2.0",
    tokenizer: bytes | None = None,
) -> None:
    """Write a model of this shape. The bytes depend only on (config, seed, zeros, encoding, tokenizer).

    zeros: probability of code 0. encoding: bits per ternary weight, "2.0" or "1.6"; for the same
    weights in both use `repack`. Scales are chosen so that every projection keeps the variance of
    its input, so activations and logits stay of order 1 at any depth.
    """
    stacks = config.stacks
    if scaled := [stack.rope_scaling for stack in stacks if stack.rope_scaling != "none"]:
        raise ValueError(f"rope_scaling is {scaled[0]!r}; a random model has none")
    if not 0 <= zeros <= 1:
        raise ValueError(f"zeros is {zeros}, expected a probability")

    body = encodings.ternary_encoding(encoding)

    def source(spec: Spec) -> Encoded:
        return _draw(spec, stacks[spec.key.stack], np.random.Generator(np.random.SFC64([seed, *spec.key])), zeros, body)

    metadata = {"provenance": {"source": "random", "seed": seed, "zeros": zeros}}
    write_packed(path, stacks, source, metadata=metadata, tokenizer=tokenizer)


def random_adapter(
    base: str | os.PathLike[str],
    path: str | os.PathLike[str],
    seed: int = 0,
    *,
    rank: int = 16,
    linears: tuple[str, ...] = TERNARY_LINEARS,
) -> None:
    """Write a separate adapter of a packed model, with weights as large as those of a trained one."""
    model = PackedFile.open(base)
    first, *others = model.configs
    stacks = [
        first.replace(adapters=linears, adapter_rank=rank),
        *(c.replace(adapters=(), adapter_rank=0) for c in others),
    ]

    def source(spec: Spec) -> Encoded:
        rng = np.random.Generator(np.random.SFC64([seed, *spec.key]))
        inwards = records.PARTS[spec.key.part] == "adapter_in"
        return _int8(spec, 1 / math.sqrt(spec.cols if inwards else 4 * rank), rng, encodings.INT8_ROWS)

    write_packed(path, stacks, source, metadata={"provenance": {"source": "random", "seed": seed}}, base=model.weights)


def _draw(spec: Spec, config: ModelConfig, rng: np.random.Generator, zeros: float, body: Encoding) -> Encoded:
    name, shape = records.ROLES[spec.key.role], (spec.rows, spec.cols)
    if name.startswith("rope_"):
        dim, of = config.rope_dim, config if name == "rope_frequencies" else config.of_layer(0)
        return Encoded.f32(of.rope_theta ** (-np.arange(0, dim, 2) / dim))
    if name == "position" and config.position == "sinusoidal":
        angle = np.arange(spec.rows)[:, None] * 10_000.0 ** (-(np.arange(spec.cols) // 2 * 2) / spec.cols)
        return Encoded.f32(np.where(np.arange(spec.cols) % 2, np.cos(angle), np.sin(angle)))
    if spec.key.part == 1:
        return Encoded.f32(rng.normal(0, 0.1, shape))
    if spec.form == "vector":
        return Encoded.f32(rng.uniform(0.5, 1.5, shape))
    stored = records.stored_as(spec, config, body)
    if stored.ternary:
        scope = encodings.SCOPE_NAMES.index(config.weight_scale)
        deviation = math.sqrt(spec.cols * max(1 - zeros, 1e-3))
        scales = rng.uniform(0.8, 1.2, encodings.scale_count(scope, *shape)) / deviation
        exact = np.float16 if scope == encodings.SCALE_GROUP else np.float32
        tiles = _ternary_tiles(*shape, rng, zeros, stored)
        return Encoded(stored, scope, tiles, scales.astype(exact).astype(np.float32))
    deviation = 2 / math.sqrt(spec.cols)
    if stored.kind == "int8":
        return _int8(spec, deviation, rng, stored)
    return Encoded.floats(stored, rng.normal(0, deviation, shape))


def _int8(spec: Spec, deviation: float, rng: np.random.Generator, stored: Encoding) -> Encoded:
    scales = rng.uniform(0.8, 1.2, spec.rows) * (deviation / _INT8_DEVIATION)
    codes = _int8_rows(spec.rows, spec.cols, rng, stored)
    return Encoded(stored, encodings.SCALE_ROW, codes, scales.astype(np.float32))


def _fill(out: Bytes, rng: np.random.Generator, table: Bytes) -> None:
    """Fill `out` with entries of a table of 65,536, chosen uniformly."""
    for start in range(0, out.size, _CHUNK):
        part = out[start : start + _CHUNK]
        np.take(table, rng.integers(0, 1 << 16, part.size, np.uint16), out=part, mode="wrap")


def _ternary_tiles(rows: int, cols: int, rng: np.random.Generator, zeros: float, body: Encoding) -> Bytes:
    data = np.empty(body.size(rows, cols), np.uint8)
    _fill(data, rng, _ternary_bytes(rng, zeros, body))

    def packed_again(part: Bytes, rows: int, cols: int) -> Bytes:
        """The same tiles with correct padding."""
        return body.encode(body.decode(np.ascontiguousarray(part), rows, cols)).reshape(-1, layout.TILE_BYTES)

    panels = data.reshape(-(-rows // layout.PANEL), -1, layout.TILE_BYTES)
    if last := cols % body.tile_k:
        panels[:, -1] = packed_again(panels[:, -1], rows, last)
    if last := rows % layout.PANEL:
        panels[-1] = packed_again(panels[-1], last, cols)
    return data


def _ternary_bytes(rng: np.random.Generator, zeros: float, body: Encoding) -> Bytes:
    """65,536 bytes of an encoding, with independent codes."""
    below = np.cumsum([(1 - zeros) / 2, zeros, (1 - zeros) / 2])
    below /= below[-1]
    drawn = rng.random((5, 1 << 16))
    codes: Bytes = np.add(drawn >= below[0], drawn >= below[1], dtype=np.uint8)  # a third of rng.choice's time
    assert body.tile_bytes  # all encodings of TERNARY have tiles
    return body.tile_bytes(codes)


def _int8_rows(rows: int, cols: int, rng: np.random.Generator, encoding: Encoding) -> Bytes:
    data = np.empty(encoding.size(rows, cols), np.uint8)
    codes = int8_rows.codes_of(data, rows, cols)
    normal = np.rint(rng.normal(0, _INT8_DEVIATION, 1 << 16)).clip(-127, 127)
    _fill(codes.reshape(-1).view(np.uint8), rng, normal.astype(np.int8).view(np.uint8))
    codes[:, cols:] = 0
    if encoding.complete:
        encoding.complete(data, rows, cols)
    return data
