"""How text is cut into the pieces that BPE works on, by the names that GGUF has for it: `tokenizer.ggml.pre`.

The names, and which of them share a rule, are those of llama.cpp's src/llama-vocab.cpp. A rule is the one that
the tokenizer.json of the model has, or the code it is published with, where that is known. llama.cpp follows it
by functions and by expressions for std::regex; where they are known to cut otherwise, `Pre.differs` says so.

Normalization to NFC, of which llama.cpp has none, is that of the models that are known to have it.

Left out are afmoe, of whose digits llama.cpp has a function and no expression; deepseek-llm, whose ranges of letters
lost their ends there; and the names with which bytes are not written as letters: gemma4, granite-embed-multi-311m,
sarvam-moe, whitespace.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from bitnet_runtime.tokenizer import expressions as known

Step = dict[str, Any]


def _split(*expressions: str) -> list[Step]:
    return [
        {"type": "Split", "pattern": {"Regex": each}, "behavior": "Isolated", "invert": False} for each in expressions
    ]


def _bytes(words: bool) -> Step:
    """Bytes to letters. words: whether to split as GPT-2 does first."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": words}


_DIGITS: Step = {"type": "Digits", "individual_digits": True}
_THREES = "[0-9][0-9][0-9]"


class Pre(NamedTuple):
    """The rules of a name in tokenizer.ggml.pre. steps: pre-tokenizers of the `tokenizers` library."""

    steps: Sequence[Step]
    nfc: bool = False
    ignore_merges: bool = False  # a piece that is in the vocabulary is one token
    add_bos: bool = False  # default, if the file does not say
    differs: str = ""  # what of it llama.cpp has not


def _pieces(*expressions: str, **more: Any) -> Pre:
    return Pre([*_split(*expressions), _bytes(False)], **more)


_CASE = "words are cut before capital letters, there only before ASCII ones"
_NO_CASE = "words are cut before capital letters, there they are not"


_RULES: dict[str, Pre] = {
    "llama-bpe llama3 llama-v3 falcon3 falcon_e falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano": _pieces(
        known.LLAMA3, ignore_merges=True, add_bos=True
    ),
    "dbrx smaug-bpe chatglm-bpe glm4": _pieces(known.LLAMA3),
    "minicpm5": _pieces(r"\p{N}{1,3}", known.MINICPM5, ignore_merges=True),
    "jais-2": _pieces(known.JAIS2),
    "qwen2 deepseek-r1-qwen f2llmv2 stablelm2 hunyuan": _pieces(known.QWEN2, nfc=True),
    "megrez kormo grok-2 solar-open": _pieces(known.QWEN2),
    "laguna": _pieces(r"[^\n]+|[\n]+", known.QWEN2),
    "ufakzeka": _pieces(known.UFAKZEKA),
    "qwen35": _pieces(known.QWEN35, nfc=True),
    "seed-coder": _pieces(known.SEED_CODER),
    "bailingmoe bailingmoe2 llada-moe": _pieces(known.BAILING),
    "exaone-moe": _pieces(known.EXAONE_MOE),
    "gpt-2 phi-2 jina-es jina-de jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe gigachat a.x-4.0 mellum "
    "exaone4 jais trillion granite-docling": Pre([_bytes(True)]),
    "olmo mpt modern-bert": Pre([_bytes(True)], nfc=True),  # olmo: of GPT-NeoX, as in TriLM
    "smollm starcoder refact codeshell exaone minerva-7b mellum2": Pre([_DIGITS, _bytes(True)]),
    "command-r": Pre([_DIGITS, _bytes(True)], nfc=True),
    "tekken": _pieces(known.TEKKEN, ignore_merges=True, add_bos=True, differs=_CASE),
    "gpt-4o llama4 kanana2 talkie minimax-m2": _pieces(known.O200K, differs=_CASE),
    "granite-embed-multi-97m": _pieces(known.O200K, ignore_merges=True, differs=_CASE),
    "tiny_aya cohere2moe": _pieces(
        r"\d{1,3}(?=(?:\d{3})*\b)", known.O200K, differs=f"{_NO_CASE}, and digits are counted off before letters too"
    ),
    "youtu": _pieces(known.CJK, known.YOUTU, ignore_merges=True, differs=_NO_CASE),
    "kimi-k2": _pieces(known.KIMI_K2, differs="々 and 〇 are Han, there they are not"),
    "deepseek-coder": Pre([*_split(r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", known.DEEPSEEK_CJK), _DIGITS, _bytes(False)]),
    "deepseek-v3 hunyuan-dense joyai-llm hy_v4": _pieces(r"\p{N}{1,3}", known.KANA, known.DEEPSEEK3),
    "spark2_5": _pieces(r"\p{N}{1,3}", known.KANA, known.SPARK, r"\p{N}"),
    "superbpe": _pieces(r"\p{N}+", r"(?=(\d{3})+(?!\d))"),
    "bloom poro-chat gpt3-finnish": _pieces(known.BLOOM),
    "viking": _pieces(known.BLOOM, r"\p{N}"),
    "chameleon": Pre(
        [*_split(*known.CHAMELEON), _DIGITS, {"type": "Punctuation", "behavior": "Isolated"}, _bytes(True)],
        add_bos=True,
    ),
    "falcon": Pre(
        [
            {"type": "Punctuation", "behavior": "Contiguous"},
            _bytes(True),
            {"type": "Digits", "individual_digits": False},
            *_split(_THREES),
        ]
    ),
    # Of llama.cpp alone: no model has it.
    "default": _pieces(r"[\p{P}\$\+<=>\^~\|]+", known.GPT2, r"\p{N}+", _THREES),
}
"""Names that share a rule, with blanks between; the first is the one that is written."""

PRE: dict[str, Pre] = {name: rule for names, rule in _RULES.items() for name in names.split()}
