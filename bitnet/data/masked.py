"""Masked language modelling: some tokens are hidden, and the model says what they were.

15 of 100 positions count. Of these 80 of 100 become the mask token, 10 another token drawn at random, and 10
stay as they are (arXiv 1810.04805 §3.1). Which ones is a pure function of the seed and the sequence's number.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitnet.data.dataset import IGNORED, Batches, Tokens, seed_of

SHARE, HIDDEN, RANDOM = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """What is put in place of hidden tokens: token `mask`, or one of the first `vocab_size`."""

    mask: int
    vocab_size: int
    seed: int

    def __call__(self, inputs_BT: Tensor, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Inputs with hidden tokens, and targets, IGNORED where a token does not count. numbers: of the sequences."""
        pairs = [self._row(row, number) for row, number in zip(inputs_BT, numbers, strict=True)]
        inputs, targets = (torch.stack(rows) for rows in zip(*pairs, strict=True))
        return inputs, targets

    def _row(self, row: Tensor, number: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed_of(self.seed, number))
        counts, fate = torch.rand(2, len(row), generator=random)
        others = torch.randint(self.vocab_size, row.shape, generator=random)
        chosen = counts < SHARE
        if not chosen.any():  # a row without a target would teach nothing
            chosen[int(counts.argmin())] = True
        seen = torch.where(fate < HIDDEN, self.mask, torch.where(fate < HIDDEN + RANDOM, others, row))
        return torch.where(chosen, seen, row), torch.where(chosen, row, IGNORED)


class MaskedBatches(Batches):
    """Sequence n as `Batches` cuts it, with tokens hidden."""

    def __init__(self, tokens: Tokens, batch: int, context: int, seed: int, masking: Masking) -> None:
        super().__init__(tokens, batch, context, seed)
        self.masking = masking

    def sequences(self, first: int, last: int) -> tuple[Tensor, ...]:
        return self.masking(super().sequences(first, last)[0], range(first, last))


@dataclass(frozen=True)
class MaskedTokens:
    """Text to evaluate on: the same tokens hidden each time."""

    text: Tokens
    masking: Masking

    @property
    def n_tokens(self) -> int:
        return self.text.n_tokens

    @property
    def bytes_per_token(self) -> float:
        return self.text.bytes_per_token

    def windows(self, context: int) -> int:
        """How many windows of `context` inputs fit without overlap."""
        return self.text.windows(context)

    def window(self, indices: Sequence[int], context: int) -> tuple[Tensor, Tensor]:
        """Inputs and targets (IGNORED where nothing is hidden), int64 (len(indices), context) each."""
        return self.masking(self.text.window(indices, context)[0], indices)
