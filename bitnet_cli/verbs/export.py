"""`bitnet export`: a checkpoint to a packed file, or a packed file with its weights in another encoding."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING

from bitnet_cli.arguments import at_least, check_exists, encodings, idle, misnamed, number_formats, refuse
from bitnet_cli.signals import at_once
from bitnet_runtime.terminal import escape, say

if TYPE_CHECKING:
    from bitnet_export.checkpoint.findings import Report
    from bitnet_export.checkpoint.repack import Repacked


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Write a checkpoint as one packed file. The file is then opened in the engine, compared with "
        "the checkpoint weight by weight and on real text, and kept only if it agrees. A packed file can be given "
        "too: then only the encoding of its ternary weights changes, not its logits."
    )
    parser.add_argument("checkpoint", help="a checkpoint, or a run folder (its newest), or a packed file")
    parser.add_argument("out", help="the packed file to write, usually NAME.bitnet, in an existing folder")
    parser.add_argument("--tokens", type=at_least(1), metavar="N", help="tokens to compare [50000]")
    parser.add_argument(
        "--encoding",
        choices=encodings(),
        default="2.0",
        help="bits a ternary weight; 1.6 reads a fifth less memory and computes more [2.0]",
    )
    parser.add_argument(
        "--head",
        choices=number_formats(),
        help="how embedding and head are stored; the report says what it costs [as trained]",
    )
    parser.add_argument(
        "--sparse",
        choices=("auto", "on", "off"),
        default="auto",
        help="store up and down so that the engine reads only rows and columns that are not multiplied by 0: "
        "where relu² makes enough zeros, or as a packed file has it [auto]",
    )
    parser.add_argument(
        "--base", metavar="MODEL", help="write only the adapters (bitnet finetune --lora): a small file beside this "
        "packed model, which has to be the one they were trained on",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the report as one JSON object")


def run(args: argparse.Namespace) -> int:
    is_packed = Path(args.checkpoint).is_file()
    alone = not (is_packed or args.head or args.sparse != "auto" or args.encoding != "2.0")
    if told := idle(
        args,
        ("head", not is_packed, "goes with a checkpoint; a packed file no longer has what was trained"),
        ("tokens", not is_packed, "goes with a checkpoint; a packed file is compared bit by bit, not on a text"),
        ("base", alone, "goes with a run or a checkpoint alone: the model keeps the encoding that it has"),
    ) or misnamed(args.out):
        return refuse(told)
    check_exists(args.checkpoint)
    with at_once():
        from bitnet_export.checkpoint.adapter import export_adapter
        from bitnet_export.checkpoint.pack import export_checkpoint
        from bitnet_export.checkpoint.repack import repack

        if not is_packed:
            import torch  # noqa: F401  # which they load later

            from bitnet import process

            process.keep_freed_memory()

    _check(args, is_packed)
    say("writing the file and comparing it with the source, which takes a moment …")
    tokens = args.tokens or 50_000
    report: Report | Repacked
    sparse = {"auto": None, "on": True, "off": False}[args.sparse]
    if args.base:
        report = export_adapter(args.checkpoint, args.base, args.out, tokens=tokens)
        source = report.checkpoint
    elif is_packed:
        report, source = repack(args.checkpoint, args.out, encoding=args.encoding, sparse=sparse), args.checkpoint
    else:
        report = export_checkpoint(
            args.checkpoint, args.out, tokens=tokens, encoding=args.encoding, head=args.head, sparse=sparse
        )
        source = report.checkpoint
    say(f"exported   {escape(source)} to {escape(args.out)}\n{report}")
    if args.json:
        print(json.dumps({"file": args.out} | report.to_dict(), indent=2))
    return 0


def _check(args: argparse.Namespace, is_packed: bool) -> None:
    """Raises, before the work is announced, what it would raise about its files without having read them."""
    from bitnet_export.packed.reader import PackedFile
    from bitnet_export.packed.replacing import check_place, spare

    sources = [args.checkpoint, args.base] if args.base else [args.checkpoint]
    for source in sources:
        spare(Path(source), Path(args.out), "adapter" if args.base else "model")
    check_place(Path(args.out))
    if not is_packed:
        from bitnet.train.checkpoint import there  # loads torch

        there(args.checkpoint)
    for packed in sources if is_packed else sources[1:]:
        PackedFile.open(packed)
