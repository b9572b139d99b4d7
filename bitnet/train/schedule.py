"""How learning rate, weight decay and quantization move with the progress of a run, 0 at its start and 1 at its end.

The defaults (constant, linear warm-down over the last 30 %, decay of weights only in the first
half, quantizers that come in until the warm-down) are what works best for small ternary models
(docs/precision.md); two_stage is that of the BitNet b1.58 Training Tips, for large ones.
"""

from __future__ import annotations

import math

from bitnet.settings import Settings


def learning_rate(settings: Settings, progress: float) -> float:
    rise = min(1.0, progress / settings.warmup) if settings.warmup else 1.0
    return settings.lr * rise * _fall(settings, progress)


def _fall(settings: Settings, progress: float) -> float:
    left = max(0.0, 1.0 - progress)
    if settings.schedule == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * min(progress, 1.0))
    if settings.schedule == "two_stage":  # linear to 0, and a third lower from the middle on
        return left if progress < 0.5 else left * 2 / 3
    return min(1.0, left / settings.warmdown) if settings.warmdown else 1.0


def quantization(settings: Settings, progress: float) -> float:
    """λ: how much of every quantizer counts. From 0 to 1 over --quantize-warmup, then 1 for the rest of the run."""
    return min(1.0, progress / settings.quantize_warmup) if settings.quantize_warmup else 1.0


def weight_decay(settings: Settings, progress: float) -> float:
    """Decay makes ternary codes flip; late in a run they should settle."""
    return settings.weight_decay if progress < 0.5 else 0.0
