"""ModelConfig to and from the 256-byte stack record (FORMAT.md §2)."""

from __future__ import annotations

import math
from typing import Any

from bitnet.config import CHOICES, TERNARY_LINEARS, ModelConfig

from .records import STACK

MAX_ATTENTION_DIM = 262_144

# Bit fields of booleans.
_FLAGS = {
    "norm_flags": (
        "pre_norm", "post_norm", "sub_norm", "linear_norm", "norm_bias", "qk_norm", "residual_norm", "embedding_norm",
        "final_norm",
    ),
    "bias_flags": ("qkv_bias", "o_bias", "ffn_bias", "head_bias", "projector_bias", "patch_bias"),
}  # fmt: skip
_BOOLEANS = ("tie_embeddings", "has_head", "normalize_routing", "class_token")
_POSITIVE = ("norm_eps", "rope_attention_factor", "embedding_scale", "residual_scale", "attention_scale")
_CHANNELS = 3
_RANK_BITS = 16  # low bits of the adapters word; above them one bit for each role with an adapter

# The words of the record in order.
_WORDS = (
    "input", "mask", "vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_context",
    "sliding_window", "norm", "norm_flags", "norm_eps", "ffn", "activation", "n_experts", "experts_per_token",
    "position", "rope_attention_factor", "bias_flags", "tie_embeddings", "embedding_scale", "residual_scale",
    "attention_scale", "attention_softcap", "logit_softcap", "pooling", "has_head", "rope_dim", "global_every",
    "normalize_routing", "first_position", "image_size", "patch_size", "channels",
    *["pixel_mean"] * _CHANNELS, *["pixel_std"] * _CHANNELS,
    "class_token", "out_dim", "similarity_scale", "similarity_bias", "image_token", "adapters",
)  # fmt: skip


def pack_stack(config: ModelConfig) -> bytes:
    """The record of a configuration. Raises ValueError for values that a record cannot express."""
    if config.vision:
        raise ValueError("a record holds one stack, expected one of `ModelConfig.stacks`")
    numbers: list[int | float] = []
    for field in dict.fromkeys(_WORDS):
        if field in _FLAGS:
            numbers.append(sum(1 << bit for bit, flag in enumerate(_FLAGS[field]) if getattr(config, flag)))
        elif field in CHOICES:
            numbers.append(CHOICES[field].index(getattr(config, field)))
        elif field in ("pixel_mean", "pixel_std"):
            numbers += [*getattr(config, field), 0.0, 0.0, 0.0][:_CHANNELS]
        elif field == "adapters":
            bits = (1 << _RANK_BITS << i for i, role in enumerate(TERNARY_LINEARS) if role in config.adapters)
            numbers.append(config.adapter_rank | sum(bits))
        else:
            numbers.append(getattr(config, field))
    record = STACK.pack(*numbers, config.name.encode())
    unpack_stack(record)
    return record


def unpack_stack(record: bytes) -> ModelConfig:
    """The configuration of a record. Raises ValueError naming the word that is out of range.

    Fields that only training needs (rope_theta, weight_scale, ...) get their defaults;
    METADATA has the full configuration.
    """
    *words, name = STACK.unpack(record)
    if b"\0" in name.rstrip(b"\0") or name[-1]:
        raise ValueError("name is not padded with zeros")
    fields: dict[str, Any] = {"name": name.rstrip(b"\0").decode(), "pixel_mean": (), "pixel_std": ()}
    for field, word in zip(_WORDS, words, strict=True):
        if isinstance(word, float) and not (math.isfinite(word) and (word > 0 or field not in _POSITIVE)):
            raise ValueError(f"{field} is {word}, expected a finite number" + " above 0" * (field in _POSITIVE))
        if field in _FLAGS:
            _check_below(field, word, 1 << len(_FLAGS[field]))
            fields |= {flag: bool(word >> bit & 1) for bit, flag in enumerate(_FLAGS[field])}
        elif field in CHOICES:
            _check_below(field, word, len(CHOICES[field]))
            fields[field] = CHOICES[field][word]
        elif field in _BOOLEANS:
            _check_below(field, word, 2)
            fields[field] = bool(word)
        elif field in ("pixel_mean", "pixel_std"):
            fields[field] += (word,)
        elif field == "adapters":
            _check_below(field, word, 1 << _RANK_BITS + len(TERNARY_LINEARS))
            fields["adapter_rank"] = word & (1 << _RANK_BITS) - 1
            fields[field] = tuple(role for i, role in enumerate(TERNARY_LINEARS) if word >> _RANK_BITS + i & 1)
        else:
            fields[field] = word
    for field in ("pixel_mean", "pixel_std"):
        values, channels = fields[field], min(fields["channels"], _CHANNELS)
        if any(value or math.copysign(1, value) < 0 for value in values[channels:]):
            raise ValueError(f"{field} has a value for a channel that does not exist")
        fields[field] = values[:channels]
    config = ModelConfig(**fields)
    if config.n_heads * config.head_dim > MAX_ATTENTION_DIM:
        raise ValueError(
            f"n_heads * head_dim is {config.n_heads * config.head_dim}, expected at most {MAX_ATTENTION_DIM}"
        )
    return config


def _check_below(field: str, word: int, limit: int) -> None:
    if word >= limit:
        raise ValueError(f"{field} is {word}, expected 0 to {limit - 1}")
