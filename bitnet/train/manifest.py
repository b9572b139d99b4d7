"""manifest.json of a checkpoint: size and SHA-256 of every other file, written last.

Damage by a disk, a copy or a full volume is found before a checkpoint is used. In a checkpoint without a
manifest, from elsewhere or from an older version, only the sizes that safetensors files state are checked.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from stat import S_ISREG
from typing import TypeVar

from safetensors import SafetensorError, safe_open

from bitnet.process import sha256

NAME = "manifest.json"

T = TypeVar("T")


def write(folder: Path) -> None:
    """Write the manifest of the files now in a folder."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    (folder / NAME).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def damage(checkpoint: Path) -> str:
    """What is wrong with the files of a checkpoint; "" if nothing is. Reads all of them.

    Raises OSError if they cannot be read now, which says nothing about their content.
    """
    try:
        stats = {file.name: file.stat() for file in checkpoint.iterdir()}
    except (FileNotFoundError, NotADirectoryError) as error:
        return f"it cannot be read: {error.strerror}"
    sizes = {name: s.st_size for name, s in stats.items() if S_ISREG(s.st_mode)}
    if NAME not in sizes:
        return _without_manifest(checkpoint, sizes)
    try:
        for name, said in json.loads(_read(checkpoint / NAME, Path.read_bytes))["files"].items():
            if name not in sizes:
                return f"{name} is missing"
            if sizes[name] != said["bytes"]:
                return f"{name} has {sizes[name]:,} bytes, {NAME} says {said['bytes']:,}"
            if _read(checkpoint / name, sha256) != said["sha256"]:
                return f"{name} holds other bytes than were saved (SHA-256)"
    except FileNotFoundError as error:  # removed in the meantime
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{NAME} is damaged"
    return ""


def _without_manifest(checkpoint: Path, names: Iterable[str]) -> str:
    if "model.safetensors" not in names:
        return "model.safetensors is missing"
    for file in (checkpoint / name for name in names if name.endswith(".safetensors")):
        file.open("rb").close()  # safe_open reports any such error as a missing file
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            return f"{file.name} is damaged or not a safetensors file: {error}"
    return ""


def _read(file: Path, how: Callable[[Path], T]) -> T:
    """how(file), with the file named in any OSError: an error of reading, unlike one of opening, does not name it."""
    try:
        return how(file)
    except OSError as error:
        error.filename = str(file)
        raise
