"""`--profile`: what a few steps spend their time on, as a table, and as a trace for Perfetto or chrome://tracing."""

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

ROWS = 15  # of the table
WAIT = 10  # steps before: compiling, first allocations


def check(steps: int, left: float) -> None:
    """Raises TrainingError: a run of so many steps, of which so many are left, ends before they are recorded."""
    if steps and left < WAIT + 1 + steps:
        raise TrainingError(
            f"--profile {steps} records the steps after the first {WAIT + 1}: it takes {WAIT + 1 + steps:,}, and the "
            f"run has {left:,.0f} left; make it longer, or leave --profile out"
        )


@contextmanager
def profiled(folder: Path, steps: int) -> Iterator[Callable[[], None]]:
    """Records so many steps to trace.json and profile.txt in `folder`. Gives what is to be called after each step."""
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
    if made <= WAIT + 1:  # a budget of minutes, or a signal
        say(f"no trace.json: it begins after {WAIT + 1} steps, and there were {made:,}")


def table(operations: Iterable[Any], steps: int) -> str:
    """What takes most of a step, each operation without those that it calls; on a GPU by the time there."""
    known = [each for each in operations if each.device_type.name == "CPU"]  # they count the time of their kernels
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
