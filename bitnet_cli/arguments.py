"""Words on a command line that several verbs take, and wrong usage that argparse cannot see."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any


def refuse(message: str) -> int:
    """Say what is wrong; the exit code of wrong usage."""
    print(f"bitnet: error: {message}", file=sys.stderr)
    return 2


class Once(argparse.Action):
    """An option that is not given twice: the last one would silently win."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        if getattr(args, self.dest) is not None:
            parser.error(f"{option} is given twice, expected once")
        setattr(args, self.dest, value)


def at_least(low: int, high: int | None = None) -> Callable[[str], int]:
    """high: the most that it may be."""
    expected = f"of at least {low}" if high is None else f"from {low} to {high}"

    def parse(text: str) -> int:
        if not text.isdecimal() or int(text) < low or (high is not None and int(text) > high):
            raise argparse.ArgumentTypeError(f"{text!r}, expected an integer {expected}")
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
