"""Ternary models with vision against the same in full precision: recall of captions, answers to questions.

    python benchmarks/image_gap.py --jobs 2       # three seeds of four models: an hour on two cores
    python benchmarks/image_gap.py --quick        # that it runs: seconds, and the figures mean nothing

The steps of `make vision`. The pictures are those of `bitnet.data.drawn`; models are evaluated on pictures with
combinations that no training picture had. Twins are trained alike: data, order, steps, learning rates. Runs of `bitnet
train` are kept in --runs; the script can be restarted to continue.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import report
import training_runs

from bitnet.data import drawn
from bitnet.train import checkpoint

FULL = ["ternary=[]", "head_format=f32", "vision.ternary=[]"]
VARIANTS: dict[str, list[str]] = {"ternary": [], "full": FULL}
NAMES = {"ternary": "ternary", "full": "full precision"}
MEASURES = {"recall": "caption of a picture", "recall_back": "picture of a caption", "accuracy": "answers"}
SMALL = {"siglip-tiny": ["dim=32", "n_layers=1", "n_heads=1", "n_kv_heads=1", "ffn_dim=64", "out_dim=32"]}
SMALL["siglip-tiny"] += [f"vision.{option}" for option in SMALL["siglip-tiny"][:-1]]
SMALL["paligemma-tiny"] = SMALL["siglip-tiny"][:5]
SETTINGS = ("siglip_steps", "paligemma_steps", "pictures", "unseen")
VALIDATION = 0.02  # share of the pictures; the measured ones are held out in addition


def check_made(args: argparse.Namespace) -> None:
    """Write into the folder of the runs what makes them. Raises BenchmarkError: something else made those in it, whose
    pictures and figures would be taken for those of this command."""
    file, names = args.runs / "made.json", (*SETTINGS, "quick")
    made = {name: getattr(args, name) for name in names} | {"version": training_runs.version()}
    before = json.loads(file.read_text(encoding="utf-8")) if file.exists() else dict.fromkeys(made)
    changed = [name for name in made if made[name] != before.get(name)]
    if changed and args.runs.is_dir() and any(args.runs.iterdir()):
        name = changed[0]
        raise report.BenchmarkError(
            f"{args.runs} has runs of another {name}, {before.get(name)}, expected {made[name]}; remove the folder, or "
            "name another one with --runs"
        )
    args.runs.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(made, indent=1) + "\n", encoding="utf-8")


def one(args: argparse.Namespace, variant: str, seed: int) -> dict[str, float]:
    """Accuracy of the two models of a variant and a seed on held-out data; read from disk if it was measured before."""
    outcome = args.runs / f"{variant}-seed{seed}.json"
    if outcome.exists():
        found: dict[str, float] = json.loads(outcome.read_text())
        return found
    towers, answers = (args.runs / f"{model}-{variant}-seed{seed}" for model in ("siglip", "paligemma"))
    pictures, unseen = args.runs / "pictures", args.runs / "unseen"
    train(args, "siglip-tiny", variant, seed, towers, pictures / "records.jsonl", [])
    train(args, "paligemma-tiny", variant, seed, answers, pictures / "questions.jsonl", ["--vision", towers])
    compared, right = (
        training_runs.bitnet("eval", str(run), "--data", str(unseen / name), "--json", until=args.until)
        for run, name in ((towers, "records.jsonl"), (answers, "questions.jsonl"))
    )
    found = {"recall": compared["recall"], "recall_back": compared["recall_back"], "accuracy": right["right"]}
    outcome.write_text(json.dumps(found))
    print(f"{outcome.name}: {found}", file=sys.stderr)
    return found


def in_time(args: argparse.Namespace, variant: str, seed: int) -> dict[str, float]:
    """The same; nothing if time is up."""
    try:
        return one(args, variant, seed)
    except TimeoutError:
        return {}


def train(
    args: argparse.Namespace, preset: str, variant: str, seed: int, folder: Path, data: Path, more: list[Any]
) -> None:
    """Make a run, unless it is finished."""
    steps = {"siglip-tiny": args.siglip_steps, "paligemma-tiny": args.paligemma_steps}[preset]
    saved = checkpoint.all_of(folder)
    if saved and saved[-1].name == f"step-{steps:06}":
        return
    words = ["train", "--json", "--preset", preset, "--data", data, "--out", folder, "--seed", seed]
    words += ["--threads", args.threads, "--steps", steps, "--validation", VALIDATION, "--keep", 1]
    words += ["--layers-every", 0, *more]
    for option in VARIANTS[variant] + (SMALL[preset] if args.quick else []):
        if not (more and option.startswith("vision.")):  # its stack comes from the other run
            words += ["--set", option]
    training_runs.bitnet(*map(str, words + (["--resume"] if saved else [])), until=args.until)
    print(f"{folder.name}: trained", file=sys.stderr)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each variant, over the seeds for which both were measured in time; no rows if there is none."""
    check_made(args)
    for name, n, held_out in (("pictures", args.pictures, False), ("unseen", args.unseen, True)):
        if not (args.runs / name / "questions.jsonl").exists():
            drawn.write(args.runs / name, n, seed=1 + held_out, held_out=held_out)
    pool = training_runs.workers(args.jobs)
    waiting = {  # twins together, so that the results there is time for can be compared
        f"{variant}-seed{seed}": pool.submit(in_time, args, variant, seed)
        for seed in range(args.seeds) for variant in VARIANTS
    }  # fmt: skip
    found = training_runs.results(waiting)
    of_seeds = ({variant: found[f"{variant}-seed{seed}"] for variant in VARIANTS} for seed in range(args.seeds))
    twins = [each for each in of_seeds if all(each.values())]
    return [
        {"variant": variant} | {name: summary([each[variant][name] for each in twins]) for name in MEASURES}
        for variant in VARIANTS
        if twins
    ]


def summary(values: list[float]) -> dict[str, Any]:
    deviation = statistics.stdev(values) if len(values) > 1 else 0.0
    return {"mean": statistics.mean(values), "deviation": deviation, "seeds": values}


def markdown(results: dict[str, Any]) -> str:
    rows = results["rows"]
    head = ["model", *MEASURES.values()]
    cells = [[NAMES[row["variant"]], *(middle(row[name]) for name in MEASURES)] for row in rows]
    seeds = "\n".join(
        f"- {NAMES[row['variant']]}, {MEASURES[name]}: " + ", ".join(f"{value:.1%}" for value in row[name]["seeds"])
        for row in rows
        for name in MEASURES
    )
    n = len(rows[0]["recall"]["seeds"])
    return (
        "# Images: ternary against full precision\n\n"
        f"Share that is right on {results['unseen']} pictures with combinations that no picture in training had. "
        "Captions and pictures: the best of all of them is the right one. Answers: word for word. "
        f"{f'Mean and deviation of {n} seeds' if n > 1 else 'One seed'}; {results['siglip_steps']:,} steps of SigLIP, "
        f"then {results['paligemma_steps']:,} of PaliGemma, on {results['pictures']:,} pictures.\n\n"
        f"{report.table(head, cells)}" + (f"\n\nEach seed:\n\n{seeds}" if n > 1 else "")
    )


def middle(measure: dict[str, Any]) -> str:
    deviation = f" ± {measure['deviation']:.1%}" if len(measure["seeds"]) > 1 else ""
    return f"{measure['mean']:.1%}{deviation}"


def panels(results: dict[str, Any]) -> list[report.Panel]:
    rows = {row["variant"]: row for row in results["rows"]}
    series = {
        NAMES[variant]: [100 * rows[variant][name]["mean"] for name in MEASURES] for variant in ("full", "ternary")
    }
    return [report.Panel("right on pictures never seen", [*MEASURES.values()], series, unit=" %")]


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="[3]")
    parser.add_argument("--siglip-steps", type=int, default=2000, help="of a run [2000]")
    parser.add_argument("--paligemma-steps", type=int, default=4000, help="of a run [4000]")
    parser.add_argument("--pictures", type=int, default=20_000, help="to learn from [20000]")
    parser.add_argument("--unseen", type=int, default=240, help="to be measured on [240]")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time [1]")
    parser.add_argument("--threads", type=int, default=1, help="of a run [1]")
    parser.add_argument("--minutes", type=float, default=0.0, help="stop then; started again, it goes on [no limit]")
    parser.add_argument("--runs", type=Path, default=report.ROOT / "build" / "vision-runs", help="folder of the runs")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of table, figures and JSON")
    parser.add_argument("--quick", action="store_true", help="tiny models, one seed, a few steps")
    args = parser.parse_args(argv)
    if args.quick:
        args.seeds, args.siglip_steps, args.paligemma_steps, args.pictures, args.unseen = 1, 3, 3, 80, 20
    words = "benchmarks/image_gap.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results: dict[str, Any] = {"origin": report.origin(f"python {words.strip()}")} | {
        name: getattr(args, name) for name in SETTINGS
    }
    args.until = time.monotonic() + 60 * args.minutes if args.minutes else math.inf
    results["rows"] = measure(args)
    if not results["rows"]:
        print("no run was finished in that time; started again, it goes on", file=sys.stderr)
        return 1
    report.write(args.out, "image_gap", results, markdown(results), panels(results))
    print(markdown(results))
    return 0


if __name__ == "__main__":
    report.run(main)
