"""The numeric specification of BitNet b1.58 (W1.58A8): weights by absmean, activations by absmax per token.

Everything else in this project computes exactly this: the packed file stores these codes and
scales, the C engine reproduces `integer_product` from integers. All arithmetic is fp32 and
rounds half to even, whatever the dtype of the master weights or of autocast.

References: "The Era of 1-bit LLMs" (arXiv 2402.17764) eq. 1-3 and its Training Tips.
Shapes: N outputs, K inputs, leading dimensions of activations free.
"""

from __future__ import annotations

import torch
from torch import Tensor

from bitnet import kernels, scaled_sum
from bitnet.integer_sum import integer_sum, scaled_integer_sum

EPS = 1e-5
GROUP = 128  # inputs that share a scale when the scope is "group"


def weight_scale(w: Tensor, scope: str = "tensor") -> Tensor:
    """γ = max(mean|W|, 1e-5), fp32; for groups rounded to fp16, as stored.

    w: (N, K). Returns shape (1,) for "tensor", (N,) for "row", (N, ceil(K/128)) for "group".
    """
    if scope == "tensor":
        units = _magnitudes(w).sum(0, keepdim=True)
    elif scope == "row":
        units = _magnitudes(w)
    elif scope == "group":
        means = [_mean(_magnitudes(part), part.shape[1]) for part in w.split(GROUP, dim=1)]
        return torch.stack(means, dim=1).clamp(min=EPS).half().float()
    else:
        raise ValueError(f"weight scale scope is {scope!r}, expected tensor, row or group")
    return _mean(units, w.numel() // len(units)).clamp(min=EPS)


def _magnitudes(w: Tensor) -> Tensor:
    """Σ |w| of each row, bit-identical for any number of threads and on any device.

    |w| is rounded to multiples of 2⁻³², of which fp64 adds 2⁵³ exactly, in any order: enough for 100 million
    weights of 0.02. w: (N, K). Returns multiples of 2⁻³², fp64 (N,).
    """
    w = w.detach().float()
    return kernels.magnitudes(w) if kernels.possible(w) else w.mul(2.0**32).abs_().round_().sum(1, dtype=torch.float64)


def _mean(units: Tensor, n: int) -> Tensor:
    """The mean of n magnitudes, fp32."""
    return (units * 2.0**-32 / torch.full_like(units, n)).float()


def expand_scale(gamma: Tensor, n: int, k: int) -> Tensor:
    """Broadcast a stored scale of any scope against (N, K) codes."""
    if gamma.dim() == 2:
        return gamma.repeat_interleave(GROUP, dim=1)[:, :k]
    return gamma.reshape(-1, 1) if gamma.numel() == n and n > 1 else gamma.reshape(1, 1)


def ternary_codes(w: Tensor, scope: str = "tensor") -> tuple[Tensor, Tensor]:
    """T = clamp(round(W/γ), -1, 1) as int8 (N, K), and γ."""
    gamma = weight_scale(w, scope)
    if scope != "group" and kernels.possible(w):
        return kernels.ternary_codes(w, gamma), gamma
    codes = (w.detach().float() / expand_scale(gamma, *w.shape)).round_().clamp_(-1, 1).to(torch.int8)
    return codes, gamma


def activation_codes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Per token: s = 127 / max(max|x|, 1e-5), q = clamp(round(x·s), -127, 127).

    x: (..., K). Returns q int8 (..., K) and s fp32 (..., 1).
    """
    x = x.detach().float()
    if kernels.possible(x):
        return kernels.activation_codes(x)
    largest = x.abs().amax(dim=-1, keepdim=True).clamp(min=EPS)
    s = torch.full_like(largest, 127.0) / largest  # a tensor: torch would compute 127.0 / x as the reciprocal times 127
    return (x * s).round_().clamp_(-127, 127).to(torch.int8), s


def activation_values(q: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """x_q = q/s, rounded to dtype. q: int8 (M, K), s: (M, 1)."""
    if kernels.possible(s) and dtype in kernels.FLOATS:
        return kernels.values(q, s, dtype)
    return q.float().div_(s).to(dtype)


def row_codes(w: Tensor) -> tuple[Tensor, Tensor]:
    """Embedding and head, int8 per row: σ = max(max|w|, 1e-5)/127, c = clamp(round(w/σ), -127, 127).

    w: (N, K). Returns c int8 (N, K) and σ fp32 (N,).
    """
    w = w.detach().float()
    largest = w.abs().amax(dim=1).clamp(min=EPS)
    sigma = largest / torch.full_like(largest, 127.0)  # a tensor: by a number a GPU multiplies by its reciprocal
    return (w / sigma[:, None]).round_().clamp_(-127, 127).to(torch.int8), sigma


def stored_rows(w: Tensor, storage: str) -> Tensor:
    """The values of embedding or head rows as stored: c·σ for "int8", rounded for "f16", w for "f32"."""
    if storage == "int8":
        codes, sigma = row_codes(w)
        return codes * sigma[:, None]
    if storage == "f16":
        return w.detach().half().float()
    if storage == "f32":
        return w.detach().float()
    raise ValueError(f"storage is {storage!r}, expected int8, f16 or f32")


def integer_product(
    q: Tensor, codes: Tensor, scale: Tensor, s: Tensor, dtype: torch.dtype = torch.float32, ternary: bool = False
) -> Tensor:
    """y = (Σ q·c)·(scale/s): an exact integer sum (`bitnet.integer_sum`), converted to fp32, and one fp32 factor.

    With groups, y = (Σ_g (Σ q·c)·scale_g) / s, the outer sum in fp32 and in order.
    q: int8 (M, K), codes: int8 (N, K), scale: any scope, s: (M, 1). Returns (M, N), rounded to dtype. ternary: whether
    all codes are -1, 0 or 1, which is faster.
    """
    if scaled_sum.possible(q, scale):
        return scaled_sum.scaled_sum(q, codes, scale, s, dtype)
    return product_in_steps(q, codes, scale, s, ternary).to(dtype)


def product_in_steps(q: Tensor, codes: Tensor, scale: Tensor, s: Tensor, ternary: bool = False) -> Tensor:
    if scale.dim() == 1:
        return scaled_integer_sum(q, codes, scale, s, ternary)
    y = torch.zeros(q.shape[0], codes.shape[0], device=q.device)
    for g, (qg, cg) in enumerate(zip(q.split(GROUP, -1), codes.split(GROUP, 1), strict=True)):
        y += integer_sum(qg.contiguous(), cg.contiguous()).mul_(scale[:, g])
    return y.div_(s)
