"""The tiled weight encodings of the packed file (FORMAT.md §4), numpy only.

A tile is 64 bytes: 16 rows × 4 bytes, and a tile row is one 32-bit word of four neighbouring
columns. So every encoding is a little arithmetic on 32-bit words and one transpose; there is never a
carry into the next byte, so the byte order of the machine does not matter.

Shapes: N rows (outputs), K columns (inputs).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

PANEL = 16  # rows per panel, in every tiled encoding
TILE_BYTES = 64
TERNARY_TILE_K = 16
TRIT_TILE_K = 20
TRIT_MAX_K = 32_768  # most columns of a TERNARY_5TRIT matrix: sums fit 24 bits
INT8_MAX_K = 65_536  # most columns of an INT8_ROWS matrix: sums fit 32 bits
SCALE_GROUP_K = 128
LINE_CODES = 256  # codes in 64 bytes of a line

Codes = NDArray[np.int8]
Bytes = NDArray[np.uint8]
Data = bytes | Bytes  # of a matrix, as the file holds them


def _tiles(rows: int, cols: int, tile_k: int) -> tuple[int, int]:
    """Panels and tiles per panel."""
    if rows < 1 or cols < 1:
        raise ValueError(f"matrix is {rows} x {cols}, expected at least 1 x 1")
    return -(-rows // PANEL), -(-cols // tile_k)


def ternary_size(rows: int, cols: int) -> int:
    """Bytes of a TERNARY_2BIT matrix."""
    panels, tiles = _tiles(rows, cols, TERNARY_TILE_K)
    return TILE_BYTES * panels * tiles


def trit_size(rows: int, cols: int) -> int:
    """Bytes of a TERNARY_5TRIT matrix."""
    panels, tiles = _tiles(rows, cols, TRIT_TILE_K)
    return TILE_BYTES * panels * tiles


def check_codes(codes: Codes, most: int) -> None:
    """Raises ValueError unless codes are an int8 matrix of -most … most."""
    if codes.ndim != 2 or codes.dtype != np.int8:
        raise ValueError(f"codes are {codes.dtype} of shape {codes.shape}, expected an int8 matrix")
    if codes.size and (codes.min() < -most or codes.max() > most):
        found = codes.min() if codes.min() < -most else codes.max()
        raise ValueError(f"a code is {found}, expected {-most} to {most}")


def _padded_words(codes: Codes, tile_k: int) -> NDArray[np.uint32]:
    """(N, K) ternary codes, each plus 1, as words (panels, 16, tiles, tile_k / 4)."""
    check_codes(codes, 1)
    rows, cols = codes.shape
    panels, tiles = _tiles(rows, cols, tile_k)
    padded = np.ones((panels * PANEL, tiles * tile_k), np.uint8)
    np.add(codes.view(np.uint8), np.uint8(1), out=padded[:rows, :cols])  # wraps mod 256, as it should
    return padded.view(np.uint32).reshape(panels, PANEL, tiles, tile_k // 4)


def _stream(words: NDArray[np.uint32]) -> Bytes:
    """(panels, 16, tiles) words of tile rows to bytes in file order."""
    return np.ascontiguousarray(words.transpose(0, 2, 1)).reshape(-1).view(np.uint8)


def _words(data: Data, rows: int, cols: int, tile_k: int) -> NDArray[np.uint32]:
    """Bytes in file order to (panels, 16, tiles) words."""
    panels, tiles = _tiles(rows, cols, tile_k)
    raw = np.frombuffer(data, np.uint8)
    if raw.size != panels * tiles * TILE_BYTES:
        raise ValueError(f"{raw.size} bytes for a {rows} x {cols} matrix, expected {panels * tiles * TILE_BYTES}")
    return np.ascontiguousarray(raw.view(np.uint32).reshape(panels, tiles, PANEL).transpose(0, 2, 1))


def _codes(words: NDArray[np.uint32], rows: int, cols: int) -> Codes:
    """(panels, 16, tiles, tile_k / 4) words of codes plus 1 to int8 (N, K)."""
    panels, _, tiles, parts = words.shape
    padded = words.view(np.uint8).reshape(panels * PANEL, tiles * parts * 4)
    return np.subtract(padded[:rows, :cols], np.uint8(1)).view(np.int8)


def _two_bits(w: NDArray[np.uint32]) -> Bytes:
    """(panels, 16, tiles, 4) words of values 0 to 3 to bytes in file order."""
    return _stream(w[..., 0] | w[..., 1] << np.uint32(2) | w[..., 2] << np.uint32(4) | w[..., 3] << np.uint32(6))


def pack_ternary(codes: Codes) -> Bytes:
    """int8 codes in {-1, 0, 1}, (N, K), to TERNARY_2BIT bytes. Raises ValueError on another code."""
    return _two_bits(_padded_words(codes, TERNARY_TILE_K))


def pack_panels(values: Bytes) -> Bytes:
    """Values 0 to 3 of whole panels and tiles, in the tiles of TERNARY_2BIT."""
    return _two_bits(values.view(np.uint32).reshape(-1, PANEL, values.shape[1] // TERNARY_TILE_K, 4))


def unpack_ternary(data: Data, rows: int, cols: int) -> Codes:
    """TERNARY_2BIT bytes to int8 (N, K). The refused code 3 shows as 2."""
    words = _words(data, rows, cols, TERNARY_TILE_K)
    fields = np.empty((*words.shape, 4), np.uint32)
    for f in range(4):
        np.bitwise_and(words >> np.uint32(2 * f), np.uint32(0x03030303), out=fields[..., f])
    return _codes(fields, rows, cols)


def rows_size(rows: int, cols: int) -> int:
    """Bytes of a TERNARY_2BIT_ROWS matrix."""
    _tiles(rows, cols, LINE_CODES)
    return rows * -(-cols // LINE_CODES) * TILE_BYTES


def columns_size(rows: int, cols: int) -> int:
    """Bytes of a TERNARY_2BIT_COLUMNS matrix."""
    return rows_size(cols, rows)


def pack_rows(codes: Codes) -> Bytes:
    """int8 codes in {-1, 0, 1}, (N, K), to TERNARY_2BIT_ROWS bytes. Raises ValueError on another code."""
    words = _padded_words(codes, LINE_CODES).reshape(-1, 4, 4)[: rows_size(*codes.shape) // 16]  # unit, field, word
    w: NDArray[np.uint32] = words[:, 0] | words[:, 1] << np.uint32(2) | words[:, 2] << np.uint32(4)
    w |= words[:, 3] << np.uint32(6)
    return w.reshape(-1).view(np.uint8)


def unpack_rows(data: Data, rows: int, cols: int) -> Codes:
    """TERNARY_2BIT_ROWS bytes to int8 (N, K). The refused code 3 shows as 2."""
    raw, size = np.frombuffer(data, np.uint8), rows_size(rows, cols)
    if raw.size != size:
        raise ValueError(f"{raw.size} bytes for a {rows} x {cols} matrix, expected {size}")
    units = raw.view(np.uint32).reshape(-1, 4)
    fields = np.empty((len(units), 4, 4), np.uint32)
    for f in range(4):
        np.bitwise_and(units >> np.uint32(2 * f), np.uint32(0x03030303), out=fields[:, f])
    return np.subtract(fields.view(np.uint8).reshape(rows, -1)[:, :cols], np.uint8(1)).view(np.int8)


def pack_columns(codes: Codes) -> Bytes:
    """int8 codes in {-1, 0, 1}, (N, K), to TERNARY_2BIT_COLUMNS bytes. Raises ValueError on another code."""
    return pack_rows(np.ascontiguousarray(codes.T))


def unpack_columns(data: Data, rows: int, cols: int) -> Codes:
    """TERNARY_2BIT_COLUMNS bytes to int8 (N, K). The refused code 3 shows as 2."""
    return np.ascontiguousarray(unpack_rows(data, cols, rows).T)


TRIT_BYTES = np.array([-(-256 * n // 243) for n in range(243)], np.uint8)
"""The byte that encodes a number of five base-3 digits."""


def _trit_digits() -> Bytes:
    """(5, 256): digit f of every byte. The first digit belongs to the first column."""
    digits, value = np.empty((5, 256), np.uint8), np.arange(256)
    for f in range(5):
        digits[f] = 3 * value >> 8
        value = 3 * value & 255
    return digits


_TRIT_DIGITS = _trit_digits()


def ternary_bytes(codes: Bytes) -> Bytes:
    """Codes + 1 of five columns, (5, n), as the n bytes of TERNARY_2BIT that hold the first four."""
    return np.array([1, 4, 16, 64, 0], np.uint8) @ codes


def trit_bytes(codes: Bytes) -> Bytes:
    """Codes + 1 of five columns, (5, n), as the n bytes of TERNARY_5TRIT that hold them."""
    return np.take(TRIT_BYTES, np.array([81, 27, 9, 3, 1], np.uint8) @ codes)


def pack_trits(codes: Codes) -> Bytes:
    """int8 codes in {-1, 0, 1}, (N, K), to TERNARY_5TRIT bytes. Raises ValueError on another code."""
    w = _padded_words(codes, TRIT_TILE_K)
    number = w[..., 0]
    for f in range(1, 5):
        number = 3 * number + w[..., f]  # at most 242 in each byte
    return np.take(TRIT_BYTES, _stream(number))


def unpack_trits(data: Data, rows: int, cols: int) -> Codes:
    """TERNARY_5TRIT bytes to int8 (N, K). The 13 refused bytes also decode to codes."""
    words = _words(data, rows, cols, TRIT_TILE_K)
    digits = np.empty((*words.shape, 5), np.uint32)
    for f in range(5):
        digits[..., f] = np.take(_TRIT_DIGITS[f], words.view(np.uint8)).view(np.uint32)
    return _codes(digits, rows, cols)


def has_refused_ternary(data: Data) -> bool:
    """Whether any 2-bit field, padding included, holds 3."""
    raw = np.frombuffer(data, np.uint8)
    return any(bool((part & part >> 1 & 0x55).any()) for part in blocks(raw))


def has_refused_trits(data: Data) -> bool:
    """Whether any byte, padding included, is not one of the 243 that encode five codes."""
    return any(bool((part * np.uint8(243) >= 243).any()) for part in blocks(np.frombuffer(data, np.uint8)))


def group_scale_count(rows: int, cols: int) -> int:
    """Number of scales of scope group, padding rows included."""
    panels, groups = _tiles(rows, cols, SCALE_GROUP_K)
    return panels * groups * PANEL


def spread_scales(scales: NDArray[np.float32], cols: int) -> NDArray[np.float32]:
    """One scale per group of 128 columns, (N, ceil(K/128)), for each column, (N, K)."""
    return np.repeat(scales, SCALE_GROUP_K, axis=1)[:, :cols]


def pack_group_scales(scales: NDArray[np.float32]) -> NDArray[np.float16]:
    """fp32 (N, ceil(K/128)) to fp16 in file order. Raises ValueError when fp16 cannot hold one exactly."""
    rows, groups = scales.shape
    padded = np.ones((-(-rows // PANEL) * PANEL, groups), "<f2")
    with np.errstate(over="ignore"):
        padded[:rows] = scales
    inexact = padded[:rows] != scales
    if inexact.any():
        raise ValueError(f"a group scale is {scales[inexact][0]:.9g}, which fp16, as they are stored, cannot hold")
    return np.ascontiguousarray(padded.reshape(-1, PANEL, groups).transpose(0, 2, 1)).reshape(-1)


def unpack_group_scales(data: Data, rows: int, cols: int) -> NDArray[np.float32]:
    """fp16 in file order to fp32 (N, ceil(K/128))."""
    panels, groups = _tiles(rows, cols, SCALE_GROUP_K)
    halves = np.frombuffer(data, "<f2").reshape(panels, groups, PANEL).transpose(0, 2, 1)
    return halves.reshape(panels * PANEL, groups)[:rows].astype(np.float32)


def blocks(raw: Bytes, size: int = 1 << 22) -> list[Bytes]:
    """Views of a few megabytes, so that temporaries stay small."""
    return [raw[i : i + size] for i in range(0, raw.size, size)]
