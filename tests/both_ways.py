"""Work with kernels of a training step and with torch alone, for the tests of kernels."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from bitnet import kernels
from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer

Results = list[Tensor]


def both_ways(
    monkeypatch: pytest.MonkeyPatch, work: Callable[..., Tensor | tuple[Tensor, ...]], *inputs: Tensor
) -> tuple[Results, Results]:
    """Outputs of work(*inputs), and their gradients where inputs require them: by kernels and by torch.

    The kernels give the same bits in one thread and in three.
    """

    def results() -> Results:
        made = work(*inputs)
        outputs = list(made) if isinstance(made, tuple) else [made]
        learns = [x for x in inputs if x.requires_grad]
        if not learns:
            return outputs
        generator = torch.Generator().manual_seed(1)
        grads = [torch.randn(y.shape[::-1], generator=generator).permute(list(range(y.dim()))[::-1]) for y in outputs]
        return [*outputs, *torch.autograd.grad(outputs, learns, grads)]

    found = []
    for n in (1, 3):
        torch.set_num_threads(n)
        found.append(results())
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    with monkeypatch.context() as patch:
        patch.setattr(kernels, "possible", lambda *_, **__: False)
        return found[0], results()


def wide(shape: tuple[int, ...]) -> Tensor:
    """Not contiguous, as a part of a wider matrix is not."""
    return torch.randn(*shape[:-1], 2 * shape[-1])[..., : shape[-1]]


def same(pair: tuple[Results, Results]) -> bool:
    return all(a.equal(b) and a.dtype == b.dtype for a, b in zip(*pair, strict=True))


def near(pair: tuple[Results, Results], share: float) -> bool:
    """Whether no value differs by more than this share of the largest."""
    return all((a - b).abs().max() <= share * b.abs().max() and a.dtype == b.dtype for a, b in zip(*pair, strict=True))


def a_step(amount: float, precise: bool) -> tuple[Callable[..., Tensor], list[Tensor]]:
    """The loss of a small model, and what it learns."""
    config = ModelConfig(
        vocab_size=90, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, max_context=80
    )
    model, tokens = Transformer(config), torch.randint(0, 90, (2, 81))

    def work(*_: Tensor) -> Tensor:
        with model.partly_quantized(amount), torch.autocast("cpu", torch.bfloat16, enabled=not precise):
            return model.loss(tokens[:, :-1], tokens[:, 1:])

    return work, list(model.parameters())
