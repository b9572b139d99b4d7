"""A packed file to another with a different encoding of the ternary weights, without loss."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from bitnet.config import ModelConfig
from bitnet_export.packed import encodings, records
from bitnet_export.packed.encodings import Encoding
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import Spec
from bitnet_export.packed.replacing import spare
from bitnet_export.packed.writer import Encoded, write_sections

from . import sparsity
from .pictures import drawn_images, engine_sees
from .reading import EngineReader, Floats, drawn, whole
from .verify import VerificationError

TOKENS = 32  # whose logits are compared


@dataclass(frozen=True)
class Repacked:
    """What was written, and how far it was found equal to the source."""

    source_bytes: int
    file_bytes: int
    ternary_weights: int
    ternary_bits_per_weight: float
    tensors_equal: int
    logits_equal: int  # tokens whose logits, or vector, are the same bits in both; 0: the engine cannot run the model

    def to_dict(self) -> dict[str, Any]:
        return dataclasses.asdict(self)

    def __str__(self) -> str:
        logits = f"the same bits for {self.logits_equal} tokens" if self.logits_equal else "not compared"
        return "\n".join(
            [
                f"size       {self.file_bytes / 1e6:.2f} MB, from {self.source_bytes / 1e6:.2f} MB",
                f"weights    all {self.ternary_weights:,} ternary codes equal, now {self.ternary_bits_per_weight:.2f} "
                f"bits each; so is all else ({self.tensors_equal} tensors)",
                f"logits     {logits}",
            ]
        )


def repack(
    source: str | os.PathLike[str], out: str | os.PathLike[str], *, encoding: str = "2.0", sparse: bool | None = None
) -> Repacked:
    """Write a packed file again with `encoding` bits a ternary weight ("2.0" or "1.6").

    sparse: `up` and `down` in lines of 2 bits a weight, whatever `encoding` is for the others, of which the
    engine reads only relevant ones; None: as in the source.

    Codes, scales, all other tensors and all other sections stay as they are; sections that this
    version does not know are left out, as they may describe bytes that change. The result is read
    back, compared, and run in the engine beside the source; it appears only if it is equal.

    Raises PackedFormatError for a bad source, ValueError if the format cannot express the result (1.6 has no
    group scales), VerificationError.
    """
    body = encodings.ternary_encoding(encoding)
    spare(Path(source), Path(out))
    file = PackedFile.open(source)
    if sparse:
        sparsity.require_zeros(file.configs[0], source)
    elif sparse is None:
        sparse = file.sparse
    kinds = [s.kind for s in file.sections if s.kind < records.DATA]
    reports: list[Repacked] = []
    write_sections(
        out,
        file.configs,
        lambda spec: _encoded(file, spec, body, sparse),
        {kind: file.section(kind) or b"" for kind in kinds},
        check=lambda written: reports.append(_compare(Path(source), file, written)),
    )
    return reports[0]


def _encoded(file: PackedFile, spec: Spec, body: Encoding, sparse: bool) -> Encoded:
    record = file.tensors[spec.key]
    scales = file.scales(record)
    if not record.encoding.ternary or spec.form == "table":  # a table has no other
        return Encoded(record.encoding, record.scope, file.stored(record), scales)
    encoding = encodings.encoding_of(records.ROLES[record.key.role], body, sparse)
    return Encoded(encoding, record.scope, encoding.encode(file.codes(record)), scales)


def _compare(source: Path, old: PackedFile, written: Path) -> Repacked:
    new = PackedFile.open(written)
    for kind in (records.STACKS, records.METADATA, records.TOKENIZER, records.TEMPLATE):
        if old.section(kind) != new.section(kind):
            raise VerificationError(f"section {records.SECTION_NAMES[kind]} differs from the source's")
    weights = size = 0
    for key, record in new.tensors.items():
        before = old.tensors[key]
        read = PackedFile.codes if record.encoding.ternary else PackedFile.stored
        if not np.array_equal(read(old, before), read(new, record)):
            raise VerificationError(f"{key.name}: weights in the file differ from the source's")
        if old.scales(before).tobytes() != new.scales(record).tobytes():
            raise VerificationError(f"{key.name}: scales in the file differ from the source's")
        if record.encoding.ternary:
            weights += record.rows * record.cols
            size += record.size
    return Repacked(
        source_bytes=old.file_size,
        file_bytes=new.file_size,
        ternary_weights=weights,
        ternary_bits_per_weight=8 * size / weights if weights else 0.0,
        tensors_equal=len(new.tensors),
        logits_equal=_compare_computed(source, written, new.configs),
    )


def _compare_computed(source: Path, written: Path, stacks: Sequence[ModelConfig]) -> int:
    """For how many tokens both files give the same bits of logits, or of the vector and of image vectors."""
    from bitnet_runtime import Model, UnsupportedModelError

    config, tokens = stacks[0], min(TOKENS, stacks[0].max_context)

    def computed(path: Path) -> Iterator[tuple[str, Floats]]:
        with Model.load(path) as model:
            for stack in stacks:
                if stack.input == "images":
                    yield "vectors of images", engine_sees(model, stack, drawn_images(stack, 2))
            if config.input != "images":
                with model.session(n_ctx=tokens) as session:
                    text = drawn(config, np.random.default_rng(0), tokens)
                    read = whole(EngineReader(session, config), config, text)
                yield "logits" if config.has_head else "vectors", read

    try:
        for (what, first), (_, second) in zip(computed(source), computed(written), strict=True):
            if first.tobytes() != second.tobytes():
                raise VerificationError(f"the engine computes other {what} from the file than from the source")
    except UnsupportedModelError:
        return 0
    return tokens
