"""The part of `Model` that knows its adapters."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.errors import ClosedError, InvalidParameterError, check, shown
from bitnet_runtime.handles import Handle, Unique


class ModelAdapters(Unique):
    """An open model and its adapters."""

    _path: Path
    _handle: Handle | None  # None when closed
    _adapters: dict[str, Path]

    @property
    def adapters(self) -> tuple[str, ...]:
        """Names of the adapters that the model was loaded with; a text can have one."""
        return tuple(self._adapters)

    @property
    def files(self) -> tuple[Path, ...]:
        """The packed file, and those of its adapters."""
        return self._path, *self._adapters.values()

    def adapter_number(self, name: str | None) -> int:
        """The number of an adapter in the C library; 0 for None. Raises InvalidParameterError: no such adapter."""
        if name is None:
            return 0
        if not isinstance(name, str) or name not in self._adapters:
            known = f"expected one of {', '.join(self._adapters)}" if self._adapters else "this model has none"
            raise InvalidParameterError(
                f"adapter is {shown(name)}, {known}; Model.load(path, adapters=[…]) loads them", "adapter"
            )
        return 1 + [*self._adapters].index(name)

    def adapter_digest(self, name: str | None) -> str | None:
        """SHA-256 of the file of an adapter, as it was opened; None for None."""
        if name is None:
            return None
        with self._file(name) as file:
            return hashlib.sha256(file).hexdigest()

    def adapter_checksum(self, name: str) -> str:
        """Checksum of the header of an adapter's file, as `bitnet inspect` shows it."""
        with self._file(name) as file:
            return header_checksum(file)

    @contextmanager
    def _file(self, adapter: str | None = None) -> Iterator[Any]:
        """All bytes of the packed file, or of that of an adapter, as a buffer for the time of the block."""
        data, size = ffi.new("const uint8_t **"), ffi.new("size_t *")
        handle = self._open
        if adapter is None:
            check(lib.bn_model_get_file(handle.pointer, data, size))
        else:
            check(lib.bn_model_get_adapter(handle.pointer, self.adapter_number(adapter), data, size))
        yield ffi.buffer(data[0], size[0])

    def _go_on(self) -> None:
        """Raises ClosedError if the model was closed."""
        self._open  # noqa: B018  raises

    @property
    def _open(self) -> Handle:
        if self._handle is None:
            raise ClosedError(f"the model {self._path.name} is closed; load it again")
        return self._handle


def header_checksum(file: Any) -> str:
    """The header checksum in the bytes of a packed file (FORMAT.md §1)."""
    return bytes(file[60:64])[::-1].hex()
