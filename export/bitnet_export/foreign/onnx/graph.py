"""The decoder as an ONNX graph, read from top to bottom like forward.c and bitnet/model/transformer.py.

    x = embedding[token]
    for each layer:
        x += o( sub_norm( attention( rope(q), rope(k), v )))     q, k, v of norm(x)
        x += down( sub_norm( act(gate) · up ))                   gate, up of norm(x)
    logits = head( norm(x) )

Shape letters as in bitnet/model/transformer.py, and P tokens in the cache, S = P + T. Names of inputs and
outputs are those of Hugging Face optimum.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto

from bitnet.config import ModelConfig
from bitnet_export.packed import encodings
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import NONE, ROLE, Key, Record

from .matrices import Matrices
from .ops import Graph, Value

_BATCH, _LENGTH, _PAST, _TOTAL = "batch", "length", "past", "past + length"
_LOWEST = float(np.finfo(np.float32).min)  # a score that weighs nothing; finite, so that a row of padding is no NaN

Rotation = tuple[Value, Value]  # cos and sin, each (B, 1, T, rope_dim/2)


def unsupported(file: PackedFile, form: str) -> list[str]:
    """What the graph cannot say of a file, by name; empty when it can say all."""
    limits: dict[str, tuple[object, ...]] = {
        "input": ("tokens",),
        "mask": ("causal",),
        "has_head": (True,),
        "n_experts": (0,),
        "position": ("rope", "learned", "none"),
    }
    config = file.configs[0]
    found = [
        f"{field} = {getattr(config, field)!r} (only {' or '.join(repr(value) for value in allowed)})"
        for field, allowed in limits.items()
        if getattr(config, field) not in allowed
    ]
    if len(file.configs) > 1:
        found.append(f"{len(file.configs)} stacks (only 1)")
    if form == "int8" and any(record.scope == encodings.SCALE_GROUP for record in file.tensors.values()):
        found.append("one scale per 128 weights (only in the forms 2bit and float)")
    return found


def build(graph: Graph, file: PackedFile, form: str) -> ModelProto:
    """The model; the bytes of its weights go to the graph's file. `unsupported` is empty."""
    return _Decoder(graph, file, form).build()


class _Decoder:
    def __init__(self, graph: Graph, file: PackedFile, form: str) -> None:
        self.g, self.file = graph, file
        self.config = file.configs[0]
        self.matrices = Matrices(graph, file, form)
        self.masks: dict[int, Value] = {}  # by window
        self.rotations: dict[str, Rotation] = {}  # by role of the frequencies

    def build(self) -> ModelProto:
        g, c = self.g, self.config
        cache: list[int | str] = [_BATCH, c.n_kv_heads, _PAST, c.head_dim]
        ids = g.input("input_ids", TensorProto.INT64, [_BATCH, _LENGTH])
        self.attention_mask = g.input("attention_mask", TensorProto.INT64, [_BATCH, _TOTAL])
        self.positions = g.input("position_ids", TensorProto.INT64, [_BATCH, _LENGTH])
        past = [
            [g.input(f"past_key_values.{i}.{kind}", TensorProto.FLOAT, cache) for kind in ("key", "value")]
            for i in range(c.n_layers)
        ]

        g.part = "embedding"
        x = self.matrices.rows(ids, self.record("embedding")) * c.embedding_scale
        if c.position == "learned":
            x = x + self.matrices.rows(self.positions, self.record("position"))
        present = []
        for i in range(c.n_layers):
            x, kept = self.layer(i, x, *past[i])
            present.append(kept)
        g.part = "head"
        logits = self.head(self.norm(x, "final_norm"))

        g.output("logits", logits, TensorProto.FLOAT, [_BATCH, _LENGTH, c.vocab_size])
        cache[2] = _TOTAL
        for i, kept in enumerate(present):
            for kind, value in zip(("key", "value"), kept, strict=True):
                g.output(f"present.{i}.{kind}", value, TensorProto.FLOAT, cache)
        return g.model(c.name, producer_name="bitnet-edge")

    def layer(self, i: int, x: Value, past_key: Value, past_value: Value) -> tuple[Value, tuple[Value, Value]]:
        """x: (B, T, D). Returns the new x and the keys and values so far, (B, G, S, E) each."""
        g, c = self.g, self.config.of_layer(i)
        g.part = f"layers.{i}/attention"
        h = self.norm(x, "attn_norm", i)
        q, k = (self.heads(h, role, i) for role in ("q", "k"))
        v = self.split_heads(self.project(h, "v", i))
        if c.position == "rope":
            rotation = self.rotation("rope_local_frequencies" if self.is_local(i) else "rope_frequencies")
            q, k = self.rotate(q, *rotation), self.rotate(k, *rotation)
        keys = g.op("Concat", past_key, k, axis=2)
        values = g.op("Concat", past_value, v, axis=2)
        y = self.norm(self.attention(q, keys, values, c), "attn_sub_norm", i)
        x = x + self.norm(self.project(y, "o", i), "attn_post_norm", i) * c.residual_scale

        g.part = f"layers.{i}/feed_forward"
        h = self.norm(x, "ffn_norm", i)
        if c.ffn == "gated":
            h = self.activation(self.project(h, "gate", i)) * self.project(h, "up", i)
        else:
            h = self.activation(self.project(h, "up", i))
        y = self.project(self.norm(h, "ffn_sub_norm", i), "down", i)
        return x + self.norm(y, "ffn_post_norm", i) * c.residual_scale, (keys, values)

    def head(self, x: Value) -> Value:
        """Logits (B, T, V)."""
        c = self.config
        logits = self.matrices.head(x, self.record("embedding" if c.tie_embeddings else "head"))
        if c.head_bias:
            logits = logits + self.matrices.vector(self.record("head", part=1))
        return self.softcap(logits, c.logit_softcap)

    # ---- attention ----

    def attention(self, q_BHTE: Value, k_BGSE: Value, v_BGSE: Value, c: ModelConfig) -> Value:
        """Softmax(q·kᵀ)·v, (B, T, H·E). The queries of a key's head lie one below the other: no key is copied."""
        g = self.g
        queries = (q_BHTE * c.attention_scale).reshape(0, c.n_kv_heads, -1, c.head_dim)
        scores = self.softcap(g.op("MatMul", queries, k_BGSE.transpose(0, 1, 3, 2)), c.attention_softcap)
        weights = g.op("Softmax", g.op("Where", self.mask(c.sliding_window), scores, _LOWEST), axis=-1)
        y_BHTE = g.op("MatMul", weights, v_BGSE).reshape(0, c.n_heads, -1, c.head_dim)
        return y_BHTE.transpose(0, 2, 1, 3).reshape(0, 0, c.n_heads * c.head_dim)

    def mask(self, window: int) -> Value:
        """What a query sees: bool (B, 1, H/G·T, S), the same for every group of heads."""
        if window not in self.masks:
            g, part = self.g, self.g.part
            g.part = "mask"
            n_keys = g.op("Shape", self.attention_mask, start=1, end=2)
            n_queries = g.op("Shape", self.positions, start=1, end=2)
            end, length = (g.op("Squeeze", n) for n in (n_keys, n_queries))
            keys = g.op("Range", 0, end, 1)
            queries = g.op("Unsqueeze", g.op("Range", end - length, end, 1), [1])
            seen = g.op("LessOrEqual", keys, queries)
            if window:
                seen = g.op("And", seen, g.op("Less", queries - keys, window))
            kept = g.op("Unsqueeze", self.attention_mask.cast(TensorProto.BOOL), [1, 2])
            heads = self.config.n_heads // self.config.n_kv_heads
            self.masks[window] = g.op("Tile", g.op("And", kept, seen), [1, 1, heads, 1])
            g.part = part
        return self.masks[window]

    def is_local(self, i: int) -> bool:
        """Whether layer i turns by the frequencies of local layers (FORMAT.md §2, global_every)."""
        return self.config.global_every > 0 and self.config.of_layer(i).sliding_window > 0

    def rotation(self, frequencies: str) -> Rotation:
        """cos and sin of position · frequency: the angle an fp32 product, as in the engine, its functions in fp64."""
        if frequencies not in self.rotations:
            g, part = self.g, self.g.part
            g.part = frequencies
            place = g.op("Unsqueeze", self.positions.cast(TensorProto.FLOAT), [1, 3])
            angle = (place * self.matrices.vector(self.record(frequencies))).cast(TensorProto.DOUBLE)
            cos, sin = (
                g.op(kind, angle).cast(TensorProto.FLOAT) * self.config.rope_attention_factor for kind in ("Cos", "Sin")
            )
            self.rotations[frequencies] = cos, sin
            g.part = part
        return self.rotations[frequencies]

    def rotate(self, x_BHTE: Value, cos: Value, sin: Value) -> Value:
        """Turn each pair (i, i + rope_dim/2) of a head; dimensions past rope_dim stay."""
        half, rest = self.config.rope_dim // 2, self.config.head_dim - self.config.rope_dim
        a, b, *same = self.g.split(x_BHTE, [half, half, rest] if rest else [half, half])
        return self.g.op("Concat", a * cos - b * sin, b * cos + a * sin, *same, axis=-1)

    def heads(self, h: Value, role: str, i: int) -> Value:
        """Queries or keys before they turn, (B, H or G, T, E)."""
        x = self.project(h, role, i).reshape(0, 0, -1, self.config.head_dim)
        return self.norm(x, f"{role}_norm", i).transpose(0, 2, 1, 3)

    def split_heads(self, x: Value) -> Value:
        return x.reshape(0, 0, -1, self.config.head_dim).transpose(0, 2, 1, 3)

    # ---- what layers are made of ----

    def project(self, x: Value, role: str, i: int) -> Value:
        """A linear layer with its bias, and the norm before it where the model has one."""
        y = self.matrices.linear(self.norm(x, f"{role}_linear_norm", i), self.record(role, i))
        bias = self.find(role, i, part=1)
        return y + self.matrices.vector(bias) if bias else y

    def norm(self, x: Value, role: str, i: int = NONE) -> Value:
        """RMS or layer norm over the last dimension; x itself where the model has none."""
        gain, bias = self.find(role, i), self.find(role, i, part=1)
        if gain is None:
            return x
        g = self.g
        if self.config.norm == "layer":
            x = x - g.op("ReduceMean", x, [-1], keepdims=1)
        square = g.op("ReduceMean", g.op("Pow", x, 2.0), [-1], keepdims=1)
        y = x / g.op("Sqrt", square + self.config.norm_eps) * self.matrices.vector(gain)
        return y + self.matrices.vector(bias) if bias else y

    def activation(self, x: Value) -> Value:
        g, kind = self.g, self.config.activation
        if kind == "silu":
            return x * g.op("Sigmoid", x)
        if kind == "gelu":
            return g.op("Gelu", x, approximate="tanh")
        y = g.op("Relu", x)
        return y * y if kind == "relu2" else y

    def softcap(self, x: Value, cap: float) -> Value:
        return self.g.op("Tanh", x / cap) * cap if cap else x

    # ---- tensors of the file ----

    def find(self, role: str, layer: int = NONE, part: int = 0) -> Record | None:
        return self.file.tensors.get(Key(0, layer, ROLE[role], NONE, part))

    def record(self, role: str, layer: int = NONE, part: int = 0) -> Record:
        return self.file.tensors[Key(0, layer, ROLE[role], NONE, part)]
