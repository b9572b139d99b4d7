"""The JSON configuration of a Thinker, converted to that of `bitnet train`: preset, [train] and [model]."""

from __future__ import annotations

import json
from typing import Any

from bitnet_runtime.errors import did_you_mean

DEFAULTS: dict[str, Any] = {
    "vocab_size": 5000, "n_layers": 4, "d_model": 256, "n_heads": 4, "d_ff": 1024, "dropout": 0.1,
    "rope_theta": 10_000.0, "ctx_len": 512, "use_swiglu": True, "use_gqa": False, "use_moe": False, "num_experts": 8,
    "num_experts_per_tok": 2, "lr": 3e-4, "wd": 0.1, "warmup_steps": 10, "max_steps": 5000, "batch_size": 8,
    "max_grad_norm": 1.0, "val_split": 0.1, "seed": 42,
}  # fmt: skip
"""Every key and its default."""

TRAINING = {
    "lr": "lr", "wd": "weight_decay", "max_steps": "steps", "batch_size": "batch", "max_grad_norm": "clip",
    "val_split": "validation", "seed": "seed",
}  # fmt: skip
"""Keys of training that correspond to one option here."""

MARK = "d_model"  # the key that identifies such a file


def parse(text: str, path: str) -> dict[str, Any]:
    """The content of the equivalent TOML file. Raises ValueError if it is not such a configuration."""
    try:
        said = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not JSON: {error}") from None
    if not isinstance(said, dict) or MARK not in said:
        raise ValueError(
            f"{path} has no {MARK!r}, so it is not a configuration of a Thinker, the only JSON that is read here; "
            "write a TOML file with the tables [train] and [model]"
        )
    for key, value in said.items():
        if key not in DEFAULTS:
            near = did_you_mean(key, DEFAULTS) or f", expected some of {', '.join(DEFAULTS)}"
            raise ValueError(f"{path}: unknown key {key!r}{near}")
        wanted = type(DEFAULTS[key])
        if type(value) is not wanted and not (wanted is float and type(value) is int):
            raise ValueError(f"{path}: {key} is {value!r}, expected {wanted.__name__}")
    return {"preset": "thinker", "train": _training(said), "model": _model(DEFAULTS | said, path)}


def _model(said: dict[str, Any], path: str) -> dict[str, Any]:
    width, heads = said["d_model"], said["n_heads"]
    if heads < 1 or width < heads or width % heads:
        raise ValueError(f"{path}: d_model is {width}, expected a multiple of n_heads = {heads}")
    model = {
        "vocab_size": said["vocab_size"], "dim": width, "n_layers": said["n_layers"], "n_heads": heads,
        "n_kv_heads": max(1, heads // 2) if said["use_gqa"] else heads, "head_dim": width // heads,
        "ffn_dim": said["d_ff"], "max_context": said["ctx_len"], "rope_theta": said["rope_theta"],
        "dropout": said["dropout"],
    }  # fmt: skip
    if not said["use_swiglu"]:
        model |= {"ffn": "plain", "activation": "gelu_erf", "ffn_bias": True}
    if said["use_moe"]:
        model |= {"n_experts": said["num_experts"], "experts_per_token": said["num_experts_per_tok"]}
    return model


def _training(said: dict[str, Any]) -> dict[str, Any]:
    """Options of the keys in the file; its learning rate is for AdamW."""
    train = {option: said[key] for key, option in TRAINING.items() if key in said}
    if "lr" in said:
        train["optimizer"] = "adamw"
    if "warmup_steps" in said:
        train["warmup"] = min(1.0, said["warmup_steps"] / max(1, said.get("max_steps", DEFAULTS["max_steps"])))
    return train
