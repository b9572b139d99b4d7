"""Reports the numbers of a run, besides its log, to TensorBoard, Weights & Biases or Trackio, by their libraries."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

from bitnet.settings import Settings
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say

PROJECT = "bitnet"
"""The project of the runs in Weights & Biases and Trackio."""


def _library(name: str) -> Any:
    if name == "wandb":
        import wandb

        return wandb
    import trackio

    return trackio


class Board(Protocol):
    def add(self, numbers: dict[str, float], step: int) -> None: ...

    def close(self) -> None: ...


def check(settings: Settings) -> None:
    """Raises ModuleNotFoundError, before the text is read, if the library is not installed."""
    if settings.report_to == "tensorboard":
        import torch.utils.tensorboard  # noqa: F401
    elif settings.report_to != "none":
        _library(settings.report_to)


def board_of(settings: Settings, folder: Path, step: int) -> Board | None:
    """The board that a run reports to after `step`. Raises TrainingError if it cannot start."""
    if settings.report_to == "none":
        return None
    if settings.report_to == "tensorboard":
        return _TensorBoard(folder / "tensorboard", step)
    return _Tracker(settings, folder)


class _TensorBoard:
    """TensorBoard files in the run folder. Records after `step` are discarded."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer: Any = SummaryWriter(str(folder), purge_step=step + 1)

    def add(self, numbers: dict[str, float], step: int) -> None:
        for name, value in numbers.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class _Tracker:
    """Weights & Biases, or Trackio, which has the same functions. A resumed run is a new run in the same group."""

    def __init__(self, settings: Settings, folder: Path) -> None:
        self._library, self._failed = _library(settings.report_to), False
        name = folder.resolve().name
        where = {"dir": str(folder)} if settings.report_to == "wandb" else {}
        try:
            with contextlib.redirect_stdout(sys.stderr):  # their messages are not output of the command
                self._library.init(project=PROJECT, name=name, group=name, config=settings.to_dict(), **where)
        except Exception as error:  # any error of the library: no account, no network, a full disk
            offline = ", or set WANDB_MODE=offline" if where else ""
            raise TrainingError(
                f"--report-to {settings.report_to} cannot start: {error}; see its own help{offline}, or leave it out"
            ) from error

    def add(self, numbers: dict[str, float], step: int) -> None:
        with self._surviving():
            self._library.log({name: value for name, value in numbers.items() if name != "step"}, step=step)

    def close(self) -> None:
        with self._surviving(), contextlib.redirect_stdout(sys.stderr):
            self._library.finish()

    @contextlib.contextmanager
    def _surviving(self) -> Iterator[None]:
        """A context in which errors of the library, such as a lost network, do not end the run."""
        try:
            yield
        except Exception as error:
            if not self._failed:
                say(f"{self._library.__name__} failed: {error}; the run continues, and log.jsonl has all numbers")
            self._failed = True
