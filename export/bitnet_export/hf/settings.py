"""What a model folder holds besides weights: tokenizer, chat template, generation defaults, pooling."""

from __future__ import annotations

from typing import Any

from bitnet_export import packed
from bitnet_export.source import SourceError

from .fields import Fields
from .folder import MAX_TOKENIZER, Folder

_SAMPLING = {
    "temperature": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p",
    "repetition_penalty": "repeat_penalty", "max_new_tokens": "max_tokens",
}  # fmt: skip
_POOLING = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


def read_tokenizer(folder: Folder, vocab_size: int) -> bytes | None:
    """tokenizer.json. Raises SourceError: not one, or with tokens that the model does not have."""
    content = folder.read("tokenizer.json", MAX_TOKENIZER)
    if content is None:
        return None
    from tokenizers import Tokenizer

    try:
        words = Tokenizer.from_buffer(content).get_vocab(with_added_tokens=True)
    except Exception as error:  # tokenizers raises Exception itself
        raise SourceError(f"{folder.path}/tokenizer.json is not a tokenizer: {error}") from None
    largest = max(words.values(), default=-1)
    if largest >= vocab_size:
        raise SourceError(
            f"{folder.path}/tokenizer.json has token id {largest}, config.json has vocab_size {vocab_size}; "
            "use the tokenizer of this model"
        )
    return content


def read_template(folder: Folder) -> bytes | None:
    """The chat template: chat_template.jinja, or inside chat_template.json or tokenizer_config.json."""
    content = folder.read("chat_template.jinja", packed.MAX_TEMPLATE)
    if content is not None:
        return content
    for name in ("chat_template.json", "tokenizer_config.json"):
        found = folder.json(name).get("chat_template")
        if isinstance(found, list):  # several, each with a name
            found = next((t.get("template") for t in found if isinstance(t, dict) and t.get("name") == "default"), None)
        if isinstance(found, str):
            if len(found.encode("utf-8", "replace")) > packed.MAX_TEMPLATE:
                raise SourceError(f"{folder.path / name}: the chat template is larger than {packed.MAX_TEMPLATE} bytes")
            return found.encode("utf-8", "replace")
    return None


def read_generation(folder: Folder, config: Fields, vocab_size: int) -> tuple[dict[str, Any], list[str]]:
    """Generation defaults under our names, and what was left out of them."""
    given = Fields(config | folder.json("generation_config.json"), str(folder.path / "generation_config.json"))
    ends = given.get("eos_token_id")
    generation: dict[str, Any] = {"eos_token_ids": ends if isinstance(ends, list) else [] if ends is None else [ends]}
    if "bos_token_id" in given:
        generation["bos_token_id"] = given["bos_token_id"]
    left_out = []
    for name, value in list(generation.items()):
        ids = value if isinstance(value, list) else [value]
        if not all(type(token) is int and 0 <= token < vocab_size for token in ids):
            left_out.append(f"{name} = {value!r:.80} was left out: not token ids below {vocab_size}")
            del generation[name]
    if given.truth("do_sample"):
        generation |= {ours: given.number(name) for name, ours in _SAMPLING.items() if name in given}
        for name in ("top_k", "max_tokens"):
            if name in generation:
                generation[name] = int(generation[name])
    return generation, left_out


def read_pooling(folder: Folder) -> tuple[str, list[str]]:
    """How an embedding model makes one vector of a text, and what was assumed."""
    given = folder.json("1_Pooling/config.json")
    modes = [name for name, on in given.items() if name.startswith("pooling_mode_") and on is True]
    if not modes:
        return "last", ["the vector of a text is that of its last token: the folder has no 1_Pooling/config.json"]
    if len(modes) > 1 or modes[0] not in _POOLING:
        raise SourceError(
            f"{folder.path}/1_Pooling/config.json: {', '.join(modes)}, expected one of {', '.join(_POOLING)}"
        )
    return _POOLING[modes[0]], []
