"""The Thinker: its presets have its sizes, its JSON configuration is read, and what we cannot represent is refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from bitnet.config import ModelConfig
from bitnet.model.transformer import Transformer
from bitnet.presets import PRESETS
from bitnet.settings import Settings
from bitnet.setup.given import Given
from bitnet.setup.resolve import resolve
from bitnet.setup.thinker import DEFAULTS
from training import TINY, bitnet

TINY_JSON: dict[str, Any] = {
    "vocab_size": 5000, "n_layers": 4, "d_model": 256, "n_heads": 4, "d_ff": 1024, "dropout": 0.1, "rope_theta": 10000,
    "ctx_len": 512, "use_swiglu": True, "use_gqa": False, "use_moe": False,
}  # fmt: skip


def parameters(config: ModelConfig) -> int:
    with torch.device("meta"):
        return sum(p.numel() for p in Transformer(config).parameters())


def resolved(values: Any, folder: Path, **options: Any) -> tuple[Settings, ModelConfig]:
    file = folder / "thinker.json"
    file.write_text(values if isinstance(values, str) else json.dumps(values), encoding="utf-8")
    return resolve(Given(options=options, config=str(file)))


def test_presets_have_the_published_sizes() -> None:
    assert parameters(PRESETS["thinker"]) == 6_756_608
    assert parameters(PRESETS["thinker-moe"]) == 28_784_896


def test_its_configurations_are_the_presets(tmp_path: Path) -> None:
    settings, config = resolved(TINY_JSON, tmp_path)
    assert config == PRESETS["thinker"] and settings.preset == "thinker"
    settings, config = resolved(DEFAULTS | {"use_moe": True}, tmp_path, steps=77)
    assert config == PRESETS["thinker-moe"]
    said = settings.lr, settings.weight_decay, settings.warmup, settings.steps, settings.batch, settings.clip
    assert said == (3e-4, 0.1, 10 / 5000, 77, 8, 1.0)  # flags win
    assert (settings.validation, settings.seed, settings.optimizer) == (0.1, 42, "adamw")


def test_other_forms(tmp_path: Path) -> None:
    config = resolved(TINY_JSON | {"use_swiglu": False, "use_gqa": True}, tmp_path)[1]
    assert (config.ffn, config.activation, config.ffn_bias) == ("plain", "gelu_erf", True)
    assert (config.n_heads, config.n_kv_heads, config.head_dim) == (4, 2, 64)
    assert resolved(TINY_JSON | {"rope_theta": 10000.0}, tmp_path)[1] == PRESETS["thinker"]
    assert resolved(TINY_JSON | {"n_heads": 1, "use_gqa": True}, tmp_path)[1].n_kv_heads == 1


@pytest.mark.parametrize(
    ("values", "said"),
    [
        (TINY_JSON | {"n_layer": 4}, "unknown key 'n_layer', did you mean 'n_layers'?"),
        (TINY_JSON | {"zzz": 4}, "unknown key 'zzz', expected some of vocab_size, n_layers, d_model, n_heads, d_ff,"),
        (TINY_JSON | {"use_moe": 1}, "use_moe is 1, expected bool"),
        (TINY_JSON | {"d_model": "256"}, "d_model is '256', expected int"),
        (TINY_JSON | {"n_heads": 3}, "d_model is 256, expected a multiple of n_heads = 3"),
        (TINY_JSON | {"n_heads": 0}, "expected a multiple of n_heads = 0"),
        (TINY_JSON | {"d_ff": -1}, "ffn_dim is -1, expected an integer from 1"),
        (TINY_JSON | {"warmup_steps": -5}, "--warmup is -0.001, expected 0 to 1"),
        (TINY_JSON | {"rope_theta": 10**400}, "expected a finite number above 0"),
        ({"dim": 8}, "has no 'd_model'"),
        ([1], "has no 'd_model'"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
    ],
)
def test_refusals(values: Any, said: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=None) as error:
        resolved(values, tmp_path)
    assert said in str(error.value)


def test_it_trains_from_the_command_line(sentences: str, tmp_path: Path) -> None:
    file = tmp_path / "tiny.json"
    shape = {"vocab_size": 300, "n_layers": 1, "d_model": 32, "n_heads": 2, "d_ff": 48, "ctx_len": 32, "use_moe": True}
    file.write_text(json.dumps(shape | {"max_steps": 3}), encoding="utf-8")
    options = [word for word in TINY[TINY.index("--threads") :] if word not in ("--steps", "20")]
    assert bitnet("train", "--config", file, *options, "--data", sentences, "--out", tmp_path / "run") == 0
    assert (tmp_path / "run" / "step-000003").is_dir()
