"""`bitnet finetune --lora`: adapters that are trained beside a frozen ternary model."""

from __future__ import annotations

from typing import Any

from bitnet.config import ModelConfig
from bitnet.settings import Settings


def added(base: ModelConfig, overrides: dict[str, Any], settings: Settings) -> ModelConfig:
    """The configuration of a frozen model with adapters. Raises ValueError if the model cannot have any."""
    if overrides:
        raise ValueError(f"--set {next(iter(overrides))} does not go with --lora: the model stays as it is")
    if settings.quantize_warmup:
        raise ValueError("--quantize-warmup does not go with --lora: the model stays ternary from the first step on")
    if settings.embedding_lr:
        raise ValueError("--embedding-lr does not go with --lora, which trains only adapters, at --lr; leave it out")
    if base.adapters:
        raise ValueError("the source has adapters already; go on with its run, or begin with what that began with")
    if base.input != "tokens" or not base.ternary:
        found = f"takes {base.input}" if base.input != "tokens" else "is a full-precision model"
        raise ValueError(
            f"--lora is for a ternary model of texts, and the source {found}"
            + "; bitnet finetune without --lora makes it ternary" * (not base.ternary)
        )
    if settings.lora > base.dim:
        raise ValueError(f"lora is {settings.lora}, expected at most the model's width, {base.dim}; usual: 8 to 64")
    there = [role for role in base.ternary if base.ffn == "gated" or role != "gate"]
    if missing := [role for role in settings.lora_linears if role not in there]:
        raise ValueError(f"lora_linears has {missing[0]}, and the ternary linears of the source are {', '.join(there)}")
    adapters = tuple(role for role in there if role in (settings.lora_linears or there))
    if settings.draft:
        raise ValueError("--draft does not go with --lora, which learns adapters alone; a packed model keeps its draft")
    return base.replace(adapter_rank=settings.lora, adapters=adapters)
