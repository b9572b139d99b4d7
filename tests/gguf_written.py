"""Small random packed files that llama.cpp supports, to be written as GGUF in tests."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np

from bitnet.config import ModelConfig
from bitnet_export import random_model
from bitnet_export.convert.incoming import pack_source
from bitnet_export.foreign.source import Tensor, Ternary
from bitnet_export.packed.records import Key
from packed_source import source_of

BITNET = ModelConfig(
    vocab_size=131, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=512, max_context=64,
    activation="silu",
)  # fmt: skip


def build(
    folder: Path, config: ModelConfig, *, halves: bool = False, linears: str | None = None, **sections: Any
) -> Path:
    """A random model. halves: with scales that fp16 represents exactly; linears: the float type of linear layers."""
    random_model(config.replace(rope_scaling="none"), folder / "random.bitnet", 1)
    source = dataclasses.replace(source_of(folder / "random.bitnet"), config=config, **sections)

    def load(key: Key) -> Tensor:
        tensor = source.load(key)
        if isinstance(tensor, Ternary) and halves:
            return Ternary(tensor.codes, tensor.scales.astype(np.float16).astype(np.float32))
        return tensor

    pack_source(dataclasses.replace(source, load=load), folder / "m.bitnet", head=config.head_format, linears=linears)
    return folder / "m.bitnet"
