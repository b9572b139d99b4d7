"""Sessions as files. What is in one is said in runtime_c/src/session/saved.c."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import InvalidParameterError, SessionFileError, check, shown


def packed(session: Any, note: bytes) -> Any:
    """A bn_session, at rest, as the bytes of a file."""
    if not isinstance(note, bytes):
        raise InvalidParameterError(f"note is {shown(note)}, expected bytes", "note")
    size = lib.bn_session_saved_size(session, len(note))
    data = ffi.new("uint8_t[]", size)
    check(lib.bn_session_save(session, ffi.from_buffer("uint8_t[]", note), len(note), data, size))
    return ffi.buffer(data)


def writable(path: Path) -> None:
    """Raises OSError: there can be no new file of this name. To be asked before the work whose result it gets."""
    if not path.parent.is_dir():
        raise FileNotFoundError(f"folder {path.parent} does not exist; create it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, expected the name of a file to write")
    if path.exists() and not path.is_file():  # the new file would take its place
        raise FileExistsError(f"{path} is a device or pipe, expected the name of a file to write")


def replace(path: Path, data: Any) -> None:
    """Put bytes in the place of a file, so that whoever looks finds the old ones or the new ones.

    An OSError speaks of `path`, not of the temporary name.
    """
    writable(path)
    temporary = path.with_name(f".{path.name[:200]}.{secrets.token_hex(4)}")
    try:
        with open(temporary, "xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
    with contextlib.suppress(OSError):  # a folder that cannot be opened
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def load(model: Any, path: str | os.PathLike[str]) -> tuple[Any, bytes]:
    """A bn_session of a bn_model, and the note. Raises SessionFileError, OSError."""
    out, detail = ffi.new("bn_session **"), ffi.new("char[]", lib.BN_DETAIL_SIZE)
    note, size = ffi.new("const uint8_t **"), ffi.new("uint64_t *")
    with _mapped(Path(path)) as data, ffi.from_buffer("uint8_t[]", data) as view:
        status = lib.bn_session_load(model, view, len(data), out, note, size, detail)
        why = ffi.string(detail).decode("utf-8", "replace")
        if status in (lib.BN_ERR_MEMORY, lib.BN_ERR_CACHE):
            check(status, f"{path}: {why}")
        if status:
            raise SessionFileError(f"{path}: {why}")
        return out[0], bytes(ffi.buffer(note[0], size[0]))


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[Any]:
    """The bytes of a file; what is no session is refused before all of it is read."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise SessionFileError(f"{path} is not a regular file, expected a saved session")
        if not facts.st_size:
            raise SessionFileError(f"{path} is empty, expected a saved session")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
