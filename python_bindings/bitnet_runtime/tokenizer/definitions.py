"""A tokenizer.json as an object: its faults, its special tokens, how many characters a token stands for."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from bitnet_runtime.errors import TokenizerError, json_kind, unique_keys

MARK = "\ufdd0"  # a code point that is never a character; no token may contain it
LONGEST, LONGEST_ADDED = 4096, 128  # characters of a token, of an added one
STEPS = 16  # of a normalizer and the like


def parse(definition: bytes) -> dict[str, Any]:
    """The definition as an object. Raises TokenizerError: it is none, two readers could read it differently,
    or it is one that makes the `tokenizers` library end the process; nothing else may go there."""
    try:
        found = json.loads(definition.decode(), object_pairs_hook=unique_keys)
    except (ValueError, RecursionError) as error:
        raise TokenizerError(f"the tokenizer of the file is not as the tokenizers library writes it: {error}") from None
    if not isinstance(found, dict):
        raise TokenizerError(f"the tokenizer of the file is {json_kind(found)}, expected a JSON object")
    _check_merges(found.get("model"))
    return found


def _check_merges(model: Any) -> None:
    """Raises TokenizerError: the library would cut a prefix off within a character, and abort the process."""
    prefix = model.get("continuing_subword_prefix") if isinstance(model, dict) else None
    merges = model.get("merges") if prefix else None
    if not isinstance(prefix, str) or not isinstance(merges, list):
        return  # nothing to cut, or refused by the library
    for merge in merges:
        pair = merge.split(" ") if isinstance(merge, str) else merge
        right = pair[-1] if isinstance(pair, list) and pair else ""
        if not isinstance(right, str) or not right.startswith(prefix):
            raise TokenizerError(
                f"the tokenizer of the file has the merge {merge!r:.100}, expected a right side that begins "
                f"with continuing_subword_prefix, {prefix!r:.40}"
            )


def added_tokens(definition: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Tokens beside the model's, each with its "content" and whether it is "special". Raises TokenizerError."""
    found = definition.get("added_tokens") or []
    if not isinstance(found, list) or not all(
        isinstance(token, dict) and type(token.get("content")) is str and type(token.get("special")) is bool
        for token in found
    ):
        raise TokenizerError("added_tokens of the file's tokenizer is not a list of objects with content and special")
    return [token for token in found if token["content"]]  # as in the library


def check_tokens(ids: Mapping[str, int], added: list[dict[str, Any]], around: Sequence[int], vocab_size: int) -> None:
    """Raises TokenizerError: tokens that the model cannot have, or that no honest file has.

    around: the tokens that the tokenizer puts around a text.
    """
    largest = max((*ids.values(), *around), default=-1)
    if largest >= vocab_size:
        raise TokenizerError(
            f"the tokenizer of the file has token id {largest}, the model's vocabulary has {vocab_size} tokens; "
            f"export the model with the tokenizer it was trained with"
        )
    for texts, most in ((ids, LONGEST), ([token["content"] for token in added if token["special"]], LONGEST_ADDED)):
        longest = max(texts, key=len, default="")
        if len(longest) > most:
            raise TokenizerError(
                f"the tokenizer of the file has a token of {len(longest)} characters, expected at most {most}: "
                f"{longest!r:.40}"
            )
    if any(MARK in token["content"] for token in added):
        raise TokenizerError("the tokenizer of the file has a token with U+FDD0, which is not a character")


def out_of_reach(definition: dict[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The definition with other names in its model for special tokens that the model would make of plain text.

    And these names, by the special tokens, which then are added tokens alone, with ids after all others.
    """
    added = added_tokens(definition)
    special = {token["content"] for token in added if token["special"]}
    try:
        within = _within_reach(definition["model"], special)
        return _renamed(definition, added, within) if within else (definition, {})
    except (AttributeError, KeyError, TypeError, ValueError):
        raise TokenizerError("the tokenizer of the file failed: its model is not as the library writes it") from None


def _renamed(
    definition: dict[str, Any], added: list[dict[str, Any]], within: set[str]
) -> tuple[dict[str, Any], dict[str, str]]:
    model = definition["model"]
    names = {text: secrets.token_hex() for text in sorted(within)}
    changed = dict(model)
    if isinstance(model["vocab"], dict):
        changed["vocab"] = {names.get(text, text): token for text, token in model["vocab"].items()}
    else:
        changed["vocab"] = [[names.get(text, text), score] for text, score in model["vocab"]]
    if isinstance(model.get("unk_token"), str):
        changed["unk_token"] = names.get(model["unk_token"], model["unk_token"])
    if "merges" in model:
        changed["merges"] = [
            merge for merge, three in zip(model["merges"], _merged(model), strict=True) if not names.keys() & three
        ]
    added.sort(key=lambda token: token["content"] in names)
    return definition | {"model": changed, "added_tokens": added}, names


def _within_reach(model: Mapping[str, Any], special: set[str]) -> set[str]:
    """The special tokens of two or more characters that the model finds in a text."""
    found = {text for text in special & model_texts(model) if len(text) > 1}
    only_by_merges = "merges" in model and not any(
        model.get(name) for name in ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix")
    )
    return found.intersection(*([made for *_, made in _merged(model)],) if found and only_by_merges else ())


def model_texts(model: Mapping[str, Any]) -> set[str]:
    """The tokens of the tokenizer's model, without added ones."""
    vocab = model["vocab"]
    return {piece for piece, _ in vocab} if isinstance(vocab, list) else set(vocab)


def _merged(model: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """The merges of a BPE model: left, right, and what they make."""
    prefix = model.get("continuing_subword_prefix") or ""
    pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
    return [(left, right, left + right.removeprefix(prefix)) for left, right in pairs]


def steps(definition: Mapping[str, Any], kind: str) -> list[dict[str, Any]]:
    """The steps of a normalizer, a pre_tokenizer, a decoder or a post_processor, sequences resolved."""
    found = list(_flat(definition.get(kind), kind.replace("_", "").removeprefix("post") + "s"))
    if len(found) > STEPS:
        raise ValueError(f"more than {STEPS} steps")
    return found


def _flat(step: dict[str, Any] | None, plural: str) -> Iterator[dict[str, Any]]:
    if step is None:
        return
    if step["type"] != "Sequence":
        yield step
        return
    if set(step) != {"type", plural}:
        raise ValueError("a sequence with more than its steps")
    for each in step[plural]:
        yield from _flat(each, plural)


# ---- characters of a token ----


def characters_a_token(definition: Mapping[str, Any], byte_letters: str) -> int | None:
    """The most characters of a text that one token can stand for; None: not told, characters may be left out.

    byte_letters: how byte-level vocabularies write the bytes.
    """
    try:
        return _characters(definition, byte_letters)
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        return None


def _characters(definition: Mapping[str, Any], byte_letters: str) -> int | None:
    model, added = definition["model"], definition.get("added_tokens") or []
    before = [*steps(definition, "normalizer"), *steps(definition, "pre_tokenizer")]
    kinds = {step["type"] for step in before}
    letters = byte_letters if "ByteLevel" in kinds else [f"<0x{byte:02X}>" for byte in range(256)]
    whole = (
        model["type"] == "BPE"
        and ("ByteLevel" in kinds or model.get("byte_fallback") is True)
        and all(letter in model["vocab"] for letter in letters)
        and kinds <= {"NFC", "NFD", "Prepend", "Replace", "ByteLevel", "Split", "Punctuation", "Digits", "Metaspace"}
        and not any(step.get("behavior") == "Removed" for step in before)
        and all(
            len(step["content"]) >= len(step["pattern"].get("String", step["content"] + " "))
            for step in before
            if step["type"] == "Replace"
        )
        and not any(token["lstrip"] or token["rstrip"] for token in added)
    )
    if not whole:
        return None
    longest = max(map(len, (*model["vocab"], *(token["content"] for token in added))))
    return longest * (4 if "NFC" in kinds else 1)  # it makes one character of at most four
