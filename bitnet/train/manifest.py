"""manifest.json of a checkpoint: size and SHA-256 of every other file, written last.

What a disk, a copy or a full volume did to a checkpoint is found before anything is made of it.
A checkpoint without one, from elsewhere or from an older version, is checked as far as safetensors
files know their own size.
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
    """Of the files that are in a folder now."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    (folder / NAME).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def damage(checkpoint: Path) -> str:
    """What is wrong with the files of a checkpoint; "" when nothing is. Reads all of them.

    Raises OSError: they cannot be read now, which says nothing about what is in them.
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
    except FileNotFoundError as error:  # removed this moment
        return f"{Path(error.filename).name} is missing"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{NAME} is damaged"
    return ""


def _without_manifest(checkpoint: Path, names: Iterable[str]) -> str:
    if "model.safetensors" not in names:
        return "model.safetensors is missing"
    for file in (checkpoint / name for name in names if name.endswith(".safetensors")):
        file.open("rb").close()  # of any error here, safe_open says that there is no file
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            return f"{file.name} is damaged or not a safetensors file: {error}"
    return ""


def _read(file: Path, how: Callable[[Path], T]) -> T:
    """Its OSError names the file: that of a read, unlike that of `open`, does not."""
    try:
        return how(file)
    except OSError as error:
        error.filename = str(file)
        raise
