"""Schedules of learning rate, weight decay and quantization.

The defaults (WSD: constant, linear warm-down over the last 30 %, weight decay only in the first
half, quantizers phased in until the warm-down) work best for small ternary models
(docs/precision.md); two_stage is that of the BitNet b1.58 Training Tips, for large ones.

A run whose length is changed continues its schedule: λ never falls, warm-ups end where they would have, and
the learning rate falls from where it is, however short the rest.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from bitnet.settings import Settings


@dataclass(frozen=True)
class Place:
    """The place of the next step in its run."""

    whole: float  # share of the run that is done, 0 to 1
    begun: float  # the same for the first planned length, or the present one if shorter: warm-ups are shares of it
    tokens: float = 0.0  # tokens done
    horizon: float = 0.0  # tokens of the whole run
    since: float = 0.0  # share of the run at which its length was last changed
    fallen: float = 1.0  # factor of the learning rate there
    quantized: float = 0.0  # λ reached so far


def behind(length: float, share: float, tokens: float) -> float:
    """How much of an initial phase is done, 0 to 1. Lengths up to 1 are shares of the run, others tokens."""
    if not length:
        return 1.0
    return min(1.0, share / length if length <= 1 else tokens / length)


def learning_rate(settings: Settings, at: Place) -> float:
    return settings.lr * behind(settings.warmup, at.begun, at.tokens) * fall(settings, at)


def fall(settings: Settings, at: Place) -> float:
    """Factor of the learning rate, 1 before it falls. If it fell before a resume, it rises as in a warm-up."""
    if at.fallen < 1 and (rise := _share(settings.warmup, at)):
        return min(_course(settings, at), at.fallen + (at.whole - at.since) / rise)
    return _course(settings, at)


def _course(settings: Settings, at: Place) -> float:
    left = max(0.0, 1.0 - at.whole)
    if settings.schedule == "cosine":
        return 0.5 + 0.5 * math.cos(math.pi * min(at.whole, 1.0))
    if settings.schedule == "two_stage":  # linear to 0, and a third lower in the second half
        return left if at.whole < 0.5 else left * 2 / 3
    length = _share(settings.warmdown, at)
    if at.fallen == 1:
        length = min(length, 1.0 - at.since)
    return min(1.0, left / length) if length > 0 else 1.0


def _share(length: float, at: Place) -> float:
    return length if length <= 1 else length / max(at.horizon, 1.0)


def falls(settings: Settings, at: Place) -> bool:
    """Whether the next step is in the warm-down of a constant schedule."""
    return settings.schedule == "constant" and fall(settings, at) < 1


def quantization(settings: Settings, at: Place) -> float:
    """λ: how much of every quantizer counts. From 0 to 1 over --quantize-warmup, then 1 for the rest of the run."""
    return max(at.quantized, behind(settings.quantize_warmup, at.begun, at.tokens))


def weight_decay(settings: Settings, at: Place) -> float:
    """Decay makes ternary codes flip; late in a run they should settle."""
    return settings.weight_decay if at.whole < 0.5 else 0.0
