"""The figures of a run with experts: how often each is chosen."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from bitnet.report.figures import DARK, PALE, PANELS, Panel, smooth
from bitnet.train.runlog import Array, Records, number, series


def of_experts(records: Records) -> tuple[Array, Array]:
    """Tokens seen (n,), and the load of each expert of each layer, relative to the mean: (n, layers, experts)."""
    pairs = [(number(record.get("tokens")), _table(record.get("experts"))) for record in records]
    pairs = [(tokens, loads) for tokens, loads in pairs if loads.size and not math.isnan(tokens)]
    pairs = [(tokens, loads) for tokens, loads in pairs if loads.shape == pairs[-1][1].shape]
    if not pairs:
        return np.empty(0), np.empty((0, 0, 0))
    loads = np.stack([loads for _, loads in pairs])
    return np.array([tokens for tokens, _ in pairs]), loads * loads.shape[-1]


def _table(value: Any) -> Array:
    """A table of numbers with rows of equal length; empty for anything else."""
    rows = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else []
    if not rows or len({len(row) for row in rows}) != 1:
        return np.empty((0, 0))
    table = np.array([[number(each) for each in row] for row in rows]).reshape(len(rows), -1)
    return np.empty((0, 0)) if np.isnan(table).any() else table


def _loads(axes: Any, records: Records) -> bool:
    """For each layer the most and the least chosen expert."""
    tokens, loads = of_experts(records)
    if not len(tokens):
        return False
    layers = loads.shape[1]
    colors = _pale_to_dark(layers)
    for layer in range(layers):
        name = f"layer {layer}" if layer in (0, layers - 1) else "_"
        axes.plot(tokens, loads[:, layer].max(1), lw=1.2, color=colors[layer], label=name)
        axes.plot(tokens, loads[:, layer].min(1), lw=1.2, color=colors[layer], ls="--")
    axes.axhline(1, color="#888888", lw=0.8, ls=":", label="balanced")
    axes.set_ylabel("times the mean, most (solid), least")
    axes.set_ylim(bottom=0)
    axes.legend(frameon=False, ncols=3, fontsize=8, loc="best")
    return True


def _pale_to_dark(n: int) -> Any:
    """n colours."""
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0.85, 0.1, n))


def _balance(axes: Any, records: Records) -> bool:
    tokens, balance = series(records, "balance")
    axes.plot(tokens, balance, lw=0.7, color=PALE)
    axes.plot(tokens, smooth(balance, max(1, len(balance) // 50)), lw=1.2, color=DARK)
    axes.axhline(1, color="#888888", lw=0.8, ls=":")
    axes.set_ylabel("balance, mean of layers")
    return len(balance) > 0


def _load_map(axes: Any, records: Records) -> bool:
    """The last record: layers by experts."""
    _, loads = of_experts(records)
    if not len(loads):
        return False
    table = loads[-1]
    axes.imshow(table, aspect="auto", cmap="RdBu_r", vmin=0, vmax=2)
    axes.set_xlabel("expert")
    axes.set_ylabel("layer")
    for axis in (axes.xaxis, axes.yaxis):
        axis.get_major_locator().set_params(integer=True, min_n_ticks=1)
    axes.grid(False)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    for (layer, expert), value in np.ndenumerate(table) if table.shape[0] <= 16 >= table.shape[1] else ():
        color = "white" if abs(value - 1) > 0.7 else "black"
        axes.text(expert, layer, f"{value:.2f}", ha="center", va="center", fontsize=8, color=color)
    return True


EXPERT_PANELS = (
    Panel(
        "Experts: load of the most and the least chosen",
        "1 is the mean; an expert near 0 is dead weight, one at the number of experts divided by those per token is "
        "chosen by every token. Raise --balance-loss when the lines diverge.",
        _loads,
    ),
    Panel(
        "Experts: balance",
        "The loss that --balance-loss weighs: 1 when all are chosen equally often, up to the number of experts when "
        "one gets all tokens. It should stay within some tenths of 1.",
        _balance,
    ),
    Panel(
        "Now, by layer: load of each expert",
        "The last record; 1 is the mean, red is above, and dark blue is hardly ever.",
        _load_map,
    ),
)


def panels(records: Records) -> tuple[Panel, ...]:
    """The panels of a run; more with experts."""
    return PANELS + (EXPERT_PANELS if any("experts" in record for record in records) else ())
