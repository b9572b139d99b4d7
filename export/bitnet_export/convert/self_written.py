"""Lets a source of training, a checkpoint or a folder of another program, write text in the engine."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from bitnet.train import source_model
from bitnet.train.checkpoint import Checkpoint
from bitnet_export.checkpoint.pack import pack_checkpoint

from .incoming import open_source, pack_source

TOGETHER = 64  # texts


def self_written(path: str, prompts: Sequence[list[int]], most: int, seed: int) -> Iterator[list[int]]:
    """Each prompt followed by up to `most` tokens, drawn with the model's own sampling defaults. The last is the end
    token if that ended the text."""
    from bitnet_runtime import Model

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.bitnet"
        if source_model.is_checkpoint(path):
            pack_checkpoint(Checkpoint.open(path), file)
        else:
            with open_source(path) as source:
                pack_source(source, file)
        with Model.load(file) as model:
            end = sorted(model.end_tokens)[:1]
            for first in range(0, len(prompts), TOGETHER):
                these = prompts[first : first + TOGETHER]
                results = model.generate(these, max_tokens=most, seed=seed + first)
                for prompt, result in zip(these, results, strict=True):
                    yield prompt + result.tokens + (end if result.finish_reason == "stop" else [])
