"""How long an answer that runs waits for its next token while a long prompt loads beside it, in steps without.

python benchmarks/waits.py --shape bitnet-2b4t [--prompt 4000] [--texts 1 4] [--threads 2] [--rounds 3]
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from pathlib import Path

from shapes import SHAPES

from bitnet_export import random_model
from bitnet_runtime import Model

STEPS = 48  # without the prompt, of which one is the median


def waits(model: Model, texts: int, prompt: int) -> tuple[float, list[float], float]:
    """Seconds of a step alone, of each while the prompt loads, and from its coming to its first token."""
    alone: list[float] = []
    beside: list[float] = []
    with model.batch() as batch:
        running = [batch.add([5 + i, 6, 7], max_tokens=None, temperature=0, stop=[], draft=0) for i in range(texts)]
        added, begun, last = None, 0.0, time.perf_counter()
        for stream, _, _ in batch:
            now = time.perf_counter()
            if stream is added:
                return statistics.median(alone), beside, now - begun
            if stream is not running[0]:
                continue
            (alone if added is None else beside).append(now - last)
            last = now
            if added is None and len(alone) == STEPS:
                added, begun = batch.add([9] * prompt, max_tokens=1), now
    raise RuntimeError("the answers ended before the prompt was there: take a shorter one")


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
                    step, beside, seconds = waits(model, texts, args.prompt)
                    cuts = statistics.quantiles([wait / step for wait in beside], n=100, method="inclusive")
                    print(
                        f"{texts} answers, {1e3 * step:.2f} ms a step: {args.prompt} tokens load in {seconds:.1f} s "
                        f"and {len(beside)} steps of {cuts[49]:.1f} (p50), {cuts[98]:.1f} (p99) times the time"
                    )


if __name__ == "__main__":
    main()
