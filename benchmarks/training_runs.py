"""Training runs of a benchmark: ordinary runs of `bitnet train`, each in its own folder.

An interrupted run is resumed when the benchmark is started again; a finished one is read. A run is identified by its
folder's name. A file beside the folder says which command and version made it: a run of others is refused, because its
figures would be taken for those of this command.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import report

from bitnet.config import ModelConfig
from bitnet.train import checkpoint, runlog

Options = Mapping[str, Any]  # of `bitnet train`, by flag
T = TypeVar("T")


@dataclass(frozen=True)
class Outcome:
    """The result of a finished run. curve: (tokens, validation loss in nats per token)."""

    folder: Path
    loss: float
    bits_per_byte: float
    curve: list[tuple[int, float]]
    seconds: float


class Runs:
    """Makes runs, at most `jobs` at a time, with one thread each. All runs train on the same token ids."""

    def __init__(self, folder: Path, jobs: int, common: Options) -> None:
        self.folder, self.common = folder.resolve(), dict(common)
        self.pool = workers(jobs)
        self.shared: dict[int, Path] = {}  # vocabulary -> tokenizer.json

    def all(self, runs: Mapping[str, tuple[ModelConfig, Options]]) -> dict[str, Outcome]:
        """Make runs in parallel, once none of their folders has a run of something else."""
        asked = {name: self._asked(name, *run) for name, run in runs.items()}
        for folder, _, words in asked.values():
            check_made(folder, words)
        waiting = {name: self.pool.submit(finished, *each) for name, each in asked.items()}
        return results(waiting)

    def prepare(self, config: ModelConfig) -> None:
        """Make the tokenizer of all runs with this vocabulary, and the token ids, by a run of one step."""
        first = self.folder / f"tokens-{config.vocab_size}"
        self.shared[config.vocab_size] = first / "step-000001" / "tokenizer.json"
        finished(first, None, command(first, config, self.common | {"steps": 1, "eval-tokens": 1}))

    def _asked(self, name: str, config: ModelConfig, options: Options) -> tuple[Path, Path, list[str]]:
        """What `finished` takes."""
        words, folder = self.shared[config.vocab_size], self.folder / name
        options = self.common | {"tokenizer": words} | options
        return folder, words.parent.parent, command(folder, config, options)


def workers(jobs: int) -> ThreadPoolExecutor:
    """Threads that make runs."""
    if jobs < 1:
        raise report.BenchmarkError(f"--jobs is {jobs}, expected 1 or more")
    return ThreadPoolExecutor(jobs)


def results(waiting: Mapping[str, Future[T]]) -> dict[str, T]:
    """What the runs have returned. If one fails, or at Ctrl-C, those that have not begun never do."""
    try:
        return {name: run.result() for name, run in waiting.items()}
    finally:
        for run in waiting.values():
            run.cancel()


def finished(folder: Path, ids: Path | None, words: list[str]) -> Outcome:
    """The outcome of a run, which the command starts or resumes unless finished. ids: a run with the same token ids.

    Raises BenchmarkError: the folder has a run of another command, model or version.
    """
    check_made(folder, words)
    outcome = read(folder)
    if outcome is None:
        for file in ids.glob("*.bin") if ids else ():
            if not (folder / file.name).exists():
                os.link(file, folder / file.name)
        bitnet(*words)
        outcome = read(folder)
        assert outcome is not None
        print(f"{folder.name}: {outcome.loss:.4f} nats/token, {outcome.seconds:.0f} s", file=sys.stderr)
    return outcome


def check_made(folder: Path, words: list[str]) -> None:
    """Write beside the folder of a run what makes it, or raise BenchmarkError: something else made the run in it."""
    config = folder / "run.toml"
    model = config.read_text(encoding="utf-8") if config.exists() else ""
    command = [word for word in words if word != "--resume"]
    made = {"command": command, "model": model, "version": version()}
    file = folder.parent / f"{folder.name}.json"
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else dict.fromkeys(made)
    changed = [name for name in made if made[name] != before[name]]
    if changed and checkpoint.all_of(folder):
        raise report.BenchmarkError(
            f"{folder} has a run of another {changed[0]}, expected that of: bitnet {' '.join(command)}; "
            "remove the folder, or name another one with --runs"
        )
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


@functools.cache
def version() -> str:
    """A hash of the sources that train: figures of two versions are no comparison."""
    sources = sorted((report.ROOT / "bitnet").rglob("*.py"))
    return hashlib.sha256(b"".join(source.read_bytes() for source in sources)).hexdigest()[:16]


def budget(steps: int, batch: int, keep: int = 1) -> dict[str, Any]:
    """Options of a run of this many steps: ten evaluations, and max(4, keep) checkpoints, the last `keep` kept."""
    return {
        "steps": steps, "batch": batch, "eval-every": max(1, steps // 10), "save-every": max(1, steps // max(4, keep)),
        "keep": keep, "layers-every": 0,
    }  # fmt: skip


def add_flags(parser: argparse.ArgumentParser, name: str, quick: str) -> None:
    """Options shared by all benchmarks of `bitnet train`. name: folder of their runs."""
    parser.add_argument("--data", nargs="+", help="text, as for bitnet train; none: Python's standard library")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one thread each [1]")
    parser.add_argument("--runs", type=Path, default=report.ROOT / "build" / name, help="folder of the runs")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of table, figures and JSON")
    parser.add_argument("--quick", action="store_true", help=quick)


def read(folder: Path) -> Outcome | None:
    """The outcome of a run, None if it is not finished."""
    records = runlog.read(folder / "log.jsonl")
    if not records or not records[-1].get("final"):
        return None
    last = records[-1]["validation"]
    curve = [(r["tokens"], r["validation"]["nats_per_token"]) for r in records if "validation" in r]
    return Outcome(folder, last["nats_per_token"], last["bits_per_byte"], curve, records[-1]["seconds"])


def command(folder: Path, config: ModelConfig, options: Options) -> list[str]:
    """The `bitnet train` command that starts or resumes a run, with its model in a file, as a user would write it."""
    folder.mkdir(parents=True, exist_ok=True)
    model = "".join(f"{key} = {json.dumps(value)}\n" for key, value in config.to_dict().items() if value is not None)
    (folder / "run.toml").write_text("[model]\n" + model)
    words = ["train", "--json", "--config", folder / "run.toml", "--out", folder, "--threads", 1]
    words += ["--resume"] if checkpoint.all_of(folder) else []
    for flag, value in options.items():
        words += [f"--{flag}", *(value if isinstance(value, list) else [] if value is True else [value])]
    return [str(word) for word in words]


def bitnet(*words: str, until: float = math.inf) -> Any:
    """The output of a `bitnet` command with --json. Raises BenchmarkError with its error.

    until: when to stop it, by `time.monotonic()`, as with Ctrl-C: a training run is saved. Then raises TimeoutError.
    """
    command = [sys.executable, "-m", "bitnet", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, err = process.communicate(timeout=None if until == math.inf else max(0.0, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)
            process.communicate()
            raise TimeoutError(" ".join(words)) from None
    if process.returncode:
        raise report.BenchmarkError(f"bitnet {' '.join(words)} failed: {err[-1000:]}")
    return json.loads(out)


def best_rate(
    runs: Runs, name: str, config: ModelConfig, options: Options, start: float, search: bool = True
) -> tuple[float, dict[float, Outcome]]:
    """The learning rate with the lowest loss for seed 0 among start · 2ⁿ: both neighbours were tried and are worse."""

    def at(*rates: float) -> dict[float, Outcome]:
        names = {f"{name}-lr{rate:g}-seed0": rate for rate in rates}
        found = runs.all({key: (config, options | {"lr": rate, "seed": 0}) for key, rate in names.items()})
        return {names[key]: outcome for key, outcome in found.items()}

    tried = at(start, 2 * start) if search else at(start)
    while search:
        best = min(tried, key=lambda rate: tried[rate].loss)
        missing = [rate for rate in (best / 2, 2 * best) if rate not in tried]
        if not missing:
            break
        tried |= at(*missing)
    return min(tried, key=lambda rate: tried[rate].loss), tried


def spread(outcomes: list[Outcome]) -> tuple[float, float]:
    """Mean and standard deviation of final losses."""
    losses = [outcome.loss for outcome in outcomes]
    return statistics.mean(losses), statistics.stdev(losses) if len(losses) > 1 else 0.0


def tried(variants: Iterable[tuple[str, dict[str, Any]]]) -> str:
    """The loss at each learning rate, a line for each variant, its name and row of results."""
    said = "Loss of seed 0 by learning rate. Rates are chosen and losses reported on the same validation text:\n\n"
    return said + "\n".join(
        f"- {name}: " + ", ".join(f"{rate}: {loss:.4f}" for rate, loss in row["tried"].items())
        for name, row in variants
    )
