"""The acceptance rate of draft tokens on what the model generates, greedily, after held-out text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import torch

from bitnet.data import dataset, views
from bitnet.data.dialogues import Dialogues
from bitnet.evaluate.loss import chosen_windows, too_short
from bitnet.model.draft import accepted
from bitnet.model.transformer import Transformer

PROMPT, WRITTEN = 64, 32  # tokens of the prompt and of its continuation
LEAST, MOST = 4, 64  # number of texts


@dataclass(frozen=True)
class Accepted:
    """Results of a draft that starts a chain of draft tokens after every token."""

    nats_per_guess: float  # its loss as in training
    accepted: tuple[float, ...]  # acceptance rate: share of chains whose first 1, 2, ... draft tokens are all right
    tokens_per_pass: float  # tokens per pass of the model with full chains: 1 plus the accepted draft tokens
    chains: int

    @classmethod
    def mean(cls, found: Sequence[Accepted], weights: Sequence[float]) -> Self:
        """The mean of several texts. weights: of each; their sum is 1."""

        def weighted(values: Sequence[float]) -> float:
            return sum(weight * value for weight, value in zip(weights, values, strict=True))

        shares = tuple(weighted(each) for each in zip(*(one.accepted for one in found), strict=True))
        nats = weighted([one.nats_per_guess for one in found])
        return cls(nats, shares, 1 + sum(shares), sum(one.chains for one in found))

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.2f}" for share in self.accepted)
        return f"{self.nats_per_guess:.4f} nats/draft token, {shares} accepted, {self.tokens_per_pass:.2f} tokens/pass"

    @property
    def details(self) -> str:
        return f"{self.chains:,} chains"


def evaluate(
    model: Transformer,
    text: dataset.Tokens | views.ViewedTokens | Dialogues,
    context: int,
    limit: int = 0,
) -> Accepted:
    """Evaluate in fp32, like the engine, after evenly spaced texts. limit: tokens that the model computes, without a
    KV cache; 0: MOST texts. In rows of several documents the last one of the prompt is continued.

    As long as its draft tokens are right, a greedy chain sees the model's own tokens. So after every token of a
    generated text, they are right exactly where they would be in an engine that drafts from there.
    """
    if text.windows(context) < 1:
        raise too_short(text.n_tokens, context)
    prompt = max(1, min(PROMPT, context // 2))
    rows = max(LEAST, min(MOST, limit // (prompt * WRITTEN))) if limit else MOST
    chosen = chosen_windows(text.windows(context), rows)
    with torch.no_grad(), model.evaluating():
        tokens, _, *more = text.window(chosen, context)
        documents = more[0] if more else torch.zeros_like(tokens)
        filled = (documents >= 0).sum(1)  # padding comes last
        prompt = min(prompt, int(filled.max()))
        tokens, documents = (part[filled >= prompt, :prompt].to(model.device) for part in (tokens, documents))
        for _ in range(min(WRITTEN, model.config.max_context - prompt)):
            last = model.own_head.logits(model.hidden(tokens, documents)[:, -1:])
            tokens, documents = torch.cat([tokens, last.argmax(-1)], 1), torch.cat([documents, documents[:, -1:]], 1)
        inputs, targets, documents = tokens[:, :-1], tokens[:, 1:].clone(), documents[:, :-1]
        targets[:, : prompt - 1] = dataset.IGNORED
        steps = model.unrolled(model.hidden(inputs, documents), inputs, targets, documents)
        right, chains = accepted(steps)
    shares = tuple((right / chains.clamp(min=1)).tolist())
    return Accepted(float(steps.loss / chains[0].clamp(min=1)), shares, 1 + sum(shares), int(chains[0]))
