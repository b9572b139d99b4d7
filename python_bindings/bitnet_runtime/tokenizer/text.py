"""Text to tokens and back, with the tokenizer inside the file.

`Tokenizer` wraps the `tokenizers` library, imported on the first use of text. Text from a user
never becomes a special token: someone who types "<|end|>" gets the tokens of these characters.
`Detokenizer` turns tokens into text one at a time and never breaks a UTF-8 character.
"""

from __future__ import annotations

import bisect
import codecs
import json
import re
import secrets
from collections.abc import Iterable, Sequence
from typing import Any, Protocol

from bitnet_runtime.errors import InvalidParameterError
from bitnet_runtime.once import once
from bitnet_runtime.tokenizer.costs import costly
from bitnet_runtime.tokenizer.definitions import (
    MARK,
    added_tokens,
    characters_a_token,
    check_tokens,
    model_texts,
    out_of_reach,
    parse,
)
from bitnet_runtime.tokenizer.edges import begun
from bitnet_runtime.tokenizer.library import Library, load


class Detokenizer(Protocol):
    """Text of a growing list of tokens; the pieces joined are the text of the whole."""

    def push(self, token: int) -> str:
        """The text that became certain with this token; "" within a character."""

    def flush(self) -> str:
        """The rest at the end; an unfinished character becomes U+FFFD."""


class Tokenizer:
    """The tokenizer of a file. Safe to share between threads."""

    def __init__(self, definition: bytes, vocab_size: int, bos_token: int | None = None, *, special: int = -1) -> None:
        """special: id of a token that counts as special, whatever the definition says."""
        parsed = parse(definition)
        if unsaid := [token for token in added_tokens(parsed) if token.get("id") == special and not token["special"]]:
            unsaid[0]["special"] = True
            definition = json.dumps(parsed, ensure_ascii=False).encode()
        self._apart = costly(parsed)
        self._definition, self._names = out_of_reach(parsed)
        self._library = self._load(self._definition if self._names else definition.decode(), False)
        ids = self._library.vocabulary()
        inside = {text: ids.pop(name) for text, name in self._names.items()}
        self._outside = {inside[text]: ids[text] for text in inside}  # ids of the file to ids of the library
        self._inside = {ids[text]: inside[text] for text in inside}
        ids |= inside
        added = added_tokens(parsed)
        check_tokens(ids, added, self._library.encode("", True), vocab_size)
        apart = {each["content"] for each in added if each["special"]}
        self._special_ids = {text: ids[text] for text in apart.intersection(ids)} | inside
        self._added = {each["content"]: ids.get(each["content"]) for each in added}
        self._vocab_size = vocab_size
        self._bos_token = bos_token

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
        parser = self._unshielding_parser if shielded else self._parser if parse_special else self._library
        text = self._settle(text) if shielded else text
        ids = parser.encode(text, bool(add_bos))  # which may be 1, or of numpy
        if self._inside:
            ids = [self._inside.get(token, token) for token in ids]
        return begun(ids, self._bos_token) if add_bos else ids

    def fewest_tokens(self, text: str) -> int:
        """A lower bound of the number of tokens in `text`, known without tokenizing."""
        return -(-len(text) // self._longest) if self._longest else 0

    def decode(self, tokens: Sequence[int], *, skip_special: bool = True) -> str:
        """The text of tokens; bytes that are not UTF-8 become U+FFFD."""
        return self._library.decode([self._outside.get(token, token) for token in tokens], bool(skip_special))

    def token_text(self, token: int | None) -> str:
        """A single token as it is written, such as "<|end|>"; "" for None."""
        return self._library.text(self._outside.get(token, token)) if token is not None else ""

    def token_bytes(self, token: int) -> bytes:
        """The bytes of a token inside a text; for a special token its name."""
        if self.all_bytes is not None:
            return self.all_bytes[token]
        written = self.token_text(token)
        special = token in self._special_ids.values()
        return (written if special else self.decode([token], skip_special=False) or written).encode()

    @once
    def all_bytes(self) -> list[bytes] | None:
        """`token_bytes` of every token; None if tokens have no bytes of their own."""
        table = self._byte_table or self._spaced_table
        if table is None:
            return None
        names = {token: text.encode() for text, token in self._special_ids.items()}
        return [names.get(token, written) for token, written in enumerate(table)]

    def special_ids_of(self, texts: Iterable[str]) -> dict[str, int]:
        """The texts that are special tokens, with their ids."""
        return {text: self._special_ids[text] for text in texts if text in self._special_ids}

    def added(self, text: str) -> int | None:
        """The id of an added token, special or not; None: there is none of this text."""
        return self._added.get(text)

    def special_ids(self) -> list[int]:
        """Ids of the special tokens, which never come from a user's text."""
        return sorted(self._special_ids.values())

    def shield(self, text: str) -> str:
        """`text` marked so that `encode(shielded=True)` sees no special token that begins in it.

        Not even one that comes into being when parts of it are joined: every character that a special
        token may begin with is marked.
        """
        return text.replace(MARK, "").translate(self._marked)

    def detokenizer(self, prompt: Sequence[int] = ()) -> Detokenizer:
        """A new detokenizer for text that continues `prompt`."""
        if self._byte_table is not None:
            return _ByteDetokenizer(self._byte_table)
        return _WindowDetokenizer(self, prompt)

    @once
    def _parser(self) -> Library:
        """The tokenizer that sees special tokens."""
        return self._parsing({})

    @once
    def _unshielding_parser(self) -> Library:
        """The same, but it sees no special token at the marks of `shield`, and drops the marks."""
        unmark = {"type": "Replace", "pattern": {"String": MARK}, "content": ""}
        normalizers = [unmark, *filter(None, [self._definition.get("normalizer")])]
        return self._parsing({"normalizer": {"type": "Sequence", "normalizers": normalizers}})

    def _parsing(self, changes: dict[str, Any]) -> Library:
        added = []
        for token in added_tokens(self._definition):
            if token["special"]:
                token = token | {"normalized": False}  # found while the marks are there
                if len(token["content"]) == 1:  # cannot be marked, so it is text
                    if token["content"] in model_texts(self._definition["model"]):
                        continue
                    token["content"] = secrets.token_hex()  # ids follow from places, so it stays
            added.append(token)
        return self._load(self._definition | changes | {"added_tokens": added}, True)

    def _load(self, definition: dict[str, Any] | str, parse_special: bool) -> Library:
        text = definition if isinstance(definition, str) else json.dumps(definition, ensure_ascii=False)
        return load(text, parse_special, self._apart)

    def _settle(self, text: str) -> str:
        """`text` with only the marks at special tokens: the others would hide other added tokens."""
        if not self._special:
            return text
        longest = max(map(len, self._special))

        def mark(found: re.Match[str]) -> str:
            place = found.start()
            there = text[place - 1 : place + 2 * longest].replace(MARK, "")
            nearest = bisect.bisect_right(self._special, there) - 1  # alone can be what it begins with
            return MARK if nearest >= 0 and there.startswith(self._special[nearest]) else ""

        text = self._idle.sub("", text)
        return re.sub(MARK, mark, text)

    @once
    def _special(self) -> list[str]:
        """Special tokens in order, without those that begin with another. A single character cannot be marked."""
        shortest: list[str] = []
        for text in sorted(self._special_ids):
            if len(text) > 1 and not (shortest and text.startswith(shortest[-1])):
                shortest.append(text)
        return shortest

    @once
    def _marked(self) -> dict[int, str]:
        """First characters of special tokens, in both cases as a template may change them, to the same with a mark."""
        first = {text[0] for text in self._special}
        first.update(*((char.lower()[0], char.upper()[0]) for char in first))
        return {ord(char): char + MARK for char in first}

    @once
    def _idle(self) -> re.Pattern[str]:
        """A mark after which no special token continues."""
        follows = re.escape("".join({text[1] for text in self._special}))
        return re.compile(f"{MARK}(?![{follows}])")

    @once
    def _longest(self) -> int | None:
        return characters_a_token(self._definition, byte_level_alphabet())

    @once
    def _byte_table(self) -> list[bytes] | None:
        """The bytes of every token, when the decoder does nothing but concatenate bytes."""
        if (self._definition.get("decoder") or {}).get("type") != "ByteLevel":
            return None
        byte_of = {char: byte for byte, char in enumerate(byte_level_alphabet())}
        table = [b""] * self._vocab_size  # ids without a token, and special tokens, have no text
        hidden = {*self._special_ids, *self._names.values()}
        for text, token in self._library.vocabulary().items():
            if text not in hidden:
                known = all(char in byte_of for char in text)
                table[token] = bytes(byte_of[char] for char in text) if known else text.encode()
        return table

    @once
    def _spaced_table(self) -> list[bytes] | None:
        """The same, when the decoder turns ▁ into a space and <0x0A> into a byte, as SentencePiece models do."""
        decoder = self._definition.get("decoder") or {}
        parts = decoder.get("decoders", [decoder])
        kinds = {part.get("type") for part in parts}
        spaced = "Metaspace" in kinds or {"type": "Replace", "pattern": {"String": "\u2581"}, "content": " "} in parts
        if not spaced or not kinds <= {"Metaspace", "Replace", "ByteFallback", "Fuse", "Strip"}:
            return None
        table = [b""] * self._vocab_size
        for text, token in self._library.vocabulary().items():
            byte = re.fullmatch("<0x([0-9A-F]{2})>", text) if "ByteFallback" in kinds else None
            table[token] = bytes.fromhex(byte[1]) if byte else text.replace("\u2581", " ").encode()
        return table


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
