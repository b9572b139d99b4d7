"""How well vectors of texts find the text that belongs to each: InfoNCE loss, and recall."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet.data.corpus import DataError
from bitnet.data.pairs import Pairs
from bitnet.evaluate.loss import chosen_windows
from bitnet.model.transformer import Transformer

POOL = 1000  # pairs among which the right one is looked for, at most


@dataclass(frozen=True)
class Contrast:
    """Of held-out pairs, each text among those of its pool."""

    nats_per_pair: float
    recall: float  # share of the first texts to which the second one is nearest
    recall_back: float  # and the other way round
    pairs: int
    pool: int  # the smallest; chance is one in so many

    def __str__(self) -> str:
        return (
            f"{self.nats_per_pair:.4f} nats/pair, recall@1 {self.recall:.1%} and back {self.recall_back:.1%} "
            f"of {self.pool:,}"
        )


def similarities(vectors_ND: Tensor, temperature: float) -> Tensor:
    """Of the first half of the vectors (rows) with the second half, over the temperature: (n, n)."""
    first, second = vectors_ND.float().chunk(2)
    return first @ second.mT / temperature


def info_nce(vectors_ND: Tensor, targets_N: Tensor, temperature: float) -> Tensor:
    """Σ over the pairs of (CE of row + CE of column)/2: each text is to pick its own among the batch (1807.03748)."""
    logits = similarities(vectors_ND, temperature)
    both = F.cross_entropy(logits, targets_N, reduction="sum"), F.cross_entropy(logits.mT, targets_N, reduction="sum")
    return (both[0] + both[1]) / 2


def check(n: int) -> None:
    """Raises DataError: so few pairs say nothing."""
    if n < 2:
        raise DataError(f"{n} pairs of texts to measure on, expected at least 2; add data, or raise --validation")


def evaluate(
    model: Transformer, pairs: Pairs, context: int, temperature: float, batch: int = 16, limit: int = 0
) -> Contrast:
    """limit: tokens, or 0 for all; then pairs are evenly spaced."""
    n = pairs.count(context)
    check(n)
    chosen = chosen_windows(n, max(2, limit // (2 * context)) if limit else 0)
    pools = -(-len(chosen) // POOL)
    each = [chosen[i * len(chosen) // pools : (i + 1) * len(chosen) // pools] for i in range(pools)]
    total, right = 0.0, [0, 0]
    with torch.no_grad(), model.evaluating():
        for pool in each:
            vectors = _vectors(model, pairs, pool, context, batch)
            own = torch.arange(len(pool), device=vectors.device)
            logits = similarities(vectors, temperature)
            total += info_nce(vectors, own, temperature).item()
            for way, table in enumerate((logits, logits.mT)):
                right[way] += int((table.argmax(1) == own).sum())
    n = len(chosen)
    return Contrast(total / n, right[0] / n, right[1] / n, n, min(map(len, each)))


def _vectors(model: Transformer, pairs: Pairs, indices: Sequence[int], context: int, batch: int) -> Tensor:
    """Of the first texts, then of the second ones, (2n, D)."""
    halves: tuple[list[Tensor], list[Tensor]] = [], []
    for first in range(0, len(indices), batch):
        inputs, _, documents = pairs.rows(indices[first : first + batch], context)
        # The model is called, and not `embed`: where it is sharded, a call brings the shards together.
        vectors = model(inputs.to(model.device), documents.to(model.device))
        for half, part in zip(halves, vectors.chunk(2), strict=True):
            half.append(part)
    return torch.cat([*halves[0], *halves[1]])
