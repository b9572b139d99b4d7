"""A text model's packed file in numpy and fp64, straight from FORMAT.md: the reference for exported graphs.

Quantization is fp32, as in bitnet.quant; integer sums are exact. One text at a time, no cache.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export import PackedFile
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import Key

Array = NDArray[np.float64]
NONE = records.NONE


class Reference:
    def __init__(self, file: PackedFile) -> None:
        self.file, self.config = file, file.configs[0]

    def logits(self, text: NDArray[Any], prefix: int = 0) -> Array:
        """Logits (T, V) for T token ids, or T vectors (T, D). prefix: how many of them all others see."""
        c, h = self.config, self.hidden(text, prefix)
        y = self.product(h, "embedding" if c.tie_embeddings else "head")
        if c.head_bias:
            y = y + self.values("head", part=1)
        return c.logit_softcap * np.tanh(y / c.logit_softcap) if c.logit_softcap else y

    def vector(self, text: NDArray[Any]) -> Array:
        """The vector of a text, (D,), of length 1."""
        h = self.hidden(text)
        x: Array = {"last": h[-1], "first": h[0], "mean": h.mean(0)}[self.config.pooling]
        return x / np.linalg.norm(x)

    def hidden(self, text: NDArray[Any], prefix: int = 0) -> Array:
        """Hidden states (T, D) after the final norm."""
        c = self.config
        x = text.astype(np.float64) if text.ndim == 2 else c.embedding_scale * self.values("embedding")[text]
        if c.position in ("learned", "sinusoidal"):
            x = x + self.values("position")[: len(text)]
        x = self.norm(x, "embedding_norm")
        for i in range(c.n_layers):
            x = self.added(x, self.attention(self.norm(x, "attn_norm", i), i, prefix), "attn_post_norm", i)
            network = self.mixture if c.n_experts else self.feed_forward
            x = self.added(x, network(self.norm(x, "ffn_norm", i), i), "ffn_post_norm", i)
        return self.norm(x, "final_norm")

    def added(self, x: Array, y: Array, after: str, i: int) -> Array:
        if self.config.residual_norm:
            return self.norm(x + self.config.residual_scale * y, after, i)
        return x + self.config.residual_scale * self.norm(y, after, i)

    def attention(self, x: Array, i: int, prefix: int) -> Array:
        c = self.config.of_layer(i)
        q, k, v = (self.project(x, role, i).reshape(len(x), -1, c.head_dim).swapaxes(0, 1) for role in "qkv")
        q, k = self.norm(q, "q_norm", i), self.norm(k, "k_norm", i)
        if c.position == "rope":
            local = self.config.global_every and c.sliding_window
            frequencies = self.values("rope_local_frequencies" if local else "rope_frequencies").astype(np.float32)
            place = np.arange(c.first_position, c.first_position + len(x), dtype=np.float32)
            angle = (place[:, None] * frequencies).astype(np.float64)
            q, k = rotate(q, angle, c), rotate(k, angle, c)
        shared = c.n_heads // c.n_kv_heads
        k, v = k.repeat(shared, 0), v.repeat(shared, 0)
        scores = q @ k.swapaxes(1, 2) * c.attention_scale
        if c.attention_softcap:
            scores = c.attention_softcap * np.tanh(scores / c.attention_softcap)
        seen = visible(c, len(x), prefix)
        weights = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(-1, keepdims=True)), 0)
        y = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(x), -1)
        return self.project(self.norm(y, "attn_sub_norm", i), "o", i)

    def mixture(self, x: Array, i: int) -> Array:
        """Token by token: the most probable experts, ties to the first."""
        c, y = self.config, np.zeros_like(x)
        scores = self.product(x, "router", i)
        shares = np.exp(scores - scores.max(-1, keepdims=True))
        shares /= shares.sum(-1, keepdims=True)
        for token, share in enumerate(shares):
            chosen = np.argsort(-share, kind="stable")[: c.experts_per_token]
            total = share[chosen].sum() if c.normalize_routing else 1.0
            for expert in chosen:
                y[token] += share[expert] / total * self.feed_forward(x[token : token + 1], i, int(expert))[0]
        return y

    def feed_forward(self, x: Array, i: int, expert: int = NONE) -> Array:
        h = self.project(x, "up", i, expert)
        if self.config.ffn == "gated":
            h = activation(self.project(x, "gate", i, expert), self.config) * h
        else:
            h = activation(h, self.config)
        return self.project(self.norm(h, "ffn_sub_norm", i, expert), "down", i, expert)

    def project(self, x: Array, role: str, i: int, expert: int = NONE) -> Array:
        y = self.product(self.norm(x, f"{role}_linear_norm", i, expert), role, i, expert)
        return y + self.values(role, i, expert, 1) if self.has(role, i, expert, 1) else y

    def product(self, x: Array, role: str, i: int = NONE, expert: int = NONE) -> Array:
        record = self.file.tensors[key(role, i, expert)]
        if record.scope == encodings.SCALE_NONE:
            return x @ self.values(role, i, expert).T
        s = np.float32(127) / np.maximum(np.abs(x.astype(np.float32)).max(-1, keepdims=True), np.float32(1e-5))
        q = np.clip(np.rint(x.astype(np.float32) * s), -127, 127).astype(np.float64)
        codes, scales = self.file.codes(record).astype(np.float64), self.file.scales(record).astype(np.float64)
        if record.scope != encodings.SCALE_GROUP:
            return q @ codes.T * scales / s
        groups = range(0, record.cols, 128)
        return (
            sum(
                q[:, g : g + 128] @ codes[:, g : g + 128].T * scales.reshape(record.rows, -1)[:, g // 128]
                for g in groups
            )
            / s
        )

    def norm(self, x: Array, role: str, i: int = NONE, expert: int = NONE) -> Array:
        if not self.has(role, i, expert):
            return x
        if self.config.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * self.values(role, i, expert)
        return y + self.values(role, i, expert, 1) if self.has(role, i, expert, 1) else y

    def has(self, role: str, i: int, expert: int, part: int = 0) -> bool:
        return key(role, i, expert, part) in self.file.tensors

    def values(self, role: str, i: int = NONE, expert: int = NONE, part: int = 0) -> Array:
        record = self.file.tensors[key(role, i, expert, part)]
        values = self.file.values(record).astype(np.float64)
        return values if record.rows > 1 else values[0]


def key(role: str, layer: int, expert: int = NONE, part: int = 0) -> Key:
    return Key(0, layer, records.ROLE[role], expert, part)


def visible(c: ModelConfig, n: int, prefix: int) -> NDArray[np.bool_]:
    """(n, n): whether the token of a row sees that of a column."""
    distance = np.arange(n)[:, None] - np.arange(n)
    seen = np.ones_like(distance, bool) if c.mask == "bidirectional" else distance >= 0
    if c.mask == "prefix":
        seen = seen | (np.arange(n) < prefix)
    return seen & (abs(distance) < (c.sliding_window or n))


def rotate(x: Array, angle: Array, c: ModelConfig) -> Array:
    half = c.rope_dim // 2
    cos, sin = np.cos(angle) * c.rope_attention_factor, np.sin(angle) * c.rope_attention_factor
    a, b, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin, rest], -1)


def activation(x: Array, c: ModelConfig) -> Array:
    if c.activation == "silu":
        return x / (1 + np.exp(-x))
    if c.activation == "gelu":
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))
    if c.activation == "gelu_erf":
        return x * 0.5 * np.vectorize(math.erfc)(-x / math.sqrt(2))
    return np.maximum(x, 0) ** (2 if c.activation == "relu2" else 1)


def log_softmax(x: NDArray[Any]) -> NDArray[np.float64]:
    x = x - x.max(-1, keepdims=True).astype(np.float64)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def worst_of_rows(a: NDArray[Any], b: NDArray[Any]) -> NDArray[np.float64]:
    assert a.shape == b.shape and np.isfinite(a).all()
    return np.abs(log_softmax(a) - log_softmax(b)).max(-1).ravel()
