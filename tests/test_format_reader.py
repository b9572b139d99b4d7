"""export/FORMAT.md is enough: a reader that knows nothing else computes what the engine computes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.config import ModelConfig
from bitnet_export import random_model, repack
from bitnet_runtime import Model
from format_reader import Reader

SMALL = ModelConfig(
    vocab_size=131, dim=72, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=12, ffn_dim=130, max_context=64,
)  # fmt: skip
SEED = 6  # with which no activation of these models is so near a rounding edge that fp32 and fp64 disagree
IDS = [int(i) for i in np.random.default_rng(5).integers(0, SMALL.vocab_size, 24)]

GEMMA: dict[str, Any] = {
    "post_norm": True, "qk_norm": True, "sub_norm": False, "activation": "gelu", "embedding_scale": 6.5, "n_layers": 4,
    "attention_softcap": 5.0, "logit_softcap": 3.0, "sliding_window": 7, "global_every": 2, "rope_local_theta": 100.0,
}  # fmt: skip
ORIGINAL: dict[str, Any] = {
    "norm": "layer", "norm_bias": True, "pre_norm": False, "residual_norm": True, "sub_norm": False, "ffn": "plain",
    "final_norm": False, "activation": "relu", "position": "sinusoidal", "qkv_bias": True, "o_bias": True,
    "ffn_bias": True, "head_bias": True,
}  # fmt: skip
BERT = ORIGINAL | {
    "mask": "bidirectional", "embedding_norm": True, "activation": "gelu_erf", "position": "learned",
}  # fmt: skip
EXPERTS: dict[str, Any] = {"n_experts": 5, "experts_per_token": 2, "activation": "silu", "weight_scale": "group"}
FLOAT: dict[str, Any] = {"ternary": (), "head_format": "f32", "tie_embeddings": False}


@pytest.mark.parametrize(
    ("changes", "encoding"),
    [
        ({}, "2.0"),
        ({"weight_scale": "row", "linear_norm": True, "sub_norm": False, "rope_dim": 6, "first_position": 1}, "1.6"),
        ({"weight_scale": "group", "head_format": "ternary", "residual_scale": 0.7}, "2.0"),
        ({"mask": "prefix", "head_format": "f16", "attention_scale": 0.2}, "2.0"),
        ({"vocab_size": 8300, "dim": 64}, "2.0"),  # a head with a sketch
        ({"weight_scale": "row"}, "sparse"),
        (GEMMA, "2.0"),
        (ORIGINAL, "1.6"),
        (BERT, "2.0"),
        (EXPERTS, "2.0"),
        (EXPERTS | {"normalize_routing": False, "ternary": ("up", "down")}, "2.0"),
        (GEMMA | FLOAT, "2.0"),
        (ORIGINAL | FLOAT, "2.0"),
    ],
    ids=["default", "rows", "groups", "prefix", "sketch", "lines", "gemma", "original", "bert", "experts",
         "half-ternary", "float-gemma", "float-original"],
)  # fmt: skip
def test_agrees_with_the_engine(changes: dict[str, Any], encoding: str, tmp_path: Path) -> None:
    path, made = tmp_path / "model.bitnet", tmp_path / "made.bitnet"
    config = SMALL.replace(**changes)
    random_model(config, made, SEED, encoding="2.0" if encoding == "sparse" else encoding)
    if encoding == "sparse":
        repack(made, path, sparse=True)
    else:
        made.rename(path)
    prefix = 9 if config.mask == "prefix" else 0
    with Model.load(path, kv_type="f32", threads=1) as model, model.session() as session:
        parts = [session.append_prefix(IDS[:prefix], logits="all")] if prefix else []
        found = np.concatenate([*parts, session.append(IDS[prefix:], logits="all")])
    expected = Reader(path).logits(IDS, prefix)
    assert np.abs(found - expected).max() < 2e-6 * np.abs(expected).max()  # the engine adds and multiplies in fp32
