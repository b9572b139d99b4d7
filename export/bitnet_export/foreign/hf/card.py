"""The README.md of a Hugging Face folder, only from what the packed file knows of its model and training."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, TypeGuard

from bitnet.config import ModelConfig
from bitnet_export.packed.reader import PackedFile

_MOST = 200  # most characters of a value
_SCALES = {"tensor": "one scale a matrix", "row": "one scale a row", "group": "one scale for 128 weights of a row"}
_FIGURES = {
    "nats_per_token": "nats per token", "bits_per_byte": "bits per byte", "perplexity": "perplexity per token",
    "accuracy": "share that is right", "right": "share of the answers that is right", "nats_per_pair": "nats per pair",
    "margin": "reward of the preferred answer less that of the other", "recall": "recall@1", "tokens": "tokens",
    "recall_back": "recall@1, back", "pairs": "pairs", "answers": "answers", "pool": "pairs in a pool",
}  # fmt: skip
_OPTIONS = (
    "objective", "optimizer", "lr", "schedule", "warmup", "warmdown", "weight_decay", "precision", "seed",
)  # fmt: skip

Rows = list[tuple[str, str]]


def write_card(folder: Path, file: PackedFile, name: str) -> None:
    """Write README.md. name: the model's."""
    (folder / "README.md").write_text(card(file, name), "utf-8")


def card(file: PackedFile, name: str) -> str:
    said = file.metadata.get("provenance")
    known: Mapping[str, Any] = said if isinstance(said, dict) else {}
    is_ternary = any(record.encoding.ternary for record in file.tensors.values())
    kind = "Weights that are -1, 0 or 1 times a scale (BitNet b1.58), made" if is_ternary else "Converted"
    parts = [
        _front(file.configs[0], is_ternary),
        f"# {_text(name)}",
        f"{kind} with bitnet-edge.",
        "## Model",
        _table(_model(file)),
        "## Training",
        _table(rows) if (rows := _training(known)) else "The file does not say how this model was trained.",
        "## Evaluation",
        _evaluation(known.get("validation")),
        "## Licence",
        "None is stated: whoever publishes this model says under which it is, and adds `license:` to the head of this "
        "page. What it was not measured on is not known.",
    ]
    return "\n\n".join(parts) + "\n"


def _front(config: ModelConfig, is_ternary: bool) -> str:
    """The front matter, which the hub reads."""
    task = "feature-extraction" if not config.has_head else "fill-mask"
    if config.has_head and config.mask != "bidirectional":
        task = "image-text-to-text" if config.vision else "text-generation"
    tags = "\ntags:\n- bitnet\n- ternary" if is_ternary else ""
    return f"---\nlibrary_name: transformers\npipeline_tag: {task}{tags}\n---"


def _model(file: PackedFile) -> Rows:
    sizes = [(record.rows * record.cols, record.encoding.ternary) for record in file.tensors.values()]
    ternary = sum(size for size, is_ternary in sizes if is_ternary)
    rows = [("ternary weights", f"{ternary:,}"), ("other parameters", f"{sum(size for size, _ in sizes) - ternary:,}")]
    for config in file.configs:
        shape = f"{config.n_layers} layers of width {config.dim:,}, {config.n_heads} heads"
        shape += f" ({config.n_kv_heads} of keys)" if config.n_kv_heads != config.n_heads else ""
        rows.append((f"stack {_text(config.name)}" if len(file.configs) > 1 else "shape", shape))
    first = file.configs[0]
    if first.vocab_size:
        rows.append(("vocabulary, context", f"{first.vocab_size:,} tokens, {first.max_context:,} tokens"))
    scale = f"ternary weights with {_SCALES[first.weight_scale]}, inputs as 8-bit integers with a scale for each token"
    rows += [("quantizers", scale)] if ternary else []
    return [*rows, ("embedding and head", first.head_format)] if first.vocab_size else rows


def _training(known: Mapping[str, Any]) -> Rows:
    training = known.get("training")
    told: Mapping[str, Any] = training if isinstance(training, dict) else {}
    rows: Rows = []
    if told:
        begun = told.get("source")
        rows.append(("begun with", _names(begun) if begun else "random weights"))
        kinds = {"data": "text", "mixture": "mixture", "chat": "conversations", "preference": "preferences"}
        kept = [(f"learnt from {what}", _names(told[name])) for name, what in kinds.items() if told.get(name)]
        rows += kept or [("learnt from text", "the source of Python's standard library")]
        rows += [("taught by", _names(told["teacher"]))] if told.get("teacher") else []
    rows += [(name, f"{known[key]:,}") for key, name in (("tokens", "tokens seen"), ("step", "optimizer steps"))
             if _is_figure(known.get(key))]  # fmt: skip
    if told:
        share = told.get("quantize_warmup")
        if _is_figure(share):
            unit = f"{share:.0%} of the run" if share <= 1 else f"{share:,.0f} tokens"
            rows.append(("λ, how much the quantizers count", f"from 0 to 1 over {unit}, then 1" if share else "1"))
        shown = [*_OPTIONS, *(name for name in ("distill", "lora") if told.get(name))]
        shown += ["beta"] if told.get("preference") else []
        rows.append(("options", ", ".join(f"{name} {_text(told[name])}" for name in shown if name in told)))
    return [*rows, *((name, _text(known[name])) for name in ("tool", "date") if name in known)]


def _evaluation(figures: Any) -> str:
    found = figures if isinstance(figures, dict) else {}
    rows = [(text, f"{found[name]:,.6g}") for name, text in _FIGURES.items() if _is_figure(found.get(name))]
    if not rows:
        return "The file has no figures of an evaluation."
    return f"On what the run held out of its own data, before it was exported:\n\n{_table(rows)}"


def _is_figure(value: Any) -> TypeGuard[float]:
    """Whether it is a number that can be shown; integers of a file may be larger than all floats."""
    return isinstance(value, int | float) and abs(value) <= sys.float_info.max


def _names(paths: Any) -> str:
    return ", ".join(map(_text, paths)) if isinstance(paths, list) else _text(paths)


def _table(rows: Iterable[tuple[str, str]]) -> str:
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _text(value: Any) -> str:
    """A value as one line of text, with markup escaped."""
    shown = value if isinstance(value, str) else json.dumps(value)
    line = "".join(c if c.isprintable() else " " for c in shown)[:_MOST].strip() or "?"
    return re.sub(r"([\\`*_\[\]<>|#])", r"\\\1", line)
