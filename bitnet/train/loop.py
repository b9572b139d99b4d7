"""The training loop: steps, evaluations and checkpoints, until the budget is spent."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from bitnet import process
from bitnet.model import draft, parallel
from bitnet.train import (
    checkpoint,
    distill,
    mixtures,
    objectives,
    optimizers,
    passes,
    replay,
    runlog,
    saving,
    schedule,
    tasks,
    telemetry,
    validation,
)
from bitnet.train.errors import TrainingError
from bitnet.train.pipeline import Ahead, Made, work_of
from bitnet.train.profiling import profiled
from bitnet.train.progress import Progress, say
from bitnet.train.run import Run
from bitnet.train.saver import Saver

RECENT = 20  # number of losses that a spike is compared with
SKIPPED = 10  # bad steps in a row after which the run stops


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended, as far as this process knows."""

    signal: int = 0  # the signal that came, after which it was saved; 0: none
    checkpoint: Path | None = None  # the last one; only the first process knows it
    reached: dict[str, Any] = dataclasses.field(default_factory=dict)  # step, tokens, seconds
    validation: objectives.Result | None = None  # of the whole run; None: the signal stopped it before


def carry_out(run: Run, how: tasks.Ask | None) -> Outcome:
    """Train until the budget is spent or a signal arrives. how: evaluates tasks."""
    try:
        return _carry_out(run, how)
    except BrokenPipeError:
        raise
    except (OSError, SafetensorError) as error:
        raise run.failure(error) from error


def _carry_out(run: Run, how: tasks.Ask | None) -> Outcome:
    with contextlib.closing(run.open_log()) as log:
        if not run.state["step"]:
            if run.settings.tasks and not run.logged("tasks"):
                tasks.ask(run, log, how)  # a wrong name fails here, before anything is saved
            run.save()  # not earlier: the board that it reports to may fail to start
            if run.settings.source:
                run.evaluate_source(log)
        with Saver.ready() as run.saver:
            stopped_by = loop(run, log, how)
        run.saver = None
        parallel.wait_for_first()  # torchrun stops it as soon as one of the others ends
        if stopped_by:
            say(f"stopped and saved at step {run.state['step']:,}; --resume continues from here")
            last = checkpoint.all_of(run.folder)[-1] if parallel.is_first() else None  # others may lack the folder
            return Outcome(stopped_by, last, run.now())
        try:
            result = run.evaluate(log, last=True)
        except (KeyboardInterrupt, SystemExit):  # Ctrl-C, SIGTERM
            with contextlib.suppress(OSError):  # the terminal is closed
                say("stopped in the last evaluation: the run is saved, and --resume evaluates it again")
            raise
        return finished(run, log, result)


def finished(run: Run, log: runlog.Log, result: objectives.Result) -> Outcome:
    """The end of a run whose budget is spent. A signal no longer takes its result away."""
    best = run.state["best"]
    earlier = 0 < best["step"] < run.state["step"]  # the last step measured on fewer tokens is no better than itself
    if run.settings.keep_best and earlier and validation.loss_of(result) > best["loss"]:
        name = saving.name_of(best["step"])
        say(f"the best of the evaluations was {best['loss']:.4f}, of {name}, which is kept: export {run.folder / name}")
    if not parallel.is_first():
        return Outcome(reached=run.now())
    with process.Interruption("finished but for loss.png and --report-to; Ctrl-C again stops at once") as interruption:
        log.close()  # a board may have much to send
        try:
            runlog.plot(runlog.each(run.log_file), run.folder / "loss.png", f"{run.folder.name}: {result}")
        except ModuleNotFoundError as error:
            say(f"no loss.png: it needs {error.name}, which is not installed")
    return Outcome(interruption.signal, checkpoint.all_of(run.folder)[-1], run.now(), result)


def loop(run: Run, log: runlog.Log, how: tasks.Ask | None) -> int:
    """Steps, evaluations and checkpoints until the budget is spent. Returns the signal that stopped it, or 0."""
    settings, state = run.settings, run.state
    started = time.monotonic() - state["seconds"]
    saved_step, saved_at = state["step"], state["seconds"]
    pinned = settings.device == "cuda"
    if replay.possible(settings, run.model.config, run.sequences, parallel.size()):
        of_batch = functools.partial(passes.passes, run, weights={"cross_entropy": 1.0})
        run.replay = replay.Replay(of_batch, list(run.model.parameters()))
    begin = run.seen - state["step"] * run.sequences  # not 0 if steps had another size before
    batches = Ahead.of(lambda step: work_of(run.data.batches, begin + step * run.sequences, run.sequences, pinned))
    interruption = process.Interruption() if parallel.is_first() else process.Interruption(said="")  # all get Ctrl-C
    with (
        batches as run.ahead,
        interruption,
        Progress(run.horizon, state, run.of_peak) as progress,
        profiled(run.folder, settings.profile) as step_is_over,
    ):
        over = validation.over(run)  # it may have been over when it was interrupted
        if schedule.quantization(settings, run.place) < 1 and run.model.config.ternary_weights:
            say("λ is how much of the quantization counts: 0 for weights in floating point, 1 for ternary ones")
        while run.progress < 1 and not over and not _agreed(interruption):
            if falls_now(run):  # a checkpoint to continue or branch from
                settle(run, log, started)
                if saved_step != state["step"]:
                    saved_step, saved_at = save(run, started)
                kept = saving.name_of(state["step"])
                progress.say(f"the learning rate falls from here on; {kept} is kept: a longer run goes on from it")
            mixtures.advance(run)
            before = run.progress
            step(run, log, started)
            if run.saver:
                run.saver.settle(wait=False)
            step_is_over()
            late = settings.save_minutes and state["seconds"] - saved_at >= 60 * settings.save_minutes
            to_save = bool(state["step"] % settings.save_every == 0 or late)
            evaluating = validation.due(run, before)
            if to_save or evaluating or tasks.due(run):
                settle(run, log, started)
            progress.step(run.said)
            if evaluating:
                evaluate(run, log, progress)
                to_save |= settings.keep_best and validation.improves(run)
            over = evaluating and validation.over(run)
            if tasks.due(run, over):
                to_save |= tasks.ask(run, log, how, interruption.check) and settings.keep_best
            if to_save:
                saved_step, saved_at = save(run, started)
            if over:
                count = f"{settings.patience:,} evaluation{'s' * (settings.patience > 1)}"
                say(f"{count} without a better one: the run ends at step {state['step']:,}")
        settle(run, log, started)
    if saved_step != state["step"]:
        run.save()
    return _agreed(interruption)


def save(run: Run, started: float) -> tuple[int, float]:
    """Save. Returns the step, and the seconds of the run after it: saving itself may take minutes."""
    run.save()
    return run.state["step"], parallel.largest([time.monotonic() - started])[0]


def falls_now(run: Run) -> bool:
    """Whether the learning rate begins to fall with the next step, which the state records."""
    state, falls = run.state, schedule.falls(run.settings, run.place)
    if not falls and state["step"] > 2 * (state["stable"] or math.inf):
        state["stable"] = None  # with a time budget, faster steps have moved the end far away
    if state["stable"] is not None or not falls:
        return False
    state["stable"] = state["step"]
    return True


def evaluate(run: Run, log: runlog.Log, progress: Progress) -> None:
    """Evaluate, record the result, and print it with the newest loss."""
    result, rate = run.evaluate(log), run.optimizer.param_groups[0]["lr"]
    more = f"lr {rate:.2g}, {progress.speed}{validation.note(run, result)}"
    at = " at λ 1" if run.amount < 1 else ""  # as in the exported model
    progress.say(f"step {run.state['step']:,}: {run.said}, validation{at} {result}, {more}")


def _agreed(interruption: process.Interruption) -> int:
    """The signal that reached any of the processes, or 0."""
    return int(parallel.largest([interruption.signal])[0])


# ---- a step ----


def waits(run: Run) -> bool:
    """Whether a step's results are read before the next starts: the next depends on them, or reading costs nothing."""
    settings = run.settings
    depends = settings.on_bad_step == "skip" or settings.spike or distill.balanced(settings)
    return bool(depends) or settings.device != "cuda" or math.isnan(run.loss)


def step(run: Run, log: runlog.Log, started: float) -> None:
    """Make and count one step. It is logged when its results are read: now, or while the next one runs."""
    settings, state = run.settings, run.state
    due = settings.layers_every and (state["step"] + 1) % settings.layers_every == 0
    run.probe = telemetry.Probe(run.model) if due else None
    made = update(run)
    settle(run, log)
    state["step"] += 1
    state["tokens"] += run.horizon.each
    (state["seconds"],) = parallel.largest([time.monotonic() - started])
    made.at = run.now()
    made.layers = run.probe.records() if run.probe else {}
    if run.probe and (drafted := run.model.drafted):
        right, chains = draft.accepted(drafted)
        made.layers |= {"accepted": [float(f"{share:.5g}") for share in (right / chains.clamp(min=1)).tolist()]}
    run.unread = made
    if waits(run):
        settle(run, log)


def settle(run: Run, log: runlog.Log, started: float | None = None) -> None:
    """Read and log the step in flight, if any. started: start time of the run; given, its clock is updated.

    Raises TrainingError if that step was bad and may not be skipped.
    """
    if run.unread is None:
        return
    made, run.unread = run.unread, None
    run.loss, norm, means = made.read
    run.amount = made.amount.get("quantized", 1.0)
    if started is not None:
        (run.state["seconds"],) = parallel.largest([time.monotonic() - started])
    if problem := bad_step(run, run.loss, norm):
        skip_or_stop(run, problem, made.at["step"])
        log.write(made.at | {"skipped": problem})
        return
    run.state |= {"recent": [*run.state["recent"], run.loss][-RECENT:], "skipped": 0}
    run.terms = means if len(means) > 1 else {}
    terms = means | {"weights": made.weights} if len(means) > 1 else {}
    log.write(made.at | {"loss": run.loss, "lr": made.rate, "gradient_norm": norm} | made.amount | terms | made.layers)


def bad_step(run: Run, loss: float, norm: float) -> str:
    """Why this gradient must not be applied; "" if it may."""
    if not math.isfinite(loss + norm):
        return f"loss is {loss}, gradient norm {norm}"
    limit, recent = run.settings.spike, run.state["recent"]
    if limit and len(recent) == RECENT and loss > (usual := statistics.median(recent)) + limit:
        return f"loss is {loss:.3f}, {loss - usual:.3f} above the median of {RECENT} steps"
    return ""


def skip_or_stop(run: Run, problem: str, step: int) -> None:
    """Count a bad step. Raises TrainingError unless it may be skipped; then `update` has not applied its gradient."""
    settings, state = run.settings, run.state
    problem += f" at step {step:,}"
    state["skipped"] += 1
    if settings.on_bad_step == "skip" and state["skipped"] < SKIPPED:
        say(f"{problem}; skipped")
        return
    if settings.on_bad_step == "skip":
        problem += f", the {SKIPPED}th bad step in a row"
    raise TrainingError(f"{problem}; lower --lr (now {settings.lr:g}); {run.last_good()}")


def update(run: Run) -> Made:
    """One optimizer step, without waiting for the device unless `waits` says so."""
    settings, optimizer, place = run.settings, run.optimizer, run.place
    optimizer.zero_grad(set_to_none=True)
    amount, weights = schedule.quantization(settings, place), passes.weights_of(run)
    values = passes.gradients(run, amount, weights)
    learnt, limit = optimizers.learnt(run.model), settings.clip or math.inf  # a draft is clipped by itself
    clipped = [optimizers.clip(part, optimizer, limit) for part in learnt if part]
    norm = parallel.whole(clipped[0])
    amounts = {"quantized": amount} if settings.quantize_warmup and run.model.config.quantized else {}
    made = Made(weights, torch.cat([*values, norm[None]]), schedule.learning_rate(settings, place), amounts)
    if waits(run) and bad_step(run, *made.read[:2]):
        return made
    optimizers.set_rates(optimizer, settings, place)
    optimizer.step()
    run.state["fall"] = schedule.fall(settings, place)
    if distill.balanced(settings):
        run.state["sizes"] = distill.running_means(run.state["sizes"], made.read[2])
    return made
