"""Head and cross-entropy in one, in portions of the tokens: all logits are never in memory at once.

A vocabulary is larger than any width, so logits and their gradient would be the largest tensors of a step. Each
portion's gradient is made when its logits are; the backward pass only scales it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.quant import activation_codes, head_operands, integer_product

PORTION = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Logits at once: what a CPU's cache holds, and what keeps a GPU busy."""

Integers = tuple[Tensor, Tensor, Tensor, Tensor] | None
"""What `integer_product` takes, where int8 numbers are multiplied."""


def portion(
    x_ND: Tensor, w_VD: Tensor, integers: Integers, bias_V: Tensor | None, targets_N: Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    """Sum of the cross-entropy in nats, and its gradient (N, V) for the products. integers: those x and w stand for."""
    z_NV = integer_product(*integers) if integers else F.linear(x_ND, w_VD)
    z_NV = z_NV.to(torch.promote_types(x_ND.dtype, torch.float32))
    if bias_V is not None:
        z_NV = z_NV + bias_V
    if softcap:
        z_NV = softcap * torch.tanh(z_NV / softcap)
    counts_N1 = (targets_N >= 0)[:, None]
    at_N1 = targets_N.clamp(min=0)[:, None]
    log_p_NV = z_NV.log_softmax(-1)
    loss = -(log_p_NV.gather(1, at_N1) * counts_N1).sum()
    grad_NV = log_p_NV.exp_()
    grad_NV.scatter_add_(1, at_N1, torch.full_like(at_N1, -1, dtype=grad_NV.dtype)).mul_(counts_N1)
    if softcap:
        grad_NV.mul_(1 - (z_NV / softcap).square())
    return loss, grad_NV.to(w_VD.dtype)


Portion = Callable[[Tensor, Tensor, Integers, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]


class _HeadLoss(torch.autograd.Function):
    """Every quantizer is the identity in the backward pass, as in `bitnet.quant`."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, w_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, config: ModelConfig,
        amount: float | Tensor, of_portion: Portion,
    ) -> Tensor:  # fmt: skip
        device = x_ND.device.type
        dtype = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x_ND.dtype
        w, codes = head_operands(w_VD, config.head_format, amount, config.weight_scale, dtype)
        grad_x, grad_w = torch.empty_like(x_ND), torch.zeros_like(w_VD)
        grad_b = None if bias_V is None else torch.zeros_like(bias_V)
        loss = torch.zeros((), device=x_ND.device, dtype=torch.promote_types(x_ND.dtype, torch.float32))
        rows = max(1, PORTION.get(device, 1 << 24) // len(w_VD))
        with torch.autocast(device, enabled=False):
            for first in range(0, len(x_ND), rows):
                here = slice(first, first + rows)
                x, integers = x_ND[here], None
                if config.head_format in ("ternary", "int8"):
                    q, s = activation_codes(x)
                    x = torch.lerp(x, (q / s).to(x.dtype), amount)  # as it counts
                    integers = (q, *codes, s) if codes else None
                x = x.to(dtype)
                part, g = of_portion(x, w, integers, bias_V, targets_N[here], config.logit_softcap)
                loss += part
                grad_x[here] = g @ w
                grad_w += g.T @ x
                if grad_b is not None:
                    grad_b += g.sum(0)
        ctx.save_for_backward(grad_x, grad_w, *(() if grad_b is None else (grad_b,)))
        return loss

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grad_x, grad_w, *grad_b = (kept * grad for kept in ctx.saved_tensors)
        return grad_x, grad_w, grad_b[0] if grad_b else None, None, None, None, None


def summed_cross_entropy(
    config: ModelConfig, x_ND: Tensor, w_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor,
    amount: float | Tensor = 1.0, of_portion: Portion = portion,
) -> Tensor:  # fmt: skip
    """Σ cross-entropy over the targets that count (>= 0), in nats. x: hidden states after the final norm."""
    apply: Callable[..., Tensor] = _HeadLoss.apply
    return apply(x_ND, w_VD, bias_V, targets_N, config, amount, of_portion)
