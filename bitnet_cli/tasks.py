"""Checkpoints in the engine, by way of a packed file, as a run evaluates them on tasks of lm-evaluation-harness."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet.settings import Settings
    from bitnet.train.checkpoint import Checkpoint
    from bitnet_runtime import Model


@contextmanager
def in_engine(checkpoint: Checkpoint, **options: Any) -> Iterator[Model]:
    """A checkpoint, packed into a temporary file. options: of Model.load."""
    from bitnet_export.checkpoint.pack import pack_checkpoint
    from bitnet_runtime import Model

    with tempfile.TemporaryDirectory(prefix="bitnet-eval-") as folder:
        file = Path(folder) / "model.bitnet"
        pack_checkpoint(checkpoint, file)
        with Model.load(file, **options) as model:
            yield model


def ask(folder: Path, settings: Settings, between: Callable[[], None]) -> dict[str, Any]:
    """The figures of a checkpoint. between: see `report`. Raises ValueError: there is no such task."""
    from bitnet.harness import report, tasks_of
    from bitnet.train.checkpoint import Checkpoint

    names = settings.tasks.split(",")
    manager = tasks_of(names)  # a wrong name is told before the checkpoint is packed
    with in_engine(Checkpoint.open(folder), kv_type="f32", threads=settings.threads or None) as model:
        return report(model, names, None, settings.tasks_limit, False, between, manager=manager)[0]
