"""The engine end to end on random weights of three sizes, compared with the machine's limits.

    python benchmarks/engine.py                  # every shape, about 15 minutes on two cores

For each shape: threads, encodings, context, instruction set tiers, several texts at once, start-up and memory. The
figures are those of `bitnet bench`, with limits measured between its repetitions.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import report
from shapes import SHAPES

from bitnet_export import random_model, repack
from bitnet_runtime import Model, available_isas, default_threads, machine
from bitnet_runtime.bench import bench
from bitnet_runtime.sessions.steps import Entry, step_batch

SLOW = 200e6  # ternary weights; above this the scalar tier is skipped, as it would take hours
FIRST_TOKEN = "import sys, bitnet_runtime as b; b.Model.load(sys.argv[1]).generate([1, 2, 3], max_tokens=1)"


def single(path: Path, name: str, args: argparse.Namespace, **options: Any) -> dict[str, Any]:
    """One run of `bitnet bench` as a row of results. `options`: threads, isa, depth, kv_type."""
    print(f"{name} …", file=sys.stderr)
    found = bench(path, prompt=args.prompt, gen=args.gen, repeat=args.repeat, **options)
    return {"name": name, "batch": 1, "depth": options.get("depth", 0)} | found


def batched(path: Path, n: int, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """Greedy decoding of n texts together; tok_s counts all of them, bytes are for one step."""
    name = f"batch {n}"
    print(f"{name} …", file=sys.stderr)
    with Model.load(path, threads=threads) as model:
        sessions = [model.session(n_ctx=args.gen + 1) for _ in range(n)]
        speeds = []
        for _ in range(args.repeat):
            for i, session in enumerate(sessions):
                session.rewind(0)
                session.step(i)
            last = [session.sample(temperature=0) for session in sessions]
            begin = time.perf_counter()
            for _ in range(args.gen):
                entries = [Entry(session, [token], most=1) for session, token in zip(sessions, last, strict=True)]
                step_batch(entries)
                last = [entry.chosen[0] for entry in entries]
            speeds.append(n * args.gen / (time.perf_counter() - begin))
        speed = statistics.median(speeds)
        size = model.info.bytes_per_token + n * model.kv_bytes(args.gen // 2)
        isa = model.isa
    gb_s, bandwidth = speed / n * size / 1e9, machine.read_bandwidth(threads)
    decode = {"tok_s": speed, "runs": speeds, "bytes_per_token": size, "gb_s": gb_s}
    return {
        "name": name,
        "batch": n,
        "depth": 0,
        "isa": isa,
        "threads": threads,
        "read_bandwidth_gb_s": bandwidth,
        "decode": decode | {"bandwidth_share": gb_s / bandwidth},
    }


def first_token(path: Path, repeat: int) -> float:
    """Milliseconds from starting Python to the first generated token; the file is in the page cache."""
    times = []
    for _ in range(repeat):
        begin = time.perf_counter()
        subprocess.run([sys.executable, "-c", FIRST_TOKEN, str(path)], check=True)
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


def other_encoding(path: Path, threads: int, args: argparse.Namespace) -> dict[str, Any]:
    """The same model with 1.6 bits per ternary weight."""
    other = path.with_name("1.6")
    repack(path, other, encoding="1.6")
    return single(other, f"1.6 bits, threads {threads}", args, threads=threads)


def measure(shape: str, path: Path, args: argparse.Namespace) -> dict[str, Any]:
    """All figures of a shape; context, tiers and batches with the default number of threads."""
    config, default = SHAPES[shape], default_threads()
    needed = max(args.context, default=0) + max(args.prompt, args.gen + 1)
    config = config.replace(max_context=max(config.max_context, needed))
    print(f"writing random weights of shape {shape} …", file=sys.stderr)
    random_model(config, path)
    threads = [single(path, f"threads {n}", args, threads=n) for n in args.threads]
    context = [
        single(path, f"context {n}, {kv_type}", args, threads=default, depth=n, kv_type=kv_type)
        for n in args.context
        for kv_type in args.kv_type
    ]
    isas = [isa for isa in available_isas() if isa != "scalar" or config.ternary_weights < SLOW]
    tiers = [single(path, f"tier {isa}", args, threads=default, isa=isa) for isa in isas]
    batches = [batched(path, n, default, args) for n in args.batch]
    encodings = [other_encoding(path, n, args) for n in args.threads]
    return {
        "shape": shape,
        "threads": threads,
        "context": context,
        "tiers": tiers,
        "batches": batches,
        "encodings": encodings,
        "first_token_ms": first_token(path, args.repeat),
    }


def markdown(results: dict[str, Any]) -> str:
    """The page of results of a shape."""
    rows = []
    for row in (row for sweep in ("threads", "encodings", "context", "tiers", "batches") for row in results[sweep]):
        prefill, decode = row.get("prefill"), row["decode"]
        rows.append(
            [
                row["name"], row["threads"], row["isa"],
                prefill["tok_s"] if prefill else "", f"{prefill['int8_peak_share']:.0%}" if prefill else "",
                decode["tok_s"], decode["bytes_per_token"] / 1e6, f"{decode['bandwidth_share']:.0%}",
            ]
        )  # fmt: skip
    first = results["threads"][0]
    n = first["prefill"]["n"]
    limits = "; ".join(
        f"{row['name']} {row['read_bandwidth_gb_s']:.1f} GB/s, {row['int8_peak_gmac_s']:.0f} GMAC/s"
        for row in results["threads"]
    )
    head = [
        "run",
        "threads",
        "tier",
        f"prefill {n}, tok/s",
        "of int8 peak",
        "decode, tok/s",
        "MB a step",
        "of bandwidth",
    ]
    return "\n".join(
        [
            f"# {results['shape']}: {first['model']['ternary_weights'] / 1e6:.1f} M ternary weights",
            "",
            report.table(head, rows),
            "",
            f"- limits: {limits}",
            f"- opened in {first['load_ms']:.1f} ms, {first['load_unverified_ms']:.1f} ms without checking the weights",
            f"- first token of a fresh process after {results['first_token_ms']:.0f} ms",
            f"- memory: peak {first['peak_rss_mb']:.1f} MB, of it file {first['model']['file_mb']:.1f} and session "
            f"{first['session_mb']:.1f}",
        ]
    )


def panels(results: dict[str, Any]) -> list[report.Panel]:
    """tok/s against threads, context, tier and batch; shares of the limits; bytes per step."""

    def of(sweep: str, kind: str, figure: str, factor: float = 1) -> list[float]:
        return [factor * row[kind][figure] for row in results[sweep]]

    def labels(sweep: str) -> list[str]:
        return [row["name"] for row in results[sweep]]

    shares = {
        "decode, of read bandwidth": of("threads", "decode", "bandwidth_share", 100),
        "prefill, of int8 peak": of("threads", "prefill", "int8_peak_share", 100),
    }

    def allowed(sweep: str) -> list[float]:  # by memory bandwidth; a model that fits in the cache may exceed it
        return [1e9 * row["read_bandwidth_gb_s"] / row["decode"]["bytes_per_token"] for row in results[sweep]]

    megabytes = of("context", "decode", "bytes_per_token", 1e-6)

    def speed(kind: str, sweep: str, limit: list[float] | None = None) -> report.Panel:
        return report.Panel(f"{kind}, tokens a second", labels(sweep), {"": of(sweep, kind, "tok_s")}, limit)

    return [
        speed("decode", "threads", allowed("threads")),
        speed("prefill", "threads"),
        report.Panel("percent of the machine's limits", labels("threads"), shares, unit=" %"),
        speed("decode", "context", allowed("context")),
        report.Panel("megabytes read to decode a token", labels("context"), {"": megabytes}),
        speed("decode", "batches"),
        speed("decode", "tiers"),
        speed("prefill", "tiers"),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure the engine on random weights.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = parser.add_argument
    add("--shape", choices=SHAPES, nargs="+", default=list(SHAPES), help="sizes of model")
    add("--threads", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="threads")
    add("--context", type=int, nargs="+", default=[0, 1024, 4096], metavar="N", help="tokens in the cache before")
    add("--kv-type", nargs="+", default=["f16"], metavar="TYPE", help="types of that cache")
    add("--batch", type=int, nargs="+", default=[1, 2, 4, 8], metavar="N", help="texts decoded together")
    add("--prompt", type=int, default=128, metavar="N", help="tokens of prefill")
    add("--gen", type=int, default=64, metavar="N", help="tokens to decode")
    add("--repeat", type=int, default=3, metavar="N", help="runs to take the median of")
    add("--out", type=Path, default=report.RESULTS, metavar="FOLDER", help="where results go")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    (report.ROOT / "build").mkdir(exist_ok=True)
    for shape in args.shape:
        command = f"python benchmarks/engine.py --shape {shape}"
        for name in ("threads", "context", "kv_type", "batch"):
            command += f" --{name.replace('_', '-')} {' '.join(map(str, getattr(args, name)))}"
        command += f" --prompt {args.prompt} --gen {args.gen} --repeat {args.repeat}"
        origin = report.origin(command)
        with tempfile.TemporaryDirectory(dir=report.ROOT / "build", prefix="engine-") as folder:
            results = {"origin": origin} | measure(shape, Path(folder) / "model.bitnet", args)
        text = markdown(results)
        report.write(args.out, f"engine-{shape}", results, text, panels(results))
        print(text, end="\n\n")


if __name__ == "__main__":
    report.run(main)
