"""The operations between linear layers: norm, rotation, gate.

On a CPU these cost as much as the matrix products, because each reads and writes whole activations. So their
backward passes are hand-written: they make fewer passes over memory, and save only inputs.
The forward passes give the values of the plain formulas, bit for bit, but for a norm by a kernel: it adds in another
order.

No forward pass returns the result of an in-place operation: compiled by torch 2.11, such a tensor has no gradient
(pytorch/pytorch issue 180642).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

from bitnet import kernels
from bitnet.config import ModelConfig


class _Normalized(torch.autograd.Function):
    """x·r·w with r = 1/sqrt(mean(x²) + eps). Backward, per token: r·(g·w − x̂·mean(g·w·x̂)), x̂ = x·r."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        ctx.eps = eps
        if kernels.possible(x, weight):
            ctx.save_for_backward(x, weight)
            return kernels.norm(x, weight, eps)
        r = x.square().mean(-1, keepdim=True).add_(eps).rsqrt_()
        ctx.save_for_backward(x, weight, r)
        return (x * r) * weight

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        x, weight, *rest = ctx.saved_tensors
        if not rest:
            return *kernels.norm_back(grad, x, weight, ctx.eps), None
        (r,), product = rest, grad * x
        with torch.autocast(x.device.type, enabled=False):  # compiled, the backward pass is traced under autocast
            mean = (product @ weight).unsqueeze(-1) * (r.square() / weight.numel())  # mean(g·w·x̂), times r
            grad_w = (r.flatten()[None] @ product.flatten(0, -2))[0]
        return (grad * weight).sub_(x * mean).mul_(r), grad_w, None


class _Rotated(torch.autograd.Function):
    """The gradient of a rotation is the inverse rotation."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, inverse=False)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, inverse=True), None, None


def _turn(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    half = cos.shape[-1]
    if 2 * half <= x.shape[-1] and kernels.possible(x, cos, sin):
        return kernels.rotated(x, cos, sin, inverse)
    sin = -sin if inverse else sin
    a, b, rest = x.tensor_split((half, 2 * half), -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin, rest], -1)


class _SquaredReluGate(torch.autograd.Function):
    """relu(gate)² · up."""

    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        if kernels.possible(gate, up):
            return kernels.squared_relu_gate(gate, up)
        return F.relu(gate).square_() * up

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        gate, up = ctx.saved_tensors
        if kernels.possible(grad, gate, up):
            return kernels.squared_relu_gate_back(grad, gate, up)
        positive = F.relu(gate)
        once = grad * positive
        return torch.addcmul(torch.zeros_like(once[..., :1]), once, up, value=2), positive.mul_(once)


_normalized: Callable[[Tensor, Tensor, float], Tensor] = _Normalized.apply
_rotated: Callable[[Tensor, Tensor, Tensor], Tensor] = _Rotated.apply
_squared_relu_gate: Callable[[Tensor, Tensor], Tensor] = _SquaredReluGate.apply

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "relu2": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "gelu": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "gelu_erf": F.gelu,
}


def gated(activation: str, gate: Tensor, up: Tensor) -> Tensor:
    """activation(gate) · up, element by element."""
    return _squared_relu_gate(gate, up) if activation == "relu2" else ACTIVATIONS[activation](gate) * up


def rotate(x_BHTE: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + rope_dim/2) of a head; dimensions past rope_dim stay unchanged."""
    return _rotated(x_BHTE, cos, sin)


class RMSNorm(nn.Module):
    """y = x / sqrt(mean(x²) + eps) · weight (+ bias), over the last dimension."""

    def __init__(self, dim: int, eps: float, bias: bool = False) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(dim))
        self.bias = nn.Parameter(torch.zeros(dim)) if bias else None
        self.eps = eps

    def forward(self, x: Tensor) -> Tensor:
        x = x.to(self.weight.dtype)  # on a GPU attention gives bf16 under autocast
        if x.device.type == "cpu":
            y = _normalized(x, self.weight, self.eps)
        else:
            y = F.rms_norm(x, self.weight.shape, self.weight, self.eps)  # one kernel
        return y if self.bias is None else y + self.bias


class LayerNorm(RMSNorm):
    """y = (x − mean) / sqrt(variance + eps) · weight (+ bias), over the last dimension. Source: arXiv 1607.06450."""

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.bias, self.eps)


NORMS = {"rms": RMSNorm, "layer": LayerNorm}


def norm_of(config: ModelConfig, dim: int) -> nn.Module:
    """A norm over `dim` values, of the kind that the model has."""
    return NORMS[config.norm](dim, config.norm_eps, config.norm_bias)
