"""`bitnet embed`: vectors of texts."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bitnet_cli.arguments import refuse
from bitnet_cli.model_options import add_model, model_path, note, opened
from bitnet_cli.texts import lines_of, read_text
from bitnet_runtime.terminal import escape


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A vector of length 1 for each text, one JSON array a line. Texts come from -p, which may be repeated, or are "
        "the lines of -f or of standard input."
    )
    add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--text", action="append", metavar="TEXT", help="a text")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="a file with a text on each line")
    parser.add_argument(
        "--pooling", choices=("last", "mean", "first"), help="what becomes the vector (default: as the model says)"
    )
    parser.add_argument(
        "--similarity", action="store_true", help="print how alike the texts are, the cosine of each two, -1 to 1"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(args: argparse.Namespace) -> int:
    path = model_path(args)
    if path is None:
        return refuse("no model; give a packed file, as in `bitnet embed model.bitnet -p TEXT`")
    texts = args.text
    if texts is None:
        read = read_text(args.file)
        if read is None:
            return refuse("no texts; give -p TEXT or -f FILE, or pipe lines in")
        texts = lines_of(read)
    if not texts:
        raise ValueError(f"{args.file or 'standard input'} has no line, expected a text on each")
    for number, text in enumerate(texts, 1):
        if not text:
            raise ValueError(f"text {number} is empty, expected at least one character")
    with opened(args, path) as model:
        note(args, escape(str(model)))
        vectors = model.embed(texts, pooling=args.pooling)
    rows = [[float(f"{x:.9g}") for x in row] for row in (vectors @ vectors.T if args.similarity else vectors)]
    if args.json:
        key = "similarity" if args.similarity else "vectors"
        print(json.dumps({"texts": texts, key: rows}, ensure_ascii=sys.stdout.isatty()))
    elif args.similarity:
        for row, text in zip(rows, texts, strict=True):
            print(*(f"{x:7.4f}" for x in row), "", escape(text))
    else:
        for row in rows:
            print(json.dumps(row))
    return 0
