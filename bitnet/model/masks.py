"""Which tokens of a row see which others, and at what position each stands.

One rule: token i sees token j when the mask of the model says so, when both are of one document, and when
fewer than `window` positions lie between them. What only fills a row up is a document of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnet.config import ModelConfig


def attention_mask(
    config: ModelConfig, n_tokens: int, documents_BT: Tensor | None, prefix_B: Tensor | None, like: Tensor
) -> Tensor | None:
    """`visible` of a model's layer; None where a causal or a bidirectional mask says it all."""
    window = config.sliding_window if config.sliding_window < n_tokens else 0
    prefix_B = prefix_B if config.mask == "prefix" else None
    if documents_BT is None and prefix_B is None and not window:
        return None
    return visible(config.mask, n_tokens, window, documents_BT, prefix_B, like)


def visible(
    mask: str, n_tokens: int, window: int, documents_BT: Tensor | None, prefix_B: Tensor | None, like: Tensor
) -> Tensor:
    """True where a token (row) sees another: (T, T), or (B, 1, T, T) where rows of the batch differ.

    window: 0 for none. prefix_B: how many tokens at the beginning of each row all others see.
    """
    index = torch.arange(n_tokens, device=like.device)
    distance = index[:, None] - index
    sees = torch.ones_like(distance, dtype=torch.bool) if mask == "bidirectional" else distance >= 0
    if prefix_B is not None:
        sees = sees | (index < prefix_B[:, None])[:, None, None]
    if window:
        sees = sees & (distance.abs() < window)
    if documents_BT is not None:
        runs_BT = begins(documents_BT).cumsum(1)
        sees = sees & (runs_BT[:, :, None] == runs_BT[:, None, :])[:, None]
    return sees


def begins(documents_BT: Tensor) -> Tensor:
    """(B, T), true where a document begins: a run of equal numbers."""
    first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return first_BT


def positions(documents_BT: Tensor) -> Tensor:
    """(B, T), how many tokens of its own document stand before each."""
    index = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand_as(documents_BT)
    return index - torch.where(begins(documents_BT), index, 0).cummax(dim=1).values
