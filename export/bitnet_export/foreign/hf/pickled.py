"""Tensors that torch.save wrote, read without executing its content: of old folders, and of checkpoints.

Those of a checkpoint may be one level below, next to the training state. Their values stay in the file until they
are needed, as those of safetensors do; only of the format before torch 1.6 they are all in memory.
"""

from __future__ import annotations

import pickle
import struct
import warnings
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bitnet_export.foreign.source import SourceError
from bitnet_export.packed.content import Content
from bitnet_export.packed.recognise import PROBE

from .folder import Folder, refuse_pointer
from .shards import PICKLED, PICKLED_INDEX, SINGLE, Entry, open_shards

_FIRST = ("thinker_best.pt", "thinker.pt")
_INSIDE = ("model", "thinker", "state_dict", "model_state_dict")
_COMPILED = "_orig_mod."  # in names of modules wrapped by torch.compile
_DTYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "U8", "bool": "BOOL",
    "int64": "I64",
}  # fmt: skip
"""The last two are of masks and positions that old programs saved, and nothing reads."""
_LOCAL_HEADER = struct.Struct("<26xHH")  # of a part of a zip file: lengths of its name and of what follows that


def open_checkpoint(folder: Folder) -> tuple[dict[str, Entry], list[str]]:
    """Every tensor by name, and assumptions. Raises SourceError if there is no such file, or it is of another kind."""
    found = sorted(path.name for path in folder.path.glob("*.pt"))
    name = next((name for name in _FIRST if name in found), found[0] if len(found) == 1 else None)
    if name is None:
        those = f"{len(found)} files .pt" if found else "neither model.safetensors nor a file .pt"
        raise SourceError(f"{folder.path} has {those}; expected {SINGLE}, {' or '.join(_FIRST)}, or one file .pt")
    path = folder.find(name)
    assert path is not None
    tensors = _tensors_in(path, str(folder.path / name))
    return tensors, [f"the weights are those of {name}"] if len(found) > 1 else []


def open_pickled(folder: Folder) -> dict[str, Entry]:
    """Every tensor of pytorch_model.bin or its shards by name. Raises SourceError as `open_shards`."""
    return open_shards(folder, PICKLED, PICKLED_INDEX, _tensors_in)


def _tensors_in(path: Path, what: str) -> dict[str, Entry]:
    with open(path, "rb") as file:
        refuse_pointer(file.read(PROBE), what)
    parts = _parts(path, what)
    state = _load(path, what, "meta" if parts else "cpu")
    for key in _INSIDE:
        state = state[key] if isinstance(state.get(key), dict) else state
    content = Content.open(path)
    return {
        str(key).replace(_COMPILED, ""): _entry(value, f"{what}: tensor {key}", content, parts)
        for key, value in state.items()
    }


def _load(path: Path, what: str, device: str) -> dict[Any, Any]:
    """device: "meta" for tensors that only say where they are."""
    import torch

    try:
        with warnings.catch_warnings(action="ignore"):
            state = torch.load(path, map_location=device, weights_only=True)  # not mapped, as content.py says
    except (pickle.UnpicklingError, RuntimeError, ValueError, EOFError, LookupError, TypeError, AttributeError,
            OSError, OverflowError, MemoryError, AssertionError) as error:  # fmt: skip
        first = "it ends too soon" if isinstance(error, EOFError) else str(error).split("\n", 1)[0]
        why = "" if not first or first.startswith("Weights only") else f": {first:.160}"  # it goes on for programmers
        raise SourceError(f"{what} is no checkpoint of tensors alone that torch.save wrote{why}") from None
    if not isinstance(state, dict):
        raise SourceError(f"{what} holds a {type(state).__name__}, expected a dictionary of tensors")
    return state


def _parts(path: Path, what: str) -> dict[int, int]:
    """Sizes of the parts of a zip file by their place; empty for the format before, or what is not little-endian.

    torch.save stores data once and uncompressed; otherwise a small file could fill the memory.
    """
    try:
        with zipfile.ZipFile(path) as archive, open(path, "rb") as file:
            entries, there = archive.infolist(), archive.start_dir
            swapped = any(e.filename.endswith("/byteorder") and archive.read(e) == b"big" for e in entries)
            found = {}
            for each in entries:
                file.seek(each.header_offset)
                name, more = _LOCAL_HEADER.unpack(file.read(_LOCAL_HEADER.size))
                found[each.header_offset + _LOCAL_HEADER.size + name + more] = each.file_size
    except (zipfile.BadZipFile, OSError, ValueError, LookupError, RuntimeError, struct.error):
        return {}
    if any(each.compress_type for each in entries) or sum(each.file_size for each in entries) > there:
        raise SourceError(f"{what} is compressed, or has parts that overlap; expected a file as torch.save writes it")
    return {} if swapped else found


def _entry(value: object, what: str, file: Content, parts: Mapping[int, int]) -> Entry:
    import torch

    if not isinstance(value, torch.Tensor):
        raise SourceError(f"{what} is a {type(value).__name__}, expected a tensor")
    dtype = _DTYPES.get(str(value.dtype).removeprefix("torch."))
    if dtype is None or value.layout != torch.strided:
        raise SourceError(
            f"{what} has dtype {value.dtype} and layout {value.layout}, expected floats of 16 to 64 bits, or bytes"
        )
    if not value.nbytes:
        return Entry(Content(memoryview(b""), what), what, dtype, tuple(value.shape), 0)
    storage = value.untyped_storage()
    if value.nbytes > storage.nbytes():
        raise SourceError(f"{what} repeats the {storage.nbytes()} bytes of a smaller one, expected one of its own")
    if value.is_meta:
        start: int = getattr(storage, "_checkpoint_offset", -1)
        if parts.get(start) != storage.nbytes():
            raise SourceError(f"{what} is not where the directory of the file has it; write it again with torch.save")
        if value.is_contiguous():
            first = start + int(value.storage_offset()) * value.itemsize
            return Entry(file, what, dtype, tuple(value.shape), first)
        stored = torch.from_numpy(file.read(start, storage.nbytes())).view(value.dtype)
        value = stored.as_strided(value.shape, value.stride(), value.storage_offset())
    content = memoryview(value.detach().contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return Entry(Content(content, what), what, dtype, tuple(value.shape), 0)
