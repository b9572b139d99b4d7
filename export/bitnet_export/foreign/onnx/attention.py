"""Attention in a graph: masks, RoPE, and the weighted sum of values.

Shape letters as in bitnet/model/transformer.py, and P tokens in the cache, S = P + T.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from onnx import TensorProto

from bitnet.config import ModelConfig

from .ops import Value
from .parts import LOWEST, Parts

Rotation = tuple[Value, Value]  # cos and sin, each (B, 1, T, rope_dim/2)
Cache = tuple[Value, Value]  # keys and values, (B, G, P or S, E) each


class Places(NamedTuple):
    """Mask and positions of the tokens of a pass."""

    mask: Value  # int64 (B, S), 0 for padding
    positions: Value  # int64 (B, T)
    kinds: Value | None  # int64 (B, T), 0 for the prefix, with the mask "prefix"


class Attention:
    """Attention of all layers; masks and angles are shared between layers where equal."""

    def __init__(self, parts: Parts, places: Places) -> None:
        self.parts, self.g, self.places = parts, parts.g, places
        self.masks: dict[int, Value] = {}  # by window
        self.rotations: dict[str, Rotation] = {}  # by role of the frequencies

    def layer(self, h: Value, i: int, past: Cache | None) -> tuple[Value, Cache]:
        """h: (B, T, D), normed. Returns the addition to the residual stream, and the keys and values so far."""
        parts, c = self.parts, self.parts.config.of_layer(i)
        q, k = (self.turned(parts.norm(self.heads(h, role, i), f"{role}_norm", i), i) for role in ("q", "k"))
        v = self.heads(h, "v", i).transpose(0, 2, 1, 3)
        if past:
            k, v = (self.g.op("Concat", old, new, axis=2) for old, new in zip(past, (k, v), strict=True))
        y = parts.norm(self.attend(q, k, v, c), "attn_sub_norm", i)
        return parts.project(y, "o", i), (k, v)

    def heads(self, h: Value, role: str, i: int) -> Value:
        """Queries, keys or values by head, (B, T, H or G, E)."""
        return self.parts.project(h, role, i).reshape(0, 0, -1, self.parts.config.head_dim)

    def attend(self, q_BHTE: Value, k_BGSE: Value, v_BGSE: Value, c: ModelConfig) -> Value:
        """Softmax(q·kᵀ)·v, (B, T, H·E). The query heads of a KV head are stacked as rows, so no key is copied."""
        g = self.g
        queries = (q_BHTE * c.attention_scale).reshape(0, c.n_kv_heads, -1, c.head_dim)
        scores = self.parts.softcap(g.op("MatMul", queries, k_BGSE.transpose(0, 1, 3, 2)), c.attention_softcap)
        weights = g.op("Softmax", g.op("Where", self.mask(c.sliding_window), scores, LOWEST), axis=-1)
        y_BHTE = g.op("MatMul", weights, v_BGSE).reshape(0, c.n_heads, -1, c.head_dim)
        return y_BHTE.transpose(0, 2, 1, 3).reshape(0, 0, c.n_heads * c.head_dim)

    # ---- masks ----

    def mask(self, window: int) -> Value:
        """The keys that a query sees: bool (B, 1, H/G·T, S) or (B, 1, 1, S), the same for every KV head."""
        if window not in self.masks:
            part, self.g.part = self.g.part, "mask"
            self.masks[window] = self._mask(window)
            self.g.part = part
        return self.masks[window]

    def _mask(self, window: int) -> Value:
        g, c, places = self.g, self.parts.config, self.places
        kept = g.op("Unsqueeze", places.mask.cast(TensorProto.BOOL), [1, 2])
        if c.mask == "bidirectional" and not window:
            return kept
        n_keys = g.op("Shape", places.mask, start=1, end=2)
        n_queries = g.op("Shape", places.positions, start=1, end=2)
        end, length = (g.op("Squeeze", n) for n in (n_keys, n_queries))
        queries = g.op("Unsqueeze", g.op("Range", end - length, end, 1), [1])
        distance = queries - g.op("Range", 0, end, 1)
        seen = kept
        if c.mask != "bidirectional":
            before = g.op("GreaterOrEqual", distance, 0)
            if places.kinds:
                before = g.op("Or", before, self._prefix(places.kinds, n_keys - n_queries))
            seen = g.op("And", seen, before)
        if window:
            seen = g.op("And", seen, g.op("Less", g.op("Abs", distance), window))
        return g.op("Tile", seen, [1, 1, c.n_heads // c.n_kv_heads, 1])

    def _prefix(self, kinds: Value, n_past: Value) -> Value:
        """Whether a key belongs to the prefix in this pass: bool (B, 1, 1, S). All see cached keys anyway."""
        g, none = self.g, np.array([0], np.int64)
        padding = g.op("Concat", none, n_past, none, none, axis=0)
        return g.op("Unsqueeze", g.op("Equal", g.op("Pad", kinds, padding, np.array(1, np.int64)), 0), [1, 2])

    # ---- RoPE ----

    def turned(self, x_BTHE: Value, i: int) -> Value:
        """Queries or keys of layer i, (B, H or G, T, E), rotated if the model has RoPE."""
        c, x = self.parts.config, x_BTHE.transpose(0, 2, 1, 3)
        if c.position != "rope":
            return x
        local = c.global_every > 0 and c.of_layer(i).sliding_window > 0  # FORMAT.md §2, global_every
        cos, sin = self.rotation("rope_local_frequencies" if local else "rope_frequencies")
        half, rest = c.rope_dim // 2, c.head_dim - c.rope_dim
        a, b, *same = self.g.split(x, [half, half, rest] if rest else [half, half])
        return self.g.op("Concat", a * cos - b * sin, b * cos + a * sin, *same, axis=-1)

    def rotation(self, frequencies: str) -> Rotation:
        """cos and sin of position · frequency: the angle is an fp32 product, as in the engine; cos and sin are fp64."""
        if frequencies not in self.rotations:
            g, c = self.g, self.parts.config
            part, g.part = g.part, frequencies
            place = g.op("Unsqueeze", self.places.positions.cast(TensorProto.FLOAT), [1, 3])
            if c.first_position:
                place = place + float(c.first_position)
            angle = (place * self.parts.matrices.vector(self.parts.record(frequencies))).cast(TensorProto.DOUBLE)
            cos, sin = (g.op(kind, angle).cast(TensorProto.FLOAT) * c.rope_attention_factor for kind in ("Cos", "Sin"))
            self.rotations[frequencies] = cos, sin
            g.part = part
        return self.rotations[frequencies]
