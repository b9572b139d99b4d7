"""Regular expressions by which published tokenizers cut a text into pieces, in Oniguruma's syntax.

They are those of the tokenizer.json files, or of the code that the models are published with.
"""

from __future__ import annotations

SUFFIX = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORD, _OTHER, _SPACES = r"[^\r\n\p{L}\p{N}]?", r" ?[^\s\p{L}\p{N}]+[\r\n]*|", r"\s*[\r\n]+|\s+(?!\S)|\s+"


def _cased(suffix: str, number: str, other: str, but: str = "") -> str:
    """Words whose capital letters come first, if there are any. but: letters that are none of theirs."""
    capital, small = rf"[\p{{Lu}}\p{{Lt}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]", rf"[\p{{Ll}}\p{{Lm}}\p{{Lo}}\p{{M}}{but}]"
    words = "".join(f"{_WORD}{capital}{a}{small}{b}{suffix}|" for a, b in (("*", "+"), ("+", "*")))
    return words + number + other + _SPACES


GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA3 = rf"{SUFFIX}|{_WORD}\p{{L}}+|\p{{N}}{{1,3}}|{_OTHER}{_SPACES}"
QWEN2 = LLAMA3.replace("{1,3}", "")
QWEN35 = rf"{SUFFIX}|{_WORD}[\p{{L}}\p{{M}}]+|\p{{N}}| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
UFAKZEKA = QWEN2.removeprefix(f"{SUFFIX}|")
MINICPM5 = LLAMA3.replace("{1,3}", "+")
SEED_CODER = rf"{SUFFIX}|{_WORD}\p{{L}}+|\p{{N}}{{1}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|{_SPACES}"
BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
EXAONE_MOE = (
    rf"{SUFFIX}|{_WORD}(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
JAIS2 = LLAMA3.removesuffix(r"\s+(?!\S)|\s+") + (
    "".join(rf"\s{{{most}}}(?!\S)|" for most in (512, 256, 128, 64, 32, 16, 8, 4, "1,2")) + r"\s{1}"
)
_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|"
O200K = _cased(f"{SUFFIX}?", r"\p{N}{1,3}|", _SLASH)
TEKKEN = _cased("", r"\p{N}|", _SLASH)
YOUTU = _cased(f"{SUFFIX}?", r"\p{N}|", _SLASH)
KIMI_K2 = r"[\p{Han}]+|" + _cased(f"{SUFFIX}?", r"\p{N}{1,3}|", _OTHER, r"&&[^\p{Han}]")
_ASCII = r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
DEEPSEEK3 = _ASCII + r"| ?[\p{P}\p{S}]+[\r\n]*|" + _SPACES
SPARK = _ASCII + r"| ?[\p{P}\p{S}]+|[\r\n]|\s+(?!\S)|\s+"
BLOOM = " ?[^(\\s|.,!?…。，、।۔،)]+"

# Of rules of several steps.
KANA = "[一-龥\u3040-ゟ゠-ヿ]+"
CJK = "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|" + KANA
DEEPSEEK_CJK = "[一-龥ࠀ-一가-\ud7ff]+"
CHAMELEON = ("<sentinel:[0-9]+>", "(IMGIMG)((A|B|C|D|E|F|G|H|I){1,4})Z", r"([\t\n]|    |  )")
