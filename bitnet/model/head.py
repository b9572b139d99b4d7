"""Fused head and cross-entropy, over portions of the tokens: all logits are never in memory at once.

The vocabulary is larger than the width, so the logits and their gradient would be the largest tensors of a step. Each
portion's gradient is computed together with its logits; the backward pass only scales it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from bitnet import kernels
from bitnet.config import ModelConfig
from bitnet.float_product import product
from bitnet.quant import activation_codes, activation_values, integer_product
from bitnet.straight_through import head_operands, output_logits, toward

PORTION = {"cpu": 1 << 21, "cuda": 1 << 28}
"""Logits per portion: as many as a CPU's cache holds, or enough to keep a GPU busy."""

Integers = tuple[Tensor, Tensor, Tensor, Tensor, torch.dtype, bool] | None
"""Arguments of `integer_product`, where int8 numbers are multiplied."""


class Bias(nn.Module):
    """The only parameter of a head whose matrix is the embedding."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.bias = nn.Parameter(torch.zeros(dim))


class Head(NamedTuple):
    """The parameters that turn hidden states into logits."""

    config: ModelConfig
    weight: Tensor  # (V, D)
    bias: Tensor | None  # (V,)
    amount: float | Tensor = 1.0  # λ

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        config = self.config
        logits_BTV = output_logits(hidden_BTD, self.weight, config.head_format, self.amount, config.weight_scale)
        if self.bias is not None:
            logits_BTV = logits_BTV + self.bias
        return (
            config.logit_softcap * torch.tanh(logits_BTV / config.logit_softcap) if config.logit_softcap else logits_BTV
        )


def portion(
    x_ND: Tensor, w_VD: Tensor, integers: Integers, bias_V: Tensor | None, targets_N: Tensor, softcap: float
) -> tuple[Tensor, Tensor]:
    """Summed cross-entropy in nats, and its gradient (N, V) by the logits before the softcap.

    integers: the codes and scales that x and w stand for.
    """
    z_NV = _logits(x_ND, w_VD, integers, bias_V, softcap)
    if not softcap and w_VD.dtype in kernels.FLOATS and kernels.possible(z_NV):
        loss_N, grad_NV = kernels.cross_entropy(z_NV, targets_N, w_VD.dtype)
        return loss_N.sum(), grad_NV
    counts_N1 = (targets_N >= 0)[:, None]
    at_N1 = targets_N.clamp(min=0)[:, None]
    grad_NV = z_NV.softmax(-1)
    total_N1 = z_NV.amax(-1, keepdim=True) - grad_NV.amax(-1, keepdim=True).log()  # log Σ exp(z)
    loss = ((total_N1 - z_NV.gather(1, at_N1)) * counts_N1).sum()
    grad_NV.scatter_add_(1, at_N1, torch.full_like(at_N1, -1, dtype=grad_NV.dtype)).mul_(counts_N1)
    if softcap:
        grad_NV.mul_(1 - (z_NV / softcap).square())
    return loss, grad_NV.to(w_VD.dtype)


def _logits(x_ND: Tensor, w_VD: Tensor, integers: Integers, bias_V: Tensor | None, softcap: float) -> Tensor:
    z_NV = integer_product(*integers) if integers else product(x_ND, w_VD.mT)
    z_NV = z_NV.to(torch.promote_types(x_ND.dtype, torch.float32))
    if bias_V is not None:
        z_NV = z_NV + bias_V
    return softcap * torch.tanh(z_NV / softcap) if softcap else z_NV


Portion = Callable[[Tensor, Tensor, Integers, Tensor | None, Tensor, float], tuple[Tensor, Tensor]]


def _as_it_counts(
    x_ND: Tensor, codes: tuple[Tensor, Tensor] | None, config: ModelConfig, amount: float | Tensor, dtype: torch.dtype
) -> tuple[Tensor, Integers]:
    """The head's input as quantized at λ, and the integers of the product at λ = 1. codes: the head's, at λ = 1."""
    if config.head_format not in ("ternary", "int8"):
        return x_ND.to(dtype), None
    q, s = activation_codes(x_ND)
    if codes:
        return activation_values(q, s, dtype), (q, *codes, s, torch.float32, config.head_format == "ternary")
    return toward(x_ND, q / s, amount).to(dtype), None


def portions(x: Tensor, numbers: int) -> list[slice]:
    """Slices of the rows of x, each short enough for a temporary of `numbers` values per row."""
    rows = max(1, PORTION.get(x.device.type, 1 << 24) // numbers)
    return [slice(first, first + rows) for first in range(0, len(x), rows)]


def _product_dtype(x: Tensor) -> torch.dtype:
    """The dtype of the operands of the head's product."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


class _HeadLoss(torch.autograd.Function):
    """Every quantizer is the identity in the backward pass, as in `bitnet.straight_through`."""

    @staticmethod
    def forward(
        ctx: Any, x_ND: Tensor, w_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, config: ModelConfig,
        amount: float | Tensor, of_portion: Portion,
    ) -> Tensor:  # fmt: skip
        dtype = _product_dtype(x_ND)
        w, codes = head_operands(w_VD, config.head_format, amount, config.weight_scale, dtype)
        grad_x, learns = torch.empty_like(x_ND), ctx.needs_input_grad[1:3]  # a frozen head needs no gradient
        grad_w = torch.zeros_like(w_VD) if learns[0] else None
        grad_b = torch.zeros_like(bias_V) if bias_V is not None and learns[1] else None
        loss = torch.zeros((), device=x_ND.device, dtype=torch.promote_types(x_ND.dtype, torch.float32))
        with torch.autocast(x_ND.device.type, enabled=False):
            for here in portions(x_ND, len(w_VD)):
                x, integers = _as_it_counts(x_ND[here], codes, config, amount, dtype)
                part, g = of_portion(x, w, integers, bias_V, targets_N[here], config.logit_softcap)
                loss += part
                grad_x[here] = product(g, w)
                if grad_w is not None:
                    grad_w += product(g.T, x)
                if grad_b is not None:
                    grad_b += g.sum(0)
        ctx.save_for_backward(grad_x, grad_w, grad_b)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        grads = (None if kept is None else kept * grad for kept in ctx.saved_tensors)
        return *grads, None, None, None, None


def summed_cross_entropy(
    config: ModelConfig, x_ND: Tensor, w_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor,
    amount: float | Tensor, of_portion: Portion,
) -> Tensor:  # fmt: skip
    """Σ cross-entropy over the targets that count (>= 0), in nats. x: hidden states after the final norm."""
    apply: Callable[..., Tensor] = _HeadLoss.apply
    return apply(x_ND, w_VD, bias_V, targets_N, config, amount, of_portion)


class _LogProbabilities(torch.autograd.Function):
    """Like `_HeadLoss`, but each target has its own gradient, so the backward pass computes the logits again."""

    @staticmethod
    def forward(ctx: Any, x_ND: Tensor, w_VD: Tensor, bias_V: Tensor | None, targets_N: Tensor, head: Head) -> Tensor:
        dtype = _product_dtype(x_ND)
        w, codes = head_operands(w_VD, head.config.head_format, head.amount, head.config.weight_scale, dtype)
        ctx.made, ctx.dtype = (w, codes, bias_V, head, dtype), w_VD.dtype
        ctx.save_for_backward(x_ND, targets_N)
        found_2N = torch.empty(2, len(x_ND), device=x_ND.device, dtype=torch.promote_types(x_ND.dtype, torch.float32))
        for here, _, z_NV in _portions(x_ND, *ctx.made):
            found_2N[0, here] = z_NV.gather(1, targets_N[here, None])[:, 0] - z_NV.logsumexp(-1)
            found_2N[1, here] = (z_NV.argmax(-1) == targets_N[here]).to(found_2N.dtype)
        return found_2N

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_2N: Tensor) -> tuple[Tensor | None, ...]:
        (x_ND, targets_N), (w, _, bias_V, head, dtype), grad_N = ctx.saved_tensors, ctx.made, grad_2N[0]
        grad_x, learns = torch.empty_like(x_ND), ctx.needs_input_grad[1:3]
        grad_w = torch.zeros_like(w, dtype=ctx.dtype) if learns[0] else None
        grad_b = torch.zeros_like(bias_V) if bias_V is not None and learns[1] else None
        for here, x, z_NV in _portions(x_ND, *ctx.made):
            g_NV = z_NV.softmax(-1).neg_()
            g_NV.scatter_add_(1, targets_N[here, None], torch.ones_like(g_NV[:, :1])).mul_(grad_N[here, None])
            if head.config.logit_softcap:
                g_NV.mul_(1 - (z_NV / head.config.logit_softcap).square())
            g = g_NV.to(dtype)
            grad_x[here] = product(g, w)
            if grad_w is not None:
                grad_w += product(g.T, x)
            if grad_b is not None:
                grad_b += g.sum(0)
        return grad_x, grad_w, grad_b, None, None


def _portions(
    x_ND: Tensor, w: Tensor, codes: tuple[Tensor, Tensor] | None, bias_V: Tensor | None, head: Head, dtype: torch.dtype
) -> Iterator[tuple[slice, Tensor, Tensor]]:
    """For each portion of the states: its slice, the states as quantized at λ, and their logits."""
    with torch.autocast(x_ND.device.type, enabled=False):
        for here in portions(x_ND, len(w)):
            x, integers = _as_it_counts(x_ND[here], codes, head.config, head.amount, dtype)
            yield here, x, _logits(x, w, integers, bias_V, head.config.logit_softcap)


def log_probabilities(head: Head, x_BTD: Tensor, targets_BT: Tensor) -> Tensor:
    """Log-probability of each target in nats, and 1 where no token is likelier; both 0 where ignored (< 0): (2, B, T).

    x: hidden states after the final norm.
    """
    counts = targets_BT >= 0
    apply: Callable[..., Tensor] = _LogProbabilities.apply
    found = apply(x_BTD[counts], head.weight, head.bias, targets_BT[counts], head)
    nothing = torch.zeros(2, *counts.shape, device=found.device, dtype=found.dtype)
    return nothing.masked_scatter(counts, found)


TEXT = 0.1
"""Weight of the text's own tokens in a draft's training targets; the rest are the model's probabilities."""


class _DraftLoss(torch.autograd.Function):
    """Like `_HeadLoss` with a frozen head: only the states get a gradient."""

    @staticmethod
    def forward(
        ctx: Any, states_SND: Tensor, taught_ND: Tensor, targets_N: Tensor, counts_SN: Tensor, weights: Sequence[float],
        head: Head,
    ) -> tuple[Tensor, Tensor]:  # fmt: skip
        config, dtype = head.config, _product_dtype(states_SND)
        w, codes = head_operands(head.weight, config.head_format, head.amount, config.weight_scale, dtype)

        def logits(x_ND: Tensor) -> Tensor:
            x, integers = _as_it_counts(x_ND, codes, config, head.amount, dtype)
            return _logits(x, w, integers, head.bias, config.logit_softcap)

        grad, right_SN = torch.empty_like(states_SND), torch.empty_like(counts_SN)
        loss = torch.zeros((), device=w.device, dtype=torch.promote_types(states_SND.dtype, torch.float32))
        with torch.autocast(w.device.type, enabled=False):
            for here in portions(taught_ND, 2 * len(w)):
                z_NV = logits(taught_ND[here])
                likeliest_N = z_NV.argmax(-1)
                taught_NV = z_NV.softmax(-1).mul_(1 - TEXT)
                at_N1 = targets_N[here].clamp(min=0)[:, None]
                taught_NV.scatter_add_(1, at_N1, torch.full_like(at_N1, TEXT, dtype=taught_NV.dtype))
                for step, weight in enumerate(weights):
                    z_NV = logits(states_SND[step, here])
                    right_SN[step, here] = z_NV.argmax(-1) == likeliest_N
                    counts_N = counts_SN[step, here]
                    log_q_NV = z_NV.log_softmax(-1)
                    loss -= weight * (torch.linalg.vecdot(taught_NV, log_q_NV) * counts_N).sum()
                    g_NV = log_q_NV.exp_().sub_(taught_NV).mul_(weight * counts_N[:, None])
                    if config.logit_softcap:
                        g_NV.mul_(1 - (z_NV / config.logit_softcap).square())
                    grad[step, here] = g_NV.to(dtype) @ w
        ctx.save_for_backward(grad)
        ctx.mark_non_differentiable(right_SN)
        return loss, right_SN

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
        (kept,) = ctx.saved_tensors
        return kept * grad, None, None, None, None, None


def draft_loss(
    states_SND: Tensor, taught_ND: Tensor, targets_N: Tensor, counts_SN: Tensor, weights: Sequence[float], head: Head
) -> tuple[Tensor, Tensor]:
    """Σ weight · cross-entropy over steps and states that count, in nats, against the probabilities that `head` gives
    for the states `taught`, mixed with `TEXT` of the target; and whether both have the same likeliest token (S, N)."""
    apply: Callable[..., tuple[Tensor, Tensor]] = _DraftLoss.apply
    return apply(states_SND, taught_ND, targets_N, counts_SN, weights, head)
