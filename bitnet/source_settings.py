"""What `bitnet finetune` begins with, before the user says anything: it follows from the source."""

from __future__ import annotations

from typing import Any

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet.settings import CONTEXT, FINETUNE_SETTINGS

LORA_SETTINGS = FINETUNE_SETTINGS | {"lr": 1e-3, "quantize_warmup": 0.0}
"""Those of adapters, which begin with nothing."""

DRAFT_SETTINGS = {"draft": True, "quantize_warmup": 0.5, "batch": 4}
"""Those of a draft that learns alone: one layer learns sooner from many small steps than from few large ones."""

PREFERENCE_SETTINGS = {"lr": 1e-5, "quantize_warmup": 0.0, "draft": False}
"""Those of a model that is taught preferences: it stays as it is, and near what it says. Adapters take ten times."""


def of_source(
    config: ModelConfig, draft_only: bool = False, lora: bool = False, preference: bool = False
) -> tuple[dict[str, Any], ModelConfig]:
    """Settings and model of `bitnet finetune` from a source with this configuration, before the user's own.

    A full-precision model becomes ternary, slowly; one that is ternary already goes on so. draft_only,
    lora, preference: it stays. What is to be guessed, or compared with what it said, is said without dropout.
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
    if config.vision and config.similarity_scale and not config.similarity_bias:  # as CLIP's, which says it so
        settings["contrastive_loss"] = "softmax"
    config = config.replace(head_format=config.head_format if config.head_format != "f32" else "int8")
    if config.vision and not config.vision.ternary:
        config = config.replace(vision={"ternary": TERNARY_LINEARS})
    return settings, config.replace(ternary=TERNARY_LINEARS) if convert else config


def without_dropout(config: ModelConfig) -> ModelConfig:
    within = {name: {"dropout": 0.0} for name in ("draft", "vision") if getattr(config, name)}
    return config.replace(dropout=0.0, **within)
