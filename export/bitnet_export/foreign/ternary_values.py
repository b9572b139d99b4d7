"""Ternary matrices whose source has one scale per block, or holds undeclared ternary floats.

Both become a `Ternary` with the widest scope that represents every value exactly: one scale per tensor,
per row, or per 128 weights of a row. Nothing is rounded or guessed: if no such scales exist, there is
no Ternary.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet_export.packed.layout import SCALE_GROUP_K

from .source import Floats, SourceError, Ternary

_CHUNK = 1 << 22  # weights looked at in one go: 16 MB as fp32


def ternary_values(matrix: Floats) -> Ternary | None:
    """The Ternary that equals a matrix of floats (N, K) bit for bit, or None.

    That is so when in each group of 128 weights along K every value is 0 or ± the same number.
    """
    rows, cols = matrix.shape
    codes = np.empty((rows, cols), np.int8)
    scales = np.empty((rows, -(-cols // SCALE_GROUP_K)), np.float32)
    starts = np.arange(0, cols, SCALE_GROUP_K)
    step = max(1, _CHUNK // cols)
    for first in range(0, rows, step):
        values = matrix.rows(first, min(first + step, rows))
        size = np.abs(values)
        largest = np.maximum.reduceat(size, starts, axis=1)
        if not ((size == 0) | (size == _spread(largest, SCALE_GROUP_K, cols))).all():  # NaN is neither
            return None
        codes[first : first + step] = np.sign(values)
        scales[first : first + step] = largest
    if not np.isfinite(scales).all():
        return None
    return with_widest_scope(codes, scales, SCALE_GROUP_K)


def with_widest_scope(codes: NDArray[np.int8], scales: NDArray[np.float32], group: int) -> Ternary:
    """codes (N, K) with one scale per `group` weights of a row, scales (N, ceil(K/group)), as a Ternary.

    A scale of 0 makes its codes 0; a negative one turns their signs. `codes` may be changed in place.
    Raises SourceError: a scale that is not a finite, normal number or 0; groups smaller than 128
    whose scales differ.
    """
    tiny = np.finfo(np.float32).tiny
    if not (np.isfinite(scales) & ((scales == 0) | (np.abs(scales) >= tiny))).all():
        raise SourceError("a scale is NaN, infinite or too small for a normal fp32 number")
    cols = codes.shape[1]
    if (scales <= 0).any():
        codes *= _spread(np.sign(scales).astype(np.int8), group, cols)
        scales = np.abs(scales)
    used = scales[scales > 0]
    if used.size == 0:
        return Ternary(codes, np.ones(1, np.float32))
    if (used == used[0]).all():
        return Ternary(codes, used[:1].copy())
    row = scales.max(axis=1, keepdims=True)
    if ((scales == 0) | (scales == row)).all():
        return Ternary(codes, np.where(row > 0, row, used[0])[:, 0])
    return Ternary(codes, _of_128(scales, group))


def _of_128(scales: NDArray[np.float32], group: int) -> NDArray[np.float32]:
    """Scales per `group` weights as scales per 128."""
    if group > SCALE_GROUP_K:
        scales, group = np.repeat(scales, group // SCALE_GROUP_K, axis=1), SCALE_GROUP_K
    largest = np.maximum.reduceat(scales, np.arange(0, scales.shape[1], SCALE_GROUP_K // group), axis=1)
    if not ((scales == 0) | (scales == _spread(largest, SCALE_GROUP_K // group, scales.shape[1]))).all():
        raise SourceError(
            f"scales differ within {SCALE_GROUP_K} weights (one for each {group}), "
            f"expected the same scale for {SCALE_GROUP_K} weights of a row, or more"
        )
    return np.where(largest > 0, largest, scales.max())


def _spread(values: NDArray[Any], group: int, cols: int) -> NDArray[Any]:
    """(N, ceil(cols/group)) -> (N, cols), each value for `group` columns."""
    return np.repeat(values, group, axis=1)[:, :cols]
