"""Constrained decoding: JSON schema, regular expression or grammar, with the `llguidance` library.

A grammar may come from a stranger. It is compiled in a worker first, where time and memory are limited; what
that takes it takes here as well, and the library limits the work for each token after it.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections import OrderedDict
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from bitnet_runtime._native import ffi
from bitnet_runtime.errors import GrammarError, MissingDependencyError, TokenizerError, to_install
from bitnet_runtime.sandbox.worker import Worker, WorkerError
from bitnet_runtime.sessions.sampler import Sampler
from bitnet_runtime.structured.formats import given_as
from bitnet_runtime.tokenizer.text import Tokenizer

if TYPE_CHECKING:
    from bitnet_runtime.structured.compiling import Compiler

SECONDS = 2.0  # of CPU time to compile a grammar
MEMORY = 96 << 20  # bytes for that
KEPT = 32  # grammars
KEPT_BYTES = 256 << 10  # of their texts; compiled each byte may take 350
# A message of the library that mentions an option users do not have here.
OVERLAP = "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf"


class Grammars:
    """Grammars for the vocabulary of a model, the latest of them compiled. Safe to share between threads."""

    def __init__(self, tokenizer: Tokenizer, end_tokens: frozenset[int]) -> None:
        self.ends = end_tokens
        self._kept: OrderedDict[tuple[str, str], Any] = OrderedDict()
        tokens = tokenizer.all_bytes
        if tokens is None:
            raise TokenizerError("the tokens of this model are not bytes, so answers cannot be constrained to a format")
        special = tokenizer.special_ids()
        # Not a method: the library would hold this object, and Python's collector does not look into it.
        self.encode = functools.partial(_encode, tokenizer, tokens)
        self._compiler = _compiler(tokens, sorted(end_tokens), special, self.encode)
        vocabulary = {"tokens": [token.decode("latin-1") for token in tokens], "ends": sorted(end_tokens)}
        setup = json.dumps(vocabulary | {"special": special}, ensure_ascii=False).encode()
        self._worker = Worker(str(Path(__file__).with_name("compiling.py")), ("llguidance",), setup)
        self.size = self._compiler.size
        self.words = (len(tokens) + 31) // 32  # of a row, as bn_sampler has it

    def guide(self, kind: str, text: str) -> Guide:
        """A guide for a new answer. Raises GrammarError."""
        matcher = self._kept.pop((kind, text), None) or self._compile(kind, text)
        self._kept[kind, text] = matcher  # the latest
        while len(self._kept) > KEPT or sum(len(text) for _, text in list(self._kept)) > KEPT_BYTES:
            with contextlib.suppress(KeyError):  # another thread has dropped it
                self._kept.popitem(last=False)
        return Guide(matcher.deep_copy(), self, given_as(kind, text))

    def _compile(self, kind: str, text: str) -> Any:
        try:
            request = json.dumps([kind, text], ensure_ascii=False).encode()
            why = self._worker.ask(request, SECONDS, MEMORY).decode("utf-8", "replace")
            if not why:
                return self._compiler.matcher(kind, text)
        except (ValueError, WorkerError) as error:
            why = str(error)
        why = why.replace(OVERLAP, "the alternatives of a oneOf may overlap; write anyOf, the same where none do")
        remedy = "correct or simplify it"
        if kind == "grammar" and "::=" in text:
            remedy = "it looks like llama.cpp's GBNF; `python -m llguidance.gbnf_to_lark FILE` writes it as Lark's"
        raise GrammarError(f"{kind} is refused: {why}; {remedy}", kind)


def _encode(tokenizer: Tokenizer, tokens: Sequence[bytes], text: str) -> list[int]:
    """The tokens of a text inside another; none if they do not spell it, as when a tokenizer adds a space."""
    line = "\n"  # stands before a text that does not begin one
    for before in ("", line):
        skip = len(tokenizer.encode(before, add_bos=False))
        ids = tokenizer.encode(before + text, add_bos=False)[skip:]
        if b"".join([tokens[token] for token in ids]) == text.encode():
            return ids
    return []


def _compiler(*arguments: Any) -> Compiler:
    try:
        from bitnet_runtime.structured.compiling import Compiler
    except ImportError as error:
        raise MissingDependencyError(
            f"json_schema, regex and grammar need the `llguidance` library ({error}): {to_install('llguidance>=1.9')}"
        ) from error
    return Compiler(*arguments)


class Guide:
    """The position of one answer in its grammar."""

    def __init__(self, matcher: Any, grammars: Grammars, kind: str) -> None:
        """kind: as errors name it."""
        self._matcher, self._grammars, self._kind = matcher, grammars, kind
        self._rows = ffi.new("uint32_t[]", grammars.words + 1)

    @property
    def complete(self) -> bool:
        """Whether nothing can follow."""
        return bool(self._matcher.is_stopped())

    def admits(self, tokens: Sequence[int]) -> bool:
        """Whether they may come next."""
        return bool(self._matcher.validate_tokens(list(tokens)) == len(tokens))

    def allow(self, sampler: Sampler, draft: Sequence[int] = ()) -> list[int]:
        """Let the sampler choose what may come next; returns how the draft begins that may come.

        It ends where a token is forced: that is not sampled.
        """
        needed = (len(draft) or 1) * self._grammars.words + 1
        if len(self._rows) < needed:
            self._rows = ffi.new("uint32_t[]", needed)
        guesses: list[int] = []
        consumed = 0
        self._fill(0)
        for token in draft:
            if token in self._grammars.ends or not self._allows(len(guesses), token):
                break
            guesses.append(token)
            if len(guesses) == len(draft) or not self._matcher.consume_token(token):
                break
            consumed += 1
            if self.complete or self._matcher.compute_ff_tokens():
                break
            self._fill(len(guesses))
        self._matcher.rollback(consumed)
        sampler.struct.allowed = self._rows
        return guesses

    def take(self, tokens: Sequence[int]) -> None:
        """They come next."""
        for token in tokens:
            if token in self._grammars.ends:
                return
            self._matcher.consume_token(token)
        self._check()

    def forced(self) -> list[int]:
        """Take the tokens that have to come next, as the tokenizer would write them."""
        tokens: list[int] = [] if self.complete else self._matcher.compute_ff_tokens()
        if not tokens or not self.admits(tokens):
            return []
        self._matcher.consume_tokens(tokens)
        self._check()
        return tokens

    def _fill(self, row: int) -> None:
        place = int(ffi.cast("uintptr_t", self._rows + row * self._grammars.words))
        self._matcher.unsafe_compute_mask_ptr(place, (self._grammars.size + 31) // 32 * 4)
        self._check()

    def _allows(self, row: int, token: int) -> bool:
        return bool(self._rows[row * self._grammars.words + token // 32] >> token % 32 & 1)

    def _check(self) -> None:
        from bitnet_runtime.structured.compiling import check

        try:
            check(self._matcher)
        except ValueError as error:
            raise GrammarError(f"{self._kind} cannot be followed further: {error}", self._kind) from None
