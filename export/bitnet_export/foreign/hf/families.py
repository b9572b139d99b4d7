"""What each architecture of `transformers` means in our terms: its configuration and its names of tensors.

Source: the modeling and configuration files of transformers 5.23; for 1bitLLM the modeling_bitnet.py
in its own folder; for the BitNet embedding models docs/bitnet-embeddings-gguf-conversion.md of
microsoft/BitNet. Every field that changes the computation is mapped here or refused by name.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from bitnet.config import ModelConfig
from bitnet_export.foreign.source import SourceError

from .fields import Fields
from .rope import gemma_rope, rope
from .write import NAMES


class Family(NamedTuple):
    """An architecture. Fields of the configuration are those for which config.json has no say."""

    fixed: dict[str, Any]
    names: dict[str, str]  # where they differ from those of Llama
    head: bool = True  # False: a backbone, an embedding model
    theta: float = 10_000.0  # of RoPE, where config.json says none
    ties: bool = False  # the same for tie_word_embeddings
    bias: tuple[str, ...] = ("qkv_bias", "o_bias")  # what attention_bias switches
    gemma: bool = False  # norms multiply with 1 + weight; layers with a window have a RoPE of their own
    masters: bool = False  # BitNet by definition: float weights are there to be quantized


_PLAIN = {"sub_norm": False}
_QWEN = _PLAIN | {"qk_norm": True}
_GEMMA = _QWEN | {"post_norm": True}
_GEMMA_NAMES = {
    "attn_post_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_1BITLLM_NAMES = {"attn_sub_norm": "self_attn.inner_attn_ln", "ffn_sub_norm": "mlp.ffn_layernorm"}

FAMILIES = {
    "BitNetForCausalLM": Family({}, {}, theta=500_000.0, masters=True),
    "BitnetForCausalLM": Family({}, _1BITLLM_NAMES, masters=True, bias=()),
    "LlamaForCausalLM": Family(_PLAIN, {}),
    "MistralForCausalLM": Family(_PLAIN, {}, bias=()),
    "Qwen2ForCausalLM": Family(_PLAIN | {"qkv_bias": True}, {}, bias=()),
    "Qwen3ForCausalLM": Family(_QWEN, {}),
    "Qwen3Model": Family(_QWEN, {}, head=False),
    "Gemma3ForCausalLM": Family(_GEMMA, _GEMMA_NAMES, theta=1e6, ties=True, gemma=True),
    "Gemma3TextModel": Family(_GEMMA, _GEMMA_NAMES, head=False, theta=1e6, ties=True, gemma=True),
}

_ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "relu2": "relu2", "relu": "relu",
    "gelu_pytorch_tanh": "gelu", "gelu_new": "gelu", "gelu_fast": "gelu",
}  # fmt: skip

_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "partial_rotary_factor": (1, 1.0), "attn_logit_softcapping": (), "use_bidirectional_attention": (False,),
    "num_experts": (0,), "num_local_experts": (0, 1), "n_routed_experts": (0,), "add_cross_attention": (False,),
    "scale_emb": (1, 1.0), "scale_depth": (), "dim_model_base": (), "embedding_multiplier": (1, 1.0),
    "residual_multiplier": (1, 1.0), "attention_multiplier": (), "logits_scaling": (1, 1.0), "logit_scale": (1, 1.0),
    "clip_qkv": (), "no_rope_layers": (), "parallel_attn": (False,), "vision_config": (), "text_config": (),
    "weight_bits": (1,), "input_bits": (8,), "use_qk_norm": (False,), "is_encoder_decoder": (False,),
}  # fmt: skip
"""Fields that change the computation in ways that are not built, and the values that leave it as it is."""

_MAPPED = {
    "architectures", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "intermediate_size", "max_position_embeddings", "rms_norm_eps", "hidden_act", "hidden_activation",
    "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta", "rope_scaling", "rope_parameters",
    "rope_local_base_freq", "sliding_window", "layer_types", "use_sliding_window", "max_window_layers",
    "sliding_window_pattern", "query_pre_attn_scalar", "final_logit_softcapping", "quantization_config",
    "original_max_position_embeddings", "bos_token_id", "eos_token_id",
}  # fmt: skip
_WITHOUT_EFFECT = {
    "model_type", "auto_map", "dtype", "torch_dtype", "transformers_version", "use_cache", "initializer_range",
    "pad_token_id", "attention_dropout", "pretraining_tp", "id2label", "label2id", "return_dict", "output_attentions",
    "output_hidden_states", "chunk_size_feed_forward", "problem_type", "_name_or_path",
    "_attn_implementation_autoset", "cache_implementation", "is_decoder", "unsloth_version", "name_or_path",
    "hidden_dropout", "resid_pdrop", "embd_pdrop", "tokenizer_class", "task_specific_params",
}  # fmt: skip

_SHOWN = 20  # unknown fields that are named


def family_of(config: Fields) -> Family:
    """By `architectures`: model_type is wrong in published folders (1bitLLM says llama)."""
    found = config.words("architectures") or []
    if len(found) != 1 or found[0] not in FAMILIES:
        raise SourceError(f"{config.what}: architectures is {found}, expected one of {', '.join(FAMILIES)}")
    return FAMILIES[found[0]]


def refuse(config: Fields) -> list[str]:
    """Raises SourceError on a field that is not built; returns a line for each that is not known."""
    for name, neutral in _NEUTRAL.items():
        if name in config and config[name] not in neutral:
            raise SourceError(f"{config.what}: {name} = {config[name]!r:.80} changes the computation and is not built")
    known = set(_NEUTRAL) | _MAPPED | _WITHOUT_EFFECT
    unknown = [name for name in sorted(config.keys() - known) if name[:1] != "_" and config[name] is not False]
    lines = [f"config.json has {name:.80} = {config[name]!r:.40}, which is not known here" for name in unknown[:_SHOWN]]
    more = [f"config.json has {len(unknown) - _SHOWN} more fields that are not known here"]
    return [f"{line} and was ignored" for line in lines + more * (len(unknown) > _SHOWN)]


def model_config(config: Fields, family: Family, *, tied: bool, linear_norm: bool, pooling: str) -> ModelConfig:
    """The ModelConfig of a folder, scope of the scales and format of the tables aside."""
    dim, heads = config.integer("hidden_size"), config.integer("num_attention_heads")
    if heads < 1 or dim < 1:
        raise SourceError(f"{config.what}: hidden_size is {dim} and num_attention_heads {heads}, expected at least 1")
    default_head = None if "head_dim" not in config and dim % heads else dim // heads
    head_dim = config.integer("head_dim", default_head)
    activation = config.get("hidden_activation", config.get("hidden_act"))
    if not isinstance(activation, str) or activation not in _ACTIVATIONS:
        raise SourceError(f"{config.what}: hidden_act is {activation!r:.40}, expected one of {', '.join(_ACTIVATIONS)}")
    values = family.fixed | {
        "vocab_size": config.integer("vocab_size"), "dim": dim, "n_layers": config.integer("num_hidden_layers"),
        "n_heads": heads, "n_kv_heads": config.integer("num_key_value_heads", heads), "head_dim": head_dim,
        "ffn_dim": config.integer("intermediate_size"), "max_context": config.integer("max_position_embeddings"),
        "norm_eps": config.number("rms_norm_eps"), "activation": _ACTIVATIONS[activation],
        "tie_embeddings": tied, "has_head": family.head, "linear_norm": linear_norm, "pooling": pooling,
        "logit_softcap": config.number("final_logit_softcapping", 0.0),
    }  # fmt: skip
    if config.truth("attention_bias"):
        values |= dict.fromkeys(family.bias, True)
    values["ffn_bias"] = config.truth("mlp_bias") and config["architectures"] == ["LlamaForCausalLM"]
    values |= _gemma(config, dim) if family.gemma else rope(config, family.theta) | _windows(config)
    try:
        return ModelConfig.from_dict(values)
    except ValueError as error:
        raise SourceError(f"{config.what}: {error}") from None


def _gemma(config: Fields, dim: int) -> dict[str, Any]:
    full, local = gemma_rope(config)
    window = _windows(config)
    values = window | {"embedding_scale": math.sqrt(dim)}
    scalar = config.number("query_pre_attn_scalar", 256.0)
    if scalar <= 0:
        raise SourceError(f"{config.what}: query_pre_attn_scalar is {scalar}, expected a number above 0")
    values["attention_scale"] = scalar**-0.5
    if window["sliding_window"] and not window["global_every"]:
        return values | local
    if window["global_every"]:
        if "rope_scaling" in local:
            raise SourceError(f"{config.what}: RoPE of layers with a window is scaled, only the other is supported so")
        values["rope_local_theta"] = local["rope_theta"]
    return values | full


def _windows(config: Fields) -> dict[str, int]:
    """sliding_window and global_every, from the kind of each layer."""
    window, layers = config.integer("sliding_window", 0), config.integer("num_hidden_layers")
    if not 1 <= layers <= 1024:
        raise SourceError(f"{config.what}: num_hidden_layers is {layers}, expected 1 to 1024")
    kinds = config.words("layer_types")
    if not window or config.get("use_sliding_window", True) is False:
        kinds = kinds or ["full_attention"] * layers
    if kinds is None and "use_sliding_window" in config:  # Qwen: from some layer on
        first = config.integer("max_window_layers", layers)
        kinds = ["sliding_attention" if layer >= first else "full_attention" for layer in range(layers)]
    if kinds is None and config["architectures"][0].startswith("Gemma3"):
        every = config.integer("sliding_window_pattern", 6)
        kinds = ["full_attention" if every and (i + 1) % every == 0 else "sliding_attention" for i in range(layers)]
    if kinds is None:  # Mistral; Llama has none and does not look at it
        mistral = config["architectures"] == ["MistralForCausalLM"]
        kinds = ["sliding_attention" if mistral else "full_attention"] * layers
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


def names_of(family: Family, prefix: str) -> dict[str, str]:
    """Names of the modules by role: of layers within the layer, of the rest within the folder."""
    names = NAMES | family.names
    return {role: name.replace("model.", prefix, 1) for role, name in names.items()}
