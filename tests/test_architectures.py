"""The layers of published families with float weights, against `transformers`: nothing but the architecture differs.

Without a quantizer there are no rounding edges, so every logit is compared.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_runtime import Model

transformers = pytest.importorskip("transformers")

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

FLOAT: dict[str, Any] = {
    "vocab_size": 67, "dim": 36, "n_layers": 5, "n_heads": 3, "n_kv_heads": 1, "head_dim": 10, "ffn_dim": 50,
    "max_context": 64, "norm_eps": 1e-6, "sub_norm": False, "qk_norm": True, "ternary": (), "head_format": "f32",
}  # fmt: skip
GEMMA3 = ModelConfig(
    **FLOAT, activation="gelu", post_norm=True, embedding_scale=6.0, attention_scale=13**-0.5, sliding_window=7,
    global_every=2, rope_theta=1e6, rope_local_theta=1e4, rope_scaling="linear", rope_factor=8.0,
)  # fmt: skip
QWEN3 = ModelConfig(**FLOAT, activation="silu", rope_theta=1e6)


def published(config: ModelConfig) -> Any:
    """The same architecture as `transformers` has it, its weights drawn."""
    common: dict[str, Any] = {
        "vocab_size": config.vocab_size, "hidden_size": config.dim, "num_hidden_layers": config.n_layers,
        "num_attention_heads": config.n_heads, "num_key_value_heads": config.n_kv_heads, "head_dim": config.head_dim,
        "intermediate_size": config.ffn_dim, "rms_norm_eps": config.norm_eps, "tie_word_embeddings": True,
        "max_position_embeddings": config.max_context, "attn_implementation": "eager",
    }  # fmt: skip
    torch.manual_seed(5)
    if config is QWEN3:
        rope = {"rope_type": "default", "rope_theta": config.rope_theta}
        model = transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**common, rope_parameters=rope))
    else:
        ropes = {
            "full_attention": {"rope_type": "linear", "factor": config.rope_factor, "rope_theta": config.rope_theta},
            "sliding_attention": {"rope_type": "default", "rope_theta": config.rope_local_theta},
        }
        kinds = ["sliding_attention" if c.sliding_window else "full_attention" for c in layers(config)]
        model = transformers.Gemma3ForCausalLM(
            transformers.Gemma3TextConfig(
                **common,
                rope_parameters=ropes,
                layer_types=kinds,
                sliding_window=config.sliding_window,
                query_pre_attn_scalar=13,
                hidden_activation="gelu_pytorch_tanh",
            )
        )
    for parameter in model.parameters():
        if parameter.dim() == 1:
            torch.nn.init.uniform_(parameter, -0.5, 0.5)
        else:
            torch.nn.init.normal_(parameter, std=0.2)
    return model.eval()


def layers(config: ModelConfig) -> list[ModelConfig]:
    return [config.of_layer(i) for i in range(config.n_layers)]


def weights_of(model: Any, config: ModelConfig) -> dict[str, torch.Tensor]:
    """The weights under our names. Gemma stores its gains minus 1."""
    post = config.post_norm
    norms = {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_post_norm" if post else "ffn_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "ffn_post_norm",
    }
    ours: dict[str, torch.Tensor] = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight":
            continue
        words = name.removeprefix("model.").removesuffix(".weight").split(".")
        last = norms.get(words[-1], words[-1].removesuffix("_proj"))
        last = {"embed_tokens": "embedding", "norm": "final_norm"}.get(last, last)
        prefix = f"layers.{words[1]}." if words[0] == "layers" else ""
        ours[f"{prefix}{last}.weight"] = (tensor + 1 if post and tensor.dim() == 1 else tensor).contiguous().clone()
    return ours


@pytest.mark.parametrize("config", [GEMMA3, QWEN3], ids=["gemma3", "qwen3"])
def test_logits_are_those_of_transformers(config: ModelConfig, tmp_path: Path) -> None:
    source = published(config)
    weights = weights_of(source, config)
    model = Transformer(config).eval()
    model.load_state_dict(weights)
    tokens = torch.randint(0, config.vocab_size, (3, 40), generator=torch.Generator().manual_seed(1))
    (tmp_path / "c").mkdir()
    save_file(weights, tmp_path / "c" / "model.safetensors")
    (tmp_path / "c" / "config.json").write_text(config.to_json())
    pack_checkpoint(Checkpoint.open(tmp_path / "c"), tmp_path / "m.bitnet")
    with torch.no_grad():
        expected = source.double()(tokens).logits.numpy()
        in_torch = model.double()(tokens).numpy()
    with Model.load(tmp_path / "m.bitnet", kv_type="f32") as engine:
        rows = []
        for text in tokens.tolist():
            with engine.session() as session:
                rows.append(session.append(text, "all"))
    size = np.abs(expected).max()
    # All in fp64 but for cos and sin, which transformers rounds to fp32: 6e-8 each, times what five layers make of it.
    assert np.abs(in_torch - expected).max() < 3e-6 * size
    # fp32: five layers of sums of 50 terms, each rounded to 6e-8.
    assert np.abs(np.stack(rows) - expected).max() < 1e-5 * size
