"""Floats that are ternary already are recognised exactly, and nothing else is."""

import numpy as np
import pytest

from bitnet_export.foreign.source import Floats, SourceError
from bitnet_export.foreign.ternary_values import ternary_values, with_widest_scope

RNG = np.random.default_rng(0)


def dense(codes, scales):
    """codes · scales, the scale of a group of 128 repeated."""
    if scales.ndim == 2:
        return codes * np.repeat(scales, 128, axis=1)[:, : codes.shape[1]]
    return codes * scales[:, None]


def codes_of(rows, cols):
    codes = RNG.integers(-1, 2, (rows, cols)).astype(np.int8)
    codes[:, ::32] = 1  # no block is all zero, which would hide its scale
    return codes


@pytest.mark.parametrize("cols", [5, 128, 300])
@pytest.mark.parametrize("scope", ["tensor", "row", "group"])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_recognised(cols, scope, dtype):
    rows, groups = 7, -(-cols // 128)
    codes = codes_of(rows, cols)
    shape = {"tensor": (1,), "row": (rows,), "group": (rows, groups)}[scope]
    scales = RNG.uniform(0.01, 2, shape).astype(dtype).astype(np.float32)
    found = ternary_values(Floats.of(dense(codes, scales).astype(np.float32)))
    assert np.array_equal(found.codes, codes)
    expected = scales[:, 0] if scope == "group" and groups == 1 else scales
    assert found.scales.shape == expected.shape
    assert np.array_equal(found.scales, expected)


def test_one_value_off_is_not_ternary():
    values = dense(codes_of(6, 200), np.float32([0.3])).astype(np.float32)
    row, col = np.argwhere(values != 0)[-1]
    values[row, col] = np.nextafter(values[row, col], np.float32(9))
    assert ternary_values(Floats.of(values)) is None


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_not_finite_is_not_ternary(bad):
    values = dense(codes_of(3, 140), np.float32([0.5])).astype(np.float32)
    values[1, 130] = bad
    assert ternary_values(Floats.of(values)) is None


def test_zero_groups_rows_and_matrices():
    values = dense(codes_of(4, 256), np.float32([0.5])).astype(np.float32)
    values[1], values[2, 128:] = 0, 0
    found = ternary_values(Floats.of(values))
    assert found.scales.tolist() == [0.5] and np.array_equal(dense(found.codes, found.scales), values)
    rows = values * np.float32([[1], [1], [2], [3]])
    found = ternary_values(Floats.of(rows))
    assert found.scales.shape == (4,) and np.array_equal(dense(found.codes, found.scales), rows)
    found = ternary_values(Floats.of(np.zeros((3, 9), np.float32)))
    assert not found.codes.any() and found.scales.tolist() == [1.0]


@pytest.mark.parametrize("group", [32, 64, 128, 256])
def test_blocks_of_other_sizes(group):
    codes, scales = codes_of(3, 512), RNG.uniform(0.5, 2, (3, 4)).astype(np.float32)
    if group == 256:
        scales = np.repeat(scales[:, ::2], 2, axis=1)
    blocks = scales[:, ::2] if group == 256 else np.repeat(scales, 128 // group, axis=1)
    found = with_widest_scope(codes.copy(), blocks, group)
    assert np.array_equal(found.codes, codes) and np.array_equal(found.scales, scales)


def test_zero_and_negative_scales():
    codes = codes_of(2, 256)
    scales = np.float32([[0.5, -0.5], [0, 0.5]])
    found = with_widest_scope(codes.copy(), scales, 128)
    assert found.scales.tolist() == [0.5]
    assert np.array_equal(dense(found.codes, found.scales), dense(codes, scales))


def test_a_group_of_64_with_its_own_scale_is_refused():
    scales = np.float32([[0.5, 0.5, 0.25, 0.5]])
    with pytest.raises(SourceError, match=r"scales differ within 128 weights \(one for each 64\)"):
        with_widest_scope(codes_of(1, 256), scales, 64)


@pytest.mark.parametrize("bad", [np.nan, np.inf, 1e-45])
def test_bad_scales_are_refused(bad):
    with pytest.raises(SourceError, match="NaN, infinite or too small"):
        with_widest_scope(codes_of(1, 256), np.float32([[0.5, bad]]), 128)
