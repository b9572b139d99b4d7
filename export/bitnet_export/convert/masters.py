"""Sources of `bitnet finetune`: folders of other programs with float weights, or our own checkpoints."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from bitnet.config import not_yet
from bitnet.data import tokenizer
from bitnet.train import source_model
from bitnet_export.foreign.hf.read import open_folder
from bitnet_export.foreign.source import Floats, Source, SourceError
from bitnet_export.packed import records
from bitnet_export.packed.recognise import PROBE, recognise
from bitnet_export.packed.records import Spec

from .self_written import self_written


def read_start(path: str) -> source_model.Start:
    """Everything of a source that training needs, fp32 in memory.

    Raises SourceError or CheckpointError (what was found, what was expected), or an OSError.
    """
    if Path(path).is_file():
        with open(path, "rb") as file:
            head = file.read(PROBE)
        if head.startswith(records.MAGIC):
            raise SourceError(
                f"{path} is a packed model: training needs the float master weights, which it has not; name the run "
                "folder or checkpoint that it was exported from, or the folder that it was converted from"
            )
        found = recognise(head) or "a file of an unknown kind"
        if head.startswith(b"GGUF"):
            found = "a GGUF file, whose weights are quantized"
        raise SourceError(f"{path} is {found}; expected a checkpoint, or a Hugging Face folder with float weights")
    if source_model.is_checkpoint(path):
        return dataclasses.replace(source_model.read_checkpoint(path), writer=functools.partial(self_written, path))
    if not any((Path(path) / name).exists() for name in ("config.json", "adapter_config.json")):
        raise SourceError(
            f"{path} has no config.json and no checkpoint; expected a run folder, a checkpoint or a Hugging Face "
            "folder; text goes with --data"
        )
    with open_folder(Path(path), floats=True) as source:
        if problems := not_yet(source.config):
            raise SourceError(f"{path} cannot be trained: " + "; ".join(problems))
        stacks = source.config.stacks
        specs = [
            spec
            for stack, config in enumerate(stacks)
            for spec in records.expected_tensors(config, stack)
            if not records.ROLES[spec.key.role].startswith("rope_")
        ]
        said = source.tokenizer
        words = None if said is None else tokenizer.parse(said.decode(), f"the tokenizer of {path}")
        return source_model.Start(
            what=f"{path}, {source.what}",
            config=source.config,
            weights={spec.key.parameter(stacks): _tensor(source, spec) for spec in specs},
            tokenizer=words,
            template=None if source.template is None else source.template.decode(),
            generation=dict(source.generation),
            assumptions=source.assumptions,
            writer=functools.partial(self_written, path),
        )


def _tensor(source: Source, spec: Spec) -> Tensor:
    values = source.load(spec.key)
    assert isinstance(values, Floats)  # as asked of open_folder
    array = np.ascontiguousarray(values.all())
    if not np.isfinite(array).all():
        raise SourceError(f"{spec.key.name} holds NaN or infinity")
    return torch.from_numpy(array)
