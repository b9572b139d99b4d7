"""What each choice of the training recipe is worth: one change at a time against the defaults, ternary,
one million parameters, equal tokens.

    python benchmarks/recipe.py --jobs 2             # 15 runs: an hour on two cores
    python benchmarks/recipe.py --quick              # that it runs: seconds, and the figures mean nothing

The deviation between seeds of the defaults says which differences mean something. Runs are kept in
--runs; started again, the script goes on.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

import report
import training_runs
from qat_gap import SIZES
from training_runs import Runs

from bitnet.config import ModelConfig

CHANGES: dict[str, dict[str, Any]] = {
    "AdamW in place of Muon, at half the rate": {"optimizer": "adamw", "lr": 0.5},
    "quantized from the first step": {"quantize-warmup": 0.0},
    "no sub-norms": {"model": {"sub_norm": False}},
    "SiLU in place of relu²": {"model": {"activation": "silu"}},
    "batch ÷ 2, twice the steps": {"batch": 0.5},
    "batch × 2, half the steps": {"batch": 2.0},
    "two stages": {"schedule": "two_stage"},
    "no weight decay": {"weight-decay": 0.0},
    "a scale for each 128 inputs": {"model": {"weight_scale": "group"}},
    "head and embedding in fp32": {"model": {"head_format": "f32"}},
    "cosine": {"schedule": "cosine"},
    "warm-down over 50 %": {"warmdown": 0.5},
}
"""Options of `bitnet train`, and of the model; lr and batch are factors of the defaults'."""
BATCH, RATE = 8, 8e-3


def run_of(change: dict[str, Any], seed: int, config: ModelConfig, tokens: int) -> tuple[ModelConfig, dict[str, Any]]:
    """Model and options of a run with one change."""
    batch = int(BATCH * change.get("batch", 1))
    steps = tokens // (batch * config.max_context)
    options = {key: value for key, value in change.items() if key != "model"}
    options |= training_runs.budget(steps, batch) | {"seed": seed, "lr": RATE * change.get("lr", 1)}
    return config.replace(**change.get("model", {})), options


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = SIZES["quick" if args.quick else "1m"]
    changes = dict(list(CHANGES.items())[:2]) if args.quick else CHANGES
    runs = Runs(args.runs, args.jobs, {"data": args.data} if args.data else {})
    runs.prepare(config)
    wanted = {f"default, seed {seed}": run_of({}, seed, config, args.tokens) for seed in range(args.seeds)}
    wanted |= {name: run_of(change, 0, config, args.tokens) for name, change in changes.items()}
    found = {name: outcome.loss for name, outcome in runs.all(wanted).items()}
    defaults = [found.pop(f"default, seed {seed}") for seed in range(args.seeds)]
    rows = [{"change": name, "loss": loss, "difference": loss - defaults[0]} for name, loss in found.items()]
    return {
        "tokens": args.tokens, "losses": defaults, "loss": statistics.mean(defaults),
        "deviation": statistics.stdev(defaults), "rows": sorted(rows, key=lambda row: row["difference"]),
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    rows = [[row["change"], f"{row['loss']:.4f}", f"{row['difference']:+.4f}"] for row in results["rows"]]
    return (
        "# What each choice is worth\n\n"
        f"Validation loss in nats per token after {results['tokens']:,} tokens, 1 million parameters, ternary. "
        f"The defaults: {results['loss']:.4f} ± {results['deviation']:.4f} over {len(results['losses'])} seeds; "
        "changes with seed 0, differences from the defaults with seed 0.\n\n"
        + report.table(["change", "nats/token", "difference"], rows)
    )


def draw(file: Path, results: dict[str, Any]) -> None:
    """A bar for each change, and a band as wide as two deviations between seeds to either side."""
    plt = report.pyplot()
    rows = results["rows"][::-1]
    figure, axis = plt.subplots(figsize=(8, 2 + 0.3 * len(rows)), layout="constrained")
    axis.axvspan(-2 * results["deviation"], 2 * results["deviation"], color="#9aa7b4", alpha=0.3, lw=0)
    bars = axis.barh([row["change"] for row in rows], [row["difference"] for row in rows], color="#1f4e79")
    axis.bar_label(bars, [f"{row['difference']:+.3f}" for row in rows], fontsize=8, padding=3)
    axis.axvline(0, color="black", lw=0.8)
    axis.margins(x=0.15)
    axis.set_xlabel("nats per token more than with the defaults\n(gray: two deviations between seeds)")
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(file, dpi=130)
    plt.close(figure)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of a run [1 million]")
    parser.add_argument("--seeds", type=int, default=3, help="of the defaults [3]")
    training_runs.add_flags(parser, "recipe", "a tiny model, two seeds, two changes")
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.seeds = 512, 2
    words = "benchmarks/recipe.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results = {"origin": report.origin(f"python {words.strip()}")} | measure(args)
    report.write(args.out, "recipe", results, markdown(results), lambda file: draw(file, results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
