"""What a packed file is made of: records, roles, and the tensors a configuration calls for.

FORMAT.md §1-§4 as code, shared by the writer and the reader. Numpy and the standard library only.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig

from . import int8_rows, layout

MAGIC = b"\x89BITNET\n"
VERSION = 2
ALIGN = 64
NONE = 0xFFFF  # a layer or expert that a tensor does not have

HEADER = struct.Struct("<8sIIQI32sI")  # magic, version, flags, file_size, section_count, header_crc
SECTION = struct.Struct("<IIQQII")  # kind, crc, offset, size, flags, reserved
STACK = struct.Struct("<13If5If2I5f4I68s64s")
TENSOR = struct.Struct("<HHHHBBBBIIIQQQQQ")
MAX_STACKS = 16
MAX_TEMPLATE = 256 * 1024
OPTIONAL = 1  # section flag: skip me if you do not know me

STACKS, TENSORS, METADATA, TOKENIZER, TEMPLATE, DATA = range(1, 7)
SECTION_NAMES = {1: "STACKS", 2: "TENSORS", 3: "METADATA", 4: "TOKENIZER", 5: "TEMPLATE", 6: "DATA"}

F32, F16, TERNARY_2BIT, TERNARY_5TRIT, INT8_ROWS = 1, 2, 4, 5, 6
TERNARY_2BIT_ROWS, TERNARY_2BIT_COLUMNS, INT8_SKETCH = 7, 8, 9
ENCODING_NAMES = {
    F32: "F32", F16: "F16", TERNARY_2BIT: "TERNARY_2BIT", TERNARY_5TRIT: "TERNARY_5TRIT", INT8_ROWS: "INT8_ROWS",
    TERNARY_2BIT_ROWS: "TERNARY_2BIT_ROWS", TERNARY_2BIT_COLUMNS: "TERNARY_2BIT_COLUMNS", INT8_SKETCH: "INT8_SKETCH",
}  # fmt: skip
TERNARY = {"2.0": TERNARY_2BIT, "1.6": TERNARY_5TRIT}
"""The encodings of ternary weights by their bits a weight, as `--encoding` names them."""
LINES = {"up": TERNARY_2BIT_ROWS, "down": TERNARY_2BIT_COLUMNS}
"""The roles that can be stored line by line, so that the engine leaves out lines that do not matter."""
TERNARY_ENCODINGS = (*TERNARY.values(), *LINES.values())
INT8 = (INT8_ROWS, INT8_SKETCH)
MOST_ANGLE = 2.0**24  # of RoPE, at the last position
SKETCH_VOCAB = 8192  # tokens from which a sketch is worth its bytes


def ternary_encoding(bits: str) -> int:
    """A value of TERNARY. Raises ValueError on another word."""
    if bits not in TERNARY:
        raise ValueError(f"encoding is {bits!r}, expected {' or '.join(TERNARY)} (bits a ternary weight)")
    return TERNARY[bits]


def encoding_of(role: str, body: int, sparse: bool) -> int:
    """How ternary weights of a role are stored, with `body` for those that are not stored by lines."""
    return LINES.get(role, body) if sparse else body


class Tiles(NamedTuple):
    """How an encoding turns int8 codes (N, K) into bytes and back."""

    size: Callable[[int, int], int]  # rows, cols
    pack: Callable[[layout.Codes], layout.Bytes]
    unpack: Callable[[Any, int, int], layout.Codes]
    has_refused: Callable[[Any], bool]  # whether some bytes of codes stand for none
    refusal: str


TILES = {
    TERNARY_2BIT: Tiles(
        layout.ternary_size, layout.pack_ternary, layout.unpack_ternary, layout.has_refused_ternary,
        "a ternary code is 3, expected 0, 1 or 2",
    ),
    TERNARY_5TRIT: Tiles(
        layout.trit_size, layout.pack_trits, layout.unpack_trits, layout.has_refused_trits,
        "a byte stands for no five ternary codes",
    ),
    TERNARY_2BIT_ROWS: Tiles(
        layout.rows_size, layout.pack_rows, layout.unpack_rows, layout.has_refused_ternary,
        "a ternary code is 3, expected 0, 1 or 2",
    ),
    TERNARY_2BIT_COLUMNS: Tiles(
        layout.columns_size, layout.pack_columns, layout.unpack_columns, layout.has_refused_ternary,
        "a ternary code is 3, expected 0, 1 or 2",
    ),
    INT8_ROWS: Tiles(
        int8_rows.size, int8_rows.pack, int8_rows.unpack, int8_rows.has_refused,
        "an int8 code is -128, expected -127 to 127",
    ),
    INT8_SKETCH: Tiles(
        int8_rows.sketched_size, int8_rows.pack_sketched, int8_rows.unpack, int8_rows.has_refused,
        "an int8 code is -128, expected -127 to 127",
    ),
}  # fmt: skip

SCALE_NONE, SCALE_TENSOR, SCALE_ROW, SCALE_GROUP = range(4)
SCOPE_NAMES = ("none", "tensor", "row", "group")

ROLES = {
    1: "attn_norm", 2: "q", 3: "k", 4: "v", 5: "q_norm", 6: "k_norm", 7: "attn_sub_norm", 8: "o",
    9: "attn_post_norm", 10: "ffn_norm", 11: "router", 12: "gate", 13: "up", 14: "ffn_sub_norm",
    15: "down", 16: "ffn_post_norm", 64: "embedding", 65: "position", 66: "final_norm", 67: "head",
    69: "rope_frequencies", 70: "rope_local_frequencies",
}  # fmt: skip
LINEAR_NORM = 32  # + role of the projection it stands before
ROLES |= {LINEAR_NORM + r: ROLES[r] + "_linear_norm" for r in (2, 3, 4, 8, 12, 13, 15)}
ROLE = {name: number for number, name in ROLES.items()}
PER_EXPERT = {r + n for r in (12, 13, 15) for n in (0, LINEAR_NORM)} | {14}

Format = tuple[int, int]  # encoding, scale scope
FLOATS: tuple[Format, ...] = ((F16, SCALE_NONE), (F32, SCALE_NONE))
LONG_LINEAR_FORMATS = tuple((TERNARY_2BIT, s) for s in (SCALE_TENSOR, SCALE_ROW, SCALE_GROUP)) + FLOATS
LINEAR_FORMATS = ((TERNARY_5TRIT, SCALE_TENSOR), (TERNARY_5TRIT, SCALE_ROW), *LONG_LINEAR_FORMATS)
TABLE_FORMATS = (*((encoding, SCALE_ROW) for encoding in INT8), *LONG_LINEAR_FORMATS)
VECTOR_FORMATS: tuple[Format, ...] = ((F32, SCALE_NONE),)


class Key(NamedTuple):
    """Identity of a tensor; tuples compare in file order."""

    stack: int
    layer: int
    role: int
    expert: int
    part: int  # 0 weight, 1 bias

    @property
    def name(self) -> str:
        """The name of the parameter in a training checkpoint, e.g. "layers.0.q.weight"."""
        words = [ROLES[self.role]]
        if self.expert != NONE:
            words = ["experts", str(self.expert), *words]
        if self.layer != NONE:
            words = ["layers", str(self.layer), *words]
        if self.stack:
            words = ["stacks", str(self.stack), *words]
        if self.role < ROLE["rope_frequencies"]:
            words.append("bias" if self.part else "weight")
        return ".".join(words)


class Spec(NamedTuple):
    """A tensor that a configuration calls for."""

    key: Key
    rows: int
    cols: int
    formats: tuple[Format, ...]  # allowed (encoding, scope)


class Record(NamedTuple):
    """A row of TENSORS: where a tensor is and how it is stored. Offsets are within DATA."""

    key: Key
    encoding: int
    scope: int
    rows: int
    cols: int
    offset: int
    size: int
    scale_offset: int
    scale_size: int

    def pack(self) -> bytes:
        k = self.key
        return TENSOR.pack(
            k.stack, k.layer, k.role, k.expert, k.part, self.encoding, self.scope, 0, 0, self.rows, self.cols,
            self.offset, self.size, self.scale_offset, self.scale_size, 0,
        )  # fmt: skip


def align(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


def format_name(encoding: int, scope: int) -> str:
    """Words for an encoding and scale scope, also for values that do not exist."""
    name = ENCODING_NAMES.get(encoding, f"encoding {encoding}")
    if scope == SCALE_NONE:
        return name
    return f"{name} with {SCOPE_NAMES[scope] if scope < len(SCOPE_NAMES) else scope} scale"


def format_names(formats: tuple[Format, ...]) -> str:
    return " or ".join(format_name(*known) for known in formats)


def data_size(encoding: int, rows: int, cols: int) -> int:
    """Bytes of a tensor without its scales."""
    if encoding in TILES:
        return TILES[encoding].size(rows, cols)
    return {F32: 4, F16: 2}[encoding] * rows * cols


def codes_size(encoding: int, rows: int, cols: int) -> int:
    """Bytes of an encoding's codes, which come first."""
    return TILES[INT8_ROWS if encoding == INT8_SKETCH else encoding].size(rows, cols)


def scale_count(scope: int, rows: int, cols: int) -> int:
    """Number of scales of a matrix."""
    return (0, 1, rows, rows * -(-cols // layout.SCALE_GROUP_K))[scope]


def scale_size(scope: int, rows: int, cols: int) -> int:
    """Bytes of the scales."""
    return 2 * layout.group_scale_count(rows, cols) if scope == SCALE_GROUP else 4 * scale_count(scope, rows, cols)


class _Row(NamedTuple):
    """A line of the rule: one role, for every layer (and expert) or for the whole stack."""

    name: str
    weight: bool  # present
    bias: bool
    rows: int
    cols: int
    formats: tuple[Format, ...]


def _linear(name: str, present: bool, bias: bool, rows: int, cols: int) -> _Row:
    formats = LINEAR_FORMATS if cols <= layout.TRIT_MAX_K else LONG_LINEAR_FORMATS
    if name in LINES:
        formats = (*formats, (LINES[name], SCALE_TENSOR), (LINES[name], SCALE_ROW))
    return _Row(name, present, present and bias, rows, cols, formats)


def _norm(config: ModelConfig, name: str, present: bool, cols: int) -> _Row:
    return _Row(name, present, present and config.norm_bias, 1, cols, VECTOR_FORMATS)


def _layer_rows(c: ModelConfig) -> list[_Row]:
    attention, kv, gated = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.ffn == "gated"
    linears = [
        _linear("q", True, c.qkv_bias, attention, c.dim),
        _linear("k", True, c.qkv_bias, kv, c.dim),
        _linear("v", True, c.qkv_bias, kv, c.dim),
        _linear("o", True, c.o_bias, c.dim, attention),
        _linear("gate", gated, c.ffn_bias, c.ffn_dim, c.dim),
        _linear("up", True, c.ffn_bias, c.ffn_dim, c.dim),
        _linear("down", True, c.ffn_bias, c.dim, c.ffn_dim),
    ]
    norms = [
        _norm(c, "attn_norm", c.pre_norm, c.dim),
        _norm(c, "q_norm", c.qk_norm, c.head_dim),
        _norm(c, "k_norm", c.qk_norm, c.head_dim),
        _norm(c, "attn_sub_norm", c.sub_norm, attention),
        _norm(c, "attn_post_norm", c.post_norm, c.dim),
        _norm(c, "ffn_norm", c.pre_norm, c.dim),
        _norm(c, "ffn_sub_norm", c.sub_norm, c.ffn_dim),
        _norm(c, "ffn_post_norm", c.post_norm, c.dim),
        *(_norm(c, row.name + "_linear_norm", c.linear_norm and row.weight, row.cols) for row in linears),
    ]
    router = _Row("router", c.n_experts > 0, False, c.n_experts, c.dim, FLOATS)
    return sorted([*linears, *norms, router], key=lambda row: ROLE[row.name])


def _stack_rows(c: ModelConfig) -> list[_Row]:
    own_head, tied_head = c.has_head and not c.tie_embeddings, c.has_head and c.tie_embeddings
    rope = c.position == "rope"
    return [
        _Row("embedding", c.input == "tokens" or tied_head, False, c.vocab_size, c.dim, TABLE_FORMATS),
        _Row("position", c.position == "learned", False, c.max_context, c.dim, FLOATS),
        _norm(c, "final_norm", True, c.dim),
        _Row("head", own_head, c.has_head and c.head_bias, c.vocab_size, c.dim, TABLE_FORMATS),
        _Row("rope_frequencies", rope, False, 1, c.rope_dim // 2, VECTOR_FORMATS),
        _Row("rope_local_frequencies", rope and c.global_every > 0, False, 1, c.rope_dim // 2, VECTOR_FORMATS),
    ]


def expected_tensors(config: ModelConfig, stack: int = 0) -> Iterator[Spec]:
    """The tensors of one stack in file order (FORMAT.md §3, "Which tensors").

    Lazy, so that a reader which stops at the first difference does work in proportion to the
    file and not to the numbers in its configuration.
    """
    layer_rows = _layer_rows(config)
    for layer in range(config.n_layers):
        for row in layer_rows:
            each = config.n_experts > 0 and ROLE[row.name] in PER_EXPERT
            for expert in range(config.n_experts) if each else (NONE,):
                yield from _specs(row, stack, layer, expert)
    for row in _stack_rows(config):
        yield from _specs(row, stack, NONE, NONE)


def int8_encoding(spec: Spec, config: ModelConfig) -> int:
    """How writers store an int8 table: with a sketch when the engine can find the largest logits with it."""
    gives_logits = config.has_head and ROLES[spec.key.role] == ("embedding" if config.tie_embeddings else "head")
    as_they_are = not config.head_bias and config.logit_softcap == 0
    return INT8_SKETCH if gives_logits and as_they_are and spec.rows >= SKETCH_VOCAB else INT8_ROWS


def _specs(row: _Row, stack: int, layer: int, expert: int) -> Iterator[Spec]:
    role = ROLE[row.name]
    if row.weight:
        yield Spec(Key(stack, layer, role, expert, 0), row.rows, row.cols, row.formats)
    if row.bias:
        outputs = row.cols if row.formats is VECTOR_FORMATS else row.rows
        yield Spec(Key(stack, layer, role, expert, 1), 1, outputs, VECTOR_FORMATS)


def scales_are_valid(scales: NDArray[np.float32]) -> bool:
    """Finite, normal and above 0. (A subnormal fp16 is normal as fp32.)"""
    return bool((np.isfinite(scales) & (scales >= np.finfo(np.float32).tiny)).all())
