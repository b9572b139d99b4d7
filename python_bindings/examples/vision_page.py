"""The page of `make vision`: pictures, questions, answers, similarities, as HTML that needs no other file."""

from __future__ import annotations

import base64
import html
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vision import Asked, Matched

SHOWN = 60  # pictures with questions
COMPARED = 12  # pictures with captions


def page(folder: Path, facts: list[str], matched: Matched, asked: list[Asked]) -> str:
    """folder: of the pictures. facts: sentences for the top."""
    captions = dict(zip(matched.images, matched.captions, strict=True))
    by_image = [(image, list(group)) for image, group in groupby(asked, lambda each: each.image)]
    cards = "".join(_card(folder, image, captions[image], group) for image, group in by_image[:SHOWN])
    return _PAGE.format(
        facts="".join(f"<li>{html.escape(fact)}</li>" for fact in facts),
        table=_table(folder, matched, min(COMPARED, len(matched.images))),
        shown=min(SHOWN, len(by_image)),
        cards=cards,
    )


def _picture(folder: Path, image: str, text: str) -> str:
    encoded = base64.b64encode((folder / image).read_bytes()).decode()
    return f'<img alt="{html.escape(text)}" title="{html.escape(image)}" src="data:image/png;base64,{encoded}">'


def _card(folder: Path, image: str, caption: str, asked: list[Asked]) -> str:
    rows = "".join(_answer(each) for each in asked)
    return f"<figure>{_picture(folder, image, caption)}<table>{rows}</table></figure>"


def _answer(asked: Asked) -> str:
    right = asked.said == asked.right
    mark = '<td class="right">✓</td>' if right else '<td class="wrong">✗</td>'
    said = html.escape(asked.said) + ("" if right else f" <small>(right: {html.escape(asked.right)})</small>")
    return f"<tr>{mark}<th>{html.escape(asked.question)}</th><td>{said}</td></tr>"


def _table(folder: Path, matched: Matched, n: int) -> str:
    """A row for each picture, a column for each caption: darker fits better, within the row; the best has a frame."""
    numbers = "".join(f"<th>{i + 1}</th>" for i in range(n))
    rows = []
    for i in range(n):
        scores = matched.scores[i, :n]
        low, high, best = float(scores.min()), float(scores.max()), int(scores.argmax())
        cells = "".join(
            f'<td class="{"best" if j == best else ""}" '
            f'style="background: rgba(79, 143, 192, {(score - low) / (high - low or 1):.2f})">{score:.1f}</td>'
            for j, score in enumerate(scores.tolist())
        )
        rows.append(f"<tr><th>{i + 1} {_picture(folder, matched.images[i], matched.captions[i])}</th>{cells}</tr>")
    listed = "".join(f"<li>{html.escape(caption)}</li>" for caption in matched.captions[:n])
    return f'<div><table class="scores"><tr><th></th>{numbers}</tr>{"".join(rows)}</table></div><ol>{listed}</ol>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Pictures never seen</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1280px; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1rem; margin: 1.5rem 0 0 }}
p {{ margin: .2rem 0 .8rem; color: #555; font-size: .9rem }}
img {{ image-rendering: pixelated; border: 1px solid #ddd }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(34rem, 100%), 1fr)); gap: 1.2rem }}
figure {{ margin: 0; display: flex; gap: .7rem; align-items: flex-start; font-size: .85rem; line-height: 1.3 }}
figure img {{ width: 128px; height: 128px; flex: none }}
figure table {{ width: 100% }} figure th {{ width: 55% }}
td.right, td.wrong {{ width: 1.2em }}
th {{ text-align: left; font-weight: 400; color: #555; padding-right: .5rem; vertical-align: top }}
td {{ vertical-align: top }} td.right {{ color: #17807e }} td.wrong {{ color: #c8553d; font-weight: 700 }}
small {{ color: #c8553d }}
.matching {{ display: flex; flex-wrap: wrap; gap: 1rem 2rem; align-items: flex-start }}
.matching div {{ overflow-x: auto }}
.scores {{ border-collapse: collapse; font-size: .75rem; font-variant-numeric: tabular-nums }}
.scores th {{ white-space: nowrap; text-align: center }}
.scores img {{ width: 40px; height: 40px; vertical-align: middle }}
.scores td {{ width: 2.6rem; text-align: center; vertical-align: middle }}
.scores td.best {{ outline: 2px solid #12446b; outline-offset: -2px }}
ol {{ margin: 0; font-size: .85rem; line-height: 1.9 }}
</style></head><body>
<h1>Pictures never seen</h1><ul>{facts}</ul>
<h2>Which caption belongs to which picture</h2>
<p>Each row is a picture, each column a caption of the list. Darker fits better, and the best of the row has a frame:
all is right when the frames lie on the diagonal.</p>
<section class="matching">{table}</section>
<h2>Questions and answers</h2>
<p>The first {shown} pictures. What is right stands beside answers that are not.</p>
<main>{cards}</main>
</body></html>
"""
