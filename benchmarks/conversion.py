"""Ternary models converted from a trained full-precision model, against ternary models from random weights, after the
same number of further tokens.

    python benchmarks/conversion.py           # 1 million parameters: an hour on one core
    python benchmarks/conversion.py --quick   # that it runs: seconds, and the figures mean nothing

Runs of `bitnet train` or `bitnet finetune` are made one after another and kept in --runs; the script can be restarted
to continue. The best converted model and the one from scratch are trained with more seeds. With --search each variant
uses the learning rate that was best for its first seed.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

import report
import training_runs
from training_runs import Outcome

from bitnet.train import checkpoint
from bitnet.train.checkpoint import Checkpoint

Words = dict[str, Any]  # options of a verb, by name

SHAPE: Words = {
    "vocab_size": 1024, "dim": 128, "n_layers": 5, "n_heads": 2, "n_kv_heads": 1, "head_dim": 64, "ffn_dim": 352,
    "max_context": 256,
}  # fmt: skip
QUICK: Words = SHAPE | {"vocab_size": 300, "dim": 32, "n_layers": 2, "head_dim": 16, "ffn_dim": 48, "max_context": 32}
FULL: Words = {"ternary": [], "head_format": "'f32'"}


class Variant(NamedTuple):
    name: str
    options: Words
    rate: float  # learning rate
    color: str
    model: Words = {}  # noqa: RUF012  (never changed)


VARIANTS = {
    "scratch": Variant("from random weights", {}, 8e-3, "#d98032"),
    "direct": Variant("converted at once", {"quantize-warmup": 0}, 1.5e-3, "#9aa7b4"),
    "ce": Variant("converted over λ", {}, 1.5e-3, "#4f8fc0"),
    "logits": Variant("and divergence", {"distill": 0.5}, 1.5e-3, "#1f4e79"),
    "relations": Variant("and relations", {"distill": 0.5, "distill-relations": 0.1}, 1.5e-3, "#3f7d58"),
    "full": Variant("stays full precision", {"quantize-warmup": 0}, 1.5e-3, "#000000", FULL),
}
CONVERTED = ("direct", "ce", "logits", "relations")


def run(folder: Path, verb: list[Any], options: Words, model: Words, ids: Path | None = None) -> Outcome:
    """The outcome of a run, which is started or continued if it is not finished. ids: a run with the same token ids."""
    words = [*verb, "--json", "--out", folder, *(["--resume"] if checkpoint.all_of(folder) else [])]
    words += [word for name, value in options.items() for word in (f"--{name}", value)]
    words += [word for name, value in model.items() for word in ("--set", f"{name}={value}")]
    return training_runs.finished(folder, ids, [str(word) for word in words])


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for the teacher, then one for each variant."""
    shape = QUICK if args.quick else SHAPE
    tokens = args.batch * shape["max_context"]  # per step
    common = {"threads": 1, "batch": args.batch, "layers-every": 0, "eval-tokens": 8192}
    common |= {"data": args.data} if args.data else {}

    def budget(steps: int) -> Words:
        return common | {"steps": steps, "eval-every": max(1, steps // 4), "save-every": max(1, steps // 2)}

    source = args.runs / f"teacher-{args.teacher_steps}"
    teacher = run(source, ["train"], budget(args.teacher_steps) | {"optimizer": "adamw", "lr": 3e-3}, shape | FULL)
    rows = [row("teacher", args.teacher_steps * tokens, 3e-3, [teacher], {})]

    def at(key: str, rate: float, seed: int) -> Outcome:
        verb, model = ["finetune", source], VARIANTS[key].model
        if key == "scratch":
            verb, model = ["train", "--tokenizer", Checkpoint.open(source).folder / "tokenizer.json"], shape
        options = budget(args.steps) | VARIANTS[key].options | {"lr": rate, "seed": seed}
        return run(args.runs / f"{key}-{args.steps}-lr{rate:g}-seed{seed}", verb, options, model, source)

    factors = (0.5, 1, 2) if args.search else (1,)
    tried = {
        key: {rate: at(key, rate, 0) for rate in (factor * VARIANTS[key].rate for factor in factors)}
        for key in VARIANTS
        if key in args.variants
    }
    rates = {key: min(found, key=lambda rate, of=found: of[rate].loss) for key, found in tried.items()}
    best = min((key for key in tried if key in CONVERTED), key=lambda key: tried[key][rates[key]].loss)
    for key, rate in rates.items():
        seeds = range(1, args.seeds if key in ("scratch", best) else 1)
        outcomes = [tried[key][rate], *(at(key, rate, seed) for seed in seeds)]
        rows.append(row(key, args.steps * tokens, rate, outcomes, tried[key]))
    return rows


def row(key: str, tokens: int, rate: float, outcomes: list[Outcome], tried: dict[float, Outcome]) -> dict[str, Any]:
    mean, deviation = training_runs.spread(outcomes)
    return {
        "variant": key, "tokens": tokens, "lr": rate, "loss": mean, "deviation": deviation,
        "losses": [outcome.loss for outcome in outcomes], "seconds": outcomes[0].seconds,
        "tried": {f"{rate:g}": outcome.loss for rate, outcome in tried.items()},
        "curve": [*dict(outcomes[0].curve).items()],  # the end has two losses, on a part and on all: keep the last
    }  # fmt: skip


def markdown(results: dict[str, Any]) -> str:
    teacher, *rows = results["rows"]
    scratch = rows[0]["loss"]
    cells = [
        [
            VARIANTS[row["variant"]].name, f"{row['lr']:g}", len(row["losses"]), f"{row['loss']:.4f}",
            f"{row['deviation']:.4f}" if len(row["losses"]) > 1 else "", f"{row['loss'] - scratch:+.4f}",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["", "learning rate", "seeds", "nats/token", "deviation", "against random weights"]
    rates = training_runs.tried((VARIANTS[row["variant"]].name, row) for row in rows)
    return (
        "# Conversion against training from scratch\n\n"
        f"Loss on the whole validation text after {rows[0]['tokens']:,} tokens, mean and deviation over seeds. "
        f"What is converted, a full-precision model, had seen {teacher['tokens']:,} tokens before, to "
        f"{teacher['loss']:.4f} nats/token, and is the teacher.\n\n{report.table(head, cells)}\n\n"
        f"{rates}"
    )


def draw(file: Path, results: dict[str, Any]) -> None:
    """Plot the loss against further tokens."""
    plt = report.pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    teacher, *rows = results["rows"]
    for row in rows:
        variant, (tokens, losses) = VARIANTS[row["variant"]], zip(*row["curve"], strict=True)
        axis.plot(tokens, losses, marker="o", ms=3, color=variant.color, label=f"{variant.name}: {row['loss']:.3f}")
        axis.errorbar(tokens[-1], row["loss"], row["deviation"], color=variant.color, capsize=3)
    axis.axhline(teacher["loss"], color="black", ls=":", lw=0.8, label=f"the source: {teacher['loss']:.3f}")
    low, high = min(row["loss"] for row in results["rows"]), rows[0]["loss"]
    axis.set_ylim(low - 0.1 * (high - low), high + (high - low))  # models that are not yet ternary start far above
    axis.set(xlabel="further tokens", ylabel="nats per token")
    axis.grid(alpha=0.2)
    axis.legend(frameon=False, fontsize=8)
    origin = results["origin"]
    axis.set_title(f"conversion: commit {origin['commit']}, {origin['cpu']}", fontsize=9, color="gray")
    report.save(figure, file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", help="text, as for bitnet train; none: Python's standard library")
    parser.add_argument("--steps", type=int, default=320, help="of a conversion, 8 × 256 tokens each [320]")
    parser.add_argument("--teacher-steps", type=int, default=1600, help="of the model to convert [1600]")
    parser.add_argument("--variants", nargs="+", choices=[*VARIANTS], default=[*VARIANTS], help="which [all]")
    parser.add_argument("--search", action="store_true", help="try half and twice each learning rate, too")
    parser.add_argument("--seeds", type=int, default=3, help="of the comparison [3]")
    parser.add_argument("--runs", type=Path, default=report.ROOT / "build" / "conversion", help="folder of the runs")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of table, figures and JSON")
    parser.add_argument("--quick", action="store_true", help="a tiny model, one seed, one learning rate")
    args = parser.parse_args(argv)
    args.batch = 8
    if not {"scratch"} < {*args.variants} or not {*CONVERTED} & {*args.variants}:
        parser.error(f"--variants: expected scratch and at least one of {', '.join(CONVERTED)}")
    if args.quick:
        args.batch, args.steps, args.teacher_steps, args.seeds = 2, 4, 4, 1
        args.data = args.data or str(Path(__file__).parent / "*.py")
    words = "benchmarks/conversion.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results = {"origin": report.origin(f"python {words.strip()}"), "rows": measure(args)}
    report.write(args.out, "conversion", results, markdown(results), lambda file: draw(file, results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    report.run(main)
