"""How a run evaluates its model on tasks of lm-evaluation-harness: through a packed file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from bitnet.settings import Settings


def ask(folder: Path, settings: Settings, between: Callable[[], None]) -> dict[str, Any]:
    """The figures of a checkpoint. between: see `report`. Raises ValueError: there is no such task."""
    from bitnet.harness import report
    from bitnet.train.checkpoint import Checkpoint
    from bitnet_export.checkpoint.pack import pack_checkpoint
    from bitnet_runtime import Model

    with tempfile.TemporaryDirectory(prefix="bitnet-tasks-") as scratch:
        file = Path(scratch) / "model.bitnet"
        pack_checkpoint(Checkpoint.open(folder), file)
        with Model.load(file, kv_type="f32", threads=settings.threads or None) as model:
            return report(model, settings.tasks.split(","), None, settings.tasks_limit, chat=False, between=between)[0]
