"""The parts of benchmarks/ that do not need llama.cpp, on a model of half a million weights."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from bitnet_runtime import machine

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "benchmarks"))
engine, gguf_file, report, vs = (
    importlib.import_module(name) for name in ("engine", "gguf_file", "report", "vs_llama_cpp")
)

SMALL = ModelConfig(
    vocab_size=300, dim=256, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=64, ffn_dim=512, max_context=64,
    activation="silu",
)  # fmt: skip


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("benchmarks") / "small.bitnet"
    random_model(SMALL, path)
    return path


def f16(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def decode_tq2_0(raw: bytes) -> list[float]:
    """Weight by weight, as the blocks are described."""
    out = []
    for at in range(0, len(raw), 66):
        block, scale = raw[at : at + 64], f16(raw[at + 64 : at + 66])
        for i in range(256):
            byte = block[i // 128 * 32 + i % 32]
            out.append(((byte >> 2 * (i % 128 // 32) & 3) - 1) * scale)
    return out


def decode_q6_k(raw: bytes) -> list[float]:
    """Of the 6 bits of a weight, 4 lie in the first 128 bytes and 2 in the next 64."""
    out = []
    for at in range(0, len(raw), 210):
        block, unit = raw[at : at + 210], f16(raw[at + 208 : at + 210])
        scales = struct.unpack("16b", block[192:208])
        for i in range(256):
            half, part, l = i // 128, i % 128 // 32, i % 32
            low = block[64 * half + 32 * (part % 2) + l] >> 4 * (part // 2) & 15
            high = block[128 + 32 * half + l] >> 2 * part & 3
            out.append(unit * scales[i // 16] * ((high << 4 | low) - 32))
    return out


def test_tq2_0_holds_the_codes() -> None:
    codes = np.random.default_rng(0).integers(-1, 2, (3, 512), np.int8)
    decoded = decode_tq2_0(gguf_file.tq2_0(codes, 0.0625).tobytes())
    assert np.array_equal(np.array(decoded).reshape(3, 512), codes * 0.0625)


def test_q6_k_is_within_a_step() -> None:
    values = np.random.default_rng(0).normal(size=(2, 512)).astype(np.float32)
    values[1, 256:] = 0
    decoded = np.array(decode_q6_k(gguf_file.q6_k(values).tobytes())).reshape(-1, 256)
    # Half a step by rounding, an eighth because scales are in steps of 1/127 of the largest.
    step = np.abs(values.reshape(-1, 256)).max(axis=1) / 31
    assert (np.abs(decoded - values.reshape(-1, 256)).max(axis=1) <= 0.65 * step).all()


def test_q8_0_is_within_half_a_step() -> None:
    values = np.random.default_rng(0).normal(size=(4, 64)).astype(np.float32)
    blocks = gguf_file.q8_0(values)
    decoded = [[f16(bytes(block[:2])) * code for code in block[2:].view(np.int8)] for block in blocks]
    step = np.abs(values.reshape(-1, 32)).max(axis=1, keepdims=True) / 127
    assert (np.abs(decoded - values.reshape(-1, 32)) <= 0.57 * step).all()  # 127 codes of a scale rounded by 2^-11


def read_gguf(path: Path) -> tuple[dict[str, Any], dict[str, tuple[tuple[int, ...], int, bytes]]]:
    """Metadata, and for each tensor its shape, type and bytes up to the next tensor."""
    raw, at = path.read_bytes(), 24
    magic, version, n_tensors, n_values = struct.unpack("<4sIQQ", raw[:at])
    assert (magic, version) == (b"GGUF", 3)

    def take(form: str) -> Any:
        nonlocal at
        at += struct.calcsize(form)
        return struct.unpack(form, raw[at - struct.calcsize(form) : at])[0]

    def text() -> str:
        return take(f"{take('<Q')}s").decode()

    metadata = {text(): {4: lambda: take("<I"), 6: lambda: take("<f"), 8: text}[take("<I")]() for _ in range(n_values)}
    infos = {text(): (tuple(take("<Q") for _ in range(take("<I"))), take("<I"), take("<Q")) for _ in range(n_tensors)}
    start = -(-at // 32) * 32
    starts = [start + offset for _, _, offset in infos.values()]
    ends = [*starts[1:], len(raw)]
    return metadata, {
        name: (shape, kind, raw[begin:end])
        for (name, (shape, kind, _)), begin, end in zip(infos.items(), starts, ends, strict=True)
    }


@pytest.mark.parametrize("head", ["q6_K", "q8_0", "f16"])
def test_the_gguf_holds_the_weights_of_the_packed_file(path: Path, tmp_path: Path, head: str) -> None:
    model = PackedFile.open(path)
    size = gguf_file.write_gguf(model, tmp_path / "small.gguf", head)
    metadata, tensors = read_gguf(tmp_path / "small.gguf")
    assert metadata["general.architecture"] == "bitnet"
    assert metadata["bitnet.attention.head_count_kv"] == 2
    assert metadata["bitnet.rope.freq_base"] == 10_000
    assert len(tensors) == 2 * 11 + 2
    assert 0 <= sum(len(raw) for _, _, raw in tensors.values()) - size < 32 * len(tensors)
    by_name = {key.name: record for key, record in model.tensors.items()}
    for name, ours in {"blk.1.ffn_down": "layers.1.down", "blk.0.attn_k": "layers.0.k"}.items():
        record = by_name[f"{ours}.weight"]
        shape, kind, raw = tensors[f"{name}.weight"]
        assert (shape, kind) == ((record.cols, record.rows), 35)
        weights = np.array(decode_tq2_0(raw[: record.rows * record.cols // 256 * 66])).reshape(record.rows, -1)
        scale = np.float16(model.scales(record)[0])
        assert np.array_equal(weights, model.codes(record) * float(scale))
    shape, kind, raw = tensors["blk.0.ffn_norm.weight"]
    assert (shape, kind) == ((256,), 0)
    assert np.array_equal(np.frombuffer(raw, "<f4"), model.values(by_name["layers.0.ffn_norm.weight"])[0])
    shape, kind, raw = tensors["token_embd.weight"]
    assert (shape, kind) == ((256, 300), {"q6_K": 14, "q8_0": 8, "f16": 1}[head])
    if head == "f16":
        values = model.values(by_name["embedding.weight"])
        assert np.array_equal(np.frombuffer(raw, "<f2", values.size).reshape(300, 256), values.astype(np.float16))


def test_the_gguf_as_the_gguf_package_reads_it(path: Path, tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    model = PackedFile.open(path)
    gguf_file.write_gguf(model, tmp_path / "small.gguf")
    tensors = {tensor.name: tensor for tensor in gguf.GGUFReader(tmp_path / "small.gguf").tensors}
    embedding = tensors["token_embd.weight"]
    values = next(model.values(record) for key, record in model.tensors.items() if key.name == "embedding.weight")
    error = gguf.dequantize(embedding.data, embedding.tensor_type) - values
    assert np.abs(error).max() <= 0.65 * np.abs(values).max() / 31
    gate = tensors["blk.1.ffn_gate.weight"]
    decoded = gguf.dequantize(gate.data, gate.tensor_type)
    record = next(record for key, record in model.tensors.items() if key.name == "layers.1.gate.weight")
    assert np.array_equal(np.sign(decoded), model.codes(record))


@pytest.mark.parametrize(
    ("change", "word"),
    [({"activation": "relu2"}, "activation"), ({"ffn_dim": 320}, "ffn_dim"), ({"weight_scale": "row"}, "weight_scale"),
     ({"n_heads": 2}, "n_heads"), ({"head_format": "f16"}, "head_format")],
)  # fmt: skip
def test_what_llama_cpp_would_not_compute_is_refused(change: dict[str, Any], word: str) -> None:
    with pytest.raises(ValueError, match=word):
        gguf_file.check_config(SMALL.replace(**change))


@pytest.mark.parametrize(
    ("value", "text"), [(7, "7"), (0.5, "0.50"), (7.944, "7.94"), (33.33, "33.3"), (1234.5, "1,234")]
)
def test_numbers(value: float, text: str) -> None:
    assert report.number(value) == text


def ours(decode: float, prefill: float, bandwidth: float) -> dict[str, Any]:
    prefills = {"8": prefill, "32": 2 * prefill}
    return {"decode": decode, "prefill": prefills, "read_bandwidth_gb_s": bandwidth, "int8_peak_gmac_s": 200.0}


def test_results_of_a_comparison(tmp_path: Path) -> None:
    runs = {
        vs.OURS: [ours(10.0, 20.0, 5.0), ours(30.0, 50.0, 9.0), ours(20.0, 90.0, 8.0)],
        vs.THEIRS: [{"decode": 8.0, "prefill": {"8": 10.0, "32": 20.0}}] * 3,
    }
    read = {vs.OURS: 200_000_000, vs.THEIRS: 400_000_000}
    rows = vs.summary(2, runs, 10**9, read)
    assert [row["test"] for row in rows] == ["decode", "prefill 8", "prefill 32"]
    assert rows[0]["tok_s"] == {vs.OURS: 20.0, vs.THEIRS: 8.0}
    assert [row["ratio"] for row in rows] == [2.5, 5.0, 5.0]
    assert rows[0]["share_of_limit"] == pytest.approx({vs.OURS: 20 * 0.2 / 8, vs.THEIRS: 8 * 0.4 / 8})
    assert rows[1]["share_of_limit"] == pytest.approx({vs.OURS: 50 / 200, vs.THEIRS: 10 / 200})
    results = {
        "origin": report.origin("python benchmarks/x.py"), "shape": "small", "head": "q6_K", "logit_correlation": 0.99,
        "versions": {vs.THEIRS: "1.0"}, "bytes_per_token": read, "rows": rows,
    }  # fmt: skip
    report.write(tmp_path, "small", results, vs.markdown(results), vs.panels(results))
    assert json.loads((tmp_path / "small.json").read_text())["rows"] == rows
    page = (tmp_path / "small.md").read_text()
    assert "| 2 | decode | 8.00 | 20.0 | 2.50 × | 40% | 50% | 8.0 GB/s |" in page
    for part in (machine.cpu_name(), "python benchmarks/x.py", results["origin"]["commit"]):
        assert part in page
    assert is_picture(tmp_path / "small.png")


def is_picture(path: Path) -> bool:
    raw = path.read_bytes()
    width, height = struct.unpack(">II", raw[16:24])
    return raw.startswith(b"\x89PNG\r\n") and width > 600 and height > 300


def test_the_engine_end_to_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(engine.SHAPES, "small", SMALL)
    monkeypatch.setattr(machine, "read_bandwidth", lambda threads: 10.0 * threads)  # each takes a second
    monkeypatch.setattr(machine, "int8_peak", lambda isa, threads: 100.0 * threads)
    args = argparse.Namespace(threads=[1, 2], context=[16], batch=[1, 3], prompt=8, gen=4, repeat=1)
    results = {"origin": report.origin("")} | engine.measure("small", tmp_path / "model.bitnet", args)
    assert [row["threads"] for row in results["threads"]] == [1, 2]
    assert [row["isa"] for row in results["tiers"]] == machine.available_isas()
    assert results["context"][0]["decode"]["depth"] == 16
    single, three = results["batches"]
    cache = SMALL.n_layers * 2 * SMALL.n_kv_heads * SMALL.head_dim * 2  # bytes of a token at f16
    assert three["decode"]["bytes_per_token"] - single["decode"]["bytes_per_token"] == 2 * cache * 2
    for row in (row for sweep in ("threads", "context", "tiers", "batches") for row in results[sweep]):
        decode = row["decode"]
        assert decode["gb_s"] == pytest.approx(decode["tok_s"] / row["batch"] * decode["bytes_per_token"] / 1e9)
        assert decode["bandwidth_share"] == pytest.approx(decode["gb_s"] / row["read_bandwidth_gb_s"])
    report.write(tmp_path, "small", results, engine.markdown(results), engine.panels(results))
    assert "| batch 3 |" in (tmp_path / "small.md").read_text()
    assert math.isfinite(json.loads((tmp_path / "small.json").read_text())["first_token_ms"])
    assert is_picture(tmp_path / "small.png")
