"""RoPE as config.json describes it: `rope_parameters` of transformers 5, `rope_theta` and `rope_scaling` before.

Meaning of each kind: modeling_rope_utils.py of transformers 5.23.
"""

from __future__ import annotations

import math
from typing import Any

from bitnet_export.foreign.source import SourceError

from .fields import Fields

_ORIGINAL = "original_max_position_embeddings"


def rope(config: Fields, theta: float) -> dict[str, Any]:
    """The fields of a ModelConfig. theta: the default."""
    given = Fields(config.object("rope_scaling") or config.object("rope_parameters") or {}, f"{config.what}: RoPE")
    if inner := [name for name, value in given.items() if isinstance(value, dict)]:
        raise SourceError(f"{given.what} is of its own for {', '.join(inner):.80}, expected one for all layers")
    if _ORIGINAL in config:  # takes precedence over the one in the object
        given[_ORIGINAL] = config[_ORIGINAL]
    return _kind(given, config.number("rope_theta", theta), config)


def gemma_rope(config: Fields) -> tuple[dict[str, Any], dict[str, Any]]:
    """The same for layers with full attention, and for those with a window."""
    both = Fields(config.object("rope_parameters") or {}, f"{config.what}: rope_parameters")
    scaling, what = config.object("rope_scaling") or {}, f"{config.what}: RoPE"
    full = Fields({**(both.object("full_attention") or {}), **scaling}, what)
    window = Fields(both.object("sliding_attention") or {}, what)
    local = config.number("rope_local_base_freq", 10_000.0)
    return _kind(full, config.number("rope_theta", 1e6), config), _kind(window, local, config)


def _kind(given: Fields, theta: float, config: Fields) -> dict[str, Any]:
    kind = given.get("rope_type", given.get("type", "default"))
    if given.number("partial_rotary_factor", 1.0) != 1:
        raise SourceError(f"{given.what} turns {given['partial_rotary_factor']} of a head, only all of it is supported")
    base: dict[str, Any] = {"rope_theta": given.number("rope_theta", theta)}
    if kind == "default":
        return base
    if kind not in ("linear", "llama3", "yarn"):
        raise SourceError(f"{given.what} is of type {kind!r}, expected default, linear, llama3 or yarn")
    context = config.integer("max_position_embeddings")
    original = given.integer(_ORIGINAL, context)
    factor = given.number("factor", context / max(original, 1)) if kind == "yarn" else given.number("factor")
    base |= {"rope_scaling": kind, "rope_factor": factor}
    if not factor >= 1 or original < 1:
        raise SourceError(f"{given.what} has factor {factor} and original context {original}, expected at least 1")
    if kind == "llama3":
        base |= {f"rope_{name}": given.number(name) for name in ("low_freq_factor", "high_freq_factor")}
        if not 0 < base["rope_low_freq_factor"] < base["rope_high_freq_factor"]:
            raise SourceError(f"{given.what}: low_freq_factor must be above 0 and below high_freq_factor")
    if kind == "yarn":
        if given.get("truncate", True) is not True:
            raise SourceError(
                f"{given.what} of type yarn with truncate = {given['truncate']!r}, only true is supported"
            )
        base |= {"rope_beta_fast": given.number("beta_fast", 32.0), "rope_beta_slow": given.number("beta_slow", 1.0)}
        if min(base["rope_beta_fast"], base["rope_beta_slow"]) <= 0 or base["rope_theta"] <= 1:
            raise SourceError(f"{given.what}: yarn wants beta_fast and beta_slow above 0 and rope_theta above 1")
        base["rope_attention_factor"] = _attention_factor(given, factor)
    return base | ({"rope_original_context": original} if kind != "linear" else {})


def _attention_factor(given: Fields, factor: float) -> float:
    """The factor by which yarn multiplies cos and sin."""

    def of(scale: float) -> float:
        return 0.1 * scale * math.log(factor) + 1.0

    scale, of_all = given.number("mscale", 0.0), given.number("mscale_all_dim", 0.0)
    if min(scale, of_all) < 0:
        raise SourceError(f"{given.what} has mscale {scale} and mscale_all_dim {of_all}, expected at least 0")
    return given.number("attention_factor", of(scale) / of(of_all) if scale and of_all else of(1.0))
