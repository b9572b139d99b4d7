"""The sketch of the head finds the largest logits, also in the models that are hardest for it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from bitnet.config import ModelConfig
from bitnet_export import random_model
from bitnet_export.packed import int8_rows, records
from bitnet_export.packed.layout import Codes
from bitnet_export.packed.reader import PackedFile
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model
from packed_files import as_stored

CONFIG = ModelConfig(
    vocab_size=20_000, dim=256, n_layers=1, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=96, max_context=64,
    tie_embeddings=False,
)  # fmt: skip
OUTLIERS = (3, 70, 129, 255)
TOKENS = 150


def outlier_codes(rng: np.random.Generator) -> Codes:
    """Rows whose sketch cuts off a few columns: there the codes are 60 to 127, elsewhere a tenth of it."""
    codes = np.rint(rng.normal(0, 8, (CONFIG.vocab_size, CONFIG.dim))).clip(-127, 127).astype(np.int8)
    signs = rng.choice([-1, 1], (CONFIG.vocab_size, len(OUTLIERS)))
    codes[:, OUTLIERS] = signs * rng.integers(60, 128, signs.shape)
    return codes


def model_file(path: Path, kind: str) -> Path:
    """A random model; "outliers": with such a head, behind a norm that makes the same columns large."""
    random_model(CONFIG, path, seed=5)
    if kind == "normal":
        return path
    file, rng = PackedFile.open(path), np.random.default_rng(1)

    def source(spec: records.Spec) -> Encoded:
        tensor = as_stored(file, file.tensors[spec.key])
        if spec.key.name == "head.weight":
            return tensor._replace(data=int8_rows.pack_sketched(outlier_codes(rng)))
        if spec.key.name == "final_norm.weight":
            gain = np.ones((1, CONFIG.dim))
            gain[:, OUTLIERS] = 30
            return Encoded.f32(gain)
        return tensor

    hard = path.with_name("hard.bitnet")
    write_packed(hard, file.configs, source)
    return hard


@pytest.mark.parametrize("kind", ["normal", "outliers"])
def test_the_token_is_that_of_the_whole_head(kind: str, tmp_path: Path) -> None:
    with Model.load(model_file(tmp_path / "m.bitnet", kind)) as model, model.session() as session:
        whole = session.fork()
        for token in np.random.default_rng(2).integers(0, CONFIG.vocab_size, TOKENS).tolist():
            session.reset()
            whole.reset()
            session.feed([token])
            logits = whole.append([token])
            assert logits is not None
            for sampling in ({"temperature": 0.0}, {"temperature": 1.0, "top_k": 40}):
                session.seed(token)
                whole.seed(token)
                assert session.sample(**sampling) == whole.sample(**sampling)
            session.seed(0)
            assert session.sample(temperature=0.0) == int(logits.argmax())
