"""How an embedding model makes one vector of a text."""

from __future__ import annotations

from bitnet_export.foreign.source import SourceError

from .folder import Folder

_POOLING = {"pooling_mode_lasttoken": "last", "pooling_mode_mean_tokens": "mean", "pooling_mode_cls_token": "first"}


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
