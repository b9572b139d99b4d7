"""Σ q·c of int8 numbers by the fastest of torch's products that is exact on this device.

What is computed leaves no choice (`bitnet.quant`), only how: natively in int8 where the CPU or the CUDA
library does that exactly, else in fp32, in parts whose sums it holds.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

EXACT = 1040  # int8 products whose sum fp32 holds: 1040·127·127 < 2²⁴


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


def _int8_product_is_exact() -> bool:
    """Whether this CPU's int8 product adds without saturating (x86 before VNNI may not): tried on the extremes."""
    extremes = torch.tensor([127, -127], dtype=torch.int8)[:, None].expand(2, 256).contiguous()
    product = torch._int_mm(extremes, extremes.T)
    return product.tolist() == [[256 * 127 * 127, -256 * 127 * 127], [-256 * 127 * 127, 256 * 127 * 127]]


CPU_INT8_IS_EXACT = _int8_product_is_exact()


def _has_int8_product(q: Tensor, codes: Tensor) -> bool:
    """Whether torch multiplies these as int8, exactly. The CUDA library asks for these sizes.

    On a CPU torch 2.13 gives what lies in memory where there is but one product to add, as in the last group of 129.
    """
    if q.device.type == "cuda":
        return q.shape[0] > 16 and q.shape[1] % 8 == 0 and codes.shape[0] % 8 == 0
    return q.device.type == "cpu" and q.shape[1] > 1 and CPU_INT8_IS_EXACT
