"""When a model learns to copy: its loss on held-out tokens, and on the same tokens said a second time.

    python benchmarks/copying.py runs/mine    # each checkpoint that was kept: train with --save-every 200 --keep 20

A model that does not copy has about the same loss twice. The first token of either time does not count:
nothing says that what was said begins again.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch.nn import functional as F

from bitnet.data import corpus, dataset
from bitnet.evaluate.loss import chosen_windows
from bitnet.model.transformer import Transformer
from bitnet.settings import Settings
from bitnet.train import checkpoint, texts


def twice(ids: NDArray[np.integer], length: int, wanted: int) -> torch.Tensor:
    """Up to `wanted` pieces of the text, evenly spaced, each after its document's start token and said twice."""
    n = len(ids) // length
    if n < 1:
        raise corpus.DataError(f"the held-out text has {len(ids):,} tokens, expected at least {length:,}")
    pieces = np.stack([ids[i * length : (i + 1) * length] for i in chosen_windows(n, wanted)]).astype(np.int64)
    return torch.from_numpy(np.concatenate([np.full((len(pieces), 1), ids[0]), pieces, pieces], axis=1))


def losses(model: Transformer, rows: torch.Tensor) -> tuple[float, ...]:
    """Nats per token of what is said for the first time, and for the second."""
    sums = torch.zeros(2, dtype=torch.float64)
    with torch.no_grad(), model.evaluating():
        for block in rows.split(16):
            nats = F.cross_entropy(model(block[:, :-1]).transpose(1, 2), block[:, 1:], reduction="none")
            sums += nats.double().view(len(block), 2, -1)[:, :, 1:].sum((0, 2))
    return tuple((sums / (len(rows) * (rows.shape[1] // 2 - 1))).tolist())


def measure(folder: Path, length: int, wanted: int) -> tuple[float, ...]:
    """`losses` of a checkpoint on what its run held out."""
    opened = checkpoint.Checkpoint.open(folder)
    if (most := opened.config.max_context) < 2 * length:
        raise ValueError(f"{folder} takes {most:,} tokens, expected {2 * length:,}; lower --length")
    settings = Settings.from_dict(opened.state_of_run["settings"])
    with tempfile.TemporaryDirectory() as scratch:
        held_out = texts.of_checkpoint(opened, settings, None, most, Path(scratch), lambda line: None)
        if not isinstance(held_out, dataset.Tokens) or opened.config.mask != "causal":
            raise ValueError(f"{folder} has not learnt to go on with plain text, so it has nothing to copy")
        return losses(opened.model, twice(held_out.ids, length, wanted))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", type=Path, nargs="+", help="run folders, or checkpoints")
    parser.add_argument("--length", type=int, default=64, help="tokens that are said twice, 2 or more [64]")
    parser.add_argument("--texts", type=int, default=256, help="how many such pieces, 1 or more [256]")
    args = parser.parse_args(argv)
    if args.length < 2 or args.texts < 1:
        parser.error("--length is 2 or more, and --texts 1 or more")
    print("| checkpoint | said first | said again |\n|---|---|---|", flush=True)
    try:
        for folder in [step for source in args.source for step in checkpoint.all_of(source) or [source]]:
            first, second = measure(folder, args.length, args.texts)
            print(f"| {folder} | {first:.3f} | {second:.3f} |", flush=True)
    except (ValueError, OSError) as error:
        parser.error(str(error))
    return 0


if __name__ == "__main__":
    sys.exit(main())
