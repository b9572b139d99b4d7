"""Text to tokens and back, with the tokenizer inside the file.

`Tokenizer` wraps the `tokenizers` library, imported on the first use of text. Text from a user
never becomes a special token: someone who types "<|end|>" gets the tokens of these characters.
`Detokenizer` turns tokens into text one at a time and never breaks a UTF-8 character.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import TYPE_CHECKING, Protocol

from bitnet_runtime.errors import InvalidParameterError, MissingDependencyError, TokenizerError

if TYPE_CHECKING:
    from tokenizers import Tokenizer as HfTokenizer


_MARK = "\ufdd0"  # a code point that is never a character


class Detokenizer(Protocol):
    """Text of a growing list of tokens; the pieces joined are the text of the whole."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" within a character."""

    def flush(self) -> str:
        """What is left at the end; an unfinished character becomes U+FFFD."""


@contextmanager
def _border() -> Iterator[None]:
    """Turn what `tokenizers` raises into TokenizerError. Its panics are no `Exception`s."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise TokenizerError(f"the tokenizer of the file failed: {error}") from None
        raise


class Tokenizer:
    """The tokenizer of a file. Safe to share between threads."""

    def __init__(self, definition: bytes, vocab_size: int, bos_token: int | None = None) -> None:
        try:
            from tokenizers import Tokenizer as HfTokenizer
        except ImportError as error:
            raise MissingDependencyError(
                f"text needs the `tokenizers` library ({error}): pip install tokenizers; token ids work without it"
            ) from error
        with _border():
            self._hf: HfTokenizer = HfTokenizer.from_str(definition.decode())
            self._hf.no_padding()
            self._hf.no_truncation()
            self._hf.encode_special_tokens = True  # means: as plain text
            self._added = self._hf.get_added_tokens_decoder()
            largest = max(self._hf.get_vocab(with_added_tokens=True).values(), default=-1)
        if largest >= vocab_size:
            raise TokenizerError(
                f"the tokenizer of the file has token id {largest}, the model's vocabulary has {vocab_size} tokens; "
                f"export the model with the tokenizer it was trained with"
            )
        self._vocab_size = vocab_size
        self._bos_token = bos_token
        self._decoder = json.loads(definition).get("decoder") or {}

    def encode(self, text: str, *, add_bos: bool = True, parse_special: bool = False) -> list[int]:
        """Token ids. `add_bos`: with the start token the model was trained with, if any;
        `parse_special`: special tokens written out in the text count as such."""
        if parse_special:
            ids = [token for part in self._split(text) for token in part]
        else:
            ids = self._encode_plain(text, add_special_tokens=add_bos)
        if add_bos and self._bos_token is not None and ids[:1] != [self._bos_token]:
            ids.insert(0, self._bos_token)
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        with _border():
            return self._hf.decode(list(tokens), skip_special_tokens=skip_special)

    def token_text(self, token: int | None) -> str:
        """A single token as it is written, such as "<|end|>"; "" for None."""
        return (self._hf.id_to_token(token) or "") if token is not None else ""

    def shield(self, text: str) -> str:
        """`text` marked so that `encode(parse_special=True)` sees no special token in it."""
        marked = 1
        while self._special and marked:  # again, for what overlapped a token now marked
            text, marked = self._special.subn(_mark, text)
        return text

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A new detokenizer for text that continues `prompt`."""
        if self._byte_table is not None:
            return _ByteDetokenizer(self._byte_table)
        return _WindowDetokenizer(self, prompt)

    def _encode_plain(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameterError(f"the text is not valid Unicode: {error}", "text") from None
        with _border():
            return self._hf.encode(text, add_special_tokens=add_special_tokens).ids

    def _split(self, text: str) -> Iterator[list[int]]:
        """Ids of the special tokens in the text and of what lies between them."""
        start = 0
        for found in self._special.finditer(text) if self._special else ():
            yield self._encode_segment(text[start : found.start()])
            yield [self._special_ids[found[found.lastindex or 0]]]
            start = found.end()
        yield self._encode_segment(text[start:])

    def _encode_segment(self, text: str) -> list[int]:
        return self._encode_plain(text.replace(_MARK, "")) if text else []

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {added.content: token for token, added in self._added.items() if added.special}

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Matches a special token in a group, the longest first, with the blanks it swallows."""
        added = sorted((a for a in self._added.values() if a.special), key=lambda a: len(a.content), reverse=True)
        texts = [
            (r"\s*" if a.lstrip else "") + f"({re.escape(a.content)})" + (r"\s*" if a.rstrip else "")
            for a in added
            if len(a.content) > 1  # one character cannot be marked, so it is text
        ]
        return re.compile("|".join(texts)) if texts else None

    @cached_property
    def _byte_table(self) -> list[bytes] | None:
        """The bytes of every token, when the decoder does nothing but concatenate bytes."""
        if self._decoder.get("type") != "ByteLevel":
            return None
        byte_of = {char: byte for byte, char in enumerate(byte_level_alphabet())}
        table = [b""] * self._vocab_size  # ids without a token, and special tokens, have no text
        for text, token in self._hf.get_vocab(with_added_tokens=True).items():
            if text not in self._special_ids:
                known = all(char in byte_of for char in text)
                table[token] = bytes(byte_of[char] for char in text) if known else text.encode()
        return table


def _mark(found: re.Match[str]) -> str:
    content = found[found.lastindex or 0]
    return found[0].replace(content, content[0] + _MARK + content[1:], 1)


def byte_level_alphabet() -> str:
    """The printable character that stands for each byte in a byte-level vocabulary, in byte order.

    Printable Latin-1 stands for itself, the rest for U+0100 and up (Radford et al. 2019, GPT-2).
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = iter(range(0x100, 0x200))
    return "".join(chr(byte if byte in printable else next(others)) for byte in range(256))


class _ByteDetokenizer:
    """For byte-level vocabularies: one table look-up a token."""

    def __init__(self, table: list[bytes]) -> None:
        self._table = table
        self._decode = codecs.getincrementaldecoder("utf-8")("replace").decode

    def push(self, token: int) -> str:
        return self._decode(self._table[token])

    def flush(self) -> str:
        return self._decode(b"", True)


class _WindowDetokenizer:
    """For every other decoder: decode the latest tokens again, keep what the newest added.

    They are seen together with the tokens shown last, because decoders treat the first token of
    a text differently (a leading space is dropped). Both lists begin where a character begins.
    """

    HOLD = 8  # tokens after which U+FFFD is no longer taken for a character's beginning

    def __init__(self, tokenizer: Tokenizer, prompt: Sequence[int]) -> None:
        self._decode = tokenizer.decode
        tails = [list(prompt[-n:]) for n in range(4, 8)]  # one of four begins with a whole character
        self._shown = next((tail for tail in tails if not self._decode(tail).startswith("\ufffd")), [])
        self._held: list[int] = []

    def push(self, token: int) -> str:
        self._held.append(token)
        return self._show(final=len(self._held) > self.HOLD)

    def flush(self) -> str:
        return self._show(final=True)

    def _show(self, final: bool) -> str:
        text = self._decode(self._shown + self._held)
        if text.endswith("\ufffd") and not final:
            return ""
        new = text[len(self._decode(self._shown)) :]
        self._shown, self._held = self._held or self._shown, []
        return new
