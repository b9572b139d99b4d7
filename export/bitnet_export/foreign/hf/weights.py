"""The tensors of a model folder in our terms: unpacked, quantized as in the model's own code, or unchanged.

Packed form and scales: integrations/bitnet.py of transformers 5.23. Four codes per byte; bits 2i, 2i + 1
of byte row r hold code + 1 of row i·N/4 + r. `BitLinear` divides by weight_scale, `AutoBitLinear`
multiplies by it, after adding the bias.
"""

from __future__ import annotations

import re
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import TERNARY_LINEARS
from bitnet_export.foreign.source import Floats, SourceError, Tensor, Ternary
from bitnet_export.foreign.ternary_values import ternary_values
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import Key, Spec

from .fields import Fields
from .places import Places, mapped
from .shards import Entry

SKIPPED = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|masked_bias|embeddings\.position_ids)|(transformer\.)?h\.\d+\.attn\.bias"
    r"|blocks\.\d+\.attn\.rope\w*\.\w+"
)
"""Tensors that older programs wrote and that no computation uses."""

_TABLES = ("embedding", "head")


class Quantization(NamedTuple):
    """quantization_config with quant_method bitnet."""

    divides: bool  # by weight_scale: BitLinear
    online: bool
    linear_norm: bool
    norm_eps: float
    left_alone: frozenset[str] | None  # modules that stay float; None: the head

    @classmethod
    def of(cls, config: Fields) -> Quantization | None:
        """None if config.json has none. Raises SourceError for another kind."""
        given = config.object("quantization_config")
        if given is None:
            return None
        values = Fields(given, f"{config.what}: quantization_config")
        for name, expected, default in (
            ("quant_method", ("bitnet",), None),
            ("linear_class", ("bitlinear", "autobitlinear"), "bitlinear"),
            ("quantization_mode", ("offline", "online"), "offline"),
        ):
            if values.get(name, default) not in expected:
                raise SourceError(
                    f"{values.what}: {name} is {values.get(name)!r:.40}, expected {' or '.join(expected)}"
                )
        left = values.words("modules_to_not_convert")
        if left is not None and not all(re.fullmatch(r"[\w.]+", name) for name in left):
            raise SourceError(f"{values.what}: modules_to_not_convert is {left!r:.120}, expected names, not patterns")
        divides = values.get("linear_class", "bitlinear") == "bitlinear"
        online = not divides and values.get("quantization_mode") == "online"
        eps = values.number("rms_norm_eps", 1e-6)
        return cls(divides, online, values.truth("use_rms_norm"), eps, None if left is None else frozenset(left))

    def converts(self, module: str) -> bool:
        """Whether transformers makes this linear layer ternary: listed names are prefixes or suffixes of modules."""
        if self.left_alone is None:
            return module != "lm_head"
        heads = [module[:end] for end, letter in enumerate(module) if letter == "."]
        tails = [module[start:] for start in range(len(module))]
        return self.left_alone.isdisjoint(heads + tails)


class Weights:
    """Tensors by our keys. quantization: None if not declared. masters: whether floats are masters to quantize."""

    def __init__(self, places: Places, quantization: Quantization | None, *, masters: bool) -> None:
        self._places, self._quantization, self.masters = places, quantization, masters
        self.tables: dict[str, bool] = {}  # embedding and head, whether they are ternary
        self.floats: frozenset[str] = frozenset()  # projections that stay float

    def module(self, key: Key) -> str:
        return self._places.module(key)

    def entry(self, key: Key) -> Entry:
        return self._places.entry(self._places.name(key))

    def matrix(self, key: Key) -> Floats:
        """The values of a float tensor in the folder."""
        return self._places.floats(key)

    def check(self, spec: Spec, experts: int) -> set[str]:
        """Names of the tensors that one of ours is computed from. Raises SourceError: missing, or of another shape."""
        key, name = spec.key, self._places.name(spec.key)
        entry, shape = self._places.entry(name), self._places.shape(spec, experts)
        is_matrix = spec.form in ("linear", "table") and self._places.is_whole(key)
        if is_matrix and entry.dtype == "U8":
            if spec.rows % 4:
                raise SourceError(
                    f"{entry.what} is packed, but the configuration calls for {spec.rows} rows, not a multiple of 4"
                )
            shape = (spec.rows // 4, spec.cols)
        if entry.shape != shape:
            raise SourceError(f"{entry.what} has shape {list(entry.shape)}, config.json calls for {list(shape)}")
        if entry.dtype != "U8":
            entry.floats()
        scale = f"{self.module(key)}.weight_scale"
        if not is_matrix or scale not in self._places.tensors:
            if is_matrix and entry.dtype == "U8":
                raise SourceError(f"{entry.what} is packed, its scale {scale} is missing")
            return {name} | self._places.check_added(key, spec.cols)
        self._scale(self.module(key))
        return {name, scale}

    def load(self, key: Key) -> Tensor:
        """The tensor of a key."""
        role = records.ROLES[key.role]
        if key.part:
            return self._bias(key)
        if role in _TABLES or (role in TERNARY_LINEARS and role not in self.floats):
            return self._matrix(role, key)
        return self._places.floats(key)

    def _scale(self, module: str) -> np.float32 | None:
        """The factor of a module's codes, None if the folder has no scale."""
        entry = self._places.tensors.get(f"{module}.weight_scale")
        if entry is None:
            return None
        if self._quantization is None:
            raise SourceError(f"{entry.what}: config.json has no quantization_config; it would say multiply or divide")
        stored = entry.number()
        with np.errstate(divide="ignore", over="ignore"):
            scale = np.float32(1 / stored if self._quantization.divides else stored)
        if not encodings.scales_are_valid(np.array([stored, scale])):
            raise SourceError(f"{entry.what} is {stored}, expected a finite number above 0")
        return scale

    def _matrix(self, role: str, key: Key) -> Tensor:
        """A matrix that is ternary, or a table that may be."""
        entry, scale = self.entry(key), self._scale(self.module(key))
        if entry.dtype == "U8":
            assert scale is not None
            return Ternary(_unpack(entry), np.array([scale], np.float32))
        matrix = self._places.floats(key)
        found = ternary_values(matrix) if self.tables.get(role, True) else None
        if found is not None:
            return found if scale is None else found._replace(scales=found.scales * scale)
        if role in _TABLES:
            return matrix if scale is None else mapped(matrix, lambda w: w * scale)
        if scale is not None:
            raise SourceError(
                f"{entry.what} has a weight_scale, but its values are not ternary; linear layers of int8 are read from "
                "the packed file or the folder that they were made of"
            )
        if not self.masters:
            raise SourceError(
                f"{entry.what} is not ternary, that of the first layer is, and config.json says nothing of BitNet; "
                "download the model again"
            )
        return _quantize(matrix, entry.what)

    def _bias(self, key: Key) -> Floats:
        values, scale = self._places.floats(key), self._scale(self.module(key))
        if scale is None or self._quantization is None or self._quantization.divides:
            return values
        return mapped(values, lambda b: b * scale)


def _unpack(entry: Entry) -> NDArray[np.int8]:
    """Codes (N, K)."""
    quarter, cols = entry.shape
    codes = np.empty((4, quarter, cols), np.int8)
    bytes_ = entry.read(0, quarter)
    for field in range(4):
        codes[field] = bytes_ >> np.uint8(2 * field) & np.uint8(3)
    codes -= 1
    if (codes > 1).any():
        raise SourceError(f"{entry.what}: a code is 3, expected 0, 1 or 2 (-1, 0 or 1)")
    return codes.reshape(4 * quarter, cols)


def _quantize(matrix: Floats, what: str) -> Ternary:
    """Quantize a master as its model does: s = 1 / max(mean|W|, 1e-5), codes = clamp(round(W·s), -1, 1), scale 1/s.

    It uses the reciprocal, unlike bitnet.quant, so that borderline values get the published codes.
    """
    import torch

    w = torch.from_numpy(np.ascontiguousarray(matrix.all()))
    s = 1.0 / w.abs().mean().clamp_(min=1e-5)
    scale = (1.0 / s).reshape(1).numpy()
    if not encodings.scales_are_valid(scale):
        raise SourceError(f"{what} holds NaN or infinity")
    return Ternary(w.mul_(s).round_().clamp_(-1, 1).to(torch.int8).numpy(), scale)
