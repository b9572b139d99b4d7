"""How far a run is, while it goes on: a bar on a terminal, in a log a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any, Self

from tqdm import tqdm

from bitnet.model import parallel
from bitnet.settings import Settings
from bitnet_runtime.terminal import escape

PAUSES = 1.0, 60.0  # seconds from line to line, at first and at most: each pause is twice the one before


class Progress:
    """Entered before the first step, called after each. `state` is that of the run."""

    def __init__(self, settings: Settings, state: dict[str, Any]) -> None:
        self.settings, self.state = settings, state
        self._began = state["step"], state["seconds"]
        self._pause, self._next = PAUSES[0], 0.0

    def __enter__(self) -> Self:
        silent = None if parallel.is_first() else True  # None: where stderr is no terminal
        total, step = self.settings.steps, self.state["step"]
        self._bar = tqdm(total=total, initial=step, unit="step", disable=silent, file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, loss: float, progress: float) -> None:
        """progress: of the run, 0 to 1."""
        settings, state = self.settings, self.state
        if settings.minutes:
            self._bar.total = max(state["step"], round(state["step"] / progress))
        self._bar.set_postfix_str(f"loss {loss:.3f}, {self.speed}", refresh=False)
        self._bar.update()
        if self._bar.disable and time.monotonic() >= self._next:
            if settings.minutes:
                place = f"{state['step']:,}, {min(progress, 1):.0%} of {lasting(60 * settings.minutes)}"
            else:
                place = f"{state['step']:,} of {settings.steps:,}"
            self.say(f"step {place}: loss {loss:.3f}, {self.speed}, about {lasting(self.left)} left")

    def say(self, line: str) -> None:
        """A line, after which the next one may wait."""
        say(line)
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, PAUSES[1])

    @property
    def speed(self) -> str:
        return f"{self.state['tokens'] / max(self.state['seconds'], 1e-9):,.0f} tokens/s"

    @property
    def left(self) -> float:
        """Seconds, if steps go on taking what they took since this process began."""
        step, seconds = self._began
        if self.settings.minutes:
            left = 60 * self.settings.minutes - self.state["seconds"]
        else:
            each = (self.state["seconds"] - seconds) / max(1, self.state["step"] - step)
            left = each * (self.settings.steps - self.state["step"])
        return max(0.0, float(left))


def say(line: str) -> None:
    """On stderr, above the bar, by the first process alone."""
    if parallel.is_first():
        tqdm.write(escape(line, keep="\n\t"), file=sys.stderr)  # the name of a run may hold anything


def lasting(seconds: float) -> str:
    """For people: "40 s", "3 min", "2 h 5 min", "3 d 4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    small, large, names = (60, 60, "h min") if seconds < 48 * 3600 else (3600, 24, "d h")
    whole, rest = divmod(round(seconds / small), large)
    first, second = names.split()
    return f"{whole} {first} {rest} {second}"
