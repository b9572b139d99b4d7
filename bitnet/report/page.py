"""One page about a run, as HTML that needs no other file, or as a PNG.

It only reads, so it can be made while the run continues. In place of anything that is missing or damaged,
the page says so.
"""

from __future__ import annotations

import base64
import html
import statistics
import textwrap
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet import process
from bitnet.report.experts import panels
from bitnet.report.figures import Panel
from bitnet.report.output import LARGEST, ReportError, check_out, printable, put, pyplot, saved
from bitnet.train import runlog

if TYPE_CHECKING:
    from bitnet.train.checkpoint import Checkpoint

Facts = dict[str, str]


def write(run: Path, out: Path, prompt: str = "", tokens: int = 100) -> None:
    """Write the page about a run, with a sample of `tokens` tokens that continues the prompt.

    Raises ReportError.
    """
    check_out(out)
    if not 0 <= tokens <= 4096:
        raise ReportError(f"--tokens is {tokens}, expected 0 to 4096")
    if not (run / "log.jsonl").is_file():
        raise ReportError(f"{run} has no log.jsonl, expected a run folder of `bitnet train`")
    records = runlog.read(run / "log.jsonl")
    if not records:
        raise ReportError(f"{run}/log.jsonl holds no step yet; wait for the first")

    def page() -> bytes:
        checkpoint, problem = _newest(run)
        facts = summary(run, records) | _of_checkpoint(checkpoint, problem)
        title, text = f"bitnet report: {run.resolve().name}", sample(checkpoint, problem, prompt, tokens)
        return as_html(title, facts, text, records) if out.suffix == ".html" else as_png(title, facts, text, records)

    put(out, page)


def summary(run: Path, records: runlog.Records) -> Facts:
    """The facts at the top of the page, by name."""
    finished = any(r.get("final") for r in records)
    state = "finished" if finished else "running" if process.is_locked(run) else "stopped before its end"
    facts = {"state": state, "steps": f"{max(r['step'] for r in records):,}"}
    tokens, seconds = runlog.series(records, "seconds")
    if len(tokens) and seconds[-1] > 0:
        facts["tokens"] = f"{tokens[-1]:,.0f} in {seconds[-1] / 60:,.1f} min, {tokens[-1] / seconds[-1]:,.0f} a second"
    learnt = "nats_per_pair" if len(runlog.series(records, "preference")[1]) else "nats_per_token"
    checks = [record for record in records if "validation" in record]  # a few of very many
    measured = (name for name in runlog.LOSSES if len(runlog.series(checks, "validation", name)[1]))
    each = next(measured, learnt).removeprefix("nats_per_")
    if len(losses := runlog.series(records, "loss")[1]):
        facts["training loss"] = f"{statistics.median(losses[-20:]):.4f} nats/{each} (median of the last 20 steps)"
    if len(nats := runlog.held_out(records)[1]):
        facts["validation loss"] = f"{nats[-1]:.4f} nats/{each}"
        for name, shown in (("bits_per_byte", "{:.4f} bits/byte"), ("accuracy", "{:.1%} right"),
                            ("right", "{:.1%} of the answers right"), ("margin", "margin {:.3f}"),
                            ("chosen", "reward of the chosen {:+.3f}"),
                            ("recall", "recall@1 {:.1%}"), ("recall_back", "back {:.1%}")):  # fmt: skip
            if len(found := runlog.series(checks, "validation", name)[1]):
                facts["validation loss"] += ", " + shown.format(found[-1])
    if asked := next((r["tasks"] for r in reversed(records) if isinstance(r.get("tasks"), dict)), None):
        facts["tasks"] = ", ".join(f"{name} {value:.4g}" for name, value in asked.items() if isinstance(value, float))
    if skipped := sum("skipped" in r for r in records):
        facts["skipped steps"] = f"{skipped:,}"
    return facts


def _newest(run: Path) -> tuple[Checkpoint | None, str]:
    """The newest intact checkpoint, and what is wrong with newer ones; or why there is none."""
    from bitnet.train.checkpoint import Checkpoint

    damaged: list[str] = []
    try:
        return Checkpoint.open(run, damaged.append), "; ".join(damaged)
    except (ValueError, OSError) as error:
        return None, str(error)


def _of_checkpoint(checkpoint: Checkpoint | None, problem: str) -> Facts:
    """Model and settings."""
    if checkpoint is None:
        return {"checkpoint": problem}
    try:
        config, settings = checkpoint.config, checkpoint.state.get("settings")
    except (ValueError, TypeError, OSError) as error:  # damaged, or removed by the run this very moment
        return {"checkpoint": str(error)}
    shown = ("lr", "schedule", "batch", "accumulate", "weight_decay", "precision", "seed")
    said = settings if isinstance(settings, dict) else {}
    return {
        "checkpoint": "; ".join([checkpoint.folder.name, *([problem] if problem else [])]),
        "model": f"{config.n_layers} layers of width {config.dim}, {config.ternary_weights:,} ternary weights, "
        f"vocabulary {config.vocab_size:,}",
        "settings": ", ".join(f"{name} {said[name]}" for name in shown if name in said),
    }


def sample(checkpoint: Checkpoint | None, problem: str, prompt: str, n: int) -> str:
    """A prompt continued by up to n tokens, or in brackets the reason why there is no sample."""
    from bitnet.data import tokenizer

    if not n:
        return "[not requested: --tokens 0]"
    if checkpoint is None:
        return f"[no sample: {problem}]"
    try:
        config = checkpoint.config
        if not config.has_head or config.mask == "bidirectional":
            return "[none: this model does not predict the next token]"
        if config.ternary_weights > LARGEST:
            return f"[none: {config.ternary_weights:,} ternary weights are for `bitnet export` and `bitnet generate`]"
        words, generation = checkpoint.words, checkpoint.generation
        first = tokenizer.separator(words, generation)
        ids = [first, *next(tokenizer.encoder(words)([prompt]))]
        made = _generate(checkpoint.model, ids, n, {first, *(generation.get("eos_token_ids") or [])})
    except (ValueError, TypeError, OSError) as error:
        return f"[no sample: {error}]"
    return str(words.decode(made[1:]))


def _generate(model: Any, ids: list[int], n: int, ends: Collection[int]) -> list[int]:
    """With up to n more tokens at temperature 0.8, top-k 40, seed 0, until the document ends."""
    import torch

    random = torch.Generator().manual_seed(0)
    with torch.inference_mode():
        for made in range(n):
            logits = model(torch.tensor([ids[-model.config.max_context :]]))[0, -1]
            likeliest, tokens = logits.topk(min(40, len(logits)))
            chosen = int(tokens[torch.multinomial((likeliest / 0.8).softmax(-1), 1, generator=random)])
            if made and chosen in ends:
                break
            ids = [*ids, chosen]
    return ids


# ---- pages ----


def as_html(title: str, facts: Facts, text: str, records: runlog.Records) -> bytes:
    rows = "".join(f"<tr><th>{html.escape(k)}</th><td>{html.escape(v)}</td></tr>" for k, v in facts.items())
    figures = "".join(
        f"<figure><h2>{html.escape(panel.title)}</h2><p>{html.escape(panel.reading)}</p>"
        f'<img alt="{html.escape(panel.title)}" src="data:image/png;base64,{_encoded(panel, records)}"></figure>'
        for panel in panels(records)
    )
    return _PAGE.format(
        title=html.escape(printable(title)), rows=rows, figures=figures, text=html.escape(printable(text))
    ).encode("utf-8", errors="replace")


_PAGE = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>{title}</title>
<style>
body {{ font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1280px; margin: 2rem auto; padding: 0 1rem }}
h1 {{ font-size: 1.4rem }} h2 {{ font-size: 1rem; margin: 0 }}
th {{ text-align: left; padding-right: 1.5rem; font-weight: 600; vertical-align: top; white-space: nowrap }}
main {{ display: grid; grid-template-columns: repeat(auto-fit, minmax(min(34rem, 100%), 1fr)); gap: 2rem }}
figure {{ margin: 0; display: flex; flex-direction: column }}
figure p {{ margin: .2rem 0 .5rem; color: #555; font-size: .9rem; flex: 1 }}
img {{ width: 100% }}
pre {{ background: #f5f5f2; padding: 1rem; white-space: pre-wrap; overflow-wrap: anywhere }}
</style></head><body>
<h1>{title}</h1><table>{rows}</table>
<h2 style="margin-top: 1.5rem">Sample</h2><pre>{text}</pre>
<main>{figures}</main>
</body></html>
"""


def as_png(title: str, facts: Facts, text: str, records: runlog.Records) -> bytes:
    plt = pyplot()
    lines = [part for line in printable(text).expandtabs(4).split("\n") for part in textwrap.wrap(
        line, 150, drop_whitespace=False, replace_whitespace=False) or [""]][:40]  # fmt: skip
    head = [f"{name:16}{value}" for name, value in facts.items()]
    rows = (len(panels(records)) + 1) // 2
    tops = 0.21 * (len(head) + 1) + 0.3, 0.2 * (len(lines) + 1) + 0.5
    figure = plt.figure(figsize=(15, 4.3 * rows + sum(tops)), layout="constrained")
    figure.get_layout_engine().set(h_pad=0.14, w_pad=0.1)
    grid = figure.add_gridspec(rows + 2, 2, height_ratios=[tops[0], *[4.3] * rows, tops[1]])
    _words(figure.add_subplot(grid[0, :]), title, head)
    for i, panel in enumerate(panels(records)):
        axes = figure.add_subplot(grid[1 + i // 2, i % 2])
        reading = textwrap.fill(panel.reading, 105)
        axes.set_title(reading, loc="left", fontsize=9, color="#555555")
        above = 12 * (reading.count("\n") + 1) + 8
        axes.annotate(panel.title, (0, 1), (0, above), xycoords="axes fraction", textcoords="offset points",
                      weight="bold", fontsize=11)  # fmt: skip
        _draw(panel, axes, records)
    _words(figure.add_subplot(grid[-1, :]), "Sample", lines)
    return saved(figure)


def _words(axes: Any, title: str, lines: list[str]) -> None:
    axes.set_axis_off()
    axes.text(0, 1, title, weight="bold", fontsize=12, va="top", parse_math=False)
    axes.annotate("\n".join(map(printable, lines)), (0, 1), (0, -20), xycoords="axes fraction",
                  textcoords="offset points", va="top", family="monospace", fontsize=9, parse_math=False)  # fmt: skip


def _encoded(panel: Panel, records: runlog.Records) -> str:
    figure, axes = pyplot().subplots(figsize=(8, 3.6), layout="constrained")
    _draw(panel, axes, records)
    return base64.b64encode(saved(figure)).decode()


def _draw(panel: Panel, axes: Any, records: runlog.Records) -> None:
    axes.grid(alpha=0.2)
    axes.spines[["top", "right"]].set_visible(False)
    drawn = panel.draw(axes, records)
    if drawn and axes.get_xlabel() == "" and not axes.images:
        axes.set_xlabel("tokens")
        axes.xaxis.set_major_formatter(lambda value, _: _short(value))
    if not drawn:
        axes.set_axis_off()
        axes.text(0.5, 0.5, "nothing recorded yet", ha="center", va="center", color="#888888")


def _short(value: float) -> str:
    for size, letter in ((1e12, " T"), (1e9, " G"), (1e6, " M"), (1e3, " k")):
        if abs(value) >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
