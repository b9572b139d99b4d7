"""`contrast` and `answers` for packed files: evaluation on records of images, computed by the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from tokenizers import Tokenizer
from torch import Tensor

from bitnet.data import picture_files, pictures, tokenizer
from bitnet.data.frames import Frame
from bitnet.data.picture_rows import Answers, Captions
from bitnet.data.pictures import Sight
from bitnet.evaluate import contrast
from bitnet.evaluate.answers import Answered
from bitnet.evaluate.loss import chosen_windows, log_probabilities
from bitnet_runtime import Model, Session
from bitnet_runtime.ids import NO_TOKEN
from bitnet_runtime.images import vision
from bitnet_runtime.model_images import is_of_pairs
from bitnet_runtime.sessions.prompt import extend

TOGETHER = 64  # records whose vectors are computed in one call


def evaluate(
    model: Model, words: Tokenizer, data: Sequence[str], context: int, scratch: Path, limit: int = 0
) -> contrast.Contrast | Answered:
    """Evaluate on the records that `data` names. scratch: a folder for their files; limit: tokens, 0 for all."""
    seen, generation = model.image, model.metadata.get("generation") or {}
    assert seen
    first = tokenizer.separator(words, generation, packed=True)
    made = model.processor
    sizes = seen.image_size, seen.channels, seen.n_tokens
    sight = Sight(*sizes, seen.pixel_mean, seen.pixel_std, made.resize, made.filter)
    records = picture_files.read(data)
    side = pictures.every(records if model.has_head else picture_files.captions(records))
    kept = pictures.store(side, words, sight, scratch, "text", first)
    frame = Frame.of(words, generation | {"bos_token_id": model.bos_token})
    if model.has_head:
        end = tokenizer.end_token(words, generation)
        return evaluate_answers(model, Answers(kept, sight, first, frame, end, seen.image_token), context, limit)
    return evaluate_captions(model, Captions(kept, sight, first, frame), context, limit)


def evaluate_captions(model: Model, records: Captions, context: int, limit: int) -> contrast.Contrast:
    """`contrast.evaluate` for a packed file, with the loss that its bias indicates."""
    seen = model.image
    assert seen
    scale, bias = seen.similarity_scale, seen.similarity_bias
    loss = contrast.sigmoid if is_of_pairs(seen) else contrast.softmax

    def compare(images: Tensor, texts: Tensor) -> Tensor:
        return scale * (images @ texts.mT) + bias

    def vectors(indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        images, texts = [], []
        for first in range(0, len(indices), TOGETHER):
            some = indices[first : first + TOGETHER]
            images.append(vision.embed(model, records.values(some).numpy()))
            texts.append(model.embed([records.text(record, context).tolist() for record in some]))
        return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(texts))

    return contrast.measure(records, context, vectors, compare, loss, limit)


def evaluate_answers(model: Model, records: Answers, context: int, limit: int) -> Answered:
    """`answers.evaluate` for a packed file."""
    n = records.count(context)
    total, counted, right, chosen = 0.0, 0, 0, chosen_windows(n, max(1, limit // context) if limit else 0)
    with model.session(n_ctx=context) as session:
        for record in (int(records.fitting(context)[i]) for i in chosen):
            log_p, is_right = _answer(model, session, records, record)
            total -= log_p.sum()
            counted += len(log_p)
            right += is_right
    return Answered(total / counted, right / len(chosen), len(chosen), counted)


def _answer(model: Model, session: Session, records: Answers, record: int) -> tuple[NDArray[np.float64], bool]:
    """Log-probabilities of the tokens of the right answer, and whether each of them is the most probable."""
    before, after = records.parts(record)
    vectors = None
    if len(records.images(record)):
        vectors = vision.encode(model, records.values([record]).numpy())
    tokens = np.where(before == records.image, NO_TOKEN, before)
    extend(session, tokens.tolist(), vectors)
    first = session.logits
    assert first is not None
    logits = np.concatenate([first[None], session.append(after[:-1].tolist(), "all")])
    return log_probabilities(logits, after.tolist()), bool((logits.argmax(1) == after).all())
