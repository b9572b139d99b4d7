"""The best learning rate by size: models of `--preset`, as many steps of as many tokens each, some rates, one seed.

    python benchmarks/rates.py --jobs 2    # 1, 3 and 10 million parameters, five rates each: an hour on two cores
    python benchmarks/rates.py --quick     # that it runs: seconds, and the figures mean nothing

The best rate is where a parabola through the losses over the logarithm of the rate is lowest, drawn through the
lowest loss and its two neighbours. Runs are kept in --runs; started again, the script goes on.
"""

from __future__ import annotations

import argparse
import math
import sys
from typing import Any

import qat_gap
import report
import training_runs
from training_runs import Runs

from bitnet.config import ModelConfig
from bitnet.sizes import SIZES, model_of, training_of

RATES = [2e-3, 4e-3, 8e-3, 16e-3, 32e-3]
CONTEXT, BATCH = 256, 8


def of_preset(size: str) -> tuple[ModelConfig, float]:
    """Its model, with texts as short for all, and its learning rate."""
    return model_of(SIZES[size]).replace(max_context=CONTEXT), training_of(SIZES[size])["lr"]


def best(losses: dict[float, float]) -> float | None:
    """The rate at which losses are lowest, between those that were tried; None: the lowest one is the first or last."""
    rates = sorted(losses)
    i = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if i in (0, len(rates) - 1):
        return None
    x = [math.log(rate) for rate in rates[i - 1 : i + 2]]
    y = [losses[rate] for rate in rates[i - 1 : i + 2]]
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    return math.exp((x[0] + x[1]) / 2 - left * (x[2] - x[0]) / 2 / (right - left))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    models = {"quick": (qat_gap.SIZES["quick"], 8e-3)} if args.quick else {size: of_preset(size) for size in args.sizes}
    steps = 1 if args.quick else args.tokens // (BATCH * CONTEXT)
    runs = Runs(args.runs, args.jobs, {"data": args.data} if args.data else {})
    wanted = {}
    for size, (config, _) in models.items():
        runs.prepare(config)
        for rate in args.rates:
            options = training_runs.budget(steps, BATCH) | {"batch-tokens": BATCH * CONTEXT, "seed": 0, "lr": rate}
            wanted[size, rate] = f"{size}, {rate:g}", (config, options)
    found = runs.all(dict(wanted.values()))
    rows = []
    for size, (config, preset) in models.items():
        losses = {rate: found[wanted[size, rate][0]].loss for rate in args.rates}
        rows.append({
            "size": size, "width": config.dim, "preset": preset, "best": best(losses),
            "losses": [losses[rate] for rate in args.rates],
        })  # fmt: skip
    return {"steps": steps, "tokens": steps * BATCH * CONTEXT, "rates": args.rates, "rows": rows}


def markdown(results: dict[str, Any]) -> str:
    rows = [
        [row["size"], row["width"], *(f"{loss:.4f}" for loss in row["losses"]),
         f"{row['best']:.2g}" if row["best"] else "outside", f"{row['preset']:g}"]
        for row in results["rows"]
    ]  # fmt: skip
    return (
        "# The learning rate by size\n\n"
        f"Validation loss in nats per token after {results['steps']:,} steps, {results['tokens']:,} tokens, of models "
        "with the width, depth and vocabulary of a preset, ternary, one seed. Vocabularies differ, so losses compare "
        "within a row. Best: where a parabola through the lowest three is lowest. Preset: the rate that it sets.\n\n"
        + report.table(["size", "width", *(f"{rate:g}" for rate in results["rates"]), "best", "preset"], rows)
    )


def draw(file: Any, results: dict[str, Any]) -> None:
    """A line for each size: how much worse each rate is than the best one."""
    plt = report.pyplot()
    figure, axis = plt.subplots(figsize=(7, 4), layout="constrained")
    for row in results["rows"]:
        least = min(row["losses"])
        label = f"{row['size']}, width {row['width']}"
        axis.plot(results["rates"], [loss - least for loss in row["losses"]], marker="o", label=label)
    axis.set_xscale("log", base=2)
    axis.set_xticks(results["rates"], [f"{rate:g}" for rate in results["rates"]])
    axis.set_xlabel("learning rate")
    axis.set_ylabel("nats per token more than the best")
    axis.legend(frameon=False)
    report.save(figure, file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=600_000, help="of a run [600,000]")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1m", "3m", "10m"], help="[1m 3m 10m]")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="[2e-3 and its doubles, to 32e-3]")
    training_runs.add_flags(parser, "rates", "a tiny model, three rates, one step")
    args = parser.parse_args(argv)
    if args.quick:
        args.rates = RATES[1:4]
    if args.tokens < BATCH * CONTEXT:
        parser.error(f"--tokens is {args.tokens}, expected at least {BATCH * CONTEXT} for one step")
    args.rates = sorted(set(args.rates))
    words = "benchmarks/rates.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results = {"origin": report.origin(f"python {words.strip()}")} | measure(args)
    report.write(args.out, "rates", results, markdown(results), lambda file: draw(file, results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
