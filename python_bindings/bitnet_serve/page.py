"""The page that talks to the model in a browser, and the headers it is sent with."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

HTML = Path(__file__).with_name("page.html").read_text(encoding="utf-8")


def _only(tag: str) -> str:
    """The hash of a tag's content: the browser runs no other script or style, whatever gets into the page."""
    inside = HTML.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(inside.encode()).digest()).decode()}'"


HEADERS = {
    "content-security-policy": f"default-src 'none'; script-src {_only('script')}; style-src {_only('style')}; "
    "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
