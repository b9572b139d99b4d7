"""Log-probabilities of tokens in the model's own distribution, before temperature, penalties and limits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

from bitnet_runtime.defaults import whole

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

MOST = 20  # alternatives that can be asked for


class Scored(NamedTuple):
    """A token, its log-probability in nats, and those of the most likely ones."""

    token: int
    logprob: float
    top: list[tuple[int, float]]  # best first; of equals the lowest id


def alternatives(asked: int | None) -> int | None:
    """How many beside each token; None: no token is scored. Raises InvalidParameterError."""
    return None if asked is None else whole("logprobs", asked, 0, MOST)


def score(rows: NDArray[np.float32], tokens: Sequence[int], top: int) -> list[Scored]:
    """tokens[i] after rows[i], each the logits of a vocabulary."""
    import numpy as np

    out = []
    for row, token in zip(rows, tokens, strict=True):
        exact = row.astype(np.float64)
        best = exact.max()
        total = best + np.log(np.exp(exact - best).sum())
        out.append(Scored(token, float(exact[token] - total), [(i, float(exact[i] - total)) for i in _best(row, top)]))
    return out


def _best(row: NDArray[np.float32], n: int) -> list[int]:
    import numpy as np

    if n <= 0:
        return []
    n = min(n, len(row))
    least = np.partition(row, len(row) - n)[len(row) - n]
    found = np.flatnonzero(row >= least)
    order = np.argsort(-row[found], kind="stable")[:n]
    return [int(token) for token in found[order]]
