"""A SentencePiece model file (tokenizer.model), if it can be run exactly: BPE with byte fallback.

Fields: sentencepiece_model.proto of google/sentencepiece, of which a few dozen lines here read what is needed.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bitnet_export.foreign.source import SourceError
from bitnet_export.foreign.vocabulary import BYTE, MAX_TOKENS, NORMAL

_TIKTOKEN = re.compile(rb"[A-Za-z0-9+/]+=* \d+\r?\n")  # a piece in base64 and its number, a line each
_ADD = "add the tokenizer.json of the model, which save_pretrained of transformers writes"
_UNIGRAM, _BPE = 1, 2
_MODELS = {_UNIGRAM: "unigram", _BPE: "BPE", 3: "words", 4: "characters"}


@dataclass(frozen=True)
class SentencePiece:
    """The pieces of a model, in the order of their ids."""

    tokens: list[str]
    scores: list[float]
    kinds: list[int]  # as in vocabulary.py
    bos: int  # -1: none
    eos: int
    prefix: bool  # a text begins with a space


def read_sentencepiece(content: bytes, what: str) -> SentencePiece:
    """Read a model file. Raises SourceError if it is damaged, or the tokenizers library would not run it exactly."""
    if _TIKTOKEN.match(content):
        raise SourceError(f"{what} is a vocabulary of tiktoken, expected a SentencePiece model; {_ADD}")
    try:
        return _read(content)
    except SourceError as error:
        raise SourceError(f"{what}: {error}") from None
    except (ValueError, struct.error, IndexError) as error:  # also UnicodeDecodeError
        raise SourceError(f"{what} is not a SentencePiece model: {error}") from None


def _read(content: bytes) -> SentencePiece:
    tokens: list[str] = []
    scores: list[float] = []
    kinds: list[int] = []
    trainer: dict[int, Any] = {}
    normalizer: dict[int, Any] = {}
    for number, value in _fields(content):
        if number == 1:
            if len(tokens) == MAX_TOKENS:
                raise SourceError(f"it has more than {MAX_TOKENS} pieces, which no published vocabulary has")
            piece = dict(_fields(_message(value)))
            tokens.append(_message(piece.get(1, b"")).decode())
            scores.append(float(struct.unpack("<f", _message(piece.get(2, bytes(4))))[0]))
            kinds.append(_integer(piece.get(3, NORMAL)))
        elif number == 2:
            trainer = dict(_fields(_message(value)))
        elif number == 3:
            normalizer = dict(_fields(_message(value)))
    if not tokens:
        raise SourceError("it holds no pieces, expected a SentencePiece model")
    if bad := [kind for kind in kinds if not NORMAL <= kind <= BYTE]:
        raise SourceError(f"a piece has type {bad[0]}, expected {NORMAL} to {BYTE}")
    if (model := _integer(trainer.get(3, _UNIGRAM))) != _BPE:
        raise SourceError(
            f"the model is {_MODELS.get(model, model)}, expected BPE; add a tokenizer.json (save_pretrained writes it)"
        )
    if not _integer(trainer.get(35, 0)):
        raise SourceError("the model has no byte fallback, so that text would be lost; add a tokenizer.json")
    if _message(normalizer.get(2, b"")) or _integer(normalizer.get(4, 1)):
        raise SourceError("the model changes text before it is cut (normalizer_spec); add a tokenizer.json")
    ids = [_integer(trainer.get(number, default)) for number, default in ((41, 1), (42, 2))]
    bos, eos = (token if token < len(tokens) else -1 for token in ids)  # -1 is written as 2⁶⁴ − 1
    return SentencePiece(tokens, scores, kinds, bos, eos, prefix=bool(_integer(normalizer.get(3, 1))))


def _fields(data: bytes) -> Iterator[tuple[int, int | bytes]]:
    """Fields of a protocol buffer: integers as such, everything else as bytes."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        match key & 7:
            case 0:
                value, at = _varint(data, at)
                yield key >> 3, value
                continue
            case 1:
                size = 8
            case 2:
                size, at = _varint(data, at)
            case 5:
                size = 4
            case kind:
                raise ValueError(f"a field of kind {kind} at byte {at}")
        if size > len(data) - at:
            raise ValueError(f"a field of {size} bytes at byte {at}, of {len(data)}")
        yield key >> 3, data[at : at + size]
        at += size


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = 0
    for shift in range(0, 70, 7):
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise ValueError(f"a number of more than 10 bytes before byte {at}")


def _message(value: int | bytes) -> bytes:
    if isinstance(value, int):
        raise ValueError(f"a number, {value}, where text or a message is expected")
    return value


def _integer(value: int | bytes) -> int:
    if isinstance(value, bytes):
        raise ValueError("text or a message where a number is expected")
    return value
