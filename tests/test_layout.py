"""The tiled encodings against FORMAT.md §4, byte by byte and round trip."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from bitnet_export.packed import int8_rows, layout
from bitnet_export.packed.layout import Bytes

sizes = st.integers(1, 70)
seeds = st.integers(0, 2**32 - 1)


def ternary(rows: int, cols: int, seed: int) -> NDArray[np.int8]:
    return np.random.default_rng(seed).integers(-1, 2, (rows, cols), np.int8)


@given(sizes, sizes, seeds)
def test_ternary_follows_the_formula_of_the_format(rows: int, cols: int, seed: int) -> None:
    codes = ternary(rows, cols, seed)
    data = layout.pack_ternary(codes)
    panels, tiles = -(-rows // 16), -(-cols // 16)
    assert data.size == layout.ternary_size(rows, cols) == 64 * panels * tiles
    for row in range(16 * panels):
        for col in range(16 * tiles):
            tile = data[64 * (row // 16 * tiles + col // 16) :][:64]
            code = int(tile[4 * (row % 16) + col % 4]) >> 2 * (col % 16 // 4) & 3
            assert code == (codes[row, col] + 1 if row < rows and col < cols else 1)


@given(sizes, sizes, seeds)
def test_trits_follow_the_formula_of_the_format(rows: int, cols: int, seed: int) -> None:
    codes = ternary(rows, cols, seed)
    data = layout.pack_trits(codes)
    panels, tiles = -(-rows // 16), -(-cols // 20)
    assert data.size == layout.trit_size(rows, cols) == 64 * panels * tiles
    padded = np.ones((16 * panels, 20 * tiles), np.int64)
    padded[:rows, :cols] = codes + 1
    for row in range(16 * panels):
        for col in range(0, 20 * tiles, 20):
            for i in range(4):
                n = sum(int(padded[row, col + 4 * f + i]) * 3 ** (4 - f) for f in range(5))
                byte = data[64 * (row // 16 * tiles + col // 20) + 4 * (row % 16) + i]
                assert byte == math.ceil(256 * n / 243)


def test_every_code_of_five_trits() -> None:
    """The 243 bytes are distinct, the format's multiplication by 3 decodes them, and the other 13 are refused."""
    seen = set()
    for n, codes in enumerate(itertools.product((-1, 0, 1), repeat=5)):
        row = np.zeros((1, 20), np.int8)
        row[0, ::4] = codes
        byte = v = int(layout.pack_trits(row)[0])
        assert byte == math.ceil(256 * n / 243)
        for code in codes:
            assert 256 * (code + 1) == 3 * v - (3 * v & 255)
            v = 3 * v & 255
        assert layout.unpack_trits(layout.pack_trits(row), 1, 20).tolist() == row.tolist()
        seen.add(byte)
    assert len(seen) == 243
    assert {b for b in range(256) if layout.has_refused_trits(bytes([b]))} == set(range(256)) - seen


@given(sizes, sizes, seeds)
def test_round_trip(rows: int, cols: int, seed: int) -> None:
    codes = ternary(rows, cols, seed)
    assert np.array_equal(layout.unpack_ternary(layout.pack_ternary(codes), rows, cols), codes)
    assert np.array_equal(layout.unpack_trits(layout.pack_trits(codes).tobytes(), rows, cols), codes)


def test_a_tile_worked_by_hand() -> None:
    codes = np.zeros((2, 16), np.int8)
    codes[0] = [1, -1, 0, 0, -1, 0, 1, 0, 0, 0, 0, 1, 0, 0, -1, -1]
    tile = layout.pack_ternary(codes)
    # Byte i of row 0: columns i, 4+i, 8+i, 12+i from the low bits up, each plus 1.
    assert tile[:4].tolist() == [0b01_01_00_10, 0b01_01_01_00, 0b00_01_10_01, 0b00_10_01_01]
    assert tile[4:].tolist() == [0b01_01_01_01] * 60


def test_transposed_and_strided_codes_are_packed_by_value() -> None:
    codes = ternary(40, 60, 1)
    assert np.array_equal(layout.pack_ternary(codes.T), layout.pack_ternary(np.ascontiguousarray(codes.T)))
    assert np.array_equal(layout.pack_ternary(codes[::3, ::2]), layout.pack_ternary(codes[::3, ::2].copy()))


@pytest.mark.parametrize("code", [2, -2, 127, -128])
def test_a_code_out_of_range_is_refused(code: int) -> None:
    codes = np.zeros((3, 3), np.int8)
    codes[1, 1] = code
    for pack in (layout.pack_ternary, layout.pack_trits):
        with pytest.raises(ValueError, match=f"a code is {code}, expected -1 to 1"):
            pack(codes)


def test_wrong_shapes_and_types_are_refused() -> None:
    with pytest.raises(ValueError, match="expected an int8 matrix"):
        layout.pack_ternary(np.zeros(4, np.int8))
    with pytest.raises(ValueError, match="expected an int8 matrix"):
        layout.pack_trits(np.zeros((4, 4), np.int32))  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="0 x 4, expected at least 1 x 1"):
        layout.ternary_size(0, 4)
    with pytest.raises(ValueError, match="128 bytes for a 16 x 16 matrix, expected 64"):
        layout.unpack_ternary(bytes(128), 16, 16)


@given(sizes, sizes, seeds, st.data())
def test_refused_codes_are_found_wherever_they_are(rows: int, cols: int, seed: int, data: st.DataObject) -> None:
    packed = layout.pack_ternary(ternary(rows, cols, seed))
    assert not layout.has_refused_ternary(packed)
    assert not layout.has_refused_trits(layout.pack_trits(ternary(rows, cols, seed)))
    at, field = data.draw(st.integers(0, packed.size - 1)), data.draw(st.integers(0, 3))
    packed[at] |= 3 << 2 * field
    assert layout.has_refused_ternary(packed)


@pytest.mark.parametrize(
    ("refused", "code"),
    [(layout.has_refused_ternary, 0xC0), (layout.has_refused_trits, 1), (int8_rows.has_refused, 0x80)],
)
def test_refused_codes_are_found_in_the_last_of_several_blocks(refused: Callable[[Bytes], bool], code: int) -> None:
    large = np.zeros((1 << 22) + 1, np.uint8)
    assert not refused(large)
    large[-1] = code
    assert refused(large)


def test_a_layer_of_the_2b_model_packs_in_well_under_a_second() -> None:
    codes = ternary(6912, 2560, 0)
    start = time.process_time()
    assert np.array_equal(layout.unpack_ternary(layout.pack_ternary(codes), 6912, 2560), codes)
    assert np.array_equal(layout.unpack_trits(layout.pack_trits(codes), 6912, 2560), codes)
    assert time.process_time() - start < 2.0  # takes 0.2 s; a loop in Python takes a minute
