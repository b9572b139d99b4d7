"""Distillation: a student learns from what a frozen teacher computes of the same tokens.

Facts and figures: bitnet/FINETUNING.md.
"""

from __future__ import annotations

import torch
from tokenizers import Tokenizer
from torch import Tensor
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.finetune import SourceModelError, Start, build
from bitnet.settings import Settings


class Distillation:
    """The teacher of a run, and the loss terms that come from it.

    The teacher is frozen and computes as its source does. Raises SourceModelError when its tokens are not those
    of the student, whose configuration and tokenizer are `config` and `words`.
    """

    def __init__(self, start: Start, settings: Settings, config: ModelConfig, words: Tokenizer) -> None:
        theirs, ours = start.words.get_vocab(), words.get_vocab()
        other = next((text for text, token in theirs.items() if ours.get(text) != token), None)
        if other is not None:
            raise SourceModelError(
                f"--teacher {settings.teacher}: its token {other!r:.40} has the id {theirs[other]}, that of the source "
                f"{ours.get(other)}; expected a teacher with the same tokenizer"
            )
        rows = max(config.vocab_size, start.config.vocab_size)
        model = build(start, start.config.replace(vocab_size=rows))[0]
        self.teacher = model.requires_grad_(False).eval().to(settings.device)
        self.temperature = settings.distill_temperature

    def terms(self, logits_NV: Tensor, targets_N: Tensor, inputs: Tensor, *documents: Tensor) -> dict[str, Tensor]:
        """Sums over the targets that count, by name. logits_NV: what the student has just made of `inputs`."""
        with torch.no_grad():
            taught_NV = self.teacher(inputs, *documents).flatten(0, 1)
        return {"divergence": divergence(logits_NV, taught_NV, targets_N, self.temperature)}


def weights(settings: Settings) -> dict[str, float]:
    """What each term of the loss is multiplied by."""
    return {"cross_entropy": 1 - settings.distill} | ({"divergence": settings.distill} if settings.distill else {})


def divergence(logits: Tensor, taught: Tensor, targets: Tensor, temperature: float) -> Tensor:
    """Σ T²·KL(teacher ‖ student) in nats over the positions that count. logits, taught: (n, V), targets: (n,).

    T² keeps the size of the gradient (arXiv 1503.02531 §2.1). A teacher may have more rows than tokens.
    """
    counts = targets >= 0
    student = F.log_softmax(logits[counts].float() / temperature, -1)
    expected = F.log_softmax(taught[counts, : logits.shape[-1]].float() / temperature, -1)
    return temperature**2 * F.kl_div(student, expected, reduction="sum", log_target=True)
