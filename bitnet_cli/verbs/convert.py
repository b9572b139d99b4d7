"""`bitnet convert`: a published model to a packed file, or a packed file to the formats of others."""

from __future__ import annotations

import argparse
import json
import re
import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from bitnet_cli.arguments import at_least, encodings, idle, misnamed, number_formats, refuse
from bitnet_cli.signals import at_once
from bitnet_runtime.terminal import escape, say

if TYPE_CHECKING:
    from bitnet_export.convert.incoming import Conversion
    from bitnet_export.foreign.onnx.report import OnnxReport
    from bitnet_export.foreign.outgoing import Written


def arguments(parser: argparse.ArgumentParser) -> None:
    from bitnet_export.foreign.gguf.write import BODIES

    parser.description = (
        "Convert a published model, a Hugging Face folder or a GGUF file, to a packed file. The format and the "
        "kind of model are recognized by the content; the file is compared with its source before it appears. With "
        "--to, convert a packed file to the format of others."
    )
    parser.add_argument("source", help="a Hugging Face folder, a GGUF file, or with --to a packed file")
    parser.add_argument(
        "out",
        help="the file to write, or with --to hf and onnx the folder, new or empty; in a folder that exists",
    )
    parser.add_argument(
        "--to",
        choices=("hf", "gguf", "onnx"),
        help="write a Hugging Face folder, whose logits are those of the engine with --kv-type f32; a GGUF file, which "
        "takes text if llama.cpp knows model and tokenizer, as from `bitnet train --preset gguf`; or a folder with an "
        "ONNX graph [a packed file]",
    )
    parser.add_argument("--tokens", type=at_least(1, 8192), metavar="N", help="tokens to compare, at most 8192 [512]")
    parser.add_argument("--encoding", choices=encodings(), help="bits a ternary weight of the packed file [2.0]")
    parser.add_argument(
        "--sparse",
        choices=("on", "off"),
        help="store up and down so that the engine reads only rows and columns that are not multiplied by 0; for "
        "models with relu² [off]",
    )
    parser.add_argument(
        "--head",
        choices=number_formats(),
        help="how embedding and head are stored, with --to gguf int8 is Q8_0; the report says what it costs [int8]",
    )
    parser.add_argument(
        "--linears",
        choices=number_formats(),
        help="how linear layers that are not ternary are stored; int8 rounds their inputs too, the report says what it "
        "costs [f16 where nothing is ternary, else f32]",
    )
    parser.add_argument(
        "--type",
        choices=BODIES,
        help="with --to gguf: type of the linear layers; with a ternary type, those of floats stay floats [TQ2_0]",
    )
    parser.add_argument("--no-tokenizer", action="store_true", help="with --to gguf: leave the tokenizer out")
    parser.add_argument(
        "--form", choices=("int8", "float", "2bit"), help="with --to onnx: type of the ternary weights [int8]"
    )
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    found = f"not for --to {args.to}" if args.to else "not for packed files"
    if told := idle(
        args,
        ("tokens encoding sparse linears", not args.to, f"is for packed files, {found}"),
        ("head", args.to in (None, "gguf"), f"is for packed files and --to gguf, {found}"),
        ("type no_tokenizer", args.to == "gguf", f"is for --to gguf, {found}"),
        ("form", args.to == "onnx", f"is for --to onnx, {found}"),
    ):
        return refuse(told)
    from bitnet_export.packed.replacing import kind_of

    source = Path(args.source)
    is_packed = source.is_file() and kind_of(source) == "model"  # then --to is missing, as `convert` will say
    if not (args.to or is_packed) and (told := misnamed(args.out)):
        return refuse(told)
    if not source.exists():
        published = "a Hugging Face folder or a GGUF file; get one with: hf download OWNER/MODEL --local-dir FOLDER"
        kind = "a packed file" if args.to else published
        raise FileNotFoundError(f"{args.source} does not exist, expected {kind}")
    report: Conversion | Written | OnnxReport
    with _progress_line() as progress:
        if args.to == "hf":
            with at_once():
                from bitnet_export.foreign.hf.write import write_folder

            report = write_folder(args.source, args.out, progress=progress)
        elif args.to == "gguf":
            with at_once():
                from bitnet_export.foreign.gguf.write import write_gguf

            body, head = args.type or "TQ2_0", {"f16": "F16", "f32": "F32"}.get(args.head, "Q8_0")
            report = write_gguf(
                args.source, args.out, body=body, head=head, vocabulary=not args.no_tokenizer, progress=progress
            )
        elif args.to == "onnx":
            with at_once():
                import onnxruntime  # noqa: F401  # which it loads later

                from bitnet_export.foreign.onnx.write import write_onnx

            progress("writing the graph and comparing it with the engine")
            report = write_onnx(args.source, args.out, form=args.form or "int8")
        else:
            with at_once():
                import torch  # noqa: F401  # which it loads later

                from bitnet_export.convert.incoming import convert

            names = ("tokens", "encoding", "head", "linears")
            given = {name: getattr(args, name) for name in names if getattr(args, name)}
            report = convert(args.source, args.out, progress=progress, sparse=args.sparse == "on", **given)
    say(f"converted  {escape(args.source)} to {escape(args.out)}\n{report}")
    if args.json:
        print(json.dumps({"file": args.out} | report.to_dict(), indent=2))
    return 0


@contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """The current step, on one line of the terminal, which is cleared at the end; in a log the first of each kind."""
    shown, kind = sys.stderr.isatty(), ""

    def show(what: str) -> None:
        nonlocal kind
        before, kind = kind, re.split(r"\d", what, maxsplit=1)[0]
        if not shown and kind not in ("", before):
            say(escape(what))
        if shown:
            width = shutil.get_terminal_size().columns - 1  # more would wrap, and a wrapped line is not cleared
            print(f"\r\x1b[K{escape(what)[:width]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")
