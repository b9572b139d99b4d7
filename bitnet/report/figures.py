"""The figures of `bitnet report`, drawn from the records of log.jsonl (`bitnet.train.runlog`).

The log may be of a running run, and may be damaged: values that should be finite numbers but are not are left out,
and a figure without any says so.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from bitnet.train.runlog import Array, Records, held_out, number, series, value_at

ROLES = {"q": "#1f5fa8", "k": "#56a0d3", "v": "#17807e", "o": "#7a4fa3",
         "gate": "#c8553d", "up": "#e09f3e", "down": "#8a6d3b"}  # fmt: skip
PALE, DARK, ACCENT = "#9db4c8", "#12446b", "#b0703c"


@dataclass(frozen=True)
class Panel:
    """A figure, and how to read it. `draw` gets matplotlib axes and returns whether it had anything to draw."""

    title: str
    reading: str
    draw: Callable[[Any, Records], bool]


# ---- numbers out of records ----


def of_layers(records: Records, quantity: str) -> tuple[Array, dict[str, Array]]:
    """Tokens seen (n,), and for each role the values of a quantity of `bitnet.train.telemetry`, (n, layers).

    Roles with the same values, such as the inputs of q, k and v, are merged: "q k v".
    """
    rows = [(number(r.get("tokens")), value_at(r, ("layers", quantity))) for r in records]
    rows = [(tokens, values) for tokens, values in rows if isinstance(values, dict) and not math.isnan(tokens)]
    if not rows:
        return np.empty(0), {}
    found: dict[str, Array] = {}
    for role in [role for role in ROLES if isinstance(rows[-1][1].get(role), list)]:
        n = len(rows[-1][1][role])
        lists = [values.get(role) for _, values in rows]
        lines = [list(map(number, v)) if isinstance(v, list) and len(v) == n else [math.nan] * n for v in lists]
        array = np.array(lines).reshape(len(rows), n)
        same = next((name for name, other in found.items() if np.array_equal(other, array, equal_nan=True)), "")
        if same:
            found = {f"{name} {role}" if name == same else name: other for name, other in found.items()}
        elif n and not np.isnan(array).all():
            found[role] = array
    return np.array([tokens for tokens, _ in rows]), found


def smooth(values: Array, width: int) -> Array:
    """Mean over the last `width` values, or over all so far if there are fewer."""
    sums = np.concatenate([[0.0], np.cumsum(values)])
    ends = np.arange(1, len(values) + 1)
    starts = np.maximum(ends - width, 0)
    means: Array = (sums[ends] - sums[starts]) / (ends - starts)
    return means


# ---- figures ----


def _losses(axes: Any, records: Records) -> bool:
    tokens, losses = series(records, "loss")
    checked, validation = held_out(records)
    if len(losses):
        axes.plot(tokens, losses, lw=0.7, color=PALE, label="training, each step")
        axes.plot(tokens, smooth(losses, max(1, len(losses) // 50)), lw=1.2, color=ACCENT, label="training, mean")
    if len(validation):
        axes.plot(checked, validation, marker="o", ms=3.5, lw=1.4, color=DARK, label="validation")
    skipped, _ = series([r for r in records if "skipped" in r], "step")
    for at in skipped:
        axes.axvline(at, color="#d02020", lw=0.6, alpha=0.6, label="_" if at != skipped[0] else "skipped step")
    axes.set_ylabel("nats")
    if len(losses) + len(validation) + len(skipped):
        axes.legend(frameon=False, loc="upper right")
    return len(losses) + len(validation) > 0


def _rates(axes: Any, records: Records) -> bool:
    tokens, norms = series(records, "gradient_norm")
    at, rates = series(records, "lr")
    axes.plot(tokens, norms, lw=0.7, color=DARK)
    axes.set_ylabel("gradient norm", color=DARK)
    if (norms > 0).any():
        _log_scale(axes)
    other = axes.twinx()
    other.plot(at, rates, lw=1.2, color=ACCENT)
    other.set_ylabel("learning rate", color=ACCENT)
    other.set_ylim(bottom=0)
    other.yaxis.get_major_formatter().set_useOffset(False)
    other.yaxis.get_major_formatter().set_scientific(False)
    other.spines["top"].set_visible(False)
    return len(norms) + len(rates) > 0


def _lines(quantity: str, label: str, *, percent: bool = False, log: bool = False, normal: float = 0.0) -> Any:
    """Draws a quantity over the run, a line for each role: the mean of its layers. normal: value of normal weights."""

    def draw(axes: Any, records: Records) -> bool:
        tokens, roles = of_layers(records, quantity)
        factor = 100 if percent else 1
        marker = "o" if len(tokens) < 40 else ""
        positive = False
        for name, values in roles.items():
            mean = factor * values.mean(axis=1)
            positive = positive or bool((mean > 0).any())
            axes.plot(tokens, mean, marker=marker, ms=2.5, lw=1.3, color=ROLES[name.split()[0]], label=name)
        if normal and roles:
            axes.axhline(factor * normal, color="#888888", lw=0.8, ls=":", label="normal")
        if log and positive:
            _log_scale(axes)
        axes.set_ylabel(label)
        if roles:
            axes.legend(frameon=False, ncols=4, fontsize=8, loc="best")
        return bool(roles)

    return draw


def _map(quantity: str, *, percent: bool = False, least: float = 0.0) -> Any:
    """Draws the last record of a quantity as a table, coloured where a layer differs from the others of its role.

    least: smaller values count as this one, so that they do not differ.
    """

    def draw(axes: Any, records: Records) -> bool:
        roles = of_layers(records, quantity)[1]
        if not roles:
            return False
        layers = max(values.shape[1] for values in roles.values())
        table = np.full((layers, len(roles)), np.nan)
        for column, values in enumerate(roles.values()):
            table[: values.shape[1], column] = values[-1] * (100 if percent else 1)
        with np.errstate(all="ignore"):  # a column of zeros, or an empty one
            shown = np.maximum(table, least)
            odd = np.nan_to_num(np.log2(shown / np.nanmedian(shown, axis=0)), posinf=1, neginf=-1)
        axes.imshow(odd, aspect="auto", cmap="RdBu_r", vmin=-1.5, vmax=1.5)
        axes.set_xticks(range(len(roles)), list(roles))
        axes.yaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
        axes.set_ylabel("layer")
        axes.grid(False)
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        for (layer, role), value in np.ndenumerate(table) if layers <= 16 else ():
            axes.text(role, layer, f"{value:.3g}", ha="center", va="center", fontsize=8)
        return True

    return draw


def _log_scale(axes: Any) -> None:
    """A logarithmic y axis with plain numbers, more of them if its range is small."""
    from matplotlib.ticker import LogLocator, NullFormatter

    axes.set_yscale("log")
    low, high = axes.get_ylim()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 1.5, 2, 3, 5) if high < 100 * low else (1,)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")
    axes.yaxis.set_minor_formatter(NullFormatter())


PANELS = (
    Panel(
        "Loss",
        "Validation should fall with training and fall fastest while the learning rate goes down at the end; "
        "a widening gap means memorizing, a jump that does not recover means too high a learning rate.",
        _losses,
    ),
    Panel(
        "Learning rate and gradient norm",
        "The norm, before clipping, falls during the warm-up and stays level; look here for peaks, or a rise over "
        "many steps, when the loss jumps.",
        _rates,
    ),
    Panel(
        "Zeros: share of ternary codes that are 0",
        "Normally distributed weights have 31 %, published trained ones 17 to 34 %; a role that runs to 0 has become "
        "binary, one that runs to 100 % is dying.",
        _lines("zeros", "% of codes", percent=True, normal=0.3101),
    ),
    Panel(
        "Flips: share of codes that one step changes",
        "Follows the learning rate up and down by some powers of ten; near 0 from the start means that the weights do "
        "not move (raise --lr), high until the end that they never settle (lower it, or warm down longer).",
        _lines("flips", "% of codes in one step", percent=True, log=True),
    ),
    Panel(
        "Near the threshold: weights within 0.05 γ of 0.5 γ",
        "The weights whose codes may flip next, 5.9 % for normal weights; far above that, weights crowd at the "
        "threshold and go back and forth instead of deciding.",
        _lines("near", "% of weights", percent=True, normal=0.0588),
    ),
    Panel(
        "γ: scale of the weights",
        "Grows while weights follow the gradient and shrinks under weight decay; the larger γ is, the less a step "
        "of the same learning rate can flip.",
        _lines("gamma", "γ, mean of layers", log=True),
    ),
    Panel(
        "Absmax: largest input of the ternary layers",
        "The largest value of a token becomes 127; after a norm the usual one is near 1, so at an absmax "
        "of 30 it keeps 4 of 127 steps, and a curve that climbs without end loses precision to outliers.",
        _lines("absmax", "largest |x|", log=True),
    ),
    Panel(
        "Now, by layer: zeros, %",
        "The last record; red is above and blue below the median of the role, full colour from a factor of 3 on.",
        _map("zeros", percent=True),
    ),
    Panel(
        "Now, by layer: flips in one step, %",
        "Red layers still change more than others of their role; a cell of 0 while others move has no gradient. Below "
        "0.1 % all have settled, and none is coloured.",
        _map("flips", percent=True, least=0.1),
    ),
    Panel(
        "Now, by layer: absmax",
        "Inputs of down are the largest, most of all after squared ReLU; a layer in full red has outliers.",
        _map("absmax"),
    ),
)
