"""Names of files: those that a model is opened from, its own and those of its adapters, and saved sessions."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from bitnet_runtime.errors import InvalidParameterError, shown

Adapters = Sequence[str | os.PathLike[str]] | Mapping[str, str | os.PathLike[str]]
"""Files, or files by name."""


def path_of(path: str | os.PathLike[str], kind: str = "packed file") -> Path:
    """Raises InvalidParameterError: this cannot be the path of a file."""
    if not isinstance(path, (str, os.PathLike)) or not isinstance(os.fspath(path), str):
        raise InvalidParameterError(f"path is {shown(path)}, expected the name of a {kind}", "path")
    if not os.fspath(path) or "\0" in os.fspath(path):
        found = "has a zero byte" if os.fspath(path) else "is empty"
        raise InvalidParameterError(f"path {found}, expected the name of a {kind}", "path")
    return Path(path)


def adapter_name(path: Path) -> str:
    """What an adapter is called that is given no name."""
    return path.name.removesuffix(".bitnet")


def files_of(adapters: Adapters) -> dict[str, Path]:
    """Files of adapters by their names. Raises InvalidParameterError."""
    if isinstance(adapters, Mapping):
        given = [(name, path_of(path)) for name, path in adapters.items()]
    elif isinstance(adapters, Sequence) and not isinstance(adapters, str | bytes):
        given = [(adapter_name(path_of(path)), path_of(path)) for path in adapters]
    else:
        raise InvalidParameterError(f"adapters is {shown(adapters)}, expected a list of files", "adapters")
    named: dict[str, Path] = {}
    for name, path in given:
        if not isinstance(name, str) or not name:
            raise InvalidParameterError(f"an adapter has the name {shown(name)}, expected a text", "adapters")
        if name in named:
            raise InvalidParameterError(
                f"two adapters have the name {shown(name)}; give a dictionary of names and files", "adapters"
            )
        named[name] = path
    return named


def of_which(detail: str, model: Path, adapters: Sequence[Path]) -> tuple[str, Path]:
    """The C library's reason for a failure, and the file it concerns."""
    match = re.match(r"adapter (\d+): ", detail)
    return (detail[match.end() :], adapters[int(match[1]) - 1]) if match else (detail, model)
