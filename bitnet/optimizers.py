"""The optimizer of a run."""

from __future__ import annotations

from typing import Any

import torch

from bitnet.model import Transformer


def build(model: Transformer) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameter_groups(model), betas=(0.9, 0.95), fused=True)


def parameter_groups(model: Transformer) -> list[dict[str, Any]]:
    """Weight decay is for the matrices of the layers, not for gains, biases and embeddings."""
    named = list(model.named_parameters())
    decays = [p for name, p in named if p.dim() == 2 and name.startswith("layers.")]
    others = [p for name, p in named if p.dim() != 2 or not name.startswith("layers.")]
    return [{"params": decays, "decays": True}, {"params": others, "decays": False}]
