"""`--tasks`: what a model can do while it learns, asked as `bitnet eval --tasks` asks: packed, in the engine.

A run is given how (`Ask`), since it knows neither packed files nor the harness. It asks before its first step, every
`--tasks-every` steps, and in the end. With --keep-best the checkpoint with the best mean score is kept, too.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from bitnet.model import parallel
from bitnet.settings import Settings
from bitnet.train import runlog, saving
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say
from bitnet.train.run import Run

Ask = Callable[[Path, Settings], dict[str, Any]]
"""The figures of `bitnet.harness.report` about a checkpoint."""


def due(run: Run) -> bool:
    """Whether the step that was just made is followed by the tasks."""
    every = run.settings.tasks_every
    last = run.progress >= 1
    return bool(run.settings.tasks and (last or (every and run.state["step"] % every == 0)))


def ask(run: Run, log: runlog.Log, how: Ask | None) -> bool:
    """Ask, log, say. Returns whether it was the best so far. All processes of a run call it.

    Raises ValueError: there is no such task; whatever the task itself does.
    """
    if how is None:
        raise TrainingError("a run with --tasks goes on with `bitnet train` or `bitnet finetune`")
    work = run.folder / f".{saving.name_of(run.state['step'])}.tasks.partial"  # as what a kill leaves is removed
    if parallel.is_first():
        shutil.rmtree(work, ignore_errors=True)
    more = run.template, run.generation
    snapshot = saving.Snapshot.of(run.model, run.words.to_str(), run.optimizer, run.state, *more)
    try:
        made = saving.write(work, snapshot._replace(moments={}))
        figures = parallel.from_first(lambda: how(made, run.settings))
    finally:
        if parallel.is_first():
            shutil.rmtree(work, ignore_errors=True)
    found, score = scores(figures), mean(figures)
    log.write(run.now() | {"tasks": found} | ({} if score is None else {"task_score": score}))
    say(f"tasks at step {run.state['step']:,}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    best = run.state["best_tasks"]
    if score is None or (best["step"] is not None and score <= best["score"]):
        return False
    run.state["best_tasks"] = {"step": run.state["step"], "score": score}
    return True


def scores(figures: Mapping[str, Any]) -> dict[str, float]:
    """Each metric of each task, without its standard error."""
    return {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in figures["results"].items()
        for metric, value in metrics.items()
        if isinstance(value, int | float) and "_stderr" not in metric and metric != "sample_len"
    }


def mean(figures: Mapping[str, Any]) -> float | None:
    """Of the first metric of each task that is better when larger; None where no task has one."""
    found = []
    for task, metrics in figures["results"].items():
        better = figures.get("higher_is_better", {}).get(task, {})
        good = (metrics[name] for name in metrics if better.get(name.partition(",")[0]) is True)
        first = next((value for value in good if isinstance(value, int | float)), None)
        found += [float(first)] if first is not None else []
    return sum(found) / len(found) if found else None
