"""A checkpoint of every family as a packed file: the engine computes what torch does."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from bitnet.config import ModelConfig
from bitnet.data import dataset
from bitnet.model.transformer import Transformer
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import PackedFile, VerificationError, export_checkpoint
from bitnet_export.checkpoint import scoring, verify
from bitnet_export.checkpoint.scoring import NOTHING, texts_of, torch_scores
from training import saved

SMALL = ModelConfig(
    vocab_size=257, dim=42, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=14, ffn_dim=71, max_context=48,
)  # fmt: skip
BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "ffn_bias": True, "norm_bias": True}
ORIGINAL = SMALL.replace(
    norm="layer", residual_norm=True, pre_norm=False, sub_norm=False, final_norm=False, position="sinusoidal",
    ffn="plain", activation="relu", head_bias=True, n_kv_heads=4, **BIASES,
)  # fmt: skip
ENCODER: dict[str, Any] = {"mask": "bidirectional", "has_head": False, "pooling": "mean"}

FAMILIES = {
    "original": (ORIGINAL, "tokens"),
    "learned positions": (SMALL.replace(position="learned", embedding_norm=True, activation="gelu_erf"), "tokens"),
    "experts": (SMALL.replace(n_experts=4, experts_per_token=2), "tokens"),
    "plain experts": (
        ORIGINAL.replace(n_experts=3, experts_per_token=1, normalize_routing=False, position="none"), "tokens",
    ),
    "decoder without a head": (SMALL.replace(has_head=False, pooling="last", tie_embeddings=False), "vectors of texts"),
    "prefix": (SMALL.replace(mask="prefix", first_position=1), "tokens behind a prefix"),
    "prefix with a window": (
        SMALL.replace(mask="prefix", sliding_window=5, n_experts=3, experts_per_token=2), "tokens behind a prefix",
    ),
    "masked": (ORIGINAL.replace(mask="bidirectional", position="learned", embedding_norm=True), "masked tokens"),
    "encoder": (SMALL.replace(**ENCODER), "vectors of texts"),
    "encoder of vectors": (
        SMALL.replace(input="embeddings", vocab_size=0, sliding_window=7, **ENCODER), "vectors of texts",
    ),
    "decoder of vectors": (SMALL.replace(input="embeddings", tie_embeddings=False, head_format="f32"), "tokens"),
    "prefix of vectors": (SMALL.replace(input="embeddings", mask="prefix"), "tokens behind a prefix"),
}  # fmt: skip


pytestmark = pytest.mark.usefixtures("one_thread")


def checkpoint_of(run: Path, config: ModelConfig) -> Path:
    """A checkpoint with uneven gains, biases and routers."""
    torch.manual_seed(3)
    model = Transformer(config)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
            elif name.endswith("router.weight"):
                parameter.normal_(std=0.3)
            elif name.endswith((".o.weight", ".down.weight")):
                parameter.normal_(std=0.02)
    return saved(run, model)


@pytest.mark.parametrize("family", FAMILIES)
def test_the_engine_computes_what_torch_does(family: str, tmp_path: Path) -> None:
    config, asked = FAMILIES[family]
    folder = checkpoint_of(tmp_path / "run", config)
    report = export_checkpoint(folder, tmp_path / "m.bitnet", tokens=1440)
    assert PackedFile.open(tmp_path / "m.bitnet").configs == (config,)
    assert report.asked == asked and report.long.windows == 30 and report.long.tokens == 1440
    # On short texts fp32 noise, if no activation fell on another side of an edge; else what torch itself shows.
    assert report.short.median <= 1e-5 + 1.5 * report.short.floor_median
    assert abs(report.long.loss_engine - report.long.loss_torch) <= 1e-4 + 3 * report.long.loss_error
    assert ("loss  " in str(report)) == config.has_head and len(report.zero_inputs.after) == config.n_layers


@pytest.mark.parametrize("family", ["experts", "prefix", "masked", "encoder", "original"])
def test_what_differs_is_found(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine that is given other texts than torch."""

    def shifted(engine: Any, config: ModelConfig, texts: scoring.Texts) -> Any:
        other = scoring.Texts((texts.inputs + 1) % config.vocab_size, texts.targets, texts.prefixes, texts.hidden)
        return scoring.engine_scores(engine, config, other)

    folder = checkpoint_of(tmp_path / "run", FAMILIES[family][0])
    monkeypatch.setattr(verify, "engine_scores", shifted)
    with pytest.raises(VerificationError, match="median difference in short prompts"):
        export_checkpoint(folder, tmp_path / "m.bitnet", tokens=960)
    assert not (tmp_path / "m.bitnet").exists()


# ---- what each family is asked ----


def test_of_a_prefix_what_follows_it(tmp_path: Path) -> None:
    config = FAMILIES["prefix"][0]
    ids = np.random.default_rng(5).integers(0, 257, (6, 12))
    texts = texts_of(config, ids)
    assert texts.prefixes is not None and texts.targets is not None
    assert texts.prefixes.tolist() == [1, 3, 5, 7, 9, 11]
    for row, prefix, targets in zip(ids, texts.prefixes, texts.targets, strict=True):
        assert targets.tolist() == [NOTHING] * (prefix - 1) + row[prefix:].tolist()
    model = Checkpoint.open(checkpoint_of(tmp_path, config)).model
    scores, at = torch_scores(model, texts), 0
    for row, prefix in zip(torch.from_numpy(ids), texts.prefixes.tolist(), strict=True):
        with torch.no_grad():
            logits = model(row[None, :-1], None, torch.tensor([prefix]))[0].log_softmax(-1)
        for position in range(prefix, 12):
            assert scores[at] == pytest.approx(float(logits[position - 1, row[position]]), abs=1e-5)
            at += 1
    assert at == len(scores)


def test_of_an_encoder_with_a_head_the_hidden_tokens() -> None:
    ids = np.random.default_rng(5).integers(1, 257, (200, 40))
    texts = texts_of(FAMILIES["masked"][0], ids, mask_token=0)
    assert texts.targets is not None and texts.hidden
    asked = texts.targets != NOTHING
    assert asked.any(1).all() and 0.14 < asked.mean() < 0.17
    assert 0.75 < (texts.inputs[asked] == 0).mean() < 0.85 and np.array_equal(texts.targets[asked], ids[asked])
    assert NOTHING == dataset.IGNORED
    assert np.array_equal(texts.inputs[~asked], ids[~asked])
    assert np.array_equal(texts_of(FAMILIES["masked"][0], ids, mask_token=0).targets, texts.targets)
