"""Untrusted JSON: anything that two readers could interpret differently is refused."""

from __future__ import annotations

import json
import math
from collections import Counter
from typing import Any


def parse(content: bytes) -> Any:
    """A JSON value with unique names in objects and only finite numbers. Raises ValueError for anything else."""
    try:
        return json.loads(content.decode(), object_pairs_hook=_unique, parse_constant=_refuse, parse_float=_finite)
    except RecursionError as error:
        raise ValueError(str(error)) from None


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        name, times = Counter(name for name, _ in pairs).most_common(1)[0]
        raise ValueError(f"the key {name!r:.80} occurs {times} times, expected once")
    return found


def _refuse(word: str) -> None:
    raise ValueError(f"{word} is not JSON, and not a finite number")


def _finite(word: str) -> float:
    value = float(word)
    if not math.isfinite(value):
        raise ValueError(f"{word} is not a finite number")
    return value
