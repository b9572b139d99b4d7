"""The models that are measured: random weights, three sizes, room for 4,096 tokens of context and more."""

from __future__ import annotations

from bitnet.config import PRESETS, ModelConfig

SHAPES: dict[str, ModelConfig] = {
    "bitnet-2b4t": PRESETS["bitnet-2b4t"].replace(max_context=8192),
    "100m": ModelConfig(
        vocab_size=32_000, dim=768, n_layers=12, n_heads=12, n_kv_heads=4, head_dim=64, ffn_dim=2048, max_context=8192,
    ),
    "10m": ModelConfig(
        vocab_size=16_000, dim=256, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=768, max_context=8192,
    ),
}  # fmt: skip
