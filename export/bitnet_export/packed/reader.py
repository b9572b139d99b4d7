"""Read a packed file: an independent twin of the C parser, over bytes or a file.

Opening checks everything FORMAT.md §6 lists before anything is used (`parsed.py`).
"""

from __future__ import annotations

import copy
import os
import stat
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from bitnet.config import ModelConfig

from . import encodings, layout, records
from .content import Content
from .parsed import PackedFormatError as PackedFormatError
from .parsed import Parsed
from .records import Base, Record


class PackedFile(Parsed):
    """A checked packed file. `PackedFile(bytes)` or `PackedFile.open(path)`.

    Attributes: version, file_size, header_crc, sections, configs (one ModelConfig per stack),
    tensors (Record by Key, in file order), metadata, base (for a separate adapter the model it belongs to, else None).
    """

    draft_left_out = False  # whether this is the result of `without_draft` on a file with a draft

    @classmethod
    def open(cls, path: str | os.PathLike[str], adapter: bool | None = False) -> Self:
        """Open a file, whose tensors are read from it on demand. adapter: as in `PackedFile`.

        Raises PackedFormatError if it is invalid, OSError if it cannot be read, here and later.
        """
        path = Path(path)
        mode = path.stat().st_mode
        if not stat.S_ISREG(mode):
            kind = "a directory" if stat.S_ISDIR(mode) else "not a regular file"
            hint = "; bitnet convert or bitnet export makes one of a model's folder" * stat.S_ISDIR(mode)
            raise PackedFormatError(f"{path}: is {kind}, expected a packed model file{hint}")
        content = Content.open(path)
        if content.size == 0:
            raise PackedFormatError(f"{path}: is empty, expected a packed model file")
        try:
            return cls(content, adapter)
        except PackedFormatError as error:
            raise PackedFormatError(f"{path}: {error}") from None

    # --- what the file holds ---

    @property
    def weights(self) -> Base:
        """The identity of the weights, which adapters of this model refer to."""
        of = {s.kind: s for s in self.sections}
        crcs = (of[kind].crc for kind in (records.DATA, records.STACKS, records.TENSORS))
        return Base(of[records.DATA].size, *crcs)

    @cached_property
    def config(self) -> ModelConfig:
        """The configuration of all stacks. Raises PackedFormatError if they do not form a model."""
        try:
            return ModelConfig.of_stacks(self.configs)
        except ValueError as error:
            raise PackedFormatError(f"the stacks do not go together: {error}") from None

    def without_draft(self) -> Self:
        """The file as if it had no draft: its stack, the last one, and its tensors are hidden."""
        first, *others = self.configs
        if all(config.input != "draft" for config in others):  # a draft alone has no model
            return self
        other = copy.copy(self)
        other.configs = (first, *(config for config in others if config.input != "draft"))
        other.tensors = {key: record for key, record in self.tensors.items() if key.stack < len(other.configs)}
        other.draft_left_out = True
        return other

    def scales(self, record: Record) -> NDArray[np.float32]:
        """Scales as fp32: (0,), (1,), (N,) or, row by row, (N * ceil(K/128),)."""
        raw = self._data(record.scale_offset, record.scale_size)
        if record.scope == encodings.SCALE_GROUP:
            return layout.unpack_group_scales(raw, record.rows, record.cols).reshape(-1)
        return raw.view("<f4")

    def codes(self, record: Record) -> NDArray[Any]:
        """int8 (N, K) of a ternary or int8 tensor; the stored floats of any other."""
        return record.encoding.decode(self.stored(record), record.rows, record.cols)

    def values(self, record: Record) -> NDArray[np.float32]:
        """The weights as fp32 (N, K): scale · code, or the stored floats."""
        if not record.quantized:
            return self.codes(record).astype(np.float32, copy=False)
        scales = self.scales(record).reshape(-1, 1)
        if record.scope == encodings.SCALE_GROUP:
            scales = layout.spread_scales(scales.reshape(record.rows, -1), record.cols)
        return self.codes(record) * scales

    @property
    def sparse(self) -> bool:
        """Whether some matrices are stored in lines, of which the engine reads only relevant ones."""
        return any(record.encoding.lines for record in self.tensors.values())

    @property
    def sketched(self) -> bool:
        """Whether the engine estimates logits from a sketch, and computes only relevant ones."""
        return any(record.encoding == encodings.INT8_SKETCH for record in self.tensors.values())

    def zero_fraction(self, record: Record) -> float | None:
        """Share of ternary codes that are 0; None for other encodings."""
        if not record.encoding.ternary:
            return None
        return float((self.codes(record) == 0).mean())
