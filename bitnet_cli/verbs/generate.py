"""`bitnet generate`: continue a text."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

from bitnet_cli.arguments import Once, refuse
from bitnet_cli.model_options import (
    adapter_of,
    add_adapter,
    add_images,
    add_model,
    add_sampling,
    fitting_session,
    model_path,
    note,
    opened,
    sampling,
)
from bitnet_cli.notes import cut_off, end_line, too_long
from bitnet_cli.texts import read_text, typed
from bitnet_runtime.errors import ContextLengthError
from bitnet_runtime.sessions.saved import replace, writable
from bitnet_runtime.structured.formats import KINDS
from bitnet_runtime.terminal import escape, show


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Continue a text. The prompt comes from -p, from -f, or from standard input."
    add_model(parser)
    source = parser.add_mutually_exclusive_group()
    source.add_argument("-p", "--prompt", action=Once, type=typed, metavar="TEXT", help="the text to continue")
    source.add_argument("-f", "--file", action=Once, type=Path, metavar="FILE", help="a file with the text to continue")
    add_adapter(parser)
    add_images(parser, "a picture that the prompt is about; may be repeated")
    add_sampling(parser)
    parser.add_argument("--receipt", type=Path, metavar="FILE", help="write what `bitnet verify-receipt` takes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")
    parser.add_argument("--quiet", action="store_true", help="nothing on stderr but errors")


def _for_receipt(file: Path) -> None:
    """Raises OSError or ValueError: the file cannot be written, or exists and is not an earlier receipt."""
    writable(file)
    if file.is_file():
        with open(file, "rb") as there:
            begin = there.read(64)
        if begin.strip() and b'"bitnet_receipt"' not in begin:
            raise ValueError(f"{file} exists and is not a receipt; name another file with --receipt")


def run(args: argparse.Namespace) -> int:
    path = model_path(args)
    if path is None:
        return refuse("no model; give a packed file, as in `bitnet generate model.bitnet -p TEXT`")
    prompt = args.prompt if args.prompt is not None else read_text(args.file)
    if prompt is None:
        return refuse("no prompt; give -p TEXT or -f FILE, or pipe text in")
    if args.image and args.prompt is None:
        prompt = prompt.removesuffix("\n")  # it ends the line of a file; behind a question the model has its own
    if args.receipt:
        _for_receipt(args.receipt)
    with opened(args, path) as model:
        note(args, escape(str(model)))
        try:
            asked = {
                "images": args.image,
                "adapter": adapter_of(model),
                "receipt": args.receipt is not None,
                **sampling(args),
            }
            stream = fitting_session(args, model, lambda: model.stream(prompt, **asked))
        except ContextLengthError as error:
            raise ValueError(too_long("prompt", error.n_prompt, model, model.n_ctx, error.some)) from None
        try:
            for piece in stream:
                if not args.json and piece.text:
                    show(piece.text)
        finally:
            stream.close()
            result = stream.result
            assert result is not None  # the stream is closed
            if args.json:
                print(json.dumps(_as_json(result), ensure_ascii=sys.stdout.isatty()))
            else:
                print(flush=True)
            if args.receipt and result.receipt:
                replace(args.receipt, result.receipt.to_json().encode() + b"\n")
            as_asked = result.usage.completion_tokens == getattr(args, "max_tokens", None)
            if not as_asked or any(hasattr(args, kind) for kind in KINDS):  # a part of a format is not what was asked
                note(args, cut_off(result, model, model.n_ctx))
            note(args, end_line(result))
    return 0


def _as_json(result: Any) -> dict[str, Any]:
    """A Result as plain dictionaries."""
    values = {
        field.name: getattr(result, field.name) for field in dataclasses.fields(result) if field.name != "receipt"
    }
    return values | {"usage": result.usage._asdict(), "timings": result.timings._asdict()}
