"""Checkpoint to packed file: the same codes, the same log-probabilities, and no file otherwise."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from bitnet import kernels, straight_through
from bitnet.bitlinear import project
from bitnet.model.layers import ACTIVATIONS
from bitnet.model.positions import rope_frequencies, rope_tables
from bitnet.train.checkpoint import Checkpoint
from bitnet_export import PackedFile, export_checkpoint, repack
from bitnet_export.checkpoint.findings import Agreement
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_export.checkpoint.real_text import LONG_TOKEN, real_tokens
from bitnet_export.checkpoint.verify import VerificationError, check_agreement
from bitnet_export.packed import encodings, records
from bitnet_runtime import Model
from seeded_checkpoints import SMALL, make_checkpoint

pytestmark = pytest.mark.usefixtures("one_thread")


# ---- the same numbers ----


def test_codes_and_scales_are_those_of_the_paper(trained: Path, tmp_path: Path) -> None:
    """Compared with the formulas: γ = mean|W|, T = round(W/γ) within ±1, embedding rows by absmax."""
    pack_checkpoint(Checkpoint.open(trained), tmp_path / "m.bitnet")
    file, weights = PackedFile.open(tmp_path / "m.bitnet"), load_file(trained / "model.safetensors")
    ternary = 0
    for key, record in file.tensors.items():
        if key.name == "rope_frequencies":
            expected = 10_000.0 ** (-np.arange(0, 16, 2) / 16)
            assert np.array_equal(file.values(record)[0], expected.astype(np.float32))
            continue
        w = weights.pop(key.name).numpy()
        if record.encoding == encodings.TERNARY_2BIT:
            gamma = np.abs(w.astype(np.float64)).mean()
            assert np.allclose(file.scales(record), gamma, rtol=1e-6)
            exact = w / gamma
            clear = np.abs(np.abs(exact) - 0.5) > 1e-5  # on an edge the last bit of γ decides
            assert np.array_equal(file.codes(record)[clear], np.clip(np.rint(exact), -1, 1)[clear])
            assert clear.mean() > 0.999
            ternary += w.size
        elif record.encoding.kind == "int8":
            sigma = np.abs(w).max(axis=1) / 127
            assert np.allclose(file.scales(record), sigma, rtol=1e-6)
            assert np.abs(file.values(record) - w).max() <= 0.5001 * sigma.max()
        else:
            assert np.array_equal(file.values(record).ravel(), w)
    assert weights == {} and ternary == SMALL.ternary_weights


def test_loss_on_fifty_thousand_tokens(trained: Path, tmp_path: Path) -> None:
    report = export_checkpoint(trained, tmp_path / "m.bitnet", tokens=50_000)
    assert report.long.tokens >= 49_900 and report.text.startswith("validation text")
    assert report.long.loss_torch < 4.0  # it has learned: guessing gives 5.5
    assert abs(report.long.loss_engine - report.long.loss_torch) <= 1e-4
    assert report.short.median <= 1e-5
    assert report.ternary_weights == SMALL.ternary_weights
    assert all(0.2 < z < 0.5 for z in report.zero_fraction) and len(report.zero_fraction) == 2
    assert report.file_bytes == (tmp_path / "m.bitnet").stat().st_size
    assert os.listdir(tmp_path) == ["m.bitnet"]


def test_of_a_long_text_only_the_beginning_is_read(trained: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A book of a million pages takes no longer than a page."""
    checkpoint, read = Checkpoint.open(trained), list[int]()

    class Counting:
        def encode(self, text: str, **options: Any) -> Any:
            read.append(len(text))
            return words.encode(text, **options)

        def __getattr__(self, name: str) -> Any:
            return getattr(words, name)

    words = checkpoint.words
    whole, _ = real_tokens(checkpoint, 50_000)
    monkeypatch.setattr(Checkpoint, "words", Counting())
    ids, _ = real_tokens(Checkpoint.open(trained), 300)
    assert ids.tolist() == whole[:300].tolist()
    assert max(read) <= 300 * LONG_TOKEN  # the files have ten times as many characters


FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {"activation": "silu", "sub_norm": False, "tie_embeddings": False, "n_kv_heads": 4},
    "qwen": {"qkv_bias": True, "qk_norm": True, "activation": "silu"},
    "biases": {"o_bias": True, "ffn_bias": True, "qkv_bias": True},
    "rows": {"weight_scale": "row", "head_format": "f16"},
    "groups": {"weight_scale": "group", "dim": 136, "ffn_dim": 260, "head_format": "f32"},
    "some ternary": {"ternary": ("gate", "up", "down")},
    "none ternary": {"ternary": (), "head_format": "f16", "tie_embeddings": False},
    "scales": {"embedding_scale": 6.0, "residual_scale": 0.5, "attention_scale": 0.3, "logit_softcap": 20.0},
    "part of the head turns": {"rope_dim": 8, "rope_theta": 500.0},
    "llama 3 rope": {"rope_scaling": "llama3", "rope_factor": 8.0, "rope_original_context": 32},
    "yarn": {
        "rope_scaling": "yarn", "rope_factor": 4.0, "rope_original_context": 16, "rope_attention_factor": 1.14,
    },
    "a norm before every linear": {"linear_norm": True, "qk_norm": True, "sub_norm": False, "activation": "silu"},
    "post norms alone": {"pre_norm": False, "post_norm": True, "activation": "relu"},
    "no norm but before linears": {"pre_norm": False, "sub_norm": False, "linear_norm": True, "residual_scale": 0.3},
    "window": {"sliding_window": 5},
    "gemma": {
        "n_layers": 4, "dim": 41, "ffn_dim": 71, "n_heads": 3, "n_kv_heads": 1, "activation": "gelu", "sub_norm": False,
        "post_norm": True, "qk_norm": True, "linear_norm": True, "embedding_scale": 6.4, "attention_scale": 0.2,
        "sliding_window": 9, "global_every": 3, "rope_theta": 1e6, "rope_local_theta": 1e4, "norm_eps": 1e-6,
    },
    "local layers, one RoPE, scaled": {
        "sliding_window": 4, "global_every": 2, "rope_scaling": "linear", "rope_factor": 8.0,
    },
    "plain": {"ffn": "plain", "activation": "gelu", "linear_norm": True},
    "odd sizes": {"dim": 39, "ffn_dim": 71, "head_dim": 10, "n_heads": 3, "n_kv_heads": 1, "vocab_size": 301},
}  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_families(family: str, tmp_path: Path) -> None:
    config = SMALL.replace(**FAMILIES[family])
    report = export_checkpoint(make_checkpoint(tmp_path / "run", config, seed=7), tmp_path / "m.bitnet", tokens=1024)
    assert report.short.median <= 1e-5
    file = PackedFile.open(tmp_path / "m.bitnet")
    assert file.configs == (config,)
    tables = {key.name: file.values(record)[0] for key, record in file.tensors.items() if "frequencies" in key.name}
    assert np.array_equal(tables.pop("rope_frequencies"), rope_frequencies(config).numpy())
    if config.global_every:
        theta = config.rope_local_theta
        local = config.replace(rope_theta=theta, rope_scaling="none") if theta else config
        assert np.array_equal(tables.pop("rope_local_frequencies"), rope_frequencies(local).numpy())
    assert not tables


def test_what_the_file_carries(untrained: Path, tmp_path: Path) -> None:
    (untrained / "chat_template.jinja").write_text("{{ messages[0].content }}")
    pack_checkpoint(Checkpoint.open(untrained), tmp_path / "m.bitnet")
    file = PackedFile.open(tmp_path / "m.bitnet")
    assert file.section(records.TOKENIZER) == (untrained / "tokenizer.json").read_bytes()
    assert file.section(records.TEMPLATE) == b"{{ messages[0].content }}"
    assert file.metadata["generation"] == {"eos_token_ids": [0], "bos_token_id": 0}
    assert file.metadata["provenance"]["source"] == "step-000000" and file.metadata["provenance"]["step"] == 0
    with Model.load(tmp_path / "m.bitnet") as model:
        assert model.end_tokens == {0} and model.bos_token == 0
        assert model.detokenize(model.tokenize("naïve\n")) == "naïve\n"


def test_the_same_checkpoint_gives_the_same_bytes(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    for name in ("a", "b"):
        pack_checkpoint(Checkpoint.open(untrained), tmp_path / name)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert PackedFile.open(tmp_path / "a").metadata["provenance"]["date"] == "2023-11-14"


@pytest.mark.parametrize(("recorded", "said"), [(1.0, False), (0.4, True), ("x", False), (None, False)])
def test_a_run_that_did_not_end_is_said_so(recorded: Any, said: bool, untrained: Path, tmp_path: Path) -> None:
    state = json.loads((untrained / "state.json").read_text())
    (untrained / "state.json").write_text(json.dumps(state | {"quantized": recorded}))
    report = str(export_checkpoint(untrained, tmp_path / "a", tokens=64))
    assert ("saved when quantizers counted 40 %" in report) == said


def test_export_of_1_6_bits_is_the_other_file_repacked(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    report = export_checkpoint(untrained, tmp_path / "a", tokens=512, encoding="1.6")
    pack_checkpoint(Checkpoint.open(untrained), tmp_path / "b")
    other = repack(tmp_path / "b", tmp_path / "c", encoding="1.6")
    assert (tmp_path / "a").read_bytes() == (tmp_path / "c").read_bytes()
    assert report.ternary_bits_per_weight == other.ternary_bits_per_weight
    assert report.ternary_weights == other.ternary_weights
    assert f"{report.ternary_bits_per_weight:.2f} bits each" in str(report)


@pytest.mark.parametrize(("trained_as", "head"), [("int8", "f16"), ("f16", "int8"), ("int8", "f32")])
def test_a_head_of_another_format_and_its_cost(trained_as: str, head: str, tmp_path: Path) -> None:
    folder = make_checkpoint(tmp_path / "run", SMALL.replace(head_format=trained_as), steps=5)
    report = export_checkpoint(folder, tmp_path / "m.bitnet", tokens=2048, head=head)
    file = PackedFile.open(tmp_path / "m.bitnet")
    assert file.configs == (SMALL.replace(head_format=head),)
    table = next(record for key, record in file.tensors.items() if key.name == "embedding.weight")
    assert table.encoding.name.lower().startswith(head)

    cost = report.head
    assert (cost.stored, cost.trained) == (head, trained_as)
    windows = real_tokens(Checkpoint.open(folder), 2048)[0].reshape(-1, 64)
    model = Checkpoint.open(folder).model
    with torch.no_grad(), kernels.unused():  # as the export computes
        tokens = torch.from_numpy(windows)
        assert cost.loss_trained == pytest.approx(float(model.loss(tokens[:, :-1], tokens[:, 1:])), abs=1e-6)
    assert cost.loss == report.long.loss_torch
    assert cost.cost == pytest.approx(cost.loss - cost.loss_trained, abs=1e-12)
    assert 0 < abs(cost.cost) < 0.05 and 0 < cost.cost_error < 0.05
    assert f"{head}, trained as {trained_as}" in str(report)


def test_a_head_as_trained_costs_nothing(untrained: Path, tmp_path: Path) -> None:
    report = export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=512, head="int8")
    assert report.head.cost == report.head.cost_error == 0.0 and report.head.loss == report.head.loss_trained
    assert "int8, as trained" in str(report)
    with pytest.raises(ValueError, match="head_format is 'q4', expected one of int8, f16, f32"):
        export_checkpoint(untrained, tmp_path / "n.bitnet", head="q4")


@pytest.mark.parametrize("activation", ["relu2", "silu"])
def test_zero_inputs_of_down(activation: str, tmp_path: Path) -> None:
    """Compared with layers written out here, on the same text."""
    folder = make_checkpoint(tmp_path / "run", SMALL.replace(activation=activation), steps=5)
    zeros = export_checkpoint(folder, tmp_path / "m.bitnet", tokens=1024).zero_inputs
    model = Checkpoint.open(folder).model
    x = torch.from_numpy(real_tokens(Checkpoint.open(folder), 1024)[0].reshape(-1, 64))[:, :-1]
    with torch.no_grad():
        x = straight_through.embedding_rows(x, model.embedding.weight, "int8")
        cos, sin = rope_tables(SMALL, x.shape[1], like=x)
        for i, layer in enumerate(model.layers):
            x = x + layer.attention(layer.attn_norm(x), cos, sin)
            gate, up = project(layer.ffn_norm(x), layer.gate, layer.up)
            h = layer.ffn_sub_norm(ACTIVATIONS[activation](gate) * up)
            codes = (h * 127 / h.abs().amax(-1, keepdim=True)).round()
            silent = (gate <= 0) | (up == 0) if activation == "relu2" else (gate == 0) | (up == 0)
            assert zeros.before[i] == pytest.approx(float(silent.float().mean()), abs=1e-4)
            assert zeros.after[i] == pytest.approx(float((codes == 0).float().mean()), abs=1e-4)
            x = x + layer.down(h)
    assert len(zeros.before) == len(zeros.after) == SMALL.n_layers
    assert all(before < after < 1 for before, after in zip(zeros.before, zeros.after, strict=True))


@pytest.mark.parametrize("seconds", ["abc", "99999999999999999999", "1e9", "-99999999999999"])
def test_a_date_that_is_none(untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seconds: str) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", seconds)
    with pytest.raises(ValueError, match=f"SOURCE_DATE_EPOCH is '{seconds}', expected seconds since 1970"):
        export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=64)
    assert not (tmp_path / "m.bitnet").exists()


def test_vectors_have_no_loss_that_may_differ() -> None:
    """Their numbers may: rounding moves all numbers of a text together, which limits for chance do not allow for."""
    torch32 = np.zeros(4000)
    engine = torch32 + 1e-3 * (np.arange(4000) % 2)
    for vectors in (True, False):
        short = Agreement.of(torch32, torch32, torch32, (64, 8), vectors=vectors)
        long = Agreement.of(engine, torch32, torch32, (4, 1000), vectors=vectors)
        with contextlib.nullcontext() if vectors else pytest.raises(VerificationError, match="of the loss"):
            check_agreement(short, long, 1e-2)
        broken = Agreement.of(engine + 1, torch32, torch32, (4, 1000), vectors=vectors)
        with pytest.raises(VerificationError, match="mean difference in a long text"):
            check_agreement(short, broken, 1e-2)
