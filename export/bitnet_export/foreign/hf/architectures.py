"""The architecture of transformers that computes a packed file, and its config.json.

Source: the modeling and configuration files of transformers 5.23.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.foreign.outgoing import SIZES, Graph, nearest, rope_problems, scale_problems
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import ROLES, Record

from .families import FAMILIES
from .family import QUANTIZATION, Family
from .places import Places

ACTIVATIONS = {"relu2": "relu2", "silu": "silu", "gelu": "gelu_pytorch_tanh", "relu": "relu", "gelu_erf": "gelu"}

_FREE = ("activation", "tie_embeddings", "linear_norm", "ternary", "weight_scale", "head_format", "dropout")
_EXPERTS = ("n_experts", "experts_per_token")
_WINDOWS = ("sliding_window", "global_every")
_LAYER_NORMS: dict[str, tuple[Any, ...]] = {
    "norm": ("layer",), "norm_bias": (True,), "position": ("learned",), "ffn": ("plain",), "qkv_bias": (True,),
    "o_bias": (True,), "ffn_bias": (True,),
}  # fmt: skip
_ENCODER = _LAYER_NORMS | {
    "mask": ("bidirectional",), "pre_norm": (False,), "residual_norm": (True,), "embedding_norm": (True,),
    "final_norm": (False,), "has_head": (False,),
}  # fmt: skip


class Architecture(NamedTuple):
    """A class of transformers that computes a model."""

    name: str
    family: Family
    places: Places  # names of its tensors
    problems: list[str]  # why it cannot compute the model
    others: tuple[tuple[Family, Places], ...] = ()  # for the stacks after the first

    def of(self, stack: int) -> tuple[Family, Places]:
        return ((self.family, self.places), *self.others)[stack]


def architecture_of(file: PackedFile, c: ModelConfig) -> Architecture:
    """The class that computes this model, or the nearest with a phrase for each difference."""
    differences = {graph.name: graph.differences(c) + _own(kind, file, c) for kind, graph in graphs(c).items()}
    name, problems = nearest("transformers", differences)
    if c.linear_norm and not all(record.quantized for record in projections(file)):
        problems.append("linear_norm with projections of floats, transformers has the norms only in quantized ones")
    if c.linear_norm and head_is_quantized(file):
        problems.append(
            "linear_norm with a quantized head, transformers would put a norm before the head too: "
            "convert the model with --head f16 or f32 first"
        )
    family = FAMILIES[name]
    places = Places.written(family.names, family.prefixes[0], family.layers, whole=family.head)
    return Architecture(name, family, places, problems)


def graphs(c: ModelConfig) -> dict[str, Graph]:
    """The computation of each architecture by model_type, from its modeling file."""
    unread = ("rope_local_theta", *(["rope_attention_factor"] if c.rope_scaling != "yarn" else []))
    rope = tuple(name for name in c.to_dict() if name.startswith("rope_") and name not in unread)
    attention: dict[str, tuple[Any, ...]] = {"qkv_bias": (False, True), "o_bias": (c.qkv_bias,)}  # one switch for all
    root = math.sqrt(c.dim)
    scale = {"embedding_scale": (root, float(np.float32(root)))}  # equal in fp32, the precision of the product
    kinds: dict[str, tuple[str, Mapping[str, tuple[Any, ...]], tuple[str, ...]]] = {
        "bitnet": ("BitNetForCausalLM", {"sub_norm": (True,), **attention}, rope),
        "llama": ("LlamaForCausalLM", {"ffn_bias": (False, True), **attention}, rope),
        "qwen3": ("Qwen3ForCausalLM", {"qk_norm": (True,), **attention}, (*_WINDOWS, *rope)),
        "qwen2": ("Qwen2ForCausalLM", {"qkv_bias": (True,)}, (*_WINDOWS, *rope)),
        "mistral": ("MistralForCausalLM", {}, ("sliding_window", *rope)),
        "mixtral": ("MixtralForCausalLM", {}, ("sliding_window", *_EXPERTS, *rope)),
        "qwen3_moe": (
            "Qwen3MoeForCausalLM",
            {"qk_norm": (True,), "normalize_routing": (True, False), **attention},
            ("sliding_window", *_EXPERTS, *rope),
        ),
        "gemma": ("GemmaForCausalLM", {**attention, **scale}, rope),
        "gemma2": (
            "Gemma2ForCausalLM",
            {"post_norm": (True,), **attention, **scale},
            ("attention_softcap", "logit_softcap", *_WINDOWS, *rope),
        ),
        "gpt2": ("GPT2LMHeadModel", _LAYER_NORMS, ()),
        "bert": ("BertModel", _ENCODER, ("pooling",)),
    }
    return {kind: Graph(name, computes, (*SIZES, *_FREE, *also)) for kind, (name, computes, also) in kinds.items()}


def _own(kind: str, file: PackedFile, c: ModelConfig) -> list[str]:
    """Differences that the values alone do not show, a phrase each."""
    found = [] if kind in ("gpt2", "bert") else rope_problems(file, c)
    if kind == "gemma2":
        if abs(c.attention_scale**-2 - round(c.attention_scale**-2)) > 1e-3:
            found.append(f"attention_scale is {c.attention_scale}, it wants 1/sqrt of a whole number")
    else:
        found += scale_problems(c)
    if kind == "bitnet" and c.n_heads * c.head_dim != c.dim:
        found.append(f"n_heads · head_dim is {c.n_heads * c.head_dim}, its norm before o has dim = {c.dim} inputs")
    if kind in ("llama", "gemma2") and c.dim % c.n_heads:
        found.append(f"dim is {c.dim}, it wants a multiple of n_heads = {c.n_heads}")
    if kind in ("gpt2", "bert") and (c.n_heads * c.head_dim != c.dim or c.n_kv_heads != c.n_heads):
        found.append(f"heads are {c.n_heads}/{c.n_kv_heads} of {c.head_dim}, it wants one size that makes up dim")
    if kind == "gemma" and c.activation == "gelu_erf":
        found.append("activation is 'gelu_erf', it takes it for the other")
    quantized = {ROLES[record.key.role] for record in projections(file) if record.quantized}
    if kind == "gpt2" and quantized:
        found.append("its layers are Conv1D, which transformers does not quantize: only floats can be written")
    if kind in ("mixtral", "qwen3_moe") and quantized & {"gate", "up", "down"}:
        found.append("its experts are parameters, which transformers does not quantize: only floats can be written")
    if kind in ("mixtral", "qwen3_moe") and not c.n_experts:
        found.append("n_experts is 0, it has some")
    return found


# ---- config.json ----


def describe(file: PackedFile, c: ModelConfig, architecture: Architecture) -> dict[str, Any]:
    """config.json."""
    values = {"architectures": [architecture.name]} | fields_of(c, architecture.family)
    left = [architecture.places.module(r.key) for r in projections(file) if not r.quantized]
    left += [] if head_is_quantized(file) else ["lm_head"]
    if quantizes(file) or architecture.family.masters:  # without one floats would be read as masters to quantize
        values[QUANTIZATION] = quantization(c, left)
    return values


def fields_of(c: ModelConfig, family: Family) -> dict[str, Any]:
    """The fields that describe a model of this family."""
    kind = family.model_type
    values = {
        "model_type": kind, "dtype": "float32", "vocab_size": c.vocab_size,
        "hidden_size": c.dim, "intermediate_size": c.ffn_dim, "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads, "num_key_value_heads": c.n_kv_heads, "head_dim": c.head_dim,
        "hidden_act": ACTIVATIONS[c.activation], "max_position_embeddings": c.max_context,
        "rms_norm_eps": c.norm_eps, "tie_word_embeddings": c.tie_embeddings,
    }  # fmt: skip
    if kind not in ("gpt2", "bert"):
        values |= _rope(c) | {"attention_bias": c.qkv_bias, "mlp_bias": c.ffn_bias}
    values |= _particular(kind, c)
    return {family.fields.get(name, name): value for name, value in values.items()}


def quantization(c: ModelConfig, left: list[str]) -> dict[str, Any]:
    """quantization_config. left: modules that stay float."""
    return {
        "quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline",
        "use_rms_norm": c.linear_norm, "rms_norm_eps": c.norm_eps, "modules_to_not_convert": left,
    }  # fmt: skip


def _rope(c: ModelConfig) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rope_scaling != "none":
        rope |= {"rope_type": c.rope_scaling, "factor": c.rope_factor}
    if c.rope_scaling in ("llama3", "yarn"):
        rope["original_max_position_embeddings"] = c.rope_original_context
    if c.rope_scaling == "llama3":
        rope |= {"low_freq_factor": c.rope_low_freq_factor, "high_freq_factor": c.rope_high_freq_factor}
    if c.rope_scaling == "yarn":
        rope |= {"beta_fast": c.rope_beta_fast, "beta_slow": c.rope_beta_slow}
        rope["attention_factor"] = c.rope_attention_factor
    # for programs older than rope_parameters, which look for rope_theta
    both = {"rope_theta": c.rope_theta, "rope_parameters": rope}
    return both if c.rope_scaling == "none" else both | {"rope_scaling": rope}


def _particular(kind: str, c: ModelConfig) -> dict[str, Any]:
    """Fields that only this architecture has."""
    moe = {"num_experts": c.n_experts, "num_experts_per_tok": c.experts_per_token}
    window: dict[str, Any] = {"sliding_window": c.sliding_window or None}
    layers = [c.of_layer(layer) for layer in range(c.n_layers)]
    kinds = {"layer_types": ["sliding_attention" if x.sliding_window else "full_attention" for x in layers]}
    if kind == "gemma2":
        window = {"sliding_window": c.sliding_window or c.max_context}  # it wants one, even if no layer has it
    switched = window | {"use_sliding_window": True} if c.sliding_window else {}
    by_layer = switched | kinds if c.sliding_window else {}
    own: dict[str, dict[str, Any]] = {
        "mistral": window, "mixtral": moe | window,
        "qwen2": by_layer, "qwen3": by_layer,
        "qwen3_moe": moe | switched | {"moe_intermediate_size": c.ffn_dim, "norm_topk_prob": c.normalize_routing},
        "gemma2": window | kinds | {
            "hidden_activation": ACTIVATIONS[c.activation], "query_pre_attn_scalar": round(c.attention_scale**-2),
            "final_logit_softcapping": c.logit_softcap or None, "attn_logit_softcapping": c.attention_softcap or None,
        },
        "bert": {"type_vocab_size": 1},
    }  # fmt: skip
    return own.get(kind, {})


# ---- what is quantized ----


def projections(file: PackedFile) -> list[Record]:
    return [r for r in file.tensors.values() if ROLES[r.key.role] in TERNARY_LINEARS and r.key.part == 0]


def head_is_quantized(file: PackedFile) -> bool:
    if not file.configs[0].has_head:
        return False
    tables = {ROLES[r.key.role]: r for r in file.tensors.values() if ROLES[r.key.role] in ("embedding", "head")}
    return tables["head" if "head" in tables else "embedding"].quantized


def quantizes(file: PackedFile) -> bool:
    """Whether any layer quantizes its inputs to int8."""
    return head_is_quantized(file) or any(record.quantized for record in projections(file))
