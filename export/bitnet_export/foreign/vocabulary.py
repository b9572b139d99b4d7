"""Vocabularies as definitions (JSON) of the `tokenizers` library.

Two kinds of BPE are published with ternary models: over bytes (GPT-2 and after), and SentencePiece's,
which stores scores where the library wants merges. Tokens have the kinds of SentencePiece; GGUF took
their numbers over. An id without a token stays without one.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from bitnet_runtime import TokenizerError
from bitnet_runtime.tokenizer.definitions import parse

from .source import SourceError

if TYPE_CHECKING:
    from tokenizers import Tokenizer

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

MAX_TOKENS = 1 << 19  # the largest published vocabularies have 2^18
MAX_PIECE = 512  # characters of a piece that SentencePiece merges; published ones have at most 48
MAX_CHARACTERS = 1 << 24  # of all pieces; published ones have 2 million
MAX_MERGES = 1 << 21  # of pieces; published ones have 600,000
MAX_WRITTEN = 1 << 24  # characters of merges; published ones have 6 million

SPACE = "▁"  # U+2581, how SentencePiece writes a space

ENDS = (
    "<|eot_id|>", "<|end_of_text|>", "<|eom_id|>", "<|im_end|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "<eos>",
    "</s>",
)  # fmt: skip
"""Control tokens that always end answers of a GGUF file; of a folder, if its template has them."""


def whole_template(template: str | None, assumptions: list[str]) -> str | None:
    """A chat template, or None with an assumption if its syntax is wrong: nothing could ever be said with it."""
    from bitnet_runtime import TemplateError
    from bitnet_runtime.chat.template import ChatTemplate

    if not template:  # some have an empty one
        return None
    try:
        ChatTemplate(template).render([{"role": "user", "content": "Hello"}], {})
    except TemplateError as error:
        if error.fault:  # and not: it wants other messages
            assumptions.append(f"the chat template is left out, it {error.fault}; correct it and convert again")
            return None
    return template


def note_others(others: list[str], has_default: bool, assumptions: list[str]) -> None:
    """Name the chat templates of a model that are not used, if there are any."""
    if others:
        used = "the one named default is used, not" if has_default else "none is named default, none is used:"
        assumptions.append(f"of several chat templates {used} {', '.join(sorted(others))}"[:200])


class Vocabulary(NamedTuple):
    """Tokens in the order of their ids, and the ones before and after every text."""

    tokens: Sequence[str]
    kinds: Sequence[int]
    before: int | None = None  # start token, if texts begin with one
    after: int | None = None  # end token, if texts end with one


def byte_level(
    words: Vocabulary,
    merges: Sequence[tuple[str, str]],
    pre_tokenizers: Sequence[Mapping[str, Any]],
    *,
    nfc: bool = False,
    ignore_merges: bool = False,
) -> bytes:
    """BPE over bytes. pre_tokenizers: the steps that split a text, up to and including the ByteLevel one."""
    model = {"type": "BPE", "vocab": _ids(words), "merges": list(merges), "ignore_merges": ignore_merges}
    return _seal(
        words,
        model=model,
        normalizer={"type": "NFC"} if nfc else None,
        pre_tokenizer={"type": "Sequence", "pretokenizers": list(pre_tokenizers)},
        decoder={"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
    )


def sentencepiece_bpe(words: Vocabulary, scores: Sequence[float], *, prefix: bool = True, legacy: bool = True) -> bytes:
    """SentencePiece's BPE with byte fallback.

    prefix: a text begins with a space. legacy: so does what follows a special token.
    """
    unknown = next((token for token, kind in zip(words.tokens, words.kinds, strict=True) if kind == UNKNOWN), None)
    model = {
        "type": "BPE",
        "vocab": _ids(words),
        "merges": merges_of(words, scores),
        "unk_token": unknown,
        "fuse_unk": True,
        "byte_fallback": True,
    }
    spaces = {"type": "Replace", "pattern": {"String": " "}, "content": SPACE}
    always = [{"type": "Prepend", "prepend": SPACE}] if prefix else []
    # Only before the first part; " ", as a text may itself start with "▁", before which one is added, too.
    once = {"type": "Metaspace", "replacement": " ", "prepend_scheme": "first", "split": False}
    mark = {"type": "Metaspace", "replacement": SPACE, "prepend_scheme": "never", "split": False}
    strip = [{"type": "Strip", "content": " ", "start": 1, "stop": 0}] if prefix else []
    bytes_ = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return _seal(
        words,
        model=model,
        normalizer={"type": "Sequence", "normalizers": [*(always if legacy else []), spaces]},
        pre_tokenizer=None if legacy or not prefix else {"type": "Sequence", "pretokenizers": [once, mark]},
        decoder={"type": "Sequence", "decoders": [*bytes_, *strip]},
    )


def merges_of(words: Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Every pair of pieces that forms a piece, in SentencePiece's order: the best score of the result first.

    SentencePiece has no order among the pairs that make the same piece; the longer left part comes
    first, as in the tokenizer.json files that transformers made of these models.
    """
    score = {
        token: value
        for token, kind, value in zip(words.tokens, words.kinds, scores, strict=True)
        if kind in (NORMAL, USER_DEFINED)
    }
    if (characters := sum(map(len, score))) > MAX_CHARACTERS:
        raise SourceError(f"the vocabulary has {characters} characters, expected at most {MAX_CHARACTERS}")
    merges: list[tuple[float, int, int, str, str]] = []
    written = 0
    for token, value in score.items():
        if len(token) > MAX_PIECE:
            raise SourceError(f"the vocabulary has a piece of {len(token)} characters, expected at most {MAX_PIECE}")
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in score and right in score:
                merges.append((value, len(left), len(right), left, right))
                written += len(token)
        if len(merges) > MAX_MERGES or written > MAX_WRITTEN:
            raise SourceError(
                f"pieces of the vocabulary make each other in more than {MAX_MERGES} ways, or in long ones"
            )
    values = {merge[0] for merge in merges}
    if len(values) == 1 and len(merges) > 1:
        raise SourceError(
            "all tokens of the vocabulary have the same score, so that the order of merges is lost; "
            "convert the model again from its tokenizer.model, or from the Hugging Face folder"
        )
    merges.sort(key=lambda merge: merge[:3], reverse=True)
    return [(left, right) for _, _, _, left, right in merges]


def load(definition: bytes, what: str) -> Tokenizer:
    """The tokenizer of a definition. Raises SourceError if the library refuses it or panics."""
    from tokenizers import Tokenizer

    try:
        parse(definition)
        return Tokenizer.from_str(definition.decode())
    except TokenizerError as error:
        raise SourceError(f"{what} is refused: {error}") from None
    except BaseException as error:  # a panic of the library is no Exception
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise SourceError(f"{what} is refused by the tokenizers library: {str(error)[:300]}") from None
        raise


def around(before: tuple[str, int] | None, after: tuple[str, int] | None) -> dict[str, Any] | None:
    """The post-processor that adds tokens before and after a text."""
    special = dict(token for token in (before, after) if token)
    if not special:
        return None
    single: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}]
    pair: list[dict[str, Any]] = [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}]
    if before:
        single.insert(0, {"SpecialToken": {"id": before[0], "type_id": 0}})
        pair.insert(0, {"SpecialToken": {"id": before[0], "type_id": 0}})
    if after:
        single.append({"SpecialToken": {"id": after[0], "type_id": 0}})
        pair.append({"SpecialToken": {"id": after[0], "type_id": 1}})
    tokens = {text: {"id": text, "ids": [token], "tokens": [text]} for text, token in special.items()}
    return {"type": "TemplateProcessing", "single": single, "pair": pair, "special_tokens": tokens}


def _ids(words: Vocabulary) -> dict[str, int]:
    """Token to id. Raises SourceError for a token that occurs twice, or is empty."""
    ids: dict[str, int] = {}
    for token, (text, kind) in enumerate(zip(words.tokens, words.kinds, strict=True)):
        if kind == UNUSED:
            continue
        if not text or text in ids:
            found = f"{text!r} twice, as {ids[text]} and {token}" if text else f"an empty token, {token}"
            raise SourceError(f"the vocabulary has {found:.200}")
        ids[text] = token
    return ids


def _seal(words: Vocabulary, **parts: Any) -> bytes:
    added = [
        {
            "id": token, "content": text, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False,
            "special": kind != USER_DEFINED,
        }
        for token, (text, kind) in enumerate(zip(words.tokens, words.kinds, strict=True))
        if kind in (UNKNOWN, CONTROL, USER_DEFINED)
    ]  # fmt: skip
    edges = [None if token is None else (words.tokens[token], token) for token in (words.before, words.after)]
    definition = {"version": "1.0", "truncation": None, "padding": None, "added_tokens": added}
    definition |= parts | {"post_processor": around(*edges)}
    return load(json.dumps(definition).encode(), "the tokenizer of the file").to_str().encode()
