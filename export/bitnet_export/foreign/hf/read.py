"""A Hugging Face folder as a Source: config.json, safetensors, tokenizer, chat template, generation defaults."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.foreign.source import Source, SourceError, Ternary
from bitnet_export.foreign.ternary_values import ternary_values
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import NONE, ROLE, Key

from . import families
from .fields import Fields
from .folder import Folder
from .settings import read_pooling
from .shards import Entry, open_shards
from .tokenizer import tokenizer_of
from .weights import SKIPPED, Quantization, Weights

_DIVIDE_OR_MULTIPLY = {True: "scales divide", False: "scales multiply"}


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
    config = Fields(values, str(path / "config.json"))
    family = families.family_of(config)
    assumptions = families.refuse(config)
    quantization = Quantization.of(config)
    tensors = open_shards(folder)
    prefix = "model." if "model.embed_tokens.weight" in tensors else ""
    names = families.names_of(family, prefix)
    norm = _linear_norm(tensors, names, f"{prefix}layers.", config, quantization)
    tied = config.truth("tie_word_embeddings", family.ties)
    if family.head and "tie_word_embeddings" not in config and "lm_head.weight" not in tensors and not tied:
        tied = True
        assumptions.append("the head is the embedding: the folder has no lm_head.weight")
    pooling = "none"
    if not family.head:
        pooling, more = read_pooling(folder)
        assumptions += more
    model = families.model_config(config, family, tied=tied, linear_norm=bool(norm), pooling=pooling)
    declared = quantization is not None or family.masters or bool(norm)
    weights = Weights(tensors, names, f"{prefix}layers.", quantization, masters=declared, gemma=family.gemma, norm=norm)
    _check(model, weights, tensors, str(path))
    look = _look_at_floats if floats else _look
    model, found, more = look(model, weights, tensors, quantization)
    tokenizer, template, generation, words = tokenizer_of(folder, model.vocab_size)
    if norm and family.gemma:
        more.append("norms before projections multiply with their weight, the others with 1 + weight")
    yield Source(
        what=f"Hugging Face folder, {config['architectures'][0]}, {found}",
        config=model,
        load=weights.load,
        assumptions=tuple(assumptions + more + words),
        tokenizer=tokenizer,
        template=None if template is None else template.encode(),
        generation=generation,
        provenance={"source": path.resolve().name, "architecture": config["architectures"][0]},
    )


def _linear_norm(
    tensors: Mapping[str, Entry],
    names: Mapping[str, str],
    layers: str,
    config: Fields,
    quantization: Quantization | None,
) -> str:
    """What follows the name of a projection in that of the norm before it; empty where there are none."""
    found = {
        f".{kind}": [role for role in TERNARY_LINEARS if f"{layers}0.{names[role]}.{kind}.weight" in tensors]
        for kind in ("norm", "rms_norm")
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


def _check(model: ModelConfig, weights: Weights, tensors: Mapping[str, Entry], what: str) -> None:
    """Every tensor that is called for is there, in its shape, and no other."""
    used: set[str] = set()
    for spec in records.expected_tensors(model):
        if not records.ROLES[spec.key.role].startswith("rope_"):
            used |= weights.check(spec)
    if not model.has_head or model.tie_embeddings:  # transformers does not look at it then
        used |= {"lm_head.weight", "lm_head.weight_scale"}
    extra = [name for name in tensors if name not in used and not SKIPPED.fullmatch(name)]
    if extra:
        raise SourceError(f"{what}: tensor {min(extra)} is there, config.json does not call for it")


def _look(
    model: ModelConfig, weights: Weights, tensors: Mapping[str, Entry], quantization: Quantization | None
) -> tuple[ModelConfig, str, list[str]]:
    """What the weights are, told from the first layer and the tables: the configuration with it, words, assumptions."""
    weights.floats = _left_alone(model, weights, quantization)
    roles = [role for role in TERNARY_LINEARS if role not in weights.floats]
    if not roles:
        raise SourceError("modules_to_not_convert names every projection: nothing of this model is ternary")
    keys = [Key(0, 0, ROLE[role], NONE, 0) for role in roles]
    scopes = [tensor.scope for tensor in map(weights.load, keys) if isinstance(tensor, Ternary)]
    tables = [
        role for role in ("embedding", "head") if role == "embedding" or (model.has_head and not model.tie_embeddings)
    ]
    ternary = [isinstance(weights.load(Key(0, NONE, ROLE[role], NONE, 0)), Ternary) for role in tables]
    weights.tables = dict.fromkeys(tables, all(ternary))
    model = model.replace(ternary=roles, weight_scale=encodings.SCOPE_NAMES[max(scopes)])
    if all(ternary):
        model = model.replace(head_format="ternary")
    entry = tensors[weights.name(keys[0])]
    assumptions: list[str] = []
    if entry.dtype == "U8":
        assert quantization is not None
        return model, f"packed ternary weights, {_DIVIDE_OR_MULTIPLY[quantization.divides]}", assumptions
    kind = f"{entry.dtype} weights"
    if ternary_values(entry.floats()) is None:
        if quantization is None:
            assumptions.append("config.json does not say how the weights are quantized: as BitNet b1.58 does")
        return model, f"{kind}, float masters, quantized as the model's own code does", assumptions
    if quantization is None:
        assumptions.append("activations are quantized to int8 for each token; the published model leaves them float")
    return model, f"{kind}, ternary already with one scale a {model.weight_scale}", assumptions


def _look_at_floats(
    model: ModelConfig, weights: Weights, tensors: Mapping[str, Entry], quantization: Quantization | None
) -> tuple[ModelConfig, str, list[str]]:
    """`_look` for training. Raises SourceError: packed weights, or floats that are ternary."""
    left = _left_alone(model, weights, quantization)
    roles = [role for role in TERNARY_LINEARS if role not in left] if weights.masters else []
    weights.floats, weights.tables = frozenset(TERNARY_LINEARS), {"embedding": False, "head": False}
    entries = [tensors[weights.name(Key(0, 0, ROLE[role], NONE, 0))] for role in TERNARY_LINEARS]
    for entry in entries:
        if entry.dtype == "U8" or ternary_values(entry.floats()) is not None:
            raise SourceError(
                f"{entry.what} is ternary already: the float masters that training needs cannot be had from it, and "
                "quantized again its scale would shrink. Take the revision with masters (2B-4T: the repository that "
                "ends in -bf16, Falcon-E: the revision prequantized) or a full-precision model"
            )
    kind = "float masters of a ternary model" if roles else "a full-precision model"
    return model.replace(ternary=roles, head_format="f32"), f"{entries[0].dtype} weights, {kind}", []


def _left_alone(model: ModelConfig, weights: Weights, quantization: Quantization | None) -> frozenset[str]:
    """Roles of projections that stay float, in every layer."""
    if quantization is None:
        return frozenset()
    if quantization.online and quantization.converts("lm_head") and model.has_head:
        raise SourceError("modules_to_not_convert does not name lm_head: a head quantized from floats is not supported")
    roles = set()
    for role in TERNARY_LINEARS:
        modules = [weights.module(Key(0, layer, ROLE[role], NONE, 0)) for layer in range(model.n_layers)]
        left = [module for module in modules if not quantization.converts(module)]
        if left and len(left) < len(modules):
            raise SourceError(
                f"modules_to_not_convert names {left[0]}; a projection stays float in all layers or in none"
            )
        roles |= {role} if left else set()
    return frozenset(roles)
