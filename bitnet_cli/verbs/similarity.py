"""`bitnet similarity`: how well pictures and texts fit."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from bitnet_cli.arguments import refuse
from bitnet_cli.model_options import adapter_of, add_adapter, add_model, note, opened
from bitnet_cli.texts import lines_of, plain, read_text, typed
from bitnet_runtime.abilities import require_similarity
from bitnet_runtime.terminal import escape

KINDS = {
    "sigmoid": "[of each text by itself: the model judges pairs (sigmoid)]",
    "softmax": "[of each text among those given: the model compares texts (softmax)]",
}


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "For each picture the probability of each text, best first, by a model of images and texts. Texts come from "
        "-p, which may be repeated, or are the lines of -f."
    )
    add_model(parser)
    add_adapter(parser, "an adapter of the model, which changes the vectors of texts (docs/adapters.md)")
    parser.add_argument("images", nargs="+", metavar="IMAGE", help="a picture: png, jpeg, webp, gif, bmp, tiff, ppm")
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("-p", "--text", action="append", type=typed, metavar="TEXT", help="a text")
    source.add_argument("-f", "--file", type=Path, metavar="FILE", help="a file with a text on each line")
    parser.add_argument("--json", action="store_true", help="print one JSON object, which also has the raw scores")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def run(args: argparse.Namespace) -> int:
    names = [*([str(args.model)] if args.model else []), *args.images]
    if not args.model_flag and len(names) < 2:
        needed = "expected a packed file and a picture, as in `bitnet similarity model.bitnet cat.png -p TEXT`"
        return refuse(f"{escape(names[0])} alone is given, {needed}")
    path, images = (args.model_flag, names) if args.model_flag else (Path(names[0]), names[1:])
    texts = args.text or lines_of(read_text(args.file) or "")
    if not all(texts) or not texts:
        place = f"text {texts.index('') + 1} is empty" if texts else f"{args.file} has no line"
        raise ValueError(f"{place}, expected texts of at least one character")
    with opened(args, path) as model:
        from bitnet_runtime.model_images import is_of_pairs, likely

        note(args, escape(str(model)))
        seen = require_similarity(model)
        scores = model.similarity(images, texts, adapter=adapter_of(model))
        kind, rows = "sigmoid" if is_of_pairs(seen) else "softmax", likely(scores, seen)
    if args.json:
        values = {"scores": plain(scores), "probabilities": plain(rows), "kind": kind}
        print(json.dumps({"images": images, "texts": texts} | values, ensure_ascii=sys.stdout.isatty()))
        return 0
    for name, row in zip(images, rows, strict=True):
        print(escape(name))
        for share, text in sorted(zip(row, texts, strict=True), key=lambda pair: -pair[0]):
            print(f"  {100 * share:6.2f} %  {escape(text)}")
    note(args, KINDS[kind])
    return 0
