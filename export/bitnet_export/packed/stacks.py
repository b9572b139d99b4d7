"""ModelConfig to and from the 256-byte stack record (FORMAT.md §2)."""

from __future__ import annotations

import math
from typing import Any

from bitnet.config import CHOICES, ModelConfig

from .records import STACK

MAX_ATTENTION_DIM = 262_144

_NORM_FLAGS = ("pre_norm", "post_norm", "sub_norm", "linear_norm", "norm_bias", "qk_norm")
_BIAS_FLAGS = ("qkv_bias", "o_bias", "ffn_bias", "head_bias")

_FLAGS = {"norm_flags": _NORM_FLAGS, "bias_flags": _BIAS_FLAGS}
_BOOLEANS = ("tie_embeddings", "has_head")
_POSITIVE = ("norm_eps", "rope_attention_factor", "embedding_scale", "residual_scale", "attention_scale")

# What no word says yet: each has this value, or one of these.
_UNSAID = {"residual_norm": False, "embedding_norm": False, "final_norm": True, "normalize_routing": True}
_CHOICES = CHOICES | {"activation": ("relu2", "silu", "gelu", "relu")}

# The words of the record in order.
_WORDS = (
    "input", "mask", "vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_context",
    "sliding_window", "norm", "norm_flags", "norm_eps", "ffn", "activation", "n_experts", "experts_per_token",
    "position", "rope_attention_factor", "bias_flags", "tie_embeddings", "embedding_scale", "residual_scale",
    "attention_scale", "attention_softcap", "logit_softcap", "pooling", "has_head", "rope_dim", "global_every",
)  # fmt: skip


def pack_stack(config: ModelConfig) -> bytes:
    """The record of a configuration. Raises ValueError for what a record cannot say."""
    unsaid = [field for field, value in _UNSAID.items() if getattr(config, field) != value]
    unsaid += [field for field, words in _CHOICES.items() if field in _WORDS and getattr(config, field) not in words]
    if unsaid:
        raise ValueError(f"{unsaid[0]} is {getattr(config, unsaid[0])}, which the packed file cannot say")
    numbers: list[int | float] = []
    for field in _WORDS:
        if field in _FLAGS:
            numbers.append(sum(1 << bit for bit, flag in enumerate(_FLAGS[field]) if getattr(config, flag)))
        elif field in _CHOICES:
            numbers.append(_CHOICES[field].index(getattr(config, field)))
        else:
            numbers.append(getattr(config, field))
    record = STACK.pack(*numbers, bytes(68), config.name.encode())
    unpack_stack(record)
    return record


def unpack_stack(record: bytes) -> ModelConfig:
    """The configuration of a record. Raises ValueError naming the word that is out of range.

    Fields that only training needs (rope_theta, weight_scale, ...) have their defaults here;
    METADATA has the full configuration.
    """
    *words, unused, name = STACK.unpack(record)
    if any(unused):
        raise ValueError("an unused word is not 0")
    if b"\0" in name.rstrip(b"\0") or name[-1]:
        raise ValueError("name is not padded with zeros")
    fields: dict[str, Any] = {"name": name.rstrip(b"\0").decode()}
    for field, word in zip(_WORDS, words, strict=True):
        if field in _FLAGS:
            _check_below(field, word, 1 << len(_FLAGS[field]))
            fields |= {flag: bool(word >> bit & 1) for bit, flag in enumerate(_FLAGS[field])}
        elif field in _CHOICES:
            _check_below(field, word, len(_CHOICES[field]))
            fields[field] = _CHOICES[field][word]
        elif field in _BOOLEANS:
            _check_below(field, word, 2)
            fields[field] = bool(word)
        else:
            if isinstance(word, float) and not (math.isfinite(word) and (word > 0 or field not in _POSITIVE)):
                raise ValueError(f"{field} is {word}, expected a finite number" + " above 0" * (field in _POSITIVE))
            fields[field] = word
    config = ModelConfig(**fields)
    if config.n_heads * config.head_dim > MAX_ATTENTION_DIM:
        raise ValueError(
            f"n_heads * head_dim is {config.n_heads * config.head_dim}, expected at most {MAX_ATTENTION_DIM}"
        )
    return config


def _check_below(field: str, word: int, limit: int) -> None:
    if word >= limit:
        raise ValueError(f"{field} is {word}, expected 0 to {limit - 1}")
