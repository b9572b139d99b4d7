"""`bitnet inspect`: what is in a packed file."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from bitnet_runtime.terminal import escape

if TYPE_CHECKING:
    from bitnet_export.packed.reader import PackedFile
    from bitnet_export.packed.records import Record


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = "Check every byte of a packed file and show its header, configuration and tensors."
    parser.add_argument("file", help="a packed file")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(args: argparse.Namespace) -> int:
    from bitnet_export.packed.reader import PackedFile

    file = PackedFile.open(args.file)
    if args.json:
        print(json.dumps({"file": args.file} | describe(file), indent=2))
    else:
        print(_table(file))
    return 0


def describe(file: PackedFile) -> dict[str, Any]:
    """Everything `bitnet inspect` shows, ready for JSON."""
    from bitnet_export.packed.encodings import SCOPE_NAMES

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
