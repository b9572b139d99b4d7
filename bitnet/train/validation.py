"""The evaluations of a run: when they are due, the best one, and whether the run still improves."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

from bitnet.model import parallel
from bitnet.settings import Settings, flag_of
from bitnet.train import objectives, runlog, saving, schedule
from bitnet.train.progress import say
from bitnet.train.run import SHARE, Run
from bitnet.train.state import BEST, BEST_TASKS

USUAL, PARTS = 200, 10  # steps between evaluations; least number of them in a run
RARELY = 4  # with --minutes, evaluations so far may take one part in so many of the time so far
WORSE = 1.02  # times the best loss: more than chance explains
OF_LOSS, OF_TASKS = ("eval_tokens", "context", "beta", "temperature"), ("tasks", "tasks_limit")
"""Options without which two losses, or two scores of tasks, cannot be compared."""


def due(run: Run, before: float) -> bool:
    """Whether an evaluation is due after the step just made. before: progress before it."""
    step, every = run.state["step"], run.settings.eval_every
    if every:
        return step % every == 0
    if run.horizon.seconds:
        wanted = int(PARTS * run.progress) > int(PARTS * before) or step % USUAL == 0
        return wanted and RARELY * run.state["evaluated"] <= run.state["seconds"]
    steps = run.horizon.steps(run.state)
    apart = max(min(USUAL, max(1, steps // PARTS)), math.ceil(SHARE * run.validated / run.horizon.each))
    return step % min(apart, steps // 2 + 1) == 0  # at least one before the last


def loss_of(result: objectives.Result) -> float:
    found = dataclasses.asdict(result)
    return float(next(found[name] for name in runlog.LOSSES if name in found))


def note(run: Run, result: objectives.Result) -> str:
    """Record an evaluation in the state of the run. Returns an addition to its line: passes, and an earlier best."""
    state, loss = run.state, loss_of(result)
    best = state["best"]
    added = f", pass {run.passes:.1f}" if run.passes >= 1 else ""
    if not best["step"] or loss < best["loss"]:
        state["best"] = {**best, "step": state["step"], "loss": loss, "since": 0}
        return added
    state["best"] = best = {**best, "since": best["since"] + 1}
    learnt = run.passes > 1 and schedule.quantization(run.settings, run.place) == 1 and loss > WORSE * best["loss"]
    if learnt and not best["told"]:
        best["told"] = True
        say(
            f"validation was better at step {best['step']:,}: in pass {run.passes:.1f} over its data the model "
            "memorizes them; add data, train for less, or add --patience 3 --keep-best"
        )
    return f"{added}, best {best['loss']:.4f} at step {best['step']:,}"


def forget(run: Run, before: Settings) -> None:
    """Forget the best so far if it was measured otherwise than what follows, or with --keep-best if its checkpoint is
    not in this run folder: a new branch does not have it. before: the settings that it was measured with."""

    def forgotten(step: int | None, options: Sequence[str]) -> bool:
        if step is None:
            return False
        if changed := [name for name in options if getattr(before, name) != getattr(run.settings, name)]:
            say(f"{flag_of(changed[0])} has changed, so {saving.name_of(step)} no longer counts as the best one")
            return True
        there = run.folder / saving.name_of(step)
        return run.settings.keep_best and not parallel.from_first(there.is_dir)  # others may not see it yet

    if forgotten(run.state["best"]["step"] or None, OF_LOSS):
        run.state["best"] = {**BEST}
    if forgotten(run.state["best_tasks"]["step"], OF_TASKS):
        run.state["best_tasks"] = {**BEST_TASKS}


def improves(run: Run) -> bool:
    """Whether the newest evaluation was the best."""
    best = run.state["best"]
    return bool(best["step"] and not best["since"])


def over(run: Run) -> bool:
    """Whether --patience evaluations have passed without a better one."""
    return 0 < run.settings.patience <= run.state["best"]["since"]
