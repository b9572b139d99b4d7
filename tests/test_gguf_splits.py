"""How the names of `tokenizer.ggml.pre` cut text: by the published expressions, applied with another library."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from functools import cache

import pytest
import regex
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, pre_tokenizers

from bitnet_export.foreign.gguf.splits import PRE
from bitnet_export.foreign.gguf.tokenizer import tokenizer_of
from token_samples import EDGES

GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
END = r"'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]|'ſ"  # the last, as (?i:'s) has it
LLAMA3 = (
    rf"(?:{END})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
QWEN2 = rf"(?:{END})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
WORDS = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+END"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*END|"
)
AFTER = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
O200K = WORDS.replace("END", f"(?:{END})?") + r"\p{N}{1,3}" + AFTER
KANA = "[一-龥\u3040-\u309f\u30a0-\u30ff]+"
ASCII = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"""
BLOOM = r" ?[^(\s|.,!?…。，、।۔،)]+"
PUNCTUATION = r"[\p{P}!-/:-@\[-`{-~]"

RULES: dict[str, list[str]] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon_e falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano "
    "dbrx smaug-bpe chatglm-bpe glm4": [LLAMA3],
    "minicpm5": [
        r"\p{N}{1,3}",
        rf"{END}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "jais-2": [
        rf"(?:{END})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+"
        r"|\s{512}(?!\S)|\s{256}(?!\S)|\s{128}(?!\S)|\s{64}(?!\S)|\s{32}(?!\S)|\s{16}(?!\S)|\s{8}(?!\S)|\s{4}(?!\S)"
        r"|\s{1,2}(?!\S)|\s{1}"
    ],
    "qwen2 deepseek-r1-qwen f2llmv2 megrez kormo stablelm2 hunyuan grok-2 solar-open": [QWEN2],
    "laguna": [r"[^\n]+|[\n]+", QWEN2],
    "ufakzeka": [
        r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "qwen35": [
        rf"(?:{END})|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "seed-coder": [
        rf"(?:{END})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+"
        r"|\s*[\r\n]+|\s+(?!\S)|\s+"
    ],
    "bailingmoe bailingmoe2 llada-moe": [
        r"'(?:[sSſdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
        r"|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "exaone-moe": [
        rf"(?:{END})|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
        r"| ?[^\s\p{L}\p{N}]+[\r\n/]?|\s*[\r\n]|\s+(?!\S)|\s+"
    ],
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "exaone4 jais trillion granite-docling olmo mpt modern-bert": [GPT2],
    "smollm starcoder refact codeshell exaone minerva-7b mellum2 command-r": [r"\p{N}", GPT2],
    "tekken": [WORDS.replace("END", "") + r"\p{N}" + AFTER],
    "gpt-4o llama4 kanana2 talkie minimax-m2 granite-embed-multi-97m": [O200K],
    # The model has \b for the end, which in Oniguruma stands between a digit and what is no part of a word.
    "tiny_aya cohere2moe": [r"\p{Nd}{1,3}(?=(?:\p{Nd}{3})*(?![\p{L}\p{M}\p{N}\p{Pc}]))", O200K],
    "youtu": [
        "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + KANA,
        WORDS.replace("END", f"(?:{END})?") + r"\p{N}" + AFTER,
    ],
    "kimi-k2": [
        r"\p{Han}+|"
        + WORDS.replace("END", f"(?:{END})?").replace(r"\p{M}]", r"\p{M}&&[^\p{Han}]]")
        + r"\p{N}{1,3}"
        + AFTER.replace("/", "")
    ],
    "deepseek-coder": [r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", "[一-龥\u0800-\u4e00\uac00-\ud7ff]+", r"\p{N}"],
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": [
        r"\p{N}{1,3}", KANA, ASCII + r"[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
    ],
    "spark2_5": [r"\p{N}{1,3}", KANA, ASCII + r"|[\r\n]|\s+(?!\S)|\s+", r"\p{N}"],
    "superbpe": [r"\p{N}+", r"(?=(\d{3})+(?!\d))"],
    "bloom poro-chat gpt3-finnish": [BLOOM],
    "viking": [BLOOM, r"\p{N}"],
    "chameleon": [
        "<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )", r"\p{N}", PUNCTUATION, GPT2,
    ],
    "default": [r"[\p{P}\$\+<=>\^~\|]+", GPT2, r"\p{N}+", "[0-9]{3}"],
}  # fmt: skip
"""Rules as llama.cpp and the models state them; what one leaves over is a piece, too."""

NAMES = [(name, rule) for names, rule in RULES.items() for name in names.split()]


def by_the_rule(rule: Sequence[str], text: str) -> list[str]:
    pieces = [text]
    for expression in rule:
        pieces = [part for piece in pieces for part in isolated(expression, piece)]
    return pieces


def isolated(expression: str, piece: str) -> Iterator[str]:
    """Every match, and what is between matches."""
    cuts = {cut for match in regex.finditer(expression, piece, regex.V1) for cut in match.span()}
    for begin, end in itertools.pairwise(sorted(cuts | {0, len(piece)})):
        yield piece[begin:end]


@cache
def tokenizer(name: str) -> Tokenizer:
    """Of a GGUF vocabulary of single bytes, the token "ab", which no merge makes, and a start token."""
    metadata = {
        "tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": name, "tokenizer.ggml.merges": [],
        "tokenizer.ggml.tokens": [*sorted(pre_tokenizers.ByteLevel.alphabet()), "ab", "<|start|>"],
        "tokenizer.ggml.bos_token_id": 257,
    }  # fmt: skip
    return Tokenizer.from_str(tokenizer_of(metadata)[0].decode())


def ours(name: str, text: str) -> list[str]:
    return [text[begin:end] for _, (begin, end) in tokenizer(name).pre_tokenizer.pre_tokenize_str(text)]


def test_every_name_has_a_rule_here() -> None:
    """But falcon, which cuts letters that stand for bytes: test_tokens_gguf.py has the original."""
    assert sorted([*(name for name, _ in NAMES), "falcon"]) == sorted(PRE)


def test_names_say_more_than_the_cuts() -> None:
    """Whether texts become NFC, a piece that is a token is one, and a text has a start token by default."""
    llama3 = {
        "llama-bpe", "llama3", "llama-v3", "falcon3", "falcon_e", "falcon-h1", "pixtral", "midm-2.0", "lfm2",
        "jina-v5-nano",
    }  # fmt: skip
    nfc = {name for name in PRE if tokenizer(name).encode("e\u0301").ids == tokenizer(name).encode("é").ids}
    whole = {name for name in PRE if 256 in tokenizer(name).encode("ab").ids}
    begun = {name for name in PRE if tokenizer(name).encode("").ids == [257]}
    qwen2 = {"qwen2", "deepseek-r1-qwen", "f2llmv2", "stablelm2", "hunyuan"}
    assert nfc == qwen2 | {"qwen35", "olmo", "mpt", "modern-bert", "command-r"}
    assert whole == llama3 | {"minicpm5", "tekken", "youtu", "granite-embed-multi-97m"}
    assert begun == llama3 | {"tekken", "chameleon"}


@pytest.mark.parametrize(
    ("name", "text", "pieces"),
    [
        ("falcon-h1", "I'll DON'T 12345.\n\nx", ["I", "'ll", " DON", "'T", " ", "123", "45", ".\n\n", "x"]),
        ("deepseek-r1-qwen", "I'll 123", ["I", "'ll", " ", "1", "2", "3"]),
        ("ufakzeka", "Ankara'da 12", ["Ankara", "'da", " ", "1", "2"]),
        ("qwen35", "नमस्ते e\u0301a", ["नमस्ते", " e\u0301a"]),
        ("megrez", "नमस्ते e\u0301a", ["नमस", "\u094dत", "\u0947", " e", "\u0301a"]),
        ("laguna", "a:\n\nb", ["a", ":", "\n\n", "b"]),
        ("grok-2", "a:\n\nb", ["a", ":\n\n", "b"]),
        ("seed-coder", "a:\n\nb", ["a", ":", "\n\n", "b"]),
        ("bailingmoe", "I'd 12 \n\nb", ["I", "'d", " ", "1", "2", " \n\n", "b"]),
        ("exaone-moe", "one two 3/\n\n", ["one two", " ", "3", "/\n", "\n"]),
        ("jais-2", "a       b", ["a", "    ", "  ", " b"]),
        ("minicpm5", "12345 a", ["123", "45", " a"]),
        ("phi-2", "I'll I'LL 12345  a", ["I", "'ll", " I", "'", "LL", " 12345", " ", " a"]),
        ("starcoder", "a 123", ["a", " ", "1", "2", "3"]),
        (
            "tekken",
            "helloWORLDAb don't 12 a/b/\n",
            ["hello", "WORLDAb", " don", "'t", " ", "1", "2", " a", "/b", "/\n"],
        ),
        ("gpt-4o", "helloWORLD don't 1234 e\u0301É", ["hello", "WORLD", " don't", " ", "123", "4", " e\u0301", "É"]),
        ("tiny_aya", "1234567 a1234b", ["1", "234", "567", " a", "123", "4", "b"]),
        ("youtu", "한국어가나ab、。12 東京タワー", ["한국어가나", "ab", "、。", "1", "2", " ", "東京タワー"]),
        ("kimi-k2", "我想在apple工作12 カナ々", ["我想在", "apple", "工作", "12", " カナ", "々"]),
        ("deepseek-coder", "a\n\nf(x)  12", ["a", "\n", "\n", "f", "(", "x", ")", "  ", "1", "2"]),
        ("deepseek-v3", "a.foo(x) 東京タワー1234\n", ["a", ".foo", "(x", ")", " ", "東京タワー", "123", "4", "\n"]),
        ("spark2_5", "a)\n\n12", ["a", ")", "\n", "\n", "1", "2"]),
        ("superbpe", "one two 1234567 three", ["one two ", "1", "234", "567", " three"]),
        ("bloom", "It's 123, (a b)", ["It's", " 123", ", (", "a", " b", ")"]),
        ("viking", "It's 12, a", ["It's", " ", "1", "2", ",", " a"]),
        (
            "chameleon",
            "a      12!!<sentinel:7>",
            ["a", "    ", "  ", "1", "2", "!", "!", "<", "sentinel", ":", "7", ">"],
        ),
    ],
)
def test_what_a_rule_cuts(name: str, text: str, pieces: list[str]) -> None:
    assert ours(name, text) == pieces


TEXT = st.text(
    "aAéÉſ'sStTlLvVeEǅ 东京タ々ー한ㄱㄅनमस्ते\u0301\u0308 \t\n\r\u00a0\u3000019½²٣١.,!?/()<$+=_^`|~“！。、…।🙂👍🏽\u200d"
)


@pytest.mark.parametrize(("name", "rule"), NAMES)
def test_texts_are_cut_by_the_rule(name: str, rule: list[str]) -> None:
    more = ("<sentinel:12> IMGIMGABCZ    x", " " * 700 + "x", "1234567 x1234567y 12345", "我想在apple工作1314151天～")
    for text in (*EDGES, *more):
        assert ours(name, text) == by_the_rule(rule, text), text[:80]


@settings(max_examples=200)
@given(TEXT, st.sampled_from([(names.split()[0], rule) for names, rule in RULES.items()]))
def test_any_text_is_cut_by_the_rule(text: str, named: tuple[str, list[str]]) -> None:
    name, rule = named
    assert ours(name, text) == by_the_rule(rule, text)
