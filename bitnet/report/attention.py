"""Attention weights between the tokens of a text, an image for every layer and head, as HTML or as a PNG."""

from __future__ import annotations

import base64
import html
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet.report.output import LARGEST, ReportError, check_out, printable, put, pyplot, saved

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from bitnet.train.checkpoint import Checkpoint

MOST = 128  # tokens of a text: more would be a gray square
LONGEST = 13  # characters shown of a token
NAMED = 40  # most tokens that are named beside the image

READING = (
    "Each row is an attending token, each column an attended one; a row sums to 1, and darker is more. "
    "A dark first column is a head at rest; a dark line beside the diagonal, one that copies its neighbour."
)


def write(source: Path, out: Path, text: str) -> None:
    """Write the page of a text, with the newest checkpoint of a run. Raises ReportError, CheckpointError."""
    from bitnet.train.checkpoint import Checkpoint

    check_out(out)
    checkpoint = Checkpoint.open(source)
    if checkpoint.config.ternary_weights > LARGEST:
        raise ReportError(
            f"{checkpoint.folder} has {checkpoint.config.ternary_weights:,} ternary weights, expected at most "
            f"{LARGEST:,}: attention is drawn in PyTorch"
        )
    names, layers = weights_of(checkpoint, text)
    title = f"attention: {checkpoint.run.name}, {checkpoint.folder.name}"
    draw = as_html if out.suffix == ".html" else as_png
    put(out, lambda: draw(title, names, layers))


def weights_of(checkpoint: Checkpoint, text: str) -> tuple[list[str], list[NDArray[np.float32]]]:
    """The tokens of a text in readable form, and for each layer the weights (heads, tokens, tokens).

    The text starts like a document. For a model with the mask "prefix" all of it is the prefix.
    """
    import torch

    from bitnet.data import tokenizer

    words, most = checkpoint.words, min(MOST, checkpoint.config.max_context)
    ids = [
        tokenizer.separator(words, checkpoint.generation),
        *next(tokenizer.encoder(words)([text])),
    ]
    if not 2 <= len(ids) <= most:
        other = "a shorter text" if len(ids) > most else "a text"
        raise ReportError(f"--attention has {len(ids) - 1:,} tokens, expected 1 to {most - 1}; give {other}")
    found = checkpoint.model.attention_weights(torch.tensor([ids]), prefix_B=torch.tensor([len(ids)]))
    return [_name(words.decode([token], skip_special_tokens=False)) for token in ids], [w[0].numpy() for w in found]


def _name(token: str) -> str:
    """A token with visible spaces and line breaks."""
    return printable(token.replace(" ", "·").replace("\n", "↵").replace("\t", "→"))[:LONGEST]


def as_html(title: str, names: list[str], layers: list[NDArray[np.float32]]) -> bytes:
    figures = []
    for number, heads in enumerate(layers):
        image = base64.b64encode(_figure([heads], names, [number])).decode()
        figures.append(
            f"<figure><h2>Layer {number}</h2>"
            f'<img alt="attention of layer {number}" src="data:image/png;base64,{image}"></figure>'
        )
    return _PAGE.format(
        title=html.escape(printable(title)), text=html.escape(" ".join(names)), reading=html.escape(READING),
        figures="".join(figures),
    ).encode("utf-8", errors="replace")  # fmt: skip


def as_png(title: str, names: list[str], layers: list[NDArray[np.float32]]) -> bytes:
    return _figure(layers, names, list(range(len(layers))), title)


def _figure(layers: list[NDArray[np.float32]], names: list[str], numbers: list[int], title: str = "") -> bytes:
    """A row for each layer, an image for each of its heads."""
    from matplotlib.colors import PowerNorm

    columns = max(len(heads) for heads in layers)
    side = 1.6 + 0.11 * min(len(names), NAMED)
    figure, grid = pyplot().subplots(
        len(layers), columns, figsize=(side * columns, side * len(layers) + 0.4), squeeze=False, layout="constrained"
    )
    for row, (number, heads) in enumerate(zip(numbers, layers, strict=True)):
        for column, axes in enumerate(grid[row]):
            if column >= len(heads):
                axes.set_axis_off()
                continue
            axes.imshow(heads[column], cmap="Blues", norm=PowerNorm(0.5, 0, 1), interpolation="nearest")
            axes.set_title(f"layer {number}, head {column}", fontsize=8)
            _label(axes, names, first=column == 0)
    if title:
        figure.suptitle(title, fontsize=10, parse_math=False)
    return saved(figure)


def _label(axes: Any, names: list[str], first: bool) -> None:
    """Token names below the image, and beside the first image of a row."""
    axes.tick_params(length=0, labelsize=6)
    if len(names) > NAMED:
        return
    places = range(len(names))
    axes.set_xticks(places, names, rotation=90, parse_math=False)
    axes.set_yticks(places if first else [], names if first else [], parse_math=False)


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1600px; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1rem; margin: 1rem 0 0 }} figure {{ margin: 0 }}
img {{ max-width: 100% }} p {{ color: #555 }}
pre {{ background: #f5f5f2; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere }}
</style></head><body>
<h1>{title}</h1><pre>{text}</pre><p>{reading}</p>
{figures}
</body></html>
"""
