"""How a tensor may be stored (FORMAT.md §4): a table with one row per encoding, and one per scope of its scales.

Everything specific to an encoding is in its row: its uses, its size in bytes, how numbers are encoded and
decoded, and which bytes are refused. All other code consults the row. A new encoding is a module that turns
numbers into bytes (like layout.py and int8_rows.py) and a row here. Numpy only.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from . import int8_rows, layout
from .layout import Bytes, Data

Form = Literal["vector", "linear", "table", "dense", "low_rank"]
"""The kind of a tensor: norms, biases and frequencies; projections of a layer; embedding and head; router and
positions; parts of an adapter."""

SCALE_NONE, SCALE_TENSOR, SCALE_ROW, SCALE_GROUP = range(4)
SCOPE_NAMES = ("none", "tensor", "row", "group")


@dataclass(frozen=True, kw_only=True)
class Encoding:
    """A row of the table. Two are equal if their numbers are."""

    number: int  # in the file
    name: str
    kind: Literal["float", "int8", "ternary"] = field(compare=False)
    dtype: str = field(compare=False, default="i1")  # of the numbers it holds

    # where it may be used
    forms: tuple[Form, ...] = field(compare=False)
    scopes: tuple[int, ...] = field(compare=False)
    role: str | None = field(compare=False, default=None)  # the only role it is for
    most_cols: int | None = field(compare=False, default=None)
    head_format: str | None = field(compare=False, default=None)  # the ModelConfig.head_format that it implements

    # its bytes
    size: Callable[[int, int], int] = field(compare=False)  # rows, cols
    encode: Callable[[NDArray[Any]], NDArray[Any]] = field(compare=False)  # numbers (N, K); raises ValueError
    decode: Callable[[Data, int, int], NDArray[Any]] = field(compare=False)  # bytes, rows, cols; refused ones too
    fault: Callable[[Data, int, int], str | None] = field(compare=False)  # a description of invalid bytes

    # parts of its bytes
    unit: int | None = field(compare=False, default=None)  # rows; any multiple can be decoded separately
    codes_size: Callable[[int, int], int] | None = field(compare=False, default=None)  # if something follows them
    complete: Callable[[Bytes, int, int], None] | None = field(compare=False, default=None)  # what follows, from codes

    # of ternary ones
    bits: str | None = field(compare=False, default=None)  # bits per weight, as in `--encoding`
    lines: bool = field(compare=False, default=False)  # stored in lines, of which the engine skips irrelevant ones
    tile_k: int = field(compare=False, default=0)  # columns of a tile
    tile_bytes: Callable[[Bytes], Bytes] | None = field(compare=False, default=None)  # of codes + 1, (5, n)

    @property
    def ternary(self) -> bool:
        return self.kind == "ternary"

    def allows(self, form: Form, role: str, cols: int) -> bool:
        return (
            form in self.forms
            and (self.role is None or role == self.role)
            and (self.most_cols is None or cols <= self.most_cols)
        )

    def rows_size(self, rows: int, cols: int) -> int:
        """Bytes that `decode` needs for the first `rows` rows, whole units, of a larger matrix."""
        return (self.codes_size or self.size)(rows, cols)


# --- floats ---


def _floats(number: int, dtype: str, forms: tuple[Form, ...]) -> Encoding:
    name = f"F{8 * np.dtype(dtype).itemsize}"

    def encode(values: NDArray[Any]) -> NDArray[Any]:
        with np.errstate(over="ignore"):  # overflow becomes infinity, which the writer refuses
            return np.ascontiguousarray(values, dtype)

    def decode(data: Data, rows: int, cols: int) -> NDArray[Any]:
        return np.frombuffer(data, dtype).reshape(rows, cols)

    def fault(data: Data, rows: int, cols: int) -> str | None:
        return None if np.isfinite(decode(data, rows, cols)).all() else "a value is not finite"

    def size(rows: int, cols: int) -> int:
        return np.dtype(dtype).itemsize * rows * cols

    return Encoding(
        number=number, name=name, kind="float", dtype=dtype, forms=forms, scopes=(SCALE_NONE,),
        head_format=name.lower(), size=size, encode=encode, decode=decode, fault=fault, unit=1,
    )  # fmt: skip


# --- bytes that are refused ---


def _ternary_fault(data: Data, rows: int, cols: int) -> str | None:
    return "a ternary code is 3, expected 0, 1 or 2" if layout.has_refused_ternary(data) else None


def _trit_fault(data: Data, rows: int, cols: int) -> str | None:
    return "a byte does not encode five ternary codes" if layout.has_refused_trits(data) else None


def _int8_fault(data: Data, rows: int, cols: int) -> str | None:
    codes = np.frombuffer(data, np.uint8)[: int8_rows.size(rows, cols)]
    return "an int8 code is -128, expected -127 to 127" if int8_rows.has_refused(codes) else None


def _sketch_fault(data: Data, rows: int, cols: int) -> str | None:
    if fault := _int8_fault(data, rows, cols):
        return fault
    if not int8_rows.steps_are_valid(data, rows):
        return "a step or deviation is not finite and >= 0"
    wrong = int8_rows.wrong_sketch(data, rows, cols)
    return None if wrong is None else f"the sketch of row {wrong} is not that of its codes"


# --- the table ---

F32 = _floats(1, "<f4", ("vector", "linear", "table", "dense"))
F16 = _floats(2, "<f2", ("linear", "table", "dense"))
TERNARY_2BIT = Encoding(
    number=4, name="TERNARY_2BIT", kind="ternary", bits="2.0", head_format="ternary",
    forms=("linear", "table"), scopes=(SCALE_TENSOR, SCALE_ROW, SCALE_GROUP),
    size=layout.ternary_size, encode=layout.pack_ternary, decode=layout.unpack_ternary, fault=_ternary_fault,
    unit=layout.PANEL, tile_k=layout.TERNARY_TILE_K, tile_bytes=layout.ternary_bytes,
)  # fmt: skip
TERNARY_5TRIT = Encoding(
    number=5, name="TERNARY_5TRIT", kind="ternary", bits="1.6",
    forms=("linear",), scopes=(SCALE_TENSOR, SCALE_ROW), most_cols=layout.TRIT_MAX_K,
    size=layout.trit_size, encode=layout.pack_trits, decode=layout.unpack_trits, fault=_trit_fault,
    unit=layout.PANEL, tile_k=layout.TRIT_TILE_K, tile_bytes=layout.trit_bytes,
)  # fmt: skip
INT8_ROWS = Encoding(
    number=6, name="INT8_ROWS", kind="int8", head_format="int8",
    forms=("linear", "table", "low_rank"), scopes=(SCALE_ROW,), most_cols=layout.INT8_MAX_K,
    size=int8_rows.size, encode=int8_rows.pack, decode=int8_rows.unpack, fault=_int8_fault, unit=1,
)  # fmt: skip
TERNARY_2BIT_ROWS = Encoding(
    number=7, name="TERNARY_2BIT_ROWS", kind="ternary", lines=True,
    forms=("linear",), scopes=(SCALE_TENSOR, SCALE_ROW), role="up",
    size=layout.rows_size, encode=layout.pack_rows, decode=layout.unpack_rows, fault=_ternary_fault, unit=1,
)  # fmt: skip
TERNARY_2BIT_COLUMNS = Encoding(
    number=8, name="TERNARY_2BIT_COLUMNS", kind="ternary", lines=True,
    forms=("linear",), scopes=(SCALE_TENSOR, SCALE_ROW), role="down",
    size=layout.columns_size, encode=layout.pack_columns, decode=layout.unpack_columns, fault=_ternary_fault,
)  # fmt: skip
INT8_SKETCH = Encoding(
    number=9, name="INT8_SKETCH", kind="int8", forms=("table",), scopes=(SCALE_ROW,),
    size=int8_rows.sketched_size, encode=int8_rows.pack_sketched, decode=int8_rows.unpack, fault=_sketch_fault,
    unit=1, codes_size=int8_rows.size, complete=int8_rows.write_sketch,
)  # fmt: skip

ENCODINGS = {
    encoding.number: encoding
    for encoding in (
        F32, F16, TERNARY_2BIT, TERNARY_5TRIT, INT8_ROWS, TERNARY_2BIT_ROWS, TERNARY_2BIT_COLUMNS, INT8_SKETCH,
    )
}  # fmt: skip
"""Encodings by their number in the file."""
TERNARY = {encoding.bits: encoding for encoding in ENCODINGS.values() if encoding.bits}
"""Encodings that can be chosen for a model's ternary weights, by their bits per weight."""
TABLES = {encoding.head_format: encoding for encoding in ENCODINGS.values() if encoding.head_format}
"""Encodings of embedding and head, by ModelConfig.head_format."""
LINES = {encoding.role: encoding for encoding in ENCODINGS.values() if encoding.lines}
"""Encodings in lines, by the role they are for."""


def ternary_encoding(bits: str) -> Encoding:
    """A value of TERNARY. Raises ValueError for other words."""
    if bits not in TERNARY:
        raise ValueError(f"encoding is {bits!r}, expected {' or '.join(TERNARY)} (bits a ternary weight)")
    return TERNARY[bits]


def encoding_of(role: str, body: Encoding, sparse: bool) -> Encoding:
    """The encoding of ternary weights of a role; `body` if they are not stored in lines."""
    return LINES.get(role, body) if sparse else body


# --- an encoding with a scale scope ---

Format = tuple[Encoding, int]


def formats(form: Form, role: str, cols: int) -> tuple[Format, ...]:
    """The encodings and scopes that a tensor may have."""
    fit = (encoding for encoding in ENCODINGS.values() if encoding.allows(form, role, cols))
    return tuple((encoding, scope) for encoding in fit for scope in encoding.scopes)


def format_name(encoding: Encoding, scope: int) -> str:
    """A description of an encoding and scale scope, also for an invalid scope."""
    if scope == SCALE_NONE:
        return encoding.name
    return f"{encoding.name} with {SCOPE_NAMES[scope] if scope < len(SCOPE_NAMES) else scope} scale"


def format_names(allowed: tuple[Format, ...]) -> str:
    return " or ".join(format_name(*known) for known in allowed)


# --- scales ---


def scale_count(scope: int, rows: int, cols: int) -> int:
    """Number of scales of a matrix."""
    return (0, 1, rows, rows * -(-cols // layout.SCALE_GROUP_K))[scope]


def scale_size(scope: int, rows: int, cols: int) -> int:
    """Bytes of the scales."""
    return 2 * layout.group_scale_count(rows, cols) if scope == SCALE_GROUP else 4 * scale_count(scope, rows, cols)


def scales_are_valid(scales: NDArray[np.float32]) -> bool:
    """Finite, normal and above 0. (A subnormal fp16 is normal as fp32.)"""
    return bool((np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)).all())
