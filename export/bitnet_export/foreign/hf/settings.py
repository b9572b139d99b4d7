"""How a model computes one vector of a text: pooling and padding."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from bitnet.config import ModelConfig
from bitnet_export.foreign.outgoing import write_json
from bitnet_export.foreign.source import SourceError
from bitnet_export.foreign.vocabulary import load

from .fields import Fields
from .folder import MAX_JSON, Folder, strict_object
from .tokenizer_class import SIGLIP2

_POOLING = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
_POOLING_NAMED = {"lasttoken": "last", "mean": "mean", "cls": "first"}  # values of `pooling_mode`, of newer versions
_KEPT = ("Transformer", "Pooling", "Normalize", "Dropout")  # modules that are read, or do nothing to a unit vector
_TEXTS = tuple(f"sentence_{kind}_config.json" for kind in ("bert", "roberta", "distilbert", "xlm-roberta"))
_WORDS = {
    "last": "the vector of a text is that of its last token", "mean": "the vector of a text is the mean of its tokens'",
}  # fmt: skip


def read_pooling(folder: Folder, default: str) -> tuple[str, list[str]]:
    """The pooling of an embedding model, `default` if its folder does not say, and assumptions.

    Raises SourceError for files of the library sentence-transformers that make another vector.
    """
    _refuse_modules(folder)
    prompt = folder.json("config_sentence_transformers.json").get("default_prompt_name")
    said = [] if prompt is None else [f"a text does not get the prompt {prompt!r:.40} of the folder; write it before"]
    place = "1_Pooling/config.json"
    given = folder.json(place)
    if not given:
        return default, [f"{_WORDS[default]}: the folder has no {place}", *said]
    modes = [name for name, on in given.items() if name.startswith("pooling_mode_") and on]
    known = _POOLING
    if "pooling_mode" in given:
        modes, known = [str(given["pooling_mode"])], _POOLING_NAMED
    if len(modes) != 1 or modes[0] not in known:
        found = ", ".join(modes) or "no pooling"
        raise SourceError(f"{folder.path}/{place}: {found:.120}, expected one of {', '.join(known)}")
    return known[modes[0]], said


def _refuse_modules(folder: Folder) -> None:
    """Raises SourceError if something is computed from the pooled vector."""
    content = folder.read("modules.json", MAX_JSON)
    if content is None:
        return
    modules = strict_object(b'{"modules": ' + content + b"}", f"{folder.path}/modules.json")["modules"]
    modules = modules if isinstance(modules, list) else [modules]
    kinds = [str(each.get("type") if isinstance(each, dict) else each) for each in modules]
    if other := [kind for kind in kinds if kind.rpartition(".")[2] not in _KEPT]:
        raise SourceError(
            f"{folder.path}/modules.json has {other[0]:.80}, expected {', '.join(_KEPT)} alone: the vector of a text "
            "would be another one; without the file the pooled vector is the result"
        )


def read_texts(folder: Folder, tokenizer: bytes, context: int) -> tuple[bytes, list[str]]:
    """The tokenizer with what sentence-transformers does to a text before it, and assumptions.

    context: most tokens of a text.
    """
    name = next(filter(folder.find, _TEXTS), None)
    if name is None:
        return tokenizer, []
    given, said = Fields(folder.json(name), f"{folder.path}/{name}"), []
    if given.truth("do_lower_case"):
        rules = json.loads(tokenizer)
        steps = [{"type": "Lowercase"}, *([rules["normalizer"]] if rules["normalizer"] else [])]
        rules["normalizer"] = {"type": "Sequence", "normalizers": steps}
        tokenizer = load(json.dumps(rules).encode(), "the tokenizer with lower case").to_str().encode()
        said.append(f"texts become lower case, as {name} says")
    if (longest := given.integer("max_seq_length", context)) < context:
        said.append(f"{name} cuts texts off after {longest} tokens; here they are read up to {context}")
    return tokenizer, said


def write_pooling(folder: Path, config: ModelConfig) -> None:
    """Write the file that `read_pooling` reads, of the library sentence-transformers."""
    modes: dict[str, Any] = {mode: word == config.pooling for mode, word in _POOLING.items()}
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": config.dim, **modes})


def read_padding(folder: Folder, config: Fields, tokenizer: bytes | None, generation: dict[str, Any]) -> list[str]:
    """Add the padding of texts to `generation` (FORMAT.md §5); returns assumptions.

    Source: SigLIP was trained on texts padded to one length with a token that is not masked.
    """
    said = folder.json("tokenizer_config.json")
    token = config.integer("pad_token_id", 1)
    if tokenizer is not None and "pad_token" in generation.get("special_tokens", {}):
        found = load(tokenizer, "the tokenizer").token_to_id(generation["special_tokens"]["pad_token"])
        token = -1 if found is None else found
    side = said.get("padding_side", "left" if said.get("tokenizer_class") == SIGLIP2 else "right")
    if side not in ("left", "right"):
        raise SourceError(f"{folder.path}/tokenizer_config.json: padding_side is {side!r:.40}, expected left or right")
    if not 0 <= token < config.integer("vocab_size"):
        raise SourceError(f"{config.what}: pad_token_id is {token}, expected a token below {config['vocab_size']}")
    length = config.integer("max_position_embeddings")
    generation["padding"] = {"length": length, "token_id": token, "side": side}
    if tokenizer is None or b'"Lowercase"' in tokenizer:
        return []
    return ["texts are taken as they are written; SigLIP learned from lower case, and the tokenizer does not make it"]
