"""The operations between linear layers: values of the plain formulas, gradients by finite differences."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet.model.layers import ACTIVATIONS, RMSNorm, gated, rotate

torch.set_num_threads(1)


def plainly_rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half = cos.shape[-1]
    a, b, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], dim=-1)


@pytest.mark.usefixtures("torch_alone")  # the kernel adds in another order: tests/test_kernels.py
@pytest.mark.parametrize("shape", [(1, 1), (3, 7), (2, 5, 48)])
def test_rms_norm(shape: tuple[int, ...]) -> None:
    norm = RMSNorm(shape[-1], 1e-5)
    torch.nn.init.uniform_(norm.weight, 0.5, 1.5)
    x = torch.randn(shape)
    assert norm(x).equal(F.rms_norm(x, norm.weight.shape, norm.weight, 1e-5))
    assert norm(x.bfloat16()).dtype == torch.float32
    double = norm.double()
    assert torch.autograd.gradcheck(double, torch.randn(shape, dtype=torch.float64, requires_grad=True))
    x = torch.randn(shape, dtype=torch.float64, requires_grad=True)
    double(x).square().sum().backward()
    found, double.weight.grad = double.weight.grad, None
    F.rms_norm(x, double.weight.shape, double.weight, 1e-5).square().sum().backward()
    assert found is not None and torch.allclose(found, double.weight.grad, rtol=1e-12)  # fp64, other order of sums


@pytest.mark.parametrize("half", [3, 8])
@pytest.mark.parametrize("tables", [(5,), (2, 1, 5)])
def test_rotate(half: int, tables: tuple[int, ...]) -> None:
    angle = torch.randn(*tables, half, dtype=torch.float64)
    x = torch.randn(2, 5, 3, 16, dtype=torch.float64).transpose(1, 2)  # as heads come, not contiguous
    cos, sin = angle.cos(), angle.sin()
    as_fp32 = x.float(), cos.float(), sin.float()
    assert rotate(*as_fp32).equal(plainly_rotated(*as_fp32))
    assert torch.autograd.gradcheck(lambda x: rotate(x, cos, sin), x.requires_grad_())


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_gated(activation: str) -> None:
    gate, up = torch.randn(2, 3, 9), torch.randn(2, 3, 9)
    assert gated(activation, gate, up).equal(ACTIVATIONS[activation](gate) * up)
    inputs = gate.double().requires_grad_(), up.double().requires_grad_()
    assert torch.autograd.gradcheck(lambda gate, up: gated(activation, gate, up), inputs)
