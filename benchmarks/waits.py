"""How long a running answer waits for its next token while a long prompt loads, in units of an undisturbed step.

python benchmarks/waits.py --shape bitnet-2b4t [--prompt 4000] [--texts 1 4] [--threads 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import report
from shapes import SHAPES

from bitnet_export import random_model
from bitnet_runtime import Model

STEPS = 200  # without the prompt: the median is the time of a step, the slowest shows disturbance by the machine


def waits(model: Model, texts: int, prompt: int) -> tuple[list[float], list[float], float]:
    """Seconds of undisturbed steps, of steps while the prompt loads, and from its submission to its first token."""
    alone: list[float] = []
    beside: list[float] = []
    with model.batch() as batch:
        running = [batch.add([5 + i, 6, 7], max_tokens=None, temperature=0, stop=[], draft=0) for i in range(texts)]
        added, begun, last = None, 0.0, time.perf_counter()
        for stream, _, _ in batch:
            now = time.perf_counter()
            if stream is added:
                return alone, beside, now - begun
            if stream is not running[0]:
                continue
            (alone if added is None else beside).append(now - last)
            last = now
            if added is None and len(alone) == STEPS:
                added, begun = batch.add([9] * prompt, max_tokens=1), now
    raise report.BenchmarkError("the answers ended before the prompt was there: take a shorter one")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=list(SHAPES), default="bitnet-2b4t")
    parser.add_argument("--prompt", type=int, default=4000)
    parser.add_argument("--texts", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--threads", type=int)
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.bitnet"
        random_model(SHAPES[args.shape], path)
        with Model.load(path, threads=args.threads, verify=False) as model:
            for texts in args.texts:
                for _ in range(args.rounds):
                    alone, beside, seconds = waits(model, texts, args.prompt)
                    step = statistics.median(alone)
                    cuts, quiet = (
                        statistics.quantiles([wait / step for wait in of], n=100, method="inclusive")
                        for of in (beside, alone)
                    )
                    print(
                        f"{texts} answers, {1e3 * step:.2f} ms a step (p99 {quiet[98]:.2f} times that): {args.prompt} "
                        f"tokens load in {seconds:.1f} s and {len(beside)} steps of {cuts[49]:.2f} (p50), "
                        f"{cuts[98]:.2f} (p99) times the time"
                    )


if __name__ == "__main__":
    report.run(main)
