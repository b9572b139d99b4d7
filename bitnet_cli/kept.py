"""The messages of `bitnet chat`, as they are saved: with its session, or by /save."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from itertools import count
from pathlib import Path
from typing import Any

from bitnet_cli.signals import ENDS, ignore, leave
from bitnet_runtime.errors import SessionFileError
from bitnet_runtime.images.files import is_data
from bitnet_runtime.model_text import Message


def to_note(opening: list[Message], turns: list[Message], unseen: int) -> bytes:
    """opening: the system message, if there is one; unseen: how many turns the model no longer sees."""
    return json.dumps({"opening": opening, "turns": turns, "unseen": unseen}).encode()


def from_note(note: bytes) -> tuple[list[Message], list[Message], int]:
    """The inverse of `to_note`. Raises SessionFileError."""
    try:
        kept = json.loads(note)
        opening, turns, unseen = kept["opening"], kept["turns"], kept["unseen"]
        if not isinstance(opening, list) or not isinstance(turns, list):
            raise ValueError("its turns are no list")
        messages = [*opening, *turns]
        expected = ["system"] * len(opening) + ["user", "assistant"] * (len(turns) // 2)
        if [message["role"] for message in messages] != expected or len(opening) > 1:
            raise ValueError("its turns do not alternate")
        if type(unseen) is not int or unseen not in range(0, len(turns) + 1, 2):
            raise ValueError(f"unseen is {unseen!r:.40}")
        thoughts = [message.get("reasoning_content", "") for message in messages]
        texts = [text for message in messages for text in _texts(message["content"])]
        if not all(isinstance(text, str) for text in (*texts, *thoughts)):
            raise ValueError("a message is no text")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise SessionFileError(f"the session has no conversation of `bitnet chat` ({error})") from None
    return opening, turns, unseen


def _texts(content: Any) -> list[Any]:
    """The texts of a message, and the names of its pictures."""
    if isinstance(content, list):
        return [part["image" if part["type"] == "image" else "text"] for part in content]
    return [content]


def add(path: Path, messages: list[Message]) -> None:
    """Add a conversation to a .jsonl file, as a line of its own, or nothing. Raises OSError and ValueError."""
    line = json.dumps({"messages": [_anywhere(message) for message in messages]}, ensure_ascii=False) + "\n"
    left = line.encode()
    with path.open("ab+", buffering=0) as file:
        if size := file.tell():
            file.seek(-1, 2)
            left = left if file.read() == b"\n" else b"\n" + left
        try:
            while left:
                left = left[file.write(left) :]
        except BaseException:  # the disk is full: a part of a line would end the training that reads the file
            file.truncate(size)
            raise


def _anywhere(message: Message) -> Message:
    """The message with absolute names of its pictures."""
    content: Any = message["content"]
    if isinstance(content, str):
        return message
    parts = []
    for part in content:
        image = part.get("image")
        parts.append(part if image is None or is_data(image) else part | {"image": os.path.abspath(image)})
    return {**message, "content": parts}


@contextlib.contextmanager
def at_the_end(save: Callable[[], None]) -> Iterator[None]:
    """Call it however the block ends, even by a signal of ENDS. Later signals do not interrupt it."""
    with contextlib.ExitStack() as before:
        for number in (*ENDS, signal.SIGINT):
            before.callback(signal.signal, number, signal.getsignal(number))
        for number in ENDS:
            signal.signal(number, leave)
        try:
            yield
        finally:
            try:
                ignore((*ENDS, signal.SIGINT))
            finally:  # also when one came just before
                save()


# ---- where ----


def somewhere(path: Path, write: Callable[[Path], None]) -> None:
    """Write a file; where that fails, one of its name in a new folder for temporary files. Raises OSError, which says
    where the file is."""
    try:
        write(path)
    except OSError as error:
        try:
            other = Path(tempfile.mkdtemp(prefix="bitnet-chat-")) / path.name
        except OSError:
            raise error from None
        try:
            write(other)
        except OSError:
            other.parent.rmdir()
            raise error from None
        why = error.strerror or error
        raise OSError(f"{path}: {why}; the conversation is in {other}, and goes on with that --session") from None


@contextlib.contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Keep other chats from writing to the folder: several end at once when a terminal is closed."""
    with contextlib.ExitStack() as after:
        # No such folder, which writing will report; or no file locks, as on Windows.
        with contextlib.suppress(OSError, ImportError):
            import fcntl

            handle = os.open(folder, os.O_RDONLY)
            after.callback(os.close, handle)
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield


class Kept:
    """The file of a conversation, as it was when the chat began."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._state = self._now()

    @property
    def exists(self) -> bool:
        return self._state is not None

    def place(self) -> Path:
        """Where to write the conversation; if another has written the file meanwhile, talk-2.session beside it."""
        if self._now() in (self._state, None):  # nobody has, though it may be deleted
            return self.path
        return next(other for n in count(2) if not (other := self.path.with_stem(f"{self.path.stem}-{n}")).exists())

    def _now(self) -> tuple[int, int, int] | None:
        try:
            facts = self.path.stat()
        except FileNotFoundError:
            return None
        return facts.st_ino, facts.st_mtime_ns, facts.st_size
