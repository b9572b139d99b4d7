"""Which tokens of a row see which others, and at what position each stands."""

from __future__ import annotations

import torch
from torch import Tensor


def window_mask(n_tokens: int, window: int, like: Tensor) -> Tensor:
    """(T, T), true where a token (row) sees another: itself and the window - 1 before it."""
    distance = torch.arange(n_tokens, device=like.device)
    distance = distance[:, None] - distance
    return (distance >= 0) & (distance < window)


def attention_mask(n_tokens: int, window: int, documents_BT: Tensor | None, like: Tensor) -> Tensor | None:
    """`window_mask` within each document: (T, T), or (B, 1, T, T) with documents. None: causal, nothing else."""
    if documents_BT is None:
        return window_mask(n_tokens, window, like) if 0 < window < n_tokens else None
    same_BTT = documents_BT[:, :, None] == documents_BT[:, None, :]
    return (same_BTT & window_mask(n_tokens, window or n_tokens, like))[:, None]


def positions(documents_BT: Tensor) -> Tensor:
    """(B, T), how many tokens of its own document stand before each. A document is a run of equal numbers."""
    index = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand_as(documents_BT)
    begins = torch.ones_like(documents_BT, dtype=torch.bool)
    begins[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return index - torch.where(begins, index, 0).cummax(dim=1).values
