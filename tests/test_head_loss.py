"""Head and cross-entropy in portions: value and gradients are those of all logits at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.float_product import product
from bitnet.model import head
from bitnet.model.transformer import Transformer

SMALL: dict[str, Any] = {
    "vocab_size": 301, "dim": 64, "n_layers": 1, "n_heads": 2, "n_kv_heads": 1, "head_dim": 32, "ffn_dim": 96,
    "max_context": 64,
}  # fmt: skip
KINDS: dict[str, dict[str, Any]] = {
    "int8": {}, "f16": {"head_format": "f16"}, "full precision": {"head_format": "f32", "ternary": ()},
    "ternary": {"head_format": "ternary"}, "capped": {"logit_softcap": 5.0},
    "bias": {"tie_embeddings": False, "head_bias": True},
    "group scales": {"head_format": "ternary", "weight_scale": "group", "dim": 192, "n_heads": 6},
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("amount", [1.0, 0.5])
@pytest.mark.parametrize("precision", [torch.float64, torch.float32, torch.bfloat16])
def test_portions_are_the_whole(
    kind: str, amount: float, precision: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In fp32, sums in another order differ by about 2⁻²⁴; under autocast, portions of a gradient are rounded to bf16,
    2⁻⁹, before they are added."""
    torch.manual_seed(1)
    model = Transformer(ModelConfig(**SMALL | KINDS[kind]))
    model = model.double() if precision == torch.float64 else model
    if model.config.head_bias:
        torch.nn.init.normal_(model.head.bias)  # type: ignore[union-attr,arg-type]
    tokens = torch.randint(0, 301, (4, 33))
    targets = tokens[:, 1:].clone()
    targets[0, :5] = targets[3] = -100
    monkeypatch.setitem(head.PORTION, "cpu", 50 * 301)  # 128 tokens: two whole portions, and a part of one
    losses, gradients = [], []
    for in_portions in (False, True):
        model.zero_grad()
        with (
            model.partly_quantized(amount),
            torch.autocast("cpu", torch.bfloat16, enabled=precision == torch.bfloat16),
        ):
            if in_portions:
                loss = model(tokens[:, :-1], targets_BT=targets)
            else:
                loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), targets.flatten(), reduction="sum")
            (3 * loss).backward()
        losses.append(loss.item())
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    near = {torch.float64: 1e-6, torch.float32: 1e-5, torch.bfloat16: 1e-2}[precision]
    assert len(gradients[0]) == len(gradients[1]) == len(list(model.parameters()))
    for whole, part in zip(*gradients, strict=True):
        assert (whole - part).norm() <= near * whole.norm()


@pytest.mark.parametrize(("numbers", "rows"), [(20 * 301, [20, 20, 10]), (300, [1] * 50)])
def test_logits_are_never_in_memory_together(numbers: int, rows: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    def watched(x: torch.Tensor, *others: Any) -> tuple[torch.Tensor, torch.Tensor]:
        seen.append(len(x))
        return head.portion(x, *others)

    model = Transformer(ModelConfig(**SMALL))
    model.portion = watched
    monkeypatch.setitem(head.PORTION, "cpu", numbers)
    model.loss(torch.zeros(1, 50, dtype=torch.long), torch.ones(1, 50, dtype=torch.long)).backward()
    assert seen == rows


@pytest.mark.parametrize("each", [False, True])
def test_a_frozen_head_gets_no_gradient(each: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As with adapters: the gradient of what is trained stays, and no product makes that of the head."""
    model = Transformer(ModelConfig(**SMALL))
    tokens, gradients, made = torch.arange(50).reshape(1, 50), [], []

    def watched(*operands: torch.Tensor) -> torch.Tensor:
        made.append(tuple(len(x) for x in operands))
        return product(*operands)

    monkeypatch.setattr(head, "product", watched)
    for frozen in (False, True):
        model.zero_grad()
        made.clear()
        model.requires_grad_(not frozen)
        model.layers.requires_grad_(True)
        model(tokens, targets_BT=tokens.roll(-1, 1), each=each).sum().backward()
        gradients.append([p.grad.clone() for p in model.layers.parameters() if p.grad is not None])
        assert ((SMALL["vocab_size"], 50) in made) != frozen
    assert len(gradients[0]) == len(gradients[1]) > 5 and all(map(torch.equal, *gradients))
