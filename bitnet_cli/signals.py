"""Signals that end the program, apart from Ctrl-C."""

from __future__ import annotations

import signal
import sys
import threading
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

ENDS = (signal.SIGTERM, signal.SIGHUP)
"""Sent when the machine shuts down or the terminal is closed; often both."""


def leave(sent: int, _: object) -> None:
    """A handler of them: the program exits normally, and a second signal does not interrupt that."""
    ignore(ENDS)
    sys.exit(128 + sent)


@contextmanager
def at_once() -> Iterator[None]:
    """While libraries are loaded, signals end the process itself. Some of their C code swallows the exception of a
    handler, so that the program would go on, or crash. Nothing is there yet to be removed."""
    ours = (leave, signal.default_int_handler)
    there = threading.current_thread() is threading.main_thread()
    before = {number: signal.getsignal(number) for number in (*ENDS, signal.SIGINT) if there}
    for number, handler in before.items():
        if handler in ours:
            signal.signal(number, signal.SIG_DFL)
    try:
        yield
    finally:
        for number, handler in before.items():
            if handler in ours:
                signal.signal(number, handler)


def ignore(signals: Iterable[signal.Signals]) -> None:
    """With a handler: of one that had just come SIG_IGN would make a traceback."""
    for number in signals:
        signal.signal(number, _nothing)


def _nothing(sent: int, _: object) -> None:
    pass
