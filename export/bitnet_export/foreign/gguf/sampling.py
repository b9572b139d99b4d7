"""Default sampling options of a GGUF file, `general.sampling.*`, which llama.cpp follows, too.

Its converter takes them from generation_config.json.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from bitnet_export.foreign.side_files import left_out
from bitnet_runtime import InvalidParameterError
from bitnet_runtime.defaults import ALIASES, is_whole, resolve

from .output import Value

_OURS = {
    "temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p", "penalty_repeat": "repeat_penalty",
    "penalty_last_n": "repeat_last_n",
}  # fmt: skip
_OTHERS = ("mirostat", "xtc_probability", "sequence")  # which take effect unless they are 0 or empty


def read_sampling(metadata: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Sampling defaults of a file, for `generation`, and notes on omitted ones."""
    found: dict[str, Any] = {}
    left: list[str] = []
    for theirs, ours in _OURS.items():
        value = metadata.get(f"general.sampling.{theirs}")
        if value is None:
            continue
        value = float(str(np.float32(value))) if type(value) is float else value  # 0.6, not 0.6000000238
        try:
            resolve({ours: value})
            found[ours] = value
        except InvalidParameterError as error:
            left.append(f"general.sampling.{theirs} was left out: {error}")
    for theirs in _OTHERS:
        if value := metadata.get(f"general.sampling.{theirs}"):
            left.append(f"general.sampling.{theirs} = {value!r:.80} was left out: there is no such option here")
    return found, left


def sampling_keys(generation: Mapping[str, Any]) -> tuple[dict[str, Value], list[str]]:
    """The defaults in `generation` as keys of a file, and a note on omitted ones."""
    given = {ALIASES.get(name, name): value for name, value in generation.items()}
    keys: dict[str, Value] = {}
    for theirs, ours in _OURS.items():
        if (value := given.get(ours)) is not None:
            keys[f"general.sampling.{theirs}"] = int(value) if is_whole(ours) else float(value)
    return keys, left_out(generation, _OURS.values())
