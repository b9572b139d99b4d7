"""Two engines in turn, A B A B, and the evaluation of their figures: shared by vs_llama_cpp.py and peers.py."""

from __future__ import annotations

import argparse
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import report

from bitnet_runtime.bench import bench

OURS = "bitnet-edge"


def _other(engines: Iterable[str]) -> str:
    """The name of the engine that is not ours."""
    return next(engine for engine in engines if engine != OURS)


def run_ours(path: Path, threads: int, prompts: Sequence[int], gen: int) -> dict[str, Any]:
    """The same figures of this engine, and the limits measured right after each."""
    runs = [bench(path, prompt=n, gen=gen if n == prompts[0] else 1, repeat=1, threads=threads) for n in prompts]
    first = runs[0]
    return {
        "isa": first["isa"],
        "load_ms": first["load_ms"],
        "prefill": {str(n): run["prefill"]["tok_s"] for n, run in zip(prompts, runs, strict=True)},
        "decode": first["decode"]["tok_s"],
        "read_bandwidth_gb_s": max(run["read_bandwidth_gb_s"] for run in runs),
        "int8_peak_gmac_s": max(run["int8_peak_gmac_s"] for run in runs),
    }


def take_turns(
    path: Path, theirs: str, run_theirs: Callable[[int], dict[str, Any]], args: argparse.Namespace
) -> dict[int, dict[str, list[dict[str, Any]]]]:
    """Runs of each engine by number of threads. run_theirs(threads) returns `prefill` and `decode`, as run_ours."""
    runs: dict[int, dict[str, list[dict[str, Any]]]] = {}
    for threads in args.threads:
        runs[threads] = {OURS: [], theirs: []}
        for number in range(args.rounds):
            print(f"threads {threads}, round {number + 1} of {args.rounds} …", file=sys.stderr)
            runs[threads][OURS].append(run_ours(path, threads, args.prompt, args.gen))
            runs[threads][theirs].append(run_theirs(threads))
    return runs


def summary(
    threads: int, runs: dict[str, list[dict[str, Any]]], macs: int, read: dict[str, int]
) -> list[dict[str, Any]]:
    """Medians over the rounds, one row for each test; a share is of the limit of that test."""
    engines = list(runs)
    bandwidth = statistics.median(run["read_bandwidth_gb_s"] for run in runs[OURS])
    peak = statistics.median(run["int8_peak_gmac_s"] for run in runs[OURS])
    rows = []
    for test in ("decode", *(f"prefill {n}" for n in runs[OURS][0]["prefill"])):
        speed = {}
        for engine in engines:
            figures = [run["decode"] if test == "decode" else run["prefill"][test.split()[1]] for run in runs[engine]]
            speed[engine] = statistics.median(figures)
        if test == "decode":
            share = {engine: speed[engine] * read[engine] / 1e9 / bandwidth for engine in speed}
        else:
            share = {engine: speed[engine] * macs / 1e9 / peak for engine in speed}
        rows.append(
            {
                "threads": threads,
                "test": test,
                "tok_s": speed,
                "ratio": speed[OURS] / speed[_other(speed)],
                "share_of_limit": share,
                "limit": f"{bandwidth:.1f} GB/s" if test == "decode" else f"{peak:.0f} GMAC/s",
            }
        )
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """A Markdown table, one row for each test."""
    theirs = _other(rows[0]["tok_s"])
    head = ["threads", "test", f"{theirs}, tok/s", f"{OURS}, tok/s", "ratio",
            f"{theirs}, of limit", f"{OURS}, of limit", "limit"]  # fmt: skip
    cells = [
        [
            row["threads"], row["test"], row["tok_s"][theirs], row["tok_s"][OURS], f"{row['ratio']:.2f} ×",
            f"{row['share_of_limit'][theirs]:.0%}", f"{row['share_of_limit'][OURS]:.0%}", row["limit"],
        ]
        for row in rows
    ]  # fmt: skip
    return report.table(head, cells)


def panels(results: dict[str, Any]) -> list[report.Panel]:
    """tok/s against threads for each test, shares of the limits, bytes per token."""
    rows: list[dict[str, Any]] = results["rows"]
    engines = (_other(rows[0]["tok_s"]), OURS)
    tests = list(dict.fromkeys(row["test"] for row in rows))
    found = []
    for test in tests:
        own = [row for row in rows if row["test"] == test]
        labels = [f"{row['threads']} thread{'s' * (row['threads'] > 1)}" for row in own]
        series = {engine: [row["tok_s"][engine] for row in own] for engine in engines}
        found.append(report.Panel(f"{test}, tokens a second", labels, series))
    most = [row for row in rows if row["threads"] == rows[-1]["threads"]]
    shares = {engine: [100 * row["share_of_limit"][engine] for row in most] for engine in engines}
    title = f"percent of the machine's limit, {rows[-1]['threads']} thread{'s' * (rows[-1]['threads'] > 1)}"
    found.append(report.Panel(title, tests, shares, unit=" %"))
    megabytes = {engine: [results["bytes_per_token"][engine] / 1e6] for engine in engines}
    found.append(report.Panel("megabytes read to decode a token", [""], megabytes))
    return found
