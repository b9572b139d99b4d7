"""JSON schemas in words that `llguidance` 1.9 takes exactly; what it takes for more than it says is said otherwise."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from bitnet_runtime.errors import shown

LOWER, UPPER = ("minimum", "exclusiveMinimum"), ("maximum", "exclusiveMaximum")
LAST = 2**63 - 1024
"""The last double among whole numbers of 64 bits, as which the library reads bounds."""
VALUES = frozenset(("const", "enum", "default", "examples"))  # hold no schemas
NAMED = frozenset(("properties", "patternProperties", "$defs", "definitions", "dependentSchemas"))  # schemas by name
WITHIN_A_MINUTE = r"^[^:]*:[0-5][0-9]:[0-5]"
"""RFC 3339 allows second 60 only for a leap second, which a pattern cannot tell."""
LEAP = r"([0-9]{2}(0[48]|[2468][048]|[13579][26])|([02468][048]|[13579][26])00)"
A_DAY = rf"^([0-9]{{4}}-(0[13-9]|1[0-2]|02-([01]|2[0-8]))|{LEAP}-02-29)"
"""February has a 29th only in a leap year."""
HELD = {"date": [A_DAY], "time": [WITHIN_A_MINUTE], "date-time": [A_DAY, WITHIN_A_MINUTE]}
"""Patterns of formats, which the library takes too widely."""


def exact(schema: Any) -> Any:
    """A schema whose texts are among those of `schema`, by the library as by the standard. Of one that was made here it
    makes the same: options are checked again where they are copied, and where a receipt is read.

    Raises ValueError: a bound is beyond the numbers that the library knows.
    """
    if isinstance(schema, (list, tuple)):
        return [exact(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    found: dict[str, Any] = {}
    for word, part in schema.items():
        if word in NAMED and isinstance(part, Mapping):
            found[word] = {name: exact(each) for name, each in part.items()}
        else:
            found[word] = part if word in VALUES else exact(part)
    _make_doubles(found)
    written = found.get("format")
    if isinstance(written, str) and written in HELD:
        given = found.get("allOf", [])
        others = given if isinstance(given, list) else [given]
        more = [{"pattern": pattern} for pattern in HELD[written]]
        found["allOf"] = [*others, *(each for each in more if each not in others)]
    if "anyOf" not in found and _apart(found.get("oneOf")):
        found["anyOf"] = found.pop("oneOf")
    return found | _bounds(found)


def _apart(alternatives: Any) -> bool:
    """Whether each has a constant of its own, so that no two hold: of numbers the library does not see it."""
    parts = alternatives if isinstance(alternatives, list) else []
    values = [part["const"] for part in parts if isinstance(part, Mapping) and "const" in part]
    plain = all(isinstance(value, (str, int, float, bool, type(None))) for value in values)
    return plain and 0 < len(parts) == len(set(values))


def _make_doubles(schema: dict[str, Any]) -> None:
    """Make bounds what the library reads. From 2**53 on it adds 1 to one that is excluded, and nothing changes: so it
    becomes one that is included."""
    for included, excluded in (LOWER, UPPER):
        bounds = {word: schema[word] for word in (included, excluded) if type(schema.get(word)) in (int, float)}
        bounds = {word: _double(word, bound) for word, bound in bounds.items()}
        if abs(bounds.get(excluded, 0)) >= 2**53:
            del schema[excluded]
            bounds = {included: max(bounds.values()) if included in LOWER else min(bounds.values())}
        schema |= bounds


def _double(word: str, bound: float) -> float:
    """A bound that the library reads as it is: a double, the next one within if it is none itself, and none so far out
    that it is refused. An excluded one also moves from 2**53 on, to the first that is not."""
    inward, excluded = 1 if word in LOWER else -1, word.startswith("exclusive")
    if inward * bound > (most := LAST - excluded):
        expected = f"at most {most}" if word in LOWER else f"at least {-most}"
        raise ValueError(f"{word} is {shown(bound)}, expected {expected}")
    if inward * bound < -LAST:
        return -inward * LAST
    if not abs(bound) >= 2**53:
        return bound
    near = float(bound)
    if inward * near < inward * bound or (near == bound and excluded):
        near = math.nextafter(near, inward * math.inf)
    return int(near)


def _bounds(schema: Mapping[str, Any]) -> dict[str, float]:
    """A whole number that is excluded, and less than 1 from the other bound: it would be let in. So the bound moves by
    less than a millionth of the room between them."""
    low, high = _number(schema, *reversed(LOWER)), _number(schema, *reversed(UPPER))
    if low is None or high is None or not 0 < high - low < 1:
        return {}
    step = 10.0 ** math.floor(math.log10(high - low) - 6)
    moved = {}
    if "exclusiveMinimum" in schema and low == int(low):
        moved["exclusiveMinimum"] = max(low + step, math.nextafter(low, math.inf))
    if "exclusiveMaximum" in schema and high == int(high):
        moved["exclusiveMaximum"] = min(high - step, math.nextafter(high, -math.inf))
    return moved


def _number(schema: Mapping[str, Any], *words: str) -> float | None:
    """The first of them that is there; None: it is no number, or so large that 1 is no step."""
    value = next((schema[word] for word in words if word in schema), None)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) < 1e15:
        return None
    return float(value)
