"""The effect of each choice in the training recipe: one change at a time against the defaults, ternary, one million
parameters, equal tokens.

    python benchmarks/recipe.py --jobs 2             # 18 runs: an hour on two cores
    python benchmarks/recipe.py --only clip --jobs 2 # one of them, with as many seeds: ten minutes
    python benchmarks/recipe.py --when --jobs 2      # when the quantizers come in, three lengths: three hours
    python benchmarks/recipe.py --quick              # that it runs: seconds, and the figures mean nothing

The deviation between seeds of the defaults shows which differences are significant: `chance`. Runs are kept in --runs;
the script can be restarted to continue.
"""

from __future__ import annotations

import argparse
import math
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
    "gradients not clipped": {"clip": 0.0},
    "a scale for each 128 inputs": {"model": {"weight_scale": "group"}},
    "head and embedding in fp32": {"model": {"head_format": "f32"}},
    "cosine": {"schedule": "cosine"},
    "warm-down over 50 %": {"warmdown": 0.5},
    "norms of queries and keys": {"model": {"qk_norm": True}},
    "norms of queries and keys, no sub-norms": {"model": {"qk_norm": True, "sub_norm": False}},
}
"""Options of `bitnet train`, and of the model; lr and batch are factors of the defaults'."""
BATCH, RATE = 8, 8e-3

WHEN: dict[str, float] = {
    "from the first step": 0, "over 10 %": 0.1, "over 30 %": 0.3, "over 50 %": 0.5, "over 70 %": 0.7,
    "over 350,000 tokens": 350_000,
}  # fmt: skip
"""The part of a run over which the quantizers are phased in: a share of it, or tokens."""
LENGTHS = [500_000, 2_000_000, 8_000_000]


def run_of(
    change: dict[str, Any], seed: int, config: ModelConfig, tokens: int, keep: int = 1
) -> tuple[ModelConfig, dict[str, Any]]:
    """Model and options of a run with one change, which keeps `keep` checkpoints."""
    batch = int(BATCH * change.get("batch", 1))
    steps = tokens // (batch * config.max_context)
    options = {key: value for key, value in change.items() if key != "model"}
    options |= training_runs.budget(steps, batch, keep) | {"seed": seed, "lr": RATE * change.get("lr", 1)}
    return config.replace(**change.get("model", {})), options


def measure(args: argparse.Namespace) -> dict[str, Any]:
    config = SIZES["quick" if args.quick else "1m"]
    changes = dict(list(CHANGES.items())[:2]) if args.quick else CHANGES
    changes = {name: change for name, change in changes.items() if args.only in name}
    runs = Runs(args.runs, args.jobs, {"data": args.data} if args.data else {})
    runs.prepare(config)
    (tokens,) = args.tokens
    seeds = range(args.seeds)
    wanted = {f"default, seed {seed}": run_of({}, seed, config, tokens, args.keep) for seed in seeds}
    of_change = seeds if args.only else [0]
    names = {(change, seed): f"{change}, seed {seed}" if seed else change for change in changes for seed in of_change}
    wanted |= {name: run_of(changes[change], seed, config, tokens, args.keep) for (change, seed), name in names.items()}
    found = {name: outcome.loss for name, outcome in runs.all(wanted).items()}
    defaults = [found[f"default, seed {seed}"] for seed in seeds]
    rows = []
    for change in changes:
        losses = [found[names[change, seed]] for seed in of_change]
        differences = [loss - default for loss, default in zip(losses, defaults, strict=False)]
        rows.append(
            {
                "change": change,
                "loss": statistics.mean(losses),
                "difference": statistics.mean(differences),
                "differences": differences,
            }
        )
    return {
        "tokens": tokens, "losses": defaults, "loss": statistics.mean(defaults),
        "deviation": statistics.stdev(defaults), "rows": sorted(rows, key=lambda row: row["difference"]),
    }  # fmt: skip


def chance(results: dict[str, Any]) -> float:
    """Two deviations of a difference of two means over seeds that differ by chance alone: both means vary."""
    seeds = min((len(row["differences"]) for row in results["rows"]), default=1)
    return 2 * math.sqrt(2 / seeds) * float(results["deviation"])


def measure_when(args: argparse.Namespace) -> dict[str, Any]:
    """The loss for each way of phasing in the quantizers, at each length."""
    config = SIZES["quick" if args.quick else "1m"]
    ways = dict(list(WHEN.items())[:2]) if args.quick else WHEN
    runs = Runs(args.runs, args.jobs, {"data": args.data} if args.data else {})
    runs.prepare(config)
    keys = [
        (way, tokens, seed)
        for tokens in args.tokens for way in ways for seed in range(args.seeds)
        if ways[way] < tokens  # otherwise it ends before its weights are ternary
    ]  # fmt: skip
    wanted = {
        f"when {way}, {tokens:,} tokens, seed {seed}": run_of({"quantize-warmup": ways[way]}, seed, config, tokens)
        for way, tokens, seed in keys
    }
    found = dict(zip(keys, (outcome.loss for outcome in runs.all(wanted).values()), strict=True))
    return {
        "lengths": args.tokens, "seeds": args.seeds,
        "rows": [
            {"way": way, "losses": [[found[key] for key in keys if key[:2] == (way, tokens)] for tokens in args.tokens]}
            for way in ways
        ],
    }  # fmt: skip


def markdown_when(results: dict[str, Any]) -> str:
    def cell(losses: list[float]) -> str:
        spread = f" ± {statistics.stdev(losses):.4f}" if len(losses) > 1 else ""
        return f"{statistics.mean(losses):.4f}{spread}" if losses else ""

    rows = [[row["way"], *map(cell, row["losses"])] for row in results["rows"]]
    return (
        "# When the quantizers come in\n\n"
        f"Validation loss in nats per token, 1 million parameters, ternary, mean and deviation of {results['seeds']} "
        "seeds. λ rises from 0 to 1 over the part of the run that is named.\n\n"
        + report.table(["the quantizers come in", *(f"{n:,} tokens" for n in results["lengths"])], rows)
    )


def draw_when(file: Path, results: dict[str, Any]) -> None:
    """Plot a line for each length: how much worse each way is than the best one."""
    plt = report.pyplot()
    figure, axis = plt.subplots(figsize=(8, 4), layout="constrained")
    for i, tokens in enumerate(results["lengths"]):
        means = [statistics.mean(row["losses"][i] or [float("nan")]) for row in results["rows"]]
        best = min(mean for mean in means if mean == mean)
        axis.plot([mean - best for mean in means], marker="o", label=f"{tokens:,} tokens")
    axis.set_xticks(range(len(results["rows"])), [row["way"] for row in results["rows"]])
    axis.set_ylabel("nats per token more than the best way")
    axis.legend(frameon=False)
    report.save(figure, file)


def markdown(results: dict[str, Any]) -> str:
    rows = [[row["change"], f"{row['loss']:.4f}", f"{row['difference']:+.4f}"] for row in results["rows"]]
    return (
        "# What each choice is worth\n\n"
        f"Validation loss in nats per token after {results['tokens']:,} tokens, 1 million parameters, ternary. "
        f"The defaults: {results['loss']:.4f} ± {results['deviation']:.4f} over {len(results['losses'])} seeds; "
        f"changes with {'the same seeds' if len(rows) and len(results['rows'][0]['differences']) > 1 else 'seed 0'}, "
        f"differences from the defaults with the same. By chance they are within ±{chance(results):.4f}, two "
        "deviations, where both runs vary with their seeds as the defaults do.\n\n"
        + report.table(["change", "nats/token", "difference"], rows)
    )


def draw(file: Path, results: dict[str, Any]) -> None:
    """Plot a bar for each change, and a band of `chance` on either side."""
    plt = report.pyplot()
    rows = results["rows"][::-1]
    figure, axis = plt.subplots(figsize=(8, 2 + 0.3 * len(rows)), layout="constrained")
    axis.axvspan(-chance(results), chance(results), color="#9aa7b4", alpha=0.3, lw=0)
    bars = axis.barh([row["change"] for row in rows], [row["difference"] for row in rows], color="#1f4e79")
    axis.bar_label(bars, [f"{row['difference']:+.3f}" for row in rows], fontsize=8, padding=3)
    axis.axvline(0, color="black", lw=0.8)
    axis.margins(x=0.15)
    axis.set_xlabel("nats per token more than with the defaults\n(gray: two deviations of a difference by chance)")
    report.save(figure, file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, nargs="+", help="of a run [1 million], or with --when of several")
    parser.add_argument("--when", action="store_true", help="compare when the quantizers come in")
    parser.add_argument("--seeds", type=int, default=3, help="of the defaults, and with --only of the changes [3]")
    parser.add_argument("--keep", type=int, default=1, help="checkpoints of each run, for benchmarks/copying.py [1]")
    parser.add_argument("--only", default="", metavar="WORD", help="of the changes those that are named so")
    training_runs.add_flags(parser, "recipe", "a tiny model, two seeds, two changes")
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.seeds = [512, 1024] if args.when else [512], 2
    args.tokens = args.tokens or (LENGTHS if args.when else [1_000_000])
    if not any(args.only in name for name in CHANGES):
        parser.error(f"no change is named {args.only!r}, expected part of one of: {', '.join(CHANGES)}")
    if not args.when and len(args.tokens) > 1:
        parser.error("several lengths are for --when")
    if args.seeds < (least := 1 if args.when else 2):
        parser.error(f"--seeds is {args.seeds}, expected {least} or more" + ": they show what differs by chance")
    if args.when and args.only:
        parser.error("--only is of the changes, which --when does not make; leave one of them out")
    words = "benchmarks/recipe.py " + " ".join(sys.argv[1:] if argv is None else argv)
    name, of, said, drawn = f"recipe-{args.only}".rstrip("-"), measure, markdown, draw
    if args.when:
        name, of, said, drawn = "recipe-when", measure_when, markdown_when, draw_when
    results = {"origin": report.origin(f"python {words.strip()}")} | of(args)
    report.write(args.out, name, results, said(results), lambda file: drawn(file, results))
    print(said(results))
    return 0


if __name__ == "__main__":
    report.run(main)
