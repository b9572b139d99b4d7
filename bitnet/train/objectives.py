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
    masked,
    mixed,
    mixture,
    packing,
    pairs,
    picture_rows,
    picture_talks,
    tokenizer,
)
from bitnet.data.dialogues import Dialogues
from bitnet.data.picture_rows import Answers, Captions, Rows
from bitnet.data.picture_talks import Talks
from bitnet.data.preferences import Preferences
from bitnet.evaluate import acceptance, answers, contrast, loss
from bitnet.model.transformer import Transformer
from bitnet.settings import PRESET_SETTINGS, Settings
from bitnet.train import preferences
from bitnet.train.errors import TrainingError
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
HeldOut = Kept | loss.Overlapping | masked.ViewedTokens | Dialogues | Talks | Preferences
Result = loss.Result | loss.Hidden | contrast.Contrast | answers.Answered | acceptance.Accepted | preferences.Preferred


class Learnt(NamedTuple):
    """What a run reads."""

    words: Tokenizer
    template: str | None  # chat template
    generation: dict[str, Any]  # its defaults
    batches: Batches
    held_out: HeldOut


HELD_OUT_SEED = 0  # for masked tokens and prefixes in evaluations: the same for every run


def check(settings: Settings, config: ModelConfig) -> None:
    """Raises TrainingError if objective, model and options do not fit together."""
    if settings.preference:
        preferences.check(settings, config)
    objective, sees = settings.objective, config.vision is not None
    head = f"the model has {'a' if config.has_head else 'no'} head"
    towers, decoder = (sees and config.has_head == answers for answers in (False, True))
    problems = {
        "next": [
            (not config.has_head, head, "add --set has_head=yes, or --objective contrastive"),
            (config.mask == "bidirectional", "mask is bidirectional, so each token sees the one it is to say",
             "add --set mask=causal, or --objective mlm"),
            (config.vision is not None and config.vision.pooling != "none", "the vision stack has a pooling, and "
             "nothing would train it", "add --set vision.pooling=none"),
        ],
        "mlm": [
            (not config.has_head, head, "add --set has_head=yes"),
            (config.mask != "bidirectional", f"mask is {config.mask}, so a masked token sees one side alone",
             "add --set mask=bidirectional"),
        ],
        "contrastive": [
            (config.has_head, head, "add --set has_head=no" + " --set pooling=mean" * (config.pooling == "none")),
            (config.pooling == "none", "pooling is none, so a text has no vector", "add --set pooling=mean"),
            (config.mask == "prefix", "mask is prefix", "add --set mask=causal, or bidirectional"),
            (settings.batch < 2, "--batch is 1, so there is no other text to tell from", "raise --batch"),
        ],
    }  # fmt: skip
    problems[objective].append(
        (config.input != "tokens", "input is embeddings, and text has none", "add --set input=tokens")
    )
    plain, usual = objective == "next" and config.mask == "causal", Settings()
    compared = objective == "contrastive" and sees
    problems[objective] += [
        (settings.temperature != usual.temperature and (objective != "contrastive" or sees),
         "--temperature is of vectors of texts", "leave it out"),
        (settings.contrastive_loss != usual.contrastive_loss and not compared,
         "--contrastive-loss is of vectors of images and texts", "leave it out"),
        (settings.augment != usual.augment and not sees, "--augment is of images, and the model sees none",
         "leave it out"),
        (bool(settings.chat) and objective != "next", "--chat is for the next token", "give --data"),
        (bool(settings.mixture) and (objective != "next" or sees), "--mixture is of text, for the next token",
         "give --data"),
        (settings.documents and (not plain or sees), "--documents is of text, for the next token of a causal model",
         "leave it out"),
        (settings.draft and (not plain or sees), f"--draft{'-only' * settings.draft_only} is for causal models of the "
         "next token, of text alone", "leave it out"),
        (settings.distilled > 0 and objective != "next" and not compared,
         "only models of the next token, and of images and texts, can be distilled", "leave --distill out"),
        (settings.distill_relations > 0 and compared, "--distill-relations is of decoders", "leave it out"),
        (settings.distill_features > 0 and not sees, "--distill-features is of images, and the model sees none",
         "leave it out"),
        (settings.distill_features > 0 and decoder and (settings.freeze_vision or settings.lora > 0),
         "--distill-features is of the vision stack, which stays as it is with --lora or --freeze-vision",
         "leave it out"),
        (settings.fim > 0 and (not plain or sees), "--fim is of text, for the next token of a causal model",
         "leave it out"),
    ]  # fmt: skip
    shape = "" if settings.source or settings.preset in PRESET_SETTINGS else (
        f" ({settings.preset} is a published shape, to measure with `bitnet bench`; "
        "siglip-tiny and paligemma-tiny are to be trained)"
    )  # fmt: skip
    given = bool(settings.source)  # finetune has no presets
    of_images = [
        (towers and objective != "contrastive", "two towers of images and texts learn by contrastive alone",
         "add --objective contrastive" if given else f"take that, or --preset paligemma-tiny for answers{shape}"),
        (decoder and objective != "next", "a decoder that sees images learns by next alone",
         "add --objective next" if given else
         f"take that, or --preset siglip-tiny to compare images with texts{shape}"),
    ]  # fmt: skip
    for wrong, found, advice in of_images + problems[objective]:
        if wrong:
            raise TrainingError(f"--objective {objective}, but {found}; {advice}")


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
) -> Kept | masked.ViewedTokens:
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
    return masked.ViewedTokens(tokens, view) if view else tokens


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
    if isinstance(tokens, masked.ViewedTokens | pairs.Pairs):
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
        return masked.Masking(mask, mask if mask == size - 1 else size, seed)
    if settings.documents:
        return masked.Apart(tokens.first)
    return masked.Prefixing(seed) if config.mask == "prefix" else None


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


def evaluate(model: Transformer, text: HeldOut, settings: Settings, context: int, limit: int = 0) -> Result:
    """Evaluate on held-out data; limit: tokens, 0 for all."""
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
        found = {name: loss.evaluate(model, seen, context, settings.batch, each) for name, seen in text.seen.items()}
        n_bytes = {name: part.bytes_per_token for name, part in text.parts.items()}
        return loss.BySource.mean(cast(dict[str, loss.Result], found), n_bytes, text.weights)
    return loss.evaluate(model, text, context, settings.batch, limit)


def drafts(model: Transformer, text: HeldOut, context: int, limit: int) -> acceptance.Accepted:
    """The acceptance rate of the draft on held-out text; on a mixture the mean, weighted as that of the loss.

    limit: as in `acceptance.evaluate`.
    """
    if isinstance(text, mixture.Sources):
        weights = {name: weight for name, weight in text.weights.items() if weight}
        each = limit and max(1, limit // len(weights))
        found = [acceptance.evaluate(model, text.seen[name], context, each) for name in weights]
        return acceptance.Accepted.mean(found, [*weights.values()])
    assert isinstance(text, dataset.Tokens | masked.ViewedTokens | Dialogues)
    return acceptance.evaluate(model, text, context, limit)
