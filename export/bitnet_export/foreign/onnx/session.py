"""An exported graph in onnxruntime, on the CPU."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.checkpoint.reading import Floats

from .graph import writes
from .images import FEATURES, PIXELS

Texts = NDArray[Any]  # int64 (B, T) token ids, or fp32 (B, T, D)
Cache = list[Floats]


class OnnxModel:
    def __init__(
        self,
        model: Path,
        config: ModelConfig,
        *,
        threads: int = 0,
        replaced: Mapping[str, Floats] | None = None,
    ) -> None:
        """threads: 0: one per core. replaced: weights by name that replace the file's."""
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self.replaced = {k: onnxruntime.OrtValue.ortvalue_from_numpy(v) for k, v in (replaced or {}).items()}
        for name, value in self.replaced.items():  # the session keeps no reference to them
            options.add_initializer(name, value)
        self.session = onnxruntime.InferenceSession(str(model), options, providers=["CPUExecutionProvider"])
        self.config, layers = config, range(config.n_layers if writes(config) else 0)
        self.names = [f"past_key_values.{i}.{kind}" for i in layers for kind in ("key", "value")]
        self.empty = (config.n_kv_heads, 0, config.head_dim)

    def see(self, pixels: Floats) -> Floats:
        """Vectors of normalized images (B, C, S, S) from a vision stack: (B, N, width), or (B, width)."""
        name = FEATURES if self.config.pooling == "none" else "image_embeds"
        vectors: Floats = self.session.run([name], {PIXELS: pixels})[0]
        return vectors

    def run(
        self,
        text: Texts,
        cache: Cache | None = None,
        mask: NDArray[np.int64] | None = None,
        prefix: int = 0,
        features: Floats | None = None,
    ) -> tuple[Floats, Cache]:
        """Logits (B, T, V), or hidden states (B, T, D), of a text after the cached tokens, and the new cache.

        mask: (B, past + T), 0 for padding, which is on the left; None: no padding. prefix: how many tokens of
        the text are its prefix. features: (images, N, D), for the image tokens in it.
        """
        batch, length = text.shape[:2]
        cache = cache or [np.zeros((batch, *self.empty), np.float32)] * len(self.names)
        if mask is None:
            mask = np.ones((batch, (cache[0].shape[2] if cache else 0) + length), np.int64)
        feeds = self._feeds(text, mask) | dict(zip(self.names, cache, strict=True))
        if self.names:
            feeds["position_ids"] = np.maximum(mask.cumsum(1) - 1, 0)[:, -length:]
        if self.config.mask == "prefix":
            feeds["token_type_ids"] = np.tile(np.arange(length) >= prefix, (batch, 1)).astype(np.int64)
        if self.config.image_token:
            feeds[FEATURES] = np.empty((0, 1, self.config.dim), "f4") if features is None else features
        rows, *rest = self.session.run(None, feeds)
        return rows, rest[: len(cache)]

    def embed(self, text: Texts, mask: NDArray[np.int64] | None = None) -> Floats:
        """Vectors of whole texts, (B, D), as the model pools them. mask: (B, T), as in `run`."""
        mask = np.ones(text.shape[:2], np.int64) if mask is None else mask
        feeds = self._feeds(text, mask)
        if self.config.mask == "prefix":  # the text has no prefix
            feeds["token_type_ids"] = np.ones(text.shape[:2], np.int64)
        vectors: Floats = self.session.run(["sentence_embedding"], feeds)[0]
        return vectors

    def _feeds(self, text: Texts, mask: NDArray[np.int64]) -> dict[str, Any]:
        return {"input_ids" if text.ndim == 2 else "inputs_embeds": text, "attention_mask": mask}
