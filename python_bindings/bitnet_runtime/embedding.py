"""Texts to vectors: which are computed together, and the C call for it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import InvalidParameterError, check

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet_runtime.model import Model
    from bitnet_runtime.session import Session

POOLING = {"last": lib.BN_POOL_LAST, "mean": lib.BN_POOL_MEAN, "first": lib.BN_POOL_FIRST}

MOST_TOKENS, MOST_TEXTS = 256, 64  # of texts that are computed together


def pooling_number(model: Model, pooling: str | None) -> int:
    """`bn_pooling` of a name; None: the model's own, which then must exist."""
    name = model.pooling if pooling is None else pooling
    if name not in POOLING:
        found = "pooling is not given, and the model names none" if name is None else f"pooling is {name!r}"
        raise InvalidParameterError(f"{found}; expected one of {', '.join(POOLING)}", "pooling")
    return int(POOLING[name])


def embed(model: Model, texts: Sequence[list[int]], pooling: str | None) -> NDArray[np.float32]:
    """`Model.embed` of token ids."""
    import numpy as np

    pooling_number(model, pooling)
    if not all(texts):
        raise InvalidParameterError(f"text {texts.index([])} has no tokens; give at least one character", "text")
    out = np.empty((len(texts), model.info.dim), np.float32)
    with contextlib.ExitStack() as stack:
        sessions: list[Session] = []
        for group in _together(texts):
            while len(sessions) < len(group):  # only the first ever holds a long text
                room = min(MOST_TOKENS, model.n_ctx) if sessions else max(map(len, texts))
                sessions.append(stack.enter_context(model.session(n_ctx=room)))
            for session in sessions:
                session.reset()
            if len(group) == 1:  # in pieces, so that Ctrl-C is obeyed
                out[group[0]] = sessions[0].embed(texts[group[0]], pooling)
            else:
                out[group] = embed_batch(sessions[: len(group)], [texts[place] for place in group], pooling)
    return out


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
    sessions: Sequence[Session], texts: Sequence[Sequence[int]], pooling: str | None
) -> NDArray[np.float32]:
    """texts[i] into sessions[i], different sessions of one model, reading the weights once for all: float32[n, dim].

    Each vector is that of `sessions[i].embed(texts[i])`, bit for bit.
    """
    import numpy as np

    model = sessions[0]._model
    kind = pooling_number(model, pooling)
    arrays = [session._array(text) for session, text in zip(sessions, texts, strict=True)]
    out = np.empty((len(texts), model.info.dim), np.float32)
    with contextlib.ExitStack() as stack:
        for session in sorted(sessions, key=id):  # as in session.append_batch
            stack.enter_context(session._lock)
        for session, array in zip(sessions, arrays, strict=True):
            session._check_room(len(array))
        pointers = ffi.new("bn_session *[]", [session._open for session in sessions])
        lengths = ffi.new("int32_t[]", [len(array) for array in arrays])
        view = ffi.from_buffer("float[]", out)
        check(lib.bn_embed_batch(pointers, ffi.new("int32_t *[]", arrays), lengths, len(arrays), kind, view))
    return out
