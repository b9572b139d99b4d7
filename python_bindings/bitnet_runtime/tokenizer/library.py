"""Runs a definition with the `tokenizers` library: in this process, or in a worker if it may be costly."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from bitnet_runtime.errors import MissingDependencyError, TokenizerError, to_install


class Library(Protocol):
    """What is asked of either; see `tokenizing.Library`. Raises TokenizerError."""

    def encode(self, text: str, edges: bool) -> list[int]: ...
    def decode(self, tokens: list[int], skip_special: bool) -> str: ...
    def text(self, token: int) -> str: ...
    def vocabulary(self) -> dict[str, int]: ...


def load(definition: str, parse_special: bool, why_apart: str) -> Library:
    """A definition, loaded. why_apart: what in it may be costly; "" runs it in this process."""
    try:
        from bitnet_runtime.tokenizer.tokenizing import Library as Within
    except ImportError as error:
        raise MissingDependencyError(
            f"text needs the `tokenizers` library ({error}): {to_install('tokenizers')}; token ids work without it"
        ) from error
    if why_apart:
        return _Apart(definition, parse_special, why_apart)
    return _Here(Within, definition, parse_special)


@contextmanager
def _border() -> Iterator[None]:
    """Turn what `tokenizers` raises into TokenizerError. Its panics are not `Exception`s."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"the tokenizer of the file failed: {error!s:.500}") from None
        raise


class _Here:
    """In this process."""

    @_border()
    def __init__(self, kind: Callable[[str, bool], Library], definition: str, parse_special: bool) -> None:
        self._library: Library = kind(definition, parse_special)

    @_border()
    def encode(self, text: str, edges: bool) -> list[int]:
        return self._library.encode(text, edges)

    @_border()
    def decode(self, tokens: list[int], skip_special: bool) -> str:
        return self._library.decode(tokens, skip_special)

    @_border()
    def text(self, token: int) -> str:
        return self._library.text(token)

    @_border()
    def vocabulary(self) -> dict[str, int]:
        return self._library.vocabulary()


class _Apart:
    """In a worker, with the time and memory that honest work on a text of its length takes."""

    SECONDS, BYTES = 4e-6, 512  # for each byte of a text, four times and twice what was measured

    def __init__(self, definition: str, parse_special: bool, why: str) -> None:
        from bitnet_runtime.sandbox.worker import Worker

        self._why, self._size = why, len(definition)
        setup = json.dumps(["load", definition, parse_special], ensure_ascii=False).encode("utf-8", "replace")
        self._worker = Worker(str(Path(__file__).with_name("tokenizing.py")), ("tokenizers",), setup)
        self.vocabulary()  # an error of the definition is raised now

    def encode(self, text: str, edges: bool) -> list[int]:
        ids: list[int] = self._ask(len(text.encode()), "encode", text, edges)
        return ids

    def decode(self, tokens: list[int], skip_special: bool) -> str:
        text: str = self._ask(4 * len(tokens), "decode", tokens, skip_special)
        return text

    def text(self, token: int) -> str:
        text: str = self._ask(0, "text", token)
        return text

    def vocabulary(self) -> dict[str, int]:
        ids: dict[str, int] = self._ask(self._size, "vocabulary")
        return ids

    def _ask(self, size: int, *request: Any) -> Any:
        from bitnet_runtime.sandbox.worker import MEMORY, WorkerError

        try:
            asked = json.dumps(request, ensure_ascii=False, default=int).encode()  # an id may be one of numpy
            answer = self._worker.ask(asked, 1 + self.SECONDS * size, MEMORY + self.BYTES * size)
            reply = json.loads(answer)
        except (WorkerError, ValueError) as error:
            reply = {"error": str(error)}
        if "error" in reply:
            raise TokenizerError(
                f"the tokenizer of the file failed: {reply['error']}; "
                f"it runs apart, with limits, because of {self._why}"
            )
        return reply["value"]
