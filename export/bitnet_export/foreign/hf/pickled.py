"""Tensors that torch.save wrote, read without executing its content: of old folders, and of checkpoints.

Those of a checkpoint are under `model` or `thinker`, next to the training state, or at the top level.
"""

from __future__ import annotations

import pickle
import warnings
import zipfile
from pathlib import Path
from typing import Any

from bitnet_export.foreign.source import SourceError
from bitnet_export.packed.content import Content
from bitnet_export.packed.recognise import PROBE

from .folder import Folder, refuse_pointer
from .shards import PICKLED, PICKLED_INDEX, SINGLE, Entry, open_shards

_FIRST = ("thinker_best.pt", "thinker.pt")
_INSIDE = ("model", "thinker")
_COMPILED = "_orig_mod."  # in names of modules wrapped by torch.compile
_DTYPES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "bool": "BOOL", "int64": "I64"}
"""The latter two are of masks and positions that old programs saved, and nothing reads."""


def open_checkpoint(folder: Folder) -> tuple[dict[str, Entry], list[str]]:
    """Every tensor by name, and assumptions. Raises SourceError if there is no such file, or it is of another kind."""
    found = sorted(path.name for path in folder.path.glob("*.pt"))
    name = next((name for name in _FIRST if name in found), found[0] if len(found) == 1 else None)
    if name is None:
        those = f"{len(found)} files .pt" if found else "neither model.safetensors nor a file .pt"
        raise SourceError(f"{folder.path} has {those}; expected {SINGLE}, {' or '.join(_FIRST)}, or one file .pt")
    path = folder.find(name)
    assert path is not None
    what = str(folder.path / name)
    state = _load(path, what)
    for key in _INSIDE:
        state = state[key] if isinstance(state.get(key), dict) else state
    tensors = {str(key).replace(_COMPILED, ""): _entry(value, f"{what}: tensor {key}") for key, value in state.items()}
    return tensors, [f"the weights are those of {name}"] if len(found) > 1 else []


def open_pickled(folder: Folder) -> dict[str, Entry]:
    """Every tensor of pytorch_model.bin or its shards by name, all in memory. Raises SourceError as `open_shards`."""
    return open_shards(folder, PICKLED, PICKLED_INDEX, _tensors_in)


def _tensors_in(path: Path, what: str) -> dict[str, Entry]:
    return {str(key): _entry(value, f"{what}: tensor {key}") for key, value in _load(path, what).items()}


def _load(path: Path, what: str) -> dict[Any, Any]:
    import torch

    with open(path, "rb") as file:
        refuse_pointer(file.read(PROBE), what)
    _check_size(path, what)
    try:
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(path, map_location="cpu", weights_only=True)  # not mapped: it may be truncated meanwhile
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError,
            OSError, OverflowError, MemoryError, AssertionError) as error:  # fmt: skip
        first = str(error).split("\n", 1)[0]
        why = "" if first.startswith("Weights only") else f": {first:.160}"  # it goes on for programmers
        raise SourceError(f"{what} is no checkpoint of tensors alone that torch.save wrote{why}") from None
    if not isinstance(state, dict):
        raise SourceError(f"{what} holds a {type(state).__name__}, expected a dictionary of tensors")
    return state


def _check_size(path: Path, what: str) -> None:
    """torch.save stores data once and uncompressed; otherwise a small file could fill the memory."""
    try:
        with zipfile.ZipFile(path) as archive:
            entries, there = archive.infolist(), archive.start_dir
    except (zipfile.BadZipFile, OSError, ValueError, LookupError, RuntimeError):
        return  # the format before torch 1.6, or one that it cannot read
    if any(each.compress_type for each in entries) or sum(each.file_size for each in entries) > there:
        raise SourceError(f"{what} is compressed, or has parts that overlap; expected a file as torch.save writes it")


def _entry(value: object, what: str) -> Entry:
    import torch

    if not isinstance(value, torch.Tensor):
        raise SourceError(f"{what} is a {type(value).__name__}, expected a tensor")
    dtype = _DTYPES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None or value.layout != torch.strided:
        raise SourceError(
            f"{what} has dtype {value.dtype} and layout {value.layout}, expected floats of 16 or 32 bits, or bytes"
        )
    if not value.is_contiguous():
        raise SourceError(
            f"{what} is a part of another tensor, expected one of its own; save the state_dict of a model"
        )
    content = memoryview(value.detach().reshape(-1).view(torch.uint8).numpy().data)
    return Entry(Content(content, what), what, dtype, tuple(value.shape), 0)
