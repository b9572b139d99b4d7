"""Images in a graph: patches, their vectors in a decoder's input, and attention pooling.

Shape letters as in bitnet/model/transformer.py, and C channels, S pixels of a side, N vectors of an image.
"""

from __future__ import annotations

import numpy as np
from onnx import TensorProto

from .ops import Value
from .parts import LOWEST, Parts

PIXELS, FEATURES = "pixel_values", "image_features"


def patches(parts: Parts, pixels_BCSS: Value) -> Value:
    """The vectors of patches, row by row, after the class token, if there is one: (B, N, D)."""
    g, c = parts.g, parts.config
    side, size = c.image_size // c.patch_size, c.patch_size
    whole = pixels_BCSS
    if side * size < c.image_size:  # the remainder at the edge is cut off
        whole = g.op("Slice", whole, [0, 0], [side * size] * 2, [2, 3])
    grid = whole.reshape(0, c.channels, side, size, side, size).transpose(0, 2, 4, 1, 3, 5)
    x = parts.project(grid.reshape(0, side * side, c.channels * size * size), "patch")
    if c.class_token:
        first = parts.matrices.vector(parts.record("class_embedding"))
        shape = g.op("Concat", g.op("Shape", pixels_BCSS, start=0, end=1), [1, c.dim], axis=0)
        x = g.op("Concat", g.op("Expand", first, shape), x, axis=1)
    return x


def in_place(parts: Parts, x_BTD: Value, ids_BT: Value, features_nND: Value) -> Value:
    """x with image vectors in place of their token, in order. With too few vectors Gather fails."""
    g, c = parts.g, parts.config
    here = g.op("Equal", ids_BT, c.image_token)
    count = g.op("CumSum", here.cast(TensorProto.INT64).reshape(-1), 0)
    order = g.op("Where", here, g.op("Reshape", count, g.op("Shape", ids_BT)), 0)
    none = np.zeros((1, c.dim), np.float32)  # row 0, for tokens that are not images
    rows = g.op("Concat", none, features_nND.reshape(-1, c.dim), axis=0)
    return g.op("Where", g.op("Unsqueeze", here, [-1]), g.op("Gather", rows, order), x_BTD)


def pooled(parts: Parts, x_BTD: Value, mask_BT: Value) -> Value:
    """Attention pooling with one query, the probe (FORMAT.md §2, pooling by attention): (B, D)."""
    g, c = parts.g, parts.config
    probe = parts.matrices.vector(parts.record("pool_probe")).reshape(1, 1, c.dim)
    q, k, v = (
        parts.project(x, role).reshape(0, -1, c.n_heads, c.head_dim).transpose(0, 2, 1, 3)
        for x, role in ((probe, "pool_q"), (x_BTD, "pool_k"), (x_BTD, "pool_v"))
    )
    scores = g.op("MatMul", q * c.attention_scale, k.transpose(0, 1, 3, 2))
    seen = g.op("Unsqueeze", mask_BT.cast(TensorProto.BOOL), [1, 2])
    y_BHTE = g.op("MatMul", g.op("Softmax", g.op("Where", seen, scores, LOWEST), axis=-1), v)
    y = parts.project(y_BHTE.transpose(0, 2, 1, 3).reshape(0, 0, c.n_heads * c.head_dim), "pool_o")
    added = parts.project(parts.activation(parts.project(parts.norm(y, "pool_norm"), "pool_up")), "pool_down")
    return (y + added).reshape(-1, c.dim)
