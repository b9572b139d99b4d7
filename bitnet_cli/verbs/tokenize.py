"""`bitnet tokenize`: from text to a folder of token ids that runs share."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from bitnet.settings import Settings
from bitnet_cli.arguments import at_least, refuse
from bitnet_cli.signals import at_once
from bitnet_runtime.terminal import escape, say, show

USUAL = Settings()
VOCABULARY = 2048  # tokens of a new tokenizer


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Turn text into token ids once. `bitnet train --data FOLDER` maps them, without reading the text again; so do "
        "`bitnet finetune` and `bitnet eval` with the same tokenizer."
    )
    parser.add_argument("folder", metavar="FOLDER", help="new or empty folder to write")
    parser.add_argument(
        "--data", nargs="+", action="extend", default=[], metavar="NAME", help="text, as for bitnet train"
    )
    parser.add_argument(
        "--column", default=USUAL.column, metavar="NAME", help="the field of a line or row that holds the text [text]"
    )
    parser.add_argument("--validation", type=float, default=USUAL.validation, metavar="X", help="share held out [0.05]")
    parser.add_argument("--tokenizer", default=USUAL.tokenizer, metavar="NAME", help="as for bitnet train [bpe]")
    parser.add_argument("--vocab-size", type=int, metavar="N", help=f"tokens of a new tokenizer [{VOCABULARY}]")
    parser.add_argument(
        "--fim", action="store_true", help="give a new tokenizer the tokens that `bitnet train --fim` needs"
    )
    parser.add_argument(
        "--near-duplicates", type=float, default=0.0, metavar="X",
        help="leave out documents that share this part of all five-word runs with an earlier one, 0.5 to 1; "
        "usual: 0.8; 0: off [0]",
    )  # fmt: skip
    parser.add_argument("--workers", type=at_least(0), default=0, metavar="N", help="cores that encode; 0: all [0]")
    parser.add_argument("--json", action="store_true", help="print the result as one JSON object")


def run(args: argparse.Namespace) -> int:
    with at_once():
        from bitnet import process
        from bitnet.data import corpus, tokenized, tokenizer

    given = Path(args.tokenizer).is_file()
    for option, asked in (("--fim", args.fim), ("--vocab-size", args.vocab_size is not None)):
        if asked and given:
            return refuse(f"{option} is for a new tokenizer, not for an existing one")
    Settings(validation=args.validation)  # refuses a number that is not a share
    if args.near_duplicates and not 0.5 <= args.near_duplicates <= 1:
        raise ValueError(f"--near-duplicates is {args.near_duplicates:g}, expected 0.5 to 1, or 0")
    if args.workers:
        os.environ["RAYON_NUM_THREADS"] = str(args.workers)  # the tokenizers library reads it once, at its first use
    if not given:
        tokenizer.check_kind(args.tokenizer)
    folder = Path(args.folder)
    with process.claimed(folder) as claim:
        if any(file.name != "lock" for file in folder.iterdir()):
            raise ValueError(f"{folder} is not empty; name a new folder")
        texts = corpus.Documents(args.data, args.column)
        made = tokenized.make(
            folder,
            texts,
            args.validation,
            args.tokenizer,
            VOCABULARY if args.vocab_size is None else args.vocab_size,
            lambda line: say(escape(line)),
            args.near_duplicates,
            tokenizer.FIM if args.fim else (),
        )
        claim.begun = True
    found = {name: {"tokens": ids.n_tokens, "bytes": ids.n_bytes} for name, ids in made.items()}
    size = tokenized.tokenizer_of(folder).get_vocab_size()
    lines = [f"{name:11}{said['tokens']:,} tokens of {said['bytes']:,} bytes" for name, said in found.items()]
    lines.append(f"vocabulary {size:,} tokens")
    whole = {"folder": str(folder), "vocab_size": size} | found
    show((json.dumps(whole) if args.json else "\n".join(lines)) + "\n")
    return 0
