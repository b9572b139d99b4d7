"""Words on a command line that several verbs take, and wrong usage that argparse cannot see."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable


def refuse(message: str) -> int:
    """Say what is wrong; the exit code of wrong usage."""
    print(f"bitnet: error: {message}", file=sys.stderr)
    return 2


def at_least(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low:
            raise argparse.ArgumentTypeError(f"{text!r}, expected an integer of at least {low}")
        return int(text)

    return parse


def positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def encodings() -> tuple[str, ...]:
    """Encodings of ternary weights, by the names that are typed."""
    from bitnet_export.packed.encodings import TERNARY

    return tuple(TERNARY)
