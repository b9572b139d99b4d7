"""Carries out the runs of benchmarks/scaling.py: processes of `bitnet train`, several at a time, until all are done or
time is up. A stopped run saves and can be resumed; a finished run leaves outcome.json in its folder, which together
with log.jsonl is all that another machine needs of it."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import report
import scaling_plan
import training_runs
from scaling_plan import SIZES, Cell, Planned

from bitnet.train import checkpoint

OUTCOME, SAID = "outcome.json", ".said"
BESIDE = 20.0  # seconds of a run outside its steps
SAVING, PAUSE = 20.0, 0.2  # seconds for runs to save when time is up; between polls


@dataclass
class Study:
    """The runs of a folder. text: the output of `benchmarks/sources.py`."""

    folder: Path
    text: Path
    jobs: int
    common: dict[str, Any]  # options of all runs
    until: float = float("inf")  # deadline, as time.monotonic
    running: dict[str, tuple[Planned, Any]] = field(default_factory=dict)  # with its process
    failed: dict[str, str] = field(default_factory=dict)  # with its output

    def outcomes(self) -> dict[str, dict[str, Any]]:
        """Outcomes of finished runs, by name. Raises ValueError: one is of another text or plan."""
        found = {f.parent.name: json.loads(f.read_text()) for f in sorted(self.folder.glob(f"*/{OUTCOME}"))}
        for name, done in found.items():
            planned = Planned(Cell(done["size"], done["each"], 1), done["arm"], done["rate"], done["seed"])
            expected = made_by(planned, self.text)
            changed = [what for what in expected if done.get(what) != expected[what]]
            if changed:
                raise ValueError(
                    f"{self.folder / name} has a run of another {changed[0]}, expected that of {self.text} and of this "
                    "version's plan; remove the folder, or name another one with --runs"
                )
        return found

    def carry_out(self, plan: Sequence[Cell]) -> None:
        """Make all runs of the plan, as far as there is time. A failed run, e.g. at a high rate, counts as worst."""
        try:
            while self._begin(plan) or self.running:
                if time.monotonic() >= self.until:
                    return
                self._finish()
        finally:
            self._stop()

    def _begin(self, plan: Sequence[Cell]) -> bool:
        """Start the runs for which there is room and time. Returns whether any was started."""
        done = self.outcomes()
        losses = {name: outcome["selection"]["nats_per_token"] for name, outcome in done.items()}
        losses |= dict.fromkeys(self.failed, math.inf)
        left, begun = self.until - time.monotonic(), False
        for planned in scaling_plan.wanted(plan, losses):
            if len(self.running) >= self.jobs:
                break
            if planned.name not in self.running and self._expected(planned, done) < left - SAVING:
                config, options = SIZES[planned.cell.size].model(planned.arm), self.common | planned.options
                words = training_runs.command(self.folder / planned.name, config, options | {"data": self.text})
                self.running[planned.name] = planned, start(words, self.folder / planned.name)
                begun = True
        return begun

    def _expected(self, planned: Planned, done: Mapping[str, dict[str, Any]]) -> float:
        """Seconds that a run will take, estimated from finished ones of its size; 0: there are none."""
        known = [o["seconds"] / o["tokens"] for o in done.values() if o["size"] == planned.cell.size]
        saved = checkpoint.all_of(self.folder / planned.name)
        steps = planned.cell.steps - (int(saved[-1].name.rpartition("-")[2]) if saved else 0)
        return BESIDE + max(known) * steps * SIZES[planned.cell.size].step_tokens if known else 0.0

    def _finish(self) -> None:
        """Wait for a moment; measure runs that have ended."""
        time.sleep(PAUSE)
        for name, (planned, process) in list(self.running.items()):
            if process.poll() is None:
                continue
            del self.running[name]
            folder = self.folder / name
            if process.returncode:
                self.failed[name] = (folder / SAID).read_text()[-500:]
                print(f"{name} failed: {self.failed[name]}", file=sys.stderr, flush=True)
                continue
            found = outcome(folder, planned, self.text)
            (folder / OUTCOME).write_text(json.dumps(found, indent=1) + "\n")
            loss = found["report"]["nats_per_token"]
            print(f"{name}: {loss:.4f} nats/token, {found['seconds']:.0f} s", file=sys.stderr, flush=True)

    def _stop(self) -> None:
        """Stop the running runs, which save and can be resumed."""
        for _, process in self.running.values():
            process.send_signal(signal.SIGTERM)
        for name, (_, process) in self.running.items():
            try:
                process.wait(SAVING)
            except subprocess.TimeoutExpired:
                process.kill()
            print(f"{name}: stopped", file=sys.stderr, flush=True)
        self.running.clear()


def start(words: list[str], folder: Path) -> Any:
    """Start a `bitnet` command; its output goes to a file in the folder of its run."""
    with (folder / SAID).open("w") as said:
        return subprocess.Popen([sys.executable, "-m", "bitnet", *words], stdout=subprocess.DEVNULL, stderr=said)


def made_by(planned: Planned, text: Path) -> dict[str, str]:
    """Hashes of what makes a run, apart from the sources that train: these may change in the course of a study."""
    model = SIZES[planned.cell.size].model(planned.arm)
    plan = json.dumps([model.to_dict(), planned.options], sort_keys=True)
    return {"text": text_hash(text), "plan": hashlib.sha256(plan.encode()).hexdigest()[:16]}


@functools.cache
def text_hash(text: Path) -> str:
    """Of what `benchmarks/sources.py` took; wherever it lies, as several machines share a study."""
    parts = json.loads((text / "manifest.json").read_text())["texts"]
    return hashlib.sha256("".join(part["sha256"] for part in parts.values()).encode()).hexdigest()[:16]


def outcome(folder: Path, planned: Planned, text: Path) -> dict[str, Any]:
    """The result of a finished run, on the text for choosing rates and on that for figures. text: as of `Study`."""
    from bitnet.train import runlog

    records = runlog.read(folder / "log.jsonl")
    curve = [(r["tokens"], r["validation"]["nats_per_token"]) for r in records if "validation" in r]
    return {
        "size": planned.cell.size, "each": planned.cell.each, "arm": planned.arm, "rate": planned.rate,
        "seed": planned.seed, "tokens": records[-1]["tokens"], "seconds": records[-1]["seconds"], "curve": curve,
        "selection": records[-1]["validation"], "report": measured(folder, text / "report"),
        "commit": report.commit(), "device": device(),
    } | made_by(planned, text)  # fmt: skip


def measured(run: Path, text: Path) -> dict[str, Any]:
    """Loss of a run's newest checkpoint on a folder of token ids, on the GPU if there is one."""
    from dataclasses import asdict

    import torch

    from bitnet.data import tokenized
    from bitnet.evaluate import loss

    trained = checkpoint.Checkpoint.open(run)
    words, (ids,) = tokenized.read(text, "validation")
    if words.to_str() != trained.words.to_str():
        raise ValueError(f"{text} and {run} have different tokenizers")
    model = trained.model.to("cuda" if torch.cuda.is_available() else "cpu")
    return asdict(loss.evaluate(model, ids, model.config.max_context, batch=128))


def device() -> str:
    import torch

    return torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU"
