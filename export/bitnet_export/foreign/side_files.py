"""Files next to a model for programs that read Hugging Face folders: tokenizer, template, defaults."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from bitnet.config import ModelConfig
from bitnet_export.packed import records
from bitnet_export.packed.reader import PackedFile
from bitnet_runtime.defaults import ALIASES, FIELDS, model_defaults

from .outgoing import write_json
from .vocabulary import around, load

SAMPLING = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repeat_penalty", "max_new_tokens": "max_tokens", "min_new_tokens": "min_tokens",
}  # fmt: skip
"""Sampling options of generation_config.json, and our names for them."""
_THEIRS = {ours: theirs for theirs, ours in SAMPLING.items()}


def generation_of(file: PackedFile) -> dict[str, Any]:
    """The generation defaults of METADATA, eos_token_ids a list. Raises ValueError if they violate FORMAT.md."""
    generation = file.metadata.get("generation") or {}
    if not isinstance(generation, dict):
        raise ValueError(f"`generation` in the metadata is {generation!r}, expected an object")
    model_defaults(generation)
    ends, start = generation.get("eos_token_ids"), generation.get("bos_token_id")
    ends = ends if isinstance(ends, list) else [] if ends is None else [ends]
    size = file.configs[0].vocab_size
    if not all(type(token) is int and 0 <= token < size for token in (*ends, *([] if start is None else [start]))):
        raise ValueError(
            f"special tokens in the metadata are {ends!r:.80} and {start!r:.40}, expected ids below {size}; "
            "convert or export the model again"
        )
    padding = generation.get("padding")
    if padding is not None and not _fills(padding, file.configs[0]):
        raise ValueError(
            f"`padding` in the metadata is {padding!r:.80}, expected "
            f'{{"length": {file.configs[0].max_context}, "token_id": an id, "side": "left" or "right"}}'
        )
    return generation | {"eos_token_ids": ends or None}


def _fills(padding: Any, c: ModelConfig) -> bool:
    """Whether the file pads texts. Folders can only pad to the greatest length."""
    said = padding if isinstance(padding, dict) else {}
    token = said.get("token_id")
    known = type(token) is int and 0 <= token < c.vocab_size
    return known and said.get("length") == c.max_context and said.get("side") in ("left", "right")


def left_out(generation: Mapping[str, Any], written: Collection[str]) -> list[str]:
    """A note on the sampling defaults that a format cannot hold. written: names of those that it can."""
    given = ((ALIASES.get(name, name), value) for name, value in generation.items())
    lost = [
        f"{name} = {value!r:.40}"
        for name, value in given
        if name in FIELDS and name not in written and value not in (None, FIELDS[name].default)
    ]
    return [f"of the sampling defaults were left out: {', '.join(lost)}"] if lost else []


def write_generation(folder: Path, generation: Mapping[str, Any]) -> list[str]:
    """Write generation_config.json, in the format of transformers; returns notes on defaults that it cannot hold."""
    options = model_defaults(generation)
    notes = left_out(generation, (*_THEIRS, "repeat_last_n"))
    if options.repeat_penalty != 1 and options.repeat_last_n != -1:
        latest = f"the latest {options.repeat_last_n} tokens"
        notes.append(f"repetition_penalty looks at the whole text in transformers, repeat_penalty here at {latest}")
    given = {ALIASES.get(name, name): value for name, value in generation.items() if value is not None}
    known = {_THEIRS[name]: value for name, value in given.items() if name in _THEIRS}
    if known.get("max_new_tokens", 1) < 1:  # until the context is full, for which transformers has no number
        del known["max_new_tokens"]
    known["do_sample"] = known.get("temperature", 1.0) > 0
    if not known["do_sample"]:  # greedy; transformers takes no temperature of 0 and warns of the rest
        known = {key: value for key, value in known.items() if key not in ("temperature", "top_k", "top_p", "min_p")}
    write_json(folder / "generation_config.json", special_tokens(generation) | known)
    return notes


def special_tokens(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The ids in config.json and generation_config.json; None if the packed file has none."""
    return {"bos_token_id": generation.get("bos_token_id"), "eos_token_id": generation.get("eos_token_ids")}


def pad_token_id(generation: Mapping[str, Any]) -> dict[str, int]:
    """The padding token, for config.json; empty without padding."""
    padding = generation.get("padding")
    return {"pad_token_id": padding["token_id"]} if padding else {}


def write_tokenizer(folder: Path, file: PackedFile, c: ModelConfig, generation: Mapping[str, Any]) -> None:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja, as far as the packed file has them.

    Raises SourceError if its section TOKENIZER is no tokenizer.
    """
    tokenizer, template = file.section(records.TOKENIZER), file.section(records.TEMPLATE)
    if template is not None:
        (folder / "chat_template.jinja").write_bytes(template)
    if tokenizer is None:
        return
    loaded = load(tokenizer, "section TOKENIZER")
    words = {token: word for word, token in loaded.get_vocab(with_added_tokens=True).items()}
    named = {name: word for name, word in special_words(generation).items() if word in words.values()}
    ends, start = generation.get("eos_token_ids") or [], generation.get("bos_token_id")
    ids = {"bos_token": start, "eos_token": ends[0] if ends else None}
    named = {name: words[token] for name, token in ids.items() if token in words} | named
    side = {}
    if padding := generation.get("padding"):
        side, token = {"padding_side": padding["side"]}, padding["token_id"]
        # Of a token that is no special one config.json alone says that it fills up: named, it would become special.
        named = {name: word for name, word in named.items() if name != "pad_token"}
        named |= {"pad_token": words[token]} if token in loaded.get_added_tokens_decoder() else {}
    if start in words and loaded.encode("").ids[:1] != [start]:
        tokenizer = _with_start(tokenizer, words[start], start)
    (folder / "tokenizer.json").write_bytes(tokenizer)
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": c.max_context}
    write_json(folder / "tokenizer_config.json", settings | {"clean_up_tokenization_spaces": False} | side | named)


def special_words(generation: Mapping[str, Any]) -> dict[str, str]:
    """bos_token, eos_token and the like, as named by the source of the packed file."""
    given = generation.get("special_tokens")
    given = given if isinstance(given, dict) else {}
    return {name: word for name, word in given.items() if name.endswith("_token") and isinstance(word, str)}


def _with_start(tokenizer: bytes, word: str, start: int) -> bytes:
    """The tokenizer, which puts the start token before a text as well."""
    rules = json.loads(tokenizer)
    steps = [step for step in (rules.get("post_processor"), around((word, start), None)) if step]
    rules["post_processor"] = steps[0] if len(steps) == 1 else {"type": "Sequence", "processors": steps}
    return json.dumps(rules, ensure_ascii=False, indent=2).encode()
