"""The two encodings of one model: nothing is lost between them, and the logits are the same bit for bit."""

from __future__ import annotations

import dataclasses
import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

import packed_files
from bitnet.config import ModelConfig
from bitnet_cli import main
from bitnet_export import PackedFile, PackedFormatError, VerificationError, random_model, repack
from bitnet_export.packed import encodings, layout, records
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model, ModelFormatError, available_isas
from packed_files import SMALL

# Whole tiles of 16 columns that leave tiles of 20 unfinished, and past 64 bytes of activations.
MODEL = ModelConfig(
    vocab_size=70, dim=64, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=250, max_context=96,
    weight_scale="row",
)  # fmt: skip


@pytest.fixture
def two_bits(tmp_path: Path) -> Path:
    path = tmp_path / "two.bitnet"
    random_model(MODEL, path, 1, tokenizer=b'{"a": "tokenizer"}')
    return path


def found_in(path: Path) -> set[encodings.Encoding]:
    stored = {r.encoding for r in PackedFile.open(path).tensors.values()}
    return {encoding for encoding in stored if encoding.ternary}


def test_there_and_back_gives_the_same_bytes(two_bits: Path, tmp_path: Path) -> None:
    there, back = tmp_path / "there", tmp_path / "back"
    report = repack(two_bits, there, encoding="1.6")
    assert found_in(there) == {encodings.TERNARY_5TRIT}
    file = PackedFile.open(there)
    assert report.tensors_equal == len(file.tensors) and report.logits_equal == 32
    assert report.file_bytes == there.stat().st_size < two_bits.stat().st_size == report.source_bytes
    body = [r for r in file.tensors.values() if r.encoding == encodings.TERNARY_5TRIT]
    assert report.ternary_weights == sum(r.rows * r.cols for r in body)
    assert report.ternary_bits_per_weight == 8 * sum(r.size for r in body) / report.ternary_weights
    repack(there, back, encoding="2.0")
    assert back.read_bytes() == two_bits.read_bytes()
    repack(there, tmp_path / "again", encoding="1.6")
    assert (tmp_path / "again").read_bytes() == there.read_bytes()


def test_a_ternary_table_keeps_its_encoding(tmp_path: Path) -> None:
    """It has only one, whatever the linears have."""
    random_model(MODEL.replace(head_format="ternary"), tmp_path / "a")
    repack(tmp_path / "a", there := tmp_path / "there", encoding="1.6")
    assert found_in(there) == {encodings.TERNARY_2BIT, encodings.TERNARY_5TRIT}
    repack(there, tmp_path / "back", encoding="2.0")
    assert (tmp_path / "back").read_bytes() == (tmp_path / "a").read_bytes()


def test_logits_are_the_same_bits_in_both_encodings_on_every_tier(two_bits: Path, tmp_path: Path) -> None:
    other, tokens, logits = tmp_path / "other", list(range(70)), set()
    repack(two_bits, other, encoding="1.6")
    for path in (two_bits, other):
        for isa in available_isas():
            for threads, piece in ((1, 70), (2, 1), (1, 3), (2, 33)):  # one token, a few, many
                with Model.load(path, isa=isa, threads=threads) as model, model.session() as session:
                    pieces = [session.append(tokens[i : i + piece], "all") for i in range(0, 70, piece)]
                    logits.add(np.concatenate([p for p in pieces if p is not None]).tobytes())
    assert len(logits) == 1


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    heads=st.integers(1, 5),
    ffn_dim=st.integers(1, 160),
    scale=st.sampled_from(["tensor", "row"]),
    seed=st.integers(0, 9),
)
def test_any_shape(tmp_path: Path, heads: int, ffn_dim: int, scale: str, seed: int) -> None:
    config = MODEL.replace(
        dim=24 * heads, n_heads=heads, n_kv_heads=heads, head_dim=24, ffn_dim=ffn_dim, n_layers=1, weight_scale=scale
    )
    random_model(config, tmp_path / "a", seed, encoding="1.6")
    repack(tmp_path / "a", tmp_path / "b", encoding="2.0")
    a, b = PackedFile.open(tmp_path / "a"), PackedFile.open(tmp_path / "b")
    for key in a.tensors:
        assert np.array_equal(a.values(a.tensors[key]), b.values(b.tensors[key]))


def test_random_models_of_1_6_bits_have_the_zeros_asked_for(tmp_path: Path) -> None:
    random_model(MODEL.replace(dim=256), tmp_path / "m", zeros=0.42, encoding="1.6")
    file = PackedFile.open(tmp_path / "m")
    found = [z for record in file.tensors.values() if (z := file.zero_fraction(record)) is not None]
    assert len(found) == 14 and np.allclose(found, 0.42, atol=0.04)
    with pytest.raises(ValueError, match=r"encoding is '1.5', expected 2.0 or 1.6"):
        random_model(MODEL, tmp_path / "m", encoding="1.5")


def test_what_the_engine_cannot_run_is_converted_without_it(tmp_path: Path) -> None:
    config = SMALL.with_draft()
    assert config.draft
    random_model(config.replace(draft=config.draft.replace(sliding_window=5)), tmp_path / "a")
    assert repack(tmp_path / "a", tmp_path / "b", encoding="1.6").logits_equal == 0


@pytest.mark.parametrize(
    "family",
    [
        {"n_experts": 3, "experts_per_token": 2},
        {"has_head": False},  # which names no pooling
        {"has_head": False, "pooling": "mean", "n_experts": 2, "experts_per_token": 1, "ffn": "plain"},
        {"mask": "bidirectional"},
        {"mask": "bidirectional", "has_head": False, "input": "embeddings", "vocab_size": 0},
        {"mask": "prefix", "sliding_window": 5},
        {"mask": "prefix", "input": "embeddings"},
        {"norm": "layer", "norm_bias": True, "adapters": ("q",), "adapter_rank": 3},
    ],
)
def test_every_family_computes_the_same(tmp_path: Path, family: dict[str, Any]) -> None:
    random_model(SMALL.replace(**family), tmp_path / "a")
    report = repack(tmp_path / "a", tmp_path / "b", encoding="1.6")
    assert report.logits_equal == 32 and report.file_bytes != report.source_bytes


def test_group_scales_are_refused_and_nothing_is_left(tmp_path: Path) -> None:
    random_model(MODEL.replace(weight_scale="group"), tmp_path / "a")
    with pytest.raises(ValueError, match=r"q\.weight: stored as TERNARY_5TRIT with group scale, .* does not allow"):
        repack(tmp_path / "a", tmp_path / "b", encoding="1.6")
    assert [p.name for p in tmp_path.iterdir()] == ["a"]


def test_a_matrix_with_too_many_columns_is_refused_by_writer_and_readers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    wide = MODEL.replace(ffn_dim=layout.TRIT_MAX_K + 1, n_layers=1, dim=16, n_heads=1, n_kv_heads=1)
    path = tmp_path / "wide"
    with pytest.raises(ValueError, match=r"down\.weight: stored as TERNARY_5TRIT .* for 16 x 32769"):
        random_model(wide, path, encoding="1.6")
    random_model(wide.replace(ffn_dim=layout.TRIT_MAX_K), path, encoding="1.6")
    Model.load(path).close()
    with monkeypatch.context() as patched:
        patched.setattr(encodings.Encoding, "allows", lambda *_: True)
        random_model(wide, path, encoding="1.6")
    with pytest.raises(PackedFormatError, match=r"down\.weight is TERNARY_5TRIT"):
        PackedFile.open(path)
    with pytest.raises(ModelFormatError, match=r"down\.weight: encoding 5 .* is not allowed"):
        Model.load(path)


def test_sums_at_the_bound_on_columns_are_exact_on_every_tier(tmp_path: Path) -> None:
    """All codes 1, or all -1, with all activations at the end of their range: K * 127."""
    config = MODEL.replace(ffn_dim=layout.TRIT_MAX_K, n_layers=1, dim=16, n_heads=1, n_kv_heads=1, sub_norm=False)

    def source(spec: records.Spec) -> Encoded:
        if spec.form == "vector":
            return Encoded.f32(np.ones((spec.rows, spec.cols)))
        if spec.form == "table":
            return Encoded.f32(np.ones((spec.rows, spec.cols)))
        codes = np.ones((spec.rows, spec.cols), np.int8)
        codes[1::2] = -1 if spec.cols == layout.TRIT_MAX_K else 1
        return Encoded(
            encodings.TERNARY_5TRIT, encodings.SCALE_TENSOR, layout.pack_trits(codes), np.ones(1, np.float32)
        )

    write_packed(tmp_path / "a", [config.replace(weight_scale="tensor", head_format="f32")], source)
    assert repack(tmp_path / "a", tmp_path / "b", encoding="2.0").logits_equal == 32
    logits = set()
    for isa in available_isas():
        with Model.load(tmp_path / "a", isa=isa) as model, model.session() as session:
            rows = session.append([1, 2, 3], "all")
            assert rows is not None and np.isfinite(rows).all()
            logits.add(rows.tobytes())
    assert len(logits) == 1


def test_a_wrong_weight_in_the_result_is_found(two_bits: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def wrong(codes: layout.Codes) -> layout.Bytes:
        codes = codes.copy()
        codes[-1, -1] = -1 if codes[-1, -1] else 1
        return layout.pack_trits(codes)

    trits = dataclasses.replace(encodings.TERNARY_5TRIT, encode=wrong)
    monkeypatch.setitem(encodings.TERNARY, "1.6", trits)
    with pytest.raises(VerificationError, match=r"layers\.0\.q\.weight: weights in the file differ"):
        repack(two_bits, tmp_path / "out", encoding="1.6")
    assert not (tmp_path / "out").exists()


def test_command_line(two_bits: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main(["export", str(two_bits), str(out), "--encoding", "1.6", "--json"]) == 0
    printed = capsys.readouterr()
    assert "ternary codes equal, now 1." in printed.err and "the same bits for 32 tokens" in printed.err
    report = json.loads(printed.out)
    assert report == {"file": str(out)} | dataclasses.asdict(repack(two_bits, tmp_path / "b", encoding="1.6"))
    assert main(["inspect", str(out)]) == 0
    assert "TERNARY_5TRIT" in capsys.readouterr().out

    damaged = bytearray(out.read_bytes())
    q = packed_files.tensor_entry(bytes(damaged), "layers.0.q.weight")
    damaged[
        packed_files.section_start(bytes(damaged), records.DATA) + struct.unpack_from("<Q", damaged, q + 24)[0]
    ] ^= 1
    out.write_bytes(damaged)
    assert main(["export", str(out), str(tmp_path / "c"), "--encoding", "2.0"]) == 1
    assert "the file is damaged" in capsys.readouterr().err and not (tmp_path / "c").exists()
