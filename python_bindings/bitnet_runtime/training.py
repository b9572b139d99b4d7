"""Kernels of a training step, for `bitnet.kernels`, which knows torch."""

from __future__ import annotations

import os
from typing import Any

from bitnet_runtime._native import ffi, lib
from bitnet_runtime.machine import unknown_isa

ROWS: int = lib.BN_TRAIN_ROWS
"""Rows of a block, the unit in which threads take work."""

COLUMNS: int = lib.BN_TRAIN_COLUMNS
"""What the columns of tiles are a multiple of."""

OUTPUTS: int = lib.BN_TRAIN_OUTPUTS
"""What the rows of tiles are a multiple of."""

MOST_KEYS: int = lib.BN_TRAIN_KEYS
"""Keys of a row of attention weights."""

NULL = ffi.NULL


def address(data: int) -> Any:
    """A pointer to memory of the caller, for a member of a kernel's struct."""
    return ffi.cast("void *", data)


class Kernels:
    """The kernels of runtime_c/src/kernels/training.h, run by a team of threads."""

    def __init__(self, team: int) -> None:
        """team: the address of a function like GOMP_parallel.

        Raises InvalidParameterError if the environment variable BITNET_ISA names no tier that runs here.
        """
        self._table, self._team = ffi.new("bn_training_kernels *"), ffi.cast("bn_team *", team)
        product, isa = ffi.new("bn_train_product **"), os.environ.get("BITNET_ISA", "")
        if not lib.bn_training_select(self._table, product, isa.encode() or NULL):
            raise unknown_isa("BITNET_ISA", isa)
        self.product = product[0]
        """The engine's, for `linear`; NULL where torch's is as fast."""

    def run(self, name: str, rows: int, threads: int, *members: Any) -> None:
        """Compute all rows. members: those of the struct bn_train_`name`, in order."""
        args = ffi.new(f"bn_train_{name} *", members)
        lib.bn_training_run(getattr(self._table, name), args, rows, self._team, threads)
