"""Random models: the same for a seed, and with numbers like those of trained ones."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from packed_files import SMALL, packed_bytes


@pytest.mark.parametrize("config", [SMALL, SMALL.replace(vocab_size=8195)])
def test_random_models_are_deterministic_and_padded_right(config: ModelConfig) -> None:
    assert packed_bytes(config, 3) == packed_bytes.__wrapped__(config, 3) != packed_bytes(config, 4)
    file = PackedFile(packed_bytes(config, 3))
    for record in file.tensors.values():
        if record.scope:  # packing again what was read gives the same padding
            again = record.encoding.encode(file.codes(record))
            assert np.array_equal(again, file.stored(record)), record.key.name


def test_random_tables_look_like_trained_ones(tmp_path: Path) -> None:
    """Codes of a normal distribution whose largest is near 127; values of deviation 2/√K."""
    random_model(SMALL.replace(vocab_size=500, dim=600), tmp_path / "m")
    file = PackedFile.open(tmp_path / "m")
    table = file.tensors[next(key for key in file.tensors if key.name == "embedding.weight")]
    codes, values = file.codes(table).astype(np.float64), file.values(table)
    assert abs(codes.mean()) < 0.5 and codes.std() == pytest.approx(127 / 3.5, rel=0.01)
    assert (np.abs(codes) < codes.std()).mean() == pytest.approx(0.68, abs=0.02)
    assert 100 < np.median(np.abs(codes).max(axis=1)) <= 127
    assert values.std() == pytest.approx(2 / 600**0.5, rel=0.03)


def test_random_models_have_the_positions_that_their_configuration_implies(tmp_path: Path) -> None:
    config = SMALL.replace(position="sinusoidal", rope_dim=0)
    random_model(config, tmp_path / "m")
    file = PackedFile.open(tmp_path / "m")
    table = file.tensors[next(key for key in file.tensors if key.name == "position.weight")]
    place, pair = np.ogrid[: config.max_context, : config.dim // 2]
    turns = np.exp(1j * place / 10_000 ** (2 * pair / config.dim))
    assert np.allclose(file.values(table), np.stack((turns.imag, turns.real), -1).reshape(table.rows, -1), atol=1e-6)


@pytest.mark.parametrize("zeros", [0.0, 1 / 3, 0.6, 1.0])
def test_random_models_have_the_zeros_asked_for(zeros: float, tmp_path: Path) -> None:
    config = SMALL.replace(dim=256, ffn_dim=512, n_layers=1)
    random_model(config, tmp_path / "m", zeros=zeros)
    file = PackedFile.open(tmp_path / "m")
    ternary = [record for record in file.tensors.values() if record.encoding.ternary]
    assert len(ternary) == 7 and np.allclose([file.zero_fraction(record) or 0 for record in ternary], zeros, atol=0.04)
    gains = [file.values(record).std() * record.cols**0.5 for record in ternary]
    assert np.allclose(gains, zeros < 1, atol=0.25)  # each keeps the variance of its input, give or take its scale
