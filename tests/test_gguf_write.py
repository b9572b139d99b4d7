"""A packed file as GGUF: read by the `gguf` package, by our own reader, and by llama.cpp if it is installed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export import PackedFile
from bitnet_export.convert.incoming import open_source, pack_source
from bitnet_export.foreign.gguf.graphs import architecture
from bitnet_export.foreign.gguf.write import BODIES, write_gguf
from bitnet_export.foreign.source import Ternary
from bitnet_export.packed import encodings, records
from bitnet_export.packed.records import ROLES, Key, Spec
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model
from gguf_written import BITNET, build

gguf = pytest.importorskip("gguf")

LLAMA = BITNET.replace(sub_norm=False, tie_embeddings=False, n_kv_heads=1, rope_theta=5e5)
CONFIGS = {
    "bitnet": BITNET,
    "llama": LLAMA,
    "llama, biases": LLAMA.replace(qkv_bias=True, o_bias=True),
    "llama, scaled": LLAMA.replace(rope_scaling="llama3", rope_factor=8.0, rope_original_context=8192),
    "qwen3": BITNET.replace(sub_norm=False, qk_norm=True, head_dim=128),
}


@pytest.fixture(scope="module", params=list(CONFIGS))
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("gguf"), CONFIGS[request.param])


def in_pairs(values: NDArray[Any], config: ModelConfig) -> NDArray[Any]:
    """Rows of q or k as llama-arch files order them: 0, E/2, 1, E/2 + 1, … of each head, row by row."""
    e = config.head_dim
    return np.stack([values[head + i // 2 + i % 2 * (e // 2)] for head in range(0, len(values), e) for i in range(e)])


@pytest.mark.parametrize("body", ["TQ2_0", "F16"])
def test_the_gguf_package_reads_what_the_packed_file_holds(model: Path, tmp_path: Path, body: str) -> None:
    file = PackedFile.open(model)
    config = file.configs[0]
    written = write_gguf(model, tmp_path / "m.gguf", body=body, head="F32")
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    arch = architecture(config)
    keys = {field.name: field.contents() for field in reader.fields.values()}
    assert keys["general.architecture"] == arch
    assert keys[f"{arch}.attention.head_count_kv"] == config.n_kv_heads
    assert keys[f"{arch}.rope.freq_base"] == config.rope_theta
    assert keys["tokenizer.ggml.model"] == "none"
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    assert len(tensors) == written.tensors

    def values(name: str) -> NDArray[np.float32]:
        return gguf.dequantize(tensors[name].data, tensors[name].tensor_type)  # type: ignore[no-any-return]

    names = {"q": "attn_q", "k": "attn_k", "v": "attn_v", "o": "attn_output", "up": "ffn_up", "down": "ffn_down"}
    seen = 0
    for key, record in file.tensors.items():
        role, expected = ROLES[key.role], file.values(record)
        if role in ("q", "k") and arch == "llama":
            expected = in_pairs(expected.reshape(-1, 1) if key.part else expected, config).reshape(expected.shape)
        if role in names:
            name = f"blk.{key.layer}.{names[role]}"
            if key.part:
                assert np.array_equal(values(f"{name}.bias"), expected[0])
                continue
            assert tensors[f"{name}.weight"].tensor_type.name == body
            scale = values(f"{name}.scale") if f"{name}.scale" in tensors else np.float32(1)
            assert np.array_equal(values(f"{name}.weight") * scale, expected)
            seen += 1
        elif role in ("embedding", "head"):
            assert np.array_equal(values({"embedding": "token_embd.weight", "head": "output.weight"}[role]), expected)
    assert seen == 6 * config.n_layers
    assert ("rope_freqs.weight" in tensors) == (config.rope_scaling == "llama3")


@pytest.mark.parametrize("body", ["TQ1_0", "Q2_0", "F32"])
def test_there_and_back_gives_the_same_codes_and_scales(model: Path, tmp_path: Path, body: str) -> None:
    write_gguf(model, tmp_path / "m.gguf", body=body, head="F32")
    with open_source(tmp_path / "m.gguf") as source:
        pack_source(source, tmp_path / "back.bitnet")
    ours, back = PackedFile.open(model), PackedFile.open(tmp_path / "back.bitnet")
    assert list(ours.tensors) == list(back.tensors)
    for key, record in ours.tensors.items():
        again = back.tensors[key]
        if record.encoding in encodings.TERNARY.values():
            assert again.scope == record.scope
            assert np.array_equal(back.codes(again), ours.codes(record)), key.name
            assert back.scales(again).tobytes() == ours.scales(record).tobytes(), key.name
        elif record.encoding == encodings.F32 and ROLES[key.role] != "rope_frequencies":
            assert back.values(again).tobytes() == ours.values(record).tobytes(), key.name
    # The factors of Llama 3's RoPE are fp32, and so is their product with the frequencies.
    rope = [
        f.values(f.tensors[key])[0]
        for f in (ours, back)
        for key in f.tensors
        if key.role == records.ROLE["rope_frequencies"]
    ]
    assert np.allclose(*rope, rtol=3e-7, atol=0)


@pytest.mark.parametrize("scope", ["row", "group"])
def test_scales_of_rows_and_groups_come_back(tmp_path: Path, scope: str) -> None:
    path, out = build(tmp_path, BITNET.replace(weight_scale=scope, n_layers=1), halves=True), tmp_path / "m.gguf"
    file = PackedFile.open(path)
    for body in BODIES:
        if scope == "group" and body in ("TQ1_0", "TQ2_0"):
            with pytest.raises(ValueError, match="write them as Q2_0, F16 or F32"):
                write_gguf(path, out, body=body)
            continue
        write_gguf(path, out, body=body)
        with open_source(out) as source:
            for key, record in file.tensors.items():
                if record.encoding == encodings.TERNARY_2BIT:
                    tensor = source.load(key)
                    assert isinstance(tensor, Ternary)
                    assert tensor.scope == encodings.SCOPE_NAMES.index(scope)
                    assert np.array_equal(tensor.codes, file.codes(record))
                    assert np.array_equal(tensor.scales.ravel(), file.scales(record).ravel())


@pytest.mark.parametrize("tied", [True, False])
def test_ternary_tables_stay_ternary(tmp_path: Path, tied: bool) -> None:
    """The kind of Ternary Bonsai: one fp16 scale for each 128 weights, of the tables too."""
    config = CONFIGS["qwen3"].replace(weight_scale="group", head_format="ternary", tie_embeddings=tied)
    path, out = build(tmp_path, config), tmp_path / "m.gguf"
    file = PackedFile.open(path)
    for body in ("Q2_0", "F16"):
        assert not any("cannot hold" in note for note in write_gguf(path, out, body=body).notes)
        with open_source(out) as source:
            pack_source(source, tmp_path / "back.bitnet", head="ternary")
        back = PackedFile.open(tmp_path / "back.bitnet")
        for key, record in file.tensors.items():
            assert back.values(back.tensors[key]).tobytes() == file.values(record).tobytes(), key.name
            assert back.tensors[key][:3] == record[:3]


def test_a_ternary_table_that_no_block_holds_is_exact(tmp_path: Path) -> None:
    """Its scale is not an fp16 number, and llama.cpp has no `.scale` for an embedding."""
    path, out = build(tmp_path, BITNET.replace(head_format="ternary", n_layers=1)), tmp_path / "m.gguf"
    file = PackedFile.open(path)
    record = file.tensors[Key(0, records.NONE, records.ROLE["embedding"], records.NONE, 0)]
    written = write_gguf(path, out)
    assert "token_embd.weight is ternary, which TQ2_0 cannot hold here: written as F32" in written.notes
    with open_source(out) as source:
        tensor = source.load(record.key)
        assert source.config.head_format == "ternary" and isinstance(tensor, Ternary)
        assert np.array_equal(tensor.codes, file.codes(record))
        assert tensor.scales.tobytes() == file.scales(record).tobytes()
    written = write_gguf(path, out, exact_scales=False)
    assert "token_embd.weight is ternary, which TQ2_0 cannot hold here: rounded as Q8_0" in written.notes


def test_scales_that_are_no_fp16_numbers(tmp_path: Path) -> None:
    path, out = build(tmp_path, BITNET.replace(weight_scale="row")), tmp_path / "m.gguf"
    message = r"attn_q\.weight.*: scales of rows that fp16 cannot represent; write them as F32 \(--type\)"
    with pytest.raises(ValueError, match=message):
        write_gguf(path, out)
    assert "scales are rounded to fp16, by" in str(write_gguf(path, out, exact_scales=False))
    assert "rounded" not in str(write_gguf(path, out, body="F32"))


@pytest.mark.parametrize("scale", [1e-9, 1e6])
def test_a_scale_beyond_the_range_of_fp16_is_refused(scale: float, tmp_path: Path) -> None:
    file, odd = PackedFile.open(build(tmp_path, BITNET.replace(n_layers=1))), tmp_path / "odd"

    def source(spec: Spec) -> Encoded:
        record = file.tensors[spec.key]
        scales = np.full(1, scale) if spec.key.name == "layers.0.down.weight" else file.scales(record)
        return Encoded(record.encoding, record.scope, file.stored(record), scales)

    write_packed(odd, file.configs, source)
    with pytest.raises(ValueError, match=r"ffn_down\.weight: a scale that fp16 cannot hold"):
        write_gguf(odd, tmp_path / "m.gguf", exact_scales=False)


def test_int8_linear_layers_are_floats_or_refused(tmp_path: Path) -> None:
    """Their codes are not ternary, whatever their scales are."""
    path, out = build(tmp_path, LLAMA.replace(ternary=[]), linears="int8"), tmp_path / "m.gguf"
    for body in ("TQ2_0", "TQ1_0", "Q2_0"):
        with pytest.raises(ValueError, match=r"attn_q\.weight.*: int8 linear layers; write them as F16 or F32"):
            write_gguf(path, out, body=body, exact_scales=False)
    file = PackedFile.open(path)
    record = next(r for key, r in file.tensors.items() if key.name == "layers.1.down.weight")
    assert record.encoding.kind == "int8"
    for body, rounding in (("F32", 0), ("F16", 2**-10)):
        write_gguf(path, out, body=body)
        down = next(t for t in gguf.GGUFReader(out).tensors if t.name == "blk.1.ffn_down.weight")
        found = gguf.dequantize(down.data, down.tensor_type)
        assert np.allclose(found, file.values(record), rtol=rounding, atol=1e-7 * bool(rounding))


@pytest.mark.parametrize(
    ("change", "linears", "body", "types", "number"),
    [
        ({}, None, "TQ1_0", "TQ1_0", 36),
        ({"ternary": []}, "f16", "TQ2_0", "F16", 1),
        ({"ternary": []}, "f32", "TQ2_0", "F32", 0),
        ({"ternary": []}, "f32", "F16", "F16", 1),
        ({"ternary": ["up", "gate", "down"]}, "f16", "F32", "F32", 0),
        ({"ternary": []}, "int8", "F16", "F16", 1),
        ({"ternary": ["up", "gate", "down"]}, "f16", "TQ2_0", "TQ2_0 and F16", 37),
    ],
)
def test_the_report_and_the_file_name_the_types_of_the_layers(
    tmp_path: Path, change: dict[str, Any], linears: str | None, body: str, types: str, number: int
) -> None:
    path = build(tmp_path, LLAMA.replace(**change), **({"linears": linears} if linears else {}))
    written = write_gguf(path, tmp_path / "m.gguf", body=body, exact_scales=False)
    assert written.what == f"GGUF, architecture llama, {types}, embedding and head Q8_0"
    reader = gguf.GGUFReader(tmp_path / "m.gguf")
    assert reader.fields["general.file_type"].contents() == number
    found = {t.tensor_type.name for t in reader.tensors if t.name.startswith("blk.") and len(t.shape) == 2}
    assert found == set(types.split(" and "))


@pytest.mark.parametrize(("head", "bits"), [("F32", 32), ("F16", 16), ("Q8_0", 8.5), ("Q6_K", 6.5625)])
def test_rounded_scales_and_bytes_of_a_token(tmp_path: Path, head: str, bits: float) -> None:
    path = build(tmp_path, LLAMA)
    written = write_gguf(path, tmp_path / "m.gguf", head=head, exact_scales=False)
    tensors = gguf.GGUFReader(tmp_path / "m.gguf").tensors
    assert not any(tensor.name.endswith(".scale") for tensor in tensors)
    file = PackedFile.open(path)
    record = next(r for key, r in file.tensors.items() if key.name == "layers.1.down.weight")
    down = next(tensor for tensor in tensors if tensor.name == "blk.1.ffn_down.weight")
    assert np.array_equal(
        gguf.dequantize(down.data, down.tensor_type),
        file.codes(record) * np.float32(np.float16(file.scales(record)[0])),
    )
    norms = 4 * 256 * (2 * LLAMA.n_layers + 1)
    assert written.token_bytes == LLAMA.ternary_weights * 66 // 256 + norms + int(131 * 256 * bits / 8)


# ---- llama.cpp ----


def correlation_with_llama_cpp(model: Path, out: Path) -> float:
    """The correlation of the logits of 32 tokens."""
    llama_cpp = pytest.importorskip("llama_cpp")
    tokens = np.random.default_rng(0).integers(0, 131, 32).tolist()
    options = {"n_ctx": 64, "n_threads": 1, "logits_all": True, "verbose": False, "type_k": 0, "type_v": 0}
    theirs = llama_cpp.Llama(str(out), **options)
    theirs.eval(tokens)
    with Model.load(model, kv_type="f32") as engine, engine.session() as session:
        ours = session.append(tokens, "all")
    assert ours is not None
    return float(np.corrcoef(theirs.scores[: len(tokens)].ravel(), ours.ravel())[0, 1])


# Activations of llama.cpp are rounded in blocks of 256 or 32, or not at all, where the engine has one scale a
# token. So two right programs differ by what int8 activations cost: 0.05 nats here, a correlation of 0.9995; a wrong
# order of rows, a lost scale or norm leaves below 0.97.


@pytest.mark.parametrize("body", BODIES)
def test_llama_cpp_computes_nearly_the_same(model: Path, tmp_path: Path, body: str) -> None:
    pytest.importorskip("llama_cpp")
    write_gguf(model, tmp_path / "m.gguf", body=body, head="F32")
    assert correlation_with_llama_cpp(model, tmp_path / "m.gguf") > 0.998


def test_llama_cpp_reads_ternary_tables(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    model = build(tmp_path, CONFIGS["qwen3"].replace(weight_scale="group", head_format="ternary"))
    for body in ("Q2_0", "F16"):
        write_gguf(model, tmp_path / "m.gguf", body=body)
        assert correlation_with_llama_cpp(model, tmp_path / "m.gguf") > 0.998
