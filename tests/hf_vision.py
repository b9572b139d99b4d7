"""Tiny random vision models of `transformers`, saved by it, with awkward sizes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.functional import normalize
from transformers import (
    CLIPConfig,
    CLIPModel,
    CLIPTextConfig,
    CLIPTextModel,
    CLIPTextModelWithProjection,
    CLIPVisionConfig,
    CLIPVisionModel,
    CLIPVisionModelWithProjection,
    PaliGemmaConfig,
    PaliGemmaForConditionalGeneration,
    SiglipConfig,
    SiglipModel,
    SiglipTextConfig,
    SiglipTextModel,
    SiglipVisionConfig,
    SiglipVisionModel,
    ViTConfig,
    ViTForImageClassification,
    ViTModel,
)

from bitnet.data import tokenizer

VOCABULARY, CONTEXT, IMAGE, END = 101, 11, 97, 3
SIZE = 17  # pixels, of which 15 are seen: 9 patches
_EAGER = {"attn_implementation": "eager"}
_VISION: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 52, "num_hidden_layers": 2, "num_attention_heads": 3, "image_size": SIZE,
    "patch_size": 5,
}  # fmt: skip
_TEXT: dict[str, Any] = {
    "hidden_size": 28, "intermediate_size": 41, "num_hidden_layers": 2, "num_attention_heads": 4,
    "vocab_size": VOCABULARY, "max_position_embeddings": CONTEXT,
}  # fmt: skip
_SIGLIP_TEXT = _TEXT | {"projection_size": 36, "pad_token_id": 1, "bos_token_id": 2, "eos_token_id": END}
_CLIP_VISION, _CLIP_TEXT = _VISION | {"projection_dim": 21}, _TEXT | {"projection_dim": 21, "eos_token_id": END}
_GELU = {"hidden_act": "gelu"}
_DECODER: dict[str, Any] = {
    "hidden_size": 30, "intermediate_size": 44, "num_hidden_layers": 3, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 10, "vocab_size": VOCABULARY, "max_position_embeddings": 60,
}  # fmt: skip


_BYTES = {"vocab_size": 301}  # room for a tokenizer of bytes


def _paligemma(image: int = IMAGE, **decoder: Any) -> nn.Module:
    vision = _VISION | {"model_type": "siglip_vision_model", "vision_use_head": False}
    config = PaliGemmaConfig(
        vision_config=vision, text_config=_DECODER | decoder, projection_dim=30, image_token_index=image, **_EAGER
    )
    return PaliGemmaForConditionalGeneration(config)


_MAKE: dict[str, Callable[[], nn.Module]] = {
    "siglip": lambda: SiglipModel(SiglipConfig(vision_config=_VISION, text_config=_SIGLIP_TEXT)),
    "siglip, vision": lambda: SiglipVisionModel(SiglipVisionConfig(**_VISION)),
    "siglip, text": lambda: SiglipTextModel(SiglipTextConfig(**_SIGLIP_TEXT)),
    "clip": lambda: CLIPModel(CLIPConfig(vision_config=_CLIP_VISION, text_config=_CLIP_TEXT, projection_dim=21)),
    "clip, gelu": lambda: CLIPModel(
        CLIPConfig(vision_config=_CLIP_VISION | _GELU, text_config=_CLIP_TEXT | _GELU, projection_dim=21)
    ),
    "clip, vision": lambda: CLIPVisionModel(CLIPVisionConfig(**_CLIP_VISION)),
    "clip, vision, projected": lambda: CLIPVisionModelWithProjection(CLIPVisionConfig(**_CLIP_VISION | _GELU)),
    "clip, text": lambda: CLIPTextModel(CLIPTextConfig(**_CLIP_TEXT)),
    "clip, text, projected": lambda: CLIPTextModelWithProjection(CLIPTextConfig(**_CLIP_TEXT | _GELU)),
    "vit": lambda: ViTModel(ViTConfig(**_VISION, num_channels=1)),
    "vit, classes": lambda: ViTForImageClassification(ViTConfig(**_VISION, qkv_bias=False)),
    "paligemma": lambda: _paligemma(model_type="gemma"),
    "paligemma 2": lambda: _paligemma(
        model_type="gemma2", query_pre_attn_scalar=17, sliding_window=22, attn_logit_softcapping=3.0,
        final_logit_softcapping=4.0,
    ),
    "siglip, bytes": lambda: SiglipModel(SiglipConfig(vision_config=_VISION, text_config=_SIGLIP_TEXT | _BYTES)),
    "paligemma 2, bytes": lambda: _paligemma(257, model_type="gemma2", **_BYTES),
}  # fmt: skip
"""The window of PaliGemma 2 is longer than every prefix of the tests: in a prefix, transformers ignores the window."""

MAKE = [name for name in _MAKE if "bytes" not in name]


def make(name: str, seed: int = 1) -> nn.Module:
    """A model in fp32 with values that f16 represents, large enough that every part of the model matters."""
    model, random = _MAKE[name]().eval(), torch.Generator().manual_seed(seed)
    for module in model.modules():
        for kind, p in module.named_parameters(recurse=False):
            norm = type(module).__name__.endswith(("RMSNorm", "LayerNorm"))
            mean = 1.0 if norm and kind == "weight" and "RMS" not in type(module).__name__ else 0.0
            table = isinstance(module, nn.Embedding) or kind in ("class_embedding", "cls_token", "probe")
            std = 1.0 if table else 0.2 if norm or p.dim() < 2 else 0.15
            p.data = (torch.randn(p.shape, generator=random) * std + mean).half().float()
    if hasattr(model, "logit_scale"):
        model.logit_scale.data.fill_(1.25)
    return model


def save(name: str, folder: Path, **more: Any) -> nn.Module:
    model = make(name)
    model.save_pretrained(folder, **more)
    if name == "vit":
        said = {"size": {"height": SIZE, "width": SIZE}, "image_mean": [0.4], "image_std": [0.3]}
        (folder / "preprocessor_config.json").write_text(json.dumps(said))
    return model


def bytes_beside(folder: Path) -> None:
    """Write a byte tokenizer."""
    words = tokenizer.build("byte", [], 258, tokenizer.IMAGE)
    words.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(f'{{"eos_token": "{tokenizer.END}", "pad_token": "{tokenizer.END}"}}')


def sees(name: str) -> bool:
    return "text" not in name


def reads(name: str) -> bool:
    return name.startswith("paligemma") or (name.startswith(("siglip", "clip")) and "vision" not in name)


def pixels_of(n: int, name: str, seed: int = 0) -> torch.Tensor:
    """Random pixels (n, C, S, S), from 0 to 1."""
    shape = (n, 1 if name == "vit" else 3, SIZE, SIZE)
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed))


def tokens_of(n: int, length: int, seed: int = 0) -> torch.Tensor:
    """Random ids (n, length) without special ones, except the last, which is the end token."""
    tokens = torch.randint(5, 90, (n, length), generator=torch.Generator().manual_seed(seed))
    tokens[:, -1] = END
    return tokens


def prompts(n: int, images: int, asked: int, answered: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Token ids (n, T): image tokens, a question, an answer; and token_type_ids, 1 in the answer."""
    places = torch.full((n, images * 9), IMAGE)
    tokens = torch.cat([places, tokens_of(n, asked + answered)], 1)
    types = torch.zeros_like(tokens)
    types[:, tokens.shape[1] - answered :] = 1
    return tokens, types


@torch.inference_mode()
def result(model: nn.Module, name: str, normalized: torch.Tensor, tokens: torch.Tensor) -> dict[str, torch.Tensor]:
    """Outputs of `transformers` for pixels and token ids, in the precision of the model; vectors of length 1."""
    found: dict[str, torch.Tensor] = {}
    if name.startswith("paligemma"):
        types = prompts(len(tokens), 2, 3, tokens.shape[1] - 21)[1]
        out = model(input_ids=tokens, pixel_values=normalized, token_type_ids=types, use_cache=False)
        return {"logits": out.logits, "features": out.image_hidden_states}
    if name in ("siglip", "clip", "clip, gelu"):
        out = model(input_ids=tokens, pixel_values=normalized)
        found = {"images": out.image_embeds, "texts": out.text_embeds, "similarity": out.logits_per_image}
        if name == "siglip":
            found["states"] = out.vision_model_output.last_hidden_state
    elif sees(name):
        backbone = getattr(model, "vit", model)
        out = backbone(normalized)
        found = {"images": out.image_embeds} if "projected" in name else {"images": out.last_hidden_state[:, 0]}
        if name != "clip, vision" and "projected" not in name:
            found["states"] = out.last_hidden_state
        if name in ("siglip, vision", "clip, vision"):
            found["images"] = out.pooler_output
    else:
        out = model(input_ids=tokens)
        found = {"texts": out.text_embeds if "projected" in name else out.pooler_output}
    return {what: normalize(x, dim=-1) if what in ("images", "texts") else x for what, x in found.items()}


@torch.inference_mode()
def states(model: nn.Module, name: str, normalized: torch.Tensor) -> torch.Tensor:
    """States of all patches of images after the last norm, before any projector."""
    if name.startswith("paligemma"):
        model = model.model.vision_tower
    backbone = getattr(model, "vision_model", model) if "vit" not in name else getattr(model, "vit", model)
    out: torch.Tensor = backbone(normalized).last_hidden_state
    return backbone.post_layernorm(out) if name.startswith("clip") else out
