"""The small files of a model folder: found only inside the folder, and read strictly."""

from __future__ import annotations

import json
import os
import re
import stat
from pathlib import Path
from typing import Any

from bitnet_export.foreign.source import SourceError
from bitnet_export.packed import strict_json
from bitnet_export.packed.recognise import PROBE, recognise
from bitnet_runtime.errors import json_kind

_SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")  # half a letter, as JSON escapes it
_POINTER = b"version https://git-lfs"
MAX_JSON = 8 << 20
MAX_TOKENIZER = 128 << 20
MAX_SENTENCEPIECE = 32 << 20  # Gemma's, with 262,144 pieces, has 5 MB


class Folder:
    """A folder whose file names are untrusted: none may lead out of it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        root = path.resolve(strict=True)
        self._roots = [root]
        if root.parent.name == "snapshots":  # the hub's cache: links into `blobs`, next to `snapshots`
            self._roots.append(root.parent.parent / "blobs")

    def find(self, name: str) -> Path | None:
        """The regular file of that name, None if there is none. Raises SourceError if it is outside, or not a file."""
        if not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts:
            raise SourceError(f"{self.path}: {name!r} is not the name of a file in this folder")
        path = self.path / name
        try:
            real = path.resolve(strict=True)
            mode = real.stat().st_mode
        except (FileNotFoundError, NotADirectoryError):
            if path.is_symlink():
                raise SourceError(f"{path} is a link to a file that does not exist; download it again") from None
            return None
        except (OSError, RuntimeError) as error:  # RuntimeError: a loop of links, before Python 3.13
            raise SourceError(f"{path} cannot be read: {error}") from None
        if not any(real.is_relative_to(root) for root in self._roots):
            raise SourceError(f"{path} is a link to {real}, outside of the folder; put the file itself there")
        if not stat.S_ISREG(mode):
            raise SourceError(f"{path} is not a regular file")
        return real

    def read(self, name: str, limit: int) -> bytes | None:
        """All bytes of a file, None if there is none."""
        path = self.find(name)
        if path is None:
            return None
        with open(path, "rb") as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise SourceError(f"{self.path / name} is larger than {limit} bytes, more than such a file needs")
        refuse_pointer(content, str(self.path / name))
        return content

    def json(self, name: str) -> dict[str, Any]:
        """The object in a JSON file, empty if there is no such file."""
        content = self.read(name, MAX_JSON)
        return {} if content is None else strict_object(content, str(self.path / name))


def refuse_pointer(head: bytes, what: str) -> None:
    """Raises SourceError if a file is a Git LFS pointer instead of a large file. head: its first bytes."""
    if head.startswith(_POINTER):
        raise SourceError(f"{what} is {recognise(head[:PROBE])}")


def strict_object(content: bytes, what: str) -> dict[str, Any]:
    """A JSON object with unique names, only finite numbers, and text that can be written as UTF-8."""
    try:
        value = strict_json.parse(content)
        if _SURROGATE.search(content):
            json.dumps(value, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{what} is not the JSON expected: {error}") from None
    if not isinstance(value, dict):
        raise SourceError(f"{what} holds {json_kind(value)}, expected an object")
    return value
