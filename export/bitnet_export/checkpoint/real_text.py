"""The text on which a packed file is compared with its checkpoint."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from tokenizers import Tokenizer

    from bitnet.train.checkpoint import Checkpoint

LONG_TOKEN = 32  # characters; more than the tokens of a text have on average


def real_tokens(checkpoint: Checkpoint, n: int) -> tuple[NDArray[np.int64], str]:
    """`n` token ids and where they come from: the validation text of the run that wrote the checkpoint,
    then the source of Python's standard library; random ids when the checkpoint's tokenizer gives none."""
    ids, source = _tokens(checkpoint, n)
    if token := checkpoint.config.image_token:
        ids[ids == token] = 0  # it would stand for a vector that is not there
    return ids, source


def _tokens(checkpoint: Checkpoint, n: int) -> tuple[NDArray[np.int64], str]:
    from bitnet.data import corpus, tokenizer

    if not checkpoint.has_tokenizer:
        return _drawn(checkpoint, n), "random tokens (the checkpoint has no tokenizer)"
    words = checkpoint.words
    try:
        start = [tokenizer.separator(words, checkpoint.generation)]
    except ValueError:  # training keeps documents apart; here any text will do
        start = []
    ids, missing = _validation_ids(checkpoint, start, n)
    used = ["validation text"] if ids else []
    if len(ids) < n:
        used.append("the standard library's source")
        ids += _first(corpus.Documents([]), words, start, n - len(ids))
    if not ids:  # a model of vectors is saved with an empty tokenizer
        return _drawn(checkpoint, n), "random tokens (the tokenizer gives none)"
    return np.array(ids[:n]), " and ".join(used) + (f" (the validation text cannot be read: {missing})" * bool(missing))


def _drawn(checkpoint: Checkpoint, n: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(0, max(checkpoint.config.vocab_size, 1), n)


def mask_token_of(checkpoint: Checkpoint) -> int:
    """The token that stands for a hidden one; 0 if the tokenizer has none for that."""
    from bitnet.data import tokenizer

    try:
        return tokenizer.mask_token(checkpoint.words) if checkpoint.has_tokenizer else 0
    except ValueError:
        return 0


def _validation_ids(checkpoint: Checkpoint, start: list[int], n: int) -> tuple[list[int], str]:
    """At least `n` tokens of what the run held out, or all; and why it cannot be read, or ""."""
    from bitnet.data import conversations, corpus, dataset, files, finding, mixture, pictures, tokenized

    state, words = checkpoint.state_if_any, checkpoint.words
    if not (settings := state.get("settings")):
        return [], ""
    texts: Iterable[str]
    try:
        if kept := dataset.recorded(state, "validation", checkpoint.run):
            return kept.ids[:n].tolist(), ""
        if sources := mixture.recorded(state, "validation", checkpoint.run):
            each = -(-n // len(sources.parts))
            return [token for part in sources.parts.values() for token in part.ids[:each].tolist()], ""
        if settings.get("mixture"):
            return [], "its token ids are gone"
        if settings.get("preference"):
            return [], ""  # pairs of answers, a few
        if checkpoint.config.vision:
            seen = pictures.recorded(state, "validation", checkpoint.run)
            return (seen.text.ids[:n].tolist() if seen else []), ""
        if settings.get("chat"):
            held_out = conversations.split(
                conversations.read(finding.files_of(settings["chat"])), settings["validation"]
            )[1]
            texts = ["\n".join(message["content"] or "" for message in each.messages) for each in held_out]
        elif shared := tokenized.named(settings["data"]):
            (kept,) = tokenized.read(shared, "validation")[1]
            return kept.ids[:n].tolist(), ""
        else:
            texts = corpus.split(
                corpus.Documents(settings["data"], settings.get("column", files.COLUMN)), settings["validation"]
            )[1]
        return _first(texts, words, start, n), ""
    except (corpus.DataError, OSError, KeyError, ModuleNotFoundError) as error:
        return [], str(error)


def _first(texts: Iterable[str], words: Tokenizer, start: list[int], n: int) -> list[int]:
    """At least `n` tokens, or all; of a text that is far longer only its beginning is read."""
    ids: list[int] = []
    for text in texts:
        ids += start + words.encode(text[: LONG_TOKEN * (n - len(ids))], add_special_tokens=False).ids
        if len(ids) >= n:
            break
    return ids
