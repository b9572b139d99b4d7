"""Continues each text of a data set with a model, on all machines of a Ray cluster.

    python ray_batch.py MODEL IN.jsonl FOLDER --actors 4 --threads 8

IN.jsonl has {"prompt": "…"} in each line. FOLDER receives the same lines with "text", in several files. All machines
must see MODEL, IN.jsonl and FOLDER. Generation is greedy, so answers do not depend on the number of machines.
"""

from __future__ import annotations

import argparse
from typing import Any

import ray

from bitnet_runtime import Model


class Writer:
    """An actor that holds a model, and computes the lines of a batch together."""

    def __init__(self, path: str, threads: int, max_tokens: int) -> None:
        self._model = Model.load(path, threads=threads)
        self._max_tokens = max_tokens

    def __call__(self, batch: dict[str, Any]) -> dict[str, Any]:
        answers = self._model.generate([*batch["prompt"]], max_tokens=self._max_tokens, temperature=0)
        return batch | {"text": [answer.text for answer in answers]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("source")
    parser.add_argument("out")
    parser.add_argument("--actors", type=int, default=2, help="models in memory, in the whole cluster")
    parser.add_argument("--threads", type=int, default=1, help="threads of each; leave a core of the cluster for files")
    parser.add_argument("--max-tokens", type=int, default=64)
    args = parser.parse_args()
    ray.init()  # the cluster of RAY_ADDRESS, or of this machine alone
    ray.data.read_json(args.source).map_batches(
        Writer,
        fn_constructor_args=(args.model, args.threads, args.max_tokens),
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_cpus=args.threads,
        batch_size=16,  # computed together
    ).write_json(args.out)


if __name__ == "__main__":
    main()
