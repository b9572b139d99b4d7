"""Which tokens of a row see which others (causal, document and sliding-window masks), and their positions.

One rule: token i sees token j if the model's kind of mask allows it, both belong to the same document, and
their positions differ by less than `window`. Padding is a document of its own.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.attention.flex_attention import BlockMask

from bitnet.config import ModelConfig

BLOCK = 128  # tokens, as torch's kernels take them

Mask = Tensor | BlockMask | None
"""The mask given to a layer: true where a token sees another, or which blocks of tokens to compute; None: only the
model's kind of mask applies."""


def attention_mask(
    config: ModelConfig,
    n_tokens: int,
    documents_BT: Tensor | None,
    prefix_B: Tensor | None,
    like: Tensor,
    in_blocks: bool,
) -> Mask:
    """The mask of a model's layer. in_blocks: as `blocks`, which needs no T·T memory."""
    window = config.sliding_window if config.sliding_window < n_tokens else 0
    if documents_BT is None and not window and (prefix_B is None or config.mask != "prefix"):
        return None
    of = blocks if in_blocks else visible
    return of(config.mask, n_tokens, window, documents_BT, prefix_B, like)


def seen(
    mask: str, n_tokens: int, window: int, documents_BT: Tensor | None, prefix_B: Tensor | None, like: Tensor
) -> tuple[Tensor, Tensor]:
    """First token that each token sees, and last one plus 1: (T,), or (B, T) where rows of the batch differ.

    window: 0 for none. prefix_B: with the mask "prefix", how many tokens at the start of each row all others see.
    """
    index = torch.arange(n_tokens, device=like.device)
    first, last = torch.zeros_like(index), index + 1
    if mask == "bidirectional":
        last = torch.full_like(index, n_tokens)
    if mask == "prefix" and prefix_B is not None:
        last = torch.maximum(last, prefix_B[:, None])
    if window:
        first, last = (index - window + 1).clamp(min=0), torch.minimum(last, index + window)
    if documents_BT is not None:
        ends_BT = F.pad(begins(documents_BT)[:, 1:], (0, 1), value=True)
        first = torch.maximum(first, index - positions(documents_BT))
        last = torch.minimum(last, torch.where(ends_BT, index + 1, n_tokens).flip(1).cummin(1).values.flip(1))
    first, last = torch.broadcast_tensors(first, last)
    return first, last


def visible(
    mask: str, n_tokens: int, window: int, documents_BT: Tensor | None, prefix_B: Tensor | None, like: Tensor
) -> Tensor:
    """True where a token (row) sees another: (T, T), or (B, 1, T, T) where rows of the batch differ."""
    first, last = seen(mask, n_tokens, window, documents_BT, prefix_B, like)
    index = torch.arange(n_tokens, device=like.device)
    sees = (index >= first[..., None]) & (index < last[..., None])
    return sees if sees.dim() == 2 else sees[:, None]


def blocks(
    mask: str, n_tokens: int, window: int, documents_BT: Tensor | None, prefix_B: Tensor | None, like: Tensor
) -> BlockMask:
    """The same for `flex_attention`: for each block of BLOCK tokens, the blocks with a token that any of them sees."""
    first, last = (each.expand(len(like), -1) for each in seen(mask, n_tokens, window, documents_BT, prefix_B, like))
    n, filling = -(-n_tokens // BLOCK), (0, -n_tokens % BLOCK)
    begin_BN = F.pad(first, filling, value=n_tokens).unflatten(1, (n, BLOCK)).amin(2) // BLOCK
    end_BN = F.pad(last, filling).unflatten(1, (n, BLOCK)).amax(2).add(BLOCK - 1) // BLOCK
    at_BNN = (begin_BN[:, :, None] + torch.arange(n, device=like.device)).clamp(max=n - 1)

    def sees(b: Tensor, _: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (key >= first[b, query]) & (key < last[b, query])

    counts, which = (end_BN - begin_BN)[:, None].int(), at_BNN[:, None].int()
    return BlockMask.from_kv_blocks(counts, which, BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(n_tokens, n_tokens))


def begins(documents_BT: Tensor) -> Tensor:
    """(B, T), true where a document starts; a document is a run of equal numbers."""
    first_BT = torch.ones_like(documents_BT, dtype=torch.bool)
    first_BT[:, 1:] = documents_BT[:, 1:] != documents_BT[:, :-1]
    return first_BT


def positions(documents_BT: Tensor) -> Tensor:
    """(B, T), how many tokens of its own document precede each token."""
    index = torch.arange(documents_BT.shape[1], device=documents_BT.device).expand_as(documents_BT)
    return index - torch.where(begins(documents_BT), index, 0).cummax(dim=1).values
