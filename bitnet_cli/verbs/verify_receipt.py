"""`bitnet verify-receipt`: whether a model makes the answer of a receipt."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from bitnet_cli.model_options import add_adapter, add_engine, note, opened
from bitnet_runtime.terminal import escape, show


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Repeat the answer of a receipt, which `bitnet generate --receipt FILE` wrote on this machine or another, "
        "and compare every token and every state. Prints the answer if the receipt is true; otherwise exits with 1 and "
        "says which token is the first to differ."
    )
    parser.add_argument("model", type=Path, metavar="MODEL", help="a packed model file")
    add_engine(parser)
    add_adapter(parser, "the adapter that the answer was made with, if there was one")
    parser.add_argument("receipt", type=Path, metavar="RECEIPT", help="a file of bitnet generate --receipt")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of the answer")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(args: argparse.Namespace) -> int:
    from bitnet_runtime.answers.receipt import MOST, Receipt

    with args.receipt.open("rb") as file:  # one from a stranger may never end
        receipt = Receipt.from_json(file.read(MOST + 1))
    with opened(args, args.model) as model:
        note(args, escape(str(model)))
        verdict = model.verify_receipt(receipt)
        text = model.detokenize(receipt.tokens) if verdict.valid and model.has_tokenizer else ""
    if args.json:
        print(json.dumps(verdict._asdict()))
    elif verdict.valid:
        show(text + "\n")
        note(args, f"[true: {verdict.why}]")
    else:
        raise ValueError(f"the receipt is not true: {verdict.why}")
    return 0 if verdict.valid else 1
