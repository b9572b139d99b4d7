"""Texts to embeddings, in batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bitnet_runtime.batch import embed_batch
from bitnet_runtime.errors import CacheFullError, InvalidParameterError
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST_TOKENS, MOST_TEXTS = 256, 64  # of texts that are computed together


def embed(
    model: ModelFacts, texts: Sequence[list[int]], pooling: str | None, adapter: str | None = None
) -> NDArray[np.float32]:
    """`Model.embed` of token ids."""
    import numpy as np

    model._pooling_number(pooling)
    if not all(texts):
        raise InvalidParameterError(f"text[{texts.index([])}] has no tokens; give at least one character", "text")
    out = np.empty((len(texts), model.info.width), np.float32)
    with contextlib.ExitStack() as stack:
        sessions: list[Session] = []
        for group in _together(texts):
            while len(sessions) < len(group):  # only the first ever holds a long text
                room = min(MOST_TOKENS, model.n_ctx)
                room = room if sessions else max(room, *map(len, texts))
                sessions.append(stack.enter_context(Session._new(model, room, adapter=adapter)))
            for some, vectors in _vectors(sessions, texts, group, pooling):
                out[some] = vectors
    return out


def _vectors(
    sessions: Sequence[Session], texts: Sequence[list[int]], group: list[int], pooling: str | None
) -> Iterator[tuple[list[int], NDArray[np.float32]]]:
    """Places of a group and their vectors: of all at once, or of halves, where the cache has no room for all."""
    for session in sessions:
        session.reset()
    if len(group) == 1:  # in pieces, if that can be, so that Ctrl-C is obeyed
        yield group, sessions[0].embed(texts[group[0]], pooling)[None]
        return
    try:
        vectors = embed_batch(sessions[: len(group)], [texts[place] for place in group], pooling)
    except CacheFullError:  # before any work
        middle = len(group) // 2
    else:
        yield group, vectors
        return
    for half in (group[:middle], group[middle:]):
        yield from _vectors(sessions, texts, half, pooling)


def _together(texts: Sequence[Sequence[int]]) -> Iterator[list[int]]:
    """The places of texts that are embedded together: neighbours with few tokens, or one text."""
    group: list[int] = []
    tokens = 0
    for place, text in enumerate(texts):
        if group and (tokens + len(text) > MOST_TOKENS or len(group) == MOST_TEXTS):
            yield group
            group, tokens = [], 0
        group.append(place)
        tokens += len(text)
    if group:
        yield group
