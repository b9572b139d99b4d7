"""Tiny random full-precision models of `transformers` families, saved by it, with awkward sizes."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    BertModel,
    DistilBertConfig,
    DistilBertModel,
    Gemma2Config,
    Gemma2ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GemmaConfig,
    GemmaForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    RobertaConfig,
    RobertaForMaskedLM,
    RobertaModel,
    XLMRobertaConfig,
    XLMRobertaModel,
)

VOCABULARY, CONTEXT = 301, 50
_SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY, "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 3,
    "num_attention_heads": 3, "max_position_embeddings": CONTEXT, "attn_implementation": "eager",
}  # fmt: skip
_DECODER = _SIZES | {"num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
_MOE = _DECODER | {"num_experts_per_tok": 2, "experts_implementation": "eager"}
_GPT2: dict[str, Any] = {
    "vocab_size": VOCABULARY, "n_embd": 36, "n_layer": 3, "n_head": 3, "n_positions": CONTEXT, "n_inner": 52,
    "bos_token_id": 1, "eos_token_id": 2, "attn_implementation": "eager",
}  # fmt: skip

MAKE: dict[str, Callable[[], nn.Module]] = {
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**_DECODER, head_dim=10, attention_bias=True, mlp_bias=True)),
    "gemma": lambda: GemmaForCausalLM(GemmaConfig(**_DECODER, head_dim=10)),
    "gemma2": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_DECODER, head_dim=10, query_pre_attn_scalar=17, sliding_window=7, attn_logit_softcapping=3.0,
                     final_logit_softcapping=4.0)
    ),
    "gemma2, no caps": lambda: Gemma2ForCausalLM(
        Gemma2Config(**_DECODER, head_dim=10, attn_logit_softcapping=None, final_logit_softcapping=None)
    ),
    "gemma3": lambda: Gemma3ForCausalLM(
        Gemma3TextConfig(**_DECODER, head_dim=10, query_pre_attn_scalar=17, sliding_window=7, sliding_window_pattern=2,
                         final_logit_softcapping=4.0)
    ),
    "mistral": lambda: MistralForCausalLM(MistralConfig(**_DECODER, sliding_window=9)),
    "mixtral": lambda: MixtralForCausalLM(MixtralConfig(**_MOE, num_local_experts=5, sliding_window=9)),
    "qwen3_moe": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_MOE, head_dim=10, num_experts=5, moe_intermediate_size=21, norm_topk_prob=True)
    ),
    "qwen3_moe, shares as they are": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_MOE, head_dim=10, num_experts=5, moe_intermediate_size=21, norm_topk_prob=False)
    ),
    "qwen3_moe, a window": lambda: Qwen3MoeForCausalLM(
        Qwen3MoeConfig(**_MOE, num_experts=5, moe_intermediate_size=21, use_sliding_window=True, sliding_window=9)
    ),
    "gpt2": lambda: GPT2LMHeadModel(GPT2Config(**_GPT2)),
    "gpt2, four times wider": lambda: GPT2LMHeadModel(
        GPT2Config(**_GPT2 | {"n_inner": None, "activation_function": "gelu"}, tie_word_embeddings=False)
    ),
    "bert": lambda: BertModel(BertConfig(**_SIZES)),
    "bert, masked": lambda: BertForMaskedLM(BertConfig(**_SIZES, type_vocab_size=1)),
    "distilbert": lambda: DistilBertModel(
        DistilBertConfig(vocab_size=VOCABULARY, dim=36, hidden_dim=52, n_layers=3, n_heads=3,
                         max_position_embeddings=CONTEXT, attn_implementation="eager")
    ),
    "roberta": lambda: RobertaModel(RobertaConfig(**_SIZES, pad_token_id=4)),
    "roberta, masked": lambda: RobertaForMaskedLM(RobertaConfig(**_SIZES)),
    "roberta, many languages": lambda: XLMRobertaModel(XLMRobertaConfig(**_SIZES)),
}  # fmt: skip


def is_encoder(name: str) -> bool:
    return name.startswith(("bert", "distilbert", "roberta"))


def make(name: str, dtype: torch.dtype = torch.float16, seed: int = 1) -> nn.Module:
    """A model in fp32 with values that dtype represents, large enough that every part of the model matters."""
    model, random = MAKE[name]().eval(), torch.Generator().manual_seed(seed)
    for module in model.modules():
        for kind, p in module.named_parameters(recurse=False):
            norm = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
            mean = 1.0 if norm and kind == "weight" and not name.startswith("gemma") else 0.0
            std = 1.0 if isinstance(module, nn.Embedding) else 0.2 if norm or kind == "bias" else 0.1
            p.data = (torch.randn(p.shape, generator=random) * std + mean).to(dtype).float()
    return model


def save(name: str, folder: Path, **more: Any) -> nn.Module:
    model = make(name)
    model.save_pretrained(folder, **more)
    return model


def tokens_of(n: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids (n, length) without the first ones, which are special."""
    return torch.randint(5, VOCABULARY, (n, length), generator=torch.Generator().manual_seed(seed))


@torch.inference_mode()
def result(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Logits, or for an encoder the hidden states of the tokens: (n, T, ...)."""
    if type(model).__name__.endswith("ForMaskedLM"):
        model = model.base_model
    out = model(tokens) if "distil" in model.config.model_type else model(tokens, use_cache=False)
    found: torch.Tensor = out.logits if "logits" in out else out.last_hidden_state
    return found
