"""The cost of an adapter: tokens per second with and without one, in pairs within one run.

    python benchmarks/adapters.py [--shape bitnet-2b4t] [--rank 16] [--threads 1 2] [--pairs 9] [--out FILE.json]

A batch has eight texts: all without an adapter, or alternating between two adapters.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from shapes import SHAPES

from bitnet_export import random_adapter, random_model
from bitnet_runtime import Model
from bitnet_runtime.sessions.steps import Entry, step_batch

PROMPT, STEPS, TEXTS = 128, 16, 8


def seconds(work: Callable[[], object]) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def measured(model: Model, pairs: int) -> dict[str, Any]:
    """For each workload, seconds without and with adapters, pair by pair."""
    tokens = [i * 7919 % model.vocab_size for i in range(PROMPT)]
    names = [None] * TEXTS, [model.adapters[i % len(model.adapters)] for i in range(TEXTS)]
    sessions = [[model.session(PROMPT + STEPS, adapter=name) for name in side] for side in names]

    def prefill(side: int) -> float:
        session = sessions[side][0]
        session.rewind(0)
        return seconds(lambda: session.feed(tokens))

    def decode(side: int) -> float:
        session = sessions[side][0]
        session.rewind(0)
        session.feed(tokens[:8])
        return seconds(lambda: [session.step(token) for token in tokens[:STEPS]])

    def batch(side: int) -> float:
        for session in sessions[side]:
            session.rewind(0)
            session.feed(tokens[:8])

        def steps() -> None:
            for token in tokens[:STEPS]:
                step_batch([Entry(session, [token], most=1) for session in sessions[side]])

        return seconds(steps)

    kinds = {"prefill": prefill, "decode": decode, "batch": batch}
    for work in kinds.values():
        work(0), work(1)
    found = {kind: [(work(0), work(1)) for _ in range(pairs)] for kind, work in kinds.items()}
    for session in (*sessions[0], *sessions[1]):
        session.close()
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="bitnet-2b4t")
    parser.add_argument("--layers", type=int, help="fewer layers than the shape has")
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=9)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config = SHAPES[args.shape].replace(n_layers=args.layers or SHAPES[args.shape].n_layers)
    results = []
    with tempfile.TemporaryDirectory() as folder:
        base, adapters = Path(folder) / "base.bitnet", [Path(folder) / f"{name}.bitnet" for name in "ab"]
        random_model(config, base)
        for path in adapters:
            random_adapter(base, path, rank=args.rank)
        for threads in args.threads:
            with Model.load(base, threads=threads, adapters=adapters, verify=False) as model:
                found, isa = measured(model, args.pairs), model.isa
            for kind, pairs in found.items():
                speed = statistics.median(without / with_one for without, with_one in pairs)
                results.append({"threads": threads, "kind": kind, "speed": speed, "seconds": pairs})
                print(f"{isa}, threads {threads}, {kind}: {speed:.3f} × of the base", file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps({"shape": args.shape, "rank": args.rank, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    report.run(main)
