"""The objectives (next token, masked tokens, contrastive pairs) and what each needs from model and data.

This is the only place that distinguishes kinds of data: how they become batches, are evaluated and recorded.

A batch is inputs, targets, and further arguments of `Transformer.forward`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, NamedTuple, cast

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.data import (
    dataset,
    infilling,
    mixed,
    mixture,
    packing,
    pairs,
    picture_rows,
    picture_talks,
    tokenizer,
    views,
)
from bitnet.data.dialogues import Dialogues
from bitnet.data.picture_rows import Answers, Captions, Rows
from bitnet.data.picture_talks import Talks
from bitnet.data.preferences import Preferences
from bitnet.evaluate import acceptance, answers, contrast, loss
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import preferences
from bitnet.train.state import Recorded

Kept = dataset.Tokens | mixture.Sources | pairs.Pairs | Captions | Answers
Batches = (
    dataset.Batches
    | mixed.Mixed
    | packing.Batches[Dialogues]
    | packing.Batches[Preferences]
    | pairs.Batches
    | picture_rows.Batches
    | picture_talks.Batches
)
HeldOut = Kept | views.ViewedTokens | Dialogues | Talks | Preferences
Result = loss.Result | loss.Hidden | contrast.Contrast | answers.Answered | acceptance.Accepted | preferences.Preferred


class Learnt(NamedTuple):
    """What a run reads."""

    words: Tokenizer
    template: str | None  # chat template
    generation: dict[str, Any]  # its defaults
    batches: Batches
    held_out: HeldOut


HELD_OUT_SEED = 0  # for masked tokens and prefixes in evaluations: the same for every run


def batches(
    settings: Settings,
    config: ModelConfig,
    words: Tokenizer,
    tokens: Kept,
    context: int,
    generation: Mapping[str, Any] = MappingProxyType({}),
) -> Batches:
    """Batches of a run on text, or images and text. generation: defaults that may name start and end tokens."""
    if isinstance(tokens, Captions | Answers):
        return picture_rows.Batches(tokens, settings.batch, context, settings.seed, settings.augment)
    if isinstance(tokens, pairs.Pairs):
        return pairs.Batches(tokens, settings.batch, context, settings.seed)
    view = view_of(settings, config, words, tokens, settings.seed)
    if settings.fim:
        tokenizer.fim_tokens(words)  # raises before the first step if they are missing
        end = tokenizer.end_token(words, generation)
        view = infilling.Infilling(settings.fim, words, tokens.first, end, settings.seed, view)
    if isinstance(tokens, mixture.Sources):
        return mixed.Mixed(tokens, settings.batch, context, settings.seed, view)
    return dataset.Batches(tokens, settings.batch, context, settings.seed, view)


def held_out(
    settings: Settings, config: ModelConfig, words: Tokenizer, tokens: Kept, context: int
) -> Kept | views.ViewedTokens:
    """The held-out data as it is evaluated."""
    if isinstance(tokens, pairs.Pairs | Captions):
        contrast.check(tokens.count(context))
        return tokens
    if isinstance(tokens, Answers):
        tokens.count(context)
        return tokens
    view = view_of(settings, config, words, tokens, HELD_OUT_SEED)
    if isinstance(tokens, mixture.Sources):
        return dataclasses.replace(tokens, view=view)
    return views.ViewedTokens(tokens, view) if view else tokens


def record(tokens: HeldOut, held_out: HeldOut) -> Recorded:
    """What a checkpoint records of a run's data files, to find them again; conversations are read again instead."""
    sides = {"train": tokens, "validation": held_out}
    if isinstance(tokens, Rows):
        return {"pictures": {side: each.pictures.to_dict() for side, each in sides.items() if isinstance(each, Rows)}}
    found: Recorded = {}
    if texts := {side: text.to_dict() for side, each in sides.items() if (text := _text_of(each))}:
        found["texts"] = texts
    if isinstance(tokens, mixture.Sources):
        found["mixture"] = tokens.mixture.to_dict()
    if isinstance(tokens, pairs.Pairs):
        found["pairs"] = tokens.given
    return found


def _text_of(tokens: HeldOut) -> dataset.Tokens | mixture.Sources | None:
    """The token ids on disk beneath a view of them."""
    if isinstance(tokens, views.ViewedTokens | pairs.Pairs):
        return tokens.text
    return tokens if isinstance(tokens, dataset.Tokens | mixture.Sources) else None


def digest(held_out: HeldOut) -> str:
    """A digest of the held-out data; "" if it follows from the training data."""
    return str(getattr(held_out, "digest", ""))


def tokens_each(tokens: HeldOut, context: int) -> int:
    """Tokens that a step counts for each sequence or pair."""
    return tokens.tokens_each(context) if isinstance(tokens, pairs.Pairs | Captions | Preferences) else context


def size(held_out: HeldOut, context: int) -> int:
    """Tokens of an evaluation of all held-out data: of pairs and rows all count, with what fills them."""
    if isinstance(held_out, pairs.Pairs | Captions | Answers | Talks):
        return held_out.count(context) * tokens_each(held_out, context)
    if isinstance(held_out, Dialogues | Preferences):
        return held_out.windows(context) * tokens_each(held_out, context)
    return held_out.n_tokens


def view_of(
    settings: Settings, config: ModelConfig, words: Tokenizer, tokens: dataset.Tokens | mixture.Sources, seed: int
) -> dataset.View | None:
    """The view of text that the objective needs: none, masked tokens, prefixes, or documents."""
    if settings.objective == "mlm":
        mask = tokenizer.mask_token(words)
        size = tokenizer.vocabulary_size(words)
        return views.Masking(mask, mask if mask == size - 1 else size, seed)
    if settings.documents:
        return views.Apart(tokens.first)
    return views.Prefixing(seed) if config.mask == "prefix" else None


def counted(batches: Batches, batch: tuple[Tensor, ...]) -> int:
    """How many targets, or pairs, of a batch count."""
    _, targets, *told = batch
    if isinstance(batches.tokens, Preferences):
        return preferences.counted(told[0])
    return int((targets != dataset.IGNORED).sum())


def term(settings: Settings, model: Transformer, output: Tensor, targets: Tensor) -> Tensor:
    """Sum over the targets that count, in nats. output: logits (B, T, V), or vectors (2n, D)."""
    if settings.objective == "contrastive":
        compare, loss_of = comparison(settings, model)
        with torch.autocast(output.device.type, enabled=False):  # cosines rounded to bf16 differ by 0.004
            return loss_of(compare, *contrast.halves_of(model, output))
    return F.cross_entropy(output.flatten(0, 1), targets.flatten(), reduction="sum")


def comparison(settings: Settings, model: Transformer) -> tuple[contrast.Compare, contrast.Loss]:
    """The comparison of vectors, and its loss."""
    if model.similarity is None:
        return contrast.cosines(settings.temperature), contrast.softmax
    return model.similarity, contrast.LOSSES[settings.contrastive_loss]


def evaluate(
    model: Transformer, text: HeldOut, settings: Settings, context: int, limit: int = 0, stride: int = 0
) -> Result:
    """Evaluate on held-out data; limit: tokens, 0 for all. stride: of the windows of text; 0: none overlap."""
    if settings.draft_only:
        return drafts(model, text, context, limit)
    if isinstance(text, pairs.Pairs | Captions):
        return contrast.evaluate(model, text, context, *comparison(settings, model), settings.batch, limit)
    if isinstance(text, Preferences):
        return preferences.evaluate(model, text, settings.beta, context, settings.batch, limit)
    if isinstance(text, Answers | Talks):
        return answers.evaluate(model, text, context, settings.batch, limit)
    if isinstance(text, mixture.Sources):
        each = limit and max(1, limit // len(text.parts))
        parts = {name: loss.overlapping(part, stride) for name, part in text.seen.items()}
        found = {name: loss.evaluate(model, part, context, settings.batch, each) for name, part in parts.items()}
        n_bytes = {name: part.bytes_per_token for name, part in text.parts.items()}
        return loss.BySource.mean(cast(dict[str, loss.Result], found), n_bytes, text.weights)
    return loss.evaluate(model, loss.overlapping(text, stride), context, settings.batch, limit)


def drafts(model: Transformer, text: HeldOut, context: int, limit: int) -> acceptance.Accepted:
    """The acceptance rate of the draft on held-out text; on a mixture the mean, weighted as that of the loss.

    limit: as in `acceptance.evaluate`.
    """
    if isinstance(text, mixture.Sources):
        weights = {name: weight for name, weight in text.weights.items() if weight}
        each = limit and max(1, limit // len(weights))
        found = [acceptance.evaluate(model, text.seen[name], context, each) for name in weights]
        return acceptance.Accepted.mean(found, [*weights.values()])
    assert isinstance(text, dataset.Tokens | views.ViewedTokens | Dialogues)
    return acceptance.evaluate(model, text, context, limit)
