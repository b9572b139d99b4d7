"""manifest.json of a checkpoint: size and SHA-256 of every other file, written last.

What a disk, a copy or a full volume did to a checkpoint is found before anything is made of it.
A checkpoint without one, from elsewhere or from an older version, is checked as far as safetensors
files know their own size.
"""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open

from bitnet.process import sha256

NAME = "manifest.json"


def write(folder: Path) -> None:
    """Of the files that are in a folder now."""
    files = {file.name: {"bytes": file.stat().st_size, "sha256": sha256(file)} for file in sorted(folder.iterdir())}
    (folder / NAME).write_text(json.dumps({"files": files}, indent=2) + "\n", encoding="utf-8")


def damage(checkpoint: Path) -> str:
    """What is wrong with the files of a checkpoint; "" when nothing is. Reads all of them, once in a process."""
    try:
        stats = {file.name: file.stat() for file in checkpoint.iterdir()}
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    seen = tuple(sorted((name, s.st_ino, s.st_size, s.st_mtime_ns, s.st_ctime_ns) for name, s in stats.items()))
    return _damage(checkpoint.resolve(), seen)


@functools.lru_cache(maxsize=64)
def _damage(checkpoint: Path, seen: tuple[Any, ...]) -> str:
    """seen: what tells that the files are not those of an earlier call."""
    try:
        if not (checkpoint / NAME).exists():
            return _without_manifest(checkpoint)
        for name, said in json.loads((checkpoint / NAME).read_text(encoding="utf-8"))["files"].items():
            file = checkpoint / name
            if not file.is_file():
                return f"{name} is missing"
            if (size := file.stat().st_size) != said["bytes"]:
                return f"{name} has {size:,} bytes, {NAME} says {said['bytes']:,}"
            if sha256(file) != said["sha256"]:
                return f"{name} holds other bytes than were saved (SHA-256)"
    except OSError as error:
        return f"it cannot be read: {error.strerror}"
    except (ValueError, TypeError, KeyError, AttributeError):
        return f"{NAME} is damaged"
    return ""


def _without_manifest(checkpoint: Path) -> str:
    if not (checkpoint / "model.safetensors").is_file():
        return "model.safetensors is missing"
    for file in checkpoint.glob("*.safetensors"):
        try:
            with safe_open(file, framework="np"):
                pass
        except SafetensorError as error:
            return f"{file.name} is damaged or not a safetensors file: {error}"
    return ""
