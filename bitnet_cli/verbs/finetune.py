"""`bitnet finetune`: `bitnet train` from an existing model."""

from __future__ import annotations

import argparse

from bitnet_cli.training_options import add_branch, add_settings
from bitnet_cli.verbs import train


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train an existing model on your text or conversations, with everything that `bitnet train` does. A "
        "full-precision model becomes ternary on the way: see docs/finetune.md. Options come from the source, then "
        "--config, then flags; --set sub_norm=true adds norms before o and down."
    )
    parser.add_argument(
        "source",
        nargs="?",
        metavar="SRC",
        help="a Hugging Face folder with float weights, a checkpoint, or a run folder",
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on with the run in --out, from its newest checkpoint; needs no SRC"
    )
    add_branch(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    add_settings(parser, without=("source", "preset", "tokenizer"), finetune=True)


def run(args: argparse.Namespace) -> int:
    if not args.source and not (args.resume or args.branch):
        raise ValueError("finetune needs SRC, a model to begin with; or --resume and --out, to resume a run")
    return train.run(args)
