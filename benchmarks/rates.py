"""The best learning rate by size: `--preset`, with its batch and tokens per parameter, several rates, one seed.

    python benchmarks/rates.py --data build/sources --jobs 2    # 1 million parameters, five rates: an hour on two cores
    python benchmarks/rates.py --sizes 1m 3m 10m --tokens-per-parameter 20    # days on a CPU
    python benchmarks/rates.py --quick                          # that it runs: seconds, and the figures mean nothing

Runs have their preset's length, as the best rate depends on it: after 600,000 tokens in steps of 2,048 that of `1m` was
0.0135, after 21 million at most 0.004 (docs/precision.md). The best rate is the minimum of a parabola through the
lowest loss and its two neighbours, over the logarithm of the rate. Runs are kept in --runs; the script can be restarted
to continue.
"""

from __future__ import annotations

import argparse
import math
import sys
from dataclasses import dataclass
from typing import Any

import qat_gap
import report
import training_runs
from training_runs import Runs

from bitnet.config import ModelConfig
from bitnet.sizes import SIZES, model_of, training_of

RATES = [2e-3, 4e-3, 8e-3, 16e-3, 32e-3]


@dataclass(frozen=True)
class Preset:
    """Training options of a size."""

    config: ModelConfig
    batch: int
    batch_tokens: int
    lr: float

    @classmethod
    def of(cls, size: str) -> Preset:
        training = training_of(SIZES[size])
        return cls(model_of(SIZES[size]), training["batch"], training["batch_tokens"], training["lr"])

    def steps(self, each: float) -> int:
        """each: tokens per parameter."""
        return max(1, round(each * qat_gap.parameters(self.config) / self.batch_tokens))


def best(losses: dict[float, float]) -> float | None:
    """The rate with the lowest loss, interpolated between those tried; None: the lowest one is the first or last."""
    rates = sorted(losses)
    i = min(range(len(rates)), key=lambda i: losses[rates[i]])
    if i in (0, len(rates) - 1):
        return None
    x = [math.log(rate) for rate in rates[i - 1 : i + 2]]
    y = [losses[rate] for rate in rates[i - 1 : i + 2]]
    left, right = (y[1] - y[0]) / (x[1] - x[0]), (y[2] - y[1]) / (x[2] - x[1])
    return math.exp((x[0] + x[1]) / 2 - left * (x[2] - x[0]) / 2 / (right - left))


def measure(args: argparse.Namespace) -> dict[str, Any]:
    tiny = qat_gap.SIZES["quick"]
    quick = {"quick": Preset(tiny, 2, 2 * tiny.max_context, 8e-3)}
    presets = quick if args.quick else {size: Preset.of(size) for size in args.sizes}
    runs = Runs(args.runs, args.jobs, {"data": args.data} if args.data else {})
    wanted = {}
    for size, preset in presets.items():
        runs.prepare(preset.config)
        steps = 1 if args.quick else preset.steps(args.tokens_per_parameter)
        for rate in args.rates:
            options = {"batch-tokens": preset.batch_tokens, "seed": 0, "lr": rate}
            options |= training_runs.budget(steps, preset.batch)
            wanted[size, rate] = f"{size}, {steps} steps, {rate:g}", (preset.config, options)
    found = runs.all(dict(wanted.values()))
    rows = []
    for size, preset in presets.items():
        losses = {rate: found[wanted[size, rate][0]].loss for rate in args.rates}
        rows.append({
            "size": size, "width": preset.config.dim, "batch_tokens": preset.batch_tokens, "preset": preset.lr,
            "best": best(losses), "losses": [losses[rate] for rate in args.rates],
        })  # fmt: skip
    return {"tokens_per_parameter": args.tokens_per_parameter, "rates": args.rates, "rows": rows}


def markdown(results: dict[str, Any]) -> str:
    rows = [
        [row["size"], row["width"], f"{row['batch_tokens']:,}", *(f"{loss:.4f}" for loss in row["losses"]),
         f"{row['best']:.2g}" if row["best"] else "outside", f"{row['preset']:g}"]
        for row in results["rows"]
    ]  # fmt: skip
    return (
        "# The learning rate by size\n\n"
        f"Validation loss in nats per token of presets after {results['tokens_per_parameter']:g} tokens a parameter, "
        "ternary, one seed. Vocabularies differ, so losses compare within a row. Best: where a parabola through the "
        "lowest three is lowest. Preset: the rate that it sets.\n\n"
        + report.table(
            ["size", "width", "tokens a step", *(f"{rate:g}" for rate in results["rates"]), "best", "preset"], rows
        )
    )


def draw(file: Any, results: dict[str, Any]) -> None:
    """Plot a line for each size: how much worse each rate is than the best one."""
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
    parser.add_argument("--tokens-per-parameter", type=float, default=20.0, help="of a run [20]")
    parser.add_argument("--sizes", nargs="+", choices=list(SIZES), default=["1m"], help="[1m]")
    parser.add_argument("--rates", type=float, nargs="+", default=RATES, help="[2e-3 and its doubles, to 32e-3]")
    training_runs.add_flags(parser, "rates", "a tiny model, three rates, one step")
    args = parser.parse_args(argv)
    if args.quick:
        args.rates = RATES[1:4]
    if not args.tokens_per_parameter > 0:
        parser.error(f"--tokens-per-parameter is {args.tokens_per_parameter}, expected a number above 0")
    args.rates = sorted(set(args.rates))
    words = "benchmarks/rates.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results = {"origin": report.origin(f"python {words.strip()}")} | measure(args)
    report.write(args.out, "rates", results, markdown(results), lambda file: draw(file, results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    report.run(main)
