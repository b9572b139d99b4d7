"""The int8 encodings against FORMAT.md §4, one element at a time, and who writes which."""

from __future__ import annotations

import math
import struct
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from bitnet_export.checkpoint import pack
from bitnet_export.foreign.outgoing import value_rows
from bitnet_export.foreign.source import Floats, encode
from bitnet_export.packed import encodings, int8_rows, records
from packed_files import SMALL

sizes = st.integers(1, 70)
seeds = st.integers(0, 2**32 - 1)
peaks = st.sampled_from([0, 1, 2, 30, 127])


def some_codes(rows: int, cols: int, seed: int, peak: int = 127) -> NDArray[np.int8]:
    return np.random.default_rng(seed).integers(-peak, peak + 1, (rows, cols), np.int8)


@given(sizes, sizes, seeds)
def test_rows_follow_the_formula_of_the_format(rows: int, cols: int, seed: int) -> None:
    codes, stride = some_codes(rows, cols, seed), 64 * -(-cols // 64)
    data = int8_rows.pack(codes)
    assert data.dtype == np.uint8 and data.size == int8_rows.size(rows, cols) == rows * stride
    signed = data.tobytes()
    for row in range(rows):
        for col in range(stride):
            (code,) = struct.unpack_from("b", signed, row * stride + col)
            assert code == (codes[row, col] if col < cols else 0)


def step_of(codes: list[int]) -> int:
    """√(Σ c²/K), rounded half to even, at least 1, in integers."""
    squares = Fraction(sum(c * c for c in codes), len(codes))
    t = math.isqrt(int(squares))
    half = (t + Fraction(1, 2)) ** 2
    return max(t + (squares > half or (squares == half and t % 2 == 1)), 1)


def sketch_of(c: int, t: int) -> int:
    if c >= 0:
        return 3 if c >= t else 2
    return 0 if c <= -t else 1


@given(sizes, sizes, seeds, peaks)
def test_sketches_follow_the_formula_of_the_format(rows: int, cols: int, seed: int, peak: int) -> None:
    codes = some_codes(rows, cols, seed, peak)
    data = int8_rows.pack_sketched(codes)
    panels, tiles, first = -(-rows // 16), -(-cols // 16), int8_rows.size(rows, cols)
    assert data[:first].tobytes() == int8_rows.pack(codes).tobytes()
    assert data.size == int8_rows.sketched_size(rows, cols) == first + 64 * panels * tiles + 2 * 64 * panels
    sketch = data[first:]
    floats = np.frombuffer(sketch[64 * panels * tiles :].tobytes(), "<f4").reshape(2, 16 * panels)
    for row in range(16 * panels):
        real = codes[row].tolist() if row < rows else []
        t = step_of(real) if real else 1
        for col in range(16 * tiles):
            tile = sketch[64 * (row // 16 * tiles + col // 16) :][:64]
            s = int(tile[4 * (row % 16) + col % 4]) >> 2 * (col % 16 // 4) & 3
            assert s == sketch_of(real[col] if col < len(real) else 0, t)
        left = sum((2 * c - (2 * sketch_of(c, t) - 3) * t) ** 2 for c in real)  # 4·Σ (c - (s - 1.5)·t)²
        assert floats[0, row] == (t if real else 0)
        assert floats[1, row] == np.float32(math.sqrt(left / (4 * cols)))


def test_steps_are_rounded_half_to_even() -> None:
    for codes, step in (
        ([0, 0], 1), ([1, 0, 0, 0], 1), ([1, 1, 1, 3, 0, 0], 1), ([1, 2], 2), ([-127], 127),
        ([1, 2, 2, 0], 2), ([3, 4, 0, 0], 2),  # the roots of 2.25 and 6.25
    ):  # fmt: skip
        made = int8_rows.pack_sketched(np.array([codes], np.int8))
        assert made[-128:-64].view("<f4")[0] == step == step_of(codes)


def test_a_product_is_near_that_of_the_sketch() -> None:
    """Σ c·q ≈ t·(Σ s·q - 1.5·Σ q), to within d·√(Σ q²), as the format says."""
    rng = np.random.default_rng(1)
    codes = np.rint(rng.normal(0, 36, (600, 500))).clip(-127, 127).astype(np.int8)
    q = rng.integers(-127, 128, 500)
    floats = int8_rows.pack_sketched(codes)[-2 * 4 * 608 :].view("<f4").reshape(2, 608)[:, :600].astype(np.float64)
    t, d = floats[0][:, None], floats[1]
    s = (codes > -t).astype(int) + (codes >= 0) + (codes >= t)
    off = (codes.astype(int) @ q - t[:, 0] * (s @ q - 1.5 * q.sum())) / (d * math.sqrt(q @ q))
    assert abs(off.mean()) < 0.15 and 0.8 < off.std() < 1.2 and np.abs(off).max() < 5


@given(sizes, sizes, seeds)
def test_round_trip(rows: int, cols: int, seed: int) -> None:
    codes = some_codes(rows, cols, seed)
    for pack_codes in (int8_rows.pack, int8_rows.pack_sketched):
        found = int8_rows.unpack(pack_codes(codes).tobytes(), rows, cols)
        assert np.array_equal(found, codes) and found.flags.writeable
    assert np.array_equal(int8_rows.pack_sketched(codes.T), int8_rows.pack_sketched(np.ascontiguousarray(codes.T)))


def test_what_is_refused_when_packed() -> None:
    codes = np.zeros((3, 3), np.int8)
    codes[1, 1] = -128
    for pack_codes in (int8_rows.pack, int8_rows.pack_sketched):
        with pytest.raises(ValueError, match="a code is -128, expected -127 to 127"):
            pack_codes(codes)
        with pytest.raises(ValueError, match="expected an int8 matrix"):
            pack_codes(np.zeros((4, 4), np.int32))  # type: ignore[arg-type]
        with pytest.raises(ValueError, match="0 x 4, expected at least 1 x 1"):
            pack_codes(np.zeros((0, 4), np.int8))
    with pytest.raises(ValueError, match="128 bytes for a 1 x 16 matrix, expected 64 or 256"):
        int8_rows.unpack(bytes(128), 1, 16)


@given(sizes, sizes, seeds, st.data())
def test_refused_values_are_found_wherever_they_are(rows: int, cols: int, seed: int, data: st.DataObject) -> None:
    made = int8_rows.pack_sketched(some_codes(rows, cols, seed))
    size = encodings.INT8_SKETCH.rows_size(rows, cols)
    assert size == int8_rows.size(rows, cols)
    assert not int8_rows.has_refused(made[:size]) and int8_rows.steps_are_valid(made, rows)
    floats = made[-2 * 64 * -(-rows // 16) :].view("<f4")
    at = data.draw(st.integers(0, floats.size - 1))
    good = floats[at]
    for wrong in (math.nan, math.inf, -math.inf, -1.0, -0.0, -1e-45):
        floats[at] = wrong
        assert not int8_rows.steps_are_valid(made, rows)
    floats[at] = good
    made[data.draw(st.integers(0, size - 1))] = 0x80
    assert int8_rows.has_refused(made[:size]) and int8_rows.steps_are_valid(made, rows)


def test_blocks_of_rows_leave_no_seam() -> None:
    codes = np.resize(some_codes(64, 96, 0), (3_200, 96))
    panels = int8_rows.pack_sketched(codes)[int8_rows.size(3_200, 96) : -8 * 3_200].reshape(200, -1)
    assert np.array_equal(panels, np.tile(panels[:4], (50, 1)))


BIG: dict[str, Any] = {"vocab_size": 8192}


@pytest.mark.parametrize(
    ("changes", "embedding", "head"),
    [
        ({}, "ROWS", None),
        (BIG | {"vocab_size": 8191}, "ROWS", None),
        (BIG, "SKETCH", None),
        (BIG | {"tie_embeddings": False}, "ROWS", "SKETCH"),
        (BIG | {"tie_embeddings": False, "head_bias": True}, "ROWS", "ROWS"),
        (BIG | {"head_bias": True}, "ROWS", None),
        (BIG | {"logit_softcap": 30.0}, "ROWS", None),
        (BIG | {"attention_softcap": 30.0}, "SKETCH", None),
        (BIG | {"has_head": False}, "ROWS", None),
        (BIG | {"has_head": False, "tie_embeddings": False}, "ROWS", None),
        (BIG | {"input": "embeddings"}, "SKETCH", None),
    ],
)  # fmt: skip
def test_a_sketch_is_for_what_gives_many_logits(changes: dict[str, Any], embedding: str, head: str | None) -> None:
    config = SMALL.replace(**changes)
    found = {
        spec.key.name: records.stored_as(spec, config).name
        for spec in records.expected_tensors(config)
        if spec.form == "table"
    }
    assert found == {"embedding.weight": f"INT8_{embedding}"} | ({"head.weight": f"INT8_{head}"} if head else {})


@pytest.mark.parametrize("config", [SMALL, SMALL.replace(vocab_size=8195)])
def test_both_writers_make_the_same_bytes(config: ModelConfig) -> None:
    """From a training checkpoint all rows at once, from a published model a few thousand at a time."""
    spec = next(s for s in records.expected_tensors(config) if s.key.name == "embedding.weight")
    values = np.random.default_rng(0).normal(size=(spec.rows, spec.cols)).astype(np.float32)
    trained = pack.encode(spec, torch.from_numpy(values), config)
    published = encode(spec, Floats.of(values), config, encodings.TERNARY_2BIT, encodings.F32)
    assert trained.encoding == published.encoding == records.stored_as(spec, config)
    assert np.array_equal(trained.data, published.data)
    assert trained.scales is not None and np.array_equal(trained.scales, published.scales)


def test_a_table_is_read_a_few_thousand_rows_at_a_time(tmp_path: Path) -> None:
    random_model(SMALL.replace(vocab_size=8195, tie_embeddings=False), tmp_path / "m")
    file = PackedFile.open(tmp_path / "m")
    tables = [record for record in file.tensors.values() if record.encoding.kind == "int8"]
    assert [record.encoding for record in tables] == [encodings.INT8_ROWS, encodings.INT8_SKETCH]
    for record in tables:
        parts = list(value_rows(file, record))
        assert [len(part) for part in parts] == [4096, 4096, 3]
        assert np.array_equal(np.concatenate(parts), file.values(record))
