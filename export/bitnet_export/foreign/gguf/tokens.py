"""A tokenizer of the `tokenizers` library as the vocabulary of a GGUF file.

GGUF specifies how text is split into pieces by a name that llama.cpp knows, `tokenizer.ggml.pre`. The name is
found by comparing the rules; a tokenizer with other rules is refused. The inverse of this module is `tokenizer`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from bitnet.config import ModelConfig
from bitnet_export.foreign.side_files import generation_of, special_words
from bitnet_export.foreign.vocabulary import BYTE, CONTROL, NORMAL, UNKNOWN, UNUSED, USER_DEFINED, load
from bitnet_export.packed import records
from bitnet_export.packed.reader import PackedFile
from bitnet_runtime.tokenizer.edges import edges_of

from .output import Value
from .splits import PRE
from .tokenizer import ENDS

_ONLY_IDS = "write the file for token ids (--no-tokenizer)"
Noted = tuple[dict[str, Value], list[str]]  # keys, and notes on differences in llama.cpp


def vocabulary_of(file: PackedFile, config: ModelConfig, wanted: bool) -> tuple[dict[str, Value], list[str], list[str]]:
    """The keys of the tokenizer of a packed file, notes, and the problems that prevent writing them."""
    tokenizer, template = file.section(records.TOKENIZER), file.section(records.TEMPLATE)
    if tokenizer is None or not wanted:
        return {"tokenizer.ggml.model": "none"}, [], []
    try:
        keys, notes = vocabulary(tokenizer, config.vocab_size, generation_of(file))
    except ValueError as error:
        return {}, [], [str(error)]
    return keys | ({} if template is None else {"tokenizer.chat_template": template.decode()}), notes, []


def vocabulary(tokenizer: bytes, vocab_size: int, generation: Mapping[str, Any]) -> Noted:
    """The keys `tokenizer.ggml.*`, and notes. tokenizer: JSON; generation: of METADATA.

    Raises ValueError naming rules that llama.cpp does not have.
    """
    try:
        rules = json.loads(tokenizer)
        model, added = rules["model"], rules.get("added_tokens") or []
        if model["type"] != "BPE":
            raise ValueError(f"the tokenizer is a {model['type']} model; llama.cpp's vocabularies are BPE")
        tokens, types = _tokens(model, added, vocab_size)
        keys, notes = _byte_level(rules) if _is_byte_level(rules) else _sentencepiece(rules, tokens)
    except (KeyError, TypeError, AttributeError, RecursionError, json.JSONDecodeError) as error:
        raise ValueError(f"section TOKENIZER is not a tokenizer of the `tokenizers` library: {error!r}") from None
    keys |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    special, lost = _special(tokens, types, generation, _edges(tokenizer, generation.get("bos_token_id")))
    return keys | special, notes + lost


def _edges(tokenizer: bytes, start: int | None) -> tuple[int | None, int | None]:
    """The tokens that the engine adds before and after a text. Raises ValueError if there are several on a side."""
    words = load(tokenizer, "section TOKENIZER")
    words.no_padding()
    words.no_truncation()
    before, after = edges_of(words, start)
    if len(before) > 1 or len(after) > 1:
        raise ValueError(
            f"the tokenizer puts the tokens {before} before a text and {after} after it, llama.cpp at most one; "
            f"{_ONLY_IDS}"
        )
    return next(iter(before), None), next(iter(after), None)


def _special(
    tokens: list[str], types: list[int], generation: Mapping[str, Any], edges: tuple[int | None, int | None]
) -> Noted:
    """The keys of special tokens, and which of them llama.cpp adds to a text."""
    place = {token: i for i, token in enumerate(tokens)}
    named = {name: place.get(word) for name, word in special_words(generation).items()}
    (before, after), ends = edges, generation.get("eos_token_ids") or []
    if after is not None and ends and after not in ends:
        raise ValueError(
            f"the tokenizer ends a text with {tokens[after]!r:.40}, which ends no answer; llama.cpp has one token for "
            f"both; {_ONLY_IDS}"
        )
    end = after if after is not None else named.get("eos_token")
    if after is None and end not in ends:
        end = next(iter(ends), None)
    # Other end tokens of answers: first those that llama.cpp does not know by name.
    known = {i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind == CONTROL and token in ENDS}
    others = sorted((token for token in ends if token != end), key=lambda token: token in known)
    lost = ", ".join(tokens[token] for token in others[2:] if token not in known)
    special = {
        "bos": named.get("bos_token") if before is None else before,
        "eos": end,
        "eot": next(iter(others), None),
        "eom": next(iter(others[1:]), None),
        "padding": named.get("pad_token"),
    }
    keys: dict[str, Value] = {f"tokenizer.ggml.{name}_token_id": i for name, i in special.items() if i is not None}
    keys |= {"tokenizer.ggml.add_bos_token": before is not None, "tokenizer.ggml.add_eos_token": after is not None}
    return keys, [f"an answer does not end at {lost}: llama.cpp has no more than three end tokens"] if lost else []


def _tokens(model: Mapping[str, Any], added: list[dict[str, Any]], vocab_size: int) -> tuple[list[str], list[int]]:
    """Text and type of every id; ids that the tokenizer lacks are unused tokens."""
    names: dict[int, str] = {token: word for word, token in model["vocab"].items()}
    types = dict.fromkeys(names, NORMAL)
    if model.get("byte_fallback"):
        types |= {names_id: BYTE for word, names_id in model["vocab"].items() if _is_byte(word)}
    if model.get("unk_token") in model["vocab"]:
        types[model["vocab"][model["unk_token"]]] = UNKNOWN
    for token in added:
        names[token["id"]] = token["content"]
        if types.get(token["id"]) != UNKNOWN:
            types[token["id"]] = CONTROL if token["special"] else USER_DEFINED
    if names and not 0 <= min(names) <= max(names) < vocab_size:
        raise ValueError(f"the tokenizer has token {max(names)}, the model {vocab_size} tokens")
    return (
        [names.get(i, f"[PAD{i}]") for i in range(vocab_size)],
        [types.get(i, UNUSED) for i in range(vocab_size)],
    )


def _is_byte(word: str) -> bool:
    return len(word) == 6 and word.startswith("<0x") and word.endswith(">")


def _parts(rule: Mapping[str, Any] | None, inner: str) -> list[dict[str, Any]]:
    """The steps of a normalizer or pre-tokenizer."""
    if rule is None:
        return []
    return (
        [step for part in rule[inner] for step in _parts(part, inner)] if rule["type"] == "Sequence" else [dict(rule)]
    )


# ---- byte-level BPE: model "gpt2" ----


def _is_byte_level(rules: Mapping[str, Any]) -> bool:
    return any(step["type"] == "ByteLevel" for step in _parts(rules.get("pre_tokenizer"), "pretokenizers"))


def _byte_level(rules: Mapping[str, Any]) -> Noted:
    steps = _cuts(_parts(rules["pre_tokenizer"], "pretokenizers"))
    names = [name for name, known in PRE.items() if _cuts(known.steps) == steps]
    nfc = any(step["type"] == "NFC" for step in _parts(rules.get("normalizer"), "normalizers"))
    pre = next((name for name in names if PRE[name].nfc or not nfc), names[0] if names else "")
    problems = [] if pre else [f"cuts text by {', then '.join(steps) or 'nothing'}, llama.cpp has no name for this"]
    ignores = bool(rules["model"].get("ignore_merges"))
    if pre and ignores != PRE[pre].ignore_merges and (word := _spelt_otherwise(rules)):
        does, theirs = ("does not take", "does") if PRE[pre].ignore_merges else ("takes", "does not")
        problems.append(
            f"{does} {word!r}, which is a token, for one whatever its merges say, llama.cpp's {pre} {theirs}"
        )
    for step in _parts(rules.get("normalizer"), "normalizers"):
        if step["type"] != "NFC" or (pre and not PRE[pre].nfc):
            theirs = f"llama.cpp's {pre}" if pre else "llama.cpp"
            problems.append(f"normalizes text by {step['type']}, {theirs} does not")
    if problems:
        raise ValueError(f"the tokenizer {' and '.join(problems)}; {_ONLY_IDS}")
    differs = PRE[pre].differs
    notes = [f"some texts have other tokens in llama.cpp: {differs}"] if differs else []
    merges = [pair if isinstance(pair, str) else " ".join(pair) for pair in rules["model"]["merges"]]
    return {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.pre": pre, "tokenizer.ggml.merges": merges}, notes


def _spelt_otherwise(rules: Mapping[str, Any]) -> str | None:
    """A token that merging its own letters does not give, so that ignore_merges makes a difference."""
    from tokenizers import Tokenizer

    model = rules["model"]
    merging = Tokenizer.from_str(json.dumps({"model": {**model, "ignore_merges": False}}))
    words = sorted(model["vocab"].keys() - {added["content"] for added in rules.get("added_tokens") or ()})
    spelt = merging.encode_batch_fast(words, add_special_tokens=False)
    return next((word for word, found in zip(words, spelt, strict=True) if found.ids != [model["vocab"][word]]), None)


def _cuts(steps: Sequence[Mapping[str, Any]]) -> list[str]:
    """Descriptions of the steps of a pre-tokenizer, without one that only maps bytes to letters."""
    return [words for words in map(_cut, steps) if words]


def _cut(step: Mapping[str, Any]) -> str:
    match step:
        case {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}:
            return ""
        case {"type": "ByteLevel", "add_prefix_space": False}:  # use_regex is true by default
            return "the words of GPT-2"
        case {"type": "Split", "pattern": {"Regex": regex}, "behavior": "Isolated", "invert": False}:
            return f"split {regex}"
        case {"type": "Digits", "individual_digits": individual}:
            return "each digit" if individual else "digits"
        case {"type": "Punctuation", "behavior": "Contiguous"}:
            return "punctuation"
    return json.dumps(step, ensure_ascii=False)


# ---- SentencePiece as BPE: model "llama" ----


def _sentencepiece(rules: Mapping[str, Any], tokens: list[str]) -> Noted:
    """llama.cpp merges the neighbours whose token has the highest score: minus the rank of its first merge."""
    steps = [*_parts(rules.get("normalizer"), "normalizers"), *_parts(rules.get("pre_tokenizer"), "pretokenizers")]
    prefix, space, notes = False, False, list[str]()
    for step in steps:
        match step:
            case {"type": "Prepend", "prepend": "▁"}:
                prefix = True
            case {"type": "Replace", "pattern": {"String": " "}, "content": "▁"}:
                space = True
            case {"type": "Metaspace", "replacement": "▁" | " " as mark, "prepend_scheme": scheme, "split": False}:
                if scheme == "first":
                    notes.append(
                        "what follows a special token begins with a space in llama.cpp, and not in the engine: the "
                        "tokens of a chat differ"
                    )
                prefix, space = prefix or scheme in ("first", "always"), space or mark == "▁"
            case _:
                raise ValueError(
                    f"the tokenizer has a step {json.dumps(step, ensure_ascii=False)}, SentencePiece has not; "
                    f"{_ONLY_IDS}"
                )
    if not (space and rules["model"].get("byte_fallback")):
        raise ValueError("the tokenizer is neither byte-level nor SentencePiece (▁ for spaces, byte fallback)")
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(rules["model"]["merges"]):
        first, second = pair.split(" ") if isinstance(pair, str) else pair
        ranks.setdefault(first + second, rank)
    scores = [-float(ranks.get(token, len(ranks))) for token in tokens]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.pre": "default",
        "tokenizer.ggml.scores": scores,
        "tokenizer.ggml.add_space_prefix": prefix,
    }, notes
