"""The verbs `bitnet export`, `bitnet convert` and `bitnet inspect`. Nothing heavy is imported before one runs."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_runtime.terminal import escape, say

from . import finetune

if TYPE_CHECKING:
    from .convert import Conversion
    from .outgoing import Written
    from .reader import PackedFile
    from .records import Record
    from .report import Report
    from .to_onnx.check import OnnxReport


def register(verbs: Any) -> None:
    """Add the verbs to the subparsers of the `bitnet` command."""
    export = verbs.add_parser(
        "export",
        help="write a checkpoint as one packed file",
        description="Write a checkpoint as one packed file. The file is then opened in the engine, compared with "
        "the checkpoint weight by weight and on real text, and kept only if it agrees. A packed file can be given "
        "too: then only the encoding of its ternary weights changes, and its logits do not.",
    )
    export.add_argument("checkpoint", help="a checkpoint, or a run folder (its newest), or a packed file")
    export.add_argument("out", help="the packed file to write, by habit something.bitnet, in a folder that exists")
    export.add_argument("--tokens", type=_positive, default=50_000, metavar="N", help="tokens to compare [50000]")
    export.add_argument(
        "--encoding",
        choices=("2.0", "1.6"),
        default="2.0",
        help="bits a ternary weight; 1.6 reads a fifth less memory and computes more [2.0]",
    )
    export.add_argument(
        "--head",
        choices=("int8", "f16", "f32"),
        help="how embedding and head are stored; the report says what it costs [as trained]",
    )
    export.add_argument(
        "--sparse",
        choices=("auto", "on", "off"),
        default="auto",
        help="store up and down so that the engine reads only rows and columns that are not multiplied with 0: "
        "where relu² makes enough zeros, or as a packed file has it [auto]",
    )
    export.add_argument("--json", action="store_true", help="print the report as one JSON object")
    export.set_defaults(func=_export)

    _register_convert(verbs)
    finetune.register(verbs)

    inspect = verbs.add_parser(
        "inspect",
        help="show what is in a packed file",
        description="Check every byte of a packed file and show its header, configuration and tensors.",
    )
    inspect.add_argument("file", help="a packed file")
    inspect.add_argument("--json", action="store_true", help="print one JSON object")
    inspect.set_defaults(func=_inspect)


def _register_convert(verbs: Any) -> None:
    convert = verbs.add_parser(
        "convert",
        help="a published model to a packed file, or a packed file to another format",
        description="Convert a published ternary model, a Hugging Face folder or a GGUF file, to a packed file. The "
        "format and the kind of model are told from the content; the file is compared with its source before it "
        "appears. With --to, convert a packed file to the format of others.",
    )
    convert.add_argument("source", help="a Hugging Face folder, a GGUF file, or with --to a packed file")
    convert.add_argument(
        "out",
        help="the file to write, or with --to hf and onnx the folder, new or empty; in a folder that exists",
    )
    convert.add_argument(
        "--to",
        choices=("hf", "gguf", "onnx"),
        help="write a Hugging Face folder, whose logits are those of the engine with --kv-type f32; a GGUF file, which "
        "takes text where llama.cpp has model and tokenizer, as of `bitnet train --preset gguf`; or a folder with an "
        "ONNX graph [a packed file]",
    )
    convert.add_argument("--tokens", type=_positive, metavar="N", help="tokens to compare [512]")
    convert.add_argument("--encoding", choices=("2.0", "1.6"), help="bits a ternary weight of the packed file [2.0]")
    convert.add_argument(
        "--sparse",
        choices=("on", "off"),
        help="store up and down so that the engine reads only rows and columns that are not multiplied with 0; for "
        "models with relu² [off]",
    )
    convert.add_argument(
        "--head",
        choices=("int8", "f16", "f32"),
        help="how embedding and head are stored, with --to gguf int8 is Q8_0; the report says what it costs [int8]",
    )
    kinds = ("TQ2_0", "TQ1_0", "Q2_0", "F16", "F32")
    convert.add_argument("--type", choices=kinds, help="with --to gguf: of the ternary weights [TQ2_0]")
    convert.add_argument("--no-tokenizer", action="store_true", help="with --to gguf: leave the tokenizer out")
    convert.add_argument(
        "--form", choices=("int8", "float", "2bit"), help="with --to onnx: of the ternary weights [int8]"
    )
    convert.add_argument("--json", action="store_true", help="print the report as one JSON object")
    convert.set_defaults(func=_convert)


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _refuse(message: str) -> int:
    """Wrong usage that argparse cannot see."""
    print(f"bitnet: error: {message}", file=sys.stderr)
    return 2


def _export(args: argparse.Namespace) -> int:
    from .pack import export_checkpoint
    from .repack import Repacked, repack

    if args.head and Path(args.checkpoint).is_file():
        return _refuse("--head goes with a checkpoint; a packed file no longer has what was trained")
    if sys.stderr.isatty():
        print("writing the file and comparing it with the source, which takes a moment …", file=sys.stderr)
    report: Report | Repacked
    sparse = {"auto": None, "on": True, "off": False}[args.sparse]
    if Path(args.checkpoint).is_file():
        report, source = repack(args.checkpoint, args.out, encoding=args.encoding, sparse=sparse), args.checkpoint
    else:
        report = export_checkpoint(
            args.checkpoint, args.out, tokens=args.tokens, encoding=args.encoding, head=args.head, sparse=sparse
        )
        source = report.checkpoint
    say(f"exported   {source} to {args.out}\n{report}")
    if args.json:
        print(json.dumps({"file": args.out} | report.to_dict(), indent=2))
    return 0


_GOES_WITH = {
    "tokens": (None,), "encoding": (None,), "sparse": (None,), "head": (None, "gguf"),
    "type": ("gguf",), "no_tokenizer": ("gguf",), "form": ("onnx",),
}  # fmt: skip
"""For which --to an option of `bitnet convert` says something; None: a packed file is written."""


def _target(to: str | None) -> str:
    return f"--to {to}" if to else "packed files"


def _convert(args: argparse.Namespace) -> int:
    given = {name: getattr(args, name) for name in _GOES_WITH if getattr(args, name)}
    for name in given:
        if args.to not in _GOES_WITH[name]:
            targets = " and ".join(map(_target, _GOES_WITH[name]))
            return _refuse(f"--{name.replace('_', '-')} is for {targets}, not for {_target(args.to)}")
    report: Conversion | Written | OnnxReport
    with _progress_line() as progress:

        def count(done: int, total: int) -> None:
            progress(f"writing tensor {done} of {total}")

        if args.to == "hf":
            from .hf.write import write_folder

            report = write_folder(args.source, args.out, progress=count)
        elif args.to == "gguf":
            from .gguf.write import write_gguf

            body, head = args.type or "TQ2_0", {"f16": "F16", "f32": "F32"}.get(args.head, "Q8_0")
            report = write_gguf(
                args.source, args.out, body=body, head=head, vocabulary=not args.no_tokenizer, progress=count
            )
        elif args.to == "onnx":
            from .to_onnx.write import write_onnx

            progress("writing the graph and comparing it with the engine")
            report = write_onnx(args.source, args.out, **given)
        else:
            from .convert import convert

            given["sparse"] = args.sparse == "on"
            report = convert(args.source, args.out, progress=progress, **given)
    say(f"converted  {args.source} to {args.out}\n{report}")
    if args.json:
        print(json.dumps({"file": args.out} | report.to_dict(), indent=2))
    return 0


@contextmanager
def _progress_line() -> Iterator[Callable[[str], None]]:
    """What is being done, on one line of a terminal that is cleared in the end."""
    shown = sys.stderr.isatty()

    def show(what: str) -> None:
        if shown:
            width = shutil.get_terminal_size().columns - 1  # more would wrap, and a wrapped line is not cleared
            print(f"\r\x1b[K{escape(what)[:width]}", end="", file=sys.stderr, flush=True)

    try:
        yield show
    finally:
        show("")


def _inspect(args: argparse.Namespace) -> int:
    from .reader import PackedFile

    file = PackedFile.open(args.file)
    if args.json:
        print(json.dumps({"file": args.file} | describe(file), indent=2))
    else:
        print(_table(file))
    return 0


def describe(file: PackedFile) -> dict[str, Any]:
    """Everything `bitnet inspect` shows, ready for JSON."""
    from .encodings import SCOPE_NAMES

    def tensor(record: Record) -> dict[str, Any]:
        scales = file.scales(record)
        return {
            "name": record.key.name,
            "shape": [record.rows, record.cols],
            "encoding": record.encoding.name,
            "scale_scope": SCOPE_NAMES[record.scope],
            "offset": record.offset,
            "bytes": record.size + record.scale_size,
            "scale": [float(scales.min()), float(scales.max())] if scales.size else None,
            "zero_fraction": file.zero_fraction(record),
        }

    return {
        "version": file.version,
        "file_size": file.file_size,
        "header_crc": f"{file.header_crc:08x}",
        "sections": [
            {"name": s.name, "offset": s.offset, "bytes": s.size, "crc": f"{s.crc:08x}"} for s in file.sections
        ],
        "config": [config.to_dict() for config in file.configs],
        "metadata": {key: value for key, value in file.metadata.items() if key != "config"},
        "tensors": [tensor(record) for record in file.tensors.values()],
    }


def _table(file: PackedFile) -> str:
    facts = describe(file)
    lines = [f"packed model, format {file.version}, {file.file_size:,} bytes, header checksum {facts['header_crc']}"]
    rows = [(s["name"], f"{s['offset']:,}", f"{s['bytes']:,}", s["crc"]) for s in facts["sections"]]
    lines += ["", *_columns(("section", "offset", "bytes", "checksum"), rows, "<>><")]
    for config in facts["config"]:
        lines += ["", f"stack {escape(config.pop('name'))}"]
        lines += _wrap([f"{key}={escape(_plain(value))}" for key, value in config.items()])
    for key, value in facts["metadata"].items():
        lines += ["", f"{escape(key)}: {escape(_plain(value))}"]
    cells: list[tuple[str, ...]] = []
    for t in facts["tensors"]:
        scale = " … ".join(f"{s:.4g}" for s in dict.fromkeys(t["scale"] or []))
        zeros = "" if t["zero_fraction"] is None else f"{100 * t['zero_fraction']:.1f} %"
        shape = " × ".join(map(str, t["shape"]))
        cells.append((t["name"], shape, t["encoding"], f"{t['bytes']:,}", scale, zeros))
    lines += ["", *_columns(("tensor", "shape", "encoding", "bytes", "scale", "zeros"), cells, "<<<>>>")]
    return "\n".join(lines)


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _wrap(words: Sequence[str], width: int = 100) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) >= width:
            lines.append("")
        lines[-1] += "  " + word
    return lines
