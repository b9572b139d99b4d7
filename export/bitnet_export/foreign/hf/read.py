"""A Hugging Face folder as a Source: config.json, safetensors, tokenizer, chat template, generation defaults."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.foreign.source import Source, SourceError
from bitnet_export.packed import records
from bitnet_export.packed.records import NONE, ROLE, Key

from .configuration import model_config
from .families import Family, family_of
from .fields import Fields
from .folder import Folder
from .known import refuse
from .look import look, look_at_masters
from .pickled import open_checkpoint
from .places import Places
from .settings import read_pooling
from .shards import SINGLE, Entry, open_shards, rounded
from .tokenizer import tokenizer_of
from .weights import SKIPPED, Quantization, Weights


@contextmanager
def open_folder(path: Path, *, floats: bool = False) -> Iterator[Source]:
    """Open a model folder; shapes and names of all tensors are checked now, their values as they are loaded.

    floats: to train it. All matrices come as floats, `config.ternary` names those that the model quantizes,
    none of a full-precision model, and weights that are ternary already are refused.
    Raises SourceError naming what was found and what was expected, or an OSError.
    """
    folder = Folder(path)
    values = folder.json("config.json")
    if not values:
        raise SourceError(f"{path} has no config.json; expected a Hugging Face folder")
    architecture, family = family_of(values, str(path / "config.json"))
    config = Fields(values, str(path / "config.json"), theirs=family.fields, defaults=family.defaults)
    assumptions = refuse(config, family.reads, family.neutral)
    quantization, (tensors, more) = Quantization.of(config), _tensors(folder, family)
    assumptions += more
    places = Places.of(tensors, family.names, family.prefix, family.layers)
    places = places._replace(norm=_linear_norm(places, config, quantization))
    fixed, more = _surroundings(folder, config, family, places)
    model = model_config(config, {**family.fixed, **fixed}, family.parts)
    if model.embedding_scale != 1:
        model = model.replace(embedding_scale=rounded(model.embedding_scale, places.embedding().dtype))
    places = places._replace(
        one_plus=family.one_plus, transposed=family.transposed,
        interleaved=model.head_dim if config.truth("rope_interleaved") else 0,
        skipped=config.integer("max_position_embeddings") - model.max_context,
    )  # fmt: skip
    weights = Weights(places, quantization, masters=bool(quantization or family.masters or places.norm))
    assumptions += more + _check(model, weights, tensors, str(path), family.aside)
    model, found, more = (look_at_masters if floats else look)(model, weights, quantization)
    tokenizer, template, generation, words = tokenizer_of(folder, model.vocab_size)
    yield Source(
        what=f"{family.what}, {architecture}, {found}",
        config=model,
        load=weights.load,
        assumptions=tuple(assumptions + more + words),
        tokenizer=tokenizer,
        template=None if template is None else template.encode(),
        generation=generation,
        provenance={"source": path.resolve().name, "architecture": architecture},
    )


def _tensors(folder: Folder, family: Family) -> tuple[dict[str, Entry], list[str]]:
    """And what was assumed."""
    if family.pickled and not folder.find(SINGLE):
        return open_checkpoint(folder)
    return open_shards(folder), []


def _surroundings(folder: Folder, config: Fields, family: Family, places: Places) -> tuple[dict[str, Any], list[str]]:
    """What the folder says of the model beside its layers, and what was assumed."""
    assumptions, pooling, tied = [], "none", config.truth("tie_word_embeddings")
    if family.head and "tie_word_embeddings" not in config and "lm_head.weight" not in places.tensors:
        tied = True
        assumptions.append("the head is the embedding: the folder has no lm_head.weight")
    if not family.head:
        pooling, assumptions = read_pooling(folder, family.pooling)
    if places.norm and family.one_plus:
        assumptions.append("norms before projections multiply with their weight, the others with 1 + weight")
    biased = family.head_bias and "lm_head.bias" in places.tensors
    if "rope_interleaved" in family.reads and "rope_interleaved" not in config:
        assumptions.append("RoPE turns the halves of a head; rope_interleaved = true in config.json: its neighbours")
    values = {
        "tie_embeddings": tied,
        "head_bias": biased,
        "has_head": family.head,
        "linear_norm": bool(places.norm),
        "pooling": pooling,
    }
    return values, assumptions


def _linear_norm(places: Places, config: Fields, quantization: Quantization | None) -> str:
    """What follows the name of a projection in that of the norm before it; empty where there are none."""
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


def _check(model: ModelConfig, weights: Weights, tensors: Mapping[str, Entry], what: str, aside: str) -> list[str]:
    """Every tensor that is called for is there, in its shape, and no other. Returns what was left out."""
    used: set[str] = set()
    for spec in records.expected_tensors(model):
        if not records.ROLES[spec.key.role].startswith("rope_"):
            used |= weights.check(spec, model.n_experts)
    if not model.has_head or model.tie_embeddings:  # transformers does not look at it then
        used |= {"lm_head.weight", "lm_head.weight_scale"}
    extra = [name for name in tensors if name not in used and not SKIPPED.fullmatch(name)]
    left = [name for name in extra if aside and re.fullmatch(aside, name)]
    if len(left) < len(extra):
        raise SourceError(f"{what}: tensor {min(set(extra) - set(left))} is there, config.json does not call for it")
    words = f"{len(left)} tensors of heads are left out, such as {min(left, default='')}: the encoder alone is taken"
    return [words] if left else []
