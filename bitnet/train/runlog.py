"""The log of a run: log.jsonl, one object per step or evaluation, and loss.png.

Every record has step, tokens and seconds. The record of a step has loss, lr and gradient_norm, sometimes
layers (`bitnet.train.telemetry`), or in skipped the reason why the step was not made; that of an evaluation
has validation and zeros. With a draft, steps have its loss, draft, and evaluations guesses (docs/drafts.md).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bitnet.process import written
from bitnet.train.reporting import Board
from bitnet_runtime.terminal import escape

Records = Sequence[dict[str, Any]]
Array = NDArray[np.float64]

LOSSES = ("nats_per_token", "nats_per_pair", "nats_per_guess")
"""The names of the loss in evaluations; the objective decides which is there."""
PLOTTED = ("tokens", "loss", "lr", "validation")


class Log:
    """Appends to log.jsonl. Opened at step n, it first drops the records after n, and the final one at n.

    board: receives the same numbers.
    """

    def __init__(self, file: Path, step: int, board: Board | None) -> None:
        self._board = board
        with written(file) as out:
            before = (r for r in each(file) if r["step"] <= step and not r.get("final"))
            out.writelines(json.dumps(r).encode() + b"\n" for r in before)
        self._out = file.open("a", encoding="utf-8", buffering=1)

    def write(self, record: dict[str, Any]) -> None:
        self._out.write(json.dumps(record) + "\n")
        if self._board:
            self._board.add(dict(scalars(record)), record["step"])

    def close(self) -> None:
        """It may be called again, though boards end once."""
        self._out.close()
        board, self._board = self._board, None
        if board:
            board.close()


class Silent(Log):
    """The log of all processes but the first, which writes nothing."""

    def __init__(self) -> None:
        pass

    def write(self, record: dict[str, Any]) -> None:
        pass

    def close(self) -> None:
        pass


def each(file: Path) -> Iterator[dict[str, Any]]:
    """The records of a log, of which a long run has millions. Invalid lines, such as a truncated last one, are left
    out."""
    if file.exists():
        with file.open(encoding="utf-8", errors="replace", newline="\n") as lines:
            yield from (record for line in lines if (record := _record(line)))


def read(file: Path) -> list[dict[str, Any]]:
    """`each`, in memory together."""
    return list(each(file))


def _record(line: str) -> dict[str, Any]:
    try:
        record = json.loads(line)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) and type(record.get("step")) is int else {}


def scalars(value: Any, name: str = "") -> Iterator[tuple[str, float]]:
    """The numbers in a record with their paths, such as ("layers/zeros/q/0", 0.31)."""
    if isinstance(value, (dict, list, tuple)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from scalars(inner, f"{name}/{key}" if name else str(key))
    elif isinstance(value, (int, float)) and not isinstance(value, bool):
        yield name, float(value)


# ---- numbers out of records ----


def number(value: Any) -> float:
    """A value as float; NaN if it is not a finite number."""
    return float(value) if type(value) in (int, float) and abs(value) < 1e100 else math.nan


def series(records: Records, *path: str) -> tuple[Array, Array]:
    """Tokens seen, and the number at a path of keys, for the records that have both."""
    pairs = [(number(record.get("tokens")), number(value_at(record, path))) for record in records]
    found = np.array([pair for pair in pairs if not math.isnan(sum(pair))]).reshape(-1, 2)
    return found[:, 0], found[:, 1]


def held_out(records: Records) -> tuple[Array, Array]:
    """Tokens seen, and the loss on held-out text."""
    found = [series(records, "validation", name) for name in LOSSES]
    return next((pair for pair in found if len(pair[0])), found[0])


def value_at(value: Any, path: Sequence[str]) -> Any:
    for key in path:
        value = value.get(key) if isinstance(value, dict) else None
    return value


# ---- the plot ----


def plot(records: Iterable[dict[str, Any]], file: Path, title: str) -> None:
    """Plot training and validation loss and the learning rate over the tokens seen, as a PNG."""
    from matplotlib.figure import Figure  # not pyplot, whose global state belongs to the caller

    records = [{name: record[name] for name in PLOTTED if name in record} for record in records]
    figure = Figure(figsize=(8, 4.5), dpi=120)
    loss_axis = figure.subplots()
    loss_axis.plot(*series(records, "loss"), lw=0.6, color="#9db4c8", label="training")
    loss_axis.plot(*held_out(records), marker="o", ms=3, color="#12446b", label="validation")
    loss_axis.set(xlabel="tokens", ylabel="nats")
    loss_axis.set_title(escape(title), parse_math=False)
    loss_axis.grid(alpha=0.2)
    loss_axis.legend(frameon=False, loc="upper center")
    rate_axis = loss_axis.twinx()
    rate_axis.plot(*series(records, "lr"), lw=0.8, ls=":", color="#b0703c")
    rate_axis.set_ylabel("learning rate", color="#b0703c")
    figure.tight_layout()
    figure.savefig(file)
