"""Lets a source of training, a checkpoint or a folder of another program, write text in the engine."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bitnet.train import source_model
from bitnet.train.checkpoint import Checkpoint
from bitnet_export.checkpoint.pack import pack_checkpoint

from .incoming import open_source, pack_source

if TYPE_CHECKING:
    from bitnet_runtime import Model

TOGETHER = 64  # texts


@contextmanager
def self_written(path: str) -> Iterator[source_model.Writes]:
    """What writes text, with the model's own sampling defaults. The last token of a text is the end token if that
    ended it."""
    from bitnet_runtime import Model

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.bitnet"
        if source_model.is_checkpoint(path):
            pack_checkpoint(Checkpoint.open(path), file)
        else:
            with open_source(path) as source:
                pack_source(source, file)
        with Model.load(file) as model:
            yield functools.partial(_texts, model)


def _texts(model: Model, prompts: Sequence[list[int]], most: int, seed: int) -> Iterator[list[int]]:
    end = sorted(model.end_tokens)[:1]
    for first in range(0, len(prompts), TOGETHER):
        these = prompts[first : first + TOGETHER]
        results = model.generate(these, max_tokens=most, seed=seed + first)
        for prompt, result in zip(these, results, strict=True):
            yield prompt + result.tokens + (end if result.finish_reason == "stop" else [])
