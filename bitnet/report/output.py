"""Shared by all pages: writing them, and images."""

from __future__ import annotations

import contextlib
import io
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from bitnet_runtime.sessions.saved import replace, writable

LARGEST = 200_000_000  # most ternary weights of a model that is run here in PyTorch, without the engine


class ReportError(ValueError):
    """There is nothing to report, or nowhere to write it."""


def check_out(out: Path) -> None:
    """Raises ReportError if no page can have this name."""
    if out.suffix not in (".html", ".png"):
        raise ReportError(f"--out is {out}, expected a name that ends in .html or .png")
    if not out.parent.is_dir():
        raise ReportError(f"--out is {out}, but the folder {out.parent} does not exist")


def put(out: Path, page: Callable[[], bytes]) -> None:
    """Write the result of `page`, completely or not at all; a link stays one. Raises ReportError."""
    with _writing(out):
        writable(out)  # before the page is drawn, which takes a while
    made = page()
    with _writing(out):
        replace(out, made)


@contextlib.contextmanager
def _writing(out: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ReportError(f"{out} cannot be written: {error.strerror or error}; name another --out") from error


def printable(text: str) -> str:
    """The text with control characters replaced, which neither HTML nor a font can show."""
    return "".join(c if c.isprintable() or c in "\n\t" else "\ufffd" for c in text)


def saved(figure: Any) -> bytes:
    """The figure as a PNG; it is closed."""
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # characters that the font lacks are shown as boxes
        figure.savefig(buffer, format="png", dpi=110)
    pyplot().close(figure)
    return buffer.getvalue()


def pyplot() -> Any:
    """pyplot without a screen; imported only when something is drawn."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
