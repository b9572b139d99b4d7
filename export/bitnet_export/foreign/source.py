"""A published model, as returned by the reader of its format: its configuration, and its tensors one at a time.

Every foreign format (`hf/`, `gguf/`) is a function that yields a `Source`; everything after that
(`convert`) knows no format. Needs numpy alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export.packed import encodings, int8_rows, records
from bitnet_export.packed.encodings import Encoding
from bitnet_export.packed.records import Key, Spec
from bitnet_export.packed.writer import Encoded

_LARGEST_F16 = 65_504
_ROWS = 4096  # of a table in memory at a time
_NAMED = 20  # most unknown settings that are named


Progress = Callable[[str], None]
"""Called with a line that says what is being done."""


class SourceError(ValueError):
    """A published model is damaged, incomplete, or of a kind that cannot be converted."""


def ignored(unknown: Sequence[str], more: str) -> list[str]:
    """The first lines on unknown settings, and one on the others. more: that one, with {} for how many they are."""
    others = len(unknown) - _NAMED
    return [*unknown[:_NAMED], *([more.format(others)] if others > 0 else [])]


class Ternary(NamedTuple):
    """A matrix that is ternary in the source, and is not quantized again: W = codes · scales."""

    codes: NDArray[np.int8]  # (N, K), each -1, 0 or 1
    scales: NDArray[np.float32]  # to multiply with: (1,) per tensor, (N,) per row, (N, ceil(K/128)) per group

    @property
    def shape(self) -> tuple[int, ...]:
        return self.codes.shape

    @property
    def scope(self) -> int:
        if self.scales.ndim == 2:
            return encodings.SCALE_GROUP
        return encodings.SCALE_TENSOR if self.scales.size == 1 else encodings.SCALE_ROW

    def take(self, rows: slice | NDArray[np.int64]) -> Ternary:
        """Some of its rows, in this order."""
        return Ternary(self.codes[rows], self.scales if self.scales.size == 1 else self.scales[rows])


class Floats(NamedTuple):
    """A matrix or vector of floats; rows are converted to fp32 on demand."""

    shape: tuple[int, ...]  # (N, K) or (K,)
    dtype: str  # in the source: "f32", "f16", "bf16", "q6_K", …
    rows: Callable[[int, int], NDArray[np.float32]]  # (first, last) -> fp32 (last - first, K); a vector is one row

    @classmethod
    def of(cls, values: NDArray[np.float32]) -> Floats:
        matrix = np.atleast_2d(values)
        return cls(values.shape, "f32", lambda first, last: matrix[first:last])

    def all(self) -> NDArray[np.float32]:
        """All values, in the shape of the source."""
        return self.rows(0, self.shape[0] if len(self.shape) == 2 else 1).reshape(self.shape)


Tensor = Ternary | Floats


@dataclass(frozen=True)
class Source:
    """A model in a foreign format, in our terms.

    load: the tensor of a key that `expected_tensors(config)` calls for, except the tables of RoPE,
    read from disk at that moment; called more than once. Raises SourceError naming the tensor.
    """

    what: str  # one line: "Hugging Face folder, BitNetForCausalLM, packed ternary weights, scales multiply"
    config: ModelConfig  # head_format is "ternary" where the tables are, else left to the caller
    load: Callable[[Key], Tensor]
    assumptions: tuple[str, ...] = ()  # what the source does not say and the reader took for granted, a line each
    tokenizer: bytes | None = None  # JSON of the `tokenizers` library
    template: bytes | None = None  # Jinja chat template
    generation: Mapping[str, Any] = field(default_factory=dict)  # eos_token_ids, bos_token_id, sampling defaults
    provenance: Mapping[str, Any] = field(default_factory=dict)


def encode(spec: Spec, tensor: Tensor, config: ModelConfig, body: Encoding, floats: Encoding) -> Encoded:
    """The bytes of one tensor; `body` is the encoding of ternary ones, `floats` that of other linear layers."""
    shape = (spec.rows, spec.cols)
    if tensor.shape != shape and (1, *tensor.shape) != shape:
        raise SourceError(f"{spec.key.name} has shape {list(tensor.shape)}, the configuration calls for {list(shape)}")
    if isinstance(tensor, Ternary):
        return _encode_ternary(spec, tensor, body)
    stored = floats if spec.form == "linear" else records.stored_as(spec, config)
    if stored.kind == "int8" and records.ROLES[spec.key.role].startswith("pool_"):
        stored = encodings.F16  # one query an image: nothing is won by integers
    if stored.kind == "int8":
        return _encode_rows(spec, tensor, stored)
    values = tensor.all()
    if not np.isfinite(values).all():
        raise SourceError(f"{spec.key.name} holds NaN or infinity")
    if stored == encodings.F16 and spec.form == "linear" and np.abs(values).max() > _LARGEST_F16:
        raise SourceError(f"{spec.key.name} has values beyond the range of F16; store them with --linears f32")
    return Encoded.floats(encodings.F32 if stored.ternary else stored, values)


def _encode_ternary(spec: Spec, tensor: Ternary, body: Encoding) -> Encoded:
    body = body if spec.form == "linear" else encodings.TERNARY_2BIT  # the one of tables
    if (body, tensor.scope) not in spec.formats:
        raise SourceError(
            f"{spec.key.name} cannot be stored as {encodings.format_name(body, tensor.scope)} ({spec.rows} x "
            f"{spec.cols}), expected {encodings.format_names(spec.formats)}; leave --encoding and --sparse out"
        )
    return Encoded(body, tensor.scope, body.encode(tensor.codes), tensor.scales)


def _encode_rows(spec: Spec, tensor: Floats, encoding: Encoding) -> Encoded:
    """int8 rows (bitnet.quant.row_codes), a few thousand at a time: a table may be larger than everything else."""
    import torch

    from bitnet.quant import row_codes

    data = np.zeros(encoding.size(spec.rows, spec.cols), np.uint8)
    stored = int8_rows.codes_of(data, spec.rows, spec.cols)
    sigma = np.empty(spec.rows, np.float32)
    for first in range(0, spec.rows, _ROWS):
        last = min(first + _ROWS, spec.rows)
        values = tensor.rows(first, last)
        if not np.isfinite(values).all():
            raise SourceError(f"{spec.key.name} holds NaN or infinity")
        codes, sigma_rows = row_codes(torch.from_numpy(np.ascontiguousarray(values)))
        stored[first:last, : spec.cols], sigma[first:last] = codes.numpy(), sigma_rows.numpy()
    if encoding.complete:
        encoding.complete(data, spec.rows, spec.cols)
    return Encoded(encoding, encodings.SCALE_ROW, data, sigma)
