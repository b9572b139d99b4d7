"""The numeric specification of BitNet b1.58: what a weight and an activation become.

Everything else in this project computes exactly this: the packed file stores these codes and
scales, the C engine reproduces `ternary_linear` from integers. All arithmetic is fp32 and
rounds half to even, whatever the dtype of the master weights or of autocast.

References: "The Era of 1-bit LLMs" (arXiv 2402.17764) eq. 1-3 and its Training Tips.
Shapes: N outputs, K inputs, leading dimensions of activations free.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

EPS = 1e-5
GROUP = 128  # inputs that share a scale when the scope is "group"


def weight_scale(w: Tensor, scope: str = "tensor") -> Tensor:
    """γ = max(mean|W|, 1e-5), fp32.

    w: (N, K). Returns shape (1,) for "tensor", (N,) for "row", (N, ceil(K/128)) for "group".
    """
    a = w.detach().float().abs()
    if scope == "tensor":
        gamma = a.mean().reshape(1)
    elif scope == "row":
        gamma = a.mean(dim=1)
    elif scope == "group":
        gamma = torch.stack([part.mean(dim=1) for part in a.split(GROUP, dim=1)], dim=1)
    else:
        raise ValueError(f"weight scale scope is {scope!r}, expected tensor, row or group")
    return gamma.clamp(min=EPS)


def expand_scale(gamma: Tensor, n: int, k: int) -> Tensor:
    """Broadcast a stored scale of any scope against (N, K) codes."""
    if gamma.dim() == 2:
        return gamma.repeat_interleave(GROUP, dim=1)[:, :k]
    return gamma.reshape(-1, 1) if gamma.numel() == n and n > 1 else gamma.reshape(1, 1)


def ternary_codes(w: Tensor, scope: str = "tensor") -> tuple[Tensor, Tensor]:
    """T = clamp(round(W/γ), -1, 1) as int8 (N, K), and γ."""
    gamma = weight_scale(w, scope)
    codes = (w.detach().float() / expand_scale(gamma, *w.shape)).round().clamp(-1, 1).to(torch.int8)
    return codes, gamma


def activation_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per token: s = 127 / max(max|x|, 1e-5), q = clamp(round(x·s), -127, 127).

    x: (..., K). Returns q int8 (..., K) and s fp32 (..., 1).
    """
    x = x.detach().float()
    s = 127.0 / x.abs().amax(dim=-1, keepdim=True).clamp(min=EPS)
    return (x * s).round().clamp(-127, 127).to(torch.int8), s


def row_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    """Embedding and head, int8 per row: σ = max(max|w|, 1e-5)/127, c = clamp(round(w/σ), -127, 127).

    w: (N, K). Returns c int8 (N, K) and σ fp32 (N,).
    """
    w = w.detach().float()
    sigma = w.abs().amax(dim=1).clamp(min=EPS) / 127.0
    return (w / sigma[:, None]).round().clamp(-127, 127).to(torch.int8), sigma


def integer_product(q: Tensor, codes: Tensor, scale: Tensor, s: Tensor) -> Tensor:
    """y = (Σ q·T)·(γ/s). The sum is exact in fp32 because |Σ| < 2²⁴ for K <= 132,104 (ternary).

    q: int8 (..., K), codes: int8 (N, K), scale: any scope, s: (..., 1). Returns fp32 (..., N).
    """
    if scale.dim() == 2:  # groups: partial sums are exact, added up in order with their scales
        y = torch.zeros(*q.shape[:-1], codes.shape[0], device=q.device)
        for g, (qg, cg) in enumerate(zip(q.split(GROUP, -1), codes.split(GROUP, 1), strict=True)):
            y = y + F.linear(qg.float(), cg.float()) * (scale[:, g] / s)
        return y
    return F.linear(q.float(), codes.float()) * (scale / s)


class TernaryLinear(torch.autograd.Function):
    """y = x_q · W_qᵀ with the straight-through estimator.

    Forward is `integer_product`; backward treats both quantizers as the identity:
    grad_x = g · W_q, grad_W = gᵀ · x_q. Saves int8 codes, not float copies, and never forms
    `w + (w_q - w)`, which is inexact in bf16.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, scope: str) -> Tensor:  # type: ignore[no-untyped-def, override]
        codes, gamma = ternary_codes(w, scope)
        q, s = activation_codes(x)
        ctx.save_for_backward(q, s, codes, gamma)
        ctx.dtypes = x.dtype, w.dtype
        return integer_product(q, codes, gamma, s)

    @staticmethod
    def backward(ctx, grad: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[no-untyped-def, override]
        q, s, codes, gamma = ctx.saved_tensors
        w_q = codes.float() * expand_scale(gamma, *codes.shape)
        x_q = q.float() / s
        grad_x = grad.float() @ w_q
        grad_w = grad.float().flatten(0, -2).T @ x_q.flatten(0, -2)
        return grad_x.to(ctx.dtypes[0]), grad_w.to(ctx.dtypes[1]), None
