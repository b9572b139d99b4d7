"""`--tasks`: evaluates tasks during training, like `bitnet eval --tasks`: packed, in the engine.

A run is given a function for that (`Ask`), since it knows neither packed files nor the harness. It is called before
the first step, every `--tasks-every` steps, and at the end. --keep-best also keeps the best mean score's checkpoint.
"""

from __future__ import annotations

import math
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

Ask = Callable[[Path, Settings, Callable[[], None]], dict[str, Any]]
"""Returns `bitnet.harness.report` of a checkpoint. The function it is given is called before each question, and may
raise."""


def due(run: Run, over: bool = False) -> bool:
    """Whether the tasks are due after the step just made. over: it is the last, whatever the budget."""
    every = run.settings.tasks_every
    last = over or run.progress >= 1
    return bool(run.settings.tasks and (last or (every and run.state["step"] % every == 0)))


def ask(run: Run, log: runlog.Log, how: Ask | None, between: Callable[[], None] = lambda: None) -> bool:
    """Evaluate the tasks, log and print the scores. Returns whether they are the best so far. All processes call it.

    Raises TrainingError if they fail before the first step. Later that is only printed and logged: a failing network
    or a signal must not lose the run. between: passed to `Ask`.
    """
    if how is None:
        raise TrainingError("a run with --tasks is resumed with `bitnet train` or `bitnet finetune`")
    work = run.folder / f".{saving.name_of(run.state['step'])}.tasks.partial"  # `recover` removes it after a kill
    if parallel.is_first():
        shutil.rmtree(work, ignore_errors=True)
    try:
        made = saving.write(work, run.snapshot()._replace(moments={}))
        figures, problem = parallel.from_first(lambda: _asked(how, made, run.settings, between))
    finally:
        if parallel.is_first():
            shutil.rmtree(work, ignore_errors=True)
    if problem and not run.state["step"]:
        raise TrainingError(f"--tasks {run.settings.tasks}: {problem}")
    if problem:
        say(f"tasks at step {run.state['step']:,}, left out: {problem}")
        log.write(run.now() | {"tasks_failed": problem})
        return False
    found, score = scores(figures), mean(figures)
    log.write(run.now() | {"tasks": found} | ({} if score is None else {"task_score": score}))
    say(f"tasks at step {run.state['step']:,}: " + ", ".join(f"{name} {value:.4g}" for name, value in found.items()))
    best = run.state["best_tasks"]
    if score is None or (best["step"] is not None and score <= best["score"]):
        return False
    run.state["best_tasks"] = {"step": run.state["step"], "score": score}
    return True


def _asked(how: Ask, *given: Any) -> tuple[dict[str, Any], str]:
    """The figures, or why there are none."""
    try:
        return how(*given), ""
    except ModuleNotFoundError:
        raise  # the user has to install it
    except Exception as error:  # a harness, a task file or a network may raise anything
        kind = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
        return {}, f"{kind}{error}"


def scores(figures: Mapping[str, Any]) -> dict[str, float]:
    """Each metric of each task that is a number, without its standard error."""
    return {
        f"{task}/{metric.removesuffix(',none')}": float(value)
        for task, metrics in figures["results"].items()
        for metric, value in metrics.items()
        if _is_number(value) and "_stderr" not in metric and metric != "sample_len"
    }


def mean(figures: Mapping[str, Any]) -> float | None:
    """Mean of the first higher-is-better metric of each task; None if no task has one."""
    found = []
    for task, metrics in figures["results"].items():
        better = figures.get("higher_is_better", {}).get(task, {})
        good = (metrics[name] for name in metrics if better.get(name.partition(",")[0]) is True)
        first = next((value for value in good if _is_number(value)), None)
        found += [float(first)] if first is not None else []
    return sum(found) / len(found) if found else None


def _is_number(value: object) -> bool:
    """Not NaN, which a harness returns for no samples, and which would count as better than any score."""
    return isinstance(value, int | float) and math.isfinite(value)
