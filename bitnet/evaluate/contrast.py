"""Retrieval by vectors: contrastive losses, and recall."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from bitnet.data.corpus import DataError
from bitnet.data.pairs import Pairs
from bitnet.data.picture_rows import Captions
from bitnet.evaluate.loss import chosen_windows
from bitnet.model.transformer import Transformer

POOL = 1000  # most pairs among which the right one has to be found
CHUNK = 1024  # columns of the similarity matrix that `sigmoid` holds in memory at a time

Compare = Callable[[Tensor, Tensor], Tensor]
"""Similarities of vectors (n, D) with others (m, D), as inputs of the loss: (n, m)."""
Loss = Callable[[Compare, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contrast:
    """Results on held-out pairs, each compared within its pool."""

    nats_per_pair: float
    recall: float  # share of the first texts, or images, whose nearest text is their partner
    recall_back: float  # the same in the other direction
    pairs: int
    pool: int  # size of the smallest pool; chance level is 1/pool

    def __str__(self) -> str:
        return (
            f"{self.nats_per_pair:.4f} nats/pair, recall@1 {self.recall:.1%} and back {self.recall_back:.1%} "
            f"of {self.pool:,}"
        )

    @property
    def details(self) -> str:
        return f"{self.pairs:,} pairs"


def cosines(temperature: float) -> Compare:
    """Cosines of texts, divided by a fixed temperature."""
    return lambda first, second: first @ second.mT / temperature


def softmax(compare: Compare, first_ND: Tensor, second_ND: Tensor) -> Tensor:
    """Σ over the pairs of (CE of row + CE of column)/2: each has to pick its partner (InfoNCE, 1807.03748)."""
    table = compare(first_ND, second_ND)
    own = torch.arange(len(table), device=table.device)
    return (F.cross_entropy(table, own, reduction="sum") + F.cross_entropy(table.mT, own, reduction="sum")) / 2


def sigmoid(compare: Compare, first_ND: Tensor, second_ND: Tensor, chunk: int = CHUNK) -> Tensor:
    """−Σ log σ(z·similarity), z = 1 for matching pairs, else −1: each pair independently (2303.15343).

    In chunks of columns, recomputed in the backward pass, so that the whole matrix is never in memory.
    """

    def of_columns(first_ND: Tensor, columns: Tensor, at: int) -> Tensor:
        table = compare(first_ND, columns)
        row, column = (torch.arange(n, device=table.device) for n in table.shape)
        return -F.logsigmoid(torch.where(row[:, None] == column + at, table, -table)).sum()

    if len(second_ND) <= chunk:
        return of_columns(first_ND, second_ND, 0)
    chunks = enumerate(second_ND.split(chunk))
    parts = [checkpoint(of_columns, first_ND, part, i * chunk, use_reentrant=False) for i, part in chunks]
    return torch.stack(parts).sum()


LOSSES: dict[str, Loss] = {"softmax": softmax, "sigmoid": sigmoid}


def check(n: int) -> None:
    """Raises DataError if there are too few pairs."""
    if n < 2:
        raise DataError(f"{n} pairs to measure on, expected at least 2; add data, or raise --validation")


def evaluate(
    model: Transformer, pairs: Pairs | Captions, context: int, compare: Compare, loss: Loss, batch: int = 16,
    limit: int = 0,
) -> Contrast:  # fmt: skip
    """Evaluate a model. limit: tokens, of evenly spaced pairs; 0: all pairs."""
    with torch.no_grad(), model.evaluating():
        return measure(pairs, context, lambda some: _vectors(model, pairs, some, context, batch), compare, loss, limit)


def measure(
    pairs: Pairs | Captions,
    context: int,
    vectors: Callable[[Sequence[int]], tuple[Tensor, Tensor]],
    compare: Compare,
    loss: Loss,
    limit: int,
) -> Contrast:
    """`evaluate` with any source of vectors. vectors: those of the pairs with the given indices."""
    n = pairs.count(context)
    check(n)
    chosen = chosen_windows(n, max(2, limit // pairs.tokens_each(context)) if limit else 0)
    pools = -(-len(chosen) // POOL)
    each = [chosen[i * len(chosen) // pools : (i + 1) * len(chosen) // pools] for i in range(pools)]
    total, right = 0.0, [0, 0]
    for pool in each:
        first, second = vectors(pool)
        total += loss(compare, first, second).item()
        table, alike = compare(first, second), pairs.alike(pool).to(first.device)
        for way, (found, equal) in enumerate(((table, alike), (table.mT, alike.mT))):
            right[way] += int(equal.gather(1, found.argmax(1, keepdim=True)).sum())
    n = len(chosen)
    return Contrast(total / n, right[0] / n, right[1] / n, n, min(map(len, each)))


def _vectors(
    model: Transformer, pairs: Pairs | Captions, indices: Sequence[int], context: int, batch: int
) -> tuple[Tensor, Tensor]:
    """Vectors of the first texts or the images, and of their partner texts, (n, D) each."""
    halves: tuple[list[Tensor], list[Tensor]] = [], []
    for first in range(0, len(indices), batch):
        inputs, _, *told = (t.to(model.device) for t in pairs.rows(indices[first : first + batch], context))
        # The model is called, not `embed`: only calls gather the shards of a sharded model.
        for half, part in zip(halves, halves_of(model, model(inputs, *told)), strict=True):
            half.append(part)
    return torch.cat(halves[0]), torch.cat(halves[1])


def halves_of(model: Transformer, vectors_ND: Tensor) -> tuple[Tensor, Tensor]:
    """First and second texts; or images and their texts, which the model returns before the images."""
    first, second = vectors_ND.float().chunk(2)
    return (second, first) if model.config.vision else (first, second)
