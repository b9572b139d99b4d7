"""Signals that end the program, apart from Ctrl-C."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Sent when the machine shuts down or the terminal is closed; often both."""


def leave(sent: int, _: object) -> None:
    """A handler of them: the program exits normally, and a second signal does not interrupt that."""
    ignore(ENDS)
    sys.exit(128 + sent)


def ignore(signals: Iterable[signal.Signals]) -> None:
    """With a handler: of one that had just come SIG_IGN would make a traceback."""
    for number in signals:
        signal.signal(number, _nothing)


def _nothing(sent: int, _: object) -> None:
    pass
