"""`bitnet inspect`: what is in a packed file, a model or an adapter alone, or in a saved session."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from bitnet_cli.signals import at_once
from bitnet_runtime.sessions.saved import Saved
from bitnet_runtime.terminal import escape

if TYPE_CHECKING:
    from bitnet.config import ModelConfig
    from bitnet_export.packed.reader import PackedFile
    from bitnet_export.packed.records import Record

LONGEST = 1000  # characters of a value


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.description = (
        "Check every byte of a packed file and show its header, configuration and tensors; or of a saved session, and "
        "show which model it belongs to. Of the options of a model it shows its size, and what is not the default."
    )
    parser.add_argument("file", help="a packed file, a model or an adapter; or a saved session")
    parser.add_argument("--all", action="store_true", help="also the options of the model that have their defaults")
    parser.add_argument("--json", action="store_true", help="print one JSON object, with all options")


def run(args: argparse.Namespace) -> int:
    with at_once():
        from bitnet_export.packed.reader import PackedFile

    if Saved.is_at(args.file):
        session = Saved.of(args.file)
        facts, shown = {"kind": "session"} | session._asdict(), _of_session(session)
    else:
        file = PackedFile.open(args.file, adapter=None)
        facts, shown = describe(file), _table(file, args.all)
    print(json.dumps({"file": args.file} | facts, indent=2) if args.json else shown)
    return 0


def _of_session(session: Saved) -> str:
    def whose(what: str, size: int, checksum: str) -> str:
        return f"of the {what} of {size:,} bytes with header checksum {checksum}"

    lines = [
        f"saved session, {session.bytes:,} bytes: {session.position:,} of {session.context:,} tokens of context",
        f"  {whose('model', session.model_bytes, session.model_checksum)}",
        f"  cache {session.kv_type}, seed {session.seed}, a note of {session.note_bytes:,} bytes",
    ]
    if session.adapter_bytes:
        lines.insert(2, f"  {whose('adapter', session.adapter_bytes, session.adapter_checksum)}")
    return "\n".join(lines)


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

    stacks = [_stack(file, number) for number in range(len(file.configs))]
    return {
        "kind": "adapter" if file.base else "model",
        "parameters": sum(stack["weights"] for stack in stacks),
        "version": file.version,
        "file_size": file.file_size,
        "header_crc": f"{file.header_crc:08x}",
        "weights": (file.base or file.weights)._asdict(),
        "sections": [
            {"name": s.name, "offset": s.offset, "bytes": s.size, "crc": f"{s.crc:08x}"} for s in file.sections
        ],
        "stacks": stacks,
        "config": [config.to_dict() for config in file.configs],
        "metadata": {key: value for key, value in file.metadata.items() if key != "config"},
        "tensors": [tensor(record) for record in file.tensors.values()],
    }


def what_it_is(config: ModelConfig) -> str:
    """A stack in words."""
    inputs = {"tokens": "text", "embeddings": "vectors", "images": "images", "draft": "states"}[config.input]
    if config.input == "draft":
        kind = "draft head: drafts tokens for the stack before it"
    elif config.input == "images":
        size, patches = config.image_size, config.max_context
        gives = f"{patches} vectors of each" if config.pooling == "none" else f"a vector of each, of {patches} patches"
        kind = f"encoder of images of {size} x {size} pixels: gives {gives}"
    elif config.mask == "bidirectional":
        gives = "what stands at each position" if config.has_head else "vectors"
        kind = f"encoder of {inputs}: gives {gives}"
    else:
        kind = f"decoder of {inputs}: " + ("continues them" if inputs != "text" else "continues it")
        kind = kind if config.has_head else f"decoder of {inputs}: gives vectors"
        kind += ", whose first part sees all of itself" if config.mask == "prefix" else ""
        kind += f"; vectors of images stand in the places of token {config.image_token}" if config.image_token else ""
    if config.n_experts:
        kind += f"; a token takes {config.experts_per_token} of {config.n_experts} experts"
    return kind


def _stack(file: PackedFile, number: int) -> dict[str, Any]:
    """What a stack is, and how large. Active is what one token uses: all but the experts it does not use."""
    from bitnet_export.packed.records import NONE, learned

    config = file.configs[number]
    sizes = {"weights": 0, "ternary_weights": 0, "bytes": 0}
    active = dict(sizes)
    for key, record in file.tensors.items():
        if key.stack != number:
            continue
        weights = record.rows * record.cols if learned(key, config) else 0
        ternary = weights if record.encoding.ternary else 0
        each = (weights, ternary, record.size + record.scale_size)
        for field, size in zip(sizes, each, strict=True):
            sizes[field] += size
            if key.expert == NONE or key.expert < config.experts_per_token:  # experts are all of one shape
                active[field] += size
    return {"name": config.name, "is": what_it_is(config)} | sizes | {f"active_{k}": v for k, v in active.items()}


def _table(file: PackedFile, every: bool) -> str:
    """every: also the options that have their defaults."""
    facts = describe(file)
    kind, weights = facts["kind"], facts["weights"]
    whose = "of the model whose weights are" if file.base else "weights of"
    lines = [
        f"packed {kind}, {facts['parameters']:,} parameters, format {file.version}, {file.file_size:,} bytes, "
        f"header checksum {facts['header_crc']}",
        f"{whose} {weights['data_size']:,} bytes, checksum {weights['data_crc']:08x}",
    ]
    rows = [(s["name"], f"{s['offset']:,}", f"{s['bytes']:,}", s["crc"]) for s in facts["sections"]]
    lines += ["", *_columns(("section", "offset", "bytes", "checksum"), rows, "<>><")]
    for stack, config in zip(facts["stacks"], file.configs, strict=True):
        lines += ["", f"stack {escape(config.name)}", f"  {stack['is']}", f"  {_sizes(stack)}"]
        lines += _wrap(_options(config, every))
    for key, value in facts["metadata"].items():
        if isinstance(value, dict):
            lines += ["", escape(key), *_wrap(_pairs(value))]
        else:
            lines += ["", f"{escape(key)}: {escape(_plain(value))}"]
    cells: list[tuple[str, ...]] = []
    for t in facts["tensors"]:
        scale = " … ".join(f"{s:.4g}" for s in dict.fromkeys(t["scale"] or []))
        zeros = "" if t["zero_fraction"] is None else f"{100 * t['zero_fraction']:.1f} %"
        shape = " × ".join(map(str, t["shape"]))
        cells.append((t["name"], shape, t["encoding"], f"{t['bytes']:,}", scale, zeros))
    lines += ["", *_columns(("tensor", "shape", "encoding", "bytes", "scale", "zeros"), cells, "<<<>>>")]
    return "\n".join(lines)


def _options(config: ModelConfig, every: bool) -> list[str]:
    shown, defaults = config.to_dict(), {f.name: f.default for f in dataclasses.fields(config)}
    usual = [name for name in shown if getattr(config, name) == defaults[name]]
    for name in ("name", *(() if every else usual)):
        shown.pop(name, None)
    return _pairs(shown)


def _pairs(values: Mapping[str, Any], before: str = "") -> list[str]:
    """NAME=VALUE of each value, and of those in objects."""
    found = []
    for name, value in values.items():
        if isinstance(value, dict) and value:
            found += _pairs(value, f"{before}{name}.")
        else:
            found.append(escape(f"{before}{name}={_plain(value)}"))
    return found


def _sizes(stack: dict[str, Any]) -> str:
    def said(before: str) -> str:
        weights, ternary, size = (stack[before + field] for field in ("weights", "ternary_weights", "bytes"))
        return f"{weights:,} weights, {ternary:,} of them ternary, {size:,} bytes"

    whole, active = said(""), said("active_")
    return whole if whole == active else f"{whole}; for a token {active}"


def _plain(value: object) -> str:
    """Cut where it would fill screens: --json shows all."""
    said = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
    return said if len(said) <= LONGEST else f"{said[:LONGEST]}… ({len(said):,} characters)"


def _columns(head: Sequence[str], rows: Sequence[Sequence[str]], align: str) -> list[str]:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, align, widths, strict=True)).rstrip()
        for row in (head, *rows)
    ]


def _wrap(words: Sequence[str]) -> list[str]:
    lines = [""]
    for word in words:
        if lines[-1] and len(lines[-1]) + len(word) >= 100:
            lines.append("")
        lines[-1] += "  " + word
    return lines
