"""The int8 encodings of the packed file, INT8_ROWS and INT8_SKETCH (FORMAT.md §4), numpy only.

Both start with the codes, row by row. The rest of INT8_SKETCH is computed from them, some rows at a time,
because a table may be larger than everything else.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from .layout import (
    PANEL,
    TERNARY_TILE_K,
    Bytes,
    Codes,
    Data,
    blocks,
    check_codes,
    pack_panels,
    ternary_size,
    unpack_ternary,
)

UNIT = 64  # stored rows are padded to a multiple of it
_ROWS = 512  # rows sketched at a time; a multiple of a panel


def size(rows: int, cols: int) -> int:
    """Bytes of an INT8_ROWS matrix."""
    if rows < 1 or cols < 1:
        raise ValueError(f"matrix is {rows} x {cols}, expected at least 1 x 1")
    return rows * -(-cols // UNIT) * UNIT


def sketched_size(rows: int, cols: int) -> int:
    """Bytes of an INT8_SKETCH matrix."""
    return size(rows, cols) + ternary_size(rows, cols) + 2 * 4 * _padded(rows)


def _padded(rows: int) -> int:
    return -(-rows // PANEL) * PANEL


def codes_of(data: Data, rows: int, cols: int) -> Codes:
    """The codes in the bytes of either encoding, with their padding: a view, (N, 64·⌈K/64⌉)."""
    raw, sizes = np.frombuffer(data, np.uint8), (size(rows, cols), sketched_size(rows, cols))
    if raw.size not in sizes:
        raise ValueError(f"{raw.size} bytes for a {rows} x {cols} matrix, expected {sizes[0]} or {sizes[1]}")
    return raw[: sizes[0]].view(np.int8).reshape(rows, -1)


def _steps_of(data: Data, rows: int) -> NDArray[np.float32]:
    """Step and deviation in the bytes of INT8_SKETCH: a view, (2, 16·⌈N/16⌉)."""
    return np.frombuffer(data, np.uint8)[-8 * _padded(rows) :].view("<f4").reshape(2, -1)


def pack(codes: Codes) -> Bytes:
    """int8 codes in -127 … 127, (N, K), to INT8_ROWS bytes. Raises ValueError on -128."""
    return _with_codes(codes, size(*codes.shape))


def pack_sketched(codes: Codes) -> Bytes:
    """int8 codes in -127 … 127, (N, K), to INT8_SKETCH bytes. Raises ValueError on -128."""
    data = _with_codes(codes, sketched_size(*codes.shape))
    write_sketch(data, *codes.shape)
    return data


def _with_codes(codes: Codes, total: int) -> Bytes:
    check_codes(codes, 127)
    data = np.zeros(total, np.uint8)
    codes_of(data, *codes.shape)[:, : codes.shape[1]] = codes
    return data


def write_sketch(data: Bytes, rows: int, cols: int) -> None:
    """Fill in the part of INT8_SKETCH bytes after the codes, computed from them."""
    codes, (step, deviation) = codes_of(data, rows, cols), _steps_of(data, rows)
    panels = data[codes.size : -8 * step.size].reshape(step.size // PANEL, -1)
    step[rows:] = deviation[rows:] = 0
    for first in range(0, rows, _ROWS):
        part = codes[first : first + _ROWS, : -(-cols // TERNARY_TILE_K) * TERNARY_TILE_K]
        here = slice(first, first + len(part))
        step[here], deviation[here] = _fit(part, cols)
        values = np.full((_padded(len(part)), part.shape[1]), 2, np.uint8)
        values[: len(part)] = _sketch(part, step[here])
        panels[first // PANEL : -(-here.stop // PANEL)] = pack_panels(values).reshape(-1, panels.shape[1])


def wrong_sketch(data: Data, rows: int, cols: int) -> int | None:
    """The first row in the bytes of INT8_SKETCH whose sketch, step or deviation is not that of its codes."""
    codes, (step, deviation) = codes_of(data, rows, cols), _steps_of(data, rows)
    panels = np.frombuffer(data, np.uint8)[codes.size : -8 * step.size].reshape(step.size // PANEL, -1)
    for first in range(0, rows, _ROWS):
        part = codes[first : first + _ROWS, :cols]
        here = slice(first, first + len(part))
        found = unpack_ternary(panels[first // PANEL : -(-here.stop // PANEL)], len(part), cols) + 1
        t, d = (x.astype(np.float32) for x in _fit(part, cols))
        right = (found == _sketch(part, t)).all(axis=1) & (step[here] == t) & (deviation[here] == d)
        if not right.all():
            return first + int(np.argmin(right))
    return None


def _sketch(codes: Codes, step: NDArray[np.floating]) -> Bytes:
    t = step[:, None].astype(np.int8)
    return (codes > -t).view(np.uint8) + (codes >= 0).view(np.uint8) + (codes >= t).view(np.uint8)


def _fit(codes: Codes, cols: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Step and deviation of each row. All sums are multiples of 1/4 that float64 represents exactly."""
    magnitude = np.abs(codes)
    squares = np.square(codes, dtype=np.int32).sum(axis=1, dtype=np.int64)
    step = np.maximum(np.rint(np.sqrt(squares / cols)), 1)
    outer = magnitude >= step[:, None].astype(np.int8)  # these represent 1.5 steps, the others 0.5
    all_sum = magnitude.sum(axis=1, dtype=np.int64)
    outer_sum = (magnitude * outer).sum(axis=1, dtype=np.int64)
    left = squares - step * (all_sum + 2 * outer_sum) + step**2 * (cols / 4 + 2 * outer.sum(axis=1))
    return step, np.sqrt(left / cols)


def unpack(data: Data, rows: int, cols: int) -> Codes:
    """Bytes of either encoding to int8 (N, K). The refused -128 is returned unchanged."""
    return codes_of(data, rows, cols)[:, :cols].copy()


def has_refused(codes: Data) -> bool:
    """Whether any code, padding included, is -128; for INT8_SKETCH, pass only the codes."""
    return any(bool((part == 0x80).any()) for part in blocks(np.frombuffer(codes, np.uint8)))


def steps_are_valid(data: Data, rows: int) -> bool:
    """Whether all steps and deviations in the bytes of INT8_SKETCH are finite and >= 0 (and not -0)."""
    steps = _steps_of(data, rows)
    return bool((np.isfinite(steps) & ~np.signbit(steps)).all())
