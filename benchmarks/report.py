"""The output of every benchmark: figures as JSON, a table in Markdown, a chart as PNG, with the machine, the commit and
the command that produced them."""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from bitnet_runtime import BitnetError, __version__, machine

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
COLORS = ("#d98032", "#9aa7b4", "#1f4e79")  # the last is ours


class Panel(NamedTuple):
    """Groups of bars: one group for each label, one bar in it for each series, at most three."""

    title: str
    labels: Sequence[str]
    series: Mapping[str, Sequence[float]]
    limit: Sequence[float] | None = None  # a line above each group: what the machine allows
    unit: str = ""  # unit of the numbers on the bars


class BenchmarkError(RuntimeError, ValueError):
    """Ends a benchmark; its message says why."""


def run(main: Callable[[], int | None]) -> NoReturn:
    """End the program with what `main` returns, with a line if something is missing or failed, or as Ctrl-C does."""
    try:
        sys.exit(main())
    except (BenchmarkError, BitnetError, OSError, ImportError, subprocess.CalledProcessError) as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit(130)


def check_program(parser: argparse.ArgumentParser, flag: str, path: Path | str | None) -> None:
    """Before anything takes long: whether the program that an option names can be run."""
    if path and not shutil.which(path):
        parser.error(f"{flag} is {path}, which is no program")


def origin(command: str) -> dict[str, Any]:
    """The origin of figures. `command` reproduces them when run in the root of the repository."""
    return {
        "command": command,
        "commit": commit(),
        "version": __version__,
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "cpu": machine.cpu_name(),
        "cores": os.cpu_count(),
        "isas": machine.available_isas(),
        "memory_gb": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9,
        "system": f"{platform.system()} {platform.machine()}, Python {platform.python_version()}",
        "load_at_start": os.getloadavg()[0],
    }


def commit() -> str:
    """The commit, with a + if tracked files differ from it."""
    try:
        git = ["git", "-C", str(ROOT)]
        commit = subprocess.run([*git, "rev-parse", "--short=12", "HEAD"], capture_output=True, text=True, check=True)
        changed = subprocess.run([*git, "diff", "--quiet", "HEAD"], capture_output=True).returncode
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    return commit.stdout.strip() + ("+" if changed else "")


def write(
    folder: Path,
    name: str,
    results: Mapping[str, Any],
    text: str,
    picture: Sequence[Panel] | Callable[[Path], None] | None,
) -> None:
    """Write NAME.json, NAME.md and NAME.png to a folder. results["origin"] is what `origin` returned.

    picture: panels of a bar chart, or a function that draws another chart to a file; None: no picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shown = "" if picture is None else f"\n![{name}]({name}.png)\n"
    (folder / f"{name}.json").write_text(json.dumps(results, indent=1) + "\n")
    (folder / f"{name}.md").write_text(f"{text}\n\n{_footer(results['origin'])}\n{shown}")
    if picture is None:
        return
    if callable(picture):
        return picture(folder / f"{name}.png")
    origin = results["origin"]
    title = f"{name}: {origin['cpu']}, {origin['cores']} cores, commit {origin['commit']}"
    chart(folder / f"{name}.png", picture, title)


def _footer(origin: Mapping[str, Any]) -> str:
    return "\n".join(
        [
            f"- machine: {origin['cpu']}, {origin['cores']} cores, {origin['memory_gb']:.0f} GB, {origin['system']}; "
            f"tiers {', '.join(origin['isas'])}; load average at start {origin['load_at_start']:.1f}",
            f"- commit: {origin['commit']}, {origin['date']}",
            f"- command: `{origin['command']}`",
        ]
    )


def table(head: Sequence[str], rows: Sequence[Sequence[Any]]) -> str:
    """A Markdown table; columns of numbers are right-aligned. Floats have three digits or more."""
    cells = [[cell if isinstance(cell, str) else number(cell) for cell in row] for row in rows]
    text = [column for column in range(len(head)) if any(isinstance(row[column], str) for row in rows)]
    rule = ["---" if column in text else "---:" for column in range(len(head))]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(head), rule, *cells])


def number(value: float) -> str:
    """Three significant digits, and all digits before the decimal point."""
    return str(value) if isinstance(value, int) else f"{value:,.{max(0, 2 - len(str(int(abs(value)))) + 1)}f}"


def pyplot() -> Any:
    """matplotlib for files, without a display; imported when something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save(figure: Any, path: Path) -> None:
    """Write a figure, without the top and right frame of its axes, and close it."""
    for axis in figure.axes:
        axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(path, dpi=130)
    pyplot().close(figure)


def chart(path: Path, panels: Sequence[Panel], title: str) -> None:
    """Bar charts side by side."""
    plt = pyplot()
    columns = min(len(panels), 2)
    rows = -(-len(panels) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(6 * columns, 3.4 * rows), squeeze=False, layout="constrained")
    for axis in axes.flat[len(panels) :]:
        axis.set_visible(False)
    for axis, panel in zip(axes.flat, panels, strict=False):
        _draw(axis, panel)
    figure.suptitle(title, fontsize=9, color="gray")
    save(figure, path)


def _draw(axis: Any, panel: Panel) -> None:
    width = 0.8 / len(panel.series)
    for i, (name, values) in enumerate(panel.series.items()):
        places = [group + (i - (len(panel.series) - 1) / 2) * width for group in range(len(values))]
        bars = axis.bar(places, values, 0.94 * width, label=name, color=COLORS[i - len(panel.series)])
        texts = ["" if value != value else number(value) + panel.unit for value in values]  # NaN: not measured
        axis.bar_label(bars, texts, fontsize=8, padding=1)
    if panel.limit:
        axis.hlines(
            panel.limit,
            [group - 0.45 for group in range(len(panel.limit))],
            [group + 0.45 for group in range(len(panel.limit))],
            colors="black", linestyles="dotted", label="limit of the machine",
        )  # fmt: skip
    axis.set_title(panel.title, fontsize=10, loc="left")
    axis.set_xticks(range(len(panel.labels)), panel.labels)
    axis.margins(y=0.3)  # room for numbers and legend
    axis.set_ylim(bottom=0)
    if len(panel.series) > 1 or panel.limit:
        axis.legend(fontsize=8, frameon=False)
