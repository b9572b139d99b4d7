"""Arguments that several verbs share, and wrong usage that argparse cannot detect."""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

FOREIGN = {".gguf": "gguf", ".onnx": "onnx"}
"""Endings of files that are not packed ones, with the value of `bitnet convert --to` that writes them."""


def refuse(message: str) -> int:
    """Print what is wrong. Returns the exit code of wrong usage."""
    print(f"bitnet: error: {message}", file=sys.stderr)
    return 2


def idle(args: argparse.Namespace, *rules: tuple[str, object, str]) -> str:
    """Why an option that is given would have no effect; "" if each has one.

    A rule: names of options with spaces between them, whether they have an effect, and what is said of one without.
    """
    for names, useful, reason in rules:
        for name in names.split() if not useful else ():
            if getattr(args, name):
                return f"--{name.replace('_', '-')} {reason}"
    return ""


def check_exists(source: str | Path) -> None:
    """Raises FileNotFoundError if what a verb reads, a run or a packed file, is not there."""
    if not Path(source).exists():
        raise FileNotFoundError(f"{source} does not exist, expected a checkpoint or a run folder, or a packed file")


def misnamed(out: str) -> str:
    """Why a new packed file should not have this name; "" if it may. (Existing files have refusals of their own.)"""
    if not (to := FOREIGN.get(Path(out).suffix.lower())) or Path(out).exists():
        return ""
    packed, target = Path(out).with_suffix(".bitnet"), out if to == "gguf" else Path(out).with_suffix("")
    return (
        f"{out} would be a packed file, expected a name such as {packed}; "
        f"after that, `{shlex.join(['bitnet', 'convert', str(packed), str(target), '--to', to])}`"
    )


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


def number_formats() -> tuple[str, ...]:
    """The names, for the command line, of how weights are stored that are not ternary."""
    from bitnet.config import CHOICES

    return tuple(name for name in CHOICES["head_format"] if name != "ternary")
