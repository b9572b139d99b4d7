"""Whether a receipt is true: its answer is made again, with its own tokens as a draft, in the time of a prompt."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import NamedTuple

from bitnet_runtime.abilities import require_next_token
from bitnet_runtime.answers.receipt import Receipt, written
from bitnet_runtime.answers.writer import Writer
from bitnet_runtime.errors import (
    BitnetError,
    InvalidParameterError,
    NumericError,
    ReceiptError,
    TokenizerError,
    shown,
)
from bitnet_runtime.facts import ModelFacts
from bitnet_runtime.ids import token_ids
from bitnet_runtime.sessions.session import Session
from bitnet_runtime.shape import KV_TYPES, digest_of

TOGETHER = 64  # tokens of a draft


class Verdict(NamedTuple):
    """Whether the model makes this answer. token: the first that differs, counted from 0, unless all of it does."""

    valid: bool
    token: int | None
    why: str


class _Known:
    """Draft tokens that are right if the receipt is."""

    def __init__(self, tokens: Sequence[int]) -> None:
        self._tokens, self._at = tokens, 0

    def add(self, token: int) -> None:
        self._at += 1

    def guess(self, most: int) -> Sequence[int]:
        return self._tokens[self._at : self._at + most]


def verify(model: ModelFacts, receipt: Receipt) -> Verdict:
    """Raises ReceiptError: it says what cannot be."""
    if receipt.model != model.digest:
        return Verdict(False, None, f"it is of the model {shown(receipt.model, 70)}, this one is {model.digest}")
    digests: dict[str | None, str | None] = {digest_of(model, name): name for name in model.adapters}
    digests[None] = None
    if receipt.adapter not in digests:
        return Verdict(
            False, None, f"it is of the adapter {shown(receipt.adapter, 70)}, which is none of those that the model "
            "was loaded with",
        )  # fmt: skip
    try:
        writer = _writer(model, receipt, digests[receipt.adapter])
        with writer.session:
            return _compare(writer, receipt)
    except (InvalidParameterError, TokenizerError, NumericError) as error:  # of the options, also on the way
        raise ReceiptError(f"the receipt cannot be of this model: {error}") from None


def _writer(model: ModelFacts, receipt: Receipt, adapter: str | None) -> Writer:
    if receipt.kv_type not in KV_TYPES:
        raise InvalidParameterError(f"kv_type is {receipt.kv_type!r:.40}", "kv_type")
    require_next_token(model)
    prompt = token_ids(receipt.prompt, "prompt", model.vocab_size)
    options = receipt.options()
    if receipt.finish_reason == "cancelled":  # there may be more of it
        most, n = options.max_tokens, len(receipt.tokens)
        most = n if most is None else min(n, most)
        vars(options).update(max_tokens=most, min_tokens=min(options.min_tokens, most))
    session = Session._new(model, receipt.n_ctx, receipt.kv_type, adapter)
    try:
        if len(prompt) > session.n_ctx:
            raise InvalidParameterError(f"prompt has {len(prompt)} tokens, n_ctx is {session.n_ctx}", "prompt")
        writer = Writer(model, prompt, options, session, receipt=True)
    except BitnetError:
        session.close()
        raise
    answer = receipt.tokens + ([] if receipt.end is None else [receipt.end])
    writer._chooser.guesses = _Known(list(takewhile(lambda token: 0 <= token < model.vocab_size, answer)))
    writer._chooser.most = TOGETHER
    return writer


def _compare(writer: Writer, receipt: Receipt) -> Verdict:
    at = 0
    while not writer.done:
        writer.advance()
        while at < len(writer._transcript.tokens):
            if difference := _difference(writer, receipt, at):
                return Verdict(False, at, difference)
            at += 1
    n = len(receipt.tokens)
    if at < n:
        return Verdict(
            False, at, f"token {at} is {shown(receipt.tokens[at])} in the receipt; here the answer ends before it"
        )
    result = writer.result()
    if receipt.finish_reason == "cancelled":
        return Verdict(True, None, f"all {n} tokens are those of this model")
    if receipt.end is not None and _digest(writer, n) != receipt.digests[n]:
        return Verdict(False, n, f"the end, token {n}, was chosen from another state than here")
    if (receipt.end, receipt.finish_reason) != (writer.ended_by, result.finish_reason):
        return Verdict(
            False,
            n,
            f"it ends by {receipt.finish_reason} ({shown(receipt.end)}); "
            f"here by {result.finish_reason} ({writer.ended_by})",
        )
    return Verdict(True, None, f"all {n} tokens are those of this model")


def _digest(writer: Writer, n: int) -> str | None:
    """Of the state that a token was chosen from, if there was a choice."""
    digests = writer._witness.digests if writer._witness else []
    return written(digests[n]) if n < len(digests) else None


def _difference(writer: Writer, receipt: Receipt, at: int) -> str:
    if at >= len(receipt.tokens):
        return f"the receipt ends before token {at}; here the answer goes on"
    if _digest(writer, at) != receipt.digests[at]:
        return f"token {at} was chosen from another state than here: the prompt, the cache or its digest is another"
    here, there = writer._transcript.tokens[at], receipt.tokens[at]
    return "" if here == there else f"token {at} is {shown(there)} in the receipt, and {here} here"
