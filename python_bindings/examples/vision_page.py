"""The page of `make vision`: figures, pictures, answers, similarities, as self-contained HTML."""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vision import Asked, Figure, Matched

SHOWN = 60  # pictures shown with questions
COMPARED = 12  # pictures compared with captions


def page(
    folder: Path, matched: Matched, asked: list[Asked], figures: list[Figure], kinds: list[Figure], took: str
) -> str:
    """folder: of the pictures. figures, kinds: accuracy overall, and of the answers by kind. took: a sentence."""
    captions = dict(zip(matched.images, matched.captions, strict=True))
    by_image = [(image, list(group)) for image, group in groupby(asked, lambda each: each.image)]
    return _PAGE.format(
        pictures=len(matched.images),
        took=html.escape(took),
        figures="".join(_figure(figure) for figure in figures),
        kinds="".join(f"<div><span>{html.escape(kind.what)}</span>{_share(kind)}</div>" for kind in kinds),
        table=_table(folder, matched, min(COMPARED, len(matched.images))),
        shown=min(SHOWN, len(by_image)),
        cards="".join(_card(folder, image, captions[image], group) for image, group in by_image[:SHOWN]),
    )


def _figure(figure: Figure) -> str:
    twin = "" if figure.twin is None else f"<small>full precision, more steps: {figure.twin:.1%}</small>"
    return f"<section><h2>{html.escape(figure.what)}</h2>{_share(figure)}{twin}</section>"


def _share(figure: Figure) -> str:
    """A number and a bar, with a mark at the value of full precision."""
    mark = "" if figure.twin is None else f'<i style="left: {figure.twin:.1%}"></i>'
    bar = f'<span class="bar"><b style="width: {figure.right:.1%}"></b>{mark}</span>'
    return f"{bar}<strong>{figure.right:.1%}</strong> <small>of {figure.of:,}</small>"


def _picture(folder: Path, image: str, text: str) -> str:
    encoded = base64.b64encode((folder / image).read_bytes()).decode()
    return f'<img alt="{html.escape(text)}" title="{html.escape(image)}" src="data:image/png;base64,{encoded}">'


def _card(folder: Path, image: str, caption: str, asked: Iterable[Asked]) -> str:
    rows = "".join(_answer(each) for each in asked)
    return f"<figure>{_picture(folder, image, caption)}<table>{rows}</table></figure>"


def _answer(asked: Asked) -> str:
    right = asked.said == asked.right
    mark = '<td class="right">✓</td>' if right else '<td class="wrong">✗</td>'
    said = html.escape(asked.said) + ("" if right else f" <small>right: {html.escape(asked.right)}</small>")
    return f"<tr>{mark}<th>{html.escape(asked.question)}</th><td>{said}</td></tr>"


def _table(folder: Path, matched: Matched, n: int) -> str:
    """A row for each picture, a column for each caption: within a row, bluer fits better; the best has a frame."""
    numbers = "".join(f"<th>{i + 1}</th>" for i in range(n))
    rows = []
    for i in range(n):
        scores = matched.scores[i, :n]
        low, high, best = float(scores.min()), float(scores.max()), int(scores.argmax())
        frame = "best right" if best == i else "best wrong"
        cells = "".join(
            f'<td class="{frame if j == best else ""}" '
            f'style="background: rgba(79, 143, 192, {(score - low) / (high - low or 1):.2f})">{score:.1f}</td>'
            for j, score in enumerate(scores.tolist())
        )
        rows.append(f"<tr><th>{i + 1} {_picture(folder, matched.images[i], matched.captions[i])}</th>{cells}</tr>")
    listed = "".join(f"<li>{html.escape(caption)}</li>" for caption in matched.captions[:n])
    return f'<table class="scores"><tr><th></th>{numbers}</tr>{"".join(rows)}</table><ol>{listed}</ol>'


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Pictures never seen</title>
<style>
:root {{ color-scheme: light dark; --paper: #fff; --card: #f6f7f9; --text: #1d2329; --quiet: #5c6670; --line: #dde1e6;
  --blue: #3d7fb3; --right: #17807e; --wrong: #c8553d }}
@media (prefers-color-scheme: dark) {{ :root {{ --paper: #14181c; --card: #1d2329; --text: #e6e9ec; --quiet: #9aa5b0;
  --line: #333c45; --blue: #6aaada; --right: #45b8a8; --wrong: #ee8069 }} }}
body {{ font: 15px/1.45 system-ui, sans-serif; color: var(--text); background: var(--paper); max-width: 1240px;
  margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.6rem; margin: 0 }} h2 {{ font-size: 1.1rem; margin: 2.2rem 0 0 }}
p {{ margin: .2rem 0 1rem; color: var(--quiet) }}
small {{ color: var(--quiet); font-size: .85em }}
img {{ image-rendering: pixelated; border-radius: 4px; vertical-align: middle }}
.bar {{ display: block; position: relative; height: 8px; border-radius: 4px; background: var(--line) }}
.bar b {{ display: block; height: 100%; border-radius: 4px; background: var(--blue) }}
.bar i {{ position: absolute; top: -3px; height: 14px; width: 2px; background: var(--text) }}
.figures {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(15rem, 1fr)); gap: 1rem }}
.figures section, figure {{ background: var(--card); border: 1px solid var(--line); border-radius: 8px;
  padding: .9rem 1rem }}
.figures h2 {{ font-size: .95rem; font-weight: 400; margin: 0 0 .7rem }}
.figures strong {{ font-size: 1.9rem; font-weight: 600 }} .figures small:last-child {{ display: block }}
.kinds {{ columns: 20rem; column-gap: 2rem; margin: .6rem 0 }}
.kinds div {{ display: grid; grid-template-columns: 9.5rem 1fr 3.6rem 3.6rem; gap: .6rem; align-items: center;
  break-inside: avoid; font-size: .9rem }}
.kinds strong {{ font-weight: 400; text-align: right }}
.matching {{ display: flex; flex-wrap: wrap; gap: 1rem 2.5rem; align-items: center }}
.scores {{ border-collapse: collapse; font-size: .75rem; font-variant-numeric: tabular-nums }}
.scores th {{ white-space: nowrap; text-align: right; font-weight: 400; padding: 1px .4rem 1px 0 }}
.scores img {{ width: 40px; height: 40px }}
.scores td, .scores tr:first-child th {{ width: 2.6rem; text-align: center; vertical-align: middle; padding: 0 }}
.best {{ outline: 2px solid; outline-offset: -2px }} .best.right {{ outline-color: var(--right) }}
.best.wrong {{ outline-color: var(--wrong) }}
ol {{ margin: 0; font-size: .9rem; line-height: 1.9; padding-left: 1.6rem }}
main {{ display: grid; grid-template-columns: repeat(auto-fill, minmax(min(32rem, 100%), 1fr)); gap: 1rem }}
figure {{ margin: 0; display: flex; gap: 1rem; align-items: flex-start; font-size: .87rem; line-height: 1.35 }}
figure img {{ width: 128px; height: 128px; flex: none }}
figure table {{ width: 100%; border-collapse: collapse }}
figure th {{ text-align: left; font-weight: 400; color: var(--quiet); width: 52%; padding-right: .6rem }}
figure th, figure td {{ vertical-align: top; padding-bottom: .15rem }}
figure .right, figure .wrong {{ width: 1.3em }} figure .right {{ color: var(--right) }}
figure .wrong {{ color: var(--wrong) }}
figure small {{ color: var(--wrong) }}
@media (max-width: 40rem) {{
  .scores {{ width: 100%; table-layout: fixed }} .scores td {{ font-size: 0; width: auto }}
  .scores th {{ font-size: .65rem; padding-right: 2px }} .scores tr:first-child th {{ width: auto }}
  .scores tr:first-child th:first-child {{ width: 3.2rem }}
  .scores img {{ width: 26px; height: 26px }} .scores tr {{ height: 30px }}
  figure {{ flex-direction: column }} figure img {{ align-self: center }}
}}
</style></head><body>
<h1>Pictures never seen</h1>
<p>{pictures} pictures, with combinations that no picture in training had. {took}</p>
<div class="figures">{figures}</div>
<h2>Right answers by kind of question</h2>
<div class="kinds">{kinds}</div>
<h2>Which caption belongs to which picture</h2>
<p>Each row is a picture, each column a caption of the list. Bluer fits better. The best of a row has a frame,
and is right if it lies on the diagonal.</p>
<section class="matching">{table}</section>
<h2>Questions and answers</h2>
<p>The first {shown} pictures. The right answer is shown next to wrong ones.</p>
<main>{cards}</main>
</body></html>
"""
