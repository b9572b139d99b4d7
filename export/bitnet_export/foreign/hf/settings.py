"""How an embedding model makes one vector of a text."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from bitnet.config import ModelConfig
from bitnet_export.foreign.outgoing import write_json
from bitnet_export.foreign.source import SourceError

from .folder import Folder

_POOLING = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}
_WORDS = {
    "last": "the vector of a text is that of its last token", "mean": "the vector of a text is the mean of its tokens'",
}  # fmt: skip


def read_pooling(folder: Folder, default: str) -> tuple[str, list[str]]:
    """How an embedding model makes one vector of a text, and what was assumed; `default` where nothing is said."""
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
    """The file that `read_pooling` reads, of the library sentence-transformers."""
    modes: dict[str, Any] = {mode: word == config.pooling for mode, word in _POOLING.items()}
    (folder / "1_Pooling").mkdir()
    write_json(folder / "1_Pooling" / "config.json", {"word_embedding_dimension": config.dim, **modes})
