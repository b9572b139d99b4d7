"""The presets of other families: small versions train from the command line, and have the properties they claim."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.presets import PRESETS
from bitnet.train.checkpoint import Checkpoint
from training import TINY, bitnet, losses

torch.set_num_threads(1)

SMALL = [*TINY, "--set", "n_kv_heads=2", "--tokenizer", "bpe"]


@pytest.mark.parametrize("preset", [name for name in PRESETS if name.startswith(("transformer", "mini", "thinker"))])
def test_it_trains(preset: str, sentences: str, tmp_path: Path) -> None:
    more = ["--batch", "4", "--accumulate", "1", "--lr", "0.01"]
    assert bitnet("train", "--preset", preset, *SMALL, *more, "--data", sentences, "--out", tmp_path / "run") == 0
    checks = [record["validation"]["nats_per_token"] for record in losses(tmp_path / "run") if "validation" in record]
    assert checks[-1] < checks[0] < 5.7  # ln 300
    made = Checkpoint.open(tmp_path / "run").config
    small = {name: getattr(made, name) for name in ("vocab_size", "dim", "n_layers", "n_heads", "n_kv_heads")}
    small |= {name: getattr(made, name) for name in ("head_dim", "ffn_dim", "max_context")}
    assert made == PRESETS[preset].replace(**small)


def names_of(config: ModelConfig) -> set[str]:
    with torch.device("meta"):
        return {name.replace("layers.0.", "") for name in Transformer(config.replace(n_layers=1)).state_dict()}


def test_the_transformer_of_2017() -> None:
    """Norms with biases behind each sum and nowhere else, biases everywhere, one table for both ends."""
    parts = {f"{role}.{kind}" for role in ("q", "k", "v", "o", "up", "down") for kind in ("weight", "bias")}
    parts |= {f"{norm}.{kind}" for norm in ("attn_post_norm", "ffn_post_norm") for kind in ("weight", "bias")}
    for name in ("transformer-2017", "transformer-2017-encoder"):
        assert names_of(PRESETS[name]) == parts | {"embedding.weight"}
        assert PRESETS[name].embedding_scale == PRESETS[name].dim ** 0.5


def test_learned_positions() -> None:
    extra = names_of(PRESETS["mini-gpt-learned"]) - names_of(PRESETS["mini-gpt"])
    assert extra == {"position.weight"}


def test_a_ternary_head_is_trained_and_exported(sentences: str, tmp_path: Path) -> None:
    """With a bias; both are learnt, and the export compares them with the engine."""
    options = ("--set", "head_format=ternary", "--set", "tie_embeddings=no", "--set", "head_bias=yes", "--steps", "3")
    assert bitnet("train", *TINY, *options, "--data", sentences, "--out", tmp_path / "run") == 0
    first, last = (Checkpoint(tmp_path / "run" / name) for name in ("step-000000", "step-000003"))
    for name in ("head.weight", "head.bias"):
        assert not first.tensor(name).equal(last.tensor(name))
    assert bitnet("export", tmp_path / "run", tmp_path / "model.bitnet") == 0
