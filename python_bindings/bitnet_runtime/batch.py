"""A batch of sessions of one model in one call, which reads the weights once for all."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import InvalidParameterError
from bitnet_runtime.session import Session
from bitnet_runtime.session_state import check_all, turns

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def embed_batch(
    sessions: Sequence[Session], texts: Sequence[Sequence[int]], pooling: str | None
) -> NDArray[np.float32]:
    """texts[i] into sessions[i], different sessions of one model: float32[n, width].

    Each vector is that of `sessions[i].embed(texts[i])`, bit for bit.
    """
    import numpy as np

    _check_number(sessions, texts)
    model = sessions[0]._model
    kind = model._pooling_number(pooling)
    arrays = [session._array(text) for session, text in zip(sessions, texts, strict=True)]
    out = np.empty((len(texts), model.info.width), np.float32)
    with turns(sessions):
        handles = [session._open for session in sessions]
        pointers = ffi.new("bn_session *[]", [handle.pointer for handle in handles])
        sizes = [len(array) for array in arrays]
        lengths, view = ffi.new("int32_t[]", sizes), ffi.from_buffer("float[]", out)
        texts_of = ffi.new("int32_t *[]", arrays)
        _check(sessions, sizes, lib.bn_embed_batch(pointers, texts_of, lengths, len(handles), kind, view))
    return out


def _check_number(sessions: Sequence[Session], given: Sequence[Sequence[int]]) -> None:
    if not len(sessions) or len(sessions) != len(given):
        raise InvalidParameterError(
            f"there are {len(given)} texts for {len(sessions)} sessions, expected one for each", "sessions"
        )


def _check(sessions: Sequence[Session], sizes: Sequence[int], status: int) -> None:
    """Raises the exception of a status, which came before any work; sizes: how many tokens each was to take."""
    if status == lib.BN_ERR_ARGUMENT:
        found = "are of several models" if len({id(session._model) for session in sessions}) > 1 else "has one twice"
        raise InvalidParameterError(f"sessions {found}, expected different ones of one model", "sessions")
    if status == lib.BN_ERR_CONTEXT:
        for session, n in zip(sessions, sizes, strict=True):
            session._fit(n)
    check_all(sessions, status)
