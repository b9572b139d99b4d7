"""Valid values of `bitnet.settings.Settings`: words, ranges, and combinations of options."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from bitnet.config import TERNARY_LINEARS

SOURCES = ("data", "mixture", "chat", "preference")
"""Options that name the data of a run, one kind of data each."""

TEXT = (*SOURCES, "column", "validation", "documents", "fim")
"""These, and options on how text is read."""

CHOICES = {
    "objective": ("next", "mlm", "contrastive"),
    "contrastive_loss": ("sigmoid", "softmax"),
    "augment": ("none", "crop", "crop-flip"),
    "optimizer": ("adamw", "muon"),
    "schedule": ("constant", "cosine", "two_stage"),
    "precision": ("auto", "fp32", "bf16"),
    "device": ("auto", "cpu", "cuda"),
    "on_bad_step": ("stop", "skip"),
    "parallel": ("auto", "ddp", "fsdp"),
    "report_to": ("none", "tensorboard", "wandb", "trackio"),
}

RANGES = {
    "validation": (1e-6, 0.5), "temperature": (1e-3, 100), "steps": (1, 1e9), "minutes": (0, 1e6),
    "batch": (1, 1e6), "accumulate": (1, 1e6), "context": (0, 1 << 24), "seed": (0, 1 << 31), "lr": (1e-9, 10),
    "distill": (0, 1), "distill_temperature": (0.1, 100), "distill_relations": (0, 1),
    "distill_features": (0, 1), "distill_layer": (0, 1e4),
    "weight_decay": (0, 10), "balance_loss": (0, 10), "clip": (0, 1e9),
    "spike": (0, 1e9), "threads": (0, 1024), "eval_every": (0, 1e9), "eval_tokens": (1, 1e12),
    "save_every": (1, 1e9), "save_minutes": (0, 1e6), "keep": (1, 1e9), "layers_every": (0, 1e9),
    "batch_tokens": (0, 1e9), "tokens": (0, 1e15), "tokens_per_parameter": (0, 1e6),
    "lora": (0, 4096), "lora_alpha": (0, 1e6),
    "embedding_lr": (0, 10), "patience": (0, 1e6), "profile": (0, 1000), "self_written": (0, 1e9),
    "fim": (0, 1), "tasks_every": (0, 1e9), "tasks_limit": (0, 1e9), "beta": (1e-4, 100),
}  # fmt: skip
"""The least and the most that a number may be."""

LENGTHS = ("warmup", "warmdown", "quantize_warmup")
"""Options that are a share of the run, or tokens: values from `LEAST_TOKENS` on."""
LEAST_TOKENS = 1000

LORA = ("lora", "lora_alpha", "lora_linears")
CONVERSION: tuple[str, ...] = (
    "source", "distill", "distill_temperature", "distill_relations", "distill_layer", "distill_features", "teacher",
    *LORA, "draft_only", "self_written", "preference", "beta",
)  # fmt: skip
"""Options of `bitnet finetune` only."""


def check(settings: Any) -> None:
    """Raises ValueError: what was found, and what is expected."""
    check_values(vars(settings))
    _check_data(settings)
    _check_conversion(settings)


def check_values(given: Mapping[str, Any]) -> None:
    """Each option by itself, of those that are given. Raises ValueError, as `check` does."""
    for name, words in CHOICES.items():
        if given.get(name, words[0]) not in words:
            raise ValueError(f"{name} is {given[name]!r}, expected one of {', '.join(words)}")
    for name, (low, high) in RANGES.items():
        if not low <= given.get(name, low) <= high:
            raise ValueError(f"{flag_of(name)} is {given[name]}, expected {low:g} to {high:g}")
    shares = {"quantize_warmup": 0.5 if given.get("source") else 0.9}
    for name in LENGTHS:
        most, value = shares.get(name, 1), given.get(name, 0)
        if not (0 <= value <= most or LEAST_TOKENS <= value <= 1e15):
            raise ValueError(
                f"{flag_of(name)} is {value:g}, expected 0 to {most:g}, a share of the run, or {LEAST_TOKENS:,} and "
                "more, tokens"
            )
    for name in ("data", "chat", "preference"):
        if "" in given.get(name, ()):
            raise ValueError(f"{flag_of(name)} has an empty name, expected a file, a folder or a glob")
    if unknown := [role for role in given.get("lora_linears", ()) if role not in TERNARY_LINEARS]:
        raise ValueError(f"--lora-linears has {unknown[0]!r}, expected some of {', '.join(TERNARY_LINEARS)}")


def _check_data(settings: Any) -> None:
    """The data of a run, and how it is read."""
    given = [flag_of(name) for name in SOURCES if getattr(settings, name)]
    if len(given) > 1:
        raise ValueError(f"both {given[0]} and {given[1]} are given, expected one kind of data")
    for name in ("fim", "documents"):
        if settings.chat and getattr(settings, name):
            raise ValueError(f"{flag_of(name)} is for text, and --chat is given; leave one of them out")
    if settings.freeze_vision and not settings.vision:
        raise ValueError(
            "--freeze-vision keeps the stack that --vision names, and it names none; add it, for that of SRC as "
            "--vision SRC"
        )


def _check_conversion(settings: Any) -> None:
    """Training of an existing model: distillation, a draft, preferences, adapters."""
    for f in dataclasses.fields(settings):
        plain = [] if f.default is dataclasses.MISSING else f.default
        if f.name in CONVERSION and not settings.source and getattr(settings, f.name) != plain:
            raise ValueError(f"{flag_of(f.name)} is an option of `bitnet finetune`, which starts from a model")
    if settings.distilled > 1:
        raise ValueError(
            f"--distill {settings.distill:g}, --distill-relations {settings.distill_relations:g} and "
            f"--distill-features {settings.distill_features:g} are shares of one loss, expected at most 1 together"
        )
    if settings.draft_only and not settings.draft:
        raise ValueError(f"--draft-only and {'--lora' if settings.lora else '--no-draft'} are both given, expected one")
    if settings.draft and settings.distilled:
        raise ValueError("a draft cannot learn while its model is distilled; add --no-draft, and --draft-only after")
    if settings.self_written and (settings.chat or not settings.draft_only):
        raise ValueError("--self-written is for a draft that is trained alone, on text; add --draft-only and --data")
    if settings.teacher and not settings.distilled:
        raise ValueError(
            "--teacher is given, but nothing is distilled; add --distill, --distill-relations or --distill-features"
        )
    others = ("quantize_warmup", "draft", "distilled", "fim", "documents", "vision")
    for name in others if settings.preference else ():
        if getattr(settings, name):
            option = flag_of("distill" if name == "distilled" else name)
            raise ValueError(f"{option} does not go with --preference, which trains a model as it is; leave it out")
    if not settings.lora and (settings.lora_alpha or settings.lora_linears):
        raise ValueError("--lora-alpha or --lora-linears is given without an adapter; add --lora RANK")
    if settings.lora and (settings.optimizer != "adamw" or settings.vision):
        what = "--vision" if settings.vision else f"--optimizer {settings.optimizer}"
        raise ValueError(f"{what} does not go with --lora, which trains only adapters, with adamw; leave it out")


def flag_of(name: str) -> str:
    return f"--{name.replace('_', '-')}"
