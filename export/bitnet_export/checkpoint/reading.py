"""A text read by a program that runs models of any family: the engine here, others in their own folders."""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig

Floats = NDArray[np.float32]
Text = NDArray[Any]  # int64 (T,) token ids, or fp32 (T, D) vectors


def pooling_of(config: ModelConfig) -> str:
    """How a text becomes the vector that is compared: as the model says, or its last token's."""
    return "last" if config.pooling == "none" else config.pooling


class Reader(Protocol):
    """Reads one text in parts."""

    def restart(self) -> None: ...

    def read(self, part: Text, prefix: bool) -> Floats:
        """Logits (T, V). prefix: the part is the text's prefix."""

    def embed(self, text: Text) -> Floats:
        """The vector (D,) of a whole text; see `pooling_of`."""


class EngineReader:
    def __init__(self, session: Any, config: ModelConfig) -> None:
        """session: of bitnet_runtime."""
        self.session, self.config = session, config

    def restart(self) -> None:
        self.session.reset()

    def read(self, part: Text, prefix: bool) -> Floats:
        if part.ndim == 1:
            append = self.session.append_prefix if prefix else self.session.append
            logits: Floats = append(part.tolist(), logits="all")
        elif prefix:
            logits = self.session.append_prefix([-1] * len(part), part, logits="all")
        else:
            logits = self.session.append_embeddings(part, logits="all")
        return logits

    def behind(self, seen: Floats, tokens: Text) -> Floats:
        """Logits (T, V) of tokens after an image with the vectors `seen` (N, D); together they are a prefix."""
        if self.config.mask == "prefix":
            logits: Floats = self.session.append_prefix([-1] * len(seen) + tokens.tolist(), seen, logits="all")
            return logits[len(seen) :]
        self.session.append_embeddings(seen, logits="none")
        return self.read(tokens, False)

    def embed(self, text: Text) -> Floats:
        embed = self.session.embed if text.ndim == 1 else self.session.embed_embeddings
        vector: Floats = embed(text.tolist() if text.ndim == 1 else text, pooling_of(self.config))
        return vector


def drawn(config: ModelConfig, random: np.random.Generator, *shape: int) -> Text:
    """Random inputs for the model."""
    if config.input == "tokens":
        tokens = random.integers(0, config.vocab_size, shape)
        if config.image_token:
            tokens[tokens == config.image_token] = 0  # it would stand for a vector that is not there
        return tokens
    return random.standard_normal((*shape, config.dim), np.float32)


def whole(reader: Reader, config: ModelConfig, text: Text) -> Floats:
    """Logits (T, V) of a text, half of which is the prefix of a prefix model; its vector (1, D) without a head."""
    reader.restart()
    if not config.has_head:
        return reader.embed(text)[None]
    if config.mask != "prefix":
        return reader.read(text, False)
    first, rest = np.split(text, [len(text) // 2 or 1])
    return np.concatenate([reader.read(first, True)] + [reader.read(rest, False)] * (len(rest) > 0))
