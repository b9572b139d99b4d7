"""What is asked of the `tokenizers` library. Also the program of a worker, for definitions that may be costly."""

from __future__ import annotations

import json
import os
from typing import Any

from tokenizers import Tokenizer

LONG = 16_000  # characters: shorter texts keep others waiting for less than it takes to start the library's threads


class Library:
    """A tokenizer of the `tokenizers` library; it raises whatever the library raises."""

    def __init__(self, definition: str, parse_special: bool) -> None:
        """definition: a tokenizer.json. parse_special: special tokens written out in a text count as such."""
        self._tokenizer: Any = Tokenizer.from_str(definition)
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._tokenizer.encode_special_tokens = not parse_special  # means: as plain text

    def encode(self, text: str, edges: bool) -> list[int]:
        """Token ids; `edges`: with the tokens that the definition puts around a text."""
        if len(text) < LONG:
            ids: list[int] = self._tokenizer.encode(text, add_special_tokens=edges).ids
        else:  # of the library's methods those for batches alone let other threads of Python run
            (found,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=edges)
            ids = found.ids
        return ids

    def decode(self, tokens: list[int], skip_special: bool) -> str:
        text: str = self._tokenizer.decode(tokens, skip_special_tokens=skip_special)
        return text

    def text(self, token: int) -> str:
        """A token as it is written; "" when there is none."""
        return self._tokenizer.id_to_token(token) or ""

    def vocabulary(self) -> dict[str, int]:
        """The ids of all tokens, added ones too."""
        ids: dict[str, int] = self._tokenizer.get_vocab(with_added_tokens=True)
        return ids


_library: Library


def answer(request: bytes) -> bytes:
    """[method, *arguments] to {"value": …} or {"error": …}; the first method is "load"."""
    global _library
    method, *arguments = json.loads(request)
    reply: dict[str, Any] = {"value": None}
    try:
        if method == "load":
            os.environ["TOKENIZERS_PARALLELISM"] = "false"  # here no thread may start
            _library = Library(*arguments)
        else:
            reply["value"] = getattr(_library, method)(*arguments)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is no Exception
        reply = {"error": f"{error}"[:500]}
    return json.dumps(reply, ensure_ascii=False).encode()
