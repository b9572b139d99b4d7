"""Experts, encoders and images on random weights, compared with the machine's limits, which are measured after each
pass.

    python benchmarks/passes.py                       # about 8 minutes on two cores, 4 GB of disk

`passes.c` measures. A share is of one pass, relative to the limit measured right after it; for shares and speeds the
median and the quartiles are given. Decode: one text from an empty context, at most 256 tokens long; embed: texts of 128
tokens, together; answer: the time to the first token after an image and a prompt, which together form the prefix.

Only multiply-adds with ternary weights are counted: not those of attention, and not those with float weights, a few
percent for an image: its patches and the projector.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import report
from shapes import FAMILIES

from bitnet_export import random_model
from bitnet_runtime import default_threads
from bitnet_runtime.shape import KV_TYPES

# What is measured for each shape: tokens or texts per pass. A pass should take milliseconds if possible.
PASSES: dict[str, dict[str, int]] = {
    "thinker-moe": {"decode": 20, "prefill": 512},
    "experts-2b": {"decode": 1, "prefill": 512},
    "bert-base": {"embed": 16},
    "so400m-14": {"images": 2},
    "paligemma-3b": {"answer": 16, "decode": 1},
}
CONTEXT, TEXT = 256, 128  # of decode and embed, as in passes.c
LIMIT = {"decode": "read bandwidth"} | dict.fromkeys(("prefill", "embed", "images", "answer"), "int8 peak")


def program() -> Path:
    """passes.c, compiled with the engine of this folder."""
    build = report.ROOT / "build" / "benchmarks"
    options = ["-DBITNET_BENCHMARKS=ON", "--log-level=WARNING"]
    subprocess.run(["cmake", "-S", report.ROOT, "-B", build, *options], check=True, stdout=sys.stderr)
    command = ["cmake", "--build", build, "--parallel", "--target", "passes"]
    subprocess.run(command, check=True, stdout=sys.stderr)
    return build / "passes"


def quartiles(values: list[float]) -> list[float]:
    """The first quartile, the median, the third quartile."""
    return statistics.quantiles(values, n=4, method="inclusive") if len(values) > 1 else 3 * values


def summary(printed: str, kind: str, count: int, kv_type: str) -> dict[str, Any]:
    """Summary of what passes.c printed."""
    head, *lines = printed.splitlines()
    isa, *numbers = head.split()
    threads, weights, read, macs, cache, of_image, image_macs = map(int, numbers)
    passes = [tuple(map(float, line.split())) for line in lines]
    tokens = {"embed": count * TEXT, "images": count * of_image, "answer": of_image + count}.get(kind, count)
    images = {"images": count, "answer": 1}.get(kind, 0)
    all_macs = images * image_macs + (0 if kind == "images" else tokens * macs)
    if kind == "decode":
        read += cache * CONTEXT // 2
        shares = [1e-9 * tokens * read / took / bandwidth for took, bandwidth, _ in passes]
    else:
        shares = [1e-9 * all_macs / took / peak for took, _, peak in passes]
    return {
        "kind": kind,
        "count": count,
        "isa": isa,
        "threads": threads,
        "kv_type": kv_type,
        "ternary_weights": weights,
        "bytes_per_token": read,
        "macs_per_token": macs,
        "macs": all_macs,
        "passes": len(passes),
        "seconds": quartiles([took for took, *_ in passes]),
        "tok_s": quartiles([tokens / took for took, *_ in passes]),
        "share": quartiles(shares),
        "read_gb_s": quartiles([bandwidth for _, bandwidth, _ in passes]),
        "int8_gmac_s": quartiles([peak for *_, peak in passes]),
    }


def measure(binary: Path, shape: str, path: Path, args: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for each kind of pass."""
    rows = []
    print(f"writing random weights of shape {shape} …", file=sys.stderr)
    random_model(FAMILIES[shape], path)
    for kind, count in PASSES[shape].items():
        print(f"{shape}, {kind} …", file=sys.stderr)
        words = [binary, path, kind, count, args.seconds, args.threads, args.batch, args.kv_type]
        done = subprocess.run([str(word) for word in words], check=True, capture_output=True, text=True)
        rows.append({"shape": shape} | summary(done.stdout, kind, count, args.kv_type))
    path.unlink()
    return rows


def markdown(rows: list[dict[str, Any]]) -> str:
    def percent(shares: list[float]) -> str:
        return f"{shares[1]:.0%} ({shares[0]:.0%} to {shares[2]:.0%})"

    first = rows[0]
    table = [
        [
            row["shape"], f"{row['kind']} {row['count']}", row["passes"], 1e3 * row["seconds"][1], row["tok_s"][1],
            percent(row["share"]), LIMIT[row["kind"]],
            f"{row['read_gb_s'][1]:.1f} GB/s" if row["kind"] == "decode" else f"{row['int8_gmac_s'][1]:.0f} GMAC/s",
        ]
        for row in rows
    ]  # fmt: skip
    head = ["shape", "pass", "passes", "ms a pass", "tok/s", "of the limit (quartiles)", "limit", "median of it"]
    where = f"{first['isa']}, {first['threads']} threads, {first['kv_type']} cache"
    return f"# Experts, encoders and images, {where}\n\n{report.table(head, table)}"


def panels(rows: list[dict[str, Any]]) -> list[report.Panel]:
    labels = [f"{row['shape']}\n{row['kind']}" for row in rows]
    shares = {"": [100 * row["share"][1] for row in rows]}
    speeds = {"": [row["tok_s"][1] for row in rows]}
    return [
        report.Panel("percent of the machine's limit", labels, shares, unit=" %"),
        report.Panel("tokens a second", labels, speeds),
    ]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Measure experts, encoders and what looks at images on random weights.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--shape", choices=FAMILIES, nargs="+", default=list(FAMILIES), help="models")
    add("--threads", type=int, default=default_threads(), metavar="N", help="threads")
    add("--seconds", type=float, default=30, metavar="N", help="of each measurement")
    add("--batch", type=int, default=0, metavar="N", help="tokens of a prompt computed at a time; 0: as sessions do")
    add("--kv-type", choices=tuple(KV_TYPES), default="f16", help="numbers in the cache; in the layers of images too")
    add("--out", type=Path, default=report.RESULTS, metavar="FOLDER", help="where results go")
    return parser.parse_args()


def main() -> None:
    args = arguments()
    shapes = " ".join(args.shape)
    command = f"python benchmarks/passes.py --shape {shapes} --threads {args.threads} --seconds {args.seconds:g}"
    origin = report.origin(f"{command} --batch {args.batch} --kv-type {args.kv_type}")
    binary = program()
    with tempfile.TemporaryDirectory(dir=report.ROOT / "build", prefix="passes-") as folder:
        rows = [row for shape in args.shape for row in measure(binary, shape, Path(folder) / "model.bitnet", args)]
    text = markdown(rows)
    report.write(args.out, "passes", {"origin": origin, "rows": rows}, text, panels(rows))
    print(text)


if __name__ == "__main__":
    report.run(main)
