"""Σ q·c of int8 numbers: ternary codes by the engine where it can, others with the fastest of torch's products that is
exact on this device.

The result is fixed (`bitnet.quant`), only the method varies: natively in int8 if the CPU or the CUDA
library is exact, else in fp32, in parts whose sums fp32 represents exactly.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from bitnet import kernels

EXACT = 1040  # int8 products whose sum is exact in fp32: 1040·127·127 < 2²⁴


def integer_sum(q: Tensor, codes: Tensor) -> Tensor:
    """Σ q·c, exact, then converted to fp32 (exact below 2²⁴: K <= 132,104 ternary, K <= 1,040 int8).

    q: int8 (M, K), codes: int8 (N, K). Returns fp32 (M, N).
    """
    if _has_int8_product(q, codes):
        return torch._int_mm(q, codes.T).float()
    with torch.autocast(q.device.type, enabled=False):
        pairs = zip(q.split(EXACT, dim=1), codes.split(EXACT, dim=1), strict=True)
        parts = [F.linear(a.float(), b.float()) for a, b in pairs]
        return parts[0] if len(parts) == 1 else torch.stack(parts).sum(0, dtype=torch.float64).float()


def scaled_integer_sum(q: Tensor, codes: Tensor, scale: Tensor, s: Tensor, ternary: bool = False) -> Tensor:
    """Σ q·c, converted to fp32, times scale/s. scale: (1,) or (N,), s: (M, 1), both fp32. Returns fp32 (M, N).

    ternary: whether all codes are -1, 0 or 1, as the engine's product needs.
    """
    if ternary and kernels.multiplies(q, codes, scale, s):
        return kernels.linear(q, codes, scale, s)
    if _has_int8_product(q, codes) and kernels.possible(scale, s):
        return kernels.scaled(torch._int_mm(q, codes.T), scale, s)
    return integer_sum(q, codes).mul_(scale / s)


def _int8_product_is_exact() -> bool:
    """Whether this CPU's int8 product accumulates without saturation (before VNNI x86 may not); tests the extremes."""
    extremes = torch.tensor([127, -127], dtype=torch.int8)[:, None].expand(2, 256).contiguous()
    product = torch._int_mm(extremes, extremes.T)
    return product.tolist() == [[256 * 127 * 127, -256 * 127 * 127], [-256 * 127 * 127, 256 * 127 * 127]]


CPU_INT8_IS_EXACT = _int8_product_is_exact()


def _has_int8_product(q: Tensor, codes: Tensor) -> bool:
    """Whether torch multiplies these exactly in int8. The sizes are requirements of the CUDA library.

    On a CPU torch 2.13 returns uninitialized memory if K is 1, as in the last group of 129.
    """
    if q.device.type == "cuda":
        return q.shape[0] > 16 and q.shape[1] % 8 == 0 and codes.shape[0] % 8 == 0
    return q.device.type == "cpu" and q.shape[1] > 1 and CPU_INT8_IS_EXACT
