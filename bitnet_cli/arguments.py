"""Arguments that several verbs share, and wrong usage that argparse cannot detect."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from typing import Any


def refuse(message: str) -> int:
    """Print what is wrong. Returns the exit code of wrong usage."""
    print(f"bitnet: error: {message}", file=sys.stderr)
    return 2


class Once(argparse.Action):
    """An option that may be given only once: the last one would silently win."""

    def __call__(
        self, parser: argparse.ArgumentParser, args: argparse.Namespace, value: Any, option: str | None = None
    ) -> None:
        if getattr(args, self.dest) is not None:
            parser.error(f"{option} is given twice, expected once")
        setattr(args, self.dest, value)


def at_least(low: int, high: int = 2**31 - 1) -> Callable[[str], int]:
    """A parser of integers from `low` to `high`."""

    def parse(text: str) -> int:
        readable = text.isdecimal() and len(text) < 100  # Python refuses integers of very many digits
        if not readable or not low <= int(text) <= high:
            raise argparse.ArgumentTypeError(f"{text!r:.100}, expected an integer from {low} to {high}")
        return int(text)

    return parse


def encodings() -> tuple[str, ...]:
    """The names of encodings of ternary weights for the command line: their bits per weight."""
    from bitnet_export.packed.encodings import TERNARY

    return tuple(TERNARY)
