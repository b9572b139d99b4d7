"""The reader of tokenizer.model on bytes that are none: a result or one clear error.

Messages are written here by hand, after sentencepiece_model.proto and the encoding of protocol buffers.
"""

from __future__ import annotations

import random
import struct
from typing import Any

import pytest

import foreign_tokenizers as foreign
from bitnet_export.foreign.hf.sentencepiece import read_sentencepiece
from bitnet_export.foreign.source import SourceError
from bitnet_export.foreign.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN


def varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def field(number: int, value: int | float | bytes) -> bytes:
    if isinstance(value, bytes):
        return varint(number << 3 | 2) + varint(len(value)) + value
    if isinstance(value, float):
        return varint(number << 3 | 5) + struct.pack("<f", value)
    return varint(number << 3) + varint(value)


def piece(text: str, score: float = 0.0, kind: int = NORMAL) -> bytes:
    return field(1, field(1, text.encode()) + field(2, score) + field(3, kind))


PIECES = b"".join(
    [piece("<unk>", kind=UNKNOWN), piece("<s>", kind=CONTROL), piece("</s>", kind=CONTROL)]
    + [piece(f"<0x{byte:02X}>", kind=BYTE) for byte in range(256)]
    + [piece("a", -1.0), piece("b", -2.0), piece("ab", -0.5)]
)
TRAINER = field(2, field(3, 2) + field(35, 1))
NORMALIZER = field(3, field(3, 0) + field(4, 0))
MODEL = PIECES + TRAINER + NORMALIZER


def test_a_model_written_by_hand() -> None:
    more = varint(9 << 3 | 1) + bytes(8)  # a field of eight bytes that is not read
    found = read_sentencepiece(MODEL + more, "m")
    assert found.tokens[-3:] == ["a", "b", "ab"] and found.scores[-3:] == [-1.0, -2.0, -0.5]
    assert (found.bos, found.eos, found.prefix) == (1, 2, False)
    none = field(2, field(3, 2) + field(35, 1) + field(41, (1 << 64) - 1) + field(42, 300))
    found = read_sentencepiece(PIECES + none + field(3, field(4, 0)), "m")
    assert (found.bos, found.eos, found.prefix) == (-1, -1, True)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "m: it holds no pieces"),
        (TRAINER + NORMALIZER, "m: it holds no pieces"),
        (MODEL + piece("x", kind=7), "m: a piece has type 7, expected 1 to 6"),
        (MODEL + piece("x", kind=0), "m: a piece has type 0"),
        (PIECES + NORMALIZER, "m: the model is unigram, expected BPE; add a tokenizer.json"),
        (PIECES + field(2, field(3, 9)), "m: the model is 9, expected BPE"),
        (PIECES + field(2, field(3, 2)), "m: the model has no byte fallback"),
        (PIECES + TRAINER, "m: the model changes text before it is cut"),
        (PIECES + TRAINER + field(3, field(2, b"map") + field(4, 0)), "m: the model changes text"),
        (MODEL + field(1, 5), "m is not a SentencePiece model: a number, 5, where text or a message is expected"),
        (MODEL + field(1, field(1, 5)), "a number, 5, where text"),
        (MODEL + field(1, field(1, b"\xff")), "not a SentencePiece model: 'utf-8' codec"),
        (MODEL + field(1, field(1, b"x") + field(2, b"12345")), "not a SentencePiece model: unpack requires"),
        (MODEL + field(1, field(1, b"x") + field(3, b"1")), "text or a message where a number is expected"),
        (PIECES + field(2, field(3, b"2")), "text or a message where a number is expected"),
        (MODEL + b"\x0b", "not a SentencePiece model: a field of kind 3 at byte"),
        (MODEL + b"\xff" * 10, "a number of more than 10 bytes before byte"),
        (MODEL + b"\x08" + b"\x80" * 11, "a number of more than 10 bytes"),
        (MODEL + b"\x0a\xff\xff\xff\xff\x0f", "a field of 4294967295 bytes at byte"),
        (MODEL + b"\x09\0\0", "a field of 8 bytes at byte"),
        (MODEL + b"\x80", "not a SentencePiece model: index out of range"),
    ],
)
def test_what_is_none_is_refused(content: bytes, message: str) -> None:
    with pytest.raises(SourceError) as refused:
        read_sentencepiece(content, "m")
    assert message in str(refused.value)


@pytest.mark.parametrize("content", [MODEL, foreign.sentencepiece_model()], ids=["by hand", "trained"])
def test_random_damage(content: bytes) -> None:
    """Any byte changed, any length: a model of as many pieces at most, or one SourceError."""
    rng, outcomes = random.Random(0), set[Any]()
    for _ in range(400):
        damaged = bytearray(content[: rng.choice((len(content), rng.randrange(len(content))))])
        for _ in range(rng.choice((0, 1, 8)) if damaged else 0):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            found = read_sentencepiece(bytes(damaged), "m")
            assert len(found.tokens) == len(found.scores) == len(found.kinds) <= len(content)
            outcomes.add("read")
        except SourceError:
            outcomes.add("refused")
    assert outcomes == {"read", "refused"}
