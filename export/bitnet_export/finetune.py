"""The verb `bitnet finetune`: `bitnet train` from a model that exists. Nothing heavy is imported before it runs."""

from __future__ import annotations

import argparse
import os
from typing import Any

from bitnet import settings


def register(verbs: Any) -> None:
    """Add the verb to the subparsers of the `bitnet` command."""
    finetune = verbs.add_parser(
        "finetune",
        help="go on with a model that exists; a full-precision one becomes ternary",
        description="Train a model that exists on your text or conversations, with everything that `bitnet train` "
        "does. A full-precision model becomes ternary on the way: see docs/finetune.md. Options come from the "
        "source, then --config, then flags; --set sub_norm=true adds norms before o and down.",
    )
    finetune.add_argument(
        "source",
        nargs="?",
        metavar="SRC",
        help="a Hugging Face folder with float weights, a checkpoint, or a run folder",
    )
    finetune.add_argument(
        "--resume", action="store_true", help="go on with the run in --out, from its newest checkpoint; needs no SRC"
    )
    finetune.add_argument("--json", action="store_true", help="print the result as one JSON object")
    settings.add_flags(finetune, without=("source", "preset", "tokenizer"), finetune=True)
    finetune.set_defaults(func=_finetune)


def _finetune(args: argparse.Namespace) -> int:
    os.environ.setdefault("GOMP_SPINCOUNT", "2000")  # before torch, as in `bitnet train`
    if not args.source and not args.resume:
        raise ValueError("finetune needs SRC, a model to begin with; or --resume and --out, to go on with a run")
    from bitnet.train import command

    from .masters import read_start

    return command(args, read_start)
