"""Texts to embeddings, in batches."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import CacheFullError, InvalidParameterError, naming
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.sessions.state import check_all, turns

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
    """Places of a group and their vectors: of all at once, or of halves, where the cache has no room."""
    for session in sessions:
        session.reset()
    if len(group) == 1:  # in pieces, if that can be, so that Ctrl-C is obeyed
        with naming(f"text[{group[0]}]" if len(texts) > 1 else ""):
            vector = sessions[0].embed(texts[group[0]], pooling)
        yield group, vector[None]
        return
    try:
        names = [f"text[{place}]" for place in group]
        vectors = embed_batch(sessions[: len(group)], [texts[place] for place in group], pooling, names)
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


def embed_batch(
    sessions: Sequence[Session], texts: Sequence[Sequence[int]], pooling: str | None, names: Sequence[str] = ()
) -> NDArray[np.float32]:
    """texts[i] into sessions[i], different sessions of one model: float32[n, width].

    Each vector is that of `sessions[i].embed(texts[i])`, bit for bit. names: of the texts; a NumericError begins with
    that of the first which has a value that is not finite.
    """
    import numpy as np

    if not len(sessions) or len(sessions) != len(texts):
        raise InvalidParameterError(
            f"there are {len(texts)} texts for {len(sessions)} sessions, expected one for each", "sessions"
        )
    model = sessions[0]._model
    kind = model._pooling_number(pooling)
    arrays = [session._array(text) for session, text in zip(sessions, texts, strict=True)]
    out = np.empty((len(texts), model.info.width), np.float32)
    with turns(sessions):
        handles = [session._open for session in sessions]
        whole = [session.position + len(array) for session, array in zip(sessions, arrays, strict=True)]
        pointers = ffi.new("bn_session *[]", [handle.pointer for handle in handles])
        sizes = [len(array) for array in arrays]
        lengths, view = ffi.new("int32_t[]", sizes), ffi.from_buffer("float[]", out)
        texts_of = ffi.new("int32_t *[]", arrays)
        status = lib.bn_embed_batch(pointers, texts_of, lengths, len(handles), kind, view)
        failed = status == lib.BN_ERR_NUMERIC and names
        found = zip(names, sessions, whole, strict=True) if failed else ()
        with naming(next((name for name, session, end in found if session.position < end), "")):
            _check(sessions, sizes, status)
    return out


def _check(sessions: Sequence[Session], sizes: Sequence[int], status: int) -> None:
    """Raises the exception of a status, which came before any work; sizes: how many tokens each was to take."""
    if status == lib.BN_ERR_ARGUMENT:
        found = "are of several models" if len({id(session._model) for session in sessions}) > 1 else "has one twice"
        raise InvalidParameterError(f"sessions {found}, expected different ones of one model", "sessions")
    if status == lib.BN_ERR_CONTEXT:
        for session, n in zip(sessions, sizes, strict=True):
            session._fit(n)
    check_all(sessions, status)
