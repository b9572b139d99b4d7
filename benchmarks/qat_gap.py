r"""The gap between a ternary model and full precision: same data, same tokens, same architecture, same recipe, each
with its own best learning rate.

    python benchmarks/qat_gap.py --jobs 2            # 1 and 3 million parameters: hours on two cores
    python benchmarks/manuals.py build/manuals       # another text, and the gap there: a quarter of an hour
    python benchmarks/qat_gap.py --name manuals --data build/manuals --size 1m --models full ternary \
        --tokens 1000000 --jobs 2
    python benchmarks/qat_gap.py --quick             # that it runs: seconds, and the figures mean nothing

In addition: ternary at 1.5 times the width, and full precision (fp16) with as many bytes as the ternary model. Runs of
`bitnet train` are kept in --runs; the script can be restarted to continue.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from functools import partial
from pathlib import Path
from typing import Any

import report
import training_runs
from training_runs import Outcome, Runs

from bitnet.config import TERNARY_LINEARS, ModelConfig

FULL = {"ternary": [], "head_format": "f32"}
SIZES: dict[str, ModelConfig] = {
    "1m": ModelConfig(
        vocab_size=1024, dim=128, n_layers=5, n_heads=2, n_kv_heads=1, head_dim=64, ffn_dim=352, max_context=256,
    ),
    "3m": ModelConfig(
        vocab_size=1024, dim=256, n_layers=4, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=704, max_context=256,
    ),
    "10m": ModelConfig(
        vocab_size=4096, dim=384, n_layers=6, n_heads=6, n_kv_heads=2, head_dim=64, ffn_dim=1056, max_context=256,
    ),
    "quick": ModelConfig(
        vocab_size=300, dim=32, n_layers=1, n_heads=2, n_kv_heads=1, head_dim=16, ffn_dim=48, max_context=32,
    ),
}  # fmt: skip
TOKENS = {"1m": 2_000_000, "3m": 2_000_000, "10m": 10_000_000, "quick": 512}
RATES = {"1m": 8e-3, "3m": 4e-3, "10m": 4e-3, "quick": 8e-3}  # start of the search
NAMES = {
    "full": "full precision", "ternary": "ternary", "wide": "ternary, width × 1.5",
    "bytes": "full precision, same bytes",
}  # fmt: skip
COLORS = {"full": "#9aa7b4", "ternary": "#1f4e79", "wide": "#4f8fc0", "bytes": "#d98032"}


def model_bytes(config: ModelConfig) -> int:
    """2 bits per ternary weight and 1 byte per number in a table, or 2 bytes per number."""
    table = config.vocab_size * config.dim
    if config.ternary:
        return config.ternary_weights // 4 + table
    return 2 * parameters(config)


def scaled(config: ModelConfig, dim: int) -> ModelConfig:
    """The model at another width, with the same head size if it divides the width, else with as many heads."""
    factor = dim / config.dim
    heads = max(1, round(config.n_heads * factor))
    groups = max(1, round(config.n_kv_heads * factor))
    while heads % groups:
        groups -= 1
    head_dim = dim // heads // 2 * 2
    return config.replace(
        dim=dim, n_heads=heads, n_kv_heads=groups, head_dim=head_dim, ffn_dim=round(config.ffn_dim * factor)
    )


def variants(config: ModelConfig) -> dict[str, ModelConfig]:
    full = config.replace(**FULL)
    narrow = max(
        (scaled(full, dim) for dim in range(8, config.dim, 8) if model_bytes(scaled(full, dim)) <= model_bytes(config)),
        key=lambda c: c.dim,
        default=full,
    )
    return {"full": full, "ternary": config, "wide": scaled(config, config.dim * 3 // 2), "bytes": narrow}


def measure(size: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant at one size."""
    config, tokens = SIZES[size], args.tokens or TOKENS[size]
    batch = 4 if args.quick else 8
    steps = -(-tokens // (batch * config.max_context))
    options = training_runs.budget(steps, batch)
    runs = Runs(args.runs / size, args.jobs, {"data": args.data} if args.data else {})
    runs.prepare(config)
    rows: list[dict[str, Any]] = []
    models = variants(config)
    for name in (name for name in NAMES if name in args.models):  # full precision first, if it is among them
        model = models[name]
        rate, tried = training_runs.best_rate(runs, name, model, options, RATES[size], search=not args.quick)
        outcomes = runs.all({
            f"{name}-lr{rate:g}-seed{seed}": (model, options | {"lr": rate, "seed": seed}) for seed in range(args.seeds)
        })  # fmt: skip
        first = outcomes[f"{name}-lr{rate:g}-seed0"]
        mean, deviation = training_runs.spread([*outcomes.values()])
        row = {
            "size": size, "variant": name, "parameters": parameters(model), "bytes": model_bytes(model),
            "tokens": steps * batch * config.max_context, "lr": rate, "loss": mean, "deviation": deviation,
            "losses": [outcome.loss for outcome in outcomes.values()],
            "bits_per_byte": statistics.mean(outcome.bits_per_byte for outcome in outcomes.values()),
            "tried": {f"{lr:g}": outcome.loss for lr, outcome in sorted(tried.items())},
            "curve": average([outcome.curve for outcome in outcomes.values()]),
        }  # fmt: skip
        full = [each["loss"] for each in [*rows, row] if each["variant"] == "full"]
        row["gap"] = mean / full[0] - 1 if full else None
        rows.append(row | (exported(first) if model.ternary else {}))
    return rows


def parameters(config: ModelConfig) -> int:
    """Matrices and tables; gains are a thousandth of them."""
    return config.replace(ternary=TERNARY_LINEARS).ternary_weights + config.vocab_size * config.dim


def average(curves: list[list[tuple[int, float]]]) -> list[tuple[int, float]]:
    return [(points[0][0], sum(loss for _, loss in points) / len(points)) for points in zip(*curves, strict=True)]


def exported(outcome: Outcome) -> dict[str, Any]:
    """What `bitnet export` reports for a run: bytes of the file, and the difference between the engine's loss and
    torch's."""
    file = outcome.folder / "model.bitnet"
    found = training_runs.bitnet("export", str(outcome.folder), str(file), "--json")
    text, head = found["long"], found["head"]
    return {
        "file_bytes": found["file_bytes"], "engine_difference": text["loss_engine"] - text["loss_torch"],
        "head_cost": head["cost"], "compared_tokens": text["tokens"],
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    head = ["model", "parameters", "MB", "best lr", "nats/token", "±", "bits/byte", "gap", "engine − torch"]
    rows = [
        [
            NAMES[row["variant"]], f"{row['parameters']:,}", row["bytes"] / 1e6, f"{row['lr']:g}",
            f"{row['loss']:.4f}", f"{row['deviation']:.4f}" if len(row["losses"]) > 1 else "",
            f"{row['bits_per_byte']:.4f}", "" if row["gap"] is None else f"{row['gap']:+.1%}",
            f"{row['engine_difference']:+.0e}" if "engine_difference" in row else "",
        ]
        for row in results["rows"]
    ]  # fmt: skip
    rates = training_runs.tried((NAMES[row["variant"]], row) for row in results["rows"])
    first = results["rows"][0]
    return (
        "# Ternary against full precision\n\n"
        f"Loss on the whole validation text after {first['tokens']:,} tokens, mean and deviation of "
        f"{len(first['losses'])} seeds at the best learning rate. Gap: against full precision at the same "
        "architecture. MB: 2 bits a ternary weight and int8 tables, or fp16.\n\n"
        f"{report.table(head, rows)}\n\n{rates}"
    )


def draw(file: Path, results: dict[str, Any]) -> None:
    """Plot the loss against tokens, and the final loss against the bytes of the model."""
    plt = report.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    for row in results["rows"]:
        name, color, size = NAMES[row["variant"]], COLORS[row["variant"]], row["bytes"] / 1e6
        tokens, losses = zip(*row["curve"], strict=True)
        left.plot([t / 1e6 for t in tokens], losses, marker="o", ms=3, color=color, label=name)
        right.errorbar(size, row["loss"], row["deviation"], marker="o", color=color, capsize=3)
        right.annotate(name, (size, row["loss"]), (6, 4), textcoords="offset points", fontsize=8)
    left.set(xlabel="million tokens", ylabel="nats per token")
    sizes = [row["bytes"] / 1e6 for row in results["rows"]]
    right.set(xlabel="MB of the model", xscale="log", title="at the end")
    right.set_xticks(sizes, [f"{size:.2f}" for size in sizes])
    right.minorticks_off()
    right.margins(x=0.35, y=0.2)
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.2)
    figure.suptitle(f"{file.stem}: commit {results['origin']['commit']}", fontsize=9, color="gray")
    report.save(figure, file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", nargs="+", choices=[*SIZES], default=["1m", "3m"], help="models [1m 3m]")
    parser.add_argument("--models", nargs="+", choices=[*NAMES], default=[*NAMES], help="of each size [all]")
    parser.add_argument("--tokens", type=int, default=0, help="of a run [2 million; 10m: 10 million]")
    parser.add_argument("--seeds", type=int, default=3, help="at the best learning rate [3]")
    training_runs.add_flags(parser, "qat_gap", "one tiny size, one seed, one learning rate")
    parser.add_argument("--name", help="of the text, after that of the results and in the folder of the runs")
    args = parser.parse_args(argv)
    if args.quick:
        args.size, args.seeds = ["quick"], 1
    args.runs = args.runs / args.name if args.name else args.runs
    words = "benchmarks/qat_gap.py " + " ".join(sys.argv[1:] if argv is None else argv)
    for size in args.size:
        results: dict[str, Any] = {"origin": report.origin(f"python {words.strip()}"), "rows": measure(size, args)}
        name = "-".join(filter(None, ["qat_gap", size, args.name]))
        report.write(args.out, name, results, markdown(results), partial(draw, results=results))
        print(markdown(results))
    return 0


if __name__ == "__main__":
    report.run(main)
