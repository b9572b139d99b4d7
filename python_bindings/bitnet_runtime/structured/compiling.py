"""Calls of the `llguidance` library. Also the program of a worker, in which every grammar is tried first."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

# The rest are the library's: some 20 ms of work for a token at most. A state takes 1 to 2 kB.
LIMITS = LLParserLimits(max_lexer_states=30_000, verbose_errors=False)
# A grammar that reads a text in many ways takes time with the third power of the items of a row: 5 ms a token at this
# number, 300 at the library's. A schema reads it in one way, and 300 properties that may be left out are 1,200 items.
AMBIGUOUS = LLParserLimits(max_lexer_states=30_000, verbose_errors=False, max_items_in_row=500)
# One way to write JSON, that of json.dumps: free white space is where small models get lost, and no token of it
# could be taken for granted. "x-guidance" in a schema says otherwise.
SPACES: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}


class _Vocabulary:
    """A vocabulary in the form that LLTokenizer takes."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, tokens: list[bytes], ends: list[int], special: list[int], encode: Callable[[str], list[int]]):
        self.tokens, self.special_token_ids, self.eos_token_id, self._encode = tokens, special, ends[0], encode
        hidden = {*ends, *special}
        self._ids = {written: token for token, written in enumerate(tokens) if written and token not in hidden}
        self._longest = max(map(len, self._ids), default=0)

    def __call__(self, text: str) -> list[int]:
        return self._encode(text) or self._greedy(text.encode())

    def _greedy(self, text: bytes) -> list[int]:
        """Greedy: always the longest token."""
        ids, at = [], 0
        while at < len(text):
            size = next((n for n in range(self._longest, 0, -1) if text[at : at + n] in self._ids), 0)
            if not size:
                return []
            ids.append(self._ids[text[at : at + size]])
            at += size
        return ids


class Compiler:
    """Grammars for one vocabulary."""

    def __init__(
        self, tokens: Sequence[bytes], ends: Sequence[int], special: Sequence[int], encode: Callable[[str], list[int]]
    ) -> None:
        """tokens: the bytes of each, the name of a special one; ends: those that end an answer, or none."""
        all_tokens, eos = list(tokens), list(ends)
        if not eos:  # the library wants one: behind the vocabulary, where no model finds it
            eos = [len(all_tokens)]
            all_tokens.append(b"")
        self.size = len(all_tokens)
        wrapped: Any = _Vocabulary(all_tokens, eos, list(special), encode)
        self._tokenizer = LLTokenizer(wrapped, n_vocab=self.size, eos_token=eos)

    def matcher(self, kind: str, text: str) -> LLMatcher:
        """Raises ValueError, with the reason why it cannot be compiled."""
        if kind == "json_schema":
            grammar = LLMatcher.grammar_from_json_schema(text, defaults=SPACES)
        else:
            make = LLMatcher.grammar_from_regex if kind == "regex" else LLMatcher.grammar_from_lark
            grammar = make(text)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=AMBIGUOUS if kind == "grammar" else LIMITS)
        check(matcher)
        matcher.compute_bitmask()  # the first token causes much of the work
        check(matcher)
        return matcher


def check(matcher: LLMatcher) -> None:
    """Raises ValueError, with the reason why the matcher stopped."""
    if matcher.is_error():
        why = re.sub(r"\n<.*", "", matcher.get_error(), flags=re.DOTALL)  # the state adds nothing to the reason
        why = " ".join(why.split())
        raise ValueError(f"{why:.300}" if why != "NoExtensionBias" else "no text matches it")


_compiler: Compiler | None = None


def answer(request: bytes) -> bytes:
    """The first request is a vocabulary, every other [kind, text]; the reply is the error, or nothing."""
    global _compiler
    asked = json.loads(request)
    if _compiler is None:
        tokens = [token.encode("latin-1") for token in asked["tokens"]]
        _compiler = Compiler(tokens, asked["ends"], asked["special"], lambda _: [])  # a trial has no tokenizer
        return b""
    try:
        _compiler.matcher(*asked)
    except MemoryError:
        raise
    except BaseException as error:  # a panic of the library is not an Exception
        return f"{error}"[:500].encode() or b"?"
    return b""
