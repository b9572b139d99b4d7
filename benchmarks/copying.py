"""When a model learns to copy: its loss on held-out tokens, and on the same tokens repeated.

    python benchmarks/copying.py runs/mine    # each checkpoint that was kept: train with --save-every 200 --keep 20

A model that does not copy has about the same loss on both. The first token of each does not count: nothing predicts
that the repetition starts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import report
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from bitnet.data import corpus, dataset
from bitnet.evaluate.loss import chosen_windows
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.setup import measured
from bitnet.train import checkpoint

HEAD = ["run", "tokens learnt from", "said first", "said again"]


def twice(ids: NDArray[np.integer], length: int, wanted: int) -> torch.Tensor:
    """Up to `wanted` pieces of the text, evenly spaced, each after its document's start token and repeated once."""
    n = len(ids) // length
    if n < 1:
        raise corpus.DataError(f"the held-out text has {len(ids):,} tokens, expected at least {length:,}")
    pieces = np.stack([ids[i * length : (i + 1) * length] for i in chosen_windows(n, wanted)]).astype(np.int64)
    return torch.from_numpy(np.concatenate([np.full((len(pieces), 1), ids[0]), pieces, pieces], axis=1))


def losses(model: Transformer, rows: torch.Tensor) -> tuple[float, ...]:
    """Nats per token, for the first occurrence and for the repetition."""
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad(), model.evaluating():
        for block in rows.split(16):
            nats = F.cross_entropy(model(block[:, :-1]).transpose(1, 2), block[:, 1:], reduction="none")
            sums += nats.double().view(len(block), 2, -1)[:, :, 1:].sum((0, 2))
    return tuple((sums / (len(rows) * (rows.shape[1] // 2 - 1))).tolist())


def measure(folder: Path, length: int, wanted: int) -> dict[str, Any]:
    """`losses` of a checkpoint on the held-out data of its run."""
    opened = checkpoint.Checkpoint.open(folder)
    if (most := opened.config.max_context) < 2 * length:
        raise ValueError(f"{folder} takes {most:,} tokens, expected {2 * length:,}; lower --length")
    settings = Settings.from_dict(opened.state_of_run["settings"])
    with tempfile.TemporaryDirectory() as scratch:
        held_out = measured.of_checkpoint(opened, settings, None, most, Path(scratch), lambda line: None)
        if not isinstance(held_out, dataset.Tokens) or opened.config.mask != "causal":
            raise ValueError(f"{folder} has not learnt to go on with plain text, so it has nothing to copy")
        first, again = losses(opened.model, twice(held_out.ids, length, wanted))
    name, tokens = opened.folder.parent.name, opened.state_of_run["tokens"]
    return {"run": name, "tokens": tokens, "first": first, "again": again}


def row(found: dict[str, Any]) -> list[str]:
    return [found["run"], f"{found['tokens']:,}", f"{found['first']:.3f}", f"{found['again']:.3f}"]


def markdown(results: dict[str, Any]) -> str:
    return (
        "# When a model learns to copy\n\n"
        f"Nats per token of {results['length']} held-out tokens said for the first time, and said again at once. "
        f"Means of at most {results['texts']} such pieces.\n\n" + report.table(HEAD, [row(r) for r in results["rows"]])
    )


def draw(file: Path, results: dict[str, Any]) -> None:
    """A line for each run: how much the loss falls on the repetition."""
    plt = report.pyplot()
    figure, axis = plt.subplots(figsize=(8, 4.5), layout="constrained")
    for run in dict.fromkeys(found["run"] for found in results["rows"]):
        of_run = [found for found in results["rows"] if found["run"] == run]
        gains = [found["first"] - found["again"] for found in of_run]
        axis.plot([found["tokens"] / 1e6 for found in of_run], gains, marker="o", markersize=3, label=run)
    axis.set_xlabel("millions of tokens learnt from")
    axis.set_ylabel("nats per token less when said again")
    axis.legend(frameon=False)
    report.save(figure, file)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="+", help="run folders, or checkpoints")
    parser.add_argument("--length", type=int, default=64, help="tokens that are said twice, 2 or more [64]")
    parser.add_argument("--texts", type=int, default=256, help="how many such pieces, 1 or more [256]")
    parser.add_argument("--out", type=Path, help="folder for copying.json, .md and .png [none]")
    args = parser.parse_args(argv)
    if args.length < 2 or args.texts < 1:
        parser.error("--length is 2 or more, and --texts 1 or more")
    words = "benchmarks/copying.py " + " ".join(sys.argv[1:] if argv is None else argv)
    results = {"origin": report.origin(f"python {words}"), "length": args.length, "texts": args.texts, "rows": []}
    print(report.table(HEAD, []), flush=True)
    try:
        for folder in [step for source in args.source for step in checkpoint.all_of(source) or [source]]:
            results["rows"].append(found := measure(folder, args.length, args.texts))
            print("| " + " | ".join(row(found)) + " |", flush=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    if args.out:
        report.write(args.out, "copying", results, markdown(results), lambda file: draw(file, results))
    return 0


if __name__ == "__main__":
    report.run(main)
