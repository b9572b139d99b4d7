"""Products of fp32 matrices with the faster of torch's two libraries on an x86 CPU.

For fp32, torch uses MKL, which only uses AVX2 on non-Intel CPUs: half the rate of AVX-512, if they have it. oneDNN,
which torch uses for bf16, uses what the CPU has. Both accumulate in fp32, each in its own order.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn import functional as F

HAS_BOTH = torch.backends.mkl.is_available() and torch.backends.mkldnn.is_available()


def by_onednn(*operands: Tensor) -> bool:
    return HAS_BOTH and all(x.device.type == "cpu" and x.dtype == torch.float32 for x in operands)


def _product(a: Tensor, b: Tensor) -> Tensor:
    y: Tensor = torch.ops.mkldnn._linear_pointwise(a, b.mT, None, "none", [], "")
    return y


_traced = torch.library.custom_op("bitnet::product", _product, mutates_args=(), device_types="cpu")
"""A custom op for inductor, which by itself uses oneDNN's product only for constant weights."""
_traced.register_fake(lambda a, b: a.new_empty(a.shape[0], b.shape[1]))


def product(a: Tensor, b: Tensor, onto: Tensor | None = None) -> Tensor:
    """a @ b, added to `onto`, possibly in place. a: (M, K), b: (K, N), either in any memory order."""
    if by_onednn(a, b) and a.numel() and b.numel():
        y: Tensor = (_traced if torch.compiler.is_compiling() else _product)(a, b)
        return y if onto is None else onto.add_(y)
    return a @ b if onto is None else onto.addmm_(a, b)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return product(x.flatten(0, -2), weight.mT).view(*x.shape[:-1], len(weight))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g, (of_x, of_w) = grad.flatten(0, -2), ctx.needs_input_grad
        grad_x = product(g, weight).view(x.shape) if of_x else None
        return grad_x, product(g.mT, x.flatten(0, -2)) if of_w else None


_linear: Callable[[Tensor, Tensor], Tensor] = _Linear.apply


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Like torch's `linear`. x: (..., K), weight: (N, K)."""
    if torch.is_autocast_enabled(x.device.type) or x.dim() < 2 or not by_onednn(x, weight):
        return F.linear(x, weight, bias)
    y = _linear(x, weight)
    return y if bias is None else y + bias
