"""Who frees the C objects, and when.

A `Handle` frees its object with the last reference to it: that of its Model or Session, or of a
call that is running. So nothing is freed while it is in use, whatever a signal handler or another
thread closes, and without a lock: finalizers run in any thread at any moment, where waiting for
one may be waiting for oneself.

The C library wants every session freed before its model, and the cyclic collector finalizes in
any order. So the model is closed by whichever of its handles goes last.
"""

from __future__ import annotations

import contextlib
from abc import ABC, abstractmethod
from typing import Any, NoReturn, Self, SupportsIndex

from bitnet_runtime._native import ffi, lib


class _Family:
    """One `bn_model *`, and the handles that need it. Changed by single atomic calls only."""

    def __init__(self, model: Any) -> None:
        self.model = [model]  # empty when closed
        self.members: set[int] = set()


class Handle:
    """A `bn_model *`, or a `bn_session *` made from `model`. Keep it in a variable while `pointer` is used."""

    __slots__ = ("_family", "_free", "pointer")

    def __init__(self, pointer: Any, model: Handle | None = None) -> None:
        """model: the handle of the model, or of another session of it."""
        self.pointer = pointer
        self._family: _Family = model._family if model else _Family(pointer)
        self._free = lib.bn_session_free if model else None
        self._family.members.add(id(self))

    def __del__(self, close: Any = lib.bn_model_close, null: Any = ffi.NULL) -> None:
        pointer, self.pointer = self.pointer, null  # another finalizer of the same garbage may still call
        if self._free:
            self._free(pointer)
        self._family.members.discard(id(self))
        if not self._family.members:
            with contextlib.suppress(IndexError):  # another thread was quicker
                close(self._family.model.pop())


class Closing(ABC):
    """What the end of its `with` block closes."""

    @abstractmethod
    def close(self) -> None:
        """End it. Closing twice is fine."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Unique:
    """What stands for something in this process, so that a copy would not be another one of it."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; give another process the model's path, "
            "and load it there"
        )
