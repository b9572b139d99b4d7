"""Adapters of a run with `--lora`, as a file of their own beside the model they were trained on."""

from __future__ import annotations

import dataclasses
import os
import tempfile
from pathlib import Path

import numpy as np

from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.records import Spec
from bitnet_export.packed.replacing import check_place, spare
from bitnet_export.packed.stacks import pack_stack
from bitnet_export.packed.writer import Encoded, write_packed

from .findings import Report
from .pack import export_checkpoint

ROUNDING = 1e-5
"""The share by which a scale may differ, and of codes that may. `bitnet convert` takes the mean of published masters as
their own code does, in fp32, with errors below 1e-6; codes next to a half then round the other way, about as rarely."""


def export_adapter(
    checkpoint: str | os.PathLike[str],
    base: str | os.PathLike[str],
    out: str | os.PathLike[str],
    *,
    tokens: int = 50_000,
) -> Report:
    """Write the adapters of a checkpoint (or the newest one of a run folder) alone; base: the packed model.

    The whole model is exported and verified like any other, and then compared with `base` number by number; meanwhile
    it takes as much room on disk as `base`. Raises ValueError: a bad checkpoint, VerificationError, or another model.
    """
    model, out = PackedFile.open(base), Path(out)
    spare(Path(base), out, "adapter")
    spare(Path(checkpoint), out, "adapter")
    check_place(out)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=f".{out.name}.") as folder:
        file = Path(folder) / "whole.bitnet"
        encoding = next((bits for record in model.tensors.values() if (bits := record.encoding.bits)), "2.0")
        report = export_checkpoint(
            checkpoint, file, tokens=tokens, encoding=encoding, head=model.configs[0].head_format, sparse=False
        )
        whole = PackedFile.open(file)
        if not any(config.adapters for config in whole.configs):
            raise ValueError(
                f"{checkpoint} has no adapters, which bitnet finetune --lora learns; export it without --base"
            )
        if problem := _difference(whole, model):
            raise ValueError(
                f"{base} is not the model that {checkpoint} began with: {problem}; export the checkpoint, or convert "
                "the model, that was its SRC, and give that file as --base"
            )

        def source(spec: Spec) -> Encoded:
            record = whole.tensors[spec.key]
            return Encoded(record.encoding, record.scope, whole.stored(record), whole.scales(record))

        kept = {"provenance": whole.metadata.get("provenance", {}) | {"base": Path(base).name}}
        stacks = [*whole.configs, *model.configs[len(whole.configs) :]]  # a draft of the model, which has no adapters
        write_packed(out, stacks, source, metadata=kept, base=model.weights)
    return dataclasses.replace(report, adapter_bytes=out.stat().st_size)


def _difference(whole: PackedFile, model: PackedFile) -> str:
    """How a model differs from `whole`, apart from its adapters; "": it does not. Encodings may differ."""
    stacks = [[pack_stack(c.replace(adapters=(), adapter_rank=0)) for c in file.configs] for file in (whole, model)]
    if stacks[0] != stacks[1][: len(stacks[0])]:
        return "its layers, sizes or options are others"
    if any(config.adapters for config in model.configs):
        return "it has adapters of its own"
    for key, other in whole.tensors.items():
        if key.part > 1:
            continue
        record = model.tensors[key]
        codes, others = model.codes(record), whole.codes(other)
        if not record.quantized:
            same = np.array_equal(codes, others)
        else:
            same = np.allclose(model.scales(record), whole.scales(other), rtol=ROUNDING, atol=0)
            same &= bool(np.mean(codes != others) <= ROUNDING)
        if not same:
            return f"{key.name} differs"
    return ""
