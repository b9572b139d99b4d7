"""`--preset 1m` to `1b`: the number of parameters determines width and depth of a model, and its training settings.

Each rule is a power law of that number, fitted to measurements at 1 and 3 million (docs/scaling.md) and to published
models of a billion. Does not import torch.
"""

from __future__ import annotations

import math
from typing import Any

from bitnet.config import ModelConfig

SIZES = {"1m": 1e6, "3m": 3e6, "10m": 1e7, "30m": 3e7, "100m": 1e8, "300m": 3e8, "1b": 1e9}
"""Approximate number of parameters, including the embedding."""


def model_of(parameters: float) -> ModelConfig:
    """The model: width grows as parameters^0.4; the depth is the one that comes closest to the number."""
    width = _multiple(128 * (parameters / 1e6) ** 0.4, (64, 128, 256))
    head = 128 if width >= 1024 else 64
    heads = width // head
    ffn = -(-8 * width // 3 // 64) * 64
    vocabulary = min(32_768, _power_of_two(2048 * (parameters / 1e6) ** 0.6))
    keys = next(n for n in range(heads // 2, 0, -1) if heads % n == 0)
    of_layer = width * (2 * heads * head + 2 * keys * head + 3 * ffn)
    return ModelConfig(
        vocab_size=vocabulary, dim=width, n_layers=round((parameters - vocabulary * width) / of_layer), n_heads=heads,
        n_kv_heads=keys, head_dim=head, ffn_dim=ffn, max_context=1 << int(math.log2(2 * width)),
    )  # fmt: skip


def training_of(parameters: float) -> dict[str, Any]:
    """Training settings: twenty tokens per parameter. With these batch sizes a learning rate of 8e-3 was best at widths
    of 128 and 192; others used about 1e-3 at width 2048 and a million tokens per step (arXiv 2402.17764)."""
    return {
        "tokens_per_parameter": 20.0, "lr": min(8e-3, float(f"{2 / model_of(parameters).dim:.2g}")), "batch": 8,
        "batch_tokens": _power_of_two(8192 * (parameters / 1e6) ** 0.75),
    }  # fmt: skip


def _multiple(value: float, steps: tuple[int, int, int]) -> int:
    """The nearest multiple of the first step (below 512), the second (below 1024), or the third (from 1024 on)."""
    step = steps[(value >= 512) + (value >= 1024)]
    return round(value / step) * step


def _power_of_two(value: float) -> int:
    return 1 << round(math.log2(value))
