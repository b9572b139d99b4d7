"""A packed file as a GGUF file that llama.cpp runs.

Ternary codes and scales are exact: a scale that fp16 cannot represent is a separate fp32 tensor,
`blk.0.attn_q.scale`, by which llama.cpp multiplies the product, and the blocks have d = 1.
The results of llama.cpp are close to the engine's, not equal: it quantizes activations in blocks
of 256 (TQ*) or 32, or not at all (F16, F32), and stores keys and values as fp16.
Sources: the GGUF specification of ggml; src/models/{bitnet,llama,qwen3}.cpp of llama.cpp.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet.config import TERNARY_LINEARS, ModelConfig
from bitnet_export.foreign.outgoing import (
    DRAFT_LEFT_OUT,
    Written,
    only_stack,
    refuse,
    rope_problems,
    scale_problems,
    value_rows,
)
from bitnet_export.foreign.side_files import generation_of
from bitnet_export.foreign.source import Progress
from bitnet_export.packed import encodings
from bitnet_export.packed.layout import SCALE_GROUP_K
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import NONE, ROLES, Record
from bitnet_export.packed.replacing import GGUF_MARK, replacing, spare

from .families import LAYER, STACK
from .graphs import nearest_graph
from .output import Entry, Value, write_file
from .sampling import sampling_keys
from .tokens import vocabulary_of
from .types import WRITTEN, TensorType

BODIES = ("TQ2_0", "TQ1_0", "Q2_0", "F16", "F32")
HEADS = ("Q8_0", "Q6_K", "F16", "F32")
PRESET = "`bitnet train --preset gguf` trains a model that llama.cpp takes, with its tokenizer"


@dataclass(frozen=True)
class GgufWritten(Written):
    token_bytes: int = 0  # bytes of weights read per decoded token


def write_gguf(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    body: str = "TQ2_0",
    head: str = "Q8_0",
    exact_scales: bool = True,
    vocabulary: bool = True,
    progress: Progress = lambda _: None,
) -> GgufWritten:
    """Write a packed file as GGUF, one tensor in memory at a time; the file appears only when it is complete.

    body: type of the linear layers, one of BODIES; those of floats stay as they are beside a ternary type.
    head: type of embedding and head if they are not ternary, one of HEADS.
    exact_scales: False rounds scales to fp16 instead of adding `.scale` tensors. vocabulary: False leaves
    the tokenizer out.

    Raises PackedFormatError for a bad source; ValueError naming all obstacles: features that llama.cpp does not
    have, weights that do not fit the type, an unsupported tokenizer; OSError.
    """
    for name, word, words in (("body", body, BODIES), ("head", head, HEADS)):
        if word not in words:
            raise ValueError(f"{name} is {word!r}, expected one of {', '.join(words)}")
    path = Path(out)
    spare(Path(source), path, "GGUF")
    file = PackedFile.open(source).without_draft()
    config = only_stack(file, source)
    architecture, differences = nearest_graph(config)
    writer = _Writer(file, config, architecture, body, head, exact_scales)
    text, notes, unknown = vocabulary_of(file, config, vocabulary)
    remedy = f"; {PRESET}" if differences or unknown else ""
    problems = [*rope_problems(file, config), *scale_problems(config), *differences, *writer.problems(), *unknown]
    refuse(f"{source} cannot become a GGUF file", problems, remedy)
    sampling, of_defaults = sampling_keys(generation_of(file))
    metadata = writer.metadata() | text | sampling
    entries = list(writer.entries())
    notes += writer.notes
    with replacing(path) as temporary:
        write_file(temporary, metadata, entries, progress)
    size = sum(entry.size for entry in entries)
    if not config.tie_embeddings:
        size -= next(entry.size for entry in entries if entry.name == "token_embd.weight")
    if any(entry.name.endswith(".scale") for entry in entries):
        notes.append("exact scales are separate tensors; older versions of llama.cpp refuse the file")
    notes += [*of_defaults, *[DRAFT_LEFT_OUT] * file.draft_left_out]
    notes.append("llama.cpp rounds activations in other blocks than the engine: logits are close, not equal")
    linears = " and ".join(writer.linear_types())
    what = f"GGUF, architecture {architecture}, {linears}, embedding and head {head}"
    return GgufWritten(what, len(entries), path.stat().st_size, tuple(notes), size)


class _Writer:
    """The parts of a packed file that go into a GGUF file of one architecture."""

    def __init__(
        self, file: PackedFile, config: ModelConfig, architecture: str, body: str, head: str, exact_scales: bool
    ) -> None:
        self.file, self.config, self.architecture = file, config, architecture
        self.body, self.head, self.exact_scales = body, head, exact_scales
        self.notes: list[str] = []
        self._rounded = 0.0  # largest relative change of a scale

    def metadata(self) -> dict[str, Value]:
        c = self.config
        keys: dict[str, Value] = {
            "vocab_size": c.vocab_size,
            "context_length": c.max_context,
            "embedding_length": c.dim,
            "block_count": c.n_layers,
            "feed_forward_length": c.ffn_dim,
            "attention.head_count": c.n_heads,
            "attention.head_count_kv": c.n_kv_heads,
            "attention.key_length": c.head_dim,
            "attention.value_length": c.head_dim,
            "attention.layer_norm_rms_epsilon": float(c.norm_eps),
            "rope.dimension_count": c.head_dim,
            "rope.freq_base": float(c.rope_theta),
            "hidden_activation": c.activation,
        }
        general: dict[str, Value] = {
            "general.architecture": self.architecture,
            "general.quantized_by": GGUF_MARK.decode(),  # among the first bytes, where `kind_of` looks for it
            "general.quantization_version": 2,
            "general.file_type": WRITTEN[self.linear_types()[0]].file_type,
        }
        return general | {f"{self.architecture}.{key}": value for key, value in keys.items()}

    def linear_types(self) -> list[str]:
        """The types of the matrices of the layers, that of ternary ones first."""
        linears = [r for r in self.file.tensors.values() if ROLES[r.key.role] in TERNARY_LINEARS and not r.key.part]
        return sorted({self._linear_type(record) for record in linears}, key=lambda word: (word != self.body, word))

    def _linear_type(self, record: Record) -> str:
        """Floats keep their numbers beside ternary types."""
        kept = not record.quantized and WRITTEN[self.body].codes
        return record.encoding.name if kept else self.body

    def problems(self) -> list[str]:
        """Why matrices do not fit their types, grouped by reason."""
        names: dict[str, dict[str, None]] = {}
        for record in self.file.tensors.values():
            role = ROLES[record.key.role]
            if role in (*TERNARY_LINEARS, "embedding", "head") and not record.key.part:
                for problem in self._misfits(role, record):
                    names.setdefault(problem, {})[f"{LAYER.get(role) or STACK[role]}.weight"] = None
        return [f"{', '.join(of)}: {problem}" for problem, of in names.items()]

    def _misfits(self, role: str, record: Record) -> Iterator[str]:
        floats = role not in TERNARY_LINEARS and not self._is_ternary_table(record)
        word, option = (self._table_type(record), "--head") if floats else (self.body, "--type")
        kind, few = WRITTEN[word], f"F16 or F32 ({option})"
        if not (floats or record.encoding.ternary):
            if record.quantized and kind.codes:
                yield "int8 linear layers; write them as F16 or F32 (--type)"
            return
        if record.cols % kind.block:
            yield f"rows of {record.cols} weights, {word} has blocks of {kind.block}; write them as {few}"
        if floats:
            return
        if record.scope == encodings.SCALE_GROUP and SCALE_GROUP_K % kind.block:
            yield f"a scale for {SCALE_GROUP_K} weights, {word} has one for {kind.block}; write them as Q2_0, {few}"
            return
        scales, (d, beside) = self.file.scales(record), self._scales(record)
        if beside is None and self.exact_scales and not (d == scales).all():
            scope = encodings.SCOPE_NAMES[record.scope]
            yield f"scales of {scope}s that fp16 cannot represent; write them as F32 (--type)"
        elif not (np.isfinite(d) & (d > 0)).all():
            yield "a scale that fp16 cannot hold, expected 6e-8 to 65504"

    def entries(self) -> Iterator[Entry]:
        """The tensors of the file; requires that there are no `problems`."""
        if self.config.rope_scaling == "llama3":
            yield self._vector("rope_freqs.weight", self._rope_factors())
        for record in self.file.tensors.values():
            role = ROLES[record.key.role]
            if role == "rope_frequencies":
                continue
            layer = record.key.layer
            name = STACK[role] if layer == NONE else f"blk.{layer}.{LAYER[role]}"
            order = self._order(role, record.cols if record.key.part else record.rows)
            if record.key.part == 1:
                yield self._vector(f"{name}.bias", self.file.values(record)[0][order])
            elif role in ("embedding", "head"):
                if self._is_ternary_table(record):
                    yield from self._ternary(name, record, order)
                else:
                    word = self._table_type(record)
                    if record.encoding.ternary:
                        how = f"{'written' if self.exact_scales else 'rounded'} as {word}"
                        self.notes.append(f"{name}.weight is ternary, which {self.body} cannot hold here: {how}")
                    yield self._floats(f"{name}.weight", record, WRITTEN[word], order)
            elif role not in TERNARY_LINEARS:
                yield self._vector(f"{name}.weight", self.file.values(record)[0])
            elif record.encoding.ternary:
                yield from self._ternary(name, record, order)
            else:
                yield self._floats(f"{name}.weight", record, WRITTEN[self._linear_type(record)], order)
        if self._rounded:
            self.notes.append(f"scales are rounded to fp16, by {self._rounded:.1e} of their value at most")

    def _order(self, role: str, rows: int) -> NDArray[np.int64] | slice:
        """The source of each row: in `llama`, RoPE rotates neighbours 2i and 2i + 1, not i and i + E/2."""
        if self.architecture != "llama" or role not in ("q", "k"):
            return slice(None)
        return np.arange(rows).reshape(-1, 2, self.config.head_dim // 2).swapaxes(1, 2).reshape(-1)

    def _is_ternary_table(self, record: Record) -> bool:
        """Whether a table is ternary and can stay so in blocks; an embedding has no `.scale` in llama.cpp."""
        if not record.encoding.ternary:
            return False
        scales, block = self.file.scales(record), WRITTEN[self.body].block
        exact = self.body == "F32" or bool((scales.astype(np.float16) == scales).all())
        return (
            exact and record.cols % block == 0 and (record.scope != encodings.SCALE_GROUP or SCALE_GROUP_K % block == 0)
        )

    def _table_type(self, record: Record) -> str:
        """The type of a table written as floats; for a ternary one the smallest that holds every value."""
        if not (record.encoding.ternary and self.exact_scales):
            return self.head
        scales = self.file.scales(record)
        with np.errstate(over="ignore"):
            return "F16" if self.head != "F32" and (scales.astype(np.float16) == scales).all() else "F32"

    def _vector(self, name: str, values: NDArray[np.float32]) -> Entry:
        return Entry(name, WRITTEN["F32"], values.shape, lambda: [values])

    def _floats(self, name: str, record: Record, kind: TensorType, order: NDArray[np.int64] | slice) -> Entry:
        encode = kind.write
        assert encode

        def parts() -> Iterator[NDArray[Any]]:
            if isinstance(order, slice):
                yield from map(encode, value_rows(self.file, record))
            else:
                yield encode(self.file.values(record)[order])

        return Entry(name, kind, (record.rows, record.cols), parts)

    def _ternary(self, name: str, record: Record, order: NDArray[np.int64] | slice) -> Iterator[Entry]:
        """W = d · T, with γ in d if fp16 can represent it, else in a separate tensor."""
        kind, (d, beside) = WRITTEN[self.body], self._scales(record)
        if beside is None:
            self._rounded = max(self._rounded, float(np.abs(d / self.file.scales(record) - 1).max()))
        yield Entry(f"{name}.weight", kind, (record.rows, record.cols), lambda: [self._encoded(kind, record, d, order)])
        if beside is not None:
            yield self._vector(f"{name}.scale", beside)

    def _scales(self, record: Record) -> tuple[NDArray[Any], NDArray[np.float32] | None]:
        """d of the blocks, and γ if it is a separate tensor."""
        scales = self.file.scales(record)
        if self.body == "F32":
            return scales, None  # d is not rounded
        with np.errstate(over="ignore"):
            halves = scales.astype(np.float16)
        if self.exact_scales and record.scope == encodings.SCALE_TENSOR and not (halves == scales).all():
            return np.ones(1, np.float16), scales
        return halves, None

    def _encoded(
        self, kind: TensorType, record: Record, scales: NDArray[Any], order: NDArray[np.int64] | slice
    ) -> NDArray[Any]:
        """d·T as blocks, or as floats; both are exact."""
        per_row = scales.reshape(record.rows, -1) if record.scope != encodings.SCALE_TENSOR else scales.reshape(1, 1)
        width = kind.block if kind.codes else 1
        span = SCALE_GROUP_K if record.scope == encodings.SCALE_GROUP else record.cols
        each = np.repeat(per_row, -(-span // width), axis=1)[:, : record.cols // width]
        each = np.broadcast_to(each, (record.rows, record.cols // width))[order]
        codes = self.file.codes(record)[order]
        assert kind.write
        return kind.write(codes, each) if kind.codes else kind.write(codes.astype(np.float32) * each.astype(np.float32))

    def _rope_factors(self) -> NDArray[np.float32]:
        """The factors by which Llama 3's scaling divides the frequencies of plain RoPE."""
        from bitnet.model.positions import rope_frequencies

        plain = rope_frequencies(self.config.replace(rope_scaling="none")).double()
        return (plain / rope_frequencies(self.config).double()).float().numpy()
