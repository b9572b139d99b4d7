"""Ternary embedding and head, and scales per 128 weights: what the engine computes with them, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import Spec
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model
from packed_files import as_stored

SIZE = 300  # of the vocabulary and of the model: three groups, the last of 44, and a panel of 12 rows
CONFIG = ModelConfig(
    vocab_size=SIZE, dim=SIZE, n_layers=2, n_heads=3, n_kv_heads=1, head_dim=20, ffn_dim=140, max_context=64,
    activation="silu", sub_norm=False, qk_norm=True, tie_embeddings=False,
)  # fmt: skip
TOKENS = [5, 299, 0, 77, 77, 130, 16, 15, 254, 1, 128, 127, 33]


def logits(path: Path, **options: Any) -> NDArray[np.float32]:
    with Model.load(path, **options) as model, model.session() as session:
        rows = session.append(TOKENS, "all")
        assert rows is not None
        return np.array(rows)


@pytest.fixture(params=["tensor", "row", "group"])
def made(request: pytest.FixtureRequest, tmp_path: Path) -> PackedFile:
    random_model(CONFIG.replace(weight_scale=request.param, head_format="ternary"), tmp_path / "made", 3)
    return PackedFile.open(tmp_path / "made")


def write(made: PackedFile, path: Path, **tables: Encoded) -> Path:
    """The model with other tables."""
    same = {key.name: record for key, record in made.tensors.items()}

    def source(spec: Spec) -> Encoded:
        role = records.ROLES[spec.key.role]
        return tables[role] if role in tables else as_stored(made, same[spec.key.name])

    write_packed(path, list(made.configs), source)
    return path


def test_rows_of_the_embedding_are_codes_times_scales(made: PackedFile, tmp_path: Path) -> None:
    """A product with -1, 0 or 1 is exact, so the same table as floats gives the same bits."""
    table = next(record for key, record in made.tensors.items() if key.name == "embedding.weight")
    assert table.encoding == encodings.TERNARY_2BIT
    other = write(made, tmp_path / "floats", embedding=Encoded.f32(made.values(table)))
    assert logits(tmp_path / "made").tobytes() == logits(other).tobytes()


def test_logits_are_those_of_the_rule(made: PackedFile, tmp_path: Path) -> None:
    """kernels.h written down with numpy. A head that is the identity tells its input: sums with zeros are exact."""
    head = next(record for key, record in made.tensors.items() if key.name == "head.weight")
    x = logits(write(made, tmp_path / "identity", head=Encoded.f32(np.eye(SIZE))))
    s = np.float32(127) / np.abs(x).max(axis=1, keepdims=True)
    q, codes = np.rint(x * s).astype(np.int64), made.codes(head).astype(np.int64)
    scales = made.scales(head)
    if made.configs[0].weight_scale == "group":
        y = np.zeros((len(TOKENS), SIZE), np.float32)
        for g, scale in enumerate(scales.reshape(SIZE, -1).T):
            part = slice(128 * g, 128 * (g + 1))
            # A product of 15 and 11 bits and a float are exact in 53 bits, so that this rounds once, as fma does.
            y = ((q[:, part] @ codes[:, part].T) * scale.astype(np.float64) + y).astype(np.float32)
        expected = y / s
    else:
        expected = (q @ codes.T).astype(np.float32) * (scales / s)
    assert logits(tmp_path / "made").tobytes() == expected.tobytes()


def test_threads_and_tiers_agree_on_groups(tmp_path: Path) -> None:
    random_model(CONFIG.replace(weight_scale="group", head_format="ternary", tie_embeddings=True), tmp_path / "m", 4)
    expected = logits(tmp_path / "m", threads=1, isa="scalar")
    with Model.load(tmp_path / "m", threads=2) as model, model.session() as session:
        rows = [session.append(TOKENS[i : i + n], "all") for i, n in ((0, 1), (1, 2), (3, 1), (4, 9))]
    assert np.concatenate([np.array(row) for row in rows]).tobytes() == expected.tobytes()


def test_a_token_reads_the_ternary_head_and_half_scales(tmp_path: Path) -> None:
    random_model(CONFIG.replace(weight_scale="group", head_format="ternary"), tmp_path / "m")
    file = PackedFile.open(tmp_path / "m")
    ternary = [record for record in file.tensors.values() if record.encoding == encodings.TERNARY_2BIT]
    read = sum(record.size + record.scale_size for record in ternary if records.ROLES[record.key.role] != "embedding")
    with Model.load(tmp_path / "m") as model:
        assert model.info.bytes_per_token == read
