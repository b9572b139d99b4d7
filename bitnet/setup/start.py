"""`bitnet train`: starting and resuming runs. The run itself: `bitnet.train.loop`.

There is no random state to restore when a run is resumed: initial weights come from the seed, and batch i and its
dropout are pure functions of the seed and i (`bitnet.data.dataset`). So on one CPU, with the same number of
threads, an interrupted run ends with the same bits as an uninterrupted one. Only a budget of --minutes cannot
promise that, since its schedule follows the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import re
import shlex
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bitnet import kernels, process
from bitnet.data import tokenized
from bitnet.data.corpus import DataError
from bitnet.model import parallel
from bitnet.settings import SOURCES, Settings, flag_of
from bitnet.setup import prepare
from bitnet.setup.given import Given, options_of, run_folder
from bitnet.setup.resolve import resolve
from bitnet.train import (
    checkpoint,
    horizon,
    loop,
    manifest,
    memory,
    mixtures,
    saving,
    source_model,
    tasks,
    validation,
)
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.errors import TrainingError
from bitnet.train.loop import Outcome
from bitnet.train.progress import say
from bitnet.train.run import Run
from bitnet.train.state import NEEDED

DATA = r"(train|validation)-\w+\.(bin|pixels|owners|reference)"
"""Files of token ids and images, and of values that are computed from them once."""
WRITTEN = (
    r"\..*|lock|log\.jsonl|log\.partial|loss\.png|trace\.json|profile\.txt|tensorboard|wandb|(report|attention)\.html|step-.*"
    rf"|{DATA}|(train|validation)-\w+\.partial"
)
"""Files that a run leaves in its folder, even if killed before its first checkpoint; and hidden files."""

Read = Callable[[str], source_model.Start]
"""Opens a source: a model to start from or to learn from."""


def train(
    given: Given,
    read: Read = source_model.read_checkpoint,
    resume: bool = False,
    branch: str = "",
    ask: tasks.Ask | None = None,
) -> Outcome:
    """Start a run, from a source if one is given, or resume it from its newest checkpoint.

    branch: a checkpoint of another run from which this one continues, or that run. ask: evaluates tasks.
    """
    if branch and resume:
        raise TrainingError("--from starts a run and --resume continues one; give one of them")
    process.keep_freed_memory()
    kernels.check()
    try:
        with parallel.joined():
            if branch:
                return _branch(given, branch, read, ask)
            return _resume(given, read, ask) if resume else _begin(given, read, ask)
    except (MemoryError, RuntimeError) as error:
        if not memory.ran_out(error):
            raise
        said = f" ({found})" if (found := str(error).partition("\n")[0]) else ""
        where = f" in process {parallel.rank() + 1}" if parallel.launched() else ""
        raise TrainingError(
            f"memory ran out{where}; lower --batch or --context, or take a smaller model{said}"
        ) from error


def _begin(given: Given, read: Read, ask: tasks.Ask | None) -> Outcome:
    options, overrides = options_of(given)
    start, tower = (read(path) if (path := options.get(name)) else None for name in ("source", "vision"))
    base = None
    if start:
        alone = (bool(options.get(name)) for name in ("draft_only", "lora", "preference"))
        base = start.defaults(*alone, objective=options.get("objective", ""))
    settings, config = resolve(given, base=base, tower=tower)
    folder = settings.run_folder
    _check_free(folder, given.config)
    shared = mixtures.ids_of(settings)
    for ids in filter(None, shared if all(shared) else ()):  # beside text they are compared when it is read
        tokenized.check_read(ids, options.get("validation"), options.get("column"))
    if not (start or Path(settings.tokenizer).is_file()) and (first := next(filter(None, shared), None)):
        tokenized.check_asked(first, options.get("tokenizer", ""), overrides.get("vocab_size", 0))
    inherits = base and any(map(base[0].get, SOURCES)) and not any(map(options.get, SOURCES))
    if inherits:
        say(f"{folder}: no --data, so it learns from the text that the source learned from")
    with _claimed(folder) as claim:
        _check_unused(folder)
        teacher = read(settings.teacher) if settings.teacher else start
        try:
            run = prepare.begin(settings, config, start, teacher, tower)
        except (DataError, FileNotFoundError) as error:
            if not inherits:
                raise
            raise TrainingError(f"{error} (the text of the source; --data names another)") from error
        if parallel.is_first():  # of a run whose checkpoints were removed: its records of step 0 would seem to be ours
            (folder / "log.jsonl").unlink(missing_ok=True)
        try:
            return loop.carry_out(run, ask)
        finally:
            claim.begun = bool(checkpoint.all_of(folder))  # a run that cannot start leaves nothing behind


def _check_free(folder: Path, config: str | None) -> None:
    """Raises TrainingError if the folder holds a file that no run wrote and that is not the run's --config."""
    if not folder.is_dir() or checkpoint.all_of(folder):
        return
    files = [file for file in folder.iterdir() if not config or file.absolute() != Path(config).absolute()]
    others = [file.name for file in files if not re.fullmatch(WRITTEN, file.name)]
    if others:
        raise TrainingError(
            f"{folder} holds {min(others)} and is not a run folder; name a new or empty folder with --out, or a run's"
        )


def _resume(given: Given, read: Read, ask: tasks.Ask | None) -> Outcome:
    folder = run_folder(given)
    if not checkpoint.all_of(folder) and not list(folder.glob(f".step-*{saving.REPLACED}")):
        found = "has no step-* folder in it" if folder.is_dir() else "does not exist"
        raise TrainingError(
            f"nothing to resume: {folder} {found}, expected a run folder with a checkpoint; "
            "name the run's folder with --out, or leave --resume out to start one"
        )
    with _claimed(folder) as claim:
        last = parallel.from_first(lambda: _newest(folder))
        newest = parallel.from_first(lambda: _before_it_fell(last, given))
        run = _go_on(given, folder, newest, read, last.state_of_run["settings"])
        claim.begun = True
        if last.folder.name != newest.folder.name:
            say(f"{last.folder.name} and all others after {newest.folder.name} are set aside, as step-*.fallen")
            fallen = saving.set_aside(folder, newest.folder, "fallen") if parallel.is_first() else {}
            try:
                run.save()  # the newest from here on, with the options given
            except BaseException:  # a full disk, perhaps
                for before, after in fallen.items():
                    after.rename(before)
                raise
        _say_if_finished(run)
        return loop.carry_out(run, ask)


def _branch(given: Given, source: str, read: Read, ask: tasks.Ask | None) -> Outcome:
    """Start a run from a checkpoint of another one."""
    folder = run_folder(given)
    _check_free(folder, given.config)
    with _claimed(folder) as claim:
        _check_unused(folder)
        last = parallel.from_first(lambda: Checkpoint.open(source))
        newest = parallel.from_first(lambda: _before_it_fell(last, given))
        if parallel.is_first():
            _take(newest.run, folder)
        parallel.wait_for_first()
        say(f"{folder} continues from {newest.folder}")
        run = _go_on(given, folder, newest, read, last.state_of_run["settings"])
        run.save()
        claim.begun = True
        _say_if_finished(run)
        return loop.carry_out(run, ask)


def _say_if_finished(run: Run) -> None:
    if validation.over(run):
        say(f"the run is finished, after {run.state['step']:,} steps; give a larger --patience to go on")
    elif run.progress >= 1:
        more = flag_of(run.settings.budget[0])
        say(f"the run is finished, after {run.state['step']:,} steps; give more with {more} to go on")


def _go_on(given: Given, folder: Path, newest: Checkpoint, read: Read, before: dict[str, Any]) -> Run:
    """before: the newest settings of the run."""
    settings, config = resolve(given, {**newest.state_of_run, "settings": before})
    settings = dataclasses.replace(settings, out=str(folder))  # it may have been moved
    step = newest.state.get("teacher", "") if settings.teacher == before.get("teacher") else ""
    teacher = read(_teacher(settings.teacher or settings.source, step)) if settings.distilled else None
    run = prepare.resume(settings, config, newest, teacher, lambda: read(settings.source))
    validation.forget(run, Settings.from_dict(newest.state_of_run["settings"]))
    return run


def _teacher(folder: str, step: str) -> str:
    """The path of a teacher. For a run folder, whose run may have continued: its newest checkpoint at the start."""
    if not step or (Path(folder) / checkpoint.CONFIG).is_file():
        return folder  # possibly the checkpoint itself
    for name in (step, f"{step}.fallen"):
        if (Path(folder) / name).is_dir():
            return str(Path(folder) / name)
    raise TrainingError(
        f"{folder} no longer has {step}, which this run learns from; put it back, or start another run with --out"
    )


def _check_unused(folder: Path) -> None:
    if saved := checkpoint.all_of(folder):
        raise TrainingError(f"{folder} already holds {saved[-1].name}; add --resume to go on, or name another --out")


def _claimed(folder: Path) -> contextlib.AbstractContextManager[process.Claim]:
    return process.claimed(folder) if parallel.is_first() else contextlib.nullcontext(process.Claim())


def _newest(folder: Path) -> Checkpoint:
    """The newest intact checkpoint; damaged ones after it are set aside."""
    saving.recover(folder)
    newest = Checkpoint.open(folder)
    saving.set_aside(folder, newest.folder)
    return newest


def _before_it_fell(newest: Checkpoint, given: Given) -> Checkpoint:
    """The newest checkpoint of a run; if the run becomes longer, the one from before the learning rate fell."""
    state = newest.state_of_run
    if lacking := [name for name in NEEDED if name not in state]:
        raise TrainingError(
            f"{newest.folder / checkpoint.STATE} has no {lacking[0]!r}: an earlier version wrote it, and this one "
            f"cannot resume it; start a run from its weights, `bitnet finetune {shlex.quote(str(newest.folder))}`"
        )
    if state["fall"] < 1 and horizon.longer(resolve(given, state)[0], state):
        before = newest.folder.parent / saving.name_of(state["stable"])
        if state["stable"] is not None and before.is_dir() and not manifest.damage(before):
            return Checkpoint(before)
    return newest


def _take(source: Path, folder: Path) -> None:
    """Copy token ids, images and log of a run for another one. Each file is complete under its name, even if this is
    killed: a run that starts here with the same text uses what is there."""
    for file in source.iterdir():
        if re.fullmatch(rf"{DATA}|log\.jsonl", file.name):
            partial = (folder / file.name).with_suffix(".partial")
            shutil.copy(file, partial)
            partial.rename(folder / file.name)
