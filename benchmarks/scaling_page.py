"""The page and the chart of benchmarks/scaling.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import report
from scaling_plan import ARMS

NAMES = {"full": "full precision", "ternary": "ternary"}
COLORS = {"full": "#d98032", "ternary": "#1f4e79"}
LINES = ("-", "--", ":", "-.")

PUBLISHED = (
    ("TriLM 99M", "+0.31", "3,030", "from fits of 99M to 4B; weights alone quantized, AdamW, web text"),
    ("TriLM at 10M", "+0.48", "30,000", "the same fits, far below what they were fitted on"),
    ("ParetoQ 125M", "+0.28", "", "fine-tuned from full precision, weights alone, a scale for each row; WikiText"),
    ("BitNet 700M", "+0.043", "143", "weights and activations, AdamW; its baseline's rate is disputed by TriLM"),
)
"""Nats per token with tokenizers of 32,000 tokens or more; tokens per parameter; other differences."""


def plus_minus(value: float, half: float | None, sign: str = "") -> str:
    return f"{value:{sign}.4f}" + (f" ± {half:.4f}" if half is not None else " (one seed)")


def losses(results: dict[str, Any]) -> str:
    head = ["size", "tokens a parameter", "arm", "parameters", "without table", "tokens", "steps", "FLOPs", "MB",
            "rate", "nats/token", "bits/byte"]  # fmt: skip
    return report.table(head, [
        [
            row["size"], f"{row['each']:g}", NAMES[row["arm"]], f"{row['parameters']:,}", f"{row['body']:,}",
            f"{row['tokens']:,}", f"{row['steps']:,}", f"{row['flops']:.2e}", f"{row['bytes'] / 1e6:.2f}",
            f"{row['lr']:g}" + ("" if row["bracketed"] else " *"), plus_minus(row["loss"], row["half"]),
            plus_minus(row["bits_per_byte"], row["bits_half"]),
        ] for row in results["rows"]
    ])  # fmt: skip


def gaps(results: dict[str, Any]) -> str:
    head = ["size", "tokens a parameter", "gap, nats/token", "bits/byte", "relative", "seeds", "parameter multiplier"]
    return report.table(head, [
        [
            row["size"], f"{row['each']:g}", plus_minus(row["gap"], row["half"], "+"), f"{row['bits']:+.4f}",
            f"{row['share']:+.1%}", row["seeds"], f"{row['multiplier']:.2f}" if row["multiplier"] else "beyond",
        ] for row in results["gaps"]
    ])  # fmt: skip


def fits(results: dict[str, Any]) -> str:
    lines = []
    for each in results["fits"]:
        what = "all parameters" if each["of"] == "parameters" else "parameters without the table"
        lines.append(
            f"- N: {what}: gap = {each['c']:.3g} · N^{-each['a']:.3f} · D^{-each['b']:.3f}, of {each['cells']} cells, "
            f"which it meets within {each['residual']:.4f} (root mean square)"
        )
        lines += [
            f"  - held out, {cell['size']} at {cell['each']:g}: predicted {cell['predicted']:+.4f}, measured "
            f"{plus_minus(cell['gap'], cell['half'], '+')}" for cell in each["held_out"]
        ]  # fmt: skip
    return "\n".join(lines) or "Too few cells are finished for a fit."


def rates(results: dict[str, Any]) -> str:
    return "\n".join(
        f"- {row['size']} at {row['each']:g}, {NAMES[row['arm']]}: "
        + ", ".join(f"{rate:g}: {loss:.4f}" for rate, loss in row["tried"])
        for row in results["rows"]
    )


def markdown(results: dict[str, Any]) -> str:
    published = report.table(["model", "gap, nats/token", "tokens a parameter", "differs in"], list(PUBLISHED))
    text = results["text"]
    sizes = ", ".join(f"{name} {said['bytes'] / 1e6:.0f} MB of {len(said['projects'])} projects"
                      for name, said in text["texts"].items())  # fmt: skip
    others = ", ".join(f"{name} {bits:.3f}" for name, bits in text["compressed"].items())
    return (
        "# Ternary against full precision, by size and length\n\n"
        f"{results['runs']} runs of `bitnet train` on {', '.join(results['devices'])}, {results['flops']:.2e} FLOPs, "
        f"commit {', '.join(results['commits'])}. Text: {sizes}. Rates are chosen on the selection set, losses are of "
        "the report set. Intervals: 95 %, Student's t over seeds; gaps are paired by seed.\n\n"
        f"{losses(results)}\n\n"
        "MB: 2 bits a ternary weight and int8 tables, or fp16. FLOPs: 6 for each parameter and token. Bits/byte of the "
        f"report set by compressors that have learnt from nothing: {others}. A rate with * "
        f"was not tried with its half and its double.\n\n## The gap\n\n{gaps(results)}\n\n"
        "Parameter multiplier: parameters of the ternary model over those of a full-precision one of equal loss, both "
        "at the same tokens a parameter, read between the sizes measured.\n\n"
        f"## A law for it\n\n{fits(results)}\n\n## Published figures\n\n{published}\n\n"
        f"## Loss of seed 0 by rate, selection set\n\n{rates(results)}"
    )


Place = Callable[[dict[str, Any]], float]


def draw(file: Path, results: dict[str, Any]) -> None:
    """Plot the loss against tokens, parameters, FLOPs and bytes; the gap against parameters; the rates."""
    plt = report.pyplot()
    figure, axes = plt.subplots(2, 3, figsize=(14, 7.5), layout="constrained")
    lengths = sorted({row["each"] for row in results["rows"]})
    line = {each: LINES[i % len(LINES)] for i, each in enumerate(lengths)}
    places: dict[str, Place] = {
        "tokens": lambda row: float(row["tokens"]), "parameters": lambda row: float(row["parameters"]),
        "FLOPs": lambda row: float(row["flops"]), "bytes of the model": lambda row: float(row["bytes"]),
    }  # fmt: skip
    for axis, (label, place) in zip(axes.flat, places.items(), strict=False):
        joined = "size" if label == "tokens" else "each"  # key of the points of one line
        for arm in ARMS:
            mine = [row for row in results["rows"] if row["arm"] == arm]
            for key in dict.fromkeys(row[joined] for row in mine):
                points = sorted((place(row), row["loss"], row["half"] or 0.0) for row in mine if row[joined] == key)
                x, y, error = zip(*points, strict=True)
                style = "-" if joined == "size" else line[key]
                axis.errorbar(x, y, error, marker="o", ms=4, ls=style, color=COLORS[arm], capsize=2)
        axis.set(xlabel=label, ylabel="nats per token", xscale="log")
    for arm in ARMS:
        axes[0][0].plot([], [], color=COLORS[arm], label=NAMES[arm])
    for each in lengths:
        axes[0][1].plot([], [], color="gray", ls=line[each], label=f"{each:g} tokens a parameter")
    _gaps(axes[1][1], results, line)
    _rates(axes[1][2], results, line)
    for axis in axes.flat:
        axis.grid(alpha=0.2)
        axis.spines[["top", "right"]].set_visible(False)
        if axis.get_legend_handles_labels()[0]:
            axis.legend(frameon=False, fontsize=8)
    figure.suptitle(f"{file.stem}: {', '.join(results['devices'])}", fontsize=9, color="gray")
    figure.savefig(file, dpi=110)
    plt.close(figure)


def _rates(axis: Any, results: dict[str, Any], line: dict[float, str]) -> None:
    """Plot how much worse each rate is than the best of its cell and arm."""
    for row in results["rows"]:
        rates, losses = zip(*row["tried"], strict=True)
        over = [loss - min(losses) for loss in losses]
        axis.plot(rates, over, marker="o", ms=3, ls=line[row["each"]], color=COLORS[row["arm"]])
    known = sorted({rate for row in results["rows"] for rate, _ in row["tried"]})
    axis.set(xlabel="learning rate", ylabel="nats per token above the best rate", xscale="log")
    axis.set_xticks(known, [f"{rate:g}" for rate in known])
    axis.minorticks_off()


def _gaps(axis: Any, results: dict[str, Any], line: dict[float, str]) -> None:
    for each in dict.fromkeys(row["each"] for row in results["gaps"]):
        rows = sorted((r["parameters"], r["gap"], r["half"] or 0.0) for r in results["gaps"] if r["each"] == each)
        x, y, error = zip(*rows, strict=True)
        axis.errorbar(x, y, error, marker="o", ms=4, ls=line[each], color=COLORS["ternary"], capsize=2)
    for fit in results["fits"][:1]:
        sizes = {row["size"]: row["parameters"] for row in results["gaps"]}
        x = [sizes[cell["size"]] for cell in fit["held_out"]]
        axis.plot(x, [cell["predicted"] for cell in fit["held_out"]], "x", color="black", label="predicted by the fit")
    axis.set(xlabel="parameters", ylabel="gap, nats per token", xscale="log")
