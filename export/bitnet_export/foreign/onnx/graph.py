"""The model as an ONNX graph, to be read from top to bottom like forward.c and bitnet/model/transformer.py.

    x = norm( embedding[token] + position )
    for each layer:
        x = added( x, o( sub_norm( attention( rope(q), rope(k), v ))))     q, k, v of norm(x)
        x = added( x, down( sub_norm( act(gate) · up )))                   gate, up of norm(x)
    logits = head( norm(x) )

A generating model, with a head and a mask that is not bidirectional, has a KV cache. Any other takes whole
texts. A vision stack is a separate graph. Names of inputs and outputs are those of Hugging Face optimum.
"""

from __future__ import annotations

import numpy as np
from onnx import ModelProto, TensorProto

from bitnet.config import ModelConfig, not_yet
from bitnet_export.packed import encodings
from bitnet_export.packed.reader import PackedFile, PackedFormatError

from . import images
from .attention import Attention, Cache, Places
from .feed_forward import feed_forward
from .ops import Graph, Value
from .parts import Parts

_BATCH, _LENGTH, _PAST, _TOTAL = "batch", "length", "past", "past + length"


def unsupported(file: PackedFile, form: str) -> list[str]:
    """The features of a file that the graph cannot express; empty if it can express all."""
    found = [problem for config in file.configs for problem in not_yet(config)]
    found += [
        f"it contains adapters (adapter_rank = {config.adapter_rank}), which no graph has; give the model without them"
        for config in file.configs
        if config.adapters
    ]
    if file.configs[0].image_token and any(seeing.pooling != "none" for seeing in file.configs[1:]):
        found.append(
            "its vision stack has a pooling, so its graph gives no vectors that a decoder takes; "
            "make the model with vision.pooling = none"
        )
    if not found:
        try:
            file.config  # noqa: B018  (raises if there is none)
        except PackedFormatError as error:
            found.append(str(error))
    if form == "int8" and any(record.scope == encodings.SCALE_GROUP for record in file.tensors.values()):
        found.append("it has one scale per 128 weights, which the form int8 has not; add --form 2bit or --form float")
    return found


def writes(config: ModelConfig) -> bool:
    """Whether a model generates text, token by token with a KV cache."""
    return config.has_head and config.mask != "bidirectional"


def build(graph: Graph, file: PackedFile, form: str, stack: int = 0) -> ModelProto:
    """The graph of a stack; the bytes of its weights go to the graph's file. `unsupported` has to be empty."""
    return _Model(graph, file, form, stack).build()


class _Model(Parts):
    def build(self) -> ModelProto:
        g, c = self.g, self.config
        given = self.given()
        seen = self.seen()
        places = self.places(given, cached=writes(c))
        cache: list[int | str] = [_BATCH, c.n_kv_heads, _PAST, c.head_dim]
        past: list[Cache | None] = [None] * c.n_layers
        if writes(c):
            past = [self.past(i, cache) for i in range(c.n_layers)]

        g.part = "embedding"
        x = self.entering(given, seen, places)
        attention, present = Attention(self, places), []
        for i in range(c.n_layers):
            g.part = f"layers.{i}/attention"
            y, kept = attention.layer(self.norm(x, "attn_norm", i), i, past[i])
            x = self.added(x, y, "attn_post_norm", i)
            g.part = f"layers.{i}/feed_forward"
            x = self.added(x, feed_forward(self, self.norm(x, "ffn_norm", i), i), "ffn_post_norm", i)
            present.append(kept)

        g.part = "head"
        self.outputs(self.norm(x, "final_norm"), places.mask)
        cache[2] = _TOTAL
        for i, kept in enumerate(present if writes(c) else []):
            for kind, value in zip(("key", "value"), kept, strict=True):
                g.output(f"present.{i}.{kind}", value, TensorProto.FLOAT, cache)
        return g.model(c.name, producer_name="bitnet-edge")

    # ---- inputs ----

    def given(self) -> Value:
        """Token ids (B, T), or vectors (B, T, D), or pixels (B, C, S, S)."""
        c = self.config
        if c.input == "tokens":
            return self.g.input("input_ids", TensorProto.INT64, [_BATCH, _LENGTH])
        if c.input == "images":
            return self.g.input(images.PIXELS, TensorProto.FLOAT, [_BATCH, c.channels, c.image_size, c.image_size])
        return self.g.input("inputs_embeds", TensorProto.FLOAT, [_BATCH, _LENGTH, self.config.dim])

    def seen(self) -> Value | None:
        """Vectors of images, in the order of their places: (images, N, D)."""
        if not self.config.image_token:
            return None
        return self.g.input(images.FEATURES, TensorProto.FLOAT, ["images", "vectors", self.config.dim])

    def places(self, given: Value, cached: bool) -> Places:
        """For whole texts, positions follow from the padding mask; images have no padding."""
        if self.config.input == "images":
            n = self.config.max_context
            shape = self.g.op("Concat", self.g.op("Shape", given, start=0, end=1), [n], axis=0)
            return Places(self.g.op("Expand", [1], shape), self.g.constant(np.arange(n)[None]), None)
        g, size = self.g, [_BATCH, _LENGTH]
        mask = g.input("attention_mask", TensorProto.INT64, [_BATCH, _TOTAL] if cached else size)
        if not cached:
            g.part = "positions"
            positions = g.op("Max", g.op("Sub", g.op("CumSum", mask, 1), 1), 0)
        else:
            positions = g.input("position_ids", TensorProto.INT64, size)
        prefix = self.config.mask == "prefix"
        return Places(mask, positions, g.input("token_type_ids", TensorProto.INT64, size) if prefix else None)

    def past(self, i: int, shape: list[int | str]) -> Cache:
        key, value = (
            self.g.input(f"past_key_values.{i}.{kind}", TensorProto.FLOAT, shape) for kind in ("key", "value")
        )
        return key, value

    def entering(self, given: Value, seen: Value | None, places: Places) -> Value:
        """The input of the first layer, (B, T, D)."""
        c, x = self.config, given
        if c.input == "images":
            x = images.patches(self, given)
        if c.input == "tokens":
            x = self.matrices.rows(given, self.record("embedding")) * c.embedding_scale
        if seen:
            x = images.in_place(self, x, given, seen)
        if c.position in ("learned", "sinusoidal"):
            x = x + self.matrices.rows(places.positions, self.record("position"))
        return self.norm(x, "embedding_norm")

    def added(self, x: Value, y: Value, after: str, i: int) -> Value:
        """x + y; a norm after the sublayer, if the model has one, is applied to y or to the sum."""
        scale = self.config.residual_scale
        if self.config.residual_norm:
            return self.norm(x + y * scale, after, i)
        return x + self.norm(y, after, i) * scale

    # ---- outputs ----

    def outputs(self, hidden: Value, mask: Value) -> None:
        g, c = self.g, self.config
        if c.has_head:
            g.output("logits", self.logits(hidden), TensorProto.FLOAT, [_BATCH, _LENGTH, c.vocab_size])
        else:
            length = c.max_context if c.input == "images" else _LENGTH
            states, width = hidden, c.dim
            if c.input != "images" and c.pooling == "none":
                states, width = self.projected(hidden), c.width
            g.output("last_hidden_state", states, TensorProto.FLOAT, [_BATCH, length, width])
            if c.input == "images" and c.pooling == "none":
                features = self.projected(hidden)
                g.output(images.FEATURES, features, TensorProto.FLOAT, [_BATCH, length, c.width])
        if c.pooling != "none" and not writes(c):
            name = "image_embeds" if c.input == "images" else "sentence_embedding"
            g.output(name, self.pooled(hidden, mask), TensorProto.FLOAT, [_BATCH, c.width])

    def logits(self, x: Value) -> Value:
        """Logits (B, T, V)."""
        c = self.config
        logits = self.matrices.head(x, self.record("embedding" if c.tie_embeddings else "head"))
        if c.head_bias:
            logits = logits + self.matrices.vector(self.record("head", part=1))
        return self.softcap(logits, c.logit_softcap)

    def projected(self, x: Value) -> Value:
        return self.project(x, "projector") if self.config.out_dim else x

    def pooled(self, x: Value, mask: Value) -> Value:
        """One vector of length 1 for each text or image, (B, width), without padding."""
        g, kept = self.g, mask.cast(TensorProto.FLOAT)
        if self.config.pooling == "attention":
            x = images.pooled(self, x, mask)
        elif self.config.pooling == "mean":
            kept = g.op("Unsqueeze", kept, [-1])
            x = g.op("ReduceSum", x * kept, [1], keepdims=0) / g.op("ReduceSum", kept, [1], keepdims=0)
        else:
            last = int(self.config.pooling == "last")
            x = g.op("GatherND", x, g.op("ArgMax", kept, axis=1, select_last_index=last), batch_dims=1)
        x = self.projected(x)
        length = g.op("Sqrt", g.op("ReduceSum", x * x, [-1], keepdims=1))
        return x / g.op("Max", length, 1e-12)
