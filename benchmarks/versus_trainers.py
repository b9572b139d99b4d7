"""`bitnet train` compared with alternative trainers: same text, tokens and architecture.

    make versus                                     # the environment of the others, build/versus: once
    python benchmarks/versus_trainers.py --jobs 2   # losses: every trainer at three learning rates, hours
    python benchmarks/versus_trainers.py --speeds   # tokens a second, in turn: a minute on a quiet machine
    python benchmarks/versus_trainers.py --quick    # that it runs: a minute, and the figures mean nothing

Finished runs are kept in --runs; the script can be restarted to continue. Ours is the recipe of `bitnet train`, theirs
that of the Trainer of transformers: AdamW, cosine, as in their papers on ternary models. "ours, AdamW" separates the
effect of the recipe from that of the code.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import statistics
import subprocess
import sys
from pathlib import Path
from typing import Any

import report
import training_runs
from qat_gap import SIZES, parameters
from training_runs import Runs

from bitnet.config import ModelConfig
from bitnet.train import runlog

BATCH = 8
OURS: dict[str, tuple[str, dict[str, Any], list[float]]] = {
    "bitnet": ("bitnet train", {}, [4e-3, 8e-3, 16e-3]),
    "bitnet-adamw": ("bitnet train, AdamW", {"optimizer": "adamw"}, [2e-3, 4e-3, 8e-3]),
}
THEIRS = {
    "transformers": "transformers, online BitLinear", "torchao-ternary": "torchao, bitnet_training (prototype)",
    "torchao-int8": "torchao, int8 fake quantization", "plain": "transformers, not quantized",
}  # fmt: skip
RATES = [1e-3, 3e-3, 9e-3]  # for AdamW with a cosine
PIECES, STEPS = 2, 12  # per speed measurement


class Theirs:
    """Runs of their_trainers.py, each kept as one file."""

    def __init__(self, python: Path, folder: Path, config: ModelConfig, jobs: int, options: dict[str, Any]) -> None:
        self.python, self.folder, self.options = python, folder, options
        self.pool = training_runs.workers(jobs)
        self.shape = {
            "vocab_size": config.vocab_size, "hidden_size": config.dim, "intermediate_size": config.ffn_dim,
            "num_hidden_layers": config.n_layers, "num_attention_heads": config.n_heads, "head_dim": config.head_dim,
            "num_key_value_heads": config.n_kv_heads, "max_position_embeddings": config.max_context,
            "tie_word_embeddings": True, "bos_token_id": 0, "eos_token_id": 0,
            "rope_parameters": {"rope_type": "default", "rope_theta": config.rope_theta},
        }  # fmt: skip

    def all(self, runs: dict[str, tuple[str, float]]) -> dict[str, dict[str, Any]]:
        waiting = {name: self.pool.submit(self._kept, name, *run) for name, run in runs.items()}
        return training_runs.results(waiting)

    def _kept(self, name: str, arm: str, rate: float) -> dict[str, Any]:
        file = self.folder / f"{name}.json"
        if not file.exists():
            file.write_text(json.dumps(self.train(arm, lr=rate)))
            print(f"{name}: {json.loads(file.read_text())['loss']:.4f} nats/token", file=sys.stderr)
        found: dict[str, Any] = json.loads(file.read_text())
        return found

    def train(self, arm: str, **options: Any) -> dict[str, Any]:
        words = [str(self.python), str(Path(__file__).with_name("their_trainers.py")), arm]
        for key, value in ({"model": json.dumps(self.shape)} | self.options | options).items():
            words += [f"--{key}", str(value)]
        done = subprocess.run(words, capture_output=True, text=True)
        if done.returncode:
            raise report.BenchmarkError(f"{arm} failed: {done.stderr[-1000:]}")
        found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
        return found


def ids_of(runs: Runs, config: ModelConfig) -> dict[str, Path]:
    """Files of token ids, 16 bits each, that all trainers train on."""
    runs.prepare(config)
    folder = runs.folder / f"tokens-{config.vocab_size}"
    return {side: next(folder.glob(f"{side}-*.bin")) for side in ("train", "validation")}


def best(tried: dict[float, float]) -> dict[str, Any]:
    rate = min(tried, key=lambda rate: tried[rate])
    return {"lr": rate, "loss": tried[rate], "tried": {f"{lr:g}": loss for lr, loss in tried.items()}}


def losses(runs: Runs, theirs: Theirs, config: ModelConfig, steps: int, quick: bool) -> dict[str, dict[str, Any]]:
    """Loss of each trainer at its best learning rate."""
    some = slice(1 if quick else 3)
    options = training_runs.budget(steps, BATCH)
    mine = {
        (arm, rate): (f"{arm}-lr{rate:g}", (config, options | extra | {"lr": rate}))
        for arm, (_, extra, rates) in OURS.items() for rate in rates[some]
    }  # fmt: skip
    other = {(arm, rate): (f"{arm}-lr{rate:g}", (arm, rate)) for arm in THEIRS for rate in RATES[some]}
    found = {name: outcome.loss for name, outcome in runs.all(dict(mine.values())).items()}
    found |= {name: outcome["loss"] for name, outcome in theirs.all(dict(other.values())).items()}
    rows: dict[str, dict[float, float]] = {}
    for (arm, rate), (name, _) in (mine | other).items():
        rows.setdefault(arm, {})[rate] = found[name]
    return {arm: best(tried) for arm, tried in rows.items()}


def speeds(runs: Runs, theirs: Theirs, config: ModelConfig, threads: int) -> dict[str, float]:
    """Tokens per second of each trainer: the median over the steps of short runs, made in turn."""
    seconds: dict[str, list[float]] = {arm: [] for arm in [*OURS, *THEIRS]}
    for _ in range(PIECES):
        for arm, (_, extra, rates) in OURS.items():
            options = training_runs.budget(STEPS, BATCH) | extra | {"lr": rates[1], "threads": threads}
            folder = runs.folder / f"speed-{arm}-{len(seconds[arm])}"
            runs.all({folder.name: (config, options | {"eval-tokens": 1, "eval-every": STEPS, "save-every": STEPS})})
            ended = [each["seconds"] for each in runlog.read(folder / "log.jsonl") if "loss" in each]
            seconds[arm] += [b - a for a, b in itertools.pairwise(ended)]
            shutil.rmtree(folder)
        for arm in THEIRS:
            seconds[arm] += theirs.train(arm, lr=RATES[1], steps=STEPS, threads=threads, validation="")["seconds"]
    return {arm: BATCH * config.max_context / statistics.median(each) for arm, each in seconds.items()}


def markdown(results: dict[str, Any]) -> str:
    names = {arm: name for arm, (name, _, _) in OURS.items()} | THEIRS
    fast = results["speeds"]
    head = ["trainer", "nats/token", "best rate", "at each rate", "tokens/s"]
    table = [
        [names[arm], f"{row['loss']:.3f}", f"{row['lr']:g}",
         ", ".join(f"{rate}: {loss:.3f}" for rate, loss in row["tried"].items()),
         f"{fast[arm]:,.0f}" if arm in fast else "not measured"]
        for arm, row in results["rows"].items()
    ]  # fmt: skip
    return "\n".join([
        "# bitnet train beside other trainers", "", report.table(head, table), "",
        f"{results['parameters']:,} parameters, {results['tokens']:,} tokens of Python's standard library, one seed, "
        f"the architecture of BitNet 2B4T. Tokens a second with {results['threads']} threads: medians of "
        f"{PIECES} × {STEPS} steps, in turn. Rates are chosen and losses reported on the same validation text. "
        "onebitllms 0.0.4 quantizes by kernels of Triton: it needs a GPU.",
    ])  # fmt: skip


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=list(SIZES), default="3m", help="of the model [3m]")
    parser.add_argument("--tokens", type=int, default=2_000_000, help="that each run learns from [2000000]")
    parser.add_argument("--speeds", action="store_true", help="measure speeds alone")
    parser.add_argument("--threads", type=int, default=2, help="of a run whose speed is measured [2]")
    python = report.ROOT / "build" / "versus" / "bin" / "python"
    parser.add_argument("--python", type=Path, default=python, help="interpreter that has their trainers")
    training_runs.add_flags(parser, "versus_trainers", "one rate, a tiny model")
    args = parser.parse_args(argv)
    if not args.python.exists():
        parser.error(f"{args.python} does not exist; `make versus` makes it, --python names another")
    config = SIZES["quick" if args.quick else args.size]
    steps = 3 if args.quick else -(-args.tokens // (BATCH * config.max_context))
    runs = Runs(args.runs, args.jobs, {"data": args.data} if args.data else {})
    options = ids_of(runs, config) | {"context": config.max_context, "batch": BATCH, "steps": steps}
    theirs = Theirs(args.python, runs.folder, config, args.jobs, options)
    measured = runs.folder / "speeds.json"
    if args.speeds or args.quick:
        measured.write_text(json.dumps({"threads": args.threads} | speeds(runs, theirs, config, args.threads)))
    fast = json.loads(measured.read_text()) if measured.exists() else {"threads": args.threads}
    if args.speeds:
        return print(json.dumps(fast, indent=1))
    words = sys.argv[1:] if argv is None else argv
    results = {
        "origin": report.origin(" ".join(["python benchmarks/versus_trainers.py", *words])),
        "parameters": parameters(config), "tokens": steps * BATCH * config.max_context, "threads": fast.pop("threads"),
        "rows": losses(runs, theirs, config, steps, args.quick), "speeds": fast,
    }  # fmt: skip
    labels = [*results["rows"]]
    panels = [
        report.Panel("nats per token", labels, {"loss": [results["rows"][arm]["loss"] for arm in labels]}),
        report.Panel("tokens a second", labels, {"speed": [fast.get(arm, float("nan")) for arm in labels]}),
    ]
    report.write(args.out, "versus_trainers", results, markdown(results), panels)
    print(markdown(results))


if __name__ == "__main__":
    report.run(main)
