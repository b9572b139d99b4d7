"""Make a session hold a prompt."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from bitnet_runtime.ids import NO_TOKEN
from bitnet_runtime.sessions.session import Session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray


def extend(session: Session, prompt: Sequence[int], rows: NDArray[np.float32] | None = None) -> int:
    """Make the session hold the prompt and its logits; returns how many tokens were computed.

    What it already holds of the prompt's prefix is kept: the bits are the same. But the prefix of a prefix model,
    which all its tokens see, is computed anew, and so are images and what follows them. rows: of the -1, (..., dim).
    """
    if session._model.mask == "prefix":
        session._keep(())
        n, call = session._prefix(prompt, None if rows is None else rows.reshape(-1, rows.shape[-1]))
        session._run(n, True, call, whole=True)  # without an array of logits, and so without numpy for a text
        return len(prompt)
    same = session._keep(prompt)
    if rows is None:
        session.feed(prompt[same:])
    else:
        _feed_mixed(session, prompt[same:], rows.reshape(-1, rows.shape[-1]))
    return len(prompt) - same


def _feed_mixed(session: Session, tokens: Sequence[int], rows: NDArray[np.float32]) -> None:
    """Append tokens and vectors in order, for a causal model."""
    left = len(tokens)
    for are_rows, group in itertools.groupby(tokens, NO_TOKEN.__eq__):
        piece = list(group)
        left -= len(piece)
        if are_rows:
            session.append_embeddings(rows[: len(piece)], "none" if left else "last")
            rows = rows[len(piece) :]
        else:
            session.feed(piece, keep_logits=not left)
