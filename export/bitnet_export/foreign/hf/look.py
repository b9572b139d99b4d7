"""The kind of a model folder's weights: packed, ternary as floats, masters that the model quantizes, or plain floats.

Detected from the first layer, or the first that is not all zero, and the tables.
"""

from __future__ import annotations

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.foreign.source import Floats, SourceError, Ternary
from bitnet_export.foreign.ternary_values import ternary_values
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import NONE, PER_EXPERT, ROLE, Key

from .places import LINEAR_ASIDE
from .weights import Quantization, Weights

_ROWS = 1024  # rows examined at a time
Found = tuple[ModelConfig, str, list[str]]  # the completed configuration, a description, assumptions

_ONLINE = (
    "the weights are ternary already and stay as they are; quantization_config says online, so transformers quantizes "
    "them again, which makes their scales smaller"
)
_DIVIDE_OR_MULTIPLY = {True: "scales divide", False: "scales multiply"}


def look(model: ModelConfig, weights: Weights, quantization: Quantization | None) -> Found:
    """Examine a folder to be converted."""
    weights.floats = _left_alone(model, weights, quantization)
    telling = _telling(model, weights)
    if not weights.masters:
        weights.floats = frozenset(role for role, key in telling.items() if not _is_ternary(weights, key))
    roles = [role for role in telling if role not in weights.floats]
    if not roles:
        return _full_precision(model, weights)
    keys = [telling[role] for role in roles]
    scopes = [tensor.scope for tensor in map(weights.load, keys) if isinstance(tensor, Ternary)]
    tables = ["embedding"] * (model.input == "tokens") + ["head"] * (model.has_head and not model.tie_embeddings)
    ternary = [isinstance(weights.load(Key(0, NONE, ROLE[role], NONE, 0)), Ternary) for role in tables]
    weights.tables = dict.fromkeys(tables, all(ternary))
    model = model.replace(ternary=roles, weight_scale=encodings.SCOPE_NAMES[max(scopes)])
    if model.has_head and all(ternary):
        model = model.replace(head_format="ternary")
    dtype = weights.entry(keys[0]).dtype
    if dtype == "U8":
        assert quantization is not None
        return model, f"packed ternary weights, {_DIVIDE_OR_MULTIPLY[quantization.divides]}", []
    if weights.masters and not _is_ternary(weights, keys[0]):
        assumed = "config.json does not say how the weights are quantized: as BitNet b1.58 does"
        words = f"{dtype} weights, float masters, quantized as the model's own code does"
        return model, words, [assumed] if quantization is None else []
    said: list[str] = []
    if weights.floats and not weights.masters:  # a single damaged value can cause that, and it costs much
        names = ", ".join(weights.module(key) for role, key in telling.items() if role in weights.floats)
        said = [f"{names} is not ternary: these projections stay floats in every layer, the others are ternary"]
    if quantization is None:
        said = ["activations are quantized to int8 for each token; the published model leaves them float", *said]
    elif quantization.online:
        said = [_ONLINE, *said]
    return model, f"{dtype} weights, ternary already with one scale a {model.weight_scale}", said


def look_at_masters(model: ModelConfig, weights: Weights, quantization: Quantization | None) -> Found:
    """Examine a folder to be trained. Raises SourceError for packed weights, or floats that are ternary."""
    left = _left_alone(model, weights, quantization)
    roles = [role for role in _linears(model) if role not in left] if weights.masters else []
    weights.floats, weights.tables = frozenset(TERNARY_LINEARS), {"embedding": False, "head": False}
    for key in _telling(model, weights).values():
        entry = weights.entry(key)
        if entry.dtype == "U8" or _is_ternary(weights, key):
            raise SourceError(
                f"{entry.what} is ternary already: the float masters that training needs cannot be recovered from it, "
                "and quantized again its scale would shrink. Take the revision with masters (2B-4T: the repository "
                "that ends in -bf16, Falcon-E: the revision prequantized) or a full-precision model"
            )
    dtype = weights.entry(_first(model, "q")).dtype
    kind = "float masters of a ternary model" if roles else "a full-precision model"
    return model.replace(ternary=roles, head_format="f32"), f"{dtype} weights, {kind}", []


def _full_precision(model: ModelConfig, weights: Weights) -> Found:
    weights.tables = {"embedding": False, "head": False}
    dtype = weights.entry(_first(model, "q")).dtype
    return model.replace(ternary=[]), f"{dtype} weights, a full-precision model: nothing of it is ternary", []


def _linears(model: ModelConfig) -> list[str]:
    return [role for role in TERNARY_LINEARS if role != "gate" or model.ffn == "gated"]


def _first(model: ModelConfig, role: str, layer: int = 0) -> Key:
    """The key of a projection, of the first expert if there are several."""
    expert = 0 if model.n_experts and ROLE[role] in PER_EXPERT else NONE
    return Key(0, layer, ROLE[role], expert, 0)


def _telling(model: ModelConfig, weights: Weights) -> dict[str, Key]:
    """For each role the key of its projection in the first layer where it is not all zero: zeros reveal nothing."""
    found = {}
    for role in _linears(model):
        keys = [_first(model, role, layer) for layer in range(model.n_layers)]
        says = (key for key in keys if weights.entry(key).dtype == "U8" or _says(weights.matrix(key)))
        found[role] = next(says, keys[0])
    return found


def _says(matrix: Floats) -> bool:
    rows = matrix.shape[0]
    return any(matrix.rows(first, min(first + _ROWS, rows)).any() for first in range(0, rows, _ROWS))


def _is_ternary(weights: Weights, key: Key) -> bool:
    """Whether a projection holds codes, or floats with ternary values."""
    if weights.entry(key).dtype == "U8":
        return True
    found = ternary_values(weights.matrix(key))
    return found is not None and bool(found.codes.any())


def _left_alone(model: ModelConfig, weights: Weights, quantization: Quantization | None) -> frozenset[str]:
    """Roles of projections that stay float, in every layer."""
    if quantization is None:
        return frozenset()
    if quantization.online and quantization.converts("lm_head") and model.has_head:
        raise SourceError("modules_to_not_convert does not name lm_head: a head quantized from floats is not supported")
    for key in (spec.key for spec in records.expected_tensors(model) if records.ROLES[spec.key.role] in LINEAR_ASIDE):
        if quantization.converts(module := weights.module(key)):
            raise SourceError(f"modules_to_not_convert does not name {module}: quantized it is not supported")
    roles = set()
    for role in _linears(model):
        modules = [weights.module(_first(model, role, layer)) for layer in range(model.n_layers)]
        left = [module for module in modules if not quantization.converts(module)]
        if left and len(left) < len(modules):
            raise SourceError(
                f"modules_to_not_convert names {left[0]}; a projection stays float in all layers or in none"
            )
        roles |= {role} if left else set()
    return frozenset(roles)
