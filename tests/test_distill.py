"""Distillation: what a student learns from a teacher, worked by hand and on tiny models."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from bitnet import distill, finetune, tokenizer
from bitnet.config import ModelConfig
from bitnet.model import Transformer
from bitnet.settings import Settings

torch.set_num_threads(1)

SHAPE: dict[str, Any] = {
    "vocab_size": 257, "dim": 32, "n_layers": 2, "n_heads": 2, "n_kv_heads": 1, "head_dim": 16, "ffn_dim": 48,
    "max_context": 64, "ternary": [], "head_format": "f32",
}  # fmt: skip


def start(seed: int = 0, **changes: Any) -> finetune.Start:
    """A full-precision model with random weights."""
    torch.manual_seed(seed)
    config = ModelConfig.from_dict(SHAPE | changes)
    return finetune.Start("a model", config, Transformer(config).state_dict(), tokenizer.build("byte", [], 257))


def student(source: finetune.Start) -> Transformer:
    return finetune.build(source, source.defaults()[1])[0]


def distillation(source: finetune.Start, model: Transformer, **options: Any) -> distill.Distillation:
    settings = Settings(device="cpu", source="x", **options)
    return distill.Distillation(source, settings, model.config, source.words)


def tokens(rows: int = 4, length: int = 24) -> Tensor:
    return torch.randint(0, 257, (rows, length), generator=torch.Generator().manual_seed(0))


# ---- the teacher ----


def test_a_teacher_with_another_tokenizer() -> None:
    source = start()
    other = tokenizer.build("char", ["xyz"], 300)
    with pytest.raises(finetune.SourceModelError, match="expected a teacher with the same tokenizer"):
        distill.Distillation(source, Settings(device="cpu", source="x"), source.config, other)


def test_distillation_lowers_the_divergence() -> None:
    source = start()
    model, inputs = student(source), tokens()
    distilled = distillation(source, model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    found = []
    for _ in range(40):
        terms = distilled.terms(model(inputs).flatten(0, 1), inputs.flatten(), inputs)
        loss = terms["divergence"] / inputs.numel()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        found.append(loss.item())
    assert found[-1] < 0.5 * found[0]
    assert all(parameter.grad is None for parameter in distilled.teacher.parameters())


# ---- divergence ----


def test_divergence_by_hand() -> None:
    teacher, learner = torch.tensor([[0.0, math.log(3.0)]]), torch.tensor([[0.0, 0.0]])
    kl = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    both = torch.cat([learner, learner]), torch.cat([teacher, teacher * 9])
    # fp32 logarithms of numbers of order 1
    assert float(distill.divergence(*both, torch.tensor([1, -100]), 1.0)) == pytest.approx(kl, rel=1e-6)
    wide = torch.cat([teacher, torch.tensor([[5.0]])], dim=1)  # a row without a token
    assert float(distill.divergence(learner, wide, torch.tensor([0]), 1.0)) == pytest.approx(kl, rel=1e-6)
    halved = torch.softmax(teacher / 2, -1)
    kl = float((halved * (halved.log() - math.log(0.5))).sum())
    assert float(distill.divergence(learner, teacher, torch.tensor([0]), 2.0)) == pytest.approx(4 * kl, rel=1e-5)
