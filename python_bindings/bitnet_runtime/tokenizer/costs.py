"""Whether a tokenizer.json may cost more time or memory than a text justifies.

Most definitions are proved cheap by inspection and run in this process. Regular expressions are not
(Oniguruma, which `tokenizers` uses, backtracks), nor are unknown steps: those run in a worker.
"""

from __future__ import annotations

import json
import unicodedata
from collections.abc import Callable, Mapping
from typing import Any

from bitnet_runtime.tokenizer import expressions as known
from bitnet_runtime.tokenizer.definitions import LONGEST_ADDED, STEPS, model_texts, steps

MOST_ADDED, MOST_ADDED_TEXT = 1 << 16, 1 << 20  # tokens, and characters of all of them
GROWTH = 16  # times a text may grow on its way to the model, by what the file says; 12 with SentencePiece's ▁
MOST_DECODED = 1 << 14  # bytes of a token's text; a growth of 16 with tokens of 1 KB

_CASELESS = "(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"

LINEAR = frozenset(
    {
        known.GPT2, known.LLAMA3, known.QWEN2, known.QWEN35, known.UFAKZEKA, known.MINICPM5, known.SEED_CODER,
        known.BAILING, known.EXAONE_MOE, known.O200K, known.TEKKEN, known.YOUTU, known.KIMI_K2,
        known.DEEPSEEK3, known.SPARK, known.BLOOM, known.KANA, known.CJK, known.DEEPSEEK_CJK,
        *(each.replace(known.SUFFIX, _CASELESS) for each in (known.LLAMA3, known.QWEN2, known.QWEN35)),
        r"\p{N}{1,3}", "[0-9][0-9][0-9]", r"\p{N}", r"\p{N}+", r"\s?\p{L}+", r"\s?\p{P}+", r"[\r\n]", r"[^\n]+|[\n]+",
        r"[\p{P}\$\+<=>\^~\|]+", " {2,}", " ", r"\s+", *known.CHAMELEON,
        r"[^\r\n\p{L}\p{N}_]?[\p{L}_]+|\p{N}{1,3}| ?[^\s\p{L}\p{N}_]+|\s*[\r\n]+[ \t]*|\s+",  # bitnet train
    }
)  # fmt: skip
"""Expressions of published tokenizers, each tested to take linear time on any text."""


class _CostlyError(Exception):
    pass


def costly(definition: Mapping[str, Any]) -> str:
    """What in a definition may cost more than the text justifies; "" when nothing can.

    Everything that is not known to be cheap counts, so that a new version of the library is safe too.
    """
    try:
        growth = 1.0
        for kind in ("normalizer", "pre_tokenizer"):
            for step in steps(definition, kind):
                _require(_cheap(step, _KINDS[kind]), step)
                growth *= _growth(step)
        _require(growth <= GROWTH, "steps that lengthen a text")
        growth = 1.0
        for step in steps(definition, "decoder"):
            _require(_cheap(step, _KINDS["decoder"]), step)
            growth *= _growth(step)
        longest = max((len(text.encode()) for text in model_texts(definition["model"])), default=0)
        _require(growth * longest <= MOST_DECODED, "long tokens, or decoders that lengthen a text")
        _check_model(definition["model"])
        _check_added(definition.get("added_tokens") or [])
        _check_edges(definition)
    except _CostlyError as error:
        return str(error)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return "a form that is not known"
    return ""


def _require(condition: bool, what: str | Mapping[str, Any]) -> None:
    if not condition:
        raise _CostlyError(what if isinstance(what, str) else json.dumps(what, ensure_ascii=False)[:300])


def _flag(value: Any) -> bool:
    return type(value) is bool


def _count(value: Any) -> bool:
    return type(value) is int and 0 <= value <= 64


def _name(value: Any) -> bool:
    return type(value) is str and len(value) <= 64


def _short(value: Any) -> bool:
    """A text that stays short whatever is done to it: only user text may have characters that grow."""
    return value is None or (_name(value) and len(value) <= 16 and unicodedata.is_normalized("NFKD", value))


def _pattern(value: Any) -> bool:
    (kind, text), *more = value.items()
    return not more and ((kind == "String" and 1 <= len(text) <= 64) or (kind == "Regex" and text in LINEAR))


_Fields = Mapping[str, Callable[[Any], bool]]
_REPLACE: _Fields = {"pattern": _pattern, "content": _short}
_METASPACE: _Fields = {
    "replacement": _short,
    "str_rep": _short,
    "prepend_scheme": _name,
    "split": _flag,
    "add_prefix_space": _flag,
}
_BYTES: _Fields = {"add_prefix_space": _flag, "trim_offsets": _flag, "use_regex": _flag}
_BERT: _Fields = dict.fromkeys(
    ("clean_text", "handle_chinese_chars", "lowercase", "strip_accents"), lambda value: value is None or _flag(value)
)
_NOTHING: _Fields = {}
_KINDS: Mapping[str, Mapping[str, _Fields]] = {
    "normalizer": {
        **dict.fromkeys(("NFC", "NFD", "NFKC", "NFKD", "Nmt", "Lowercase", "StripAccents", "ByteLevel"), _NOTHING),
        "Strip": {"strip_left": _flag, "strip_right": _flag}, "BertNormalizer": _BERT,
        "Prepend": {"prepend": _short}, "Replace": _REPLACE,
    },
    "pre_tokenizer": {
        **dict.fromkeys(("Whitespace", "WhitespaceSplit", "BertPreTokenizer"), _NOTHING),
        "ByteLevel": _BYTES, "Metaspace": _METASPACE, "Digits": {"individual_digits": _flag},
        "Punctuation": {"behavior": _name}, "Split": {"pattern": _pattern, "behavior": _name, "invert": _flag},
    },
    "decoder": {
        "Fuse": _NOTHING, "ByteFallback": _NOTHING, "ByteLevel": _BYTES, "Metaspace": _METASPACE, "Replace": _REPLACE,
        "Strip": {"content": _short, "start": _count, "stop": _count},
        "WordPiece": {"prefix": _short, "cleanup": _flag},
        "BPEDecoder": {"suffix": lambda value: value != "" and _short(value)},
    },
}  # fmt: skip


def _cheap(step: Mapping[str, Any], known: Mapping[str, _Fields]) -> bool:
    fields = known.get(step["type"])
    given = {name: value for name, value in step.items() if name != "type"}
    return fields is not None and set(given) <= set(fields) and all(fields[name](given[name]) for name in given)


def _growth(step: Mapping[str, Any]) -> float:
    """By what factor, in bytes, a step in the file may lengthen a text of one byte or more."""
    match step["type"]:
        case "Prepend":
            return 1 + len(step["prepend"].encode())
        case "Replace":
            return max(1.0, len(step["content"].encode()) / len(step["pattern"].get("String", " ").encode()))
        case "Metaspace":
            return 1 + len(step["replacement"].encode())
        case "ByteLevel" | "BertNormalizer" | "WordPiece":
            return 2 + bool(step.get("add_prefix_space"))
    return 1


def _check_model(model: Mapping[str, Any]) -> None:
    kind, vocab = model["type"], model["vocab"]
    known = {"BPE": _BPE, "WordLevel": _WORD_LEVEL, "WordPiece": _WORD_PIECE, "Unigram": _UNIGRAM}[kind]
    options = {name: value for name, value in model.items() if name not in ("vocab", "merges")}
    _require(_cheap(options, {kind: known}), f"{kind} with options that are not known to be cheap")
    if kind == "Unigram":
        lengths = [len(piece.encode()) for piece, _ in vocab]
        _require(max(lengths, default=0) <= 64 and sum(lengths) <= MOST_ADDED_TEXT, "long Unigram pieces")


_BPE: _Fields = {
    "dropout": lambda value: value is None, "unk_token": lambda value: True, "continuing_subword_prefix": _short,
    "end_of_word_suffix": _short, "fuse_unk": _flag, "byte_fallback": _flag, "ignore_merges": _flag,
}  # fmt: skip
_WORD_LEVEL: _Fields = {"unk_token": lambda value: True}
_WORD_PIECE: _Fields = {
    "unk_token": lambda value: True, "continuing_subword_prefix": _short,
    "max_input_chars_per_word": lambda value: type(value) is int and 0 <= value <= 200,
}  # fmt: skip
_UNIGRAM: _Fields = {"unk_id": lambda value: True, "byte_fallback": _flag}


def _check_added(tokens: list[dict[str, Any]]) -> None:
    texts = [token["content"] for token in tokens]
    _require(
        len(texts) <= MOST_ADDED
        and sum(map(len, texts)) <= MOST_ADDED_TEXT
        and len(max(texts, key=len, default="")) <= LONGEST_ADDED,
        "added tokens that are too many or too long",
    )
    for token in tokens:  # the library looks through all spaces at each token found
        strips = token["lstrip"] or token["rstrip"] or token["single_word"]
        _require(not strips or len(token["content"].split()) == 1, f"the added token {token['content']!r}, of spaces")


def _check_edges(definition: Mapping[str, Any]) -> None:
    """Not many tokens around a text, and the text once."""
    around = [step for step in steps(definition, "post_processor") if step["type"] != "ByteLevel"]
    _require(len(around) <= 1, "several post-processors")
    for step in around:
        if step["type"] == "TemplateProcessing":
            _require(
                len(step["single"]) <= STEPS
                and sum("Sequence" in piece for piece in step["single"]) == 1
                and len(step["pair"]) <= STEPS
                and len(step["special_tokens"]) <= STEPS
                and all(len(token["ids"]) <= STEPS for token in step["special_tokens"].values()),
                "a long post-processor",
            )
        else:
            _require(step["type"] in ("BertProcessing", "RobertaProcessing"), step)
