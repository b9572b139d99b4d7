"""The shapes of the benchmarked models, which have random weights."""

from __future__ import annotations

from bitnet.config import ModelConfig
from bitnet.presets import PRESETS

# Decoders of three sizes, with room for 4,096 tokens of context and more.
SHAPES: dict[str, ModelConfig] = {
    "bitnet-2b4t": PRESETS["bitnet-2b4t"].replace(max_context=8192),
    "100m": ModelConfig(
        vocab_size=32_000, dim=768, n_layers=12, n_heads=12, n_kv_heads=4, head_dim=64, ffn_dim=2048, max_context=8192,
    ),
    "10m": ModelConfig(
        vocab_size=16_000, dim=256, n_layers=8, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=768, max_context=8192,
    ),
}  # fmt: skip

# Other families. A token of "experts-2b" uses as many weights as one of 2B4T; "thinker-moe" is a small decoder.
# "so400m-14" has only its vision tower, which makes 256 vectors per image.
FAMILIES: dict[str, ModelConfig] = {
    "thinker-moe": PRESETS["thinker-moe"],
    "experts-2b": PRESETS["bitnet-2b4t"].replace(
        n_experts=8, experts_per_token=2, ffn_dim=PRESETS["bitnet-2b4t"].ffn_dim // 2, activation="silu",
    ),
    "bert-base": ModelConfig(
        vocab_size=30_522, dim=768, n_layers=12, n_heads=12, n_kv_heads=12, head_dim=64, ffn_dim=3072, max_context=512,
        mask="bidirectional", has_head=False, pooling="mean", position="learned", ffn="plain", activation="gelu_erf",
        norm="layer", norm_bias=True, pre_norm=False, residual_norm=True, embedding_norm=True, final_norm=False,
        sub_norm=False, qkv_bias=True, o_bias=True, ffn_bias=True,
    ),
    "so400m-14": PRESETS["siglip-so400m"].stacks[1],
    "paligemma-3b": PRESETS["paligemma-3b"],
}  # fmt: skip

# Decoders to train, about as large as their names say. Width and depth grow together; the last two see 2,048 tokens.
_SIZES = {"30m": (512, 8, 64, 1024), "100m": (768, 12, 64, 1024), "300m": (1024, 24, 64, 2048),
          "1b": (2048, 20, 128, 2048)}  # fmt: skip
TRAINED: dict[str, ModelConfig] = {
    name: ModelConfig(
        vocab_size=32_768, dim=dim, n_layers=n_layers, n_heads=dim // head_dim, n_kv_heads=4, head_dim=head_dim,
        ffn_dim=-(-8 * dim // 3 // 256) * 256, max_context=context,
    )
    for name, (dim, n_layers, head_dim, context) in _SIZES.items()
}  # fmt: skip
TRAINED["100m-4k"] = TRAINED["100m"].replace(max_context=4096)
TRAINED["quick"] = ModelConfig(
    vocab_size=512, dim=64, n_layers=2, n_heads=2, n_kv_heads=1, head_dim=32, ffn_dim=128, max_context=32,
)  # fmt: skip
