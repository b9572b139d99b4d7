"""The architecture of transformers that computes a packed vision model, and its configuration files.

Source: as `architectures.py`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.foreign.outgoing import SIZES, Graph, nearest, rope_problems, scale_problems
from bitnet_export.foreign.side_files import generation_of, pad_token_id
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import ROLES

from . import architectures as plain
from . import images
from .architectures import Architecture
from .families import FAMILIES
from .family import QUANTIZATION, Family
from .places import LINEAR_ASIDE, Places

_FREE = (
    *SIZES, "activation", "tie_embeddings", "ternary", "weight_scale", "head_format", "dropout", "out_dim",
    "image_size", "patch_size", "channels", "pixel_mean", "pixel_std", "similarity_scale",
)  # fmt: skip
_LAYERS: dict[str, tuple[Any, ...]] = {
    "norm": ("layer",), "norm_bias": (True,), "position": ("learned",), "ffn": ("plain",), "qkv_bias": (True,),
    "o_bias": (True,), "ffn_bias": (True,), "has_head": (False,),
}  # fmt: skip
_SEES = _LAYERS | {"input": ("images",), "mask": ("bidirectional",)}
_SIGLIP = _SEES | {"patch_bias": (True,), "pooling": ("attention",)}
_PALIGEMMA = _SIGLIP | {"pooling": ("none",), "projector_bias": (True,)}
_CLIP = _SEES | {"class_token": (True,), "embedding_norm": (True,), "pooling": ("first",)}
_VIT = _SEES | {"class_token": (True,), "patch_bias": (True,), "pooling": ("first",), "out_dim": (0,)}
_VIT |= {"qkv_bias": (True, False)}
_SIGLIP_TEXT = _LAYERS | {"mask": ("bidirectional",), "pooling": ("last",), "projector_bias": (True,)}
_CLIP_TEXT = _LAYERS | {"pooling": ("last",)}
_ENDS = ("CLIPModel", "CLIPTextModel", "CLIPTextModelWithProjection")  # take the vector of the first end token
_HEADS = {"vit": ("pooler", "classifier")}  # linear layers that transformers adds
_FILTERS = {"bilinear": 2, "bicubic": 3}


class _Candidate(NamedTuple):
    """A class of transformers, and the computation of each of its stacks."""

    name: str
    families: tuple[Family, ...]
    graphs: tuple[Graph, ...]

    def differences(self, file: PackedFile) -> list[str]:
        """What it computes otherwise, a phrase each."""
        found = []
        for graph, c in zip(self.graphs, file.configs, strict=True):
            tower = "layer" in graph.computes.get("norm", ())
            also = _of_tower(c) if tower else _of_decoder(file, c)
            found += [f"{c.name}: {problem}" for problem in (*graph.differences(c), *also)]
        return found

    def problems(self, file: PackedFile) -> list[str]:
        """The same, and why its files cannot be written."""
        found = []
        if self.name in _ENDS and not generation_of(file)["eos_token_ids"]:
            found.append("the file names no end token, whose vector it takes for that of a text")
        for stack, c in enumerate(file.configs):
            if len(set(_quantized(file, stack))) > 1:
                found.append(f"{c.name}: some matrices of its layers are quantized, only all or none can be written")
        return found + self.differences(file)


def sees_any(configs: Iterable[ModelConfig]) -> bool:
    return any(c.input == "images" for c in configs)


def is_of_images(file: PackedFile) -> bool:
    """Whether it has vision, or is a text tower of one of these architectures."""
    if sees_any(file.configs):
        return True
    return len(file.configs) == 1 and any(not each.differences(file) for each in _candidates(file.configs))


def architecture_of_images(file: PackedFile) -> Architecture:
    """The architecture that computes this model, or the nearest with a phrase for each difference."""
    candidates = {each.name: each for each in _candidates(file.configs) if len(each.families) == len(file.configs)}
    name, problems = nearest("transformers", {name: each.problems(file) for name, each in candidates.items()})
    main, *others = candidates[name].families
    name = name if name in FAMILIES else "PaliGemmaForConditionalGeneration"
    places = [_places(family, c) for family, c in zip((main, *others), file.configs, strict=True)]
    behind = tuple(zip(others, places[1:], strict=True))
    return Architecture(name, main, places[0], problems, behind)


def _places(family: Family, c: ModelConfig) -> Places:
    places = Places.written(family.names, family.prefixes[0], family.layers, whole=bool(family.part))
    return places._replace(patch=(c.channels, c.patch_size, c.patch_size))


def _candidates(configs: tuple[ModelConfig, ...]) -> list[_Candidate]:
    main = configs[0]

    def tower(name: str, computes: Mapping[str, tuple[Any, ...]], *free: str) -> Graph:
        return Graph(name, computes, tuple(field for field in (*_FREE, *free) if field not in computes))

    text, vision = images.SIGLIP, images.SIGLIP.vision
    assert vision and images.CLIP.vision
    projected = {"out_dim": (main.out_dim or -1,)}
    if not sees_any(configs):
        text_alone = (
            ("SiglipTextModel", images.SIGLIP_TEXT, _SIGLIP_TEXT),
            ("CLIPTextModelWithProjection", images.CLIP_TEXT_PROJECTED, _CLIP_TEXT | projected),
            ("CLIPTextModel", images.CLIP_TEXT, _CLIP_TEXT | {"out_dim": (0,)}),
        )
        return [_Candidate(name, (family,), (tower("a text tower", says),)) for name, family, says in text_alone]
    found = [
        _Candidate("CLIPVisionModel", (images.CLIP_VISION,), (tower("CLIP", _CLIP | {"out_dim": (0,)}),)),
        _Candidate(
            "CLIPVisionModelWithProjection", (images.CLIP_VISION_PROJECTED,), (tower("CLIP", _CLIP | projected),)
        ),
        _Candidate("ViTModel", (images.VIT,), (tower("ViT", _VIT),)),
        _Candidate("SiglipVisionModel", (images.SIGLIP_VISION,), (tower("SigLIP", _SIGLIP),)),
        _Candidate(
            "SiglipModel", (text, vision), (tower("SigLIP", _SIGLIP_TEXT, "similarity_bias"), tower("SigLIP", _SIGLIP))
        ),
        _Candidate("CLIPModel", (images.CLIP, images.CLIP.vision), (tower("CLIP", _CLIP_TEXT), tower("CLIP", _CLIP))),
    ]
    first = FAMILIES["PaliGemmaForConditionalGeneration"]
    for kind, family in {first.part_type: first, **first.others}.items():
        gemma = plain.graphs(main)[kind]
        computes = {**gemma.computes, "mask": ("prefix",), "first_position": (0, 1), "linear_norm": (False,)}
        free = tuple(name for name in (*gemma.free, "image_token") if name not in computes)
        assert family.vision
        graphs = Graph(gemma.name, computes, free), tower("SigLIP", _PALIGEMMA)
        found.append(_Candidate(f"PaliGemma of {kind}", (family, family.vision), graphs))
    return found


def _of_tower(c: ModelConfig) -> list[str]:
    found = scale_problems(c)
    if c.n_heads * c.head_dim != c.dim or c.n_kv_heads != c.n_heads:
        found.append(f"heads are {c.n_heads}/{c.n_kv_heads} of {c.head_dim}, it wants one size that makes up dim")
    return found


def _of_decoder(file: PackedFile, c: ModelConfig) -> list[str]:
    found = [] if c.post_norm else scale_problems(c)
    return found + rope_problems(file, c.replace(first_position=0))


# ---- files of the folder ----


def describe_images(file: PackedFile, architecture: Architecture, generation: Mapping[str, Any]) -> dict[str, Any]:
    """config.json. generation: of METADATA."""
    families = [architecture.of(stack)[0] for stack in range(len(file.configs))]
    parts = [_part(family, c) for family, c in zip(families, file.configs, strict=True)]
    head: dict[str, Any] = {"architectures": [architecture.name], "model_type": architecture.family.model_type}
    head["dtype"] = "float32"
    if plain.quantizes(file):
        head[QUANTIZATION] = plain.quantization(file.configs[0], _left_alone(file, architecture))
    ends = generation.get("eos_token_ids")
    end = ({"eos_token_id": ends[0]} if ends else {}) | pad_token_id(generation)
    if len(parts) == 1:
        return head | parts[0] | end
    main, vision = file.configs
    whole: dict[str, Any] = {"text_config": parts[0] | end, "vision_config": parts[1]}
    if architecture.family.model_type == "clip":
        whole["projection_dim"] = vision.out_dim  # a text's vector is that of its end token
    if main.image_token:
        whole |= {"image_token_index": main.image_token, "projection_dim": vision.out_dim, "hidden_size": main.dim}
        whole |= {"tie_word_embeddings": main.tie_embeddings}
    return head | whole


def _left_alone(file: PackedFile, architecture: Architecture) -> list[str]:
    """Float modules, by their names in transformers' memory and in folders."""
    left = [] if plain.head_is_quantized(file) else ["lm_head"]
    for record in file.tensors.values():
        if ROLES[record.key.role] in LINEAR_ASIDE and record.key.part == 0:
            left.append(architecture.of(record.key.stack)[1].module(record.key))
    for stack in range(len(file.configs)):
        family, places = architecture.of(stack)
        if not any(_quantized(file, stack)):
            name = places.layers.split(".")[0]
            left += [name, f"model.{name}"]
        left += _HEADS.get(family.model_type, ())
    return left


def _quantized(file: PackedFile, stack: int) -> list[bool]:
    """For each matrix of a stack's layers, whether it is quantized."""
    return [r.quantized for r in plain.projections(file) if r.key.stack == stack]


def _part(family: Family, c: ModelConfig) -> dict[str, Any]:
    kind = family.part_type or family.model_type
    if c.has_head:
        return plain.fields_of(c, family._replace(model_type=kind))
    values = {
        "model_type": kind, "hidden_size": c.dim, "intermediate_size": c.ffn_dim, "num_hidden_layers": c.n_layers,
        "num_attention_heads": c.n_heads, "hidden_act": plain.ACTIVATIONS[c.activation], "layer_norm_eps": c.norm_eps,
    }  # fmt: skip
    if c.input == "images":
        values |= {"image_size": c.image_size, "patch_size": c.patch_size, "num_channels": c.channels}
        values |= {"vision_use_head": c.pooling == "attention"} if kind.startswith("siglip") else {}
        values |= {"qkv_bias": c.qkv_bias} if kind == "vit" else {}
    else:
        values |= {"vocab_size": c.vocab_size, "max_position_embeddings": c.max_context}
    if c.out_dim:
        values["projection_size" if kind == "siglip_text_model" else "projection_dim"] = c.out_dim
    return values


def similarity(c: ModelConfig, architecture: Architecture) -> dict[str, NDArray[np.float32]]:
    """The tensors of the similarity of image and text."""
    names = architecture.family.similar
    numbers = np.float32(math.log(c.similarity_scale or 1.0)), np.float32(c.similarity_bias)
    shape = (1,) if len(names) > 1 else ()
    return {name: np.full(shape, number) for name, number in zip(names, numbers, strict=False)}


def preprocessor(c: ModelConfig, generation: Mapping[str, Any]) -> dict[str, Any]:
    """preprocessor_config.json. c: of the vision stack; generation: of METADATA."""
    made = {"resize": "stretch", "filter": "bicubic"} | dict(generation.get("pictures") or {})
    square = {"height": c.image_size, "width": c.image_size}
    crop = made["resize"] == "crop"
    return {
        "image_processor_type": "CLIPImageProcessor" if crop else "SiglipImageProcessor", "do_resize": True,
        "size": {"shortest_edge": c.image_size} if crop else square, "do_center_crop": crop, "crop_size": square,
        "resample": _FILTERS[made["filter"]], "do_rescale": True, "rescale_factor": 1 / 255, "do_normalize": True,
        "do_convert_rgb": c.channels == 3, "image_mean": list(c.pixel_mean), "image_std": list(c.pixel_std),
        "image_seq_length": c.max_context,
    }  # fmt: skip
