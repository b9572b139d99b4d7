"""Texts that verbs read from a file or a pipe."""

from __future__ import annotations

import sys
from pathlib import Path


def read_text(file: Path | None) -> str | None:
    """What a file holds, or standard input where None is given; None when that is a terminal.

    Raises ValueError where it is not UTF-8, OSError.
    """
    if file is None and (sys.stdin is None or sys.stdin.isatty()):
        return None
    if hasattr(sys.stdin, "reconfigure"):
        sys.stdin.reconfigure(errors="strict")  # in the C locale it is not
    try:
        return sys.stdin.read() if file is None else file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        found = f"byte {error.start} is {error.object[error.start]:#04x}"
        raise ValueError(f"{file or 'standard input'}: {found}, expected UTF-8 text") from None


def lines_of(text: str) -> list[str]:
    """Not splitlines, which also cuts at characters that a text may have."""
    return [line.removesuffix("\r") for line in text.removesuffix("\n").split("\n")] if text else []
