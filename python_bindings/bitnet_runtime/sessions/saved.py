"""Sessions as files. runtime_c/src/session/saved.c describes what is in one."""

from __future__ import annotations

import contextlib
import mmap
import os
import secrets
import stat
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple, Self

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import (
    CacheFullError,
    InvalidParameterError,
    ModelTooLargeError,
    SessionFileError,
    check,
    shown,
)
from bitnet_runtime.handles import Handle


def packed(session: Any, note: bytes) -> Any:
    """A bn_session that is not computing, as the bytes of a file."""
    if not isinstance(note, bytes):
        raise InvalidParameterError(f"note is {shown(note)}, expected bytes", "note")
    size = lib.bn_session_saved_size(session, len(note))
    data = ffi.new("uint8_t[]", size)
    check(lib.bn_session_save(session, ffi.from_buffer("uint8_t[]", note), len(note), data, size))
    return ffi.buffer(data)


def writable(path: Path) -> None:
    """Raises OSError: no file of this name can be created. Call it before computing what goes into the file."""
    _check_name(path)
    try:
        with open(trial := _beside(_target(path)), "xb"):
            pass
        trial.unlink()
    except OSError as error:  # no permission, or a file system that cannot be written
        error.filename = str(path)
        raise


def _check_name(path: Path) -> None:
    folder = _target(path).parent
    if not folder.is_dir():
        raise FileNotFoundError(f"folder {folder} does not exist; create it first")
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, expected the name of a file to write")
    if path.exists() and not path.is_file():  # the new file would take its place
        raise FileExistsError(f"{path} is a device or pipe, expected the name of a file to write")


def _target(path: Path) -> Path:
    """The file itself, where the name is a link to it."""
    return Path(os.path.realpath(path))


def _beside(path: Path) -> Path:
    """A new name, however long that of the file is."""
    return path.with_name(f".{secrets.token_hex(8)}.tmp")


def replace(path: Path, data: Any) -> None:
    """Put bytes in the place of a file, so that whoever looks finds the old ones or the new ones, and who may look
    stays as it was.

    An OSError speaks of `path`, not of the temporary name.
    """
    _check_name(path)
    target = _target(path)
    temporary = _beside(target)
    try:
        mode = stat.S_IMODE(target.stat().st_mode) if target.exists() else None
        first = 0o666 if mode is None else 0o600  # nobody reads it before it has the mode of the old one
        with open(temporary, "xb", opener=lambda name, flags: os.open(name, flags, first)) as file:
            if mode is not None:
                os.chmod(temporary, mode)
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, target)
    except BaseException as error:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(error, OSError):
            error.filename, error.filename2 = str(path), None
        raise
    with contextlib.suppress(OSError):  # a folder that cannot be opened
        folder = os.open(target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


_NO_FAULT_OF_THE_FILE = {lib.BN_ERR_MEMORY: ModelTooLargeError, lib.BN_ERR_CACHE: CacheFullError}


def load(model: Any, path: Path, new: Handle) -> bytes:
    """A session of a `bn_model *` to the handle; its note. Raises SessionFileError, OSError."""
    detail = ffi.new("char[]", lib.BN_DETAIL_SIZE)
    note, size = ffi.new("const uint8_t **"), ffi.new("uint64_t *")
    with _mapped(path) as data, ffi.from_buffer("uint8_t[]", data) as view:
        status = lib.bn_session_load(model, view, len(data), new.cell, note, size, detail)
        why = ffi.string(detail).decode("utf-8", "replace")
        if status:
            raise _NO_FAULT_OF_THE_FILE.get(status, SessionFileError)(f"{path}: {why}")
        return bytes(ffi.buffer(note[0], size[0]))


_RECORD = struct.Struct("<8s2I3Q2I4i2I2i2Q2IiI")
_MAGIC, _VERSION, _COVERED = b"\x89BNSESS\n", 2, 16  # these and the record as saved.c has them


class Saved(NamedTuple):
    """What a session file says of itself, read without its model."""

    bytes: int
    position: int
    context: int
    kv_type: str
    seed: int
    note_bytes: int
    model_bytes: int
    model_checksum: str  # of its header, as `bitnet inspect` shows it
    adapter_bytes: int  # 0: it has none
    adapter_checksum: str

    @classmethod
    def is_at(cls, path: str | os.PathLike[str]) -> bool:
        """Whether a file begins like a saved session. Raises OSError."""
        if not Path(path).is_file():
            return False
        with open(path, "rb") as file:
            return file.read(len(_MAGIC)) == _MAGIC

    @classmethod
    def of(cls, path: str | os.PathLike[str]) -> Self:
        """Raises SessionFileError: it is none, or damaged; OSError."""
        with _mapped(Path(path)) as data:
            if len(data) < _RECORD.size or data[: len(_MAGIC)] != _MAGIC:
                raise SessionFileError(f"{path} is no saved session, or only the beginning of one")
            _, version, crc, size, note, model, header, _, n_ctx, kv, _, position, *more = _RECORD.unpack_from(data)
            seed, adapter, adapter_header = more[4:7]
            if version != _VERSION:
                raise SessionFileError(f"{path} is a session of version {version}, expected {_VERSION}")
            with memoryview(data)[_COVERED:] as covered:
                if size != len(data) or zlib.crc32(covered) != crc or kv not in range(lib.BN_KV_TYPES):
                    raise SessionFileError(f"{path} is damaged: its size or its checksum is not what it says")
            name = ffi.string(lib.bn_kv_name(kv)).decode()
            of_adapter = f"{adapter_header:08x}" if adapter else ""
            return cls(size, position, n_ctx, name, seed, note, model, f"{header:08x}", adapter, of_adapter)


@contextlib.contextmanager
def _mapped(path: Path) -> Iterator[Any]:
    """The bytes of a file, which is refused before it is read whole if it is not a session."""
    with open(path, "rb", opener=lambda name, flags: os.open(name, flags | getattr(os, "O_NONBLOCK", 0))) as file:
        facts = os.fstat(file.fileno())
        if not stat.S_ISREG(facts.st_mode):
            raise SessionFileError(f"{path} is not a regular file, expected a saved session")
        if not facts.st_size:
            raise SessionFileError(f"{path} is empty, expected a saved session")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
            yield data
