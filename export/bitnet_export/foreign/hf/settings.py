"""How a model computes one vector of a text: pooling and padding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitnet.config import ModelConfig
from bitnet_export.foreign.outgoing import write_json
from bitnet_export.foreign.source import SourceError
from bitnet_export.foreign.vocabulary import load

from .fields import Fields
from .folder import Folder
from .tokenizer import SIGLIP2

_POOLING = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
_WORDS = {
    "last": "the vector of a text is that of its last token", "mean": "the vector of a text is the mean of its tokens'",
}  # fmt: skip


def read_pooling(folder: Folder, default: str) -> tuple[str, list[str]]:
    """The pooling of an embedding model, `default` if its folder does not say, and assumptions."""
    given = folder.json("1_Pooling/config.json")
    modes = [name for name, on in given.items() if name.startswith("pooling_mode_") and on is True]
    if not modes:
        return default, [f"{_WORDS[default]}: the folder has no 1_Pooling/config.json"]
    if len(modes) > 1 or modes[0] not in _POOLING:
        raise SourceError(
            f"{folder.path}/1_Pooling/config.json: {', '.join(modes)}, expected one of {', '.join(_POOLING)}"
        )
    return _POOLING[modes[0]], []


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
