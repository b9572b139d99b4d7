"""One stack of a model folder: its configuration, and its tensors, checked against it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.foreign.source import SourceError
from bitnet_export.packed import records
from bitnet_export.packed.records import NONE, ROLE, Key

from .configuration import is_quick, model_config, side
from .family import Family
from .fields import Fields
from .folder import Folder
from .known import refuse
from .look import look, look_at_masters
from .pictures import read_pictures
from .places import Places
from .settings import read_pooling
from .shards import Entry, rounded
from .weights import Quantization, Weights

_MASTERS = (
    "the float weights are the model itself; if they are masters of a ternary one, as in the revision prequantized of "
    'Falcon-E, write "quantization_config": {"quant_method": "bitnet", "linear_class": "autobitlinear", '
    '"quantization_mode": "online"} into config.json'
)


class Stack(NamedTuple):
    """A stack, and findings about it."""

    config: ModelConfig
    weights: Weights
    used: set[str]  # names of its tensors in the folder
    found: str  # a description of its weights
    pictures: Mapping[str, str]  # how an image becomes a square
    assumptions: list[str]


def open_stack(
    folder: Folder, family: Family, values: Mapping[str, Any], tensors: Mapping[str, Entry], *, floats: bool
) -> Stack:
    """values: of config.json. floats: as in `open_folder`. Raises SourceError."""
    config = family.described(values, str(folder.path / "config.json"))
    assumptions = refuse(config, family.reads, family.neutral)
    quantization = Quantization.of(config)
    places = Places.of(tensors, family.names, family.prefixes, family.layers)
    if family.head and config.truth("tie_word_embeddings"):
        places = places.with_embedding()
    places = places._replace(norm=_linear_norm(places, config, quantization))
    fixed, more = _surroundings(folder, config, family, places)
    assumptions += more
    fixed |= _similarity(family, places)
    pictures: Mapping[str, str] = {}
    if "image_size" in family.reads:
        pixels, pictures, more = read_pictures(
            folder, side(config, "image_size"), config.integer("num_channels"), family.pictures
        )
        fixed |= pixels
        assumptions += more
    model = model_config(config, {**family.fixed, **fixed}, family.parts)
    if model.embedding_scale != 1:
        model = model.replace(embedding_scale=rounded(model.embedding_scale, places.embedding().dtype))
    quick = is_quick(config)
    if quick and (model.ffn != "plain" or model.sub_norm or model.linear_norm):
        raise SourceError(
            f"{config.what}: {config.name('hidden_act')} is 'quick_gelu' in an FFN that is gated or normed"
        )
    if quick and not floats:
        assumptions.append(
            "quick GELU becomes SiLU, with 1.702 in the matrices before and after it: F16 rounds them once more, by up "
            "to 5e-4; --linears f32 by 6e-8"
        )
    rows = model.max_context if pictures else config.integer("max_position_embeddings")
    places = places._replace(
        one_plus=family.one_plus, transposed=family.transposed, quick=quick, skipped=rows - model.max_context,
        interleaved=model.head_dim if config.truth("rope_interleaved") else 0,
        patch=(model.channels, model.patch_size, model.patch_size),
    )  # fmt: skip
    weights = Weights(places, quantization, masters=bool(quantization or family.masters or places.norm))
    used = _check(model, weights, places) | set(family.similar)
    model, found, more = (look_at_masters if floats else look)(model, weights, quantization)
    if family.model_type == "llama" and not weights.masters and not model.ternary:
        more = [*more, _MASTERS]  # programs that train them load a plain Llama, so the folder does not say
    return Stack(model, weights, used, found, pictures, assumptions + more)


def _surroundings(folder: Folder, config: Fields, family: Family, places: Places) -> tuple[dict[str, Any], list[str]]:
    """Properties of the model that its tensors or other files determine, and assumptions."""
    assumptions, tied = [], config.truth("tie_word_embeddings")
    head, table = (places.module(Key(0, NONE, ROLE[role], NONE, 0)) for role in ("head", "embedding"))
    if family.head and "tie_word_embeddings" not in config and f"{head}.weight" not in places.tensors:
        tied = True
        assumptions.append(f"the head is the embedding: the folder has no {head}.weight")
    elif family.head and tied and _is_another(places.tensors.get(f"{head}.weight"), places.embedding()):
        tied = False  # as in transformers 5; earlier versions ignored the head
        assumptions.append(f"the head is {head}.weight, not the embedding: tie_word_embeddings is not followed")
    elif family.head and not tied and f"{table}.weight" in places.tensors and f"{head}.weight" not in places.tensors:
        raise SourceError(
            f"{config.what}: tie_word_embeddings is false and tensor {head}.weight is missing; if the head is the "
            "embedding write true, else download the folder again"
        )
    if places.norm and family.one_plus:
        assumptions.append("norms before projections multiply with their weight, the others with 1 + weight")
    if "rope_interleaved" in family.reads and "rope_interleaved" not in config:
        assumptions.append("RoPE turns the halves of a head; rope_interleaved = true in config.json: its neighbours")
    values: dict[str, Any] = {
        "tie_embeddings": tied,
        "head_bias": family.head_bias and f"{head}.bias" in places.tensors,
        "has_head": family.head,
        "linear_norm": bool(places.norm),
    }
    if not family.head and family.pooling:
        values["pooling"], more = read_pooling(folder, family.pooling)
        assumptions += more
    return values, assumptions


def _similarity(family: Family, places: Places) -> dict[str, float]:
    """Similarity of image and text: e^scale · (image · text) + bias."""
    found = {}
    for name, field in zip(family.similar, ("similarity_scale", "similarity_bias"), strict=False):
        entry = places.entry(name, "it says how alike an image and a text are")
        value = float(entry.number())
        if not abs(value) < 80:
            raise SourceError(f"{entry.what} is {value}, expected a number from -80 to 80")
        found[field] = math.exp(value) if field == "similarity_scale" else value
    return found


def _is_another(head: Entry | None, table: Entry) -> bool:
    """Whether there is a head that differs from the embedding."""
    if head is None or "U8" in (head.dtype, table.dtype):
        return False
    if head.shape != table.shape:
        return True
    a, b = head.floats(), table.floats()
    rows = table.shape[0]
    parts = [(i, min(i + 4096, rows)) for i in range(0, rows, 4096)]
    return not all(np.array_equal(a.rows(*part), b.rows(*part), equal_nan=True) for part in parts)


def _linear_norm(places: Places, config: Fields, quantization: Quantization | None) -> str:
    """The suffix of a projection's name for the norm before it; empty without such norms."""
    modules = {role: places.module(Key(0, 0, ROLE[role], NONE, 0)) for role in TERNARY_LINEARS}
    found = {
        kind: [role for role, module in modules.items() if f"{module}{kind}.weight" in places.tensors]
        for kind in (".norm", ".rms_norm")
    }
    norm = max(found, key=lambda kind: len(found[kind]))
    wanted = quantization is not None and quantization.linear_norm
    if not found[norm] and not wanted:
        return ""
    if len(found[norm]) != len(TERNARY_LINEARS):
        raise SourceError(
            f"{config.what}: of a layer's projections {', '.join(found[norm]) or 'none'} have a norm before them, "
            "expected all seven or none"
        )
    if norm == ".rms_norm":
        if quantization is None or not wanted:
            raise SourceError(
                f"{config.what}: tensors {norm[1:]} are there, but not use_rms_norm in quantization_config"
            )
        if quantization.norm_eps != config.number("rms_norm_eps"):
            raise SourceError(
                f"{config.what}: rms_norm_eps is {config['rms_norm_eps']}, that of quantization_config is "
                f"{quantization.norm_eps}; only one for all norms is supported"
            )
    return norm


def _check(model: ModelConfig, weights: Weights, places: Places) -> set[str]:
    """Names of the required tensors. Raises SourceError if one is missing, or has another shape."""
    used: set[str] = set()
    for spec in records.expected_tensors(model):
        if not records.ROLES[spec.key.role].startswith("rope_"):
            used |= weights.check(spec, model.n_experts)
    if not model.has_head or model.tie_embeddings:  # if present, it is a copy of the embedding
        head = places.module(Key(0, NONE, ROLE["head"], NONE, 0))
        if model.has_head:
            _refuse_scale(places.tensors.get(f"{head}.weight_scale"))
        used |= {f"{head}.weight", f"{head}.weight_scale"}
    return used


def _refuse_scale(entry: Entry | None) -> None:
    """Raises SourceError if a tied head is scaled, which transformers supports and the engine does not."""
    if entry is not None and (scale := float(entry.number())) != 1:
        raise SourceError(
            f"{entry.what} is {scale}, expected 1: the head is the embedding; multiply the scale into a head of its own"
        )
