"""(Σ q·c)·(scale/s) of int8 numbers on a GPU in one kernel: torch's own int8 product writes int32 sums, which other
kernels then read and scale, and that would be most of the memory traffic of a layer's products.

Triton, which this is written in, comes with torch for CUDA.
"""
# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

import importlib.util

import torch
from torch import Tensor

HAS_TRITON = importlib.util.find_spec("triton") is not None


def possible(q: Tensor, scale: Tensor) -> bool:
    """Whether `scaled_sum` can compute this product. Rows are read in pieces of 16 bytes."""
    return HAS_TRITON and q.device.type == "cuda" and scale.dim() == 1 and q.shape[1] % 16 == 0 and len(q) > 16


def scaled_sum(q: Tensor, codes: Tensor, scale: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
    """An exact sum, converted to fp32, times scale/s in fp32, and rounded to dtype.

    q: int8 (M, K), codes: int8 (N, K), scale: (1,) or (N,), s: (M, 1), both fp32. Returns (M, N).
    """
    y: Tensor = _scaled_sum(q.contiguous(), codes.contiguous(), scale, s.reshape(-1), dtype)
    return y


if HAS_TRITON:
    import triton
    import triton.language as tl
    from torch.library import triton_op, wrap_triton

    TILES = [
        triton.Config({"BM": 128, "BN": 128, "BK": bk, "ROWS": 8}, num_warps=warps, num_stages=3)
        for bk, warps in ((128, 8), (64, 4))
    ]
    """Rows and columns of y that a block of threads computes, and values of K it loads at a time. The first is the
    fastest of ten on an H200, and takes 96 KiB of shared memory; the second half of that. ROWS of tiles are computed
    together, so that their shared inputs stay in the cache."""

    @triton.autotune(TILES, key=["M", "N", "K"])
    @triton.jit
    def _scaled_sum_tile(
        q, codes, scale, s, y, M, N, K: tl.constexpr, BY_ROW: tl.constexpr,
        BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, ROWS: tl.constexpr,
    ):  # fmt: skip
        down, across = tl.cdiv(M, BM), tl.cdiv(N, BN)
        index = tl.program_id(0)
        first = index // (ROWS * across) * ROWS
        rows = min(down - first, ROWS)
        m = (first + index % (ROWS * across) % rows) * BM + tl.arange(0, BM)
        n = index % (ROWS * across) // rows * BN + tl.arange(0, BN)
        k = tl.arange(0, BK)
        from_q = q + (m % M).to(tl.int64)[:, None] * K + k[None, :]  # rows past the end wrap; they are not stored
        from_codes = codes + (n % N).to(tl.int64)[None, :] * K + k[:, None]
        sums = tl.zeros((BM, BN), dtype=tl.int32)
        for start in range(0, K, BK):
            a = tl.load(from_q + start, mask=k[None, :] < K - start, other=0)
            b = tl.load(from_codes + start, mask=k[:, None] < K - start, other=0)
            sums = tl.dot(a, b, sums, out_dtype=tl.int32)
        per_token = tl.load(s + m, mask=m < M, other=1.0)[:, None]
        if BY_ROW:
            factor = tl.math.div_rn(tl.load(scale + n, mask=n < N, other=1.0)[None, :] + per_token * 0, per_token)
        else:
            factor = tl.math.div_rn(tl.load(scale) + per_token * 0, per_token)
        to = y + m.to(tl.int64)[:, None] * N + n[None, :]
        tl.store(to, (sums.to(tl.float32) * factor).to(y.dtype.element_ty), mask=(m[:, None] < M) & (n[None, :] < N))

    @triton_op("bitnet::scaled_sum", mutates_args=())
    def _scaled_sum(q: Tensor, codes: Tensor, scale: Tensor, s: Tensor, dtype: torch.dtype) -> Tensor:
        (m, k), n = q.shape, codes.shape[0]
        y = torch.empty(m, n, dtype=dtype, device=q.device)
        wrap_triton(_scaled_sum_tile)[lambda tile: (triton.cdiv(m, tile["BM"]) * triton.cdiv(n, tile["BN"]),)](
            q, codes, scale, s, y, m, n, k, BY_ROW=scale.numel() > 1
        )
        return y
