"""The log-probabilities that a model gives to tokens, or its vectors: by the engine and by torch, for every family.

A causal model predicts each token from those before it, a prefix model what follows the prefix, and a
bidirectional model with a head the tokens that are hidden from it; one without a head gives the vector of a text.
A model that takes vectors gets random ones: its logits are as good a comparison as those of real text. A model that
sees images predicts what follows an image; a vision stack gives the vectors of images.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig

from .findings import Scores
from .pictures import drawn_images, engine_sees, normalized
from .reading import EngineReader, Floats, pooling_of

if TYPE_CHECKING:
    from bitnet.model.transformer import Transformer
    from bitnet_runtime import Model, Session

MAX_LOGITS = 1 << 24  # that torch computes at a time: 128 MB in fp64

NOTHING = -100  # the target of a position that does not count; bitnet.data.dataset.IGNORED, without torch


@dataclass(frozen=True)
class Texts:
    """n texts of T tokens each."""

    inputs: NDArray[Any]  # (n, T) token ids, or (n, T, D) vectors, or (n, C, S, S) images of a vision stack
    targets: NDArray[np.int64] | None = None  # (n, T), what each position should predict; None: no head
    prefixes: NDArray[np.int64] | None = None  # (n,), tokens of each text that all others see
    hidden: bool = False  # each target is at its own position, not at the one before
    images: Floats | None = None  # (n, C, S, S), from 0 to 1: the one at the beginning of each text
    places: int = 0  # tokens of each text that stand for the image

    def __getitem__(self, rows: slice) -> Texts:
        given: dict[str, Any] = {
            f.name: value for f in fields(self) if isinstance(value := getattr(self, f.name), np.ndarray)
        }
        return replace(self, **{name: value[rows] for name, value in given.items()})

    def __len__(self) -> int:
        return len(self.inputs)

    @property
    def length(self) -> int:
        """Tokens of each text, including the last, which is only a target, without the places of an image."""
        return int(self.inputs.shape[1]) - self.places + (self.targets is not None and not self.hidden)

    @property
    def what(self) -> str:
        """What is compared, in words."""
        if self.targets is None:
            return "vectors of images" if self.inputs.ndim == 4 else "vectors of texts"
        if self.images is not None:
            return "tokens behind an image"
        return "masked tokens" if self.hidden else "tokens behind a prefix" if self.prefixes is not None else "tokens"


def texts_of(config: ModelConfig, ids: NDArray[np.int64], mask_token: int = 0) -> Texts:
    """Windows (n, T) of token ids as texts for a model. mask_token: stands for a masked token."""
    inputs: NDArray[Any] = ids
    targets: NDArray[np.int64] | None = None
    prefixes: NDArray[np.int64] | None = None
    hidden = config.mask == "bidirectional"
    if config.has_head and hidden:
        inputs, targets = _hide(config, ids, mask_token)
    elif config.has_head:
        inputs, targets = ids[:, :-1], ids[:, 1:]
        if config.mask == "prefix":  # from one token to all
            prefixes = np.linspace(1, inputs.shape[1], len(ids)).astype(np.int64)
            inside = np.arange(inputs.shape[1]) < prefixes[:, None] - 1  # the prefix's last token predicts what follows
            targets = np.where(inside, NOTHING, targets)
    if config.input != "tokens":
        inputs = np.random.default_rng(1).standard_normal((*inputs.shape, config.dim), np.float32)
    return Texts(inputs, targets, prefixes, hidden)


def images_of(config: ModelConfig, n: int) -> Texts:
    """Images for a vision stack, compared by their vectors."""
    return Texts(drawn_images(config, n))


def behind_images(config: ModelConfig, ids: NDArray[np.int64]) -> Texts:
    """Windows (n, T) of token ids as texts for a decoder, with an image before each."""
    assert config.vision
    n, places = len(ids), config.vision.max_context
    texts = texts_of(config, ids)
    assert texts.targets is not None
    before = np.full((n, places), config.image_token)
    unasked = np.full((n, places), NOTHING)
    if texts.prefixes is None:  # the image's last vector predicts the first token
        unasked[:, -1] = ids[:, 0]
    return Texts(
        np.concatenate([before, texts.inputs], 1),
        np.concatenate([unasked, texts.targets], 1),
        None if texts.prefixes is None else texts.prefixes + places,
        images=drawn_images(config.vision, n),
        places=places,
    )


def _hide(config: ModelConfig, ids: NDArray[np.int64], mask_token: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Hide tokens as in training, always the same ones."""
    import torch

    from bitnet.data.views import Masking

    tokens = torch.from_numpy(ids)
    inputs, targets = Masking(mask_token, config.vocab_size, seed=0)(tokens, tokens, range(len(ids)))
    return inputs.numpy(), targets.numpy()


# ---- the engine ----


def engine_scores(engine: Model, config: ModelConfig, texts: Texts) -> Scores:
    """log p of the targets, text after text; without a head the numbers of the vectors."""
    if texts.inputs.ndim == 4:
        return of_length_1(engine_sees(engine, config, texts.inputs))
    if texts.targets is None and texts.inputs.ndim == 2:
        return engine.embed(texts.inputs.tolist(), pooling=pooling_of(config)).astype(np.float64).ravel()
    with engine.session(n_ctx=min(texts.inputs.shape[1] + 1, config.max_context)) as session:
        seen = None
        if texts.images is not None:
            from bitnet_runtime.images import vision

            seen = vision.encode(engine, texts.images)
        return np.concatenate(
            [_of_one(session, config, texts[i : i + 1], None if seen is None else seen[i]) for i in range(len(texts))]
        )


def of_length_1(vectors: NDArray[np.floating[Any]]) -> Scores:
    """The numbers of image vectors, scaled to length 1, so that one limit fits all."""
    exact = vectors.astype(np.float64)
    lengths: Scores = np.linalg.norm(exact, axis=-1, keepdims=True)
    return (exact / lengths).ravel()


def _of_one(session: Session, config: ModelConfig, text: Texts, seen: Floats | None) -> Scores:
    """seen: the vectors (N, D) of the image at the beginning of the text."""
    reader, (inputs,) = EngineReader(session, config), text.inputs
    reader.restart()
    if text.targets is None:
        return reader.embed(inputs).astype(np.float64)
    (targets,) = text.targets
    prefix = 0 if text.prefixes is None else int(text.prefixes[0])
    if inputs.ndim == 1 and not text.hidden:
        tokens, before = [*inputs.tolist(), int(targets[-1])], prefix
        if seen is not None:
            tokens[: len(seen)] = [-1] * len(seen)
        if prefix:
            session.append_prefix(tokens[:prefix], seen)
        elif seen is not None:
            session.append_embeddings(seen)
            before = len(seen)
        return np.array(session.score(tokens[before:])[0 if before else 1 :])
    parts = [part for part in np.split(inputs, [prefix]) if len(part)]
    rows = np.concatenate([reader.read(part, prefix > 0 and i == 0) for i, part in enumerate(parts)])
    asked = targets != NOTHING
    x = rows[asked].astype(np.float64)
    x -= x.max(-1, keepdims=True)
    chosen: Scores = x[np.arange(len(x)), targets[asked]] - np.log(np.exp(x).sum(-1))
    return chosen


# ---- torch ----


def torch_scores(model: Transformer, texts: Texts) -> Scores:
    """The same for a model in fp32 or fp64."""
    import torch

    config, scores = model.config, []
    rows = max(1, MAX_LOGITS // (texts.inputs.shape[1] * max(config.vocab_size, 1)))
    with torch.inference_mode():
        for start in range(0, len(texts), rows):
            part = texts[start : start + rows]
            inputs, like = torch.from_numpy(part.inputs), next(model.parameters())
            if inputs.dim() == 4:
                pixels = normalized(config, part.inputs, like)
                vectors = model.features(pixels) if config.pooling == "none" else model.embed(pixels)
                scores.append(of_length_1(vectors.numpy()))
                continue
            if inputs.is_floating_point():
                inputs = inputs.to(like.dtype)
            if part.targets is None:
                scores.append(model.embed(inputs, pooling_of(config)).double().numpy().ravel())
                continue
            prefixes = None if part.prefixes is None else torch.from_numpy(part.prefixes)
            images = None
            if part.images is not None and config.vision:
                images = normalized(config.vision, part.images, like)
            targets, logits = torch.from_numpy(part.targets), model(inputs, None, prefixes, images).double()
            asked = targets != NOTHING
            target = logits[asked].gather(-1, targets[asked][:, None])[:, 0]
            scores.append((target - logits[asked].logsumexp(-1)).numpy())
    return np.concatenate(scores)
