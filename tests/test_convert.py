"""Conversion and its verification, apart from any foreign format; and the verb `bitnet convert`."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from bitnet.cli import main
from bitnet.config import ModelConfig
from bitnet_export import PackedFile, VerificationError, packed, random_model
from bitnet_export.convert import open_source, pack_source
from bitnet_export.source import SourceError
from bitnet_export.verify_source import verify_source
from packed_source import flipped, source_of
from runtime_models import byte_tokenizer

ODD = ModelConfig(
    vocab_size=531, dim=40, n_layers=3, n_heads=3, n_kv_heads=1, head_dim=20, ffn_dim=72, max_context=300,
)  # fmt: skip
CONFIGS = {
    "relu2": ODD,
    "silu, untied, no sub norms": ODD.replace(activation="silu", sub_norm=False, tie_embeddings=False),
    "rows": ODD.replace(weight_scale="row"),
    "groups": ODD.replace(weight_scale="group", ffn_dim=200),
    "gemma": ODD.replace(
        activation="gelu", sub_norm=False, post_norm=True, qk_norm=True, embedding_scale=6.3, sliding_window=5,
        global_every=2, rope_local_theta=100.0,
    ),
    "norm before every projection": ODD.replace(linear_norm=True, sub_norm=False),
    "embeddings": ODD.replace(has_head=False, pooling="last"),
    "soft cap": ODD.replace(logit_softcap=2.0, qkv_bias=True),
}  # fmt: skip


@pytest.fixture(params=CONFIGS)
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    path = tmp_path / "model.bitnet"
    random_model(CONFIGS[request.param], path, 5, tokenizer=byte_tokenizer().to_str().encode())
    return path


@pytest.mark.parametrize("head", ["int8", "f16", "f32"])
def test_what_is_packed_is_what_was_read(model: Path, tmp_path: Path, head: str) -> None:
    source, out = source_of(model), tmp_path / "out.bitnet"
    checks = []
    pack_source(source, out, head=head, check=lambda file: checks.append(verify_source(source, file, tokens=300)))
    before, after = PackedFile.open(model), PackedFile.open(out)
    for key, record in after.tensors.items():
        if record.encoding in packed.TERNARY.values():
            assert np.array_equal(after.codes(record), before.codes(before.tensors[key]))
            assert np.array_equal(after.scales(record), before.scales(before.tensors[key]))
    (checked,) = checks
    assert checked.short.tokens == 128 and checked.long.tokens == 256
    assert checked.ternary_weights == before.configs[0].ternary_weights
    assert (checked.head.cost == 0) == (head == "f32")  # of the published floats nothing else is exact


@pytest.mark.parametrize("role", ["q", "down", "ffn_norm"])
def test_a_difference_in_the_layers_is_found(tmp_path: Path, role: str) -> None:
    random_model(ODD, tmp_path / "a", 5)
    source, out = source_of(tmp_path / "a"), tmp_path / "out"
    with pytest.raises(VerificationError, match=rf"layers\.0\.{role}\.weight: (codes|values) in the file differ"):
        pack_source(source, out, check=lambda file: verify_source(flipped(source, role), file, tokens=64))
    assert not out.exists()


def test_a_difference_in_the_head_is_found(tmp_path: Path) -> None:
    random_model(ODD.replace(tie_embeddings=False), tmp_path / "a", 5)
    source, out = source_of(tmp_path / "a"), tmp_path / "out"
    with pytest.raises(VerificationError, match="all logits"):
        pack_source(source, out, check=lambda file: verify_source(flipped(source, "head"), file, tokens=64))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is an empty file"),
        (b"PK\x03\x04....", "is a zip archive, such as a torch checkpoint"),
        (b"what is this", "is a file of an unknown kind"),
        (b"\x89BITNET\n", "is a packed file already; say what it should become: --to hf, gguf or onnx"),
    ],
)
def test_what_is_no_published_model(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: bytes, said: str
) -> None:
    (tmp_path / "model").write_bytes(content)
    assert main(["convert", str(tmp_path / "model"), str(tmp_path / "out")]) == 1
    captured = capsys.readouterr()
    assert said in captured.err and captured.err.count("\n") == 1 and not captured.out
    with pytest.raises(SourceError), open_source(tmp_path / "model"):
        pass
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(("to", "found"), [("hf", "config.json"), ("onnx", "model.onnx"), ("gguf", "")])
def test_the_verb_out_and_back(tmp_path: Path, to: str, found: str, capsys: pytest.CaptureFixture[str]) -> None:
    config = ODD.replace(activation="silu", dim=256, head_dim=64, n_heads=4, n_kv_heads=2, ffn_dim=512)
    first, out, back = tmp_path / "first.bitnet", tmp_path / "out", tmp_path / "back.bitnet"
    random_model(config, first, 5, tokenizer=byte_tokenizer().to_str().encode())
    words = ["--to", to, *(["--no-tokenizer"] if to == "gguf" else [])]
    assert main(["convert", str(first), str(out), *words, "--json"]) == 0
    assert (out / found if found else out).is_file()
    assert json.loads(capsys.readouterr().out)["file"] == str(out)
    if to == "onnx":
        return
    assert main(["convert", str(out), str(back), "--tokens", "64"]) == 0
    assert "found" in capsys.readouterr().err
    before, after = PackedFile.open(first), PackedFile.open(back)
    for key, record in after.tensors.items():
        if record.encoding in packed.TERNARY.values():
            assert np.array_equal(after.codes(record), before.codes(before.tensors[key]))
            assert np.array_equal(after.scales(record), before.scales(before.tensors[key]))
