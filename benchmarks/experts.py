"""The benefit of experts: eight, of which a token takes two, against the dense model with equal active parameters, at
equal tokens, in full precision and ternary, each with its own best learning rate.

    python benchmarks/experts.py --jobs 2            # 12 runs and the search for rates: an hour on two cores
    python benchmarks/experts.py --quick             # that it runs: seconds, and the figures mean nothing

Runs of `bitnet train` are kept in --runs; the script can be restarted to continue.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from typing import Any

import report
import training_runs
from qat_gap import FULL, average
from training_runs import Outcome, Runs

from bitnet.config import ModelConfig
from bitnet.train import runlog

DENSE = ModelConfig(
    vocab_size=1024, dim=128, n_layers=4, n_heads=2, n_kv_heads=1, head_dim=64, ffn_dim=384, max_context=256,
)  # fmt: skip
QUICK = DENSE.replace(vocab_size=300, dim=32, n_layers=1, head_dim=16, ffn_dim=48, max_context=32)
EXPERTS, TAKEN = 8, 2
RATE = 8e-3  # start of the search
NAMES = {
    "dense-full": "dense, full precision", "moe-full": "experts, full precision",
    "dense": "dense, ternary", "moe": "experts, ternary",
}  # fmt: skip
COLORS = {"dense-full": "#9aa7b4", "moe-full": "#d98032", "dense": "#4f8fc0", "moe": "#1f4e79"}


def variants(dense: ModelConfig) -> dict[str, ModelConfig]:
    """The dense model, and one whose experts each have a share of its width, so that a token uses as many weights."""
    moe = dense.replace(n_experts=EXPERTS, experts_per_token=TAKEN, ffn_dim=dense.ffn_dim // TAKEN)
    return {"dense-full": dense.replace(**FULL), "moe-full": moe.replace(**FULL), "dense": dense, "moe": moe}


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant."""
    dense, batch = (QUICK, 4) if args.quick else (DENSE, 8)
    steps = -(-args.tokens // (batch * dense.max_context))
    runs = Runs(args.runs, args.jobs, {"data": args.data} if args.data else {})
    runs.prepare(dense)
    plans: dict[str, tuple[ModelConfig, dict[str, Any]]] = {}
    for name, config in variants(dense).items():
        options = training_runs.budget(steps, batch) | {"layers-every": max(1, steps // 10)}
        plans[name] = config, options | ({"balance-loss": args.balance_loss} if config.n_experts else {})
    runs.all({  # one of each first, for early results
        f"{name}-lr{RATE:g}-seed0": (config, options | {"lr": RATE, "seed": 0})
        for name, (config, options) in plans.items()
    })  # fmt: skip
    rows: dict[str, dict[str, Any]] = {}
    for name, (config, options) in plans.items():
        rate, tried = training_runs.best_rate(runs, name, config, options, RATE, search=not args.quick)
        outcomes = [*runs.all({
            f"{name}-lr{rate:g}-seed{seed}": (config, options | {"lr": rate, "seed": seed})
            for seed in range(args.seeds)
        }).values()]  # fmt: skip
        mean, deviation = training_runs.spread(outcomes)
        rows[name] = {
            "variant": name, "active": active(config), "all": active(config, config.n_experts),
            "tokens": steps * batch * dense.max_context, "lr": rate, "loss": mean, "deviation": deviation,
            "losses": [outcome.loss for outcome in outcomes],
            "bits_per_byte": statistics.mean(outcome.bits_per_byte for outcome in outcomes),
            "seconds": [outcome.seconds for outcome in outcomes],
            "tried": {f"{lr:g}": outcome.loss for lr, outcome in sorted(tried.items())},
            "curve": average([outcome.curve for outcome in outcomes]),
            "gap": mean / rows[f"{name}-full"]["loss"] - 1 if config.ternary else 0.0,
        } | (load(outcomes) if config.n_experts else {})  # fmt: skip
    for name, row in rows.items():
        row["gain"] = row["loss"] - rows[name.replace("moe", "dense")]["loss"]
    return [*rows.values()]


def active(config: ModelConfig, experts: int = 0) -> int:
    """Weights that a token uses, with the embedding; of all experts if their number is given."""
    met = config.replace(ternary=DENSE.ternary, n_experts=experts, experts_per_token=min(experts, TAKEN))
    taken = 1 if experts else config.experts_per_token or 1
    ffn = met.replace(ternary=("gate", "up", "down")).ternary_weights
    router = config.n_layers * config.n_experts * config.dim
    return met.ternary_weights + (taken - 1) * ffn + router + config.vocab_size * config.dim


def load(outcomes: list[Outcome]) -> dict[str, Any]:
    """How evenly the experts were used at the end: balance, and the most and least used, relative to the average."""
    last = [[r for r in runlog.read(outcome.folder / "log.jsonl") if "experts" in r][-1] for outcome in outcomes]
    shares = [EXPERTS * share for record in last for layer in record["experts"] for share in layer]
    return {
        "balance": sum(record["balance"] for record in last) / len(last), "most": max(shares), "least": min(shares),
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    rows = results["rows"]
    head = ["model", "weights a token meets", "all weights", "best lr", "nats/token", "±", "bits/byte"]
    head += ["against dense", "ternary gap", "most, least taken"]
    cells = [
        [
            NAMES[row["variant"]], f"{row['active']:,}", f"{row['all']:,}", f"{row['lr']:g}", f"{row['loss']:.4f}",
            f"{row['deviation']:.4f}", f"{row['bits_per_byte']:.4f}", f"{row['gain']:+.4f}" if row["gain"] else "",
            f"{row['gap']:+.1%}" if row["gap"] else "",
            f"{row['most']:.2f}, {row['least']:.2f}" if "most" in row else "",
        ]
        for row in rows
    ]  # fmt: skip
    rates = training_runs.tried((NAMES[row["variant"]], row) for row in rows)
    return (
        "# Experts against a dense model\n\n"
        f"{EXPERTS} experts, of which a token takes {TAKEN}, each 1/{TAKEN} as wide as the dense network. Loss on the "
        f"whole validation text after {rows[0]['tokens']:,} tokens, mean and deviation of {len(rows[0]['losses'])} "
        f"seeds at the best learning rate. Balancing loss: {results['balance_loss']:g}. "
        "Taken: 1 is as often as all.\n\n"
        f"{report.table(head, cells)}\n\n{rates}"
    )


def draw(file: Any, results: dict[str, Any]) -> None:
    """Plot the loss against tokens, and the final loss of every seed."""
    plt = report.pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4), width_ratios=(3, 2), layout="constrained")
    for place, row in enumerate(results["rows"]):
        name, color = NAMES[row["variant"]], COLORS[row["variant"]]
        tokens, losses = zip(*row["curve"], strict=True)
        left.plot([t / 1e6 for t in tokens], losses, marker="o", ms=3, color=color, label=name)
        right.scatter([place] * len(row["losses"]), row["losses"], color=color, s=18)
        right.hlines(row["loss"], place - 0.25, place + 0.25, color=color)
    left.set(xlabel="million tokens", ylabel="nats per token")
    right.set_title("at the end, each seed", fontsize=10)
    right.set_xticks(range(len(results["rows"])), [NAMES[r["variant"]].replace(", ", "\n") for r in results["rows"]])
    right.tick_params(axis="x", labelsize=8)
    left.legend(frameon=False, fontsize=8)
    for axis in (left, right):
        axis.grid(alpha=0.2)
    figure.suptitle(f"{file.stem}: commit {results['origin']['commit']}", fontsize=9, color="gray")
    report.save(figure, file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of a run [1 million]")
    parser.add_argument("--seeds", type=int, default=3, help="at the best learning rate [3]")
    parser.add_argument("--balance-loss", type=float, default=0.01, help="of the models with experts [0.01]")
    training_runs.add_flags(parser, "experts", "one tiny size, one seed, one learning rate")
    args = parser.parse_args(argv)
    if args.quick:
        args.tokens, args.seeds = 512, 1
    words = "benchmarks/experts.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results: dict[str, Any] = {
        "origin": report.origin(f"python {words.strip()}"), "balance_loss": args.balance_loss, "rows": measure(args)
    }  # fmt: skip
    report.write(args.out, "experts", results, markdown(results), lambda file: draw(file, results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    report.run(main)
