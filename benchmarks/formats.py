"""The cost of constraining an answer to a format: seconds per token with and without it, in pairs of one run.

    python benchmarks/formats.py [--shape bitnet-2b4t] [--threads 1 2] [--pairs 7] [--out FILE.json]

Random weights, and a tokenizer of the vocabulary's size, fitted to the Python sources of this machine: the time to find
the allowed tokens depends on their number and on their common prefixes.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import report
from shapes import SHAPES
from sources import standard_roots

from bitnet.data import tokenizer
from bitnet_export import random_model
from bitnet_runtime import Model

TOKENS, FIRST = 48, 8  # tokens of an answer; the first of them, which are not counted
FORMATS: dict[str, dict[str, Any]] = {
    "a text": {"json_schema": {"type": "string", "minLength": 4000}},  # a free choice at every token
    "objects": {
        "json_schema": {
            "type": "array",
            "minItems": 100,
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 8, "maxLength": 30},
                    "age": {"type": "integer", "minimum": 0, "maximum": 150},
                    "tags": {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 2},
                },
                "required": ["name", "age", "tags"],
                "additionalProperties": False,
            },
        }
    },
    "digits": {"regex": "[0-9]{4000}"},
}
SAMPLING: dict[str, dict[str, Any]] = {"greedy": {"temperature": 0}, "top-p": {"temperature": 0.8, "top_p": 0.95}}


def texts(most: int = 30_000_000) -> Iterator[str]:
    """About `most` characters of Python."""
    for folder in standard_roots():
        for file in sorted(folder.rglob("*.py")):
            text = file.read_text("utf-8", "replace")
            yield text
            most -= len(text)
            if most < 0:
                return


def seconds(model: Model, options: dict[str, Any]) -> float:
    """Seconds per token, after the first ones."""
    begin, n = 0.0, 0
    for piece in model.stream("def main():", max_tokens=TOKENS, seed=1, draft=0, **options):
        n += piece.token is not None
        if n == FIRST and not begin:
            begin = time.perf_counter()
    if n != TOKENS:
        raise report.BenchmarkError(f"the answer ended after {n} tokens, expected {TOKENS}")
    return (time.perf_counter() - begin) / (TOKENS - FIRST)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="bitnet-2b4t")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--model", type=Path, help="keep the model there, for the next time")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    config, results = SHAPES[args.shape], []
    with tempfile.TemporaryDirectory() as folder:
        path = args.model or Path(folder) / "model.bitnet"
        if not path.exists():
            words = tokenizer.build("bpe", texts(), config.vocab_size)
            random_model(config, path, tokenizer=words.to_str().encode())
        for threads in args.threads:
            with Model.load(path, threads=threads, verify=False) as model:
                for (kind, held), (how, chosen) in itertools.product(FORMATS.items(), SAMPLING.items()):
                    sides = chosen, chosen | held
                    for options in sides:
                        seconds(model, options)
                    pairs = [(seconds(model, sides[0]), seconds(model, sides[1])) for _ in range(args.pairs)]
                    cost = statistics.median(with_one / without for without, with_one in pairs) - 1
                    results.append({"threads": threads, "format": kind, "sampling": how, "cost": cost, "pairs": pairs})
                    print(f"{model.isa}, threads {threads}, {kind}, {how}: {cost:+.1%}", file=sys.stderr)
    if args.out:
        args.out.write_text(json.dumps({"shape": args.shape, "runs": results}, indent=1) + "\n")


if __name__ == "__main__":
    report.run(main)
