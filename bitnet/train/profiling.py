"""`--profile`: what a few steps spend their time on, as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from bitnet.model import parallel
from bitnet.train.progress import say

WAIT = 10  # steps before: compiling, first allocations


@contextmanager
def profiled(folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Records so many steps to `folder`/trace.json. Gives what is to be called after each step."""
    if not steps or not parallel.is_first():
        yield lambda: None
        return

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(folder / "trace.json"))
        say(f"{folder / 'trace.json'} shows {steps:,} steps; open it in ui.perfetto.dev")

    plan = torch.profiler.schedule(wait=WAIT, warmup=1, active=steps, repeat=1)
    made = 0
    with torch.profiler.profile(schedule=plan, on_trace_ready=write) as profile:

        def step_is_over() -> None:
            nonlocal made
            made += 1
            profile.step()

        yield step_is_over
    if made <= WAIT + 1:
        say(f"no trace.json: it begins after {WAIT + 1} steps, and there were {made:,}")
