"""How well a model answers what it is asked of pictures: loss of the answers, and how many are right."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch.nn import functional as F

from bitnet.data.dataset import IGNORED
from bitnet.data.picture_rows import Answers
from bitnet.data.picture_talks import Talks
from bitnet.evaluate.loss import chosen_windows
from bitnet.model import parallel
from bitnet.model.transformer import Transformer


@dataclass(frozen=True)
class Answered:
    """Of held-out records."""

    nats_per_token: float  # of answers and their end
    right: float  # share that the model answers token for token, when it always takes the likeliest token
    answers: int
    tokens: int

    def __str__(self) -> str:
        return f"{self.nats_per_token:.4f} nats/token, {self.right:.1%} of {self.answers:,} answers right"


def evaluate(model: Transformer, records: Answers | Talks, context: int, batch: int = 16, limit: int = 0) -> Answered:
    """limit: tokens, or 0 for all; then records are evenly spaced. In fp32, as the engine computes.

    An answer is the one that greedy generation gives if and only if each of its tokens is the likeliest after those
    before it. So one pass over all of them says what generating them one by one would.
    """
    n = records.count(context)
    chosen = chosen_windows(n, max(1, limit // context) if limit else 0)
    total, counted, right, answers = 0.0, 0, 0, 0
    with torch.no_grad(), model.evaluating():
        for i, counts in parallel.dealt(math.ceil(len(chosen) / batch)):
            rows = records.rows(chosen[i * batch : (i + 1) * batch], context)
            inputs, targets, *told = (t.to(model.device) for t in rows)
            logits = model(inputs, *told)
            if counts:
                loss = F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="sum")
                total += loss.double().item()
                counted += int((targets != IGNORED).sum())
                right += int(((logits.argmax(-1) == targets) | (targets == IGNORED)).all(1).sum())
                answers += len(targets)
    total, n_counted, n_right, n_answers = parallel.total([total, counted, right, answers])
    return Answered(total / n_counted, n_right / n_answers, int(n_answers), int(n_counted))
