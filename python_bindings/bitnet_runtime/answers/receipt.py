"""Receipts: what an answer was made of and from, so that any machine can make it again and compare.

Of each token that was chosen a receipt has 64 bits of a hash of the state it was chosen from: all bits of the
vector behind the last layer. Logits follow from that vector alone, and it is at hand for every token, while a
sampler computes few of the logits. The same bits everywhere (docs/why-fast.md) make them comparable.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Self, get_args

from bitnet_runtime.defaults import Sampling, resolve, whole
from bitnet_runtime.errors import ReceiptError, shown

VERSION = 1
MOST = 64 << 20  # bytes of one
Finish = Literal["stop", "length", "cancelled"]
"""Why a text ended: an end token or a stop text; max_tokens or the context; `Stream.close()`, `Session.cancel()` or an
error, which whoever reads the text gets."""


@dataclass(frozen=True)
class Receipt:
    """Of one answer."""

    model: str  # SHA-256 of the packed file
    adapter: str | None  # and of that of the adapter, if the text had one
    kv_type: str
    n_ctx: int  # of the session
    prompt: list[int]
    tokens: list[int]
    end: int | None  # the end token that came, if one did
    finish_reason: str
    seed: int
    sampling: dict[str, Any]  # all other options, as JSON has them
    digests: list[str | None]  # of the tokens, then of the end token; None where a grammar left no choice

    def to_json(self) -> str:
        """A JSON object in one line."""
        return json.dumps({"bitnet_receipt": VERSION} | dataclasses.asdict(self), allow_nan=False)

    @classmethod
    def from_json(cls, text: str | bytes | dict[str, Any]) -> Self:
        """Of the JSON, or of the dictionary that it is, as in an answer of the server. Raises ReceiptError."""
        if isinstance(text, dict):
            try:
                text = json.dumps(text)
            except (TypeError, ValueError, RecursionError) as error:
                raise ReceiptError(f"the receipt is no JSON: {error}") from None
        if not isinstance(text, str | bytes):
            raise ReceiptError(f"the receipt is {shown(text)}, expected its JSON")
        if len(text) > MOST:
            raise ReceiptError(f"the receipt has {len(text):,} bytes or more, expected at most {MOST:,}")
        try:
            fields = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ReceiptError(f"the receipt is no JSON: {error}") from None
        if not isinstance(fields, dict) or fields.pop("bitnet_receipt", None) != VERSION:
            expected = f'a JSON object with "bitnet_receipt": {VERSION}; in an answer of the server each choice has one'
            raise ReceiptError(f"this is no receipt: expected {expected}")
        names = {field.name for field in dataclasses.fields(cls)}
        if set(fields) != names:
            lacks, unknown = sorted(names - set(fields)), sorted(set(fields) - names)
            found = f"lacks {shown(lacks)}" if lacks else f"has {shown(unknown)}, which no receipt has"
            raise ReceiptError(f"the receipt {found}")
        receipt = cls(**fields)
        receipt._check()
        return receipt

    def _check(self) -> None:
        """Check types; the model checks the values."""
        right = {
            "model": isinstance(self.model, str),
            "adapter": isinstance(self.adapter, str | None),
            "kv_type": isinstance(self.kv_type, str),
            "n_ctx": type(self.n_ctx) is int,
            "prompt": _are_ids(self.prompt) and bool(self.prompt),
            "tokens": _are_ids(self.tokens),
            "end": self.end is None or (_are_ids([self.end]) and self.finish_reason == "stop"),
            "finish_reason": self.finish_reason in get_args(Finish),
            "seed": type(self.seed) is int,
            "sampling": isinstance(self.sampling, dict) and not {"seed", "draft"} & self.sampling.keys(),
            "digests": isinstance(self.digests, list)
            and all(each is None or isinstance(each, str) for each in self.digests),
        }
        if wrong := [name for name in right if not right[name]]:
            raise ReceiptError(f"{wrong[0]} of the receipt is {shown(getattr(self, wrong[0]))}, which cannot be")
        if len(self.digests) != (chosen := len(self.tokens) + (self.end is not None)):
            raise ReceiptError(f"the receipt has {len(self.digests)} digests, expected {chosen}: one of each token")

    def options(self) -> Sampling:
        """Of the sampling and the seed. Raises InvalidParameterError."""
        asked = dict(self.sampling)
        if isinstance(asked.get("logit_bias"), Mapping):
            pairs = asked["logit_bias"].items()
            asked["logit_bias"] = {_number(token): -math.inf if x == "-inf" else x for token, x in pairs}
        return resolve(asked | {"draft": 0, "seed": whole("seed", self.seed, 0, 2**64 - 1)}, Sampling())


def sampling_of(options: Sampling) -> dict[str, Any]:
    """All options but the seed, and drafts, which change nothing; as in JSON."""
    values = dataclasses.asdict(options) | {"stop": [*options.stop], "stop_token_ids": [*options.stop_token_ids]}
    if options.logit_bias is not None:
        values["logit_bias"] = {f"{token}": "-inf" if x == -math.inf else x for token, x in options.logit_bias.items()}
    return {name: value for name, value in values.items() if name not in ("seed", "draft")}


def written(digest: int | None) -> str | None:
    return None if digest is None else f"{digest:016x}"


def _are_ids(value: Any) -> bool:
    return isinstance(value, list) and all(type(token) is int for token in value)


def _number(text: str) -> int:
    return int(text) if text.isdecimal() and len(text) < 12 else -1
