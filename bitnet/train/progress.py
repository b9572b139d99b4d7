"""Progress of a running run: a bar on a terminal, in a log a line now and then."""

from __future__ import annotations

import sys
import time
from collections import deque
from typing import Self

from tqdm import tqdm

from bitnet.model import parallel
from bitnet.process import unheard
from bitnet.train.horizon import Horizon
from bitnet.train.state import State
from bitnet_runtime.terminal import escape

PAUSES = 1.0, 60.0  # seconds between lines, first and at most: each pause is twice the one before
RECENT = 20, 120.0  # speed is measured over at least 20 steps, or 120 s if those hold more


class Progress:
    """A context around the steps; `step` is called after each. `state`: that of the run."""

    def __init__(self, horizon: Horizon, state: State, of_peak: float = 0.0) -> None:
        """of_peak: seconds that a token would take on GPUs at their peak; 0: unknown."""
        self.horizon, self.state, self.of_peak = horizon, state, of_peak
        self._recent = deque([self._now])
        self._pause, self._next = PAUSES[0], 0.0

    def __enter__(self) -> Self:
        silent = None if parallel.is_first() else True  # None: only if stderr is not a terminal
        total, step = self.horizon.steps(self.state), self.state["step"]
        self._bar = tqdm(total=total, initial=step, unit="step", disable=silent, file=sys.stderr)
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def step(self, said: str) -> None:
        """Show a step. said: its loss."""
        horizon, state = self.horizon, self.state
        self._recent.append(self._now)
        while len(self._recent) > RECENT[0] + 1 and self._recent[1][0] < state["seconds"] - RECENT[1]:
            self._recent.popleft()
        self._bar.total = horizon.steps(state)
        self._bar.set_postfix_str(f"{said}, {self.speed}", refresh=False)
        self._bar.update()
        if self._bar.disable and time.monotonic() >= self._next:
            place = f"{state['step']:,} of {self._bar.total:,}"
            if horizon.seconds:
                place = f"{state['step']:,}, {min(horizon.progress(state), 1):.0%} of {lasting(horizon.seconds)}"
            self.say(f"step {place}: {said}, {self.speed}, about {lasting(self.left)} left")

    def say(self, line: str) -> None:
        """Print a line, and delay the next progress line."""
        say(line)
        self._next = time.monotonic() + self._pause
        self._pause = min(2 * self._pause, PAUSES[1])

    @property
    def _now(self) -> tuple[float, int, int]:
        return self.state["seconds"], self.state["step"], self.state["tokens"]

    def _since(self, before: tuple[float, int, int]) -> tuple[float, int, int]:
        seconds, steps, tokens = (now - then for now, then in zip(self._now, before, strict=True))
        return max(seconds, 1e-9), int(steps), int(tokens)

    @property
    def speed(self) -> str:
        """Speed of the recent steps, including evaluations and saving; earlier ones may be from a slower machine."""
        seconds, _, tokens = self._since(self._recent[0])
        rate = tokens / seconds
        return f"{rate:,.0f} tokens/s" + (f", {rate * self.of_peak:.1%} of the peak" if self.of_peak else "")

    @property
    def left(self) -> float:
        """Remaining seconds at the speed of the recent steps."""
        if self.horizon.seconds:
            return max(0.0, self.horizon.seconds - self.state["seconds"])
        seconds, steps, _ = self._since(self._recent[0])
        left = self.horizon.steps(self.state) - self.state["step"]
        return max(0.0, seconds / max(1, steps) * left)


def say(line: str) -> None:
    """Print on stderr, above the bar, from the first process only. A closed stderr is not an error."""
    if not parallel.is_first():
        return
    try:
        tqdm.write(escape(line, keep="\n\t"), file=sys.stderr)  # names of runs may hold control characters
        sys.stderr.flush()
    except BrokenPipeError:
        unheard()


def lasting(seconds: float) -> str:
    """A duration for people: "40 s", "3 min", "2 h 5 min", "3 d 4 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    if seconds < 100 * 60:
        return f"{seconds / 60:.0f} min"
    small, large, names = (60, 60, "h min") if seconds < 48 * 3600 else (3600, 24, "d h")
    whole, rest = divmod(round(seconds / small), large)
    first, second = names.split()
    return f"{whole} {first} {rest} {second}"
