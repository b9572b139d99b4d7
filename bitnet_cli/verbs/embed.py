"""`bitnet embed`: vectors of texts and pictures."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bitnet_cli.arguments import idle, refuse
from bitnet_cli.model_options import adapter_of, add_adapter, add_images, add_model, model_path, note, opened
from bitnet_cli.texts import lines_of, plain, read_text, typed
from bitnet_runtime.shape import POOLING
from bitnet_runtime.terminal import escape


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "A vector of length 1 for each picture and text, one JSON array a line. Texts come from -p, which may be "
        "repeated, or are the lines of -f, or of standard input if there is no picture."
    )
    add_model(parser)
    add_adapter(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--text", action="append", type=typed, metavar="TEXT", help="a text")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="a file with a text on each line")
    add_images(parser, "a picture; may be repeated, and comes before the texts")
    parser.add_argument(
        "--pooling", choices=tuple(POOLING), help="how token vectors become one (default: as the model says)"
    )
    parser.add_argument("--similarity", action="store_true", help="print the cosine of each pair, -1 to 1")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(args: argparse.Namespace) -> int:
    path = model_path(args)
    if path is None:
        return refuse("no model; give a packed file, as in `bitnet embed model.bitnet -p TEXT`")
    images, texts = args.image or [], args.text
    if texts is None and not (images and args.file is None):
        read = read_text(args.file)
        if read is None:
            return refuse("no texts; give -p TEXT or -f FILE, or pipe lines in")
        texts = lines_of(read)
        if not texts:
            raise ValueError(f"{args.file or 'standard input'} has no line, expected a text on each")
    texts = texts or []
    alone = "changes the vectors of texts alone, and there is none; leave it out, or give -p TEXT"
    if told := idle(args, ("adapter pooling", texts, alone)):
        return refuse(told)
    with opened(args, path) as model:
        import numpy as np

        from bitnet_runtime.model_images import cosines

        note(args, escape(str(model)))
        parts = [model.embed_images(images)] if images else []
        parts += [model.embed(texts, pooling=args.pooling, adapter=adapter_of(model))] if texts else []
    vectors = np.concatenate(parts)
    rows = plain(cosines(vectors, vectors) if args.similarity else vectors)
    if args.json:
        key = "similarity" if args.similarity else "vectors"
        given = {"images": images, "texts": texts} if images else {"texts": texts}
        print(json.dumps(given | {key: rows}, ensure_ascii=sys.stdout.isatty()))
    elif args.similarity:
        for row, text in zip(rows, [*images, *texts], strict=True):
            print(*(f"{x:7.4f}" for x in row), "", escape(text))
    else:
        for row in rows:
            print(json.dumps(row))
    return 0
