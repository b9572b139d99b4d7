"""`bitnet report`: one page of figures about a training run."""

from __future__ import annotations

import argparse
from pathlib import Path

from bitnet_cli.signals import at_once
from bitnet_cli.texts import typed
from bitnet_runtime.terminal import show

TOKENS = 100  # of the sample


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw a run, finished or not: losses, ternary codes, scales and activations, layer by layer, "
        "and text of the newest checkpoint. docs/watch.md says how to read it."
    )
    parser.add_argument("run", help="a run folder of `bitnet train`")
    parser.add_argument(
        "--out", metavar="FILE", help="the page, .html or .png; none: report.html or attention.html in the run folder"
    )
    parser.add_argument(
        "--attention", type=typed, metavar="TEXT",
        help="draw instead how much each token of a text attends to every other, layer by layer and head by head",
    )  # fmt: skip
    parser.add_argument("--prompt", default="", type=typed, metavar="TEXT", help="what the sample of text begins with")
    parser.add_argument(
        "--tokens", type=int, default=TOKENS, metavar="N", help=f"tokens of the sample; 0: no sample [{TOKENS}]"
    )


def run(args: argparse.Namespace) -> int:
    with at_once():
        from bitnet.report import attention, page

    if args.attention is not None and (args.prompt or args.tokens != TOKENS):
        raise ValueError(
            "--prompt and --tokens are for the sample, which is not drawn with --attention; leave them out"
        )
    run_folder = Path(args.run)
    if not run_folder.is_dir():
        found = "is a file" if run_folder.exists() else "does not exist"
        raise ValueError(f"{run_folder} {found}, expected a run folder of `bitnet train`")
    out = Path(args.out or run_folder / ("report.html" if args.attention is None else "attention.html"))
    if args.attention is None:
        page.write(run_folder, out, args.prompt, args.tokens)
    else:
        attention.write(run_folder, out, args.attention)
    show(f"{out}\n")
    return 0
