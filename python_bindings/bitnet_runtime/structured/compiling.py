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
# First line of a grammar of thoughts, and of an answer behind them in the format that the rest says: its kind, whether
# the thoughts have begun or may be missing, the tags around them with their ids if they are special, and a gap.
_TAG = r'("(?:[^"\\]|\\.)*")(<\[\d+\]>)?'
_HEAD = re.compile(rf'%thoughts (json_schema|regex|grammar) (begun|possible) {_TAG} {_TAG} ("(?:\\n)*")\n')
# The library's words for too many items of its parser.
_CROWDED = re.compile(r"Current row has (\d+) items; max is (\d+)")


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
        thoughts = _HEAD.match(text) if kind == "grammar" else None
        if thoughts:
            kind, *tags = thoughts.groups()
            grammar = _behind_thoughts(_grammar(kind, text[thoughts.end() :]), kind, *tags)
        else:
            grammar = _grammar(kind, text)
        matcher = LLMatcher(self._tokenizer, grammar, log_level=0, limits=AMBIGUOUS if kind == "grammar" else LIMITS)
        check(matcher)
        matcher.compute_bitmask()  # the first token causes much of the work
        check(matcher)
        return matcher


def _grammar(kind: str, text: str) -> str:
    if kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=SPACES)
    return LLMatcher.grammar_from_regex(text) if kind == "regex" else LLMatcher.grammar_from_lark(text)


def _behind_thoughts(
    grammar: str, kind: str, begun: str, opens: str, opens_id: str | None, closes: str, closes_id: str | None, gap: str
) -> str:
    """A grammar of thoughts, and of an answer behind them. It agrees with `ThoughtReader` on where they end.

    Where the answer may come without thoughts, it is not one that begins as thoughts do: the intersection of a regular
    expression says so, JSON is none, and whoever has a grammar in Lark's notation has looked at that.
    """
    made = json.loads(grammar) if kind != "grammar" else {"grammars": [{"lark_grammar": grammar}]}
    made["grammars"][0]["name"] = "answer"
    rules = [f"held: thought {gap} @answer", "ANY: /(?s:.*)/"]
    if closes_id:  # its name in letters would end them for whoever reads the text
        rules += [f"thought: UNCLOSED {closes_id}", f"UNCLOSED: ANY & ~(ANY {closes} ANY)"]
    else:
        rules.append(f"thought[lazy]: ANY {closes}")
    plain = "@answer"
    if kind == "regex":
        plain = "PLAIN"
        rules.append(f"PLAIN: {made['grammars'][0]['lark_grammar'].removeprefix('start: ')} & ~({opens} ANY)")
    rules.append("start: held" if begun == "begun" else f"start: {opens_id or opens} held | {plain}")
    made["grammars"].insert(0, {"lark_grammar": "\n".join(rules)})
    return json.dumps(made)


def check(matcher: LLMatcher) -> None:
    """Raises ValueError, with the reason why the matcher stopped."""
    if matcher.is_error():
        why = re.sub(r"\n<.*", "", matcher.get_error(), flags=re.DOTALL)  # the state adds nothing to the reason
        why = " ".join(why.split())
        if crowded := _CROWDED.search(why):
            found, most = map(int, crowded.groups())
            why = (
                f"{found:,} alternatives are open at one place, expected at most {most:,} (a property that may be left "
                "out counts as 4); require properties, or write a choice of texts as a terminal, a name in CAPITALS"
            )
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
