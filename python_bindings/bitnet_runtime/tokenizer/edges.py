"""The tokens around a text: those that a tokenizer adds, and the start token that a file names."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import tokenizers


def begun(ids: list[int], start: int | None) -> list[int]:
    """Tokens with the start token before them exactly once, even if a tokenizer has already added it."""
    if start is not None and ids[:1] != [start]:
        return [start, *ids]
    return ids[1:] if ids[:2] == [start, start] else ids


def edges_of(words: tokenizers.Tokenizer, start: int | None = None) -> tuple[list[int], list[int]]:
    """The tokens that go before and behind every text. start: the start token, if the file names one."""
    plain, whole = (words.encode("a", add_special_tokens=edges).ids for edges in (False, True))
    whole = begun(whole, start)
    at = next((i for i in range(len(whole)) if whole[i : i + len(plain)] == plain), 0)
    return whole[:at], whole[at + len(plain) :]
