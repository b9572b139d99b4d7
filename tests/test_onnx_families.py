"""ONNX graphs of every family of text models in onnxruntime, against numpy in fp64."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from bitnet.config import ModelConfig
from bitnet_export import PackedFile, random_model
from bitnet_export.foreign.onnx import FORMS, OnnxReport, write_onnx
from bitnet_export.foreign.onnx.session import OnnxModel
from bitnet_export.packed import encodings, records
from bitnet_export.packed.random_model import _draw
from bitnet_export.packed.writer import Encoded, write_packed
from bitnet_runtime import Model
from onnx_reference import Reference, worst_of_rows

pytestmark = pytest.mark.usefixtures("no_spinning")

SMALL = ModelConfig(  # no width a multiple of 16, 127 or 128
    vocab_size=211, dim=86, n_layers=2, n_heads=4, n_kv_heads=2, head_dim=22, ffn_dim=149, max_context=64,
    sub_norm=False,
)  # fmt: skip
BIASES: dict[str, Any] = {"qkv_bias": True, "o_bias": True, "ffn_bias": True, "norm_bias": True}
ORIGINAL = SMALL.replace(  # the transformer of 2017
    norm="layer", residual_norm=True, pre_norm=False, final_norm=False, position="sinusoidal", ffn="plain",
    activation="relu", embedding_scale=9.3, **BIASES,
)  # fmt: skip
EXPERTS = SMALL.replace(sub_norm=True, n_experts=5, experts_per_token=2)
ENCODER = SMALL.replace(mask="bidirectional", has_head=False, pooling="mean", activation="gelu")
BERT = ORIGINAL.replace(
    mask="bidirectional", position="learned", embedding_norm=True, activation="gelu_erf", head_bias=True, n_kv_heads=4,
    embedding_scale=1.0,
)  # fmt: skip

WRITERS = {
    "original": ORIGINAL,
    "gpt2": SMALL.replace(norm="layer", position="learned", ffn="plain", activation="gelu", **BIASES),
    "rms with bias": SMALL.replace(
        norm_bias=True, embedding_norm=True, activation="gelu_erf", head_bias=True, first_position=1, n_kv_heads=1,
    ),
    "layer norm without bias": SMALL.replace(norm="layer", position="none", sub_norm=True, qk_norm=True),
    "no norm at the end": SMALL.replace(final_norm=False, post_norm=True, activation="silu", logit_softcap=2.5),
    "residual norm": SMALL.replace(residual_norm=True, residual_scale=0.7, linear_norm=True, attention_softcap=3.0),
    "experts": EXPERTS,
    "plain experts": EXPERTS.replace(
        ffn="plain", activation="gelu_erf", normalize_routing=False, experts_per_token=3, linear_norm=True,
        residual_norm=True, norm="layer", **BIASES,
    ),
    "one expert": EXPERTS.replace(experts_per_token=1, normalize_routing=False, n_experts=9),
    "vectors in": SMALL.replace(input="embeddings", tie_embeddings=False, position="learned", embedding_norm=True),
    "int8 linears": SMALL.replace(ternary=(), activation="silu"),
}  # fmt: skip
PREFIXES = {
    "prefix": SMALL.replace(mask="prefix", first_position=1),
    "prefix with a window": SMALL.replace(mask="prefix", sliding_window=4, global_every=2, rope_local_theta=50.0),
    "prefix of vectors": EXPERTS.replace(mask="prefix", input="embeddings", tie_embeddings=True),
}
ENCODERS = {
    "mean": ENCODER,
    "first": ENCODER.replace(pooling="first", sliding_window=3, position="sinusoidal", rope_dim=0),
    "last": ENCODER.replace(pooling="last", mask="causal", n_experts=3, experts_per_token=2),
    "none of it a prefix": ENCODER.replace(mask="prefix"),
    "vectors in a window": ENCODER.replace(input="embeddings", sliding_window=5, vocab_size=0),
}
MASKED = {"bert": BERT, "bert with a pooling": BERT.replace(pooling="first", tie_embeddings=False, sliding_window=4)}
CONFIGS = WRITERS | PREFIXES | ENCODERS | MASKED
TWICE = ("experts", "one expert")  # their routers have two equal rows: ties


@functools.cache
def packed_model(folder: Path, name: str) -> Path:
    path, config = folder / f"{name}.bitnet", CONFIGS[name]

    def source(spec: records.Spec) -> Encoded:
        random = np.random.Generator(np.random.SFC64([1, *spec.key]))
        if spec.form == "linear" and not config.ternary and spec.key.part == 0:
            codes = random.integers(-127, 128, (spec.rows, spec.cols)).astype(np.int8)
            scales = random.uniform(0.5, 1.5, spec.rows) / 73 / np.sqrt(spec.cols)
            return Encoded(
                encodings.INT8_ROWS, encodings.SCALE_ROW, encodings.INT8_ROWS.encode(codes), scales.astype(np.float32)
            )
        if records.ROLES[spec.key.role] == "router":
            weight = random.normal(0, 1, (spec.rows, spec.cols)).astype(np.float32)
            if name in TWICE:
                weight[3] = weight[1]
            return Encoded.f32(weight)
        return _draw(spec, config, random, 0.3, encodings.TERNARY_2BIT)

    write_packed(path, [config], source)
    return path


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("onnx")


@functools.cache
def written(folder: Path, name: str, form: str) -> OnnxReport:
    return write_onnx(packed_model(folder, name), folder / f"{name}-{form}", form=form)


@functools.cache
def export(folder: Path, name: str, form: str) -> OnnxModel:
    written(folder, name, form)
    return OnnxModel(folder / f"{name}-{form}" / "model.onnx", CONFIGS[name], threads=1)


def texts(config: ModelConfig, *shape: int) -> NDArray[Any]:
    random = np.random.default_rng(7)
    if config.input == "tokens":
        return random.integers(0, config.vocab_size, shape)
    return random.standard_normal((*shape, config.dim), np.float32)


def reference(folder: Path, name: str) -> Reference:
    return Reference(PackedFile.open(packed_model(folder, name)))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", [*WRITERS, *PREFIXES, *MASKED])
def test_logits_are_those_of_numpy(folder: Path, name: str, form: str) -> None:
    model, expected, config = export(folder, name, form), reference(folder, name), CONFIGS[name]
    # Of the rows most have no activation that fp32 rounds to another code than fp64 (design: the noise floor),
    # fewer where every row sees all others.
    prompts = texts(config, 16, 8 if config.mask == "causal" else 4)
    for prefix in (0, 2, 4) if name in PREFIXES else (0,):
        found, _ = model.run(prompts, prefix=prefix)
        difference = worst_of_rows(found, np.stack([expected.logits(prompt, prefix) for prompt in prompts]))
        assert np.median(difference) <= 1e-5


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("name", ENCODERS)
def test_vectors_are_those_of_numpy(folder: Path, name: str, form: str) -> None:
    model, expected, prompts = export(folder, name, form), reference(folder, name), texts(CONFIGS[name], 16, 4)
    found = model.embed(prompts)
    difference = np.abs(found - np.stack([expected.vector(prompt) for prompt in prompts])).max(-1)
    assert np.median(difference) <= 1e-6 and np.allclose(np.linalg.norm(found, axis=-1), 1)
    hidden = model.run(prompts)[0]
    worst = np.abs(hidden - np.stack([expected.hidden(prompt) for prompt in prompts])).max((1, 2))
    assert np.median(worst) <= 1e-4  # states are of order 1 to 10


@pytest.mark.parametrize("name", CONFIGS)
def test_the_engine_agrees(folder: Path, name: str) -> None:
    report, config = written(folder, name, "int8"), CONFIGS[name]
    assert report.compared == 32 * 8 + 64 and report.prompts_median <= 1e-5
    assert report.vectors == (not config.has_head) and ("vectors differ" in str(report)) == report.vectors
    assert min(report.prefill) > 0 and all(report.decode) == (name in WRITERS or name in PREFIXES)


@pytest.mark.parametrize("name", CONFIGS)
def test_all_forms_give_the_same_bits(folder: Path, name: str) -> None:
    text = texts(CONFIGS[name], 2, 40)
    rows = {form: export(folder, name, form).run(text, prefix=20)[0] for form in FORMS}
    assert rows["float"].tobytes() == rows["int8"].tobytes() == rows["2bit"].tobytes()


@pytest.mark.parametrize("name", ["prefix", "prefix with a window", "prefix of vectors", "experts", "vectors in"])
def test_a_text_in_pieces(folder: Path, name: str) -> None:
    model, text = export(folder, name, "int8"), texts(CONFIGS[name], 3, 20)
    first = 7
    whole, _ = model.run(text, prefix=first)
    rows, cache = model.run(text[:, :first], prefix=first)
    parts = [rows]
    for end in (12, 13, 20):
        rows, cache = model.run(text[:, sum(part.shape[1] for part in parts) : end], cache)
        parts.append(rows)
    # Sums over other shapes have another order: fp32 noise, and rounding edges after it.
    assert np.median(worst_of_rows(np.concatenate(parts, 1), whole)) <= 1e-5


@pytest.mark.parametrize("name", PREFIXES)
def test_a_prefix_sees_what_follows_it_and_nothing_sees_past_it(folder: Path, name: str) -> None:
    model, text = export(folder, name, "float"), texts(CONFIGS[name], 1, 9)
    other = text.copy()
    other[:, 3] = texts(CONFIGS[name], 2, 9)[1:, 3]
    for prefix, changed in ((0, 3), (3, 3), (4, 0), (9, 0)):
        a, b = (model.run(x, prefix=prefix)[0][0] for x in (text, other))
        near = CONFIGS[name].sliding_window == 0  # a layer with a window does not see it at once, two layers do
        assert np.array_equal(a[:changed], b[:changed])
        assert not np.isclose(a[changed if near else 3], b[changed if near else 3]).all()


@pytest.mark.parametrize("name", [*ENCODERS, *MASKED])
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_on_either_side_changes_nothing(folder: Path, name: str, side: str) -> None:
    model, config = export(folder, name, "int8"), CONFIGS[name]
    text, lengths = texts(config, 16, 6), [6, 4, 5, 2] * 4
    mask = np.zeros((16, 6), np.int64)
    for row, length in zip(mask, lengths, strict=True):
        row[slice(6 - length, 6) if side == "left" else slice(length)] = 1
    found, differences = model.run(text, mask=mask)[0], []
    assert np.isfinite(found).all()  # padding gives numbers too
    for i, kept in enumerate(mask == 1):
        alone = model.run(text[i : i + 1, kept])[0][0]
        differences.append(np.abs(found[i, kept] - alone).max())
    # Scores of padding weigh exactly 0, but sums over more of them have another order: fp32 noise, and edges.
    assert np.median(differences) <= 1e-4
    if config.pooling != "none":
        vectors = np.stack([model.embed(text[i : i + 1, kept])[0] for i, kept in enumerate(mask == 1)])
        assert np.median(np.abs(model.embed(text, mask) - vectors).max(-1)) <= 1e-5


def test_an_expert_runs_only_when_a_token_takes_it(folder: Path) -> None:
    export(folder, "one expert", "int8")
    path, config = folder / "one expert-int8" / "model.onnx", CONFIGS["one expert"]
    gain = np.full(config.ffn_dim, np.nan, np.float32)
    text, spoiled = texts(config, 1, 1), []
    for expert in range(config.n_experts):
        name = f"layers.0.experts.{expert}.ffn_sub_norm.weight"
        broken = OnnxModel(path, config, threads=1, replaced={name: gain})
        spoiled.append(bool(np.isnan(broken.run(text)[0]).any()))
    assert sum(spoiled) == 1


def names(model: OnnxModel) -> tuple[list[str], list[str]]:
    inputs, outputs = model.session.get_inputs(), model.session.get_outputs()
    return [x.name for x in inputs if "past" not in x.name], [x.name for x in outputs if "present" not in x.name]


@pytest.mark.parametrize(
    ("name", "inputs", "outputs"),
    [
        ("original", ["input_ids", "attention_mask", "position_ids"], ["logits"]),
        ("vectors in", ["inputs_embeds", "attention_mask", "position_ids"], ["logits"]),
        ("prefix", ["input_ids", "attention_mask", "position_ids", "token_type_ids"], ["logits"]),
        ("mean", ["input_ids", "attention_mask"], ["last_hidden_state", "sentence_embedding"]),
        ("vectors in a window", ["inputs_embeds", "attention_mask"], ["last_hidden_state", "sentence_embedding"]),
        ("bert", ["input_ids", "attention_mask"], ["logits"]),
        ("bert with a pooling", ["input_ids", "attention_mask"], ["logits", "sentence_embedding"]),
    ],
)
def test_names_of_inputs_and_outputs(folder: Path, name: str, inputs: list[str], outputs: list[str]) -> None:
    model = export(folder, name, "int8")
    assert names(model) == (inputs, outputs)
    cached = any("past" in x.name for x in model.session.get_inputs())
    assert cached == (name in WRITERS or name in PREFIXES)
    out = folder / f"{name}-int8"
    assert json.loads((out / "config.json").read_text())["model_type"] == ("llama" if cached else "bert")
    assert (out / "genai_config.json").exists() == (name == "original")


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("mask", ["causal", "bidirectional"])
def test_states_behind_a_projector_where_nothing_is_pooled(tmp_path: Path, mask: str, form: str) -> None:
    """`write_onnx` compares the last of them with the engine's vector."""
    config = ENCODER.replace(mask=mask, pooling="none", out_dim=11)
    random_model(config, tmp_path / "m.bitnet", 1)
    report = write_onnx(tmp_path / "m.bitnet", tmp_path / "onnx", form=form)
    text = np.random.default_rng(3).integers(0, 211, (2, 9))
    states = OnnxModel(tmp_path / "onnx" / "model.onnx", config, threads=1).run(text)[0]
    assert states.shape == (2, 9, 11) and report.compared > 0
    with Model.load(tmp_path / "m.bitnet", kv_type="f32") as engine, engine.session() as session:
        expected = session.embed(text[0].tolist(), "last")
    assert np.abs(states[0, -1] / np.linalg.norm(states[0, -1]) - expected).max() < 3e-2  # rounding events
