"""Views of sequences (`dataset.View`): masked tokens, prefixes, documents. Each is a pure function of its number.

Masked language modelling: 15 % of the positions count. Of these 80 % become the mask token, 10 % a random token,
and 10 % stay unchanged (arXiv 1810.04805 §3.1).
Prefix: the tokens of a prefix of random length see each other, and the rest is learnt (arXiv 1910.10683 §3.2).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bitnet.data.dataset import IGNORED, Tokens, View, seed_of

SHARE, HIDDEN, RANDOM = 0.15, 0.8, 0.1


@dataclass(frozen=True)
class Masking:
    """Inputs with masked tokens, and these as targets. They become `mask` or one of the first `vocab_size` tokens."""

    mask: int
    vocab_size: int
    seed: int

    def __call__(self, inputs_BT: Tensor, _: Tensor, numbers: Sequence[int]) -> tuple[Tensor, ...]:
        pairs = [self._row(row, number) for row, number in zip(inputs_BT, numbers, strict=True)]
        return tuple(torch.stack(rows) for rows in zip(*pairs, strict=True))

    def _row(self, row: Tensor, number: int) -> tuple[Tensor, Tensor]:
        random = torch.Generator().manual_seed(seed_of(self.seed, number))
        counts, fate = torch.rand(2, len(row), generator=random)
        others = torch.randint(self.vocab_size, row.shape, generator=random)
        chosen = counts < SHARE
        if not chosen.any():  # a row without a target would teach nothing
            chosen[int(counts.argmin())] = True
        seen = torch.where(fate < HIDDEN, self.mask, torch.where(fate < HIDDEN + RANDOM, others, row))
        return torch.where(chosen, seen, row), torch.where(chosen, row, IGNORED)


@dataclass(frozen=True)
class Prefixing:
    """Inputs, targets after a prefix, documents (one per row), and lengths of the prefixes (B,)."""

    seed: int

    def __call__(self, inputs_BT: Tensor, next_BT: Tensor, numbers: Sequence[int]) -> tuple[Tensor, ...]:
        n_tokens = inputs_BT.shape[1]
        prefix_B = torch.tensor([self._length(n_tokens, number) for number in numbers])
        inside = torch.arange(n_tokens) < prefix_B[:, None] - 1  # the last token of the prefix predicts the next one
        return inputs_BT, torch.where(inside, IGNORED, next_BT), torch.zeros_like(inputs_BT), prefix_B

    def _length(self, n_tokens: int, number: int) -> int:
        random = torch.Generator().manual_seed(seed_of(self.seed, number))
        return int(torch.randint(1, max(n_tokens, 2), (), generator=random))


@dataclass(frozen=True)
class Apart:
    """Inputs, next tokens, and documents: each token `first` starts a new one."""

    first: int

    def __call__(self, inputs_BT: Tensor, next_BT: Tensor, _: Sequence[int]) -> tuple[Tensor, ...]:
        return inputs_BT, next_BT, (inputs_BT == self.first).cumsum(1)


@dataclass(frozen=True)
class ViewedTokens:
    """Text to evaluate on, through a view that is the same each time."""

    text: Tokens
    view: View

    @property
    def n_tokens(self) -> int:
        return self.text.n_tokens

    @property
    def bytes_per_token(self) -> float:
        return self.text.bytes_per_token

    def windows(self, context: int) -> int:
        """How many windows of `context` inputs fit without overlap."""
        return self.text.windows(context)

    def window(self, indices: Sequence[int], context: int) -> tuple[Tensor, ...]:
        """The view of windows of `context` tokens; targets are IGNORED where nothing counts."""
        return self.view(*self.text.window(indices, context), indices)
