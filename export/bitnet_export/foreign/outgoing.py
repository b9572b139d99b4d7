"""A packed file to another format: shared code of the writers in hf/, gguf/ and onnx/."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet.process import flush
from bitnet_export.packed import encodings
from bitnet_export.packed.layout import spread_scales
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import Record
from bitnet_export.packed.replacing import renaming

_ROWS = 4096  # of a table in memory at a time; a multiple of a panel


@dataclass(frozen=True)
class Written:
    """The result of writing a packed file in another format."""

    what: str  # one line: format and architecture
    tensors: int
    file_bytes: int  # of all files
    notes: tuple[str, ...] = ()  # what someone who uses the result should know, a line each

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        lines = [f"written    {self.what}", f"size       {self.file_bytes / 1e6:.2f} MB, {self.tensors} tensors"]
        return "\n".join(lines + [f"note       {note}" for note in self.notes])


DRAFT_LEFT_OUT = "the draft is left out: answers stay the same, and come one token at a time"


class Graph(NamedTuple):
    """An architecture of another program: its computation, in terms of ModelConfig."""

    name: str
    computes: Mapping[str, tuple[Any, ...]]  # values of a field; of a field that is not here, only the default
    free: tuple[str, ...]  # fields of which it takes any value

    def differences(self, config: ModelConfig) -> list[str]:
        """Why the architecture does not compute this model, a phrase each; empty if it does."""
        size = {name: getattr(config, name) for name in _SIZES}
        size["vocab_size"] = max(size["vocab_size"], 1)  # 0 where images enter
        size["head_dim"] += size["head_dim"] % 2  # odd without RoPE
        plain = ModelConfig(**size, sub_norm=False)
        found = []
        for field in plain.to_dict():
            allowed = self.computes.get(field, (getattr(plain, field),))
            if field not in self.free and getattr(config, field) not in allowed:
                values = " or ".join(dict.fromkeys(map(repr, allowed)))
                found.append(f"{field} is {getattr(config, field)!r}, it computes {values}")
        return found


_SIZES = ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "ffn_dim", "max_context")
SIZES = (*_SIZES, "name", "norm_eps", "rope_theta", "rope_dim", "attention_scale")
"""Free in every decoder; `rope_problems` and `scale_problems` check rope_dim and attention_scale."""


def only_stack(file: PackedFile, path: str | os.PathLike[str]) -> ModelConfig:
    """The one stack of a packed file, which is at `path`. Raises ValueError if it has several, or sees images."""
    if any(config.input == "images" for config in file.configs):
        raise ValueError(
            f"{path} sees images, which no GGUF file of ours can; --to onnx writes them, and --to hf for a model like "
            "SigLIP, CLIP or PaliGemma"
        )
    if len(file.configs) != 1:
        raise ValueError(f"{path} has {len(file.configs)} stacks, only a model of one stack can be written")
    return file.configs[0]


def scale_problems(config: ModelConfig) -> list[str]:
    if abs(config.attention_scale * config.head_dim**0.5 - 1) > 1e-6:  # one fp32 rounding in STACKS
        return [f"attention_scale is {config.attention_scale}, only 1/sqrt(head_dim) can be written"]
    return []


def rope_problems(file: PackedFile, config: ModelConfig) -> list[str]:
    """Why its positions are not RoPE with the frequencies of rope_theta over whole heads, a phrase each."""
    from bitnet.model.positions import frequency_tables

    problems = []
    if config.position != "rope" or config.rope_dim != config.head_dim:
        found = f"rope_dim is {config.rope_dim}" if config.position == "rope" else f"position is {config.position!r}"
        problems.append(f"{found}, only models whose whole heads turn (RoPE) can be written")
    if config.first_position:
        problems.append(f"first_position is {config.first_position}, only 0 can be written")
    tables = frequency_tables(config)
    for record in file.tensors.values():
        if record.key.name in tables:
            expected = tables[record.key.name].numpy()
            # rope_theta is written, not the table, which may come from a program that rounds powers
            # differently, by a few units of 2^-24.
            if not np.allclose(file.values(record)[0], expected, rtol=1e-6, atol=0):
                problems.append(f"{record.key.name} is not the table of rope_theta = {config.rope_theta}")
    return problems


def nearest(program: str, candidates: Mapping[str, list[str]]) -> tuple[str, list[str]]:
    """The architecture with the fewest differences from a model, and a phrase about them.

    program: whose architectures they are. candidates: the differences of each, by its name.
    """
    name = min(candidates, key=lambda name: len(candidates[name]))
    if not (differences := candidates[name]):
        return name, []
    found = "; ".join(differences)
    return name, [f"no architecture of {program} computes this model, the nearest is {name}: {found}"]


def refuse(what: str, problems: Sequence[str], remedy: str = "") -> None:
    """Raises ValueError with all problems in one message, if there are any."""
    if problems:
        each = problems if len(problems) == 1 else [f"({n}) {text}" for n, text in enumerate(problems, 1)]
        raise ValueError(f"{what}: {'; '.join(each)}{remedy}")


def code_rows(file: PackedFile, record: Record) -> Iterator[NDArray[Any]]:
    """The codes, ternary or int8 (n, K), or stored floats, some rows at a time."""
    encoding, unit = record.encoding, record.encoding.unit
    if unit is None:
        yield file.codes(record)
        return
    size = encoding.rows_size(unit, record.cols)
    for first in range(0, record.rows, _ROWS):
        rows = min(_ROWS, record.rows - first)
        stored = file.stored(record, first // unit * size, -(-rows // unit) * size)
        yield encoding.decode(stored, rows, record.cols)


def value_rows(file: PackedFile, record: Record) -> Iterator[NDArray[np.float32]]:
    """The weights, scale · code or the stored floats, as fp32 (n, K), some rows at a time."""
    if not record.quantized:
        yield from (values.astype(np.float32, copy=False) for values in code_rows(file, record))
        return
    scales, first = file.scales(record), 0
    for codes in code_rows(file, record):
        rows = slice(first, first + len(codes))
        if record.scope == encodings.SCALE_GROUP:
            yield codes * spread_scales(scales.reshape(record.rows, -1)[rows], record.cols)
        else:
            yield codes * (scales[rows, None] if record.scope == encodings.SCALE_ROW else scales)
        first = rows.stop


@contextmanager
def replacing_folder(path: Path) -> Iterator[Path]:
    """A temporary folder beside `path`, on disk with all its files before it gets that name; else as `renaming`.

    A folder that is there must be empty. Killed half-way, a program leaves `path` as it was, and a hidden folder.
    """
    if path.is_symlink() or (path.exists() and not (path.is_dir() and not any(path.iterdir()))):
        found = "is a link" if path.is_symlink() else "is there already"
        raise FileExistsError(f"{path} {found}; give a new folder, or remove it first")
    with renaming(path) as temporary:
        temporary.mkdir()
        yield temporary
        for file in (*temporary.rglob("*"), temporary):
            flush(file)


def write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2, ensure_ascii=False) + "\n", "utf-8")
