"""Attention with bf16 operands against torch's own in fp32."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.model import masks
from bitnet.model.attention import LONGEST, attention_in_bf16, bf16_attention
from bitnet.model.transformer import Transformer

DOCUMENTS = torch.tensor([[0] * 5 + [1] * 14, [0] * 19, [3] * 18 + [4]])


def heads(n: int, generator: torch.Generator) -> Tensor:
    """(3, n, 19, 8), in memory as a layer has them: token by token."""
    return torch.randn(3, 19, n, 8, generator=generator).transpose(1, 2).requires_grad_()


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(4, 4), (4, 2), (6, 1)])
@pytest.mark.parametrize("seen", ["causal", "all", "documents", "window", "more keys"])
def test_as_torch(n_heads: int, n_kv_heads: int, seen: str) -> None:
    """bf16 has 8 bits: operands, weights and their gradients are each rounded to 2⁻⁹ of themselves, and errors of a
    sum partly cancel: 2 % of the largest leaves room."""
    generator = torch.Generator().manual_seed(n_heads)
    q, k, v = heads(n_heads, generator), heads(n_kv_heads, generator), heads(n_kv_heads, generator)
    mask = None
    if seen == "documents":
        mask = masks.visible("causal", 19, 0, DOCUMENTS, None, q)
    elif seen == "window":
        mask = masks.visible("causal", 19, 4, None, None, q)
    elif seen == "more keys":
        k, v = (torch.cat([x, x.flip(2)], 2).detach().requires_grad_() for x in (k, v))
        mask = torch.rand(19, 38, generator=generator) < 0.5
    causal, grad = seen == "causal", torch.randn(3, n_heads, 19, 8, generator=generator)
    found = bf16_attention(q, k, v, mask, causal, 0.4)
    expected = F.scaled_dot_product_attention(q, k, v, mask, 0.0, is_causal=causal, scale=0.4, enable_gqa=True)
    pairs = [(found, expected)]
    pairs += zip(*(torch.autograd.grad(y, (q, k, v), grad) for y in (found, expected)), strict=True)
    for a, b in pairs:
        assert a.dtype == torch.float32 and a.shape == b.shape
        assert (a - b).abs().max() < 0.02 * b.abs().max()
    assert not found.equal(expected)


def test_where_it_is_used() -> None:
    """Under autocast alone, with a gradient or without; evaluations compute as the engine does."""
    x = torch.zeros(1, 1, 4, 8)
    assert not attention_in_bf16(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert attention_in_bf16(x)
        assert not attention_in_bf16(torch.zeros(1, 1, LONGEST + 1, 8))
    torch.manual_seed(0)
    model = Transformer(
        ModelConfig(vocab_size=30, dim=16, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=8, ffn_dim=32, max_context=12)
    )
    tokens = torch.randint(0, 30, (2, 12))
    plain = model(tokens)
    with torch.autocast("cpu", torch.bfloat16):
        in_training = model(tokens)
        with torch.no_grad():
            assert model(tokens).equal(in_training)
    assert not in_training.equal(plain)


def test_a_batch_of_no_pictures() -> None:
    q, k = (torch.zeros(0, heads, 5, 8, requires_grad=True) for heads in (4, 2))
    out = bf16_attention(q, k, k, None, False, 1.0)
    assert out.shape == q.shape
    out.sum().backward()
    assert q.grad is not None and q.grad.shape == q.shape
