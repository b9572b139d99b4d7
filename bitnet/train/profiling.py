"""`--profile`: where a few steps spend their time, as a table, and as a trace for Perfetto or chrome://tracing."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from bitnet.model import parallel
from bitnet.train.errors import TrainingError
from bitnet.train.progress import say

ROWS = 15  # rows of the table
WAIT = 10  # steps that are not recorded: compilation, first allocations


def check(steps: int, left: float) -> None:
    """Raises TrainingError if the steps left in the run do not suffice to record `steps` of them."""
    if steps and left < WAIT + 1 + steps:
        raise TrainingError(
            f"--profile {steps} records the steps after the first {WAIT + 1}: it takes {WAIT + 1 + steps:,}, and the "
            f"run has {left:,.0f} left; make it longer, or leave --profile out"
        )


@contextmanager
def profiled(folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Record `steps` steps to trace.json and profile.txt in `folder`. Yields a function to call after each step."""
    if not steps or not parallel.is_first():
        yield lambda: None
        return

    def write(profile: torch.profiler.profile) -> None:
        profile.export_chrome_trace(str(folder / "trace.json"))
        shown = table(profile.key_averages(), steps)
        (folder / "profile.txt").write_text(shown + "\n", encoding="utf-8")
        say(f"{shown}\n{folder / 'trace.json'} shows {steps:,} steps; open it in ui.perfetto.dev")

    plan = torch.profiler.schedule(wait=WAIT, warmup=1, active=steps, repeat=1)
    made = 0
    with torch.profiler.profile(schedule=plan, on_trace_ready=write) as profile:

        def step_is_over() -> None:
            nonlocal made
            made += 1
            profile.step()

        yield step_is_over
    if made <= WAIT + 1:  # with a budget in minutes, or a signal
        say(f"no trace.json: it begins after {WAIT + 1} steps, and there were {made:,}")


def table(operations: Iterable[Any], steps: int) -> str:
    """The most expensive operations by self time, on a GPU by device time."""
    known = [each for each in operations if each.device_type.name == "CPU"]  # includes their kernels
    there = any(each.self_device_time_total for each in known)
    times, calls = Counter[str](), Counter[str]()
    for each in known:
        name = "Python, between operations" if each.key.startswith("ProfilerStep") else each.key[:80]
        times[name] += each.self_device_time_total if there else each.self_cpu_time_total
        calls[name] += each.count
    whole = times.total() or 1
    rows = [f"{'ms a step':>10}  {'share':>6}  {'calls':>7}  operation"]
    for name, time in times.most_common(ROWS):
        rows.append(f"{time / 1e3 / steps:10.2f}  {time / whole:6.1%}  {calls[name] / steps:7.0f}  {name}")
    return "\n".join(rows)
