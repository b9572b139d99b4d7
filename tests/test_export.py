"""Checkpoint to packed file: the same codes, the same log-probabilities, and no file otherwise."""

from __future__ import annotations

import argparse
import ast
import decimal
import inspect
import json
import os
import shutil
import subprocess
import tarfile
import typing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import hostile_packed
import packed_files
from bitnet import quant
from bitnet.bitlinear import project
from bitnet.config import ModelConfig
from bitnet.data import corpus, dataset, tokenizer
from bitnet.model.layers import ACTIVATIONS
from bitnet.model.positions import rope_frequencies, rope_tables
from bitnet.model.transformer import Transformer
from bitnet.train import checkpoint, saving
from bitnet.train.checkpoint import Checkpoint
from bitnet_cli import main
from bitnet_export import PackedFile, VerificationError, export_checkpoint, repack, verify, write_packed
from bitnet_export.checkpoint import pack
from bitnet_export.checkpoint.pack import pack_checkpoint
from bitnet_export.checkpoint.real_text import real_tokens
from bitnet_export.packed import encodings, records
from bitnet_export.packed.writer import Encoded
from bitnet_runtime import Model

SMALL = ModelConfig(
    vocab_size=257, dim=40, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, ffn_dim=72, max_context=64,
)  # fmt: skip

TEXT = [inspect.getfile(module) for module in (argparse, ast, decimal, inspect, shutil, subprocess, tarfile, typing)]


pytestmark = pytest.mark.usefixtures("one_thread")


def make_checkpoint(run: Path, config: ModelConfig = SMALL, *, steps: int = 0, seed: int = 0) -> Path:
    """A seeded model with uneven gains and biases; `steps` of training on Python source."""
    torch.manual_seed(seed)
    model, words = Transformer(config), tokenizer.build("byte", [], 257)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("norm.weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(std=0.1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if steps:
        run.mkdir(parents=True, exist_ok=True)
        tokens = dataset.tokenize(list(corpus.Documents(TEXT)), words, run, "text")
        batches = dataset.Batches(tokens, 16, 64, seed)
        for step in range(steps):
            model.loss(*batches[step]).backward()
            optimizer.step()
            optimizer.zero_grad()
    state = {"step": steps, "tokens": 1024 * steps, "seconds": 0, "settings": {"data": TEXT, "validation": 0.3}}
    return saving.save(run, model, words.to_str(), optimizer, state)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("run"), steps=60)


@pytest.fixture
def untrained(tmp_path: Path) -> Path:
    folder = make_checkpoint(tmp_path / "run")
    (folder / "manifest.json").unlink()  # so that tests may change it
    return folder


def edit(folder: Path, **tensors: torch.Tensor | None) -> None:
    """Replace (or remove, with None) tensors of a checkpoint; dots are written as double underscores."""
    weights = load_file(folder / "model.safetensors")
    for name, tensor in tensors.items():
        weights.pop(name.replace("__", "."), None)
        if tensor is not None:
            weights[name.replace("__", ".")] = tensor
    save_file(weights, folder / "model.safetensors")


# ---- the same numbers ----


def test_codes_and_scales_are_those_of_the_paper(trained: Path, tmp_path: Path) -> None:
    """Against arithmetic written out here: γ = mean|W|, T = round(W/γ) within ±1, embedding rows by absmax."""
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
            clear = np.abs(np.abs(exact) - 0.5) > 1e-5  # on the edge, the last bit of γ decides
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
    assert report.long.loss_torch < 4.0  # it has learned: 5.5 is a guess
    assert abs(report.long.loss_engine - report.long.loss_torch) <= 1e-4
    assert report.short.median <= 1e-5
    assert report.ternary_weights == SMALL.ternary_weights
    assert all(0.2 < z < 0.5 for z in report.zero_fraction) and len(report.zero_fraction) == 2
    assert report.file_bytes == (tmp_path / "m.bitnet").stat().st_size
    assert os.listdir(tmp_path) == ["m.bitnet"]


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
    with torch.no_grad():
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
    """Against layers written out here, on the same text."""
    folder = make_checkpoint(tmp_path / "run", SMALL.replace(activation=activation), steps=5)
    zeros = export_checkpoint(folder, tmp_path / "m.bitnet", tokens=1024).zero_inputs
    model = Checkpoint.open(folder).model
    x = torch.from_numpy(real_tokens(Checkpoint.open(folder), 1024)[0].reshape(-1, 64))[:, :-1]
    with torch.no_grad():
        x = quant.embedding_rows(x, model.embedding.weight, "int8")
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


# ---- a file that is not the checkpoint's is not kept ----


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("layers.1.down.weight", lambda e: e.data.__setitem__(0, e.data[0] ^ (2 if e.data[0] & 3 != 1 else 1))),
        ("layers.0.q.weight", lambda e: e.scales.__imul__(np.float32(1.000001))),
        ("layers.0.ffn_norm.weight", lambda e: e.data.__imul__(np.float32(1.000001))),
        ("embedding.weight", lambda e: e.data.__setitem__(3, e.data[3] ^ 0x10)),
    ],
)
def test_one_wrong_number_is_found(
    name: str, change: Any, untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = pack.encode

    def wrong(spec: records.Spec, weight: torch.Tensor, config: ModelConfig, body: int) -> Encoded:
        tensor = right(spec, weight, config, body)
        if spec.key.name != name:
            return tensor
        scales = None if tensor.scales is None else tensor.scales.copy()
        tensor = tensor._replace(data=tensor.data.copy(), scales=scales)
        change(tensor)
        return tensor

    monkeypatch.setattr(pack, "encode", wrong)
    with pytest.raises(VerificationError, match=f"{name}: .* differ from the checkpoint's"):
        export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=64)
    assert not [file for file in os.listdir(tmp_path) if "m.bitnet" in file]


def test_an_engine_that_computes_something_else_is_found(
    untrained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = __import__("bitnet_export.checkpoint.verify", fromlist=["verify"])
    right = module.engine_scores
    for error, message in (
        (lambda s: s - 3e-5, "median difference in short prompts"),
        (lambda s: s - 0.5 * (s.size > 64 * 7), "mean difference in a long text"),  # more than the prompts have
        (lambda s: s * np.nan, "nan nats"),
    ):
        monkeypatch.setattr(module, "engine_scores", lambda *args, error=error: error(right(*args)))
        with pytest.raises(VerificationError, match=message):
            export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=1024)
        assert not [file for file in os.listdir(tmp_path) if "m.bitnet" in file]


def test_verify_of_another_checkpoint_fails(trained: Path, untrained: Path, tmp_path: Path) -> None:
    pack_checkpoint(Checkpoint.open(trained), tmp_path / "m.bitnet")
    with pytest.raises(VerificationError, match="differ from the checkpoint's"):
        verify(untrained, tmp_path / "m.bitnet")


# ---- bad checkpoints ----


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers__0__q__weight": None}, r"tensor layers\.0\.q\.weight is missing"),
        ({"extra": torch.zeros(2)}, "tensor extra is there, config.json does not call for it"),
        ({"layers__1__o__weight": torch.ones(40, 40)}, r"layers\.1\.o\.weight is 40×40, config\.json calls for 40×64"),
        ({"final_norm__weight": torch.full((40,), float("nan"))}, r"final_norm\.weight holds NaN or infinity"),
        ({"layers__0__up__weight": torch.full((72, 40), float("inf"))}, "holds NaN or infinity"),
    ],
)
def test_bad_checkpoints(changes: dict[str, Any], message: str, untrained: Path, tmp_path: Path) -> None:
    edit(untrained, **changes)
    with pytest.raises(checkpoint.CheckpointError, match=message):
        export_checkpoint(untrained, tmp_path / "m.bitnet")
    assert os.listdir(tmp_path) == ["run"]


def test_a_tokenizer_of_another_model(untrained: Path, tmp_path: Path) -> None:
    words = tokenizer.build("char", ["αβγδ"], 300)
    (untrained / "tokenizer.json").write_text(words.to_str())
    with pytest.raises(ValueError, match=r"has token id 260, .* has vocab_size 257"):
        export_checkpoint(untrained, tmp_path / "m.bitnet")


def test_a_checkpoint_without_tokenizer_is_compared_on_random_tokens(untrained: Path, tmp_path: Path) -> None:
    (untrained / "tokenizer.json").unlink()
    (untrained / "state.json").unlink()
    report = export_checkpoint(untrained, tmp_path / "m.bitnet", tokens=512)
    assert report.text.startswith("random tokens")
    assert PackedFile.open(tmp_path / "m.bitnet").section(records.TOKENIZER) is None


# ---- the command line ----


def test_export_and_inspect(untrained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = str(tmp_path / "m.bitnet")
    assert main(["export", str(untrained.parent), out, "--tokens", "600", "--json"]) == 0
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["file"] == out and report["short"]["median"] <= 1e-5 and report["long"]["tokens"] == 576
    for word in ("size", "fp16", "zeros", "weights", "prompts", "text", "loss", "head", "inputs"):
        assert word in printed.err
    assert report["head"]["cost"] == 0.0 and len(report["zero_inputs"]["after"]) == SMALL.n_layers

    assert main(["export", out, str(tmp_path / "again"), "--head", "f16"]) == 2
    assert "--head goes with a checkpoint" in capsys.readouterr().err and not (tmp_path / "again").exists()

    assert main(["inspect", out, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    file = PackedFile.open(out)
    assert facts["file_size"] == file.file_size and facts["config"] == [SMALL.to_dict()]
    assert [s["name"] for s in facts["sections"]] == ["STACKS", "TENSORS", "METADATA", "TOKENIZER", "DATA"]
    q = next(t for t in facts["tensors"] if t["name"] == "layers.0.q.weight")
    assert q["shape"] == [64, 40] and q["encoding"] == "TERNARY_2BIT" and q["bytes"] == 64 * 4 * 3 + 4
    assert 0.2 < q["zero_fraction"] < 0.5 and q["scale"][0] == q["scale"][1] > 0

    assert main(["inspect", out]) == 0
    table = capsys.readouterr().out
    assert "layers.1.down.weight" in table and "64 × 40" in table and f"{file.sections[0].crc:08x}" in table


def test_inspect_refuses_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "m.gguf").write_bytes(hostile_packed.foreign_files()["gguf"])
    for path, message in ((tmp_path / "m.gguf", "found a GGUF file"), (tmp_path / "none", "No such file")):
        assert main(["inspect", str(path)]) == 1
        printed = capsys.readouterr()
        assert printed.out == "" and message in printed.err and printed.err.count("\n") == 1


def test_inspect_never_sends_escapes_to_the_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    evil = "a\x1b[31m\x9b\r\n\u202e\x00"
    config = packed_files.SMALL.replace(name="b\x1b]0;x\x07")
    source = PackedFile(packed_files.packed_bytes())

    def same(spec: records.Spec) -> Encoded:
        return Encoded.f32(source.values(source.tensors[spec.key]))

    write_packed(tmp_path / "m", [config], same, metadata={evil: {evil: evil}})
    assert main(["inspect", str(tmp_path / "m")]) == 0
    assert all(c.isprintable() or c == "\n" for c in capsys.readouterr().out)


@pytest.mark.parametrize("words", [["export"], ["export", "x"], ["inspect"], ["export", "a", "b", "--tokens", "0"]])
def test_wrong_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words) == 2
    assert "error" in capsys.readouterr().err


def test_export_fails_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", str(tmp_path / "none"), str(tmp_path / "m")]) == 1
    assert "none does not exist" in capsys.readouterr().err
    folder = make_checkpoint(tmp_path / "run")
    (folder / "manifest.json").unlink()
    shutil.copy(folder / "config.json", folder / "model.safetensors")
    assert main(["export", str(folder), str(tmp_path / "m")]) == 1
    printed = capsys.readouterr().err
    assert "damaged or not a safetensors file" in printed and printed.count("\n") == 1
    assert os.listdir(tmp_path) == ["run"]


@pytest.mark.parametrize(
    "name",
    ["step-000009/model.safetensors", "step-000009/optimizer.safetensors", "step-000009/config.json", "log.jsonl"],
)
@pytest.mark.parametrize("source", [".", "step-000009"])
def test_no_part_of_the_run_is_replaced(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, source: str
) -> None:
    run = tmp_path / "run a"
    folder = make_checkpoint(run)
    folder = folder.rename(run / "step-000009")
    (run / "log.jsonl").write_text("{}\n")
    before = (run / name).read_bytes()
    assert main(["export", str(run / source), str(run / name)]) == 1
    assert f"{run / name} is in the source and would be replaced; give another name" in capsys.readouterr().err
    assert (run / name).read_bytes() == before
