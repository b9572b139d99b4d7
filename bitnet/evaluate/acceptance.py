"""How many of a draft's guesses are right: of what the model itself writes, greedily, behind held-out text."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from bitnet.data import dataset, masked
from bitnet.data.dialogues import Dialogues
from bitnet.evaluate.loss import chosen_windows
from bitnet.model.draft import accepted
from bitnet.model.transformer import Transformer

PROMPT, WRITTEN = 64, 32  # tokens of a text that is continued, and tokens that it is continued by
LEAST, MOST = 4, 64  # texts


@dataclass(frozen=True)
class Accepted:
    """Of a draft that guesses again behind every token."""

    nats_per_guess: float  # its loss as in training
    accepted: tuple[float, ...]  # share of chains whose first 1, 2, ... guesses are all right
    tokens_per_pass: float  # of the model, if all guesses were made each time: 1 and those
    chains: int

    def __str__(self) -> str:
        shares = ", ".join(f"{share:.2f}" for share in self.accepted)
        return f"{self.nats_per_guess:.4f} nats/guess, {shares} accepted, {self.tokens_per_pass:.2f} tokens/pass"


def evaluate(
    model: Transformer,
    text: dataset.Tokens | masked.ViewedTokens | Dialogues,
    context: int,
    limit: int = 0,
) -> Accepted:
    """In fp32, as the engine computes, behind texts that are evenly spaced. limit: tokens that the model computes,
    which keeps none from token to token; 0: as for the most texts.

    A greedy chain stands for itself as long as its guesses are right. So behind every token of a text that the model
    wrote, whether they are is what an engine would find that drafts from there.
    """
    prompt = max(1, min(PROMPT, context // 2))
    rows = max(LEAST, min(MOST, limit // (prompt * WRITTEN))) if limit else MOST
    chosen = chosen_windows(text.windows(context), rows)
    with torch.no_grad(), model.evaluating():
        tokens = text.window(chosen, context)[0][:, :prompt].to(model.device)
        for _ in range(min(WRITTEN, model.config.max_context - prompt)):
            last = model.own_head.logits(model.hidden(tokens)[:, -1:])
            tokens = torch.cat([tokens, last.argmax(-1)], 1)
        inputs, targets = tokens[:, :-1], tokens[:, 1:].clone()
        targets[:, : prompt - 1] = dataset.IGNORED
        steps = model.unrolled(model.hidden(inputs), inputs, targets)
        right, chains = accepted(steps)
    shares = tuple((right / chains.clamp(min=1)).tolist())
    return Accepted(float(steps.loss / chains[0].clamp(min=1)), shares, 1 + sum(shares), int(chains[0]))
