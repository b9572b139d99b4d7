"""Models by name: published ones, and those for `bitnet train`.

Does not import torch, like `bitnet.config`.
"""

from __future__ import annotations

import math
from typing import Any

from bitnet.config import ModelConfig
from bitnet.sizes import SIZES, model_of

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

_SEES: dict[str, Any] = {  # layers of SigLIP and CLIP, for vision stacks and text towers
    "norm": "layer", "norm_bias": True, "sub_norm": False, "ffn": "plain", "activation": "gelu",
    "position": "learned", "qkv_bias": True, "o_bias": True, "ffn_bias": True, "has_head": False,
    "tie_embeddings": False,
}  # fmt: skip

_RGB: dict[str, Any] = {
    "name": "vision", "input": "images", "vocab_size": 0, "mask": "bidirectional", "max_context": -1, "channels": 3,
    "pixel_mean": (0.5, 0.5, 0.5), "pixel_std": (0.5, 0.5, 0.5), "patch_bias": True,
}  # fmt: skip

_BASE: dict[str, Any] = {
    "dim": 768, "n_layers": 12, "n_heads": 12, "n_kv_heads": 12, "head_dim": 64, "ffn_dim": 3072,
}  # fmt: skip
_SO400M: dict[str, Any] = {
    "dim": 1152, "n_layers": 27, "n_heads": 16, "n_kv_heads": 16, "head_dim": 72, "ffn_dim": 4304,
}  # fmt: skip
_SO400M_14 = ModelConfig(
    image_size=224, patch_size=14, norm_eps=1e-6, pooling="attention", **_SO400M, **_RGB, **_SEES,
)  # fmt: skip
_SIGLIP_TEXT: dict[str, Any] = {
    "name": "text", "vocab_size": 32_000, "max_context": 64, "mask": "bidirectional", "norm_eps": 1e-6,
    "pooling": "last", "projector_bias": True, "similarity_scale": 10.0, "similarity_bias": -10.0,
}  # fmt: skip

_TINY_TOWER: dict[str, Any] = _SEES | {  # ternary from its first step
    "dim": 128, "n_heads": 4, "n_kv_heads": 4, "head_dim": 32, "ffn_dim": 384, "sub_norm": True, "norm_eps": 1e-6,
}  # fmt: skip
_TINY_VISION = ModelConfig(n_layers=4, image_size=72, patch_size=24, pooling="attention", **_RGB, **_TINY_TOWER)

PRESETS: dict[str, ModelConfig] = {
    # The demo: 2 million parameters, trained in minutes on two cores. Few heads and layers: at this
    # size training spends its time on attention and memory traffic, not on matrix products.
    "tiny": ModelConfig(
        vocab_size=2048, dim=192, n_layers=4, n_heads=3, n_kv_heads=1, head_dim=64, ffn_dim=512, max_context=256,
    ),
    # As large, for llama.cpp: an activation that it has, and rows of whole TQ1_0 and TQ2_0 blocks (256 weights).
    "gguf": ModelConfig(
        vocab_size=2048, dim=256, n_layers=3, n_heads=4, n_kv_heads=1, head_dim=64, ffn_dim=512, max_context=256,
        activation="silu",
    ),
    # Character-level, about 1 million parameters.
    "mini-gpt": ModelConfig(
        vocab_size=512, dim=128, n_layers=5, n_heads=4, n_kv_heads=4, head_dim=32, ffn_dim=352, max_context=256,
    ),
    # As large, with learned position embeddings.
    "mini-gpt-learned": ModelConfig(
        vocab_size=512, dim=128, n_layers=5, n_heads=4, n_kv_heads=4, head_dim=32, ffn_dim=352, max_context=256,
        position="learned",
    ),
    # The decoder of a small multimodal model; with 8 experts, 2 per token, four times the parameters.
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
    # Images of 72 pixels in 9 patches, and short texts, 1.5 million parameters; and a decoder that takes such
    # images. The tokenizer of a run determines the image token.
    "siglip-tiny": ModelConfig(
        name="text", vocab_size=1024, n_layers=3, max_context=64, mask="bidirectional", pooling="mean", out_dim=128,
        projector_bias=True, similarity_scale=10.0, similarity_bias=-10.0, vision=_TINY_VISION, **_TINY_TOWER,
    ),
    "paligemma-tiny": ModelConfig(
        vocab_size=1024, dim=128, n_layers=4, n_heads=4, n_kv_heads=4, head_dim=32, ffn_dim=384, max_context=128,
        mask="prefix", activation="gelu", norm_eps=1e-6, embedding_scale=math.sqrt(128), image_token=1,
        vision=_TINY_VISION.replace(pooling="none", out_dim=128, projector_bias=True),
    ),
    # google/siglip-base-patch16-224 and siglip-so400m-patch14-224, arXiv 2303.15343. Shapes to run.
    "siglip-base": ModelConfig(
        out_dim=768, vision=ModelConfig(
            image_size=224, patch_size=16, norm_eps=1e-6, pooling="attention", **_BASE, **_RGB, **_SEES,
        ),
        **_BASE, **_SIGLIP_TEXT, **_SEES,
    ),
    "siglip-so400m": ModelConfig(out_dim=1152, vision=_SO400M_14, **_SO400M, **_SIGLIP_TEXT, **_SEES),
    # laion/CLIP-ViT-B-32-laion2B-s34B-b79K: CLIP of arXiv 2103.00020 with GELU in place of x·σ(1.702·x).
    "clip-base": ModelConfig(
        name="text", vocab_size=49_408, dim=512, n_layers=12, n_heads=8, n_kv_heads=8, head_dim=64, ffn_dim=2048,
        max_context=77, pooling="last", out_dim=512, similarity_scale=1 / 0.07,
        vision=ModelConfig(
            image_size=224, patch_size=32, class_token=True, embedding_norm=True, pooling="first", out_dim=512,
            **_BASE, **_RGB | {
                "patch_bias": False, "pixel_mean": (0.48145466, 0.4578275, 0.40821073),
                "pixel_std": (0.26862954, 0.26130258, 0.27577711),
            }, **_SEES | {"activation": "gelu_erf"},
        ),
        **_SEES | {"activation": "gelu_erf"},
    ),
    # google/paligemma-3b-pt-224, arXiv 2407.07726.
    "paligemma-3b": ModelConfig(
        vocab_size=257_216, dim=2048, n_layers=18, n_heads=8, n_kv_heads=1, head_dim=256, ffn_dim=16_384,
        max_context=8192, mask="prefix", activation="gelu", sub_norm=False, norm_eps=1e-6, first_position=1,
        embedding_scale=math.sqrt(2048), image_token=257_152,
        vision=_SO400M_14.replace(pooling="none", out_dim=2048, projector_bias=True),
    ),
}  # fmt: skip
PRESETS |= {name: model_of(parameters) for name, parameters in SIZES.items()}
