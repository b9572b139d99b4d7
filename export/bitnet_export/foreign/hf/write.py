"""A packed file as a Hugging Face folder that `transformers` loads and that has the same logits.

    config.json, generation_config.json, model.safetensors
    tokenizer.json, tokenizer_config.json, chat_template.jinja    if the packed file has them
    README.md                                                     a card of the model

Every ternary projection becomes an `AutoBitLinear` in mode offline: y = (Σ x_q·W + b)·weight_scale.
It multiplies by the scale, so that γ is stored unchanged; the older `BitLinear` divides by it, but half
of all fp32 numbers γ are not the reciprocal of any fp32 number. Two forms of the weight:
- uint8 [N/4, K], four codes per byte, weight_scale = γ: if there is one γ and N is a multiple of 4;
- fp32 [N, K] = scale · code, weight_scale = 1: scales of rows and groups, other N, and the head.
The head quantizes its inputs if the engine's does, with int8 or ternary rows. A full-precision model needs neither
form, and classes without torch linear layers (experts, GPT-2) accept only such a model. transformers 5 needs
`accelerate` for both forms, and runs them on any device, including the CPU.
Source: integrations/bitnet.py, core_model_loading.py and modeling_*.py of transformers 5.23.
"""

from __future__ import annotations

import functools
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from bitnet.config import TERNARY_LINEARS
from bitnet_export.foreign.outgoing import (
    DRAFT_LEFT_OUT,
    Written,
    only_stack,
    refuse,
    replacing_folder,
    value_rows,
    write_json,
)
from bitnet_export.foreign.side_files import generation_of, special_tokens, write_generation, write_tokenizer
from bitnet_export.foreign.source import Progress
from bitnet_export.packed import encodings
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import ROLE, ROLES, WHOLE, Record, Spec

from .architectures import Architecture, architecture_of, describe, head_is_quantized
from .card import write_card
from .family import QUANTIZATION
from .image_architectures import (
    architecture_of_images,
    describe_images,
    is_of_images,
    preprocessor,
    sees_any,
    similarity,
)
from .places import LINEAR_NORM, Slice
from .settings import write_pooling


class _Entry(NamedTuple):
    """A tensor of model.safetensors."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    parts: Callable[[], Iterable[NDArray[Any]]]  # its bytes, in order


_MATRICES = (*TERNARY_LINEARS, "embedding", "head")
_POOLED = ("pool_q", "pool_k", "pool_v")
_DENSE = (
    "router", "position", "patch", "projector", "class_embedding", "pool_probe", "pool_o", "pool_up", "pool_down",
)  # fmt: skip
# A quantized model is not converted on loading, so floats are stored in the precision of the computation.
_DTYPES: dict[str, np.dtype[Any]] = {"U8": np.dtype("u1"), "F32": np.dtype("<f4")}


def write_folder(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, progress: Progress = lambda _: None
) -> Written:
    """Write a packed file as a Hugging Face folder, one tensor in memory at a time.

    out: the folder to create; an existing one must be empty.
    Raises PackedFormatError for a bad source, ValueError naming features that no architecture of transformers
    computes, FileExistsError, OSError; then nothing is left behind.
    """
    file = PackedFile.open(source).without_draft()
    seeing = is_of_images(file)
    config = file.configs[0] if seeing else only_stack(file, source)
    architecture = architecture_of_images(file) if seeing else architecture_of(file, config)
    refuse(f"{source} cannot become a Hugging Face folder", architecture.problems)
    out = Path(out)
    entries, generation = list(_entries(file, architecture)), generation_of(file)
    with replacing_folder(out) as folder:
        _write_tensors(folder / "model.safetensors", entries, progress)
        described = describe_images(file, architecture, generation) if seeing else describe(file, config, architecture)
        write_json(folder / "config.json", special_tokens(generation) | described)
        of_defaults = write_generation(folder, generation)
        write_tokenizer(folder, file, config, generation)
        if sees_any(file.configs):
            write_json(folder / "preprocessor_config.json", preprocessor(file.configs[-1], generation))
        elif not config.has_head and config.pooling != "none":
            write_pooling(folder, config)
        write_card(folder, file, out.resolve().name)
        size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    notes = [
        'for the same numbers load it with dtype float32, and run the engine with --kv-type f32 (kv_type="f32"): '
        "its cache of f16 moves " + ("log-probabilities by up to 0.1" if config.has_head else "numbers by up to 0.004")
    ]
    if unpacked := sum(r.encoding.ternary and not _is_packed(r) for r in file.tensors.values()):
        notes.append(f"{unpacked} ternary matrices are stored as fp32: packed ones have one scale, rows in fours")
    if any(_is_int8_linear(record) for record in file.tensors.values()):
        notes.append("linear layers of int8 are for transformers alone: this folder cannot be converted again")
    if config.n_experts and (config.dim % 8 or config.ffn_dim % 8):  # numbers of bf16
        notes.append(
            f"experts have rows of {config.dim} and {config.ffn_dim} numbers, and transformers multiplies rows of "
            'multiples of 16 bytes: load it with experts_implementation="eager"'
        )
    notes += [*of_defaults, *[DRAFT_LEFT_OUT] * file.draft_left_out]
    method = ", quant_method bitnet" if QUANTIZATION in described else ""
    return Written(f"Hugging Face folder, {architecture.name}{method}", len(entries), size, tuple(notes))


# ---- tensors ----


def _entries(file: PackedFile, architecture: Architecture) -> Iterator[_Entry]:
    """The tensors of the folder, in the order of the packed file."""
    scale = np.ones(1, np.float32)  # weight_scale of the projection whose bias comes next
    for record in file.tensors.values():
        family, places = architecture.of(record.key.stack)
        role = ROLES[record.key.role]
        if role.startswith("rope_"):
            continue
        name, module = places.name(record.key), places.module(record.key)
        place = places.place(record.key)[1]
        if isinstance(place, Slice) or (family.transposed and role in TERNARY_LINEARS and record.key.part == 0):
            if not isinstance(place, Slice) or place.at == 0:  # the others are part of the first one's entry
                yield _whole(file, record, architecture)
        elif record.key.part == 1:  # transformers adds a projection's bias before it multiplies by the scale
            yield _vector(name, file.values(record)[0] / (scale if role in TERNARY_LINEARS else np.float32(1)))
        elif role in _DENSE:
            spec = Spec(record.key, record.rows, record.cols, "vector" if record.key.role in WHOLE else "dense")
            yield _vector(name, file.values(record).reshape(places.shape(spec, record.rows)))
        elif role not in _MATRICES:
            gain = file.values(record)[0]
            yield _vector(name, gain - 1 if family.one_plus and not role.endswith(LINEAR_NORM) else gain)
        elif _is_packed(record):
            scale = file.scales(record)
            yield _Entry(name, "U8", (record.rows // 4, record.cols), functools.partial(_packed_rows, file, record))
            yield _vector(f"{module}.weight_scale", scale)
        else:
            scale = np.ones(1, np.float32)
            yield _Entry(name, "F32", (record.rows, record.cols), functools.partial(value_rows, file, record))
            if role != "embedding" and record.quantized:
                yield _vector(f"{module}.weight_scale", scale)
    for name, value in similarity(file.configs[0], architecture).items():
        yield _vector(name, value)
    if added := architecture.places.added():
        yield _vector(added, np.zeros((1, file.configs[0].dim), np.float32))
    if file.configs[0].tie_embeddings and head_is_quantized(file):
        yield _vector("lm_head.weight_scale", np.ones(1, np.float32))


def _whole(file: PackedFile, record: Record, architecture: Architecture) -> _Entry:
    """A float tensor that combines several of ours, or is stored as inputs × outputs."""
    places = architecture.of(record.key.stack)[1]
    name = places.name(record.key)
    roles = [ROLE[role] for role in (*TERNARY_LINEARS, *_POOLED)]
    keys = [record.key._replace(role=role) for role in roles]
    parts = [file.tensors[key] for key in keys if key in file.tensors and places.name(key) == name]
    rows = sum(part.cols if record.key.part else part.rows for part in parts)

    turned = record.key.part == 0 and ROLES[record.key.role] not in _POOLED

    def values() -> Iterator[NDArray[Any]]:
        matrix = np.concatenate([file.values(part) for part in parts], axis=1 if record.key.part else 0)
        yield matrix.T if turned else matrix

    return _Entry(
        name, "F32", (rows,) if record.key.part else (record.cols, rows) if turned else (rows, record.cols), values
    )


def _vector(name: str, values: NDArray[np.float32]) -> _Entry:
    return _Entry(name, "F32", values.shape, lambda: [values])


def _is_int8_linear(record: Record) -> bool:
    return record.encoding.kind == "int8" and ROLES[record.key.role] in TERNARY_LINEARS and record.key.part == 0


def _is_packed(record: Record) -> bool:
    """Whether the packed form of transformers can hold the tensor: one scale, whole bytes."""
    projection = ROLES[record.key.role] in TERNARY_LINEARS
    return projection and record.encoding.ternary and record.scope == encodings.SCALE_TENSOR and record.rows % 4 == 0


def _packed_rows(file: PackedFile, record: Record) -> Iterator[NDArray[np.uint8]]:
    """Bits 2i, 2i + 1 of byte row r hold code + 1 of row i·N/4 + r."""
    fields = (file.codes(record) + 1).view(np.uint8).reshape(4, record.rows // 4, record.cols)
    yield fields[0] | fields[1] << 2 | fields[2] << 4 | fields[3] << 6


def _write_tensors(path: Path, entries: list[_Entry], progress: Progress) -> None:
    """A safetensors file: u64 length of a JSON header, the header, the tensors without gaps."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for entry in entries:
        start, end = end, end + _DTYPES[entry.dtype].itemsize * math.prod(entry.shape)
        header[entry.name] = {"dtype": entry.dtype, "shape": list(entry.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "xb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for number, entry in enumerate(entries, 1):
            progress(f"writing tensor {number} of {len(entries)}")
            for part in entry.parts():
                file.write(np.ascontiguousarray(part, _DTYPES[entry.dtype]).data)
        assert file.tell() == 8 + len(text) + end
