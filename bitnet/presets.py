"""Models by name: published ones, and those that `bitnet train` begins with.

Imports no torch, as `bitnet.config`.
"""

from __future__ import annotations

import math
from typing import Any

from bitnet.config import ModelConfig

_BONSAI: dict[str, Any] = {
    "activation": "silu", "sub_norm": False, "qk_norm": True, "weight_scale": "group", "head_format": "ternary",
}  # fmt: skip

_TRANSFORMER_2017: dict[str, Any] = {
    "vocab_size": 37_000, "dim": 512, "n_layers": 6, "n_heads": 8, "n_kv_heads": 8, "head_dim": 64, "ffn_dim": 2048,
    "max_context": 512, "embedding_scale": math.sqrt(512), "norm": "layer", "norm_bias": True, "pre_norm": False,
    "residual_norm": True, "sub_norm": False, "final_norm": False, "ffn": "plain", "activation": "relu",
    "position": "sinusoidal", "qkv_bias": True, "o_bias": True, "ffn_bias": True, "dropout": 0.1,
}  # fmt: skip

_THINKER: dict[str, Any] = {
    "dim": 256, "n_layers": 4, "n_heads": 4, "n_kv_heads": 4, "head_dim": 64, "ffn_dim": 1024, "max_context": 512,
    "activation": "silu", "sub_norm": False, "tie_embeddings": False, "dropout": 0.1,
}  # fmt: skip

PRESETS: dict[str, ModelConfig] = {
    # The demo: 2 million parameters, trained in minutes on two cores. Few heads, few layers: at this
    # size training spends its time on attention and on reading activations, not on products.
    "tiny": ModelConfig(
        vocab_size=2048, dim=192, n_layers=4, n_heads=3, n_kv_heads=1, head_dim=64, ffn_dim=512, max_context=256,
    ),
    # As large, and llama.cpp takes it: its activation, and rows of whole blocks of TQ1_0 and TQ2_0 (256 weights).
    "gguf": ModelConfig(
        vocab_size=2048, dim=256, n_layers=3, n_heads=4, n_kv_heads=1, head_dim=64, ffn_dim=512, max_context=256,
        activation="silu",
    ),
    # Characters in, about 1 million parameters.
    "mini-gpt": ModelConfig(
        vocab_size=512, dim=128, n_layers=5, n_heads=4, n_kv_heads=4, head_dim=32, ffn_dim=352, max_context=256,
    ),
    # As large, with a learned vector for each position.
    "mini-gpt-learned": ModelConfig(
        vocab_size=512, dim=128, n_layers=5, n_heads=4, n_kv_heads=4, head_dim=32, ffn_dim=352, max_context=256,
        position="learned",
    ),
    # The decoder of a small multimodal model; with 8 experts, of which a token takes 2, four times the parameters.
    "thinker": ModelConfig(vocab_size=5000, **_THINKER),
    "thinker-moe": ModelConfig(vocab_size=5000, n_experts=8, experts_per_token=2, **_THINKER),
    # arXiv 1706.03762, base: half of it as a decoder, and as an encoder for --objective mlm. Ternary.
    "transformer-2017": ModelConfig(**_TRANSFORMER_2017),
    "transformer-2017-encoder": ModelConfig(mask="bidirectional", pooling="mean", **_TRANSFORMER_2017),
    # microsoft/bitnet-b1.58-2B-4T, arXiv 2504.12285.
    "bitnet-2b4t": ModelConfig(
        vocab_size=128_256, dim=2560, n_layers=30, n_heads=20, n_kv_heads=5, head_dim=128, ffn_dim=6912,
        max_context=4096, rope_theta=500_000.0,
    ),
    # prism-ml/Ternary-Bonsai: Qwen3, ternary with a scale for every 128 weights, tables too. To run, not to train.
    "ternary-bonsai-1.7b": ModelConfig(
        vocab_size=151_936, dim=2048, n_layers=28, n_heads=16, n_kv_heads=8, head_dim=128, ffn_dim=6144,
        max_context=32_768, norm_eps=1e-6, rope_theta=1e6, **_BONSAI,
    ),
    "ternary-bonsai-8b": ModelConfig(
        vocab_size=151_936, dim=4096, n_layers=36, n_heads=32, n_kv_heads=8, head_dim=128, ffn_dim=12_288,
        max_context=65_536, norm_eps=1e-6, rope_theta=1e6, tie_embeddings=False, **_BONSAI,
    ),
}  # fmt: skip
