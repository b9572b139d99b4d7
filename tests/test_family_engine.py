"""Norms, positions, biases and activations of all families: the engine computes what torch does.

With float weights there are no rounding edges, so every logit is compared; with ternary ones by the noise floor.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import export_checkpoint
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_runtime import Model, available_isas
from drawn_models import drawn, made

torch.set_num_threads(1)  # tiny tensors: waking threads takes longer than the work

BASE = ModelConfig(
    vocab_size=67, dim=36, n_layers=3, n_heads=3, n_kv_heads=1, head_dim=10, ffn_dim=50, max_context=64,
)  # fmt: skip
FLOAT: dict[str, Any] = {"ternary": (), "head_format": "f32"}
LAYER_NORM: dict[str, Any] = {"norm": "layer", "norm_bias": True}
BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "ffn_bias": True, "head_bias": True}

FIELDS: dict[str, dict[str, Any]] = {
    "layer-norm": {"norm": "layer"},
    "layer-norm-bias": LAYER_NORM,
    "rms-bias": {"norm_bias": True},
    "post-norm": {"post_norm": True, **LAYER_NORM},
    "residual-norm": {"residual_norm": True, "residual_scale": 0.7},
    "head-norms": {"qk_norm": True, **LAYER_NORM},
    "linear-norms": {"linear_norm": True, "sub_norm": False, "pre_norm": False, **LAYER_NORM},
    "embedding-norm": {"embedding_norm": True, "embedding_scale": 3.0},
    "no-final-norm": {"final_norm": False},
    "learned": {"position": "learned", "embedding_scale": 3.0},
    "sinusoidal": {"position": "sinusoidal", "embedding_norm": True},
    "no-positions": {"position": "none"},
    "first-position": {"first_position": 1, "rope_dim": 6},
    "biases": BIASES,
    "own-head-bias": {"head_bias": True, "tie_embeddings": False, "logit_softcap": 3.0},
    "softcap": {"attention_softcap": 0.5},
    "gelu-erf": {"activation": "gelu_erf"},
    **{f"plain-{name}": {"ffn": "plain", "activation": name} for name in ("relu2", "silu", "gelu", "relu", "gelu_erf")},
}
NO_ROPE: dict[str, Any] = {"sub_norm": False, "ffn": "plain", **LAYER_NORM, **BIASES}
FAMILIES: dict[str, dict[str, Any]] = {
    # The decoder of 2017: a norm of each sum and none elsewhere.
    "original": {
        **NO_ROPE, "pre_norm": False, "residual_norm": True, "final_norm": False, "position": "sinusoidal",
        "activation": "relu", "embedding_scale": 6.0, "n_kv_heads": 3,
    },
    "gpt-2": {**NO_ROPE, "activation": "gelu", "position": "learned", "n_kv_heads": 3, "head_bias": False},
    "mini-gpt": {
        "norm": "layer", "sub_norm": False, "ffn": "plain", "activation": "gelu_erf", "position": "learned",
        "tie_embeddings": False, "head_bias": True,
    },
    "all": {
        **LAYER_NORM, **BIASES, "residual_norm": True, "linear_norm": True, "qk_norm": True, "embedding_norm": True,
        "first_position": 1, "activation": "gelu_erf", "attention_softcap": 2.0, "sliding_window": 7,
        "tie_embeddings": False, "residual_scale": 0.8,
    },
    "experts": {
        **LAYER_NORM, **BIASES, "residual_norm": True, "linear_norm": True, "activation": "gelu_erf",
        "position": "learned", "residual_scale": 0.8, "n_experts": 4, "experts_per_token": 2,
    },
}  # fmt: skip


def texts(n: int, length: int) -> list[list[int]]:
    tokens: list[list[int]] = np.random.default_rng(1).integers(0, BASE.vocab_size, (n, length)).tolist()
    return tokens


def of_engine(path: Path, rows: list[list[int]]) -> NDArray[np.float64]:
    with Model.load(path, kv_type="f32", threads=2) as engine, engine.session() as session:
        logits = []
        for row in rows:
            session.reset()
            logits.append(session.append(row, "all"))
    return np.stack(logits).astype(np.float64)


def of_torch(model: Transformer, rows: list[list[int]], dtype: torch.dtype = torch.float32) -> NDArray[np.float64]:
    with torch.no_grad():
        logits: NDArray[np.float64] = model.to(dtype)(torch.tensor(rows)).double().numpy()
    model.float()
    return logits


@pytest.mark.parametrize("changes", [*FIELDS.values(), *FAMILIES.values()], ids=[*FIELDS, *FAMILIES])
def test_float_models(changes: dict[str, Any], tmp_path: Path) -> None:
    model, path = made(BASE.replace(**changes, **FLOAT), tmp_path)
    rows = texts(3, 40)
    expected = of_torch(model, rows, torch.float64)
    # fp32: three layers of sums of 50 terms, each rounded to 6e-8, and the norms of what they add up to.
    assert np.abs(of_engine(path, rows) - expected).max() < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_ternary_models(changes: dict[str, Any], tmp_path: Path) -> None:
    """Design §10, the noise floor: exact where no activation changed its code, else like fp32 against fp64."""
    model, path = made(BASE.replace(**changes), tmp_path)

    def log_p(logits: NDArray[np.float64]) -> NDArray[np.float64]:
        scores: NDArray[np.float64] = torch.from_numpy(logits).log_softmax(-1).numpy()
        return scores

    short, long = texts(64, 4), texts(24, 60)
    worst = np.abs(log_p(of_engine(path, short)) - log_p(of_torch(model, short))).max(axis=(1, 2))
    assert np.median(worst) < 1e-5  # fp32 noise; half of the texts have no rounding event at all
    single = log_p(of_torch(model, long))
    ours = np.abs(log_p(of_engine(path, long)) - single).mean(axis=(1, 2))
    floor = np.abs(log_p(of_torch(model, long, torch.float64)) - single).mean(axis=(1, 2))
    error = 2 * np.sqrt((ours.var() + 1.5**2 * floor.var()) / len(long))  # of both means
    assert ours.mean() <= 1.5 * floor.mean() + error


@pytest.mark.parametrize("kv_type", ["f16", "f32"])
@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_same_bits_on_every_tier(changes: dict[str, Any], kv_type: str, tmp_path: Path) -> None:
    """And for every number of threads, every split of the text and every batch."""
    _, path = made(BASE.replace(**changes), tmp_path)
    text, batch = texts(1, 60)[0], [row[: 1 + i % 9] for i, row in enumerate(texts(30, 9))]
    logits, vectors = set(), set()
    for isa in available_isas():
        for threads in (1, 3):
            with Model.load(path, isa=isa, threads=threads, kv_type=kv_type) as engine, engine.session() as session:
                for piece in (60, 1, 7):
                    session.reset()
                    rows = [session.append(text[at : at + piece], "all") for at in range(0, 60, piece)]
                    logits.add(np.concatenate(rows).tobytes())
                vectors.add(engine.embed(batch, pooling="mean").tobytes())
                vectors.add(np.stack([engine.embed(row, pooling="mean") for row in batch]).tobytes())
    assert len(logits) == 1 and len(vectors) == 1


@pytest.mark.parametrize("changes", FAMILIES.values(), ids=FAMILIES)
def test_export_verifies_them(changes: dict[str, Any], tmp_path: Path) -> None:
    drawn(BASE.replace(**changes), tmp_path / "c")
    report = export_checkpoint(tmp_path / "c", tmp_path / "m.bitnet", tokens=512)
    assert report.short.median <= 1e-5


@pytest.mark.parametrize("activation", ["relu2", "relu"])
def test_lines_change_no_bit_behind_a_layer_norm(activation: str, tmp_path: Path) -> None:
    """The norm turns the zeros, for which lines are skipped, into other values."""
    changes = {**LAYER_NORM, **BIASES, "activation": activation, "residual_norm": True, "linear_norm": True}
    _, path = made(BASE.replace(**changes), tmp_path)
    pack_checkpoint(Checkpoint.open(tmp_path / "checkpoint"), tmp_path / "lines.bitnet", sparse=True)
    rows = texts(3, 40)
    assert np.array_equal(of_engine(path, rows), of_engine(tmp_path / "lines.bitnet", rows))
