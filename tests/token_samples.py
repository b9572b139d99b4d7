"""Texts on which tokenizers differ, and comparisons of ours with the original ones."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

import sentencepiece

import foreign_tokenizers as foreign
from bitnet_export.foreign.hf.folder import Folder
from bitnet_export.foreign.hf.tokenizer import tokenizer_of
from bitnet_runtime.tokenizer.text import Tokenizer

CODE = "def f(a: int) -> str:\n\tif a != 0:\n        return f'{a:04d}'  # don't\r\n\r\n\n   \n"

EDGES = ["", " ", "  ", "   a", "a  b   c    d", "\n\n \n\t x", "I'LL we've 'S", "1234567 12 ½ ² ٣٤", "é e\u0301 Å",
         "👩‍👩‍👧‍👦🏳️‍🌈 👍🏽", "\0\x01\x7f", "\ufeffx\u200b\u00a0y\u3000z", CODE, "ſ'ſ 'ſa", "a" * 500,
         "日本語のテキスト", "$x+=<y>^~|`"]  # fmt: skip

LLAMA2 = {
    "tokenizer_class": "LlamaTokenizer", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
    "add_bos_token": True, "add_eos_token": False,
}  # fmt: skip


def all_of_unicode(step: int = 1) -> Iterator[str]:
    """Every code point that is not a surrogate, in pieces and between letters.

    step: for planes with only ideographs, and empty ones, whose code points all have the same properties.
    """
    points = [*range(0xD800), *range(0xE000, 0x20000), *range(0x20000, 0xE0000, step), *range(0xE0000, 0xE0200)]
    points += range(0xE0200, 0x110000, step)
    for first in range(0, len(points), 1024):
        yield "".join(map(chr, points[first : first + 4096]))
    for first in range(0, 0x3000, 512):
        yield " ".join(f"a{chr(point)}1" for point in points[first : first + 512])


def texts(special: list[str], pieces: int | None = None) -> list[str]:
    return [*EDGES, *islice(all_of_unicode(64), pieces), *special, "x" + "".join(special) + "y", " ".join(special)]


def of_folder(folder: Folder) -> tuple[bytes | None, str | None, dict[str, Any], list[str]]:
    return tokenizer_of(folder, 1000)


def runtime(definition: bytes | None, generation: dict[str, Any]) -> Tokenizer:
    assert definition is not None
    return Tokenizer(definition, 1 << 21, generation.get("bos_token_id"))


def same(ours: Tokenizer, theirs: Any, samples: list[str]) -> None:
    """Compare encoding with and without special tokens, and decoding with and without them, whole and streamed."""
    for text in samples:
        for special in (False, True) if len(text) < 1000 else (False,):
            expected = theirs.encode(text, split_special_tokens=not special)
            if special and theirs.bos_token and expected[:2] == [theirs.bos_token_id] * 2:
                del expected[0]  # the text starts with the start token, and ours does not repeat it
            assert ours.encode(text, parse_special=special) == expected, (special, text[:80])
            shown = [theirs.decode(expected, skip_special_tokens=skip) for skip in (True, False)]
            assert [ours.decode(expected, skip_special=skip) for skip in (True, False)] == shown
            if len(expected) < 700:
                assert streamed(ours, expected) == shown[0]


def streamed(tokenizer: Tokenizer, tokens: list[int]) -> str:
    out = tokenizer.detokenizer()
    return "".join(map(out.push, tokens)) + out.flush()


def spm(prefix: bool = True, **options: Any) -> sentencepiece.SentencePieceProcessor:
    return sentencepiece.SentencePieceProcessor(model_proto=foreign.sentencepiece_model(prefix, **options))


def spm_texts(pieces: int | None = None) -> list[str]:
    return [text for text in texts(["<s>", "</s>", "<unk>"], pieces) if text and "\0" not in text and "▁" not in text]
