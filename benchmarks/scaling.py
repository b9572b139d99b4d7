"""Ternary against full precision by size and length: 1, 3 and 10 million parameters at 20 tokens per parameter and
other lengths, each arm at its own best learning rate, several seeds, evaluated on projects that no run has seen.

    python benchmarks/sources.py --out build/sources             # the text: minutes
    python benchmarks/scaling.py --jobs 6 --minutes 9            # as far as nine minutes go; again, to go on
    python benchmarks/scaling.py --minutes 0                     # the page of the runs that are finished
    python benchmarks/scaling.py --quick                         # that it runs; the figures mean nothing

Runs are ordinary ones of `bitnet train`, kept in --runs. The most informative are made first, and no run is started
that would not finish in time. Only log.jsonl and outcome.json of finished runs are needed, so several machines can
share the work: merge their folders. benchmarks/scaling_plan.py has the sizes and the order.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from functools import partial
from pathlib import Path

import report
import scaling_page
import scaling_plan
import scaling_results
from scaling_plan import FULL_PLAN, QUICK_PLAN, Cell
from scaling_runs import Study


def overview() -> str:
    """Runs and FLOPs of the plan, if every search ends with its first three rates."""
    most: dict[str, Cell] = {}
    for cell in FULL_PLAN:
        most[cell.name] = cell
    runs = {name: 2 * (cell.seeds - 1 + (3 if cell.search else 1)) for name, cell in most.items()}
    rows = [
        [name, scaling_plan.SIZES[cell.size].parameters, cell.tokens, cell.steps, runs[name], f"{cell.flops:.2e}",
         f"{runs[name] * cell.flops:.2e}"]
        for name, cell in most.items()
    ]  # fmt: skip
    return report.table(["cell", "parameters", "tokens", "steps", "runs", "FLOPs each", "FLOPs"], rows)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    build = report.ROOT / "build"
    parser.add_argument("--text", type=Path, default=build / "sources", help="what benchmarks/sources.py made")
    parser.add_argument("--runs", type=Path, default=build / "scaling", help="folder of the runs")
    parser.add_argument("--out", type=Path, default=report.RESULTS, help="folder of table, picture and JSON")
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, one CPU thread each [1]")
    parser.add_argument("--minutes", type=float, help="after which runs save and stop; 0: make none [no limit]")
    parser.add_argument("--cells", nargs="+", metavar="SIZE@TOKENS", help="of the plan these alone, such as 1m@20")
    parser.add_argument("--compile", action="store_true", help="as of bitnet train")
    parser.add_argument("--plan", action="store_true", help="print what there is to do, and do nothing")
    parser.add_argument("--quick", action="store_true", help="a tiny model for a few steps")
    args = parser.parse_args(argv)
    if args.plan:
        print(overview())
        return 0
    manifest = args.text / "manifest.json"
    if not manifest.is_file():
        parser.error(f"{args.text} holds no text; make it with benchmarks/sources.py --out {args.text}")
    plan = [cell for cell in (QUICK_PLAN if args.quick else FULL_PLAN) if not args.cells or cell.name in args.cells]
    if not plan:
        parser.error(f"no such cell, expected some of {', '.join(dict.fromkeys(cell.name for cell in FULL_PLAN))}")
    common = {"compile": True} if args.compile else {}
    until = time.monotonic() + 60 * args.minutes if args.minutes is not None else float("inf")
    study = Study(args.runs.resolve(), args.text.resolve(), args.jobs, common, until)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # as Ctrl-C: runs save and end
    try:
        study.carry_out(plan)
        outcomes = study.outcomes()
    except ValueError as error:
        parser.error(str(error))
    if not outcomes:
        print("no run is finished", file=sys.stderr)
        return 1
    words = "benchmarks/scaling.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results = {"origin": report.origin(f"python {words.strip()}"), "text": json.loads(manifest.read_text())}
    results |= scaling_results.results(outcomes)
    text = scaling_page.markdown(results)
    report.write(args.out, "scaling", results, text, partial(scaling_page.draw, results=results))
    print(text)
    return 0


if __name__ == "__main__":
    report.run(main)
