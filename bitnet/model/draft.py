"""A draft head: a layer for multi-token prediction (MTP), whose draft tokens a model verifies in one pass.

It takes the model's hidden state of a token after the final norm and the embedding row of the next token, and returns a
state from which the model's own head predicts the token after that one (export/FORMAT.md, "A draft"). It continues
from its own states, step by step, with the same weights. Form: DeepSeek-V3 (arXiv 2412.19437 §2.2); steps unrolled
over its own states: arXiv 2503.01840, 2509.18362.

Entry j stands for tokens j and j + 1. In step k its state is the output of step k − 1 at entry j − 1. It attends to
the entries that a chain of k steps has: those of the first step up to j − k + 1, then one of each later step.

Shape letters as in `bitnet.model.transformer`; E entries, S steps.
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bitnet.bitlinear import BitLinear
from bitnet.config import ModelConfig
from bitnet.model.block import Block
from bitnet.model.head import Head, draft_loss
from bitnet.model.layers import norm_of
from bitnet.model.masks import Mask, begins, visible
from bitnet.model.positions import places

STEPS = 3
WEIGHTS = (0.51, 0.31, 0.18)
"""Weights of the steps in the loss: arXiv 2509.18362."""


class Steps(NamedTuple):
    """Results of the steps of a draft at every entry."""

    loss: Tensor  # (): Σ over entries and steps of weight · cross-entropy, nats
    counts: Tensor  # (S, B, E): whether the chain of that many steps that ends here is within one document
    right: Tensor  # (S, B, E): whether the draft's most probable token here is the model's


class Recalling(Block):
    """A layer whose tokens also attend to keys and values of earlier calls, as far as the mask allows."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.past: list[tuple[Tensor, Tensor]] = []

    def attend(self, q_BHTE: Tensor, k_BGTE: Tensor, v_BGTE: Tensor, mask: Mask) -> Tensor:
        self.past.append((k_BGTE, v_BGTE))
        keys, values = (torch.cat(each, 2) for each in zip(*self.past, strict=True))
        return super().attend(q_BHTE, keys, values, mask)


class Draft(nn.Module):
    """The draft of a model; config: its own, with input "draft"."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        dim = config.dim
        self.draft_hidden_norm, self.draft_embedding_norm = norm_of(config, dim), norm_of(config, dim)
        self.draft_projection: nn.Linear = (
            BitLinear(2 * dim, dim, False, config.weight_scale) if config.ternary else nn.Linear(2 * dim, dim, False)
        )
        self.layers = nn.ModuleList(Recalling(config.of_layer(i)) for i in range(config.n_layers))
        self.final_norm = norm_of(config, dim) if config.final_norm else nn.Identity()

    @property
    def blocks(self) -> list[Recalling]:
        return cast(list[Recalling], list(self.layers))

    def states(
        self, hidden_BED: Tensor, rows_BED: Tensor, documents_BE: Tensor | None = None, steps: int = 1
    ) -> list[Tensor]:
        """The states (B, E, D) after each step, for the model's head. In step k the first k − 1 entries are not valid.

        hidden: the model's state of each entry's first token; rows: embedding rows of its second.
        """
        rows_BED = self.draft_embedding_norm(rows_BED)
        found: list[Tensor] = []
        state_BED, at = hidden_BED, [places(layer.config, hidden_BED, documents_BE) for layer in self.blocks]
        try:
            for step in range(steps):
                pair = torch.cat([self.draft_hidden_norm(state_BED), rows_BED.to(state_BED.dtype)], -1)
                x_BED = self.draft_projection(pair)
                for layer, (cos, sin, mask) in zip(self.blocks, at, strict=True):
                    seen = self._seen(layer.config, x_BED, documents_BE, step) if step else mask
                    x_BED = layer(x_BED, cos, sin, seen)
                found.append(self.final_norm(x_BED))
                state_BED = F.pad(found[-1][:, :-1], (0, 0, 1, 0))
        finally:
            for layer in self.blocks:
                layer.past = []
        return found

    def _seen(self, config: ModelConfig, x_BED: Tensor, documents_BE: Tensor | None, step: int) -> Tensor:
        """Mask (..., E, steps · E): which entries of each step so far every entry sees; this step is the last part."""
        n = x_BED.shape[1]
        index = torch.arange(n, device=x_BED.device)
        behind = index[:, None] - index
        sees = visible("causal", n, config.sliding_window, documents_BE, None, x_BED)
        chain = [behind >= step, *(behind == step - earlier for earlier in range(1, step + 1))]
        # Where a chain would start before the text, an entry sees itself: a fully masked row would give NaN.
        return torch.cat([sees & part for part in chain], -1)


def within(documents_BT: Tensor, step: int) -> Tensor:
    """(B, T − 1): whether the chain of step + 1 steps that ends at an entry starts in the same document."""
    first_BT = begins(documents_BT)
    runs_BT = first_BT.cumsum(1)
    start_BE = F.pad(runs_BT, (step, 0), value=-1)[:, : runs_BT.shape[1] - 1]
    return start_BE == runs_BT[:, 1:]


def unrolled(
    draft: Draft, head: Head, hidden_BTD: Tensor, rows_BTD: Tensor, targets_BT: Tensor, documents_BT: Tensor | None
) -> Steps:
    """The draft at every position of a text, for the loss. Gradients do not flow into the model.

    hidden: the model's states; rows: embedding rows; targets: the next tokens, negative where ignored.
    """
    hidden_BTD, rows_BTD = hidden_BTD.detach(), rows_BTD.detach()
    documents_BE = None if documents_BT is None else documents_BT[:, :-1]
    states = draft.states(hidden_BTD[:, :-1], rows_BTD[:, 1:], documents_BE, STEPS)
    targets_BE = targets_BT[:, 1:]
    whole = documents_BT if documents_BT is not None else torch.zeros_like(targets_BT)
    counts_SBE = torch.stack([within(whole, step) & (targets_BE >= 0) for step in range(STEPS)])
    flat = torch.stack(states).flatten(1, 2), hidden_BTD[:, 1:].flatten(0, 1), targets_BE.flatten()
    loss, right_SN = draft_loss(*flat, counts_SBE.flatten(1), WEIGHTS, head)
    return Steps(loss, counts_SBE, right_SN.view_as(counts_SBE))


def accepted(steps: Steps) -> tuple[Tensor, Tensor]:
    """How many chains had their first 1, 2, ... draft tokens all right (S,), and in how many these all count (S,)."""

    def of_chains(flags_SBE: Tensor, step: int) -> Tensor:
        """Whether draft tokens 0 to `step` of each chain, at consecutive entries, all have the flag."""
        n = flags_SBE.shape[2] - step
        return torch.stack([flags_SBE[m, :, m : m + n] for m in range(step + 1)]).all(0)

    count = [of_chains(steps.counts, step) for step in range(len(steps.counts))]
    right = [of_chains(steps.right, step) & counted for step, counted in enumerate(count)]
    return torch.stack([each.sum() for each in right]), torch.stack([each.sum() for each in count])
