"""Model FLOPs utilization of a GPU: the operations that the model needs, over the GPU's peak."""

from __future__ import annotations

import re

import torch
from torch import Tensor

from bitnet.model.transformer import Transformer

PEAKS = {
    "B200": 2250, "H200": 989, "H100 PCIe": 756, "H100 NVL": 835, "H100": 989, "A100": 312, "L40S": 362, "L4": 121,
    "RTX 4090": 165, "RTX 3090": 71,
}  # fmt: skip
"""Dense bf16 with fp32 accumulation, 10¹² operations per second, from the vendor. The first matching name counts."""
OTHERS = r"\b(MIG|Laptop|4090 D)\b"
"""Names of a part of such a GPU, or of a slower one."""


def of_token(model: Transformer, context: int) -> float:
    """Operations per token of a full sequence, forward and backward: 6 per weight that multiplies it, 4 per one that is
    frozen, and attention.

    Recomputation and quantization do not count.
    """
    config = model.config
    taken = config.experts_per_token / config.n_experts if config.n_experts else 1.0
    matrices = [(name, p) for name, p in model.layers.named_parameters() if p.dim() == 2]
    weights = sum(_each(p) * p.numel() * (taken if ".experts." in name else 1.0) for name, p in matrices)
    weights += _each(model.own_head.weight) * config.vocab_size * config.dim if config.has_head else 0
    windows = [config.of_layer(i).sliding_window for i in range(config.n_layers)]
    seen = sum(window if 0 < window < context else context / 2 for window in windows)
    seen *= 2 if config.mask == "bidirectional" else 1
    return weights + 12 * config.n_heads * config.head_dim * seen


def _each(weight: Tensor) -> float:
    """Operations for each number of a weight: a product, the gradient of its input, and its own if it is trained."""
    return 6.0 if weight.requires_grad else 4.0


def peak(device: str, precision: str) -> float:
    """The GPU's peak in operations per second; 0 if unknown."""
    if device != "cuda" or precision != "bf16":
        return 0.0
    name = torch.cuda.get_device_name()
    if re.search(OTHERS, name):
        return 0.0
    return next((1e12 * rate for known, rate in PEAKS.items() if re.search(rf"\b{known}\b", name)), 0.0)
