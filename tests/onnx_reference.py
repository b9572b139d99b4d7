"""The decoder of a packed file in numpy and fp64, straight from FORMAT.md: what exported graphs are held against.

Quantization is fp32, as bitnet.quant says; integer sums are exact. One text at a time, no cache.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export import Key, PackedFile
from bitnet_export.packed import encodings, records

Array = NDArray[np.float64]


class Reference:
    def __init__(self, file: PackedFile) -> None:
        self.file, self.config = file, file.configs[0]

    def logits(self, tokens: NDArray[np.int64]) -> Array:
        """(T,) token ids to (T, V)."""
        c = self.config
        x = c.embedding_scale * self.values("embedding")[tokens]
        if c.position == "learned":
            x = x + self.values("position")[: len(tokens)]
        for i in range(c.n_layers):
            x = x + c.residual_scale * self.norm(self.attention(self.norm(x, "attn_norm", i), i), "attn_post_norm", i)
            x = x + c.residual_scale * self.norm(self.feed_forward(self.norm(x, "ffn_norm", i), i), "ffn_post_norm", i)
        h = self.norm(x, "final_norm")
        y = self.product(h, "embedding" if c.tie_embeddings else "head")
        if c.head_bias:
            y = y + self.values("head", part=1)
        return c.logit_softcap * np.tanh(y / c.logit_softcap) if c.logit_softcap else y

    def attention(self, x: Array, i: int) -> Array:
        c = self.config.of_layer(i)
        q, k, v = (self.project(x, role, i).reshape(len(x), -1, c.head_dim).swapaxes(0, 1) for role in "qkv")
        q, k = self.norm(q, "q_norm", i), self.norm(k, "k_norm", i)
        if c.position == "rope":
            local = self.config.global_every and c.sliding_window
            frequencies = self.values("rope_local_frequencies" if local else "rope_frequencies").astype(np.float32)
            angle = (np.arange(len(x), dtype=np.float32)[:, None] * frequencies).astype(np.float64)
            q, k = rotate(q, angle, c), rotate(k, angle, c)
        shared = c.n_heads // c.n_kv_heads
        k, v = k.repeat(shared, 0), v.repeat(shared, 0)
        scores = q @ k.swapaxes(1, 2) * c.attention_scale
        if c.attention_softcap:
            scores = c.attention_softcap * np.tanh(scores / c.attention_softcap)
        distance = np.arange(len(x))[:, None] - np.arange(len(x))
        seen = (distance >= 0) & (distance < (c.sliding_window or len(x)))
        weights = np.where(seen, np.exp(scores - np.where(seen, scores, -np.inf).max(-1, keepdims=True)), 0)
        y = (weights / weights.sum(-1, keepdims=True) @ v).swapaxes(0, 1).reshape(len(x), -1)
        return self.project(self.norm(y, "attn_sub_norm", i), "o", i)

    def feed_forward(self, x: Array, i: int) -> Array:
        up = self.project(x, "up", i)
        h = (
            activation(self.project(x, "gate", i), self.config) * up
            if self.config.ffn == "gated"
            else activation(up, self.config)
        )
        return self.project(self.norm(h, "ffn_sub_norm", i), "down", i)

    def project(self, x: Array, role: str, i: int) -> Array:
        y = self.product(self.norm(x, f"{role}_linear_norm", i), role, i)
        return y + self.values(role, i, 1) if self.has(role, i, 1) else y

    def product(self, x: Array, role: str, i: int = records.NONE) -> Array:
        record = self.file.tensors[key(role, i)]
        if record.scope == encodings.SCALE_NONE:
            return x @ self.values(role, i).T
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

    def norm(self, x: Array, role: str, i: int = records.NONE) -> Array:
        if not self.has(role, i):
            return x
        if self.config.norm == "layer":
            x = x - x.mean(-1, keepdims=True)
        y = x / np.sqrt((x * x).mean(-1, keepdims=True) + self.config.norm_eps) * self.values(role, i)
        return y + self.values(role, i, 1) if self.has(role, i, 1) else y

    def has(self, role: str, i: int, part: int = 0) -> bool:
        return key(role, i, part) in self.file.tensors

    def values(self, role: str, i: int = records.NONE, part: int = 0) -> Array:
        record = self.file.tensors[key(role, i, part)]
        values = self.file.values(record).astype(np.float64)
        return values if record.rows > 1 else values[0]


def key(role: str, layer: int, part: int = 0) -> Key:
    return Key(0, layer, records.ROLE[role], records.NONE, part)


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
    return np.maximum(x, 0) ** (2 if c.activation == "relu2" else 1)
