"""Vision architectures of `transformers`, and their stacks.

Source: the modeling and configuration files of transformers 5.23. SigLIP and CLIP have a tower for images and one
for texts, PaliGemma a decoder instead of the latter. For the other files on images, see `pictures.py`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from bitnet_export.foreign.source import SourceError

from . import configuration as its
from .family import Family
from .fields import Fields
from .places import Name, Names, Parameter, Slice


def patches(config: Fields) -> its.Values:
    """The input of the first layer: one token per patch of an image."""
    size, patch = its.side(config, "image_size"), its.side(config, "patch_size")
    if patch > size:
        raise SourceError(f"{config.what}: patch_size is {patch}, expected at most image_size = {size}")
    of_images = {"image_size": size, "patch_size": patch, "channels": config.integer("num_channels"), "vocab_size": 0}
    return of_images | {"max_context": (size // patch) ** 2}


def class_and_patches(config: Fields) -> its.Values:
    """The same, with a learned vector before them."""
    found = patches(config)
    return found | {"max_context": found["max_context"] + 1, "class_token": True}


def attention_head(config: Fields) -> its.Values:
    """An attention pooling head, if there is one."""
    return {"pooling": "attention" if config.truth("vision_use_head", True) else "none"}


def projected(config: Fields) -> its.Values:
    return {"out_dim": config.integer("projection_dim")}


def projected_text(config: Fields) -> its.Values:
    return {"out_dim": config.integer("projection_size", config.integer("hidden_size"))}


def image_token(config: Fields) -> its.Values:
    """The token that image vectors replace. Its embedding row exists but is not used."""
    token, rows = config.integer("image_token_index"), config.integer("vocab_size")
    if not 1 <= token < rows:
        name = config.name("image_token_index")
        raise SourceError(f"{config.what}: {name} is {token}, expected 1 to vocab_size - 1 = {rows - 1}")
    return {"image_token": token}


def qkv_biases(config: Fields) -> its.Values:
    return {"qkv_bias": config.truth("qkv_bias", True)}


# ---- SigLIP and CLIP ----

_LAYERS: dict[str, Any] = {
    "sub_norm": False, "norm": "layer", "norm_bias": True, "ffn": "plain", "qkv_bias": True, "o_bias": True,
    "ffn_bias": True, "position": "learned",
}  # fmt: skip
_IMAGES = _LAYERS | {"name": "vision", "input": "images", "mask": "bidirectional"}
_TEXTS = _LAYERS | {"name": "text", "pooling": "last"}

_TOWER = {
    "hidden_size": 768, "intermediate_size": 3072, "num_hidden_layers": 12, "num_attention_heads": 12,
    "hidden_act": "gelu_pytorch_tanh", "rms_norm_eps": 1e-6,
}  # fmt: skip
_PIXELS = {"vocab_size": 0, "max_position_embeddings": 0, "num_channels": 3, "image_size": 224, "patch_size": 16}
_SQUARE: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "resample": 3}
_MIDDLE: dict[str, Any] = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073], "image_std": [0.26862954, 0.26130258, 0.27577711],
    "resample": 3, "do_center_crop": True,
}  # fmt: skip
_SIZES = ("image_size", "patch_size", "num_channels")

_LAYER_NAMES: Names = {
    "attn_norm": "layer_norm1", "o": "self_attn.out_proj", "ffn_norm": "layer_norm2", "up": "mlp.fc1",
    "down": "mlp.fc2",
}  # fmt: skip


def _vision_names(prefix: str) -> Names:
    """Names in a vision tower; the pool is SigLIP's, the class embedding CLIP's."""
    pool = f"{prefix}head."
    return {
        **_LAYER_NAMES, "patch": f"{prefix}embeddings.patch_embedding",
        "class_embedding": Parameter(f"{prefix}embeddings.class_embedding"),
        "position": f"{prefix}embeddings.position_embedding", "embedding_norm": f"{prefix}pre_layrnorm",
        "final_norm": f"{prefix}post_layernorm", "projector": "visual_projection",
        "pool_probe": Parameter(f"{pool}probe", ones=2), "pool_q": Slice(f"{pool}attention.in_proj", 0, 3, joint="_"),
        "pool_k": Slice(f"{pool}attention.in_proj", 1, 3, joint="_"),
        "pool_v": Slice(f"{pool}attention.in_proj", 2, 3, joint="_"), "pool_o": f"{pool}attention.out_proj",
        "pool_norm": f"{pool}layernorm", "pool_up": f"{pool}mlp.fc1", "pool_down": f"{pool}mlp.fc2",
    }  # fmt: skip


def _text_names(projector: str) -> Names:
    return {
        **_LAYER_NAMES, "embedding": "text_model.embeddings.token_embedding", "projector": projector,
        "position": "text_model.embeddings.position_embedding", "final_norm": "text_model.final_layer_norm",
    }  # fmt: skip


_SIGLIP = Family(
    "", {}, (), _TOWER, {"rms_norm_eps": "layer_norm_eps"}, layers="encoder.layers.", head=False, pooling=""
)
SIGLIP_VISION = _SIGLIP._replace(
    model_type="siglip_vision_model", fixed=_IMAGES | {"patch_bias": True}, parts=(patches, attention_head),
    defaults=_TOWER | _PIXELS, reads=(*_SIZES, "vision_use_head"), names=_vision_names("vision_model."),
    prefixes=("vision_model.",), pictures=_SQUARE,
)  # fmt: skip
SIGLIP_TEXT = _SIGLIP._replace(
    model_type="siglip_text_model", fixed=_TEXTS | {"mask": "bidirectional", "projector_bias": True},
    parts=(projected_text,), defaults=_TOWER | {"vocab_size": 32_000, "max_position_embeddings": 64},
    reads=("projection_size",), names=_text_names("text_model.head"), prefixes=("text_model.",), padded=True,
)  # fmt: skip

_CLIP = _TOWER | {"hidden_act": "quick_gelu", "rms_norm_eps": 1e-5, "projection_dim": 512}
_CLIP_TEXT = {
    "hidden_size": 512, "intermediate_size": 2048, "num_attention_heads": 8, "vocab_size": 49_408,
    "max_position_embeddings": 77,
}  # fmt: skip
CLIP_VISION = _SIGLIP._replace(
    model_type="clip_vision_model", fixed=_IMAGES | {"embedding_norm": True, "pooling": "first"},
    parts=(class_and_patches,), defaults=_CLIP | _PIXELS | {"patch_size": 32}, reads=_SIZES,
    names=_vision_names("vision_model."), prefixes=("vision_model.",), pictures=_MIDDLE,
)  # fmt: skip
CLIP_TEXT = _SIGLIP._replace(
    model_type="clip_text_model", fixed=_TEXTS, defaults=_CLIP | _CLIP_TEXT, names=_text_names("text_projection"),
    prefixes=("text_model.",),
)  # fmt: skip
CLIP_VISION_PROJECTED = CLIP_VISION._replace(parts=(class_and_patches, projected), reads=(*_SIZES, "projection_dim"))
CLIP_TEXT_PROJECTED = CLIP_TEXT._replace(parts=(projected,), reads=("projection_dim",))


def _pair(
    whole: str, text: Family, vision: Family, similar: tuple[str, ...], *shared: str, older: bool = False
) -> Family:
    """Two towers. older: config.json may have objects of older names for the towers, which then take precedence."""

    def of_whole(tower: Family, name: str) -> Family:
        part = (f"{name}_config_dict", f"{name}_config") if older else (f"{name}_config",)
        return tower._replace(model_type=whole, part=part, part_type=tower.model_type, shared=shared)

    return of_whole(text, "text")._replace(similar=similar, vision=of_whole(vision, "vision"))


SIGLIP = _pair("siglip", SIGLIP_TEXT, SIGLIP_VISION, ("logit_scale", "logit_bias"))
CLIP = _pair("clip", CLIP_TEXT_PROJECTED, CLIP_VISION_PROJECTED, ("logit_scale",), "projection_dim", older=True)


# ---- ViT ----

_VIT_NAMES: Names = {
    "attn_norm": "layernorm_before", "q": "attention.attention.query", "k": "attention.attention.key",
    "v": "attention.attention.value", "o": "attention.output.dense", "ffn_norm": "layernorm_after",
    "up": "intermediate.dense", "down": "output.dense", "patch": "vit.embeddings.patch_embeddings.projection",
    "class_embedding": Parameter("vit.embeddings.cls_token", ones=2),
    "position": Parameter("vit.embeddings.position_embeddings", ones=1), "final_norm": "vit.layernorm",
}  # fmt: skip
_VIT = {field: value for field, value in _IMAGES.items() if field != "qkv_bias"}
VIT = _SIGLIP._replace(
    model_type="vit", fixed={**_VIT, "patch_bias": True, "pooling": "first"}, parts=(class_and_patches, qkv_biases),
    defaults=_TOWER | _PIXELS | {"hidden_act": "gelu", "rms_norm_eps": 1e-12}, reads=(*_SIZES, "qkv_bias"),
    names=_VIT_NAMES, prefixes=("vit.",), layers="encoder.layer.",
    pictures=_SQUARE | {"resample": 2, "default_to_square": True},
    aside=r"(vit\.)?(pooler\..*|embeddings\.mask_token)|classifier\..*",
)  # fmt: skip


# ---- PaliGemma ----

_TOWERS = ("vision_tower.vision_model.", "vision_tower.", "model.vision_tower.vision_model.", "model.vision_tower.")
_DECODERS = ("language_model.model.", "model.language_model.")
_PROJECTORS: list[Name] = ["multi_modal_projector.linear", "model.multi_modal_projector.linear"]
_PALIGEMMA_VISION = SIGLIP_VISION._replace(
    model_type="paligemma", parts=(patches, attention_head, projected),
    fixed={**SIGLIP_VISION.fixed, "projector_bias": True}, defaults={**SIGLIP_VISION.defaults, "projection_dim": 2048},
    reads=(*SIGLIP_VISION.reads, "projection_dim"),
    names={**_vision_names(_TOWERS[0]), "projector": _PROJECTORS},
    prefixes=_TOWERS, part=("vision_config",), part_type="siglip_vision_model", shared=("projection_dim",),
)  # fmt: skip


def paligemma(decoder: Family) -> Family:
    """A text decoder, Gemma or Gemma 2, with vision: images and prompt are its prefix."""
    heads: list[Name] = ["language_model.lm_head", "lm_head"]
    outer: Names = {"embedding": f"{_DECODERS[0]}embed_tokens", "final_norm": f"{_DECODERS[0]}norm", "head": heads}
    return decoder._replace(
        model_type="paligemma", fixed={**decoder.fixed, "mask": "prefix", "first_position": 1},
        parts=(*decoder.parts, image_token),
        defaults={**decoder.defaults, "max_position_embeddings": 8192, "vocab_size": 256_000},
        fields={"image_token_index": "image_token_id"}, reads=(*decoder.reads, "image_token_index"),
        # it would turn off the causal mask, which the prefix mask replaces anyway
        neutral={**decoder.neutral, "use_bidirectional_attention": (True, False)},
        names={**decoder.names, **outer}, prefixes=_DECODERS, part=("text_config",), part_type=decoder.model_type,
        shared=("image_token_index", "image_token_id", "tie_word_embeddings"), vision=_PALIGEMMA_VISION,
    )  # fmt: skip


def families(gemma: Family, gemma2: Family) -> Mapping[str, Family]:
    """Families by architecture. gemma, gemma2: the decoders of that name."""
    first, second = paligemma(gemma), paligemma(gemma2)
    return {
        "SiglipModel": SIGLIP,
        "SiglipVisionModel": SIGLIP_VISION,
        "SiglipTextModel": SIGLIP_TEXT,
        "CLIPModel": CLIP,
        "CLIPVisionModel": CLIP_VISION,
        "CLIPVisionModelWithProjection": CLIP_VISION_PROJECTED,
        "CLIPTextModel": CLIP_TEXT,
        "CLIPTextModelWithProjection": CLIP_TEXT_PROJECTED,
        "ViTModel": VIT,
        "ViTForImageClassification": VIT,
        "PaliGemmaForConditionalGeneration": first._replace(others={gemma2.model_type: second}),
    }
