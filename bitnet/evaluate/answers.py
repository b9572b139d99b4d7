"""How well a model answers questions about images: loss of the answers, and how many are right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from bitnet.data.dataset import IGNORED
from bitnet.data.picture_rows import Answers
from bitnet.data.picture_talks import Talks
from bitnet.evaluate.loss import chosen_windows
from bitnet.model import parallel
from bitnet.model.transformer import Transformer


@dataclass(frozen=True)
class Answered:
    """Results on held-out records."""

    nats_per_token: float  # over answers and their end tokens
    right: float  # share of answers that greedy generation reproduces token for token
    answers: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.nats_per_token:.4f} nats/token, {self.right:.1%} of {self.answers:,} answers right"

    @property
    def details(self) -> str:
        return f"{self.tokens:,} tokens"


def evaluate(model: Transformer, records: Answers | Talks, context: int, batch: int = 16, limit: int = 0) -> Answered:
    """Evaluate in fp32, like the engine. limit: tokens, of evenly spaced records; 0: all records.

    Greedy generation gives an answer if and only if each of its tokens is the most probable one after those before it.
    So one pass over the answer replaces generating it token by token.
    """
    n = records.count(context)
    chosen = chosen_windows(n, max(1, limit // context) if limit else 0)
    total, counted, right, answers = 0.0, 0, 0, 0
    with torch.no_grad(), model.evaluating():
        for i, counts in parallel.dealt(math.ceil(len(chosen) / batch)):
            rows = records.rows(chosen[i * batch : (i + 1) * batch], context)
            inputs, targets, *told = (t.to(model.device) for t in rows)
            log_p, likeliest = model(inputs, *told, targets_BT=targets, each=True)  # never all logits in memory
            if counts:
                total -= log_p.double().sum().item()
                counted += int((targets != IGNORED).sum())
                right += int(((likeliest > 0) | (targets == IGNORED)).all(1).sum())
                answers += len(targets)
    total, n_counted, n_right, n_answers = parallel.total([total, counted, right, answers])
    return Answered(total / n_counted, n_right / n_answers, int(n_answers), int(n_counted))
