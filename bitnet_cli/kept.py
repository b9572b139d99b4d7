"""The messages of `bitnet chat`, as they go with its session into a file."""

from __future__ import annotations

import contextlib
import json
import signal
import sys
from collections.abc import Callable, Iterator
from typing import Any

from bitnet_runtime.errors import SessionFileError
from bitnet_runtime.model_text import Message


def to_note(opening: list[Message], turns: list[Message], unseen: int) -> bytes:
    """opening: the system message, if there is one; unseen: how many turns the model no longer sees."""
    return json.dumps({"opening": opening, "turns": turns, "unseen": unseen}).encode()


def from_note(note: bytes) -> tuple[list[Message], list[Message], int]:
    """What `to_note` was given. Raises SessionFileError."""
    try:
        kept = json.loads(note)
        opening, turns, unseen = kept["opening"], kept["turns"], kept["unseen"]
        messages = [*opening, *turns]
        expected = ["system"] * len(opening) + ["user", "assistant"] * (len(turns) // 2)
        if [message["role"] for message in messages] != expected or len(opening) > 1:
            raise ValueError("its turns do not alternate")
        if type(unseen) is not int or unseen not in range(0, len(turns) + 1, 2):
            raise ValueError(f"unseen is {unseen!r:.40}")
        if not all(isinstance(text, str) for message in messages for text in _texts(message["content"])):
            raise ValueError("a message is no text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SessionFileError(f"the session has no conversation of `bitnet chat` ({error})") from None
    return opening, turns, unseen


def _texts(content: Any) -> list[Any]:
    """The texts of a message, and the names of its pictures."""
    if isinstance(content, list):
        return [part["image" if part["type"] == "image" else "text"] for part in content]
    return [content]


@contextlib.contextmanager
def at_the_end(save: Callable[[], None]) -> Iterator[None]:
    """Call it whatever ends the block, also a terminal that is closed, or a machine that shuts down."""
    with contextlib.ExitStack() as before:
        for number in (signal.SIGTERM, signal.SIGHUP):
            before.callback(signal.signal, number, signal.signal(number, lambda sent, _: sys.exit(128 + sent)))
        try:
            yield
        finally:
            save()
