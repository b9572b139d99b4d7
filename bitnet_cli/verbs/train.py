"""`bitnet train`: from text to a checkpoint."""

from __future__ import annotations

import argparse

from bitnet.settings import CONVERSION
from bitnet_cli.signals import at_once
from bitnet_cli.tasks import ask
from bitnet_cli.training_options import add_branch, add_settings, conclude, given


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Train a model. Options come from the preset, then --config, then flags. "
        "Without --data it learns from the source of Python's standard library."
    )
    parser.add_argument("--resume", action="store_true", help="go on from the newest checkpoint of the run folder")
    add_branch(parser)
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")
    add_settings(parser, without=CONVERSION)


def run(args: argparse.Namespace) -> int:
    with at_once():
        from bitnet.setup.start import train
        from bitnet_export.convert.masters import read_start

    return conclude(train(given(args), read_start, args.resume, args.branch, ask), args.json)
