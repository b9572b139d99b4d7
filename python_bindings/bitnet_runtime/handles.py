"""Who frees the C objects, and when.

A `Handle` frees its object with the last reference to it: that of its Model or Session, or of a
call that is running. So nothing is freed while it is in use, whatever a signal handler or another
thread closes, and without a lock: finalizers run in any thread at any moment, where waiting for
one may be waiting for oneself.

A handle is there before its object is, and what frees it is C. So there is no moment at which
Ctrl-C could lose it. The cyclic collector finalizes in any order: in the C library a model lives
as long as its sessions.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any, Literal, NoReturn, Self, SupportsIndex

from bitnet_runtime._native import ffi, lib


class Handle:
    """A `bn_model *` or a `bn_session *`, NULL until a C call wrote one to `cell`.

    Keep the handle in a variable while `pointer` is used.
    """

    __slots__ = ("_freeing", "cell")

    def __init__(self, kind: Literal["model", "session"]) -> None:
        self.cell = ffi.new(f"bn_{kind} **")
        self._freeing = ffi.gc(self.cell, lib.drop_model if kind == "model" else lib.drop_session)

    @property
    def pointer(self) -> Any:
        return self.cell[0]


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
    """Something that exists only in this process, so it cannot be pickled or copied."""

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        raise TypeError(
            f"a {type(self).__name__} cannot be copied or pickled; give another process the model's path, "
            "and load it there"
        )
