"""Which of llama.cpp's graphs computes a model."""

from __future__ import annotations

from typing import Any

from bitnet.config import ModelConfig
from bitnet_export.foreign.outgoing import SIZES, Graph, nearest, refuse

_FREE = (*SIZES, "ternary", "weight_scale", "head_format", "dropout")
_RULES: dict[str, tuple[Any, ...]] = {"activation": ("silu",), "rope_scaling": ("none",)}
# No FFN biases: llama.cpp adds them before it multiplies by `.scale`.
_BIASES: dict[str, tuple[Any, ...]] = dict.fromkeys(("qkv_bias", "o_bias"), (False, True))
_TIED: dict[str, tuple[Any, ...]] = {"tie_embeddings": (False, True)}
GRAPHS = (
    Graph("bitnet", {**_RULES, "sub_norm": (True,)}, _FREE),
    Graph("llama", {**_RULES, **_TIED, **_BIASES, "rope_scaling": ("none", "llama3")}, (*_FREE, *(
        "rope_factor", "rope_original_context", "rope_low_freq_factor", "rope_high_freq_factor",
    ))),
    Graph("qwen3", {**_RULES, **_TIED, "qk_norm": (True,), "qkv_bias": (False, True)}, _FREE),
)  # fmt: skip


def architecture(config: ModelConfig) -> str:
    """The llama.cpp graph that computes this model. Raises ValueError naming the nearest and its differences."""
    name, differences = nearest_graph(config)
    refuse(f"the model {config.name}", differences)
    return name


def nearest_graph(config: ModelConfig) -> tuple[str, list[str]]:
    """The name of the graph with the fewest differences from a model, and those."""
    differences = {graph.name: graph.differences(config) for graph in GRAPHS}
    if config.n_heads * config.head_dim != config.dim:
        found = f"n_heads · head_dim is {config.n_heads * config.head_dim}, it wants dim = {config.dim}"
        differences["bitnet"].append(found)
    return nearest("llama.cpp", differences)
