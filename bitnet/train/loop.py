"""`bitnet train`: from text to a checkpoint.

There is no random state to restore when a run is resumed: initial weights come from the seed, batch i is
a pure function of the seed and i (`bitnet.data.dataset`), and so is what dropout drops of it. So on one
CPU, with the same number of threads, a run that was interrupted ends in the same bits as one that was
not. Only a budget of --minutes cannot promise that, since its schedule follows the clock.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import re
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor

from bitnet import process
from bitnet.data import dataset
from bitnet.model import parallel
from bitnet.train import checkpoint, distill, memory, objectives, runlog, saving, schedule, source_model, telemetry
from bitnet.train.checkpoint import Checkpoint
from bitnet.train.errors import TrainingError
from bitnet.train.prepare import prepare
from bitnet.train.progress import Progress, say
from bitnet.train.resolve import Given, resolve, run_folder
from bitnet.train.run import Run

RECENT = 20  # losses that a spike is held against
SKIPPED = 10  # bad steps in a row that no more data will cure
WRITTEN = (
    r"\..*|lock|log\.jsonl|log\.partial|loss\.png|(report|attention)\.html|step-.*"
    r"|(train|validation)-\w+\.(bin|pixels|owners|partial)"
)
"""What a run leaves in its folder, even when it is killed before its first checkpoint; and hidden files."""


@dataclasses.dataclass(frozen=True)
class Outcome:
    """How a run ended, as far as this process is to say it."""

    signal: int = 0  # that stopped it, after saving; 0: its budget is spent
    checkpoint: Path | None = None  # the last one, when the budget is spent; of several processes the first knows it
    reached: dict[str, Any] = dataclasses.field(default_factory=dict)  # step, tokens, seconds
    validation: objectives.Result | None = None


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
        return carry_out(run)


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
        return carry_out(run)


def _claimed(folder: Path) -> contextlib.AbstractContextManager[process.Claim]:
    return process.claimed(folder) if parallel.is_first() else contextlib.nullcontext(process.Claim())


def _newest(folder: Path) -> Checkpoint:
    """The checkpoint to go on from."""
    saving.recover(folder)
    newest = Checkpoint.open(folder)
    saving.set_aside(folder, newest.folder)
    return newest


def carry_out(run: Run) -> Outcome:
    """Train to the end of the budget, or to a signal."""
    try:
        return _carry_out(run)
    except BrokenPipeError:
        raise
    except (OSError, SafetensorError) as error:
        raise run.failure(error) from error


def _carry_out(run: Run) -> Outcome:
    with contextlib.closing(run.open_log()) as log:
        stopped_by = loop(run, log)
        if stopped_by:
            say(f"stopped and saved at step {run.state['step']:,}; --resume goes on from here")
            return Outcome(stopped_by)
        result = run.evaluate(log)
    if not parallel.is_first():
        return Outcome()
    try:
        runlog.plot(log.records, run.folder / "loss.png", f"{run.folder.name}: {result}")
    except ModuleNotFoundError as error:
        say(f"no loss.png: it needs {error.name}, which is not installed")
    return Outcome(0, checkpoint.all_of(run.folder)[-1], run.now(), result)


def loop(run: Run, log: runlog.Log) -> int:
    """Steps, evaluations and checkpoints until the budget is spent. Returns the signal that stopped it, or 0."""
    settings, state = run.settings, run.state
    started = time.monotonic() - state["seconds"]
    saved_step, saved_at = state["step"], state["seconds"]
    with process.Interruption() as interruption, Progress(settings, state) as progress:
        while run.progress < 1 and not _agreed(interruption):
            loss = step(run, log, started)
            progress.step(loss, run.progress)
            if state["step"] % settings.eval_every == 0:
                result, rate = run.evaluate(log, settings.eval_tokens), run.optimizer.param_groups[0]["lr"]
                progress.say(
                    f"step {state['step']:,}: loss {loss:.3f}, validation {result}, lr {rate:.2g}, {progress.speed}"
                )
            late = settings.save_minutes and state["seconds"] - saved_at >= 60 * settings.save_minutes
            if state["step"] % settings.save_every == 0 or late:
                run.save()
                saved_step = state["step"]
                (saved_at,) = parallel.largest([time.monotonic() - started])  # saving may take minutes itself
    if saved_step != state["step"]:
        run.save()
    return _agreed(interruption)


def step(run: Run, log: runlog.Log, started: float) -> float:
    """One step, counted and logged. Returns its loss."""
    settings, state = run.settings, run.state
    due = settings.layers_every and (state["step"] + 1) % settings.layers_every == 0
    with telemetry.Probe(run.model) if due else contextlib.nullcontext() as probe:
        loss, norm = update(run)
    problem = bad_step(run, loss, norm)
    if problem:
        skip_or_stop(run, problem)
    state["step"] += 1
    state["tokens"] += run.sequences * run.tokens_each
    (state["seconds"],) = parallel.largest([time.monotonic() - started])
    if problem:
        log.write(run.now() | {"skipped": problem})
    else:
        state |= {"recent": [*state["recent"], loss][-RECENT:], "skipped": 0}
        rate = run.optimizer.param_groups[0]["lr"]
        layers = probe.records() if probe else {}
        log.write(run.now() | {"loss": loss, "lr": rate, "gradient_norm": norm} | run.terms | layers)
    return loss


def _agreed(interruption: process.Interruption) -> int:
    """The signal that reached any of the processes, or 0."""
    return int(parallel.largest([interruption.signal])[0])


def bad_step(run: Run, loss: float, norm: float) -> str:
    """Why the weights must not follow this gradient; "" when they may."""
    if not math.isfinite(loss + norm):
        return f"loss is {loss}, gradient norm {norm}"
    limit, recent = run.settings.spike, run.state["recent"]
    if limit and len(recent) == RECENT and loss > (usual := statistics.median(recent)) + limit:
        return f"loss is {loss:.3f}, {loss - usual:.3f} above the median of {RECENT} steps"
    return ""


def skip_or_stop(run: Run, problem: str) -> None:
    """Count a bad step, whose gradient `update` has not applied. Raises TrainingError unless it may be skipped."""
    settings, state = run.settings, run.state
    problem += f" at step {state['step'] + 1:,}"
    state["skipped"] += 1
    if settings.on_bad_step == "skip" and state["skipped"] < SKIPPED:
        say(f"{problem}; skipped")
        return
    if settings.on_bad_step == "skip":
        problem += f", the {SKIPPED}th bad step in a row"
    raise TrainingError(f"{problem}; lower --lr (now {settings.lr:g}); {run.last_good()}")


def update(run: Run) -> tuple[float, float]:
    """One optimizer step. Returns the loss (nats per token) and the norm of the gradient before clipping."""
    settings, model, optimizer = run.settings, run.model, run.optimizer
    device = torch.device(settings.device)
    optimizer.zero_grad(set_to_none=True)
    first, last = parallel.share(run.state["step"] * run.sequences, (run.state["step"] + 1) * run.sequences)
    starts = range(first, last, settings.batch)
    batches = [run.batches.sequences(start, min(start + settings.batch, last)) for start in starts]
    (counted,) = parallel.total([sum(int((targets != dataset.IGNORED).sum()) for _, targets, *_ in batches)])
    amount = schedule.quantization(settings, run.progress)
    weights = distill.weights(settings, run.state["sizes"])
    weights |= {"balance": settings.balance_loss} if model.config.n_experts else {}
    means = dict.fromkeys(weights, 0.0)
    for i, (number, batch) in enumerate(zip(starts, batches, strict=True), start=1):
        if model.config.dropout:  # what is dropped is a function of the seed and the sequence, as the sequence is
            torch.manual_seed(dataset.seed_of(settings.seed, number))
        on_device = [tensor.to(device) for tensor in batch]
        autocast = torch.autocast(device.type, torch.bfloat16, enabled=settings.precision == "bf16")
        # With --recompute the backward pass quantizes, too.
        rising = model.partly_quantized(amount, vision=not settings.vision)  # a trained stack is quantized already
        with parallel.gradients_kept(run.forward, keep=i < len(batches)), rising:
            with autocast:
                terms = {name: term / counted for name, term in loss_terms(run, *on_device).items()}
            loss = torch.stack([weights[name] * term for name, term in terms.items()]).sum()
            (loss * parallel.size()).backward()  # gradients are averaged over the processes, their sum is wanted
        for name, term in terms.items():
            means[name] += term.item()
    means = dict(zip(means, parallel.total(list(means.values())), strict=True))
    total = sum(weights[name] * mean for name, mean in means.items())
    run.terms = {"quantized": amount} if settings.quantize_warmup else {}
    run.terms |= means | {"weights": weights} if len(means) > 1 else {}
    norm = parallel.whole(torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip or math.inf)).item()
    if not bad_step(run, total, norm):
        for group in optimizer.param_groups:
            group["lr"] = schedule.learning_rate(settings, run.progress)
            group["weight_decay"] = schedule.weight_decay(settings, run.progress) if group["decays"] else 0.0
        optimizer.step()
        if settings.distill_relations:
            run.state["sizes"] = distill.running_means(run.state["sizes"], means)
    return total, norm


def loss_terms(run: Run, inputs: Tensor, targets: Tensor, *told: Tensor) -> dict[str, Tensor]:
    """Sums over the targets that count: cross-entropy in nats, with a teacher what is learnt from it, of experts
    their balance. told: what the model is told of the inputs: documents, prefixes, images."""
    output = run.forward(inputs, *told)
    terms = {"cross_entropy": objectives.term(run.settings, run.model, output, targets)}
    if run.distillation:
        terms |= run.distillation.terms(output.flatten(0, 1), targets, inputs, *told)
    if run.model.config.n_experts:
        terms["balance"] = (targets != dataset.IGNORED).sum() * run.model.balance
    return terms
