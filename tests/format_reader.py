"""From the bytes of a packed file to logits, in numpy, written from export/FORMAT.md alone.

It imports nothing of this project: the page is enough to write another engine. For text models without adapters and
drafts; sums are in fp64, one text at a time.
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]

NONE = 0xFFFF  # no layer, no expert
WORDS = {  # of a stack record, §2
    "mask": 1, "vocab_size": 2, "dim": 3, "n_layers": 4, "n_heads": 5, "n_kv_heads": 6, "head_dim": 7,
    "sliding_window": 10, "norm": 11, "norm_flags": 12, "ffn": 14, "activation": 15, "n_experts": 16,
    "experts_per_token": 17, "position": 18, "tie_embeddings": 21, "has_head": 28, "rope_dim": 29, "global_every": 30,
    "normalize_routing": 31, "first_position": 32,
}  # fmt: skip
FLOATS = {
    "norm_eps": 13, "rope_attention_factor": 19, "embedding_scale": 22, "residual_scale": 23, "attention_scale": 24,
    "attention_softcap": 25, "logit_softcap": 26,
}  # fmt: skip
ATTN_NORM, Q, K, V, Q_NORM, K_NORM, ATTN_SUB_NORM, O, ATTN_POST_NORM = range(1, 10)  # roles, §3
FFN_NORM, ROUTER, GATE, UP, FFN_SUB_NORM, DOWN, FFN_POST_NORM = range(10, 17)
LINEAR_NORM = 32  # before role r: 32 + r
EMBEDDING, POSITION, FINAL_NORM, HEAD, EMBEDDING_NORM, ROPE, ROPE_LOCAL = range(64, 71)
F32, F16, _, TERNARY_2BIT, TERNARY_5TRIT, INT8_ROWS, TERNARY_2BIT_ROWS, TERNARY_2BIT_COLUMNS, INT8_SKETCH = range(1, 10)

ACTIVATIONS: list[Callable[[Array], Array]] = [
    lambda x: np.maximum(x, 0) ** 2,
    lambda x: x / (1 + np.exp(-x)),
    lambda x: 0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    lambda x: np.maximum(x, 0),
    lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))),
]


class Tensor(NamedTuple):
    """A record of §3 with its bytes."""

    encoding: int
    scope: int
    rows: int
    cols: int
    data: bytes
    scales: bytes

    @property
    def values(self) -> Array:
        """(rows, cols), fp64."""
        return codes(self) * scales(self)


def align64(x: int) -> int:
    return -(-x // 64) * 64


def codes(t: Tensor) -> Array:
    """Codes, or floats of F32 and F16, (rows, cols): §4."""
    row, col = np.arange(t.rows)[:, None], np.arange(t.cols)[None]
    raw = np.frombuffer(t.data, np.uint8)
    if t.encoding in (F32, F16):
        return np.frombuffer(t.data, "<f4" if t.encoding == F32 else "<f2").reshape(t.rows, t.cols).astype(np.float64)
    if t.encoding in (INT8_ROWS, INT8_SKETCH):
        return raw[: t.rows * align64(t.cols)].view(np.int8).reshape(t.rows, -1)[:, : t.cols].astype(np.float64)
    if t.encoding == TERNARY_2BIT:
        tile = (row // 16 * -(-t.cols // 16) + col // 16) * 64
        return (raw[tile + 4 * (row % 16) + col % 4] >> (2 * (col % 16 // 4)) & 3) - 1.0
    if t.encoding == TERNARY_5TRIT:
        tile = (row // 16 * -(-t.cols // 20) + col // 20) * 64
        v, found = raw[tile + 4 * (row % 16) + col % 4].astype(np.int64), np.zeros((t.rows, t.cols))
        for f in range(5):
            found = np.where(col % 20 // 4 == f, (3 * v >> 8) - 1.0, found)
            v = 3 * v & 255
        return found
    assert t.encoding in (TERNARY_2BIT_ROWS, TERNARY_2BIT_COLUMNS), t.encoding
    line, i, n = (row, col, t.cols) if t.encoding == TERNARY_2BIT_ROWS else (col, row, t.rows)
    return (raw[line * -(-n // 256) * 64 + i // 64 * 16 + i % 16] >> (2 * (i % 64 // 16)) & 3) - 1.0


def scales(t: Tensor) -> Any:
    """Scales that broadcast against codes."""
    row, col = np.arange(t.rows)[:, None], np.arange(t.cols)[None]
    if t.scope == 3:
        of_groups = np.frombuffer(t.scales, "<f2").astype(np.float64)
        return of_groups[(row // 16 * -(-t.cols // 128) + col // 128) * 16 + row % 16]
    return np.frombuffer(t.scales, "<f4").astype(np.float64)[:, None] if t.scope else 1.0


class File:
    """The text stack of a packed file: words of its record by name, tensors by (layer, role, expert, part)."""

    def __init__(self, path: Path) -> None:
        raw = path.read_bytes()
        magic, version, flags, size, n = struct.unpack_from("<8sIIQI", raw)
        assert magic == b"\x89BITNET\n" and version == 3 and flags == 0 and size == len(raw)
        table = raw[64 : 64 + 32 * n]
        assert struct.unpack_from("<I", raw, 60)[0] == zlib.crc32(raw[:60] + table)
        sections, end = {}, 64 + 32 * n
        for kind, crc, offset, length, _ in struct.iter_unpack("<IIQQQ", table):
            assert offset == align64(end) and crc == zlib.crc32(raw[offset : offset + length])
            sections[kind], end = raw[offset : offset + length], offset + length
        stacks, records, data = sections[1], sections[2], sections[6]
        assert len(stacks) == 256
        self.words = {name: struct.unpack_from("<I", stacks, 4 * word)[0] for name, word in WORDS.items()}
        self.floats = {name: struct.unpack_from("<f", stacks, 4 * word)[0] for name, word in FLOATS.items()}
        self.tensors: dict[tuple[int, int, int, int], Tensor] = {}
        for record in struct.iter_unpack("<4H4B3I5Q", records):
            _, layer, role, expert, part, encoding, scope, _, _, rows, cols, at, size, at_scales, of_scales, _ = record
            parts = data[at : at + size], data[at_scales : at_scales + of_scales]
            self.tensors[layer, role, expert, part] = Tensor(encoding, scope, rows, cols, *parts)


class Reader:
    """The model of a file, one text at a time."""

    def __init__(self, path: Path) -> None:
        self.file = File(path)
        self.words, self.floats = self.file.words, self.file.floats

    def logits(self, ids: list[int], prefix: int = 0) -> Array:
        """(T, vocab_size). prefix: the tokens that a prefix mask shows to all."""
        y = self.linear(self.states(ids, prefix), EMBEDDING if self.words["tie_embeddings"] else HEAD)
        if self.words["tie_embeddings"]:
            y = y + self.bias(HEAD)
        return softcapped(y, self.floats["logit_softcap"])

    def states(self, ids: list[int], prefix: int = 0) -> Array:
        """(T, dim), after the final norm."""
        x = self.floats["embedding_scale"] * self.values(EMBEDDING)[ids]
        if self.words["position"] in (1, 2):
            x = x + self.values(POSITION)[: len(ids)]
        x = self.norm(x, EMBEDDING_NORM)
        for layer in range(self.words["n_layers"]):
            y = self.attention(self.norm(x, ATTN_NORM, layer), layer, prefix)
            x = self.added(x, y, ATTN_POST_NORM, layer)
            y = self.norm(x, FFN_NORM, layer)
            y = self.mixture(y, layer) if self.words["n_experts"] else self.network(y, layer, NONE)
            x = self.added(x, y, FFN_POST_NORM, layer)
        return self.norm(x, FINAL_NORM)

    def added(self, x: Array, y: Array, role: int, layer: int) -> Array:
        """With the norm after the sum (residual_norm) or before it (post_norm), if there is one."""
        s = self.floats["residual_scale"]
        if self.words["norm_flags"] >> 6 & 1:
            return self.norm(x + s * y, role, layer)
        return x + s * self.norm(y, role, layer)

    def attention(self, x: Array, layer: int, prefix: int) -> Array:
        n, kv, size = (self.words[name] for name in ("n_heads", "n_kv_heads", "head_dim"))
        q, k, v = (self.linear(x, role, layer).reshape(len(x), -1, size) for role in (Q, K, V))
        q, k = self.norm(q, Q_NORM, layer), self.norm(k, K_NORM, layer)
        every = self.words["global_every"]
        local = every > 0 and (layer + 1) % every != 0
        if self.words["position"] == 0:
            q, k = (self.turned(z, ROPE_LOCAL if local else ROPE) for z in (q, k))
        window = self.words["sliding_window"] if local or not every else 0
        seen, heads = self.seen(len(x), prefix, window), []
        for head in range(n):
            of = head * kv // n
            scores = softcapped(
                self.floats["attention_scale"] * q[:, head] @ k[:, of].T, self.floats["attention_softcap"]
            )
            heads.append(softmax(np.where(seen, scores, -np.inf)) @ v[:, of])
        return self.linear(self.norm(np.concatenate(heads, 1), ATTN_SUB_NORM, layer), O, layer)

    def seen(self, n: int, prefix: int, window: int) -> Array:
        """Whether token i sees token j, (n, n)."""
        i, j = np.arange(n)[:, None], np.arange(n)[None]
        seen = [j <= i, j >= 0, (j <= i) | (j < prefix)][self.words["mask"]]
        return seen & (abs(i - j) < window) if window else seen

    def turned(self, x: Array, role: int) -> Array:
        """RoPE: dimension i is paired with i + rope_dim/2. x: (T, heads, head_dim)."""
        half = self.words["rope_dim"] // 2
        position = np.arange(len(x), dtype=np.float32) + np.float32(self.words["first_position"])
        angle = (position[:, None] * self.values(role).astype(np.float32)).astype(np.float64)[:, None]
        cos, sin = (f(angle) * self.floats["rope_attention_factor"] for f in (np.cos, np.sin))
        a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
        return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)

    def network(self, x: Array, layer: int, expert: int) -> Array:
        act, h = ACTIVATIONS[self.words["activation"]], self.linear(x, UP, layer, expert)
        h = act(h) if self.words["ffn"] else act(self.linear(x, GATE, layer, expert)) * h
        return self.linear(self.norm(h, FFN_SUB_NORM, layer, expert), DOWN, layer, expert)

    def mixture(self, x: Array, layer: int) -> Array:
        shares, out = softmax(self.linear(x, ROUTER, layer)), np.zeros_like(x)
        for t, share in enumerate(shares):
            taken = np.argsort(-share, kind="stable")[: self.words["experts_per_token"]]
            total = share[taken].sum() if self.words["normalize_routing"] else 1.0
            for expert in taken:
                out[t] += share[expert] / total * self.network(x[t : t + 1], layer, int(expert))[0]
        return out

    def values(self, role: int, layer: int = NONE, expert: int = NONE) -> Array:
        return self.file.tensors[layer, role, expert, 0].values

    def bias(self, role: int, layer: int = NONE, expert: int = NONE) -> Any:
        found = self.file.tensors.get((layer, role, expert, 1))
        return found.values[0] if found else 0.0

    def linear(self, x: Array, role: int, layer: int = NONE, expert: int = NONE) -> Array:
        """x · Wᵀ, with x as int8 where the matrix has scales."""
        x = self.norm(x, LINEAR_NORM + role, layer, expert) if role < LINEAR_NORM else x
        matrix = self.file.tensors[layer, role, expert, 0]
        if matrix.scope:
            x = x.astype(np.float32)
            s = np.float32(127) / np.maximum(np.abs(x).max(-1, keepdims=True), np.float32(1e-5))
            x = np.rint(x * s) / s.astype(np.float64)
        return x @ matrix.values.T + self.bias(role, layer, expert)

    def norm(self, x: Array, role: int, layer: int = NONE, expert: int = NONE) -> Array:
        """x itself if the file has no such norm."""
        if (layer, role, expert, 0) not in self.file.tensors:
            return x
        x = x - x.mean(-1, keepdims=True) if self.words["norm"] == 1 else x
        x = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.floats["norm_eps"])
        return x * self.values(role, layer, expert)[0] + self.bias(role, layer, expert)


def softcapped(x: Array, cap: float) -> Array:
    return cap * np.tanh(x / cap) if cap else x


def softmax(x: Array) -> Array:
    p = np.exp(x - x.max(-1, keepdims=True))
    return p / p.sum(-1, keepdims=True)
