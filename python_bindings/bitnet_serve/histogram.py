"""Durations, counted as a Prometheus histogram."""

from __future__ import annotations

import bisect
import itertools

LATENCIES = {
    "time_to_first_token_seconds": "from a request that is understood to its first token",
    "time_per_output_token_seconds": "of an answer for each token behind its first",
    "e2e_request_latency_seconds": "from a request that is understood to the end of its answer",
}
BOUNDS = tuple(step * 10.0**power for power in range(-4, 3) for step in (1, 2.5, 5))
"""Seconds: a token of a small model takes a tenth of a millisecond, an answer of a large one may take minutes."""


class Histogram:
    """Written by one thread, read by any."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BOUNDS) + 1)
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        self._counts[bisect.bisect_left(BOUNDS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str, label: str) -> list[str]:
        """Of the text form of Prometheus. label: such as model="x"."""
        ends = [*(f"{bound:g}" for bound in BOUNDS), "+Inf"]
        counts = [*itertools.accumulate(self._counts)]
        lines = [f'{name}_bucket{{{label},le="{end}"}} {n}' for end, n in zip(ends, counts, strict=True)]
        return [*lines, f"{name}_sum{{{label}}} {self._sum:.9g}", f"{name}_count{{{label}}} {counts[-1]}"]
