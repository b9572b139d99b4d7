"""`bitnet report`: one page of figures about a training run."""

from __future__ import annotations

import argparse
from pathlib import Path

from bitnet_runtime.terminal import show


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Draw a run, finished or not: losses, ternary codes, scales and activations, layer by layer, "
        "and text of the newest checkpoint. docs/watch.md says how to read it."
    )
    parser.add_argument("run", help="a run folder of `bitnet train`")
    parser.add_argument(
        "--out", metavar="", help="the page, .html or .png; none: report.html or attention.html in the run folder"
    )
    parser.add_argument(
        "--attention", metavar="TEXT",
        help="draw instead what each token of a text takes of each other, layer by layer and head by head",
    )  # fmt: skip
    parser.add_argument("--prompt", default="", metavar="", help="what the sample of text begins with")
    parser.add_argument("--tokens", type=int, default=100, metavar="", help="of the sample; 0: no sample [100]")


def run(args: argparse.Namespace) -> int:
    from bitnet.report import attention, page

    run_folder = Path(args.run)
    out = Path(args.out or run_folder / ("report.html" if args.attention is None else "attention.html"))
    if args.attention is None:
        page.write(run_folder, out, args.prompt, args.tokens)
    else:
        attention.write(run_folder, out, args.attention)
    show(f"{out}\n")
    return 0
