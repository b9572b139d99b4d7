"""`bitnet train`: how a run begins, or goes on. What it then does: `bitnet.train.loop`.

There is no random state to restore when a run is resumed: initial weights come from the seed, batch i is
a pure function of the seed and i (`bitnet.data.dataset`), and so is what dropout drops of it. So on one
CPU, with the same number of threads, a run that was interrupted ends in the same bits as one that was
not. Only a budget of --minutes cannot promise that, since its schedule follows the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
from collections.abc import Callable
from pathlib import Path

from bitnet import process
from bitnet.model import parallel
from bitnet.train import checkpoint, loop, memory, saving, source_model
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.errors import TrainingError
from bitnet.train.loop import Outcome
from bitnet.train.prepare import prepare
from bitnet.train.resolve import Given, resolve, run_folder

WRITTEN = (
    r"\..*|lock|log\.jsonl|log\.partial|loss\.png|(report|attention)\.html|step-.*"
    r"|(train|validation)-\w+\.(bin|pixels|owners|partial)"
)
"""What a run leaves in its folder, even when it is killed before its first checkpoint; and hidden files."""

Read = Callable[[str], source_model.Start]
"""Opens a source, a model to begin with."""


def train(given: Given, read: Read | None = None, resume: bool = False) -> Outcome:
    """A run from its beginning, or from its newest checkpoint; with `read` it begins with a source."""
    process.keep_freed_memory()
    try:
        with parallel.joined():
            return _resume(given, read) if resume else _begin(given, read)
    except (MemoryError, RuntimeError) as error:
        if not memory.ran_out(error) or parallel.launched():
            raise
        said = str(error).partition("\n")[0]
        raise TrainingError(f"memory ran out; lower --batch or --context, or take a smaller model ({said})") from error


def _begin(given: Given, read: Read | None) -> Outcome:
    start = read(given.options["source"]) if read else None
    settings, config = resolve(given, base=start.defaults() if start else None)
    folder = settings.run_folder
    _check_free(folder, given.config)
    with _claimed(folder) as claim:
        if saved := checkpoint.all_of(folder):
            raise TrainingError(
                f"{folder} already holds {saved[-1].name}; add --resume to go on, or name another --out"
            )
        teacher = read(settings.teacher) if read and settings.teacher else start
        tower = source_model.read_checkpoint(settings.vision) if settings.vision else None
        run = prepare(settings, config, None, start, teacher, tower)
        claim.begun = True
        return loop.carry_out(run)


def _check_free(folder: Path, config: str | None) -> None:
    """Raises TrainingError: there is something in the folder that no run wrote, and that is not the run's --config."""
    if not folder.is_dir() or checkpoint.all_of(folder):
        return
    files = [file for file in folder.iterdir() if not config or file.absolute() != Path(config).absolute()]
    others = [file.name for file in files if not re.fullmatch(WRITTEN, file.name)]
    if others:
        raise TrainingError(
            f"{folder} holds {min(others)} and is no run folder; name a new or empty folder with --out, or a run's"
        )


def _resume(given: Given, read: Read | None) -> Outcome:
    folder = run_folder(given)
    if not checkpoint.all_of(folder) and not list(folder.glob(f".step-*{saving.REPLACED}")):
        found = "has no step-* folder in it" if folder.is_dir() else "does not exist"
        raise TrainingError(
            f"nothing to resume: {folder} {found}, expected a run folder with a checkpoint; "
            "name the run's folder with --out, or leave --resume out to start one"
        )
    with _claimed(folder) as claim:
        newest = parallel.from_first(lambda: _newest(folder))
        settings, config = resolve(given, newest.state_of_run)
        settings = dataclasses.replace(settings, out=str(folder))  # it may have been moved
        teacher = read(settings.teacher or settings.source) if read and settings.distilled else None
        run = prepare(settings, config, newest, teacher=teacher)
        claim.begun = True
        return loop.carry_out(run)


def _claimed(folder: Path) -> contextlib.AbstractContextManager[process.Claim]:
    return process.claimed(folder) if parallel.is_first() else contextlib.nullcontext(process.Claim())


def _newest(folder: Path) -> Checkpoint:
    """The checkpoint to go on from."""
    saving.recover(folder)
    newest = Checkpoint.open(folder)
    saving.set_aside(folder, newest.folder)
    return newest
