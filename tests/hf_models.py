"""Random models of the published families, saved as published, with the forward pass of `transformers`.

The forward pass is that of the model's class in transformers with its linear layers replaced by
transformers' own BitLinear and AutoBitLinear, as loading a published folder does. If there is no
class, the nearest does the same arithmetic: 1bitLLM is its BitNet with SiLU, the norm of the
embedding models is the `rms_norm` of AutoBitLinear, and models whose weights are ternary floats
get int8 activations, as in the engine.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import (
    BitNetConfig,
    BitNetForCausalLM,
    Gemma3TextConfig,
    Gemma3TextModel,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3Model,
)
from transformers.integrations.bitnet import AutoBitLinear, BitLinear, pack_weights

PROJECTIONS = {
    "q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj",
    "gate": "mlp.gate_proj", "up": "mlp.up_proj", "down": "mlp.down_proj",
}  # fmt: skip
SHAPE: dict[str, Any] = {
    "vocab_size": 301, "hidden_size": 96, "intermediate_size": 140, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "max_position_embeddings": 1024, "rms_norm_eps": 1e-5,
    "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MULTIPLY = {"quant_method": "bitnet", "linear_class": "autobitlinear", "quantization_mode": "offline"}
ONLINE = MULTIPLY | {"quantization_mode": "online"}
DIVIDE = {"quant_method": "bitnet", "modules_to_not_convert": ["lm_head"]}


@dataclass
class Published:
    """A published folder before it is saved, its model, and the values of its linear layers."""

    config: dict[str, Any]  # of config.json
    tensors: dict[str, torch.Tensor]
    model: nn.Module  # fp32
    ternary: dict[str, tuple[np.ndarray, np.ndarray]]  # by module: codes, scales

    def save(self, folder: Path, shards: int = 1) -> Path:
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(self.config))
        names = sorted(self.tensors)
        files = {f"model-{i + 1:05}-of-{shards:05}.safetensors": names[i::shards] for i in range(shards)}
        if shards == 1:
            files = {"model.safetensors": names}
        else:
            places = {name: file for file, inside in files.items() for name in inside}
            (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
        for file, inside in files.items():
            save_file({n: self.tensors[n].contiguous() for n in inside}, folder / file, metadata={"format": "pt"})
        return folder

    def forward(self, tokens: np.ndarray, dtype: torch.dtype = torch.float32, noise: int = 0) -> np.ndarray:
        """Logits or, for a backbone, final states: (n, T, ...) as fp64.

        noise: a seed; the gains of the norms change by two units in the last place of fp32, like sums of a
        hundred products that two correct programs compute in different orders.
        """
        model = copy.deepcopy(self.model).to(dtype)
        if noise:
            random = torch.Generator().manual_seed(noise)
            for name, p in model.named_parameters():
                if "norm" in name:
                    p.data *= 1 + 2.5e-7 * torch.randn(p.shape, generator=random)
        for layer in model.modules():
            if isinstance(layer, BitLinear):
                layer.dtype = dtype
        with torch.inference_mode(), torch.compiler.set_stance("force_eager"):
            out = model(torch.from_numpy(tokens), use_cache=False)
        return (out.logits if "logits" in out else out.last_hidden_state).double().numpy()


def randomize(model: nn.Module, dtype: torch.dtype, seed: int, norms: float = 1.0) -> None:
    """Set values that `dtype` represents, large enough that every part of the model matters. norms: their mean."""
    random = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        spread = {"embed_tokens": 1.0, "lm_head": 0.3, "norm": 0.2, "layernorm": 0.2, "_ln": 0.2, "bias": 0.3}
        std = next((value for part, value in spread.items() if part in name), 0.1)
        mean = norms if "norm" in name and not name.endswith("_proj.norm.weight") else 0.0
        values = torch.randn(p.shape, generator=random) * std + (1.0 if "_proj." in name and "norm" in name else mean)
        p.data = values.to(dtype).float()


def absmean(w: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and 1/s of a master weight, as in transformers' WeightQuant."""
    s = 1.0 / w.abs().mean().clamp(min=1e-5)
    return (w * s).round().clamp(-1, 1), (1.0 / s).reshape(1)


def replace_linears(model: nn.Module, make: Any, head: bool = False) -> dict[str, nn.Linear]:
    """Replace every linear layer (and the head) by make(name, linear); returns the old ones."""
    old = {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear) and (head or name != "lm_head")}
    for name, linear in old.items():
        model.set_submodule(name, make(name, linear))
    return old


def auto(
    linear: nn.Linear, weight: torch.Tensor, scale: torch.Tensor | None, eps: float | None = None
) -> AutoBitLinear:
    """AutoBitLinear with a weight; online without a scale; with a norm if there is an eps."""
    n, k = weight.shape
    new = AutoBitLinear(
        k, n, linear.bias is not None, online_quant=scale is None, use_rms_norm=eps is not None, rms_norm_eps=eps or 0.0
    )
    new.weight.data = weight.clone()
    if linear.bias is not None:
        new.bias.data = linear.bias.data.clone()
    if scale is not None:
        new.weight_scale.data = scale.clone()
    return new


def describe(model: nn.Module, **more: Any) -> dict[str, Any]:
    """config.json as transformers writes it."""
    return json.loads(model.config.to_json_string(use_diff=True)) | {"architectures": [type(model).__name__]} | more


def tensors_of(model: nn.Module, dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """All tensors in the published dtype, except packed weights and a tied head."""
    state = {
        n: v for n, v in model.state_dict().items() if n != "lm_head.weight" or not model.config.tie_word_embeddings
    }
    return {name: value if value.dtype == torch.uint8 else value.to(dtype) for name, value in state.items()}


# ---- the families ----


def bitnet_packed(dtype: torch.dtype = torch.bfloat16, **more: Any) -> Published:
    """microsoft/bitnet-b1.58-2B-4T: scales multiply."""
    model = BitNetForCausalLM(BitNetConfig(**SHAPE, tie_word_embeddings=True, **more)).eval()
    randomize(model, dtype, 1)
    ternary, packed = {}, {}

    def make(name: str, linear: nn.Linear) -> nn.Module:
        codes, gamma = absmean(linear.weight.data)
        gamma = gamma.to(dtype).float()
        packed[f"{name}.weight"] = pack_weights(codes.clone())
        ternary[name] = codes.numpy().astype(np.int8), gamma.numpy()
        return auto(linear, codes, gamma)

    replace_linears(model, make)
    tensors = tensors_of(model, dtype) | packed
    return Published(describe(model, quantization_config=MULTIPLY), tensors, model, ternary)


def masters(model: nn.Module, dtype: torch.dtype, quantization: dict[str, Any] | None) -> Published:
    """A model with float masters, which it quantizes on each pass."""
    randomize(model, dtype, 2)
    ternary = {}

    def make(name: str, linear: nn.Linear) -> nn.Module:
        codes, scale = absmean(linear.weight.data)
        ternary[name] = codes.numpy().astype(np.int8), scale.numpy()
        return auto(linear, linear.weight.data, None)

    replace_linears(model, make)
    more = {} if quantization is None else {"quantization_config": quantization}
    return Published(describe(model, **more), tensors_of(model, dtype), model, ternary)


def bitnet_masters() -> Published:
    """microsoft/bitnet-b1.58-2B-4T-bf16."""
    return masters(BitNetForCausalLM(BitNetConfig(**SHAPE, tie_word_embeddings=True)).eval(), torch.bfloat16, ONLINE)


def falcon_masters() -> Published:
    """Falcon-E, the revisions with floats: a Llama that declares bitnet."""
    return masters(LlamaForCausalLM(LlamaConfig(**SHAPE, head_dim=40)).eval(), torch.bfloat16, DIVIDE)


def one_bit_llm() -> Published:
    """1bitLLM/bitnet_b1_58-3B: head size 100, different names, a wrong model_type."""
    shape = SHAPE | {"hidden_size": 300, "num_key_value_heads": 3, "hidden_act": "silu"}
    theta = {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}
    found = masters(
        BitNetForCausalLM(BitNetConfig(**shape, **theta, tie_word_embeddings=True)).eval(), torch.float16, None
    )
    names = {"attn_sub_norm": "inner_attn_ln", "ffn_sub_norm": "ffn_layernorm"}
    for old, new in names.items():
        found.tensors = {name.replace(old, new): value for name, value in found.tensors.items()}
    found.config |= {"architectures": ["BitnetForCausalLM"], "model_type": "llama", "weight_bits": 1, "input_bits": 8}
    del found.config["rope_parameters"]
    found.config |= {"rope_theta": 10_000.0, "rope_scaling": None}
    return found


def llama_packed(eps: float | None = None, left: tuple[str, ...] = (), **more: Any) -> Published:
    """HF1BitLLM/Llama3-8B-1.58, Falcon3-1.58bit, Falcon-E: scales divide.

    eps: with a norm inside each linear layer. left: names of projections that stay float.
    """
    return packed_to_divide(LlamaForCausalLM(LlamaConfig(**SHAPE, **more)).eval(), eps, left)


def packed_to_divide(model: nn.Module, eps: float | None = None, left: tuple[str, ...] = ()) -> Published:
    """The model packed for BitLinear."""
    dtype = torch.bfloat16
    randomize(model, dtype, 3)
    random, ternary = torch.Generator().manual_seed(4), {}

    def make(name: str, linear: nn.Linear) -> nn.Module:
        if name.endswith(left):
            return linear
        codes, gamma = absmean(linear.weight.data)
        n, k = codes.shape
        new = BitLinear(k, n, linear.bias is not None, use_rms_norm=eps is not None, rms_norm_eps=eps or 0.0)
        new.dtype, new.weight = torch.float32, pack_weights(codes.clone())
        new.weight_scale = (1 / gamma).to(dtype).float()
        if linear.bias is not None:
            new.bias = linear.bias.data.clone()
        if eps is not None:
            new.rms_norm.weight.data = (1 + 0.2 * torch.randn(k, generator=random)).to(dtype).float()
        ternary[name] = codes.numpy().astype(np.int8), (1 / new.weight_scale).numpy()
        return new

    replace_linears(model, make)
    norm = {} if eps is None else {"use_rms_norm": True, "rms_norm_eps": eps}
    quantization = DIVIDE | norm | {"modules_to_not_convert": ["lm_head", *left]}
    return Published(describe(model, quantization_config=quantization), tensors_of(model, dtype), model, ternary)


def mistral_packed() -> Published:
    """Every layer with a window."""
    config = MistralConfig(**SHAPE, sliding_window=24, tie_word_embeddings=False)
    return packed_to_divide(MistralForCausalLM(config).eval())


def floats_that_are_ternary(model: nn.Module, scope: str, tables: bool, seed: int = 5) -> Published:
    """TriLM (one scale per tensor, or per part of a row) and Ternary-Bonsai (one per 128 weights), as fp16."""
    randomize(model, torch.float16, seed)
    random = np.random.default_rng(seed)
    ternary: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def fill(name: str, w: torch.Tensor, largest: float) -> torch.Tensor:
        n, k = w.shape
        shape = {"tensor": (1,), "row": (n,), "group": (n, -(-k // 128))}[scope]
        scales = random.uniform(largest / 2, largest, shape).astype(np.float16).astype(np.float32)
        codes = random.integers(-1, 2, (n, k)).astype(np.int8)
        codes[:, ::64] = 1  # no group is all zero, which would hide its scale
        if scales.shape == (n, 1):
            scales = scales[:, 0]  # the same scales, one a row
        ternary[name] = codes, scales
        wide = np.repeat(scales, 128, axis=1)[:, :k] if scales.ndim == 2 else scales[:, None]
        return torch.from_numpy(codes * wide)

    if tables:
        model.model.embed_tokens.weight.data = fill("model.embed_tokens", model.model.embed_tokens.weight, 1.0)
        if model.config.tie_word_embeddings:
            model.lm_head.weight = model.model.embed_tokens.weight
    floats = copy.deepcopy(model)

    def make(name: str, linear: nn.Linear) -> nn.Module:
        if name == "lm_head" and model.config.tie_word_embeddings:
            weight = linear.weight.data
        else:
            weight = fill(name, linear.weight, 0.15)
            floats.get_submodule(name).weight.data = weight
        return auto(linear, weight, torch.ones(1))

    replace_linears(model, make, head=tables)
    return Published(describe(floats), tensors_of(floats, torch.float16), model, ternary)


def trilm(scope: str = "tensor") -> Published:
    return floats_that_are_ternary(LlamaForCausalLM(LlamaConfig(**SHAPE)).eval(), scope, tables=False)


def bonsai(tied: bool = True) -> Published:
    config = Qwen3Config(**SHAPE | {"hidden_size": 288}, head_dim=40, tie_word_embeddings=tied)
    return floats_that_are_ternary(Qwen3ForCausalLM(config).eval(), "group", tables=True)


def qwen2_packed() -> Published:
    """Biases of q, k and v; the scale also multiplies the bias (AutoBitLinear)."""
    dtype = torch.float32
    model = Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=False)).eval()
    randomize(model, dtype, 6)
    ternary, packed = {}, {}

    def make(name: str, linear: nn.Linear) -> nn.Module:
        codes, gamma = absmean(linear.weight.data)
        packed[f"{name}.weight"] = pack_weights(codes.clone())
        ternary[name] = codes.numpy().astype(np.int8), gamma.numpy()
        return auto(linear, codes, gamma)

    replace_linears(model, make)
    return Published(describe(model, quantization_config=MULTIPLY), tensors_of(model, dtype) | packed, model, ternary)


def embedding(backbone: str) -> Published:
    """microsoft/bitnet-embedding-0.6B (qwen3) and -270M (gemma3): a norm before every projection, no head."""
    dtype, eps = torch.bfloat16, SHAPE["rms_norm_eps"]
    if backbone == "qwen3":
        model: nn.Module = Qwen3Model(Qwen3Config(**SHAPE, head_dim=40, tie_word_embeddings=True)).eval()
    else:
        kinds = ["sliding_attention", "full_attention", "sliding_attention"]
        more = {"head_dim": 40, "sliding_window": 24, "layer_types": kinds, "query_pre_attn_scalar": 56}
        model = Gemma3TextModel(Gemma3TextConfig(**SHAPE, **more)).eval()
        scale = model.embed_tokens.embed_scale  # in the type of the weights, as when transformers computes in it
        scale.copy_(scale.to(dtype))
    randomize(model, dtype, 7, norms=0.0 if backbone == "gemma3" else 1.0)
    random, ternary = torch.Generator().manual_seed(8), {}

    def make(name: str, linear: nn.Linear) -> nn.Module:
        codes, scale = absmean(linear.weight.data)
        ternary[name] = codes.numpy().astype(np.int8), scale.numpy()
        new = auto(linear, linear.weight.data, None, eps)
        new.rms_norm.weight.data = (1 + 0.2 * torch.randn(codes.shape[1], generator=random)).to(dtype).float()
        return new

    replace_linears(model, make)
    tensors = {name.replace(".rms_norm.", ".norm."): value for name, value in tensors_of(model, dtype).items()}
    return Published(describe(model), tensors, model, ternary)
