"""Architectures of `transformers` in our terms: configuration and names of tensors.

Source: the modeling and configuration files of transformers 5.23; for 1bitLLM the modeling_bitnet.py
in its own folder; for the Thinker omni/thinker.py of its project; for the BitNet embedding models
docs/bitnet-embeddings-gguf-conversion.md of microsoft/BitNet. Every field that changes the computation is
mapped here or refused by name.
A new family is a row of FAMILIES, and functions in `configuration.py` for features that no other has. Vision models
are rows of `images.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_export.foreign.source import SourceError

from . import configuration as its
from . import images
from .family import Family
from .fields import Fields
from .places import EXPERT, Name, Names, Slice

THINKER = "d_model"  # a field that identifies the configuration of a Thinker, which names no architecture


_PLAIN: dict[str, Any] = {"sub_norm": False}
_QWEN = _PLAIN | {"qk_norm": True}
_BOTH = _PLAIN | {"post_norm": True}  # norms before and after
_ENCODER = _PLAIN | {
    "mask": "bidirectional", "position": "learned", "norm": "layer", "norm_bias": True, "pre_norm": False,
    "residual_norm": True, "embedding_norm": True, "final_norm": False, "ffn": "plain", "qkv_bias": True,
    "o_bias": True, "ffn_bias": True,
}  # fmt: skip
_GPT2 = _PLAIN | {
    "position": "learned", "norm": "layer", "norm_bias": True, "ffn": "plain", "qkv_bias": True, "o_bias": True,
    "ffn_bias": True,
}  # fmt: skip

_NO_WINDOW = {"use_sliding_window": False}
_SWITCHED = ("use_sliding_window", "sliding_window")
_BY_LAYER = (*_SWITCHED, "layer_types", "max_window_layers")
_ROPE = (its.turned, its.windows)
_GEMMA = (its.scaled_embedding, its.attention_biases)
_GEMMA2 = (*_GEMMA, its.scaled_queries, its.capped_logits, its.capped_scores)

_GEMMA_SAYS = {"head_dim": 256, "tie_word_embeddings": True, "rms_norm_eps": 1e-6}
_GEMMA_NAMES = {
    "attn_post_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "ffn_post_norm": "post_feedforward_layernorm",
}  # fmt: skip
_1BITLLM_NAMES = {"attn_sub_norm": "self_attn.inner_attn_ln", "ffn_sub_norm": "mlp.ffn_layernorm"}


def _experts(block: str, gate: str, up: str, down: str) -> Names:
    """Names of experts: one by one, or as in transformers 5's memory, those of a layer in two tensors."""
    both, single = "mlp.experts.gate_up_proj", f"{block}.experts.{EXPERT}."
    return {
        "router": [f"{block}.gate", "mlp.gate"], "gate": [single + gate, Slice(both, 0, 2, stacked=True)],
        "up": [single + up, Slice(both, 1, 2, stacked=True)],
        "down": [single + down, Slice("mlp.experts.down_proj", 0, 1, stacked=True)],
    }  # fmt: skip


_MIXTRAL_NAMES = _experts("block_sparse_moe", "w1", "w3", "w2")
_MOE_NAMES = _experts("mlp", "gate_proj", "up_proj", "down_proj")
_GPT2_NAMES: dict[str, Name] = {
    "attn_norm": "ln_1", "ffn_norm": "ln_2", "q": Slice("attn.c_attn", 0, 3), "k": Slice("attn.c_attn", 1, 3),
    "v": Slice("attn.c_attn", 2, 3), "o": "attn.c_proj", "up": "mlp.c_fc", "down": "mlp.c_proj",
    "embedding": "transformer.wte", "position": "transformer.wpe", "final_norm": "transformer.ln_f",
}  # fmt: skip


def _thinker(network: str) -> list[Name]:
    return [f"mlp.{network}", f"moe.experts.{EXPERT}.{network}"]


_THINKER_NAMES: Names = {
    "attn_norm": "norm1", "ffn_norm": "norm2", "q": [Slice("attn.qkv", 0, 3), "attn.q"],
    "k": [Slice("attn.qkv", 1, 3), "attn.k"], "v": [Slice("attn.qkv", 2, 3), "attn.v"], "o": "attn.o",
    "router": "moe.router", "gate": _thinker("gate_proj"), "up": _thinker("up_proj") + _thinker("fc1"),
    "down": _thinker("down_proj") + _thinker("fc2"), "embedding": "tok_emb", "final_norm": "norm",
}  # fmt: skip
_DISTILBERT_NAMES: Names = {
    "q": "attention.q_lin", "k": "attention.k_lin", "v": "attention.v_lin", "o": "attention.out_lin",
    "attn_post_norm": "sa_layer_norm", "up": "ffn.lin1", "down": "ffn.lin2", "ffn_post_norm": "output_layer_norm",
    "embedding": "distilbert.embeddings.word_embeddings", "position": "distilbert.embeddings.position_embeddings",
    "embedding_norm": "distilbert.embeddings.LayerNorm",
}  # fmt: skip


def _bert(prefix: str) -> Names:
    return {
        "q": "attention.self.query", "k": "attention.self.key", "v": "attention.self.value",
        "o": "attention.output.dense", "attn_post_norm": "attention.output.LayerNorm", "up": "intermediate.dense",
        "down": "output.dense", "ffn_post_norm": "output.LayerNorm", "embedding": f"{prefix}embeddings.word_embeddings",
        "position": f"{prefix}embeddings.position_embeddings", "embedding_norm": f"{prefix}embeddings.LayerNorm",
        "token_type": f"{prefix}embeddings.token_type_embeddings",
    }  # fmt: skip


_LLAMA = Family("llama", _PLAIN, (its.turned, its.attention_biases, its.ffn_biases))
_BITNET = Family("bitnet", {}, defaults={"rope_theta": 500_000.0}, masters=True)
_1BITLLM = Family("", {}, (its.turned,), names=_1BITLLM_NAMES, masters=True)
_MISTRAL = Family("mistral", _PLAIN, _ROPE, {"sliding_window": 4096}, reads=("sliding_window", "layer_types"))
_QWEN2 = Family(
    "qwen2", _PLAIN | {"qkv_bias": True}, _ROPE, _NO_WINDOW | {"max_window_layers": 28}, reads=_BY_LAYER
)  # fmt: skip
_QWEN3 = Family(
    "qwen3", _QWEN, (*_ROPE, its.attention_biases), _NO_WINDOW | {"max_window_layers": 28}, reads=_BY_LAYER
)  # fmt: skip
_GEMMA1 = Family(
    "gemma", _PLAIN, (its.turned, *_GEMMA, its.gelu_is_tanh),
    _GEMMA_SAYS | {"hidden_act": "gelu_pytorch_tanh"}, one_plus=True,
)  # fmt: skip
_GEMMA2_FAMILY = Family(
    "gemma2", _BOTH, (*_ROPE, *_GEMMA2),
    _GEMMA_SAYS | {
        "hidden_activation": "gelu_pytorch_tanh",
        "sliding_window": 4096, "sliding_window_pattern": 2, "query_pre_attn_scalar": 256,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
    },
    reads=("query_pre_attn_scalar", "final_logit_softcapping", "attn_logit_softcapping", "hidden_activation",
           "sliding_window", "layer_types"),
    names=_GEMMA_NAMES,
    one_plus=True,
)  # fmt: skip
_GEMMA3 = Family(
    "gemma3_text", _BOTH | {"qk_norm": True}, (its.gemma3, *_GEMMA, its.scaled_queries, its.capped_logits),
    _GEMMA_SAYS | {
        "rope_theta": 1e6, "sliding_window": 4096, "sliding_window_pattern": 6,
        "hidden_activation": "gelu_pytorch_tanh",
    },
    reads=("query_pre_attn_scalar", "final_logit_softcapping", "hidden_activation", "sliding_window", "layer_types",
           "sliding_window_pattern"),
    names=_GEMMA_NAMES, one_plus=True,
)  # fmt: skip
_MIXTRAL = Family(
    "mixtral", _PLAIN, (*_ROPE, its.experts), {"rope_theta": 1e6, "num_experts": 8, "num_experts_per_tok": 2},
    fields={"num_experts": "num_local_experts"}, reads=("num_experts", "num_experts_per_tok", "sliding_window"),
    names=_MIXTRAL_NAMES,
)  # fmt: skip
_QWEN3_MOE = Family(
    "qwen3_moe", _QWEN, (*_ROPE, its.attention_biases, its.experts),
    _NO_WINDOW | {
        "num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "norm_topk_prob": False,
    },
    fields={"num_experts": "num_local_experts"},
    reads=("num_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", *_SWITCHED),
    names=_MOE_NAMES,
)  # fmt: skip
_BERT = Family(
    "bert", _ENCODER, (), {"rms_norm_eps": 1e-12, "hidden_act": "gelu", "max_position_embeddings": 512},
    fields={"rms_norm_eps": "layer_norm_eps"}, neutral={"is_decoder": (False,)}, names=_bert("bert."),
    prefixes=("bert.",), layers="encoder.layer.", head=False, pooling="mean", aside=r"(bert\.)?pooler\..*|cls\..*",
)  # fmt: skip
_ROBERTA = _BERT._replace(
    model_type="roberta", parts=(its.after_padding,), defaults={**_BERT.defaults, "pad_token_id": 1},
    names=_bert("roberta."), prefixes=("roberta.",), aside=r"(roberta\.)?pooler\..*|lm_head\..*",
)  # fmt: skip
_DISTILBERT = Family(
    "distilbert", _ENCODER, (), {"hidden_act": "gelu", "max_position_embeddings": 512, "rms_norm_eps": 1e-12},
    fields={
        "hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads",
        "intermediate_size": "hidden_dim", "hidden_act": "activation",
    },
    neutral={"sinusoidal_pos_embds": (False, True)}, names=_DISTILBERT_NAMES, prefixes=("distilbert.",),
    layers="transformer.layer.", head=False, pooling="mean", aside=r"vocab_\w+\..*",
)  # fmt: skip
_GPT2_FAMILY = Family(
    "gpt2", _GPT2, (its.four_times_wider,),
    {"rms_norm_eps": 1e-5, "tie_word_embeddings": True, "hidden_act": "gelu_new", "max_position_embeddings": 1024},
    fields={
        "hidden_size": "n_embd", "num_hidden_layers": "n_layer", "num_attention_heads": "n_head",
        "max_position_embeddings": "n_positions", "intermediate_size": "n_inner", "hidden_act": "activation_function",
        "rms_norm_eps": "layer_norm_epsilon",
    },
    names=_GPT2_NAMES, prefixes=("transformer.",), layers="h.", transposed=True,
)  # fmt: skip
_THINKER = Family(
    "", _PLAIN, (its.turned, its.thinker),
    {
        "num_hidden_layers": 4, "hidden_size": 256, "num_attention_heads": 4, "intermediate_size": 1024,
        "max_position_embeddings": 512, "vocab_size": 5000, "rope_theta": 10_000, "use_swiglu": True, "use_gqa": False,
        "use_moe": False, "num_experts": 8, "num_experts_per_tok": 2, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "tie_word_embeddings": False,
    },
    fields={
        "num_hidden_layers": "n_layers", "hidden_size": THINKER, "num_attention_heads": "n_heads",
        "intermediate_size": "d_ff", "max_position_embeddings": "ctx_len", "rms_norm_eps": "norm_eps",
        "num_key_value_heads": "kv_groups",
    },
    reads=("num_experts", "num_experts_per_tok", "use_swiglu", "use_gqa", "use_moe", "rope_interleaved"),
    names=_THINKER_NAMES, prefixes=("",), layers="blocks.", head_bias=True, pickled=True,
    what="checkpoint of a Thinker",
)  # fmt: skip

FAMILIES = {
    "BitNetForCausalLM": _BITNET,
    "BitnetForCausalLM": _1BITLLM,
    "LlamaForCausalLM": _LLAMA,
    "MistralForCausalLM": _MISTRAL,
    "MixtralForCausalLM": _MIXTRAL,
    "Qwen2ForCausalLM": _QWEN2,
    "Qwen3ForCausalLM": _QWEN3,
    "Qwen3Model": _QWEN3._replace(head=False),
    "Qwen3MoeForCausalLM": _QWEN3_MOE,
    "GemmaForCausalLM": _GEMMA1,
    "Gemma2ForCausalLM": _GEMMA2_FAMILY,
    "Gemma3ForCausalLM": _GEMMA3,
    "Gemma3TextModel": _GEMMA3._replace(head=False),
    "GPT2LMHeadModel": _GPT2_FAMILY,
    "BertModel": _BERT,
    "BertForMaskedLM": _BERT,
    "BertForPreTraining": _BERT,
    "DistilBertModel": _DISTILBERT,
    "DistilBertForMaskedLM": _DISTILBERT,
    "RobertaModel": _ROBERTA,
    "RobertaForMaskedLM": _ROBERTA,
    "XLMRobertaModel": _ROBERTA._replace(model_type="xlm-roberta"),
    "XLMRobertaForMaskedLM": _ROBERTA._replace(model_type="xlm-roberta"),
    **images.families(_GEMMA1, _GEMMA2_FAMILY),
}

_ELSEWHERE = {
    "Qwen2MoeForCausalLM": "its layers have an expert that every token takes",
    "OlmoeForCausalLM": "its norms of queries and keys are of all heads together",
}
"""Architectures that a ModelConfig cannot fully describe."""


def family_of(values: Mapping[str, Any], what: str) -> tuple[str, Family]:
    """By `architectures`, as model_type is wrong in published folders (1bitLLM says llama); without it by model_type.

    values: of config.json. what: the file in messages. Returns the architecture and its family.
    """
    found = Fields(values, what).words("architectures")
    if found is None and THINKER in values and "model_type" not in values:
        return "ThinkerLM", _THINKER
    if found is None and isinstance(kind := values.get("model_type"), str):
        found = [name for name, family in FAMILIES.items() if family.model_type == kind][:1]
        if not found:
            known = dict.fromkeys(family.model_type for family in FAMILIES.values() if family.model_type)
            raise SourceError(f"{what}: model_type is {kind!r:.40}, without architectures; expected {', '.join(known)}")
    found = found or []
    if len(found) == 1 and found[0] in _ELSEWHERE:
        raise SourceError(f"{what}: architectures is {found}: {_ELSEWHERE[found[0]]}, which is not supported")
    if len(found) != 1 or found[0] not in FAMILIES:
        raise SourceError(f"{what}: architectures is {found}, expected one of {', '.join(FAMILIES)}")
    return found[0], FAMILIES[found[0]].of_part(values, what)
