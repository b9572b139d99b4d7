"""The state of a training run. `bitnet.setup.prepare` builds it from the settings."""

from __future__ import annotations

import dataclasses
import functools
import math
import shlex
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import nn

from bitnet.bitlinear import BitLinear
from bitnet.data.mixed import Mixed
from bitnet.model import compiler, parallel
from bitnet.model.transformer import Transformer
from bitnet.quant import ternary_codes
from bitnet.settings import Settings
from bitnet.train import distill, flops, objectives, reporting, runlog, saving, schedule, telemetry
from bitnet.train.checkpoint import Checkpoint, CheckpointError, all_of
from bitnet.train.errors import TrainingError
from bitnet.train.horizon import Horizon
from bitnet.train.pipeline import Ahead, Made
from bitnet.train.progress import say
from bitnet.train.replay import Replay
from bitnet.train.saver import Saver
from bitnet.train.state import State

LAST = 8
"""The final evaluation uses LAST times the tokens of the others: it takes about as long as they do together."""
SHARE = 2
"""But at most one in SHARE of the tokens that the run learned from, and so do the others together: a token takes about
a quarter of its time in training. In a short run they would take longer than all of its steps."""


@dataclasses.dataclass
class Run:
    """A training run. `state` is what a checkpoint records besides model and optimizer."""

    settings: Settings
    data: objectives.Learnt
    sequences: int  # per optimizer step, over all processes
    horizon: Horizon
    model: Transformer
    forward: nn.Module  # the module that a step calls: the model, or DDP around it
    optimizer: torch.optim.Optimizer
    state: State
    distillation: distill.Distillation | None = None
    saver: Saver | None = None  # writes checkpoints in the background, during the loop
    ahead: Ahead | None = None  # prepares batches in advance, during the loop
    unread: Made | None = None  # the step in flight
    replay: Replay | None = None  # CUDA graph of the passes, if possible
    probe: telemetry.Probe | None = None  # telemetry of this step, if it is recorded
    loss: float = math.nan  # the newest loss that was read
    amount: float = 1.0  # λ at which it was computed
    terms: dict[str, float] = dataclasses.field(default_factory=dict)  # terms of that loss, if there are several

    @property
    def folder(self) -> Path:
        return self.settings.run_folder

    @property
    def log_file(self) -> Path:
        return self.folder / "log.jsonl"

    @property
    def progress(self) -> float:
        """Share of the budget that is spent, below 1 while it lasts."""
        return self.horizon.progress(self.state)

    @property
    def seen(self) -> int:
        """Sequences seen so far, whatever the size of the steps was; the next step starts after them."""
        return self.state["tokens"] * self.sequences // self.horizon.each

    @property
    def passes(self) -> float:
        """How many epochs were seen."""
        if isinstance(self.data.batches, Mixed):
            return self.data.batches.passes(self.seen)
        return self.seen / self.data.batches.per_epoch

    @property
    def said(self) -> str:
        """The newest loss, its λ if below 1, and its terms."""
        terms = ", ".join(f"{name.replace('_', '-')} {term:.3f}" for name, term in self.terms.items())
        at = f" at λ {self.amount:.2f}" if self.amount < 1 else ""
        return f"loss {self.loss:.3f}{at}" + (f" ({terms})" if terms else "")

    @functools.cached_property
    def validated(self) -> int:
        """Tokens of an evaluation."""
        there = objectives.size(self.data.held_out, self.data.batches.context)
        return min(self.settings.eval_tokens, there)

    @property
    def of_peak(self) -> float:
        """Seconds that a token would take on the GPUs of the run at their peak; 0: unknown."""
        known = flops.peak(self.settings.device, self.settings.precision) * parallel.size()
        uncounted = self.model.vision or self.model.draft
        return flops.of_token(self.model, self.data.batches.context) / known if known and not uncounted else 0.0

    @property
    def place(self) -> schedule.Place:
        """The place of the next step."""
        return self.horizon.place(self.state)

    def now(self) -> dict[str, Any]:
        return {"step": self.state["step"], "tokens": self.state["tokens"], "seconds": self.state["seconds"]}

    def save(self) -> None:
        parameters = dict(self.model.named_parameters())
        broken = parallel.largest([float(not parallel.kept(p).isfinite().all()) for p in parameters.values()])
        if any(broken):
            name = list(parameters)[broken.index(1)]
            raise TrainingError(f"{name} holds NaN or infinity, not saved; {self.last_good()}; lower --lr")
        self.state["quantized"] = schedule.quantization(self.settings, self.place)
        bests = [self.state["best"]["step"] or None, self.state["best_tasks"]["step"]]
        best = bests if self.settings.keep_best else []
        keep = [self.state["stable"], *best]
        if self.saver:
            self.saver.settle()  # one snapshot at a time
        snapshot = self.snapshot()
        if self.saver is None or not snapshot.may_be_copied():
            self._write(snapshot, keep)
        elif parallel.is_first():
            self.saver.begin(functools.partial(self._write, snapshot.copied(), keep))

    def snapshot(self) -> saving.Snapshot:
        """The present state of the run; the tensors are shared with it."""
        more = self.data.template, self.data.generation
        return saving.Snapshot.of(self.model, self.data.words.to_str(), self.optimizer, self.state, *more)

    def _write(self, snapshot: saving.Snapshot, keep: Sequence[int | None]) -> None:
        """keep: the steps of checkpoints to keep besides the newest."""
        try:
            saving.write(self.folder, snapshot)
            if parallel.is_first():
                saving.keep_newest(self.folder, self.settings.keep, keep)
        except (OSError, SafetensorError) as error:
            raise self.failure(error, snapshot.step) from error

    def open_log(self) -> runlog.Log:
        """The log of the run, continued after the steps made so far."""
        if not parallel.is_first():
            return runlog.Silent()
        step = self.state["step"]
        return runlog.Log(self.log_file, step, reporting.board_of(self.settings, self.folder, step))

    def logged(self, name: str) -> bool:
        """Whether a record of the log has this field. All processes call it."""
        return parallel.from_first(lambda: any(name in record for record in runlog.each(self.log_file)))

    def last_good(self) -> str:
        """The newest intact checkpoint, for messages; waits for the one being written, by the first process. All
        processes call it."""
        if self.saver:
            self.saver.wait()
        return parallel.from_first(self._whole)

    def _whole(self) -> str:
        try:
            return f"{Checkpoint.open(self.folder, lambda _: None).folder} is the last good checkpoint"
        except CheckpointError:
            return "no checkpoint was saved"
        except OSError as error:
            return f"the checkpoints cannot be read now ({error.strerror})"

    def failure(self, error: OSError | SafetensorError, at: int | None = None) -> TrainingError:
        """The error when a file of the run cannot be written, for example on a full disk. at: its step."""
        step = self.state["step"] if at is None else at
        what = getattr(error, "strerror", None) or str(error)
        where = f" ({name})" if (name := getattr(error, "filename", None)) else ""
        good = self._whole()  # not `last_good`: the saver's own thread must not wait for the saver
        advice = f"{good}, from which --resume continues" if step and all_of(self.folder) else good
        return TrainingError(f"{self.folder} cannot be written at step {step:,}: {what}{where}; {advice}")

    def evaluate_source(self, log: runlog.Log) -> None:
        """Log the loss of the model that finetuning starts from, in full precision if it is not ternary yet."""
        if self.logged("start"):
            return
        amount = 0.0 if self.settings.quantize_warmup else 1.0
        context, limit = self.data.batches.context, self.settings.eval_tokens
        with compiler.eagerly(), self.model.partly_quantized(amount, vision=self.state["phased"]):
            result = objectives.evaluate(self.model, self.data.held_out, self.settings, context, limit)
        say(f"before the first step{', in full precision' if amount < 1 else ''}: validation {result}")
        log.write(self.now() | {"start": dataclasses.asdict(result)})

    def evaluate(self, log: runlog.Log, last: bool = False) -> objectives.Result:
        """Loss on the validation data, or on evenly spaced parts of it, logged. last: of more tokens (LAST, SHARE)."""
        limit, held_out, context = self.settings.eval_tokens, self.data.held_out, self.data.batches.context
        there = objectives.size(held_out, context)
        if last:
            limit = max(limit, min(LAST * limit, self.state["tokens"] // SHARE))
        if last and there > self.settings.eval_tokens:
            share = f"{limit:,} of {there:,}" if there > limit else f"all {there:,}"
            say(f"evaluating on {share} tokens of validation")
        begin = time.monotonic()
        with compiler.eagerly():
            found = objectives.evaluate(self.model, held_out, self.settings, context, limit)
            drafts = self.model.draft and not self.settings.draft_only
            guessed = drafts and objectives.drafts(self.model, held_out, context, limit)
        result = parallel.from_first(lambda: found)  # pairs and drafts each process measures, to its own last bits
        self.state["evaluated"] += parallel.largest([time.monotonic() - begin])[0]
        record = self.now() | {"validation": dataclasses.asdict(result), "zeros": zero_fraction(self.model)}
        if guessed:
            record |= {"guesses": dataclasses.asdict(guessed)}
            say(f"draft: {guessed}")
        log.write(record | {"final": True} if last else record)
        if last and (error := getattr(result, "standard_error", None)):
            whole = f"bitnet eval {shlex.quote(str(self.folder))}"
            say(f"the last loss is on a part, standard error {error:.4f}; {whole} uses all")
        guessing = math.log(max(2, self.model.config.vocab_size))
        if last and (loss := getattr(result, "nats_per_token", 0.0)) > guessing:
            say(
                f"the last loss, {loss:.2f} nats, is above the {guessing:.2f} of guessing: the run is too short or its "
                "learning rate too high; try a lower --lr"
            )
        return result


def zero_fraction(model: Transformer) -> float:
    """Share of the ternary weights that are 0."""
    layers = [m for m in model.modules() if isinstance(m, BitLinear)]
    zeros = sum(int((ternary_codes(parallel.whole(m.weight), m.scope)[0] == 0).sum()) for m in layers)
    return zeros / max(1, sum(m.weight.numel() for m in layers))
