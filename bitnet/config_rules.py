"""Valid values of `bitnet.config.ModelConfig`: words, ranges, and combinations of options; of two stacks see
`bitnet.config_stacks`.

Each check raises ValueError: what was found, and what is expected.
"""

from __future__ import annotations

import dataclasses
import math
import sys
from typing import Any, cast

from bitnet.config_stacks import check_draft, check_vision

TERNARY_LINEARS = ("q", "k", "v", "o", "gate", "up", "down")

CHOICES: dict[str, tuple[str, ...]] = {
    "input": ("tokens", "embeddings", "images", "draft"),
    "mask": ("causal", "bidirectional", "prefix"),
    "norm": ("rms", "layer"),
    "ffn": ("gated", "plain"),
    "activation": ("relu2", "silu", "gelu", "relu", "gelu_erf"),
    "position": ("rope", "learned", "sinusoidal", "none"),
    "rope_scaling": ("none", "linear", "llama3", "yarn"),
    "pooling": ("none", "last", "mean", "first", "attention"),
    "weight_scale": ("tensor", "row", "group"),
    "head_format": ("int8", "f16", "f32", "ternary"),
}
"""Allowed words; the position in the tuple is the number in the packed file."""


POSITIVE = (
    "norm_eps", "embedding_scale", "residual_scale", "attention_scale", "rope_theta", "rope_factor",
    "rope_low_freq_factor", "rope_high_freq_factor", "rope_beta_fast", "rope_beta_slow", "rope_attention_factor",
)  # fmt: skip


def check(config: Any) -> None:
    """Check a whole configuration."""
    _check_words(config)
    _check_sizes_of_images(config)
    _check_ranges(config)
    _check_numbers(config)
    _check_relations(config)
    _check_lists(config)
    _check_rope(config)
    _check_kind(config)
    _check_images(config)
    if config.vision is not None:
        if not isinstance(config.vision, type(config)):
            raise ValueError(f"vision is {config.vision!r}, expected a table of options")
        check_vision(config, config.vision)
    if config.draft is not None:
        if not isinstance(config.draft, type(config)):
            raise ValueError(f"draft is {config.draft!r}, expected a table of options")
        check_draft(config, config.draft)


def check_types(config: Any) -> None:
    """Check that numbers and yes-or-no options are such, before anything is computed from them."""
    expected = {"int": (int, "an integer"), "bool": (bool, "true or false")}
    for field in dataclasses.fields(config):
        wanted, words = expected.get(str(field.type), (None, ""))
        value = getattr(config, field.name)
        if wanted and type(value) is not wanted:
            raise ValueError(f"{field.name} is {value!r:.80}, expected {words}")


def _check_words(config: Any) -> None:
    for field, words in CHOICES.items():
        if getattr(config, field) not in words:
            raise ValueError(f"{field} is {getattr(config, field)!r}, expected one of {', '.join(words)}")


def _check_ranges(config: Any) -> None:
    ranges = {
        "vocab_size": (0 if config.input != "tokens" and not config.has_head else 1, 1 << 21),
        "dim": (1, 65_536),
        "n_layers": (1, 1024),
        "n_heads": (1, 1024),
        "n_kv_heads": (1, config.n_heads),
        "head_dim": (1, 1024),
        "ffn_dim": (1, 262_144),
        "max_context": (1, 1 << 24),
        "sliding_window": (0, 1 << 24),
        "global_every": (0, 1024),
        "n_experts": (0, 65_534),
        "experts_per_token": (0, config.n_experts if config.n_experts > 0 else 65_534),
        "rope_dim": (0, config.head_dim),
        "out_dim": (0, 65_536),
        "first_position": (0, 1 if config.position == "rope" else 0),
        "image_token": (0, max(config.vocab_size - 1, 0)),
    }
    for field, (low, high) in ranges.items():
        if not low <= getattr(config, field) <= high:
            raise ValueError(f"{field} is {getattr(config, field)}, expected an integer from {low} to {high}")


def _check_numbers(config: Any) -> None:
    for field in POSITIVE:
        value = getattr(config, field)
        if not (finite(value) and value > 0):
            raise ValueError(f"{field} is {value!r}, expected a finite number above 0")
    if not (type(config.dropout) in (int, float) and 0 <= config.dropout < 1):
        raise ValueError(f"dropout is {config.dropout!r}, expected a share from 0 to below 1")
    for field in ("logit_softcap", "attention_softcap", "rope_local_theta"):
        value = getattr(config, field)
        if not (finite(value) and value >= 0):
            raise ValueError(f"{field} is {value!r}, expected 0 (none) or a positive number")
    if config.rope_local_theta and config.rope_attention_factor != 1:
        raise ValueError(
            f"rope_attention_factor is {config.rope_attention_factor!r} with rope_local_theta, expected 1: "
            "it would count for the layers with a window, too"
        )


def _check_relations(config: Any) -> None:
    if config.residual_norm and config.post_norm:
        raise ValueError("residual_norm and post_norm are both set, expected at most one")
    if config.global_every == 1 or (config.global_every and not config.sliding_window):
        raise ValueError(
            f"global_every is {config.global_every} with sliding_window = {config.sliding_window}, "
            "expected 0 (all layers alike), or at least 2 and a window"
        )
    if config.n_heads % config.n_kv_heads:
        raise ValueError(f"n_heads is {config.n_heads}, expected a multiple of n_kv_heads = {config.n_kv_heads}")
    if (config.n_experts > 0) != (config.experts_per_token > 0):
        near = f"experts_per_token = {min(2, config.n_experts)}" if config.n_experts else "n_experts = 8"
        raise ValueError(
            f"n_experts is {config.n_experts} and experts_per_token {config.experts_per_token}, expected both 0 or "
            f"both above 0; set {near}, too"
        )


def _check_lists(config: Any) -> None:
    if type(config.name) is not str:
        raise ValueError(f"name is {config.name!r}, expected a text")
    if len(config.name.encode()) > 63:
        raise ValueError(f"name {config.name!r} is longer than 63 bytes")
    for field in ("ternary", "adapters"):
        roles, known = getattr(config, field), ", ".join(TERNARY_LINEARS)
        if type(roles) is not tuple:
            raise ValueError(f'{field} is {roles!r}, expected a list of some of {known}, such as ["q", "o"]')
        unknown = [role for role in roles if role not in TERNARY_LINEARS]
        if unknown:
            raise ValueError(f"{field} names {unknown[0]!r}, expected some of {known}")
        if len(set(roles)) < len(roles):
            raise ValueError(f"{field} is {', '.join(roles)}, expected each at most once")
    if not 0 <= config.adapter_rank < 1 << 16:
        raise ValueError(f"adapter_rank is {config.adapter_rank}, expected an integer from 0 to 65535")
    if (config.adapter_rank > 0) != (len(config.adapters) > 0):
        raise ValueError(f"adapter_rank is {config.adapter_rank} and adapters {config.adapters}, expected both or none")


def _check_rope(config: Any) -> None:
    if config.rope_dim % 2 or (config.rope_dim > 0) != (config.position == "rope"):
        expected = "an even number above 0" if config.position == "rope" else "0"
        raise ValueError(f"rope_dim is {config.rope_dim} with position = {config.position!r}, expected {expected}")
    needs = {
        "llama3": ("rope_low_freq_factor", "rope_high_freq_factor"),
        "yarn": ("rope_beta_slow", "rope_beta_fast"),
    }
    if config.rope_scaling not in needs:
        return
    if config.rope_original_context < 1:
        raise ValueError(
            f"rope_original_context is {config.rope_original_context}, expected at least 1 with {config.rope_scaling}"
        )
    low, high = needs[config.rope_scaling]
    if not getattr(config, low) < getattr(config, high):
        raise ValueError(f"{low} is {getattr(config, low)}, expected less than {high}, {getattr(config, high)}")
    if config.rope_scaling == "yarn" and config.rope_theta <= 1:
        raise ValueError(f"rope_theta is {config.rope_theta}, expected more than 1 with yarn")


def _check_sizes_of_images(config: Any) -> None:
    of_images = config.input == "images"
    ranges = {
        "image_size": (1, 1 << 14) if of_images else (0, 0),
        "patch_size": (1, max(config.image_size, 1)) if of_images else (0, 0),
        "channels": (1, 3) if of_images else (0, 0),
    }
    for field, (low, high) in ranges.items():
        value = getattr(config, field)
        if not low <= value <= high:
            raise ValueError(
                f"{field} is {value} with input = {config.input!r}, expected an integer from {low} to {high}"
            )


def _check_kind(config: Any) -> None:
    """Options that do not fit a vision stack, or a text stack."""
    if config.input != "images":
        if config.pooling == "attention":
            raise ValueError(
                "pooling is 'attention' for texts, expected none, last, mean or first; 'attention' is for images"
            )
        return
    if config.mask != "bidirectional":
        raise ValueError(f"mask is {config.mask!r} of images, expected 'bidirectional': patches have no order in time")
    if config.has_head:
        raise ValueError("has_head is True of images, expected False: a head predicts tokens, and images have none")


def _check_images(config: Any) -> None:
    """Options of one vision stack: pixels and patches."""
    for field in ("pixel_mean", "pixel_std"):
        values = getattr(config, field)
        numbers = type(values) is tuple and all(map(finite, values))
        if not numbers or len(values) != config.channels or (field == "pixel_std" and not all(v > 0 for v in values)):
            expected = f"{config.channels} finite number{'s' * (config.channels != 1)}"
            above = " above 0" * (field == "pixel_std")
            raise ValueError(f"{field} is {values!r}, expected {expected}{above}, one for each channel")
    if config.input == "images" and config.max_context != config.patches + config.class_token:
        raise ValueError(
            f"max_context is {config.max_context}, expected {config.patches + config.class_token}, "
            "the tokens of an image"
        )
    if config.image_size**2 * config.channels > 1 << 26:
        raise ValueError(
            f"image_size is {config.image_size} with {config.channels} channels, "
            f"expected at most {1 << 26} values of pixels"
        )
    if config.input == "images" and config.max_context > 1 << 16:
        raise ValueError(f"an image has {config.max_context} tokens, expected at most {1 << 16}; use larger patches")
    if config.class_token and config.input != "images":
        raise ValueError(f"class_token is set with input = {config.input!r}, expected input = 'images'")
    for field in ("similarity_scale", "similarity_bias"):
        value = getattr(config, field)
        least = 0.0 if field == "similarity_scale" else -math.inf
        if not (finite(value) and value >= least):
            raise ValueError(f"{field} is {value!r}, expected a finite number" + " from 0 on" * (least == 0))


def finite(value: object) -> bool:
    """Whether it is a number that fp64 can hold; `math.isfinite` fails for large integers."""
    return type(value) in (int, float) and abs(cast(float, value)) <= sys.float_info.max
