"""The fields of config.json as a ModelConfig.

A family (`families.py`) lists the functions here for the fields that are specific to it.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

from bitnet.config import ModelConfig
from bitnet_export.foreign.source import SourceError

from .fields import Fields
from .rope import gemma_rope, rope

Values = dict[str, Any]  # fields of a ModelConfig
Part = Callable[[Fields], Values]

SIZES = {
    "vocab_size": "vocab_size", "dim": "hidden_size", "n_layers": "num_hidden_layers",
    "n_heads": "num_attention_heads", "n_kv_heads": "num_key_value_heads", "head_dim": "head_dim",
    "ffn_dim": "intermediate_size", "max_context": "max_position_embeddings", "norm_eps": "rms_norm_eps",
}  # fmt: skip
"""Names in config.json of the fields that every family has."""
QUICK = "quick_gelu"  # x · sigmoid(1.702 · x): SiLU, with 1.702 in the matrices before and after it (`places.py`)
_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu2": "relu2", "relu": "relu", "gelu": "gelu_erf", "gelu_python": "gelu_erf",
    "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
    QUICK: "silu",
}  # fmt: skip


def model_config(config: Fields, fixed: Values, parts: tuple[Part, ...]) -> ModelConfig:
    """The ModelConfig of a folder, except scope of the scales and format of the tables.

    fixed: fields that config.json does not determine. parts: functions of this module; later ones override earlier.
    """
    values = sizes(config)
    for part in parts:
        values |= part(config)
    values |= fixed
    if values["mask"] == "bidirectional" and values.get("sliding_window"):
        raise SourceError(f"{config.what}: is_causal is false and layers have a window, only one of both is supported")
    try:
        return ModelConfig.from_dict(values)
    except ValueError as error:
        theirs = re.sub(r"\w+", lambda word: config.name(SIZES.get(word[0], word[0])), str(error))
        raise SourceError(f"{config.what}: {theirs}") from None


def sizes(config: Fields) -> Values:
    """The fields of every family."""
    dim, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if heads < 1 or dim < 1:
        names = config.name("hidden_size"), config.name("num_attention_heads")
        raise SourceError(f"{config.what}: {names[0]} is {dim} and {names[1]} {heads}, expected at least 1")
    layers = config.integer("num_hidden_layers")
    if not 1 <= layers <= 1024:  # later code makes lists of them
        raise SourceError(f"{config.what}: {config.name('num_hidden_layers')} is {layers}, expected 1 to 1024")
    default_head = None if "head_dim" not in config and dim % heads else dim // heads
    return {
        "vocab_size": config.integer("vocab_size"), "dim": dim, "n_layers": layers,
        "n_heads": heads, "n_kv_heads": config.integer("num_key_value_heads", heads),
        "head_dim": config.integer("head_dim", default_head), "ffn_dim": config.integer("intermediate_size", 0),
        "max_context": config.integer("max_position_embeddings"), "norm_eps": config.number("rms_norm_eps"),
        "activation": _activation(config),
        "mask": "causal" if config.truth("is_causal", True) else "bidirectional",
    }  # fmt: skip


def is_quick(config: Fields) -> bool:
    return bool(_named(config) == QUICK)


def _named(config: Fields) -> Any:
    return config.get("hidden_activation", config.get("hidden_act"))


def _activation(config: Fields) -> str:
    found = _named(config)
    if not isinstance(found, str) or found not in _ACTIVATIONS:
        name = config.name("hidden_act")
        raise SourceError(f"{config.what}: {name} is {found!r:.40}, expected one of {', '.join(_ACTIVATIONS)}")
    return _ACTIVATIONS[found]


# ---- positions and windows ----


def turned(config: Fields) -> Values:
    """RoPE, the same in all layers."""
    return rope(config, 10_000.0)


def gemma3(config: Fields) -> Values:
    """Layers with a window use their own RoPE."""
    if "sliding_window" not in config and "layer_types" not in config:
        raise SourceError(f"{config.what}: sliding_window is null, expected an integer, or layer_types without windows")
    full, local = gemma_rope(config)
    window = windows(config)
    if window["sliding_window"] and not window["global_every"]:
        return window | local
    if window["global_every"]:
        if "rope_scaling" in local:
            raise SourceError(f"{config.what}: RoPE of layers with a window is scaled, only the other is supported so")
        window["rope_local_theta"] = local["rope_theta"]
    return window | full


def after_padding(config: Fields) -> Values:
    """Learned positions that start after the id of the padding token."""
    rows, first = config.integer("max_position_embeddings"), config.integer("pad_token_id") + 1
    if not 0 <= first < rows:
        name = config.name("max_position_embeddings")
        raise SourceError(f"{config.what}: positions begin at pad_token_id + 1 = {first}, of {name} = {rows}")
    return {"max_context": rows - first}


def windows(config: Fields) -> Values:
    """sliding_window and global_every, from the kind of each layer."""
    window, layers = config.integer("sliding_window", 0), config.integer("num_hidden_layers")
    kinds = config.words("layer_types")
    if not window or not config.truth("use_sliding_window", True):
        kinds = kinds or ["full_attention"] * layers
    if kinds is None and "max_window_layers" in config:  # Qwen: from that layer on
        first = config.integer("max_window_layers")
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if kinds is None and "sliding_window_pattern" in config:  # Gemma: every n-th layer has full attention
        every = config.integer("sliding_window_pattern")
        kinds = ["full_attention" if every and (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    if kinds is None:
        kinds = ["sliding_attention"] * layers
    if len(kinds) != layers or not set(kinds) <= {"full_attention", "sliding_attention"}:
        raise SourceError(f"{config.what}: layer_types is {kinds!r:.120}, expected full_attention or sliding_attention "
                          f"for each of {layers} layers")  # fmt: skip
    full = [layer for layer, kind in enumerate(kinds) if kind == "full_attention"]
    if len(full) == layers:
        return {"sliding_window": 0, "global_every": 0}
    if not window:
        raise SourceError(f"{config.what}: layer_types has layers with a window, sliding_window is missing")
    every = full[0] + 1 if full else 0
    if full != (list(range(every - 1, layers, every)) if every else []) or every == 1:
        raise SourceError(f"{config.what}: layer_types is {kinds!r:.200}, expected full_attention in every n-th layer")
    return {"sliding_window": window, "global_every": every}


# ---- scales, biases, experts ----


def gelu_is_tanh(config: Fields) -> Values:
    """Gemma 1 was published with a wrong name for the activation that it was trained with."""
    return {"activation": "gelu"} if config.get("hidden_act") == "gelu" else {}


def four_times_wider(config: Fields) -> Values:
    return {"ffn_dim": config.integer("intermediate_size", 4 * config.integer("hidden_size"))}


def scaled_embedding(config: Fields) -> Values:
    """Factor sqrt(D); `open_folder` rounds it to the precision of the weights."""
    return {"embedding_scale": math.sqrt(max(config.integer("hidden_size"), 0))}


def scaled_queries(config: Fields) -> Values:
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise SourceError(f"{config.what}: query_pre_attn_scalar is {scalar}, expected a number above 0")
    return {"attention_scale": scalar**-0.5}


def capped_logits(config: Fields) -> Values:
    return {"logit_softcap": config.number("final_logit_softcapping", 0.0)}


def capped_scores(config: Fields) -> Values:
    return {"attention_softcap": config.number("attn_logit_softcapping", 0.0)}


def attention_biases(config: Fields) -> Values:
    """attention_bias, one switch for all four."""
    return dict.fromkeys(("qkv_bias", "o_bias"), config.truth("attention_bias"))


def ffn_biases(config: Fields) -> Values:
    return {"ffn_bias": config.truth("mlp_bias")}


def experts(config: Fields) -> Values:
    """Number of experts, of those per token, and whether their shares are normalized."""
    found, taken = config.integer("num_experts"), config.integer("num_experts_per_tok")
    if not 1 <= taken <= found:
        names = config.name("num_experts_per_tok"), config.name("num_experts")
        raise SourceError(f"{config.what}: {names[0]} is {taken}, expected 1 to {names[1]} = {found}")
    values = {"n_experts": found, "experts_per_token": taken, "normalize_routing": config.truth("norm_topk_prob", True)}
    return values | {"ffn_dim": config.integer("moe_intermediate_size", config.integer("intermediate_size"))}


def thinker(config: Fields) -> Values:
    """Its switches: gated FFN or not, half as many KV heads, experts."""
    values: Values = {}
    if not config.truth("use_swiglu"):
        values = {"ffn": "plain", "activation": "gelu_erf", "ffn_bias": True}
    if config.truth("use_moe"):
        values |= experts(config)
    heads = config.integer("num_attention_heads")
    groups = config.integer("num_key_value_heads", max(1, heads // 2)) if config.truth("use_gqa") else heads
    return values | {"n_kv_heads": groups}


# ---- images ----


def side(config: Fields, name: str) -> int:
    """The side of a square in pixels."""
    value = config.get(name)
    side = value[0] if isinstance(value, list) and value and value.count(value[0]) == len(value) else value
    if type(side) is not int or not 1 <= side <= 1 << 14:
        raise SourceError(f"{config.what}: {name} is {value!r:.80}, expected pixels of a square's side, 1 to 16384")
    return side
