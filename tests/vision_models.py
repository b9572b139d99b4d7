"""Tiny vision models with odd sizes: a single stack, two towers, and a decoder with vision."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional as F

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer

SIGLIP: dict[str, Any] = {  # its layers; and CLIP's, with quick GELU aside
    "norm": "layer", "norm_bias": True, "norm_eps": 1e-6, "sub_norm": False, "ffn": "plain", "activation": "gelu",
    "position": "learned", "qkv_bias": True, "o_bias": True, "ffn_bias": True, "mask": "bidirectional",
    "has_head": False, "tie_embeddings": False,
}  # fmt: skip

VISION = ModelConfig(
    name="vision", input="images", vocab_size=0, dim=36, n_layers=2, n_heads=3, n_kv_heads=3, head_dim=12, ffn_dim=71,
    max_context=-1, image_size=14, patch_size=4, channels=3, pixel_mean=(0.5, 0.4, 0.3), pixel_std=(0.5, 0.25, 0.3),
    patch_bias=True, pooling="attention", **SIGLIP,
)  # fmt: skip
"""14 pixels, of which 12 are used: 9 patches."""

TOWERS = ModelConfig(
    name="text", vocab_size=257, dim=44, n_layers=2, n_heads=2, n_kv_heads=2, head_dim=22, ffn_dim=70, max_context=24,
    pooling="last", out_dim=36, projector_bias=True, vision=VISION, **SIGLIP,
)  # fmt: skip

CLIP = TOWERS.replace(
    mask="causal", pooling="last", out_dim=20, projector_bias=False, activation="gelu_erf", similarity_scale=14.3,
    vision={"class_token": True, "pooling": "first", "embedding_norm": True, "patch_bias": False, "out_dim": 20,
            "n_kv_heads": 1, "pixel_mean": (0.5,), "pixel_std": (0.3,), "channels": 1},
)  # fmt: skip

PALIGEMMA = ModelConfig(
    vocab_size=257, dim=42, n_layers=2, n_heads=4, n_kv_heads=1, head_dim=14, ffn_dim=71, max_context=64,
    mask="prefix", activation="gelu", sub_norm=False, norm_eps=1e-6, embedding_scale=42**0.5, first_position=1,
    image_token=250, vision=VISION.replace(pooling="none", out_dim=42, projector_bias=True),
)  # fmt: skip

CAUSAL = PALIGEMMA.replace(mask="causal", sub_norm=True, activation="relu2", first_position=0)

FAMILIES = {"towers": TOWERS, "clip": CLIP, "paligemma": PALIGEMMA, "causal": CAUSAL}


def seeded(config: ModelConfig) -> Transformer:
    """A model with random weights, and gains and biases that are not 1 and 0."""
    torch.manual_seed(7)
    model = Transformer(config)
    for name, parameter in model.named_parameters():
        if parameter.dim() == 1 and not name.startswith("similarity"):
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    return model.eval()


def pixels(n: int, config: ModelConfig, seed: int = 3) -> torch.Tensor:
    """Random normalized pixels (n, C, S, S)."""
    stack = config.vision or config
    shape = (n, stack.channels, stack.image_size, stack.image_size)
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def prompt(config: ModelConfig, n_images: int, n_tokens: int, rows: int = 1, seed: int = 5) -> torch.Tensor:
    """Token ids (rows, T): image tokens, then n_tokens others."""
    assert config.vision
    places = torch.full((rows, n_images * config.vision.max_context), config.image_token)
    others = torch.randint(1, 200, (rows, n_tokens), generator=torch.Generator().manual_seed(seed))
    return torch.cat([places, others], 1)


def loss_of(model: Transformer, config: ModelConfig, images: torch.Tensor | None = None) -> torch.Tensor:
    """The loss on four images with a text each: contrastive, or that of the texts."""
    images = pixels(4, config) if images is None else images
    if not config.image_token:
        vectors = model(captions(), images=images)
        assert model.similarity
        signs = 2 * torch.eye(4, dtype=vectors.dtype) - 1
        return -F.logsigmoid(signs * model.similarity(vectors[4:], vectors[:4])).sum() / 4
    row = prompt(config, 1, 6, rows=4)
    logits = model(row[:, :-1], None, torch.full((4,), 11), images)
    return F.cross_entropy(logits[:, 10:].flatten(0, 1), row[:, 11:].flatten())


def captions() -> torch.Tensor:
    return torch.randint(0, 257, (4, 7), generator=torch.Generator().manual_seed(1))
