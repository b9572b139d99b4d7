"""The generation defaults and end tokens of a Hugging Face folder, from generation_config.json and its tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from bitnet_export.foreign.side_files import SAMPLING
from bitnet_export.foreign.vocabulary import ENDS

from .folder import Folder

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_OURS = SAMPLING | {"stop_strings": "stop"}  # not written: transformers would want the tokenizer in every call
_NO_OPTION = {
    "suppress_tokens": None, "begin_suppress_tokens": None, "bad_words_ids": None, "forced_bos_token_id": None,
    "forced_eos_token_id": None, "sequence_bias": None, "no_repeat_ngram_size": 0,
    "num_beams": 1, "typical_p": 1.0, "epsilon_cutoff": 0.0, "eta_cutoff": 0.0, "penalty_alpha": 0.0,
    "guidance_scale": 1, "exponential_decay_length_penalty": None,
}  # fmt: skip
"""Fields of generation_config.json that change an answer and are not read, and their neutral values."""


def read_generation(
    folder: Folder,
    vocab_size: int,
    tokenizer: Tokenizer | None,
    texts: Mapping[str, str],
    assumptions: list[str],
    template: str = "",
) -> dict[str, Any]:
    """`generation` of the packed file's METADATA (FORMAT.md §5).

    vocab_size: rows of the model's embedding. texts: special tokens by name. assumptions: receives what was left out,
    and end tokens that generation_config.json lacks.
    """
    from bitnet_runtime import InvalidParameterError
    from bitnet_runtime.defaults import resolve

    config = folder.json("generation_config.json")
    described = config if config.get("eos_token_id") is not None else folder.json("config.json")
    ends = set(_end_ids(described, vocab_size, assumptions))
    # Also without do_sample: a temperature is meant to be used. Penalties and end tokens also apply to greedy answers.
    found: dict[str, Any] = {ours: config[name] for name, ours in _OURS.items() if config.get(name) is not None}
    found |= {"temperature": 0.0} if config.get("do_sample") is False else {}
    for name, value in list(found.items()):
        try:
            resolve({name: value})
        except InvalidParameterError as error:
            del found[name]
            assumptions.append(f"of generation_config.json was left out: {error}")
    if found.get("repeat_penalty", 1.0) != 1.0:
        found["repeat_last_n"] = -1  # of the whole text, as in transformers
    for name in (name for name, neutral in _NO_OPTION.items() if config.get(name) not in (None, [], {}, neutral)):
        said = f"{name} = {config[name]!r:.40}, for which there is no default here"
        assumptions.append(f"of generation_config.json was left out: {said}")
    if tokenizer is not None:
        end = tokenizer.token_to_id(texts.get("eos_token", ""))
        if end is not None and ends and end not in ends:
            assumptions.append(f"an answer also ends at {texts['eos_token']}, the eos_token of the tokenizer")
        ends |= set() if end is None else {end}
        turns = {token: text for token, text in _ends_of_turns(tokenizer, template).items() if token not in ends}
        if turns:
            assumptions.append(f"an answer also ends at {', '.join(turns.values())}, which the chat template writes")
        ends |= turns.keys()
        first = tokenizer.encode("").ids[:1]
        if first and first == [tokenizer.token_to_id(texts.get("bos_token", ""))]:
            found["bos_token_id"] = first[0]
    found |= {"eos_token_ids": sorted(ends)} if ends else {}
    return found | ({"special_tokens": dict(texts)} if texts else {})


def _ends_of_turns(tokenizer: Tokenizer, template: str) -> dict[int, str]:
    """Special tokens of a template that end answers by their name: without them the model would go on as the user."""
    added = {token: each.content for token, each in tokenizer.get_added_tokens_decoder().items() if each.special}
    return {token: text for token, text in added.items() if text in ENDS and text in template}


def _end_ids(config: Mapping[str, Any], vocab_size: int, assumptions: list[str]) -> list[int]:
    value = config.get("eos_token_id")
    ids = value if isinstance(value, list) else [] if value is None else [value]
    fits = [type(token) is int and 0 <= token < vocab_size for token in ids]
    if bad := [token for token, fit in zip(ids, fits, strict=True) if not fit]:
        assumptions.append(
            f"of eos_token_id = {value!r:.80} was left out: {', '.join(map(repr, bad)):.80}, expected token ids below "
            f"{vocab_size}"
        )
    return [token for token, fit in zip(ids, fits, strict=True) if fit]
