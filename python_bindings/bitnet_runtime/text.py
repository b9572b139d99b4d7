"""Text to tokens and back, with the tokenizer inside the file.

`Tokenizer` wraps the `tokenizers` library, imported on the first use of text. Text from a user
never becomes a special token: someone who types "<|end|>" gets the tokens of these characters.
`Detokenizer` turns tokens into text one at a time and never breaks a UTF-8 character.
"""

from __future__ import annotations

import codecs
import json
import re
import secrets
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from bitnet_runtime.errors import InvalidParameterError, MissingDependencyError, TokenizerError
from bitnet_runtime.once import once as cached_property

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
        self._hf = _load(definition)
        with _border():
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
        self._definition: dict[str, Any] = json.loads(definition)

    def encode(
        self, text: str, *, add_bos: bool = True, parse_special: bool = False, shielded: bool = False
    ) -> list[int]:
        """Token ids. `add_bos`: with the start token the model was trained with, if any;
        `parse_special`: special tokens written out in the text count as such, but not, in a text
        with `shielded` parts, in those."""
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidParameterError(f"the text is not valid Unicode: {error}", "text") from None
        parser = self._unshielding_parser if shielded else self._parser if parse_special else self._hf
        with _border():
            ids: list[int] = parser.encode(text, add_special_tokens=add_bos).ids
        if add_bos and self._bos_token is not None:
            written = ids[:2].count(self._bos_token) if ids[:1] == [self._bos_token] else 0
            ids = [self._bos_token] * (1 - written) + ids[max(written - 1, 0) :]
        return ids

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens; bytes that are no UTF-8 become U+FFFD."""
        with _border():
            return self._hf.decode(list(tokens), skip_special_tokens=skip_special)

    def token_text(self, token: int | None) -> str:
        """A single token as it is written, such as "<|end|>"; "" for None."""
        return (self._hf.id_to_token(token) or "") if token is not None else ""

    def shield(self, text: str) -> str:
        """`text` marked so that `encode(shielded=True)` sees no special token in it."""
        marked = 1
        while self._special and marked:  # again, for what overlapped a token now marked
            text, marked = self._special.subn(_mark, text)
        return text

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A new detokenizer for text that continues `prompt`."""
        if self._byte_table is not None:
            return _ByteDetokenizer(self._byte_table)
        return _WindowDetokenizer(self, prompt)

    @cached_property
    def _parser(self) -> HfTokenizer:
        """The tokenizer that sees special tokens."""
        return self._parsing({})

    @cached_property
    def _unshielding_parser(self) -> HfTokenizer:
        """The same, but it sees none where `shield` left a mark, and drops the marks."""
        unmark = {"type": "Replace", "pattern": {"String": _MARK}, "content": ""}
        normalizers = [unmark, *filter(None, [self._definition.get("normalizer")])]
        return self._parsing({"normalizer": {"type": "Sequence", "normalizers": normalizers}})

    def _parsing(self, changes: dict[str, Any]) -> HfTokenizer:
        added = [dict(token) for token in self._definition.get("added_tokens") or []]
        for token in added:
            if token["special"]:
                token["normalized"] = False  # found while the marks are there
                if len(token["content"]) == 1:  # cannot be marked, so it is text; ids follow from places, so it stays
                    token["content"] = secrets.token_hex()
        return _load(json.dumps(self._definition | changes | {"added_tokens": added}).encode())

    @cached_property
    def _special_ids(self) -> dict[str, int]:
        return {added.content: token for token, added in self._added.items() if added.special}

    @cached_property
    def _special(self) -> re.Pattern[str] | None:
        """Matches a special token, the longest first."""
        texts = sorted((re.escape(text) for text in self._special_ids if len(text) > 1), key=len, reverse=True)
        return re.compile("|".join(texts)) if texts else None

    @cached_property
    def _byte_table(self) -> list[bytes] | None:
        """The bytes of every token, when the decoder does nothing but concatenate bytes."""
        if (self._definition.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        byte_of = {char: byte for byte, char in enumerate(byte_level_alphabet())}
        table = [b""] * self._vocab_size  # ids without a token, and special tokens, have no text
        for text, token in self._hf.get_vocab(with_added_tokens=True).items():
            if text not in self._special_ids:
                known = all(char in byte_of for char in text)
                table[token] = bytes(byte_of[char] for char in text) if known else text.encode()
        return table


def _mark(found: re.Match[str]) -> str:
    return found[0][0] + _MARK + found[0][1:]


def _load(definition: bytes) -> HfTokenizer:
    try:
        from tokenizers import Tokenizer as HfTokenizer
    except ImportError as error:
        raise MissingDependencyError(
            f"text needs the `tokenizers` library ({error}): pip install tokenizers; token ids work without it"
        ) from error
    with _border():
        loaded: HfTokenizer = HfTokenizer.from_str(definition.decode())
        loaded.no_padding()
        loaded.no_truncation()
        return loaded


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
    SILENT = 32  # tokens without text, such as special ones, that may stand between two with text

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
        self._shown = self._held if new else [*self._shown, *self._held][-self.SILENT :]
        self._held = []
        return new
