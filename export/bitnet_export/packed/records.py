"""The structure of a packed file: records, roles, and the tensors that a configuration requires.

FORMAT.md §1-§3 as code, shared by the writer and the reader; §4 is encodings.py. Needs only the standard library.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from bitnet.config import ModelConfig

from . import encodings
from .encodings import Encoding, Form, Format

MAGIC = b"\x89BITNET\n"
VERSION = 3
ALIGN = 64
NONE = 0xFFFF  # a layer or expert that a tensor does not have

HEADER = struct.Struct("<8sIIQI32sI")  # magic, version, flags, file_size, section_count, base, header_crc
BASE = struct.Struct("<QIII12x")  # size of DATA; crc of DATA, of STACKS, of TENSORS
SECTION = struct.Struct("<IIQQII")  # kind, crc, offset, size, flags, reserved
STACK = struct.Struct("<13If5If2I5f9I6f2I2f2I64s")
TENSOR = struct.Struct("<HHHHBBBBIIIQQQQQ")
MAX_STACKS = 16
MAX_TEMPLATE = 256 * 1024
OPTIONAL = 1  # section flag: readers may skip it if they do not know it
ADAPTER_ALONE = 1  # header flag

STACKS, TENSORS, METADATA, TOKENIZER, TEMPLATE, DATA = range(1, 7)
SECTION_NAMES = {1: "STACKS", 2: "TENSORS", 3: "METADATA", 4: "TOKENIZER", 5: "TEMPLATE", 6: "DATA"}

MOST_ANGLE = 2.0**24  # of RoPE, at the last position
SKETCH_VOCAB = 8192  # vocabulary size from which on a sketch is worth its bytes


ROLES = {
    1: "attn_norm", 2: "q", 3: "k", 4: "v", 5: "q_norm", 6: "k_norm", 7: "attn_sub_norm", 8: "o",
    9: "attn_post_norm", 10: "ffn_norm", 11: "router", 12: "gate", 13: "up", 14: "ffn_sub_norm",
    15: "down", 16: "ffn_post_norm", 64: "embedding", 65: "position", 66: "final_norm", 67: "head",
    68: "embedding_norm", 69: "rope_frequencies", 70: "rope_local_frequencies",
    71: "draft_hidden_norm", 72: "draft_embedding_norm", 73: "draft_projection",
    74: "patch", 75: "class_embedding", 76: "projector",
    80: "pool_probe", 81: "pool_q", 82: "pool_k", 83: "pool_v", 84: "pool_o", 85: "pool_norm",
    86: "pool_up", 87: "pool_down",
}  # fmt: skip
LINEAR_NORM = 32  # + role of the projection after it
ROLES |= {LINEAR_NORM + r: ROLES[r] + "_linear_norm" for r in (2, 3, 4, 8, 12, 13, 15)}
ROLE = {name: number for number, name in ROLES.items()}
PER_EXPERT = {r + n for r in (12, 13, 15) for n in (0, LINEAR_NORM)} | {14}
PARTS = ("weight", "bias", "adapter_in", "adapter_out")
WHOLE = {ROLE[name] for name in ("rope_frequencies", "rope_local_frequencies", "class_embedding", "pool_probe")}


class Section(NamedTuple):
    """An entry of the section table."""

    kind: int
    crc: int
    offset: int
    size: int
    optional: bool

    @property
    def name(self) -> str:
        return SECTION_NAMES.get(self.kind, f"kind {self.kind}")


class Base(NamedTuple):
    """The identity of a model's weights, by which a separate adapter recognises its model."""

    data_size: int
    data_crc: int
    stacks_crc: int
    tensors_crc: int


class Key(NamedTuple):
    """Identity of a tensor; tuples compare in file order."""

    stack: int
    layer: int
    role: int
    expert: int
    part: int  # index into PARTS

    @property
    def name(self) -> str:
        """Its name, e.g. "layers.0.q.weight", the same as in the engine."""
        words = [ROLES[self.role]]
        if self.expert != NONE:
            words = ["experts", str(self.expert), *words]
        if self.layer != NONE:
            words = ["layers", str(self.layer), *words]
        if self.stack:
            words = ["stacks", str(self.stack), *words]
        if self.role not in WHOLE:
            words.append(PARTS[self.part])
        return ".".join(words)

    def parameter(self, stacks: Sequence[ModelConfig]) -> str:
        """Its parameter name in a training checkpoint of a model with these stacks."""
        own = self._replace(stack=0).name.replace("pool_", "pool.")
        return {"images": "vision.", "draft": "draft."}[stacks[self.stack].input] + own if self.stack else own


def learned(key: Key, config: ModelConfig) -> bool:
    """Whether training learns the tensor, so that its numbers are parameters; else the configuration implies it."""
    role, sines = ROLES[key.role], config.position == "sinusoidal"
    return role not in ("rope_frequencies", "rope_local_frequencies") and not (role == "position" and sines)


class Spec(NamedTuple):
    """A tensor that a configuration requires."""

    key: Key
    rows: int
    cols: int
    form: Form

    @property
    def formats(self) -> tuple[Format, ...]:
        """The encodings and scopes that it may have."""
        return encodings.formats(self.form, ROLES[self.key.role], self.cols)


class Record(NamedTuple):
    """A row of TENSORS: where a tensor is and how it is stored. Offsets are within DATA."""

    key: Key
    encoding: Encoding
    scope: int
    rows: int
    cols: int
    offset: int
    size: int
    scale_offset: int
    scale_size: int

    @property
    def quantized(self) -> bool:
        """Whether it holds integers and their scales, not floats."""
        return self.scope != encodings.SCALE_NONE

    def pack(self) -> bytes:
        k = self.key
        return TENSOR.pack(
            k.stack, k.layer, k.role, k.expert, k.part, self.encoding.number, self.scope, 0, 0, self.rows, self.cols,
            self.offset, self.size, self.scale_offset, self.scale_size, 0,
        )  # fmt: skip


def align(n: int) -> int:
    return -(-n // ALIGN) * ALIGN


class _Row(NamedTuple):
    """One role of the tensor rule, for every layer (and expert) or for the whole stack."""

    name: str
    weight: bool  # present
    bias: bool
    rows: int
    cols: int
    form: Form
    rank: int = 0  # of its adapter


def _linear(name: str, present: bool, bias: bool, rows: int, cols: int, rank: int = 0) -> _Row:
    return _Row(name, present, present and bias, rows, cols, "linear", rank if present else 0)


def _vector(name: str, present: bool, cols: int) -> _Row:
    return _Row(name, present, False, 1, cols, "vector")


def _norm(config: ModelConfig, name: str, present: bool, cols: int) -> _Row:
    return _Row(name, present, present and config.norm_bias, 1, cols, "vector")


def _layer_rows(c: ModelConfig) -> list[_Row]:
    attention, kv, gated = c.n_heads * c.head_dim, c.n_kv_heads * c.head_dim, c.ffn == "gated"
    after = c.post_norm or c.residual_norm

    def linear(name: str, present: bool, bias: bool, rows: int, cols: int) -> _Row:
        return _linear(name, present, bias, rows, cols, c.adapter_rank if name in c.adapters else 0)

    linears = [
        linear("q", True, c.qkv_bias, attention, c.dim),
        linear("k", True, c.qkv_bias, kv, c.dim),
        linear("v", True, c.qkv_bias, kv, c.dim),
        linear("o", True, c.o_bias, c.dim, attention),
        linear("gate", gated, c.ffn_bias, c.ffn_dim, c.dim),
        linear("up", True, c.ffn_bias, c.ffn_dim, c.dim),
        linear("down", True, c.ffn_bias, c.dim, c.ffn_dim),
    ]
    norms = [
        _norm(c, "attn_norm", c.pre_norm, c.dim),
        _norm(c, "q_norm", c.qk_norm, c.head_dim),
        _norm(c, "k_norm", c.qk_norm, c.head_dim),
        _norm(c, "attn_sub_norm", c.sub_norm, attention),
        _norm(c, "attn_post_norm", after, c.dim),
        _norm(c, "ffn_norm", c.pre_norm, c.dim),
        _norm(c, "ffn_sub_norm", c.sub_norm, c.ffn_dim),
        _norm(c, "ffn_post_norm", after, c.dim),
        *(_norm(c, row.name + "_linear_norm", c.linear_norm and row.weight, row.cols) for row in linears),
    ]
    router = _Row("router", c.n_experts > 0, False, c.n_experts, c.dim, "dense")
    return sorted([*linears, *norms, router], key=lambda row: ROLE[row.name])


def _stack_rows(c: ModelConfig) -> list[_Row]:
    own_head, tied_head = c.has_head and not c.tie_embeddings, c.has_head and c.tie_embeddings
    rope, table = c.position == "rope", c.position in ("learned", "sinusoidal")
    images, draft = c.input == "images", c.input == "draft"
    return [
        _Row("embedding", c.input == "tokens" or tied_head, False, c.vocab_size, c.dim, "table"),
        _Row("position", table, False, c.max_context, c.dim, "dense"),
        _norm(c, "final_norm", c.final_norm, c.dim),
        _Row("head", own_head, c.has_head and c.head_bias, c.vocab_size, c.dim, "table"),
        _norm(c, "embedding_norm", c.embedding_norm, c.dim),
        _vector("rope_frequencies", rope, c.rope_dim // 2),
        _vector("rope_local_frequencies", rope and c.global_every > 0, c.rope_dim // 2),
        _norm(c, "draft_hidden_norm", draft, c.dim),
        _norm(c, "draft_embedding_norm", draft, c.dim),
        _linear("draft_projection", draft, False, c.dim, 2 * c.dim),
        _Row("patch", images, images and c.patch_bias, c.dim, c.channels * c.patch_size**2, "dense"),
        _vector("class_embedding", c.class_token, c.dim),
        _Row("projector", c.out_dim > 0, c.out_dim > 0 and c.projector_bias, c.out_dim, c.dim, "dense"),
        *_pool_rows(c),
    ]


def _pool_rows(c: ModelConfig) -> list[_Row]:
    present, attention = c.pooling == "attention", c.n_heads * c.head_dim
    return [
        _vector("pool_probe", present, c.dim),
        _linear("pool_q", present, c.qkv_bias, attention, c.dim),
        _linear("pool_k", present, c.qkv_bias, attention, c.dim),
        _linear("pool_v", present, c.qkv_bias, attention, c.dim),
        _linear("pool_o", present, c.o_bias, c.dim, attention),
        _norm(c, "pool_norm", present, c.dim),
        _linear("pool_up", present, c.ffn_bias, c.ffn_dim, c.dim),
        _linear("pool_down", present, c.ffn_bias, c.dim, c.ffn_dim),
    ]


def expected_tensors(config: ModelConfig, stack: int = 0, adapter_alone: bool = False) -> Iterator[Spec]:
    """The tensors of one stack in file order (FORMAT.md §3, "Which tensors"); for a separate adapter parts 2 and 3.

    Lazy, so that a reader which stops at the first difference does work in proportion to the
    file, not to the numbers in its configuration.
    """
    layer_rows = _layer_rows(config)
    if adapter_alone:
        layer_rows = [row._replace(weight=False, bias=False) for row in layer_rows if row.rank]
    for layer in range(config.n_layers):
        for row in layer_rows:
            each = config.n_experts > 0 and ROLE[row.name] in PER_EXPERT
            for expert in range(config.n_experts) if each else (NONE,):
                yield from _specs(row, stack, layer, expert)
    for row in [] if adapter_alone else _stack_rows(config):
        yield from _specs(row, stack, NONE, NONE)


def stored_as(spec: Spec, config: ModelConfig, body: Encoding = encodings.TERNARY_2BIT) -> Encoding:
    """How writers store a tensor. body: the encoding of ternary linears. An int8 table gets a sketch if the engine
    can find the largest logits with it."""
    role = ROLES[spec.key.role]
    if spec.form == "low_rank":
        return encodings.INT8_ROWS
    if spec.form != "table":
        ternary = role in config.ternary or (role == "draft_projection" and config.ternary)
        return body if spec.form == "linear" and ternary else encodings.F32
    stored = encodings.TABLES[config.head_format]
    gives_logits = config.has_head and role == ("embedding" if config.tie_embeddings else "head")
    as_they_are = not config.head_bias and config.logit_softcap == 0
    screened = gives_logits and as_they_are and spec.rows >= SKETCH_VOCAB
    return encodings.INT8_SKETCH if stored == encodings.INT8_ROWS and screened else stored


def _specs(row: _Row, stack: int, layer: int, expert: int) -> Iterator[Spec]:
    role = ROLE[row.name]
    if row.weight:
        yield Spec(Key(stack, layer, role, expert, 0), row.rows, row.cols, row.form)
    if row.bias:
        outputs = row.cols if row.form == "vector" else row.rows
        yield Spec(Key(stack, layer, role, expert, 1), 1, outputs, "vector")
    if row.rank:
        yield Spec(Key(stack, layer, role, expert, 2), row.rank, row.cols, "low_rank")
        yield Spec(Key(stack, layer, role, expert, 3), row.rank, row.rows, "low_rank")
