"""Defaults of `bitnet finetune`, which depend on the source."""

from __future__ import annotations

from typing import Any

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet.settings import CONTEXT, FINETUNE_SETTINGS

LORA_SETTINGS = FINETUNE_SETTINGS | {"lr": 1e-3, "quantize_warmup": 0.0}
"""Defaults for adapters, which start from zero."""

DRAFT_SETTINGS = {"draft": True, "quantize_warmup": 0.5, "batch": 4}
"""Defaults for training only a draft: one layer learns faster from many small steps than from few large ones."""

PREFERENCE_SETTINGS = {"lr": 1e-5, "quantize_warmup": 0.0, "draft": False}
"""Defaults for preferences, which should change a model only a little. Adapters use ten times the learning rate."""


def of_source(
    config: ModelConfig, draft_only: bool = False, lora: bool = False, preference: bool = False
) -> tuple[dict[str, Any], ModelConfig]:
    """Settings and model of `bitnet finetune` from a source with this configuration, before the user's own.

    A full-precision model becomes ternary, gradually; a ternary one stays ternary. With draft_only, lora or preference
    no model is converted. If outputs are to be guessed, or compared with earlier ones, there is no dropout.
    """
    settings: dict[str, Any] = {"draft": bool(config.draft)}
    if config.max_context > CONTEXT:
        settings["context"] = CONTEXT
    if preference:
        more = {"lr": 1e-4} if lora else {}
        return FINETUNE_SETTINGS | settings | PREFERENCE_SETTINGS | more, without_dropout(config)
    if lora:
        return LORA_SETTINGS | settings | {"draft": False}, config
    if draft_only:
        return settings | DRAFT_SETTINGS, without_dropout(config)
    convert = not config.ternary
    settings |= FINETUNE_SETTINGS | {"quantize_warmup": 0.5 if convert else 0.0}
    if config.vision and config.similarity_scale and not config.similarity_bias:  # as in CLIP
        settings["contrastive_loss"] = "softmax"
    config = config.replace(head_format=config.head_format if config.head_format != "f32" else "int8")
    if config.vision and not config.vision.ternary:
        config = config.replace(vision={"ternary": TERNARY_LINEARS})
    return settings, config.replace(ternary=TERNARY_LINEARS) if convert else config


def without_dropout(config: ModelConfig) -> ModelConfig:
    stacks = {"draft": config.draft, "vision": config.vision}
    within = {name: stack.replace(dropout=0.0) for name, stack in stacks.items() if stack}
    return config.replace(dropout=0.0, **within)
