"""A file or folder appears under its name only when it is complete, and replaces nothing but an older result."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from bitnet.process import flush

from . import records

_TOO_MUCH = dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "no space left") | {errno.EFBIG: "limit on the size of files"}


@contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A temporary path in the folder of `path`, on disk before it gets that name, removed on any failure.

    A link stays one, and who may read an older file may read the new one, as with sessions.
    """
    path = Path(os.path.realpath(path))
    check_place(path)
    with renaming(path) as temporary:
        yield temporary
        flush(temporary)
        if path.exists():
            shutil.copymode(path, temporary)


def check_place(path: Path) -> None:
    """Raises OSError if no file can be written there."""
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a directory, expected the name of a file to write")
    if path.exists() and not path.is_file():
        raise FileExistsError(f"{path} is a device or pipe, expected the name of a file to write")
    _check_folder(path)


def _check_folder(path: Path) -> None:
    if path.name in ("", ".."):  # replacing it would leave processes in a deleted current folder
        raise FileExistsError(f"{path} has no name of its own; give the name of a new folder")
    if path.parent.exists() and not path.parent.is_dir():
        raise NotADirectoryError(f"{path.parent} is not a folder, expected one to write into; name another")
    if not path.parent.is_dir():
        raise FileNotFoundError(f"folder {path.parent} does not exist; create it first")
    with contextlib.suppress(FileNotFoundError):
        path.lstat()  # raises where the name is too long, which renaming would report only at the end


@contextmanager
def renaming(path: Path) -> Iterator[Path]:
    """A temporary name next to `path` for a file or folder, renamed to it on success, removed on any failure.

    An OSError names `path`, not the temporary name.
    """
    _check_folder(path)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")  # short, however long that of the file is
    try:
        yield temporary
        os.replace(temporary, path)
    except OSError as error:
        if error.errno in _TOO_MUCH:
            what = _TOO_MUCH[error.errno]
            raise OSError(
                error.errno, f"{what} while writing {path}; free some or choose another folder, nothing was kept"
            ) from error
        if error.filename is not None:
            error.filename = str(error.filename).replace(str(temporary), str(path))
        raise
    finally:
        if temporary.is_dir():
            shutil.rmtree(temporary, ignore_errors=True)
        elif temporary.exists():
            temporary.unlink()
    flush(path.parent)


def spare(source: Path, out: Path, kind: str = "model") -> None:
    """Raises FileExistsError if writing `out` would replace the source, a part of it, or anything but an older result.

    kind: of the new file, as in `kind_of`.
    """
    if not out.is_file():
        return
    found = kind_of(out)
    is_checkpoint = (source / "state.json").is_file()  # it is inside a run folder
    folder = source.resolve().parent if is_checkpoint else source.resolve()
    inside = source.is_dir() and found != kind and out.resolve().is_relative_to(folder)
    if inside or (source.is_file() and out.samefile(source)):
        raise FileExistsError(f"{out} is {'in ' if inside else ''}the source and would be replaced; give another name")
    if found != kind and out.stat().st_size:
        what = f"is {_KINDS[found]}, expected" if found else "is not"
        raise FileExistsError(f"{out} exists and {what} {_KINDS[kind]}; give another name")


GGUF_MARK = b"bitnet-edge"
_KINDS = {
    "model": "a packed file", "adapter": "an adapter", "GGUF": "a GGUF file of our own",
    "foreign GGUF": "a GGUF file of another program",
}  # fmt: skip


def kind_of(file: Path) -> str | None:
    """The kind of a file by its first bytes: "model", "adapter" and "GGUF" (ours), "foreign GGUF"; None: another."""
    with file.open("rb") as handle:
        head = handle.read(256)
    if head.startswith(records.MAGIC):
        flags = records.HEADER.unpack_from(head)[2] if len(head) >= records.HEADER.size else 0
        return "adapter" if flags & records.ADAPTER_ALONE else "model"
    if head.startswith(b"GGUF"):
        return "GGUF" if GGUF_MARK in head else "foreign GGUF"
    return None
