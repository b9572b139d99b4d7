"""Output to a person's terminal.

Answers go to stdout, everything else to stderr. What a model or a file says is shown with `escape`,
so that it cannot move the cursor, change colours or titles, or turn the direction of the line.
"""

from __future__ import annotations

import os
import re
import sys

_CONTROLS = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")
"""C0 and C1 controls, line separators, overrides of the text direction, lone surrogates."""


def escape(text: str, keep: str = "") -> str:
    """Text for a terminal: control characters but those to `keep` become \\x1b and the like."""

    def shown(found: re.Match[str]) -> str:
        return found[0] if found[0] in keep else found[0].encode("unicode_escape").decode()

    return _CONTROLS.sub(shown, text)


def show(text: str) -> None:
    """Write a piece of an answer to stdout: unchanged to a file or a pipe, with `escape` to a terminal."""
    sys.stdout.write(escape(text, keep="\n\t") if sys.stdout.isatty() else text)
    sys.stdout.flush()


def say(text: str) -> None:
    """Lines for the person, to stderr. Where they cannot be written, as on a full disk, the program goes on without."""
    try:
        print(escape(text, keep="\n\t"), file=sys.stderr, flush=True)
    except OSError:  # Python would try again at exit, and fail
        discard(sys.stderr.fileno())


def discard(descriptor: int) -> None:
    """Redirect what is written to it, which nobody can read any more, to the null device."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, descriptor)
    os.close(nowhere)
